"""What commands print of a learned drafter: its text and size, the reliability of its estimates, and chains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from treeopt.cli.console import Console
from treeopt.cli.facts import Column, Part, Table, picked
from treeopt.errors import counted

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.drafting.learn import Learned, Learning
    from treeopt.optimize.chains import ChainPrediction
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
    """Print the text that a drafter was learned from, its n-gram table, and the seconds; JSON has its weights."""
    if positions < _FEW:
        few = counted(positions, "position")
        console.warn(f"warning: fitted to {few}; with fewer than {_FEW:,} the weights are unreliable")
    seconds = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in learned.seconds.items())
    console.report(*_counted_text(learned), seconds)


def _counted_text(learned: Learned) -> Iterator[str]:
    """The text that was counted, and the size of the table."""
    table, source = learned.drafter.ngram_table, learned.drafter.source.get("learning", {})
    if table is not None and table.empty:
        yield "nothing was counted: the n-gram table is empty, and the text so far gives the candidates"
    elif table is not None:
        sampled = f", and answers sampled at temperature {source.get('temperature')}, seed {source.get('seed')}"
        yield (
            f"learned from {table.num_tokens:,} tokens: {len(learned.fold_of)} prompts with their answers"
            f"{sampled if source.get('tokens') else ''}; the model's greedy choice after each token is counted"
        )
        yield f"n-gram table: {table.contexts:,} contexts of 1 to 4 tokens, {table.bytes / 1e6:.1f} MB"


def learned_as_dict(learned: Learned) -> dict[str, Any]:
    """The figures of a learned drafter for JSON."""
    table = learned.drafter.ngram_table
    return {
        **picked(learned.drafter, "id", "levels", "source"),
        **picked(learned, "tokens", "seconds"),
        "contexts": 0 if table is None else table.contexts,
        "bytes": 0 if table is None else table.bytes,
    }


def reliability_text(calibration: Calibration) -> str:
    """The expected calibration error of the most likely guess of each level."""
    from treeopt.optimize.per_step import BINS, reliability

    error = reliability(calibration).error
    errors = " ".join(f"{one:.3f}" for one in error)
    return f"expected calibration error by level ({BINS} bins): {errors}; mean {error.mean():.3f}"


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
    shown = [one for one in found.chains if one.drafts <= _CHAINS or (drafter and one.drafts in best)]
    cost = f"; cost ratio c {found.cost:.2f}: seconds of a step of {drafter} alone / of the base, here"
    rate = f"acceptance rate alpha {found.alpha:.3f}: positions where the drafter's best token is the base's"
    yield rate + (cost if drafter else "")
    if sampled is not None:
        yield f"under sampling at temperature 1, alpha of the draft model {sampled:.3f}: mean of sum_x min(p, q)"
    yield Table(_CHAIN if drafter else _CHAIN[:3], shown)
    yield "formula: (1 - alpha^(g+1)) / (1 - alpha) of arXiv:2211.17192, for drafts accepted independently"
    if drafter:
        formula, replay = (counted(number, "draft") if number else "none" for number in best)
        yield f"best chain: {formula} by the formula, {replay} by replay; a step takes g c + 1 steps of the base"
