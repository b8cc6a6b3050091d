"""Trees in the formats of engines: one function for each format, by the names of `treeopt.engines`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from treeopt.engines import ENGINES
from treeopt.errors import check_choice
from treeopt.export.adjacency import adjacency_text
from treeopt.export.braces import braces_text
from treeopt.export.growmaps import growmap_pt, growmap_text
from treeopt.export.lint import Finding, check_exportable
from treeopt.files.choices import choices_text
from treeopt.files.trees import GivenTree, as_tree
from treeopt.tree import Tree

PT = ".pt"


def _eagle_text(tree: Tree) -> str:
    return f"mc_sim_7b_63 = {choices_text(tree)}"


WRITERS: dict[str, Callable[[Tree], str]] = {
    "medusa": choices_text,
    "nxdi": choices_text,
    "nxdi-eagle": adjacency_text,
    "trtllm": choices_text,
    "triton": braces_text,
    "sequoia": growmap_text,
    "eagle": _eagle_text,
    "json": choices_text,
}
BINARY: dict[str, Callable[[Tree], bytes]] = {"sequoia": growmap_pt}  # written to files with the suffix .pt


@dataclass(frozen=True)
class Exported:
    """A tree in the format of an engine.

    Args:
        engine: a name of `treeopt.engines.ENGINES`.
        content: the bytes of the file.
        setting: where the content goes in the engine, with the numbers that belong to it.
        warnings: conditions under which the engine reads it rightly.
    """

    engine: str
    content: bytes
    setting: str
    warnings: tuple[Finding, ...]


def export_tree(tree: GivenTree, to: str, *, suffix: str = "") -> Exported:
    """A tree in the format of an engine.

    Args:
        tree: the tree.
        to: a name of `treeopt.engines.ENGINES`.
        suffix: of the file that is to be written; `.pt` for a growmap of `sequoia` as `torch.save` writes it.

    Raises:
        TreeoptError: E105 where the engine would refuse or misread the tree; as `treeopt.files.trees.as_tree`.
        ValueError: where no engine has the name.
    """
    check_choice("to", to, ENGINES)
    tree = as_tree(tree)
    warnings = check_exportable(tree, to)
    binary = BINARY.get(to) if suffix.lower() == PT else None
    content = binary(tree) if binary else (WRITERS[to](tree) + "\n").encode()
    setting = ENGINES[to].setting.format(drafts=len(tree.paths), nodes=tree.nodes, depth=tree.depth)
    return Exported(to, content, setting, tuple(warnings))
