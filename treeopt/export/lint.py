"""The rules of engines for trees: what an engine would refuse or misread, and trees built within its limits."""

import dataclasses
import functools
import os
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from treeopt.calibration import Calibration
from treeopt.defaults import BLOCK, EAGLE, HEADS, MODEL
from treeopt.engines import (
    ANY_DRAFT,
    EAGLE_DRAFT,
    ENGINES,
    HEADS_DRAFT,
    HYDRA_DRAFT,
    MODEL_DRAFT,
    Engine,
    SettingsEngine,
)
from treeopt.errors import Code, TreeoptError, check_choice, check_counts
from treeopt.facts import Fact, Part, picked
from treeopt.files.drafters import load_drafter
from treeopt.files.read import read_settings
from treeopt.files.trees import GivenTree, as_tree
from treeopt.optimize.build_job import BuildJob, Built, run_job
from treeopt.optimize.intervals import Gain, gain_of_sums, replayed_gain
from treeopt.progress import Progress, silent
from treeopt.tree import Path as RankPath
from treeopt.tree import Tree

# The number of MTP modules, in the order in which vLLM 0.33 looks (vllm/config/speculative.py); of some models it is
# in the config of the text model.
_MODULES = ("n_predict", "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


@dataclass(frozen=True)
class DraftConfig:
    """Limits of a drafter."""

    name: str  # its folder
    # MTP modules in the checkpoint; a longer chain is a multiple of them in vLLM. None where there are none
    modules: int | None = None
    grounded: bool | None = None  # whether Hydra heads read the drafts before them; None of other drafters

    def allows(self, drafts: int) -> bool:
        """Whether vLLM takes a chain of so many drafts."""
        return self.modules is None or drafts <= self.modules or drafts % self.modules == 0

    def check(self, drafts: int | None) -> None:
        """Raise E105 where vLLM does not take a chain of so many drafts."""
        if drafts is not None and not self.allows(drafts):
            what = f"{self.name} has {self.modules} MTP modules, and the chain {drafts} drafts"
            why = "vLLM takes at most as many, or a multiple of them"
            raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, at=f"--chain-length {drafts}", why=why)


def read_draft_config(path: str | os.PathLike[str]) -> DraftConfig:
    """The limits in the config.json of a drafter, or in a folder with one; of an MTP module it is that of the base.

    Raises:
        TreeoptError: E201 where there is no such file, E203 where it is no config.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    found = read_settings(file)
    if not isinstance(found, dict):
        raise TreeoptError(Code.FILE_INVALID, f"{file} is not a config.json", why="it holds no names and values")
    text = found.get("text_config")
    parts: list[dict[str, Any]] = [found, *([text] if isinstance(text, dict) else [])]
    numbers = [part[name] for name in _MODULES for part in parts if part.get(name)]
    if numbers and (type(numbers[0]) is not int or numbers[0] < 1):
        what = f"{file} says that there are {numbers[0]!r} MTP modules"
        raise TreeoptError(Code.FILE_INVALID, what, why="it is a whole number from 1")
    hydra = "hydra_num_heads" in found
    grounded = bool(found.get("grounded_heads")) if hydra else None
    return DraftConfig(str(path), numbers[0] if numbers else None, grounded)


ERROR, WARNING = "error", "warning"
DRAFT_ROWS, EXPANDED_FIRST = "draft-rows", "expanded-first"  # rules of EAGLE-1 and Hydra that growth does not know
_SHOWN = 3  # paths of one finding
# Drafts that depend on the tokens of the path above.
_OF_MODEL = {MODEL_DRAFT: "a draft model", EAGLE_DRAFT: "an EAGLE head", HYDRA_DRAFT: "grounded Hydra heads"}
_SAME = {HEADS: HEADS_DRAFT, MODEL: MODEL_DRAFT, EAGLE: EAGLE_DRAFT}  # drafter of a tree -> engines that draft alike
_RANKS_OF = {HEADS: "heads", MODEL: "a draft model", EAGLE: "an EAGLE head"}


@dataclass(frozen=True)
class Finding:
    """One broken rule."""

    rule: str  # its id
    severity: str  # `error` or `warning`
    engine: str  # the engine whose rule it is
    what: str  # the fault, with the values
    why: str  # what the engine does with such a tree
    fix: str  # a command or an edit
    paths: tuple[RankPath, ...] = ()  # the first paths that break it
    count: int = 0  # the number of these paths; 0 where the rule is one of the whole tree

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}; {self.why}" + (f" ({self.fix})" if self.fix else "")


def lint_tree(tree: GivenTree, engine: str, *, num_heads: int | None = None) -> list[Finding]:
    """The rules of an engine that a tree breaks; errors first.

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
    found = _broken(as_tree(tree), ENGINES[engine], num_heads)
    return sorted(found, key=lambda finding: finding.severity != ERROR)


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
        what = f"{ENGINES[engine].reader} would misread this tree: {first.what}"
        raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, at=places, why=first.why, fix=first.fix)
    return found


