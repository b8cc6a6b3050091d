"""Several processes of one run: `--nproc N`, torchrun, and that the first process alone prints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.checks import given
from treeopt.defaults import AUTO

if TYPE_CHECKING:
    from treeopt.runs.processes import Processes
    from treeopt.runs.work import BatchRun


NO_PROCESSES = "--device-map divides one model among all devices: leave it out, or run one process"
PROGRAM = "treeopt.program"  # in a context's meta: the function that runs the program, and its arguments
_TEAM = "treeopt.team"  # there too: the processes of the run


def is_one_of_several() -> bool:
    """Whether torchrun, another launcher of torch's processes, or `--nproc` started this process with others."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def follows() -> bool:
    """Whether this process is one of several, and not the first, so that it prints nothing."""
    return is_one_of_several() and os.environ.get("RANK", "0") != "0"


def known_team(context: click.Context) -> Processes | None:
    """The processes of a command; None where it runs in one, and before they are joined."""
    return context.meta.get(_TEAM)


def _keep_team(context: click.Context, team: Processes) -> None:
    """Note the processes of a command, which end with it."""
    context.meta[_TEAM] = team
    context.call_on_close(team.close)


def join_team(context: click.Context) -> None:
    """Join the processes of a launcher, where there are several and the command can divide its work."""
    if "nproc" in context.params and is_one_of_several():
        from treeopt.runs.processes import joined

        _keep_team(context, joined())


def is_passed_on(context: click.Context, report: Mapping[str, Any]) -> bool:
    """Whether the first process prints an error by which this one ends."""
    team = known_team(context)
    return team is not None and team.rank > 0 and team.fail(report)


nproc_option = click.option(  # of a command whose batches can be divided among processes
    "--nproc",
    type=click.IntRange(1, 64),
    default=1,
    help="Processes on this machine that divide the batches; with GPUs, one for each.",
)


def team_of(options: Mapping[str, Any]) -> Processes | None:
    """The processes that divide the work of the running command, of which this is one; None for this one alone."""
    context = click.get_current_context()
    team = known_team(context)
    if options["device_map"] is not None and (team is not None or options["nproc"] > 1):
        raise click.UsageError(NO_PROCESSES)
    if options["batch_size"] == AUTO and (team is not None or options["nproc"] > 1):
        raise click.UsageError(f"several processes need a --batch-size that is a number: with {AUTO} they could differ")
    if team is not None:
        from treeopt.runs.processes import is_launched

        if given("nproc") and not is_launched():
            raise click.UsageError(f"torchrun has started {team.size} processes: leave out --nproc")
        return team
    if options["nproc"] == 1:
        return None
    kind, _, number = options["device"].partition(":")
    if number:
        raise click.UsageError(f"each of {options['nproc']} processes takes its own device: give --device {kind}")
    from treeopt.runs.processes import check_device, launched

    check_device(options["device"], options["nproc"])
    main, arguments = context.meta[PROGRAM]
    team = launched(main, arguments, options["nproc"])
    _keep_team(context, team)
    return team


def division_of(options: Mapping[str, Any]) -> BatchRun[Any]:
    """The processes that divide what the running command decodes; every one of them runs the rest of it too."""
    from treeopt.runs.work import BatchRun

    return BatchRun(team_of(options))
