"""`treeopt train`: texts to draft heads."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.console import Console, command, resumable
from treeopt.cli.early_checks import check_apart
from treeopt.cli.numbers import SEED, FiniteRange
from treeopt.cli.options import base_options, say_base

if TYPE_CHECKING:
    from treeopt.train.medusa1 import Trained


@command("train")
@base_options
@click.option("--data", "data", multiple=True, required=True, help="Texts to learn from (repeatable).")
@click.option("--num-heads", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--blocks", type=click.IntRange(min=0), default=1, show_default=True, help="Residual blocks of a head.")
@click.option("--shared-lm-head", is_flag=True, help="Use the base's LM head: a tenth of the memory, cheaper steps.")
@click.option("--load-in-4bit", is_flag=True, help="Quantise the base (needs CUDA and bitsandbytes).")
@click.option("--length", type=click.IntRange(min=3), default=2048, show_default=True, help="Most tokens of a text.")
@click.option("--epochs", type=FiniteRange(min=0, min_open=True), default=1.0, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps, in place of --epochs.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Texts of one forward.")
@click.option("--accumulate", type=click.IntRange(min=1), default=1, show_default=True, help="Forwards of one step.")
@click.option("--learning-rate", type=FiniteRange(min=0, min_open=True), default=1e-3, show_default=True)
@click.option("--warmup", type=FiniteRange(0, 1, max_open=True), default=0.05, show_default=True, help="Share.")
@click.option("--weight-decay", type=FiniteRange(min=0), default=0.0, show_default=True)
@click.option("--holdout", type=click.IntRange(min=0), default=0, show_default=True, help="Texts to judge on, unseen.")
@click.option("--log-every", type=click.IntRange(min=1), default=10, show_default=True, help="Steps.")
@click.option("--bf16", is_flag=True, help="Mixed precision in the heads; their weights stay float32.")
@click.option("--chat-template/--no-chat-template", default=True, help="Use the tokenizer's, where it has one.")
@click.option("--seed", type=SEED, default=0, show_default=True)
@click.option("--resume", is_flag=True, help="Go on with the unfinished run in the output folder.")
@click.option("--force", is_flag=True, help="Replace heads and an unfinished run in the output folder; never an input.")
@click.option("-o", "--output", required=True, help="Folder for the heads.")
def run(console: Console, **options: Any) -> None:
    """Train draft heads on a frozen base model (Medusa-1).

    Each head begins as a copy of the base's LM head and learns to guess one token further on. Heads guess best what
    they were trained on: let `treeopt distill` write the base's own answers to prompts like yours. Loss and accuracies
    go to metrics.jsonl in the output folder.
    """
    if not options["blocks"] and options["shared_lm_head"]:
        raise click.UsageError("--blocks 0 with --shared-lm-head leaves nothing to train")
    check_apart("resume", "force")
    check_apart("steps", "epochs")
    from treeopt.models.base import load_base
    from treeopt.train.data import load_texts, read_texts
    from treeopt.train.medusa1 import check_outputs, train_heads
    from treeopt.train.settings import Settings
    from treeopt.verify.probe import check_trees

    inputs = (*options["data"], options["model"])
    check_outputs(Path(options["output"]), inputs, resume=options["resume"], overwrite=options["force"])
    files = [read_texts(name) for name in options["data"]]
    base = load_base(
        options["model"], dtype=options["dtype"], device=options["device"], load_in_4bit=options["load_in_4bit"]
    )
    say_base(console, base)
    check_trees(base)
    length = min(options["length"], base.context)
    texts = load_texts(base, files, length=length, chat_template=options["chat_template"])
    tokens = sum(len(example.ids) for example in texts.examples)
    console.note(f"data     {len(texts.examples)} texts, {tokens} tokens, of {', '.join(texts.names)}")
    if texts.cut:
        console.warn(f"warning: {texts.cut} texts were longer than {length} tokens and are cut there (--length)")
    if texts.foreign:
        console.warn(
            f"warning: {texts.foreign} rows are another model's answers, and tokenised anew; heads guess best what "
            "their own base writes (treeopt distill)"
        )
    if texts.empty:
        console.warn(f"warning: {texts.empty} rows hold no answer of two tokens or more and are left out")
    given = {name: options.get(name) for name in (field.name for field in fields(Settings))}
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    with resumable(console, "from the last checkpoint"), console.progress("train") as progress:
        trained = train_heads(
            base,
            texts,
            options["output"],
            settings,
            resume=options["resume"],
            overwrite=options["force"],
            progress=progress,
        )
    _report(console, trained, options)


command = run


def _report(console: Console, trained: Trained, options: dict[str, Any]) -> None:
    rows = [
        [f"head {h}", f"{score.loss:.3f}", *(f"{share:.1%}" for share in score.top), str(score.trials)]
        for h, score in enumerate(trained.held_out, start=1)
    ]
    if rows:
        tops = [f"top-{i}" for i in range(1, len(trained.held_out[0].top) + 1)]
        console.table(["", "loss", *tops, "trials"], rows)
        console.say(f"{options['holdout']} texts held out; loss in nats; share of trials with the token in the first i")
    console.note(f"wrote {options['output']}   next: treeopt calibrate --heads {options['output']} --prompts PROMPTS")
    console.result(
        {
            "steps": trained.steps,
            "heads": trained.heads.num_heads,
            "held_out": [vars(score) for score in trained.held_out],
            "output": options["output"],
        }
    )
