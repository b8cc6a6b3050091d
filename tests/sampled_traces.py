"""Random traces of sampled texts: true ranks drawn from the probabilities of the candidates, and per-step places."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from helpers import make_calibration

from treeopt.calibration import Calibration
from treeopt.defaults import STEP_SIZES
from treeopt.traces import MISS, NONE, StepTraces, TargetTraces

LEVELS, RANKS = 3, 6
TRACED = 4  # candidates with a traced probability; ranks 4 and 5 are counted


def sampled(seed: int, *, texts: int = 12, length: int = 30, traced: int = TRACED, levels: int = LEVELS) -> Calibration:
    """Random traces: true ranks that are drawn from the probabilities of the candidates, and per-step places."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, texts)
    total = int(lengths.sum())
    p = rng.dirichlet(np.geomspace(1.0, 0.1, RANKS + 1), (total, levels))  # the last one is no candidate
    drawn = (p.cumsum(axis=2) < rng.random((total, levels, 1))).sum(axis=2)
    made = make_calibration(np.split(drawn, np.cumsum(lengths)[:-1]), top_k=RANKS)
    probability = np.where((made.ranks == NONE)[:, :, None], 0, p[:, :, :traced]).astype(np.float16)
    return with_places(dataclasses.replace(made, target=TargetTraces(probability)), rng)


def with_places(made: Calibration, rng: np.random.Generator) -> Calibration:
    """The calibration with random per-step trees: the candidates' places rise with rank and level."""
    assert made.target is not None
    count, levels, traced = made.target.probability.shape
    places = np.zeros((count, levels, traced), np.int64)
    node_rank = np.zeros((count, levels), np.int64)
    for i, level in itertools.product(range(count), range(levels)):
        parent = 0 if level == 0 else node_rank[i, level - 1]
        row = np.minimum(parent + rng.integers(1, 9, RANKS).cumsum(), MISS) if parent < MISS else np.full(RANKS, MISS)
        places[i, level] = row[:traced]
        rank = made.ranks[i, level]
        node_rank[i, level] = NONE if rank == NONE else MISS if rank >= RANKS else row[rank]
    estimates = 1 + np.sort(rng.random((count, len(STEP_SIZES))), axis=1).astype(np.float32)
    steps = StepTraces(node_rank.astype(np.uint8), estimates, np.full((count, levels), 0.5, np.float16))
    target = dataclasses.replace(made.target, places=places.astype(np.uint8))
    provenance = dataclasses.replace(made.provenance, settings={"answers": "sampled", "temperature": 0.7})
    return dataclasses.replace(made, steps=steps, target=target, provenance=provenance)


def of_drafter(calibration: Calibration) -> Calibration:
    """The same traces, of a drafter, which policies need."""
    provenance = dataclasses.replace(calibration.provenance, drafter_id="d1", drafter="d.safetensors")
    return dataclasses.replace(calibration, provenance=provenance)
