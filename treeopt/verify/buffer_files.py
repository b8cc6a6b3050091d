"""Files of compiled trees: safetensors, checked on loading against the tree that they hold."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from treeopt.errors import Code, TreeoptError
from treeopt.files.configurations import KEY, Configuration
from treeopt.files.marks import BUFFERS_SCHEMA as SCHEMA
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.tree import Tree
from treeopt.verify.buffers import BUFFER_NAMES, Buffers, compile_ranks

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
