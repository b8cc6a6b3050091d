"""The plan that `learn` recommends against none and every other size: tokens per second of whole texts, in one run.

    python bench/recommended.py [--model smollm2|pocket|tinystories] [--dtype float32 bfloat16] [--shared ../shared]

The drafter is learned with heads where the model has them; `learn_drafter` times a step of none, and of static and
per-step trees of each size, and recommends a plan for each dtype. Then other texts are decoded by all plans in turn:
two rounds of all, then 20 repeats of none, the recommended plan, and those whose fastest round came within `CLOSE` of
the fastest of all; of these the ones that are slower than the best after 5 repeats, by their interval, are dropped. The
figures are geometric means of paired ratios with their 90 % intervals (Student's t). Where a goal depends on an
interval that is wider than 3 % to either side, 20 more repeats follow, at most seven times. Times are CPU seconds of
the one thread, so that other processes do not count. The model of smollm2 is that of `python bench/smollm2.py
build/smollm2`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from decode import TINY_SHAPE, random_pair
from scipy.stats import t as student
from timing import add_tiny, judged, machine

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafting.learn import Learning
from treeopt.evaluate.learn_drafter import LearnedDrafter, PlanFigures, fastest_of, learn_drafter
from treeopt.models.base import Base, load_base
from treeopt.models.compatibility import heads_like
from treeopt.models.given import load_pair
from treeopt.models.head_files import LoadedHeads
from treeopt.texts.encode import encode
from treeopt.texts.prompts import PromptSet, load_prompts

PLAIN_GOAL, BEST_GOAL = 0.98, 0.97
WIDEST = 0.03  # to either side of the mean, of a 90 % interval
CLOSE = 0.85  # of the fastest plan's tokens per second in the first rounds
FIRST = 2  # rounds of all plans
SURE = 5  # repeats after which slower plans are dropped
MODELS = ("smollm2", "pocket", "tinystories")


@dataclasses.dataclass(frozen=True)
class Effort:
    """Sizes of a run.

    Args:
        sizes: nodes of the plans.
        known: prompts that the drafter is learned from.
        learned: tokens that are sampled to learn from.
        texts: prompts that are decoded.
        new_tokens: of each text.
        repeats: of the paired times.
    """

    sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    known: int = 96
    learned: int = 50_000
    texts: int = 8
    new_tokens: int = 128
    repeats: int = 20


CHAT = Effort(known=48, learned=12_000, texts=3, new_tokens=48)
TINY = Effort((2, 8), known=4, learned=100, texts=1, new_tokens=8, repeats=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--model", choices=MODELS, nargs="+", default=MODELS)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="learned in the first")
    parser.add_argument("--folder", default="build/smollm2", help="of smollm2")
    add_tiny(parser)
    options = parser.parse_args()
    each_model(options, measure)


def each_model(options: argparse.Namespace, measure: Callable[[str, argparse.Namespace], None]) -> None:
    """Run a bench on each model, with one thread."""
    torch.set_num_threads(1)
    print(f"{machine(1)}, torch {torch.__version__}")
    for name in options.model:
        measure(name, options)


def measure(name: str, options: argparse.Namespace) -> None:
    """Learn a drafter, and compare its plans in each dtype."""
    effort = TINY if options.tiny else CHAT if name == "smollm2" else Effort()
    base, loaded, prompts = prepared(name, options)
    rows = prompts.prompts
    known = dataclasses.replace(prompts, prompts=rows[: effort.known])
    texts = [encode(one, base.tokenizer, chat_template=True)[0] for one in rows[-effort.texts :]]
    found = learn_drafter(
        base,
        known,
        loaded,
        learning=Learning(effort.learned),
        sizes=effort.sizes,
        max_new_tokens=effort.new_tokens,
        batch_size=32,
        dtypes=options.dtype[1:],
    )
    for dtype in options.dtype:
        figures = [one for one in found.figures if one.dtype == dtype]
        print(f"\n{name}, {found.drafter.name}, {dtype}: recommended is {label(fastest_of(figures))}")
        compare(base.in_dtype(dtype), loaded, found, figures, texts, effort)


def prepared(name: str, options: argparse.Namespace) -> tuple[Base, LoadedHeads | None, PromptSet]:
    """One of `MODELS` in the first dtype, its heads (None where it has none) and its prompts."""
    folder, dtype = options.shared / "models" / "tinystories-260k", options.dtype[0]
    stories = str(options.shared / "data" / "story_openings.json")
    if name == "pocket":
        return *load_pair("pocket", None, dtype=dtype, device="cpu"), load_prompts("pocket")
    if name == "tinystories":
        return *load_pair(f"{folder}-medusa", str(folder), dtype=dtype, device="cpu"), load_prompts(stories)
    if options.tiny:
        base, _, _ = random_pair(TINY_SHAPE, getattr(torch, dtype))
        tokenizer = load_base(str(folder), device="cpu").tokenizer
        return dataclasses.replace(base, tokenizer=tokenizer), None, load_prompts(stories)
    base = load_base(options.folder, dtype=dtype, device="cpu")
    return base, None, load_prompts(str(options.shared / "data" / "alpaca_eval.json"))


def label(one: PlanFigures) -> str:
    """The kind and the nodes of a plan."""
    return one.kind if one.nodes == 1 else f"{one.kind} {one.nodes}"


def compare(
    base: Base,
    loaded: LoadedHeads | None,
    found: LearnedDrafter,
    figures: Sequence[PlanFigures],
    texts: Sequence[list[int]],
    effort: Effort,
) -> None:
    """Decode with every plan in turn, and judge the recommended one."""
    heads = None if loaded is None else heads_like(base, loaded.heads)
    drafter = found.drafter
    plans = {label(one): one for one in figures}
    decoders = {name: TreeDecoder(base, heads, one.plan, drafter=drafter) for name, one in plans.items()}
    none, chosen = label(figures[0]), label(fastest_of(figures))
    expected = {name: one.speedup for name, one in plans.items()}
    race(lambda name, _: decoded(decoders[name], texts, effort.new_tokens), expected, none, chosen, effort.repeats)
    print(f"texts: {len(texts)}")


def race(
    run: Callable[[str, int], tuple[float, float]],
    expected: Mapping[str, float],
    none: str,
    chosen: str,
    repeats: int,
    goal: float = BEST_GOAL,
) -> None:
    """Run every plan in turn, print its speedup over none beside the expected one, and judge the chosen plan.

    `run` gives tokens per step and tokens per second of a plan in a round, whose number may choose the texts.
    """
    rates: dict[str, list[float]] = defaultdict(list)
    taus: dict[str, list[float]] = defaultdict(list)

    def repeat(names: Iterable[str], number: int) -> None:
        for name in names:
            tau, rate = run(name, number)
            taus[name].append(tau)
            rates[name].append(rate)

    for _ in range(FIRST):  # the first warms
        repeat(expected, 0)
    first = {name: max(found) for name, found in rates.items()}
    rates.clear()
    rest = [name for name, rate in first.items() if name in (none, chosen) or rate >= CLOSE * max(first.values())]
    for done in range(1, 8 * repeats + 1):
        repeat(rest, done)
        best = max(rest, key=lambda name: float(np.mean(np.log(rates[name]))))
        over = {name: interval(rates[chosen], rates[name]) for name in (none, best)}
        if done == SURE or done % repeats == 0:
            rest = [name for name in rest if name in (none, chosen) or interval(rates[name], rates[best])[2] >= 1]
        aims = ((PLAIN_GOAL, over[none]), (goal, over[best]))
        unsure = [low < aim < high and high / mean > 1 + WIDEST for aim, (low, mean, high) in aims]
        if done % repeats == 0 and not any(unsure):
            break
    width = max(12, *map(len, expected))
    print(f"{'plan':{width}} tokens/step  over none, measured  expected")
    for name, speedup in expected.items():
        count = len(rates.get(name, ()))
        _, mean, _ = interval(rates[name], rates[none][:count]) if count else 3 * (first[name] / first[none],)
        fewer = "" if name in rest else f"  ({count or FIRST} repeats)"
        tau = float(np.mean(taus[name][FIRST:] or taus[name]))
        print(f"{name:{width}} {tau:11.3f}  {mean:19.3f}  {speedup:8.3f}{fewer}")
    low, mean, high = over[none]
    judged(f"{chosen} over none", mean, PLAIN_GOAL, f"90 % interval {low:.3f} to {high:.3f}")
    judged_by_best(f"{chosen} over {best}, the best", over[best], goal, len(rates[none]))


def judged_by_best(name: str, ends: tuple[float, float, float], goal: float, repeats: int) -> None:
    """Print whether a ratio to the best is at least the goal, or 1 within its interval; `ends` as of `interval`."""
    low, mean, high = ends
    outcome = "met   " if mean >= goal or high >= 1 else "MISSED"
    aim = f"goal: at least {goal:g}, or 1 within the 90 % interval {low:.3f} to {high:.3f}"
    print(f"{outcome}  {name}: {mean:.4g} ({aim}); {repeats} repeats", flush=True)


def decoded(decoder: TreeDecoder, texts: Sequence[list[int]], new_tokens: int, batch: int = 1) -> tuple[float, float]:
    """Tokens per step and tokens per CPU second of all texts."""
    begin = time.thread_time()
    batches = [texts[start : start + batch] for start in range(0, len(texts), batch)]
    made = [one for each in batches for one in decoder.generate(each, new_tokens)]
    spent = time.thread_time() - begin
    tokens, steps = sum(len(one.tokens) for one in made), sum(len(one.step_lengths) for one in made)
    return tokens / steps, tokens / spent


def interval(rates: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of paired ratios between the ends of its 90 % interval."""
    logs = np.log(rates) - np.log(others)
    mean, count = float(logs.mean()), len(logs)
    half = 0.0 if count < 2 else float(student.ppf(0.95, count - 1) * logs.std(ddof=1) / math.sqrt(count))
    return math.exp(mean - half), math.exp(mean), math.exp(mean + half)


if __name__ == "__main__":
    main()
