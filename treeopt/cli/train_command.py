"""The command `treeopt train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.checks import check_apart, check_belongs, check_inputs
from treeopt.cli.console import Console, command
from treeopt.cli.numbers import SEED, FiniteRange
from treeopt.cli.options import base_options, loading_options, say_base
from treeopt.cli.work_options import resumable
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


def _joint_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of stage 2."""
    above = FiniteRange(min=0, min_open=True)
    share = FiniteRange(0, 1, max_open=True)
    count = click.IntRange(min=1)
    schedules = click.Choice(["constant", "sine"])
    for option in (
        click.option("--merge", help="Stage 2: folder for the base with its adapter in the weights, as a checkpoint."),
        click.option("--self-distill", is_flag=True, help="Stage 2: keep the base's distribution, not the texts'."),
        click.option("--heads-schedule", type=schedules, help="Stage 2 [default: constant with --heads, else sine]."),
        click.option(
            "--heads-weight", type=above, help="Stage 2: weight of the heads' loss [default: 0.2, or 0.01 on the sine]."
        ),
        click.option("--heads-rate", type=above, default=4.0, help="Stage 2: rate over the adapter's."),
        click.option("--dropout", type=share, default=0.05, help="Stage 2: of the adapter."),
        click.option("--alpha", type=above, default=16.0, help="Stage 2: scale of the adapter."),
        click.option("--rank", type=count, default=32, help="Stage 2: of the adapter."),
        click.option("--heads", help="Stage 2: heads to start from, as those of stage 1 [default: new ones]."),
        click.option(
            "--stage",
            type=click.IntRange(1, 2),
            default=1,
            help="1: the heads alone (Medusa-1). 2: the heads and a LoRA adapter of the base (Medusa-2).",
        ),
    ):
        function = option(function)
    return function


@command("train")
@base_options
@_joint_options
@click.option("--data", "data", multiple=True, required=True, help="Training texts (repeatable).")
@click.option("--num-heads", type=click.IntRange(min=1), default=5, help="Number of heads.")
@click.option("--blocks", type=click.IntRange(min=0), default=1, help="Residual blocks of a head.")
@click.option("--shared-lm-head", is_flag=True, help="Use the base's LM head: a tenth of the memory, faster steps.")
@click.option("--load-in-4bit", is_flag=True, help="Quantise the base (needs CUDA and bitsandbytes).")
@click.option("--length", type=click.IntRange(min=3), default=2048, help="Most tokens of a text.")
@click.option("--epochs", type=FiniteRange(min=0, min_open=True), default=1.0, help="Passes over the texts.")
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps, in place of --epochs.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, help="Texts of one forward.")
@click.option("--accumulate", type=click.IntRange(min=1), default=1, help="Forwards of one step.")
@click.option(
    "--learning-rate",
    type=FiniteRange(min=0, min_open=True),
    help="Peak of the heads' rate [default: 0.001]; at stage 2 of the adapter's [default: 0.0005].",
)
@click.option("--warmup", type=FiniteRange(0, 1, max_open=True), default=0.05, help="Share of the steps.")
@click.option("--weight-decay", type=FiniteRange(min=0), default=0.0, help="Of the weights.")
@click.option("--holdout", type=click.IntRange(min=0), default=0, help="Texts held out, by which the heads are judged.")
@click.option("--log-every", type=click.IntRange(min=1), default=10, help="Steps of a log line.")
@click.option("--bf16", is_flag=True, help="Mixed precision in the heads; their weights stay float32.")
@click.option("--chat-template/--no-chat-template", default=True, help="Use the tokenizer's chat template.")
@click.option("--seed", type=SEED, default=0, help="Of the order of the texts.")
@click.option("--resume", is_flag=True, help="Continue the unfinished run in the output folder.")
@click.option("--force", is_flag=True, help="Replace heads, and delete an unfinished run, in the output folder.")
@click.option("-o", "--output", required=True, help="Folder for the heads.")
def run(console: Console, **options: Any) -> None:
    """Train draft heads for a base model (Medusa-1), or heads and a LoRA adapter of the base (Medusa-2).

    Each head starts as a copy of the base's LM head and learns to predict a later token. Training texts should resemble
    the texts that will be drafted: use `treeopt distill` with prompts like yours. Losses and accuracies are written to
    metrics.jsonl in the output folder.

    Stage 2 changes the base's distribution, little with --self-distill. Its adapter is written to OUTPUT/adapter; other
    commands take it as --adapter. It needs the package peft.
    """
    check_inputs()
    _check_options(options)
    from treeopt.models.base import load_base
    from treeopt.models.merged import check_merged_space
    from treeopt.train.data import read_texts
    from treeopt.verify.probe import check_trees

    _check_outputs(options)
    files = [read_texts(name) for name in options["data"]]
    base = load_base(options["model"], **loading_options(options, "load_in_4bit"))
    say_base(console, base)
    check_trees(base)
    if options["merge"] is not None:
        check_merged_space(base, options["merge"])
    texts = _texts(console, base, files, options)
    if options["stage"] == 2:
        _say_adapter(console, base)
    again = resumable(console, "from the last checkpoint")
    with storing(console.configuration), again, console.progress("train") as progress:
        trained, score = _train(base, texts, options, progress)
        if options["merge"] is not None and (console.for_people or console.for_programs):  # one process of torchrun
            _merge(console, options)
    _report(console, trained, score, options)