def _broken(tree: Tree, engine: Engine, num_heads: int | None) -> Iterator[Finding]:
    """A finding for each rule that is broken."""
    found, drafts = functools.partial(_finding, engine=engine), len(tree.paths)
    if not tree.paths and engine.drafts != ANY_DRAFT:
        yield found("empty", "the tree has no drafts", "treeopt build --nodes 2", "nothing is drafted")
    yield from _drafter(tree, engine)
    above = [path for path in tree.paths if engine.max_rank is not None and path[-1] > engine.max_rank]
    where = " on level 1" if engine.contiguous == 1 else ""
    for rule, paths, fault in (
        ("rank", above, f"with a rank above {engine.max_rank}"),
        ("gap", gaps(tree.paths, engine.contiguous), f"without the sibling of the next smaller rank{where}"),
        ("depth", _deeper(tree, engine.max_depth), f"deeper than {engine.max_depth} levels"),
    ):
        if paths:
            fix = f"treeopt build --for {engine.name}"
            yield found(rule, f"{_named(paths)} {fault}", fix, engine.reason, paths=paths)
    if engine.max_nodes is not None and tree.nodes > engine.max_nodes:
        what = f"{tree.nodes:,} nodes, root counted; at most {engine.max_nodes:,} are written"
        why = "its mask has a number for each pair of nodes"
        yield found("nodes", what, f"treeopt build --nodes {engine.max_nodes}", why)
    most = engine.default_drafts
    if most is not None and drafts > most:
        what = f"{drafts} drafts; an engine that was built with default options holds {most}"
        fix = f"build the engine with a maximum draft length of {drafts}, or treeopt build --nodes {most + 1}"
        yield found("rows", what, fix, "more drafts are refused", severity=WARNING)
    yield from _of_readers(tree, engine, num_heads)


def _of_readers(tree: Tree, engine: Engine, num_heads: int | None) -> Iterator[Finding]:
    """What the code of single engines cannot read."""
    found = functools.partial(_finding, engine=engine)
    if engine.name == "eagle" and tree.depth == 1:
        why = "its drafter takes the first of the levels below level 1, and stops with an IndexError without one"
        yield found("one-level", "the tree has one level", "treeopt build with more nodes", why)
    if engine.name == "eagle" and (skipped := _draft_rows(tree)):
        fault = "whose children have no children, before a node of the level whose children have some"
        why = "its drafter counts only parents of such nodes: the drafts below the later node are those of the earlier"
        yield found(DRAFT_ROWS, f"{_named(skipped)} {fault}", "treeopt build --max-depth 2", why, paths=skipped)
    if engine.name == "hydra" and (later := _expanded_later(tree)):
        fault = "with children, after a sibling without"
        why = "of a node's children it expands the first: the drafts below are those of the sibling"
        yield found(EXPANDED_FIRST, f"{_named(later)} {fault}", "treeopt build --for hydra", why, paths=later)
    if engine.drafts in (HEADS_DRAFT, HYDRA_DRAFT) and (deep := _deeper(tree, num_heads)):
        what, fix = f"{_named(deep)} deeper than the {num_heads} heads", f"treeopt build --max-depth {num_heads}"
        yield found("heads", what, fix, "level d is drafted by head d", paths=deep)
    if engine.name == "medusa" and num_heads not in (None, engine.max_depth):
        what = f"{num_heads} heads, and its loader makes {engine.max_depth}, whatever the config says"
        why = "further heads are not read, and missing ones have random weights"
        yield found("heads-made", what, f"serve {engine.max_depth} heads", why, severity=WARNING)


