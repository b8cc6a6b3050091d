"""`treeopt explain`: why a path is in a tree, or not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from treeopt.cli.console import Console, command
from treeopt.cli.mismatch import warn_edited
from treeopt.defaults import MAX_NODES

if TYPE_CHECKING:
    from treeopt.optimize.explain import Explanation, Prefix
    from treeopt.tree import Path


_RANKS = re.compile(r"\[?\(?\s*(\d{1,9}(?:\s*,\s*\d{1,9})*)?\s*,?\s*\)?\]?")


@command("explain")
@click.argument("tree")
@click.argument("path")
@click.option("--calibration", help="Estimate the values from these traces, and replay the tree with and without PATH.")
def run(console: Console, tree: str, path: str, calibration: str | None) -> None:
    """Show why PATH (ranks such as 0,2) is in TREE (a file, or a name from `treeopt list`), or why it is not.

    A tree of N nodes holds the N - 1 paths of the greatest value. The place is that of the path in this order, the
    cut-off the value of the last place. With --calibration the values are estimated by the method in the tree's file,
    or by Medusa's where it names none, and tokens per step with and without the path are from replay.
    """
    from treeopt.files.calibrations import load_calibration
    from treeopt.files.trees import load_tree
    from treeopt.optimize.explain import explain_path

    record = load_tree(tree)
    warn_edited(console, tree)
    ranks = _ranks(path)
    traces = None if calibration is None else load_calibration(calibration)
    found = explain_path(record, ranks, traces)
    last = found.last
    console.say(f"{list(ranks)} is {'' if last.in_tree else 'not '}in {tree}, which has {record.nodes - 1} paths")
    console.say(f"value     {last.value:.4g}  the estimated probability that all its ranks are right ({found.method})")
    by_value = "" if last.place is None and not last.value else " by value"
    console.say(f"place     {_place(last)}{by_value}; the tree has {found.paths:,} places")
    console.say(f"cut-off   {found.cut_off:.4g}  the value of the last place")
    made = "in by" if found.made_it else "out by"
    tie = "; equal values go to the shallower path, then to the smaller ranks" if not found.margin else ""
    console.say(f"margin    {found.margin:+.4g}  {made} {abs(found.margin):.4g}{tie}")
    if found.gain is not None:
        gain = found.gain
        console.say(f"replay    {gain.first:.4f} tokens per step without it, {gain.second:.4f} with it: {gain}")
    if found.made_it != last.in_tree:
        console.say(f"note      {_why_not(found)}")
    rows = [_cells(prefix) for prefix in found.prefixes]
    console.table(["path", "value", "of the path above", "place", "in the tree"], rows)
    console.result(
        {
            "path": ranks,
            "in_tree": last.in_tree,
            "value": last.value,
            "place": last.place,
            "cut_off": found.cut_off,
            "margin": found.margin,
            "made_it": found.made_it,
            "method": found.method,
            "tokens_per_step": None if found.gain is None else found.gain.as_dict(),
            "prefixes": [vars(prefix) for prefix in found.prefixes],
        }
    )


command = run


def _ranks(text: str) -> Path:
    """The ranks of a path, as on the command line: `0,2`, `[0, 2]` or `(0, 2)`."""
    found = _RANKS.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is not a path of ranks such as 0,2", param_hint="PATH")
    return tuple(int(rank) for rank in found[1].split(",")) if found[1] else ()


def _why_not(found: Explanation) -> str:
    """Why a tree differs from the order of the values."""
    ends = "the tree was built from other traces, or under other limits"
    if found.last.in_tree:
        return f"it is in the tree although its value is not enough: {ends}"
    return f"it is not in the tree although its value is enough: {ends}"


def _place(prefix: Prefix) -> str:
    if prefix.place is not None:
        return f"{prefix.place:,}"
    return f"above {MAX_NODES:,}" if prefix.value else "none: its value is 0"


def _cells(prefix: Prefix) -> list[str]:
    inside = "yes" if prefix.in_tree else "no"
    return [str(list(prefix.path)), f"{prefix.value:.4g}", f"{prefix.share:.4f}", _place(prefix), inside]
