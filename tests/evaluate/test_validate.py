"""Validate: a right decoder is proved, its metrics hang together, and a wrong one is found out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import planted, prompts_of, quick_drafter
from looped import looped
from tiny import but_slow, cycle_base, cycle_heads, random_heads, tiny_base

from treeopt.calibrate.pipeline import run_calibration
from treeopt.calibration import Calibration
from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.draft_metrics import Step
from treeopt.evaluate.baselines import (
    AUTOREGRESSIVE,
    GENERATE,
    LOOKUP,
    MEASURED,
    TREE,
    WARMING,
    Baseline,
    Call,
    Run,
    with_generate,
)
from treeopt.evaluate.divergence import ENDED, Cause
from treeopt.evaluate.runs import ValidateOptions, decode_all, decode_in_turns
from treeopt.evaluate.validate import Validation, validate
from treeopt.models.base import Base
from treeopt.models.head_files import LoadedHeads
from treeopt.optimize.tree_builder import build_tree
from treeopt.policy import TreePolicy
from treeopt.progress import silent
from treeopt.texts.encode import Text, encode
from treeopt.texts.prompts import Prompt, PromptSet, load_prompts
from treeopt.tree import Tree

NEW_TOKENS = 20


@pytest.fixture(scope="module")
def stories(shared: Path) -> PromptSet:
    """Six story openings."""
    return load_prompts(str(shared / "data" / "story_openings.json"), limit=6)


@pytest.fixture(scope="module")
def calibration(base: Base, loaded: LoadedHeads, stories: PromptSet) -> Calibration:
    """The heads' traces over those openings, run one at a time, as validation runs them."""
    return run_calibration(base, loaded, stories, max_new_tokens=NEW_TOKENS, batch_size=1).calibration


@pytest.fixture(scope="module")
def tree(calibration: Calibration) -> Tree:
    """The best tree of 16 nodes by that calibration."""
    return build_tree(calibration, 16)


@pytest.fixture(scope="module")
def texts(base: Base, stories: PromptSet) -> list[Text]:
    """The openings' token ids."""
    return [Text(p.id, encode(p, base.tokenizer, chat_template=True)[0], []) for p in stories.prompts]


@pytest.fixture(scope="module")
def validation(base: Base, loaded: LoadedHeads, tree: Tree, texts: list[Text]) -> Validation:
    """That tree, proved on its own calibration prompts."""
    return validate(base, loaded.heads, tree, texts, max_new_tokens=NEW_TOKENS, repeats=2)


def test_validate_lossless(validation: Validation) -> None:
    """Every text is that of stock generate."""
    assert validation.lossless
    assert validation.differences == ()


def test_validate_predicted_is_measured(validation: Validation) -> None:
    """Steps were predicted exactly, prompt by prompt, and so was how deep drafts are accepted."""
    assert validation.prediction_misses == ()
    assert [one.steps for one in validation.metrics.trials] == [
        one.predicted_steps for one in validation.metrics.trials
    ]
    assert validation.metrics.predicted_tokens_per_step == validation.tokens_per_step
    assert validation.predicted.tokens_per_step == validation.tokens_per_step
    np.testing.assert_allclose(validation.measured_by_depth, validation.predicted.acceptance_by_depth())
    assert validation.tokens_per_step > 1.5


@pytest.mark.parametrize("batch_size", but_slow([1, 4], 4))
@pytest.mark.parametrize("kind", ["static", "policy"])
def test_validate_predicted_histogram_is_measured(kind: str, batch_size: int) -> None:
    """Replay knows how many steps accept k drafts, where texts end by an end token as where they end by the budget."""
    base, heads = planted(3)
    texts = prompts_of(2, 6)
    base.model.generation_config.eos_token_id = with_generate(base)([texts[0].prompt], 9, Call(0))[0].tokens[-1]
    drafter = quick_drafter(base, heads)
    tree = Tree.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)], drafter=drafter.id)
    plan = tree if kind == "static" else TreePolicy(6, drafter.depth, drafter.id)
    found = validate(base, heads, plan, texts, drafter=drafter, max_new_tokens=17, batch_size=batch_size)
    assert found.lossless
    measured = found.metrics.draft_metrics()
    assert measured is not None
    assert found.predicted.histogram == measured.acceptance_histogram
    assert 0 < found.metrics.steps - measured.num_drafts < 6  # some texts end by a root that needs no forward
    assert len({trial.tokens for trial in found.metrics.trials}) > 1


