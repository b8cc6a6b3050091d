"""Replay: the steps that a decoder takes with a tree, computed from rank traces.

At row t the decoder emits the root g[t] and the accepted drafts: the longest prefix of row t's ranks that is a path of
the tree. So the steps of any tree follow from the traces: t <- t + 1 + accepted(t). Tokens past the end of a text have
the rank `NONE`, which no path contains, so no step passes the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.files.trees import GivenTree, as_tree
from treeopt.optimize.grow import Growth
from treeopt.optimize.trie import Children
from treeopt.traces import Ranks, TargetTraces
from treeopt.tree import Tree, check_tree_fits

FEWEST = 2  # independent parts of a standard error


@dataclass(frozen=True, eq=False)
class TextSums:
    """Tokens and steps of S texts with one tree or policy.

    Under sampling `tokens` are those that the target's probabilities expect of the text's steps, float64, and `counted`
    the lengths of the texts.
    """

    tokens: NDArray[Any]  # [S]
    steps: NDArray[np.int64]  # [S]
    counted: NDArray[Any] | None = None  # [S]; None where `tokens` are counted

    @property
    def columns(self) -> list[NDArray[Any]]:
        """The arrays that are known, in this order."""
        return [self.tokens, self.steps, *([] if self.counted is None else [self.counted])]

    @property
    def tokens_per_step(self) -> float:
        """tau = sum of tokens / sum of steps (not the mean of ratios); 1.0 where there is no text."""
        steps = self.steps.sum()
        return float(self.tokens.sum() / steps) if steps else 1.0

    @classmethod
    def of_folds(cls, folds: NDArray[np.int64], parts: Sequence[TextSums]) -> TextSums:
        """Sums of all texts from those of each fold, ascending; `folds` int64 [S] are the folds of the texts."""
        order = np.argsort(np.argsort(folds, kind="stable"), kind="stable")
        return cls(*(np.concatenate(columns)[order] for columns in zip(*(part.columns for part in parts), strict=True)))


def standard_error(tokens: NDArray[Any], steps: NDArray[Any]) -> float | None:
    """Standard error of sum of tokens / sum of steps over S independent clusters of texts; None below two.

    That of a ratio estimator: sqrt(S/(S-1) * sum over clusters of (tokens - tau * steps)^2) / sum of steps.
    """
    count, total = len(tokens), float(steps.sum())
    if count < FEWEST or not total:
        return None
    spread = float(((tokens - tokens.sum() / total * steps) ** 2).sum())
    return math.sqrt(spread * count / (count - 1)) / total


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
        lengths = np.diff(self.offsets)
        steps = np.diff(np.concatenate([[0], np.cumsum(self.visited)])[self.offsets])
        if self.expected_drafts is None:
            return TextSums(lengths, steps)
        text = np.repeat(np.arange(len(steps)), lengths)
        tokens = steps + np.bincount(text, weights=self.expected_drafts, minlength=len(steps))
        return TextSums(tokens, steps, lengths)

    @property
    def verified(self) -> NDArray[np.bool_]:
        """bool [P]: the steps with a forward, which a root that is the last token of its text needs not."""
        found = self.visited.copy()
        found[self.offsets[1:][self.offsets[1:] > 0] - 1] = False
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
    return TraceRows.of(calibration).replay(tree)


def children_of(tree: Tree | Growth) -> Children:
    """The children of each node, in the order of the tree or of growth."""
    if isinstance(tree, Growth):
        return tree.children
    parents, last = np.array(tree.parents[1:], np.int64), np.array([path[-1] for path in tree.paths], np.int64)
    return Children.of(parents, last, tree.depth)


def check_drafter(drafter: str, calibration: Calibration) -> None:
    """Raise E223 unless traces and tree (or policy) are of the same drafter."""
    traced = calibration.provenance.drafter_id
    if drafter != traced:
        needed, found = (f"drafter {name}" if name else "the heads alone" for name in (drafter, traced))
        what = f"the tree was made for {needed}, the calibration traced {found}"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="treeopt calibrate with the drafter of the tree")


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


@dataclass(frozen=True, eq=False)
class TraceRows:
    """The traces of S texts, with the target's probabilities where they were sampled."""

    ranks: Ranks  # [P, H]
    offsets: NDArray[np.int64]  # [S+1], of the texts
    target: TargetTraces | None

    @classmethod
    def of(cls, calibration: Calibration, texts: NDArray[np.bool_] | None = None) -> TraceRows:
        """Those of some texts of a calibration (bool [S]); of all where None."""
        ranks, offsets, target = calibration.ranks, calibration.offsets, calibration.target
        if texts is None:
            return cls(ranks, offsets, target)
        lengths = np.diff(offsets)
        chosen = np.flatnonzero(np.repeat(texts, lengths))
        target = None if target is None else target.rows(chosen)
        return cls(ranks[chosen], np.concatenate([[0], np.cumsum(lengths[texts])]), target)

    def replay(self, tree: Tree | Growth) -> Replay:
        """The steps of a tree with all of its nodes, which is not checked to fit."""
        children = children_of(tree)
        [found] = self.replays(children, [children.count + 1])
        return found

    def sums_by_size(self, growth: Growth, sizes: Sequence[int]) -> list[TextSums]:
        """Tokens and steps of each text with the tree of each size; of all nodes where the growth has fewer."""
        return [found.sums for found in self.replays(growth.children, sizes)]

    def replays(self, children: Children, sizes: Sequence[int]) -> Iterator[Replay]:
        """The steps of the trees of the first nodes, as many as each size, root counted."""
        nodes = children.along(self.ranks)
        for last in (min(size - 1, children.count) for size in sizes):
            accepted = (nodes <= last).sum(axis=1, dtype=np.int8)
            visited = visits(accepted)
            expected = None
            if self.target is not None:
                rows, expected = np.flatnonzero(visited), np.zeros(len(visited))
                part = nodes[rows], self.ranks[rows], self.target.rows(rows)
                expected[rows] = children.expected_drafts(*part, last)
            yield Replay(accepted, visited, self.offsets, children.depth, expected)