def _deeper(tree: Tree, most: int | None) -> list[RankPath]:
    return [path for path in tree.paths if most is not None and len(path) > most]


def _drafter(tree: Tree, engine: Engine) -> Iterator[Finding]:
    """Whether the engine's drafter gives the ranks the meaning that they have in the tree."""
    kind = drafter_name(tree.drafter, tree.source.get("drafter"))
    fitted = bool(tree.source.get("calibration"))  # a list of paths says nothing about the drafts
    if engine.drafts == _SAME.get(kind) or (kind == HEADS and (engine.drafts == ANY_DRAFT or not fitted)):
        return
    of_model, severity = engine.drafts in _OF_MODEL, WARNING
    if kind in _SAME and of_model:
        drafts = _OF_MODEL[engine.drafts]
        what = f"the ranks are of {_RANKS_OF[kind]}, and the engine drafts with {drafts}"
        why = "the engine reads the paths, but they were not built for its drafts: expected figures do not hold"
        fix = "treeopt calibrate --draft MODEL, and treeopt build" if engine.drafts == MODEL_DRAFT else ""
    elif kind == MODEL and engine.drafts == ANY_DRAFT:
        what, fix = "the ranks are of a draft model, which the file does not say", "keep the tree file beside it"
        why = "rank r is the (r+1)-th likeliest token after the tokens of the path above, not of a head"
    else:
        what, severity = f"the tree was made for drafter {tree.drafter}" + (f" ({kind})" if kind else ""), ERROR
        why = "its ranks are of candidates that only treeopt drafts; an engine takes them for ranks of its drafter"
        if kind == MODEL:
            why = "its ranks are of a draft model's tokens after each path; an engine takes them for its heads'"
        fix = "treeopt calibrate --drafter heads, and treeopt build; or treeopt generate with this tree"
        if of_model:
            fix = "treeopt calibrate --drafter model, and treeopt build" if kind else "keep the drafter's file"
    yield _finding("drafter", what, fix, why, engine=engine, severity=severity)


def drafter_name(drafter_id: str, file: str | None) -> str:
    """The name of a drafter, as `--drafter` has it; empty where its file is not there, or is another one's."""
    if not drafter_id:
        return HEADS
    if not file or not Path(file).is_file():
        return ""
    drafter = load_drafter(file)
    return drafter.name if drafter.id == drafter_id else ""


def engine_method(known: SettingsEngine, name: str, calibration: Calibration | None) -> str:
    """The engine's name of a calibration's drafter; of EAGLE that of EAGLE-3, unless the head is older, of blocks that
    of DFlash, JetSpec and DSpark. Empty where it is not known.
    """
    found = [one for one, how in known.methods.items() if name and how.drafts == name]
    if name in (EAGLE, BLOCK) and calibration is not None and calibration.provenance.drafter:
        layout = str(load_drafter(calibration.provenance.drafter).source.get("draft_layout", ""))
        if name == EAGLE:
            found.sort(key=lambda one: one.endswith("3") is layout.startswith("EAGLE ("))
        if name == BLOCK:
            kind = layout.partition(" ")[0].replace("JetSpec", "DFlash").lower()
            found = [one for one in found if one.lower().removeprefix("draft-") == kind]
    return found[0] if found else ""


def _expanded_later(tree: Tree) -> list[RankPath]:
    """Nodes with children whose sibling of the next smaller rank is there and has none."""
    parents = {path[:-1] for path in tree.paths}
    inner = [path for path in tree.paths if path in parents and path[-1]]
    return [path for path in inner if (*path[:-1], path[-1] - 1) not in parents]


