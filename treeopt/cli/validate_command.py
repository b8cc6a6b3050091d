"""`treeopt validate`: check that a tree is lossless and as predicted, and measure its speed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.checks import check_belongs, check_inputs, origin_of
from treeopt.cli.console import Console, command, skipped_text, threads
from treeopt.cli.drafters import chosen_plan, load_with_prompts, plan_options
from treeopt.cli.numbers import FiniteRange
from treeopt.cli.options import (
    GREEDY,
    SAMPLE,
    TYPICAL,
    acceptance_options,
    acceptance_rule,
    chosen_prompts,
    compile_option,
    model_options,
    prompt_options,
)
from treeopt.cli.processes import division_of, nproc_option
from treeopt.errors import counted
from treeopt.facts import Column, Fact, Part, Table, attribute, percent, picked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from treeopt.evaluate.baselines import Metrics, Spread
    from treeopt.evaluate.runs import Measured
    from treeopt.evaluate.validate import TypicalValidation, Validation
    from treeopt.evaluate.validate_sample import SampleValidation
    from treeopt.policy import Plan
    from treeopt.texts.prompts import Skipped

_RULES = (GREEDY, SAMPLE, TYPICAL)
_NAMES = {"generate": "stock generate"}  # printed in place of a baseline's name


@command("validate")
@model_options(dtype="float32")
@prompt_options()
@plan_options
@click.option(
    "--repeats", type=click.IntRange(min=1), default=1, help="Runs of each text and baseline, which take turns."
)
@click.option("--batch-size", type=click.IntRange(min=1), default=1, help="Prompts decoded together.")
@nproc_option
@compile_option
@acceptance_options(rules=_RULES, what="sample and typical: what is validated differs, see the command's help.")
@click.option("--draws", type=click.IntRange(min=0), help="For sample: texts of a test, 0 for none [default: 1000].")
@click.option("--judge", type=click.IntRange(min=0), help="Differing texts judged in float64, 0 for none [default: 5].")
@click.option("--min-tokens-per-step", type=FiniteRange(min=0), help="Minimum; exit status 6 below it.")
@click.option("--min-speedup", type=FiniteRange(min=0), help="Minimum for the median repeat; exit status 6 below it.")
def run(console: Console, **options: Any) -> None:
    """Decode every prompt with the tree, autoregressively, by stock `generate` and by prompt lookup, and compare.

    Lossless means: token for token the text of stock greedy `generate`. The first --judge differing texts are judged by
    a float64 forward on the CPU. The cause is a tie (equal logits), rounding (a gap below the resolution of the dtype)
    or a bug. Exit status 5 for a bug; in float32 also for rounding and for a difference that was not judged. In half
    precision these two are no failures, so use float32 to prove that a tree is lossless.

    --drafter alone takes the tree that the drafter recommends. Without --tree, --drafter and --heads, per-step trees of
    16 nodes are drafted from the text so far. The prediction is independent of the decoder: a separate teacher-forced
    pass, and replay.

    Prompts with `turns` (MT-bench, Spec-Bench) are decoded turn by turn, each after the model's answer. Metrics are
    printed for each turn and each `category`.

    --acceptance sample decodes every prompt --repeats times. Lossless means: the first tokens after the four shortest
    prompts, --draws times each, have the distribution of the base and of stock `generate` (chi-square tests; exit
    status 5 where a p-value times the number of tests is below 1e-4). --acceptance typical is lossy: its texts are
    compared with greedy and sampled texts.

    --nproc divides the batches among processes. Processes on one CPU slow each other down, so speeds are to be
    compared within a run only.
    """
    source = chosen_prompts(options)
    check_inputs()
    chosen = chosen_plan(options)
    settings = _settings(options)
    from treeopt.evaluate.runs import JUDGED
    from treeopt.evaluate.validate import Validation, advice, divided_validate, make_inputs

    used, encoded = load_with_prompts(console, options, chosen, source)
    base, plan = used.base, used.plan
    _note_calibrated(console, plan, source, options["skip"])
    with console.progress("validate") as progress:
        settings |= {"draft": used.draft}
        inputs = make_inputs(base, used.heads, plan, encoded.texts, None, used.drafter, settings)
        found = divided_validate(*inputs, progress)
    if found is None:
        return
    console.report(*_figures(found, encoded.skipped))  # before differing texts are judged, which may take long
    console.warn(*(f"warning: {warning}" for warning in advice(found, plan)))
    if isinstance(found, Validation):
        found = found.judged(base, JUDGED if options["judge"] is None else options["judge"])
    parts, data = _by_rule(found, console, base.tokenizer)
    console.report(*parts)
    origin = origin_of(base, used.heads, used.draft, plan)
    console.result({**_as_json(found, encoded.skipped), **origin, **data})
    found.check(base.tokenizer)
    found.check_minima(options["min_tokens_per_step"], options["min_speedup"])


command = run


def _note_calibrated(console: Console, plan: Plan, source: str, skip: int) -> None:
    """Say that the tree was built from these prompts: by their name and number, which are what its file has."""
    made = plan.source.get("calibration") or {}
    count = made.get("sequences")
    named = source in str(made.get("prompts", "")).split(", ")
    if named and isinstance(count, int) and skip < count:  # an edited file may have a text here
        console.note(
            f"the tree was built from {counted(count, 'text')} of {source} too; --skip {count} takes prompts that it "
            "was not fitted to"
        )


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `validate`; nothing is judged yet."""
    name = options["acceptance"]
    check_belongs(("judge",), f"--acceptance {GREEDY}", name == GREEDY)
    check_belongs(("draws",), f"--acceptance {SAMPLE}", name == SAMPLE)
    if options["temperature"] == 0:
        raise click.UsageError("--temperature 0 is greedy decoding, which is the default: leave out --acceptance")
    settings = {name: options[name] for name in ("max_new_tokens", "repeats", "batch_size", "chat_template")}
    settings |= {} if options["draws"] is None else {"draws": options["draws"]}
    rule = acceptance_rule(options, rules=_RULES)
    return {**settings, "judge": 0, "acceptance": rule, "division": division_of(options)}