def test_validate_fields_consistent(validation: Validation, texts: list[Text], tree: Tree) -> None:
    """Every baseline decoded every text twice; tokens, steps and ratios are those of the runs."""
    metrics = validation.metrics
    assert [trial.text.prompt_id for trial in metrics.trials] == [text.prompt_id for text in texts]
    assert metrics.tokens == sum(trial.tokens for trial in metrics.trials) == 6 * NEW_TOKENS
    assert metrics.steps == sum(trial.steps for trial in metrics.trials)
    assert set(metrics.baselines) == {GENERATE, LOOKUP, AUTOREGRESSIVE, TREE}
    assert metrics.tokens_per_step(AUTOREGRESSIVE) == metrics.tokens_per_step(GENERATE) == 1.0
    assert metrics.tokens_per_step(LOOKUP) > 1.0
    assert len(validation.measured_by_depth) == tree.depth
    assert metrics.repeats == 2
    for trial in metrics.trials:
        for runs in trial.runs.values():
            assert len(runs) == 2
            assert all(len(run.tokens) == sum(run.step_lengths) == NEW_TOKENS for run in runs)
            assert all(min(run.seconds, run.prefill_seconds) > 0 for run in runs)
    tree_seconds, plain_seconds = (
        [sum(trial.runs[name][repeat].seconds for trial in metrics.trials) for repeat in range(2)]
        for name in (TREE, AUTOREGRESSIVE)
    )
    plain_steps = sum(len(trial.runs[AUTOREGRESSIVE][0].step_lengths) for trial in metrics.trials)
    ratios = [
        tree / metrics.steps / (plain / plain_steps) for tree, plain in zip(tree_seconds, plain_seconds, strict=True)
    ]
    assert validation.overhead == pytest.approx(np.median(ratios))
    assert validation.speedup == pytest.approx(np.median([validation.tokens_per_step / one for one in ratios]))
    assert validation.made_by["dtype"] == "float32"
    assert validation.made_by["threads"] == "1"


def test_validate_tree_without_expectation(base: Base, loaded: LoadedHeads, texts: list[Text]) -> None:
    """A tree that says nothing about itself is proved all the same, with nothing to compare."""
    done: list[tuple[int, int]] = []
    result = validate(
        base,
        loaded.heads,
        Tree.chain(2),
        texts[:2],
        max_new_tokens=12,
        progress=lambda at, total, _note: done.append((at, total)),
    )
    assert (result.lossless, result.prediction_misses, result.expected_tokens_per_step) == (True, (), None)
    assert done == [(1, 2), (2, 2)]


def test_texts_of_one_id_are_refused(base: Base, loaded: LoadedHeads) -> None:
    """Before anything is decoded."""
    with pytest.raises(ValueError, match="have one prompt_id"):
        validate(base, loaded.heads, Tree.chain(2), [Text("a", [1, 2], []), Text("a", [3], [])])


@pytest.mark.parametrize("budget", [1, 2])
def test_validate_small_budget(budget: int) -> None:
    """One or two tokens a text can be proved as well; a pace of no decoded token is none."""
    base = tiny_base("llama")
    result = validate(base, random_heads(base, 2), Tree.chain(2), [Text("a:0", [3, 5], [])], max_new_tokens=budget)
    assert result.lossless
    assert result.metrics.tokens == budget
    assert (result.metrics.tokens_per_second() is None) == (result.speedup is None) == (budget == 1)


def test_validate_end_of_text() -> None:
    """Texts that end early, within a step, are proved and predicted."""
    base = cycle_base(1)
    heads = cycle_heads(base, 4, 1)
    free = validate(base, heads, Tree.chain(4), [Text("a:0", [3, 8], [])], max_new_tokens=20)
    assert (free.metrics.tokens, free.metrics.steps) == (20, 4)
    text = base.generate(torch.tensor([[3, 8]]), torch.ones(1, 2).long(), 20)[0, 2:].tolist()
    base.model.generation_config.eos_token_id = text[12]
    ended = validate(base, heads, Tree.chain(4), [Text("a:0", [3, 8], [])], max_new_tokens=20)
    assert (ended.metrics.tokens, ended.metrics.steps, ended.metrics.trials[0].predicted_steps) == (13, 3, 3)
    assert ended.lossless
    assert ended.measured_by_depth == (1.0, 1.0, 2 / 3, 2 / 3)


