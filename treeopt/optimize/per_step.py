"""Policies: trees chosen anew at every step, replayed exactly from traces of which node comes when.

The likeliest nodes of one step come in one order, whatever the budget. So a trace of the true path's places in that
order says for every number of nodes what would have been accepted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration, StepTraces
from treeopt.errors import Code, TreeoptError
from treeopt.latency import ONE_NODE, LatencyProfile
from treeopt.optimize.intervals import by_text, prediction_interval
from treeopt.optimize.replay import Replay, check_drafter, visits
from treeopt.optimize.tree_builder import calibration_source, rounded
from treeopt.policy import STEP_SIZES, PolicyExpected, TreePolicy
from treeopt.version import VERSION

_ROUNDS = 12  # by then the costs stop changing
_FEWEST_NODES = 2  # of a policy: the root and a draft

Ints = NDArray[np.int64]


def replay_policy(policy: TreePolicy, calibration: Calibration) -> Replay:
    """Run a policy over the traces of `calibration`.

    Raises:
        TreeoptError: E220 where the calibration did not trace trees of steps; E223 where it is of another drafter.
    """
    check_drafter(policy.drafter, calibration)
    steps = traced_steps(calibration)
    depth = min(policy.depth, calibration.num_heads)
    accepted = _accepted(steps, sizes_of(policy, steps), depth)
    return Replay(accepted, visits(accepted), calibration.offsets, depth)


def sizes_of(policy: TreePolicy, steps: StepTraces) -> Ints:
    """int64 [P]: nodes that the policy takes at each position."""
    sizes = np.array(policy.sizes)
    if len(sizes) == 1:
        return np.full(len(steps.expected_tokens), policy.nodes)
    return _worth(steps, sizes, np.array([price for _, price in policy.size_cost]))


def steps_by_size(calibration: Calibration, nodes: int) -> Ints:
    """int64 [S]: steps that each text takes with trees of so many nodes, the root alone being 1."""
    if nodes == ONE_NODE:
        return np.diff(calibration.offsets)
    policy = TreePolicy(nodes, calibration.num_heads, calibration.provenance.drafter_id)
    return replay_policy(policy, calibration).steps_by_sequence()


def build_policy(calibration: Calibration, nodes: int) -> TreePolicy:
    """The policy of so many nodes at every step, with what is expected of it.

    Raises:
        TreeoptError: E103 where the number is out of range; E220 where the calibration did not trace trees of steps.
    """
    traced_steps(calibration)
    return _described(TreePolicy(nodes, calibration.num_heads, calibration.provenance.drafter_id), calibration)


def fastest_policy(
    calibration: Calibration,
    profile: LatencyProfile,
    *,
    batch: int = 1,
    context: int | None = None,
) -> TreePolicy:
    """The policy that takes at each step the size that is worth its time on a machine.

    Tokens a second are a ratio of sums, so the best policy values time at its own rate (Dinkelbach 1967): a step takes
    the size with the most estimated tokens less rate * seconds. The rate is found by replay; estimates being what they
    are, the rates of a round may fall, so the best round counts.

    Args:
        calibration: the traces.
        profile: seconds of a step by the nodes of its tree.
        batch: of the profile.
        context: of the profile; its longest where None.

    Raises:
        TreeoptError: E220 where the calibration did not trace trees of steps; E230 where the profile lacks something.
    """
    steps, depth = traced_steps(calibration), calibration.num_heads
    largest = profile.largest(batch, context)
    # A step that chooses its tree has run heads and drafter by then, so one node costs it no less than two.
    sizes = np.array([size for size in STEP_SIZES if _FEWEST_NODES <= size <= max(largest, _FEWEST_NODES)])
    seconds = np.array([profile.seconds(int(size), batch, context) for size in sizes])
    rate, reached = 1 / profile.seconds(ONE_NODE, batch, context), 0.0
    for _ in range(_ROUNDS):
        chosen = _worth(steps, sizes, rate * seconds)
        begun = visits(_accepted(steps, chosen, depth))
        found = calibration.positions / seconds[np.searchsorted(sizes, chosen[begun])].sum()
        if found <= reached:
            break
        reached, value, largest = found, rate, chosen[begun].max()
        rate = found
    used = sizes[sizes <= max(largest, _FEWEST_NODES)]
    size_cost = tuple((int(size), rounded(value * one)) for size, one in zip(used, seconds, strict=False))
    policy = TreePolicy(int(used[-1]), depth, calibration.provenance.drafter_id, size_cost)
    return _described(policy, calibration)


def _described(policy: TreePolicy, calibration: Calibration) -> TreePolicy:
    """The policy with what is expected of it and what it was made from."""
    steps, found = traced_steps(calibration), replay_policy(policy, calibration)
    sizes = sizes_of(policy, steps)[found.visited]
    begun = steps.expected_tokens[found.visited]
    mass = np.array([np.interp(size, STEP_SIZES, row) for size, row in zip(sizes, begun, strict=True)])
    tokens, used = np.diff(calibration.offsets), found.steps_by_sequence()
    low = high = None
    interval = prediction_interval(*by_text(calibration.token_hashes, tokens, used))
    if interval is not None:
        low, high = rounded(max(interval.low, 0.0)), rounded(interval.high)
    expected = PolicyExpected(
        rounded(found.tokens_per_step), rounded(float(mass.mean())), rounded(float(sizes.mean())), low, high
    )
    source = {"made_by": f"treeopt {VERSION}", "calibration": calibration_source(calibration)}
    if calibration.provenance.drafter:
        source["drafter"] = calibration.provenance.drafter
    return TreePolicy(policy.nodes, policy.depth, policy.drafter, policy.size_cost, expected, source)


def traced_steps(calibration: Calibration) -> StepTraces:
    """The traces of trees chosen per step.

    Raises:
        TreeoptError: E220 where there are none, E303 where there is no text.
    """
    if calibration.steps is None:
        what = "the calibration holds no traces of trees chosen per step"
        raise TreeoptError(
            Code.CALIBRATION_INVALID,
            what,
            why="only they say what trees that differ from step to step would have yielded",
            fix="treeopt calibrate --kind dynamic, with the --drafter that this one has",
        )
    if not calibration.positions:
        raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text")
    return calibration.steps


def _worth(steps: StepTraces, sizes: Ints, size_cost: NDArray[np.float64]) -> Ints:
    """int64 [P]: the size with the most estimated tokens above its price; the smallest of equal ones."""
    mass = steps.expected_tokens[:, np.searchsorted(STEP_SIZES, sizes)]
    chosen: Ints = sizes[(mass - size_cost).argmax(1)]
    return chosen


def _accepted(steps: StepTraces, sizes: Ints, depth: int) -> NDArray[np.int8]:
    """int8 [P]: drafts accepted at each position by trees of these sizes."""
    inside: NDArray[np.bool_] = steps.node_rank[:, :depth] < sizes[:, None]
    accepted: NDArray[np.int8] = inside.sum(1).astype(np.int8)
    return accepted
