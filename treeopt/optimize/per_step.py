"""Policies of per-step trees: replay over traces, and the policy with the most tokens per second.

The nodes of a step are sorted by their estimated probability, and the tree of N nodes is the first N of them. So a
trace of the true path's positions in that order gives the accepted drafts for every N.
"""

import dataclasses
import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.defaults import KINDS, ONE_NODE, PATH_TOKENS, STEP_SIZES
from treeopt.errors import Code, TreeoptError
from treeopt.files.trees import as_policy
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import Budget, check_priced, drafting_seconds, step_seconds
from treeopt.optimize.replay import Replay, TextSums, check_drafter, replay, visits
from treeopt.optimize.tree_builder import predicted_ends, rounded, source_of
from treeopt.policy import Plan, PolicyExpected, TreePolicy
from treeopt.schedule import Schedule
from treeopt.traces import MISS, NONE, StepTraces
from treeopt.tree import Tree

BINS = 10  # of estimated probability, equally wide
_ROUNDS = 12  # costs change no further by then
_FEWEST_NODES = 2  # of a policy: the root and a draft

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def replay_policy(policy: TreePolicy | str | os.PathLike[str], calibration: Calibration) -> Replay:
    """The steps of a policy on the traces of a calibration.

    Args:
        policy: the policy, or its file.
        calibration: with traces of per-step trees of the policy's drafter.

    Raises:
        TreeoptError: E220 where the calibration has no traces of per-step trees, or of deeper ones; E223 where it is of
            another drafter; as `treeopt.files.trees.as_policy`.
    """
    policy = as_policy(policy)
    check_drafter(policy.drafter, calibration)
    steps = traced_steps(calibration, path_tokens=policy.path_tokens)
    depth = min(policy.depth, calibration.num_heads)
    # Nodes below its depth have taken places that the policy's trees give to others.
    deeper = policy.path_tokens or (steps.node_rank[:, depth:] < MISS).any()
    if depth < calibration.num_heads and deeper:
        what = f"a policy is {depth} drafts deep, and its trees were traced {calibration.num_heads} deep"
        raise TreeoptError(Code.CALIBRATION_INVALID, what, fix="treeopt build, which makes it as deep")
    return _replay(calibration, sizes_of(policy, steps), depth, path_tokens=policy.path_tokens)


def replay_plan(plan: Plan, calibration: Calibration) -> Replay:
    """The steps of a tree or a policy on the traces of a calibration."""
    return replay(plan, calibration) if isinstance(plan, Tree) else replay_policy(plan, calibration)


def replay_schedule(schedule: Schedule, calibration: Calibration, prompts: Sequence[int], *, batch: int = 1) -> Replay:
    """The steps of each text by a schedule, where so many are in progress until it ends and none is longer.

    Args:
        schedule: its plans.
        calibration: of the plans' drafter; with traces of per-step trees where one is a policy.
        prompts: tokens of each text's prompt, which are in the cache when its first step begins.
        batch: 1 for texts that are decoded alone, whose steps these are exactly.
    """
    starts = calibration.offsets[:-1] - np.array(prompts, np.int64)
    context = np.arange(calibration.positions) - np.repeat(starts, np.diff(calibration.offsets))
    which = np.array([schedule.index(batch, tokens) for tokens in range(int(context.max(initial=0)) + 1)])[context]
    accepted: NDArray[np.int8] = np.zeros(calibration.positions, np.int8)
    for number in set(which.tolist()):
        plan, here = schedule.plans[number], which == number
        accepted[here] = replay_plan(plan, calibration).accepted[here]
    return Replay(accepted, visits(accepted), calibration.offsets, schedule.depth)


def sizes_of(policy: TreePolicy, steps: StepTraces) -> Ints:
    """int64 [P]: the size of the policy's tree at each position."""
    sizes = np.array(policy.sizes)
    if len(sizes) == 1:
        return np.full(len(steps.expected_tokens), policy.nodes)
    costs = np.array([cost for _, cost in policy.size_cost])
    return _best_sizes(_expected_tokens(steps, path_tokens=policy.path_tokens), sizes, costs)


def sums_by_size(calibration: Calibration, size: int, *, path_tokens: bool = False) -> TextSums:
    """Tokens and steps of each text with per-step trees of `size` nodes (root counted) or path tokens."""
    if size == ONE_NODE:
        tokens = np.diff(calibration.offsets)
        return TextSums(tokens, tokens)
    return replay_policy(_policy(calibration, size, path_tokens=path_tokens), calibration).sums


def build_policy(calibration: Calibration, size: int, *, path_tokens: bool = False) -> TreePolicy:
    """The policy of one size at every step.

    Args:
        calibration: with traces of per-step trees.
        size: nodes, root counted, 2 to 254; or path tokens, one of `treeopt.defaults.STEP_SIZES` from 2 on.
        path_tokens: whether the size is of path tokens, leaves * (depth + 1).

    Raises:
        TreeoptError: E103 where the number is out of range; E220 where the calibration has no traces of such trees.
    """
    traced_steps(calibration, path_tokens=path_tokens)
    return _described(_policy(calibration, size, path_tokens=path_tokens), calibration)


