"""`treeopt render`: a tree as a picture."""

from __future__ import annotations

from pathlib import Path

import click

from treeopt.cli.console import Console, command
from treeopt.files.atomic import write_bytes
from treeopt.files.outputs import check_output
from treeopt.files.trees import load_tree


@command("render")
@click.argument("tree")
@click.option("-o", "--output", help=".svg and .dot need no program; .png, .pdf, ... need graphviz [default: TREE.svg]")
@click.option("--title", default="", help="Above the picture.")
def run(console: Console, tree: str, output: str | None, title: str) -> None:
    """Draw TREE (a file, or a name from `treeopt list`): a column a head, width and colour by a node's value."""
    target = Path(output or f"{Path(tree).stem}.svg")
    record = load_tree(tree)  # first: what is no tree is not an output either
    check_output(target, tree)
    from treeopt.view.picture import render

    write_bytes(target, render(record, target.suffix.removeprefix(".") or "svg", title=title))
    console.note(f"wrote {target}")
    console.result({"nodes": record.nodes, "depth": record.depth, "output": str(target)})


command = run
