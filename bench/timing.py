"""How the benches time: candidates in turn, again and again, so that the machine's moods hit all alike."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping


def add_tiny(parser: argparse.ArgumentParser) -> None:
    """The option that every bench has: the suite runs each of them so, lest one is broken unnoticed."""
    parser.add_argument("--tiny", action="store_true", help="a few seconds, to see that it runs; figures mean nothing")


def interleaved(candidates: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Median seconds of each candidate over `repeats` rounds, after one round that is not counted."""
    spent: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(repeats + 1):
        for name, run in candidates.items():
            begin = time.perf_counter()
            run()
            if round_number:
                spent[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in spent.items()}


def machine(threads: int) -> str:
    """One line about where the numbers come from."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {threads} thread(s), Python {platform.python_version()}"


def verdict(name: str, value: float, limit: float, unit: str) -> str:
    """A line that says whether a figure meets its goal."""
    return f"{'met   ' if value <= limit else 'MISSED'}  {name}: {value:.4g} {unit} (goal: at most {limit:g} {unit})"
