"""The reports of `treeopt sweep --levels`, `--sizes` and `--calibration-size`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt.cli.build_dynamic import texts_of
from treeopt.cli.sweep_report import LOSS, MEDUSA_TREE, TOKENS, Report, ends, flat, model_name, named, texts_json

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.optimize.intervals import Interval
    from treeopt.optimize.sweep_levels import LevelSweep
    from treeopt.optimize.sweep_sizes import SizePoint, SizeSweep
    from treeopt.optimize.sweep_texts import TextsSweep
    from treeopt.view.charts import Series


def of_levels(found: LevelSweep, calibration: Calibration) -> Report:
    """Levels of trees of each size."""
    from treeopt.view.charts import Panel

    rows = [
        [
            str(point.nodes),
            str(point.levels),
            str(point.used),
            f"{point.tokens_per_step:.3f}",
            ends(point.sampling),
            f"{point.share:.1%}",
            ends(point.share_interval, percent=True),
        ]
        for point in found.points
    ]
    header = ["nodes", "levels", "used nodes", "tokens/step", "90 %", "of all levels", "90 %"]
    sizes = list(dict.fromkeys(point.nodes for point in found.points))
    sentences = []
    for nodes in sizes:
        last = [point for point in found.points if point.nodes == nodes][-1]
        sentences.append(
            f"{nodes} nodes: {found.enough(nodes)} of {last.levels} levels are needed to lose less than {LOSS}; with "
            f"all of them the tree reaches level {last.depth} ({last.method})"
        )
    sentences.append(f"tokens per step, cross-validated, over {texts_of(calibration)}")
    series = [
        _series(f"{nodes} nodes", [one for one in found.points if one.nodes == nodes], "levels", "sampling")
        for nodes in sizes
    ]
    chart = [Panel("levels", TOKENS, series)]
    data = {"enough": {str(nodes): found.enough(nodes) for nodes in sizes}, **texts_json(calibration)}
    title = f"Levels of the tree, {model_name(calibration)}"
    return Report([flat(point) for point in found.points], data, header, rows, sentences, chart, title)


def of_sizes(found: SizeSweep, calibrations: Mapping[str, Calibration]) -> Report:
    """Methods and drafters by nodes."""
    from treeopt.view.charts import NODES, Panel

    rows = [
        [
            str(point.nodes),
            _size_name(point, found),
            f"{point.tokens_per_step:.3f}",
            ends(point.sampling),
            f"{point.ratio:.3f}",
            ends(point.ratio_interval),
            point.method,
        ]
        for point in sorted(found.points, key=lambda point: point.nodes)
    ]
    header = ["nodes", "trees", "tokens/step", "90 %", f"of the {MEDUSA_TREE}", "90 %", "method"]
    left_out = f"; {found.left_out} sequences that not all calibrations hold were left out" if found.left_out else ""
    sentences = [f"over {found.texts} different texts; the {MEDUSA_TREE} is that of {found.medusa}{left_out}"]
    if calibrations[found.medusa].provenance.drafter_id:
        what = "no calibration is of heads alone, so the denominator is the independent tree of the first one"
        sentences.append(f"{what}, which is not the {MEDUSA_TREE}")
    groups: dict[str, list[SizePoint]] = {}
    for point in found.points:
        groups.setdefault(_size_name(point, found), []).append(point)
    chart = [
        Panel(NODES, TOKENS, [_series(name, of, "nodes", "sampling") for name, of in groups.items()], log2=True),
        Panel(
            NODES,
            f"tokens per step / {MEDUSA_TREE}",
            [_series(name, of, "nodes", "ratio_interval", "ratio") for name, of in groups.items()],
            log2=True,
        ),
    ]
    data = {"medusa": found.medusa, "texts_distinct": found.texts, "left_out": found.left_out}
    title = f"Tokens per step by nodes, {model_name(calibrations[found.medusa])}"
    return Report([flat(point) for point in found.points], data, header, rows, sentences, chart, title)


def of_texts(found: TextsSweep, calibration: Calibration) -> Report:
    """Tokens per step by the prompts of the calibration."""
    from treeopt.view.charts import Panel, Series

    rows = [
        [
            str(point.texts),
            named(point.method),
            f"{point.tokens_per_step:.3f}",
            f"{point.lost:.2%}",
            ends(point.interval, percent=True),
            f"{point.worst:.2%}",
        ]
        for point in sorted(found.points, key=lambda point: point.texts)
    ]
    header = ["prompts", "trees", "tokens/step", "lost", "90 %", "worst draw"]
    methods = list(dict.fromkeys(point.method for point in found.points))
    sentences = [_enough(found, method) for method in methods]
    sentences.append(
        f"{found.nodes} nodes; lost against trees from {found.fitted} prompts; {found.draws} draws, each of which "
        f"judges all {found.texts} different texts on trees that were fitted without them"
    )
    series = []
    for method in methods:
        points = [point for point in found.points if point.method == method]
        lost = [100 * point.lost for point in points]
        known = [None if one.interval is None else _percent(one.interval) for one in points]
        series.append(Series(named(method), [point.texts for point in points], lost, known))
    chart = [Panel("prompts of the calibration", "tokens per step lost, %", series, log2=True)]
    enough = {method: None if (point := found.enough(method)) is None else point.texts for method in methods}
    data = {"nodes": found.nodes, "texts": found.texts, "fitted": found.fitted, "draws": found.draws}
    title = f"Prompts that a calibration needs, {model_name(calibration)}"
    points_json = [flat(point) for point in found.points]
    return Report(points_json, {**data, "enough": enough}, header, rows, sentences, chart, title)


def _enough(found: TextsSweep, method: str) -> str:
    """How many prompts lose less than 1 %."""
    point = found.enough(method)
    if point is None:
        return f"{named(method)}: fewer than {found.fitted} prompts may lose {LOSS} or more"
    lost = f"{point.lost:.2%}, {ends(point.interval, percent=True)} (90 %)"
    return f"{named(method)}: {point.texts} prompts lose less than {LOSS} ({lost})"


def _series(name: str, points: Sequence[Any], x: str, interval: str, y: str = "tokens_per_step") -> Series:
    from treeopt.view.charts import Series

    return Series(
        name,
        [getattr(point, x) for point in points],
        [getattr(point, y) for point in points],
        [getattr(point, interval) for point in points],
    )


def _size_name(point: SizePoint, found: SizeSweep) -> str:
    """The kind of trees, with the file of the calibration; its folder too where two files have one name."""
    from treeopt.optimize.sweep_sizes import INDEPENDENT

    medusa = point.trees == INDEPENDENT and point.calibration == found.medusa
    stem = Path(point.calibration).stem
    same = {one.calibration for one in found.points if Path(one.calibration).stem == stem}
    return f"{MEDUSA_TREE if medusa else point.trees}, {stem if len(same) == 1 else point.calibration}"


def _percent(interval: Interval) -> Interval:
    from treeopt.optimize.intervals import Interval

    return Interval(100 * interval.low, 100 * interval.high, interval.level)