command = run


def _check_options(options: dict[str, Any]) -> None:
    """Raise a usage error for options that contradict each other."""
    if not options["blocks"] and options["shared_lm_head"]:
        raise click.UsageError("--blocks 0 with --shared-lm-head leaves nothing to train")
    check_apart("resume", "force")
    check_apart("steps", "epochs")
    check_belongs((*_JOINT, "heads", "merge"), "--stage 2", options["stage"] == 2)
    if options["heads"] is not None:
        check_belongs(_FORM, "new heads: leave out --heads", holds=False)
    check_belongs(("device_map",), "--stage 1: an adapter is trained on one device", options["stage"] == 1)
    check_belongs(("load_in_4bit",), "--stage 1: an adapter is merged into whole weights", options["stage"] == 1)


def _check_outputs(options: dict[str, Any]) -> None:
    """Check, before any work, that the folders can be written, and at stage 2 that peft is installed."""
    from treeopt.models.adapters import require_peft
    from treeopt.models.merged import check_merged_writable
    from treeopt.train import medusa2, run

    again = {"resume": options["resume"], "overwrite": options["force"]}
    inputs = (*options["data"], options["model"])
    if options["stage"] == 1:
        run.check_outputs(Path(options["output"]), inputs, **again)
        return
    require_peft()
    inputs = (*inputs, *([] if options["heads"] is None else [options["heads"]]))
    medusa2.check_outputs(Path(options["output"]), inputs, **again)
    if options["merge"] is not None:
        check_merged_writable(options["merge"], overwrite=options["force"], others=(*inputs, options["output"]))


def _train(
    base: Base, texts: TrainingTexts, options: dict[str, Any], progress: Progress
) -> tuple[Trained, BaseScore | None]:
    """Train by the stage of the options; the second stage judges the base too."""
    from treeopt.train.medusa1 import train_heads
    from treeopt.train.medusa2 import train_jointly
    from treeopt.train.settings import JointSettings, Settings

    kind = Settings if options["stage"] == 1 else JointSettings
    given = {field.name: options.get(field.name) for field in fields(kind)}
    settings: Any = kind(**{name: value for name, value in given.items() if value is not None})
    more = {"progress": progress, "resume": options["resume"], "overwrite": options["force"]}
    if options["stage"] == 1:
        return train_heads(base, texts, options["output"], settings, **more), None
    found = train_jointly(base, texts, options["output"], settings, heads=options["heads"], **more)
    return found, found.base_score


def _merge(console: Console, options: dict[str, Any]) -> None:
    """Write the base with the new adapter in its weights, which --resume cannot repeat."""
    from treeopt.models.adapters import ADAPTER_FOLDER
    from treeopt.models.base import load_base
    from treeopt.models.merged import save_merged

    adapter, folder = Path(options["output"]) / ADAPTER_FOLDER, options["merge"]
    given = "".join(f", {name}={options[name]!r}" for name in ("dtype", "device") if options[name] != "auto")
    replaced = ", overwrite=True" if options["force"] else ""
    later = f"treeopt.load_base({options['model']!r}, adapter={str(adapter)!r}{given})"
    later = f"treeopt.save_merged({later}, {folder!r}{replaced})"
    try:
        base = load_base(options["model"], dtype=options["dtype"], device=options["device"], adapter=adapter)
        save_merged(base, folder, overwrite=options["force"])
    except BaseException:
        console.warn(f"heads and adapter are written; to merge later, in Python: {later}")
        raise
    console.note(f"wrote {folder}   the base with the adapter in its weights")


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


def _say_adapter(console: Console, base: Base) -> None:
    """Print what share of the base's weights the adapter is on; warn of experts, which get none."""
    from treeopt.train.lora import adapter_shares

    linear, experts = adapter_shares(base)
    console.note(f"adapter  on the linear layers, which have {linear:.1%} of the weights")
    if experts:
        console.warn(f"warning: experts have {experts:.1%} of the weights, and get no adapter")


def _report(console: Console, trained: Trained, score: BaseScore | None, options: dict[str, Any]) -> None:
    """Print the scores of heads and base on the texts held out."""
    rows = [
        [f"head {h}", f"{score.loss:.3f}", *(f"{share:.1%}" for share in score.top), str(score.trials)]
        for h, score in enumerate(trained.held_out, start=1)
    ]
    if rows:
        tops = [f"top-{i}" for i in range(1, len(trained.held_out[0].top) + 1)]
        console.table(["", "loss", *tops, "trials"], rows)
        console.say(f"{counted(options['holdout'], 'text')} held out; loss in nats; top-i accuracy")
    if score is not None:
        change = f"{score.original_loss:.4f} nats before, {score.loss:.4f} with the adapter"
        console.say(f"the base's loss on them: {change}; divergence from the base {score.divergence:.4f}")
    adapter = f" --adapter {options['output']}/adapter" if options["stage"] == 2 else ""
    next_command = f"treeopt calibrate --heads {options['output']}{adapter} --prompts PROMPTS"
    console.note(f"wrote {options['output']}   next: {next_command}")
    joint = {} if score is None else {"base": vars(score)}
    console.result(
        {
            "steps": trained.steps,
            "heads": trained.heads.num_heads,
            "held_out": [vars(score) for score in trained.held_out],
            **joint,
            "output": options["output"],
        }
    )
