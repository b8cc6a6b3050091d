"""`treeopt report`: calibrations, a tree and results of other commands as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from treeopt.cli.checks import check_once, check_suffix, given, hashes_of, option_of, several
from treeopt.cli.console import Console, command
from treeopt.cli.options import check_outputs, force_option
from treeopt.defaults import MAX_NODES
from treeopt.files.configurations import INPUTS as STORED_INPUTS
from treeopt.files.outputs import REPORT, write_marked

_LARGEST = 64


@command("report")
@click.argument("folder", required=False)
@click.option("--calibration", "calibrations", multiple=True, help="Traces, from `treeopt calibrate`; repeatable.")
@click.option("--tree", help="A tree or policy: a file, or a name from `treeopt list`.")
@click.option("--profile", help="Seconds per step, by `treeopt profile`: adds overhead and speedup by nodes.")
@click.option(
    "--validation", multiple=True, help="Result of `treeopt validate --json`; repeatable, the first is the headline."
)
@click.option("--comparison", help="Result of `treeopt compare --json`.")
@click.option("--decoding", help="Result of `treeopt generate --json`: a text as it was decoded.")
@click.option("--title", default="", show_default=False, help="Heading of the page.")
@click.option("--largest", type=click.IntRange(1, MAX_NODES), default=_LARGEST, help="Largest tree of the curves.")
@force_option
@click.option("-o", "--output", default="report.html", help="An .html file.")
def run(console: Console, folder: str | None, **options: Any) -> None:
    """Write a report as one HTML file to send: it loads nothing, and contains its figures as JSON.

    Every input is optional, and one is needed. FOLDER is that of `treeopt demo`, or any other that lists its inputs in
    report-inputs.json; it replaces the options.
    """
    from treeopt.cli.report_inputs import INPUTS, listed_inputs, load_inputs

    both = [name for name in INPUTS if given(name)]
    if folder is not None and both:
        raise click.UsageError(f"FOLDER lists the inputs: leave out {option_of(both[0])}")
    if folder is not None:
        options |= listed_inputs(folder)
        listed = [one for name in INPUTS for one in several(options[name]) if one is not None]
        console.configuration[STORED_INPUTS] = hashes_of(listed)
    elif not both:
        raise click.UsageError("Missing inputs: give a folder, such as that of `treeopt demo`, or one of the options.")
    check_once("calibrations", options["calibrations"])
    check_once("validation", options["validation"])
    check_outputs(options, options["output"], kind=REPORT)
    check_suffix(options["output"], ".html")
    inputs = load_inputs(console, options)
    from treeopt.view.report import render_report
    from treeopt.view.report_data import PARTS, report_data, without_folders

    data = report_data(inputs)
    page = render_report(data)
    write_marked(options["output"], page, REPORT, without_folders(_within(folder, console.configuration)))
    written = Path(options["output"]).stat().st_size
    console.say(f"wrote {options['output']}: {written:,} bytes")
    sections = [name for name in PARTS if name in data]
    console.result({"output": options["output"], "bytes": written, "inputs": sections})


def _within(folder: str | None, configuration: dict[str, Any]) -> dict[str, Any]:
    """The configuration with inputs of the folder named below its last name, so that `--map` finds them all."""
    if folder is None:
        return configuration
    above = f"{Path(folder).parent}/"
    inputs = {name.removeprefix(above): found for name, found in configuration[STORED_INPUTS].items()}
    return {**configuration, STORED_INPUTS: inputs}


command = run
