"""The records of drafters, n-gram tables and policies: their rules, keys, and an id of what decides drafts."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from looped import looped
from naive_draft import naive_key, random_table
from refusals import refusal_of

from treeopt.drafter import MAX_MATCH, Drafter, Level
from treeopt.drafting.count import NgramCounts
from treeopt.errors import Code, TreeoptError
from treeopt.ngram_table import CONTEXT, NgramTable, context_keys
from treeopt.policy import TreePolicy
from treeopt.tree import Tree

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
    "no candidate of the LM head": ({"top": 0, "num_heads": 0, "lm_head_levels": 1}, "0 candidates"),
    "no prior of the cache": ({"cache_prior": 0.0}, "cache_prior of 0.0"),
    "a negative prior of the cache": ({"cache_prior": -1.0}, "cache_prior of -1.0"),
    "an infinite prior of the cache": ({"cache_prior": float("inf")}, "cache_prior of inf"),
    "a prior of the cache that is NaN": ({"cache_prior": float("nan")}, "cache_prior of nan"),
    "a negative number of voted candidates": ({"voted": -1}, "-1 candidates from the cache"),
    "levels of the LM head beside heads": ({"lm_head_levels": 1}, "lm_head_levels of 1, beside 2 heads$"),
    "more levels of the LM head than levels": (
        {"num_heads": 0, "lm_head_levels": 4},
        "lm_head_levels of 4, not from 0 to 3$",
    ),
    "a negative number of LM head levels": (
        {"num_heads": 0, "lm_head_levels": -1},
        "lm_head_levels of -1, not from 0 to 3$",
    ),
    "a draft model beside heads": ({"draft": "0123"}, "a draft model beside 2 heads$"),
    "a draft model beside the LM head": (
        {"draft": "0123", "num_heads": 0, "lm_head_levels": 1},
        "a draft model beside lm_head_levels of 1$",
    ),
    "a tree for another drafter": (
        {"plan": Tree(((0,),), drafter="0123456789abcdef")},
        "plan was made for drafter 0123",
    ),
    "a tree for the heads": ({"plan": Tree(((0,),))}, "plan was made for drafter heads, this is"),
    "a policy for another drafter": ({"plan": TreePolicy(8, 3, "another")}, "plan was made for drafter another"),
    "a negative window": ({"window": -1}, "window of -1"),
    "a window shorter than contexts": ({"window": 3}, "window of 3"),
    "extra depth without an n-gram table": ({"ngram_table": None}, "needs an n-gram table"),
}


@looped("case", BROKEN)
def test_broken_drafter_is_refused(case: str) -> None:
    """Every rule is checked when the record is made."""
    change, message = BROKEN[case]
    error = refusal_of(dataclasses.replace, DRAFTER, **change)
    assert error.code is Code.DRAFTER_INVALID
    assert re.search(message, error.what)


BROKEN_LEVELS: dict[str, tuple[dict[str, Any], str]] = {
    "a head weight that is NaN": ({"head": float("nan")}, "not finite"),
    "an infinite prior weight": ({"prior": float("inf")}, "not finite"),
    "an infinite ngram weight": ({"ngram": float("-inf")}, "not finite"),
    "an infinite other_logit": ({"other_logit": float("-inf")}, "not finite"),
    "prompt_lookup weights that are NaN": ({"prompt_lookup": (float("nan"),) * MAX_MATCH}, "not finite"),
    "too few prompt_lookup": ({"prompt_lookup": (0.0,) * (MAX_MATCH - 1)}, "12 weights of prompt_lookup"),
    "too many prompt_lookup": ({"prompt_lookup": (0.0,) * (MAX_MATCH + 1)}, "12 weights of prompt_lookup"),
    "a cache weight that is NaN": ({"cache": (0.0,) * 5 + (float("nan"),)}, "not finite"),
    "too few cache weights": ({"cache": (0.0,) * 5}, "and 6 of cache"),
    "too many cache weights": ({"cache": (0.0,) * 7}, "and 6 of cache"),
    "log-odds that are infinite": ({"calibration_map": ((0.0, float("inf")),)}, "not finite"),
    "estimates that fall": ({"calibration_map": ((0.0, 0.0), (-1.0, 1.0))}, "does not ascend"),
    "equal estimates": ({"calibration_map": ((0.0, 0.0), (0.0, 1.0))}, "does not ascend"),
    "observed log-odds that fall": ({"calibration_map": ((0.0, 0.0), (1.0, -1.0))}, "does not ascend"),
}


@looped("case", BROKEN_LEVELS)
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
    "the prior of the cache": {"cache_prior": 2.0},
    "voted candidates": {"voted": 1},
    "no heads": {"num_heads": 0},
    "a level of the LM head": {"num_heads": 0, "lm_head_levels": 1},
    "two levels of the LM head": {"num_heads": 0, "lm_head_levels": 2},
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
    "one weight of the cache": {"cache": (0.0,) * 5 + (0.5,)},
    "another weight of the cache": {"cache": (0.5,) + (0.0,) * 5},
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


def test_ids_of_before_the_cache_are_kept() -> None:
    """Drafters without cache, voted candidates and LM head have the ids that version 1.0 gave them."""
    counts = NgramCounts(5)
    counts.add([1, 2, 3, 1, 2], [2, 3, 1, 2, 4])
    level = Level(0.5, 0.25, 1 / 3, tuple(0.1 * n for n in range(MAX_MATCH)), -3.0, ((-1.0, -2.0), (0.5, 0.25)))
    assert Drafter((level, Level(), level), 2, 3, 16, counts.table()).id == "a6c0078e9081aa43"
    assert Drafter((level,) * 4, 0, 3, 0, counts.table()).id == "dea4522df216ce3e"
    assert Drafter.heads_only(2, 7).id == "b8c7d717f734defa"
    # An empty table drafts otherwise than before, so its drafter is another one.
    assert Drafter((Level(),), 1, 3, 4, NgramCounts(5).table()).id != "e1814c6e644bceb6"


def test_a_plan_does_not_change_the_id() -> None:
    """A drafter with a plan for it is the same drafter; with other weights the plan no longer fits."""
    for plan in (Tree(((0,), (1,)), drafter=DRAFTER.id), TreePolicy(8, 3, DRAFTER.id)):
        planned = dataclasses.replace(DRAFTER, plan=plan)
        assert planned.id == DRAFTER.id
        assert planned.plan is plan
        with pytest.raises(TreeoptError, match="plan was made for drafter"):
            dataclasses.replace(planned, cache_prior=3.0)


def test_map_ascends_in_its_first_numbers() -> None:
    """Two estimates may have the same result, but no estimate has two."""
    assert Level(calibration_map=((0.5, 3.0), (1.0, 3.0))).fault() == ""
    for pairs in (((0.5, 0.1), (0.5, 0.2)), ((0.5, 0.1), (0.4, 0.2)), ((0.5, 0.2), (1.0, 0.1))):
        assert "does not ascend" in Level(calibration_map=pairs).fault()


def test_untrained_drafter_takes_all_tokens_alike() -> None:
    """It has a token of each id, all of the same probability, and knows the first ones as candidates."""
    drafter = Drafter.untrained(50, 3)
    table = drafter.ngram_table
    assert drafter.depth == 3
    assert table is not None
    assert table.unigram.shape == (50,)
    assert np.exp(table.unigram.astype(float)).sum() == pytest.approx(1.0, rel=1e-2)


def test_sizes() -> None:
    """Those of the size_cost, or the one that all steps have, of two nodes at least."""
    assert TreePolicy(2, 1, "d").sizes == (2,)
    assert TreePolicy(20, 3, "d").sizes == (20,)
    assert TreePolicy(8, 3, "d", ((1, 0.5), (4, 0.7), (8, 1.0))).sizes == (1, 4, 8)


FAULTS: dict[str, dict[str, Any]] = {
    "one node": {"nodes": 1},
    "more nodes than are traced": {"nodes": 255},
    "half a node": {"nodes": 8.5},
    "no number of nodes": {"nodes": "8"},
    "no depth": {"depth": 0},
    "half a level": {"depth": 2.5},
    "no number of levels": {"depth": True},
    "no drafter": {"drafter": ""},
    "size_cost of other nodes": {"size_cost": ((1, 0.5), (4, 1.0))},
    "falling": {"size_cost": ((4, 0.5), (1, 0.6), (8, 1.0))},
    "twice": {"size_cost": ((4, 0.5), (4, 0.6), (8, 1.0))},
    "size that is not traced": {"size_cost": ((5, 0.5), (8, 1.0))},
    "not a number": {"size_cost": ((4, math.nan), (8, 1.0))},
    "negative": {"size_cost": ((4, -1.0), (8, 1.0))},
}


@looped("name", FAULTS)
def test_faults(name: str) -> None:
    """What breaks a rule is E103."""
    TreePolicy(8, 3, "d", ((4, 0.5), (8, 1.0)))
    with pytest.raises(TreeoptError, match="not a policy") as caught:
        TreePolicy(**{"nodes": 8, "depth": 3, "drafter": "d", **FAULTS[name]})
    assert caught.value.code is Code.TREE_INVALID


ONE = 1 << 60  # the least key of one token


def arrays(**changes: Any) -> dict[str, Any]:
    """Two contexts, rows of two, a vocabulary of three; with changes."""
    parts: dict[str, Any] = {
        "keys": np.array([ONE + 5, 2 * ONE + 3]),
        "tokens": np.array([[0, 1], [2, 0], [1, 2]], np.int32),
        "ratios": np.array([[0, 0], [1, 0.5], [2, -0.5]], np.float16),
        "backoff": np.array([0, -0.5, -1], np.float16),
        "unigram": np.array([-0.5, -1, -2], np.float16),
        "num_tokens": 7,
    }
    return parts | changes


def test_properties() -> None:
    """Sizes come from the arrays: 2 x 8 + 6 x 4 + 6 x 2 + 3 x 2 + 3 x 2 bytes."""
    table = NgramTable(**arrays())
    assert (table.vocab_size, table.contexts, table.bytes) == (3, 2, 64)


def test_arrays_are_read_only() -> None:
    """A record's arrays cannot be written into."""
    for array in NgramTable(**arrays()).arrays().values():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_no_context_at_all() -> None:
    """Row 0 alone is a table."""
    none = arrays(keys=np.zeros(0, np.int64), tokens=np.zeros((1, 2), np.int32), backoff=np.zeros(1, np.float16))
    assert NgramTable(**none | {"ratios": np.zeros((1, 2), np.float16)}).contexts == 0


