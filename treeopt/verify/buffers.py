"""The compiled tree: the tensors that `treeopt compile` writes, and that the decoder verifies and accepts with.

Example, the tree {(0,), (1,), (0, 0)} with top_k 2; nodes are the root and these paths in this order:
    attention_mask    1 0 0 0    row: a node; columns: what it attends to, its ancestors and itself
                      1 1 0 0
                      1 0 1 0
                      1 1 0 1
    position_ids      0 1 1 2
    tree_indices      0 1 2 3    into [root, head 1's rank 0, 1, head 2's rank 0, 1]
    retrieve_indices  0 2 -1     one row for each leaf: the nodes from the root to it
                      0 1  3
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.files.configurations import KEY, Configuration
from treeopt.files.outputs import BUFFERS_SCHEMA as SCHEMA
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.files.trees import GivenTree, as_tree
from treeopt.tree import MAX_DEPTH, MAX_RANK, ROOT, Tree

PAD = -1  # in `retrieve_indices` and `paths`, beyond the end of a short path
MEDUSA_TOP_K = 10  # guesses of each head in the original code, for every tree
MAX_NODES = 1 << 15  # the mask of a larger tree takes more than a gigabyte
BUFFER_NAMES = ("attention_mask", "position_ids", "tree_indices", "retrieve_indices")


@dataclass(frozen=True, eq=False)
class Buffers:
    """A compiled tree of N nodes (root counted), L leaves and depth D, or one such tree for each of B rows.

    `compile_tree` makes the tensors of one tree, `compile_parents` those of a tree for each row of a batch. The latter
    have a leading dimension B, and `retrieve_indices` has one row for each node instead of each leaf, so that its shape
    does not depend on values on the device.

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
        return _levels(self)

    def tree(self) -> Tree:
        """The tree of these tensors, by `tree_indices` and `retrieve_indices`.

        Raises:
            TreeoptError: E103 where they are not those of a tree.
        """
        fault = self._layout_fault() or self._path_fault()
        if fault:
            raise TreeoptError(Code.TREE_INVALID, f"not a compiled tree: {fault}", fix="treeopt.compile_tree")
        ranks = ((self.tree_indices - 1) % max(self.top_k, 1)).tolist()
        rows = [[node for node in path[1:] if node != PAD] for path in self.paths.tolist()[1:]]
        return Tree(tuple(tuple(ranks[node] for node in path) for path in rows))

    def _layout_fault(self) -> str:
        """The shape or dtype that no compiled tree has; empty where there is none."""
        wrong = [name for name in BUFFER_NAMES if not isinstance(getattr(self, name), Tensor)]
        if wrong:
            return f"{wrong[0]} is not a tensor"
        if not isinstance(self.top_k, int) or not 0 <= self.top_k <= MAX_RANK + 1:
            return f"top_k is {self.top_k!r}"
        nodes, retrieve = self.position_ids.numel(), tuple(self.retrieve_indices.shape)
        if not 1 <= nodes <= MAX_NODES:
            return f"it has {nodes:,} nodes; a compiled tree has 1 to {MAX_NODES:,}"
        if len(retrieve) != 2 or not (1 <= retrieve[0] <= nodes and 1 <= retrieve[1] <= min(nodes, MAX_DEPTH + 1)):
            return f"retrieve_indices is {list(retrieve)}, not [L, D+1] of a tree of {nodes:,} nodes"
        for name, shape in zip(BUFFER_NAMES, [(nodes, nodes), (nodes,), (nodes,), retrieve], strict=True):
            tensor, dtype = getattr(self, name), torch.bool if name == "attention_mask" else torch.int64
            if (tensor.dtype, tensor.shape) != (dtype, shape):
                return f"{name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}"
        return ""

    def _path_fault(self) -> str:
        """How the indices contradict each other; empty where each node has one parent, depth and rank."""
        rows, depths, indices = self.retrieve_indices, self.position_ids, self.tree_indices
        on_path = rows != PAD
        if not ((rows >= PAD) & (rows < self.nodes)).all():
            return f"retrieve_indices are not from {PAD} to {self.nodes - 1}"
        columns = torch.arange(self.depth + 1, device=rows.device).expand(rows.shape)
        if not torch.equal(depths[rows[on_path]], columns[on_path]) or len(torch.unique(rows[on_path])) < self.nodes:
            return "position_ids are not the columns of the nodes in retrieve_indices"
        above = self.parents[rows[:, 1:]] == rows[:, :-1]
        if not above[on_path[:, 1:]].all():
            return "retrieve_indices give a node two parents"
        top_k = max(self.top_k, 1)
        if indices[ROOT] != ROOT or not torch.equal((indices - 1).div(top_k, rounding_mode="floor"), depths - 1):
            return f"tree_indices are not those of the nodes' depths, with top_k {self.top_k}"
        largest = int(((indices[1:] - 1) % top_k).max()) if self.nodes > 1 else -1
        return "" if self.top_k == largest + 1 else f"top_k is {self.top_k}, and the largest rank is {largest}"

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
            fix = f"treeopt build --max-rank {MEDUSA_TOP_K - 1}"
            raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, fix=fix)
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
    """The n drafts of one depth, on the host.

    Args:
        parents: int64 [n], index of each parent among the inner nodes of the depth above.
        ranks: int64 [n].
        inner: int64 [m], indices of the drafts with children, ascending: the inner nodes of this depth.
    """

    parents: np.ndarray
    ranks: np.ndarray
    inner: np.ndarray


