"""The report of `treeopt sweep --epsilon`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt.cli.sweep_report import TOKENS, Report, ends, flat

if TYPE_CHECKING:
    from treeopt.evaluate.sweep_epsilon import EpsilonPoint, EpsilonSweep
    from treeopt.optimize.intervals import Interval
    from treeopt.texts.encode import Skipped
    from treeopt.view.charts import Panel

_EPSILON_PANELS = {
    "tokens_per_step": TOKENS,
    "log_likelihood": "log-likelihood a token",
    "distinct_2": "distinct-2",
    "agreement_with_greedy": "agreement with greedy texts",
}


def of_epsilon(found: EpsilonSweep, model: str, skipped: Sequence[Skipped]) -> Report:
    """Typical acceptance by epsilon, beside greedy and sampled texts."""
    points = [_epsilon_point(point) for point in found.points]
    rows = [
        [
            point.texts if point.epsilon is None else f"typical, epsilon {point.epsilon:g}",
            f"{point.tokens_per_step:.3f}",
            ends(point.sampling),
            f"{point.predicted:.3f}",
            f"{point.quality.log_likelihood:.4f}",
            *(f"{share:.4f}" for share in point.quality.distinct),
            f"{point.quality.agreement:.1%}",
        ]
        for point in found.points
    ]
    header = ["texts", "tokens/step", "90 %", "predicted", "log-likelihood a token"]
    header += ["distinct-1", "distinct-2", "distinct-3", "agreement with greedy"]
    misses = sum(point.misses for point in found.points)
    typical = sum(point.epsilon is not None for point in found.points)
    sentences = [
        f"{found.texts} texts, {found.nodes} nodes, temperature {found.temperature:g}, delta = sqrt(epsilon); typical "
        "acceptance is LOSSY",
        f"{misses} of {found.texts * typical} texts took another number of steps than predicted",
    ]
    data = {"temperature": found.temperature, "texts": found.texts, "nodes": found.nodes}
    chart = [_epsilon_panel(points, name, label) for name, label in _EPSILON_PANELS.items()]
    title = f"Typical acceptance by epsilon, {Path(model).name}"
    return Report(points, data, header, rows, sentences, chart, title, [*skipped, *found.skipped])


def _epsilon_point(point: EpsilonPoint) -> dict[str, Any]:
    found = flat(point)
    quality = found.pop("quality")
    return {
        **found,
        "log_likelihood": quality.log_likelihood,
        **{f"distinct_{n}": share for n, share in enumerate(quality.distinct, start=1)},
        "agreement_with_greedy": quality.agreement,
    }


def _epsilon_panel(points: Sequence[Mapping[str, Any]], name: str, label: str) -> Panel:
    """A figure by epsilon; those of greedy and sampled texts as dashed lines."""
    from treeopt.view.charts import Panel, Series

    typical = [point for point in points if point["epsilon"] is not None]
    places = [point["epsilon"] for point in typical]
    known = [_interval(point, name) for point in typical]
    series = [Series("typical", places, [point[name] for point in typical], known)]
    for point in points:
        if point["epsilon"] is None:
            ends = [places[0], places[-1]]
            series.append(Series(point["texts"], ends, [point[name]] * 2, dashed=True))
    return Panel("epsilon", label, series)


def _interval(point: Mapping[str, Any], name: str) -> Interval | None:
    from treeopt.optimize.intervals import Interval

    low, high = point.get(f"{name}_low"), point.get(f"{name}_high")
    return None if low is None or high is None else Interval(low, high)
