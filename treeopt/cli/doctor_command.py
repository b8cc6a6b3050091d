"""`treeopt doctor`: whether treeopt can be used here, and what to do where it cannot."""

from __future__ import annotations

import dataclasses

import click

from treeopt.cli.console import Console, command
from treeopt.errors import EXIT_ENVIRONMENT


@command("doctor")
@click.pass_context
def run(context: click.Context, console: Console) -> None:
    """Check the installation: versions, device, memory, hub, caches, and a text decoded by the built-in model.

    ok: it works. warn: some commands or options need it. fail: treeopt cannot be used; the exit status is then 4. One
    short request is sent to the hub, and none where HF_HUB_OFFLINE is set.
    """
    from treeopt.evaluate.environment import FAIL, check_environment

    checks = list(check_environment())
    console.table(["check", "status", "found"], [[one.name, one.status, one.found] for one in checks])
    for one in checks:
        if one.fix:
            console.say(f"{one.status} {one.name}: {one.fix}")
    failed = [one.name for one in checks if one.status == FAIL]
    console.result({"usable": not failed, "checks": [dataclasses.asdict(one) for one in checks]})
    if failed:
        context.exit(EXIT_ENVIRONMENT)


command = run
