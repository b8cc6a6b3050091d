"""The options about drafters, and the rules of `--drafter` beside `--heads`, `--model` and `--draft`.

`heads`, `heads+ngram`, `ngram`, `model` and `model+ngram` are drafters that a command makes; any other value of
`--drafter` is a file, and a file of such a name is `./ngram`. A drafter with heads takes `--heads`, one with a draft
model `--draft`, and one without both `--model` alone. Without `--heads` and `--model` the built-in model is used, with
its heads where the drafter has heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.console import Console
from treeopt.cli.early_checks import check_belongs
from treeopt.defaults import HEADS, HEADS_NGRAM, LEARN_TOKENS, LEVELS, MAX_DEPTH, MODEL, MODEL_NGRAM, NGRAM
from treeopt.errors import Code, TreeoptError

if TYPE_CHECKING:
    from treeopt.drafter import Drafter
    from treeopt.models.base import Base
    from treeopt.policy import Plan

WITH_TABLE = (HEADS_NGRAM, NGRAM, MODEL_NGRAM)  # drafters with an n-gram table, counted in the model's text
LEARNED = (*WITH_TABLE, MODEL)  # drafters whose numbers are fitted to the model's text
WITH_DRAFT = (MODEL, MODEL_NGRAM)
_RESERVED = (HEADS, *LEARNED)


def _check_file(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a reserved word where a file is needed."""
    if value in _RESERVED:
        raise click.BadParameter(
            f"a drafter file is needed (treeopt learn); a file of that name is ./{value}", ctx, param
        )
    return value


def drafter_file_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--drafter FILE` of a command that reads a drafter, with the text of its help."""
    return click.option("--drafter", callback=_check_file, help=text)


def learning_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of a drafter that is learned: sampled tokens and levels."""
    for option in (
        click.option(
            "--levels",
            type=click.IntRange(1, MAX_DEPTH),
            default=LEVELS,
            show_default=True,
            help="Of a learned drafter: its deepest draft; at least as many as there are heads.",
        ),
        click.option(
            "--learn-tokens",
            type=click.IntRange(min=0),
            default=LEARN_TOKENS,
            show_default=True,
            help="Sampled to learn a drafter from, beyond the greedy answers.",
        ),
    ):
        function = option(function)
    return function


def chosen_drafter(options: Mapping[str, Any], default: str = HEADS) -> str:
    """The value of --drafter; without it `ngram` with --model alone, else `default`.

    Raises:
        click.UsageError: for a reserved word that contradicts --heads and --model, and for learning options that the
            drafter does not use.
    """
    draft = options["draft"] is not None
    name: str = options["drafter"] or (MODEL if draft else NGRAM if model_alone(options) else default)
    if name in WITH_DRAFT and not draft:
        raise click.UsageError(f"--drafter {name} needs --draft, a smaller model with the same tokenizer")
    if name in _RESERVED and name not in WITH_DRAFT and draft:
        raise click.UsageError(f"--drafter {name} has no draft model: leave out --draft, or --drafter {MODEL_NGRAM}")
    if name in WITH_DRAFT and options["heads"] is not None:
        raise click.UsageError(f"--drafter {name} uses no heads: name the base with --model, and leave out --heads")
    if name == NGRAM and options["heads"] is not None:
        raise click.UsageError(f"--drafter {NGRAM} uses no heads: name the base with --model, and leave out --heads")
    if name in (HEADS, HEADS_NGRAM) and model_alone(options):
        raise click.UsageError(f"--drafter {name} needs --heads; --drafter {NGRAM} needs none")
    check_belongs(("learn_tokens",), f"--drafter {', '.join(WITH_TABLE)}", name in WITH_TABLE)
    check_belongs(("levels",), f"--drafter {', '.join(LEARNED)}", name in LEARNED)
    return name


def draft_option(function: Callable[..., Any], *, default: str = "that of a drafter file") -> Callable[..., Any]:
    """`--draft MODEL`, for `load_draft_model`, with the text of its default."""
    text = f"Draft model: folder or hub name of a smaller model with the same tokenizer [default: {default}]."
    return click.option("--draft", help=text)(function)


def load_draft_model(
    console: Console, options: Mapping[str, Any], base: Base, drafter: Drafter | None = None
) -> Base | None:
    """Load the draft model that --draft names, or else the one that a drafter was made with, and print its name.

    Raises:
        TreeoptError: E223 where --draft is given to a drafter without a draft model; as `load_draft`.
    """
    from treeopt.files.outputs import check_no_input

    name = options["draft"]
    if drafter is not None:
        if name is not None and not drafter.draft:
            what = f"--draft is given, and the drafter ({drafter.name}) has no draft model"
            raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="leave out --draft")
        name = name or drafter.source.get("draft")
        if drafter.draft and name is None:
            what = "the drafter has a draft model, and its file does not name it"
            raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="--draft MODEL")
    if name is None:
        return None
    from treeopt.models.given import load_draft

    try:
        device = str(base.device) if options["device_map"] else options["device"]
        draft = load_draft(name, base, dtype=options["dtype"], device=device)
    except TreeoptError as error:
        if options["draft"] is None:  # the user did not name it
            error.at = f"{name}, the draft model that the drafter's file names"
            error.fix = "--draft MODEL, that draft model in its present place"
        raise
    if "output" in options:
        check_no_input(options["output"], draft.name)
    console.note(f"draft    {draft.name}  {draft.model.num_parameters():,} parameters")
    for warning in draft.notes:
        console.warn(warning)
    return draft


def model_alone(options: Mapping[str, Any]) -> bool:
    """Whether --model is given without --heads."""
    return options["heads"] is None and options["model"] is not None


def uses_heads(options: Mapping[str, Any], name: str, drafter: Drafter | None, plan: Plan | None = None) -> bool:
    """Whether heads are loaded for a drafter or a tree, after checking --heads and --model.

    Args:
        options: of the command.
        name: of the drafter or of the tree, for messages.
        drafter: the record; None for the heads alone.
        plan: the tree without a record.

    Raises:
        TreeoptError: E223 where heads are needed and only --model is given, or --heads is given to a drafter without.
    """
    if drafter is not None and not drafter.num_heads and options["heads"] is not None:
        what = f"{name} drafts without heads, and --heads is given"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="leave out --heads, and name the base with --model")
    needed = drafter.num_heads if drafter is not None else 0 if plan is None else plan.depth
    if needed and model_alone(options):
        what = f"{name} drafts with heads, and only --model is given"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="--heads HEADS, beside --model or alone")
    return not model_alone(options) and (drafter is None or drafter.num_heads > 0)
