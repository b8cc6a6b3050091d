"""The output of a command that runs in several processes: the first prints everything, errors of the others too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from treeopt.runs.processes import Processes

NO_PROCESSES = "--device-map divides one model among all devices: leave it out, or run one process"
ARGUMENTS = "treeopt.arguments"  # in a context's meta: those of the program
_TEAM = "treeopt.team"  # there too: the processes of the run


def is_one_of_several() -> bool:
    """Whether torchrun, another launcher of torch's processes, or `--nproc` started this process with others."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def follows() -> bool:
    """Whether this process is one of several, and not the first, so that it prints nothing."""
    return is_one_of_several() and os.environ.get("RANK", "0") != "0"


def known_team(context: click.Context) -> Processes | None:
    """The processes of a command; None where it runs in one, and before they are joined."""
    team: Processes | None = context.meta.get(_TEAM)
    return team


def keep_team(context: click.Context, team: Processes) -> None:
    """Note the processes of a command, which end with it."""
    context.meta[_TEAM] = team
    context.call_on_close(team.close)


def join_team(context: click.Context) -> None:
    """Join the processes of a launcher, where there are several and the command can divide its work."""
    if "nproc" in context.params and is_one_of_several():
        from treeopt.runs.processes import joined

        keep_team(context, joined())


def is_passed_on(context: click.Context, report: Mapping[str, Any]) -> bool:
    """Whether the first process prints an error by which this one ends."""
    team = known_team(context)
    return team is not None and team.rank > 0 and team.fail(report)
