"""Runs with `AutoBatch` where memory runs out: the results of the size that fits, and no batch is made twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import Cut
from tiny import chat_base, random_heads

from treeopt.calibrate.pipeline import run_calibration
from treeopt.calibrate.results import Shard
from treeopt.drafting.learn import Learning
from treeopt.errors import Code, TreeoptError
from treeopt.models.auto_batch import AutoBatch
from treeopt.models.base import Base
from treeopt.runs.work import Work
from treeopt.train.distill import distill

PROMPTS = [" ".join(f"w{i + j}" for j in range(1 + i % 5)) for i in range(1, 12)]
NEW = 8


class Limited:
    """A model whose forwards of more than `limit` rows raise the error of CUDA; notes the rows of the others."""

    def __init__(self, base: Base, limit: int) -> None:
        self.base, self.limit = base, limit
        self.rows: list[int] = []
        self._forward = base.model.forward

    def __call__(self, input_ids: torch.Tensor, **options: Any) -> Any:
        if len(input_ids) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if input_ids.shape[1] > 1:  # prompts and whole texts; not the steps of `generate`
            self.rows.append(len(input_ids))
        return self._forward(input_ids, **options)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Limited:
    """A model with memory for 2 texts."""
    base = chat_base(disturbed=0.3)
    made = Limited(base, 2)
    monkeypatch.setattr(base.model, "forward", made)
    return made


def calibrate(limited: Limited, **options: Any) -> Any:
    """Trace two random heads."""
    heads = random_heads(limited.base, 2)
    return run_calibration(limited.base, heads, PROMPTS, max_new_tokens=NEW, **options).calibration


def test_result_is_that_of_the_size_that_fits(limited: Limited) -> None:
    """From 8, memory runs out with 8 and 4: the traces are those of --batch-size 2."""
    said: list[str] = []
    auto = AutoBatch(8, said.append)
    found = calibrate(limited, auto_batch=auto)
    assert (auto.size, len(said)) == (2, 1)
    wanted = calibrate(limited, batch_size=2)
    np.testing.assert_array_equal(found.ranks, wanted.ranks)
    assert (found.prompt_ids, found.token_hashes) == (wanted.prompt_ids, wanted.token_hashes)
    with pytest.raises(torch.OutOfMemoryError):
        calibrate(limited, batch_size=4)


@pytest.mark.slow
def test_every_forward_of_learning_is_halved(limited: Limited) -> None:
    """Sampling, counting and tracing a learned drafter run in forwards of the size that fits."""
    learning = Learning(200, temperature=2.0, levels=3)
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 0.9, "auto_batch": AutoBatch(8)}
    run = run_calibration(limited.base, None, PROMPTS, learning=learning, **options)
    assert run.calibration.sequences == len(PROMPTS)
    assert max(limited.rows) == 2


def test_stored_batches_are_not_made_again(tmp_path: Path, limited: Limited) -> None:
    """A run is cut with memory for all, and resumed with less: two stored batches are read, one is made by halves."""
    target = tmp_path / "out.safetensors"
    limited.limit, left = 4, iter(range(2))

    def progress(*_told: object) -> None:
        if next(left, None) is None:
            raise Cut

    with pytest.raises(Cut):
        calibrate(limited, auto_batch=AutoBatch(4), work=Work(target), progress=progress)
    done = sum(limited.rows)
    limited.limit, limited.rows = 2, []
    work = Work(target, resume=True)
    assert work.chunks == 3
    found = calibrate(limited, auto_batch=AutoBatch(4), work=work)
    assert done + sum(limited.rows) == 2 * len(PROMPTS)  # each text is answered once, and traced once
    np.testing.assert_array_equal(found.ranks, calibrate(limited, batch_size=2).ranks)


def test_a_run_is_resumed_with_auto_alone(tmp_path: Path, limited: Limited) -> None:
    """The batches of an automatic run have its first size: another size is E205, as is auto for a run of a size."""
    target = tmp_path / "out.safetensors"
    for begun, other in (
        ({"auto_batch": AutoBatch(4)}, {"batch_size": 4}),
        ({"batch_size": 4}, {"auto_batch": AutoBatch(4)}),
    ):
        Work(target, overwrite=True).begin({})
        limited.limit = 4
        calibrate(limited, work=Work(target, overwrite=True), **begun)
        with pytest.raises(TreeoptError, match="batch_size") as caught:
            calibrate(limited, work=Work(target, resume=True), **other)
        assert caught.value.code is Code.RESUME_INVALID


def test_shards_have_one_size(limited: Limited) -> None:
    """Shards are joined to the bytes of one run, which no automatic size promises."""
    with pytest.raises(ValueError, match="auto_batch"):
        calibrate(limited, auto_batch=AutoBatch(4), shard=Shard(0, 2))


def test_distilled_texts_are_those_of_the_size_that_fits(tmp_path: Path, limited: Limited) -> None:
    """Distillation halves its forwards too."""
    auto = AutoBatch(8)
    rows = []
    for name, options in (("a", {"auto_batch": auto}), ("b", {"batch_size": 2})):
        distill(limited.base, PROMPTS, tmp_path / f"{name}.jsonl", max_new_tokens=NEW, **options)  # type: ignore[arg-type]
        text = (tmp_path / f"{name}.jsonl").read_text()
        rows.append(text.replace('"batch_size": "auto, from 8"', '"batch_size": 2'))
    assert auto.size == 2
    assert rows[0] == rows[1]