def test_validate_dialogues(base: Base, loaded: LoadedHeads, tree: Tree) -> None:
    """A second turn continues the whole dialogue so far, as predicted; the third no longer fits and is named."""
    asked = Prompt("set:00000000", ({"role": "user", "content": "One day"},), None, None, later=("Then", "x " * 300))
    ids, _ = encode(asked, base.tokenizer, chat_template=True)
    result = validate(base, loaded.heads, tree, [Text(asked.id, ids, [], asked)], max_new_tokens=24)
    first, second = result.metrics.trials
    assert base.tokenizer is not None
    said = base.tokenizer.decode(first.runs[GENERATE][0].tokens, skip_special_tokens=True)
    prompt = torch.tensor([base.tokenizer(f"One day\n{said}\nThen")["input_ids"]])
    stock = base.generate(prompt, torch.ones_like(prompt), 24)[0, prompt.shape[1] :].tolist()
    assert second.runs[TREE][0].tokens == stock
    assert (result.lossless, result.prediction_misses) == (True, ())
    assert [(trial.text.turn, trial.text.prompt_id) for trial in (first, second)] == [
        (1, asked.id),
        (2, f"{asked.id}.02"),
    ]
    assert [one.prompt_id for one in result.skipped] == [f"{asked.id}.03"]


def test_each_turn_of_a_compiled_base_is_decoded_before_it_is_timed(base: Base) -> None:
    """A later turn has another size of the cache, whose compilation would be timed with it."""
    asked = Prompt("set:00000000", ({"role": "user", "content": "One day"},), None, None, later=("Then",))
    ids, _ = encode(asked, base.tokenizer, chat_template=True)
    calls: list[tuple[int, int, int]] = []

    def stock(prompts: Sequence[Sequence[int]], new: int, call: Call) -> list[Run]:
        calls.append((call.turn, call.part, len(prompts[0])))
        return with_generate(base)(prompts, new, call)

    compiled, options = dataclasses.replace(base, compile=True), ValidateOptions(max_new_tokens=4, repeats=2)
    decode_all({GENERATE: stock}, compiled, [Text(asked.id, ids, [], asked)], options, silent)
    turns = [[length for turn, _, length in calls if turn == number] for number in (0, 1)]
    assert len(set(turns[0])) == len(set(turns[1])) == 1
    assert [(turn, part) for turn, part, _ in calls] == [
        (0, WARMING),
        *((turn, part) for turn in (0, 1) for part in (WARMING, MEASURED, MEASURED)),
    ]


def test_validate_in_batches(base: Base, loaded: LoadedHeads, tree: Tree, texts: list[Text]) -> None:
    """Three texts two by two: the same texts, steps and prediction as one at a time; prompt lookup takes no batches."""
    alone = validate(base, loaded.heads, tree, texts[:3], max_new_tokens=NEW_TOKENS)
    found = validate(base, loaded.heads, tree, texts[:3], max_new_tokens=NEW_TOKENS, batch_size=2)
    assert (found.lossless, found.prediction_misses, found.batch_size) == (True, (), 2)
    assert [trial.text.prompt_id for trial in found.metrics.trials] == [
        trial.text.prompt_id for trial in alone.metrics.trials
    ]
    assert [trial.runs[TREE][0].tokens for trial in found.metrics.trials] == [
        trial.runs[TREE][0].tokens for trial in alone.metrics.trials
    ]
    assert found.tokens_per_step == alone.tokens_per_step
    assert list(found.left_out) == [LOOKUP]


def test_baselines_take_turns() -> None:
    """Within a repeat every baseline runs once, and each repeat and text begins with another."""
    order: list[str] = []

    def baseline(name: str) -> Baseline:
        def run(_prompts: Sequence[Sequence[int]], _budget: int, call: Call) -> list[Run]:
            order.append(f"{name}{call.repeat}")
            return [Run([1], [1], 1, 0.0, 0.0)]

        return run

    options = ValidateOptions(max_new_tokens=1, repeats=2)
    (runs,) = decode_in_turns({name: baseline(name) for name in "abc"}, [[1]], options, Call(1))
    assert " ".join(order) == "b0 c0 a0 c1 a1 b1"
    assert [len(runs[name]) for name in "abc"] == [2, 2, 2]


