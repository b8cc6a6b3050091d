"""Losslessness in random cases: family, dtype, attention, drafter, trees, acceptance rule, batch, ends, processors.

    python bench/lossless.py                      # 20,000 cases
    python bench/lossless.py --families paths     # of the families that verify trees by paths alone
    python bench/lossless.py --case 12345         # one of them
    python bench/lossless.py --case 12345 --set rows=0 --set nodes=4
    python bench/lossless.py --set drafter=eagle  # all cases with random EAGLE heads
    python bench/lossless.py --device cuda

The texts of exact rules are those of stock greedy `generate`, those of the typical rule are checked token by token with
a plain forward, and those of rules that draw by a chi-square test. A case that fails is made simpler as long as it
fails, and printed as a command. Exit status 1 if any case fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence

import lossless_stock
import numpy as np
import torch
import transformers
from lossless_cases import CONTEXTS, DRAFTED, KINDS, Case, draw, prompts_of
from lossless_run import FAILED, REFUSED, ROUNDING, SAME, Result, run
from lossless_shrink import shrunk
from timing import add_tiny, machine

CASES, TINY = 20_000, 40
EVERY = 500  # cases between two lines of progress
DIMENSIONS = ("dtype", "attention", "context", "drafter", "plan", "rule", "via", "processors", "ends")


class Tally:
    """Counts of the cases so far."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.by: dict[str, Counter[str]] = {name: Counter() for name in (*DIMENSIONS, "rows", "draft", "family")}
        self.more: Counter[str] = Counter()
        self.p: list[float] = []
        self.tokens = self.steps = 0

    def add(self, case: Case, result: Result) -> None:
        """Count one case; a refused one among the outcomes alone."""
        self.outcomes[result.outcome] += 1
        if result.outcome == REFUSED:
            return
        for name in DIMENSIONS:
            self.by[name][str(getattr(case, name))] += 1
        self.by["rows"][str(case.rows.count(",") + 1)] += 1
        self.by["family"][case.family] += 1
        if case.drafter in DRAFTED:
            self.by["draft"][case.draft] += 1
        self.tokens, self.steps = self.tokens + result.tokens, self.steps + result.steps
        longest = max(map(len, prompts_of(case)))
        room = CONTEXTS[case.context] - longest - case.new
        self.more["to the last or last but one position of the context"] += room <= 1
        self.more["over 256 entries of the cache"] += longest <= 256 < longest + case.new + case.nodes
        self.more["a text ended by an end token"] += case.ends > 0 and result.ended
        if result.p is not None:
            self.p.append(result.p)

    def report(self) -> str:
        """All counts, one dimension a line."""
        lines = [
            f"{name}: " + ", ".join(f"{key} {n:,}" for key, n in found.most_common()) for name, found in self.by.items()
        ]
        families = self.by["family"].values()
        lines[-1] = f"family: {len(families)}, of {min(families, default=0)} to {max(families, default=0)} cases each"
        lines += [f"{what}: {count:,}" for what, count in self.more.items()]
        lines.append(
            f"{self.tokens:,} tokens in {self.steps:,} steps, {self.tokens / max(1, self.steps):.2f} tokens per step"
        )
        if self.p:
            shares = np.histogram(self.p, bins=5, range=(0, 1))[0]
            lines.append(f"drawn: {len(self.p)} tests, least p {min(self.p):.2g}, in fifths of p {shares.tolist()}")
        return "\n".join(lines)


def command(case: Case) -> str:
    """The command line that runs a case, which is that of its seed but for some fields."""
    given, drawn = dataclasses.asdict(case), dataclasses.asdict(draw(case.seed))
    changed = [f"--set {shlex.quote(f'{name}={value}')}" for name, value in given.items() if value != drawn[name]]
    return " ".join([f"python bench/lossless.py --case {case.seed}", *changed])


def with_settings(case: Case, settings: Sequence[str]) -> Case:
    """The case with fields set as NAME=VALUE."""
    kinds = {field.name: type(getattr(case, field.name)) for field in dataclasses.fields(case)}
    given = dict(one.split("=", 1) for one in settings)
    return dataclasses.replace(case, **{name: kinds[name](value) for name, value in given.items()})


def show_failure(case: Case, result: Result) -> None:
    """Print a case that failed, and a simpler one."""
    print(f"FAILED  {result.detail}\n  {command(case)}", flush=True)
    simple = shrunk(case, lambda one: run(one).outcome == FAILED)
    if simple != case:
        print(f"  simpler: {run(simple).detail}\n  {command(simple)}", flush=True)


def campaign(first: int, count: int, families: Sequence[str], settings: Sequence[str] = ()) -> int:
    """Run the cases of consecutive seeds on some families, with fields set; the number that failed."""
    tally, begin = Tally(), time.perf_counter()
    for done, seed in enumerate(range(first, first + count), start=1):
        case = with_settings(draw(seed, families), settings)
        result = run(case)
        tally.add(case, result)
        if result.outcome == FAILED:
            show_failure(case, result)
        elif result.outcome == ROUNDING and case.dtype != "bfloat16":
            print(f"rounding  {result.detail}\n  {command(case)}", flush=True)
        if done % EVERY == 0:
            spent = time.perf_counter() - begin
            print(f"{done:,} cases, {spent:.0f} s: {dict(tally.outcomes)}", flush=True)
    print(tally.report())
    counts = tally.outcomes
    print(
        f"{count:,} cases, seeds {first} to {first + count - 1}, {time.perf_counter() - begin:.0f} s: "
        f"{counts[SAME]:,} as stock generate or the rule says, {counts[ROUNDING]:,} that differ by rounding alone, "
        f"{counts[REFUSED]:,} refused, {counts[FAILED]:,} failed"
    )
    return counts[FAILED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--families", choices=list(KINDS), default="all", help="by the route of their trees")
    parser.add_argument("--case", type=int, help="run the case of this seed alone")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change a field of the cases")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    add_tiny(parser)
    options = parser.parse_args()
    lossless_stock.place = options.device
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"{machine(1)}, transformers {transformers.__version__}")
    families = KINDS[options.families]
    if options.case is None:
        if campaign(options.first, TINY if options.tiny else options.cases, families, options.set):
            sys.exit(1)
        return
    case = with_settings(draw(options.case, families), options.set)
    result = run(case)
    print(case, *map(str, prompts_of(case)), result, sep="\n")
    if result.outcome == FAILED:
        show_failure(case, result)
        sys.exit(1)


if __name__ == "__main__":
    main()
