"""`treeopt distill`: prompts to the base model's own answers."""

from __future__ import annotations

from typing import Any

import click

from treeopt.cli.console import Console, base_options, command, prompt_options, resumable, say_base, say_skipped
from treeopt.files.atomic import check_writable


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
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of sampling.")
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
    check_writable(options["output"], overwrite=options["force"])
    from treeopt.calibrate.prompts import load_prompts
    from treeopt.models.base import load_base
    from treeopt.models.probe import check_trees
    from treeopt.train.distill import SelfTalk, distill

    if options["self_talk"] is None:
        seeds: Any = load_prompts(options["prompts"], limit=options["limit"])
        console.note(f"prompts  {len(seeds.prompts)} of {seeds.name}  (sha256 {seeds.sha256[:12]})")
    else:
        seeds = SelfTalk(options["self_talk"], options["turns"], options["opening_tokens"])
    exclude = load_prompts(options["exclude"]) if options["exclude"] else None
    base = load_base(options["model"], dtype=options["dtype"], device=options["device"])
    say_base(console, base)
    check_trees(base)
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
