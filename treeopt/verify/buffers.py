"""Compile: a tree as the tensors that an inference loop needs.

Example, the tree {(0,), (1,), (0, 0)} with top_k 2; nodes are the root and these paths in this order:
    attention_mask    1 0 0 0    a row is a node, a column what it may see: its ancestors and itself
                      1 1 0 0
                      1 0 1 0
                      1 1 0 1
    position_ids      0 1 1 2
    tree_indices      0 1 2 3    into [root, head 1's rank 0, 1, head 2's rank 0, 1]
    retrieve_indices  0 2 -1     one row a leaf: the nodes from the root to it
                      0 1  3
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.files.marks import BUFFERS_SCHEMA as SCHEMA
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.tree import ROOT, Tree, as_tree

PAD = -1  # in `retrieve_indices`, beyond the end of a short path
MEDUSA_TOP_K = 10  # guesses a head that the original code draws, whatever the tree
MAX_NODES = 1 << 15  # the mask of a larger tree takes more than a gigabyte
BUFFER_NAMES = ("attention_mask", "position_ids", "tree_indices", "retrieve_indices")


@dataclass(frozen=True, eq=False)
class Buffers:
    """The compiled tree of N nodes (root counted), L leaves and depth D.

    Args:
        attention_mask: bool [N, N], True where the row's node sees the column's.
        position_ids: int64 [N], depth of each node: position = length of the cached text + this.
        tree_indices: int64 [N], each node's token among the 1 + D * top_k candidates [root, head 1's guesses, ...].
        retrieve_indices: int64 [L, D+1], nodes from the root to each leaf, leaves ascending; `PAD` beyond the end. Take
            real path lengths from it: an index of -1 would silently read the last node.
        top_k: guesses a head must give, the largest rank + 1.
    """

    attention_mask: Tensor
    position_ids: Tensor
    tree_indices: Tensor
    retrieve_indices: Tensor
    top_k: int

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


def compile_tree(tree: Tree | Iterable[Sequence[int]], device: torch.device | str = "cpu") -> Buffers:
    """The tensors of a tree, or of a list of paths such as `[[0], [0, 0], [1]]`; see the module's example.

    Raises:
        TreeoptError: E103 where a list is not a tree, E105 where the tree was made for a drafter or is too large.
    """
    tree = as_tree(tree)
    if tree.nodes > MAX_NODES:
        what = f"the tree has {tree.nodes:,} nodes; at most {MAX_NODES:,} are compiled"
        raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, why="the mask holds a byte for each pair of nodes")
    if tree.drafter:
        raise TreeoptError(
            Code.TREE_NOT_EXPORTABLE,
            f"the tree was made for drafter {tree.drafter}",
            why="its ranks count among corrected candidates, which differ by the token before; these tensors hold "
            "ranks of the heads' plain guesses",
            fix="treeopt calibrate --drafter heads, and treeopt build; or treeopt generate with this tree",
        )
    depths = np.array(tree.depths)
    top_k = tree.max_rank + 1
    last_ranks = np.array([0, *(path[-1] for path in tree.paths)])
    indices = 1 + (depths - 1) * top_k + last_ranks
    indices[ROOT] = ROOT
    buffers = Buffers(
        attention_mask=torch.from_numpy(tree.ancestors.copy()),
        position_ids=torch.from_numpy(depths).long(),
        tree_indices=torch.from_numpy(indices).long(),
        retrieve_indices=torch.from_numpy(_leaf_paths(tree)).long(),
        top_k=top_k,
    )
    return buffers.to(device)


def _leaf_paths(tree: Tree) -> np.ndarray:
    """int64 [L, D+1]: the nodes from the root to each leaf, padded with `PAD`."""
    parents, depths = np.array(tree.parents), np.array(tree.depths)
    leaves = np.array(tree.leaves)
    rows = np.full((len(leaves), tree.depth + 1), PAD)
    node, at = leaves, depths[leaves]
    for _ in range(tree.depth + 1):  # all leaves climb together; at the root they write the same again
        rows[np.arange(len(leaves)), at] = node
        node, at = parents[node], np.maximum(at - 1, 0)
    return rows


def save_buffers(buffers: Buffers, tree: Tree, path: str | os.PathLike[str]) -> None:
    """Write the tensors as safetensors; equal trees give equal bytes. An existing file is replaced."""
    header = {"schema": SCHEMA, "top_k": buffers.top_k, "nodes": tree.nodes, "depth": tree.depth}
    arrays = {name: getattr(buffers, name).cpu().numpy() for name in BUFFER_NAMES}
    write_arrays(path, arrays, header, overwrite=True)


def load_buffers(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Buffers:
    """Read what `save_buffers` wrote.

    Raises:
        TreeoptError: E201 where it is missing, E203 where it is damaged or something else.
    """
    arrays, header = read_arrays(path, SCHEMA)
    missing = [name for name in BUFFER_NAMES if name not in arrays]
    if missing:
        raise TreeoptError(Code.FILE_INVALID, f"{path} lacks {', '.join(missing)}")
    tensors = {name: torch.from_numpy(arrays[name]) for name in BUFFER_NAMES}
    if not isinstance(header.get("top_k"), int):
        raise TreeoptError(Code.FILE_INVALID, f"{path} does not say its top_k")
    return Buffers(**tensors, top_k=header["top_k"]).to(device)
