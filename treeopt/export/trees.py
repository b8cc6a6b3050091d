"""Trees to and from the formats of engines, by the names of `treeopt.engines`."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from treeopt.defaults import MAX_NODES
from treeopt.engines import ENGINES
from treeopt.errors import Code, TreeoptError, check_choice
from treeopt.export.draft_config import DraftConfig
from treeopt.export.growmaps import (
    FORMATS,
    KEYS,
    MAX_PT,
    adjacency_text,
    fault_of,
    growmap_pt,
    growmap_text,
    read_growmap_pt,
    tree_of_adjacency,
    tree_of_growmap,
)
from treeopt.export.lint import Finding, check_exportable
from treeopt.facts import Fact, for_programs, picked
from treeopt.files.choices import choices_text, is_choices, literal, tree_of_literal
from treeopt.files.read import read_bytes, read_head
from treeopt.files.strict_yaml import read_text, refusal
from treeopt.files.trees import GivenTree, as_tree
from treeopt.tree import Tree

PT = ".pt"


WRITERS: dict[str, Callable[[Tree], str]] = {
    "medusa": choices_text,
    "nxdi": choices_text,
    "nxdi-eagle": adjacency_text,
    "trtllm": choices_text,
    "triton": lambda tree: ", ".join("{" + ", ".join(map(str, path)) + "}" for path in tree.paths),  # {0}, {0, 0}
    "sequoia": growmap_text,
    "eagle": lambda tree: f"mc_sim_7b_63 = {choices_text(tree)}",
    "hydra": choices_text,
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
    binary = BINARY.get(to) if suffix.lower() == PT else None
    content = binary(tree) if binary else (WRITERS[to](tree) + "\n").encode()
    setting = ENGINES[to].setting.format(drafts=len(tree.paths), nodes=tree.nodes, depth=tree.depth)
    return Exported(to, content, setting, tuple(warnings))


_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


PATHS = "a list of paths"
ADJACENCY, GROWMAP = "a token tree of NxD Inference", "a growmap of Sequoia"
_MODEL_RANKS = (ADJACENCY, GROWMAP)  # layouts whose ranks are those of a draft model


@dataclass(frozen=True)
class Imported:
    """A tree of an engine's file.

    Args:
        tree: the tree; its source names the file.
        layout: the name of the format.
        assumed: what the file does not say.
    """

    tree: Tree
    layout: str
    assumed: tuple[str, ...]


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
