"""The curve as SVG by a small layout of our own: tokens per step by size and, below, speedup and overhead.

Nodes stand on a log2 axis, so that each doubling takes the same room. Bands are the intervals, prediction light and
sampling dark; hovering a point shows its figures, and the text alternative lists them all. Equal curves, equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from treeopt.optimize.curve import Curve, CurvePoint
from treeopt.optimize.intervals import Interval

_WIDTH, _LEFT, _RIGHT = 720.0, 64.0, 656.0  # of the picture, and where the panels begin and end, in pixels
_UPPER, _LOWER = (62.0, 302.0), (386.0, 556.0)  # top and bottom of the two panels
_INSET = 16.0  # from a panel's side to the first and last size
_FOOT = 46.0  # below the last panel: numbers and name of the x axis
_DIGIT = 6.0  # width of a digit, taken generously: numbers closer than this would touch
_TITLE_LENGTH = 70  # characters of the heading that fit
_STEPS, _MARGIN = 8, 0.04  # on a y axis: steps at most, and free room above and below as a share of the values

_STYLE = (
    "text{font:10px system-ui,sans-serif;fill:#33414d}"
    ".title{font-size:13px;font-weight:600}"
    ".frame{fill:none;stroke:#c3ccd4}.grid{stroke:#e3e8ed}"
    ".one{stroke:#9aa7b2;stroke-dasharray:2 3}.marker{stroke:#33414d;stroke-dasharray:5 3}"
    "polyline{fill:none;stroke-width:1.5}circle{stroke-width:1.25}"
    ".prediction{fill:#0b4f8a;fill-opacity:.17}.sampling{fill:#0b4f8a;fill-opacity:.33}"
    "polyline.tokens,circle.tokens{stroke:#0b4f8a}circle.tokens{fill:#0b4f8a}"
    "polyline.speedup,circle.speedup{stroke:#0b7285}circle.speedup{fill:#0b7285}"
    "polyline.overhead,circle.overhead{stroke:#d9480f;fill:#fff}"
    "polyline.overhead{stroke-dasharray:6 4;fill:none}text.overhead{fill:#b83c0b}"
    "g:hover>circle{stroke:#000}"
)


@dataclass(frozen=True)
class _Scale:
    """A straight map of values `low`..`high` to pixels `start`..`end`; a single value falls in the middle."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[tuple[float, str], ...] = ()  # where, and what is written there

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + share * (self.end - self.start)


Place = tuple[float, float]


def render_curve(curve: Curve, title: str = "") -> str:
    """The picture as text; `title` stands above it."""
    timed = [point for point in curve.points if point.speedup is not None and point.overhead is not None]
    heading = "".join(filter(str.isprintable, title)) or "Tokens per step by size of the tree"
    shown = heading if len(heading) <= _TITLE_LENGTH else heading[: _TITLE_LENGTH - 1] + "…"
    logs = [math.log2(point.nodes) for point in curve.points]
    x = _Scale(min(logs), max(logs), _LEFT + _INSET, _RIGHT - _INSET)
    bottom = (_LOWER if timed else _UPPER)[1]
    size = f"{_WIDTH:.0f}", f"{bottom + _FOOT:.0f}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" '
        f'viewBox="0 0 {size[0]} {size[1]}" role="img">',
        f"<title>{escape(heading)}</title>",
        f"<desc>{escape('; '.join(_figures(point) for point in curve.points))}</desc>",
        f"<style>{_STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text class="title" x="{_LEFT:.0f}" y="20">{escape(shown)}</text>',
        *_upper(curve.points, curve.best, x),
        *(_lower(timed, curve.best, x) if timed else []),
        _text((_LEFT + _RIGHT) / 2, bottom + 36, "nodes (root counted)"),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _upper(points: Sequence[CurvePoint], best: int | None, x: _Scale) -> list[str]:
    """Tokens per step, its line on its two bands."""
    bands = {
        kind: [interval for point in points if (interval := getattr(point, kind)) is not None]
        for kind in ("prediction", "sampling")
    }
    ends = [end for intervals in bands.values() for each in intervals for end in (each.low, each.high)]
    y = _y_scale([*ends, *(point.tokens_per_step for point in points)], _UPPER)
    places = [(_x(x, point), y.at(point.tokens_per_step)) for point in points]
    names = [("line", "tokens", "tokens per step, unseen texts")]
    for kind, found in reversed(bands.items()):
        names += [("band", kind, f"{kind} interval, {found[0].level:.0%}")] if found else []
    return [
        '<g class="upper">',
        *_frame(y, _UPPER, "tokens per step"),
        *_x_axis(points, best, x, _UPPER),
        *(_band(kind, places, found, y) for kind, found in bands.items() if found),
        *_line("tokens", places, points),
        *_legend(names, _UPPER[0] - 15),
        "</g>",
    ]


