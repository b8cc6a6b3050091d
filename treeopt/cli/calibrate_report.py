"""The output of `treeopt calibrate`: accuracies of the heads or of a drafter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from treeopt.cli.console import Console, skipped_text
from treeopt.cli.learn_report import learned_as_dict, report_reliability
from treeopt.defaults import DEFAULT_TOP_K, HEADS
from treeopt.errors import counted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from treeopt.calibrate.results import CalibrationRun
    from treeopt.runs.shards import AnswerShard

_SHOWN_RANKS = 4


def report_calibration(console: Console, run: CalibrationRun, output: str, drafter_output: str | None) -> None:
    """Print a calibration's accuracies, or its JSON."""
    calibration = run.calibration
    _print_accuracy(console, run)
    console.report(skipped_text(run.skipped))
    if run.answers_cut:
        console.say(f"{run.answers_cut} given answers were cut at --max-new-tokens")
    if calibration.steps is not None:
        report_reliability(console, calibration)
    written = output if drafter_output is None else f"{output} and {drafter_output}"
    console.note(f"wrote {written}   next: treeopt build --nodes 64 --calibration {output} -o tree.yaml")
    console.result({**_as_dict(run), "output": output, "drafter_output": drafter_output})


def report_answers(console: Console, part: AnswerShard, output: str) -> None:
    """Print what a shard of answers holds."""
    lengths = [length for arrays, _ in part.chunks.values() for length in arrays["lengths"].tolist()]
    texts, tokens = len(lengths), sum(lengths)
    console.say(f"{counted(texts, 'answer')}, {tokens} tokens, in {len(part.chunks)} of {part.batches} batches")
    console.note(f"wrote {output}   next: treeopt merge, with all {part.shard.count} shards")
    console.result({"answers": texts, "tokens": tokens, "batches": len(part.chunks), "output": output})


def _shares(accuracy: NDArray[np.float64], error: float, shown: int) -> list[str]:
    """The first shares of a level, the first with its error, and the sum of all."""
    first = f"{accuracy[0]:.1%}" + (f" ± {error:.1%}" if math.isfinite(error) else "")
    return [first, *(f"{one:.1%}" for one in accuracy[1:shown]), f"{accuracy.sum():.1%}"]


def _print_accuracy(console: Console, run: CalibrationRun) -> None:
    """The accuracy of each head or level, by rank."""
    import numpy as np

    calibration = run.calibration
    top_k = min(DEFAULT_TOP_K, calibration.top_k)
    shown = min(_SHOWN_RANKS, top_k)
    accuracy, errors = calibration.accuracy[:, :top_k], calibration.standard_error(1)
    rows = [
        [
            f"head {h + 1}" if h < run.heads else f"level {h + 1}",
            *(_shares(accuracy[h], errors[h, 0], shown) if trials else ["-"] * (shown + 1)),
            f"{trials}",
        ]
        for h, trials in enumerate(calibration.trials.tolist())
    ]
    console.table(["", *(f"rank {r}" for r in range(shown)), f"top-{top_k}", "trials"], rows)
    console.say(
        f"{counted(calibration.sequences, 'text')}, {calibration.distinct} distinct, {calibration.positions} positions"
        "; accuracy by rank" + ("; ± one standard error, clustered by text" if np.isfinite(errors).any() else "")
    )
    if calibration.target is not None:
        console.say(
            f"sampled at temperature {calibration.temperature:g}, with the target's probabilities of "
            f"{calibration.target.ranks} candidates per {'head' if run.heads == calibration.num_heads else 'level'}"
        )


def _as_dict(run: CalibrationRun) -> dict[str, Any]:
    """The figures of a calibration for JSON."""
    from treeopt.optimize.per_step import reliability

    calibration = run.calibration
    top_k = min(DEFAULT_TOP_K, calibration.top_k)
    return {
        "heads": run.heads,
        "levels": calibration.num_heads,
        "prompts": calibration.sequences,
        "texts_distinct": calibration.distinct,
        "skipped": len(run.skipped),
        "skipped_prompts": [vars(skipped) for skipped in run.skipped],
        "answers_cut": run.answers_cut,
        "positions": calibration.positions,
        "top_k": top_k,
        "temperature": calibration.temperature,
        "target_ranks": None if calibration.target is None else calibration.target.ranks,
        "trials": calibration.trials.tolist(),
        "accuracy": calibration.accuracy[:, :top_k].tolist(),
        "standard_error_top_1": calibration.standard_error(1)[:, 0].tolist(),
        "drafter": calibration.provenance.drafter_id or HEADS,
        "learned": None if run.learned is None else learned_as_dict(run.learned),
        "calibration_error": None if calibration.steps is None else reliability(calibration).error.tolist(),
    }
