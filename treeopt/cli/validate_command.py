"""`treeopt validate`: is a tree lossless, does it do what was predicted, is it faster."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.console import (
    Console,
    command,
    model_options,
    note_pair,
    prompt_options,
    say_skipped,
    tree_option,
    warn_other_tree,
)
from treeopt.errors import Code, TreeoptError
from treeopt.files.trees import load_tree

if TYPE_CHECKING:
    from treeopt.calibrate.texts import Skipped
    from treeopt.runtime.validate import Validation

_SHOWN = 5


@command("validate")
@functools.partial(model_options, dtype="float32")
@prompt_options
@tree_option
def run(console: Console, **options: Any) -> None:
    """Decode every prompt with the tree, one token a step, and by stock `generate`, and compare.

    Lossless means: token for token the text of stock greedy `generate`. The prediction comes from a separate
    teacher-forced pass and replay, never from the decoder. Exit status 5 where a text differs.
    """
    if options["prompts"] is None:
        raise click.UsageError("Missing option '--prompts'.")
    tree = load_tree(options["tree"])
    from treeopt.calibrate.prompts import load_prompts
    from treeopt.calibrate.texts import encode_prompts
    from treeopt.models.pair import load_pair
    from treeopt.runtime.validate import validate

    prompts = load_prompts(options["prompts"], limit=options["limit"])
    base, loaded = load_pair(options["heads"], options["model"], dtype=options["dtype"], device=options["device"])
    note_pair(console, base, loaded)
    encoded = encode_prompts(base, prompts, options["max_new_tokens"], chat_template=options["chat_template"])
    with console.progress("validate") as progress:
        found = validate(
            base, loaded.heads, tree, encoded.texts, max_new_tokens=options["max_new_tokens"], progress=progress
        )
    _report(console, found, tree.nodes, encoded.skipped)
    warn_other_tree(console, options["tree"], tree, loaded)
    if found.lossless and found.prediction_misses:
        console.warn(
            f"warning: {len(found.prediction_misses)} prompts took other steps than predicted: two guesses of nearly "
            "equal logits changed ranks by rounding, or there is a bug"
        )
    if not found.lossless:
        raise _not_lossless(found)


command = run


def _report(console: Console, found: Validation, nodes: int, skipped: Sequence[Skipped]) -> None:
    total, wrong, misses = len(found.results), len(found.differences), len(found.prediction_misses)
    verdict = "yes" if found.lossless else "NO"
    console.say(
        f"lossless        {verdict}: {total - wrong}/{total} prompts, {found.tree.tokens} tokens, "
        f"against stock greedy generate in {found.made_by['dtype']}"
    )
    expected = found.expected_tokens_per_step
    shown = "not in the tree file" if expected is None else f"{expected:.4f}"
    console.say(
        f"tokens per step {found.tokens_per_step:.4f} measured  (1 + accepted drafts per step: all tokens / all steps)"
    )
    console.say(
        f"                {found.predicted.tokens_per_step:.4f} predicted by replay; steps agree on "
        f"{total - misses}/{total} prompts"
    )
    console.say(f"                {shown} expected by the calibration")
    rows = []
    for name, pace in (
        ("stock generate", found.generate),
        ("one by one", found.one_by_one),
        (f"tree {nodes}", found.tree),
    ):
        rate = pace.tokens_per_second
        rows.append([name, f"{pace.tokens / pace.steps:.2f}", "-" if rate is None else f"{rate:.0f}"])
    console.table(["", "tokens/step", "tokens/s"], rows)
    overhead, speedup = ("-" if x is None else f"{x:.2f}" for x in (found.overhead, found.speedup))
    console.say(
        f"overhead {overhead}  speedup {speedup} over one by one "
        f"(batch 1, {found.made_by['device']}, {found.made_by['threads']} threads, prefill left out)"
    )
    say_skipped(console, skipped)
    console.result(
        {
            "lossless": found.lossless,
            "prompts": total,
            "skipped": len(skipped),
            "skipped_prompts": [vars(one) for one in skipped],
            "tokens": found.tree.tokens,
            "steps": found.tree.steps,
            "tokens_per_step": found.tokens_per_step,
            "predicted_tokens_per_step": found.predicted.tokens_per_step,
            "expected_tokens_per_step": expected,
            "prediction_misses": [miss.prompt_id for miss in found.prediction_misses],
            "acceptance_by_depth": {
                "measured": found.measured_by_depth,
                "predicted": found.predicted.acceptance_by_depth().tolist(),
            },
            "tokens_per_second": {
                "tree": found.tree.tokens_per_second,
                "one_by_one": found.one_by_one.tokens_per_second,
                "generate": found.generate.tokens_per_second,
            },
            "prefill_seconds": {
                "tree": found.tree.prefill_seconds,
                "one_by_one": found.one_by_one.prefill_seconds,
                "generate": found.generate.prefill_seconds,
            },
            "overhead": found.overhead,
            "speedup": found.speedup,
            "differences": [vars(difference) for difference in found.differences],
            "made_by": found.made_by,
        }
    )


def _not_lossless(found: Validation) -> TreeoptError:
    lines = [
        f"prompt {d.prompt_id}, token {d.position}: greedy {d.greedy_token}, {d.way} {d.found_token}, gap {d.gap:.2g}"
        for d in found.differences[:_SHOWN]
    ]
    what = f"{len(found.differences)} of {len(found.results)} texts differ from greedy decoding"
    why = "a gap of logits near the dtype's rounding is a tie that two computations decide apart; a large one is a bug"
    return TreeoptError(Code.NOT_LOSSLESS, what, at="\n".join(lines), why=why, fix="--dtype float32 is the proof")