def _policy(
    calibration: Calibration, size: int, size_cost: tuple[tuple[int, float], ...] = (), *, path_tokens: bool
) -> TreePolicy:
    drafter = calibration.provenance.drafter_id
    return TreePolicy(size, calibration.num_heads, drafter, size_cost, path_tokens=path_tokens)


def fastest_policy(
    calibration: Calibration, profile: LatencyProfile, *, batch: int = 1, context: int | None = None
) -> TreePolicy:
    """The policy with the most tokens per second on a machine.

    Tokens per second is a ratio of sums. Its maximum is found by Dinkelbach's method (1967): a step takes the size with
    the most estimated tokens - rate * seconds, where rate is the tokens per second that this policy reaches in replay.
    Estimates are not exact, so the rate can fall from one round to the next; the best round counts.

    Drafting chooses the nodes of the largest size, of which a step verifies the likeliest. So each largest size is
    tried: a step of fewer nodes then takes its seconds with the drafting of the largest size. The result is compared
    with each fixed size, which is returned where it is faster: estimates of the drafter may mislead the choice. In a
    batch the size is fixed: all rows would share the largest that is best for one of them.
    """
    traced_steps(calibration, path_tokens=profile.path_tokens)
    check_priced(profile, calibration, KINDS[1])
    largest = profile.largest(batch, context)
    # Heads and drafter run before the tree is chosen, so a step of one node takes no less time than one of two.
    sizes = np.array([size for size in STEP_SIZES if _FEWEST_NODES <= size <= max(largest, _FEWEST_NODES)])
    seconds = np.array([step_seconds(profile, int(size), batch, context) for size in sizes])
    drafting = drafting_seconds(profile, sizes, batch, context)
    alone = 1 / step_seconds(profile, ONE_NODE, batch, context)
    # Where drafting takes the same time for all sizes, the largest one loses nothing.
    ends = range(1, len(sizes) + 1) if np.ptp(drafting) > 0 else [len(sizes)]
    rest = seconds - drafting
    found = [_fastest(calibration, profile, sizes[:end], rest[:end] + drafting[end - 1], alone) for end in ends]
    rate, size_cost = max(found, key=operator.itemgetter(0))
    unit = {"path_tokens": profile.path_tokens}
    taus = [sums_by_size(calibration, int(size), **unit).tokens_per_step for size in sizes]
    fixed = [tau / time for tau, time in zip(taus, seconds, strict=True)]
    if max(fixed) > rate or batch > 1:
        return build_policy(calibration, int(sizes[np.argmax(fixed)]), **unit)
    return _described(_policy(calibration, size_cost[-1][0], size_cost, **unit), calibration)


def policy_budget(
    policy: TreePolicy, calibration: Calibration, profile: LatencyProfile, *, batch: int = 1, context: int | None = None
) -> Budget:
    """Expected figures of a policy on a machine; `seconds` is the mean over the steps of its replay.

    Drafting chooses the nodes of the policy's largest size, whatever the size of a step.
    """
    check_priced(profile, calibration, KINDS[1])
    found = replay_policy(policy, calibration)
    sizes, counts = np.unique(sizes_of(policy, traced_steps(calibration))[found.visited], return_counts=True)
    seconds = np.array([step_seconds(profile, int(size), batch, context) for size in sizes])
    largest = drafting_seconds(profile, np.array([policy.nodes]), batch, context)
    seconds += largest - drafting_seconds(profile, sizes, batch, context)
    mean, alone = float(seconds @ counts / counts.sum()), step_seconds(profile, ONE_NODE, batch, context)
    return Budget.of(policy.nodes, found.tokens_per_step, mean, alone)


