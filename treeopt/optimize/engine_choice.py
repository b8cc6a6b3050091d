"""The lengths of chains and the numbers of dynamic trees with the most tokens per second on a machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.drafter import KINDS
from treeopt.errors import Code, TreeoptError
from treeopt.latency import ONE_NODE, LatencyProfile
from treeopt.optimize.budget import Budget, best_budget, budget_at, check_priced, step_seconds
from treeopt.optimize.curve import default_sizes
from treeopt.optimize.engine_replay import DynamicTree, replay_dynamic_tree, replay_mean_tree, replay_stopped_chain
from treeopt.optimize.leviathan import MOST_DRAFTS, replayed_chains
from treeopt.optimize.replay import Replay
from treeopt.policy import STEP_SIZES

WIDTHS = (1, 2, 4, 8, 16)  # of `top_k` that are tried
LEAST_PROBABILITIES = tuple(i / 20 for i in range(20))  # at which a chain may end; 0 never ends one
_GOOD_ENOUGH = 0.995  # of the most tokens per step: below it, a deeper or wider expansion is worth its drafting
MOST_NODES = STEP_SIZES[-1]  # of which places are traced


@dataclass(frozen=True)
class StoppedChain:
    """A chain that ends before improbable drafts.

    Args:
        drafts: its greatest length.
        least: the probability below which a token is not drafted; 0 drafts all.
        replay: the steps.
        budget: their mean seconds, and the speedup; `nodes` is that of the longest chain.
    """

    drafts: int
    least: float
    replay: Replay
    budget: Budget


@dataclass(frozen=True)
class TreeChoice:
    """Numbers of a dynamic tree and its steps.

    Args:
        shape: the numbers; None where decoding without drafts is the fastest.
        replay: the steps, with the likely accepted drafts; None without a shape.
        budget: seconds and speedup; None without a profile.
    """

    shape: DynamicTree | None
    replay: Replay | None
    budget: Budget | None


def check_chains(calibration: Calibration, profile: LatencyProfile) -> None:
    """Raise E223 unless the profile is of the drafter of the traces; chains are priced by trees of either kind."""
    check_priced(profile, calibration, profile.kind or KINDS[0])


def best_chains(calibration: Calibration, profile: LatencyProfile) -> dict[int, Budget]:
    """The fastest chain at each measured batch, at the largest context: nodes are drafts and the root.

    Args:
        calibration: the traces; a chain has the likeliest token of each level, and at most `MOST_DRAFTS` drafts.
        profile: seconds per step of trees of as many nodes.

    Raises:
        TreeoptError: E223 where the profile is of another drafter, E230 where it lacks the one-node step.
    """
    check_chains(calibration, profile)
    return {batch: best_budget(chain_tokens(calibration), profile, batch) for batch in profile.batches}


def chain_tokens(calibration: Calibration) -> NDArray[np.float64]:
    """Tokens per step of chains of 0, 1, 2, ... drafts: float64 [n]."""
    return np.concatenate([[1.0], replayed_chains(calibration)])


def best_stopped_chain(
    calibration: Calibration, profile: LatencyProfile, drafts: int | None = None, *, batch: int = 1
) -> StoppedChain:
    """The fastest chain that ends before improbable drafts, at one batch.

    Args:
        calibration: with traced probabilities.
        profile: as `best_chains`.
        drafts: the greatest length; None tries all.
        batch: texts decoded together, of the profile.

    Raises:
        TreeoptError: as `best_chains` and `replay_stopped_chain`.
    """
    check_chains(calibration, profile)
    most = min(calibration.num_heads, MOST_DRAFTS, profile.largest(batch) - 1)
    seconds = np.array([step_seconds(profile, drafted + 1, batch) for drafted in range(most + 1)])

    def chains() -> Iterator[StoppedChain]:
        for length in range(1, most + 1) if drafts is None else [min(drafts, most)]:
            for least in LEAST_PROBABILITIES:
                replay, drafted = replay_stopped_chain(calibration, length, least)
                # The improbable draft that ends a chain is made too: a step is priced as if it were verified.
                spent = float(seconds[np.minimum(drafted[replay.visited] + 1, length)].mean())
                tokens, overhead = replay.tokens_per_step, spent / float(seconds[0])
                yield StoppedChain(
                    length, least, replay, Budget(length + 1, tokens, spent, overhead, tokens / overhead)
                )

    return max(chains(), key=lambda chain: chain.budget.speedup)  # the shortest and least restrictive of equal ones


def best_tree(calibration: Calibration, profile: LatencyProfile, *, batch: int = 1, narrow: bool = False) -> TreeChoice:
    """The fastest dynamic tree at one batch, at the largest context.

    Args:
        calibration: the traces; without those of per-step trees, the tree is that of the mean probabilities.
        profile: seconds per step of trees of as many nodes, of the kind of the traces.
        batch: texts decoded together.
        narrow: as `best_shape`.

    Raises:
        TreeoptError: E223 where the profile is of another drafter, E230 where it is of another kind of trees, or lacks
            the batch or the one-node step.
    """
    check_priced(profile, calibration, KINDS[calibration.steps is not None])
    largest = min(profile.largest(batch), most_nodes(calibration, narrow=narrow))
    sizes = default_sizes(largest)[1:]
    known = [1.0] + [best_shape(calibration, size, narrow=narrow)[1].tokens_per_step for size in sizes]
    expected = np.interp(np.arange(1, largest + 1), [ONE_NODE, *sizes], known)
    nodes = best_budget(expected, profile, batch).nodes
    if nodes == ONE_NODE:
        return TreeChoice(None, None, budget_at(expected, profile, nodes, batch))
    choice = tree_of(calibration, nodes, narrow=narrow)
    assert choice.replay is not None
    expected[nodes - 1] = choice.replay.tokens_per_step
    return TreeChoice(choice.shape, choice.replay, budget_at(expected, profile, nodes, batch))


def tree_of(calibration: Calibration, nodes: int, *, narrow: bool = False) -> TreeChoice:
    """The dynamic tree of so many nodes, root counted, without a profile."""
    return TreeChoice(*best_shape(calibration, nodes, narrow=narrow), None)


def price_tree(choice: TreeChoice, calibration: Calibration, profile: LatencyProfile) -> dict[int, Budget]:
    """The figures of a dynamic tree at the smallest measured batch.

    Raises:
        TreeoptError: as `best_tree`, and E230 where the size was not measured.
    """
    check_priced(profile, calibration, KINDS[calibration.steps is not None])
    assert choice.shape is not None
    assert choice.replay is not None
    expected = np.full(choice.shape.nodes, choice.replay.tokens_per_step)
    batch = profile.batches[0]
    return {batch: budget_at(expected, profile, choice.shape.nodes, batch)}


def best_shape(calibration: Calibration, nodes: int, *, narrow: bool = False) -> tuple[DynamicTree, Replay]:
    """Steps and top_k of a tree of so many nodes, and its replay.

    Deeper and wider expansions take longer to draft, which no profile has measured. So it is the expansion with the
    fewest candidates among those within 0.5 % of the most tokens per step.

    Args:
        calibration: the traces.
        nodes: 2 to `most_nodes`, root counted.
        narrow: at most `steps` * `top_k` drafts, the limit of TensorRT-LLM.

    Raises:
        TreeoptError: E103 where the number of nodes is out of range.
    """
    most = most_nodes(calibration, narrow=narrow)
    if not 2 <= nodes <= most:
        what = f"a dynamic tree of {nodes} nodes cannot be replayed"
        why = f"places are traced up to {MOST_NODES} nodes, root counted"
        if most < MOST_NODES:
            traced = f"{calibration.num_heads} levels of {calibration.top_k} ranks are traced"
            limit = (
                f"steps * top_k drafts, with a top_k of {WIDTHS[-1]} at most"
                if narrow
                else f"a top_k of {WIDTHS[-1]} at most"
            )
            why = f"{traced}; with {limit}, the largest tree has {most} nodes, root counted"
        raise TreeoptError(Code.TREE_INVALID, what, why=why, fix=f"--nodes from 2 to {most}")
    figure = replay_mean_tree if calibration.steps is None else replay_dynamic_tree
    found = [(shape, figure(calibration, shape)) for shape in _shapes(calibration, nodes, narrow)]
    best = max(replay.tokens_per_step for _, replay in found)
    good = [one for one in found if one[1].tokens_per_step >= _GOOD_ENOUGH * best]
    return min(good, key=lambda one: (one[0].steps * one[0].top_k, one[0].steps))


def most_nodes(calibration: Calibration, *, narrow: bool = False) -> int:
    """The largest number of nodes, root counted, of a dynamic tree of the traced levels and ranks; see `best_shape`."""
    widest = min(calibration.top_k, WIDTHS[-1])
    return min(MOST_NODES, 1 + _candidates(calibration.num_heads, widest, narrow))


def _candidates(steps: int, top_k: int, narrow: bool) -> int:
    """The number of nodes, root not counted, that a tree is chosen from, or the limit of TensorRT-LLM."""
    return steps * top_k if narrow else top_k + top_k**2 * (steps - 1)


def _shapes(calibration: Calibration, nodes: int, narrow: bool) -> Iterator[DynamicTree]:
    """The numbers that engines accept for so many nodes."""
    for steps in range(1, min(calibration.num_heads, nodes - 1) + 1):
        for top_k in sorted({*WIDTHS, calibration.top_k}):
            enough = nodes - 1 <= _candidates(steps, top_k, narrow)
            if enough and top_k <= min(calibration.top_k, WIDTHS[-1]):
                yield DynamicTree(steps, top_k, nodes)
