"""`treeopt import`: a tree from the file of an engine."""

import click

import treeopt
from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console, command
from treeopt.cli.options import check_outputs, force_option
from treeopt.facts import picked
from treeopt.files.outputs import TREE


@command("import")
@click.argument("file")
@click.option("--name", default="", help="List to read, of a Python file with several.")
@force_option
@click.option("-o", "--output", default="tree.yaml", help="File to write.")
def run(console: Console, file: str, name: str, output: str, force: bool) -> None:
    """Read the tree in FILE, which an engine wrote or reads, and write it as a tree of treeopt.

    The format is recognised by the content: a list of paths in JSON or Python (Medusa, Spec-Bench, EAGLE-1, Hydra,
    NxD Inference, TensorRT-LLM), a token tree of NxD Inference, a growmap of Sequoia (.pt or .json). Nothing in the
    file is executed.

    Every prefix of a path must be listed too.
    """
    found = treeopt.import_tree(file, name=name)
    check_outputs({"tree": file, "force": force}, output, kind=TREE, suffixes=(".yaml", ".yml"))
    from treeopt.view.scene import summary

    treeopt.save_tree(with_configuration(found.tree, console.configuration), output)
    console.say(f"{file} is {found.layout}: {summary(found.tree)}")
    for line in found.assumed:
        console.say(f"assumed   {line}")
    console.note(f"wrote {output}")
    tree = picked(found.tree, "nodes", "depth", "paths")
    console.result({**picked(found, "layout", "assumed"), **tree, "output": output})
