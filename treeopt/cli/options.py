"""Options that several commands share, with their checks and loaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.checks import INPUT_OPTIONS, check_apart, check_suffix, several
from treeopt.cli.console import Console
from treeopt.cli.numbers import COUNT, NOT_NEGATIVE, SEED, SHARE, Temperature
from treeopt.cli.processes import NO_PROCESSES, is_one_of_several
from treeopt.defaults import CALIBRATION_FILE, DEFAULT_TOP_K
from treeopt.errors import Code, TreeoptError
from treeopt.files.bundled import POCKET

if TYPE_CHECKING:
    from treeopt.decode.rules import Rule
    from treeopt.models.base import Base
    from treeopt.models.head_files import LoadedHeads
    from treeopt.texts.prompts import PromptSet

Option = Callable[[Callable[..., Any]], Callable[..., Any]]  # a decorator of a command


def group(*options: Option) -> Option:
    """One decorator for several options, which `--help` shows in this order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_DTYPES = ("float32", "bfloat16", "float16")


class Dtypes(click.ParamType[str]):
    """One dtype or several, separated by commas; the text itself, for `dtypes_of`."""

    name = "[auto|float32|bfloat16|float16],..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        names = str(value).split(",")
        if value != "auto" and (set(names) - {*_DTYPES} or len(set(names)) < len(names)):
            self.fail(f"{value!r} is not auto, or one or several of {', '.join(_DTYPES)}.", param, ctx)
        return str(value)


def dtypes_of(options: dict[str, Any]) -> list[str]:
    """The dtypes that `--dtype` names; the first of them is then the option's value."""
    names: list[str] = options["dtype"].split(",")
    options["dtype"] = names[0]
    return names


def device_options(*, dtype: str = "auto", several: bool = False) -> Option:
    """Options for a model's device and precision; with `several`, --dtype may name several, for `dtypes_of`."""
    dtypes = Dtypes() if several else click.Choice(["auto", *_DTYPES])
    first = "; of several the first is loaded, and each is timed" if several else ""
    return group(
        click.option(
            "--dtype",
            type=dtypes,
            default=dtype,
            metavar=Dtypes.name if several else None,
            help=f"auto: float32 on a CPU{first}.",
        ),
        click.option("--device-map", type=click.Choice(["auto"]), help="auto: divide the model among all GPUs."),
        click.option("--device", default="auto", help="cpu, cuda, cuda:1, ..."),
    )


