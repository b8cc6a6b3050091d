"""`treeopt build --drafter auto`: calibrations of several drafters to the fastest tree or policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console
from treeopt.cli.early_checks import check_belongs, check_static_only, check_suffix, given
from treeopt.cli.mismatch import warn_other_heads
from treeopt.cli.options import check_outputs
from treeopt.cli.sampling_options import check_temperature_of
from treeopt.defaults import KINDS, ONE_NODE
from treeopt.errors import counted
from treeopt.files.outputs import TREE
from treeopt.progress import late

if TYPE_CHECKING:
    from treeopt.optimize.auto_drafter import Candidate, DrafterChoice


_ONE_DRAFTER = ("holdout", "refine", "mix", "robust", "contiguous", "engine")
_STATIC = ("values", "weights", "max_rank", "max_depth")


def run_auto(console: Console, options: dict[str, Any]) -> None:
    """The fastest tree or policy over the drafters of several calibrations."""
    from treeopt.files.calibrations import load_calibration
    from treeopt.files.policies import save_plan
    from treeopt.files.profiles import load_profile
    from treeopt.optimize.auto_drafter import choose_drafter
    from treeopt.optimize.build_job import BuildJob

    check_belongs(_ONE_DRAFTER, "a build without --drafter auto", holds=False)
    kinds = (options["kind"],) if given("kind") else KINDS
    if KINDS[0] not in kinds:
        check_static_only(_STATIC)
    check_outputs(options, options["output"], kind=TREE)
    check_suffix(options["output"], ".yaml", ".yml")
    job = BuildJob(
        nodes=options["nodes"] if given("nodes") and isinstance(options["nodes"], int) else None,
        exactly=given("values") and given("weights"),
        **{name: options[name] for name in (*_STATIC, "batch", "context")},
    )
    calibrations = [load_calibration(file) for file in options["calibrations"]]
    check_temperature_of(calibrations, options["temperature"])
    profiles = [load_profile(file) for file in options["profile"]]
    with console.progress("build") as progress:
        choice = choose_drafter(calibrations, profiles, job, kinds=kinds, progress=late(progress))
    output = options["output"]
    save_plan(with_configuration(choice.plan, console.configuration), output)
    _report(console, choice, options["batch"])
    console.note(f"wrote {output}")
    console.result(_as_dict(choice, output))


def _report(console: Console, choice: DrafterChoice, batch: int) -> None:
    header = ["drafter", "trees", "nodes", "tokens/step", "step", "tokens/s", "speedup"]
    console.table(header, [_cells(one) for one in choice.candidates])
    console.say(
        "tokens/step: all tokens / all steps, cross-validated for static trees; step: with its drafting, by the "
        f"profile, at batch {batch}; tokens/s: of one text; speedup: over the profile's autoregressive step"
    )
    for one in choice.candidates:
        if one.budget is None:
            console.say(f"left out: {one.group.name}, {_trees(one.kind)}: {one.missing}" + (one.fix and f"; {one.fix}"))
    best, expected = choice.best, choice.plan.expected
    assert expected is not None
    size = counted(choice.plan.nodes, "node")
    shown = f"{best.group.name}, {_trees(best.kind)}, {size}, {choice.plan.depth} deep"
    console.say(f"fastest: {'none: plain decoding' if choice.plan.nodes == ONE_NODE else shown}")
    console.say(f"expected tokens per step  {expected.replay:.3f}  replay: a decoder on the texts of its calibrations")
    for warning in choice.warnings:
        console.warn(f"warning: {warning}")
    for one in choice.candidates:
        if one.budget is not None:
            warn_other_heads(console, one.group.joined, one.group.profiles[one.kind])


def _cells(one: Candidate) -> list[str]:
    """A row of the table; `-` where a candidate has no figures."""
    budget = one.budget
    if budget is None:
        return [one.group.name, _trees(one.kind), *"-----"]
    return [
        one.group.name,
        _trees(one.kind),
        str(budget.nodes),
        f"{budget.tokens_per_step:.3f}",
        f"{budget.seconds * 1e3:.2f} ms",
        f"{budget.tokens_per_second:.0f}",
        f"{budget.speedup:.2f}",
    ]


def _trees(kind: str) -> str:
    return kind if kind == KINDS[0] else "per step"


def _as_dict(choice: DrafterChoice, output: str) -> dict[str, Any]:
    plan = choice.plan
    return {
        "drafter": choice.best.group.name,
        "kind": "none" if plan.nodes == ONE_NODE else choice.best.kind,
        "nodes": plan.nodes,
        "depth": plan.depth,
        "expected_tokens_per_step": vars(plan.expected),
        "rows": [{**_row(one), "chosen": one is choice.best and plan.nodes > ONE_NODE} for one in choice.candidates],
        "output": output,
    }


def _row(one: Candidate) -> dict[str, Any]:
    """A candidate for JSON; its figures are null where it has none."""
    names = ("nodes", "tokens_per_step", "seconds", "tokens_per_second", "overhead", "speedup")
    return {
        "drafter": one.group.name,
        "drafter_id": one.group.drafter_id,
        "kind": one.kind,
        **{name: getattr(one.budget, name, None) for name in names},
        "missing": one.missing,
        "fix": one.fix,
    }
