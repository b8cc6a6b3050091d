"""Random dense trees against optimised sparse ones: tokens per step by nodes (arXiv:2401.10774, figure 4).

A dense tree takes the s_k likeliest candidates of each level k after every node of the level above, the Cartesian
product of section 2.1.2. A sparse tree of as many nodes spends them on likelier paths. Sparse trees are judged on texts
that were left out of their fit. Dense trees are not fitted; the best of many is chosen on the texts that it is judged
on, so its figure is slightly too high. The method of the sparse trees is chosen on the same folds that its figure is
of, which makes that slightly too high as well (two methods, the Medusa tree and one other, are printed).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeopt.calibration import Calibration
from treeopt.defaults import DEFAULT_VALUES, DEFAULT_WEIGHTS, DENSE_TREES, FEWEST_DENSE, LARGEST_DENSE, SWEEP_NODES
from treeopt.drafter import KINDS
from treeopt.latency import ONE_NODE
from treeopt.optimize.budget import check_priced
from treeopt.optimize.curve import Timing, default_sizes
from treeopt.optimize.intervals import Interval, by_text, difference_interval
from treeopt.optimize.methods import MEDUSA, Method, candidates
from treeopt.optimize.refine import Limits
from treeopt.optimize.select_method import Fitter
from treeopt.optimize.sums import TextSums
from treeopt.optimize.sweep_limits import check_folds, check_reached, check_sizes
from treeopt.optimize.trace_rows import TraceRows
from treeopt.optimize.tree_builder import DEFAULT_TOP_K, tree_limits
from treeopt.progress import Progress, silent
from treeopt.sampling import check_seed
from treeopt.tree import Path, Tree

Widths = tuple[int, ...]  # s_1, s_2, ... of the levels of a dense tree


@dataclass(frozen=True)
class DensePoint:
    """One dense tree.

    Args:
        widths: s_1 to s_D.
        nodes: of the tree, root counted.
        tokens_per_step: by replay over all texts.
        sparse: tokens per step, cross-validated, of the optimised sparse tree of as many nodes.
        overhead: seconds of a step / seconds of a step of one node; None without a latency profile.
        speedup: tokens per step / overhead; None without a latency profile.
    """

    widths: Widths
    nodes: int
    tokens_per_step: float
    sparse: float
    overhead: float | None
    speedup: float | None


@dataclass(frozen=True)
class SparsePoint:
    """A sparse tree of `nodes` nodes (root counted) by a method; the figures as of `DensePoint`, cross-validated."""

    method: str
    nodes: int
    tokens_per_step: float
    overhead: float | None
    speedup: float | None


@dataclass(frozen=True)
class Verdict:
    """A sparse tree against all dense trees, in tokens per step.

    Args:
        method: of the sparse tree.
        nodes: of the sparse tree, root counted.
        tokens_per_step: of the sparse tree, cross-validated.
        beaten: number of dense trees with fewer tokens per step.
        trees: number of dense trees.
        best: the dense tree with the most tokens per step.
        difference: 90 % interval of sparse - best (paired over texts); None where there are too few texts.
    """

    method: str
    nodes: int
    tokens_per_step: float
    beaten: int
    trees: int
    best: DensePoint
    difference: Interval | None

    @property
    def beats_all(self) -> bool:
        """Whether every dense tree has fewer tokens per step."""
        return self.beaten == self.trees


@dataclass(frozen=True)
class DenseSweep:
    """The result of `sweep_dense`.

    Args:
        dense: by nodes, then by widths.
        sparse: the points of the Medusa tree and of the chosen method, by method and nodes.
        verdicts: for each given size, of the Medusa tree and of the chosen method.
        possible: number of all dense trees within the limits, of which `dense` is a random choice.
        largest: the limit of their nodes.
        method: the chosen method of the sparse trees.
    """

    dense: tuple[DensePoint, ...]
    sparse: tuple[SparsePoint, ...]
    verdicts: tuple[Verdict, ...]
    possible: int
    largest: int
    method: str


def dense_widths(levels: int, ranks: int, largest: int) -> list[Widths]:
    """The widths of all dense trees with 2 to `largest` nodes (root counted), by nodes, then by widths.

    Args:
        levels: the greatest depth.
        ranks: the greatest width of a level.
        largest: the greatest number of nodes.
    """
    found: list[tuple[int, Widths]] = []
    level: list[tuple[Widths, int, int]] = [((), 1, 1)]  # widths, leaves, nodes
    for _ in range(levels):
        level = [
            ((*widths, width), leaves * width, nodes + leaves * width)
            for widths, leaves, nodes in level
            for width in range(1, min(ranks, (largest - nodes) // leaves) + 1)
        ]
        found += [(nodes, widths) for widths, _, nodes in level]
    return [widths for _, widths in sorted(found)]


def random_widths(levels: int, ranks: int, largest: int, trees: int, seed: int = 0) -> tuple[list[Widths], int]:
    """The widths of different dense trees, each of the possible ones equally likely, and the number of possible ones.

    Args:
        levels: as `dense_widths`.
        ranks: as `dense_widths`.
        largest: as `dense_widths`.
        trees: how many; all where 0, or where there are no more.
        seed: of the choice.
    """
    possible = dense_widths(levels, ranks, largest)
    if not 0 < trees < len(possible):
        return possible, len(possible)
    chosen = np.random.default_rng(seed).choice(len(possible), trees, replace=False)
    return [possible[i] for i in np.sort(chosen).tolist()], len(possible)


def dense_tree(widths: Sequence[int], drafter: str = "") -> Tree:
    """The dense tree of these widths: 1 + s_1 + s_1 s_2 + ... nodes.

    Source: arXiv:2401.10774, section 2.1.2.
    """
    paths: list[Path] = []
    for depth in range(1, len(widths) + 1):
        paths += itertools.product(*(range(width) for width in widths[:depth]))
    return Tree(tuple(paths), drafter=drafter)


def sweep_dense(
    calibration: Calibration,
    *,
    sizes: Sequence[int] = (SWEEP_NODES,),
    trees: int = DENSE_TREES,
    largest: int = LARGEST_DENSE,
    top_k: int = DEFAULT_TOP_K,
    seed: int = 0,
    timing: Timing | None = None,
    progress: Progress = silent,
) -> DenseSweep:
    """Random dense trees and optimised sparse trees, in tokens per step and, with a profile, in speed.

    Source: arXiv:2401.10774, figure 4a (tokens per step) and 4b (speed).

    Args:
        calibration: the rank traces.
        sizes: nodes (root counted) of the sparse trees that are compared with all dense trees.
        trees: number of random dense trees; 0 takes all.
        largest: nodes of the largest trees.
        top_k: K, the ranks of each level that are considered.
        seed: of the choice of the dense trees.
        timing: latency profile of the steps, with its batch and context.
        progress: called after each dense tree.

    Raises:
        TreeoptError: E102 where the traces hold no tree of a size; E223 or E230 where the profile is of another drafter
            or of per-step trees, or lacks a size; E303 where there are fewer than five different texts.
        ValueError: where a number is out of range.
    """
    check_sizes(sizes)
    check_seed(seed)
    if trees < 0 or largest < FEWEST_DENSE:
        raise ValueError(f"trees {trees}, largest {largest}: out of range")
    check_folds(calibration)
    if timing is not None:
        check_priced(timing.profile, calibration, KINDS[0])
        for nodes in (ONE_NODE, largest, *sizes):
            timing.seconds(nodes)  # what the profile lacks is an error before any work
    limits = tree_limits(calibration, max(largest, *sizes), top_k=top_k)
    fitter = Fitter(calibration, limits)
    method = fitter.choose(candidates(DEFAULT_VALUES, DEFAULT_WEIGHTS, refined=False)).method
    methods = list(dict.fromkeys([MEDUSA, method]))
    widths, possible = random_widths(calibration.num_heads, limits.top_k, largest, trees, seed)
    dense = _replayed(calibration, widths, progress)
    shown = sorted({*default_sizes(largest), *sizes})
    curves, reached = _curves(fitter, methods, {*shown, *(_nodes(one) for one in widths)}, sizes, limits)
    points = [
        _dense_point(one, sums.tokens_per_step, curves[method][_nodes(one)].tokens_per_step, timing)
        for one, sums in zip(widths, dense, strict=True)
    ]
    best = max(range(len(points)), key=lambda i: points[i].tokens_per_step)
    return DenseSweep(
        tuple(points),
        tuple(
            _sparse_point(one, size, curves[one][size], timing)
            for one in methods
            for size in shown
            if size <= reached[one]
        ),
        tuple(
            _verdict(calibration, (one, size, curves[one][size]), points, (points[best], dense[best]))
            for size in sizes
            for one in methods
        ),
        possible,
        largest,
        str(method),
    )


def _replayed(calibration: Calibration, widths: Sequence[Widths], progress: Progress) -> list[TextSums]:
    """Tokens and steps of each text with every dense tree."""
    rows, found = TraceRows.of(calibration), []
    for done, one in enumerate(widths, start=1):
        found.append(rows.sums(dense_tree(one)))
        progress(done, len(widths), "dense trees")
    return found


def _curves(
    fitter: Fitter, methods: Sequence[Method], needed: set[int], sizes: Sequence[int], limits: Limits
) -> tuple[dict[Method, dict[int, TextSums]], dict[Method, int]]:
    """For each method and size, cross-validated tokens and steps of each text; the nodes of each method's growth.

    At a size beyond the growth the tree is the whole growth.
    """
    found, reached = {}, {}
    for method in methods:
        [(growth, _)] = fitter.build([method])
        check_reached(growth, sizes, fitter.calibration, limits)
        reached[method] = len(growth.values) + 1
        ordered = sorted(needed)
        found[method] = dict(zip(ordered, fitter.cross_validated_sums(method, ordered), strict=True))
    return found, reached


def _nodes(widths: Widths) -> int:
    """Nodes of a dense tree, root counted."""
    return 1 + sum(itertools.accumulate(widths, int.__mul__))


def _speed(nodes: int, tau: float, timing: Timing | None) -> tuple[float | None, float | None]:
    """Overhead and speedup."""
    if timing is None:
        return None, None
    overhead = timing.seconds(nodes) / timing.seconds(ONE_NODE)
    return overhead, tau / overhead


def _dense_point(widths: Widths, tau: float, sparse: float, timing: Timing | None) -> DensePoint:
    nodes = _nodes(widths)
    return DensePoint(widths, nodes, tau, sparse, *_speed(nodes, tau, timing))


def _sparse_point(method: Method, nodes: int, sums: TextSums, timing: Timing | None) -> SparsePoint:
    tau = sums.tokens_per_step
    return SparsePoint(str(method), nodes, tau, *_speed(nodes, tau, timing))


def _verdict(
    calibration: Calibration,
    sparse: tuple[Method, int, TextSums],
    points: Sequence[DensePoint],
    best: tuple[DensePoint, TextSums],
) -> Verdict:
    """A sparse tree (method, nodes, sums) against the points and the best of them (with its sums)."""
    method, nodes, sums = sparse
    tau = sums.tokens_per_step
    one, other = (by_text(calibration.token_hashes, each.tokens, each.steps) for each in (sums, best[1]))
    beaten = sum(point.tokens_per_step < tau for point in points)
    interval = difference_interval(one[0], one[1], other[1], other[0])
    return Verdict(str(method), nodes, tau, beaten, len(points), best[0], interval)
