"""Validation of schedules: lossless in any batch, predicted exactly where texts are decoded alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from drafters import SIZE_COST, answered, planted, prompts_of, quick_drafter
from program import treeopt_json
from refusals import refusal_of
from tiny import tiny_base

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Sample
from treeopt.drafter import Drafter
from treeopt.errors import Code
from treeopt.evaluate.runs import trace
from treeopt.evaluate.validate import advice, validate
from treeopt.files.schedules import save_schedule
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.tree_builder import rounded
from treeopt.optimize.verdict import verdicts_of
from treeopt.policy import TreePolicy
from treeopt.schedule import Schedule, ScheduledPlan
from treeopt.tree import Tree


def schedule_of(drafter: Drafter) -> Schedule:
    """Alone, as the text grows: none, a chain, none again, a tree and a policy; a chain in larger batches."""
    chain, tree = Tree.chain(3), Tree.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])
    chain, tree = (dataclasses.replace(one, drafter=drafter.id) for one in (chain, tree))
    policy = TreePolicy(8, drafter.depth, drafter.id, SIZE_COST[:4])
    alone = zip((6, 12, 15, 24, 99), (Tree(()), chain, Tree(()), tree, policy), strict=True)
    cells = [ScheduledPlan(1, context, plan) for context, plan in alone]
    return Schedule((*cells, ScheduledPlan(8, 99, chain)))


@pytest.mark.parametrize("ngram", [True, False])
def test_prediction_is_exact_alone(ngram: bool) -> None:
    """At batch 1 each text takes the predicted steps; in a batch it is lossless, and a note says what is not exact."""
    base, heads = planted(3)
    drafter = quick_drafter(base, heads, ngram=ngram)
    schedule, texts = schedule_of(drafter), prompts_of(2, 6)
    given = (base, heads, schedule, texts)
    found = validate(*given, drafter=drafter, max_new_tokens=30)
    assert found.lossless
    assert found.prediction_misses == ()
    assert found.predicted.tokens_per_step == found.tokens_per_step > 1.2
    np.testing.assert_allclose(found.measured_by_depth, found.predicted.acceptance_by_depth())
    assert (found.nodes, found.expected_tokens_per_step) == (8, None)
    assert not any("predict" in one for one in advice(found, schedule))
    batch = validate(*given, drafter=drafter, max_new_tokens=30, batch_size=6)
    assert batch.lossless
    notes = [one for one in advice(batch, schedule) if "predict" in one]
    assert ["exact at batch 1 only" in note for note in notes] == [True] * bool(batch.prediction_misses)
    refused = refusal_of(validate, *given, drafter=drafter, max_new_tokens=4, acceptance=Sample())
    assert refused.code is Code.GENERATE_UNSUPPORTED


@pytest.mark.parametrize("name", ["heads+ngram", "heads, fitted", "model"])
def test_promised_is_decoded(name: str) -> None:
    """Every chain, tree and per-step tree of a verdict takes on its texts the very steps that it promises."""
    base, heads = planted(3)
    texts = answered(base, prompts_of(2, 2), 12)
    draft = tiny_base("llama", 2) if name == "model" else None
    given = None if draft else heads
    drafter = Drafter.model_only(4, 6, draft.fingerprint) if draft else quick_drafter(base, heads, ngram="+" in name)
    traces = trace(base, given, texts, drafter, draft, steps=drafter.depth)
    points = [LatencyPoint(nodes, 1, 64, 1.0, 1.0, 1.0) for nodes in (1, 2, 4)]
    found = verdicts_of(traces, [LatencyProfile.from_points(points)])
    for one in found.verdicts[0].settings:
        plan = one.of.plan()
        decoder = TreeDecoder(base, given, plan, drafter=drafter, draft=draft)
        decoded = [decoder.generate(text.prompt, 12) for text in texts]
        assert [each.tokens for each in decoded] == [text.answer for text in texts]
        tokens, steps = sum(len(each.tokens) for each in decoded), sum(len(each.step_lengths) for each in decoded)
        if one.kind != "static":
            assert tokens / steps == one.budget.tokens_per_step, one.kind
        assert plan.expected is not None
        assert plan.expected.replay == rounded(tokens / steps)


def test_commands_take_a_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` and `validate` of the built-in model take a schedule as a tree."""
    monkeypatch.chdir(tmp_path)
    cells = [
        ScheduledPlan(1, 12, Tree.chain(2)),
        ScheduledPlan(1, 99, Tree(((0,), (1,)))),
        ScheduledPlan(2, 9, Tree(())),
    ]
    save_schedule(Schedule(tuple(cells)), "s.yaml")
    made = treeopt_json("generate", "import os", "--heads", "pocket", "--tree", "s.yaml", "--max-new-tokens", "12")
    assert made["nodes"] == 3
    assert max(made["step_lengths"]) > 1
    for batch in ("1", "3"):
        line = ("--heads", "pocket", "--tree", "s.yaml", "--limit", "3", "--max-new-tokens", "16")
        found = treeopt_json("validate", *line, "--batch-size", batch)
        assert found["lossless"]
        assert (found["predicted_tokens_per_step"] == found["tokens_per_step"]) or batch != "1"
