"""The output of `treeopt compare`: the tables, the CSV, the picture and the JSON object."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treeopt.cli.console import Console, skipped_text, threads
from treeopt.cli.facts import shown
from treeopt.errors import counted

if TYPE_CHECKING:
    from treeopt.evaluate.comparison import Comparison, Figures, Row
    from treeopt.evaluate.metrics import Spread
    from treeopt.view.charts import Bar

_NAMES = {"generate": "stock generate"}  # printed in place of a method's name
_COLUMNS = (
    *("method", "nodes", "category", "texts", "mean_acceptance_length"),
    *("tokens_per_second", "tokens_per_second_low", "tokens_per_second_high"),
    *("speedup", "speedup_low", "speedup_high", "lossless", "same_texts", "left_out", "setting"),
)
ALL = "all"  # the category of all texts, in CSV


def report_comparison(console: Console, found: Comparison) -> None:
    """Print one line a method, the figures by category and turn, and what they are of."""
    best, dtype = found.recommended, found.made_by["dtype"]
    exact = dtype == "float32"
    rows = [*map(_cells, found.rows), [f"recommended: {_cells(best)[0]}", *_cells(best)[1:]]]
    equal = "lossless" if exact else f"equal in {dtype}"
    console.table(["method", "nodes", "tokens/step", "tokens/s", "speedup", equal], rows)
    repeats = f"median (quartiles) of {found.repeats} repeats" if found.repeats > 1 else "one repeat"
    console.say(
        "tokens/step: all tokens / all steps, the mean acceptance length; speedup: over autoregressive decoding by our "
        f"loop, without prefill; {repeats}, batch 1, {found.made_by['device']}, {threads(found.made_by['threads'])}"
    )
    console.say(
        f"{equal}: texts that equal stock greedy generate token for token; "
        f"learned from {counted(found.learned, 'prompt')}, judged on {len(found.texts)} other texts"
    )
    for row in found.rows:
        if row.left_out:
            console.say(f"{row.method} was left out: {row.left_out}")
        elif not row.lossless and exact:
            differing = len(found.texts) - row.same
            console.warn(
                f"warning: {row.method} differs on {counted(differing, 'text')}; treeopt validate finds the causes"
            )
    _report_gaps(console, found)
    _report_parts(console, found, "category", {row.method: row.by_category for row in found.rows})
    by_turn = {row.method: {f"turn {turn}": one for turn, one in row.by_turn.items()} for row in found.rows}
    if any(len(parts) > 1 for parts in by_turn.values()):
        _report_parts(console, found, "turn", by_turn)
    if found.dropped:
        console.say(f"not judged, as they equal learned ones: {counted(found.dropped, 'prompt')}")
    console.report(skipped_text(found.skipped))


def _report_gaps(console: Console, found: Comparison) -> None:
    """Print how near ties are where texts in half precision differ."""
    gaps = [gap for row in found.rows for gap in row.gaps]
    if gaps:
        console.say(
            "where a text first differs, the logits of the two tokens by one forward are "
            f"{min(gaps):.2g} to {max(gaps):.2g} apart; treeopt validate finds the causes"
        )


def report_settings(console: Console, found: Sequence[Comparison]) -> None:
    """Print the dtype and forward with the most tokens per second, without and with speculative decoding."""

    def speed(pair: tuple[str, Row]) -> float:
        figures = pair[1].figures
        return 0.0 if figures is None or figures.tokens_per_second is None else figures.tokens_per_second.median

    plain = max(((one.setting, one.rows[0]) for one in found), key=speed)
    best = max(((one.setting, one.recommended) for one in found), key=speed)
    for what, (setting, row) in (("plain decoding", plain), ("recommended", best)):
        console.say(f"fastest, {what}: {setting}, {_cells(row)[0]}, {speed((setting, row)):.1f} tokens/s")


def _cells(row: Row) -> list[str]:
    name, nodes = _NAMES.get(row.method, row.method), "-" if row.nodes is None else str(row.nodes)
    if row.figures is None:
        return [name, nodes, "-", "-", "-", "left out"]
    figures = row.figures
    share = "yes" if row.lossless and row.exact else f"{row.same}/{figures.texts}"
    speeds = shown(figures.tokens_per_second, ".0f"), shown(figures.speedup, ".2f")
    return [name, nodes, f"{figures.mean_acceptance_length:.3f}", *speeds, share]


def _report_parts(console: Console, found: Comparison, title: str, parts: Mapping[str, Mapping[str, Figures]]) -> None:
    """Print tokens per step and speedup of each method by category or turn."""
    names = list(dict.fromkeys(name for of_method in parts.values() for name in of_method))
    if not names:
        return
    rows = [
        [_NAMES.get(row.method, row.method), *(_short(parts[row.method][name]) for name in names)]
        for row in found.rows
        if row.figures is not None
    ]
    counts = next(iter(parts.values()))
    console.say(f"tokens/step (speedup) by {title}, with the number of texts:")
    console.table(["method", *(f"{name}, {counts[name].texts}" for name in names)], rows)


def _short(figures: Figures) -> str:
    speedup = "-" if figures.speedup is None else f"{figures.speedup.median:.2f}"
    return f"{figures.mean_acceptance_length:.2f} ({speedup})"


def as_bars(found: Sequence[Comparison]) -> list[Bar]:
    """The methods that ran, for the picture; of several settings with their names."""
    from treeopt.view.charts import Bar

    return [
        Bar(
            _NAMES.get(row.method, row.method) + (f", {one.setting}" if len(found) > 1 else ""),
            row.nodes or 1,
            row.figures.mean_acceptance_length,
            *_ends(row.figures.speedup),
            lossless=bool(row.lossless),
        )
        for one in found
        for row in one.rows
        if row.figures is not None
    ]


def as_csv(found: Sequence[Comparison]) -> str:
    """One line a method for all texts, and one for each category and turn; the last column is the setting."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for one in found:
        for line in itertools.chain.from_iterable(map(_lines, one.rows)):
            known = {**line, "setting": one.setting}
            writer.writerow({name: "" if value is None else value for name, value in known.items()})
    return stream.getvalue()


