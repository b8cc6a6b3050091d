"""Tokens per step of shorter chains from the counts of a longer one, beside replay, for the models and drafters here.

    python bench/counters.py [CALIBRATION ...] [--limit 160] [--shared ../shared]

The counts are those of a replayed chain of K drafts, K up to 8, as an engine would report them; the estimate of every
k < K is compared with replay of the chain of k, and so is the plain sum 1 + P(>= 1) + ... + P(>= k). Goals: an error of
at most 3 %, every interval holds the replayed figure, and from 5,000 steps on is at most 5 % wide to either side.
Given files are compared in place of new calibrations.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import add_tiny, judged, machine

from treeopt.calibration import Calibration
from treeopt.cli.app import program
from treeopt.files.calibrations import load_calibration
from treeopt.optimize.chains import MeasuredAcceptance, acceptance_rates, mean_acceptance, replay_chain
from treeopt.optimize.counters import estimate_chains

LONGEST = 8  # drafts
MANY = 5000  # steps from which the width of intervals has a goal
POCKET = {
    "pocket, heads": ["--heads", "pocket"],
    "pocket, heads+ngram": ["--heads", "pocket", "--drafter", "heads+ngram"],
    "pocket, ngram": ["--model", "pocket", "--drafter", "ngram"],
    "pocket, draft model": ["--model", "pocket", "--draft", "pocket-draft"],
}


@dataclass(frozen=True)
class Case:
    """The chain of k drafts, estimated from that of K, beside its replay; errors are relative."""

    steps: int
    error: float
    sum_error: float
    held: bool
    width: float  # of half the interval, relative


def cases(calibration: Calibration) -> Iterator[Case]:
    """All K up to the levels, and all k below."""
    longest = min(calibration.num_heads, LONGEST)
    counts = {drafts: replay_chain(calibration, drafts).histogram for drafts in range(1, longest + 1)}
    for measured in counts.values():
        found = estimate_chains(MeasuredAcceptance(mean_acceptance(measured), tuple(measured)))
        rates = acceptance_rates(measured)
        for chain in found.chains[1:-1]:
            true = mean_acceptance(counts[chain.drafts])
            yield Case(
                found.steps,
                chain.tokens_per_step / true - 1,
                (1 + sum(rates[: chain.drafts])) / true - 1,
                chain.low <= true <= chain.high,
                (chain.high - chain.low) / 2 / chain.tokens_per_step,
            )


def calibrations(options: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Calibration]]:
    """The given calibrations, or small ones of each drafter."""
    for file in options.files:
        yield Path(file).stem, load_calibration(file)
    if options.files:
        return
    lines = dict(POCKET)
    heads = Path(options.shared) / "models" / "tinystories-260k-medusa"
    if heads.is_dir():
        prompts = str(Path(options.shared) / "data" / "story_openings.json")
        lines["tinystories, heads"] = ["--heads", str(heads), "--prompts", prompts]
    size = ["--limit", str(options.limit), "--max-new-tokens", str(options.tokens)]
    for name, line in lines.items():
        learned = ["--kind", "static"]
        learned += ["--learn-tokens", str(options.learn)] if name.endswith("ngram") else []
        file = str(folder / "c.safetensors")
        with contextlib.redirect_stdout(io.StringIO()):
            program(
                ["calibrate", *line, *size, *learned, "-q", "--no-progress", "--force", "-o", file],
                standalone_mode=False,
            )
        yield name, load_calibration(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="CALIBRATION")
    parser.add_argument("--limit", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--learn", type=int, default=4000)
    parser.add_argument("--shared", default="../shared")
    add_tiny(parser)
    options = parser.parse_args()
    if options.tiny:
        options.limit, options.tokens, options.learn = 6, 24, 0
    torch.set_num_threads(1)
    print(f"{machine(1)}; {len(options.files) or options.limit} {'files' if options.files else 'prompts'}")
    everything: list[Case] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, calibration in calibrations(options, Path(folder)):
            found = list(cases(calibration))
            if not found:
                print(f"{name}: one level, no estimate")
                continue
            everything += found
            worst = max(abs(case.error) for case in found)
            plain = max(abs(case.sum_error) for case in found)
            held, widest = sum(case.held for case in found), max(case.width for case in found)
            print(
                f"{name}: {len(found)} estimates from {min(case.steps for case in found):,} steps or more: error at "
                f"most {worst:.2%} (plain sum {plain:.2%}), {held} intervals hold, widest half {widest:.2%}",
                flush=True,
            )
    if not everything:
        return
    judged("largest error of an estimate", max(abs(case.error) for case in everything), 0.03, most=True)
    judged("share of intervals that hold replay", sum(case.held for case in everything) / len(everything), 1.0)
    wide = [case.width for case in everything if case.steps >= MANY]
    judged(f"widest half interval from {MANY:,} steps", max(wide, default=0.0), 0.05, f"{len(wide)} cases", most=True)


if __name__ == "__main__":
    main()
