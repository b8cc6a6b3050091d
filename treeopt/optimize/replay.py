"""Replay: the steps that a decoder takes with a tree, computed from rank traces.

At row t the decoder emits the root g[t] and the accepted drafts: the longest prefix of row t's ranks that is a path of
the tree. So the steps of any tree follow from the traces: t <- t + 1 + accepted(t). Tokens past the end of a text have
the rank `NONE`, which no path contains, so no step passes the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.tree import Tree, as_tree, check_tree_fits

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
    """

    accepted: NDArray[np.int8]
    visited: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    depth: int

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
        return self.tokens / self.steps if self.steps else 1.0

    def steps_by_sequence(self) -> NDArray[np.int64]:
        """int64 [S]: steps of each sequence."""
        return steps_by_text(self.visited, self.offsets)

    def acceptance_by_depth(self) -> NDArray[np.float64]:
        """float64 [D]: share of steps that accept d drafts or more, d = 1 .. D."""
        counts = np.bincount(self.accepted[self.visited], minlength=self.depth + 1)
        at_least = np.cumsum(counts[::-1])[::-1]
        return at_least[1 : self.depth + 1] / max(self.steps, 1)


def replay(tree: Tree | Iterable[Sequence[int]], calibration: Calibration) -> Replay:
    """Replay `tree`, or the tree of a list of paths, over the traces of `calibration`.

    Raises:
        TreeoptError: E101 where the tree is deeper than the traces; E102 where it has ranks that were not traced;
            E103 where a list is not a tree; E223 where the traces are of another drafter.
    """
    tree = as_tree(tree)
    check_drafter(tree.drafter, calibration)
    check_tree_fits(tree, heads=calibration.num_heads, ranks=calibration.top_k, holder="the calibration")
    accepted = accepted_drafts(tree, calibration.ranks)
    return Replay(accepted, visits(accepted), calibration.offsets, tree.depth)


def steps_by_text(visited: NDArray[np.bool_], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [S]: the steps that begin in each text, whose rows are offsets[s] to offsets[s + 1]."""
    total = np.concatenate([[0], np.cumsum(visited)])
    steps: NDArray[np.int64] = np.diff(total[offsets])
    return steps


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
