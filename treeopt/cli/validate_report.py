"""The reports of `treeopt validate`, by the rule of acceptance: figures, differences, distributions, and errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treeopt.cli.console import Console, row_of, skipped_text, threads
from treeopt.cli.facts import Column, Fact, Table, attribute, percent, picked
from treeopt.errors import Code, TreeoptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from treeopt.evaluate.baselines import Metrics, Spread
    from treeopt.evaluate.divergence import Difference
    from treeopt.evaluate.runs import Measured
    from treeopt.evaluate.validate import TypicalValidation, Validation
    from treeopt.evaluate.validate_sample import SampleValidation
    from treeopt.texts.prompts import Skipped

_SHOWN = 5
_NAMES = {"generate": "stock generate"}  # printed in place of a baseline's name
_TAU = "(1 + accepted drafts per step)"
_MEASURED = "tokens per step"
_HALF = ("bfloat16", "float16")


def report_judged(console: Console, found: Validation, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Print whether the texts are lossless, and the differences that are not failures."""
    console.report(*lossless_rows(found))
    tolerated = [one for one in found.our_differences if one not in found.failures]
    if tolerated:
        console.note(f"differences that are not failures ({_counted(tolerated)}):")
        console.note(_listed(tolerated, tokenizer))
    console.result(
        {
            "acceptance": "greedy",
            "lossy": False,
            **picked(found, "lossless", "differing", "differences"),
            "failures": len(found.failures),
            "judged": found.num_judged,
            "prediction_misses": [one.prompt_id for one in found.prediction_misses],
        }
    )


def lossless_rows(found: Validation) -> list[Fact]:
    """Whether the texts are lossless, and what is known of those that differ."""
    trials, ours, dtype = found.metrics.trials, found.our_differences, found.made_by["dtype"]
    # In half precision other texts may differ at near ties.
    yes = "yes" if dtype == "float32" else "as far as these texts show"
    answer = yes if not ours else "NO" if found.failures else f"no failure, but differences ({_counted(ours)})"
    texts = f"{len(trials) - found.differing}/{len(trials)} texts, {found.metrics.tokens} tokens"
    gaps = [one.gap for one in ours if math.isfinite(one.gap)]
    others = Counter(one.decoder for one in found.differences if one not in ours)
    judged = f"{found.num_judged} of {found.differing} differing texts judged"
    between = f"gaps of the logits where texts differ: {min(gaps):.2g} to {max(gaps):.2g}" if gaps else ""
    return [
        Fact("lossless", f"{answer}: {texts}, against stock greedy generate in {dtype}"),
        *([Fact("", judged)] if ours else []),
        *([Fact("", between)] if gaps else []),
        *(
            Fact("", f"(not counted: {_NAMES.get(name, name)} differs from stock generate on {count} texts)")
            for name, count in others.items()
        ),
    ]


def differences_error(found: Validation, tokenizer: PreTrainedTokenizerBase | None) -> TreeoptError:
    """E501 with the first failures."""
    texts = len({one.prompt_id for one in found.failures})
    unjudged = found.differing - found.num_judged
    fix = f"--judge {found.differing} judges all" if unjudged else ""
    return TreeoptError(
        Code.NOT_LOSSLESS,
        f"{texts} of {len(found.metrics.trials)} texts differ from greedy decoding ({_counted(found.failures)})",
        at=_listed(found.failures, tokenizer),
        why="in float64 the gap of the logits is 0 (tie), below the dtype's resolution (rounding) or above it (bug)",
        fix=fix if found.made_by["dtype"] == "float32" else "repeat with --dtype float32",
    )


def check_minima(found: Measured, tokens_per_step: float | None, speedup: float | None) -> None:
    """Raise E505 where a metric is below its minimum."""
    timed = "no speedup was measured" if found.speedup is None else f"speedup {found.speedup:.3f}"
    checks = (
        ("--min-tokens-per-step", tokens_per_step, found.tokens_per_step, f"{found.tokens_per_step:.4f} {_MEASURED}"),
        ("--min-speedup", speedup, found.speedup, timed),
    )
    below = {
        option: f"{what}, the minimum is {least:g}"
        for option, least, value, what in checks
        if least is not None and (value is None or value < least)
    }
    if below:
        raise TreeoptError(Code.BELOW_THRESHOLD, "; ".join(below.values()), at=", ".join(below))


def report_sample(console: Console, found: SampleValidation) -> None:
    """Print the tests of the distribution; raise E501 where one found another."""
    from treeopt.evaluate.validate_sample import ALPHA

    answer = "not tested"
    if found.p_value is not None:
        answer = (
            f"{'yes' if found.lossless else 'NO'}, by the distribution of texts in {found.made_by['dtype']}: "
            f"p {found.p_value:.3g} of {2 * len(found.tests)} tests (Bonferroni), limit {ALPHA:g}"
        )
    console.report(Table(_TESTS, found.tests), Fact("lossless", answer))
    if not found.as_predicted:
        console.warn(
            f"warning: measured and predicted tokens per step differ by {found.z_score:+.1f} standard errors: by "
            "rounding of probabilities near the edge of top-k or top-p, or there is a bug"
        )
    own = ("lossless", "p_value", "tests", "measured_standard_error", "predicted_standard_error", "z_score")
    rule = picked(found.rule, "temperature", "top_k", "top_p", "seed", "lossy")
    console.result({"acceptance": "sample", **rule, **picked(found, *own)})
    if found.lossless is False:
        raise _distribution_error(found, ALPHA / (2 * len(found.tests)))