def _lower(points: Sequence[CurvePoint], best: int | None, x: _Scale) -> list[str]:
    """Speedup on the left axis, overhead on the right one, and the best size; both axes show 1."""
    speedups, overheads = [point.speedup or 0.0 for point in points], [point.overhead or 0.0 for point in points]
    left, right = _y_scale([1.0, *speedups], _LOWER), _y_scale([1.0, *overheads], _LOWER)
    columns = [_x(x, point) for point in points]
    names = [
        ("line", "speedup", "speedup (left)"),
        ("line", "overhead", "overhead: time of a step, one node = 1 (right)"),
    ]
    return [
        '<g class="lower">',
        *_frame(left, _LOWER, "speedup over one by one"),
        *_x_axis(points, best, x, _LOWER),
        _across(left.at(1.0), "one"),
        *(_text(_RIGHT + 6, right.at(value) + 3.5, label, "overhead", "start") for value, label in right.ticks),
        _upright(_WIDTH - 12, _LOWER, "overhead", "overhead"),
        *(_marker(point, x) for point in points if point.nodes == best),
        *_line("overhead", list(zip(columns, map(right.at, overheads), strict=True)), points),
        *_line("speedup", list(zip(columns, map(left.at, speedups), strict=True)), points),
        *_legend(names, _LOWER[0] - 30),
        "</g>",
    ]


def _y_scale(values: Sequence[float], panel: tuple[float, float]) -> _Scale:
    """Room for all values and a little more, with ticks at multiples of 1, 2 or 5 times a power of ten."""
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(abs(high), 1.0):
        low, high = low - 0.5, high + 0.5
    margin = _MARGIN * (high - low)
    low, high = low - margin, high + margin
    power = math.floor(math.log10((high - low) / _STEPS))
    factor = next(each for each in (1, 2, 5, 10) if each * 10.0**power * _STEPS >= high - low or each == 10)
    step, decimals = factor * 10.0**power, max(0, -power - (factor == 10))
    ticks = (
        (index * step, f"{index * step:.{decimals}f}")
        for index in range(math.ceil(low / step), math.floor(high / step) + 1)
    )
    return _Scale(low, high, panel[1], panel[0], tuple(ticks))


def _frame(y: _Scale, panel: tuple[float, float], name: str) -> list[str]:
    """A line across the panel at each tick, its number, the panel's border and the axis's name."""
    lines = []
    for value, label in y.ticks:
        lines.append(_across(y.at(value), "grid"))
        lines.append(_text(_LEFT - 6, y.at(value) + 3.5, label, "y", "end"))
    size = f'width="{_RIGHT - _LEFT:.1f}" height="{panel[1] - panel[0]:.1f}"'
    border = f'<rect class="frame" x="{_LEFT:.1f}" y="{panel[0]:.1f}" {size}/>'
    return [*lines, border, _upright(18, panel, name)]


def _x_axis(points: Sequence[CurvePoint], best: int | None, x: _Scale, panel: tuple[float, float]) -> list[str]:
    """A line down the panel at each size that has room for its number: first the best, the ends, powers of two."""
    ends = (points[0].nodes, points[-1].nodes)
    sizes = sorted(
        {point.nodes for point in points},
        key=lambda size: (size != best, size not in ends, size & (size - 1) != 0, size),
    )
    kept: dict[int, tuple[float, float]] = {}  # size -> where it stands, and half the width of its number
    for size in sizes:
        at, half = x.at(math.log2(size)), (len(str(size)) + 1) * _DIGIT / 2
        if all(abs(at - other) >= half + wide for other, wide in kept.values()):
            kept[size] = at, half
    lines = []
    for size, (at, _) in sorted(kept.items()):
        lines.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{panel[0]:.1f}" y2="{panel[1]:.1f}"/>')
        lines.append(_text(at, panel[1] + 15, str(size), "x"))
    return lines


