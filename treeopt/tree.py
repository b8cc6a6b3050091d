"""The tree record: the drafts that are verified in one forward pass, as paths of ranks.

Terms (the same in code, files and on the command line):
    position t   from its hidden state the base's LM head predicts token t+1, the *root* of the tree
    head h       1..H; predicts token t+1+h from the same hidden state
    rank         0 = the head's most likely token; ties go to the smaller token id
    path         one rank for each head: `(0, 2)` = head 1's most likely token, then head 2's third
    nodes        root counted: 64 nodes = the root and 63 paths
Letters: H heads, K ranks, N nodes (root counted), L leaves, D depth, V vocabulary, d hidden size, B batch, P positions.
"""

import functools
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from treeopt.defaults import MAX_DEPTH
from treeopt.errors import Code, TreeoptError, counted

Path = tuple[int, ...]

ROOT = 0  # index of the root among the nodes; node i > 0 is the tree's i-th path
MAX_FAULTS = 10  # faults of one tree listed together
MAX_RANK = 2**31 - 1  # larger than any vocabulary; the compiled indices fit into int64
_SHOWN_RANKS = 12  # of a path in an error message


@dataclass(frozen=True)
class Expected:
    """Expected tokens per step (root counted) of a tree, by its calibration.

    `independent` is Medusa's estimate 1 + sum of the products of accuracies (arXiv:2401.10774, section 2.3.3), `replay`
    the figure of a decoder on the calibration's texts; `top_k` is the number K of ranks. `cross_validated` is replay on
    texts left out of the fit, `low` to `high` its 90 % prediction interval on as many new prompts; None where there
    were too few texts.
    """

    independent: float
    replay: float
    top_k: int
    cross_validated: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Tree:
    """A prefix-closed set of rank paths, sorted by (length, path): runtime order = file order, node 0 the root.

    Args:
        paths: N - 1 paths, without the root; lists of integers, also of numpy, become tuples of int. The
            empty tree is legal: it decodes one token a step.
        values: N - 1 estimated probabilities that the whole path is right, where the tree was built from a calibration.
        expected: tokens per step by the calibration the tree was built from.
        source: made_by, calibration, method, reference and the drafter's file; not compared.
        drafter: id of the drafter whose candidates the ranks refer to; empty for the `heads` drafter.

    Raises:
        TreeoptError: E103, every fault (at most 10) at once.
    """

    paths: tuple[Path, ...]
    values: tuple[float, ...] | None = None
    expected: Expected | None = field(default=None, compare=False)
    source: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    drafter: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", _as_paths(self.paths))
        # The tree of the root alone has no values, so that equal trees have equal records.
        object.__setattr__(self, "values", _as_values(self.values) if self.paths else None)
        faults = [text for _, text in path_faults(self.paths)]
        keys = [(len(path), path) for path in self.paths]
        if not faults and any(map(operator.gt, keys, keys[1:])):
            faults = ["paths are not sorted by (length, path); Tree.from_paths sorts them"]
        if self.values is not None:
            faults += _value_faults(self)
        if faults:
            raise TreeoptError(Code.TREE_INVALID, f"not a tree: {faults[0]}", at="\n".join(faults[1:MAX_FAULTS]))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], values: Iterable[float] | None = None, **more: Any) -> Self:
        """The tree of these paths in any order; `values` follow their paths."""
        listed = _as_paths(paths)
        order = sorted(range(len(listed)), key=lambda i: (len(listed[i]), listed[i]))
        given = None if values is None else list(values)
        if given is not None and len(given) != len(listed):
            raise TreeoptError(Code.TREE_INVALID, f"not a tree: {len(given)} values for {len(listed)} paths")
        ordered = None if given is None else tuple(given[i] for i in order)
        return cls(tuple(listed[i] for i in order), ordered, **more)

    @classmethod
    def chain(cls, depth: int) -> Self:
        """The chain of each head's most likely token: `depth` + 1 nodes."""
        return cls(tuple((0,) * length for length in range(1, depth + 1)))

    @property
    def nodes(self) -> int:
        """N, the root counted."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """D, the number of levels below the root; 0 for the root alone."""
        return len(self.paths[-1]) if self.paths else 0

    @functools.cached_property
    def max_rank(self) -> int:
        """The largest rank in any path; -1 for the root alone."""
        return max((max(path) for path in self.paths), default=-1)

    @functools.cached_property
    def parents(self) -> tuple[int, ...]:
        """Parent of each of the N nodes; the root is its own parent."""
        index = {path: node for node, path in enumerate(self.paths, start=1)}
        index[()] = ROOT
        return (ROOT, *(index[path[:-1]] for path in self.paths))

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each of the N nodes; 0 for the root."""
        return (0, *map(len, self.paths))

    @functools.cached_property
    def ancestors(self) -> NDArray[np.bool_]:
        """bool [N, N]: whether the column's node is on the row's path; the node itself and the root included."""
        matrix = np.eye(self.nodes, dtype=np.bool_)
        parents, depths = np.array(self.parents), np.array(self.depths)
        for depth in range(1, self.depth + 1):  # level by level: the parents' rows are complete
            level = np.flatnonzero(depths == depth)
            matrix[level] |= matrix[parents[level]]
        matrix.setflags(write=False)
        return matrix

    @functools.cached_property
    def leaves(self) -> tuple[int, ...]:
        """Nodes without children, ascending; the root where it is alone."""
        inner = set(self.parents[1:])
        return tuple(node for node in range(self.nodes) if node not in inner)

    @property
    def path_tokens(self) -> int:
        """Leaves * (depth + 1): the tokens of a forward over all paths as a batch, padding included."""
        return len(self.leaves) * (self.depth + 1)


