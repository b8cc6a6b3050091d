"""The output of commands about a learned drafter: its text, size and weights, and the reliability of its estimates."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from treeopt.cli.console import Console
from treeopt.errors import counted

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.drafter import Drafter
    from treeopt.drafting.learn import Learned, Learning
    from treeopt.evaluate.learn_drafter import LearnedDrafter, PlanFigures
    from treeopt.texts.prompts import PromptSet

_FEW = 1000  # positions; fewer are too few for the weights and the calibration map of a level


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
    if learning.ngram and learning.tokens:
        parts.append("counts all tokens")
    console.note(f"learning {', '.join([*parts, 'fits the drafter', 'traces the answers'])}")


def report_learned(console: Console, learned: Learned, positions: int) -> None:
    """Print the text that a drafter was learned from, its n-gram table, its weights, and the seconds."""
    if positions < _FEW:
        count = f"{positions} position{'s' if positions != 1 else ''}"
        console.warn(f"warning: fitted to {count}; with fewer than {_FEW:,} the weights are unreliable")
    drafter, table = learned.drafter, learned.drafter.ngram_table
    if table is not None and table.empty:
        console.say("nothing was counted: the n-gram table is empty, and the text so far gives the candidates")
    elif table is not None:
        source = drafter.source.get("learning", {})
        sampled = f", and answers sampled at temperature {source.get('temperature')}, seed {source.get('seed')}"
        console.say(
            f"learned from {table.num_tokens:,} tokens: {len(learned.fold_of)} prompts with their answers"
            f"{sampled if source.get('tokens') else ''}; the model's greedy choice after each token is counted"
        )
        console.say(f"n-gram table: {table.contexts:,} contexts of 1 to 4 tokens, {table.bytes / 1e6:.1f} MB")
    _say_weights(console, drafter)
    console.say(", ".join(f"{name} {seconds:.1f} s" for name, seconds in learned.seconds.items()))


def _say_weights(console: Console, drafter: Drafter) -> None:
    """Print the weights of each level; `-` where a source does not score."""
    from treeopt.drafter import CACHE_LENGTHS, MAX_MATCH

    rows = []
    for number, level in enumerate(drafter.levels, start=1):
        name = f"head {number}" if number <= drafter.num_heads else f"level {number}"
        head = f"{level.head:.2f}" if number <= drafter.levels_with_logits else "-"
        weights = (level.prior, level.ngram, level.cache[0], level.cache[-1], level.prompt_lookup[-1])
        rows.append([name, head, *(f"{weight:.2f}" for weight in weights)])
    head = "head" if drafter.num_heads else "draft model" if drafter.draft else "LM head"
    text = (f"cache, {CACHE_LENGTHS[0]} token", f"cache, {CACHE_LENGTHS[-1]} tokens", f"lookup, {MAX_MATCH} tokens")
    console.table(["weight of", head, "unigram", "n-gram", *text], rows)
    console.say(f"prior of the cache: {drafter.cache_prior:g} votes")


def report_plans(console: Console, found: LearnedDrafter) -> None:
    """Print tokens per step and speed by dtype and size, and the recommended plan."""
    from treeopt.optimize.select_method import FOLDS

    several = len({one.setting for one in found.figures}) > 1
    rows = [
        [
            *([one.setting] if several else []),
            _trees(one),
            str(one.nodes),
            str(one.plan.depth),
            f"{one.tokens_per_step:.3f}",
            f"{one.seconds * 1e3:.2f} ms",
            f"{one.tokens_per_second:.1f}",
            f"{one.speedup:.2f}",
        ]
        for one in found.figures
    ]
    header = ["trees", "nodes", "depth", "tokens/step", "step", "tokens/s", "speedup"]
    console.table([*(["setting"] if several else []), *header], rows)
    console.say(
        "tokens/step: all tokens / all steps, on texts left out; step: the shortest here, batch 1; speedup: over "
        f"autoregressive decoding in the same loop{' and setting' if several else ''}, without prefill"
    )
    best = found.recommended
    if several:
        plain = max((one for one in found.figures if one.kind == "none"), key=lambda one: one.tokens_per_second)
        console.say(f"fastest without a drafter: {plain.setting}, {plain.tokens_per_second:.1f} tokens/s")
    if len({one.dtype for one in found.figures}) > 1:
        console.say("texts in half precision can differ from those in float32; measure it: treeopt validate --dtype D")
    shown = "none: no tree is faster than plain decoding on this machine"
    if best.kind != "none":
        shown = f"{_trees(best)}, {counted(best.nodes, 'node')}, depth {best.plan.depth}"
    console.say(f"recommended: {shown}" + (f", in {best.setting}" if several else ""))
    texts = found.run.calibration.distinct
    if texts < FOLDS:
        console.warn(f"warning: tokens/step of {counted(texts, 'different text')} are unreliable")


def _trees(one: PlanFigures) -> str:
    return "per step" if one.kind == "dynamic" else one.kind


def plans_as_dict(found: LearnedDrafter) -> dict[str, Any]:
    """The figures of `report_plans` for JSON."""

    def figures(one: PlanFigures) -> dict[str, Any]:
        names = ("dtype", "compiled", "kind", "nodes", "tokens_per_step", "seconds", "tokens_per_second", "speedup")
        return {name: getattr(one, name) for name in names}

    return {"sizes": [figures(one) for one in found.figures], "recommended": figures(found.recommended)}


def learned_as_dict(learned: Learned) -> dict[str, Any]:
    """The figures of a learned drafter for JSON."""
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
    """Print the accuracy of top-1 guesses by their estimated probability, and the expected calibration error."""
    import numpy as np

    from treeopt.optimize.per_step import BINS, reliability

    found = reliability(calibration)
    trials, estimated, correct = (table.sum(0) for table in (found.trials, found.estimated, found.correct))
    shares = trials / max(trials.sum(), 1)
    rows = [
        [
            f"{b / BINS:.0%} to {(b + 1) / BINS:.0%}",
            *(f"{part:.1%}" for part in (estimated[b] / trials[b], correct[b] / trials[b], shares[b])),
        ]
        for b in range(BINS)
        if trials[b]
    ]
    if rows:
        console.table(["top-1 probability", "mean", "accuracy", "share"], rows)
    errors = " ".join(f"{error:.3f}" for error in found.error)
    console.say(f"expected calibration error by level ({BINS} bins): {errors}; mean {np.mean(found.error):.3f}")
