"""The command `treeopt merge`."""

from pathlib import Path
from typing import Any

import click

import treeopt
from treeopt.cli.calibrate_command import report_calibration
from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console, command
from treeopt.cli.options import check_outputs, force_option
from treeopt.defaults import CALIBRATION_FILE


@command("merge")
@click.argument("files", nargs=-1, required=True, metavar="FILES")
@force_option
@click.option("-o", "--output", default=CALIBRATION_FILE, help="File to write.")
def run(console: Console, **options: Any) -> None:
    """Join the shards of a calibration, or calibrations of different prompts.

    The shards of `treeopt calibrate --shard i/n`, in any order, give the same file, byte for byte, as a run without
    --shard.

    Calibrations of different prompts with the same model, drafter and settings give one calibration of all texts.
    """
    check_outputs(options, options["output"], suffixes=(".safetensors",))
    from treeopt.files.calibrations import SCHEMA
    from treeopt.files.strict_yaml import schema_of

    run = treeopt.merge_calibrations(options["files"])
    calibration = run.calibration
    several = schema_of(Path(options["files"][0])) == SCHEMA  # no shards, which give the file of a run without --shard
    if several and not calibration.provenance.configuration:
        named = {"merge": {"files": sorted(options["files"])}}  # files in another order give the same bytes
        calibration = with_configuration(calibration, {**console.configuration, **named})
    treeopt.save_calibration(calibration, options["output"], overwrite=options["force"])
    report_calibration(console, run, options["output"])
