"""Why a path is in a tree, or not: its value, its place in best-first growth, and the value of the last place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treeopt.calibration import Calibration
from treeopt.defaults import DEFAULT_TOP_K, MAX_NODES, VALUES, WEIGHTS
from treeopt.errors import Code, TreeoptError
from treeopt.files.trees import GivenTree, as_tree
from treeopt.optimize.grow import grow
from treeopt.optimize.intervals import Gain, replayed_gain
from treeopt.optimize.select_method import MEDUSA, Fitter, Limits, Method
from treeopt.optimize.values import Values
from treeopt.tree import Path, Tree, as_path


@dataclass(frozen=True)
class Prefix:
    """A node on the way to a path."""

    path: Path  # its ranks
    value: float  # the estimated probability that all of them are right
    share: float  # its value over that of the node above
    # in best-first growth, from 1 (the root is not counted); None beyond 131,072 nodes, and for a value of 0
    place: int | None
    in_tree: bool  # whether the tree has it


@dataclass(frozen=True)
class Explanation:
    """Why a path is in a tree, or not."""

    prefixes: tuple[Prefix, ...]  # the nodes from the first level to the path itself
    # the value of the last place, that of the (N-1)-th node of best-first growth; 0.0 where growth ends before
    cut_off: float
    paths: int  # N - 1, the number of places in the tree
    method: str  # how the values were estimated
    # tokens per step without and with the path, by replay: of the tree without the path and the paths below it, and of
    # the tree with the path and those above it; None without traces
    gain: Gain | None

    @property
    def last(self) -> Prefix:
        """The path itself."""
        return self.prefixes[-1]

    @property
    def margin(self) -> float:
        """Value - cut-off; 0 also for a path that has the same value as the last place and comes after it."""
        return self.last.value - self.cut_off

    @property
    def made_it(self) -> bool:
        """Whether the path's place is one of the first N - 1."""
        return self.last.place is not None and self.last.place <= self.paths


def explain_path(tree: GivenTree, path: Sequence[int], calibration: Calibration | None = None) -> Explanation:
    """Explain a path of a tree: by the values in the tree's file, or by the traces of a calibration.

    Estimates are by the method of the tree's file, else by Medusa's (independent values, all positions alike). The
    order is that of growth without the limits of an engine.

    Args:
        tree: the tree.
        path: one rank or more; it need not be in the tree where there is a calibration.
        calibration: traces of the tree's drafter.

    Raises:
        TreeoptError: E106 where there is no calibration, and the tree has no values or not this path; with one, E101,
            E102 and E223 as `treeopt.optimize.replay.replay`, and E303 where it holds no text; E103 where
            the path is not a list of ranks; as `treeopt.files.trees.as_tree`.
    """
    tree, ranks = as_tree(tree), as_path(path)
    if not ranks:
        raise TreeoptError(Code.PATH_UNKNOWN, "[] is the root, which every tree has", fix="a path such as 0,2")
    return _by_file(tree, ranks) if calibration is None else _by_traces(tree, ranks, calibration)


def _by_file(tree: Tree, path: Path) -> Explanation:
    if tree.values is None or path not in tree.paths:
        absent = f"{list(path)} is not in the tree, so its file does not have the value"
        what = "the tree has no values" if tree.values is None else absent
        raise TreeoptError(Code.PATH_UNKNOWN, what, fix="--calibration FILE estimates it from traces")
    values: dict[Path, float] = {(): 1.0, **dict(zip(tree.paths, tree.values, strict=True))}
    order = sorted(tree.paths, key=lambda one: (-values[one], len(one), one))
    place = {one: i for i, one in enumerate(order, start=1)}
    method = str(_method(tree.source)[0]) if tree.source.get("method") else "of the file"
    return Explanation(_prefixes(tree, path, values, place), min(tree.values), len(place), method, None)


def _by_traces(tree: Tree, path: Path, calibration: Calibration) -> Explanation:
    chosen = {path[:length] for length in range(1, len(path) + 1)}
    larger = Tree.from_paths({*tree.paths, *chosen}, drafter=tree.drafter)
    smaller = Tree.from_paths((one for one in tree.paths if one[: len(path)] != path), drafter=tree.drafter)
    gain = replayed_gain(smaller, larger, calibration)  # checks that the traces fit
    method, top_k = _method(tree.source)
    ranks = min(calibration.top_k, max(top_k, max(path) + 1))
    estimate = Fitter(calibration, Limits(tree.nodes, ranks)).estimate(method)
    values: dict[Path, float] = {(): 1.0}
    for one in sorted(chosen, key=len):
        children = estimate.children(np.array([one[:-1]], np.int32).reshape(1, -1), np.array([values[one[:-1]]]))
        values[one] = float(children[0, one[-1]])
    grown = grow(estimate, tree.nodes).values
    cut_off = float(grown[-1]) if len(grown) == tree.nodes - 1 and len(grown) else 0.0
    prefixes = _prefixes(tree, path, values, _places(estimate, values))
    return Explanation(prefixes, cut_off, tree.nodes - 1, str(method), gain)


def _prefixes(tree: Tree, path: Path, values: Mapping[Path, float], places: Mapping[Path, int]) -> tuple[Prefix, ...]:
    known = set(tree.paths)
    prefixes = []
    for length in range(1, len(path) + 1):
        one = path[:length]
        share = values[one] / values[one[:-1]] if values[one[:-1]] else 0.0
        prefixes.append(Prefix(one, values[one], share, places.get(one), one in known))
    return tuple(prefixes)


def _places(estimate: Values, values: Mapping[Path, float]) -> dict[Path, int]:
    """The places of these paths in best-first growth, as far as it is followed."""
    sought = [path for path, value in values.items() if path and value > 0.0]
    nodes = 64
    while True:
        growth = grow(estimate, nodes)
        rows = {tuple(rank for rank in row if rank >= 0): i for i, row in enumerate(growth.paths.tolist(), start=1)}
        if all(path in rows for path in sought) or len(growth.values) < nodes - 1 or nodes >= MAX_NODES:
            return {path: rows[path] for path in sought if path in rows}
        nodes = min(nodes * 8, MAX_NODES)


def _method(source: Mapping[str, Any]) -> tuple[Method, int]:
    """The method of a tree's file and its number of ranks."""
    made = source.get("method") or {}
    values, weights, strength, top_k = (made.get(name, 0) for name in ("values", "weights", "strength", "top_k"))
    known = values in VALUES and weights in WEIGHTS and isinstance(strength, int) and isinstance(top_k, int)
    if not known or (values == "joint") != (strength > 0):  # edited
        return MEDUSA, DEFAULT_TOP_K
    return Method(values, weights, float(strength)), top_k or DEFAULT_TOP_K
