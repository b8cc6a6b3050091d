"""The campaign of bench/lossless.py at a small size: some random cases, and a planted fault that it must find."""

from __future__ import annotations

import importlib
import shlex
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT_FOLDER
from torch import Tensor

from treeopt.decode import rules
from treeopt.drafting.interface import Drafts

BLOCKS = (5, 6, 8, 10, 11)  # five models: float32 and float64, eager and sdpa, with end tokens and without
SEEDS = [200, 240, 400, *(40 * block + place for block in BLOCKS for place in range(1, 39, 5))]


@pytest.fixture(scope="module")
def bench() -> Any:
    """The parts of the script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT_FOLDER / "bench"))
        names = ("lossless", "lossless_cases", "lossless_run", "lossless_shrink", "families")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.mark.slow
def test_random_cases_of_the_campaign(bench: Any) -> None:
    """No case fails; several drafters, rules and ways to decode are among them, and drafts are accepted."""
    cases = [bench.lossless_cases.draw(seed) for seed in SEEDS]
    results = [bench.lossless_run.run(case) for case in cases]
    failed = [(case, result.detail) for case, result in zip(cases, results, strict=True) if result.outcome == "FAILED"]
    assert not failed
    assert Counter(result.outcome for result in results)["same"] > 20
    assert sum(result.tokens for result in results) > 1.1 * sum(result.steps for result in results)
    for name, least in (("drafter", 8), ("rule", 6), ("via", 5), ("dtype", 2), ("attention", 2), ("context", 2)):
        assert len({getattr(case, name) for case in cases}) >= least, name


@pytest.mark.parametrize(("family", "attention"), [("deepseek_v3", "sdpa"), ("gpt_oss", "eager"), ("laguna", "sdpa")])
def test_families(bench: Any, family: str, attention: str) -> None:
    """Latent attention, attention sinks, and heads that differ by layer are lossless on paths as deep as the tree."""
    found = bench.families.try_family(family, attention)
    assert (found.verdict, found.tokens_per_step, found.reason) == ("lossless", bench.families.DEPTH + 1, "")


def test_a_planted_fault_is_found_and_shrunk(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that accepts the first draft, right or wrong, fails; the simpler case fails too, and its command is it."""
    greedy = rules.greedy

    def first_draft(drafts: Drafts, choice: Tensor) -> Tensor:
        return greedy(drafts, choice).clamp(min=min(1, drafts.tokens.shape[1] - 1))

    monkeypatch.setattr(rules, "greedy", first_draft)
    run, draw = bench.lossless_run.run, bench.lossless_cases.draw
    found = (case for case in map(draw, range(246, 280)) if case.rows.count(",") and run(case).outcome == "FAILED")
    case = next(found)
    simple = bench.lossless_shrink.shrunk(case, lambda one: run(one).outcome == "FAILED", most=40)
    assert run(simple).outcome == "FAILED"
    assert "," not in simple.rows
    assert simple.new <= 2
    assert simple.depth == 1
    _, *words = shlex.split(bench.lossless.command(simple).partition("lossless.py")[2])
    seed, settings = int(words[0]), words[2::2]
    assert bench.lossless.with_settings(draw(seed), settings) == simple
