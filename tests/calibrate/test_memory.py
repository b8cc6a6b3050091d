"""Memory of calibrations: bytes a prompt and a position of the stages, by what Python and numpy allocate."""

from __future__ import annotations

import copy
import dataclasses
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import random_calibration
from sampled_traces import sampled
from tiny import VOCAB, chat_base, random_heads

from treeopt import traces as traces_module
from treeopt.calibrate.pipeline import run_calibration
from treeopt.errors import TreeoptError
from treeopt.files.calibrations import save_calibration
from treeopt.models.base import Base
from treeopt.runs.work import Work
from treeopt.texts.encode import Text
from treeopt.texts.prompts import load_prompts
from treeopt.traces import NONE

HEADS = 3
# Stated in docs/gpus.md; the traces of heads take H bytes a position.
A_PROMPT, A_POSITION = 2200, 4 + 2 * HEADS + 2


class FakeBase(Base):
    """A model whose answers are random tokens, all at once."""

    def generate(self, ids: torch.Tensor, mask: torch.Tensor, max_new_tokens: int, **_options: Any) -> torch.Tensor:
        return torch.cat([ids, torch.randint(1, VOCAB, (len(ids), max_new_tokens))], dim=1)


def peak_of(folder: Path, count: int, new: int) -> int:
    """Bytes at the peak of a calibration of so many prompts, from the file of prompts to that of the traces."""
    made = chat_base()
    made.model.generation_config.eos_token_id = None
    base = FakeBase(made.model, made.tokenizer, "fake")
    prompts, output = folder / f"{count}-{new}.jsonl", folder / f"{count}-{new}.safetensors"
    prompts.write_text("".join(json.dumps({"text": f"w{i % 50} w1 w2 w3"}) + "\n" for i in range(count)))
    heads = random_heads(base, HEADS)
    tracemalloc.start()
    try:
        options: dict[str, Any] = {"max_new_tokens": new, "batch_size": 16, "work": Work(output)}
        run = run_calibration(base, heads, load_prompts(prompts), **options)
        save_calibration(run.calibration, output)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_grows_by_the_traces_and_the_texts(tmp_path: Path) -> None:
    """Four times the prompts take no more than the stated bytes more, with short and with long answers."""
    peak_of(tmp_path, 16, 10)  # imports, and what is cached
    grown = [peak_of(tmp_path, 192, new) - peak_of(tmp_path, 48, new) for new in (10, 60)]
    assert grown[0] <= 144 * (A_PROMPT + 10 * A_POSITION)
    assert grown[1] - grown[0] <= 144 * 50 * A_POSITION


def test_tokens_are_stored_in_four_bytes() -> None:
    """A text reads as lists, which are new each time; its tokens are int32."""
    text = Text("set:00000000", [1, 70_000], [3])
    assert (text.prompt, text.answer) == ([1, 70_000], [3])
    assert text == Text("set:00000000", [1, 70_000], [3])
    assert text != Text("set:00000000", [1, 70_000], [4])
    assert text.prompt is not text.prompt
    tracemalloc.start()
    try:
        many = Text("set:00000000", range(100_000), [])
        assert tracemalloc.get_traced_memory()[0] < 480_000  # an array grows by a share
    finally:
        tracemalloc.stop()
    assert len(many.prompt) == 100_000
    with pytest.raises(TypeError, match="answer"):
        Text("set:00000000", [1])  # type: ignore[call-arg]  # that is the point


@pytest.mark.parametrize(("kind", "bytes_of"), [("heads", 4), ("sampled", 3 * (1 + 2 * 4 + 1 + 2 + 4) + 64)])
def test_file_has_the_stated_bytes_of_a_position(kind: str, bytes_of: int, tmp_path: Path) -> None:
    """H; with per-step trees 64 + 3 H more; with target probabilities 3 H R more: a header, and 8 bytes a text."""
    found = random_calibration(1, sequences=50) if kind == "heads" else sampled(1, texts=50)
    save_calibration(found, tmp_path / "c.safetensors")
    raw = (tmp_path / "c.safetensors").read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    assert len(raw) - header == found.positions * bytes_of + 8 * (found.sequences + 1)


FAULTS = {
    "ranks": "NONE is not exactly|node_rank|a rank is",
    "node_rank": "precedes its own prefix|places of the true",
    "expected_tokens": "not finite",
    "confidence": "not finite",
    "probability": "not from 0 to 1",
    "places": "places of the true tokens",
}
WRONG: dict[str, Any] = {
    "ranks": 253,
    "node_rank": [9, 8, 7],
    "expected_tokens": np.nan,
    "confidence": np.inf,
    "probability": -0.5,
    "places": 3,
}


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
def test_checks_of_parts_find_what_checks_of_all_find(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that breaks a rule is found at the first and at the last position, whatever part it is in."""
    monkeypatch.setattr(traces_module, "_BLOCK", block)
    whole = sampled(3, texts=6)
    assert whole.steps is not None
    assert whole.target is not None
    rows = np.flatnonzero((whole.ranks != NONE).all(axis=1) & (whole.ranks < 4).all(axis=1))
    for row in (rows[0], rows[-1]):
        for name, message in FAULTS.items():
            record = copy.deepcopy(whole)
            fields = {"ranks": record.ranks, **vars(record.steps), **vars(record.target)}
            fields[name].setflags(write=True)
            fields[name][row] = WRONG[name]
            with pytest.raises(TreeoptError, match=message):
                dataclasses.replace(record)


def test_merging_many_is_merging_in_turn() -> None:
    """All at once as two at a time, in any order; calibrations without a text count too."""
    whole = sampled(5, texts=9)
    parts = [whole.select(np.arange(start, 9, 3)) for start in range(3)]
    empty = whole.select([])
    once = parts[2].merge(empty, parts[0], parts[1])
    for found in (once, empty.merge(*parts), parts[0].merge(parts[1]).merge(parts[2])):
        np.testing.assert_array_equal(found.ranks, whole.ranks)
        assert found.prompt_ids == whole.prompt_ids
        assert found.steps is not None
        assert found.target is not None
        assert whole.target is not None
        np.testing.assert_array_equal(found.target.probability, whole.target.probability)
    bare = dataclasses.replace(parts[1], steps=None, target=None)
    for first, others in ((empty, (parts[0], bare)), (parts[0], (parts[2], bare)), (empty, (bare, parts[0]))):
        with pytest.raises(TreeoptError, match="per-step trees"):
            first.merge(*others)
