"""Where a result of `--json` comes from: the command, and ids of the models and of the tree it was measured with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.configuration import command_line

if TYPE_CHECKING:
    from treeopt.models.base import Base
    from treeopt.models.head_files import LoadedHeads
    from treeopt.policy import Plan


def origin_of(
    base: Base, loaded: LoadedHeads | None, draft: Base | None = None, plan: Plan | None = None
) -> dict[str, Any]:
    """The keys `command` and `made_with` of a result of the running command.

    Args:
        base: the base model.
        loaded: its heads; None without.
        draft: the draft model; None without.
        plan: the tree or policy; None where the result is not of one.
    """
    from treeopt.files.policies import plan_id

    made_with = {
        "model": base.name,
        "model_id": base.fingerprint,
        "dtype": base.dtype_name,
        "heads_id": "" if loaded is None else loaded.fingerprint,
        "draft_id": "" if draft is None else draft.fingerprint,
        **({} if plan is None else {"drafter_id": plan.drafter, "tree_id": plan_id(plan)}),
    }
    return {"command": command_line(click.get_current_context()), "made_with": made_with}
