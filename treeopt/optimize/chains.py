"""Chains and the dynamic trees of engines, by replay: the steps they take, and which of them is the fastest.

An engine that takes no fixed tree drafts by a few numbers: the length of a chain, or the numbers of EAGLE-2's trees. A
chain is also what the formulas of arXiv:2211.17192 predict.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.defaults import KINDS, ONE_NODE, STEP_SIZES, WITH_DRAFT
from treeopt.errors import Code, TreeoptError, counted
from treeopt.facts import Column, Fact, Part, Table
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import Budget, best_budget, budget_at, check_priced, fastest
from treeopt.optimize.curve import default_sizes
from treeopt.optimize.intervals import Interval, by_text, prediction_interval
from treeopt.optimize.per_step import traced_steps
from treeopt.optimize.replay import Replay, visits

MOST_DRAFTS = 16  # longest chain that is considered
_SHOWN_DRAFTS = 8  # chains of more drafts are shown only where one is the fastest
WIDTHS = (1, 2, 4, 8, 16)  # of `top_k` that are tried
_GOOD_ENOUGH = 0.995  # of the most tokens per step: below it, a deeper or wider expansion is worth its drafting
MOST_NODES = STEP_SIZES[-1]  # of which places are traced

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class DynamicTree:
    """The numbers that EAGLE-2's choice of a tree takes (arXiv:2406.16858, section 4), as SGLang names them.

    Level 1 has the `top_k` likeliest tokens. Of the nodes of a level the `top_k` likeliest are expanded, each by its
    `top_k` likeliest tokens, until there are `steps` levels. The tree is the `nodes` - 1 likeliest of all of these
    nodes and the root; the probability of a node is the product along its path.
    """

    steps: int  # levels, `--speculative-num-steps`
    top_k: int  # `--speculative-eagle-topk`
    nodes: int  # root counted, `--speculative-num-draft-tokens`

    def __post_init__(self) -> None:
        if min(self.steps, self.top_k) < 1 or self.nodes < 2:
            raise ValueError(f"{self}: steps and top_k are 1 or more, nodes 2 or more")
        if self.nodes - 1 > _candidates(self.steps, self.top_k):
            raise ValueError(f"{self}: there are fewer candidates than nodes")

    def replays_exactly(self, levels: int) -> bool:
        """Whether per-step traces of so many levels give the accepted drafts of this tree exactly.

        With `top_k` >= `nodes` - 1 the tree is that of the likeliest nodes, which the traces are of, whatever was
        expanded. Traces of more levels than `steps` also count deeper nodes.
        """
        return self.steps == 1 or self.top_k == 1 or (self.top_k >= self.nodes - 1 and self.steps == levels)


@dataclass(frozen=True)
class TreeChoice:
    """The numbers of a dynamic tree and its likely steps, None where decoding without drafts is the fastest.

    `budget` is None without a profile.
    """

    shape: DynamicTree | None
    replay: Replay | None
    budget: Budget | None


@dataclass(frozen=True)
class ChainFigures:
    """A chain of `drafts` drafts: tokens per step and speedup by the formulas, and by replay.

    Those by replay are None where the traces have fewer levels than the chain has drafts.
    """

    drafts: int
    tokens_per_step: float
    speedup: float
    replayed_tokens_per_step: float | None
    replayed_speedup: float | None


@dataclass(frozen=True)
class ChainPrediction:
    """Chains of 1 to `MOST_DRAFTS` drafts from one acceptance rate and one cost ratio."""

    alpha: float  # share of positions where the drafter's best token is the target's
    cost: float  # c, seconds of a forward of the draft model ÷ seconds of one of the target
    chains: tuple[ChainFigures, ...]

    @property
    def best_drafts(self) -> int:
        """Length of the fastest chain by the formulas; 0 where none pays."""
        return _fastest_length([one.speedup for one in self.chains])

    @property
    def best_replayed_drafts(self) -> int:
        """Length of the fastest chain by replay; 0 where none pays."""
        return _fastest_length([one.replayed_speedup for one in self.chains if one.replayed_speedup is not None])


@dataclass(frozen=True)
class MeasuredAcceptance:
    """Accepted drafts of an engine."""

    mean_acceptance_length: float  # tokens per step, the one after the accepted drafts counted
    histogram: tuple[int, ...] | None  # [D+1], steps with k accepted drafts; None where the engine gives the mean alone
    draft_lengths: tuple[int, ...] = ()  # the numbers of drafts that steps had, ascending, where the engine states them


@dataclass(frozen=True)
class AcceptanceComparison:
    """Accepted drafts of an engine beside those that replay promised."""

    promised: float  # tokens per step by replay: 1 + accepted drafts per step with a forward
    interval: Interval | None  # of the promise on as many new texts, or steps where counted; None below two texts
    measured: float  # tokens per step of the engine
    promised_rates: tuple[float, ...]  # [D], share of steps that accept d drafts or more by replay, d = 1 .. D
    measured_rates: tuple[float, ...] | None  # [D] of the engine; None where it gives the mean alone

    @property
    def as_promised(self) -> bool | None:
        """Whether the engine's figure is in the interval of the promise; None without one."""
        return None if self.interval is None else self.interval.low <= self.measured <= self.interval.high

    def report(self) -> Iterator[Part]:
        """Both figures and the verdict, and the shares of steps."""
        of = "new texts" if self.measured_rates is None else "steps of new texts"
        spread = "" if self.interval is None else f" ({self.interval:.3f} on as many {of})"
        verdicts = {True: "as predicted", False: "not as predicted", None: "no interval of the prediction"}
        difference = self.measured / self.promised - 1
        yield Fact("predicted", self.promised, ".4f", f"tokens per step{spread}")
        yield Fact("measured", self.measured, ".4f", f"({difference:+.1%}): {verdicts[self.as_promised]}")
        if self.measured_rates is not None:
            columns = (
                Column("drafts accepted, at least", lambda row: row[0]),
                Column("predicted", lambda row: row[1], ".4f"),
                Column("measured", lambda row: row[2], ".4f"),
            )
            yield Table(columns, list(zip(itertools.count(1), self.promised_rates, self.measured_rates, strict=False)))
        interval = None if self.interval is None else [self.interval.low, self.interval.high]
        yield Fact(None, {**vars(self), "as_promised": self.as_promised, "interval": interval}, key="comparison")


