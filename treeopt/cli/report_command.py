"""`treeopt report`: calibrations, a tree and results of other commands as one HTML file."""

from pathlib import Path
from typing import Any

import click

from treeopt.cli.checks import check_once, given, several
from treeopt.cli.console import Console, command
from treeopt.cli.drafters import warn_edited
from treeopt.cli.options import check_outputs, force_option
from treeopt.defaults import MAX_NODES
from treeopt.files.outputs import REPORT, write_marked
from treeopt.progress import late

_VALIDATION = "Result of `treeopt validate --json`; repeatable, the first is the headline."


@command("report")
@click.option("--calibration", "calibrations", multiple=True, help="Traces, from `treeopt calibrate`; repeatable.")
@click.option("--tree", help="A tree or policy: a file, or a name from `treeopt list`.")
@click.option("--profile", help="Seconds per step, by `treeopt profile`: adds overhead and speedup by nodes.")
@click.option("--validation", multiple=True, help=_VALIDATION)
@click.option("--comparison", help="Result of `treeopt compare --json`.")
@click.option("--decoding", help="Result of `treeopt generate --json`: a text as it was decoded.")
@click.option("--title", default="", show_default=False, help="Heading of the page.")
@click.option("--largest", type=click.IntRange(1, MAX_NODES), default=64, help="Largest tree of the curves.")
@force_option
@click.option("-o", "--output", default="report.html", help="An .html file.")
def run(console: Console, **options: Any) -> None:
    """Write a report as one HTML file: it loads nothing from the network, and contains its figures as JSON.

    Every input is optional; give at least one.
    """
    from treeopt.optimize.build_report import fitted_texts
    from treeopt.view.report import render_report
    from treeopt.view.report_data import INPUTS, PARTS, report_data, report_inputs, without_folders

    if not any(map(given, INPUTS)):
        raise click.UsageError("Missing inputs: give one of the options, such as --tree.")
    check_once("calibrations", options["calibrations"])
    check_once("validation", options["validation"])
    check_outputs(options, options["output"], kind=REPORT, suffixes=(".html",))
    warn_edited(console, options["tree"])
    paths = {name: [path for path in several(options[name]) if path is not None] for name in INPUTS}
    with console.progress("curves") as progress:
        inputs = report_inputs(paths, options["title"], largest=options["largest"], progress=late(progress))
    for one in inputs.calibrations:
        console.warn(*fitted_texts(one.calibration))
    data = report_data(inputs)
    write_marked(
        options["output"], render_report(data), REPORT, without_folders(console.configuration, kept=("title",))
    )
    written = Path(options["output"]).stat().st_size
    console.say(f"wrote {options['output']}: {written:,} bytes")
    console.result({"output": options["output"], "bytes": written, "inputs": [name for name in PARTS if name in data]})
