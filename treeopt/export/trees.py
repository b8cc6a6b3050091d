"""Trees to and from the formats of engines, by the names of `treeopt.engines`: paths, or the children of each node.

Children are in NxD Inference's token trees, `{"0": ["1", "2"], "1": ["3"]}`, without the nodes that have none, and in
Sequoia's growmaps. These, as a .pt file or as JSON, have for each level the ids of its nodes (roots) and their numbers
of children (branches), for each node its children (Successors) and its depth, and `mask`, int64 [N, N]: 1 where the
column's node is on the row's path, which includes the node itself and the root. Both number nodes level by level from
the root, 0, and list children by rank.
"""

import io
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from treeopt.defaults import MAX_DEPTH, MAX_NODES
from treeopt.engines import ENGINES
from treeopt.errors import Code, TreeoptError, check_choice
from treeopt.export.lint import DraftConfig, Finding, check_exportable, shown
from treeopt.facts import Fact, for_programs, picked
from treeopt.files.choices import choices_text, is_choices, literal, tree_of_literal
from treeopt.files.read import read_bytes, read_head
from treeopt.files.strict_yaml import read_text, refusal
from treeopt.files.trees import GivenTree, as_tree
from treeopt.tree import Path as RankPath
from treeopt.tree import Tree

Fault = Callable[[str], TreeoptError]  # what is wrong -> the error, which names the file

FORMATS = (
    "read are paths such as [[0], [1], [0, 0]] in JSON or Python, token trees of NxD Inference, and growmaps of "
    "Sequoia (.pt or .json)"
)


def fault_of(path: Path, layout: str) -> Fault:
    """The function that makes the errors of a file in a layout: E206."""

    def fault(what: str) -> TreeoptError:
        fix = "correct it, or export it again from the program that made it"
        return TreeoptError(Code.ENGINE_FILE_INVALID, f"{path} is not {layout}: it {what}", at=str(path), fix=fix)

    return fault


_ID = re.compile(r"0|[1-9][0-9]{0,6}")


def adjacency_text(tree: Tree) -> str:
    """The tree as JSON; its siblings must be contiguous."""
    children: dict[str, list[str]] = {}
    for node, parent in enumerate(tree.parents[1:], start=1):
        children.setdefault(str(parent), []).append(str(node))
    return json.dumps(children)


def tree_of_adjacency(data: Mapping[Any, Any], fault: Fault) -> Tree:
    """The tree of a token tree; E206 where ids are no numbers in strings, or not given level by level."""
    children: dict[int, list[int]] = {}
    for key, listed in data.items():
        if not isinstance(listed, (list, tuple)):
            raise fault(f"has {shown(listed)} as the children of {shown(key)}, not a list")
        children[_id(key, fault)] = [_id(child, fault) for child in listed]
    return tree_of_children(children, fault)


def tree_of_children(children: Mapping[int, list[int]], fault: Fault) -> Tree:
    """The tree whose children are listed in the order of their ranks; ids are given level by level, each once."""
    nodes = 1 + sum(map(len, children.values()))
    if nodes > MAX_NODES:
        raise fault(f"has {nodes:,} nodes; a tree has {MAX_NODES:,} at most")
    paths: list[RankPath] = [()]
    for node in range(nodes):
        if node == len(paths):
            raise fault(f"has nodes that are not below the root, such as {node}")
        for rank, child in enumerate(children.get(node, ())):
            if child != len(paths):
                raise fault(f"has node {child} below node {node}, where node {len(paths)} is due: level by level")
            paths.append((*paths[node], rank))
        if len(paths[node]) > MAX_DEPTH:
            raise fault(f"is more than {MAX_DEPTH} levels deep")
    if max(children, default=0) >= nodes:
        raise fault(f"has children of node {max(children)}, but {nodes} nodes, whose ids are 0 to {nodes - 1}")
    return Tree.from_paths(paths[1:])


def _id(value: Any, fault: Fault) -> int:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise fault(f'has the id {shown(value)}: an id is a number in a string, such as "3"')
    return int(value)


KEYS = ("roots", "branches", "Successors", "mask", "depth", "size")
TENSORS = ("mask", "depth")
_WHOLE = {f"torch.{name}" for name in ("bool", "uint8", "int8", "int16", "int32", "int64")}  # types of mask and depth
_MOST_NODES = ENGINES["sequoia"].max_nodes or 0
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