_TESTS = (
    Column("", lambda test: row_of(test.prompt_id)),
    Column("tokens", "length"),
    Column("draws", "draws"),
    Column("cells", "cells"),
    Column("p: tree, base", "p_base", ".3g"),
    Column("p: tree, generate", "p_stock", ".3g"),
    Column("p: generate, base", "p_control", ".3g"),
)


def _distribution_error(found: SampleValidation, limit: float) -> TreeoptError:
    """E501 with the prompts whose texts have another distribution."""
    wrong = [one for one in found.tests if min(one.p_base, one.p_stock) < limit]
    return TreeoptError(
        Code.NOT_LOSSLESS,
        f"the texts of {len(wrong)} of {len(found.tests)} prompts do not have the distribution of the base model",
        at="\n".join(
            f"{row_of(one.prompt_id)}: p {one.p_base:.3g} against the base, {one.p_stock:.3g} against stock generate"
            for one in wrong
        ),
        why=f"sampled texts must have the distribution of autoregressive sampling (limit of a p-value {limit:.3g})",
        fix="repeat with --dtype float32" if found.made_by["dtype"] in _HALF else "",
    )


def report_typical(console: Console, found: TypicalValidation) -> None:
    """Print the quality of the texts under typical acceptance."""
    rule = picked(found.rule, "temperature", "epsilon", "delta")
    names = {"generate": "greedy", "tree": "typical"}
    quality = Table(_QUALITY, [(names.get(name, name), one) for name, one in found.quality.items()])
    settings = ", ".join(f"{name} {value:g}" for name, value in rule.items())
    lossy = f"no, LOSSY by its definition: it accepts drafts that are likely enough ({settings})"
    console.report(quality, Fact("lossless", lossy))
    kinds = [kind.replace(" ", "_") for kind, _ in quality.records]
    console.result(
        {
            "acceptance": "typical",
            **rule,
            "lossy": found.rule.lossy,
            "lossless": False,
            "prediction_misses": [one.prompt_id for one in found.prediction_misses],
            "quality": dict(zip(kinds, quality.value, strict=True)),
        }
    )


_QUALITY = (  # of a name and the quality of its texts
    Column("texts", lambda kind: kind[0]),
    Column("log-likelihood a token", lambda kind: kind[1].log_likelihood, ".4f", "log_likelihood"),
    Column("distinct-1", lambda kind: kind[1].distinct[0], ".4f", "distinct_1"),
    Column("distinct-2", lambda kind: kind[1].distinct[1], ".4f", "distinct_2"),
    Column("distinct-3", lambda kind: kind[1].distinct[2], ".4f", "distinct_3"),
    Column("agreement with greedy", lambda kind: kind[1].agreement, percent, "agreement_with_greedy"),
)


def report_figures(console: Console, found: Measured, skipped: Sequence[Skipped], origin: Mapping[str, Any]) -> None:
    """Print the figures of any rule, before differing texts are judged, which may take long."""
    metrics, made = found.metrics, found.made_by
    drafts = metrics.draft_metrics()
    assert drafts is not None  # of the tree, which our decoder always reports
    rate = "" if drafts.draft_acceptance_rate is None else f" ({drafts.draft_acceptance_rate:.1%})"
    accepted = f"verified in the {drafts.num_drafts} steps that had any, {drafts.num_accepted_tokens} accepted{rate}"
    repeats = f"median (quartiles) of {metrics.repeats} repeats" if metrics.repeats > 1 else "one repeat"
    where = f"batch {found.batch_size}, {made['device']}, {threads(made['threads'])}, {made['attention']} attention"
    baselines = (
        Column("", lambda name: f"tree {found.nodes}" if name == "tree" else _NAMES.get(name, name)),
        Column("tokens/step", metrics.tokens_per_step, ".2f"),
        Column("tokens/s", metrics.tokens_per_second, ".0f"),
        Column("vs autoregressive", metrics.speedup, ".2f"),
    )
    by_turn = {f"turn {turn}": part for turn, part in metrics.by_turn.items()} if len(metrics.by_turn) > 1 else {}
    shares = zip(found.measured_by_depth, found.predicted.acceptance_by_depth().tolist(), strict=True)
    console.report(
        *_tokens_per_step(found),
        Fact("drafts", drafts.num_draft_tokens, note=accepted),
        Table(baselines, metrics.baselines),
        Fact("overhead", metrics.overhead, ".2f"),
        Fact("speedup", metrics.speedup(), ".2f", f"over autoregressive ({repeats}, {where}, without prefill)"),
        *(f"{name} was left out: {why}" for name, why in found.left_out.items()),
        Table(_DEPTHS, [(depth, *pair) for depth, pair in enumerate(shares, start=1)]),
        Table(_PARTS, [*metrics.by_category.items(), *by_turn.items()]),
        skipped_text([*skipped, *found.skipped]),
        *(Fact(None, value, key=key) for key, value in {**_figures(found, skipped), **origin}.items()),
    )


