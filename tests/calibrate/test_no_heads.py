"""Calibration, profile and validation in Python without heads: `heads` is None."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from drafters import answered, learned, planted, prompts_of
from tiny import VOCAB, chat_base

from treeopt.calibrate.pipeline import run_calibration
from treeopt.defaults import KINDS
from treeopt.drafter import Drafter
from treeopt.drafting.learn import TOP, Learning
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.profile import measure_profile
from treeopt.evaluate.runs import trace
from treeopt.evaluate.validate import validate
from treeopt.files.drafters import load_drafter, save_drafter
from treeopt.models.base import Base
from treeopt.optimize.per_step import build_policy
from treeopt.optimize.tree_builder import build_tree
from treeopt.texts.encode import Text

PROMPTS = [f"w{i} w{i + 1}" for i in range(1, 9)]
NEW = 16


@pytest.fixture(scope="module")
def base() -> Base:
    """A model with a tokenizer, whose text an n-gram table often knows."""
    return chat_base(template=None, disturbed=0.03)


@pytest.fixture(scope="module")
def drafter(base: Base) -> Drafter:
    """A drafter without heads for it."""
    return learned(base, None, answered(base, prompts_of(1, 12), NEW), new=NEW, levels=4).drafter


def test_traces_are_those_of_one_pass(base: Base, drafter: Drafter) -> None:
    """The calibration of answers equals the trace of the same texts, and names no heads."""
    run = run_calibration(base, None, PROMPTS, drafter=drafter, max_new_tokens=NEW, steps=True)
    record = run.calibration
    assert (run.heads, run.learned, record.num_heads) == (0, None, 4)
    source = record.provenance
    assert (source.heads, source.heads_id, source.drafter_id) == ("", "", drafter.id)
    assert (source.model, source.model_id) == (base.name, base.fingerprint)
    assert base.tokenizer is not None
    texts = answered(base, [Text(p, base.tokenizer(p)["input_ids"], []) for p in PROMPTS], NEW)
    again = trace(base, None, texts, drafter, steps=4)
    assert np.array_equal(record.ranks, again.ranks)
    assert np.count_nonzero(record.ranks == 0) > len(record.ranks)  # of four levels
    assert record.steps is not None
    assert again.steps is not None
    assert np.array_equal(record.steps.node_rank, again.steps.node_rank)


def test_learning_without_heads(base: Base) -> None:
    """A drafter is learned from the prompts; its file reads back; progress names levels."""
    notes: list[str] = []
    learning = Learning(200, levels=3, window=32)
    run = run_calibration(
        base,
        None,
        PROMPTS,
        learning=learning,
        max_new_tokens=NEW,
        progress=lambda done, total, note: notes.append(note),
    )
    assert run.learned is not None
    made = run.learned.drafter
    assert (made.num_heads, made.top, made.depth, run.heads) == (0, TOP, 3, 0)
    assert (made.source["heads"], made.source["heads_id"], made.source["model_id"]) == ("", "", base.fingerprint)
    assert notes[-1].startswith("level 1 top-1 ")
    assert run.calibration.provenance.drafter_id == made.id


def test_parts_merge_and_others_do_not(base: Base, drafter: Drafter) -> None:
    """Parts without heads merge to the whole; traces with another heads_id do not."""
    whole, *parts = (
        run_calibration(base, None, prompts, drafter=drafter, max_new_tokens=NEW).calibration
        for prompts in (PROMPTS, PROMPTS[:3], PROMPTS[3:])
    )
    ids = [dataclasses.replace(one, prompt_ids=tuple(f"{i}{p}" for p in one.prompt_ids)) for i, one in enumerate(parts)]
    merged = ids[1].merge(ids[0])
    assert np.array_equal(merged.ranks, whole.ranks)
    assert merged.provenance.heads_id == ""
    other = dataclasses.replace(ids[1], provenance=dataclasses.replace(ids[1].provenance, heads_id="h1"))
    with pytest.raises(TreeoptError) as caught:
        merged.merge(other)
    assert caught.value.code is Code.CALIBRATION_MISMATCH
    assert caught.value.at == "heads_id: none and h1"


def test_something_must_draft(base: Base) -> None:
    """Without heads, a drafter or learning with an n-gram table is needed; that is known before any answer."""
    calls: list[str] = []
    with pytest.raises(ValueError, match="heads is None: "):
        run_calibration(base, None, PROMPTS, progress=lambda *about: calls.append(about[2]))
    with pytest.raises(ValueError, match="nothing drafts"):
        run_calibration(
            base, None, PROMPTS, learning=Learning(ngram=False), progress=lambda *about: calls.append(about[2])
        )
    assert calls == []


def test_heads_and_records_that_do_not_fit(base: Base, drafter: Drafter) -> None:
    """E223 says whether heads are missing or to be left out."""
    _, heads = planted()
    for given, record, fix in (
        (None, dataclasses.replace(drafter, num_heads=2, lm_head_levels=0), "--heads HEADS"),
        (heads, drafter, "heads=None"),
    ):
        with pytest.raises(TreeoptError) as caught:
            run_calibration(base, given, PROMPTS, drafter=record)
        assert caught.value.code is Code.DRAFTER_MISMATCH
        assert fix in caught.value.fix


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_validated_as_expected(base: Base, drafter: Drafter, kind: str) -> None:
    """A tree from such traces is lossless, and measured are the expected tokens per step."""
    calibration = run_calibration(base, None, PROMPTS, drafter=drafter, max_new_tokens=NEW, steps=True).calibration
    plan = build_tree(calibration, 8) if kind == "static" else build_policy(calibration, 8)
    found = validate(base, None, plan, PROMPTS, drafter=drafter, max_new_tokens=NEW)
    assert found.lossless
    assert found.prediction_misses == ()
    assert found.tokens_per_step == pytest.approx(found.expected_tokens_per_step, rel=1e-6)
    assert found.tokens_per_step > 1.3


def test_profile_without_heads(base: Base, drafter: Drafter) -> None:
    """Static and per-step trees of an empty table and of a drafter are timed; no heads are named."""
    for record, kind in itertools.product((None, drafter), KINDS):
        profile = measure_profile(base, None, nodes=(2, 6), contexts=(8,), repeats=1, drafter=record, kind=kind)
        assert [point.nodes for point in profile.points] == [1, 2, 6]
        assert (profile.provenance["heads"], profile.provenance["heads_id"]) == ("", "")
        assert (profile.kind, profile.drafter) == (kind, (record or Drafter.untrained(base.vocab_size)).id)
        assert profile.provenance["drafter_name"] == "ngram"
    found = measure_profile(base, None, nodes=(6,), repeats=1, kind="dynamic", drafter=drafter)
    assert found.contexts == (base.context - 4 - 1,)


def test_sizes_without_heads(base: Base, drafter: Drafter) -> None:
    """The largest tree is that of the drafter's levels and candidates."""
    one = dataclasses.replace(drafter, levels=drafter.levels[:1], lm_head_levels=1)
    with pytest.raises(TreeoptError, match="no tree of 25 nodes: the largest has 24"):
        measure_profile(base, None, nodes=(25,), contexts=(8,), repeats=1, drafter=one)


def test_file_without_heads(drafter: Drafter, tmp_path: Path) -> None:
    """A drafter file of H = 0 reads back under its id."""
    save_drafter(drafter, tmp_path / "d.safetensors")
    again = load_drafter(tmp_path / "d.safetensors")
    assert (again.id, again.num_heads, again.top, again.depth) == (drafter.id, 0, drafter.top, 4)
    assert again.ngram_table is not None
    assert again.ngram_table.vocab_size == VOCAB
