"""`treeopt build --kind dynamic`: rank traces to a policy of per-step trees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console
from treeopt.cli.early_checks import check_static_only, check_suffix
from treeopt.cli.learn_report import report_reliability
from treeopt.cli.mismatch import warn_other_heads
from treeopt.cli.options import check_outputs
from treeopt.cli.sampling_options import check_temperature_of
from treeopt.defaults import ONE_NODE
from treeopt.files.outputs import TREE

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.policy import TreePolicy


AUTO = "auto"  # as the number of nodes
_STATIC_ONLY = (
    *("values", "weights", "refine", "max_rank", "max_depth", "holdout", "mix", "robust"),
    *("contiguous", "engine"),
)


def run_dynamic(console: Console, options: dict[str, Any]) -> None:
    """A policy from one calibration, or none where a profile says that plain decoding is as fast."""
    from treeopt.files.calibrations import load_calibration
    from treeopt.files.policies import save_plan
    from treeopt.optimize.per_step import reliability
    from treeopt.optimize.tree_builder import build_tree

    check_static_only(_STATIC_ONLY)
    if len(options["calibrations"]) > 1:
        raise click.UsageError("--kind dynamic takes one --calibration")
    check_profile(options)
    [file] = options["calibrations"]
    check_outputs(options, options["output"], kind=TREE)
    check_suffix(options["output"], ".yaml", ".yml")
    calibration = load_calibration(file)
    check_temperature_of([calibration], options["temperature"])
    policy, pays = _chosen(console, options, calibration)
    plan = policy if pays else build_tree(calibration, ONE_NODE)
    save_plan(with_configuration(plan, console.configuration), options["output"])
    _report(console, policy, calibration, pays=pays)
    console.note(f"wrote {options['output']}")
    errors = reliability(calibration).error.tolist()
    console.result(
        {
            "kind": options["kind"] if pays else "none",
            "nodes": plan.nodes,
            "depth": plan.depth,
            "drafter": plan.drafter,
            "size_cost": policy.size_cost if pays else (),
            "expected_tokens_per_step": vars(plan.expected),
            "calibration_error": errors,
            "output": options["output"],
        }
    )


def _chosen(console: Console, options: dict[str, Any], calibration: Calibration) -> tuple[TreePolicy, bool]:
    """The policy of the given size, or the fastest one by the profile, and whether it is faster than plain decoding."""
    from treeopt.files.profiles import load_profile
    from treeopt.optimize.budget import fastest
    from treeopt.optimize.per_step import build_policy, fastest_policy, policy_budget

    if not options["profile"]:
        return build_policy(calibration, options["nodes"]), True
    profile = load_profile(options["profile"])
    warn_other_heads(console, calibration, profile)
    where = {"batch": options["batch"], "context": options["context"]}
    policy = fastest_policy(calibration, profile, **where)
    return policy, fastest([policy_budget(policy, calibration, profile, **where).speedup]) is not None


def _report(console: Console, policy: TreePolicy, calibration: Calibration, *, pays: bool) -> None:
    expected = policy.expected
    assert expected is not None
    if not pays:
        console.say("none: plain decoding is as fast, by the profile, as the fastest per-step trees, which are these:")
    console.say(f"at every step the most likely nodes, at most {policy.nodes}, {policy.depth} drafts deep")
    console.say(f"expected tokens per step  {expected.replay:.3f}  replay: a decoder on {texts_of(calibration)}")
    console.say(f"                          {expected.estimated:.3f}  estimated by the drafter")
    if expected.low is not None:
        between = f"{expected.low:.3f} to {expected.high:.3f}"
        console.say(f"                          {between} on as many new prompts (90 %)")
    warn_few_texts(console, calibration)
    if policy.size_cost:
        console.say(f"mean nodes of a step      {expected.nodes:.1f}")
    report_reliability(console, calibration)


def check_profile(options: dict[str, Any]) -> None:
    """Refuse a profile without --nodes auto, and --nodes auto without a profile."""
    auto = options["nodes"] == AUTO
    if auto != (options["profile"] is not None):
        raise click.UsageError("--nodes auto and --profile go together")
    if not auto and (options["batch"] != 1 or options["context"]):
        raise click.UsageError("--batch-size and --context choose from a --profile")


def texts_of(calibration: Calibration) -> str:
    """The number of texts, and of different ones where some are equal."""
    count, distinct = calibration.sequences, calibration.distinct
    sampled = f" sampled at temperature {calibration.temperature:g}" if calibration.target is not None else ""
    return f"{count} text{'s' if count != 1 else ''}{sampled}" + (f", {distinct} distinct" if distinct != count else "")


def by_one_growth(largest: int) -> str:
    """Why a size can have another figure here than in `treeopt build --nodes N`."""
    return (
        f"static trees of every size are the first nodes of one growth to {largest} nodes; `treeopt build --nodes N` "
        "chooses method and nodes for N, so its figure can differ"
    )


def warn_few_texts(console: Console, calibration: Calibration) -> None:
    """Warn where there are too few different texts for an interval."""
    from treeopt.optimize.intervals import FEWEST_TEXTS

    if calibration.distinct < FEWEST_TEXTS:
        console.warn(f"warning: {texts_of(calibration)}: an interval needs two different ones")