def _fastest(
    calibration: Calibration, profile: LatencyProfile, sizes: Ints, seconds: Floats, rate: float
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The most tokens per second in replay, from the `rate` without drafts on, and the nodes and cost of each size."""
    paths, depth = profile.path_tokens, calibration.num_heads
    estimates = _expected_tokens(traced_steps(calibration, path_tokens=paths), path_tokens=paths)
    reached, value, largest = 0.0, rate, _FEWEST_NODES
    for _ in range(_ROUNDS):
        chosen = _best_sizes(estimates, sizes, rate * seconds)
        replayed = _replay(calibration, chosen, depth, path_tokens=paths)
        begun, expected = replayed.visited, replayed.expected_drafts
        tokens = len(chosen) if expected is None else replayed.steps + expected.sum()
        found = tokens / seconds[np.searchsorted(sizes, chosen[begun])].sum()
        if found <= reached:
            break
        reached, value, largest = found, rate, chosen[begun].max()
        rate = found
    used = sizes[sizes <= max(largest, _FEWEST_NODES)]
    costs = tuple((int(size), rounded(value * time)) for size, time in zip(used, seconds, strict=False))
    return reached, costs


def _described(policy: TreePolicy, calibration: Calibration) -> TreePolicy:
    """The policy with its expected tokens per step and its source."""
    steps, found = traced_steps(calibration), replay_policy(policy, calibration)
    sizes = sizes_of(policy, steps)[found.visited]
    begun = _expected_tokens(steps, path_tokens=policy.path_tokens)[found.visited]
    estimated = np.array([np.interp(size, STEP_SIZES, row) for size, row in zip(sizes, begun, strict=True)])
    expected = PolicyExpected(
        rounded(found.tokens_per_step),
        rounded(float(estimated.mean())),
        rounded(float(sizes.mean())),
        **predicted_ends(calibration, found.sums, policy.depth),
    )
    return dataclasses.replace(policy, expected=expected, source=source_of(calibration))


def traced_steps(calibration: Calibration, *, path_tokens: bool = False) -> StepTraces:
    """The traces of per-step trees, also by path tokens; E220 where there are none, E303 where there is no text."""
    if calibration.steps is None or (path_tokens and calibration.steps.path_accepted is None):
        what = f"the calibration has no traces of per-step trees{f' by {PATH_TOKENS}' * path_tokens}"
        raise TreeoptError(
            Code.CALIBRATION_INVALID,
            what,
            why="a policy is replayed over these traces"
            + ", which a model that verifies paths as a batch has" * path_tokens,
            fix="treeopt calibrate --kind dynamic, with the same --drafter",
        )
    if not calibration.positions:
        raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text")
    return calibration.steps


def _expected_tokens(steps: StepTraces, *, path_tokens: bool) -> NDArray[np.float32]:
    """float32 [P, len(STEP_SIZES)], of trees of these sizes."""
    if not path_tokens:
        return steps.expected_tokens
    assert steps.path_expected is not None
    return steps.path_expected


def _best_sizes(expected_tokens: NDArray[np.float32], sizes: Ints, size_cost: Floats) -> Ints:
    """int64 [P]: the size with the greatest estimated tokens - cost; the smallest of equal ones."""
    tokens = expected_tokens[:, np.searchsorted(STEP_SIZES, sizes)]
    chosen: Ints = sizes[(tokens - size_cost).argmax(1)]
    return chosen


def _replay(calibration: Calibration, sizes: Ints, depth: int, *, path_tokens: bool) -> Replay:
    """The steps with a tree of this size at each position, int64 [P].

    By path tokens accepted drafts are counted on sampled texts too: places of other candidates are not traced.
    """
    assert calibration.steps is not None
    if path_tokens:
        assert calibration.steps.path_accepted is not None
        which = np.searchsorted(STEP_SIZES, sizes)[:, None]
        accepted = np.take_along_axis(calibration.steps.path_accepted, which, axis=1)[:, 0]
        return Replay(accepted, visits(accepted), calibration.offsets, depth)
    accepted = (calibration.steps.node_rank[:, :depth] < sizes[:, None]).sum(1).astype(np.int8)
    visited = visits(accepted)
    return Replay(accepted, visited, calibration.offsets, depth, _expected_drafts(calibration, sizes, depth, visited))


def _expected_drafts(calibration: Calibration, sizes: Ints, depth: int, visited: NDArray[np.bool_]) -> Floats | None:
    """float64 [P]: as `Replay.expected_drafts`; a candidate whose probability was not traced counts on the text."""
    steps, target = calibration.steps, calibration.target
    if target is None or target.places is None or steps is None:
        return None
    rows = np.flatnonzero(visited)
    size = sizes[rows, None]
    inside = target.places[rows, :depth] < size[:, :, None]
    expected = np.where(inside, target.probability[rows, :depth], 0).sum(axis=(1, 2), dtype=np.float64)
    untraced = calibration.ranks[rows, :depth] >= target.ranks
    expected += (untraced & (steps.node_rank[rows, :depth] < size)).sum(axis=1)
    found = np.zeros(len(visited))
    found[rows] = expected
    return found


def calibration_error(calibration: Calibration) -> Floats:
    """float64 [H]: expected calibration error of the most likely guess of each level."""
    assert calibration.steps is not None
    confidence = calibration.steps.confidence.astype(np.float64)
    return binned_errors(confidence, calibration.ranks == 0, calibration.ranks != NONE)


def binned_errors(confidence: Floats, right: NDArray[np.bool_], known: NDArray[np.bool_]) -> Floats:
    """float64 [L]: expected calibration error of guesses with these confidences [n, L], of those that are `known`.

    It is the mean over guesses of |estimated - correct| of their bins; a level without guesses has none.
    """
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)

    def by_bin(weights: NDArray[Any]) -> Floats:
        return np.stack([np.bincount(level, weight, BINS) for level, weight in zip(bins.T, weights.T, strict=True)])

    gaps = np.abs(by_bin(np.where(known, confidence, 0.0)) - by_bin(right & known))
    error: Floats = gaps.sum(1) / np.maximum(known.sum(0), 1)
    return error
