"""`--nproc N`: the work of a command in several processes, which it starts itself or torchrun has started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.early_checks import given
from treeopt.cli.following import ARGUMENTS, NO_PROCESSES, keep_team, known_team
from treeopt.defaults import AUTO

if TYPE_CHECKING:
    from treeopt.runs.batches import BatchRun
    from treeopt.runs.processes import Processes

_MOST = 64  # processes of one machine


def nproc_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--nproc N` of a command whose batches can be divided among processes."""
    text = "Processes on this machine that divide the batches; with GPUs, one for each."
    return click.option("--nproc", type=click.IntRange(1, _MOST), default=1, show_default=True, help=text)(function)


def team_of(options: Mapping[str, Any]) -> Processes | None:
    """The processes that divide the work of the running command, of which this is one; None for this one alone.

    Raises:
        click.UsageError: for --nproc under torchrun or with the number of a device, and for several processes with
            `--batch-size auto` or `--device-map`.
        TreeoptError: E402 where there are fewer devices than processes.
    """
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
    from treeopt.cli.app import run
    from treeopt.runs.processes import check_device, launched

    check_device(options["device"], options["nproc"])
    team = launched(run, context.meta[ARGUMENTS], options["nproc"])
    keep_team(context, team)
    return team


def division_of(options: Mapping[str, Any]) -> BatchRun[Any]:
    """The processes that divide what the running command decodes; every one of them runs the rest of it too.

    Raises:
        BaseException: as `team_of`.
    """
    from treeopt.runs.batches import BatchRun

    return BatchRun(team_of(options))
