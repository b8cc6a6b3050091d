"""The report of `treeopt validate`: metrics, differences, and errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treeopt.cli.console import Console, row_of, say_skipped, threads
from treeopt.cli.rows import shown
from treeopt.errors import Code, TreeoptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from treeopt.decode.draft_metrics import DraftMetrics
    from treeopt.evaluate.divergence import Difference
    from treeopt.evaluate.metrics import Metrics, Spread
    from treeopt.evaluate.runs import Measured
    from treeopt.evaluate.validate import Validation
    from treeopt.texts.prompts import Skipped

_SHOWN = 5
_NAMES = {"generate": "stock generate"}  # printed in place of a baseline's name


def report_metrics(console: Console, found: Validation, skipped: Sequence[Skipped]) -> None:
    """Print the metrics, before differing texts are judged, which may take long."""
    _say_tokens(console, found)
    say_speed(console, found)
    say_depths(console, found)
    say_parts(console, found.metrics)
    say_skipped(console, [*skipped, *found.skipped])


def report_differences(
    console: Console,
    found: Validation,
    tokenizer: PreTrainedTokenizerBase | None,
    skipped: Sequence[Skipped],
    origin: Mapping[str, Any],
) -> None:
    """Print whether the texts are lossless; with --json, print the whole report, with the keys of `origin_of`."""
    _say_lossless(console, found)
    _say_tolerated(console, found, tokenizer)
    console.result({**_as_json(found, [*skipped, *found.skipped]), **origin})


def differences_error(found: Validation, tokenizer: PreTrainedTokenizerBase | None) -> TreeoptError:
    """E501 with the first failures."""
    texts = len({one.prompt_id for one in found.failures})
    exact = found.made_by["dtype"] == "float32"
    unjudged = found.differing - found.num_judged
    return TreeoptError(
        Code.NOT_LOSSLESS,
        f"{texts} of {len(found.metrics.trials)} texts differ from greedy decoding ({_counted(found.failures)})",
        at=_listed(found.failures, tokenizer),
        why="in float64 the gap of the logits is 0 (tie), below the dtype's resolution (rounding) or above it (bug)",
        fix=(f"--judge {found.differing} judges all" if unjudged else "") if exact else "repeat with --dtype float32",
    )


def _say_tolerated(console: Console, found: Validation, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Print the differences that are not failures."""
    tolerated = [one for one in found.our_differences if one not in found.failures]
    if tolerated:
        console.note(f"differences that are not failures ({_counted(tolerated)}):")
        console.note(_listed(tolerated, tokenizer))


def threshold_error(found: Measured, tokens_per_step: float | None, speedup: float | None) -> TreeoptError | None:
    """E505 where a metric is below its minimum; None where none is."""
    faults, options = [], []
    if tokens_per_step is not None and found.tokens_per_step < tokens_per_step:
        faults.append(f"{found.tokens_per_step:.4f} tokens per step, the minimum is {tokens_per_step:g}")
        options.append("--min-tokens-per-step")
    if speedup is not None and (found.speedup is None or found.speedup < speedup):
        measured = "no speedup was measured" if found.speedup is None else f"speedup {found.speedup:.3f}"
        faults.append(f"{measured}, the minimum is {speedup:g}")
        options.append("--min-speedup")
    if not faults:
        return None
    return TreeoptError(Code.BELOW_THRESHOLD, "; ".join(faults), at=", ".join(options))


def _say_lossless(console: Console, found: Validation) -> None:
    trials, ours = found.metrics.trials, found.our_differences
    same = len(trials) - found.differing
    exact = found.made_by["dtype"] == "float32"
    yes = "yes" if exact else "as far as these texts show"  # in half precision other texts may differ at near ties
    answer = yes if not ours else "NO" if found.failures else f"no failure, but differences ({_counted(ours)})"
    console.say(
        f"lossless        {answer}: {same}/{len(trials)} texts, {found.metrics.tokens} tokens, "
        f"against stock greedy generate in {found.made_by['dtype']}"
    )
    if ours:
        console.say(f"                {found.num_judged} of {found.differing} differing texts judged")
        gaps = [one.gap for one in ours if math.isfinite(one.gap)]
        if gaps:
            console.say(f"                gaps of the logits where texts differ: {min(gaps):.2g} to {max(gaps):.2g}")
    for name, texts in Counter(one.decoder for one in found.differences if one not in ours).items():
        shown = _NAMES.get(name, name)
        console.say(f"                (not counted: {shown} differs from stock generate on {texts} texts)")


