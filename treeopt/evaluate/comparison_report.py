"""What a comparison says: its facts and tables, and the keys of `--json`."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from treeopt.errors import counted
from treeopt.evaluate.comparison import Comparison, Figures, Row
from treeopt.facts import Column, Part, Table, attribute, picked, shown, threads
from treeopt.texts.prompts import skipped_text

_NAMES = {"generate": "stock generate"}  # printed in place of a method's name


def _name(row: Row) -> str:
    return _NAMES.get(row.method, row.method)


def _share(row: Row) -> str:
    """The texts that equal those of stock generate."""
    if row.figures is None:
        return "left out"
    return "yes" if row.lossless and row.exact else f"{row.same}/{row.figures.texts}"


def report_of(found: Comparison) -> Iterator[Part]:
    """One line a method, the figures by category and turn, and what they are of."""
    best, dtype = found.recommended, found.made_by["dtype"]
    equal = "lossless" if dtype == "float32" else f"equal in {dtype}"
    columns = (
        Column("method", _name),
        Column("nodes", "nodes"),
        Column("tokens/step", "figures.mean_acceptance_length", ".3f"),
        Column("tokens/s", "figures.tokens_per_second", ".0f"),
        Column("speedup", "figures.speedup", ".2f"),
        Column(equal, _share),
    )
    gaps = [gap for row in found.rows for gap in row.gaps]
    repeats = f"median (quartiles) of {found.repeats} repeats" if found.repeats > 1 else "one repeat"
    yield Table(columns, [*found.rows, dataclasses.replace(best, method=f"recommended: {_name(best)}")])
    yield (
        "tokens/step: all tokens / all steps, the mean acceptance length; speedup: over autoregressive decoding by our "
        f"loop, without prefill; {repeats}, batch 1, {found.made_by['device']}, {threads(found.made_by['threads'])}"
    )
    yield (
        f"{equal}: texts that equal stock greedy generate token for token; "
        f"learned from {counted(found.learned, 'prompt')}, compared on {len(found.texts)} other texts"
    )
    yield from (f"{row.method} was left out: {row.left_out}" for row in found.rows if row.left_out)
    if gaps:
        yield f"logits where a text first differs: {min(gaps):.2g} to {max(gaps):.2g} apart, by one forward"
    yield from _parts(found)
    if any(row.method.endswith("with the memory") for row in found.rows):
        also = "Token Recycling, SuffixDecoding and SAM-Decoding do too, other rows do not"
        yield f"with the memory: it also learns the compared texts, one after another; {also}"
    if found.dropped:
        yield f"left out, because they equal prompts that were learned from: {counted(found.dropped, 'prompt')}"
    yield skipped_text(found.skipped)


def _parts(found: Comparison) -> Iterator[Part]:
    """Tokens per step and speedup of each method by category and by turn, where there are several."""

    def column(name: str, texts: int) -> Column:
        return Column(f"{name}, {texts}", lambda pair: pair[1][name], _short)

    pairs = []
    for row in (row for row in found.rows if row.figures is not None):
        turns = {f"turn {turn}": one for turn, one in row.by_turn.items()} if len(row.by_turn) > 1 else {}
        pairs.append((row, {**row.by_category, **turns}))
    counts = {name: one.texts for _, parts in pairs for name, one in parts.items()}
    if counts:
        yield "tokens/step (speedup) by category and turn, with the number of texts:"
        yield Table((Column("method", lambda pair: _name(pair[0])), *map(column, counts, counts.values())), pairs)


def _short(figures: Figures) -> str:
    return f"{figures.mean_acceptance_length:.2f} ({shown(attribute(figures.speedup, 'median'), '.2f')})"


def lossy_texts(found: Comparison) -> list[str]:
    """In float32 a warning for each method with other texts than stock generate."""
    return [
        f"{row.method} differs on {counted(len(found.texts) - row.same, 'text')}; treeopt validate finds the causes"
        for row in found.rows
        if row.lossless is False and row.exact
    ]


def fastest_settings(found: Sequence[Comparison]) -> list[str]:
    """The dtype and forward with the most tokens per second, without and with speculative decoding."""

    def speed(pair: tuple[str, Row]) -> float:
        return float(attribute(pair[1], "figures.tokens_per_second.median") or 0.0)

    plain = max(((one.setting, one.rows[0]) for one in found), key=speed)
    best = max(((one.setting, one.recommended) for one in found), key=speed)
    return [
        f"fastest, {what}: {pair[0]}, {_name(pair[1])}, {speed(pair):.1f} tokens/s"
        for what, pair in (("plain decoding", plain), ("recommended", best))
    ]


def picture_rows(found: Sequence[Comparison]) -> list[tuple[dict[str, Any], str]]:
    """The methods that ran as rows of JSON, each with its name in the picture, of several settings with theirs."""
    return [
        (_row_data(row), _name(row) + (f", {one.setting}" if len(found) > 1 else ""))
        for one in found
        for row in one.rows
        if row.figures is not None
    ]


def data_of(found: Comparison) -> dict[str, Any]:
    """The keys of `--json`."""
    return {
        **picked(found, "learned", "dropped", "repeats", "made_by"),
        "rows": [_row_data(row) for row in found.rows],
        "recommended": found.recommended.method,
        "texts": len(found.texts),
        "skipped": len(found.skipped),
        "skipped_prompts": found.skipped,
    }


def _row_data(row: Row) -> dict[str, Any]:
    return {
        **picked(row, "method", "nodes", "lossless", "gaps"),
        **_figures_data(row.figures),
        "same_texts": row.same,
        "by_category": {name: _figures_data(figures) for name, figures in row.by_category.items()},
        "by_turn": {turn: _figures_data(figures) for turn, figures in row.by_turn.items()},
        "left_out": row.left_out or None,
    }


def _figures_data(figures: Figures | None) -> dict[str, Any]:
    """Medians, and quartiles over the repeats; null where they are equal, as those of one repeat."""
    spreads = picked(figures, "tokens_per_second", "speedup")
    return {
        **picked(figures, "texts", "mean_acceptance_length"),
        **{name: attribute(one, "median") for name, one in spreads.items()},
        "quartiles": {
            name: None if one is None or one.low == one.high else (one.low, one.high) for name, one in spreads.items()
        },
    }
