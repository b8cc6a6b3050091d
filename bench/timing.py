"""Timing of the benches: candidates run in turn in every round, so that other load affects all of them equally."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping


def add_tiny(parser: argparse.ArgumentParser) -> None:
    """Add the option --tiny, with which the tests run each bench."""
    parser.add_argument("--tiny", action="store_true", help="run for a few seconds as a test; the figures mean nothing")


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
    """One line that describes the machine."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {threads} thread(s), Python {platform.python_version()}"


def goal_line(name: str, value: float, limit: float, unit: str) -> str:
    """A line with a figure, its goal, and whether it meets it."""
    return f"{'met   ' if value <= limit else 'MISSED'}  {name}: {value:.4g} {unit} (goal: at most {limit:g} {unit})"


def judged(name: str, value: float, goal: float, more: str = "", *, most: bool = False) -> None:
    """Print a figure and whether it meets its goal, a lower bound or, with `most`, an upper bound."""
    met = value <= goal if most else value >= goal
    aim = f"at {'most' if most else 'least'} {goal:g}" + (f"; {more}" if more else "")
    print(f"{'met   ' if met else 'MISSED'}  {name}: {value:.4g} (goal: {aim})", flush=True)
