"""`treeopt profile`: measure the time of a decode step on this machine, by the size of the tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

import treeopt
from treeopt.cli.checks import check_apart, check_inputs
from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console, command
from treeopt.cli.drafters import draft_option, drafter_file_option, load_draft_model, uses_heads
from treeopt.cli.numbers import COUNT, numbers_option
from treeopt.cli.options import check_outputs, compile_option, force_option, load_models, model_options
from treeopt.defaults import (
    CHAIN,
    NODES,
    ONE_NODE,
    PATH_TOKENS,
    PROFILE_CONTEXT,
    PROFILE_FILE,
    PROFILE_KINDS,
    PROFILE_NODES,
    PROFILE_REPEATS,
)
from treeopt.facts import Column, Part, Table, threads

_SIZES = "Nodes, root counted; 1 is always included."
_KIND = "static: one tree for all steps; dynamic: a tree for each step (for `build --kind dynamic`); chain: chains."


@command("profile")
@model_options(dtype="auto")
@numbers_option("--sizes", default=[",".join(map(str, PROFILE_NODES))], help=_SIZES)
@numbers_option("--context", help=f"Tokens in the KV cache [default: {PROFILE_CONTEXT}, or as many as fit].")
@numbers_option("--batch-size", "batch", default=["1"], help="Texts decoded together.")
@drafter_file_option("Time the trees of this drafter file [default: the guesses of the heads, or of --draft].")
@draft_option()
@click.option("--kind", type=click.Choice(PROFILE_KINDS), default=PROFILE_KINDS[0], help=_KIND)
@click.option("--repeats", type=COUNT, default=PROFILE_REPEATS, help="Rounds over all sizes; the faster half counts.")
@compile_option
@force_option
@click.option("-o", "--output", default=PROFILE_FILE, help="File to write.")
def run(console: Console, **options: Any) -> None:
    """Measure the seconds of a decoding step, drafting included, for trees of each size.

    All sizes are timed in turn in every round. The step of one node is autoregressive decoding by the same loop,
    without drafts; overheads are relative to it. A step takes longer after more text: give the length of your texts as
    --context. The default is 512 tokens, or as many as leave room for the largest tree where the model has fewer
    positions.

    `build --nodes auto` takes a profile of the same --kind and of its calibration's drafter (--drafter FILE). Without
    one, drafts are by the probabilities of --draft, or with --model alone by an n-gram drafter with an empty table.

    Takes about half a minute for the built-in model on two CPU cores.
    """
    from treeopt.files.profiles import save_profile

    file, output = options["drafter"], options["output"]
    check_outputs(options, output, suffixes=(".yaml", ".yml"))
    if not file:
        check_apart("heads", "draft")
    check_inputs()
    measured = _measured(console, options, treeopt.load_drafter(file) if file else None)
    profile = with_configuration(measured, console.configuration)
    check_outputs(options, output)  # again: the measurement takes long
    save_profile(profile, output)
    console.report(*_parts(profile))
    console.note(f"wrote {output}")
    console.result({"points": profile.points, "provenance": profile.provenance, "output": output})


def _measured(console: Console, options: dict[str, Any], drafter: treeopt.Drafter | None) -> treeopt.LatencyProfile:
    """The profile by the options."""
    from treeopt.models.origins import drafter_for_others, models_ids

    alone = drafter is None and options["draft"] is not None
    with_heads = not alone and uses_heads(options, options["drafter"], drafter)
    base, loaded = load_models(console, options, with_heads=with_heads)
    draft = load_draft_model(console, options, base, drafter)
    console.warn(*drafter_for_others(drafter, models_ids(base, loaded, draft)))
    with console.progress("profile") as progress:
        profile = treeopt.measure_profile(
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
    if not options["context"]:
        context = profile.points[0].context
        most = f"of {base.context} positions, as many as leave room for the trees" if context < PROFILE_CONTEXT else ""
        console.note(
            f"context  {context} tokens{f' ({most})' if most else ''}; shorter texts have faster steps: --context"
        )
    return profile


def _parts(profile: treeopt.LatencyProfile) -> Iterator[Part]:
    ones = {(point.batch, point.context): point.seconds for point in profile.points if point.nodes == ONE_NODE}
    columns = (
        Column(PATH_TOKENS if profile.path_tokens else NODES, "nodes", key="nodes"),
        Column("batch", "batch"),
        Column("context", "context"),
        Column("ms per step", "seconds", lambda seconds: f"{seconds * 1e3:.3f}"),
        Column("spread", lambda point: (point.high - point.low) / point.seconds, ".0%"),
        Column("overhead", lambda point: point.seconds / ones[point.batch, point.context], ".2f"),
    )
    source = profile.provenance
    yield Table(columns, profile.points)
    trees = "chains" if source["kind"] == CHAIN else f"{source['kind']} trees"
    yield (
        f"{trees}, drafter {source['drafter_name']}: median of the faster half of {source['repeats']} "
        f"rounds ({source['dtype']}, {source['device']}, {threads(source['threads'])}, {source['attention']} "
        "attention); spread: quartile distance / median; overhead: to one node, without drafts"
    )
