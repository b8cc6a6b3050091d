"""How often the stated 90 % intervals hold, on simulated texts: those of built trees and those of comparisons.

    python bench/intervals.py [--repeats 4000] [--texts 20 40 100] [--workers 2]

Texts are drawn from a population whose positions are easy or hard for stretches and whose texts differ. A tree of 16
nodes is built from S texts, with the method that cross-validation chooses and with a fixed one. Its prediction interval
is compared with the tokens per step counted on S new texts. The intervals of given trees are compared with the figures
of the population, from 20,000 further texts. Sampled texts have the target's probabilities, from which their true ranks
are drawn.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor

import numpy as np
from timing import add_tiny, machine

from treeopt.calibration import Calibration, Provenance
from treeopt.optimize.intervals import (
    REPLICATES,
    Interval,
    Numbers,
    between,
    difference_interval,
    prediction_interval,
    resamples,
    sampling_interval,
    too_few,
)
from treeopt.optimize.replay import TextSums, TraceRows
from treeopt.optimize.select_method import MEDUSA, Fitter, Limits, candidates
from treeopt.optimize.tree_builder import describe
from treeopt.traces import MISS, NONE, TargetTraces
from treeopt.tree import Tree

NODES, LEVELS, RANKS = 16, 4, 8
LENGTHS = (10, 70)  # tokens of a text
POPULATION = 20_000  # texts
NEW_DRAWS = 4  # sets of new texts for each built tree
CHAIN = Tree.chain(LEVELS)
TREE = Tree.from_paths([*CHAIN.paths, (1,), (2,), (0, 1), (1, 0), (0, 0, 1), (3,), (0, 2), (1, 1), (0, 1, 0)])
PROVENANCE = Provenance("base", "b", "heads", "h", {"answers": "simulated"})


def draw_texts(rng: np.random.Generator, texts: int, *, sampled: bool) -> Calibration:
    """Traces of new texts of the population."""
    lengths = rng.integers(LENGTHS[0], LENGTHS[1] + 1, texts)
    total = int(lengths.sum())
    ease = np.repeat(rng.normal(0.3, 0.5, texts), lengths)
    turned = rng.random(total) < 0.1
    turned[np.cumsum(lengths) - lengths] = rng.random(texts) < 0.5  # texts begin anew: they are independent
    turns = np.cumsum(turned) % 2
    ease = ease + np.where(turns == 1, 0.8, -0.6)
    slope = np.exp(ease)[:, None] * np.linspace(1.0, 0.45, LEVELS)  # [P, H]
    logits = -slope[:, :, None] * np.sqrt(np.arange(RANKS)) * 1.3  # the last one stands for all other tokens
    logits = logits + rng.normal(0, 0.7, (total, LEVELS, RANKS))
    p = np.exp(logits)
    p /= p.sum(axis=2, keepdims=True)
    ranks = (p.cumsum(axis=2) < rng.random((total, LEVELS, 1))).sum(axis=2)
    ranks = np.where(ranks >= RANKS - 1, MISS, ranks).astype(np.uint8)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    left = np.repeat(offsets[1:], lengths) - np.arange(total)
    beyond = np.arange(1, LEVELS + 1) >= left[:, None]
    ranks[beyond] = NONE
    target = None
    if sampled:
        target = TargetTraces(np.where(beyond[:, :, None], 0, p[:, :, : RANKS - 1]).astype(np.float16))
    names = tuple(f"{i:08}" for i in range(texts))
    return Calibration(ranks, offsets, names, names, RANKS - 1, PROVENANCE, target=target)


def ratio_interval(
    tokens: Numbers,
    steps: Numbers,
    other_tokens: Numbers,
    other_steps: Numbers,
    *,
    seed: int = 0,
    replicates: int = REPLICATES,
) -> Interval | None:
    """The interval of the ratio of tokens per step of two trees on the same texts (paired resamples).

    With rows [D, S], such as the draws of a random split, each resample draws rows as well as texts; a row holds the
    same texts as the others.
    """
    one, two, three, four = (
        np.atleast_2d(sums).astype(np.float64) for sums in (tokens, steps, other_tokens, other_steps)
    )
    rows, texts = one.shape
    if too_few(one.sum(axis=0)):
        return None
    drawn = np.concatenate(list(resamples(rows, rows, seed + 1, replicates)))
    ratios, begin = [], 0
    for times in resamples(texts, texts, seed, replicates):
        of_rows = drawn[begin : begin + len(times)]
        sums = [((of_rows @ part) * times).sum(axis=1) for part in (one, two, three, four)]
        ratios.append((sums[0] / sums[1]) / (sums[2] / sums[3]))
        begin += len(times)
    ratio = (one.sum() / two.sum()) / (three.sum() / four.sum())
    return between(np.concatenate(ratios), ratio, one.sum(axis=0))


def counted(sums: TextSums) -> float:
    """Tokens per step as a decoder counts them."""
    tokens = sums.tokens if sums.counted is None else sums.counted
    return float(tokens.sum() / sums.steps.sum())


def holds(interval: Interval | None, figures: Sequence[float]) -> float:
    """The share of the figures that an interval holds; nan where there is none."""
    if interval is None:
        return math.nan
    return float(np.mean([interval.low <= figure <= interval.high for figure in figures]))


def built_cases(rng: np.random.Generator, texts: int, *, sampled: bool) -> Iterator[tuple[str, float]]:
    """Whether the interval that a built tree states holds the figures counted on as many new texts."""
    fitter = Fitter(draw_texts(rng, texts, sampled=sampled), Limits(NODES, RANKS - 1))
    new = [TraceRows.of(draw_texts(rng, texts, sampled=sampled)) for _ in range(NEW_DRAWS)]
    for name, methods in (("method chosen", candidates("joint", "visits")), ("method fixed", [MEDUSA])):
        tree = describe(fitter, fitter.choose(methods))
        stated = tree.expected
        assert stated is not None
        interval = None if stated.low is None or stated.high is None else Interval(stated.low, stated.high)
        yield f"built tree, {name}", holds(interval, [counted(rows.replay(tree).sums) for rows in new])


def given_cases(rng: np.random.Generator, texts: int, *, sampled: bool) -> Iterator[tuple[str, float]]:
    """Whether the intervals of two given trees hold the figures of the population, and those of new texts."""
    rows, new = (TraceRows.of(draw_texts(rng, texts, sampled=sampled)) for _ in range(2))
    one, two = rows.replay(TREE).sums, rows.replay(CHAIN).sums
    true, other = truths(sampled)
    yield "given tree, new texts", holds(prediction_interval(*one.columns), [counted(new.replay(TREE).sums)])
    yield "given tree, population", holds(sampling_interval(one.tokens, one.steps), [true])
    difference = difference_interval(one.tokens, one.steps, two.steps, two.tokens)
    yield "difference of two trees", holds(difference, [true - other])
    yield "ratio of two trees", holds(ratio_interval(one.tokens, one.steps, two.tokens, two.steps), [true / other])


@functools.cache
def truths(sampled: bool) -> tuple[float, float]:
    """Tokens per step of the two given trees over the population, from many texts."""
    rows = TraceRows.of(draw_texts(np.random.default_rng(1), POPULATION, sampled=sampled))
    one, two = (rows.replay(tree).tokens_per_step for tree in (TREE, CHAIN))
    return one, two


def repeat(setting: tuple[int, int, bool, bool]) -> list[tuple[str, float]]:
    """One repetition: seed, texts, whether they are sampled, and whether trees are built."""
    seed, texts, sampled, build = setting
    rng = np.random.default_rng([seed, texts, sampled, build])
    return list((built_cases if build else given_cases)(rng, texts, sampled=sampled))


def print_coverage(pool: Executor, texts: int, sampled: bool, repeats: int, build: bool) -> None:
    """Print how often each interval held, with its standard error over the repetitions."""
    found: dict[str, list[float]] = {}
    settings = [(seed, texts, sampled, build) for seed in range(repeats)]
    for results in pool.map(repeat, settings, chunksize=50):
        for name, held in results:
            found.setdefault(name, []).append(held)
    for name, shares in found.items():
        share = 100 * np.array(shares)
        error = share.std() / math.sqrt(len(share))
        kind = "sampled" if sampled else "greedy"
        print(
            f"{texts:4} texts, {kind}, {name}: holds in {share.mean():.1f} % (standard error {error:.1f})", flush=True
        )


def main() -> None:
    """Print the coverage of every interval."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4000)
    parser.add_argument("--texts", type=int, nargs="+", default=[20, 40, 100])
    parser.add_argument("--workers", type=int, default=2)
    add_tiny(parser)
    options = parser.parse_args()
    print(machine(1))
    texts, repeats = ([20], 4) if options.tiny else (options.texts, options.repeats)
    with ProcessPoolExecutor(options.workers) as pool:
        for count, sampled, build in itertools.product(texts, (False, True), (True, False)):
            print_coverage(pool, count, sampled, repeats, build)


if __name__ == "__main__":
    main()
