"""The rules of engines for trees: what an engine would refuse or misread, and trees built within its limits."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeGuard

from treeopt.calibration import Calibration
from treeopt.defaults import HEADS, MODEL
from treeopt.engines import ANY_DRAFT, EAGLE_DRAFT, ENGINES, HEADS_DRAFT, MODEL_DRAFT, Engine
from treeopt.errors import Code, TreeoptError, check_choice, check_counts
from treeopt.export.growmaps import shown
from treeopt.files.choices import is_choices, literal
from treeopt.files.drafters import load_drafter
from treeopt.files.strict_yaml import TREE_FORMATS, read_text
from treeopt.files.trees import GivenTree, as_tree, load_tree
from treeopt.optimize.build_job import BuildJob, Built, run_job
from treeopt.optimize.intervals import Gain, gain_of_sums, replayed_gain
from treeopt.progress import Progress, silent
from treeopt.tree import Path as RankPath
from treeopt.tree import Tree

ERROR, WARNING = "error", "warning"
DRAFT_ROWS = "draft-rows"  # the rule of EAGLE-1 that growth does not know
_SHOWN = 3  # paths of one finding
_SAME = {HEADS: HEADS_DRAFT, MODEL: MODEL_DRAFT}  # drafter of a tree -> engines that draft alike


@dataclass(frozen=True)
class Finding:
    """One broken rule.

    Args:
        rule: its id.
        severity: `error` or `warning`.
        engine: the engine whose rule it is; empty for a rule of every tree.
        what: the fault, with the values.
        why: what the engine does with such a tree.
        fix: a command or an edit.
        paths: the first paths that break it.
        count: the number of these paths; 0 where the rule is one of the whole tree.
    """

    rule: str
    severity: str
    engine: str
    what: str
    why: str
    fix: str
    paths: tuple[RankPath, ...] = ()
    count: int = 0

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}; {self.why}" + (f" ({self.fix})" if self.fix else "")


def lint_tree(tree: GivenTree, engine: str, *, num_heads: int | None = None) -> list[Finding]:
    """The rules of an engine that a tree breaks, errors first.

    Args:
        tree: the tree.
        engine: a name of `treeopt.engines.ENGINES`.
        num_heads: number of heads that the engine serves; None where it is not known.

    Raises:
        TreeoptError: as `treeopt.files.trees.as_tree`.
        ValueError: where no engine has the name, or the number is out of range.
    """
    check_choice("engine", engine, ENGINES)
    if num_heads is not None:
        check_counts(0, num_heads=num_heads)
    tree, known = as_tree(tree), ENGINES[engine]
    found = [finding for finding in _broken(tree, known) if finding is not None]
    if num_heads is not None and known.drafts == HEADS_DRAFT and tree.depth > num_heads:
        deep = [path for path in tree.paths if len(path) > num_heads]
        what = f"{_named(deep)} deeper than the {num_heads} heads"
        fix = f"treeopt build --max-depth {num_heads}"
        found.append(_of_engine("heads", known, what, fix, why="level d is drafted by head d", paths=deep))
    if num_heads is not None and known.name == "medusa" and num_heads != known.max_depth:
        what = f"{num_heads} heads, and its loader makes {known.max_depth}, whatever the config says"
        why = "further heads are not read, and missing ones have random weights"
        fix = f"serve {known.max_depth} heads"
        found.append(_of_engine("heads-made", known, what, fix, why=why, severity=WARNING))
    return sorted(found, key=lambda finding: finding.severity != ERROR)


def refusing_engines(tree: Tree) -> list[str]:
    """The names of the engines that `check_exportable` refuses the tree for."""
    return [name for name in ENGINES if any(finding.severity == ERROR for finding in lint_tree(tree, name))]


def lint_list(paths: Sequence[object]) -> list[Finding]:
    """The rules of every tree that a list of candidate paths breaks; they need no engine."""
    found = []
    wrong = [path for path in paths if not _is_path(path)]
    if wrong:
        what = f"{len(wrong)} entries are not lists of whole numbers from 0, such as {shown(wrong[0])}"
        found.append(_of_list("types", what, "write every path as a list of whole numbers, such as [0, 2]"))
    if len({type(path) for path in paths if isinstance(path, (list, tuple))}) > 1:
        what = "lists and tuples are mixed"
        why = "engines sort the paths, and Python does not compare a list with a tuple"
        found.append(_of_list("types", what, "write all paths as lists", why=why))
    listed: list[RankPath] = [tuple(path) for path in paths if _is_path(path)]
    known = {(), *listed}
    if () in listed:
        found.append(_of_list("root", "[] is listed", "remove []: the root is not a path", why="the root is implicit"))
    twice = [path for path, times in Counter(listed).items() if path and times > 1]
    if twice:
        found.append(_of_list("duplicate", f"{_named(twice)} more than once", "keep each path once", paths=twice))
    orphans = [path for path in dict.fromkeys(listed) if path and path[:-1] not in known]
    if orphans:
        what = f"{_named(orphans)} without the path above"
        why = "TensorRT-LLM attaches such a node to the root without a word; Medusa and NxDI stop with an error"
        missing = list(orphans[0][:-1])
        fix = f"add {missing} and the paths above it, or remove these"
        found.append(_of_list("orphan", what, fix, why=why, paths=orphans))
    return found


def gaps(paths: Sequence[RankPath], levels: int) -> list[RankPath]:
    """The paths of at most `levels` ranks whose sibling of the next smaller rank is missing, in their order.

    For example `(0, 2)` where `(0, 1)` is missing. A path that ends in rank 0 needs no sibling.
    """
    known = set(paths)
    return [path for path in paths if len(path) <= levels and path[-1] and (*path[:-1], path[-1] - 1) not in known]


def check_exportable(tree: Tree, engine: str) -> list[Finding]:
    """The warnings of an engine about a tree; E105 with all broken rules where it would refuse or misread it."""
    found = lint_tree(tree, engine)
    errors = [finding for finding in found if finding.severity == ERROR]
    if errors:
        first = errors[0]
        places = "\n".join(f"{finding.rule}: {finding.what}" for finding in errors)
        what = f"{ENGINES[engine].reader} would not read this tree rightly: {first.what}"
        raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, at=places, why=first.why, fix=first.fix)
    return found


def _broken(tree: Tree, engine: Engine) -> Iterator[Finding | None]:
    """A finding for each rule that is broken, and perhaps None for others."""
    drafts = len(tree.paths)
    if not tree.paths and engine.drafts != ANY_DRAFT:
        yield _of_engine("empty", engine, "the tree has no drafts", "treeopt build --nodes 2", why="nothing is drafted")
    yield _drafter(tree, engine)
    if engine.max_rank is not None and tree.max_rank > engine.max_rank:
        above = [path for path in tree.paths if path[-1] > engine.max_rank]
        what = f"{_named(above)} with a rank above {engine.max_rank}"
        yield _of_engine("rank", engine, what, _grow(engine), paths=above)
    if missing := gaps(tree.paths, engine.contiguous):
        where = " on level 1" if engine.contiguous == 1 else ""
        what = f"{_named(missing)} without the sibling of the next smaller rank{where}"
        yield _of_engine("gap", engine, what, _grow(engine), paths=missing)
    if engine.max_depth is not None and tree.depth > engine.max_depth:
        deep = [path for path in tree.paths if len(path) > engine.max_depth]
        what = f"{_named(deep)} deeper than {engine.max_depth} levels"
        yield _of_engine("depth", engine, what, _grow(engine), paths=deep)
    if engine.max_nodes is not None and tree.nodes > engine.max_nodes:
        what = f"{tree.nodes:,} nodes, root counted; at most {engine.max_nodes:,} are written"
        why = "its mask has a number for each pair of nodes"
        yield _of_engine("nodes", engine, what, f"treeopt build --nodes {engine.max_nodes}", why=why)
    if engine.name == "eagle" and tree.depth == 1:
        why = (
            "its drafter takes the first of the levels below level 1, and stops with an IndexError where there is none"
        )
        yield _of_engine("one-level", engine, "the tree has one level", "treeopt build with more nodes", why=why)
    if engine.name == "eagle":
        yield _draft_rows(tree, engine)
    most = engine.default_drafts
    if most is not None and drafts > most:
        what = f"{drafts} drafts; an engine that was built with default options holds {most}"
        fix = f"build the engine with a maximum draft length of {drafts}, or treeopt build --nodes {most + 1}"
        yield _of_engine("rows", engine, what, fix, why="more drafts are refused", severity=WARNING)


def _drafter(tree: Tree, engine: Engine) -> Finding | None:
    """Whether the engine's drafter gives the ranks the meaning that they have in the tree."""
    kind = drafter_name(tree.drafter, tree.source.get("drafter"))
    fitted = bool(tree.source.get("calibration"))  # a list of paths says nothing about the drafts
    if engine.drafts == _SAME.get(kind) or (kind == HEADS and (engine.drafts == ANY_DRAFT or not fitted)):
        return None
    if kind in _SAME and engine.drafts in (MODEL_DRAFT, EAGLE_DRAFT):
        drafts = "an EAGLE head" if engine.drafts == EAGLE_DRAFT else "a draft model"
        what = f"the ranks are of {'heads' if kind == HEADS else 'a draft model'}, and the engine drafts with {drafts}"
        why = "the paths are read rightly, but were not fitted to its drafts: the expected figures do not hold there"
        fix = "" if engine.drafts == EAGLE_DRAFT else "treeopt calibrate --draft MODEL, and treeopt build"
        return _of_engine("drafter", engine, what, fix, why=why, severity=WARNING)
    if kind == MODEL and engine.drafts == ANY_DRAFT:
        what = "the ranks are of a draft model, which the file does not say"
        why = "rank r is the (r+1)-th likeliest token after the tokens of the path above, not of a head"
        return _of_engine("drafter", engine, what, "keep the tree file beside it", why=why, severity=WARNING)
    what = f"the tree was made for drafter {tree.drafter}" + (f" ({kind})" if kind else "")
    why = "its ranks are of candidates that only treeopt drafts; an engine takes them for ranks of its drafter"
    if kind == MODEL:
        why = "its ranks are of a draft model's tokens after each path; the engine takes them for ranks of its heads"
    fix = "treeopt calibrate --drafter heads, and treeopt build; or treeopt generate with this tree"
    if engine.drafts in (MODEL_DRAFT, EAGLE_DRAFT):
        fix = "treeopt calibrate --drafter model, and treeopt build" if kind else "keep the drafter's file"
    return _of_engine("drafter", engine, what, fix, why=why)