def growmap_pt(tree: Tree) -> bytes:
    """The growmap as `torch.save` writes it; mask and depth are tensors of int64."""
    import torch

    content = growmap(tree)
    stream = io.BytesIO()
    torch.save({**content, **{name: torch.tensor(content[name], dtype=torch.int64) for name in TENSORS}}, stream)
    return stream.getvalue()


def read_growmap_pt(raw: bytes, fault: Fault) -> dict[str, Any]:
    """The content of a .pt file, with tensors as lists; no code in it is executed, such a file is E210."""
    import torch

    from treeopt.models.tensors import UNKNOWN, ordinary, refused_name, refused_pickle, unpacked_size

    if kind := refused_pickle(io.BytesIO(raw)):
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
        if name := refused_name(error):
            raise _refused(name, fault) from error
        raise fault("is damaged, or not a file of PyTorch") from error
    if not isinstance(content, Mapping):
        raise fault(f"holds {shown(content)}, not a mapping")
    lists = dict(content)
    for name in TENSORS:
        tensor: Any = content.get(name)
        whole = isinstance(tensor, torch.Tensor) and ordinary(tensor) and str(tensor.dtype) in _WHOLE
        if not whole or tensor.numel() > _MOST_NODES**2:
            raise fault(f"has a {name} that is not a tensor of whole numbers in memory")
        lists[name] = tensor.long().tolist()
    return lists


def _refused(kind: str, fault: Fault) -> TreeoptError:
    found = fault(f"holds more than tensors, lists and numbers ({kind})")
    return TreeoptError(Code.PICKLE_REFUSED, found.what, at=found.at, fix=found.fix)


def tree_of_growmap(content: Mapping[str, Any], fault: Fault) -> Tree:
    """The tree of a growmap, all of whose parts must agree."""
    if missing := [name for name in KEYS if name not in content]:
        raise fault(f"lacks {', '.join(missing)}")
    if unknown := [shown(name) for name in content if name not in KEYS]:
        raise fault(f"has unknown keys: {', '.join(unknown[:5])}")
    successors = content["Successors"]
    lists = isinstance(successors, list) and all(isinstance(listed, list) for listed in successors)
    if not lists or not all(type(child) is int for listed in successors for child in listed):
        raise fault("has Successors that are not lists of whole numbers")
    tree = tree_of_children(dict(enumerate(successors)), fault)
    if tree.nodes > _MOST_NODES:
        raise fault(f"has {tree.nodes:,} nodes; a growmap has {_MOST_NODES:,} at most")
    for name, right in growmap(tree).items():
        if not _same_types(content[name], right) or content[name] != right:
            raise fault(f"has {name} that are not those of its Successors")
    return tree


def _same_types(found: Any, right: Any) -> bool:
    """Whether no number is a bool or a float that equals the right one."""
    if isinstance(right, list):
        return type(found) is list and all(map(_same_types, found, right))
    return type(found) is type(right)


WRITERS: dict[str, Callable[[Tree], str]] = {
    "medusa": choices_text,
    "nxdi": choices_text,
    "nxdi-eagle": adjacency_text,
    "trtllm": choices_text,
    "triton": lambda tree: ", ".join("{" + ", ".join(map(str, path)) + "}" for path in tree.paths),  # {0}, {0, 0}
    "sequoia": lambda tree: json.dumps(growmap(tree)),
    "eagle": lambda tree: f"mc_sim_7b_63 = {choices_text(tree)}",
    "hydra": choices_text,
    "json": choices_text,
}


@dataclass(frozen=True)
class Exported:
    """A tree in the format of an engine."""

    engine: str  # a name of `treeopt.engines.ENGINES`
    content: bytes  # the bytes of the file
    setting: str  # where the content goes in the engine, with the numbers that belong to it
    warnings: tuple[Finding, ...]  # conditions under which the engine reads it rightly

    def report(self, tree: Tree) -> Iterator[Fact]:
        """Who reads the file, and what of the tree is not in it."""
        known = ENGINES[self.engine]
        yield Fact("read by", f"{known.reader}: {known.versions}")
        yield Fact("setting", self.setting, key="setting")
        yield Fact("lost", known.lost, key="lost")
        more = {**picked(tree, "nodes", "depth"), **picked(known, "reader", "versions")}
        yield from for_programs({**more, "to": self.engine, "findings": self.warnings})


