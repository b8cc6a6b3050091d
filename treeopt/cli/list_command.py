"""`treeopt list`: the bundled trees, prompt sets and model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treeopt.cli.console import Console, command
from treeopt.files.bundled import POCKET, POCKET_DRAFT, prompt_sets, zoo

if TYPE_CHECKING:
    from treeopt.tree import Tree


_SHORT = 2  # parts of a reference, author and source, that fit into 80 columns


@command("list")
def run(console: Console) -> None:
    """List the bundled trees (a name can be given for any tree file) and the named prompt sets."""
    from treeopt.files.trees import load_tree

    trees = {name: load_tree(path) for name, path in zoo().items()}
    rows = [[name, str(tree.nodes), str(tree.depth), _description(tree)] for name, tree in trees.items()]
    console.table(["tree", "nodes", "depth", "from"], rows)
    console.say(f"prompt sets: {', '.join(prompt_sets())}")
    console.say(f"built-in model with heads, the default of --heads and --model: {POCKET}")
    console.say(f"built-in draft model for it: {POCKET_DRAFT}")
    described = [
        {"name": name, "nodes": tree.nodes, "depth": tree.depth, "leaves": len(tree.leaves), **tree.source}
        for name, tree in trees.items()
    ]
    console.result({"trees": described, "prompt_sets": list(prompt_sets())})


command = run


def _description(tree: Tree) -> str:
    """The first parts of a tree's reference; `treeopt show` prints all of it."""
    return ", ".join(str(tree.source.get("reference", "")).split(", ")[:_SHORT])
