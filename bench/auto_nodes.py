"""`--nodes auto` against every fixed size: tokens per second of whole texts, all decoded in turn in one run.

    python bench/auto_nodes.py --shared ../shared [--model tinystories|pocket|random]

For each model, drafter and kind of trees: the drafter is learned, the steps are profiled at the texts' mean context,
and `auto` chooses its tree or policy from both. Then other texts are decoded by `auto` and by each fixed size. Every
text counts with the shortest of its times. Times are CPU seconds of the one thread, so that other processes do not
count. Beside tokens per second stand the milliseconds of a step, in whole texts and by the profile (of the clock); the
former have the prefill and the work between steps too.

The random model has 110 M bfloat16 weights. Its text means nothing, but is as predictable as its n-grams say, so that
the price of steps of this size can be judged by it.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from decode import SMALL_SHAPE, TINY_SHAPE, random_pair
from timing import add_tiny, judged, machine

from treeopt.calibrate.pipeline import run_calibration
from treeopt.calibration import Calibration
from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import HEADS_NGRAM, KINDS, NGRAM
from treeopt.drafting.learn import Learning
from treeopt.evaluate.profile import measure_profile
from treeopt.latency import LatencyProfile
from treeopt.models.base import Base, load_base
from treeopt.models.layouts import LoadedHeads
from treeopt.models.pair import load_pair
from treeopt.optimize.budget import step_seconds
from treeopt.optimize.build_job import Job, run_job
from treeopt.optimize.per_step import build_policy, fastest_policy
from treeopt.optimize.tree_builder import build_tree
from treeopt.policy import Plan
from treeopt.texts.encode import encode
from treeopt.texts.prompts import PromptSet, load_prompts

GOAL = 0.97
AUTO = "auto"
MODELS = ("tinystories", "pocket", "random")


@dataclasses.dataclass(frozen=True)
class Effort:
    """Sizes of a run.

    Args:
        sizes: nodes of the fixed trees.
        profiled: nodes of the profile.
        known: prompts that the drafter is learned from.
        learned: tokens that are sampled to learn from.
        texts: prompts that are decoded.
        new_tokens: tokens of each text.
        rounds: of whole texts.
        repeats: of the profile.
    """

    sizes: tuple[int, ...] = (4, 8, 16, 32, 64)
    profiled: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    known: int = 96
    learned: int = 50_000
    texts: int = 16
    new_tokens: int = 160
    rounds: int = 3
    repeats: int = 20


SLOW = Effort(known=12, learned=0, texts=3, new_tokens=64, rounds=3, repeats=10)  # of the random model
TINY = Effort((4, 8), (1, 2, 8), known=4, learned=100, texts=1, new_tokens=8, rounds=1, repeats=1)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with its heads (None where it has none), and prompts that drafters do not see."""

    name: str
    base: Base
    loaded: LoadedHeads | None
    known: PromptSet
    texts: list[list[int]]
    effort: Effort


