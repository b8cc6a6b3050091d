"""`treeopt calibrate`: prompts to traces."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from treeopt.calibration import Calibration
from treeopt.cli.console import Console, command, say_skipped
from treeopt.cli.early_checks import check_belongs, check_suffix, unkept, warn_no_trees
from treeopt.cli.learn_report import announce_learning, learned_as_dict, report_learned, report_reliability
from treeopt.cli.mismatch import warn_other_drafter
from treeopt.cli.numbers import SEED, Temperature
from treeopt.cli.options import check_outputs, chosen_prompts, force_option, load_models, model_options, prompt_options
from treeopt.drafter import HEADS, HEADS_NGRAM, KINDS, LEARN_TOKENS, Drafter
from treeopt.files.calibrations import DEFAULT_FILE, save_calibration
from treeopt.files.drafters import load_drafter, save_drafter
from treeopt.optimize.reliability import reliability
from treeopt.optimize.tree_builder import DEFAULT_TOP_K

if TYPE_CHECKING:
    from treeopt.calibrate.pipeline import CalibrationRun
    from treeopt.drafting.learn import Learning
    from treeopt.texts.prompts import PromptSet

_SHOWN_RANKS = 4


@command("calibrate")
@functools.partial(model_options, dtype="auto")
@prompt_options
@click.option("--responses", help="Score the answers in this file (prompt and `output` a row) instead of generating.")
@click.option(
    "--drafter",
    default=HEADS,
    show_default=True,
    help=f"{HEADS}: the heads' guesses; {HEADS_NGRAM}: learn a drafter on the way; or a drafter file.",
)
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    help="dynamic: trace trees chosen per step too [default: with every drafter but plain].",
)
@click.option(
    "--learn-tokens",
    type=click.IntRange(min=0),
    default=LEARN_TOKENS,
    show_default=True,
    help="Drawn by --drafter heads+ngram to learn from, beyond the greedy answers.",
)
@click.option("--temperature", type=Temperature(), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of sampling, and of what is learned from.")
@click.option("--batch-size", type=click.IntRange(min=1), default=16, show_default=True)
@force_option
@click.option("-o", "--output", default=DEFAULT_FILE, show_default=True)
def run(console: Console, **options: Any) -> None:
    """Measure how often each head's guesses are right, on the base model's own answers to the prompts.

    Every prompt is continued greedily; then one pass over the result ranks each true token under each head. The file
    holds these ranks: enough to build any tree and to replay it exactly.

    With --drafter heads+ngram the model writes more text to the same prompts, and a drafter is learned from all of it
    (`treeopt learn` says how); each answer is traced by what the answers to other prompts taught. Its file goes beside
    the output.

    Prompts with `turns` (MT-bench, Spec-Bench) are asked turn by turn, each after the model's own answer; without a
    chat template the turns are joined by newlines. With --responses only the first turn is scored.
    """
    scored = options["responses"] is not None
    if scored and options["prompts"] is not None:
        raise click.UsageError("give either --prompts or --responses")
    asked = options["responses"] if scored else chosen_prompts(options)
    check_belongs(("learn_tokens",), "--drafter heads+ngram", options["drafter"] == HEADS_NGRAM)
    check_belongs(("temperature",), "answers that are generated: --responses are given", not scored)
    check_outputs(options, options["output"])
    check_suffix(options["output"], ".safetensors")
    learning, drafter_file = _drafting(options)
    from treeopt.calibrate.pipeline import run_calibration
    from treeopt.texts.prompts import load_prompts
    from treeopt.verify.probe import check_trees

    prompts = load_prompts(asked, skip=options["skip"], limit=options["limit"], answers=scored)
    drafter = None if drafter_file is None or learning is not None else load_drafter(drafter_file)
    base, loaded = load_models(console, options)
    if drafter is not None:
        warn_other_drafter(console, drafter, base, loaded)
        _warn_known(console, drafter, prompts)
    console.note(f"prompts  {len(prompts.prompts)} of {prompts.name}  (sha256 {prompts.sha256[:12]})")
    if drafter_file is None:
        warn_no_trees(console, base, "its traces serve other engines alone")
    else:
        check_trees(base)
    if learning is not None:
        announce_learning(console, learning, prompts, options["max_new_tokens"], given=scored)
    with unkept(console, options), console.progress("calibrate") as progress:
        run = run_calibration(
            base,
            loaded,
            prompts,
            max_new_tokens=options["max_new_tokens"],
            batch_size=options["batch_size"],
            temperature=options["temperature"],
            seed=options["seed"],
            chat_template=options["chat_template"],
            responses=scored,
            drafter=drafter,
            learning=learning,
            steps=drafter_file is not None and options["kind"] != "static",
            progress=progress,
        )
    if run.learned is not None:
        assert drafter_file is not None
        save_drafter(run.learned.drafter, drafter_file, overwrite=options["force"])
    save_calibration(_naming(run.calibration, drafter_file), options["output"], overwrite=options["force"])
    if run.learned is not None:
        report_learned(console, run.learned, run.calibration.positions)
    _report(console, run, options["output"], drafter_file if run.learned is not None else None)


command = run


def _drafting(options: dict[str, Any]) -> tuple[Learning | None, str | None]:
    """What is to be learned, if anything, and the drafter's file: read, or to be written; None for plain guesses."""
    from treeopt.drafting.learn import Learning

    name, output = options["drafter"], Path(options["output"])
    if name not in (HEADS, HEADS_NGRAM):
        return None, name
    if name == HEADS and options["kind"] != "dynamic":
        return None, None
    file = str(output.with_name(f"{output.stem}.drafter.safetensors"))
    check_outputs(options, file)
    return Learning(tokens=options["learn_tokens"], seed=options["seed"], ngram=name == HEADS_NGRAM), file