def replay_chain(calibration: Calibration, drafts: int) -> Replay:
    """The steps of a chain of `drafts` drafts, each the likeliest token of its level; 0 is decoding without drafts."""
    return _walked(calibration, np.logical_and.accumulate(calibration.ranks[:, :drafts] == 0, axis=1), drafts)


def chain_tokens(calibration: Calibration) -> Floats:
    """Tokens per step of chains of 0, 1, ... drafts, up to `MOST_DRAFTS` and the levels: float64 [n]."""
    longest = min(calibration.num_heads, MOST_DRAFTS)
    return np.array([replay_chain(calibration, drafts).tokens_per_step for drafts in range(longest + 1)])


def replay_dynamic_tree(calibration: Calibration, shape: DynamicTree) -> Replay:
    """The likely steps with EAGLE-2's trees, by per-step traces; exact where `shape.replays_exactly`.

    A path is taken to be in the tree where each of its nodes has a rank below `top_k` and its last node is among the
    `nodes` likeliest of all. Which nodes an engine expands is not traced; bench/dynamic_trees.py measures the
    difference. Chains and trees of one level follow from the ranks alone.
    """
    places = traced_steps(calibration).node_rank[:, : shape.steps].astype(np.int64)
    ranks = calibration.ranks[:, : shape.steps]
    inside = ranks < shape.top_k
    if shape.steps == 1:
        inside = ranks < shape.nodes - 1
    elif shape.top_k == 1:
        inside = inside[:, : shape.nodes - 1]
    else:
        inside &= places < shape.nodes
    return _walked(calibration, np.logical_and.accumulate(inside, axis=1), shape.steps)


def chains_by_batch(
    expected: Floats,
    profile: LatencyProfile,
    drafts: int | None = None,
    *,
    allows: Callable[[int], bool] = lambda drafts: True,
) -> dict[int, Budget]:
    """The figures of the chain of `drafts` drafts, or of the fastest, at each measured batch and the largest context.

    Chains are priced by a profile of chains, or else by trees of as many nodes. `expected` has the tokens per step of
    chains of 0, 1, ... drafts; the fastest is one of the lengths that are allowed.
    """
    if drafts is not None:
        return {batch: budget_at(expected, profile, drafts + 1, batch) for batch in profile.batches}
    best = functools.partial(best_budget, expected, profile, allows=lambda nodes: allows(nodes - 1))
    return {batch: best(batch) for batch in profile.batches}


def chain_doubts(profile: LatencyProfile) -> list[str]:
    """A warning where chains are priced by trees of a drafter that runs once a level."""
    if profile.kind != KINDS[0] or profile.provenance.get("drafter_name") not in WITH_DRAFT:
        return []
    return [
        "chains are priced as trees of as many nodes, which have fewer levels, and a draft runs once a level:"
        " they are slower than shown; treeopt profile --kind chain measures them"
    ]


