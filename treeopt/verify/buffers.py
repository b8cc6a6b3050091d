"""The compiled tree: the tensors that `treeopt compile` writes, and that the decoder verifies and accepts with."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.files.configurations import KEY, Configuration
from treeopt.files.outputs import BUFFERS_SCHEMA as SCHEMA
from treeopt.files.strict_yaml import reading
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.files.trees import GivenTree, as_tree
from treeopt.tree import ROOT, Tree

PAD = -1  # in `retrieve_indices` and `paths`, beyond the end of a short path
MEDUSA_TOP_K = 10  # guesses of each head in the original code, for every tree
MAX_NODES = 1 << 15  # the mask of a larger tree takes more than a gigabyte
Made = TypeVar("Made")
BUFFER_NAMES = ("attention_mask", "position_ids", "tree_indices", "retrieve_indices")


@dataclass(frozen=True, eq=False)
class Buffers:
    """A compiled tree: N nodes (root counted), L leaves and depth D, or one such tree for each of B rows.

    `compile_tree` makes the tensors of one tree. Those of trees chosen per step, one for each row, are made with their
    tokens (`treeopt.drafting.kernel.trees.compile_rows`): they have a leading dimension B, and `retrieve_indices` has
    one row for each node instead of each leaf, so that its shape depends on the number of nodes alone.

    Args:
        attention_mask: bool [N, N] or [B, N, N], True where the row's node attends to the column's.
        position_ids: int64 [N] or [B, N], depth of each node; its position is the length of the cached text + depth.
        tree_indices: int64 [N] or [B, N], index of each node's token in the 1 + D * top_k candidates [root, head 1's
            guesses, head 2's guesses, ...]; for trees chosen per step, in [root, drafts].
        retrieve_indices: int64 [L, D+1] or [B, N, D+1], the nodes from the root to each leaf, leaves ascending, then
            `PAD`. As an index, `PAD` would silently read the last node.
        top_k: the number of guesses of each head, the largest rank + 1; 0 for trees chosen per step.
    """

    attention_mask: Tensor
    position_ids: Tensor
    tree_indices: Tensor
    retrieve_indices: Tensor
    top_k: int

    @property
    def nodes(self) -> int:
        """N, the root counted."""
        return self.position_ids.shape[-1]

    @property
    def depth(self) -> int:
        """D; for trees chosen per step the maximum depth."""
        return self.retrieve_indices.shape[-1] - 1

    @property
    def per_row(self) -> bool:
        """Whether there is one tree for each row of a batch."""
        return self.position_ids.ndim == 2

    @functools.cached_property
    def paths(self) -> Tensor:
        """int64 [N, D+1] or [B, N, D+1]: the nodes from the root to each node, then `PAD`."""
        if self.per_row:
            return self.retrieve_indices
        leaf, column = (self.retrieve_indices != PAD).nonzero(as_tuple=True)
        through = self.position_ids.new_zeros(self.nodes)
        through[self.retrieve_indices[leaf, column]] = leaf  # any leaf below the node
        columns = torch.arange(self.depth + 1, device=through.device)
        return self.retrieve_indices[through].masked_fill(columns > self.position_ids[:, None], PAD)

    @functools.cached_property
    def parents(self) -> Tensor:
        """int64 [N] or [B, N]: each node's parent; that of the root is the root."""
        above = (self.position_ids - 1).clamp_(min=0)
        return self.paths.gather(-1, above[..., None])[..., 0]

    @functools.cached_property
    def levels(self) -> tuple[TreeLevel, ...]:
        """The drafts of one tree by depth, on the host."""
        assert not self.per_row, "one tree has levels, a batch of trees has none"
        depths, parents = self.position_ids.numpy(force=True), self.parents.numpy(force=True)
        has_children = np.zeros(len(depths), np.bool_)
        has_children[parents[1:]] = True
        number = np.zeros(len(depths), np.int64)  # index of each inner node among those of its depth
        levels = []
        for depth in range(1, int(depths.max()) + 1):
            nodes = np.flatnonzero(depths == depth)
            inner = np.flatnonzero(has_children[nodes])
            levels.append(TreeLevel(number[parents[nodes]], self.ranks[nodes], inner))
            number[nodes[inner]] = np.arange(len(inner))
        return tuple(levels)

    @functools.cached_property
    def ranks(self) -> np.ndarray:
        """int64 [N], the rank of each node of one tree, on the host; that of the root has no meaning."""
        return (self.tree_indices.numpy(force=True) - 1) % max(self.top_k, 1)

    def paths_to(self, nodes: Tensor) -> Tensor:
        """int64 [B, D+1]: the path to one node of each row, `nodes` int64 [B]."""
        if self.per_row:
            return self.paths[torch.arange(len(nodes), device=nodes.device), nodes]
        return self.paths[nodes]

    def at_parents(self, values: Tensor) -> Tensor:
        """The value of each node's parent: [B, N] -> [B, N]."""
        if self.per_row:
            return values.gather(1, self.parents)
        return values.index_select(1, self.parents)

    def along_paths(self, values: Tensor) -> Tensor:
        """The sum over each node's path, without the root: float32 [B, N] -> [B, N]."""
        if self.per_row:
            return torch.bmm(self._drafts, values[..., None])[..., 0]
        return values @ self._drafts.T

    def last_without(self, marked: Tensor) -> Tensor:
        """The last node on whose path no draft is marked: bool [B, N] -> int64 [B]; the root, 0, where all others are.

        All in one product, because most of the time of so small operations is that of calling them.
        """
        marks = marked.float()
        if self.per_row:
            order = self._order[:, None]
            return torch.baddbmm(order, self._drafts, marks[..., None], alpha=-MAX_NODES).argmax(1)[:, 0]
        return torch.addmm(self._order, marks, self._drafts.T, alpha=-MAX_NODES).argmax(-1)

    @functools.cached_property
    def _order(self) -> Tensor:
        """float32 [N]: 0, 1, ...; less `MAX_NODES` for every mark, numbers below 2^24, which float32 holds exactly."""
        return torch.arange(self.nodes, dtype=torch.float32, device=self.position_ids.device)

    @functools.cached_property
    def _drafts(self) -> Tensor:
        """float32 [.., N, N]: the mask, with the root's column zero."""
        drafts = self.attention_mask.float()
        drafts[..., ROOT] = 0.0
        return drafts

    def to(self, device: torch.device | str) -> Buffers:
        """The same on another device."""
        return Buffers(**{name: getattr(self, name).to(device) for name in BUFFER_NAMES}, top_k=self.top_k)

    def as_medusa(self) -> dict[str, Tensor]:
        """Names, shapes, values and row order of the original `generate_medusa_buffers`.

        medusa_attn_mask float32 [1, 1, N, N]; tree_indices int64 [N] with 10 guesses a head; medusa_position_ids
        int64 [N]; retrieve_indices int64 [L, D+1], last leaf first, padded with -1.

        Raises:
            TreeoptError: E105 where a rank is above 9: the original would silently read the next head's guesses.
        """
        if self.top_k > MEDUSA_TOP_K:
            what = f"the tree uses rank {self.top_k - 1}; the original layout has ranks 0 to {MEDUSA_TOP_K - 1}"
            raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, fix=f"treeopt build --max-rank {MEDUSA_TOP_K - 1}")
        head, rank = (self.tree_indices - 1) // max(self.top_k, 1), (self.tree_indices - 1) % max(self.top_k, 1)
        indices = torch.where(self.tree_indices == ROOT, ROOT, 1 + head * MEDUSA_TOP_K + rank)
        return {
            "medusa_attn_mask": self.attention_mask.float()[None, None],
            "tree_indices": indices,
            "medusa_position_ids": self.position_ids,
            "retrieve_indices": self.retrieve_indices.flip(0),
        }


