"""The sweep of epsilon: each point is what `validate` finds, and greedy and sampled texts are decoded once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
from drafters import prompts_of
from helpers import random_tree
from tiny import random_heads, tiny_base

from treeopt.decode.rules import Typical
from treeopt.evaluate import validate_typical as typical_module
from treeopt.evaluate.baselines import GENERATE, TREE, Call, Run
from treeopt.evaluate.quality import quality
from treeopt.evaluate.sweep_epsilon import EpsilonSweep, rules_of, sweep_epsilon
from treeopt.evaluate.validate import validate
from treeopt.evaluate.validate_typical import SAMPLED
from treeopt.models.base import Base
from treeopt.optimize.intervals import sampling_interval

EPSILONS = (0.2, 0.01, 0.05)
TEMPERATURE = 1.5
TREE_OF = random_tree(5, nodes=30, depth=2, ranks=8)
PROMPTS = prompts_of(6, 5)


def model() -> tuple[Base, Any]:
    """A random model with random heads: most accepted drafts are not its likeliest tokens."""
    base = tiny_base("llama", 1)
    return base, random_heads(base, 2, 1)


def swept(new: int = 15, **options: Any) -> EpsilonSweep:
    """The sweep of five prompts."""
    given = {"epsilons": EPSILONS, "temperature": TEMPERATURE, "max_new_tokens": new, **options}
    return sweep_epsilon(*model(), TREE_OF, PROMPTS, **given)


@pytest.fixture(scope="module")
def found() -> EpsilonSweep:
    """Three values of epsilon."""
    return swept()


# At most 8 new tokens, the warm-up and the first batch are equal calls, whose sampled draws must differ.
@pytest.mark.parametrize(("new", "batch_size"), [(15, 1), (15, 3), (6, 5)])
def test_points_are_those_of_validate(new: int, batch_size: int) -> None:
    """Tokens per step, prediction and quality of every epsilon equal a validation of its own, with delta = sqrt."""
    sweep = swept(new, batch_size=batch_size)
    greedy, sampled, *typical = sweep.points
    assert [point.epsilon for point in typical] == [0.01, 0.05, 0.2]
    for point in typical:
        rule = Typical(TEMPERATURE, point.epsilon, math.sqrt(point.epsilon))
        alone = validate(*model(), TREE_OF, PROMPTS, acceptance=rule, max_new_tokens=new, batch_size=batch_size)
        assert point.delta == rule.delta
        assert point.tokens_per_step == alone.tokens_per_step
        assert point.predicted == alone.predicted.tokens_per_step
        assert point.quality == alone.quality[TREE]
        assert (greedy.quality, sampled.quality) == (alone.quality[GENERATE], alone.quality[SAMPLED])
        tokens, steps = ([getattr(trial, name) for trial in alone.metrics.trials] for name in ("tokens", "steps"))
        assert point.sampling == sampling_interval(*map(_array, (tokens, steps)))
        assert point.misses == len(alone.prediction_misses) == 0


def _array(values: list[int]) -> Any:
    import numpy as np

    return np.array(values)


def test_larger_epsilon_accepts_less(found: EpsilonSweep) -> None:
    """Figure 5 of the paper: tokens per step fall as epsilon rises, towards those of greedy acceptance."""
    greedy, _, *typical = found.points
    taus = [point.tokens_per_step for point in typical]
    assert taus == sorted(taus, reverse=True)
    assert taus[0] > taus[-1] >= greedy.tokens_per_step


def test_exact_points_are_what_the_decoder_takes(found: EpsilonSweep) -> None:
    """Greedy: the tokens per step of a greedy validation. Sampled: replay over the sampled texts, by their quality."""
    greedy, sampled = found.points[:2]
    alone = validate(*model(), TREE_OF, PROMPTS, max_new_tokens=15)
    assert (greedy.texts, greedy.tokens_per_step) == ("greedy", alone.tokens_per_step)
    assert (greedy.quality.agreement, greedy.epsilon, greedy.delta) == (1.0, None, None)
    assert sampled.texts == "sampled"
    assert sampled.quality.agreement < 1
    assert 1 <= sampled.tokens_per_step < greedy.tokens_per_step + 1
    base, _ = model()
    texts = [dataclasses.replace(text, answer=text.answer) for text in alone.texts]
    assert greedy.quality == quality(base, texts, texts)
    assert (found.texts, found.nodes, found.temperature) == (5, 30, TEMPERATURE)


def test_baselines_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, sampled and autoregressive texts are made for the first epsilon alone."""
    made: list[str] = []
    real = typical_module.baselines_for

    def counted(base: Base, temperature: float) -> dict[str, Any]:
        def wrap(name: str, baseline: Any) -> Any:
            def run(prompts: Sequence[Sequence[int]], new: int, call: Call) -> list[Run]:
                made.append(name)
                return list(baseline(prompts, new, call))

            return run

        return {name: wrap(name, one) for name, one in real(base, temperature).items()}

    monkeypatch.setattr("treeopt.evaluate.sweep_epsilon.baselines_for", counted)
    swept()
    assert sorted(made) == sorted([GENERATE, SAMPLED, "autoregressive"] * 6)  # a warm-up and five prompts


def test_progress_counts_the_texts() -> None:
    """One count from 1 to the number of texts: each is decoded by all rules in turn."""
    seen: list[tuple[int, int, str]] = []
    swept(progress=lambda *one: seen.append(one))
    assert [(done, total) for done, total, _ in seen] == [(i, 5) for i in range(1, 6)]


def test_rules_are_ascending_with_the_square_root() -> None:
    """Delta is the square root of epsilon, not epsilon; doubles count once; the paper's temperature is the default."""
    assert rules_of((0.25, 0.04, 0.25)) == [Typical(0.7, 0.04, 0.2), Typical(0.7, 0.25, 0.5)]


@pytest.mark.parametrize(
    "wrong", [{"epsilons": ()}, {"epsilons": (0.0,)}, {"epsilons": (-0.1,)}, {"epsilons": (1.1,)}, {"temperature": 0}]
)
def test_values_out_of_range_are_refused(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No epsilon, one that is not in (0, 1], temperature 0: before anything is decoded."""
    monkeypatch.setattr("treeopt.evaluate.sweep_epsilon.make_inputs", None)
    with pytest.raises(ValueError, match=r"epsilon|temperature"):
        swept(**wrong)
    monkeypatch.undo()
    with pytest.raises(TypeError, match="repeats is no option"):
        swept(repeats=2)