def check_tree_fits(tree: Tree, *, heads: int, ranks: int, holder: str) -> None:
    """Raise E101 or E102 unless every path has at most `heads` ranks, each below `ranks`."""
    if tree.depth > heads:
        what = f"the tree is {counted(tree.depth, 'level')} deep, and {holder} has {counted(heads, 'level')}"
        fix = f"treeopt build --max-depth {heads}"
        raise TreeoptError(Code.TREE_TOO_DEEP, what, at=str(list(tree.paths[-1])), fix=fix)
    if tree.max_rank >= ranks:
        path = next(path for path in tree.paths if max(path) >= ranks)
        what = f"the tree has rank {max(path)}, but {holder} has {counted(ranks, 'rank')}, 0 to {ranks - 1}"
        raise TreeoptError(Code.RANK_TOO_LARGE, what, at=str(list(path)), fix=f"treeopt build --max-rank {ranks - 1}")


def path_faults(paths: Sequence[Path]) -> list[tuple[int, str]]:
    """Why `paths` are not a tree, in the order of the paths: (index of the path, its fault)."""
    faults: list[tuple[int, str]] = []
    known = {(), *paths}
    seen: set[Path] = {()}
    for i, path in enumerate(paths):
        if path in seen:
            faults.append((i, f"{_shown(path)} occurs twice" if path else "[] is the root, which is not listed"))
        elif path[:-1] not in known:
            faults.append((i, f"{_shown(path)}: its parent {_shown(path[:-1])} is missing"))
        elif min(path) < 0 or max(path) > MAX_RANK:
            faults.append((i, f"{_shown(path)} has a rank that is not a whole number from 0 to {MAX_RANK}"))
        elif len(path) > MAX_DEPTH:
            faults.append((i, f"{_shown(path)} has {len(path)} ranks; a tree is at most {MAX_DEPTH} deep"))
        seen.add(path)
    return faults


def _as_paths(given: Any) -> tuple[Path, ...]:
    """The paths as tuples of int, in their order."""
    tuples = type(given) is tuple and set(map(type, given)) <= {tuple}
    if tuples and set(map(type, chain.from_iterable(given))) <= {int}:
        paths: tuple[Path, ...] = given
        return paths  # already tuples of int
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        why = "a tree is a list of paths such as [[0], [1], [0, 0]], or the result of treeopt.load_tree"
        fix = "treeopt.load_tree(NAME) reads a file, or a tree of `treeopt list`"
        raise TreeoptError(Code.TREE_INVALID, f"{_named(given)} is not a list of paths", why=why, fix=fix)
    return tuple(map(as_path, given))


def as_path(path: Any) -> Path:
    """A sequence of ranks as a tuple of int; E103 where it is none."""
    try:
        if not isinstance(path, (str, bytes, Mapping, set, frozenset)):
            ranks = tuple(path)
            if {bool, np.bool_}.isdisjoint(map(type, ranks)):  # numpy 2.0 takes its own as an index
                return tuple(map(operator.index, ranks))
    except TypeError:
        pass
    what = f"{_named(path)} is not a path: a path is a list of whole numbers, a rank for each head, such as [0, 2]"
    raise TreeoptError(Code.TREE_INVALID, what)


def _as_values(values: Any) -> tuple[float, ...] | None:
    """The values as a tuple of floats."""
    if values is None:
        return None
    listed = tuple(values) if isinstance(values, Iterable) else (values,)
    if set(map(type, listed)) <= {float}:
        return listed
    wrong = [value for value in listed if isinstance(value, bool) or not isinstance(value, Real)]
    if wrong:
        raise TreeoptError(Code.TREE_INVALID, f"not a tree: the value {_named(wrong[0])} is not a probability")
    return tuple(map(float, listed))


def _named(given: Any) -> str:
    """A value for an error message."""
    if isinstance(given, (str, bytes, int, float, list, tuple)) or given is None:
        try:
            return reprlib.repr(given)
        except ValueError:  # a number of thousands of digits
            pass
    return f"an object of type {type(given).__name__}"


def _shown(path: Path) -> str:
    """A path for an error message, with long paths and huge numbers cut."""
    ranks = [str(rank) if abs(rank) <= MAX_RANK else f"a number of {rank.bit_length()} bits" for rank in path]
    return f"[{', '.join(ranks[:_SHOWN_RANKS])}{', ...' if len(ranks) > _SHOWN_RANKS else ''}]"


def _value_faults(tree: Tree) -> list[str]:
    assert tree.values is not None
    if len(tree.values) != len(tree.paths):
        return [f"{len(tree.values)} values for {len(tree.paths)} paths"]
    wrong = [i for i, value in enumerate(tree.values) if not 0.0 <= value <= 1.0]
    return [f"{list(tree.paths[i])} has value {tree.values[i]}, not a probability" for i in wrong]