@dataclasses.dataclass
class Timed:
    """The text of one plan: its tokens, steps, and for each prompt the shortest of its times in seconds."""

    tokens: int = 0
    steps: int = 0
    seconds: dict[int, float] = dataclasses.field(default_factory=dict)

    @property
    def total(self) -> float:
        """Seconds of all texts."""
        return sum(self.seconds.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--model", choices=MODELS, action="append", help="one of the models; by default all")
    add_tiny(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine(1)}, torch {torch.__version__}")
    for name in options.model or MODELS:
        model = prepared(name, options.shared, tiny=options.tiny)
        for drafter in (NGRAM,) if model.loaded is None else (HEADS_NGRAM, NGRAM):
            measure(model, drafter)


def prepared(name: str, shared: Path, *, tiny: bool) -> Model:
    """One of `MODELS` with its prompts."""
    effort = TINY if tiny else SLOW if name == "random" else Effort()
    folder, loaded = shared / "models" / "tinystories-260k", None
    if name == "pocket":
        base, loaded = load_pair("pocket", None, device="cpu")
    elif name == "tinystories":
        base, loaded = load_pair(f"{folder}-medusa", str(folder), device="cpu")
    else:
        base, _, _ = random_pair(TINY_SHAPE if tiny else SMALL_SHAPE, torch.bfloat16, "cpu", "eager")
        base = dataclasses.replace(base, tokenizer=load_base(str(folder), device="cpu").tokenizer)
    prompts = load_prompts("pocket" if name == "pocket" else str(shared / "data" / "story_openings.json"))
    known = dataclasses.replace(prompts, prompts=prompts.prompts[: effort.known])
    texts = [encode(prompt, base.tokenizer, chat_template=True)[0] for prompt in prompts.prompts[-effort.texts :]]
    return Model(name, base, loaded, known, texts, effort)


def measure(model: Model, name: str) -> None:
    """Learn a drafter, and compare the sizes of each kind."""
    effort, heads = model.effort, None if name == NGRAM else model.loaded
    learning = Learning(effort.learned)
    new = effort.new_tokens
    run = run_calibration(
        model.base, heads, model.known, learning=learning, steps=True, max_new_tokens=new, batch_size=32
    )
    assert run.learned is not None
    record = run.learned.drafter
    context = sum(map(len, model.texts)) // len(model.texts) + new // 2
    for kind in KINDS:
        profile = measure_profile(
            model.base,
            heads,
            nodes=effort.profiled,
            contexts=(context,),
            repeats=effort.repeats,
            drafter=record,
            kind=kind,
        )
        plans = plans_of(run.calibration, profile, kind, effort.sizes)
        used = None if heads is None else heads.heads
        decoders = {plan: TreeDecoder(model.base, used, plan, drafter=record) for plan in plans.values()}
        by_plan = decoded(decoders, model.texts, effort)
        found = {label: by_plan[plan] for label, plan in plans.items()}
        report(f"{model.name}, {name}, {kind}", plans, found, profile)


def plans_of(calibration: Calibration, profile: LatencyProfile, kind: str, sizes: Sequence[int]) -> dict[str, Plan]:
    """The plan of `auto`, and that of each fixed size."""
    if kind == KINDS[1]:
        return {AUTO: fastest_policy(calibration, profile), **{str(n): build_policy(calibration, n) for n in sizes}}
    chosen = run_job([calibration], Job(nodes=None, profile=profile)).tree
    return {AUTO: chosen, **{str(n): build_tree(calibration, n) for n in sizes}}


def decoded(decoders: Mapping[Plan, TreeDecoder], texts: Sequence[list[int]], effort: Effort) -> dict[Plan, Timed]:
    """Decode every text with every decoder in turn; the first round is not counted."""
    found = {name: Timed() for name in decoders}
    for number in range(effort.rounds + 1):
        for i, ids in enumerate(texts):
            for name, decoder in decoders.items():
                begin = time.thread_time()
                made = decoder.generate(ids, effort.new_tokens)
                spent = time.thread_time() - begin
                if not number:
                    found[name].tokens += len(made.tokens)
                    found[name].steps += len(made.step_lengths)
                else:
                    known = found[name].seconds.get(i, spent)
                    found[name].seconds[i] = min(known, spent)
    return found


def report(title: str, plans: Mapping[str, Plan], found: Mapping[str, Timed], profile: LatencyProfile) -> None:
    """Print a row for each plan, and whether `auto` meets the goal."""
    print(f"\n{title} trees\n{'':6} nodes  tokens/step  tokens/s  ms a step  by the profile")
    for name, one in found.items():
        nodes = plans[name].nodes
        by_profile = "" if name == AUTO and profile.kind == KINDS[1] else f"{step_seconds(profile, nodes) * 1e3:15.2f}"
        tau, rate, step = one.tokens / one.steps, one.tokens / one.total, one.total / one.steps * 1e3
        print(f"{name:6} {nodes:5}  {tau:11.3f}  {rate:8.1f}  {step:9.2f}  {by_profile}")
    rates = {name: one.tokens / one.total for name, one in found.items()}
    best = max((name for name in rates if name != AUTO), key=rates.__getitem__)
    judged(f"{title}: auto to the best fixed size, {best}", rates[AUTO] / rates[best], GOAL)


if __name__ == "__main__":
    main()
