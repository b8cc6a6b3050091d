"""`treeopt calibrate`: prompts to traces."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from treeopt.build.trees import DEFAULT_TOP_K
from treeopt.cli.console import (
    Console,
    chosen_prompts,
    command,
    load_models,
    model_options,
    prompt_options,
    say_skipped,
)
from treeopt.files.atomic import check_writable
from treeopt.files.calibrations import DEFAULT_FILE, save_calibration

if TYPE_CHECKING:
    from treeopt.calibrate.measure import CalibrationRun

_SHOWN_RANKS = 4


@command("calibrate")
@functools.partial(model_options, dtype="auto")
@prompt_options
@click.option("--responses", help="Score the answers in this file (prompt and `output` a row) instead of generating.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of sampling.")
@click.option("--batch-size", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--force", is_flag=True, help="Overwrite the output.")
@click.option("-o", "--output", default=DEFAULT_FILE, show_default=True)
def run(console: Console, **options: Any) -> None:
    """Measure how often each head's guesses are right, on the base model's own answers to the prompts.

    Every prompt is continued greedily; then one pass over the result ranks each true token under each head. The file
    holds these ranks: enough to build any tree and to replay it exactly.

    Prompts with `turns` (MT-bench, Spec-Bench) are asked turn by turn, each after the model's own answer; without a
    chat template the turns are joined by newlines. With --responses only the first turn is scored.
    """
    scored = options["responses"] is not None
    if scored and options["prompts"] is not None:
        raise click.UsageError("give either --prompts or --responses")
    asked = options["responses"] if scored else chosen_prompts(options)
    check_writable(options["output"], overwrite=options["force"])
    from treeopt.calibrate.measure import run_calibration
    from treeopt.calibrate.prompts import load_prompts

    prompts = load_prompts(asked, limit=options["limit"], answers=scored)
    base, loaded = load_models(console, options)
    console.note(f"prompts  {len(prompts.prompts)} of {prompts.name}  (sha256 {prompts.sha256[:12]})")
    with console.progress("calibrate") as progress:
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
            progress=progress,
        )
    save_calibration(run.calibration, options["output"], overwrite=options["force"])
    _report(console, run, options["output"])


command = run


def _report(console: Console, run: CalibrationRun, output: str) -> None:
    calibration = run.calibration
    top_k = min(DEFAULT_TOP_K, calibration.kept)
    accuracy, trials = calibration.accuracy[:, :top_k], calibration.trials
    errors = calibration.standard_error(1)
    rows = [
        [
            f"head {h + 1}",
            f"{accuracy[h, 0]:.1%} ± {errors[h, 0]:.1%}",
            *(f"{accuracy[h, r]:.1%}" for r in range(1, min(_SHOWN_RANKS, top_k))),
            f"{accuracy[h].sum():.1%}",
            f"{trials[h]}",
        ]
        for h in range(calibration.num_heads)
    ]
    ranks = [f"rank {r}" for r in range(min(_SHOWN_RANKS, top_k))]
    console.table(["", *ranks, f"in the first {top_k}", "trials"], rows)
    console.say(
        f"{calibration.sequences} texts, {calibration.positions} positions; share of trials in which the guess of that "
        "rank was right; ± one standard error, clustered by text"
    )
    say_skipped(console, run.skipped)
    if run.answers_cut:
        console.say(f"{run.answers_cut} given answers were cut at --max-new-tokens")
    console.note(f"wrote {output}   next: treeopt build --nodes 64 --calibration {output} -o tree.yaml")
    console.result(
        {
            "heads": calibration.num_heads,
            "prompts": calibration.sequences,
            "skipped": len(run.skipped),
            "skipped_prompts": [vars(skipped) for skipped in run.skipped],
            "answers_cut": run.answers_cut,
            "positions": calibration.positions,
            "top_k": top_k,
            "trials": trials.tolist(),
            "accuracy": accuracy.tolist(),
            "standard_error_top_1": errors[:, 0].tolist(),
            "output": output,
        }
    )