def _say_tokens(console: Console, found: Validation) -> None:
    comparable = sum(trial.same for trial in found.metrics.trials)
    expected = found.expected_tokens_per_step
    shown = "not in the tree file" if expected is None else f"{expected:.4f}"
    counted = f"{found.metrics.tokens} tokens / {found.metrics.steps} steps"
    console.say(f"tokens per step {found.tokens_per_step:.4f} measured: {counted} (1 + accepted drafts per step)")
    console.say(
        f"                {found.predicted.tokens_per_step:.4f} predicted by replay; steps agree on "
        f"{comparable - len(found.prediction_misses)}/{comparable} texts"
    )
    console.say(f"                {shown} expected by the calibration")
    say_drafts(console, found.metrics)


def say_drafts(console: Console, metrics: Metrics) -> None:
    """Print how many drafts the tree verified and accepted."""
    drafts = _draft_metrics(metrics)
    rate = "" if drafts.draft_acceptance_rate is None else f" ({drafts.draft_acceptance_rate:.1%})"
    console.say(
        f"drafts          {drafts.num_draft_tokens} verified in the {drafts.num_drafts} steps that had any, "
        f"{drafts.num_accepted_tokens} accepted{rate}"
    )


def say_speed(console: Console, found: Measured) -> None:
    """Print the table of all baselines, overhead and speedup."""
    metrics = found.metrics
    rows = [
        [
            f"tree {found.nodes}" if name == "tree" else _NAMES.get(name, name),
            f"{metrics.tokens_per_step(name):.2f}",
            shown(metrics.tokens_per_second(name), ".0f"),
            shown(metrics.speedup(name), ".2f"),
        ]
        for name in metrics.baselines
    ]
    console.table(["", "tokens/step", "tokens/s", "vs autoregressive"], rows)
    repeats = f"median (quartiles) of {metrics.repeats} repeats" if metrics.repeats > 1 else "one repeat"
    console.say(
        f"overhead {shown(metrics.overhead, '.2f')}  speedup {shown(metrics.speedup(), '.2f')} over autoregressive "
        f"({repeats}, batch {found.batch_size}, {found.made_by['device']}, {threads(found.made_by['threads'])}, "
        f"{found.made_by['attention']} attention, without prefill)"
    )
    for name, why in found.left_out.items():
        console.say(f"{name} was left out: {why}")


def say_depths(console: Console, found: Measured) -> None:
    """Print the share of steps that accepted d drafts or more, measured and predicted."""
    predicted = found.predicted.acceptance_by_depth().tolist()
    rows = [
        [str(depth), f"{measured:.1%}", f"{replayed:.1%}"]
        for depth, (measured, replayed) in enumerate(zip(found.measured_by_depth, predicted, strict=True), start=1)
    ]
    if rows:
        console.table(["drafts accepted, at least", "measured", "predicted"], rows)


def say_parts(console: Console, metrics: Metrics) -> None:
    """Print the table of categories and turns, where there are several."""
    by_turn = metrics.by_turn
    parts = metrics.by_category
    if len(by_turn) > 1:
        parts |= {f"turn {turn}": part for turn, part in by_turn.items()}
    rows = [
        [
            name,
            str(len(part.trials)),
            str(part.tokens),
            f"{part.tokens_per_step():.4f}",
            "-" if part.predicted_tokens_per_step is None else f"{part.predicted_tokens_per_step:.4f}",
            shown(part.speedup(), ".2f"),
        ]
        for name, part in parts.items()
    ]
    if rows:
        console.table(["", "texts", "tokens", "tokens/step", "predicted", "speedup"], rows)


def _counted(differences: Sequence[Difference]) -> str:
    """`2 rounding, 1 bug`."""
    return ", ".join(f"{n} {name}" for name, n in Counter(one.cause.value for one in differences).items())


def _listed(differences: Sequence[Difference], tokenizer: PreTrainedTokenizerBase | None) -> str:
    lines = [
        f"{row_of(one.prompt_id)}, token {one.position}: greedy {_token(one.greedy_token, tokenizer)}, "
        f"{one.decoder} {_token(one.found_token, tokenizer)}{_gap(one)}: {one.cause.value}"
        for one in differences[:_SHOWN]
    ]
    more = len(differences) - _SHOWN
    return "\n".join([*lines, f"and {more} more; --json lists all"] if more > 0 else lines)