def plant(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[int, list[list[int]]], list[list[int]]]) -> None:
    """Let every decoder with a tree give what `spoil` makes of the token budget and the steps it would have given."""
    start = TreeDecoder.start_all

    def spoiled(self: TreeDecoder, ids: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[dict[int, list[int]]]:
        steps = start(self, ids, max_new_tokens)
        if self.tree.nodes == 1:
            return steps
        made = spoil(max_new_tokens, [step[0] for step in steps])
        return iter([{0: Step(step, self.trees.nodes - 1)} for step in made])

    monkeypatch.setattr(TreeDecoder, "start_all", spoiled)


def test_validate_planted_token(
    base: Base, loaded: LoadedHeads, tree: Tree, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token of the decoder's own between two steps is a bug: where, both tokens, and the gap in float64."""

    def insert_wrong(_budget: int, steps: list[list[int]]) -> list[list[int]]:
        return steps if len(steps) < 5 else [*steps[:4], [300], *steps[4:]]

    plant(monkeypatch, insert_wrong)
    result = validate(base, loaded.heads, tree, texts[:3], max_new_tokens=NEW_TOKENS)
    assert not result.lossless
    assert result.failures == result.differences == result.our_differences
    assert [difference.prompt_id for difference in result.differences] == [text.prompt_id for text in texts[:3]]
    assert result.prediction_misses == ()  # a text of its own cannot be compared with the prediction
    for text, trial, difference in zip(texts, result.metrics.trials, result.differences, strict=False):
        stock, found = trial.runs[GENERATE][0].tokens, trial.runs[TREE][0]
        assert (difference.decoder, difference.cause) == (TREE, Cause.BUG)
        assert difference.position == sum(found.step_lengths[:4])
        assert (difference.greedy_token, difference.found_token) == (stock[difference.position], 300)
        with torch.inference_mode():
            logits = base.model(torch.tensor([[*text.prompt, *stock[: difference.position]]])).logits[0, -1]
        assert difference.gap == pytest.approx(float(logits.max() - logits[300]), abs=1e-4)
        assert difference.gap > 1000 * difference.resolution


@pytest.mark.parametrize(
    ("dtype", "step", "cause", "fine"),
    [
        (torch.float32, 0.0, Cause.TIE, True),
        (torch.bfloat16, 0.0, Cause.TIE, True),
        (torch.float32, 1e-7, Cause.ROUNDING, False),
        (torch.bfloat16, 2**-7, Cause.ROUNDING, True),
        (torch.bfloat16, 0.5, Cause.BUG, False),
    ],
)
def test_validate_planted_twins(
    dtype: torch.dtype, step: float, cause: Cause, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of the LM head, one of them lower by `step`, and a decoder that chooses otherwise than stock generate.

    No cause makes the text token for token that of stock, but a tie is no failure, nor is rounding in bfloat16.
    """
    base = tiny_base("llama")
    base.model.to(dtype)
    text = base.generate(torch.tensor([[3, 5]]), torch.ones(1, 2).long(), 12)[0, 2:].tolist()
    chosen, twin = text[6], next(token for token in range(60, 0, -1) if token not in text)
    with torch.no_grad():
        base.lm_head.weight[twin] = base.lm_head.weight[chosen] * (1 - step)

    def choose_the_other(_budget: int, steps: list[list[int]]) -> list[list[int]]:
        other = {chosen: twin, twin: chosen}
        return [[other.get(token, token) for token in one] for one in steps]

    plant(monkeypatch, choose_the_other)
    result = validate(base, random_heads(base, 2), Tree.chain(2), [Text("a:0", [3, 5], [])], max_new_tokens=12)
    (difference,) = [one for one in result.differences if one.decoder == TREE]
    assert difference.cause is cause
    assert {difference.greedy_token, difference.found_token} == {chosen, twin}
    assert not result.lossless
    assert (difference not in result.failures) is fine


def test_validate_planted_single_steps(base: Base, loaded: LoadedHeads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that accepts nothing is lossless, but its steps are not the predicted ones."""
    plant(monkeypatch, lambda _budget, steps: [[token] for one in steps for token in one])
    result = validate(base, loaded.heads, Tree.chain(3), [Text("a:0", [1, 403, 407], [])], max_new_tokens=40)
    assert result.lossless
    assert result.prediction_misses == result.metrics.trials
    assert result.metrics.steps == 40 > result.metrics.trials[0].predicted_steps


def test_validate_planted_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that goes on where stock generate had ended is a bug there, with no token on the one side."""
    base = cycle_base(1)
    out = base.generate(torch.tensor([[3, 8]]), torch.ones(1, 2).long(), 20)[0, 2:].tolist()
    base.model.generation_config.eos_token_id = out[7]
    plant(monkeypatch, lambda budget, _steps: [out[i : min(i + 5, budget)] for i in range(0, budget, 5)])
    result = validate(base, cycle_heads(base, 4, 1), Tree.chain(4), [Text("a:0", [3, 8], [])], max_new_tokens=20)
    (difference,) = result.differences
    assert (difference.position, difference.greedy_token, difference.found_token) == (8, ENDED, out[8])
    assert difference.cause is Cause.BUG
    assert math.isnan(difference.gap)


def spoil_all(base: Base, monkeypatch: pytest.MonkeyPatch, *, judge: int, count: int = 8) -> Validation:
    """Validation of `count` texts whose last token every tree decoder gets wrong."""

    def wrong_end(_budget: int, steps: list[list[int]]) -> list[list[int]]:
        return [*steps[:-1], [*steps[-1][:-1], (steps[-1][-1] + 1) % base.vocab_size]]

    plant(monkeypatch, wrong_end)
    texts = [Text(f"a:{i:08}", [3, 5 + i], []) for i in range(count)]
    return validate(base, random_heads(base, 2), Tree.chain(2), texts, max_new_tokens=8, judge=judge)


@looped(("judge", "judged"), [(0, 0), (3, 3), (5, 5), (8, 8), (99, 8)])
def test_validate_judges_the_first_texts(judge: int, judged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many differing texts are judged, in the order of the prompts; the others stay open, and fail in float32."""
    result = spoil_all(tiny_base("llama"), monkeypatch, judge=judge)
    assert (result.differing, result.num_judged, len(result.failures)) == (8, judged, 8)
    causes = [one.cause for one in result.our_differences]
    assert causes == [Cause.BUG] * judged + [Cause.UNJUDGED] * (8 - judged)
    assert not result.lossless


def test_validate_judges_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left open is judged afterwards, the next texts each time, with the causes of judging at once."""
    base = tiny_base("llama")
    result = spoil_all(base, monkeypatch, judge=0, count=5)
    later = result.judged(base, 2).judged(base, 2)
    assert (later.num_judged, result.num_judged) == (4, 0)
    assert later.differences[:4] == result.judged(base, 4).differences[:4]
    assert later.metrics is result.metrics


def test_validate_never_judges_prompt_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of prompt lookup that differ are named, never judged, and counted as nobody's failures."""
    base = tiny_base("llama")
    stock = with_generate

    def spoiled(base: Base, **options: int) -> Baseline:
        run = stock(base, **options)

        def wrong(prompts: Sequence[Sequence[int]], new: int, call: Call) -> list[Run]:
            return [dataclasses.replace(one, tokens=[7, *one.tokens[1:]]) for one in run(prompts, new, call)]

        return wrong if options else run

    monkeypatch.setattr("treeopt.evaluate.validate.with_generate", spoiled)
    monkeypatch.setattr("treeopt.evaluate.divergence._in_float64", lambda _model: pytest.fail("judged"))
    result = validate(base, random_heads(base, 2), Tree.chain(2), [Text("a:0", [3, 5], [])], max_new_tokens=8)
    assert [(one.decoder, one.cause) for one in result.differences] == [(LOOKUP, Cause.UNJUDGED)]
    assert (result.lossless, result.differing, result.failures) == (True, 0, ())


@looped(
    "wrong",
    [
        *({name: value} for name in ("max_new_tokens", "repeats", "batch_size") for value in (0, 1.5, "4", None, True)),
        *({"judge": value} for value in (-1, 1.5, None)),
    ],
)
def test_validate_refuses_numbers_out_of_range(wrong: dict[str, Any]) -> None:
    """What cannot be run is a ValueError that names it, before anything is decoded."""
    base = tiny_base("llama")
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} "):
        validate(base, random_heads(base, 2), Tree.chain(2), [Text("a:0", [3, 5], [])], **wrong)
