"""What commands print of a learned drafter: its text, size, weights, reliability of its estimates, and chains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from treeopt.cli.console import Console
from treeopt.cli.facts import Column, Table, percent, picked
from treeopt.errors import counted

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.drafter import Drafter
    from treeopt.drafting.learn import Learned, Learning
    from treeopt.models.base import Base
    from treeopt.optimize.chains import ChainFigures, ChainPrediction
    from treeopt.texts.prompts import PromptSet

_FEW = 1000  # positions; fewer are too few for the weights and the calibration map of a level
_CHAINS = 8  # chains of more drafts are shown only where one is the fastest


def announce_learning(
    console: Console, learning: Learning, prompts: PromptSet, max_new_tokens: int, *, given: bool = False
) -> None:
    """Print the parts of the work before it begins, with the numbers of answers and of tokens to sample."""
    count = sum(1 if given else 1 + len(prompt.later) for prompt in prompts.prompts)  # given answers: first turns only
    verb = "reads" if given else "generates"
    parts = [f"{verb} {count:,} answers of up to {max_new_tokens:,} tokens to {len(prompts.prompts):,} prompts"]
    if learning.ngram and learning.tokens:
        less = "fewer if all answers repeat"
        parts.append(f"samples {learning.tokens:,} more tokens at temperature {learning.temperature} ({less})")
        parts.append("counts all tokens")
    console.note(f"learning {', '.join([*parts, 'fits the drafter', 'traces the answers'])}")


def report_learned(console: Console, learned: Learned, positions: int) -> None:
    """Print the text that a drafter was learned from, its n-gram table, its weights, and the seconds."""
    if positions < _FEW:
        few = counted(positions, "position")
        console.warn(f"warning: fitted to {few}; with fewer than {_FEW:,} the weights are unreliable")
    drafter = learned.drafter
    console.report(
        *_counted_text(learned),
        _weights(drafter),
        f"prior of the cache: {drafter.cache_prior:g} votes",
        ", ".join(f"{name} {seconds:.1f} s" for name, seconds in learned.seconds.items()),
    )


def _counted_text(learned: Learned) -> list[str]:
    """The text that was counted, and the size of the table."""
    table, source = learned.drafter.ngram_table, learned.drafter.source.get("learning", {})
    if table is None:
        return []
    if table.empty:
        return ["nothing was counted: the n-gram table is empty, and the text so far gives the candidates"]
    sampled = f", and answers sampled at temperature {source.get('temperature')}, seed {source.get('seed')}"
    return [
        f"learned from {table.num_tokens:,} tokens: {len(learned.fold_of)} prompts with their answers"
        f"{sampled if source.get('tokens') else ''}; the model's greedy choice after each token is counted",
        f"n-gram table: {table.contexts:,} contexts of 1 to 4 tokens, {table.bytes / 1e6:.1f} MB",
    ]


def _weights(drafter: Drafter) -> Table:
    """The weights of each level; `-` where a source does not score."""
    from treeopt.drafter import CACHE_LENGTHS, MAX_MATCH

    def name(number: int) -> str:
        return f"head {number}" if number <= drafter.num_heads else f"level {number}"

    def head(number: int) -> float | None:
        return drafter.levels[number - 1].head if number <= drafter.levels_with_logits else None

    def weight(find: Any) -> Any:
        return lambda number: find(drafter.levels[number - 1])

    source = "head" if drafter.num_heads else "draft model" if drafter.draft else "LM head"
    columns = (
        Column("weight of", name),
        Column(source, head, ".2f"),
        Column("unigram", weight(lambda level: level.prior), ".2f"),
        Column("n-gram", weight(lambda level: level.ngram), ".2f"),
        Column(f"cache, {CACHE_LENGTHS[0]} token", weight(lambda level: level.cache[0]), ".2f"),
        Column(f"cache, {CACHE_LENGTHS[-1]} tokens", weight(lambda level: level.cache[-1]), ".2f"),
        Column(f"lookup, {MAX_MATCH} tokens", weight(lambda level: level.prompt_lookup[-1]), ".2f"),
    )
    return Table(columns, range(1, len(drafter.levels) + 1))


def learned_as_dict(learned: Learned) -> dict[str, Any]:
    """The figures of a learned drafter for JSON."""
    table = learned.drafter.ngram_table
    return {
        **picked(learned.drafter, "id", "levels", "source"),
        **picked(learned, "tokens", "seconds"),
        "contexts": 0 if table is None else table.contexts,
        "bytes": 0 if table is None else table.bytes,
    }


def report_reliability(console: Console, calibration: Calibration) -> None:
    """Print the accuracy of top-1 guesses by their estimated probability, and the expected calibration error."""
    from treeopt.optimize.per_step import BINS, reliability

    found = reliability(calibration)
    trials, estimated, correct = (table.sum(0) for table in (found.trials, found.estimated, found.correct))
    columns = (
        Column("top-1 probability", lambda one: f"{one / BINS:.0%} to {(one + 1) / BINS:.0%}"),
        Column("mean", lambda one: estimated[one] / trials[one], percent),
        Column("accuracy", lambda one: correct[one] / trials[one], percent),
        Column("share", lambda one: trials[one] / trials.sum(), percent),
    )
    errors = " ".join(f"{error:.3f}" for error in found.error)
    console.report(
        Table(columns, [one for one in range(BINS) if trials[one]]),
        f"expected calibration error by level ({BINS} bins): {errors}; mean {found.error.mean():.3f}",
    )


def report_acceptance(console: Console, calibration: Calibration, draft: Base | None) -> None:
    """With a draft model, print the acceptance rate, and tokens per step of chains by the formula and by replay."""
    from treeopt.optimize.chains import predict_chains

    if draft is not None:
        found = predict_chains(calibration, 0.0)
        console.report(
            f"acceptance rate alpha {found.alpha:.3f}: positions where the drafter's best token is the base's",
            Table(_CHAIN[:3], found.chains[:_CHAINS]),
            "formula: (1 - alpha^(g+1)) / (1 - alpha) of arXiv:2211.17192, for drafts accepted independently",
        )


_CHAIN = (
    Column("chain of drafts", "drafts"),
    Column("tokens/step, formula", "tokens_per_step", ".3f"),
    Column("replay", "replayed_tokens_per_step", ".3f"),
    Column("speedup, formula", "speedup", ".2f"),
    Column("replay", "replayed_speedup", ".2f"),
)


def report_chains(console: Console, found: ChainPrediction, drafter: str, sampled: float | None) -> None:
    """Print acceptance rates, cost ratio, and the speedup of chains by the formula and by replay.

    `sampled` is the draft model's acceptance rate under sampling.
    """
    under = "under sampling at temperature 1, alpha of the draft model"
    formula, replay = (counted(n, "draft") if n else "none" for n in (found.best_drafts, found.best_replayed_drafts))
    console.report(
        f"acceptance rate alpha {found.alpha:.3f} of drafter {drafter}, cost ratio c {found.cost:.2f}: seconds of a "
        "step of the draft model alone / of the base, here",
        None if sampled is None else f"{under} {sampled:.3f}: mean of sum_x min(p, q)",
        Table(_CHAIN, _shown(found)),
        f"best chain: {formula} by the formula of arXiv:2211.17192, {replay} by replay; both take a step of g drafts "
        "for g c + 1 steps of the base",
    )


def _shown(found: ChainPrediction) -> Sequence[ChainFigures]:
    best = (found.best_drafts, found.best_replayed_drafts)
    return [one for one in found.chains if one.drafts <= _CHAINS or one.drafts in best]
