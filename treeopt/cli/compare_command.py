"""`treeopt compare`: one table that says which method of speculative decoding pays."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.checks import check_inputs, check_suffix, origin_of
from treeopt.cli.console import Console, command
from treeopt.cli.drafters import (
    chosen_memory,
    draft_option,
    load_draft_model,
    memory_option,
    model_alone,
    sampled_tokens,
)
from treeopt.cli.numbers import COUNT, NOT_NEGATIVE, SEED, NumberOrAuto
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
from treeopt.cli.processes import division_of, is_one_of_several, nproc_option
from treeopt.defaults import STEP_SIZES
from treeopt.errors import counted
from treeopt.facts import machine
from treeopt.files.bundled import POCKET_DRAFT, POCKET_EAGLE3
from treeopt.files.outputs import PICTURE, write_marked

if TYPE_CHECKING:
    from treeopt.evaluate.comparison import CompareOptions, Comparison

_METHODS_HELP = (
    "Comma-separated, of: autoregressive generate lookup recycling suffix sam assisted mc_sim_7b_63 medusa heads "
    "heads+ngram ngram eagle2 ddtree and the kinds of --draft, model eagle mtp block, each also with +ngram; the first "
    "two are always run [default: all]."
)
_TEXTS_HELP = "Most prompts to compare on, spread evenly over those that are not learned."
_LEARN_LIMIT_HELP = "Most prompts to learn from, spread evenly over the others."
_LEARN_TOKENS_HELP = "Tokens to sample for each n-gram table; auto: until more text does not pay."


@command("compare")
@model_options(dtype="float32", several=True)
@draft_option(default=f"{POCKET_DRAFT} and {POCKET_EAGLE3} for the built-in model, else none", multiple=True)
@prompt_options(new_tokens=64)
@click.option("--prompts-learn", help="Prompts to learn from [default: the first half of each category of --prompts].")
@click.option("--methods", help=_METHODS_HELP)
@click.option("--nodes", type=click.IntRange(2, STEP_SIZES[-1]), default=16, help="Size of every tree.")
@click.option("--test-limit", "texts", type=COUNT, default=8, help=_TEXTS_HELP)
@click.option("--repeats", type=COUNT, default=3, help="Runs of each text.")
@click.option("--learn-limit", type=COUNT, default=16, help=_LEARN_LIMIT_HELP)
@click.option("--learn-tokens", type=NumberOrAuto(NOT_NEGATIVE), default=10_000, help=_LEARN_TOKENS_HELP)
@click.option("--seed", type=SEED, default=0, help="Seed of sampling.")
@click.option("--batch-size", type=COUNT, default=16, help="Prompts decoded together while learning.")
@memory_option
@compile_option
@nproc_option
@click.option("--svg", help="Write a bar chart of the speedups.")
@force_option
def run(console: Console, **options: Any) -> None:
    """Compare methods of speculative decoding on your model and prompts: tokens per step, speed, lossless or not.

    The methods are autoregressive decoding by treeopt's loop, stock `generate`, prompt lookup and assisted generation
    of transformers, Token Recycling, SuffixDecoding and SAM-Decoding (`suffix`, `sam`) by published settings and by the
    best of a grid, the published tree mc_sim_7b_63, the Medusa tree, and trees of each drafter, static and per step.
    All trees have --nodes nodes; published ones keep their size. The methods take turns in one process, text by text.

    A method that learns does so from other prompts than those that are compared. A method that cannot run is left out,
    and its line gives the reason: heads and drafts are given by --heads and --draft, which may be repeated, and the
    built-in model has both. `eagle2` are the trees of EAGLE-2 from the same drafts, at its best depth and top-k.

    For each drafter the tree with the most tokens per second by timed steps is decoded as well. The last row,
    recommended, repeats the method with the highest measured speed; it is autoregressive decoding where no method is
    faster by 2 %. With --memory per-step trees of drafters with an n-gram table are decoded once more, each text with
    those before it in a memory; `suffix`, `sam` and `recycling` learn these, too. With several --dtype, and with
    --compile, all methods are compared in each setting.

    Takes about 6 minutes for the built-in model and its prompts on two CPU cores.
    """
    if options["svg"] is not None:
        check_outputs(options, options["svg"], kind=PICTURE)
        check_suffix(options["svg"], ".svg", option="--svg")
    source, dtypes = chosen_prompts(options), dtypes_of(options)
    check_inputs()
    chosen, names = _settings(options), _drafts(options)
    settings = [*itertools.product((False, True) if options["compile"] else (False,), dtypes)]
    if len(settings) > 1 and (options["nproc"] > 1 or is_one_of_several()):
        raise click.UsageError("--nproc takes one --dtype, and no --compile")
    from treeopt.evaluate import comparison_report
    from treeopt.evaluate.compare import divided_compare
    from treeopt.texts.prompts import load_prompts

    prompts = load_prompts(source, skip=options["skip"], limit=options["limit"])
    say_prompts(console, prompts)
    found: list[Comparison] = []
    parts: dict[str, Any] = {}
    for options["compile"], options["dtype"] in settings:
        base, loaded = load_models(console, options, with_heads=not model_alone(options))
        drafts = [load_draft_model(console, {**options, "draft": name}, base) for name in names]
        chosen = dataclasses.replace(chosen, memory=chosen_memory(console, options))
        with console.progress("compare") as progress:
            one = divided_compare(base, loaded, prompts, [one for one in drafts if one is not None], chosen, progress)
        if one is None:
            return
        console.report(*comparison_report.report_of(one))
        console.warn(*(f"warning: {text}" for text in comparison_report.lossy_texts(one)))
        origin = origin_of(base, loaded)  # of each setting: fingerprints are of weights in a dtype
        origin["made_with"]["draft_id"] = ", ".join(draft.fingerprint for draft in drafts if draft is not None)
        found.append(one)
        parts[one.setting] = {**comparison_report.data_of(one), **origin}
    if len(found) > 1:
        console.report(*comparison_report.fastest_settings(found))
    if options["svg"] is not None:
        check_outputs(options, options["svg"], kind=PICTURE)  # again: the comparison takes long
        picture = _picture(found, base.name, options["nodes"])
        write_marked(options["svg"], picture, PICTURE, console.configuration)
        console.note(f"wrote {options['svg']}")
    console.result(parts[found[0].setting] if len(parts) == 1 else {"settings": parts})


def _drafts(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of --draft, one of a kind; those of the built-in model where none is given."""
    from treeopt.models.draft_files import kind_in_files

    built_in = options["heads"] is None and options["model"] is None
    names: tuple[str, ...] = options["draft"] or ((POCKET_DRAFT, POCKET_EAGLE3) if built_in else ())
    if len({kind_in_files(name) for name in names}) < len(names):
        raise click.UsageError(f"--draft is given twice for one kind, and a table has one of each: {', '.join(names)}")
    return names