def _naming(calibration: Calibration, drafter: str | None) -> Calibration:
    """The calibration with its drafter's file."""
    return dataclasses.replace(
        calibration, provenance=dataclasses.replace(calibration.provenance, drafter=drafter or "")
    )


def _warn_known(console: Console, drafter: Drafter, prompts: PromptSet) -> None:
    """Warn where a drafter has counted the answers to these very prompts."""
    first, last = drafter.source.get("rows", (0, -1))
    known = prompts.sha256 in drafter.source.get("prompts", {})
    if known and first <= prompts.prompts[-1].row and prompts.prompts[0].row <= last:
        console.warn(
            "warning: the drafter was learned from these prompts, whose answers it has counted: its figures here are "
            "higher than on other prompts (--drafter heads+ngram leaves each text out of its own drafter)"
        )


def _report(console: Console, run: CalibrationRun, output: str, drafter_output: str | None) -> None:
    calibration = run.calibration
    top_k = min(DEFAULT_TOP_K, calibration.top_k)
    accuracy, trials = calibration.accuracy[:, :top_k], calibration.trials
    errors = calibration.standard_error(1)
    rows = [
        [
            f"head {h + 1}" if h < run.heads else f"level {h + 1}",
            f"{accuracy[h, 0]:.1%}" + (f" ± {errors[h, 0]:.1%}" if math.isfinite(errors[h, 0]) else ""),
            *(f"{accuracy[h, r]:.1%}" for r in range(1, min(_SHOWN_RANKS, top_k))),
            f"{accuracy[h].sum():.1%}",
            f"{trials[h]}",
        ]
        for h in range(calibration.num_heads)
    ]
    ranks = [f"rank {r}" for r in range(min(_SHOWN_RANKS, top_k))]
    console.table(["", *ranks, f"in the first {top_k}", "trials"], rows)
    console.say(
        f"{calibration.sequences} texts, {calibration.distinct} distinct, {calibration.positions} positions; share of "
        "trials in which the guess of that rank was right"
        + ("; ± one standard error, clustered by text" if np.isfinite(errors).any() else "")
    )
    say_skipped(console, run.skipped)
    if run.answers_cut:
        console.say(f"{run.answers_cut} given answers were cut at --max-new-tokens")
    if calibration.steps is not None:
        report_reliability(console, calibration)
    written = output if drafter_output is None else f"{output} and {drafter_output}"
    console.note(f"wrote {written}   next: treeopt build --nodes 64 --calibration {output} -o tree.yaml")
    console.result(
        {
            "heads": calibration.num_heads,  # levels, where a drafter goes beyond the heads
            "prompts": calibration.sequences,
            "texts_distinct": calibration.distinct,
            "skipped": len(run.skipped),
            "skipped_prompts": [vars(skipped) for skipped in run.skipped],
            "answers_cut": run.answers_cut,
            "positions": calibration.positions,
            "top_k": top_k,
            "trials": trials.tolist(),
            "accuracy": accuracy.tolist(),
            "standard_error_top_1": errors[:, 0].tolist(),
            "drafter": calibration.provenance.drafter_id or HEADS,
            "learned": None if run.learned is None else learned_as_dict(run.learned),
            "calibration_error": None if calibration.steps is None else reliability(calibration).error.tolist(),
            "output": output,
            "drafter_output": drafter_output,
        }
    )
