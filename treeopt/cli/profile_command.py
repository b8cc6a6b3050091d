"""`treeopt profile`: measure the time of a decode step on this machine, by the size of the tree."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.checks import check_inputs, check_suffix
from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console, command, threads
from treeopt.cli.drafters import draft_option, drafter_file_option, load_draft_model, uses_heads, warn_other_drafter
from treeopt.cli.numbers import numbers_option
from treeopt.cli.options import check_outputs, compile_option, force_option, load_models, model_options
from treeopt.defaults import KINDS, ONE_NODE, PROFILE_CONTEXT, PROFILE_FILE, PROFILE_NODES, PROFILE_REPEATS

if TYPE_CHECKING:
    from treeopt.drafter import Drafter
    from treeopt.latency import LatencyProfile


@command("profile")
@functools.partial(model_options, dtype="auto")
@numbers_option(
    "--sizes",
    default=[",".join(map(str, PROFILE_NODES))],
    help="Nodes, root counted; 1 is always included.",
)
@numbers_option("--context", help=f"Tokens in the cache [default: {PROFILE_CONTEXT}, or the maximum of the model].")
@numbers_option("--batch-size", "batch", default=["1"], help="Texts decoded together.")
@drafter_file_option("Time the trees of this drafter file [default: the guesses of the heads].")
@draft_option
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default=KINDS[0],
    help="static: one tree for all steps; dynamic: a tree for each step (for `build --kind dynamic`).",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=PROFILE_REPEATS,
    help="Rounds over all sizes; the quieter half counts.",
)
@compile_option
@force_option
@click.option("-o", "--output", default=PROFILE_FILE, help="File to write.")
def run(console: Console, **options: Any) -> None:
    """Time one decode step, drafting included, by the size of the tree.

    All sizes take turns in every round. The step of one node is autoregressive decoding by the same loop, without
    drafts; overheads refer to it. `build --nodes auto` takes a profile of its own --kind and of its calibration's
    drafter. With --model alone and no --drafter, drafts are those of an n-gram drafter with an empty table.
    """
    from treeopt.files.drafters import load_drafter
    from treeopt.files.profiles import save_profile

    check_outputs(options, options["output"])
    check_suffix(options["output"], ".yaml", ".yml")
    file = options["drafter"]
    if not file and options["draft"] is not None:
        raise click.UsageError("--draft needs --drafter, from `treeopt learn --draft MODEL`")
    check_inputs()
    measured = _measured(console, options, load_drafter(file) if file else None)
    profile = with_configuration(measured, console.configuration)
    save_profile(profile, options["output"])
    _report(console, profile)
    console.note(f"wrote {options['output']}")
    points = [vars(point) for point in profile.points]
    console.result({"points": points, "provenance": profile.provenance, "output": options["output"]})


command = run


def _measured(console: Console, options: dict[str, Any], drafter: Drafter | None) -> LatencyProfile:
    """The profile in the dtype of the options."""
    from treeopt.evaluate.profile import largest_context, measure_profile

    base, loaded = load_models(console, options, with_heads=uses_heads(options, options["drafter"], drafter))
    draft = load_draft_model(console, options, base, drafter)
    warn_other_drafter(console, drafter, base, loaded, draft)
    room = largest_context(base, None if loaded is None else loaded.heads, options["sizes"], drafter, options["kind"])
    contexts = options["context"] or (max(1, min(PROFILE_CONTEXT, room)),)
    with console.progress("profile") as progress:
        return measure_profile(
            base,
            loaded,
            nodes=options["sizes"],
            contexts=contexts,
            batches=options["batch"],
            repeats=options["repeats"],
            kind=options["kind"],
            drafter=drafter,
            draft=draft,
            progress=progress,
        )


def _report(console: Console, profile: LatencyProfile) -> None:
    ones = {(p.batch, p.context): p.seconds for p in profile.points if p.nodes == ONE_NODE}
    rows = [
        [
            str(point.nodes),
            str(point.batch),
            str(point.context),
            f"{point.seconds * 1e3:.3f}",
            f"{(point.high - point.low) / point.seconds:.0%}",
            f"{point.seconds / ones[point.batch, point.context]:.2f}",
        ]
        for point in profile.points
    ]
    console.table(["nodes", "batch", "context", "ms per step", "spread", "overhead"], rows)
    source = profile.provenance
    console.say(
        f"{source['kind']} trees, drafter {source['drafter_name']}: median of the quieter half of {source['repeats']} "
        f"rounds ({source['dtype']}, {source['device']}, {threads(source['threads'])}, {source['attention']} "
        "attention); spread: quartile distance / median; overhead: to one node, without drafts"
    )
