"""The drafter: its rules, and an id that follows whatever decides its drafts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from naive_draft import random_table

from treeopt.drafter import MAX_MATCH, Drafter, Level, NgramTable
from treeopt.errors import Code, TreeoptError

TABLE = random_table(np.random.default_rng(0), 5).record()
LEVEL = Level(0.5, 0.25, 0.75, (1.0,) * MAX_MATCH, -4.0, ((-1.0, -0.5), (1.0, 0.5)))
DRAFTER = Drafter((LEVEL, LEVEL, LEVEL), 2, 3, 8, TABLE, {"text": "one"})


def test_heads_only_levels() -> None:
    """A heads drafter has one level for each head, no other weights and no window."""
    plain = Drafter.heads_only(3, 10)
    assert (plain.depth, plain.num_heads, plain.top, plain.window) == (3, 3, 10, 0)
    assert plain.ngram_table is None
    level = plain.levels[2]
    assert (level.head, level.prior, level.ngram, level.prompt_lookup, level.calibration_map) == (
        1.0,
        0.0,
        0.0,
        (0.0,) * 12,
        (),
    )


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a negative number of heads": ({"num_heads": -1}, "3 levels for -1 heads"),
    "no head and no table": ({"num_heads": 0, "ngram_table": None}, "needs an n-gram table"),
    "more heads than levels": ({"num_heads": 4}, "3 levels for 4 heads"),
    "no level": ({"levels": ()}, "0 levels for 2 heads"),
    "no candidate": ({"top": 0}, "0 candidates"),
    "a negative window": ({"window": -1}, "window of -1"),
    "a window shorter than contexts": ({"window": 3}, "window of 3"),
    "extra depth without an n-gram table": ({"ngram_table": None}, "needs an n-gram table"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_drafter_is_refused(case: str) -> None:
    """Every rule is checked when the record is made."""
    change, message = BROKEN[case]
    with pytest.raises(TreeoptError, match=message) as caught:
        dataclasses.replace(DRAFTER, **change)
    assert caught.value.code is Code.DRAFTER_INVALID


BROKEN_LEVELS: dict[str, tuple[dict[str, Any], str]] = {
    "a head weight that is NaN": ({"head": float("nan")}, "not finite"),
    "an infinite prior weight": ({"prior": float("inf")}, "not finite"),
    "an infinite ngram weight": ({"ngram": float("-inf")}, "not finite"),
    "an infinite other_logit": ({"other_logit": float("-inf")}, "not finite"),
    "prompt_lookup weights that are NaN": ({"prompt_lookup": (float("nan"),) * MAX_MATCH}, "not finite"),
    "too few prompt_lookup": ({"prompt_lookup": (0.0,) * (MAX_MATCH - 1)}, "12 weights of prompt_lookup"),
    "too many prompt_lookup": ({"prompt_lookup": (0.0,) * (MAX_MATCH + 1)}, "12 weights of prompt_lookup"),
    "log-odds that are infinite": ({"calibration_map": ((0.0, float("inf")),)}, "not finite"),
    "estimates that fall": ({"calibration_map": ((0.0, 0.0), (-1.0, 1.0))}, "does not ascend"),
    "equal estimates": ({"calibration_map": ((0.0, 0.0), (0.0, 1.0))}, "does not ascend"),
    "observed log-odds that fall": ({"calibration_map": ((0.0, 0.0), (1.0, -1.0))}, "does not ascend"),
}


@pytest.mark.parametrize("case", BROKEN_LEVELS)
def test_broken_level_is_refused(case: str) -> None:
    """A rule that the second level breaks is found, and the level named."""
    change, message = BROKEN_LEVELS[case]
    with pytest.raises(TreeoptError, match=rf"level 2.*{message}|{message}.*level 2") as caught:
        dataclasses.replace(DRAFTER, levels=(LEVEL, dataclasses.replace(LEVEL, **change), LEVEL))
    assert caught.value.code is Code.DRAFTER_INVALID


def test_odds_may_stay_level() -> None:
    """Different estimates may have come equally often."""
    flat = dataclasses.replace(LEVEL, calibration_map=((0.0, 0.5), (1.0, 0.5)))
    assert dataclasses.replace(DRAFTER, levels=(flat,) * 3).depth == 3


def changed_array(name: str) -> NgramTable:
    """The table with the last number of one array changed a little, within the rules."""
    parts = {key: array.copy() for key, array in TABLE.arrays().items()}
    flat = parts[name].reshape(-1)
    flat[-1] = (flat[-1] + 1) % 5 if name == "tokens" else flat[-1] + (-0.125 if name == "backoff" else 1)
    return NgramTable(**parts, num_tokens=TABLE.num_tokens)


ID_CHANGES: dict[str, dict[str, Any]] = {
    "heads": {"num_heads": 3},
    "top": {"top": 4},
    "window": {"window": 9},
    "a level more": {"levels": (LEVEL,) * 4},
    "no n-gram table": {"ngram_table": None, "num_heads": 3},
}
for _name in TABLE.arrays():
    ID_CHANGES[f"the table's {_name}"] = {"ngram_table": changed_array(_name)}
LEVEL_CHANGES: dict[str, dict[str, Any]] = {
    "head": {"head": 0.5000001},
    "prior": {"prior": 0.0},
    "ngram": {"ngram": 0.5},
    "other_logit": {"other_logit": -5.0},
    "one prompt_lookup": {"prompt_lookup": (1.0,) * (MAX_MATCH - 1) + (2.0,)},
    "calibration_map": {"calibration_map": ((-1.0, -0.5), (1.0, 0.75))},
    "no odds": {"calibration_map": ()},
}
for _name, _change in LEVEL_CHANGES.items():
    ID_CHANGES[f"a level's {_name}"] = {"levels": (LEVEL, LEVEL, dataclasses.replace(LEVEL, **_change))}


def test_id_follows_all_that_decides_drafts() -> None:
    """Each change of a number or an array gives an id of its own."""
    ids = {case: dataclasses.replace(DRAFTER, **change).id for case, change in ID_CHANGES.items()}
    assert len({DRAFTER.id, *ids.values()}) == len(ids) + 1


def test_id_does_not_follow_the_source() -> None:
    """The same drafter of another origin is the same drafter."""
    assert dataclasses.replace(DRAFTER, source={"text": "two"}).id == DRAFTER.id


def test_id_of_heads_only_is_stored() -> None:
    """Traces and trees name drafters, so an id is the same in every version and on every machine."""
    assert Drafter.heads_only(5, 16).id == "cc0f6b9e377020c5"
