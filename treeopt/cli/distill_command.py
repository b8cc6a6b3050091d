"""The command `treeopt distill`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli import options as shared
from treeopt.cli.checks import check_apart, check_belongs, check_inputs
from treeopt.cli.console import Console, command
from treeopt.cli.drafters import warn_no_trees
from treeopt.cli.numbers import COUNT, SEED, Temperature
from treeopt.cli.work_options import batch_option, batch_settings, ending_work, open_work, work_options
from treeopt.errors import counted
from treeopt.facts import picked
from treeopt.files.configurations import write_note

if TYPE_CHECKING:
    from treeopt.texts.prompts import PromptSet
    from treeopt.train.distill import Distilled


@command("distill")
@shared.base_options
@shared.adapter_option
@shared.prompt_options()
@click.option("--self-talk", type=COUNT, help="Number of conversations to write without prompts.")
@click.option("--turns", type=COUNT, default=1, help="User turns of each --self-talk.")
@click.option("--opening-tokens", type=COUNT, default=32, help="Most tokens of a user turn or opening of --self-talk.")
@click.option("--exclude", help="Evaluation prompts: prompts with the same text are left out.")
@click.option("--temperature", type=Temperature(), default=0.0, help="0 is greedy.")
@click.option("--seed", type=SEED, default=0, help="Seed of sampling.")
@batch_option
@work_options
@click.option("-o", "--output", required=True, help="A .jsonl file.")
def run(console: Console, **options: Any) -> None:
    """Write the base model's answers to prompts, to train heads on.

    Conversations among the prompts are answered turn by turn, after the model's own answers. With --self-talk the model
    also writes the user turns (or, without a chat template, the openings of texts), at temperature 1.

    Takes about a minute for 50,000 tokens of the built-in model on two CPU cores.
    """
    if (options["prompts"] is None) == (options["self_talk"] is None):
        raise click.UsageError("give either --prompts or --self-talk")
    check_apart("resume", "force")
    check_belongs(("turns", "opening_tokens"), "--self-talk", options["self_talk"] is not None)
    check_belongs(("skip", "limit"), "--prompts", options["prompts"] is not None)
    shared.check_outputs(options, options["output"], suffixes=(".jsonl",))
    check_inputs()
    from treeopt.train.distill import DistillOptions, divided_distill

    work = open_work(options)
    prompts = _prompts(console, options)
    exclude = treeopt.load_prompts(options["exclude"]) if options["exclude"] else None
    base = treeopt.load_base(options["model"], **shared.loading_options(options, "adapter"))
    shared.say_base(console, base)
    warn_no_trees(console, base, "heads trained on its answers cannot draft for it here")
    names = ("max_new_tokens", "temperature", "seed", "chat_template", "resume")
    chosen = {**batch_settings(console, options), **{name: options[name] for name in names}}
    with ending_work(console, work), console.progress("distill") as progress:
        given = DistillOptions(overwrite=options["force"], work=work, **chosen)
        done = divided_distill(base, prompts, options["output"], given, exclude=exclude, progress=progress)
    if done is None:
        return
    write_note(options["output"], console.configuration)
    _report(console, done, options["output"])


def _prompts(console: Console, options: dict[str, Any]) -> PromptSet | treeopt.SelfTalk:

    if options["self_talk"] is not None:
        return treeopt.SelfTalk(options["self_talk"], options["turns"], options["opening_tokens"])
    prompts = treeopt.load_prompts(options["prompts"], skip=options["skip"], limit=options["limit"])
    shared.say_prompts(console, prompts)
    return prompts


def _report(console: Console, done: Distilled, output: str) -> None:
    from treeopt.texts.prompts import skipped_text

    console.say(f"{counted(done.rows, 'answer')}, {done.tokens} tokens")
    if done.ended_early:
        ended = counted(done.ended_early, "conversation")
        console.warn(f"ended before the last turn, as an answer reached --max-new-tokens: {ended}")
    console.report(skipped_text(done.skipped))
    console.note(f"wrote {output}   next: treeopt train --data {output} -o HEADS")
    skipped = [vars(one) for one in done.skipped]
    console.result({**picked(done, "rows", "tokens", "ended_early"), "skipped_prompts": skipped, "output": output})