def drafter_name(drafter_id: str, file: str | None) -> str:
    """The name of a drafter, as `--drafter` has it; empty where its file is not there, or is another one's."""
    if not drafter_id:
        return HEADS
    if not file or not Path(file).is_file():
        return ""
    drafter = load_drafter(file)
    return drafter.name if drafter.id == drafter_id else ""


def _draft_rows(tree: Tree, engine: Engine) -> Finding | None:
    """Nodes whose children EAGLE-1's drafter would mistake for those of another node of their level."""
    inner = [tree.paths[node - 1] for node in sorted(set(tree.parents[1:])) if node]
    parents = {path[:-1] for path in inner}
    skipped = []
    for _, group in groupby(inner, key=len):
        level = list(group)
        last = max((i for i, path in enumerate(level) if path in parents), default=0)
        skipped += [path for path in level[:last] if path not in parents]
    if not skipped:
        return None
    what = f"{_named(skipped)} whose children have no children, before a node of the level whose children have some"
    why = "its drafter counts only parents of such nodes, so the drafts below the later node are those of the earlier"
    return _of_engine(DRAFT_ROWS, engine, what, "treeopt build --max-depth 2", why=why, paths=skipped)


def _of_engine(
    rule: str,
    engine: Engine,
    what: str,
    fix: str,
    *,
    why: str = "",
    paths: Sequence[RankPath] = (),
    severity: str = ERROR,
) -> Finding:
    return Finding(rule, severity, engine.name, what, why or engine.reason, fix, tuple(paths[:_SHOWN]), len(paths))