def _lines(row: Row) -> Iterator[dict[str, Any]]:
    common = {"method": row.method, "nodes": row.nodes, "category": ALL, "left_out": row.left_out}
    if row.figures is None:
        yield common
        return
    yield {**common, **_columns(row.figures), "lossless": row.lossless, "same_texts": row.same}
    by_turn = {f"turn {turn}": figures for turn, figures in row.by_turn.items()} if len(row.by_turn) > 1 else {}
    for name, figures in {**row.by_category, **by_turn}.items():
        yield {**common, "category": name, **_columns(figures)}


def _columns(figures: Figures) -> dict[str, Any]:
    found: dict[str, Any] = {"texts": figures.texts, "mean_acceptance_length": figures.mean_acceptance_length}
    for name, spread in (("tokens_per_second", figures.tokens_per_second), ("speedup", figures.speedup)):
        found |= dict(zip((name, f"{name}_low", f"{name}_high"), _ends(spread), strict=True))
    return found


def _ends(spread: Spread | None) -> tuple[float | None, float | None, float | None]:
    """Median, lower and upper quartile."""
    return (None, None, None) if spread is None else (spread.median, spread.low, spread.high)


def as_json(found: Comparison) -> dict[str, Any]:
    """The keys of `--json`."""
    return {
        "rows": [_row_as_json(row) for row in found.rows],
        "recommended": found.recommended.method,
        "texts": len(found.texts),
        "learned": found.learned,
        "dropped": found.dropped,
        "skipped": len(found.skipped),
        "repeats": found.repeats,
        "made_by": found.made_by,
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    none = dict.fromkeys(("mean_acceptance_length", "tokens_per_second", "speedup"))
    return {
        "method": row.method,
        "nodes": row.nodes,
        **(none if row.figures is None else _figures_as_json(row.figures)),
        "lossless": row.lossless,
        "same_texts": row.same,
        "gaps": list(row.gaps),
        "by_category": {name: _figures_as_json(figures) for name, figures in row.by_category.items()},
        "by_turn": {str(turn): _figures_as_json(figures) for turn, figures in row.by_turn.items()},
        "left_out": row.left_out or None,
    }


def _figures_as_json(figures: Figures) -> dict[str, Any]:
    """Medians, and quartiles over the repeats; null where they are equal, as those of one repeat."""
    spreads = {"tokens_per_second": figures.tokens_per_second, "speedup": figures.speedup}
    known = {name: spread for name, spread in spreads.items() if spread is not None and spread.low != spread.high}
    return {
        "texts": figures.texts,
        "mean_acceptance_length": figures.mean_acceptance_length,
        **{name: _ends(spread)[0] for name, spread in spreads.items()},
        "quartiles": {name: _ends(known[name])[1:] if name in known else None for name in spreads},
    }
