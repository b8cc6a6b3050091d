"""The options of drafters and trees, and what they load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.checks import check_belongs
from treeopt.cli.console import Console
from treeopt.cli.numbers import AUTO, NOT_NEGATIVE, NumberOrAuto
from treeopt.cli.options import Option, group, load_models
from treeopt.cli.processes import is_one_of_several
from treeopt.defaults import (
    BLOCK,
    DRAFT_KINDS,
    EAGLE,
    HEADS,
    HEADS_NGRAM,
    LEVELS,
    MAX_DEPTH,
    MODEL,
    MTP,
    NGRAM,
    WITH_DRAFT,
)
from treeopt.errors import Code, TreeoptError
from treeopt.files.outputs import is_edited

if TYPE_CHECKING:
    from treeopt.models.base import Base
    from treeopt.models.head_files import LoadedHeads
    from treeopt.schedule import Planned
    from treeopt.texts.encode import Encoded


WITH_TABLE = (HEADS_NGRAM, NGRAM, *DRAFT_KINDS.values())  # drafters with an n-gram table, counted in the model's text
LEARNED = (*WITH_TABLE, *DRAFT_KINDS)  # drafters whose numbers are fitted to the model's text
_RESERVED = (HEADS, *LEARNED)


def _check_file(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value in _RESERVED:
        what = f"a drafter file is needed (treeopt learn); a file of that name is ./{value}"
        raise click.BadParameter(what, ctx, param)
    return value


def drafter_file_option(text: str) -> Option:
    """`--drafter FILE` of a command that reads a drafter, with the text of its help."""
    return click.option("--drafter", callback=_check_file, help=text)


_SAMPLED = "Tokens to sample and learn from, besides the greedy answers; auto: until more text does not pay."
_DEEPEST = "Levels of a learned drafter; at least the number of heads, at most those of a block."
learning_options = group(  # of a drafter that is learned
    click.option("--learn-tokens", type=NumberOrAuto(NOT_NEGATIVE), default=AUTO, help=_SAMPLED),
    click.option("--levels", type=click.IntRange(1, MAX_DEPTH), default=LEVELS, help=_DEEPEST),
)


def sampled_tokens(options: Mapping[str, Any]) -> int | None:
    """The value of --learn-tokens as `Learning` takes it."""
    return None if options["learn_tokens"] == AUTO else options["learn_tokens"]


def chosen_drafter(options: Mapping[str, Any], default: str = HEADS) -> str:
    """The value of --drafter; without it `ngram` with --model alone, else `default`."""
    draft, kind = options["draft"] is not None, MODEL
    if draft:
        # Imported here as it imports torch.
        from treeopt.models.draft_files import kind_in_files

        kind = kind_in_files(options["draft"])
    name: str = options["drafter"] or (kind if draft else NGRAM if model_alone(options) else default)
    heads = name in (HEADS, HEADS_NGRAM)
    if name in WITH_DRAFT and not draft:
        raise click.UsageError(f"--drafter {name} needs --draft, {_NEEDED[name.removesuffix('+ngram')]}")
    fitting = (kind, DRAFT_KINDS[kind])
    if name in _RESERVED and draft and name not in fitting:
        raise click.UsageError(
            f"--drafter {name} has no draft such as --draft {options['draft']}, which is for --drafter "
            f"{' or '.join(fitting)}"
        )
    if name in _RESERVED and not heads and options["heads"] is not None:
        raise click.UsageError(f"--drafter {name} uses no heads: name the base with --model, and leave out --heads")
    if heads and model_alone(options):
        raise click.UsageError(f"--drafter {name} needs --heads; --drafter {NGRAM} needs none")
    check_belongs(("learn_tokens",), f"--drafter {', '.join(WITH_TABLE)}", name in WITH_TABLE)
    check_belongs(("levels",), f"--drafter {', '.join(LEARNED)}", name in LEARNED)
    return name


_NEEDED = {
    MODEL: "a smaller model with the same tokenizer",
    EAGLE: "an EAGLE head of the base",
    MTP: "which is mtp for the layer in the base's checkpoint",
    BLOCK: "a block drafter of the base",
}


def draft_option(*, default: str = "that of a drafter file", multiple: bool = False) -> Option:
    """`--draft NAME`, for `load_draft_model`, with the text of its default."""
    text = (
        "What drafts: folder or hub name of a smaller model with the same tokenizer, of an EAGLE head or a block "
        f"drafter; or mtp, the layer in the base's checkpoint [default: {default}]."
    )
    return click.option("--draft", multiple=multiple, help=text)


def load_draft_model(
    console: Console, options: Mapping[str, Any], base: Base, drafter: treeopt.Drafter | None = None
) -> Base | None:
    """Load the draft model that --draft names, or else the one that a drafter was made with, and print its name."""
    name = options["draft"]
    if drafter is not None:
        _check_draft(options, drafter, f"the drafter ({drafter.name}) has no draft model")
        name = name or drafter.source.get("draft")
        if drafter.draft and name is None:
            what = "the drafter has a draft model, and its file does not name it"
            raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="--draft MODEL")
    if name is None:
        return None
    from treeopt.files.outputs import check_no_input
    from treeopt.models.draft_files import load_draft
    from treeopt.models.draft_module import title_of

    try:
        device = str(base.device) if options["device_map"] else options["device"]
        draft = load_draft(name, base, dtype=options["dtype"], device=device)
    except TreeoptError as error:
        if options["draft"] is None:  # the user did not name it
            error.at = f"{name}, the draft model that the drafter's file names"
            error.fix = "--draft MODEL, with the present place of that draft model"
        raise
    if "output" in options:
        check_no_input(options["output"], draft.name)
    console.note(f"draft    {draft.name}  {title_of(draft.model)}{draft.model.num_parameters():,} parameters")
    console.warn(*draft.notes)
    return draft


def _check_draft(options: Mapping[str, Any], drafter: treeopt.Drafter | None, why: str) -> None:
    if options["draft"] is not None and (drafter is None or not drafter.draft):
        raise TreeoptError(Code.DRAFTER_MISMATCH, f"--draft is given, and {why}", fix="leave out --draft")


EMPTY = "empty"
memory_option = click.option("--memory", help="Memory to begin with: file of `treeopt generate --memory`, or `empty`.")


def chosen_memory(console: Console, options: Mapping[str, Any]) -> treeopt.Memory | None:
    """The memory of `memory_option`; one process decodes with it, as its texts are in one order."""
    if options["memory"] is None:
        return None
    if options["nproc"] > 1 or is_one_of_several():
        raise click.UsageError("--memory takes one process")
    memory = treeopt.Memory() if options["memory"] == EMPTY else treeopt.load_memory(options["memory"])
    console.note(f"memory   {memory.num_tokens:,} tokens")
    console.made_with["memory_id"] = memory.id
    return memory


def model_alone(options: Mapping[str, Any]) -> bool:
    return options["heads"] is None and options["model"] is not None


def uses_heads(
    options: Mapping[str, Any], name: str, drafter: treeopt.Drafter | None, plan: Planned | None = None
) -> bool:
    """Whether heads are loaded for a drafter or a tree, after checking --heads and --model."""
    if drafter is not None and not drafter.num_heads and options["heads"] is not None:
        what = f"{name} drafts without heads, and --heads is given"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="leave out --heads, and name the base with --model")
    needed = drafter.num_heads if drafter is not None else 0 if plan is None else plan.depth
    if needed and model_alone(options):
        what = f"{name} drafts with heads, and only --model is given"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="--heads HEADS, beside --model or alone")
    return not model_alone(options) and (drafter is None or drafter.num_heads > 0)


plan_options = group(  # for `chosen_plan`
    click.option("--tree", help="Tree file, or name from `treeopt list` [default: the one that --drafter recommends]."),
    drafter_file_option(
        "Drafter file, from `treeopt learn` [default: the one in the tree file; without --tree and --heads, a drafter "
        "that nothing was learned for]."
    ),
    draft_option(),
)


@dataclass(frozen=True)
class ChosenPlan:
    """The tree or policy of a command, with its drafter, and the name of its file; None where nothing was learned."""

    name: str
    plan: Planned | None
    drafter: treeopt.Drafter | None


def chosen_plan(options: Mapping[str, Any]) -> ChosenPlan:
    """The plan that --tree and --drafter name, checked before any model is loaded."""
    from treeopt.files.schedules import as_plan_for

    tree, drafter = options["tree"], options["drafter"]
    if tree is None and drafter is None:
        if options["heads"] is not None:
            raise click.UsageError("--heads needs --tree, or --drafter with the tree that it recommends")
        if options["draft"] is not None and (options.get("memory") or options.get("memory_file")):
            raise click.UsageError("--memory needs --drafter, of a drafter with an n-gram table")
        return ChosenPlan(options["draft"] or "the text so far", None, None)
    plan, record = as_plan_for(tree, drafter)
    from treeopt.drafting.plans import check_plan  # imports torch: after the files are read

    check_plan(plan, record)
    _check_draft(options, record, f"{tree or drafter} was not made for a draft model")
    return ChosenPlan(tree or drafter, plan, record)


@dataclass(frozen=True)
class LoadedPlan:
    """A plan and all that decodes with it."""

    base: Base
    heads: LoadedHeads | None
    plan: Planned
    drafter: treeopt.Drafter | None
    draft: Base | None


def named_models(options: Mapping[str, Any], chosen: ChosenPlan) -> dict[str, Any]:
    """What the drafter's file names where the options do not: base and heads, and the dtype of its tree."""
    if chosen.drafter is None:
        return {}
    named, found = chosen.drafter.source, {}
    if options["model"] is None and options["heads"] is None:
        heads = named.get("heads") or None if chosen.drafter.num_heads else None
        found = {"model": named.get("model"), "heads": heads}
    if options["dtype"] == "auto" and options["tree"] is None:
        found["dtype"] = chosen.drafter.timed_dtype or "auto"
    return found


