"""Sequoia's growmap: the tree level by level, with its mask and depths, as a .pt file or as JSON.

roots       for each level the ids of its nodes; ids are given level by level, the root is 0
branches    for each level the number of children of each node; those of the last level are 0
Successors  for each node the ids of its children, in the order of their ranks
mask        int64 [N, N], 1 where the column's node is on the row's path, the node itself and the root included
depth       int64 [N]
size        N, the root counted
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from treeopt.engines import ENGINES
from treeopt.errors import Code, TreeoptError
from treeopt.export.adjacency import tree_of_children
from treeopt.export.faults import Fault, shown
from treeopt.tree import Tree

KEYS = ("roots", "branches", "Successors", "mask", "depth", "size")
TENSORS = ("mask", "depth")
_WHOLE = {f"torch.{name}" for name in ("bool", "uint8", "int8", "int16", "int32", "int64")}  # types of mask and depth
MAX_PT = 1 << 26  # bytes of a .pt file, unpacked too; the mask of the largest growmap has half of them


def growmap(tree: Tree) -> dict[str, Any]:
    """The growmap of a tree with contiguous siblings, in lists and numbers."""
    successors: list[list[int]] = [[] for _ in range(tree.nodes)]
    for node, parent in enumerate(tree.parents[1:], start=1):
        successors[parent].append(node)
    roots = [list(level) for _, level in groupby(range(tree.nodes), key=tree.depths.__getitem__)]
    return {
        "roots": roots,
        "branches": [[len(successors[node]) for node in level] for level in roots],
        "Successors": successors,
        "mask": tree.ancestors.astype(int).tolist(),
        "depth": list(tree.depths),
        "size": tree.nodes,
    }


def growmap_text(tree: Tree) -> str:
    """The growmap as JSON."""
    return json.dumps(growmap(tree))


def growmap_pt(tree: Tree) -> bytes:
    """The growmap as `torch.save` writes it; mask and depth are tensors of int64."""
    import torch

    content = growmap(tree)
    stream = io.BytesIO()
    torch.save({**content, **{name: torch.tensor(content[name], dtype=torch.int64) for name in TENSORS}}, stream)
    return stream.getvalue()


def read_growmap_pt(raw: bytes, fault: Fault) -> dict[str, Any]:
    """The content of a .pt file, with tensors as lists; no code in it is executed.

    Raises:
        TreeoptError: E210 where it holds more than tensors, lists and numbers; E206 where it is damaged or too large.
    """
    import torch

    from treeopt.models.pickles import UNKNOWN, ordinary, refused_pickle, unpacked_size

    kind = refused_pickle(io.BytesIO(raw))
    if kind is not None:
        raise _refused(kind, fault)
    unpacked = max(len(raw), unpacked_size(io.BytesIO(raw)))
    if unpacked == UNKNOWN:
        raise fault("is damaged, or not a file of PyTorch")
    if unpacked > MAX_PT:
        raise fault(f"holds {unpacked:,} bytes; at most {MAX_PT:,} are read")
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's of pickles that it refuses next
            content = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:  # the types that torch.load raises vary
        from treeopt.models.checkpoint import refused_name

        name = refused_name(error)
        if name is None:
            raise fault("is damaged, or not a file of PyTorch") from error
        raise _refused(name, fault) from error
    if not isinstance(content, Mapping):
        raise fault(f"holds {shown(content)}, not a mapping")
    _check_keys(content, fault)
    size = _size(content, fault)
    lists = dict(content)
    for name, shape in (("mask", (size, size)), ("depth", (size,))):
        tensor = content[name]
        if not isinstance(tensor, torch.Tensor) or not ordinary(tensor) or str(tensor.dtype) not in _WHOLE:
            raise fault(f"has a {name} that is not a tensor of whole numbers in memory")
        if tuple(tensor.shape) != shape:
            raise fault(f"has a {name} of shape {list(tensor.shape)}, and size {size}")
        lists[name] = tensor.long().tolist()
    return lists


def _refused(kind: str, fault: Fault) -> TreeoptError:
    found = fault(f"holds more than tensors, lists and numbers ({kind})")
    return TreeoptError(Code.PICKLE_REFUSED, found.what, at=found.at, fix=found.fix)


def tree_of_growmap(content: Mapping[str, Any], fault: Fault) -> Tree:
    """The tree of a growmap, all of whose parts must agree.

    Raises:
        TreeoptError: E206 where keys are missing or unknown, types are wrong, or parts disagree.
    """
    _check_keys(content, fault)
    size = _size(content, fault)
    successors = content["Successors"]
    if not isinstance(successors, list) or len(successors) != size:
        raise fault(f"has no list of {size} Successors")
    for node, listed in enumerate(successors):
        if not isinstance(listed, list) or len(listed) >= size or not all(type(child) is int for child in listed):
            raise fault(f"has {shown(listed)} as the Successors of node {node}")
        if any(not 0 < child < size for child in listed):
            raise fault(f"has {shown(listed)} as the Successors of node {node}: ids are 1 to {size - 1}")
    tree = tree_of_children(dict(enumerate(successors)), size, fault)
    for name, right in growmap(tree).items():
        if content[name] != right or not _same_types(content[name], right):
            raise fault(f"has {name} that are not those of its Successors")
    return tree


def _check_keys(content: Mapping[Any, Any], fault: Fault) -> None:
    if missing := [name for name in KEYS if name not in content]:
        raise fault(f"lacks {', '.join(missing)}")
    if unknown := [shown(name) for name in content if name not in KEYS]:
        raise fault(f"has unknown keys: {', '.join(unknown[:5])}")


def _size(content: Mapping[str, Any], fault: Fault) -> int:
    size, most = content["size"], ENGINES["sequoia"].max_nodes
    assert most is not None
    if type(size) is not int or not 1 <= size <= most:
        raise fault(f"has size {shown(size)}, not a whole number from 1 to {most:,}")
    return size


def _same_types(found: Any, right: Any) -> bool:
    """Whether no number is a bool or a float that equals the right one."""
    if isinstance(right, list):
        return type(found) is list and all(map(_same_types, found, right))
    return type(found) is type(right)