@dataclass(frozen=True, eq=False)
class TreeLevel:
    """The n drafts of one depth, on the host."""

    parents: np.ndarray  # int64 [n], index of each parent among the inner nodes of the depth above
    ranks: np.ndarray  # int64 [n]
    inner: np.ndarray  # int64 [m], indices of the drafts with children, ascending: the inner nodes of this depth


def once_a_tree(make: Callable[..., Made]) -> Callable[..., Made]:
    """Keep what a function makes of a tree (and of its other arguments) as long as that tree lives."""
    known: weakref.WeakKeyDictionary[Buffers, dict[Any, Made]] = weakref.WeakKeyDictionary()

    @functools.wraps(make)
    def get(tree: Buffers, *others: Any) -> Made:
        made = known.setdefault(tree, {})
        if others not in made:
            made[others] = make(tree, *others)
        return made[others]

    return get


def compile_tree(tree: GivenTree, device: torch.device | str = "cpu") -> Buffers:
    """The tensors of a tree, such as `[[0], [0, 0], [1]]`.

    Of the tree {(0,), (1,), (0, 0)}, whose nodes are the root and these paths in this order, with top_k 2:

        attention_mask    1 0 0 0    row: a node; columns: what it attends to, its ancestors and itself
                          1 1 0 0
                          1 0 1 0
                          1 1 0 1
        position_ids      0 1 1 2
        tree_indices      0 1 2 3    into [root, head 1's rank 0, 1, head 2's rank 0, 1]
        retrieve_indices  0 2 -1     one row for each leaf: the nodes from the root to it
                          0 1  3

    Raises:
        TreeoptError: E105 where the tree was made for a drafter or is too large; as `treeopt.files.trees.as_tree`.
    """
    tree = as_tree(tree)
    if tree.drafter:
        raise TreeoptError(
            Code.TREE_NOT_EXPORTABLE,
            f"the tree was made for drafter {tree.drafter}",
            why="its ranks are those of rescored candidates, which depend on the token before; an engine that reads "
            "these tensors takes them for ranks of the heads' guesses",
            fix="treeopt calibrate --drafter heads, and treeopt build; or treeopt generate with this tree",
        )
    return compile_ranks(tree, device)


