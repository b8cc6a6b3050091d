"""Bootstrap intervals of tokens per step, for the same prompts and for new ones.

The tokens of one text depend on each other, so whole texts are resampled (bootstrap over sequences). Tokens per step is
a ratio of sums: each resample sums first, then divides. Equal texts count as one, and so do the turns of a dialogue
(`Calibration.clusters`). There is no interval from fewer than two, or where one text has nearly all of the weight.

The spread of resamples is that of the texts' empirical distribution, which is too small by sqrt((n-1)/n), and it is
itself an estimate with n-1 degrees of freedom. So both ends are moved away from the estimate by the factor
sqrt(n/(n-1)) * t(n-1) / z, the quantiles of Student's t and of the normal distribution; n is the effective number of
texts. `bench/intervals.py` prints how often the intervals then hold.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError, counted
from treeopt.files.trees import GivenTree, as_tree
from treeopt.optimize.replay import TextSums, replay
from treeopt.optimize.trie import Floats
from treeopt.tree import Path, Tree

LEVEL = 0.9
REPLICATES = 1000
FEWEST_TEXTS = 2  # of an interval
_FEWEST_EFFECTIVE = 1.5  # effective number of texts: two, one with about a quarter of the other's weight
_DRAWN_AT_ONCE = 1 << 22

Numbers = NDArray[np.int64] | Floats  # expected tokens are fractions


@dataclass(frozen=True)
class Interval:
    """Two ends, and the probability that the figure lies between them."""

    low: float
    high: float
    level: float = LEVEL

    def __format__(self, spec: str) -> str:
        """`1.98 to 2.11`."""
        return f"{self.low:{spec}} to {self.high:{spec}}"


def by_text(clusters: Sequence[str], tokens: NDArray[Any], *steps: NDArray[Any]) -> list[NDArray[Any]]:
    """Sums [n] of arrays [S] over each cluster, in the order of their first occurrence, without those of no token."""
    number = {cluster: i for i, cluster in enumerate(dict.fromkeys(clusters))}
    text = [number[cluster] for cluster in clusters]
    sums = []
    for each in (tokens, *steps):
        total = np.zeros(len(number), each.dtype)
        np.add.at(total, text, each)
        sums.append(total)
    return [total[sums[0] > 0] for total in sums]


def sampling_interval(tokens: Numbers, steps: Numbers) -> Interval | None:
    """The interval of the expected tokens per step of texts with these tokens and steps, [S] each."""
    return None if too_few(tokens) else between(_draw(tokens, steps), tokens.sum() / steps.sum(), tokens)


def prediction_interval(
    tokens: Numbers, steps: Numbers, counted: Numbers | None = None, *, count: int | None = None
) -> Interval | None:
    """The interval of tokens per step, counted on as many other texts, or on `count`.

    Both samples vary, these texts and the new ones: the 90 % sampling interval holds in only three of four cases. Under
    sampling `tokens` are expected ones and `counted` [S] those of the texts: the figure on new texts is a count, which
    varies more.
    """
    if too_few(tokens):
        return None
    sampled, predicted = _draw(tokens, steps), _draw(tokens if counted is None else counted, steps, 1, count)
    centre = tokens.sum() / steps.sum()
    if counted is not None:
        centre += centre - counted.sum() / steps.sum()  # the new texts have the mean of the expected tokens
    return between(centre + predicted - sampled, tokens.sum() / steps.sum(), tokens)


def difference_interval(
    tokens: Numbers, steps: Numbers, other: Numbers, other_tokens: Numbers | None = None
) -> Interval | None:
    """The interval of the difference in tokens per step of two trees on the same texts (paired resamples).

    `other` and `other_tokens` are the steps and tokens of the second tree; its tokens are those of the first where
    None. They differ under sampling, where tokens are expected ones.
    """
    if too_few(tokens):
        return None
    other_tokens = tokens if other_tokens is None else other_tokens
    apart = _draw(tokens, steps) - _draw(other_tokens, other)
    return between(apart, tokens.sum() / steps.sum() - other_tokens.sum() / other.sum(), tokens)


def too_few(tokens: Numbers) -> bool:
    """Whether there is at most one text, or one that has nearly all of the weight."""
    return len(tokens) < FEWEST_TEXTS or _effective_number(tokens) < _FEWEST_EFFECTIVE


def _effective_number(tokens: Numbers) -> float:
    """Kish's effective number of texts: S where all have as many tokens, fewer where some have more weight."""
    return float(tokens.sum() ** 2 / np.square(tokens, dtype=np.float64).sum())