def load_for_plan(console: Console, options: Mapping[str, Any], chosen: ChosenPlan) -> LoadedPlan:
    """Load the models that a plan needs, and warn where it was made for others; the plan where none was chosen."""
    from treeopt.drafting.plans import untrained
    from treeopt.models.origins import drafter_for_others, made_for_others, models_ids, timed_for_others
    from treeopt.verify.probe import check_trees

    plan, drafter = chosen.plan, chosen.drafter
    with_heads = plan is not None and uses_heads(options, chosen.name, drafter, plan)
    base, loaded = load_models(console, options, with_heads=with_heads)
    check_trees(base)
    draft = load_draft_model(console, options, base, drafter)
    if plan is None:
        plan, drafter = untrained(base, draft)
        console.note(f"drafter  nothing was learned: drafts from {chosen.name} (treeopt learn makes a better one)")
    warn_edited(console, options["tree"])
    here = models_ids(base, loaded, draft)
    console.warn(*made_for_others(chosen.name, plan.source.get("calibration") or {}, here))
    console.warn(*drafter_for_others(drafter, here))
    if options["tree"] is None and drafter is not None:
        console.warn(*timed_for_others(drafter, base))
    return LoadedPlan(base, loaded, plan, drafter, draft)


def load_with_prompts(
    console: Console, options: Mapping[str, Any], chosen: ChosenPlan, source: str
) -> tuple[LoadedPlan, Encoded]:
    """The models of a plan, and the prompts that the options choose from a source, as token ids."""
    from treeopt.texts.encode import encode_prompts, joins_turns

    prompts = treeopt.load_prompts(source, skip=options["skip"], limit=options["limit"])
    used = load_for_plan(console, options, chosen)
    template = options["chat_template"]
    encoded = encode_prompts(used.base, prompts, options["max_new_tokens"], chat_template=template)
    if joins_turns(used.base, encoded.texts, chat_template=template):
        console.note("no chat template: each turn follows the answer before it on a new line")
    return used, encoded


def warn_edited(console: Console, *names: str | None) -> None:
    """Warn of each tree file that was edited by hand: its figures are not those that treeopt wrote."""
    for name in names:
        if name is not None and is_edited(Path(name)):
            console.warn(f"warning: {name} was edited by hand, so its figures may not be those of its calibration")


def warn_no_trees(console: Console, base: Base, but: str) -> None:
    """Warn where a base model cannot verify trees, for commands whose output is useful without trees."""
    from treeopt.verify.probe import check_trees

    try:
        check_trees(base)
    except TreeoptError as error:
        console.warn(f"warning: {error.what} ({error.why}); {but}")