Report = tuple[Sequence[Part], dict[str, Any]]  # what is printed, and the keys of `--json`


def _by_rule(found: Measured, console: Console, tokenizer: PreTrainedTokenizerBase | None) -> Report:
    """What was found under the rule, beside the figures of all rules."""
    from treeopt.evaluate.divergence import counted_causes, listed
    from treeopt.evaluate.validate import TypicalValidation, Validation
    from treeopt.evaluate.validate_sample import SampleValidation

    if isinstance(found, SampleValidation):
        return _sampled(found)
    if isinstance(found, TypicalValidation):
        return _typical(found)
    assert isinstance(found, Validation)
    tolerated = [one for one in found.our_differences if one not in found.failures]
    if tolerated:
        causes = counted_causes(tolerated)
        console.note(f"differences that are not failures ({causes}):\n{listed(tolerated, tokenizer)}")
    counts = {"failures": len(found.failures), "judged": found.num_judged, "prediction_misses": _missed(found)}
    own = picked(found, "lossless", "differing", "differences")
    return lossless_rows(found), {"acceptance": "greedy", "lossy": False, **own, **counts}


def _missed(found: Validation | TypicalValidation) -> list[str]:
    return [one.prompt_id for one in found.prediction_misses]


def lossless_rows(found: Validation) -> list[Fact]:
    """Whether the texts are lossless, and what is known of those that differ."""
    from treeopt.evaluate.divergence import counted_causes

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
    from treeopt.evaluate.validate_sample import ALPHA
    from treeopt.texts.prompts import row_of

    answer = "not tested"
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
    return (Table(tests, found.tests), Fact("lossless", answer)), {"acceptance": SAMPLE, **rule, **picked(found, *own)}


def _typical(found: TypicalValidation) -> Report:
    """The quality of the texts under typical acceptance."""
    rule = picked(found.rule, "temperature", "epsilon", "delta")
    names = {"generate": "greedy", "tree": "typical"}
    quality = Table(_QUALITY, [(names.get(name, name), one) for name, one in found.quality.items()])
    settings = ", ".join(f"{name} {value:g}" for name, value in rule.items())
    lossy = f"no, LOSSY by its definition: it accepts drafts that are likely enough ({settings})"
    own = {"lossy": found.rule.lossy, "lossless": False, "prediction_misses": _missed(found)}
    by_kind = {kind.replace(" ", "_"): row for (kind, _), row in zip(quality.records, quality.value, strict=True)}
    return (quality, Fact("lossless", lossy)), {"acceptance": TYPICAL, **rule, **own, "quality": by_kind}


_QUALITY = (  # of a name and the quality of its texts
    Column("texts", lambda kind: kind[0]),
    Column("log-likelihood a token", lambda kind: kind[1].log_likelihood, ".4f", "log_likelihood"),
    Column("distinct-1", lambda kind: kind[1].distinct[0], ".4f", "distinct_1"),
    Column("distinct-2", lambda kind: kind[1].distinct[1], ".4f", "distinct_2"),
    Column("distinct-3", lambda kind: kind[1].distinct[2], ".4f", "distinct_3"),
    Column("agreement with greedy", lambda kind: kind[1].agreement, percent, "agreement_with_greedy"),
)


def _figures(found: Measured, skipped: Sequence[Skipped]) -> Iterator[Part]:
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


def _as_json(found: Measured, skipped: Sequence[Skipped]) -> dict[str, Any]:
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
