"""`treeopt validate`: check that a tree is lossless and as predicted, and measure its speed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.console import Console, command
from treeopt.cli.numbers import FiniteRange
from treeopt.cli.options import chosen_prompts, model_options, prompt_options
from treeopt.cli.plan_options import chosen_plan, load_for_plan, plan_options
from treeopt.cli.validate_report import differences_error, report_differences, report_metrics, threshold_error
from treeopt.policy import Plan, TreePolicy

if TYPE_CHECKING:
    from treeopt.evaluate.validation import Validation


@command("validate")
@functools.partial(model_options, dtype="float32")
@prompt_options
@plan_options
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Runs of each text and baseline, which take turns.",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Prompts decoded together."
)
@click.option("--judge", type=click.IntRange(min=0), help="Differing texts judged in float64, 0 for none [default: 5].")
@click.option("--min-tokens-per-step", type=FiniteRange(min=0), help="Minimum; exit status 6 below it.")
@click.option("--min-speedup", type=FiniteRange(min=0), help="Minimum for the median repeat; exit status 6 below it.")
def run(console: Console, **options: Any) -> None:
    """Decode every prompt with the tree, autoregressively, by stock `generate` and by prompt lookup, and compare.

    Lossless means: token for token the text of stock greedy `generate`. After the metrics are printed, the first
    --judge differing texts are judged by a float64 forward on the CPU. The cause is a tie (equal logits), rounding (a
    gap below the resolution of the dtype) or a bug. Exit status 5 for a bug; in float32 also for rounding and for a
    difference that was not judged. In bfloat16 and float16 these two are reported and are not failures, so use float32
    to prove that a tree is lossless.

    --drafter alone takes the tree that the drafter recommends. Without --tree, --drafter and --heads, per-step trees of
    16 nodes are drafted from the text so far.

    The prediction is independent of the decoder: a separate teacher-forced pass, and replay.

    Prompts with `turns` (MT-bench, Spec-Bench) are decoded turn by turn, each after the model's answer; without a chat
    template the turns are joined by newlines. Metrics are printed for each turn and each `category`.
    """
    source = chosen_prompts(options)
    chosen = chosen_plan(options)
    from treeopt.evaluate.advice import advice
    from treeopt.evaluate.validate import validate
    from treeopt.evaluate.validation import JUDGED
    from treeopt.texts.encode import encode_prompts, joins_turns
    from treeopt.texts.prompts import load_prompts

    prompts = load_prompts(source, skip=options["skip"], limit=options["limit"])
    used = load_for_plan(console, options, chosen)
    base, tree = used.base, used.plan
    settings = {name: options[name] for name in ("max_new_tokens", "repeats", "batch_size", "chat_template")}
    template = options["chat_template"]
    encoded = encode_prompts(base, prompts, options["max_new_tokens"], chat_template=template)
    if joins_turns(base, encoded.texts, chat_template=template):
        console.note("no chat template: each turn follows the answer before it on a new line")
    with console.progress("validate") as progress:
        found = validate(
            base,
            used.heads,
            tree,
            encoded.texts,
            drafter=used.drafter,
            draft=used.draft,
            judge=0,
            progress=progress,
            **settings,
        )
    report_metrics(console, found, encoded.skipped)
    found = found.judged(base, JUDGED if options["judge"] is None else options["judge"])
    report_differences(console, found, base.tokenizer, encoded.skipped)
    for warning in advice(found):
        console.warn(f"warning: {warning}")
    if found.failures:
        raise differences_error(found, base.tokenizer)
    if found.prediction_misses:
        _warn_prediction(console, found, tree)
    below = threshold_error(found, options["min_tokens_per_step"], options["min_speedup"])
    if below is not None:
        raise below


command = run


def _warn_prediction(console: Console, found: Validation, tree: Plan) -> None:
    """Warn of texts whose number of steps was not predicted, with the reason."""
    # Replay takes each text alone; in a batch all rows take the largest size that is best for one of them.
    shared = isinstance(tree, TreePolicy) and len(tree.sizes) > 1 and found.batch_size > 1
    reason = (
        "texts of a batch share the largest size that is best for one of them, the prediction takes each alone"
        if shared
        else "two candidates of nearly equal logits changed ranks by rounding, or there is a bug"
    )
    count = len(found.prediction_misses)
    console.warn(f"warning: {count} texts took another number of steps than predicted: {reason}")