def _of_list(rule: str, what: str, fix: str, *, why: str = "", paths: Sequence[RankPath] = ()) -> Finding:
    return Finding(rule, ERROR, "", what, why or Code.TREE_INVALID.rule, fix, tuple(paths[:_SHOWN]), len(paths))


def _grow(engine: Engine) -> str:
    return f"treeopt build --for {engine.name}"


def _is_path(path: object) -> TypeGuard[Sequence[int]]:
    return isinstance(path, (list, tuple)) and all(type(rank) is int and rank >= 0 for rank in path)


def _named(paths: Sequence[RankPath]) -> str:
    """`1 path ([0, 10])`, `5 paths ([10], [11], [12], ...)`."""
    listed = ", ".join(shown(list(path)) for path in paths[:_SHOWN]) + (", ..." if len(paths) > _SHOWN else "")
    return f"{len(paths)} path{'' if len(paths) == 1 else 's'} ({listed})"


@dataclass(frozen=True)
class Constrained:
    """A tree built under limits.

    Args:
        built: the tree.
        gain: from the tree without the limits to this tree, in tokens per step; None for several tasks.
        cross_validated: whether `gain` is from texts left out of the fit; else it is from the fitted texts.
        findings: rules of the engine that the tree still breaks.
    """

    built: Built
    gain: Gain | None
    cross_validated: bool
    findings: tuple[Finding, ...]


