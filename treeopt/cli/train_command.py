"""The command `treeopt train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.console import Console, command, resumable
from treeopt.cli.early_checks import check_apart
from treeopt.cli.numbers import SEED, FiniteRange
from treeopt.cli.options import base_options, say_base

if TYPE_CHECKING:
    from treeopt.models.base import Base
    from treeopt.train.data import TextFile, TrainingTexts
    from treeopt.train.medusa1 import Trained
    from treeopt.train.settings import Settings


@command("train")
@base_options
@click.option("--data", "data", multiple=True, required=True, help="Training texts (repeatable).")
@click.option("--num-heads", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--blocks", type=click.IntRange(min=0), default=1, show_default=True, help="Residual blocks of a head.")
@click.option("--shared-lm-head", is_flag=True, help="Use the base's LM head: a tenth of the memory, faster steps.")
@click.option("--load-in-4bit", is_flag=True, help="Quantise the base (needs CUDA and bitsandbytes).")
@click.option("--length", type=click.IntRange(min=3), default=2048, show_default=True, help="Most tokens of a text.")
@click.option("--epochs", type=FiniteRange(min=0, min_open=True), default=1.0, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps, in place of --epochs.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Texts of one forward.")
@click.option("--accumulate", type=click.IntRange(min=1), default=1, show_default=True, help="Forwards of one step.")
@click.option("--learning-rate", type=FiniteRange(min=0, min_open=True), default=1e-3, show_default=True)
@click.option(
    "--warmup", type=FiniteRange(0, 1, max_open=True), default=0.05, show_default=True, help="Share of the steps."
)
@click.option("--weight-decay", type=FiniteRange(min=0), default=0.0, show_default=True)
@click.option(
    "--holdout", type=click.IntRange(min=0), default=0, show_default=True, help="Texts held out, for evaluation."
)
@click.option("--log-every", type=click.IntRange(min=1), default=10, show_default=True, help="Steps of a log line.")
@click.option("--bf16", is_flag=True, help="Mixed precision in the heads; their weights stay float32.")
@click.option("--chat-template/--no-chat-template", default=True, help="Use the tokenizer's chat template.")
@click.option("--seed", type=SEED, default=0, show_default=True)
@click.option("--resume", is_flag=True, help="Continue the unfinished run in the output folder.")
@click.option("--force", is_flag=True, help="Replace heads, and delete an unfinished run, in the output folder.")
@click.option("-o", "--output", required=True, help="Folder for the heads.")
def run(console: Console, **options: Any) -> None:
    """Train draft heads on a frozen base model (Medusa-1).

    Each head starts as a copy of the base's LM head and learns to predict a later token. Training texts should resemble
    the texts that will be drafted: use `treeopt distill` with prompts like yours. Losses and accuracies are written to
    metrics.jsonl in the output folder.
    """
    if not options["blocks"] and options["shared_lm_head"]:
        raise click.UsageError("--blocks 0 with --shared-lm-head leaves nothing to train")
    check_apart("resume", "force")
    check_apart("steps", "epochs")
    from treeopt.models.base import load_base
    from treeopt.train.data import read_texts
    from treeopt.train.medusa1 import train_heads
    from treeopt.train.run import check_outputs
    from treeopt.verify.probe import check_trees

    inputs = (*options["data"], options["model"])
    check_outputs(Path(options["output"]), inputs, resume=options["resume"], overwrite=options["force"])
    files = [read_texts(name) for name in options["data"]]
    names = ("dtype", "device", "load_in_4bit")
    base = load_base(options["model"], **{name: options[name] for name in names})
    say_base(console, base)
    check_trees(base)
    texts = _texts(console, base, files, options)
    with resumable(console, "from the last checkpoint"), console.progress("train") as progress:
        trained = train_heads(
            base,
            texts,
            options["output"],
            _settings(options),
            resume=options["resume"],
            overwrite=options["force"],
            progress=progress,
        )
    _report(console, trained, options)


command = run


def _texts(console: Console, base: Base, files: Sequence[TextFile], options: dict[str, Any]) -> TrainingTexts:
    """The texts as token ids; print their number, and warnings about rows that are cut or left out."""
    from treeopt.train.data import load_texts

    length = min(options["length"], base.context)
    texts = load_texts(base, files, length=length, chat_template=options["chat_template"])
    tokens = sum(len(example.ids) for example in texts.examples)
    console.note(f"data     {len(texts.examples)} texts, {tokens} tokens, of {', '.join(texts.names)}")
    if texts.cut:
        console.warn(f"warning: {texts.cut} texts were longer than {length} tokens and were cut (--length)")
    if texts.foreign:
        console.warn(
            f"warning: {texts.foreign} rows are answers of another model, and are tokenised again; heads draft "
            "best after training on answers of their base (treeopt distill)"
        )
    if texts.empty:
        console.warn(f"warning: {texts.empty} rows hold no answer of two tokens or more and are left out")
    return texts


def _settings(options: dict[str, Any]) -> Settings:
    """The settings that the options name."""
    from treeopt.train.settings import Settings

    given = {field.name: options.get(field.name) for field in fields(Settings)}
    return Settings(**{name: value for name, value in given.items() if value is not None})


def _report(console: Console, trained: Trained, options: dict[str, Any]) -> None:
    """Print the scores of the heads on the texts held out."""
    rows = [
        [f"head {h}", f"{score.loss:.3f}", *(f"{share:.1%}" for share in score.top), str(score.trials)]
        for h, score in enumerate(trained.held_out, start=1)
    ]
    if rows:
        tops = [f"top-{i}" for i in range(1, len(trained.held_out[0].top) + 1)]
        console.table(["", "loss", *tops, "trials"], rows)
        console.say(f"{options['holdout']} texts held out; loss in nats; top-i accuracy")
    console.note(f"wrote {options['output']}   next: treeopt calibrate --heads {options['output']} --prompts PROMPTS")
    console.result(
        {
            "steps": trained.steps,
            "heads": trained.heads.num_heads,
            "held_out": [vars(score) for score in trained.held_out],
            "output": options["output"],
        }
    )