def choose_dynamic_tree(
    calibration: Calibration, profile: LatencyProfile | None, nodes: int | None = None
) -> TreeChoice:
    """The dynamic tree of so many nodes, or the fastest at the smallest measured batch and the largest context.

    It is priced by per-step trees of as many nodes; the profile may be None where `nodes` is given.
    """
    traced_steps(calibration)
    if profile is not None:
        check_priced(profile, calibration, KINDS[1])
    if nodes is None:
        assert profile is not None
        batch = profile.batches[0]
        largest = min(profile.largest(batch), most_nodes(calibration))
        sizes = default_sizes(largest)[1:]  # between them tokens per step are interpolated
        known = [1.0] + [best_shape(calibration, size)[1].tokens_per_step for size in sizes]
        best = best_budget(np.interp(np.arange(1, largest + 1), [ONE_NODE, *sizes], known), profile, batch)
        if best.nodes == ONE_NODE:
            return TreeChoice(None, None, best)
        nodes = best.nodes
    shape, replay = best_shape(calibration, nodes)
    if profile is None:
        return TreeChoice(shape, replay, None)
    tokens = np.full(nodes, replay.tokens_per_step)
    return TreeChoice(shape, replay, budget_at(tokens, profile, nodes, profile.batches[0]))


def best_shape(calibration: Calibration, nodes: int) -> tuple[DynamicTree, Replay]:
    """Steps and top_k of a tree of so many nodes, and its replay.

    Deeper and wider expansions take longer to draft, which no profile has measured. So it is the expansion with the
    fewest candidates among those within 0.5 % of the most tokens per step.
    """
    most = most_nodes(calibration)
    if not 2 <= nodes <= most:
        what = f"a dynamic tree of {nodes} nodes cannot be replayed"
        why = f"places are traced up to {MOST_NODES} nodes, root counted"
        if most < MOST_NODES:
            traced = f"{calibration.num_heads} levels of {calibration.top_k} ranks are traced"
            why = f"{traced}; with a top_k of {WIDTHS[-1]} at most, the largest tree has {most} nodes, root counted"
        raise TreeoptError(Code.TREE_INVALID, what, why=why, fix=f"--nodes from 2 to {most}")
    found = [(shape, replay_dynamic_tree(calibration, shape)) for shape in _shapes(calibration, nodes)]
    best = max(replay.tokens_per_step for _, replay in found)
    good = [one for one in found if one[1].tokens_per_step >= _GOOD_ENOUGH * best]
    return min(good, key=lambda one: (one[0].steps * one[0].top_k, one[0].steps))


def most_nodes(calibration: Calibration) -> int:
    """The largest number of nodes, root counted, of a dynamic tree of the traced levels and ranks; see `best_shape`."""
    return min(MOST_NODES, 1 + _candidates(calibration.num_heads, min(calibration.top_k, WIDTHS[-1])))


def predict_chains(calibration: Calibration, cost: float) -> ChainPrediction:
    """The figures of chains by the formulas and by replay over the traces of a draft model.

        tokens per step of g drafts = (1 - alpha^(g+1)) / (1 - alpha)        (equation 1)
        speedup = tokens per step / (g c + 1)                                (theorem 3.8)

    The formulas assume that drafts are accepted independently of each other, and that the target verifies g drafts in
    the time of one token. Replay makes the second assumption only.
    """
    rate, replayed = float(calibration.accuracy[0, 0]), chain_tokens(calibration).tolist()

    def figures(drafts: int) -> ChainFigures:
        tokens, overhead = expected_tokens(rate, drafts), drafts * cost + 1.0
        known = replayed[drafts] if drafts < len(replayed) else None
        return ChainFigures(drafts, tokens, tokens / overhead, known, None if known is None else known / overhead)

    return ChainPrediction(rate, cost, tuple(figures(drafts) for drafts in range(1, MOST_DRAFTS + 1)))


_CHAIN = (
    Column("chain of drafts", "drafts"),
    Column("tokens/step, formula", "tokens_per_step", ".3f"),
    Column("replay", "replayed_tokens_per_step", ".3f"),
    Column("speedup, formula", "speedup", ".2f"),
    Column("replay", "replayed_speedup", ".2f"),
)


