"""`treeopt compile`: a tree to tensors."""

from pathlib import Path

import click

import treeopt
from treeopt.cli.console import Console, command
from treeopt.cli.options import check_outputs, force_option
from treeopt.facts import picked
from treeopt.files.outputs import BUFFERS


@command("compile")
@click.argument("tree")
@force_option
@click.option("-o", "--output", help="[default: TREE.safetensors]")
def run(console: Console, tree: str, output: str | None, force: bool) -> None:
    """Turn TREE (a file, or a name from `treeopt list`) into attention mask, position ids and indices.

    A tree of a drafter other than `heads` is refused: its ranks are not those of the heads.
    """
    target = f"{Path(tree).stem}.safetensors" if output is None else output
    record = treeopt.load_tree(tree)  # before the output is checked, because an invalid tree is the first error
    check_outputs({"tree": tree, "force": force}, target, kind=BUFFERS, suffixes=(".safetensors",))
    from treeopt.verify.buffers import BUFFER_NAMES, save_buffers

    buffers = treeopt.compile_tree(record)
    save_buffers(buffers, record, target, console.configuration)
    shapes = {name: list(getattr(buffers, name).shape) for name in BUFFER_NAMES}
    for name, shape in shapes.items():
        console.say(f"{name:17} {str(getattr(buffers, name).dtype).removeprefix('torch.'):6} {shape}")
    console.note(f"wrote {target}")
    console.result({**picked(record, "nodes", "depth"), "top_k": buffers.top_k, "shapes": shapes, "output": target})
