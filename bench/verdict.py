"""The verdict against every setting, measured: tokens per second of whole texts in batches of 1, 4 and 16, in one run.

    python bench/verdict.py [--model smollm2|pocket|tinystories] [--dtype float32 bfloat16] [--draft FOLDER] [--batch N]

A drafter is learned, with heads where the model has them, or with --draft of a draft module alone. In each dtype the
steps of chains, static and per-step trees are timed (`treeopt profile`), and the verdict is made from these and the
traces. Then other texts are decoded in batches by none, chains of 1 to 8 drafts, static and per-step trees of each size
and the chosen plan, as in bench/recommended.py: the chosen plan is to be within 2 % of the best, or 1 within the 90 %
interval of paired repeats. With --full a batch is timed until its first text ends, so that its size is always that of
the verdict. At last one batch of texts with budgets of different lengths is decoded by the schedule and by each fixed
length. Times are CPU seconds of the one thread. The model of smollm2 is that of `python bench/smollm2.py
build/smollm2`.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recommended import MODELS, each_model, prepared, race
from timing import add_tiny

from treeopt.calibrate.pipeline import run_calibration
from treeopt.decode.decoder import TreeDecoder, advance
from treeopt.defaults import LEARN_SIZES, NONE, PROFILE_KINDS
from treeopt.drafter import Drafter
from treeopt.drafting.learn import Learning
from treeopt.evaluate.profile import measure_profile
from treeopt.models.base import Base
from treeopt.models.compatibility import heads_like
from treeopt.models.draft_files import load_draft
from treeopt.models.heads import MedusaHeads
from treeopt.optimize.verdict import Setting, Verdict, Verdicts, named, verdicts_of
from treeopt.schedule import Planned
from treeopt.texts.encode import encode

GOAL = 0.98  # of the best
CHAINS = range(1, 9)  # drafts
COMPARED = (1, 4, 16)
SCHEDULE = "schedule"


@dataclasses.dataclass(frozen=True)
class Effort:
    """Sizes of a run.

    Args:
        sizes: nodes of static and per-step trees.
        known: prompts that the drafter is learned and traced from.
        learned: tokens that are sampled to learn from.
        texts: prompts that are decoded; each repeat takes the next ones.
        fewest: texts of a repeat.
        new_tokens: of each text.
        rounds: of timed steps.
        repeats: of the paired times.
        batches: that are timed.
    """

    sizes: tuple[int, ...] = LEARN_SIZES
    known: int = 96
    learned: int = 50_000
    texts: int = 160
    fewest: int = 4
    new_tokens: int = 48
    rounds: int = 20
    repeats: int = 20
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)


CHAT = Effort(known=48, learned=12_000, fewest=2, new_tokens=24, rounds=4, batches=COMPARED)
TINY = Effort((2, 8), known=6, learned=100, texts=2, new_tokens=8, rounds=1, repeats=2, batches=(1, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--model", choices=MODELS, nargs="+", default=MODELS)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="learned in the first")
    parser.add_argument("--folder", default="build/smollm2", help="of smollm2")
    parser.add_argument("--draft", help="EAGLE head or block drafter of the model, in place of heads and n-gram table")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=COMPARED, choices=COMPARED, help="of " + ", ".join(map(str, COMPARED))
    )
    parser.add_argument("--full", action="store_true", help="time batches while all of their texts are in progress")
    add_tiny(parser)
    options = parser.parse_args()
    each_model(options, measure)


def measure(name: str, options: argparse.Namespace) -> None:
    """Learn a drafter of a model, and compare its verdicts in each dtype."""
    effort = TINY if options.tiny else CHAT if name == "smollm2" else Effort()
    base, loaded, prompts = prepared(name, options)
    draft = load_draft(options.draft, base) if options.draft else None
    loaded = None if draft else loaded
    known = dataclasses.replace(prompts, prompts=prompts.prompts[: effort.known])
    seen = [(one.messages, one.text) for one in known.prompts]
    others = [one for one in prompts.prompts[-effort.texts :] if (one.messages, one.text) not in seen]
    texts = [encode(one, base.tokenizer, chat_template=True)[0] for one in others]
    learning = Learning(tokens=effort.learned, ngram=draft is None)
    answers: dict[str, Any] = {"max_new_tokens": effort.new_tokens, "batch_size": 32}
    run = run_calibration(base, loaded, known, learning=learning, steps=True, draft=draft, **answers)
    assert run.learned is not None
    drafter = run.learned.drafter
    context = sorted(map(len, texts))[len(texts) // 2] + effort.new_tokens // 2
    for dtype in options.dtype[: 1 if options.tiny else None]:
        here = base.in_dtype(dtype)
        heads = None if loaded is None else heads_like(here, loaded.heads)
        sizes = sorted({*effort.sizes, *([] if options.tiny else [drafts + 1 for drafts in CHAINS])})
        shared: dict[str, Any] = {
            "nodes": sizes,
            "batches": effort.batches,
            "contexts": [context],
            "repeats": effort.rounds,
            "draft": draft,
        }
        profiles = [measure_profile(here, heads, drafter=drafter, kind=kind, **shared) for kind in PROFILE_KINDS]
        found = verdicts_of(run.calibration, profiles)
        bench = Bench(here, heads, draft, drafter, texts, effort, options.full)
        for place in found.verdicts:
            if place.batch in options.batch:
                print(f"\n{name}, {drafter.name}, {dtype}, batch {place.batch}: the verdict is {named(place.best)}")
                bench.compare(place)
        if set(options.batch) < set(COMPARED):
            continue
        print(f"\n{name}, {drafter.name}, {dtype}: {COMPARED[-1]} texts of different lengths in one batch")
        bench.follow(found)


@dataclasses.dataclass(frozen=True)
class Bench:
    """What decodes, and the texts."""

    base: Base
    heads: MedusaHeads | None
    draft: Base | None
    drafter: Drafter
    texts: Sequence[list[int]]
    effort: Effort
    full: bool

    def decoder(self, plan: Planned) -> TreeDecoder:
        return TreeDecoder(self.base, self.heads, plan, drafter=self.drafter, draft=self.draft)

    def compare(self, place: Verdict) -> None:
        """Decode all texts in batches by every setting in turn."""
        chosen = [one for one in place.settings if self._compared(one) or one is place.best]
        names = [named(one) for one in chosen]
        names = [f"{name}*" if name in names[:i] else name for i, name in enumerate(names)]  # by costs of sizes
        decoders = {name: self.decoder(one.of.plan()) for name, one in zip(names, chosen, strict=True)}
        expected = {name: one.budget.speedup for name, one in zip(names, chosen, strict=True)}
        best = names[next(i for i, one in enumerate(chosen) if one is place.best)]
        new = self.effort.new_tokens
        count = max(self.effort.fewest, place.batch)

        def run(name: str, number: int) -> tuple[float, float]:
            texts = self._taken(number, count)
            batches = [texts[first : first + place.batch] for first in range(0, count, place.batch)]
            return self._rates(decoders[name], batches, [new] * place.batch, full=self.full)

        race(run, expected, NONE, best, self.effort.repeats, GOAL)

    def _compared(self, one: Setting) -> bool:
        return one.kind == NONE or one.budget.nodes in (
            [drafts + 1 for drafts in CHAINS] if one.kind == "chain" else self.effort.sizes
        )

    def follow(self, found: Verdicts) -> None:
        """Decode one batch of budgets from an eighth of the longest on, by the schedule and by each fixed length."""
        place = found.verdicts[-1]
        lengths = [one for one in place.settings if one.kind in (NONE, "chain") and self._compared(one)]
        plans: dict[str, Planned] = {named(one): one.of.plan() for one in lengths}
        plans[SCHEDULE] = found.schedule
        expected = {named(one): one.budget.speedup for one in lengths} | {SCHEDULE: place.best.budget.speedup}
        decoders = {name: self.decoder(plan) for name, plan in plans.items()}
        count, most = min(COMPARED[-1], len(self.texts)), self.effort.new_tokens
        budgets = [max(1, most // 8 + most * 7 * i * i // (8 * max(1, count - 1) ** 2)) for i in range(count)]

        def run(name: str, number: int) -> tuple[float, float]:
            return self._rates(decoders[name], [self._taken(number, count)], budgets)

        race(run, expected, NONE, SCHEDULE, self.effort.repeats, GOAL)

    def _taken(self, number: int, count: int) -> list[list[int]]:
        """The texts of a repeat."""
        return [self.texts[(number * count + i) % len(self.texts)] for i in range(count)]

    def _rates(
        self, decoder: TreeDecoder, batches: Sequence[list[list[int]]], budgets: Sequence[int], *, full: bool = False
    ) -> tuple[float, float]:
        """Tokens per step, and per CPU second without prefill; `budgets` has the new tokens of each text of a batch.

        With `full` until the first text of a batch ends.
        """
        spent = 0.0
        lengths: list[int] = []
        for texts in batches:
            rows = decoder.prefill(texts, max(budgets))
            left = dict(zip(range(len(texts)), budgets, strict=False))  # the last batch may be smaller
            begin, timed = time.thread_time(), 0.0
            for step in advance(decoder, rows, left, frozenset(self.base.eos_ids)):
                if full and len(step) < len(texts):
                    break
                timed = time.thread_time() - begin
                lengths += map(len, step.values())
            spent += timed
        return sum(lengths) / len(lengths), sum(lengths) / spent


if __name__ == "__main__":
    main()