def _picture(found: Sequence[Comparison], model: str, nodes: int) -> str:
    """The bars of the methods, with the model and the machine."""
    from treeopt.evaluate.comparison_report import picture_rows
    from treeopt.view.charts import bar_of, render_bars
    from treeopt.view.report_data import last_name

    first = found[0]
    made = first.made_by if len(found) == 1 else {**first.made_by, "dtype": None}  # each bar has its own
    note = f"{machine(made)}; {len(first.texts)} texts, {counted(first.repeats, 'repeat')}, batch 1."
    title = f"{last_name(model)}: methods compared, {nodes} nodes"
    return render_bars([bar_of(*row) for row in picture_rows(found)], title, note)


def _settings(options: Mapping[str, Any]) -> CompareOptions:
    """The options of `compare`, checked before any model is loaded."""
    from treeopt.evaluate.comparison import METHODS, CompareOptions

    learning = ("prompts_learn", "learn_limit", "learn_tokens", "seed", "batch_size")
    names = ("nodes", "texts", "max_new_tokens", "repeats", "chat_template", *learning)
    chosen = {**{name: options[name] for name in names}, "learn_tokens": sampled_tokens(options)}
    if options["methods"] is not None:
        chosen["methods"] = tuple(name.strip() for name in options["methods"].split(","))
        unknown = [name for name in chosen["methods"] if name not in METHODS]
        if unknown:
            raise click.BadParameter(f"no method {unknown[0]!r}; they are {' '.join(METHODS)}", param_hint="--methods")
        if options["memory"] is not None and not any("ngram" in name for name in chosen["methods"]):
            raise click.UsageError("--memory adds rows of methods with an n-gram table, and --methods names none")
    return CompareOptions(division=division_of(options), **chosen)
