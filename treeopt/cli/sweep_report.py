"""What the reports of `treeopt sweep` share: tables, sentences, the CSV, the JSON object, and how figures are shown."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt.cli.console import Console, say_skipped
from treeopt.defaults import TOLERATED_LOSS
from treeopt.optimize.methods import MEDUSA

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.optimize.intervals import Interval
    from treeopt.texts.encode import Skipped
    from treeopt.view.charts import Panel

TOKENS = "tokens per step"  # the label of an axis
MEDUSA_TREE = "Medusa tree"
LOSS = f"{100 * TOLERATED_LOSS:g} %"
# Intervals of a point -> the figure that they are of.
_INTERVALS = {"sampling": "tokens_per_step", "share_interval": "share", "ratio_interval": "ratio", "interval": "lost"}


@dataclass(frozen=True)
class Report:
    """What a sweep prints and writes.

    Args:
        points: one line of the CSV each, and the `points` of `--json`.
        data: the other keys of `--json`.
        header: of the table.
        rows: of the table.
        sentences: printed below it.
        chart: the panels of the picture.
        title: of the picture.
        skipped: prompts that do not fit into the context.
    """

    points: Sequence[Mapping[str, Any]]
    data: Mapping[str, Any]
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    sentences: Sequence[str]
    chart: Sequence[Panel]
    title: str
    skipped: Sequence[Skipped] = field(default=())


def print_report(console: Console, report: Report) -> None:
    """Print the table and the sentences."""
    console.table(report.header, report.rows)
    for sentence in report.sentences:
        console.say(sentence)
    say_skipped(console, report.skipped)


def as_csv(report: Report) -> str:
    """One line a point, with the columns of all points; the numbers of `--json`, an empty cell for null."""
    columns = dict.fromkeys(name for point in report.points for name in point)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(columns), lineterminator="\n", restval="")
    writer.writeheader()
    for point in report.points:
        writer.writerow({name: "" if value is None else value for name, value in point.items()})
    return stream.getvalue()


def flat(point: Any) -> dict[str, Any]:
    """The fields of a point by name; ends of intervals and widths of dense trees as single cells."""
    found: dict[str, Any] = {}
    for one in fields(point):
        value = getattr(point, one.name)
        if one.name in _INTERVALS:
            name = _INTERVALS[one.name]
            found |= {f"{name}_low": None, f"{name}_high": None}
            found |= {} if value is None else {f"{name}_low": value.low, f"{name}_high": value.high}
        else:
            found[one.name] = "x".join(map(str, value)) if isinstance(value, tuple) else value
    return found


def named(method: str) -> str:
    """The name of a method in tables."""
    return MEDUSA_TREE if method == str(MEDUSA) else method


def ends(interval: Interval | None, *, percent: bool = False) -> str:
    """The ends of an interval; a dash where there is none."""
    if interval is None:
        return "-"
    return " to ".join(f"{end:.2%}" if percent else f"{end:.3f}" for end in (interval.low, interval.high))


def model_name(calibration: Calibration) -> str:
    """The model of a calibration, for titles."""
    return Path(calibration.provenance.model).name


def texts_json(calibration: Calibration) -> dict[str, int]:
    """The texts that figures are of."""
    return {"texts": calibration.sequences, "texts_distinct": calibration.distinct}
