"""Replay of the drafts that inference engines make by their own rules: chains, chains that stop, and EAGLE-2's trees.

An engine chooses by a few numbers in place of a tree. Each function gives the steps that it takes on traced texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.optimize.per_step import traced_steps
from treeopt.optimize.replay import Replay, accepted_drafts, visits
from treeopt.tree import Tree

Bools = NDArray[np.bool_]
Bound = Literal["likely", "least", "most"]


@dataclass(frozen=True)
class DynamicTree:
    """The numbers that EAGLE-2's choice of a tree takes (arXiv:2406.16858, section 4), as SGLang names them.

    Level 1 has the `top_k` likeliest tokens. Of the nodes of a level the `top_k` likeliest are expanded, each by its
    `top_k` likeliest tokens, until there are `steps` levels. The tree is the `nodes` - 1 likeliest of all of these
    nodes and the root; the probability of a node is the product along its path.

    Args:
        steps: levels, `--speculative-num-steps`.
        top_k: `--speculative-eagle-topk`.
        nodes: root counted, `--speculative-num-draft-tokens`.

    Raises:
        ValueError: where a number is out of range, or the tree has more nodes than there are candidates.
    """

    steps: int
    top_k: int
    nodes: int

    def __post_init__(self) -> None:
        if min(self.steps, self.top_k) < 1 or self.nodes < 2:
            raise ValueError(f"{self}: steps and top_k are 1 or more, nodes 2 or more")
        if self.nodes - 1 > self.top_k + self.top_k**2 * (self.steps - 1):
            raise ValueError(f"{self}: there are fewer candidates than nodes")

    def replays_exactly(self, levels: int) -> bool:
        """Whether per-step traces of so many levels give the accepted drafts of this tree exactly.

        With `top_k` >= `nodes` - 1 every node of the tree is a candidate, whatever was expanded, so the tree is that of
        the likeliest nodes, which the traces are of. Traces of more levels than `steps` also count deeper nodes. A
        chain, and a tree of one level, follow from the ranks.
        """
        return self.steps == 1 or self.top_k == 1 or (self.top_k >= self.nodes - 1 and self.steps == levels)


def replay_chain(calibration: Calibration, drafts: int) -> Replay:
    """The steps of a chain of `drafts` drafts, each the likeliest token of its level; 0 is decoding without drafts."""
    return _walked(calibration, np.logical_and.accumulate(calibration.ranks[:, :drafts] == 0, axis=1), drafts)


def replay_stopped_chain(calibration: Calibration, drafts: int, least: float) -> tuple[Replay, NDArray[np.int64]]:
    """The steps of a chain that ends before the first token with a probability below `least`, and its drafts.

    The drafts are int64 [P]. After a draft that is wrong no probabilities are traced, and the chain is counted as if it
    reached its greatest length, so an engine drafts no more than this.

    Raises:
        TreeoptError: E220 where the calibration has no probabilities, E303 where there is no text.
    """
    confident = traced_steps(calibration).confidence[:, :drafts] >= least
    right = calibration.ranks[:, :drafts] == 0
    going = np.logical_and.accumulate(confident & right, axis=1)
    accepted = going.sum(1, dtype=np.int64)
    ended = np.minimum(accepted, drafts - 1)  # the level that was not accepted, where there is one
    stopped = ~np.take_along_axis(confident, ended[:, None], axis=1)[:, 0] & (accepted < drafts)
    return _walked(calibration, going, drafts), np.where(stopped, accepted, drafts)


def replay_dynamic_tree(calibration: Calibration, shape: DynamicTree, *, bound: Bound = "likely") -> Replay:
    """The steps with EAGLE-2's trees, by per-step traces.

    The traces hold the place of the true path among the likeliest nodes of all, and not which nodes an engine expands.
    So the accepted drafts of a position are known within bounds, which are equal where `shape.replays_exactly`:

    - `likely`: a path is in the tree where each of its nodes has a rank below `top_k` and its last node is among the
      `nodes` likeliest. An engine leaves out such a path where it did not expand one of its nodes, and it has others in
      the place of likelier nodes that it did not expand. bench/dynamic_trees.py measures the difference.
    - `least`: as well, its inner nodes were certainly expanded. Before a node at depth d with place j come the root,
      its d - 1 ancestors and j - d other nodes. With at most `top_k` others, fewer than `top_k` are at its depth: if
      all of them are, they are its siblings, of which fewer than `top_k` are likelier.
    - `most`: a path is not in the tree where a rank is `top_k` or more, or it is longer than the tree can be.

    Chains and trees of one level follow from the ranks alone. The bounds are of each position; tokens per step of a
    walk through a text need not be in their order, because steps then begin elsewhere.

    Args:
        calibration: the traces.
        shape: the numbers of the engine.
        bound: of the accepted drafts.

    Raises:
        TreeoptError: E220 where the calibration has no traces of per-step trees, E303 where there is no text.
    """
    places = traced_steps(calibration).node_rank[:, : shape.steps].astype(np.int64)
    ranks = calibration.ranks[:, : shape.steps]
    inside = ranks < shape.top_k
    if shape.steps == 1:
        inside = ranks < shape.nodes - 1
    elif bound == "most" or shape.top_k == 1:
        inside = inside[:, : shape.nodes - 1]
    else:
        inside &= places < shape.nodes
        if bound == "least":
            depth = np.arange(1, places.shape[1] + 1)
            inside[:, 1:] &= np.logical_and.accumulate(places - depth <= shape.top_k, axis=1)[:, :-1]
    return _walked(calibration, np.logical_and.accumulate(inside, axis=1), shape.steps)


def mean_dynamic_tree(calibration: Calibration, shape: DynamicTree) -> Tree:
    """EAGLE-2's tree where each level has the mean probabilities of its ranks at every step: a fixed tree.

    It stands for the engine's trees where no per-step traces are known. Equal probabilities are ordered by depth, then
    path.
    """
    chances = calibration.accuracy[:, : shape.top_k]
    first: list[tuple[float, tuple[int, ...]]] = [(float(chance), (rank,)) for rank, chance in enumerate(chances[0])]
    level = sorted(first, key=_order)
    found = list(level)
    for depth in range(1, min(shape.steps, calibration.num_heads)):
        children = [
            (value * float(chance), (*path, rank))
            for value, path in level[: shape.top_k]
            for rank, chance in enumerate(chances[depth])
        ]
        level = sorted(children, key=_order)[: shape.top_k]
        found += children
    chosen = sorted(found, key=_order)[: shape.nodes - 1]
    return Tree.from_paths([path for _, path in chosen])


def replay_mean_tree(calibration: Calibration, shape: DynamicTree) -> Replay:
    """The steps with the tree of `mean_dynamic_tree`."""
    tree = mean_dynamic_tree(calibration, shape)
    accepted = accepted_drafts(tree, calibration.ranks)
    return Replay(accepted, visits(accepted), calibration.offsets, tree.depth)


def _order(node: tuple[float, tuple[int, ...]]) -> tuple[float, int, tuple[int, ...]]:
    """Probability down, then depth and path up."""
    value, path = node
    return -value, len(path), path


def _walked(calibration: Calibration, inside: Bools, depth: int) -> Replay:
    """The replay of paths whose prefixes are in the tree: bool [P, D], true up to the last accepted level."""
    accepted: NDArray[np.int8] = inside.sum(1, dtype=np.int8)
    return Replay(accepted, visits(accepted), calibration.offsets, depth)
