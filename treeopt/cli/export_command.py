"""`treeopt export`: a tree in the format of an inference engine, or the settings of one that takes no tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.checks import check_suffix, option_of
from treeopt.cli.console import Console, command
from treeopt.cli.options import check_outputs, force_option
from treeopt.engines import ENGINES, SETTINGS
from treeopt.facts import Column, Part, Table, picked
from treeopt.files.atomic import write_bytes, write_text
from treeopt.files.configurations import write_note

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.export.settings import EngineSettings
    from treeopt.optimize.chains import AcceptanceComparison

_SUFFIXES = {"sequoia": (".pt", ".json")}  # of formats that are more than one


@command("export")
@click.argument("tree", required=False)
@click.option("--for", "engine", type=click.Choice(list(ENGINES | SETTINGS)), required=True, help="Engine or format.")
@click.option("--calibration", help="Settings, not a tree: traces, from `treeopt calibrate`.")
@click.option("--profile", help="Settings: times of steps, from `treeopt profile`.")
@click.option(
    "--chain-length", type=click.IntRange(min=1), help="Settings: drafts of the chain [default: the fastest]."
)
@click.option("--nodes", type=click.IntRange(min=2), help="Settings: size of the dynamic tree, root counted.")
@click.option("--measured", help="Settings: acceptance that the engine measured, JSON or metrics.")
@click.option("-o", "--output", help="A file [default: standard output]; sequoia: .pt or .json.")
@force_option
def run(console: Console, tree: str | None, engine: str, output: str | None, force: bool, **options: Any) -> None:
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
    given = [option_of(name) for name, value in options.items() if value is not None]
    if tree is None and options["calibration"] is None:
        raise click.UsageError("Missing argument 'TREE' or option '--calibration'.")
    if tree is not None and given:
        raise click.UsageError(f"{given[0]} is for settings, which need no TREE.")
    if tree is not None and engine not in ENGINES:
        raise click.UsageError(f"--for {engine} takes no fixed tree: give --calibration in place of TREE.")
    if tree is None and engine not in SETTINGS:
        raise click.UsageError(f"--for {engine} writes a tree: give TREE in place of --calibration.")
    if tree is None:
        _export_settings(console, engine, output, {**options, "force": force})
    else:
        _export_tree(console, tree, engine, output, force)


command = run


def _export_tree(console: Console, tree: str, engine: str, output: str | None, force: bool) -> None:
    from treeopt.files.trees import load_tree

    record = load_tree(tree)  # before the output is checked, because an invalid tree is the first error
    if output is not None:
        check_outputs({"tree": tree, "force": force}, output)
        if engine in _SUFFIXES:
            check_suffix(output, *_SUFFIXES[engine])
    from treeopt.export.trees import export_tree

    exported = export_tree(record, engine, suffix="" if output is None else Path(output).suffix)
    if output is None:
        console.say(exported.content.decode().removesuffix("\n"))
    else:
        write_bytes(output, exported.content)
        write_note(output, console.configuration)
        console.note(f"wrote {output}")
    for finding in exported.warnings:
        console.warn(f"warning: {finding}")
    known = ENGINES[engine]
    console.note(f"read by   {known.reader}: {known.versions}")
    console.note(f"setting   {exported.setting}")
    console.note(f"lost      {known.lost}")
    console.result(
        {
            **picked(record, "nodes", "depth"),
            "to": engine,
            **picked(known, "reader", "versions", "lost"),
            "setting": exported.setting,
            "findings": exported.warnings,
            "content": exported.content.decode() if output is None else None,
            "output": output,
        }
    )


def _export_settings(console: Console, engine: str, output: str | None, options: Mapping[str, Any]) -> None:
    """Print or write the settings of an engine, with what replay promises and, with --measured, what it measured."""
    from treeopt.files.calibrations import load_calibration
    from treeopt.files.profiles import load_profile

    known = SETTINGS[engine]
    for name, taken in (("chain_length", known.chains), ("nodes", known.trees)):
        if options[name] is not None and taken is None:
            raise click.UsageError(f"--for {engine} takes no {option_of(name)}.")
    calibration = load_calibration(options["calibration"])
    profile = None if options["profile"] is None else load_profile(options["profile"])
    if output is not None:
        check_outputs(options, output)
    from treeopt.export.settings import engine_settings

    found = engine_settings(engine, calibration, profile, drafts=options["chain_length"], nodes=options["nodes"])
    comparison = None if options["measured"] is None else _compared(console, options["measured"], found, calibration)
    _report_settings(console, found, output, table=comparison is None)
    if comparison is not None:
        console.report(*_comparison(comparison))
    console.result(_settings_data(found, comparison, output))


def _compared(
    console: Console, measured_file: str, found: EngineSettings, calibration: Calibration
) -> AcceptanceComparison:
    """What an engine measured beside what replay promised."""
    from treeopt.export.acceptance import read_acceptance
    from treeopt.export.settings import promised
    from treeopt.optimize.chains import compare_acceptance

    measured = read_acceptance(measured_file)
    if len(measured.draft_lengths) > 1:
        lengths = ", ".join(map(str, measured.draft_lengths))
        console.warn(f"warning: the engine's steps had {lengths} drafts; the promise is of the longest chain")
    drafts = None if measured.histogram is None else len(measured.histogram) - 1
    return compare_acceptance(promised(found, calibration, drafts), calibration, measured)


def _report_settings(console: Console, found: EngineSettings, output: str | None, *, table: bool) -> None:
    if output is not None and found.content:
        write_text(output, found.content + "\n")
        write_note(output, console.configuration)
    elif found.content:
        console.say(found.content)
    elif table:
        columns = (Column("drafts", lambda one: one[0]), Column("tokens per step", lambda one: one[1], ".4f"))
        console.report(Table(columns, list(enumerate(found.chains))))
    if found.warning:
        console.warn(f"warning: {found.warning}")
    for name, why in found.underived.items():
        console.warn(f"not derived: {name}: {why}")
    if output is not None:
        written = f"wrote {output}" if found.content else f"{output} is not written: there is no setting"
        (console.note if found.content else console.warn)(written)
    console.note(f"read by   {SETTINGS[found.engine].versions}")
    if found.replay is not None:
        where = "" if found.batch is None else f", batch {found.batch}"
        console.note(f"replay    {found.replay.tokens_per_step:.4f} tokens per step ({found.bound}{where})")
    for batch, budget in found.budgets.items():
        figures = f"{budget.tokens_per_step:.4f} tokens per step, speedup {budget.speedup:.3f}"
        console.note(f"batch {batch:<4}{budget.nodes - 1} drafts: {figures}")
    for note in found.notes:
        console.note(f"note      {note}")


def _comparison(comparison: AcceptanceComparison) -> Iterator[Part]:
    interval = comparison.interval
    spread = "" if interval is None else f" ({interval:.3f} on as many new texts)"
    difference = comparison.measured / comparison.promised - 1
    verdict = {True: "as promised", False: "not as promised", None: "no interval of the promise"}
    yield f"promised  {comparison.promised:.4f} tokens per step{spread}"
    yield f"measured  {comparison.measured:.4f} ({difference:+.1%}): {verdict[comparison.as_promised]}"
    if comparison.measured_rates is not None:
        columns = (
            Column("drafts accepted, at least", lambda row: row[0]),
            Column("promised", lambda row: row[1][0], ".4f"),
            Column("measured", lambda row: row[1][1], ".4f"),
        )
        pairs = zip(comparison.promised_rates, comparison.measured_rates, strict=False)
        yield Table(columns, list(enumerate(pairs, 1)))


def _settings_data(
    found: EngineSettings, comparison: AcceptanceComparison | None, output: str | None
) -> dict[str, Any]:
    compared = picked(comparison, "promised", "measured", "as_promised", "promised_rates", "measured_rates")
    interval = None if comparison is None else comparison.interval
    compared["interval"] = None if interval is None else [interval.low, interval.high]
    return {
        "to": found.engine,
        "versions": SETTINGS[found.engine].versions,
        **picked(found, "settings", "batch", "bound", "notes"),
        "content": found.content if output is None else None,
        "output": output if found.content else None,
        **picked(found.replay, "tokens_per_step"),
        "batches": [
            {"batch": batch, "drafts": budget.nodes - 1, **picked(budget, "tokens_per_step", "speedup")}
            for batch, budget in found.budgets.items()
        ],
        "chain_tokens_per_step": found.chains,
        "not_derived": found.underived,
        **({} if comparison is None else {"comparison": compared}),
    }
