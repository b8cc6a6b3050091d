"""`treeopt render`: a tree as a picture."""

from __future__ import annotations

from pathlib import Path

import click

from treeopt.cli.console import Console, command
from treeopt.cli.options import check_outputs, force_option
from treeopt.files.atomic import write_bytes
from treeopt.files.marks import PICTURE, write_marked
from treeopt.files.trees import load_tree


@command("render")
@click.argument("tree")
@click.option("-o", "--output", help="an .svg or .dot file; .png, .pdf, ... need graphviz [default: TREE.svg]")
@force_option
@click.option("--title", default="", help="Heading of the picture.")
def run(console: Console, tree: str, output: str | None, title: str, force: bool) -> None:
    """Draw TREE (a file, or a name from `treeopt list`): one column per level, width and colour by a node's value."""
    target = f"{Path(tree).stem}.svg" if output is None else output
    file_format = Path(target).suffix.removeprefix(".").lower() or "svg"
    # Only text formats hold the mark; other formats need --force to replace a file.
    marked = file_format in ("svg", "dot", "gv")
    record = load_tree(tree)  # before the output is checked, because an invalid tree is the first error
    check_outputs({"tree": tree, "force": force}, target, kind=PICTURE if marked else None)
    from treeopt.view.picture import render

    picture = render(record, file_format, title=title)
    if marked:
        write_marked(target, picture.decode(), PICTURE)
    else:
        write_bytes(target, picture)
    console.note(f"wrote {target}")
    console.result({"nodes": record.nodes, "depth": record.depth, "output": target})


command = run
