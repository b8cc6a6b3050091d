"""`treeopt distill`: prompts to the base model's own answers."""

from __future__ import annotations

from typing import Any

import click

from treeopt.cli.console import Console, command, resumable, say_skipped
from treeopt.cli.early_checks import check_apart, check_belongs, check_suffix, warn_no_trees
from treeopt.cli.numbers import SEED, Temperature
from treeopt.cli.options import base_options, check_outputs, prompt_options, say_base


@command("distill")
@base_options
@prompt_options
@click.option("--self-talk", type=click.IntRange(min=1), help="No prompts: the model writes so many of its own.")
@click.option("--turns", type=click.IntRange(min=1), default=1, show_default=True, help="Of each --self-talk.")
@click.option(
    "--opening-tokens",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Budget of a user's turn or an opening in --self-talk.",
)
@click.option("--exclude", help="Prompts kept for judging: seeds of the same text are left out.")
@click.option("--temperature", type=Temperature(), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of sampling.")
@click.option("--batch-size", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--resume", is_flag=True, help="Go on with OUTPUT.partial.")
@click.option("--force", is_flag=True, help="Overwrite the output, and drop an OUTPUT.partial.")
@click.option("-o", "--output", required=True, help="A .jsonl file.")
def run(console: Console, **options: Any) -> None:
    """Let the base model answer prompts, and keep the answers to train heads on.

    A conversation among the prompts is put to the model turn by turn, each after its own answers. With --self-talk the
    model writes the user's part as well (or, without a chat template, how a text begins), at temperature 1.
    """
    if (options["prompts"] is None) == (options["self_talk"] is None):
        raise click.UsageError("give either --prompts or --self-talk")
    check_apart("resume", "force")
    check_belongs(("turns", "opening_tokens"), "--self-talk", options["self_talk"] is not None)
    check_belongs(("skip", "limit"), "--prompts", options["prompts"] is not None)
    target = check_outputs(options, options["output"])
    check_suffix(options["output"], ".jsonl")
    from treeopt.models.base import load_base
    from treeopt.texts.prompts import load_prompts
    from treeopt.train.distill import distill
    from treeopt.train.partial import partial_of
    from treeopt.train.talks import SelfTalk

    partial_of(target, resume=options["resume"], overwrite=options["force"])
    if options["self_talk"] is None:
        seeds: Any = load_prompts(options["prompts"], skip=options["skip"], limit=options["limit"])
        console.note(f"prompts  {len(seeds.prompts)} of {seeds.name}  (sha256 {seeds.sha256[:12]})")
    else:
        seeds = SelfTalk(options["self_talk"], options["turns"], options["opening_tokens"])
    exclude = load_prompts(options["exclude"]) if options["exclude"] else None
    base = load_base(options["model"], dtype=options["dtype"], device=options["device"])
    say_base(console, base)
    warn_no_trees(console, base, "heads trained on its answers will be of no use here")
    names = ("max_new_tokens", "temperature", "seed", "batch_size", "chat_template", "resume")
    with resumable(console, f"with {options['output']}.partial"), console.progress("distill") as progress:
        done = distill(
            base,
            seeds,
            options["output"],
            exclude=exclude,
            overwrite=options["force"],
            progress=progress,
            **{name: options[name] for name in names},
        )
    console.say(f"{done.rows} answers, {done.tokens} tokens ({done.new_rows} answers in this run)")
    if done.ended_early:
        console.warn(
            f"{done.ended_early} conversations ended before their last turn: an answer reached --max-new-tokens"
        )
    say_skipped(console, done.skipped)
    console.note(f"wrote {options['output']}   next: treeopt train --data {options['output']} -o HEADS")
    console.result(
        {
            "rows": done.rows,
            "tokens": done.tokens,
            "new_rows": done.new_rows,
            "ended_early": done.ended_early,
            "skipped_prompts": [vars(one) for one in done.skipped],
            "output": options["output"],
        }
    )


command = run
