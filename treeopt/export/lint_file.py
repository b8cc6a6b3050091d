"""The rules of engines for the tree in a file, which need not be a tree yet, and a tree that keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treeopt.calibration import Calibration
from treeopt.engines import ENGINES
from treeopt.errors import Code, TreeoptError
from treeopt.export.build_for import build_for
from treeopt.export.lint import ERROR, Finding, lint_list, lint_tree
from treeopt.files.choices import is_choices, literal
from treeopt.files.kinds import TREE_FORMATS, read_text
from treeopt.files.trees import load_tree
from treeopt.optimize.build_job import Job
from treeopt.optimize.differences import Gain, replayed_gain
from treeopt.progress import Progress, silent
from treeopt.tree import Tree


@dataclass(frozen=True)
class Report:
    """The rules that the tree of a file breaks.

    Args:
        tree: the tree; None where the paths are not one.
        nodes: number of nodes, root counted; of a list that is not a tree, 1 and the number of its entries.
        findings: the broken rules.
    """

    tree: Tree | None
    nodes: int
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that are errors."""
        return tuple(finding for finding in self.findings if finding.severity == ERROR)


@dataclass(frozen=True)
class Fixed:
    """A tree that was grown again under the limits of an engine.

    Args:
        tree: the new tree.
        gain: from the given tree to the new one, by replay over the calibration; None where it cannot be replayed.
        loss: from the new tree without the limits to the new tree; cross-validated where there are enough texts.
        replaced: why the given tree was not replayed; empty where it was.
        findings: rules that the new tree breaks.
        capped: why the new tree has fewer nodes than the given one; empty where the engine takes as many.
    """

    tree: Tree
    gain: Gain | None
    loss: Gain | None
    replaced: str
    findings: tuple[Finding, ...]
    capped: str = ""


def lint_file(name: str, engines: Sequence[str], *, num_heads: int | None = None) -> Report:
    """Check the tree of a file, or of `treeopt list`, by the rules of some engines.

    A list of paths that is not a tree is reported with the rules that it breaks; other files must hold a tree.

    Raises:
        TreeoptError: as `treeopt.files.trees.load_tree`; E203 where a list is no literal.
    """
    entries = _entries(name)
    if entries is not None:
        found = lint_list(entries)
        if found:
            return Report(None, 1 + len(entries), tuple(found))
    tree = load_tree(name)
    broken = (finding for engine in engines for finding in lint_tree(tree, engine, num_heads=num_heads))
    return Report(tree, tree.nodes, tuple(broken))


def fix_tree(
    name: str,
    engine: str,
    calibration: Calibration,
    *,
    num_heads: int | None = None,
    progress: Progress = silent,
) -> Fixed:
    """The best tree of as many nodes as the tree of a file, or as the engine takes, under the limits of an engine.

    Args:
        name: the file, or a name of `treeopt list`; a list that is not a tree counts by its entries.
        engine: a name of `treeopt.engines.ENGINES`.
        calibration: the traces to grow from.
        num_heads: number of heads that the engine serves, which limits the depth.
        progress: called after each growth.

    Raises:
        TreeoptError: as `lint_file` and `build_for`.
    """
    report = lint_file(name, [engine])
    nodes = min(report.nodes, ENGINES[engine].max_nodes or report.nodes)
    job = Job(nodes=nodes, max_depth=num_heads, engine=engine)
    try:
        constrained = build_for([calibration], job, progress=progress)
    except TreeoptError as error:
        if error.code is not Code.TREE_NOT_EXPORTABLE:
            raise
        fix = f"treeopt build --for {engine} {error.fix}"  # the option of a smaller tree, which lint does not have
        raise TreeoptError(error.code, error.what, why=error.why, fix=fix) from error
    tree = constrained.built.tree
    gain, replaced = None, "its paths are not a tree"
    if report.tree is not None:
        try:
            gain, replaced = replayed_gain(report.tree, tree, calibration), ""
        except TreeoptError as error:
            if error.code not in (Code.TREE_TOO_DEEP, Code.RANK_TOO_LARGE, Code.DRAFTER_MISMATCH):
                raise
            replaced = error.what
    capped = f"the tree given has {report.nodes:,} nodes, and {engine} takes {nodes:,}" if nodes < report.nodes else ""
    return Fixed(tree, gain, constrained.gain, replaced, constrained.findings, capped)


def _entries(name: str) -> list[object] | None:
    """The entries of a file with a list in JSON or Python; None for any other file or name."""
    path = Path(name)
    if not path.is_file():
        return None
    text = read_text(path, TREE_FORMATS).decode("utf-8-sig", errors="replace")
    found = literal(path, text) if is_choices(text) else None
    return list(found) if isinstance(found, (list, tuple)) else None
