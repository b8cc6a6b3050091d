"""Replay: the steps that a decoder takes with a tree, computed from rank traces.

At row t the decoder emits the root g[t] and the accepted drafts: the longest prefix of row t's ranks that is a path of
the tree. So the steps of any tree follow from the traces: t <- t + 1 + accepted(t). Tokens past the end of a text have
the rank `NONE`, which no path contains, so no step passes the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.files.trees import GivenTree, as_tree
from treeopt.optimize.children import Children
from treeopt.optimize.sums import TextSums
from treeopt.traces import Ranks, TargetTraces
from treeopt.tree import Tree, check_tree_fits

_CHUNK = 1 << 16  # positions walked at once, so that the arrays fit into the processor's cache
_DOUBLINGS = 4  # a walk advances 2 ** _DOUBLINGS steps at a time


@dataclass(frozen=True)
class Replay:
    """The steps of a tree on traces of P positions in S sequences.

    Args:
        accepted: int8 [P], drafts that a step accepts if it begins at this position.
        visited: bool [P], whether a step begins at this position.
        offsets: int64 [S+1], as in the calibration.
        depth: D of the tree.
        expected_drafts: float64 [P], the drafts that the target's probabilities expect to be accepted at each visited
            position, 0 at the others; None where the texts were not sampled. With it, `tokens_per_step` is the mean of
            1 + `expected_drafts` over the steps, which has the mean of the count and a smaller variance.
    """

    accepted: NDArray[np.int8]
    visited: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    depth: int
    expected_drafts: NDArray[np.float64] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.offsets[-1])

    @property
    def steps(self) -> int:
        """Steps of all sequences."""
        return int(np.count_nonzero(self.visited))

    @property
    def tokens_per_step(self) -> float:
        """tau = sum of tokens / sum of steps (not the mean of ratios); 1.0 where there is no text."""
        return self.sums.tokens_per_step

    @property
    def sums(self) -> TextSums:
        """Tokens and steps of each text."""
        return text_sums(self.visited, self.offsets, self.expected_drafts)

    @property
    def verified(self) -> NDArray[np.bool_]:
        """bool [P]: the steps with a forward, which a root that is the last token of its text needs not."""
        found = self.visited.copy()
        found[self.offsets[1:] - 1] = False
        return found

    @property
    def histogram(self) -> tuple[int, ...]:
        """[D+1]: verified steps with k accepted drafts, comparable to `DraftMetrics.acceptance_histogram`.

        There are none of the one-node tree. A policy may give a step one node; replay does not know its size and counts
        it as a step that accepts none.
        """
        if not self.depth:
            return (0,)
        return tuple(np.bincount(self.accepted[self.verified], minlength=self.depth + 1).tolist())

    def steps_by_sequence(self) -> NDArray[np.int64]:
        """int64 [S]: steps of each sequence."""
        return self.sums.steps

    def acceptance_by_depth(self) -> NDArray[np.float64]:
        """float64 [D]: share of steps that accept d drafts or more, d = 1 .. D."""
        counts = np.bincount(self.accepted[self.visited], minlength=self.depth + 1)
        at_least = np.cumsum(counts[::-1])[::-1]
        return at_least[1 : self.depth + 1] / max(self.steps, 1)


def replay(tree: GivenTree, calibration: Calibration) -> Replay:
    """Replay a tree over the traces of `calibration`.

    Raises:
        TreeoptError: E101 where the tree is deeper than the traces; E102 where it has ranks that were not traced;
            E223 where the traces are of another drafter; as `treeopt.files.trees.as_tree`.
    """
    tree = as_tree(tree)
    check_drafter(tree.drafter, calibration)
    check_tree_fits(tree, heads=calibration.num_heads, ranks=calibration.top_k, holder="the calibration")
    accepted = accepted_drafts(tree, calibration.ranks)
    visited = visits(accepted)
    expected = expected_drafts(tree, calibration.ranks, calibration.target, visited)
    return Replay(accepted, visited, calibration.offsets, tree.depth, expected)


def text_sums(visited: NDArray[np.bool_], offsets: NDArray[np.int64], expected: NDArray[np.float64] | None) -> TextSums:
    """Tokens and steps of each text.

    Args:
        visited: bool [P], whether a step begins at this position.
        offsets: int64 [S+1], of the texts.
        expected: float64 [P], expected drafts of each step, 0 at positions that are not visited; None for the tokens of
            the texts.
    """
    steps = np.diff(np.concatenate([[0], np.cumsum(visited)])[offsets])
    if expected is None:
        return TextSums(np.diff(offsets), steps)
    text = np.repeat(np.arange(len(steps)), np.diff(offsets))
    tokens = steps + np.bincount(text, weights=expected, minlength=len(steps))
    return TextSums(tokens, steps, np.diff(offsets))


def expected_shares(tree: Tree, ranks: Ranks, target: TargetTraces) -> list[float]:
    """For each path the share of the steps that accept it, as the target's probabilities expect."""
    children, rows = _children(tree), np.flatnonzero(visits(accepted_drafts(tree, ranks)))
    nodes, part = children.along(ranks[rows]), target.rows(rows)
    sums = np.zeros((tree.nodes + 1, max(target.ranks, tree.max_rank + 1)))  # the last row: off the tree
    parent = np.zeros(len(rows), np.int32)
    for level in range(tree.depth):
        np.add.at(sums[:, : target.ranks], parent, part.probability[:, level].astype(np.float64))
        untraced = (ranks[rows, level] >= target.ranks) & (ranks[rows, level] < sums.shape[1])
        np.add.at(sums, (parent[untraced], ranks[rows, level][untraced]), 1.0)
        parent = nodes[:, level]
    pairs = zip(tree.parents[1:], tree.paths, strict=True)
    return [float(sums[above, path[-1]] / max(len(rows), 1)) for above, path in pairs]