def build_for(calibrations: Sequence[Calibration], job: BuildJob, *, progress: Progress = silent) -> Constrained:
    """Build the tree of a job that has limits for an engine, and the tree of the same size without them.

    EAGLE-1 misreads some trees of three levels and more (`draft-rows`). For it the tree is built again with one level
    less until it is read rightly.
    """
    built = run_job(calibrations, job, progress=progress)
    findings = lint_tree(built.tree, job.engine) if job.engine else []
    while any(finding.rule == DRAFT_ROWS for finding in findings):
        flatter = dataclasses.replace(job, max_depth=built.tree.depth - 1)
        built = run_job(calibrations, flatter, progress=progress)
        findings = lint_tree(built.tree, job.engine)
    if len(calibrations) > 1:
        return Constrained(built, None, False, tuple(findings))
    return Constrained(built, *_loss(calibrations, job, built, progress), tuple(findings))


def _loss(calibrations: Sequence[Calibration], job: BuildJob, built: Built, progress: Progress) -> tuple[Gain, bool]:
    """The gain over the tree of the same size without the limits, and whether it is cross-validated."""
    same_size = dataclasses.replace(job.unconstrained, nodes=built.budget)
    free = run_job(calibrations, same_size, progress=progress)
    fitted = built.fitted
    if free.fit.sums is None or built.fit.sums is None:
        return replayed_gain(free.tree, built.tree, fitted), False
    return gain_of_sums(fitted.token_hashes, free.fit.sums, built.fit.sums), True


@dataclass(frozen=True)
class LintReport:
    """The rules that the tree of a file breaks.

    `tree` is None where the paths are not one; `nodes` is then 1 and the number of the list's entries.
    """

    tree: Tree | None
    nodes: int
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that are errors."""
        return tuple(finding for finding in self.findings if finding.severity == ERROR)


def lint_file(name: str, engines: Sequence[str], *, num_heads: int | None = None) -> LintReport:
    """Check the tree of a file, or of `treeopt list`, by the rules of some engines.

    A list of paths that is not a tree is reported with the rules that it breaks; other files must hold a tree.
    """
    entries = _entries(name)
    if found := lint_list(entries):
        return LintReport(None, 1 + len(entries), tuple(found))
    tree = load_tree(name)
    broken = (finding for engine in engines for finding in lint_tree(tree, engine, num_heads=num_heads))
    return LintReport(tree, tree.nodes, tuple(broken))


def _entries(name: str) -> list[object]:
    """The entries of a file with a list in JSON or Python; none of any other file or name."""
    path = Path(name)
    if not path.is_file():
        return []
    text = read_text(path, TREE_FORMATS).decode("utf-8-sig", errors="replace")
    found = literal(path, text) if is_choices(text) else None
    return list(found) if isinstance(found, (list, tuple)) else []
