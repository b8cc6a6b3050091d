"""`treeopt compare`: one table that says which method of speculative decoding pays."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.checks import check_inputs, check_suffix, origin_of
from treeopt.cli.console import Console, command
from treeopt.cli.drafters import draft_option, load_draft_model, model_alone
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
from treeopt.cli.processes import division_of, is_one_of_several, nproc_option
from treeopt.defaults import STEP_SIZES
from treeopt.errors import counted
from treeopt.facts import Column, Table, attribute, picked, shown, threads
from treeopt.files.bundled import POCKET_DRAFT
from treeopt.files.outputs import PICTURE, write_marked

if TYPE_CHECKING:
    from treeopt.evaluate.comparison import CompareOptions, Comparison, Figures, Row
    from treeopt.view.charts import Bar

_METHODS_HELP = (
    "Comma-separated, of: autoregressive generate lookup recycling assisted mc_sim_7b_63 medusa heads heads+ngram "
    "ngram model model+ngram; the first two are always run [default: all]."
)


@command("compare")
@model_options(dtype="float32", several=True)
@draft_option(default=f"{POCKET_DRAFT} for the built-in model, else none")
@prompt_options(new_tokens=64)
@click.option("--prompts-learn", help="Prompts to learn from [default: the first half of each category of --prompts].")
@click.option("--methods", help=_METHODS_HELP)
@click.option("--nodes", type=click.IntRange(2, STEP_SIZES[-1]), default=16, help="Size of every tree.")
@click.option(
    "--test-limit",
    "texts",
    type=click.IntRange(min=1),
    default=8,
    help="Prompts judged at most, spread evenly over those that are not learned.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, help="Runs of each text.")
@click.option(
    "--learn-limit",
    type=click.IntRange(min=1),
    default=16,
    help="Prompts learned from at most, spread evenly over those that are not judged.",
)
@click.option(
    "--learn-tokens", type=click.IntRange(min=0), default=10_000, help="Sampled to learn each n-gram table from."
)
@click.option("--seed", type=SEED, default=0, help="Of sampling.")
@click.option("--batch-size", type=click.IntRange(min=1), default=16, help="Of learning.")
@compile_option
@nproc_option
@click.option("--svg", help="Write bars of the speedups.")
@force_option
def run(console: Console, **options: Any) -> None:
    """Compare methods of speculative decoding on your model and prompts: tokens per step, speed, lossless or not.

    Autoregressive decoding by our loop, stock `generate`, prompt lookup and assisted generation of transformers, Token
    Recycling, the published tree mc_sim_7b_63, the Medusa tree, and trees of each drafter, static and per step. All
    trees have --nodes nodes; published ones keep their size. The methods take turns in one process, text by text.

    What a method must learn it learns from other prompts than those that are judged. A method that cannot run here is
    left out, and its line says why: heads and draft model are given by --heads and --draft, and the built-in model has
    both.

    Of each drafter the tree with the most tokens per second by timed steps is decoded as well. The last row,
    recommended, repeats the method with the highest measured speed; it is autoregressive decoding where no method is
    faster by 2 %. With several --dtype, and with --compile, all of this is done in each setting.
    """
    if options["svg"] is not None:
        check_outputs(options, options["svg"], kind=PICTURE)
        check_suffix(options["svg"], ".svg", option="--svg")
    source, dtypes = chosen_prompts(options), dtypes_of(options)
    check_inputs()
    chosen = _settings(options)
    settings = [*itertools.product((False, True) if options["compile"] else (False,), dtypes)]
    if len(settings) > 1 and (options["nproc"] > 1 or is_one_of_several()):
        raise click.UsageError("--nproc takes one --dtype, and no --compile")
    from treeopt.evaluate.compare import divided_compare
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
            one = divided_compare(base, loaded, prompts, draft, chosen, progress)
        if one is None:
            return
        _report(console, one)
        found.append(one)
    if len(found) > 1:
        _report_settings(console, found)
    if options["svg"] is not None:
        from treeopt.view.charts import render_bars

        picture = render_bars(as_bars(found), f"{base.name}, {options['nodes']} nodes")
        write_marked(options["svg"], picture, PICTURE, console.configuration)
        console.note(f"wrote {options['svg']}")
    parts = {one.setting: _as_json(one) for one in found}
    result = parts[found[0].setting] if len(parts) == 1 else {"settings": parts}
    console.result({**result, **origin_of(base, loaded, draft)})


command = run


def _settings(options: Mapping[str, Any]) -> CompareOptions:
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
    return CompareOptions(division=division_of(options), **chosen)


_NAMES = {"generate": "stock generate"}  # printed in place of a method's name


def _name(row: Row) -> str:
    return _NAMES.get(row.method, row.method)


def _share(row: Row) -> str:
    """The texts that equal those of stock generate."""
    if row.figures is None:
        return "left out"
    return "yes" if row.lossless and row.exact else f"{row.same}/{row.figures.texts}"


def _report(console: Console, found: Comparison) -> None:
    """Print one line a method, the figures by category and turn, and what they are of."""
    from treeopt.texts.prompts import skipped_text

    best, dtype = found.recommended, found.made_by["dtype"]
    exact = dtype == "float32"
    equal = "lossless" if exact else f"equal in {dtype}"
    columns = (
        Column("method", _name),
        Column("nodes", "nodes"),
        Column("tokens/step", "figures.mean_acceptance_length", ".3f"),
        Column("tokens/s", "figures.tokens_per_second", ".0f"),
        Column("speedup", "figures.speedup", ".2f"),
        Column(equal, _share),
    )
    gaps = [gap for row in found.rows for gap in row.gaps]
    repeats = f"median (quartiles) of {found.repeats} repeats" if found.repeats > 1 else "one repeat"
    console.report(
        Table(columns, [*found.rows, dataclasses.replace(best, method=f"recommended: {_name(best)}")]),
        "tokens/step: all tokens / all steps, the mean acceptance length; speedup: over autoregressive decoding by our "
        f"loop, without prefill; {repeats}, batch 1, {found.made_by['device']}, {threads(found.made_by['threads'])}",
        f"{equal}: texts that equal stock greedy generate token for token; "
        f"learned from {counted(found.learned, 'prompt')}, judged on {len(found.texts)} other texts",
        *(f"{row.method} was left out: {row.left_out}" for row in found.rows if row.left_out),
        f"logits where a text first differs: {min(gaps):.2g} to {max(gaps):.2g} apart, by one forward"
        if gaps
        else None,
        *_parts(found),
        f"not judged, as they equal learned ones: {counted(found.dropped, 'prompt')}" if found.dropped else None,
        skipped_text(found.skipped),
    )
    for row in found.rows if exact else ():
        if row.lossless is False:
            texts = counted(len(found.texts) - row.same, "text")
            console.warn(f"warning: {row.method} differs on {texts}; treeopt validate finds the causes")


def _parts(found: Comparison) -> Iterator[str | Table]:
    """Tokens per step and speedup of each method by category and by turn, where there are several."""

    def column(name: str, texts: int) -> Column:
        return Column(f"{name}, {texts}", lambda pair: pair[1][name], _short)

    pairs = []
    for row in (row for row in found.rows if row.figures is not None):
        turns = {f"turn {turn}": one for turn, one in row.by_turn.items()} if len(row.by_turn) > 1 else {}
        pairs.append((row, {**row.by_category, **turns}))
    counts = {name: one.texts for _, parts in pairs for name, one in parts.items()}
    if counts:
        yield "tokens/step (speedup) by category and turn, with the number of texts:"
        yield Table((Column("method", lambda pair: _name(pair[0])), *map(column, counts, counts.values())), pairs)


def _short(figures: Figures) -> str:
    return f"{figures.mean_acceptance_length:.2f} ({shown(attribute(figures.speedup, 'median'), '.2f')})"


def _report_settings(console: Console, found: Sequence[Comparison]) -> None:
    """Print the dtype and forward with the most tokens per second, without and with speculative decoding."""

    def speed(pair: tuple[str, Row]) -> float:
        return float(attribute(pair[1], "figures.tokens_per_second.median") or 0.0)

    plain = max(((one.setting, one.rows[0]) for one in found), key=speed)
    best = max(((one.setting, one.recommended) for one in found), key=speed)
    for what, (setting, row) in (("plain decoding", plain), ("recommended", best)):
        console.say(f"fastest, {what}: {setting}, {_name(row)}, {speed((setting, row)):.1f} tokens/s")


def as_bars(found: Sequence[Comparison]) -> list[Bar]:
    """The methods that ran, for the picture; of several settings with their names."""
    from treeopt.view.charts import bar_of

    return [
        bar_of(_row_as_json(row), _name(row) + (f", {one.setting}" if len(found) > 1 else ""))
        for one in found
        for row in one.rows
        if row.figures is not None
    ]


def _as_json(found: Comparison) -> dict[str, Any]:
    """The keys of `--json`."""
    return {
        **picked(found, "learned", "dropped", "repeats", "made_by"),
        "rows": [_row_as_json(row) for row in found.rows],
        "recommended": found.recommended.method,
        "texts": len(found.texts),
        "skipped": len(found.skipped),
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    return {
        **picked(row, "method", "nodes", "lossless", "gaps"),
        **_figures_as_json(row.figures),
        "same_texts": row.same,
        "by_category": {name: _figures_as_json(figures) for name, figures in row.by_category.items()},
        "by_turn": {turn: _figures_as_json(figures) for turn, figures in row.by_turn.items()},
        "left_out": row.left_out or None,
    }


def _figures_as_json(figures: Figures | None) -> dict[str, Any]:
    """Medians, and quartiles over the repeats; null where they are equal, as those of one repeat."""
    spreads = picked(figures, "tokens_per_second", "speedup")
    several = {name: one for name, one in spreads.items() if one is not None and one.low != one.high}
    return {
        **picked(figures, "texts", "mean_acceptance_length"),
        **{name: attribute(spread, "median") for name, spread in spreads.items()},
        "quartiles": {name: (one.low, one.high) if (one := several.get(name)) else None for name in spreads},
    }
