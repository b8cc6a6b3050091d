"""`treeopt validate`: is a tree lossless, does it do what was predicted, is it faster."""

from __future__ import annotations

import functools
from typing import Any

import click

from treeopt.cli.console import Console, command
from treeopt.cli.mismatch import warn_other_drafter, warn_other_tree
from treeopt.cli.numbers import FiniteRange
from treeopt.cli.options import chosen_prompts, drafter_option, load_models, model_options, prompt_options, tree_option
from treeopt.cli.validate_report import differences_error, report_figures, report_verdict, threshold_error
from treeopt.files.policies import load_plan_for
from treeopt.policy import TreePolicy


@command("validate")
@functools.partial(model_options, dtype="float32")
@prompt_options
@tree_option
@drafter_option
@click.option(
    "--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Of each text and way; they take turns."
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Prompts decoded together."
)
@click.option("--judge", type=click.IntRange(min=0), help="Differing texts judged in float64, 0 for none [default: 5].")
@click.option("--min-tokens-per-step", type=FiniteRange(min=0), help="Exit status 6 below it.")
@click.option("--min-speedup", type=FiniteRange(min=0), help="Exit status 6 below it, by the median repeat.")
def run(console: Console, **options: Any) -> None:
    """Decode every prompt with the tree, one token a step, by stock `generate` and by prompt lookup, and compare.

    Lossless means: token for token the text of stock greedy `generate`. After the figures the first --judge differing
    texts are decided by a float64 forward on the CPU: a tie (equal logits), rounding (a gap below what the dtype
    resolves there) or a bug. Exit status 5 where a bug is found. In float32 also where there is rounding, or a
    difference that was not judged; in bfloat16 and float16 these are reported and are no failure: float32 is the proof.

    The prediction comes from a separate teacher-forced pass and replay, never from the decoder.

    Prompts with `turns` (MT-bench, Spec-Bench) are asked turn by turn, each after the model's own answer; without a
    chat template the turns are joined by newlines. Figures are given for each turn and each `category`.
    """
    asked = chosen_prompts(options)
    tree, drafter = load_plan_for(options["tree"], options["drafter"])
    from treeopt.drafting.plans import check_plan
    from treeopt.evaluate.advice import advice
    from treeopt.evaluate.validate import validate
    from treeopt.evaluate.validation import JUDGED
    from treeopt.texts.encode import encode_prompts, joins_turns
    from treeopt.texts.prompts import load_prompts
    from treeopt.verify.probe import check_trees

    check_plan(tree, drafter)
    prompts = load_prompts(asked, skip=options["skip"], limit=options["limit"])
    base, loaded = load_models(console, options)
    check_trees(base)
    warn_other_tree(console, options["tree"], tree, base, loaded)
    warn_other_drafter(console, drafter, base, loaded)
    template, budget = options["chat_template"], options["max_new_tokens"]
    encoded = encode_prompts(base, prompts, budget, chat_template=template)
    if joins_turns(base, encoded.texts, chat_template=template):
        console.note("no chat template: each turn follows the answer before it on a line of its own")
    with console.progress("validate") as progress:
        found = validate(
            base,
            loaded.heads,
            tree,
            encoded.texts,
            drafter=drafter,
            max_new_tokens=budget,
            repeats=options["repeats"],
            batch_size=options["batch_size"],
            chat_template=template,
            judge=0,
            progress=progress,
        )
    report_figures(console, found, encoded.skipped)
    found = found.judged(base, JUDGED if options["judge"] is None else options["judge"])
    report_verdict(console, found, base.tokenizer, encoded.skipped)
    for warning in advice(found):
        console.warn(f"warning: {warning}")
    if found.failures:
        raise differences_error(found, base.tokenizer)
    if found.prediction_misses:
        # Replay knows texts one by one; in a batch the row that wants most decides how many nodes all rows take.
        shared = isinstance(tree, TreePolicy) and len(tree.sizes) > 1 and found.batch_size > 1
        reason = (
            "texts of a batch share the largest size that one of them asks for, the prediction is of each alone"
            if shared
            else "two guesses of nearly equal logits changed ranks by rounding, or there is a bug"
        )
        console.warn(f"warning: {len(found.prediction_misses)} texts took other steps than predicted: {reason}")
    below = threshold_error(found, options["min_tokens_per_step"], options["min_speedup"])
    if below is not None:
        raise below


command = run
