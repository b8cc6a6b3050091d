"""Bars of a comparison as SVG, drawn by matplotlib: the speedup of each method, with its quartiles.

The description in the file's metadata lists the figures of every bar. Equal bars give equal bytes where the versions of
matplotlib are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treeopt.view.figure import TITLE_LENGTH, WIDTH, render_figure, short_label
from treeopt.view.words import shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SETTINGS = {"axes.spines.top": False, "axes.spines.right": False}
_BAR_HEIGHT, _MARGIN = 0.32, 1.0  # inches
_COLOR, _LOSSY, _SLOWER, _LINE = "#0b7285", "#d9480f", "#9aa7b2", "#33414d"


@dataclass(frozen=True)
class Bar:
    """One method.

    Args:
        name: of the method.
        nodes: that it verifies in a step at most.
        tokens_per_step: its mean acceptance length.
        speedup: median over the repeats; None where nothing was timed.
        low: lower quartile; None as `speedup`.
        high: upper quartile; None as `speedup`.
        lossless: whether all texts are those of greedy decoding.
    """

    name: str
    nodes: int
    tokens_per_step: float
    speedup: float | None
    low: float | None
    high: float | None
    lossless: bool

    @property
    def slower(self) -> bool:
        """Whether autoregressive decoding is faster."""
        return self.speedup is not None and self.speedup < 1


def render_bars(bars: Sequence[Bar], title: str) -> str:
    """The picture as text, the first method on top."""
    description = "; ".join(f"{bar.name}, {_figures(bar)}" for bar in bars)
    return render_figure(lambda heading: bars_figure(bars, heading), title, description, _SETTINGS)


def bars_figure(bars: Sequence[Bar], heading: str) -> Figure:
    """One horizontal bar a method, its figures beside it; the dotted line is autoregressive decoding."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, _MARGIN + _BAR_HEIGHT * len(bars)), layout="constrained")
    figure.suptitle(shortened(heading, TITLE_LENGTH), x=0.01, ha="left", weight="bold").set_parse_math(False)
    axes = figure.subplots()
    lengths = [bar.speedup or 0.0 for bar in bars]
    places = list(range(len(bars)))
    colors = [_LOSSY if not bar.lossless else _SLOWER if bar.slower else _COLOR for bar in bars]
    below = [length - (bar.low or length) for bar, length in zip(bars, lengths, strict=True)]
    above = [(bar.high or length) - length for bar, length in zip(bars, lengths, strict=True)]
    axes.barh(places, lengths, color=colors, height=0.7, xerr=(below, above), ecolor=_LINE, gid="speedup")
    axes.axvline(1.0, color=_LINE, linestyle=":", linewidth=1.0)
    ends = [length + more for length, more in zip(lengths, above, strict=True)]
    for place, end, bar in zip(places, ends, bars, strict=True):
        right = max(end, 1.0)  # beside the dotted line, not across it
        axes.annotate(_figures(bar), (right, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, 1.45 * max([1.0, *ends]))  # room for the figures
    axes.set_yticks(places, [short_label(bar.name) for bar in bars])
    axes.invert_yaxis()
    axes.set_xlabel("speedup over autoregressive decoding")
    return figure


def _figures(bar: Bar) -> str:
    """The figures of a bar in words."""
    speed = "not timed" if bar.speedup is None else f"{bar.speedup:.2f}{', slower' if bar.slower else ''}"
    return f"{speed} ({bar.tokens_per_step:.2f} tokens/step)" + ("" if bar.lossless else ", not lossless")
