"""The report of `treeopt sweep --dense`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treeopt.cli.build_dynamic import texts_of
from treeopt.cli.sweep_report import TOKENS, Report, ends, flat, model_name, named, texts_json

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.optimize.sweep_dense import DensePoint, DenseSweep, Verdict
    from treeopt.view.charts import Panel


_SPEEDUP = "speedup over autoregressive"


def of_dense(found: DenseSweep, calibration: Calibration) -> Report:
    """Dense trees against sparse ones."""
    sparse: dict[str, dict[int, Any]] = {}
    for point in found.sparse:
        sparse.setdefault(point.method, {})[point.nodes] = point
    rows = []
    for nodes in next(iter(sparse.values())):
        smaller = [point for point in found.dense if point.nodes <= nodes]
        best = max(smaller, key=lambda point: point.tokens_per_step, default=None)
        line = [str(nodes), "-", "-"] if best is None else [str(nodes), f"{best.tokens_per_step:.3f}", _widths(best)]
        rows.append([*line, *(_tau_and_speed(of_method[nodes]) for of_method in sparse.values())])
    header = ["nodes", "best dense tree of at most as many", "widths", *(named(method) for method in sparse)]
    higher = sum(point.sparse > point.tokens_per_step for point in found.dense)
    sentences = [_verdict(one, found) for one in found.verdicts]
    sentences.append(
        f"at equal nodes the sparse tree ({found.method}) is better than {higher} of {len(found.dense)} dense trees"
    )
    sentences.append(f"tokens per step over {texts_of(calibration)}; sparse trees are cross-validated")
    points = [{"trees": "dense", **flat(point)} for point in found.dense]
    points += [{"trees": "sparse", **flat(point)} for point in found.sparse]
    verdicts = [{**flat(one), "best": flat(one.best), "beats_all": one.beats_all} for one in found.verdicts]
    for one, shown in zip(found.verdicts, verdicts, strict=True):
        shown["difference"] = None if one.difference is None else vars(one.difference)
    data = {"verdicts": verdicts, "possible": found.possible, "largest": found.largest, "method": found.method}
    chart = [_dense_panel(found, sparse, "tokens_per_step", TOKENS)]
    if found.dense[0].speedup is not None:
        chart.append(_dense_panel(found, sparse, "speedup", _SPEEDUP))
        sentences += _fastest(found)
    title = f"Dense and sparse trees, {model_name(calibration)}"
    return Report(points, {**data, **texts_json(calibration)}, header, rows, sentences, chart, title)


def _verdict(one: Verdict, found: DenseSweep) -> str:
    """Whether a sparse tree is better than every dense tree."""
    begin = f"the {one.nodes}-node sparse tree ({named(one.method)}, {one.tokens_per_step:.3f} tokens per step)"
    which = _all_or_random(found)
    said = f"beats every one of {which}" if one.beats_all else f"beats {one.beaten} and not all of {which}"
    best = one.best
    end = f"the best of them has {best.tokens_per_step:.3f} (widths {_widths(best)}, {best.nodes} nodes)"
    interval = "" if one.difference is None else f"; difference {ends(one.difference)} (90 %)"
    return f"{begin} {said}; {end}{interval}"


def _all_or_random(found: DenseSweep) -> str:
    count = len(found.dense)
    chosen = "all" if count == found.possible else f"random ones of the {found.possible:,}"
    return f"{count:,} dense trees ({chosen} of at most {found.largest} nodes)"


def _fastest(found: DenseSweep) -> list[str]:
    """The greatest speedups, by the profile."""
    dense = max(found.dense, key=lambda point: point.speedup or 0.0)
    sparse = max(found.sparse, key=lambda point: point.speedup or 0.0)
    return [
        f"fastest by the profile: sparse {sparse.speedup:.2f} times ({sparse.nodes} nodes, {named(sparse.method)}), "
        f"dense {dense.speedup:.2f} times ({dense.nodes} nodes, widths {_widths(dense)})"
    ]


def _dense_panel(found: DenseSweep, sparse: Mapping[str, Mapping[int, Any]], name: str, label: str) -> Panel:
    from treeopt.view.charts import NODES, Panel, Series

    dense = Series(
        "dense trees", [one.nodes for one in found.dense], [getattr(one, name) for one in found.dense], dots=True
    )
    lines = [
        Series(f"sparse: {named(method)}", list(points), [getattr(one, name) for one in points.values()])
        for method, points in sparse.items()
    ]
    return Panel(NODES, label, [dense, *lines], log2=True)


def _widths(point: DensePoint) -> str:
    return "x".join(map(str, point.widths))


def _tau_and_speed(point: Any) -> str:
    speed = "" if point.speedup is None else f" (speedup {point.speedup:.2f})"
    return f"{point.tokens_per_step:.3f}{speed}"
