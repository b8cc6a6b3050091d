"""What commands print of a learned drafter: its numbers, its size, its text, and how reliable its estimates are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from treeopt.calibration import Calibration
from treeopt.cli.console import Console
from treeopt.optimize.reliability import BINS, reliability

if TYPE_CHECKING:
    from treeopt.drafting.learn import Learned, Learning
    from treeopt.texts.prompts import PromptSet

_FEW = 1000  # positions, for some ten numbers and a map of odds a level


def announce_learning(
    console: Console, learning: Learning, prompts: PromptSet, max_new_tokens: int, *, given: bool = False
) -> None:
    """What learning will cost, before it begins: the tokens to be generated, and the passes over them."""
    asked = sum(1 if given else 1 + len(prompt.later) for prompt in prompts.prompts)  # given answers are to first turns
    answers = f"{asked:,} answers to {len(prompts.prompts):,} prompts, at most {asked * max_new_tokens:,} tokens"
    parts = [f"{'takes' if given else 'generates'} {answers}"]
    passes = ["fits the drafter to the answers", "traces them"]
    if learning.ngram:
        if learning.tokens:
            parts.append(f"draws {learning.tokens:,} tokens more at temperature {learning.temperature}")
        passes.insert(0, "counts all of this text")
    console.note(f"learns   {', then '.join(parts)}; {', '.join(passes)}; writes at the end")


def report_learned(console: Console, learned: Learned, positions: int) -> None:
    """The text it learned from, the table's size, the fitted numbers, and the seconds that each part took."""
    if positions < _FEW:
        console.warn(f"warning: fitted to {positions} positions; below {_FEW:,} the numbers mean little")
    drafter, table = learned.drafter, learned.drafter.ngram_table
    if table is not None:
        text = drafter.source.get("learning", {})
        more = f", and more drawn at temperature {text.get('temperature')}, seed {text.get('seed')}"
        console.say(
            f"learned from {table.num_tokens:,} tokens: {len(learned.fold_of)} prompts with their answers"
            f"{more if text.get('tokens') else ''}; what counts after each token is the model's own choice"
        )
        console.say(f"transitions  {table.contexts:,} contexts of 1 to 4 tokens, {table.bytes / 1e6:.1f} MB")
    rows = []
    for number, level in enumerate(drafter.levels, start=1):
        name = f"head {number}" if number <= drafter.num_heads else f"level {number}"
        head = f"{level.head:.2f}" if number <= drafter.num_heads else "-"
        weights = (level.prior, level.ngram, level.prompt_lookup[0], level.prompt_lookup[-1])
        rows.append([name, head, *(f"{weight:.2f}" for weight in weights)])
    console.table(
        ["weight of", "head", "frequency", "transition", "match of 1", f"of {len(level.prompt_lookup)}"], rows
    )
    console.say(", ".join(f"{name} {seconds:.1f} s" for name, seconds in learned.seconds.items()))


def learned_as_dict(learned: Learned) -> dict[str, Any]:
    """The same for programs."""
    drafter, table = learned.drafter, learned.drafter.ngram_table
    return {
        "id": drafter.id,
        "tokens": learned.tokens,
        "contexts": 0 if table is None else table.contexts,
        "bytes": 0 if table is None else table.bytes,
        "levels": [dataclasses.asdict(level) for level in drafter.levels],
        "seconds": learned.seconds,
        "source": dict(drafter.source),
    }


def report_reliability(console: Console, calibration: Calibration) -> None:
    """How often guesses of rank 0 came, by their estimated probability, and the expected calibration error."""
    found = reliability(calibration)
    trials, estimated, came = (table.sum(0) for table in (found.trials, found.estimated, found.correct))
    shares = trials / max(trials.sum(), 1)
    rows = [
        [
            f"{b / BINS:.0%} to {(b + 1) / BINS:.0%}",
            *(f"{part:.1%}" for part in (estimated[b] / trials[b], came[b] / trials[b], shares[b])),
        ]
        for b in range(BINS)
        if trials[b]
    ]
    console.table(["first guesses estimated at", "mean", "came", "share"], rows)
    errors = " ".join(f"{error:.3f}" for error in found.error)
    console.say(f"expected calibration error by level ({BINS} bins): {errors}; mean {np.mean(found.error):.3f}")