def _band(kind: str, places: Sequence[Place], intervals: Sequence[Interval], y: _Scale) -> str:
    """The area between the ends of the intervals; that of a single point is a bar."""
    columns = [at for at, _ in places]
    if len(columns) == 1:
        columns, intervals = [columns[0] - 8, columns[0] + 8], [intervals[0]] * 2
    above = [(at, y.at(each.high)) for at, each in zip(columns, intervals, strict=True)]
    below = [(at, y.at(each.low)) for at, each in zip(columns, intervals, strict=True)]
    return f'<polygon class="{kind}" points="{_joined([*above, *reversed(below)])}"/>'


def _line(kind: str, places: Sequence[Place], points: Sequence[CurvePoint]) -> list[str]:
    dots = [
        f'<g><title>{escape(_figures(point))}</title><circle class="{kind}" cx="{at:.1f}" cy="{y:.1f}" r="2.8"/></g>'
        for (at, y), point in zip(places, points, strict=True)
    ]
    return [f'<polyline class="{kind}" points="{_joined(places)}"/>', *dots]


def _marker(point: CurvePoint, x: _Scale) -> str:
    """The best size: a line down the panel, and its figures above it, kept within the panel's sides."""
    at = _x(x, point)
    label = f"best: {_nodes(point)}, {point.speedup:.2f} times"
    half = len(label) * _DIGIT / 2
    line = f'<line class="marker" x1="{at:.1f}" x2="{at:.1f}" y1="{_LOWER[0] - 5:.1f}" y2="{_LOWER[1]:.1f}"/>'
    return line + _text(min(max(at, _LEFT + half), _RIGHT - half), _LOWER[0] - 10, label, "best")


def _legend(names: Sequence[tuple[str, str, str]], y: float) -> list[str]:
    """A row of samples with their names: (line or band, class, name)."""
    lines, at = [], _LEFT
    for shape, kind, name in names:
        if shape == "line":
            lines.append(f'<polyline class="{kind}" points="{_joined([(at, y), (at + 22, y)])}"/>')
        else:
            lines.append(f'<rect class="{kind}" x="{at:.1f}" y="{y - 5:.1f}" width="22" height="10"/>')
        lines.append(_text(at + 28, y + 3.5, name, "legend", "start"))
        at += 28 + len(name) * _DIGIT + 10
    return lines


def _figures(point: CurvePoint) -> str:
    """What the picture says of a point, in words."""
    text = (
        f"{_nodes(point)}: {point.tokens_per_step:.3f} tokens per step, "
        f"sampling {_between(point.sampling)}, prediction {_between(point.prediction)}"
    )
    return text if point.speedup is None else f"{text}, overhead {point.overhead:.3f}, speedup {point.speedup:.3f}"


def _between(interval: Interval | None) -> str:
    return "unknown" if interval is None else f"{interval.low:.3f} to {interval.high:.3f}"


def _nodes(point: CurvePoint) -> str:
    return f"{point.nodes} node{'s' if point.nodes != 1 else ''}"


def _x(x: _Scale, point: CurvePoint) -> float:
    return x.at(math.log2(point.nodes))


def _joined(places: Sequence[Place]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _across(y: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{_LEFT:.1f}" x2="{_RIGHT:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str = "name", anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _upright(x: float, panel: tuple[float, float], text: str, kind: str = "name") -> str:
    """A name beside a panel, read from below."""
    y = (panel[0] + panel[1]) / 2
    return (
        f'<text class="{kind}" transform="translate({x:.1f} {y:.1f}) rotate(-90)" text-anchor="middle">'
        f"{escape(text)}</text>"
    )
