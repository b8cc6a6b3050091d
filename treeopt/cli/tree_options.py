"""The options --tree and --drafter of commands that decode, and the model for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.console import Console
from treeopt.cli.drafter_options import draft_option, drafter_file_option, load_draft_model, uses_heads
from treeopt.cli.mismatch import warn_edited, warn_other_drafter, warn_other_dtype, warn_other_tree
from treeopt.cli.options import load_models
from treeopt.errors import Code, TreeoptError

if TYPE_CHECKING:
    from treeopt.drafter import Drafter
    from treeopt.models.base import Base
    from treeopt.models.head_files import LoadedHeads
    from treeopt.policy import Plan
    from treeopt.texts.encode import Encoded


def plan_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options --tree, --drafter and --draft, for `chosen_plan`."""
    drafter = drafter_file_option(
        "Drafter file, from `treeopt learn` [default: the one in the tree file; without --tree and --heads, a drafter "
        "that nothing was learned for]."
    )
    tree = click.option(
        "--tree", help="Tree file, or a name from `treeopt list` [default: the one that --drafter recommends]."
    )
    return tree(drafter(draft_option(function)))


@dataclass(frozen=True)
class ChosenPlan:
    """The tree or policy of a command, with its drafter, and the name of its file; None where nothing was learned."""

    name: str
    plan: Plan | None
    drafter: Drafter | None


def chosen_plan(options: Mapping[str, Any]) -> ChosenPlan:
    """The plan that --tree and --drafter name, checked before any model is loaded.

    Raises:
        click.UsageError: where --heads is given without them.
        TreeoptError: as `as_plan_for` and `check_plan`.
    """
    from treeopt.decode.plans import as_plan_for

    tree, drafter = options["tree"], options["drafter"]
    if tree is None and drafter is None:
        if options["draft"] is not None:
            raise click.UsageError("--draft needs --drafter, from `treeopt learn --draft MODEL`")
        if options["heads"] is not None:
            raise click.UsageError("--heads needs --tree, or --drafter with the tree that it recommends")
        return ChosenPlan("the text so far", None, None)
    plan, record = as_plan_for(tree, drafter)
    from treeopt.drafting.plans import check_plan  # imports torch: after the files are read

    check_plan(plan, record)
    if options["draft"] is not None and (record is None or not record.draft):
        what = f"--draft is given, and {tree or drafter} was not made for a draft model"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="leave out --draft")
    return ChosenPlan(tree or drafter, plan, record)


@dataclass(frozen=True)
class LoadedPlan:
    """A plan and all that decodes with it."""

    base: Base
    heads: LoadedHeads | None
    plan: Plan
    drafter: Drafter | None
    draft: Base | None


def load_for_plan(console: Console, options: Mapping[str, Any], chosen: ChosenPlan) -> LoadedPlan:
    """Load the models that a plan needs, and warn where it was made for others; the plan where none was chosen."""
    from treeopt.drafting.plans import untrained
    from treeopt.verify.probe import check_trees

    plan, drafter = chosen.plan, chosen.drafter
    with_heads = plan is not None and uses_heads(options, chosen.name, drafter, plan)
    base, loaded = load_models(console, options, with_heads=with_heads)
    check_trees(base)
    if plan is None:
        plan, drafter = untrained(base)
        console.note("drafter  nothing was learned: drafts from the text so far (treeopt learn makes a better one)")
    warn_edited(console, options["tree"])
    warn_other_tree(console, chosen.name, plan, base, loaded)
    draft = load_draft_model(console, options, base, drafter)
    warn_other_drafter(console, drafter, base, loaded, draft)
    if options["tree"] is None:
        warn_other_dtype(console, drafter, base)
    return LoadedPlan(base, loaded, plan, drafter, draft)


def load_with_prompts(
    console: Console, options: Mapping[str, Any], chosen: ChosenPlan, source: str
) -> tuple[LoadedPlan, Encoded]:
    """The models of a plan, and the prompts that the options choose from a source, as token ids."""
    from treeopt.texts.encode import encode_prompts, joins_turns
    from treeopt.texts.prompts import load_prompts

    prompts = load_prompts(source, skip=options["skip"], limit=options["limit"])
    used = load_for_plan(console, options, chosen)
    template = options["chat_template"]
    encoded = encode_prompts(used.base, prompts, options["max_new_tokens"], chat_template=template)
    if joins_turns(used.base, encoded.texts, chat_template=template):
        console.note("no chat template: each turn follows the answer before it on a new line")
    return used, encoded