def loading_options(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Arguments of `load_base` from the options of `device_options`, and from others by their `names`."""
    check_apart("device", "device_map")
    if options["device_map"] is not None and is_one_of_several():
        raise click.UsageError(NO_PROCESSES)
    return {name: options.get(name) for name in ("dtype", "device", "device_map", *names)}


# The option of every command that writes files; see `treeopt.files.outputs`.
force_option = click.option("--force", is_flag=True, help="Replace an existing file, unless it is an input.")


def check_outputs(
    options: Mapping[str, Any], output: str, *, kind: str | None = None, suffixes: tuple[str, ...] = ()
) -> Path:
    """The path of an output, after checking that it may be replaced, is no input of this command, and has a suffix."""
    from treeopt.files.outputs import check_output

    inputs = [value for name in INPUT_OPTIONS for value in several(options.get(name))]
    target = check_output(output, kind=kind, force=options["force"], inputs=inputs)
    if suffixes:
        check_suffix(output, *suffixes)
    return target


base_options = group(  # of commands that need a base model and no heads
    click.option("--model", default=POCKET, help="Base model: folder or hub name."), device_options()
)
adapter_option = click.option("--adapter", help="Folder of a LoRA adapter of the base, from treeopt train --stage 2.")
compile_option = click.option("--compile", is_flag=True, help="Run trees by torch.compile: up to a minute a size.")


def model_options(*, dtype: str, several: bool = False) -> Option:
    """Options of commands that need a base model and perhaps its heads, for `load_models`."""
    model = "Base model: folder or hub name [default: the one in the heads' config]; alone: no heads."
    heads = f"Heads: folder, weights file or hub name [default: the built-in {POCKET}]."
    return group(
        device_options(dtype=dtype, several=several),
        click.option("--heads", help=heads),
        click.option("--model", help=model),
        adapter_option,
    )


def load_models(console: Console, options: Mapping[str, Any], *, with_heads: bool) -> tuple[Base, LoadedHeads | None]:
    """Load the base model and, `with_heads`, the heads that the options name, and print their names.

    The built-in ones are the default.
    """
    from treeopt.files.outputs import check_no_input
    from treeopt.models.given import load_pair

    on = loading_options(options, "adapter")
    loaded: LoadedHeads | None = None
    if with_heads:
        base, loaded = load_pair(options["heads"] or POCKET, options["model"], **on)
        for note in (f"heads    {loaded.heads.num_heads} in {loaded.file}", *loaded.notes):
            console.note(note)
    else:
        base = treeopt.load_base(options["model"] or POCKET, **on)
    if options.get("compile"):
        base = dataclasses.replace(base, compile=True)
    if "output" in options:  # the heads' config may name the base
        check_no_input(options["output"], base.name, *([] if loaded is None else [loaded.name]))
    say_base(console, base)
    return base, loaded


def say_base(console: Console, base: Base) -> None:
    if any(device.type == "cpu" for device in base.devices):
        import torch

        console.made_with["threads"] = torch.get_num_threads()  # sums depend on it
    adapter = "" if base.adapter is None else f" with adapter {base.adapter.name}"
    compiled = ", compiled" if base.compile else ""
    console.note(f"model    {base.name}{adapter}  {base.dtype_name}{compiled} on {', '.join(map(str, base.devices))}")
    console.warn(*base.notes)


_TEMPLATE = "Use the tokenizer's chat template."
chat_template_option = click.option("--chat-template/--no-chat-template", default=True, help=_TEMPLATE)


def text_options(*, new_tokens: int = 128) -> Option:
    most = click.option("--max-new-tokens", type=COUNT, default=new_tokens, help="Most tokens of each answer.")
    return group(most, chat_template_option)


def prompt_options(*, new_tokens: int = 128, limit: str = "all") -> Option:
    """Options for the prompts, and those of `text_options`."""
    prompts = "File (.json .jsonl .txt .parquet), hub data set, or a set of `treeopt list`."
    return group(
        click.option("--prompts", help=prompts),
        click.option("--skip", type=NOT_NEGATIVE, default=0, help="Number of prompts to skip at the start."),
        click.option("--limit", type=COUNT, help=f"Number of prompts [default: {limit}]."),
        text_options(new_tokens=new_tokens),
    )


def chosen_prompts(options: Mapping[str, Any]) -> str:
    """The prompts that the options name; those of the built-in model without --prompts, --heads and --model."""
    if options["prompts"] is None and (options["heads"] or options["model"] or POCKET) != POCKET:
        what = "Missing option '--prompts' (such as alpaca_eval), which all but the built-in models and heads need."
        raise click.UsageError(what)
    return POCKET if options["prompts"] is None else str(options["prompts"])


def say_prompts(console: Console, prompts: PromptSet) -> None:
    console.note(f"prompts  {len(prompts.prompts)} of {prompts.name}  (sha256 {prompts.sha256[:12]})")


step_options = group(  # the batch and the context at which steps are priced by a profile
    click.option("--batch-size", "batch", type=COUNT, default=1, help="Batch size, of those in the profile."),
    click.option("--context", type=COUNT, help="Context, of those in the profile [default: its longest]."),
)
_RANK = f"Largest rank of a level [default: {DEFAULT_TOP_K - 1}]; 9 for engines that draft ten tokens a level."
max_rank_option = click.option("--max-rank", type=NOT_NEGATIVE, help=_RANK)


def ranks_of(options: Mapping[str, Any]) -> int:
    """K, the ranks of a level that trees are built from."""
    return DEFAULT_TOP_K if options["max_rank"] is None else int(options["max_rank"]) + 1


calibration_option = click.option("--calibration", default=CALIBRATION_FILE, help="Traces, from `treeopt calibrate`.")
_ANOTHER = "Refuse traces of texts at another temperature; 0 is greedy [default: that of the traces]."
temperature_option = click.option("--temperature", type=Temperature(), help=_ANOTHER)


def check_temperature_of(calibrations: Iterable[treeopt.Calibration], temperature: float | None) -> None:
    others = {one.temperature for one in calibrations} - {temperature}
    if temperature is None or not others:
        return
    other = others.pop()
    kind = f"texts sampled at temperature {other:g}" if other else "greedy texts"
    what = f"the calibration is of {'given answers, or its temperature is not recorded' if other is None else kind}"
    why = "acceptance is traced on texts of the temperature that they will be decoded at"
    fix = f"treeopt calibrate --temperature {temperature:g}, with the same model and prompts"
    raise TreeoptError(Code.CALIBRATION_INVALID, what, at=f"--temperature {temperature:g}", why=why, fix=fix)


GREEDY, SAMPLE, TYPICAL, REJECTION = "greedy", "sample", "typical", "rejection"
_SAMPLING = ("temperature", "top_k", "top_p", "seed")
_OPTIONS: dict[str, tuple[str, ...]] = {
    GREEDY: (),
    SAMPLE: _SAMPLING,
    TYPICAL: ("temperature", "epsilon", "delta"),
    REJECTION: _SAMPLING,
}
_ALL_TOKENS = {"top_k": 0, "top_p": 1.0}


def acceptance_options(*, rules: tuple[str, ...], what: str) -> Option:
    """The options of an acceptance rule, for `acceptance_rule`."""
    drawn = " and ".join(name for name in rules if _OPTIONS[name] is _SAMPLING)
    temperature = f"[default: 1 for {drawn}, 0.7 for {TYPICAL}]"
    return group(
        click.option("--acceptance", type=click.Choice(rules), default=GREEDY, help=what),
        click.option("--temperature", type=Temperature(), help=temperature),
        click.option("--top-k", type=NOT_NEGATIVE, default=0, help="Of sampling: most likely tokens kept; 0 is all."),
        click.option("--top-p", type=SHARE, default=1.0, help="Of sampling: probability kept."),
        click.option("--seed", type=SEED, help="Seed of sampling."),
        click.option("--epsilon", type=SHARE, help="For typical [default: 0.09]."),
        click.option("--delta", type=SHARE, help="For typical [default: 0.3]."),
    )


def acceptance_rule(options: Mapping[str, Any], *, rules: tuple[str, ...]) -> Rule:
    """The acceptance rule of the options of a command that has these rules."""
    name = options["acceptance"]
    for one in sorted({one for rule in rules for one in _OPTIONS[rule]}.difference(_OPTIONS[name])):
        if options[one] != _ALL_TOKENS.get(one):
            having = " and ".join(rule for rule in rules if one in _OPTIONS[rule])
            raise click.UsageError(f"--{one.replace('_', '-')} belongs to --acceptance {having}")
    given = {one: options[one] for one in _OPTIONS[name] if options[one] is not None}
    try:
        rule: Rule = getattr(treeopt, name.capitalize())(**given)
        return rule
    except ValueError as error:
        raise click.UsageError(str(error)) from error