def _draw(tokens: Numbers, steps: Numbers, seed: int = 0, count: int | None = None) -> Floats:
    """float64 [REPLICATES]: tokens per step of as many texts, or of `count`, drawn with replacement."""
    drawn = resamples(len(tokens), count or len(tokens), seed, REPLICATES)
    return np.concatenate([times @ tokens / np.maximum(times @ steps, 1e-300) for times in drawn])


def resamples(texts: int, count: int, seed: int, replicates: int) -> Iterator[Floats]:
    """float64 [b, S] at a time, `replicates` rows in all: how often each text was drawn."""
    rng = np.random.default_rng(seed)
    rows = max(1, _DRAWN_AT_ONCE // texts)
    for start in range(0, replicates, rows):
        size = min(rows, replicates - start)
        yield rng.multinomial(count, np.full(texts, 1.0 / texts), size=size).astype(np.float64)


def between(values: Floats, estimate: float, tokens: Numbers) -> Interval:
    """The interval around an estimate, from its resamples, of texts with these tokens."""
    from scipy.special import ndtri, stdtrit

    tail, effective = (1.0 - LEVEL) / 2, _effective_number(tokens)
    wider = math.sqrt(effective / (effective - 1.0)) * stdtrit(effective - 1.0, 1.0 - tail) / ndtri(1.0 - tail)
    low, high = estimate + wider * (np.quantile(values, [tail, 1.0 - tail]) - estimate)
    return Interval(float(low), float(high))


@dataclass(frozen=True)
class Gain:
    """Tokens per step of two trees on the same texts, and the interval of second - first over different ones."""

    first: float
    second: float
    interval: Interval | None
    texts: int

    @property
    def difference(self) -> float:
        """second - first."""
        return self.second - self.first

    def __str__(self) -> str:
        """`-0.012 (-0.020 to -0.004, 90 %, 60 texts)`."""
        spread = "too few for an interval" if self.interval is None else f"{self.interval:+.3f}, 90 %"
        return f"{self.difference:+.3f} ({spread}, {counted(self.texts, 'text')})"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "difference": self.difference}


@dataclass(frozen=True)
class TreeDifference:
    """The paths that one tree has and the other has not, in runtime order, and the tokens per step of both."""

    first_only: tuple[Path, ...]
    second_only: tuple[Path, ...]
    shared: int
    gain: Gain | None


def compare_trees(first: GivenTree, second: GivenTree, calibration: Calibration | None = None) -> TreeDifference:
    """How two trees differ; with a calibration also in tokens per step, by replay over its traces.

    Raises:
        TreeoptError: E101, E102 and E223 as `replay`; E223 where the trees are of different drafters; E303 where the
            calibration holds no text; as `treeopt.files.trees.as_tree`.
    """
    first, second = as_tree(first), as_tree(second)
    if first.drafter != second.drafter:
        names = " and ".join(f"drafter {tree.drafter}" if tree.drafter else "the heads" for tree in (first, second))
        what = f"the trees are of {names}: equal ranks are different drafts"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="treeopt compare measures both on your prompts")
    one, other = set(first.paths), set(second.paths)
    gain = None if calibration is None else replayed_gain(first, second, calibration)
    return TreeDifference(
        tuple(path for path in first.paths if path not in other),
        tuple(path for path in second.paths if path not in one),
        len(one & other),
        gain,
    )


def replayed_gain(first: Tree, second: Tree, calibration: Calibration) -> Gain:
    """Tokens per step of both trees by replay."""
    if not calibration.positions:
        raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text")
    return gain_of_sums(calibration.clusters, *(replay(tree, calibration).sums for tree in (first, second)))


def gain_of_sums(clusters: Sequence[str], first: TextSums, second: TextSums) -> Gain:
    """The gain from tokens and steps of each text by both trees, whose S texts are of these clusters."""
    one, other = (by_text(clusters, sums.tokens, sums.steps) for sums in (first, second))
    interval = difference_interval(other[0], other[1], one[1], one[0])
    return Gain(first.tokens_per_step, second.tokens_per_step, interval, len(one[0]))
