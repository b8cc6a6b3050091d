"""Shapes: which node hangs on which, as tensors; one tree for all rows of a batch and all steps, or one a row and step.

Example, the tree {(0,), (1,), (0, 0)}; nodes are the root and these paths in this order:
    parents     0 0 0 1
    depths      0 1 1 2
    ancestors   1 0 0 0
                1 1 0 0
                1 0 1 0
                1 1 0 1
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from treeopt.tree import ROOT, Tree

Level = tuple[list[int], Tensor]  # the nodes of one depth, and their paths int64 [n, depth + 1]


@dataclass(frozen=True)
class Frame:
    """What all trees of a decoder have in common where each step has its own: their size.

    Args:
        nodes: the most, the root counted.
        depth: D, the greatest depth of any node; a tree need not reach it.
    """

    nodes: int
    depth: int


@dataclass(frozen=True, eq=False)
class Shape:
    """Which node hangs on which, one tree a row of the batch, or one for all rows where the first size is 1.

    Args:
        parents: int64 [B, N]; a node's parent comes before it; the root, node 0, is its own.
        depths: int64 [B, N], ascending along a row; the root has 0.
        ancestors: bool [B, N, N], True where the column's node is on the row's path, itself and the root included.
        void: bool [B, N], nodes that are never accepted, whatever their tokens; None where there are none.
    """

    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    void: Tensor | None = None

    @classmethod
    def from_parents(cls, parents: Tensor, depth: int) -> Shape:
        """The shapes with these parents, no node deeper than `depth`; the device is not waited for."""
        rows, nodes = parents.shape
        climb = [torch.arange(nodes, device=parents.device).expand(rows, -1)]
        for _ in range(depth):
            climb.append(parents.gather(1, climb[-1]))
        ancestors = torch.zeros(rows, nodes, nodes, dtype=torch.bool, device=parents.device)
        ancestors.scatter_(2, torch.stack(climb, dim=2), True)  # at the root a climb stays where it is
        return cls(parents, ancestors.sum(-1) - 1, ancestors)

    @classmethod
    def of_tree(cls, tree: Tree, device: torch.device) -> Shape:
        """One tree for all rows."""
        tables = (torch.tensor(tree.parents), torch.tensor(tree.depths), torch.tensor(tree.ancestors))
        return cls(*(table[None].to(device) for table in tables))

    def at_parents(self, values: Tensor) -> Tensor:
        """What stands at each node's parent: [B, N] -> [B, N]."""
        return values.gather(1, self.parents.expand(values.shape))

    def along(self, values: Tensor) -> Tensor:
        """Sums over the drafts of each node's path, the root left out: float32 [B, N] -> [B, N]."""
        if self._drafts.ndim == 2:
            return values @ self._drafts
        return torch.bmm(self._drafts, values[..., None])[..., 0]

    @functools.cached_property
    def levels(self) -> list[list[Level]]:
        """The nodes of each row, by depth, with their paths; waits for the device."""
        return [_levels(*row) for row in zip(self.depths.tolist(), self.ancestors, strict=True)]

    @functools.cached_property
    def _drafts(self) -> Tensor:
        """The ancestors without the root's column: float32 [N, N], a column a path, where all rows share one tree;
        else [B, N, N], a row a path.
        """
        drafts = self.ancestors.float()
        drafts[:, :, ROOT] = 0.0
        return drafts[0].T if len(drafts) == 1 else drafts


def _levels(depths: list[int], ancestors: Tensor) -> list[Level]:
    """The levels of one row, by its depths [N] and its ancestors bool [N, N]."""
    found = []
    for depth in range(depths[-1] + 1):
        nodes = [node for node, own in enumerate(depths) if own == depth]
        found.append((nodes, ancestors[nodes].nonzero()[:, 1].view(len(nodes), depth + 1)))
    return found
