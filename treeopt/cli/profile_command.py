"""`treeopt profile`: measure the time of a decode step on this machine, by the size of the tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.checks import check_inputs
from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console, command, threads
from treeopt.cli.drafters import draft_option, drafter_file_option, load_draft_model, uses_heads, warn_other_drafter
from treeopt.cli.facts import Column, Part, Table
from treeopt.cli.numbers import numbers_option
from treeopt.cli.options import check_outputs, compile_option, force_option, load_models, model_options
from treeopt.defaults import KINDS, ONE_NODE, PROFILE_CONTEXT, PROFILE_FILE, PROFILE_NODES, PROFILE_REPEATS

if TYPE_CHECKING:
    from treeopt.latency import LatencyProfile


@command("profile")
@model_options(dtype="auto")
@numbers_option(
    "--sizes",
    default=[",".join(map(str, PROFILE_NODES))],
    help="Nodes, root counted; 1 is always included.",
)
@numbers_option("--context", help=f"Tokens in the cache [default: {PROFILE_CONTEXT}, or the maximum of the model].")
@numbers_option("--batch-size", "batch", default=["1"], help="Texts decoded together.")
@drafter_file_option("Time the trees of this drafter file [default: the guesses of the heads].")
@draft_option()
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

    file, output = options["drafter"], options["output"]
    check_outputs(options, output, suffixes=(".yaml", ".yml"))
    if not file and options["draft"] is not None:
        raise click.UsageError("--draft needs --drafter, from `treeopt learn --draft MODEL`")
    check_inputs()
    from treeopt.evaluate.profile import measure_profile

    drafter = load_drafter(file) if file else None
    base, loaded = load_models(console, options, with_heads=uses_heads(options, file, drafter))
    draft = load_draft_model(console, options, base, drafter)
    warn_other_drafter(console, drafter, base, loaded, draft)
    with console.progress("profile") as progress:
        measured = measure_profile(
            base,
            loaded,
            nodes=options["sizes"],
            contexts=options["context"] or None,
            batches=options["batch"],
            repeats=options["repeats"],
            kind=options["kind"],
            drafter=drafter,
            draft=draft,
            progress=progress,
        )
    profile = with_configuration(measured, console.configuration)
    save_profile(profile, output)
    console.report(*_parts(profile))
    console.note(f"wrote {output}")
    console.result({"points": profile.points, "provenance": profile.provenance, "output": output})


command = run


def _parts(profile: LatencyProfile) -> Iterator[Part]:
    ones = {(point.batch, point.context): point.seconds for point in profile.points if point.nodes == ONE_NODE}
    columns = (
        Column("nodes", "nodes"),
        Column("batch", "batch"),
        Column("context", "context"),
        Column("ms per step", "seconds", lambda seconds: f"{seconds * 1e3:.3f}"),
        Column("spread", lambda point: (point.high - point.low) / point.seconds, ".0%"),
        Column("overhead", lambda point: point.seconds / ones[point.batch, point.context], ".2f"),
    )
    source = profile.provenance
    yield Table(columns, profile.points)
    yield (
        f"{source['kind']} trees, drafter {source['drafter_name']}: median of the quieter half of {source['repeats']} "
        f"rounds ({source['dtype']}, {source['device']}, {threads(source['threads'])}, {source['attention']} "
        "attention); spread: quartile distance / median; overhead: to one node, without drafts"
    )
