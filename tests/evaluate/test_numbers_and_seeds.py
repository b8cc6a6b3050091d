"""Numbers of profiles, seeds of baselines, profiles of a comparison and the check of the hub, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from huggingface_hub import constants
from tiny import tiny_base

from treeopt.cli import doctor_command as environment
from treeopt.cli.doctor_command import check_hub
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.baselines import Call, seeded
from treeopt.evaluate.profile import MOST_BATCH, ProfileOptions
from treeopt.models import hub


def test_numbers_of_a_profile() -> None:
    """Lists of whole numbers from 1; the largest batch is allowed, one more is E403."""
    assert ProfileOptions(batches=[MOST_BATCH, 1]).batches == (1, MOST_BATCH)
    with pytest.raises(TreeoptError) as caught:
        ProfileOptions(batches=[MOST_BATCH + 1, 1])
    assert caught.value.code is Code.OUT_OF_MEMORY
    wrong = ({"nodes": []}, {"contexts": "1"}, {"batches": 1}, {"nodes": [1.5]}, {"contexts": [True]}, {"nodes": [0]})
    for given in (*wrong, {"batches": [0]}, {"repeats": 0}):
        with pytest.raises(ValueError, match=next(iter(given))):
            ProfileOptions(**given)


def test_seeds_differ_by_call_name_and_seed() -> None:
    """Each is below 2^63, the same in every run, and torch's generator is as before."""
    base = tiny_base("llama", vocab_size=7)
    found: dict[tuple[int, str], list[int]] = {}

    def baseline(*_: Any) -> list[Any]:
        return [torch.initial_seed()]

    torch.manual_seed(5)
    for key in ((0, "a"), (0, "b"), (1, "a"), (0, "ab")):
        run, again = (seeded(base, baseline, *key) for _ in range(2))
        found[key] = [run([], 1, Call(i))[0] for i in range(8)]  # type: ignore[misc]
        assert found[key] == [again([], 1, Call(i))[0] for i in range(8)]
    seeds = [seed for some in found.values() for seed in some]
    assert len(set(seeds)) == 32
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert max(seeds) > 1 << 62
    assert torch.initial_seed() == 5


@pytest.mark.parametrize(("offline", "answers", "status", "words"), [
    (True, False, "OK", "offline mode"),
    (False, True, "OK", " answers"),
    (False, False, "WARN", "does not answer within"),
])  # fmt: skip
def test_hub(offline: bool, answers: bool, status: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked in offline mode."""
    asked: list[bool] = []
    monkeypatch.setattr(constants, "is_offline_mode", lambda: offline)
    monkeypatch.setattr(hub, "hub_reachable", lambda: asked.append(True) or answers)
    [check] = check_hub()
    assert check.status == getattr(environment, status)
    assert words in check.found
    assert asked == [True] * (not offline)