def expected_drafts(
    tree: Tree, ranks: Ranks, target: TargetTraces | None, visited: NDArray[np.bool_]
) -> NDArray[np.float64] | None:
    """float64 [P]: `Children.expected_drafts` of the tree at visited positions; None without target probabilities."""
    if target is None:
        return None
    children, chosen = _children(tree), np.flatnonzero(visited)
    found = np.zeros(len(ranks))
    found[chosen] = children.expected_drafts(children.along(ranks[chosen]), ranks[chosen], target.rows(chosen))
    return found


def _children(tree: Tree) -> Children:
    parents, last = np.array(tree.parents[1:], np.int64), np.array([path[-1] for path in tree.paths], np.int64)
    return Children.of(parents, last, tree.depth)


def check_drafter(drafter: str, calibration: Calibration) -> None:
    """Raise E223 unless traces and tree (or policy) are of the same drafter."""
    traced = calibration.provenance.drafter_id
    if drafter != traced:
        needed, found = (f"drafter {name}" if name else "the heads alone" for name in (drafter, traced))
        what = f"the tree was made for {needed}, the calibration traced {found}"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="treeopt calibrate with the drafter of the tree")


def deepest_nodes(tree: Tree, ranks: NDArray[np.uint8]) -> NDArray[np.int32]:
    """int32 [P]: the node of the longest prefix of each row of `ranks` that is a path of the tree; the root if none."""
    table = _child_table(tree)
    width = table.shape[1] - 1
    deepest = np.zeros(len(ranks), np.int32)
    for start in range(0, len(ranks), _CHUNK):
        chunk = ranks[start : start + _CHUNK]
        node = np.full(len(chunk), tree.nodes, np.intp)
        for depth in range(tree.depth):
            node = table[node, np.minimum(chunk[:, depth], width)]
            # A child's index is larger than its parent's; a walk that has left the tree stays at 0.
            np.maximum(deepest[start : start + _CHUNK], node, out=deepest[start : start + _CHUNK], casting="unsafe")
    return deepest


def accepted_drafts(tree: Tree, ranks: NDArray[np.uint8]) -> NDArray[np.int8]:
    """int8 [P]: length of the longest prefix of each row of `ranks` that is a path of the tree."""
    return np.array(tree.depths, np.int8)[deepest_nodes(tree, ranks)]


def _child_table(tree: Tree) -> NDArray[np.intp]:
    """[N+1, top_k+1]: the child of a node by rank; node 0 where there is none.

    A walk that has left the tree must not return through the root's children. So row 0 holds zeros, the children of the
    root are in row N, and a walk starts at N. The last column is for all ranks that are not in the tree.
    """
    table = np.zeros((tree.nodes + 1, tree.max_rank + 2), np.intp)
    for node, path in enumerate(tree.paths, start=1):
        table[tree.parents[node] or tree.nodes, path[-1]] = node
    return table


def visits(accepted: NDArray[np.int8]) -> NDArray[np.bool_]:
    """bool [P]: the positions where steps begin. No step passes the end of its text, so one walk covers all texts.

    The walk advances `2 ** _DOUBLINGS` steps at a time; then the steps in between are filled in for all at once.
    """
    end = len(accepted)
    begins = np.arange(1, end + 1) + accepted  # of the next step
    jumps = [np.append(np.minimum(begins, end), end)]
    for _ in range(_DOUBLINGS):
        jumps.append(jumps[-1][jumps[-1]])
    walked, position, farthest = [], 0, jumps.pop()
    while position < end:
        walked.append(position)
        position = farthest.item(position)
    found: NDArray[np.int64] = np.array(walked, np.int64)
    for jump in reversed(jumps):
        found = np.concatenate([found, jump[found]])
    visited = np.zeros(end + 1, np.bool_)
    visited[found] = True
    return visited[:end]