def _gap(one: Difference) -> str:
    """`, gap 0.01, resolution 0.03`; empty where not computed."""
    return "" if math.isnan(one.gap) else f", gap {one.gap:.2g}, resolution {one.resolution:.2g}"


def _token(token: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Id and text of a token; a negative id means that the text had ended."""
    if token < 0:
        return "had ended"
    return f"{token}" if tokenizer is None else f"{token} {tokenizer.convert_ids_to_tokens(token)!r}"


def _as_json(found: Validation, skipped: Sequence[Skipped]) -> dict[str, Any]:
    return {
        "acceptance": "greedy",
        "lossy": False,
        "lossless": found.lossless,
        "failures": len(found.failures),
        "differing": found.differing,
        "judged": found.num_judged,
        "differences": [{**vars(one), "cause": one.cause.value} for one in found.differences],
        "prediction_misses": [miss.prompt_id for miss in found.prediction_misses],
        **measured_json(found, skipped),
    }


def measured_json(found: Measured, skipped: Sequence[Skipped]) -> dict[str, Any]:
    """The part of the JSON report that all acceptance rules have."""
    metrics = found.metrics
    return {
        "prompts": len({text.dialogue for text in found.texts}),
        "texts": len(metrics.trials),
        "skipped": len(skipped),
        "skipped_prompts": [vars(one) for one in skipped],
        "nodes": found.nodes,
        "tokens": metrics.tokens,
        "steps": metrics.steps,
        "tokens_per_step": found.tokens_per_step,
        "predicted_tokens_per_step": found.predicted.tokens_per_step,
        "expected_tokens_per_step": found.expected_tokens_per_step,
        **_draft_metrics(metrics).as_dict(),
        "predicted_acceptance_histogram": list(found.predicted.histogram),
        "acceptance_by_depth": {
            "measured": found.measured_by_depth,
            "predicted": found.predicted.acceptance_by_depth().tolist(),
        },
        "smaller_trees": {str(nodes): tau for nodes, tau in found.smaller.items()},
        "repeats": found.repeats,
        "batch_size": found.batch_size,
        **_speeds(found),
        "by_category": {name: _part(part) for name, part in metrics.by_category.items()},
        "by_turn": {str(turn): _part(part) for turn, part in metrics.by_turn.items()},
        "left_out": dict(found.left_out),
        "made_by": found.made_by,
    }


def _speeds(found: Measured) -> dict[str, Any]:
    """The timed part of the JSON report, by baseline: medians, and quartiles over the repeats."""
    metrics = found.metrics
    keys = {name.replace(" ", "_"): name for name in metrics.baselines}
    rates = {key: metrics.tokens_per_second(name) for key, name in keys.items()}
    speedups = {key: metrics.speedup(name) for key, name in keys.items()}
    return {
        "tokens_per_second": {key: _median(rate) for key, rate in rates.items()},
        "prefill_seconds": {key: metrics.prefill_seconds(name) for key, name in keys.items()},
        "baseline_tokens_per_step": {key: metrics.tokens_per_step(name) for key, name in keys.items()},
        "overhead": found.overhead,
        "speedup": found.speedup,
        "speedup_vs_autoregressive": {key: _median(speedup) for key, speedup in speedups.items()},
        "quartiles": {
            "tokens_per_second": {key: _quartiles(rate) for key, rate in rates.items()},
            "speedup_vs_autoregressive": {key: _quartiles(speedup) for key, speedup in speedups.items()},
            "overhead": _quartiles(metrics.overhead),
            "speedup": _quartiles(metrics.speedup()),
        },
    }


def _part(part: Metrics) -> dict[str, Any]:
    return {
        "texts": len(part.trials),
        "tokens": part.tokens,
        "steps": part.steps,
        "tokens_per_step": part.tokens_per_step(),
        "predicted_tokens_per_step": part.predicted_tokens_per_step,
        **_draft_metrics(part).as_dict(),
        "overhead": _median(part.overhead),
        "speedup": _median(part.speedup()),
    }


def _draft_metrics(part: Metrics) -> DraftMetrics:
    """Those of the tree, which our decoder always reports."""
    drafts = part.draft_metrics()
    assert drafts is not None
    return drafts


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median


def _quartiles(spread: Spread | None) -> tuple[float, float] | None:
    return None if spread is None else (spread.low, spread.high)