def chain_parts(found: ChainPrediction, drafter: str = "", sampled: float | None = None) -> Iterator[Part]:
    """The acceptance rate of a draft model, and chains by the formula and by replay; of a timed drafter their speedup.

    `sampled` is the rate under sampling.
    """
    best = (found.best_drafts, found.best_replayed_drafts)
    shown = [one for one in found.chains if one.drafts <= _SHOWN_DRAFTS or (drafter and one.drafts in best)]
    cost = f"; cost ratio c {found.cost:.2f}: seconds of a step of {drafter} alone / of the base, here"
    rate = f"acceptance rate alpha {found.alpha:.3f}: positions where the drafter's best token is the base's"
    yield rate + (cost if drafter else "")
    if sampled is not None:
        yield f"under sampling at temperature 1, alpha of the draft model {sampled:.3f}: mean of sum_x min(p, q)"
    yield Table(_CHAIN if drafter else _CHAIN[:3], shown)
    yield "formula: (1 - alpha^(g+1)) / (1 - alpha) of arXiv:2211.17192, for drafts accepted independently"
    if drafter:
        formula, replay = (counted(number, "draft") if number else "none" for number in best)
        yield f"best chain: {formula} by the formula, {replay} by replay, where a step takes g c + 1 steps of the base"


def expected_tokens(alpha: float, drafts: int) -> float:
    """Tokens per step of a chain of `drafts` drafts, each accepted with probability `alpha`.

    >>> expected_tokens(0.5, 2)
    1.75
    """
    return math.fsum(alpha**i for i in range(drafts + 1))  # exact where alpha is 1, or nearly


def sampled_acceptance(target: NDArray[np.floating], draft: NDArray[np.floating]) -> float:
    """alpha of sampling: the mean of sum_x min(p(x), q(x)) over positions (corollary 3.6); both are float [n, V]."""
    p, q = np.asarray(target, np.float64), np.asarray(draft, np.float64)
    return min(float(np.minimum(p, q).sum(1).mean()), 1.0)


def compare_acceptance(replay: Replay, calibration: Calibration, measured: MeasuredAcceptance) -> AcceptanceComparison:
    """An engine's accepted drafts beside those of a replay.

    Args:
        replay: of what the engine drafts, over the texts of `calibration`.
        calibration: the traces.
        measured: as `read_acceptance` reads it.
    """
    accepted = np.where(replay.verified, replay.accepted, 0).astype(np.int64)
    steps, drafts = (
        np.diff(np.concatenate([[0], np.cumsum(column)])[replay.offsets]) for column in (replay.verified, accepted)
    )
    texts = by_text(calibration.clusters, steps + drafts, steps)
    served = None  # texts of the calibration that take as many steps as the engine did
    if measured.histogram is not None:
        served = max(1, round(len(texts[0]) * sum(measured.histogram) / max(steps.sum(), 1)))
    interval = prediction_interval(*texts, count=served)
    return AcceptanceComparison(
        mean_acceptance(replay.histogram),
        interval,
        measured.mean_acceptance_length,
        acceptance_rates(replay.histogram),
        None if measured.histogram is None else acceptance_rates(measured.histogram),
    )


def mean_acceptance(histogram: Sequence[int]) -> float:
    """Tokens per step of a histogram: 1 + accepted drafts per step; 1 where there is no step."""
    return 1 + sum(k * steps for k, steps in enumerate(histogram)) / max(sum(histogram), 1)


def acceptance_rates(histogram: Sequence[int]) -> tuple[float, ...]:
    """[D]: share of steps that accept d drafts or more, d = 1 .. D."""
    reached = np.cumsum(histogram[::-1])[::-1] / max(sum(histogram), 1)
    return tuple(reached[1:].tolist())


def _fastest_length(speedups: Sequence[float]) -> int:
    best = fastest(speedups)
    return 0 if best is None else best + 1


def _candidates(steps: int, top_k: int) -> int:
    """The number of nodes, root not counted, that a tree is chosen from."""
    return top_k + top_k**2 * (steps - 1)


def _shapes(calibration: Calibration, nodes: int) -> Iterator[DynamicTree]:
    """The numbers that engines accept for so many nodes."""
    for steps in range(1, min(calibration.num_heads, nodes - 1) + 1):
        for top_k in sorted({*WIDTHS, calibration.top_k}):
            enough = nodes - 1 <= _candidates(steps, top_k)
            if enough and top_k <= min(calibration.top_k, WIDTHS[-1]):
                yield DynamicTree(steps, top_k, nodes)


def _walked(calibration: Calibration, inside: NDArray[np.bool_], depth: int) -> Replay:
    """The replay of paths whose prefixes are in the tree: bool [P, D], true up to the last accepted level."""
    accepted: NDArray[np.int8] = inside.sum(1, dtype=np.int8)
    return Replay(accepted, visits(accepted), calibration.offsets, depth)