def compile_ranks(tree: Tree, device: torch.device | str = "cpu") -> Buffers:
    """As `compile_tree`, for a tree of any drafter, whose candidates have the ranks; E105 where it is too large."""
    if tree.nodes > MAX_NODES:
        what = f"the tree has {tree.nodes:,} nodes; at most {MAX_NODES:,} are compiled"
        why = "the mask holds a byte for each pair of nodes"
        raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, why=why, fix="build a tree with a smaller --nodes")
    parents = torch.tensor(tree.parents)
    upward = [torch.arange(tree.nodes)]
    for _ in range(tree.depth):
        upward.append(parents[upward[-1]])
    ancestors = torch.stack(upward, dim=1)  # [N, D+1], from the node upward; the root repeats
    mask = torch.zeros(tree.nodes, tree.nodes, dtype=torch.bool).scatter_(1, ancestors, True)
    depths = mask.sum(-1) - 1
    steps_up = depths[:, None] - torch.arange(tree.depth + 1)
    paths = ancestors.gather(1, steps_up.clamp(min=0)).masked_fill_(steps_up < 0, PAD)
    top_k = tree.max_rank + 1
    indices = 1 + (depths - 1) * top_k + torch.tensor([0, *(path[-1] for path in tree.paths)])
    indices[ROOT] = ROOT
    return Buffers(mask, depths, indices, paths[list(tree.leaves)], top_k).to(device)


def save_buffers(
    buffers: Buffers, tree: Tree, path: str | os.PathLike[str], configuration: Configuration | None = None
) -> None:
    """Write the tensors as safetensors; equal trees give equal bytes. An existing file is replaced."""
    header: dict[str, Any] = {"schema": SCHEMA, "top_k": buffers.top_k, "nodes": tree.nodes, "depth": tree.depth}
    if configuration:
        header[KEY] = configuration
    arrays = {name: getattr(buffers, name).cpu().numpy() for name in BUFFER_NAMES}
    write_arrays(path, arrays, header, overwrite=True)


def load_buffers(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Buffers:
    """Read what `save_buffers` or `treeopt compile` wrote.

    Raises:
        TreeoptError: E201 where the file is missing, E203 where it is damaged, was changed, or is of another kind.
    """
    arrays, header = read_arrays(path, SCHEMA)
    with reading(path, "compiled tree"):
        tensors = {name: torch.from_numpy(arrays[name]) for name in BUFFER_NAMES}
        return Buffers(**tensors, top_k=header["top_k"]).to(device)