def _levels(tree: Buffers) -> tuple[TreeLevel, ...]:
    depths, parents = tree.position_ids.numpy(force=True), tree.parents.numpy(force=True)
    ranks = (tree.tree_indices.numpy(force=True) - 1) % max(tree.top_k, 1)
    has_children = np.zeros(len(depths), np.bool_)
    has_children[parents[1:]] = True
    number = np.zeros(len(depths), np.int64)  # index of each inner node among those of its depth
    levels = []
    for depth in range(1, int(depths.max()) + 1):
        nodes = np.flatnonzero(depths == depth)
        inner = np.flatnonzero(has_children[nodes])
        levels.append(TreeLevel(number[parents[nodes]], ranks[nodes], inner))
        number[nodes[inner]] = np.arange(len(inner))
    return tuple(levels)


def compile_tree(tree: GivenTree, device: torch.device | str = "cpu") -> Buffers:
    """The tensors of a tree, such as `[[0], [0, 0], [1]]`; see the example of the module.

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
    """As `compile_tree`, for a tree of any drafter: ranks are those of the drafter's candidates.

    Raises:
        TreeoptError: E105 where the tree is too large.
    """
    if tree.nodes > MAX_NODES:
        what = f"the tree has {tree.nodes:,} nodes; at most {MAX_NODES:,} are compiled"
        why = "the mask holds a byte for each pair of nodes"
        raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, why=why, fix="build a tree with a smaller --nodes")
    mask, depths, paths = (tensor[0] for tensor in _from_parents(torch.tensor([tree.parents]), tree.depth))
    top_k = tree.max_rank + 1
    last_ranks = torch.tensor([0, *(path[-1] for path in tree.paths)])
    indices = 1 + (depths - 1) * top_k + last_ranks
    indices[ROOT] = ROOT
    return Buffers(mask, depths, indices, paths[list(tree.leaves)], top_k).to(device)


def compile_parents(parents: Tensor, depth: int) -> Buffers:
    """The trees of a batch, one for each row, without synchronisation with the device.

    Args:
        parents: int64 [B, N], the parent of each node, which precedes it; the parent of the root, node 0, is 0. Nodes
            are sorted by depth.
        depth: D, the maximum depth of a node.
    """
    mask, depths, paths = _from_parents(parents, depth)
    indices = torch.arange(parents.shape[1], device=parents.device).expand(parents.shape)
    return Buffers(mask, depths, indices, paths, top_k=0)


def _from_parents(parents: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mask bool [B, N, N], depths int64 [B, N] and paths int64 [B, N, depth + 1] of trees given by `parents` [B, N]."""
    rows, nodes = parents.shape
    upward = [torch.arange(nodes, device=parents.device).expand(rows, -1)]
    for _ in range(depth):
        upward.append(parents.gather(1, upward[-1]))
    ancestors = torch.stack(upward, dim=2)  # [B, N, depth + 1], from the node upward; the root repeats
    mask = torch.zeros(rows, nodes, nodes, dtype=torch.bool, device=parents.device)
    mask.scatter_(2, ancestors, True)
    depths = mask.sum(-1) - 1
    steps_up = depths[..., None] - torch.arange(depth + 1, device=parents.device)
    paths = ancestors.gather(2, steps_up.clamp(min=0)).masked_fill_(steps_up < 0, PAD)
    return mask, depths, paths


_FIX = "treeopt compile writes the file again"


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
    """Read what `save_buffers` wrote.

    The tree is read from `tree_indices` and `retrieve_indices` and compiled again; all tensors must equal the file's.

    Raises:
        TreeoptError: E201 where the file is missing, E203 where it is damaged, of another kind, or its tensors are not
            those of a tree.
    """
    arrays, header = read_arrays(path, SCHEMA)
    missing = [name for name in BUFFER_NAMES if name not in arrays]
    if missing:
        raise TreeoptError(Code.FILE_INVALID, f"{path} lacks {', '.join(missing)}", fix=_FIX)
    top_k = header.get("top_k")
    if not isinstance(top_k, int) or isinstance(top_k, bool):
        raise TreeoptError(Code.FILE_INVALID, f"{path} does not say its top_k", fix=_FIX)
    found = Buffers(**{name: torch.from_numpy(arrays[name]) for name in BUFFER_NAMES}, top_k=top_k)
    fault = _fault(found, arrays, header)
    if fault:
        raise TreeoptError(Code.FILE_INVALID, f"{path} is not a compiled tree: {fault}", fix=_FIX)
    return found.to(device)


def _fault(found: Buffers, arrays: dict[str, np.ndarray], header: dict[str, Any]) -> str:
    """How the file differs from that of the tree whose indices it holds; empty where it does not."""
    if extra := sorted(set(arrays) - set(BUFFER_NAMES)):
        return f"it holds {', '.join(extra)} too"
    try:
        tree = found.tree()
    except TreeoptError as error:
        return error.what.removeprefix("not a compiled tree: ")
    expected = compile_ranks(tree)
    for name in BUFFER_NAMES:
        right = getattr(expected, name).numpy()
        wrong = arrays[name]
        if wrong.shape != right.shape:
            return f"{name} is {list(wrong.shape)}, its tree's is {list(right.shape)}"
        places = np.argwhere(wrong != right)
        if len(places):
            place = tuple(places[0].tolist())
            return f"{name}{list(place)} is {wrong[place]}, its tree's is {right[place]}"
    right_header = {"top_k": expected.top_k, "nodes": tree.nodes, "depth": tree.depth}
    for name, number in right_header.items():
        if header.get(name) != number:
            return f"{name} is {header.get(name)!r}, its tree's is {number}"
    return ""