def export_tree(tree: GivenTree, to: str, *, suffix: str = "", draft: DraftConfig | None = None) -> Exported:
    """A tree in the format of an engine.

    Args:
        tree: the tree.
        to: a name of `treeopt.engines.ENGINES`.
        suffix: of the file that is to be written; `.pt` for a growmap of `sequoia` as `torch.save` writes it.
        draft: the config of the drafter that the engine serves, where it is known.

    Raises:
        TreeoptError: E105 where the engine, or the drafter in it, would refuse or misread the tree; as
            `treeopt.files.trees.as_tree`.
        ValueError: where no engine has the name.
    """
    check_choice("to", to, ENGINES)
    tree = as_tree(tree)
    if to == "hydra" and draft is not None and not draft.grounded:
        what = f"{draft.name} has {'no Hydra heads' if draft.grounded is None else 'Hydra heads without grounding'}"
        why = "the tree is for heads that read the drafts before them: grounded_heads is true in their config.json"
        raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, why=why, fix="grounded Hydra heads")
    warnings = check_exportable(tree, to)
    packed = to == "sequoia" and suffix.lower() == ".pt"
    content = growmap_pt(tree) if packed else (WRITERS[to](tree) + "\n").encode()
    setting = ENGINES[to].setting.format(drafts=len(tree.paths), nodes=tree.nodes, depth=tree.depth)
    return Exported(to, content, setting, tuple(warnings))


_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


PATHS = "a list of paths"
ADJACENCY, GROWMAP = "a token tree of NxD Inference", "a growmap of Sequoia"
_MODEL_RANKS = (ADJACENCY, GROWMAP)  # layouts whose ranks are those of a draft model


@dataclass(frozen=True)
class Imported:
    """A tree of an engine's file."""

    tree: Tree  # the tree; its source names the file
    layout: str  # the name of the format
    assumed: tuple[str, ...]  # what the file does not say


def import_tree(path: str | os.PathLike[str], *, name: str = "") -> Imported:
    """Read a tree from the file of an engine; or from a pasted list of paths.

    No code of the file is executed, and pickles are read with `weights_only=True`.

    Args:
        path: the file.
        name: of the list, in a Python file that assigns several.

    Raises:
        TreeoptError: E201 where there is no file; E203 where it is not text of these formats; E206 where it breaks the
            rules of its format; E210 where a .pt file holds code.
    """
    file = Path(path)
    regular = file.is_file() or not file.exists()  # a pipe can be read once
    if regular and read_head(file, 8).startswith(_PICKLES):
        fault = fault_of(file, GROWMAP)
        return _imported(file, tree_of_growmap(read_growmap_pt(read_bytes(file, MAX_PT), fault), fault), GROWMAP)
    text = read_text(file, FORMATS).decode("utf-8-sig", errors="replace")
    if "\ufffd" in text:
        raise refusal(file, "is not UTF-8 text", FORMATS)
    if "schema:" in text and "treeopt.tree/1" in text:
        raise refusal(
            file, "is a tree of treeopt already", FORMATS, fix="use it as it is; treeopt export writes others"
        )
    if not is_choices(text) and not text.lstrip().startswith("{"):
        raise refusal(file, "holds no tree in a format that is known", FORMATS)
    content = literal(file, text, name)
    if not isinstance(content, Mapping):
        if isinstance(content, (list, tuple)) and len(content) >= MAX_NODES:
            raise refusal(file, f"lists {len(content):,} paths; a tree has {MAX_NODES:,} nodes at most", FORMATS)
        return _imported(file, tree_of_literal(file, content), PATHS)
    if set(content) & set(KEYS):
        return _imported(file, tree_of_growmap(content, fault_of(file, GROWMAP)), GROWMAP)
    return _imported(file, tree_of_adjacency(content, fault_of(file, ADJACENCY)), ADJACENCY)


def _imported(file: Path, tree: Tree, layout: str) -> Imported:
    meaning = "the engine's draft model" if layout in _MODEL_RANKS else "the heads"
    assumed = (f"the ranks are those of {meaning}: the file does not name a drafter",)
    return Imported(Tree(tree.paths, source={"reference": f"{file.name}, {layout}"}), layout, assumed)
