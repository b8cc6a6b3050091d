"""Replay: run a tree over rank traces, exactly as the decoder would step through the same text.

At row t the decoder emits the root g[t] and every draft below it that is right: the longest prefix of row t's ranks
that is a path of the tree. So the steps of any tree follow from the traces alone: t <- t + 1 + accepted(t).
Rows past the end of a text are `NONE`, which no path contains, so a step never runs past it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.tree import Tree, as_tree, check_tree_fits

_CHUNK = 1 << 16  # positions walked at once: the working arrays stay in the processor's cache
_DOUBLINGS = 4  # of the steps that a walk takes at a time


@dataclass(frozen=True)
class Replay:
    """What a tree does on traces of P positions in S sequences.

    Args:
        accepted: int8 [P], drafts that would be accepted if a step began at this position.
        visited: bool [P], whether a step does begin there.
        offsets: int64 [S+1], as in the calibration.
        depth: D of the tree.
    """

    accepted: NDArray[np.int8]
    visited: NDArray[np.bool_]
    offsets: NDArray[np.int64]
    depth: int

    @property
    def tokens(self) -> int:
        """All tokens of all sequences."""
        return int(self.offsets[-1])

    @property
    def steps(self) -> int:
        """Verifications of all sequences."""
        return int(np.count_nonzero(self.visited))

    @property
    def tokens_per_step(self) -> float:
        """tau = all tokens / all steps (not the mean of ratios); 1.0 where there is no text."""
        return self.tokens / self.steps if self.steps else 1.0

    def steps_by_sequence(self) -> NDArray[np.int64]:
        """int64 [S]."""
        total = np.concatenate([[0], np.cumsum(self.visited)])
        steps: NDArray[np.int64] = np.diff(total[self.offsets])
        return steps

    def acceptance_by_depth(self) -> NDArray[np.float64]:
        """float64 [D]: share of steps that accept d drafts or more, d = 1 .. D."""
        counts = np.bincount(self.accepted[self.visited], minlength=self.depth + 1)
        at_least = np.cumsum(counts[::-1])[::-1]
        return at_least[1 : self.depth + 1] / max(self.steps, 1)


def replay(tree: Tree | Iterable[Sequence[int]], calibration: Calibration) -> Replay:
    """Run `tree`, or the tree of a list of paths, over the traces of `calibration`.

    Raises:
        TreeoptError: E101 where the tree is deeper than the traces' heads; E102 where it has ranks that were not kept;
            E103 where a list is not a tree; E223 where it is of another drafter.
    """
    tree = as_tree(tree)
    check_drafter(tree.drafter, calibration)
    check_tree_fits(tree, heads=calibration.num_heads, ranks=calibration.top_k, holder="the calibration")
    accepted = accepted_drafts(tree, calibration.ranks)
    return Replay(accepted, visits(accepted), calibration.offsets, tree.depth)


def check_drafter(drafter: str, calibration: Calibration) -> None:
    """Raise E223 unless traces and tree (or policy) are of the same drafter."""
    traced = calibration.provenance.drafter_id
    if drafter != traced:
        made, told = (f"drafter {name}" if name else "the heads' plain guesses" for name in (drafter, traced))
        what = f"the tree was made for {made}, the calibration traced {told}"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="treeopt calibrate with the tree's own drafter")


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
            # A child's index is larger than its parent's, and a walk that has left the tree stays at 0.
            np.maximum(deepest[start : start + _CHUNK], node, out=deepest[start : start + _CHUNK], casting="unsafe")
    return deepest


def accepted_drafts(tree: Tree, ranks: NDArray[np.uint8]) -> NDArray[np.int8]:
    """int8 [P]: length of the longest prefix of each row of `ranks` that is a path of the tree."""
    return np.array(tree.depths, np.int8)[deepest_nodes(tree, ranks)]


def _child_table(tree: Tree) -> NDArray[np.intp]:
    """[N+1, top_k+1]: the child of a node by rank; node 0 where there is none.

    A walk that left the tree must not come back through the root's children, so the root's own row is moved to index
    N and row 0 leads nowhere; the walk starts at N. The last column takes every rank the tree does not have.
    """
    table = np.zeros((tree.nodes + 1, tree.max_rank + 2), np.intp)
    for node, path in enumerate(tree.paths, start=1):
        table[tree.parents[node] or tree.nodes, path[-1]] = node
    return table


def visits(accepted: NDArray[np.int8]) -> NDArray[np.bool_]:
    """bool [P]: where steps begin. A step ends at most at the end of its text, so one walk runs through all texts.

    The walk takes `2 ** _DOUBLINGS` steps at a time; those between follow for all of them at once.
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