def _draft_rows(tree: Tree) -> list[RankPath]:
    """Nodes whose children EAGLE-1's drafter would mistake for those of another node of their level."""
    inner = [tree.paths[node - 1] for node in sorted(set(tree.parents[1:])) if node]
    parents = {path[:-1] for path in inner}
    skipped = []
    for _, group in groupby(inner, key=len):
        level = list(group)
        last = max((i for i, path in enumerate(level) if path in parents), default=0)
        skipped += [path for path in level[:last] if path not in parents]
    return skipped


def _finding(
    rule: str, what: str, fix: str, why: str, *, paths: Sequence[RankPath] = (), engine: Engine, severity: str = ERROR
) -> Finding:
    return Finding(rule, severity, engine.name, what, why, fix, tuple(paths[:_SHOWN]), len(paths))


def _named(paths: Sequence[RankPath]) -> str:
    """`1 path ([0, 10])`, `5 paths ([10], [11], [12], ...)`."""
    listed = ", ".join(shown(list(path)) for path in paths[:_SHOWN]) + (", ..." if len(paths) > _SHOWN else "")
    return f"{len(paths)} path{'' if len(paths) == 1 else 's'} ({listed})"


def shown(value: object) -> str:
    """A value for a message, cut."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a value of type {type(value).__name__}"


@dataclass(frozen=True)
class Constrained:
    """A tree built under limits, with the rules of the engine that it still breaks.

    `gain` is from the tree without the limits, by texts left out of the fit where `cross_validated`, else by the fitted
    ones.
    """

    built: Built
    gain: Gain
    cross_validated: bool
    findings: tuple[Finding, ...]

    def report(self, engine: str) -> Iterator[Part]:
        """What the limits cost."""
        loss = {"engine": engine or None, "loss": self.gain.as_dict()}
        yield Fact(None, {**loss, **picked(self, "cross_validated", "findings")}, key="limits")
        texts = "cross-validated" if self.cross_validated else "replay"
        yield (
            f"limits{f' of {engine}' if engine else ''}: {self.gain.second:.3f} tokens per step, "
            f"{self.gain.first:.3f} without them ({texts}): {self.gain}"
        )


def engines_report(tree: Tree) -> Iterator[Part]:
    """The engines that refuse a tree."""
    rules = {name: {one.rule for one in lint_tree(tree, name) if one.severity == ERROR} for name in ENGINES}
    refusing = [name for name, broken in rules.items() if broken]
    yield Fact(None, refusing, key="not_exportable_to")
    if refusing:
        by_limits = any(broken and "drafter" not in broken for broken in rules.values())
        advice = "; treeopt build --for ENGINE builds within the limits of one" if by_limits else ", by its drafter"
        yield f"not exportable to {', '.join(refusing)}{advice}"


def build_for(calibration: Calibration, job: BuildJob, *, progress: Progress = silent) -> Constrained:
    """Build the tree of a job that has limits for an engine, and the tree of the same size without them.

    EAGLE-1 and Hydra misread some trees (`draft-rows`, `expanded-first`): for them the tree is built with one level
    less until it is read rightly.
    """
    built = run_job(calibration, job, progress=progress)
    findings = lint_tree(built.tree, job.engine) if job.engine else []
    while any(finding.rule in (DRAFT_ROWS, EXPANDED_FIRST) for finding in findings):
        built = run_job(calibration, dataclasses.replace(job, max_depth=built.tree.depth - 1), progress=progress)
        findings = lint_tree(built.tree, job.engine)
    budget: dict[str, Any] = {"nodes": built.budget, "path_tokens": built.limits.path_tokens}
    without = dataclasses.replace(job, engine="", max_rank=None, **budget)
    free = run_job(calibration, without, progress=progress)
    one, other = free.fit.sums, built.fit.sums
    if one is None or other is None:
        return Constrained(built, replayed_gain(free.tree, built.tree, built.fitted), False, tuple(findings))
    return Constrained(built, gain_of_sums(built.fitted.clusters, one, other), True, tuple(findings))
