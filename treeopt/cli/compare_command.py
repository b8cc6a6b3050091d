"""`treeopt compare`: one table that says which method of speculative decoding pays."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.console import Console, command
from treeopt.cli.drafter_options import draft_option, load_draft_model, model_alone
from treeopt.cli.early_checks import check_suffix
from treeopt.cli.following import is_one_of_several
from treeopt.cli.inputs import check_inputs
from treeopt.cli.numbers import SEED
from treeopt.cli.options import (
    check_outputs,
    chosen_prompts,
    compile_option,
    dtypes_of,
    force_option,
    load_models,
    model_options,
    prompt_options,
    say_prompts,
)
from treeopt.cli.origin import origin_of
from treeopt.cli.processes import division_of, nproc_option
from treeopt.defaults import STEP_SIZES
from treeopt.files.atomic import write_text
from treeopt.files.bundled import POCKET_DRAFT
from treeopt.files.configurations import write_note
from treeopt.files.outputs import PICTURE, write_marked

if TYPE_CHECKING:
    from treeopt.evaluate.comparison import Comparison

_METHODS_HELP = (
    "Comma-separated, of: autoregressive generate lookup recycling assisted mc_sim_7b_63 medusa heads heads+ngram "
    "ngram model model+ngram; the first two are always run [default: all]."
)


@command("compare")
@functools.partial(model_options, dtype="float32", several=True)
@functools.partial(draft_option, default=f"{POCKET_DRAFT} for the built-in model, else none")
@functools.partial(prompt_options, new_tokens=64)
@click.option("--prompts-learn", help="Prompts to learn from [default: the first half of each category of --prompts].")
@click.option("--methods", help=_METHODS_HELP)
@click.option(
    "--nodes", type=click.IntRange(2, STEP_SIZES[-1]), default=16, show_default=True, help="Size of every tree."
)
@click.option(
    "--texts",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Prompts judged at most, spread evenly over those that are not learned.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each text.")
@click.option(
    "--learn-limit",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Prompts learned from at most, spread evenly over those that are not judged.",
)
@click.option(
    "--learn-tokens",
    type=click.IntRange(min=0),
    default=10_000,
    show_default=True,
    help="Sampled to learn each n-gram table from.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of sampling.")
@click.option("--batch-size", type=click.IntRange(min=1), default=16, show_default=True, help="Of learning.")
@compile_option
@nproc_option
@click.option("--svg", help="Write bars of the speedups.")
@click.option("--csv", help="Write the figures, by category too.")
@force_option
def run(console: Console, **options: Any) -> None:
    """Compare methods of speculative decoding on your model and prompts: tokens per step, speed, lossless or not.

    Autoregressive decoding by our loop, stock `generate`, prompt lookup and assisted generation of transformers, Token
    Recycling, the published tree mc_sim_7b_63, the Medusa tree, and trees of each drafter, static and per step. All
    trees have --nodes nodes; published ones keep their size. The methods take turns in one process, text by text.

    What a method must learn it learns from other prompts than those that are judged. A method that cannot run here is
    left out, and its line says why: heads and draft model are given by --heads and --draft, and the built-in model has
    both.

    Steps of other sizes are timed, and of each drafter the tree with the most tokens per second by them is decoded as
    well. The last row, recommended, repeats the method with the highest measured speed; it is autoregressive decoding
    where no method is faster by 2 %. With --dtype float32,bfloat16 all of this is done in both, one after the other,
    and with --compile in each of them again, with compiled forwards over trees.
    """
    _check_files(options)
    source, dtypes = chosen_prompts(options), dtypes_of(options)
    check_inputs()
    chosen = _settings(options)
    division = division_of(options)
    settings = [*itertools.product((False, True) if options["compile"] else (False,), dtypes)]
    if len(settings) > 1 and (options["nproc"] > 1 or is_one_of_several()):
        raise click.UsageError("--nproc takes one --dtype, and no --compile")
    if options["repeats"] == 1:
        _warn_busy(console)
    from treeopt.cli.compare_report import as_json, report_comparison, report_settings
    from treeopt.evaluate.compare import compare
    from treeopt.texts.prompts import load_prompts

    prompts = load_prompts(source, skip=options["skip"], limit=options["limit"])
    say_prompts(console, prompts)
    found: list[Comparison] = []
    for options["compile"], options["dtype"] in settings:
        base, loaded = load_models(console, options, with_heads=not model_alone(options))
        if options["heads"] is None and options["model"] is None and options["draft"] is None:
            options["draft"] = POCKET_DRAFT
        draft = load_draft_model(console, options, base)
        with console.progress("compare") as progress:
            one = compare(base, loaded, prompts, draft=draft, progress=progress, division=division, **chosen)
        report_comparison(console, one)
        found.append(one)
    if len(found) > 1:
        report_settings(console, found)
    _write(console, options, found, f"{base.name}, {options['nodes']} nodes")
    parts = {one.setting: as_json(one) for one in found}
    result = parts[found[0].setting] if len(parts) == 1 else {"settings": parts}
    console.result({**result, **origin_of(base, loaded, draft)})


command = run


def _check_files(options: Mapping[str, Any]) -> None:
    """Check that the files to write may be written."""
    from treeopt.files.outputs import check_distinct

    for name, suffix, kind in (("svg", ".svg", PICTURE), ("csv", ".csv", None)):
        if options[name] is not None:
            check_outputs(options, options[name], kind=kind)
            check_suffix(options[name], suffix, option=f"--{name}")
    check_distinct(options["svg"], options["csv"])


def _write(console: Console, options: Mapping[str, Any], found: Sequence[Comparison], title: str) -> None:
    """Write the picture and the figures of all settings."""
    from treeopt.cli.compare_report import as_bars, as_csv

    if options["svg"] is not None:
        from treeopt.view.charts import render_bars

        write_marked(options["svg"], render_bars(as_bars(found), title), PICTURE, console.configuration)
        console.note(f"wrote {options['svg']}")
    if options["csv"] is not None:
        write_text(options["csv"], as_csv(found))
        write_note(options["csv"], console.configuration)
        console.note(f"wrote {options['csv']}")


def _warn_busy(console: Console) -> None:
    """Warn where other programs keep the cores busy: one repeat does not show how much they disturb."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # there is none on Windows
    if load > cores / 2:
        console.warn(
            f"warning: other programs use this machine (load {load:.1f}, {cores} cores), and one repeat does not show "
            "how much they disturb: give --repeats 3 or more"
        )


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `compare`, checked before any model is loaded."""
    from treeopt.evaluate.comparison import METHODS, CompareOptions

    learning = ("prompts_learn", "learn_limit", "learn_tokens", "seed", "batch_size")
    names = ("nodes", "texts", "max_new_tokens", "repeats", "chat_template", *learning)
    chosen = {name: options[name] for name in names}
    if options["methods"] is not None:
        chosen["methods"] = tuple(name.strip() for name in options["methods"].split(","))
        unknown = [name for name in chosen["methods"] if name not in METHODS]
        if unknown:
            raise click.BadParameter(f"no method {unknown[0]!r}; they are {' '.join(METHODS)}", param_hint="--methods")
    CompareOptions(**chosen)
    return chosen
