"""The command `treeopt learn`, and what it and calibrate print of a learned drafter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.checks import check_inputs
from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console, command
from treeopt.cli.drafters import LEARNED, WITH_TABLE, chosen_drafter, draft_option, learning_options, load_draft_model
from treeopt.cli.numbers import SEED, Temperature
from treeopt.cli.options import (
    check_outputs,
    chosen_prompts,
    compile_option,
    dtypes_of,
    load_models,
    model_options,
    prompt_options,
    say_prompts,
)
from treeopt.cli.work_options import batch_option, batch_settings, ending_work, open_work, work_options
from treeopt.defaults import DRAFTER_FILE, HEADS_NGRAM, LEARN_SIZES, MODEL, NGRAM, STEP_SIZES
from treeopt.errors import counted
from treeopt.facts import Column, Fact, Part, Table, milliseconds, picked

if TYPE_CHECKING:
    from treeopt.drafting.learn import Learned
    from treeopt.evaluate.learn_drafter import LearnedDrafter, PlanFigures
    from treeopt.models.base import Base
    from treeopt.models.head_files import LoadedHeads
    from treeopt.optimize.chains import ChainPrediction
    from treeopt.texts.prompts import PromptSet


_FEW = 1000  # positions; fewer are too few for the weights and the calibration map of a level
_CHAINS = 8  # chains of more drafts are shown only where one is the fastest


def announce_learning(
    console: Console, learning: treeopt.Learning, prompts: PromptSet, max_new_tokens: int, *, given: bool = False
) -> None:
    """Print the parts of the work before it begins, with the numbers of answers and of tokens to sample."""
    count = sum(1 if given else 1 + len(prompt.later) for prompt in prompts.prompts)  # given answers: first turns only
    verb = "reads" if given else "generates"
    parts = [f"{verb} {count:,} answers of up to {max_new_tokens:,} tokens to {len(prompts.prompts):,} prompts"]
    if learning.ngram and learning.tokens:
        less = "fewer if all answers repeat"
        parts.append(f"samples {learning.tokens:,} more tokens at temperature {learning.temperature} ({less})")
        parts.append("counts all tokens")
    console.note(f"learning {', '.join([*parts, 'fits the drafter', 'traces the answers'])}")


def report_learned(console: Console, learned: Learned, positions: int) -> None:
    """Print the text that a drafter was learned from, its n-gram table, and the seconds; JSON has its weights."""
    if positions < _FEW:
        few = counted(positions, "position")
        console.warn(f"warning: fitted to {few}; with fewer than {_FEW:,} the weights are unreliable")
    seconds = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in learned.seconds.items())
    console.report(*_counted_text(learned), seconds)


def _counted_text(learned: Learned) -> Iterator[str]:
    """The text that was counted, and the size of the table."""
    table, source = learned.drafter.ngram_table, learned.drafter.source.get("learning", {})
    if table is not None and table.empty:
        yield "nothing was counted: the n-gram table is empty, and the text so far gives the candidates"
    elif table is not None:
        sampled = f", and answers sampled at temperature {source.get('temperature')}, seed {source.get('seed')}"
        yield (
            f"learned from {table.num_tokens:,} tokens: {len(learned.fold_of)} prompts with their answers"
            f"{sampled if source.get('tokens') else ''}; the model's greedy choice after each token is counted"
        )
        yield f"n-gram table: {table.contexts:,} contexts of 1 to 4 tokens, {table.bytes / 1e6:.1f} MB"


def learned_as_dict(learned: Learned) -> dict[str, Any]:
    table = learned.drafter.ngram_table
    return {
        **picked(learned.drafter, "id", "levels", "source"),
        **picked(learned, "tokens", "seconds"),
        "contexts": 0 if table is None else table.contexts,
        "bytes": 0 if table is None else table.bytes,
    }


_CHAIN = (
    Column("chain of drafts", "drafts"),
    Column("tokens/step, formula", "tokens_per_step", ".3f"),
    Column("replay", "replayed_tokens_per_step", ".3f"),
    Column("speedup, formula", "speedup", ".2f"),
    Column("replay", "replayed_speedup", ".2f"),
)


def chain_parts(found: ChainPrediction, drafter: str = "", sampled: float | None = None) -> Iterator[Part]:
    """The acceptance rate of a draft model, and chains by the formula and by replay; of a timed drafter their speedup.

    `sampled` is the rate under sampling.
    """
    best = (found.best_drafts, found.best_replayed_drafts)
    shown = [one for one in found.chains if one.drafts <= _CHAINS or (drafter and one.drafts in best)]
    cost = f"; cost ratio c {found.cost:.2f}: seconds of a step of {drafter} alone / of the base, here"
    rate = f"acceptance rate alpha {found.alpha:.3f}: positions where the drafter's best token is the base's"
    yield rate + (cost if drafter else "")
    if sampled is not None:
        yield f"under sampling at temperature 1, alpha of the draft model {sampled:.3f}: mean of sum_x min(p, q)"
    yield Table(_CHAIN if drafter else _CHAIN[:3], shown)
    yield "formula: (1 - alpha^(g+1)) / (1 - alpha) of arXiv:2211.17192, for drafts accepted independently"
    if drafter:
        formula, replay = (counted(number, "draft") if number else "none" for number in best)
        yield f"best chain: {formula} by the formula, {replay} by replay; a step takes g c + 1 steps of the base"


@command("learn")
@model_options(dtype="auto", several=True)
@prompt_options()
@click.option(
    "--drafter",
    help=f"{', '.join(LEARNED)} [default: {HEADS_NGRAM}; {MODEL} with --draft, {NGRAM} with --model alone].",
)
@draft_option(default="none")
@learning_options
@click.option("--temperature", type=Temperature(min_open=True), default=0.7, help="Of the sampling.")
@click.option("--seed", type=SEED, default=0, help="Of sampling.")
@batch_option
@click.option(
    "--nodes",
    type=click.IntRange(2, STEP_SIZES[-1]),
    multiple=True,
    help=f"Size to time, repeatable [default: {' '.join(map(str, LEARN_SIZES))}].",
)
@compile_option
@work_options
@click.option("-o", "--output", default=DRAFTER_FILE, help="File to write.")
def run(console: Console, **options: Any) -> None:
    """Learn a drafter from the model's own text, for a model with heads, with a draft model, or without either.

    `heads+ngram`: the heads' guesses, rescored by an n-gram table and the text so far. `ngram`: the guesses of the
    table, the text so far and the LM head; no heads are needed. `model+ngram`: the guesses of the draft model that
    --draft names, rescored likewise; `model`: these alone, with probabilities fitted to the base's text.

    The base answers the prompts, and samples --learn-tokens more. Its greedy choices are counted in the table, and the
    sources weighted by its answers. Base and heads do not change, and decoding stays lossless.

    Then trees of several sizes are built, measured on texts left out, and timed on this machine. The file stores the
    one with the most tokens per second, which `generate` and `validate` use without --tree; it is the root alone, plain
    decoding, where no tree is faster. With --dtype float32,bfloat16 steps are timed in both, and with --compile with
    compiled forwards as well.

    For traces to build other trees from, use `treeopt calibrate --drafter FILE` on other prompts. Finished batches are
    stored in OUTPUT.partial, for --resume.
    """
    drafter = _drafter(options)
    check_outputs(options, options["output"], suffixes=(".safetensors",))
    check_inputs()
    further = _further_dtypes(options)
    name, batches, work = chosen_prompts(options), batch_settings(console, options), open_work(options)
    from treeopt.texts.prompts import load_prompts
    from treeopt.verify.probe import check_trees

    prompts = load_prompts(name, skip=options["skip"], limit=options["limit"])
    batches |= {name: options[name] for name in ("max_new_tokens", "chat_template")}
    with_compiled = options.pop("compile")  # the model itself answers and traces as it is
    base, loaded = load_models(console, options, with_heads=drafter == HEADS_NGRAM)
    draft = load_draft_model(console, options, base)
    say_prompts(console, prompts)
    check_trees(base)
    fields = {name: options[name] for name in ("temperature", "seed", "levels")}
    learning = treeopt.Learning(options["learn_tokens"], ngram=drafter in WITH_TABLE, **fields)
    announce_learning(console, learning, prompts, options["max_new_tokens"])
    with ending_work(console, work):
        with console.progress("learn") as progress:
            found = treeopt.learn_drafter(
                base,
                prompts,
                loaded,
                **batches,
                learning=learning,
                draft=draft,
                work=work,
                sizes=options["nodes"] or LEARN_SIZES,
                dtypes=further,
                compile=with_compiled,
                progress=progress,
            )
        made = with_configuration(found.drafter, console.configuration)
        treeopt.save_drafter(made, options["output"], overwrite=options["force"])
        work.remove()
    _report(console, found, options["output"], base, loaded)


command = run


def _further_dtypes(options: dict[str, Any]) -> list[str]:
    _, *further = dtypes_of(options)
    if further and options["device_map"] is not None:
        raise click.UsageError("--device-map takes one --dtype: the model is copied for each further one")
    return further


def _drafter(options: Mapping[str, Any]) -> str:
    drafter = chosen_drafter(options, HEADS_NGRAM)
    if drafter not in LEARNED:
        raise click.BadParameter(f"{drafter!r} is not {' or '.join(LEARNED)}", param_hint="--drafter")
    return drafter


def _report(console: Console, found: LearnedDrafter, output: str, base: Base, loaded: LoadedHeads | None) -> None:
    from treeopt.optimize.build_report import reliability_text
    from treeopt.texts.prompts import skipped_text

    learned = found.run.learned
    assert learned is not None
    report_learned(console, learned, found.run.calibration.positions)
    console.report(reliability_text(found.run.calibration))
    _report_plans(console, found)
    chains: dict[str, Any] = {}
    if found.chains is not None:
        console.report(*chain_parts(found.chains, found.drafter.name, found.sampled_alpha))
        names = ("alpha", "best_drafts", "best_replayed_drafts", "chains")
        more = {"cost_ratio": found.chains.cost, "alpha_sampled": found.sampled_alpha}
        chains = {"chains": {**picked(found.chains, *names), **more}}
    console.report(skipped_text(found.run.skipped))
    where = f"--heads {loaded.name}" if loaded is not None else f"--model {base.name}"
    where += "" if base.adapter is None else f" --adapter {base.adapter.name}"
    console.note(f"wrote {output}   next: treeopt generate 'PROMPT' {where} --drafter {output}")
    console.result({**learned_as_dict(learned), **chains, "output": output})


def _trees(one: PlanFigures) -> str:
    return "per step" if one.kind == "dynamic" else one.kind


_PLANS = (
    Column("trees", _trees),
    Column(None, "dtype"),
    Column(None, "compiled"),
    Column(None, "kind"),
    Column("nodes", "nodes"),
    Column("depth", "plan.depth", key=""),
    Column("tokens/step", "tokens_per_step", ".3f"),
    Column("step", "seconds", milliseconds),
    Column("tokens/s", "tokens_per_second", ".1f"),
    Column("speedup", "speedup", ".2f"),
)


def _report_plans(console: Console, found: LearnedDrafter) -> None:
    from treeopt.optimize.select_method import FOLDS

    several = len({one.setting for one in found.figures}) > 1
    columns = (Column("setting", "setting", key=""), *_PLANS) if several else _PLANS
    best = found.recommended
    plain = max((one for one in found.figures if one.kind == "none"), key=lambda one: one.tokens_per_second)
    shown = "none: no tree is faster than plain decoding on this machine"
    if best.kind != "none":
        shown = f"{_trees(best)}, {counted(best.nodes, 'node')}, depth {best.plan.depth}"
    half = "texts in half precision can differ from those in float32; measure it: treeopt validate --dtype D"
    console.report(
        Table(columns, found.figures, key="sizes"),
        "tokens/step: all tokens / all steps, on texts left out; step: the shortest here, batch 1; speedup: over "
        f"autoregressive decoding in the same loop{' and setting' if several else ''}, without prefill",
        f"fastest without a drafter: {plain.setting}, {plain.tokens_per_second:.1f} tokens/s" if several else None,
        half if len({one.dtype for one in found.figures}) > 1 else None,
        f"recommended: {shown}" + (f", in {best.setting}" if several else ""),
        Fact(None, Table(_PLANS, [best]).value[0], key="recommended"),
    )
    texts = found.run.calibration.distinct
    if texts < FOLDS:
        console.warn(f"warning: tokens/step of {counted(texts, 'different text')} are unreliable")
