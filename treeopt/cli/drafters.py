"""The options of drafters and trees, what they load, and warnings where it was made for another model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.checks import check_belongs
from treeopt.cli.console import Console
from treeopt.cli.numbers import NOT_NEGATIVE
from treeopt.cli.options import Option, group, load_models
from treeopt.defaults import HEADS, HEADS_NGRAM, LEARN_TOKENS, LEVELS, MAX_DEPTH, MODEL, MODEL_NGRAM, NGRAM
from treeopt.errors import Code, TreeoptError
from treeopt.files.outputs import is_edited

if TYPE_CHECKING:
    from treeopt.models.base import Base
    from treeopt.models.head_files import LoadedHeads
    from treeopt.policy import Plan
    from treeopt.texts.encode import Encoded


WITH_TABLE = (HEADS_NGRAM, NGRAM, MODEL_NGRAM)  # drafters with an n-gram table, counted in the model's text
LEARNED = (*WITH_TABLE, MODEL)  # drafters whose numbers are fitted to the model's text
WITH_DRAFT = (MODEL, MODEL_NGRAM)
_RESERVED = (HEADS, *LEARNED)


def _check_file(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value in _RESERVED:
        raise click.BadParameter(
            f"a drafter file is needed (treeopt learn); a file of that name is ./{value}", ctx, param
        )
    return value


def drafter_file_option(text: str) -> Option:
    """`--drafter FILE` of a command that reads a drafter, with the text of its help."""
    return click.option("--drafter", callback=_check_file, help=text)


_SAMPLED = "Sampled to learn a drafter from, beyond the greedy answers."
_DEEPEST = "Of a learned drafter: its deepest draft; at least as many as there are heads."
learning_options = group(  # of a drafter that is learned
    click.option("--learn-tokens", type=NOT_NEGATIVE, default=LEARN_TOKENS, help=_SAMPLED),
    click.option("--levels", type=click.IntRange(1, MAX_DEPTH), default=LEVELS, help=_DEEPEST),
)


def chosen_drafter(options: Mapping[str, Any], default: str = HEADS) -> str:
    """The value of --drafter; without it `ngram` with --model alone, else `default`."""
    draft = options["draft"] is not None
    name: str = options["drafter"] or (MODEL if draft else NGRAM if model_alone(options) else default)
    heads = name in (HEADS, HEADS_NGRAM)
    if name in WITH_DRAFT and not draft:
        raise click.UsageError(f"--drafter {name} needs --draft, a smaller model with the same tokenizer")
    if name in _RESERVED and name not in WITH_DRAFT and draft:
        raise click.UsageError(f"--drafter {name} has no draft model: leave out --draft, or --drafter {MODEL_NGRAM}")
    if name in _RESERVED and not heads and options["heads"] is not None:
        raise click.UsageError(f"--drafter {name} uses no heads: name the base with --model, and leave out --heads")
    if heads and model_alone(options):
        raise click.UsageError(f"--drafter {name} needs --heads; --drafter {NGRAM} needs none")
    check_belongs(("learn_tokens",), f"--drafter {', '.join(WITH_TABLE)}", name in WITH_TABLE)
    check_belongs(("levels",), f"--drafter {', '.join(LEARNED)}", name in LEARNED)
    return name


def draft_option(*, default: str = "that of a drafter file") -> Option:
    """`--draft MODEL`, for `load_draft_model`, with the text of its default."""
    text = f"Draft model: folder or hub name of a smaller model with the same tokenizer [default: {default}]."
    return click.option("--draft", help=text)


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


def _check_draft(options: Mapping[str, Any], drafter: treeopt.Drafter | None, why: str) -> None:
    if options["draft"] is not None and (drafter is None or not drafter.draft):
        raise TreeoptError(Code.DRAFTER_MISMATCH, f"--draft is given, and {why}", fix="leave out --draft")


def model_alone(options: Mapping[str, Any]) -> bool:
    return options["heads"] is None and options["model"] is not None


def uses_heads(
    options: Mapping[str, Any], name: str, drafter: treeopt.Drafter | None, plan: Plan | None = None
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
    plan: Plan | None
    drafter: treeopt.Drafter | None


def chosen_plan(options: Mapping[str, Any]) -> ChosenPlan:
    """The plan that --tree and --drafter name, checked before any model is loaded."""
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
    _check_draft(options, record, f"{tree or drafter} was not made for a draft model")
    return ChosenPlan(tree or drafter, plan, record)


@dataclass(frozen=True)
class LoadedPlan:
    """A plan and all that decodes with it."""

    base: Base
    heads: LoadedHeads | None
    plan: Plan
    drafter: treeopt.Drafter | None
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
    warn_made_for_other(console, chosen.name, plan.source.get("calibration") or {}, _ids(base, loaded))
    draft = load_draft_model(console, options, base, drafter)
    warn_other_drafter(console, drafter, base, loaded, draft)
    if options["tree"] is None and drafter is not None:
        _warn_other_dtype(console, drafter, base)
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


_FLOAT32 = "float32"  # the dtype of older files, which do not state it


def warn_edited(console: Console, *names: str | None) -> None:
    """Warn of each tree file that was edited by hand: its figures are not those that treeopt wrote."""
    for name in names:
        if name is not None and is_edited(Path(name)):
            console.warn(f"warning: {name} was edited by hand, so its figures may not be those of its calibration")


def warn_other_heads(
    console: Console, calibration: treeopt.Calibration, profile: treeopt.LatencyProfile | None
) -> None:
    """Warn where a profile was measured with another base or other heads than a calibration, or was not measured."""
    if profile is None:
        return
    made = profile.provenance
    if made.get("modelled"):
        console.warn(
            f"warning: the seconds are modelled ({made.get('model')} on {made.get('device')}), not measured; "
            f"the traces are of {calibration.provenance.model}"
        )
    warn_made_for_other(console, "the profile", made, ids_of_traces(calibration))


def warn_other_drafter(
    console: Console, drafter: treeopt.Drafter | None, base: Base, loaded: LoadedHeads | None, draft: Base | None = None
) -> None:
    """Warn where a drafter was learned with another base, other heads or another draft model than these."""
    if drafter is None:
        return
    warn_made_for_other(console, "the drafter", drafter.source, _ids(base, loaded))
    same_dtype = draft is not None and drafter.source.get("dtype", _FLOAT32) == draft.dtype_name
    if draft is not None and same_dtype and drafter.draft != draft.fingerprint:
        console.warn(
            f"warning: the drafter was made for another draft model ({drafter.draft}, this is {draft.fingerprint})"
        )


def _warn_other_dtype(console: Console, drafter: treeopt.Drafter, base: Base) -> None:
    """Warn where the recommended tree of a drafter was chosen by steps in another dtype than the base's."""
    timed = drafter.timed_dtype
    if timed not in ("", base.dtype_name):
        console.warn(
            f"warning: the drafter's tree is the fastest in {timed}; the model is in {base.dtype_name}, where another "
            f"size may be faster, or none (--dtype {timed}, or treeopt learn --dtype {base.dtype_name})"
        )
    elif drafter.timed_compiled and not base.compile:
        console.note("the drafter's tree was timed with --compile, and is the fastest with it")


