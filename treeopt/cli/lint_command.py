"""`treeopt lint`: the rules of engines that a tree breaks, and a tree that keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console, command
from treeopt.cli.early_checks import check_belongs, check_suffix
from treeopt.cli.engine_report import findings_as_list, say_findings
from treeopt.cli.options import check_outputs, force_option
from treeopt.engines import ENGINES
from treeopt.errors import EXIT_INPUT, counted
from treeopt.files.outputs import TREE
from treeopt.progress import late


@command("lint")
@click.argument("tree")
@click.option("--for", "engine", type=click.Choice(list(ENGINES)), help="One engine [default: all of them].")
@click.option("--num-heads", type=click.IntRange(min=1), help="Number of heads that the engine serves.")
@click.option("--fix", is_flag=True, help="Grow the tree again under the engine's limits; needs --for, --calibration.")
@click.option("--calibration", help="Traces to grow from, from `treeopt calibrate`.")
@force_option
@click.option("-o", "--output", help="The tree of --fix [default: TREE-ENGINE.yaml].")
def run(console: Console, tree: str, **options: Any) -> None:
    """Check TREE (a file, a list of paths, or a name from `treeopt list`) by the rules of inference engines.

    An error is what an engine would refuse or misread, a warning what depends on how it was built. docs/engines.md
    lists the rules by their ids. With --for the exit status is 3 where there is an error; without it only where the
    list is not a tree.

    With --fix a tree of the same number of nodes, or of as many as the engine takes, is grown from the calibration
    under the limits of the engine, as `treeopt build --for` does, and both are compared on the calibration's texts.
    """
    check_belongs(("calibration", "output", "force"), "--fix", holds=options["fix"])
    if options["fix"] and not (options["engine"] and options["calibration"]):
        raise click.UsageError("--fix needs --for and --calibration")
    from treeopt.export.lint import lint_file

    names = [options["engine"]] if options["engine"] else list(ENGINES)
    report = lint_file(tree, names, num_heads=options["num_heads"])
    findings = findings_as_list(report.findings)
    say_findings(console, report.findings)
    data = {"nodes": report.nodes, "engines": names, "valid": report.tree is not None, "findings": findings}
    if options["fix"]:
        data["fixed"] = _fix(console, tree, options)
    elif report.tree is not None:
        for name in names:
            faults = sum(finding.engine == name and finding.severity == "error" for finding in report.findings)
            console.say(f"{name:11} {'ok' if not faults else f'{faults} ' + ('error' if faults == 1 else 'errors')}")
    console.result(data)
    if not options["fix"] and (report.tree is None or (options["engine"] and report.errors)):
        click.get_current_context().exit(EXIT_INPUT)


command = run


def _fix(console: Console, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Grow the tree again, write it, and print what changed."""
    from treeopt.files.calibrations import load_calibration
    from treeopt.files.trees import save_tree

    engine = options["engine"]
    output = options["output"] or f"{Path(name).stem}-{engine}.yaml"
    check_outputs({"tree": name, **options}, output, kind=TREE)
    check_suffix(output, ".yaml", ".yml")
    calibration = load_calibration(options["calibration"])
    from treeopt.export.lint import fix_tree

    with console.progress("lint") as progress:
        fixed = fix_tree(name, engine, calibration, num_heads=options["num_heads"], progress=late(progress))
    save_tree(with_configuration(fixed.tree, console.configuration), output)
    console.say(f"{counted(fixed.tree.nodes, 'node')}, depth {fixed.tree.depth}, under the limits of {engine}")
    for label, gain in (("over the tree given", fixed.gain), ("over the tree without the limits", fixed.loss)):
        if gain is not None:
            console.say(f"{label}: {gain.first:.3f} to {gain.second:.3f} tokens per step, {gain}")
    if fixed.capped:
        console.say(f"fewer nodes: {fixed.capped}")
    if fixed.replaced:
        console.say(f"the tree given was not replayed: {fixed.replaced}")
    say_findings(console, fixed.findings)
    console.note(f"wrote {output}")
    return {
        "output": output,
        "paths": fixed.tree.paths,
        "capped": fixed.capped or None,
        "gain": fixed.gain and fixed.gain.as_dict(),
        "loss": fixed.loss and fixed.loss.as_dict(),
        "findings": findings_as_list(fixed.findings),
    }
