"""`treeopt diff`: what differs between two trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from treeopt.cli.console import Console, command
from treeopt.cli.mismatch import warn_edited
from treeopt.errors import counted

if TYPE_CHECKING:
    from treeopt.tree import Path, Tree


_SHOWN = 40  # paths of each side


@command("diff")
@click.argument("first")
@click.argument("second")
@click.option("--calibration", help="Replay both trees over these traces.")
def run(console: Console, first: str, second: str, calibration: str | None) -> None:
    """Compare the trees FIRST and SECOND (files, or names from `treeopt list`).

    Paths with - are in FIRST alone, with + in SECOND alone. With --calibration both are replayed over the same traces;
    the interval of the difference in tokens per step is a paired bootstrap over texts.
    """
    from treeopt.files.calibrations import load_calibration
    from treeopt.files.trees import load_tree
    from treeopt.optimize.intervals import compare_trees

    one, other = load_tree(first), load_tree(second)
    warn_edited(console, first, second)
    traces = None if calibration is None else load_calibration(calibration)
    found = compare_trees(one, other, traces)
    for sign, name, tree in (("-", first, one), ("+", second, other)):
        size = f"{counted(tree.nodes, 'node')}, depth {tree.depth}, {counted(len(tree.leaves), 'leaf')}"
        console.say(f"{sign} {name}: {size}")
    shared = counted(found.shared, "path")
    console.say(f"{shared} in both, {len(found.first_only)} removed, {len(found.second_only)} added")
    _say_paths(console, "-", one, found.first_only)
    _say_paths(console, "+", other, found.second_only)
    gain = found.gain
    if gain is not None:
        console.say(f"tokens per step by replay over {calibration}: {gain.first:.4f} and {gain.second:.4f}, {gain}")
    console.result(
        {
            "shared": found.shared,
            "removed": found.first_only,
            "added": found.second_only,
            "nodes": [one.nodes, other.nodes],
            "depth": [one.depth, other.depth],
            "tokens_per_step": None if gain is None else gain.as_dict(),
        }
    )


command = run


def _say_paths(console: Console, sign: str, tree: Tree, paths: Sequence[Path]) -> None:
    values = dict(zip(tree.paths, tree.values or (), strict=False))
    for path in paths[:_SHOWN]:
        value = f"  {values[path]:.4f}" if path in values else ""
        console.say(f"{sign} {list(path)}{value}")
    if len(paths) > _SHOWN:
        console.say(f"{sign} and {len(paths) - _SHOWN} more (--json lists all)")
