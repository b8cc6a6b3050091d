"""`treeopt export`: a tree in the format of an inference engine, or the settings of one that takes no tree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.console import Console, command
from treeopt.cli.early_checks import check_suffix
from treeopt.cli.engine_report import findings_as_list, warn_findings
from treeopt.cli.export_settings import export_settings
from treeopt.cli.options import check_outputs, force_option
from treeopt.engines import ENGINES, SETTINGS
from treeopt.files.atomic import write_bytes
from treeopt.files.configurations import write_note

if TYPE_CHECKING:
    from treeopt.export.trees import Exported

_SUFFIXES = {"sequoia": (".pt", ".json")}  # of formats that are more than one


@command("export")
@click.argument("tree", required=False)
@click.option(
    "--for", "to", type=click.Choice(list(ENGINES | SETTINGS)), required=True, help="The engine, or the format."
)
@click.option("--calibration", help="Settings, not a tree: traces, from `treeopt calibrate`.")
@click.option("--profile", help="Settings: times of steps, from `treeopt profile`.")
@click.option(
    "--chain-length", "drafts", type=click.IntRange(min=1), help="Settings: length of the chain [default: the fastest]."
)
@click.option("--nodes", type=click.IntRange(min=2), help="Settings: size of the dynamic tree, root counted.")
@click.option("--measured", "compare", help="Settings: acceptance that the engine measured, JSON or metrics.")
@click.option("-o", "--output", help="A file [default: standard output]; sequoia: .pt or .json.")
@force_option
def run(console: Console, tree: str | None, to: str, output: str | None, force: bool, **options: Any) -> None:
    """Write TREE (a file, or a name from `treeopt list`) as an engine reads it, or settings for an engine.

    A tree that the engine would refuse or misread is refused, with the rule and a remedy (`treeopt show --for`).
    Values, expected tokens per step and sources stay behind: no engine reads them.

    \b
    medusa      Medusa, Spec-Bench: paths as a Python list
    nxdi        AWS NxD Inference, Medusa: medusa_tree as JSON
    nxdi-eagle  AWS NxD Inference, EAGLE-1 and 2: token tree as JSON
    trtllm      TensorRT-LLM to 1.2.x: medusa_choices or eagle_choices
    triton      Triton with TensorRT-LLM to 1.2.x: paths in braces
    sequoia     Sequoia: growmap
    eagle       EAGLE-1: mc_sim_7b_63 of its choices.py
    json        paths as JSON, for programs of your own

    With --calibration in place of TREE: settings of engines that take no fixed tree, with the tokens per step that
    replay promises (vllm, sglang, trtllm, llamacpp, transformers, or chain for its length alone).
    """
    if tree is None and options["calibration"] is not None:
        if to not in SETTINGS:
            raise click.UsageError(f"--for {to} writes a tree: give TREE in place of --calibration.")
        _check_taken(to, options)
        export_settings(console, to, output, {**options, "force": force})
        return
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if tree is None:
        raise click.UsageError("Missing argument 'TREE' or option '--calibration'.")
    if given:
        raise click.UsageError(f"{given[0]} is for settings, which need no TREE.")
    if to not in ENGINES:
        raise click.UsageError(f"--for {to} takes no fixed tree: give --calibration in place of TREE.")
    _export_tree(console, tree, to, output, force)


command = run


def _check_taken(to: str, options: Mapping[str, Any]) -> None:
    """Refuse a length or a size that the engine does not take."""
    known = SETTINGS[to]
    if options["drafts"] is not None and known.chains is None:
        raise click.UsageError(f"--for {to} takes a tree, no length: --nodes in place of --chain-length.")
    if options["nodes"] is not None and known.trees is None:
        raise click.UsageError(f"--for {to} takes a length, no tree: --chain-length in place of --nodes.")
    if options["drafts"] is not None and options["nodes"] is not None:
        raise click.UsageError("--chain-length is of a chain and --nodes of a tree: give one of them.")


def _export_tree(console: Console, tree: str, to: str, output: str | None, force: bool) -> None:
    from treeopt.files.trees import load_tree

    record = load_tree(tree)  # before the output is checked, because an invalid tree is the first error
    if output is not None:
        check_outputs({"tree": tree, "force": force}, output)
        if to in _SUFFIXES:
            check_suffix(output, *_SUFFIXES[to])
    from treeopt.export.trees import export_tree

    exported = export_tree(record, to, suffix="" if output is None else Path(output).suffix)
    if output is None:
        console.say(exported.content.decode().removesuffix("\n"))
    else:
        write_bytes(output, exported.content)
        write_note(output, console.configuration)
    _report(console, exported, output)
    console.result({"nodes": record.nodes, "depth": record.depth, **_as_dict(exported, output)})


def _report(console: Console, exported: Exported, output: str | None) -> None:
    engine = ENGINES[exported.engine]
    warn_findings(console, exported.warnings)
    if output is not None:
        console.note(f"wrote {output}")
    console.note(f"read by   {engine.reader}: {engine.versions}")
    console.note(f"setting   {exported.setting}")
    console.note(f"lost      {engine.lost}")


def _as_dict(exported: Exported, output: str | None) -> dict[str, Any]:
    engine = ENGINES[exported.engine]
    return {
        "to": exported.engine,
        "reader": engine.reader,
        "versions": engine.versions,
        "setting": exported.setting,
        "lost": engine.lost,
        "findings": findings_as_list(exported.warnings),
        "content": exported.content.decode() if output is None else None,
        "output": output,
    }
