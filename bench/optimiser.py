"""The optimiser compared with the Medusa tree on held-out texts, its intervals, and its speed.

    python bench/optimiser.py table    --calibration calibration.safetensors
    python bench/optimiser.py coverage --calibration calibration.safetensors
    python bench/optimiser.py speed    --calibration calibration.safetensors

The calibration of the README's figures: `treeopt calibrate` on the 512 story openings, 160 greedy tokens each. `table`
builds from the first half (rows 0-255) and evaluates on the second (texts in both are dropped), then on random
halves.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from timing import add_tiny, goal_line, machine

from treeopt.calibration import Calibration
from treeopt.files.calibrations import load_calibration
from treeopt.optimize.intervals import Interval, by_text, prediction_interval, sampling_interval
from treeopt.optimize.replay import TextSums, replay
from treeopt.optimize.select_method import MEDUSA, Fitter, Limits, MethodFit, candidates

SIZES = (8, 16, 32, 64, 128, 256)
GOALS = (1.5, 0.8, 1.2, 1.2, 1.4, 1.4)  # percent over the Medusa tree, rows 0-255 against 256-511
TOP_K = 32
SPLITS = 10
FEW = 50  # prompts to build from, where there are few
COVERAGE_SPLITS, COVERAGE_NODES = 200, 64
LARGE = 1_000_000  # positions


def fit(calibration: Calibration, nodes: int) -> MethodFit:
    """The fit of `treeopt build` with its defaults."""
    fitter = Fitter(calibration, Limits(nodes, TOP_K))
    return fitter.choose(candidates("joint", "visits"))


def halves(calibration: Calibration, chosen: NDArray[np.int64]) -> tuple[Calibration, Calibration]:
    """These texts, and all others that are not equal to one of them."""
    fitted = calibration.select(np.sort(chosen))
    known, picked = set(fitted.token_hashes), set(chosen.tolist())
    hashes = calibration.token_hashes
    others = [s for s in range(calibration.sequences) if s not in picked and hashes[s] not in known]
    return fitted, calibration.select(others)


def gain(calibration: Calibration, chosen: NDArray[np.int64], nodes: int) -> tuple[float, str, str]:
    """Gain over the Medusa tree on the other texts, in percent; tokens per step of the Medusa tree and of the other."""
    fitted, aside = halves(calibration, chosen)
    trees = (Fitter(fitted, Limits(nodes, TOP_K)).build(MEDUSA).tree(), fit(fitted, nodes).tree)
    medusa, other = (replay(tree, aside).sums for tree in trees)
    percent = 100 * (other.tokens_per_step / medusa.tokens_per_step - 1)
    return percent, _figure(medusa, aside), _figure(other, aside)


def _figure(sums: TextSums, aside: Calibration) -> str:
    interval = sampling_interval(*by_text(aside.token_hashes, sums.tokens, sums.steps))
    ends = "-" if interval is None else f"{interval.low:.3f}-{interval.high:.3f}"
    return f"{sums.tokens_per_step:.4f} ({ends})"


def table(calibration: Calibration, sizes: Sequence[int] = SIZES) -> None:
    """Gains at six sizes: the fixed halves, ten random halves, ten times 50 prompts."""
    print("nodes | Medusa (90 %) | joint, visits (90 %) | gain, goal | random halves | from 50 prompts, least")
    for nodes, goal in zip(sizes, GOALS, strict=False):
        percent, medusa, joint = gain(calibration, np.arange(calibration.sequences // 2), nodes)
        half, few = (_random_gains(calibration, texts, nodes) for texts in (calibration.sequences // 2, FEW))
        reached = f"{percent:+.2f} % {'met' if percent >= goal else 'MISSED'} {goal}"
        print(f"{nodes:5} | {medusa} | {joint} | {reached} | {_mean(half)} | {_mean(few)}, {few.min():+.2f}")


def _random_gains(calibration: Calibration, texts: int, nodes: int) -> NDArray[np.float64]:
    """Gains over ten random choices of this number of texts to build from."""
    rng = np.random.default_rng(7)
    draws = [rng.permutation(calibration.sequences)[:texts] for _ in range(SPLITS)]
    return np.array([gain(calibration, draw, nodes)[0] for draw in draws])


def _mean(gains: NDArray[np.float64]) -> str:
    return f"{gains.mean():+.2f} ± {gains.std(ddof=1):.2f} %"


def coverage(calibration: Calibration, splits: int = COVERAGE_SPLITS) -> None:
    """How often the 90 % intervals from one half contain the figure measured on the other."""
    rng = np.random.default_rng(11)
    inside = {"prediction": 0, "sampling": 0}
    intervals: dict[str, Callable[..., Interval | None]] = {
        "prediction": prediction_interval,
        "sampling": sampling_interval,
    }
    for _ in range(splits):
        chosen = rng.permutation(calibration.sequences)[: calibration.sequences // 2]
        fitted, aside = halves(calibration, chosen)
        found = fit(fitted, COVERAGE_NODES)
        sums = Fitter(aside, Limits(COVERAGE_NODES, TOP_K)).sums(found.tree)
        measured = sums.tokens_per_step
        assert found.sums is not None, "a calibration of many different texts is cross-validated"
        tokens = found.sums.tokens
        for name, interval in intervals.items():
            ends = interval(tokens, found.sums.steps)
            assert ends is not None, "a calibration of many different texts has intervals"
            inside[name] += ends.low <= measured <= ends.high
    for name, count in inside.items():
        print(f"{name} interval at 90 %: holds {count} of {splits} ({count / splits:.1%})")


def speed(calibration: Calibration, positions: int = LARGE) -> None:
    """One fit at 64 nodes and 1,000 replicates over a million positions, made by repeating the texts."""
    copies = -(-positions // calibration.positions)
    lengths = np.tile(np.diff(calibration.offsets), copies)
    large = Calibration(
        ranks=np.tile(calibration.ranks, (copies, 1)),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_ids=tuple(f"{i:09}" for i in range(len(lengths))),
        token_hashes=tuple(str(i) for i in range(len(lengths))),
        top_k=calibration.top_k,
        provenance=calibration.provenance,
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    found = fit(large, 64)
    seconds = time.perf_counter() - begin
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(goal_line(f"joint + visits, 64 nodes, {large.positions:,} positions", seconds, 5.0, "s"))
    print(goal_line("memory on top of the calibration", grown / large.ranks.size, 20, "bytes a position and head"))
    begin = time.perf_counter()
    assert found.sums is not None
    sampling_interval(found.sums.tokens, found.sums.steps)
    print(goal_line("1,000 replicates", time.perf_counter() - begin, 2.0, "s"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["table", "coverage", "speed"])
    parser.add_argument("--calibration", default="calibration.safetensors")
    add_tiny(parser)
    options = parser.parse_args()
    print(machine(1))
    calibration = load_calibration(options.calibration)
    if options.what == "table":
        table(calibration, SIZES[:1] if options.tiny else SIZES)
    elif options.what == "coverage":
        coverage(calibration, 2 if options.tiny else COVERAGE_SPLITS)
    else:
        speed(calibration, 2_000 if options.tiny else LARGE)


if __name__ == "__main__":
    main()
