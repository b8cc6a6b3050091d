"""The reports of `treeopt validate --acceptance sample` and `typical`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treeopt.cli.console import Console, row_of, say_skipped
from treeopt.cli.validate_report import measured_json, say_depths, say_drafts, say_parts, say_speed
from treeopt.errors import Code, TreeoptError

if TYPE_CHECKING:
    from treeopt.evaluate.validate_sample import DistributionTest, SampleValidation
    from treeopt.evaluate.validate_typical import TypicalValidation
    from treeopt.texts.prompts import Skipped

_HALF = ("bfloat16", "float16")


def report_sample(
    console: Console, found: SampleValidation, skipped: Sequence[Skipped], origin: Mapping[str, Any]
) -> None:
    """Print the results under sampling, with --json as JSON, with the keys of `origin_of`.

    Raises:
        TreeoptError: E501 where a test found another distribution.
    """
    _say_estimates(console, found)
    say_drafts(console, found.metrics)
    say_speed(console, found)
    say_depths(console, found)
    say_parts(console, found.metrics)
    _say_tests(console, found)
    say_skipped(console, [*skipped, *found.skipped])
    if not found.as_predicted:
        console.warn(
            f"warning: measured and predicted tokens per step differ by {found.z_score:+.1f} standard errors: by "
            "rounding of probabilities near the edge of top-k or top-p, or there is a bug"
        )
    console.result({**_sample_json(found, [*skipped, *found.skipped]), **origin})
    if found.lossless is False:
        raise _distribution_error(found)


def report_typical(
    console: Console, found: TypicalValidation, skipped: Sequence[Skipped], origin: Mapping[str, Any]
) -> None:
    """Print the results under typical acceptance, with --json as JSON, with the keys of `origin_of`."""
    trials, misses = found.metrics.trials, len(found.prediction_misses)
    console.say(f"tokens per step {found.tokens_per_step:.4f} measured  (1 + accepted drafts per step)")
    console.say(
        f"                {found.predicted.tokens_per_step:.4f} predicted by replay of the rule on these texts; steps "
        f"agree on {len(trials) - misses}/{len(trials)} texts"
    )
    say_drafts(console, found.metrics)
    say_speed(console, found)
    say_depths(console, found)
    say_parts(console, found.metrics)
    names = {"generate": "greedy", "tree": "typical"}
    rows = [
        [
            names.get(name, name),
            f"{one.log_likelihood:.4f}",
            *(f"{share:.4f}" for share in one.distinct),
            f"{one.agreement:.1%}",
        ]
        for name, one in found.quality.items()
    ]
    header = ["texts", "log-likelihood a token", "distinct-1", "distinct-2", "distinct-3", "agreement with greedy"]
    console.table(header, rows)
    console.say(
        "lossless        no, LOSSY by its definition: it accepts drafts that are likely enough "
        f"(temperature {found.rule.temperature:g}, epsilon {found.rule.epsilon:g}, delta {found.rule.delta:g})"
    )
    say_skipped(console, [*skipped, *found.skipped])
    console.result({**_typical_json(found, [*skipped, *found.skipped]), **origin})


def _say_estimates(console: Console, found: SampleValidation) -> None:
    """Print measured and predicted tokens per step with their standard errors."""
    score = "no standard error with one prompt" if found.z_score is None else f"z-score {found.z_score:+.2f}"
    score += ", which means nothing with so few accepted drafts" if found.z_score and found.few_drafts else ""
    expected = found.expected_tokens_per_step
    console.say(
        f"tokens per step {found.tokens_per_step:.4f}{_error(found.measured_standard_error)} measured on "
        f"{len(found.metrics.trials)} texts  (1 + accepted drafts per step)"
    )
    console.say(
        f"                {found.predicted.tokens_per_step:.4f}{_error(found.predicted_standard_error)} predicted on "
        f"the texts of stock generate; {score}"
    )
    if expected is not None:
        console.say(f"                {expected:.4f} expected by the calibration")


def _say_tests(console: Console, found: SampleValidation) -> None:
    """Print the tests of the distribution of texts."""
    from treeopt.evaluate.validate_sample import ALPHA

    rows = [
        [
            row_of(one.prompt_id),
            str(one.length),
            str(one.draws),
            str(one.cells),
            f"{one.p_base:.3g}",
            f"{one.p_stock:.3g}",
            f"{one.p_control:.3g}",
        ]
        for one in found.tests
    ]
    if rows:
        header = ["", "tokens", "draws", "cells", "p: tree, base", "p: tree, generate", "p: generate, base"]
        console.table(header, rows)
    if found.p_value is None:
        console.say("lossless        not tested")
        return
    console.say(
        f"lossless        {'yes' if found.lossless else 'NO'}, by the distribution of texts in "
        f"{found.made_by['dtype']}: p {found.p_value:.3g} of {2 * len(rows)} tests (Bonferroni), limit {ALPHA:g}"
    )


def _distribution_error(found: SampleValidation) -> TreeoptError:
    """E501 with the prompts whose texts have another distribution."""
    from treeopt.evaluate.validate_sample import ALPHA

    limit = ALPHA / (2 * len(found.tests))
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


def _error(error: float | None) -> str:
    return "" if error is None else f" ± {error:.4f}"


def _sample_json(found: SampleValidation, skipped: Sequence[Skipped]) -> dict[str, Any]:
    rule = found.rule
    return {
        "acceptance": "sample",
        "temperature": rule.temperature,
        "top_k": rule.top_k,
        "top_p": rule.top_p,
        "seed": rule.seed,
        "lossy": rule.lossy,
        "lossless": found.lossless,
        "p_value": found.p_value,
        "tests": [_test_json(one) for one in found.tests],
        "measured_standard_error": found.measured_standard_error,
        "predicted_standard_error": found.predicted_standard_error,
        "z_score": found.z_score,
        **measured_json(found, skipped),
    }


def _test_json(one: DistributionTest) -> dict[str, Any]:
    return dict(vars(one))


def _typical_json(found: TypicalValidation, skipped: Sequence[Skipped]) -> dict[str, Any]:
    rule = found.rule
    keys = {"generate": "greedy", "tree": "typical"}
    return {
        "acceptance": "typical",
        "temperature": rule.temperature,
        "epsilon": rule.epsilon,
        "delta": rule.delta,
        "lossy": rule.lossy,
        "lossless": False,
        "prediction_misses": [miss.prompt_id for miss in found.prediction_misses],
        "quality": {
            keys.get(name, name.replace(" ", "_")): {
                "log_likelihood": one.log_likelihood,
                **{f"distinct_{n}": share for n, share in enumerate(one.distinct, start=1)},
                "agreement_with_greedy": one.agreement,
            }
            for name, one in found.quality.items()
        },
        **measured_json(found, skipped),
    }