BROKEN_ngram_table: dict[str, tuple[dict[str, Any], str]] = {
    "keys of another type": ({"keys": np.array([ONE, 2 * ONE], np.uint64)}, "keys are uint64 [2]"),
    "keys of two dimensions": ({"keys": np.array([[ONE, 2 * ONE]])}, "keys are int64 [1, 2]"),
    "keys of no dimension": ({"keys": np.array(ONE)}, "keys are int64 []"),
    "too few rows": ({"tokens": np.zeros((2, 2), np.int32)}, "tokens are int32 [2, 2]"),
    "tokens of another type": ({"tokens": np.zeros((3, 2), np.int64)}, "tokens are int64 [3, 2]"),
    "tokens of one dimension": ({"tokens": np.zeros(3, np.int32)}, "tokens are int32 [3]"),
    "tokens of no dimension": ({"tokens": np.array(0, np.int32)}, "tokens are int32 []"),
    "rows of none": (
        {"tokens": np.zeros((3, 0), np.int32), "ratios": np.zeros((3, 0), np.float16)},
        "tokens are int32 [3, 0]",
    ),
    "ratios of another width": ({"ratios": np.zeros((3, 1), np.float16)}, "ratios are float16 [3, 1]"),
    "ratios of another type": ({"ratios": np.zeros((3, 2), np.float32)}, "ratios are float32 [3, 2]"),
    "backoff of another length": ({"backoff": np.zeros(2, np.float16)}, "backoff are float16 [2]"),
    "unigram of another type": ({"unigram": np.zeros(3, np.float32)}, "unigram are float32 [3]"),
    "unigram of two dimensions": ({"unigram": np.zeros((3, 1), np.float16)}, "unigram are float16 [3, 1]"),
    "unigram of no dimension": ({"unigram": np.array(0, np.float16)}, "unigram are float16 []"),
    "a ratio that is not finite": ({"ratios": np.full((3, 2), np.nan, np.float16)}, "ratios are not finite"),
    "an infinite backoff": ({"backoff": np.array([0, -np.inf, 0], np.float16)}, "backoff are not finite"),
    "an infinite frequency": ({"unigram": np.array([0, 0, -np.inf], np.float16)}, "unigram are not finite"),
    "falling keys": ({"keys": np.array([2 * ONE, ONE])}, "keys are not ascending"),
    "equal keys": ({"keys": np.array([ONE, ONE])}, "keys are not ascending"),
    "a key of no token": ({"keys": np.array([ONE - 1, ONE])}, "1 to 4 tokens"),
    "a key of five tokens": ({"keys": np.array([ONE, 5 * ONE])}, "1 to 4 tokens"),
    "a token too large": ({"tokens": np.full((3, 2), 3, np.int32)}, "outside the vocabulary of 3"),
    "a negative token": ({"tokens": np.full((3, 2), -1, np.int32)}, "outside the vocabulary of 3"),
    "a successor below the rest": ({"backoff": np.array([0, 0.75, -1], np.float16)}, "below its row's backoff"),
}