def _tokens_per_step(found: Measured) -> Iterator[Fact]:
    """Measured, predicted, and expected by the calibration, with what each is of."""
    from treeopt.evaluate.validate_sample import SampleValidation

    trials = found.metrics.trials
    measured = f"measured: {found.metrics.tokens} tokens / {found.metrics.steps} steps"
    agree = sum(one.steps == one.predicted_steps for one in trials)
    predicted = f"predicted by replay; steps agree on {agree}/{len(trials)} texts"
    if isinstance(found, SampleValidation):
        score = "no standard error with one prompt" if found.z_score is None else f"z-score {found.z_score:+.2f}"
        score += ", which means nothing with so few accepted drafts" if found.z_score and found.few_drafts else ""
        measured = f"{_error(found.measured_standard_error)}measured on {len(trials)} texts"
        predicted = f"{_error(found.predicted_standard_error)}predicted on the texts of stock generate; {score}"
    yield Fact(_MEASURED, found.tokens_per_step, ".4f", f"{measured} {_TAU}")
    yield Fact("", found.predicted.tokens_per_step, ".4f", predicted)
    if found.expected_tokens_per_step is not None:
        yield Fact("", found.expected_tokens_per_step, ".4f", "expected by the calibration")


def _error(error: float | None) -> str:
    return "" if error is None else f"± {error:.4f} "


_DEPTHS = (
    Column("drafts accepted, at least", lambda shares: shares[0]),
    Column("measured", lambda shares: shares[1], percent),
    Column("predicted", lambda shares: shares[2], percent),
)
_PARTS = (  # of a name and the metrics of its texts
    Column("", lambda part: part[0]),
    Column("texts", lambda part: len(part[1].trials)),
    Column("tokens", lambda part: part[1].tokens),
    Column("tokens/step", lambda part: part[1].tokens_per_step(), ".4f"),
    Column("predicted", lambda part: part[1].predicted_tokens_per_step, ".4f"),
    Column("speedup", lambda part: part[1].speedup(), ".2f"),
)


def _figures(found: Measured, skipped: Sequence[Skipped]) -> dict[str, Any]:
    """The part of the JSON object that all rules have."""
    metrics, predicted, left_out = found.metrics, found.predicted, [*skipped, *found.skipped]

    def each(figure: Callable[[str], Any]) -> dict[str, Any]:
        return {name.replace(" ", "_"): figure(name) for name in metrics.baselines}

    rates, ratios = each(metrics.tokens_per_second), each(metrics.speedup)
    return {
        **picked(found, "nodes", "expected_tokens_per_step", "repeats", "batch_size", "left_out", "made_by"),
        **_part(metrics),
        "predicted_tokens_per_step": predicted.tokens_per_step,
        "prompts": len({text.dialogue for text in found.texts}),
        "skipped": len(left_out),
        "skipped_prompts": left_out,
        "predicted_acceptance_histogram": predicted.histogram,
        "acceptance_by_depth": {"measured": found.measured_by_depth, "predicted": predicted.acceptance_by_depth()},
        "smaller_trees": found.smaller,
        "tokens_per_second": {name: attribute(rate, "median") for name, rate in rates.items()},
        "speedup_vs_autoregressive": {name: attribute(ratio, "median") for name, ratio in ratios.items()},
        "prefill_seconds": each(metrics.prefill_seconds),
        "baseline_tokens_per_step": each(metrics.tokens_per_step),
        "quartiles": {
            "tokens_per_second": {name: _ends(rate) for name, rate in rates.items()},
            "speedup_vs_autoregressive": {name: _ends(ratio) for name, ratio in ratios.items()},
            "overhead": _ends(metrics.overhead),
            "speedup": _ends(metrics.speedup()),
        },
        "by_category": {name: _part(part) for name, part in metrics.by_category.items()},
        "by_turn": {turn: _part(part) for turn, part in metrics.by_turn.items()},
    }


def _part(part: Metrics) -> dict[str, Any]:
    """The figures of some of the texts, or of all."""
    drafts = part.draft_metrics()
    assert drafts is not None
    return {
        "texts": len(part.trials),
        **picked(part, "tokens", "steps", "predicted_tokens_per_step"),
        "tokens_per_step": part.tokens_per_step(),
        **drafts.as_dict(),
        "overhead": attribute(part.overhead, "median"),
        "speedup": attribute(part.speedup(), "median"),
    }


def _ends(spread: Spread | None) -> tuple[float, float] | None:
    return None if spread is None else (spread.low, spread.high)


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
    return "" if math.isnan(one.gap) else f", gap {one.gap:.2g}, resolution {one.resolution:.2g}"


def _token(token: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Id and text of a token; a negative id means that the text had ended."""
    if token < 0:
        return "had ended"
    return f"{token}" if tokenizer is None else f"{token} {tokenizer.convert_ids_to_tokens(token)!r}"
