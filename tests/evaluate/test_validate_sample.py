"""Validation under sampling: right decoders pass and are predicted, wrong rules and wrong predictions are found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from chances import DrawnPerChild
from drafters import SIZE_COST, planted, prompts_of, quick_drafter
from looped import looped
from tiny import but_slow, random_heads, tiny_base

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.draft_metrics import Step
from treeopt.decode.rules import Rule, Sample, Typical
from treeopt.evaluate.baselines import AUTOREGRESSIVE, GENERATE, TREE
from treeopt.evaluate.validate import validate
from treeopt.evaluate.validate_sample import SampleValidation, z_score
from treeopt.models.base import Base
from treeopt.models.head_files import LoadedHeads
from treeopt.optimize.replay import standard_error
from treeopt.policy import TreePolicy
from treeopt.texts.encode import Text
from treeopt.texts.prompts import Prompt
from treeopt.tree import Tree

RULE = Sample(temperature=0.4, top_k=20, seed=5)
TREE_OF = Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)])


def found_by(rule: Rule = RULE, *, prompts: int = 4, **options: Any) -> SampleValidation:
    """The validation of a model that is sure of its text now and then, with heads that are often right."""
    base, heads = planted(3)
    settings = {"max_new_tokens": 12, "repeats": 3, "draws": 0, **options}
    return validate(base, heads, TREE_OF, prompts_of(4, prompts), acceptance=rule, **settings)


@pytest.fixture(scope="module")
def found() -> SampleValidation:
    """Four prompts, three times each."""
    return found_by()


def test_validate_sample_decodes_every_prompt_several_times(found: SampleValidation) -> None:
    """A trial for each prompt and repeat, by three baselines, all with texts of their own."""
    assert len(found.metrics.trials) == len(found.texts) == 12
    assert [trial.text.prompt_id for trial in found.metrics.trials] == [f"set:{i:08}" for i in range(4)] * 3
    assert found.metrics.baselines == (GENERATE, AUTOREGRESSIVE, TREE)
    for i in range(4):
        texts = [tuple(runs[0].tokens) for trial in found.metrics.trials[i::4] for runs in trial.runs.values()]
        assert len(set(texts)) == len(texts) == 9
    assert found.metrics.tokens_per_step(AUTOREGRESSIVE) == 1
    assert 1.2 < found.tokens_per_step < 4


def test_validate_sample_standard_errors_are_clustered(found: SampleValidation) -> None:
    """The repeats of a prompt are one cluster, in both standard errors; the measured ratio is of sums."""
    tokens, steps = np.zeros(4), np.zeros(4)
    for place, trial in enumerate(found.metrics.trials):
        tokens[place % 4] += trial.tokens
        steps[place % 4] += trial.steps
    tau = tokens.sum() / steps.sum()
    assert found.tokens_per_step == tau
    error = math.sqrt(4 / 3 * sum((tokens - tau * steps) ** 2)) / steps.sum()
    assert found.measured_standard_error == pytest.approx(error)
    sums = found.predicted.sums
    tokens, steps = sums.tokens.reshape(3, 4).sum(0), sums.steps.reshape(3, 4).sum(0)
    error = math.sqrt(4 / 3 * sum((tokens - found.predicted.tokens_per_step * steps) ** 2)) / steps.sum()
    assert found.predicted_standard_error == pytest.approx(error)


def test_validate_sample_with_equal_seeds(found: SampleValidation) -> None:
    """Equal seeds give equal texts and figures; other seeds others. No seed is seed 0."""

    def drawn(one: SampleValidation) -> list[list[int]]:
        return [runs[0].tokens for trial in one.metrics.trials for runs in trial.runs.values()]

    torch.manual_seed(99)
    again = found_by()
    assert drawn(again) == drawn(found)
    assert (again.z_score, again.predicted.tokens_per_step) == (found.z_score, found.predicted.tokens_per_step)
    unseeded, zero = (found_by(dataclasses.replace(RULE, seed=seed), repeats=1) for seed in (None, 0))
    assert drawn(unseeded) == drawn(zero)
    assert drawn(zero) != drawn(found)[:12]


@pytest.mark.parametrize("kind", but_slow(["static", "policy", "several sizes"], "policy"))
def test_validate_sample_is_predicted(kind: str) -> None:
    """Measured and predicted tokens per step agree within their standard errors, over 24 or 48 texts."""
    base, heads = planted(3)
    drafter = quick_drafter(base, heads)
    cost = SIZE_COST if kind == "several sizes" else ()
    plan = TREE_OF if kind == "static" else TreePolicy(16, drafter.depth, drafter.id, cost)
    found = validate(
        base,
        heads,
        plan,
        prompts_of(4, 8),
        drafter=None if kind == "static" else drafter,
        acceptance=Sample(temperature=0.4, seed=1),
        max_new_tokens=10,
        repeats=3 if kind == "several sizes" else 6,
        draws=0,
        batch_size=1 if kind == "several sizes" else 8,
    )
    assert found.z_score is not None
    assert abs(found.z_score) < 3
    assert found.as_predicted
    assert found.measured_standard_error is not None
    assert found.measured_standard_error < 0.15
    assert found.tokens_per_step > 1.2


def test_validate_sample_finds_a_decoder_that_accepts_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were split in two are not the predicted ones, and the distribution is still right."""
    start = TreeDecoder.start_all

    def split(self: TreeDecoder, ids: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[dict[int, Step]]:
        for step in start(self, ids, max_new_tokens):
            first = {row: Step(tokens[:1], tokens.num_draft_tokens) for row, tokens in step.items()}
            rest = {row: Step(tokens[1:], tokens.num_draft_tokens) for row, tokens in step.items() if tokens[1:]}
            yield from (one for one in (first, rest) if one)

    monkeypatch.setattr(TreeDecoder, "start_all", split)
    found = found_by(prompts=8, draws=100, batch_size=8)
    assert found.z_score is not None
    assert found.z_score < -4
    assert not found.as_predicted
    assert found.lossless


def test_validate_sample_tests_the_shortest_prompts() -> None:
    """Four prompts at most, and as many draws as given; a right decoder is lossless."""
    base = tiny_base("llama", 1, vocab_size=9, initializer_range=0.2)
    texts = prompts_of(2, 7, vocab=9)
    found = validate(
        base,
        random_heads(base, 3),
        TREE_OF,
        texts,
        acceptance=Sample(),
        draws=400,
        max_new_tokens=2,
    )
    shortest = sorted(texts, key=lambda text: (len(text.prompt), text.prompt_id))[:4]
    assert [one.prompt_id for one in found.tests] == [text.prompt_id for text in shortest]
    assert all(one.draws == 400 for one in found.tests)
    assert found.lossless
    assert found.p_value is not None
    assert found.p_value == min(1, 8 * min(min(one.p_base, one.p_stock) for one in found.tests))


def test_validate_sample_finds_a_wrong_rule() -> None:
    """A draw for every child accepts drafts too often: not lossless."""
    base = tiny_base("llama", 1, vocab_size=9, initializer_range=0.2)
    texts = prompts_of(2, 2, vocab=9)
    wrong = DrawnPerChild(temperature=1.0, seed=2)
    found = validate(base, random_heads(base, 3), TREE_OF, texts, acceptance=wrong, draws=1500, max_new_tokens=4)
    assert found.lossless is False
    assert all(one.p_control > 1e-3 for one in found.tests)


def test_validate_sample_of_one_prompt_has_no_standard_error() -> None:
    """One cluster gives none, nor a z-score; nothing was tested, so nothing is said of losslessness."""
    found = found_by(prompts=1)
    assert (found.measured_standard_error, found.predicted_standard_error, found.z_score) == (None, None, None)
    assert (found.as_predicted, found.lossless, found.p_value) == (True, None, None)


def test_validate_sample_of_dialogues_clusters_their_turns(base: Base, loaded: LoadedHeads) -> None:
    """Both turns of a dialogue are one cluster, so one dialogue has no standard error."""
    prompt = Prompt("set:00000000", ({"role": "user", "content": "One day"},), None, None, later=("Then",))
    ids = base.tokenizer("One day")["input_ids"]
    found = validate(
        base,
        loaded,
        TREE_OF,
        [Text(prompt.id, ids, [], prompt)],
        acceptance=RULE,
        draws=0,
        max_new_tokens=6,
        repeats=2,
    )
    assert [trial.text.prompt_id for trial in found.metrics.trials] == [prompt.id, f"{prompt.id}.02"] * 2
    assert found.measured_standard_error is None


def test_warning_needs_drafts_and_follows_the_number_of_prompts() -> None:
    """A z-score of 6 is beyond the limit of 30 prompts (4.7), within that of 8 (8.9); few drafts never warn."""
    base, heads = planted(3)
    for count, tokens, fits in ((30, 8, False), (8, 16, True), (3, 2, True)):
        found = validate(base, heads, TREE_OF, prompts_of(4, count), acceptance=RULE, max_new_tokens=tokens, draws=0)
        assert found.few_drafts == (count == 3)
        assert dataclasses.replace(found, z_score=6.0).as_predicted == fits
        assert dataclasses.replace(found, z_score=-100.0).as_predicted == (count == 3)
        assert dataclasses.replace(found, z_score=None).as_predicted


def test_z_score_by_hand() -> None:
    """Two prompts: ratios 2.5 and 1.5, residuals -1/4 and 1/4 against none, so the standard error is 1/2."""
    one = np.array([4.0, 6.0]), np.array([2.0, 2.0])
    other = np.array([3.0, 3.0]), np.array([2.0, 2.0])
    assert z_score(one, other) == pytest.approx(2, abs=1e-4)
    assert z_score(other, one) == pytest.approx(-2, abs=1e-4)


def test_z_score_is_paired() -> None:
    """What both ratios have in common of a prompt is no error of their difference."""
    steps = np.full(6, 10.0)
    tokens = np.array([11.0, 40.0, 20.0, 35.0, 12.0, 30.0])
    other = tokens + np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    error = standard_error(tokens, steps)
    assert error is not None
    assert error > 0.4
    assert z_score((tokens, steps), (other, steps)) == pytest.approx(0, abs=1e-9)
    shifted = other + 3
    assert z_score((tokens, steps), (shifted, steps)) == pytest.approx(-0.3 / math.sqrt(6 / 5 * 6 / 3600), rel=1e-3)


def test_z_score_of_equal_ratios_without_errors_is_zero() -> None:
    """Two deterministic decoders: no spread and no difference; a difference of rounding is none."""
    same = np.array([4.0, 4.0]), np.array([2.0, 2.0])
    assert z_score(same, same) == 0
    rounded = np.array([4.0005, 4.0005]), np.array([2.0, 2.0])
    score = z_score(rounded, same)
    assert score is not None
    assert 0 < score < 1
    assert z_score((np.array([4.0]), np.array([2.0])), (np.array([3.0]), np.array([2.0]))) is None


@looped(
    ("options", "error", "match"),
    [
        ({"acceptance": Sample(temperature=0)}, ValueError, "temperature 0 is greedy"),
        ({"acceptance": Typical(temperature=0)}, ValueError, "temperature 0 is greedy"),
        ({"acceptance": "sample"}, TypeError, "acceptance is"),
        ({"draws": -1}, ValueError, "draws -1"),
        ({"draws": 1.5}, ValueError, "draws 1.5"),
    ],
)
def test_validate_refuses_rules_and_draws(options: dict[str, Any], error: type[Exception], match: str) -> None:
    """What cannot be validated is refused before anything is decoded."""
    base = tiny_base("llama")
    with pytest.raises(error, match=match):
        validate(base, random_heads(base, 2), Tree.chain(2), [Text("a:0", [3, 5], [])], **options)
