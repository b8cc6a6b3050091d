"""The options that several commands share, and what is loaded or refused by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.console import Console
from treeopt.files.bundled import POCKET
from treeopt.files.calibrations import DEFAULT_FILE
from treeopt.files.outputs import check_no_input, check_output

if TYPE_CHECKING:
    from treeopt.models.base import Base
    from treeopt.models.layouts import LoadedHeads

# Options that name what a command reads, under every name that a command has for it.
_INPUTS = (
    *("heads", "model", "prompts", "responses", "exclude", "data"),
    *("tree", "calibration", "calibrations", "drafter", "profile"),
)


def device_options(function: Callable[..., Any], *, dtype: str = "auto") -> Callable[..., Any]:
    """The options that say on what, and in which precision, a model runs."""
    dtypes = click.Choice(["auto", "float32", "bfloat16", "float16"])
    for option in (
        click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, ..."),
        click.option("--dtype", type=dtypes, default=dtype, show_default=True, help="auto: float32 on a CPU."),
    ):
        function = option(function)
    return function


def force_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option of every command that writes; `treeopt.files.outputs` says what it decides."""
    shown = "Replace a file that exists, unless it is an input."
    return click.option("--force", is_flag=True, help=shown)(function)


def check_outputs(options: Mapping[str, Any], output: str, *, kind: str | None = None) -> Path:
    """The path of an output; refused where it must not be replaced, or is an input of this command. Before any work."""
    inputs = [value for name in _INPUTS for value in _several(options.get(name))]
    return check_output(output, kind=kind, force=options["force"], inputs=inputs)


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def base_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of commands that need a base model alone."""
    model = click.option("--model", default=POCKET, show_default=True, help="Base model: folder or hub name.")
    return model(device_options(function))


def model_options(function: Callable[..., Any], *, dtype: str) -> Callable[..., Any]:
    """The options of commands that need heads and their base model; `load_models` reads them."""
    for option in (
        click.option("--model", help="Base model: folder or hub name [default: the one in the heads' config]."),
        click.option("--heads", help=f"Heads: folder, weights file or hub name [default: the built-in {POCKET}]."),
    ):
        function = option(function)
    return device_options(function, dtype=dtype)


def load_models(console: Console, options: Mapping[str, Any]) -> tuple[Base, LoadedHeads]:
    """The base model and heads that the options name, said on the console."""
    from treeopt.models.pair import load_pair

    heads, model = _chosen_heads(options), options["model"]
    base, loaded = load_pair(heads, model, dtype=options["dtype"], device=options["device"])
    if "output" in options:  # the base is known only now where the heads' config names it
        check_no_input(options["output"], base.name, loaded.name)
    for note in (f"heads    {loaded.heads.num_heads} in {loaded.file}", *loaded.notes):
        console.note(note)
    say_base(console, base)
    return base, loaded


def _chosen_heads(options: Mapping[str, Any]) -> str:
    """The heads that the options name; the built-in ones where neither heads nor a model are given."""
    if options["heads"] is None and options["model"] is not None:
        raise click.UsageError("--model needs --heads: which heads does it draft with?")
    return POCKET if options["heads"] is None else str(options["heads"])


def say_base(console: Console, base: Base) -> None:
    """Say which base model was loaded, and how it runs."""
    console.note(f"model    {base.name}  {base.dtype_name} on {base.device}")
    for warning in base.notes:
        console.warn(warning)


def text_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say how prompts become token ids, and how far they are continued."""
    for option in (
        click.option("--chat-template/--no-chat-template", default=True, help="Use the tokenizer's, where it has one."),
        click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True),
    ):
        function = option(function)
    return function


def prompt_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say which prompts are continued, and how far."""
    function = text_options(function)
    for option in (
        click.option("--limit", type=click.IntRange(min=1), help="Only so many prompts."),
        click.option("--skip", type=click.IntRange(min=0), default=0, help="Leave out the first so many prompts."),
        click.option("--prompts", help="File (.json .jsonl .txt .parquet), hub data set, or a set of `treeopt list`."),
    ):
        function = option(function)
    return function


def chosen_prompts(options: Mapping[str, Any]) -> str:
    """The prompts that the options name: the built-in model's own where neither prompts nor heads are given."""
    if options["prompts"] is None and _chosen_heads(options) != POCKET:
        raise click.UsageError("Missing option '--prompts' (such as alpaca_eval), which other heads than pocket need.")
    return POCKET if options["prompts"] is None else str(options["prompts"])


tree_option = click.option("--tree", required=True, help="Tree file, or a name from `treeopt list`.")
drafter_option = click.option("--drafter", help="Drafter file, by `treeopt learn` [default: the one the tree names].")
calibration_option = click.option(
    "--calibration", default=DEFAULT_FILE, show_default=True, help="Traces, by `treeopt calibrate`."
)
