"""The command `treeopt train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.checks import check_apart, check_belongs, check_inputs
from treeopt.cli.console import Console, command
from treeopt.cli.numbers import ABOVE_ZERO, COUNT, NOT_NEGATIVE, SEED, FiniteRange
from treeopt.cli.options import base_options, chat_template_option, group, loading_options, say_base
from treeopt.cli.work_options import interruptible
from treeopt.errors import counted
from treeopt.files.configurations import storing

if TYPE_CHECKING:
    from treeopt.models.base import Base
    from treeopt.progress import Progress
    from treeopt.train.data import TextFile, TrainingTexts
    from treeopt.train.medusa1 import Trained
    from treeopt.train.medusa2 import BaseScore

_FORM = ("num_heads", "blocks", "shared_lm_head")  # of new heads
_JOINT = ("rank", "alpha", "dropout", "heads_rate", "heads_weight", "heads_schedule", "self_distill")


_NOT_ALL = FiniteRange(0, 1, max_open=True)
_STAGES = "1: the heads alone (Medusa-1). 2: the heads and a LoRA adapter of the base (Medusa-2)."
_WEIGHT = "Stage 2: weight of the heads' loss [default: 0.2, or 0.01 with sine]."
_SCHEDULE = "Stage 2: schedule of that weight [default: constant with --heads, else sine]."
_joint_options = group(  # of stage 2
    click.option("--stage", type=click.IntRange(1, 2), default=1, help=_STAGES),
    click.option("--heads", help="Stage 2: heads to start from, such as those of stage 1 [default: new ones]."),
    click.option("--rank", type=COUNT, default=32, help="Stage 2: rank of the adapter."),
    click.option("--alpha", type=ABOVE_ZERO, default=16.0, help="Stage 2: scale of the adapter."),
    click.option("--dropout", type=_NOT_ALL, default=0.05, help="Stage 2: dropout of the adapter."),
    click.option("--heads-rate", type=ABOVE_ZERO, default=4.0, help="Stage 2: heads' learning rate / adapter's."),
    click.option("--heads-weight", type=ABOVE_ZERO, help=_WEIGHT),
    click.option("--heads-schedule", type=click.Choice(["constant", "sine"]), help=_SCHEDULE),
    click.option("--self-distill", is_flag=True, help="Stage 2: learn the base's distribution, not the texts'."),
)
_RATE = "Peak of the heads' learning rate [default: 0.001]; at stage 2 of the adapter's [default: 0.0005]."


@command("train")
@base_options
@_joint_options
@click.option("--data", "data", multiple=True, required=True, help="Training texts (repeatable).")
@click.option("--num-heads", type=COUNT, default=5, help="Number of heads.")
@click.option("--blocks", type=NOT_NEGATIVE, default=1, help="Residual blocks of a head.")
@click.option("--shared-lm-head", is_flag=True, help="Use the base's LM head: a tenth of the memory, faster steps.")
@click.option("--load-in-4bit", is_flag=True, help="Quantise the base (needs CUDA and bitsandbytes).")
@click.option("--length", type=click.IntRange(min=3), default=2048, help="Most tokens of a text.")
@click.option("--epochs", type=ABOVE_ZERO, default=1.0, help="Passes over the texts.")
@click.option("--steps", type=COUNT, help="Optimizer steps, in place of --epochs.")
@click.option("--batch-size", type=COUNT, default=8, help="Texts of one forward.")
@click.option("--accumulate", type=COUNT, default=1, help="Forwards of one step.")
@click.option("--learning-rate", type=ABOVE_ZERO, help=_RATE)
@click.option("--warmup", type=_NOT_ALL, default=0.05, help="Share of the steps in which the rate rises.")
@click.option("--weight-decay", type=FiniteRange(min=0), default=0.0, help="Weight decay.")
@click.option("--holdout", type=NOT_NEGATIVE, default=0, help="Texts held out to evaluate the heads.")
@click.option("--log-every", type=COUNT, default=10, help="Steps between log lines.")
@click.option("--bf16", is_flag=True, help="Mixed precision in the heads; their weights stay float32.")
@chat_template_option
@click.option("--seed", type=SEED, default=0, help="Seed of the order of the texts.")
@click.option("--resume", is_flag=True, help="Continue the unfinished run in the output folder.")
@click.option("--force", is_flag=True, help="Replace heads, and delete an unfinished run, in the output folder.")
@click.option("-o", "--output", required=True, help="Folder for the heads.")
def run(console: Console, **options: Any) -> None:
    """Train draft heads for a base model (Medusa-1), or heads and a LoRA adapter of the base (Medusa-2).

    Training texts should resemble the texts that you will decode: use `treeopt distill` with prompts like yours. Losses
    and accuracies are written to metrics.jsonl in the output folder.

    Stage 2 changes the distribution of the base, only a little with --self-distill. Its adapter is written to
    OUTPUT/adapter, for --adapter of other commands. It needs the package peft.

    On two CPU cores, takes minutes for a model of a few million parameters, and hours from 100 million on.
    """
    check_inputs()
    _check_options(options)
    from treeopt.train.data import read_texts
    from treeopt.train.medusa2 import expert_share
    from treeopt.verify.probe import check_trees

    _check_outputs(options)
    files = [read_texts(name) for name in options["data"]]
    base = treeopt.load_base(options["model"], **loading_options(options, "load_in_4bit"))
    say_base(console, base)
    check_trees(base)
    texts = _texts(console, base, files, options)
    if options["stage"] == 2 and (share := expert_share(base)):
        console.warn(f"warning: experts have {share:.1%} of the weights, and get no adapter")
    again = interruptible(console, lambda: "the same command with --resume continues from the last checkpoint")
    with storing(console.configuration), again, console.progress("train") as progress:
        trained, score = _train(base, texts, options, progress)
    _report(console, trained, score, options)


def _check_options(options: dict[str, Any]) -> None:
    if not options["blocks"] and options["shared_lm_head"]:
        raise click.UsageError("--blocks 0 with --shared-lm-head leaves nothing to train")
    check_apart("resume", "force")
    check_apart("steps", "epochs")
    check_belongs((*_JOINT, "heads"), "--stage 2", options["stage"] == 2)
    if options["heads"] is not None:
        check_belongs(_FORM, "new heads: leave out --heads", holds=False)
    check_belongs(("device_map",), "--stage 1: an adapter is trained on one device", options["stage"] == 1)
    check_belongs(("load_in_4bit",), "--stage 1: an adapter is merged into whole weights", options["stage"] == 1)


def _check_outputs(options: dict[str, Any]) -> None:
    """Check, before any work, that the folders can be written, and at stage 2 that peft is installed."""
    from treeopt.train import medusa2, run

    check = run.check_outputs if options["stage"] == 1 else medusa2.check_outputs
    inputs = [name for name in (*options["data"], options["model"], options["heads"]) if name is not None]
    check(Path(options["output"]), inputs, resume=options["resume"], overwrite=options["force"])


def _train(
    base: Base, texts: TrainingTexts, options: dict[str, Any], progress: Progress
) -> tuple[Trained, BaseScore | None]:
    """Train by the stage of the options; the second stage judges the base too."""
    kind = treeopt.Settings if options["stage"] == 1 else treeopt.JointSettings
    given = {field.name: options.get(field.name) for field in fields(kind)}
    settings: Any = kind(**{name: value for name, value in given.items() if value is not None})
    more = {"progress": progress, "resume": options["resume"], "overwrite": options["force"]}
    if options["stage"] == 1:
        return treeopt.train_heads(base, texts, options["output"], settings, **more), None
    found = treeopt.train_jointly(base, texts, options["output"], settings, heads=options["heads"], **more)
    return found, found.base_score


def _texts(console: Console, base: Base, files: Sequence[TextFile], options: dict[str, Any]) -> TrainingTexts:
    """The texts as token ids; print their number, and warnings about rows that are cut or left out."""
    from treeopt.train.data import load_texts

    length = min(options["length"], base.context)
    texts = load_texts(base, files, length=length, chat_template=options["chat_template"])
    tokens = sum(len(example.ids) for example in texts.examples)
    console.note(f"data     {counted(len(texts.examples), 'text')}, {tokens} tokens, of {', '.join(texts.names)}")
    if texts.cut:
        console.warn(f"warning: cut at {length} tokens (--length): {counted(texts.cut, 'longer text')}")
    if texts.foreign:
        console.warn(
            f"warning: answers of another model, tokenised again: {counted(texts.foreign, 'row')}; heads draft best "
            "after training on answers of their base (treeopt distill)"
        )
    if texts.empty:
        console.warn(f"warning: left out, as they hold no answer of two tokens or more: {counted(texts.empty, 'row')}")
    return texts


def _report(console: Console, trained: Trained, score: BaseScore | None, options: dict[str, Any]) -> None:
    shown = max((len(score.top) for score in trained.held_out), default=0)
    rows = []
    for h, head in enumerate(trained.held_out, start=1):
        cells = [f"{head.loss:.3f}", *(f"{share:.1%}" for share in head.top)] if head.top else ["-"] * (1 + shown)
        rows.append([f"head {h}", *cells, str(head.trials)])
    if rows:
        console.table(["", "loss", *(f"top-{i + 1}" for i in range(shown)), "trials"], rows)
        console.say(f"{counted(options['holdout'], 'text')} held out; loss in nats; top-i accuracy")
    if score is not None:
        change = f"{score.original_loss:.4f} nats before, {score.loss:.4f} with the adapter"
        console.say(f"the base's loss on them: {change}; divergence from the base {score.divergence:.4f}")
    output = options["output"]
    adapter = f" --adapter {output}/adapter" if options["stage"] == 2 else ""
    console.note(f"wrote {output}   next: treeopt calibrate --heads {output}{adapter} --prompts PROMPTS")
    joint = {} if score is None else {"base": vars(score)}
    held_out = [vars(one) for one in trained.held_out]
    console.result(
        {"steps": trained.steps, "heads": trained.heads.num_heads, "held_out": held_out, **joint, "output": output}
    )
