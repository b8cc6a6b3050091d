"""`treeopt export`: a tree in the format of an inference engine, or the settings of one that takes no tree."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.checks import check_suffix, option_of
from treeopt.cli.console import Console, command
from treeopt.cli.numbers import COUNT
from treeopt.cli.options import check_outputs, force_option
from treeopt.engines import ENGINES, SETTINGS
from treeopt.facts import Column, Fact, Table, keyed, lines
from treeopt.files.atomic import write_bytes, write_text
from treeopt.files.configurations import write_note

if TYPE_CHECKING:
    from treeopt.export.lint import DraftConfig
    from treeopt.export.settings import EngineSettings
    from treeopt.optimize.chains import AcceptanceComparison, MeasuredAcceptance

_WITH_DRAFT = ("vllm", "hydra")  # engines with limits that depend on the drafter's config
_SUFFIXES = {"sequoia": (".pt", ".json")}  # of formats that are more than one
_MEASURED = "Settings: acceptance that the engine measured (JSON, metrics, log); with --calibration both are compared."
_SYNTHETIC = "Settings: acceptance rates in place of drafts, to time the engine."
_DRAFT = "Folder of the drafter that is served (of mtp the base's), for limits by its config: vllm, hydra."


@command("export")
@click.argument("tree", required=False)
@click.option("--for", "engine", type=click.Choice(list(ENGINES | SETTINGS)), required=True, help="Engine or format.")
@click.option("--calibration", help="Settings, not a tree: traces, from `treeopt calibrate`.")
@click.option("--profile", help="Settings: times of steps, from `treeopt profile`, or a CSV file of an engine's.")
@click.option("--chain-length", type=COUNT, help="Settings: drafts of the chain [default: the fastest].")
@click.option("--nodes", type=click.IntRange(min=2), help="Settings: size of the dynamic tree, root counted.")
@click.option("--method", help="Settings: the engine's name of its drafter [default: that of the calibration].")
@click.option("--measured", help=_MEASURED)
@click.option("--synthetic", is_flag=True, default=None, help=_SYNTHETIC)
@click.option("--draft", help=_DRAFT)
@click.option("-o", "--output", help="A file [default: standard output]; sequoia: .pt or .json.")
@force_option
def run(console: Console, tree: str | None, engine: str, output: str | None, force: bool, **options: Any) -> None:
    """Write TREE (a file, or a name from `treeopt list`) in the format of an engine, or settings for an engine.

    A tree that the engine would refuse or misread is refused, with the rule and a remedy (`treeopt show --for`).
    Values, expected tokens per step and sources are left out: no engine reads them.

    \b
    medusa      Medusa, Spec-Bench: paths as a Python list
    nxdi        AWS NxD Inference, Medusa: medusa_tree as JSON
    nxdi-eagle  AWS NxD Inference, EAGLE-1 and 2: token tree as JSON
    trtllm      TensorRT-LLM to 1.2.x: medusa_choices or eagle_choices
    triton      Triton with TensorRT-LLM to 1.2.x: paths in braces
    sequoia     Sequoia: growmap
    eagle       EAGLE-1: mc_sim_7b_63 of its choices.py
    hydra       Hydra, grounded heads: paths as a Python list
    json        paths as JSON, for programs of your own

    With --calibration in place of TREE: settings of engines that take no fixed tree, with the tokens per step that
    replay predicts (vllm, sglang, trtllm, llamacpp, transformers, or chain for its length alone).

    With --measured alone, the counters of an engine that ran K drafts give the tokens per step of all shorter chains,
    with 90 % intervals: no model is needed. --profile adds the fastest length.
    """
    draft = options.pop("draft")
    given = [option_of(name) for name, value in options.items() if value is not None]
    if tree is None and options["calibration"] is None and options["measured"] is None:
        raise click.UsageError("Missing argument 'TREE' or option '--calibration' or '--measured'.")
    if tree is not None and given:
        raise click.UsageError(f"{given[0]} is for settings, which need no TREE.")
    if engine not in (SETTINGS if tree is None else ENGINES):
        place, other = ("TREE", "--calibration") if tree is None else ("--calibration", "TREE")
        raise click.UsageError(f"--for {engine} takes {place} in place of {other}.")
    if draft is not None and engine not in _WITH_DRAFT:
        raise click.UsageError(f"--draft is for --for {' and '.join(_WITH_DRAFT)}: no other limits are read from it.")
    if tree is None:
        _export_settings(console, engine, output, {**options, "draft": draft, "force": force})
    else:
        _export_tree(console, tree, engine, output, {"draft": draft, "force": force})


def _export_tree(console: Console, tree: str, engine: str, output: str | None, options: Mapping[str, Any]) -> None:

    record = treeopt.load_tree(tree)  # before the output is checked, because an invalid tree is the first error
    if output is not None:
        check_outputs({"tree": tree, **options}, output)
        if engine in _SUFFIXES:
            check_suffix(output, *_SUFFIXES[engine])

    suffix = "" if output is None else Path(output).suffix
    exported = treeopt.export_tree(record, engine, suffix=suffix, draft=_draft(options))
    if output is None:
        console.say(exported.content.decode().removesuffix("\n"))
    else:
        write_bytes(output, exported.content)
        write_note(output, console.configuration)
        console.note(f"wrote {output}")
    for finding in exported.warnings:
        console.warn(f"warning: {finding}")
    content = exported.content.decode() if output is None else None
    _note(console, list(exported.report(record)), {"content": content, "output": output})


def _note(console: Console, facts: list[Fact], data: dict[str, Any]) -> None:
    """Print facts beside the content, and all of a result for programs."""
    for line in lines(facts):
        console.note(str(line))
    console.result({**keyed(facts), **data})


def _export_settings(console: Console, engine: str, output: str | None, options: Mapping[str, Any]) -> None:
    """Print or write the settings of an engine, with what replay promises and, with --measured, what it measured."""
    from treeopt.export.settings import no_tree
    from treeopt.models.origins import profile_for_others

    known = SETTINGS[engine]
    if options["method"] is not None and options["method"] not in known.methods:
        names = ", ".join(known.methods) or "no drafter"
        raise click.UsageError(f"--for {engine} takes --method with {names}, not {options['method']}.")
    if options["nodes"] is not None:
        traced, chain = options["calibration"] is not None, options["chain_length"] is not None
        if refused := no_tree(engine, options["method"], traced, chain):
            raise click.UsageError(f"--nodes: {refused}.")
    calibration = None if options["calibration"] is None else treeopt.load_calibration(options["calibration"])
    measured = None if options["measured"] is None else _measured(console, options["measured"])
    profile = None if options["profile"] is None else treeopt.load_profile(options["profile"])
    if calibration is not None and profile is not None:
        console.warn(*profile_for_others(profile, calibration))
    if output is not None:
        check_outputs(options, output)
    given = {"drafts": options["chain_length"], "nodes": options["nodes"], "method": options["method"]}
    found = treeopt.engine_settings(engine, calibration, profile, **given, measured=measured, draft=_draft(options))
    if options["synthetic"]:
        found = found.synthetic
    comparison = None if calibration is None or measured is None else _compared(measured, found, calibration)
    _write_settings(console, found, output, table=comparison is None)
    if comparison is not None:
        console.report(*comparison.report())
    data = {"content": found.content if output is None else None, "output": output if found.content else None}
    _note(console, list(found.report()), data)


def _draft(options: Mapping[str, Any]) -> DraftConfig | None:

    return None if options["draft"] is None else treeopt.read_draft_config(options["draft"])


def _measured(console: Console, file: str) -> MeasuredAcceptance:
    """What an engine counted, with a warning where its steps had different numbers of drafts."""
    measured = treeopt.read_acceptance(file)
    if len(measured.draft_lengths) > 1:
        lengths = ", ".join(map(str, measured.draft_lengths))
        console.warn(f"warning: the engine's steps had {lengths} drafts; all are taken for chains of the longest")
    return measured


def _compared(
    measured: MeasuredAcceptance, found: EngineSettings, calibration: treeopt.Calibration
) -> AcceptanceComparison:
    """What an engine measured beside what replay promised."""
    from treeopt.export.settings import promised

    drafts = None if measured.histogram is None else len(measured.histogram) - 1
    return treeopt.compare_acceptance(promised(found, calibration, drafts), calibration, measured)


def _write_settings(console: Console, found: EngineSettings, output: str | None, *, table: bool) -> None:
    if found.content and output is not None:
        write_text(output, found.content + "\n")
        write_note(output, console.configuration)
        console.note(f"wrote {output}")
    elif found.content:
        console.say(found.content)
    elif table and found.estimates is None:
        columns = (Column("drafts", lambda one: one[0]), Column("tokens per step", lambda one: one[1], ".4f"))
        console.report(Table(columns, list(enumerate(found.chains))))
    if found.estimates is not None:
        console.report(*found.estimates.report())
    if found.warning:
        console.warn(f"warning: {found.warning}")
    for name, why in found.underived.items():
        console.warn(f"not derived: {name}: {why}")
    if output is not None and not found.content:
        old = ", and the old one is out of date" if Path(output).exists() else ""
        console.warn(f"{output} is not written: there is no setting{old}")
