"""Random traces of per-step trees, and a decoder's loop over them."""

from __future__ import annotations

import dataclasses

import numpy as np
from helpers import make_calibration

from treeopt.calibration import Calibration
from treeopt.defaults import STEP_SIZES
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.policy import TreePolicy
from treeopt.traces import MISS, NONE, StepTraces


def traced(
    seed: int, *, sequences: int = 12, length: int = 40, heads: int = 3, exact: bool = False, drafter: str = "d1"
) -> Calibration:
    """Random places of true paths; where `exact`, estimates are what each size would really bring, then spread out."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, sequences)
    made = make_calibration([rng.geometric(0.5, (n, heads)) - 1 for n in lengths])
    steps = np.minimum(rng.geometric(rng.choice([0.6, 0.1, 0.02], made.positions)[:, None], made.ranks.shape), 200)
    places = np.minimum(np.cumsum(steps, axis=1), MISS)
    node_rank = np.where(made.ranks == NONE, NONE, places).astype(np.uint8)
    expected_tokens = 1 + (node_rank[:, :, None] < np.array(STEP_SIZES)).sum(1).astype(np.float32)
    if not exact:
        expected_tokens = 1 + np.sort(rng.random(expected_tokens.shape) * heads, axis=1).astype(np.float32)
    confidence = np.full(node_rank.shape, 0.5, np.float16)
    provenance = dataclasses.replace(made.provenance, drafter_id=drafter, drafter="d.safetensors")
    return dataclasses.replace(made, provenance=provenance, steps=StepTraces(node_rank, expected_tokens, confidence))


def with_paths(calibration: Calibration, seed: int = 0) -> Calibration:
    """The same calibration with random traces by path tokens."""
    assert calibration.steps is not None
    rng, left = np.random.default_rng(seed), (calibration.ranks != NONE).sum(1)[:, None]
    accepted = np.minimum(np.cumsum(rng.random((calibration.positions, len(STEP_SIZES))) < 0.3, axis=1), left)
    expected = (1 + np.sort(rng.random(accepted.shape) * 3, axis=1)).astype(np.float32)
    more = {"path_accepted": accepted.astype(np.int8), "path_expected": expected}
    return dataclasses.replace(calibration, steps=dataclasses.replace(calibration.steps, **more))


def profile_of(seconds: dict[int, float], **provenance: str) -> LatencyProfile:
    """One batch and context."""
    return LatencyProfile.from_points((LatencyPoint(n, 1, 512, s, s, s) for n, s in seconds.items()), provenance)


def naive(policy: TreePolicy, calibration: Calibration) -> tuple[list[int], list[int]]:
    """Steps of each text and the sizes of all steps, position by position."""
    assert calibration.steps is not None
    steps, sizes = [], []
    estimates = calibration.steps.path_expected if policy.path_tokens else calibration.steps.expected_tokens
    assert estimates is not None
    for s in range(calibration.sequences):
        at, count = int(calibration.offsets[s]), 0
        while at < calibration.offsets[s + 1]:
            size, gain = policy.nodes, -np.inf
            for nodes, cost in policy.size_cost:
                estimated = float(estimates[at][STEP_SIZES.index(nodes)]) - cost
                if estimated > gain:
                    size, gain = nodes, estimated
            accepted = 0
            if calibration.steps.path_accepted is not None and policy.path_tokens:
                accepted = int(calibration.steps.path_accepted[at][STEP_SIZES.index(size)])
            while not policy.path_tokens and (
                accepted < min(policy.depth, calibration.num_heads) and calibration.steps.node_rank[at, accepted] < size
            ):
                accepted += 1
            at, count = at + 1 + accepted, count + 1
            sizes.append(size)
        assert at == calibration.offsets[s + 1]
        steps.append(count)
    return steps, sizes
