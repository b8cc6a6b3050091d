"""What a validation says: its facts and tables, and the keys of `--json`."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from treeopt.evaluate.baselines import Metrics, Spread
from treeopt.evaluate.divergence import counted_causes, listed
from treeopt.evaluate.runs import Measured
from treeopt.evaluate.validate import TypicalValidation, Validation
from treeopt.evaluate.validate_sample import ALPHA, SampleValidation
from treeopt.facts import Column, Fact, Part, Table, attribute, percent, picked, threads
from treeopt.texts.prompts import Skipped, row_of, skipped_text

_NAMES = {"generate": "stock generate"}  # printed in place of a baseline's name
Report = tuple[Sequence[Part], dict[str, Any]]  # what is printed, and the keys of `--json`


def rule_report(found: Measured) -> Report:
    """What was found under the rule, beside the figures of all rules."""
    if isinstance(found, SampleValidation):
        return _sampled(found)
    if isinstance(found, TypicalValidation):
        return _typical(found)
    assert isinstance(found, Validation)
    counts = {"failures": len(found.failures), "judged": found.num_judged, "prediction_misses": _missed(found)}
    own = picked(found, "lossless", "differing", "differences")
    return lossless_rows(found), {"acceptance": "greedy", "lossy": False, **own, **counts}


def tolerated_text(found: Validation, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """The differences that are not failures; empty where there are none."""
    tolerated = [one for one in found.our_differences if one not in found.failures]
    causes = counted_causes(tolerated)
    return f"differences that are not failures ({causes}):\n{listed(tolerated, tokenizer)}" if tolerated else ""


def _missed(found: Validation | TypicalValidation) -> list[str]:
    return [one.text.prompt_id for one in found.prediction_misses]


def lossless_rows(found: Validation) -> list[Fact]:
    """Whether the texts are lossless, and what is known of those that differ."""
    trials, ours, dtype = found.metrics.trials, found.our_differences, found.made_by["dtype"]
    # In half precision other texts may differ at near ties.
    yes = "yes" if dtype == "float32" else "as far as these texts show"
    answer = yes if not ours else "NO" if found.failures else f"no failure, but differences ({counted_causes(ours)})"
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


def _sampled(found: SampleValidation) -> Report:
    """The tests of the distribution."""
    answer = "not tested: no prompt has two cells of texts; --draws sets how many texts are drawn"
    if found.p_value is not None:
        answer = (
            f"{'yes' if found.lossless else 'NO'}, by the distribution of texts in {found.made_by['dtype']}: "
            f"p {found.p_value:.3g} of {2 * len(found.tests)} tests (Bonferroni), limit {ALPHA:g}"
        )
    tests = (
        Column("", lambda test: row_of(test.prompt_id)),
        Column("tokens", "length"),
        Column("draws", "draws"),
        Column("cells", "cells"),
        Column("p: tree, base", "p_base", ".3g"),
        Column("p: tree, generate", "p_stock", ".3g"),
        Column("p: generate, base", "p_control", ".3g"),
    )
    own = ("lossless", "p_value", "tests", "measured_standard_error", "predicted_standard_error", "z_score")
    rule = picked(found.rule, "temperature", "top_k", "top_p", "seed", "lossy")
    return (Table(tests, found.tests), Fact("lossless", answer)), {
        "acceptance": "sample",
        **rule,
        **picked(found, *own),
    }


def _typical(found: TypicalValidation) -> Report:
    """The quality of the texts under typical acceptance."""
    rule = picked(found.rule, "temperature", "epsilon", "delta")
    names = {"generate": "greedy", "tree": "typical"}
    quality = Table(_QUALITY, [(names.get(name, name), one) for name, one in found.quality.items()])
    settings = ", ".join(f"{name} {value:g}" for name, value in rule.items())
    lossy = f"no, LOSSY by its definition: it accepts drafts that are likely enough ({settings})"
    own = {"lossy": found.rule.lossy, "lossless": False, "prediction_misses": _missed(found)}
    by_kind = {kind.replace(" ", "_"): row for (kind, _), row in zip(quality.records, quality.value, strict=True)}
    return (quality, Fact("lossless", lossy)), {"acceptance": "typical", **rule, **own, "quality": by_kind}


_QUALITY = (  # of a name and the quality of its texts
    Column("texts", lambda kind: kind[0]),
    Column("log-likelihood a token", lambda kind: kind[1].log_likelihood, ".4f", "log_likelihood"),
    Column("distinct-1", lambda kind: kind[1].distinct[0], ".4f", "distinct_1"),
    Column("distinct-2", lambda kind: kind[1].distinct[1], ".4f", "distinct_2"),
    Column("distinct-3", lambda kind: kind[1].distinct[2], ".4f", "distinct_3"),
    Column("agreement with greedy", lambda kind: kind[1].agreement, percent, "agreement_with_greedy"),
)


def measured_report(found: Measured, skipped: Sequence[Skipped]) -> Iterator[Part]:
    """The figures of any rule."""
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
    turns = {f"turn {turn}": part for turn, part in metrics.by_turn.items()} if len(metrics.by_turn) > 1 else {}
    shares = zip(found.measured_by_depth, found.predicted.acceptance_by_depth().tolist(), strict=True)
    yield from _tokens_per_step(found)
    yield Fact("drafts", drafts.num_draft_tokens, note=accepted)
    yield Table(baselines, metrics.baselines)
    yield Fact("overhead", metrics.overhead, ".2f")
    yield Fact("speedup", metrics.speedup(), ".2f", f"over autoregressive ({repeats}, {where}, without prefill)")
    yield from (f"{name} was left out: {why}" for name, why in found.left_out.items())
    yield Table(_DEPTHS, [(depth, *pair) for depth, pair in enumerate(shares, start=1)])
    yield Table(_PARTS, [*metrics.by_category.items(), *turns.items()])
    yield skipped_text([*skipped, *found.skipped])


def _tokens_per_step(found: Measured) -> Iterator[Fact]:
    """Measured, predicted, and expected by the calibration, with what each is of."""
    trials = found.metrics.trials
    measured = f"measured: {found.metrics.tokens} tokens / {found.metrics.steps} steps"
    agree = sum(one.steps == one.predicted_steps for one in trials)
    predicted = f"predicted by replay; steps agree on {agree}/{len(trials)} texts"
    if isinstance(found, SampleValidation):
        score = "no standard error with one prompt" if found.z_score is None else f"z-score {found.z_score:+.2f}"
        score += ", which means nothing with so few accepted drafts" if found.z_score and found.few_drafts else ""
        measured = f"{_error(found.measured_standard_error)}measured on {len(trials)} texts"
        predicted = f"{_error(found.predicted_standard_error)}predicted on the texts of stock generate; {score}"
    yield Fact("tokens per step", found.tokens_per_step, ".4f", f"{measured} (1 + accepted drafts per step)")
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


def measured_data(found: Measured, skipped: Sequence[Skipped]) -> dict[str, Any]:
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