@looped("case", BROKEN_ngram_table)
def test_broken_record_is_refused(case: str) -> None:
    """Every rule is checked when the record is made."""
    change, message = BROKEN_ngram_table[case]
    with pytest.raises(TreeoptError, match=re.escape(message)) as caught:
        NgramTable(**arrays(**change))
    assert caught.value.code is Code.DRAFTER_INVALID


def test_context_keys_by_hand() -> None:
    """Token 1 then token 0 (the last): the second multiplier alone, under two tokens' bits."""
    keys = context_keys(np.array([0, 1, 0, 0]))
    assert [hex(key) for key in keys] == [
        "0x1000000000000000",
        "0x2ade47ddbde5c099",
        "0x3ade47ddbde5c099",
        "0x4ade47ddbde5c099",
    ]


@given(st.lists(st.integers(-1, 2**31 - 1), min_size=CONTEXT, max_size=CONTEXT))
def test_context_keys_equal_integers_without_bounds(context: list[int]) -> None:
    """Sums that overflow are taken modulo 2^60, for each number of tokens."""
    wanted = [naive_key(tuple(reversed(context[:length]))) for length in range(1, CONTEXT + 1)]
    assert context_keys(np.array(context)).tolist() == wanted


def test_context_keys_leading_dimensions() -> None:
    """Any leading dimensions are kept, the argument too."""
    context = np.arange(24).reshape(2, 3, 4)
    keys = context_keys(context)
    assert np.array_equal(keys[1, 2], context_keys(np.array([20, 21, 22, 23])))
    assert np.array_equal(context, np.arange(24).reshape(2, 3, 4))


@looped("seed", range(3))
def test_random_tables_are_accepted(seed: int) -> None:
    """What other tests are made of keeps the rules."""
    assert random_table(np.random.default_rng(seed), 5).record().vocab_size == 5
