"""Contiguous siblings: trees in which the k children of a node have the ranks 0, 1, .. k-1."""

from __future__ import annotations

from collections.abc import Sequence

from treeopt.tree import Path


def gaps(paths: Sequence[Path], levels: int) -> list[Path]:
    """The paths of at most `levels` ranks whose sibling of the next smaller rank is missing, in their order.

    For example `(0, 2)` where `(0, 1)` is missing. A path that ends in rank 0 needs no sibling.
    """
    known = set(paths)
    return [path for path in paths if len(path) <= levels and path[-1] and (*path[:-1], path[-1] - 1) not in known]
