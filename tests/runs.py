"""Small training runs for tests: settings, texts, bases, kills, and what two equal runs have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import VOCAB, tiny_base, walk

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.train.data import Example, TrainingTexts
from treeopt.train.medusa2 import train_jointly
from treeopt.train.run import METRICS_FILE
from treeopt.train.settings import JointSettings, Settings

SMALL = Settings(num_heads=2, steps=12, batch_size=2, log_every=2, saves=3, holdout=2, learning_rate=1e-2)
JOINT = JointSettings(num_heads=2, steps=12, batch_size=2, log_every=2, saves=3, holdout=2, rank=4, alpha=8.0)


class Cut(KeyboardInterrupt):
    """Stands for a kill."""


def cut_at(step: int) -> Any:
    """A progress callback that ends the run after so many steps."""

    def progress(done: int, *_rest: object) -> None:
        if done == step:
            raise Cut

    return progress


def noise(count: int, seed: int = 0, length: int = 12) -> TrainingTexts:
    """Random texts of different lengths, so that the order of texts shows in the weights."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, length + 1, count)
    examples = [Example(rng.integers(0, VOCAB, n).astype(np.int32), ((1, int(n)),)) for n in lengths]
    return TrainingTexts(tuple(examples), ("noise",), (f"sha{seed}",), 0, 0)


def walks(count: int, length: int = 24) -> TrainingTexts:
    """Texts of `cycle_base`, each from another token on, answered from its third token on."""
    examples = [Example(np.array(walk(i % VOCAB, length), np.int32), ((2, length),)) for i in range(count)]
    return TrainingTexts(tuple(examples), ("walks",), ("sha",), 0, 0)


def tied_base() -> Base:
    """A tiny llama whose LM head is its embedding."""
    return tiny_base("llama", tie_word_embeddings=True)


def metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics, without what a clock measured and the Trainer's own sum, counted a process."""
    lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    clock = ("runtime", "per_second", "total_flos", "train_loss")
    return [{name: value for name, value in line.items() if not name.endswith(clock)} for line in lines]


def assert_same_run(one: Path, other: Path) -> None:
    """Both folders hold the same weights and metrics, and nothing of an unfinished run."""
    for folder in (one, other):
        assert sorted(path.name for path in folder.iterdir()) == [
            "config.json",
            "medusa_lm_head.safetensors",
            "metrics.jsonl",
        ]
    name = "medusa_lm_head.safetensors"
    assert (one / name).read_bytes() == (other / name).read_bytes()
    assert metrics(one) == metrics(other)


def refused(code: Code, *given: Any, **options: Any) -> TreeoptError:
    """The error of a Medusa-2 run, which has this code."""
    with pytest.raises(TreeoptError) as caught:
        train_jointly(*given, **options)
    assert caught.value.code is code
    return caught.value