Ids = tuple[str, str, str]  # of the base model, its dtype, and of the heads: empty without heads


def _ids(base: Base, loaded: LoadedHeads | None) -> Ids:
    return base.fingerprint, base.dtype_name, loaded.fingerprint if loaded else ""


def ids_of_traces(calibration: treeopt.Calibration) -> Ids:
    traced = calibration.provenance
    return traced.model_id, traced.settings.get("dtype", _FLOAT32), traced.heads_id


def warn_made_for_other(console: Console, name: str, source: Mapping[str, Any], here: Ids) -> None:
    """Warn where the ids in `source` are not those of the base, of which only ids in one dtype agree, and the heads."""
    model_id, dtype, heads_id = here
    others = []
    if source.get("dtype", _FLOAT32) == dtype and source.get("model_id") not in (None, "", model_id):
        others.append(f"another base model ({source['model_id']}, this is {model_id})")
    made_for = source.get("heads_id", heads_id)  # empty: without heads
    if made_for != heads_id:
        these = f"these are {heads_id}" if heads_id else "there are none here"
        others.append(f"other heads ({made_for}, {these})" if made_for else f"no heads ({these})")
    if others:
        console.warn(f"warning: {name} was made for {' and '.join(others)}")


def warn_no_trees(console: Console, base: Base, but: str) -> None:
    """Warn where a base model cannot verify trees, for commands whose output is useful without trees."""
    from treeopt.verify.probe import check_trees

    try:
        check_trees(base)
    except TreeoptError as error:
        console.warn(f"warning: {error.what} ({error.why}); {but}")
