"""`treeopt list`: the bundled trees, prompt sets and model."""

import treeopt
from treeopt.cli.console import Console, command
from treeopt.files.bundled import POCKET, POCKET_DRAFT, POCKET_EAGLE3, prompt_sets, zoo

_SHORT = 2  # parts of a reference, author and source, that fit into 80 columns


@command("list")
def run(console: Console) -> None:
    """List the bundled trees (a name can be given for any tree file) and the named prompt sets."""
    trees = {name: treeopt.load_tree(path) for name, path in zoo().items()}
    references = [str(tree.source.get("reference", "")).split(", ")[:_SHORT] for tree in trees.values()]
    rows = [[name, str(tree.nodes), str(tree.depth)] for name, tree in trees.items()]
    rows = [[*row, ", ".join(parts)] for row, parts in zip(rows, references, strict=True)]
    console.table(["tree", "nodes", "depth", "from"], rows)
    console.say(f"prompt sets: {', '.join(prompt_sets())}")
    console.say(f"built-in model with heads, the default of --heads and --model: {POCKET}")
    console.say(f"built-in draft model for it: {POCKET_DRAFT}; EAGLE-3 head: {POCKET_EAGLE3}")
    described = [
        {"name": name, "nodes": tree.nodes, "depth": tree.depth, "leaves": len(tree.leaves), **tree.source}
        for name, tree in trees.items()
    ]
    console.result({"trees": described, "prompt_sets": list(prompt_sets())})
