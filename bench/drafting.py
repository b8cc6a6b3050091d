"""The drafter heads+ngram and per-step trees: tokens per step on held-out texts, ablations, and speed.

    python bench/drafting.py table --model tinystories|pocket [--tokens 400000]
    python bench/drafting.py terms --model tinystories|pocket
    python bench/drafting.py speed --model tinystories|pocket
    python bench/drafting.py cost

`table` learns and builds on the first half of the prompts (rows 0-255 of the story openings; pocket was not trained on
the modules of its prompts) and evaluates on the second: the Medusa tree, then static and per-step trees of the drafters
heads and heads+ngram. Figures are by replay over traces of the second half, which equals decoding step by step;
`--decode` also decodes. `speed` times whole texts, in turn, in one run. `cost` times drafting alone, without the
heads' matrix products, relative to a step of a 134M model with 32,000 tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from timing import add_tiny, machine

from treeopt.calibrate.pipeline import CalibrationRun, run_calibration
from treeopt.calibration import Calibration
from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import Drafter
from treeopt.drafting.learn import Learning
from treeopt.models.base import Base
from treeopt.models.layouts import LoadedHeads
from treeopt.models.pair import load_pair
from treeopt.optimize.per_step import build_policy, replay_policy
from treeopt.optimize.reliability import reliability
from treeopt.optimize.replay import replay
from treeopt.optimize.tree_builder import build_tree
from treeopt.policy import Plan, TreePolicy
from treeopt.texts.encode import encode_prompts
from treeopt.texts.prompts import PromptSet, load_prompts
from treeopt.tree import Tree

SIZES = (8, 16, 32, 64)
TOP_K = 32
GOALS = {"static": (1.32, 1.38, 1.43, 1.47), "dynamic": (1.42, 1.49, 1.53, 1.56)}
SPEED_GOALS = {"heads+ngram static": 1.25, "heads+ngram dynamic": 1.15}
SPEED_NODES = 16


@dataclass(frozen=True)
class Pair:
    """A model with heads, and its prompts in two halves."""

    base: Base
    loaded: LoadedHeads
    first_half: PromptSet
    second_half: PromptSet
    new_tokens: int


def load(name: str, shared: Path, *, tiny: bool) -> Pair:
    """tinystories with its heads and the story openings, or pocket with its heads and prompts."""
    if name == "tinystories":
        folder = shared / "models"
        base, loaded = load_pair(
            str(folder / "tinystories-260k-medusa"), str(folder / "tinystories-260k"), dtype="float32", device="cpu"
        )
        prompts, tokens = load_prompts(str(shared / "data" / "story_openings.json")), 160
    else:
        base, loaded = load_pair("pocket", None, dtype="float32", device="cpu")
        prompts, tokens = load_prompts("pocket"), 128
    half = len(prompts.prompts) // 2
    count = 6 if tiny else half
    parts = (prompts.prompts[:count], prompts.prompts[half : half + count])
    first_half, second_half = (dataclasses.replace(prompts, prompts=part) for part in parts)
    return Pair(base, loaded, first_half, second_half, 12 if tiny else tokens)


def traces(
    pair: Pair, *, evaluated: bool, drafter: Drafter | None = None, learning: Learning | None = None
) -> CalibrationRun:
    """A calibration of one half, with per-step trees where there is a drafter."""
    return run_calibration(
        pair.base,
        pair.loaded,
        pair.second_half if evaluated else pair.first_half,
        max_new_tokens=pair.new_tokens,
        batch_size=64,
        drafter=drafter,
        learning=learning,
        steps=drafter is not None or learning is not None,
    )


@dataclass(frozen=True)
class Half:
    """The results of one drafter: traces to build from, traces to evaluate on, and the drafter."""

    fitted: Calibration
    evaluated: Calibration
    drafter: Drafter | None

    def plan(self, kind: str, nodes: int) -> Plan:
        """The tree or policy with a number of nodes."""
        if kind == "dynamic":
            return build_policy(self.fitted, nodes)
        if kind == "medusa":
            return build_tree(self.fitted, nodes, top_k=TOP_K, values="independent", weights="uniform")
        return build_tree(self.fitted, nodes, top_k=TOP_K)

    def tau(self, kind: str, nodes: int) -> float:
        """Tokens per step of that plan on the texts for evaluation."""
        plan = self.plan(kind, nodes)
        found = replay_policy(plan, self.evaluated) if isinstance(plan, TreePolicy) else replay(plan, self.evaluated)
        return found.tokens_per_step


def fitted(pair: Pair, learning: Learning | None) -> Half:
    """Learn on the first half and trace it; there are no traces for evaluation yet."""
    run = traces(pair, evaluated=False, learning=learning)
    drafter = None if run.learned is None else run.learned.drafter
    return Half(run.calibration, run.calibration.select([]), drafter)


def measured(pair: Pair, learning: Learning | None) -> Half:
    """The same with traces of the second half, without texts that are in both halves."""
    half = fitted(pair, learning)
    evaluated = traces(pair, evaluated=True, drafter=half.drafter).calibration
    known = set(half.fitted.token_hashes)
    others = [s for s in range(evaluated.sequences) if evaluated.token_hashes[s] not in known]
    return dataclasses.replace(half, evaluated=evaluated.select(others))


def table(pair: Pair, options: argparse.Namespace) -> None:
    """Tokens per step of every drafter and kind, as ratios to the Medusa tree of the same run."""
    heads_only = measured(pair, None)
    calibrated = measured(pair, Learning(ngram=False, top=TOP_K))
    rescored = measured(pair, Learning(tokens=options.tokens))
    sizes = options.sizes
    medusa = [heads_only.tau("medusa", nodes) for nodes in sizes]
    lines = {
        "Medusa tree": (heads_only, "medusa"),
        "heads static": (heads_only, "static"),
        "heads dynamic": (calibrated, "dynamic"),
        "heads+ngram static": (rescored, "static"),
        "heads+ngram dynamic": (rescored, "dynamic"),
    }
    print(f"{'nodes':19}", *(f"{nodes:>14}" for nodes in sizes))
    for name, (half, kind) in lines.items():
        taus = [half.tau(kind, nodes) for nodes in sizes]
        goals = GOALS.get(kind, ())[: len(sizes)] if name.startswith("heads+ngram") else ()
        cells = [f"{tau:.3f} ({tau / one:.3f})" for tau, one in zip(taus, medusa, strict=True)]
        print(f"{name:19}", *(f"{cell:>14}" for cell in cells))
        if goals:
            met = [tau / one >= goal for tau, one, goal in zip(taus, medusa, goals, strict=True)]
            print(
                f"{'  goal':19}",
                *(f"{'met' if m else 'MISSED'} {goal:.2f}".rjust(14) for m, goal in zip(met, goals, strict=True)),
            )
    print(f"evaluated on {rescored.evaluated.sequences} texts, {rescored.evaluated.positions} tokens")
    error = reliability(rescored.evaluated).error
    print("calibration error by level, second half:", " ".join(f"{one:.3f}" for one in error), "(goal: at most 0.02)")
    drafter = rescored.drafter
    assert drafter is not None
    assert drafter.ngram_table is not None
    size = drafter.ngram_table.bytes / 1e6
    print(
        f"n-gram table: {drafter.ngram_table.num_tokens:,} tokens, {drafter.ngram_table.contexts:,} contexts,"
        f" {size:.1f} MB"
    )
    if options.decode:
        decoded(pair, {name: line for name, line in lines.items() if name.startswith("heads+ngram")}, sizes)


def decoded(pair: Pair, lines: dict[str, tuple[Half, str]], sizes: Sequence[int]) -> None:
    """Decode, and compare texts with greedy decoding and tokens per step with the prediction."""
    evaluated = {prompt for half, _ in lines.values() for prompt in half.evaluated.prompt_ids}
    texts = [t for t in encode_prompts(pair.base, pair.second_half, pair.new_tokens).texts if t.prompt_id in evaluated]
    autoregressive = TreeDecoder(pair.base, None, Tree(()))
    greedy = [autoregressive.generate(text.prompt, pair.new_tokens).tokens for text in texts]
    for name, (half, kind) in lines.items():
        for nodes in sizes:
            decoder = TreeDecoder(pair.base, pair.loaded.heads, half.plan(kind, nodes), drafter=half.drafter)
            made = [decoder.generate(text.prompt, pair.new_tokens) for text in texts]
            same = sum(one.tokens == text for one, text in zip(made, greedy, strict=True))
            tau = sum(len(one.tokens) for one in made) / sum(len(one.step_lengths) for one in made)
            predicted = half.tau(kind, nodes)
            print(
                f"{name} {nodes}: lossless {same}/{len(texts)}, measured {tau:.6f}, predicted {predicted:.6f}",
                flush=True,
            )


def terms(pair: Pair, options: argparse.Namespace) -> None:
    """Tokens per step without parts of the drafter heads+ngram."""
    whole = Learning(tokens=options.tokens)
    variants = {
        "all": whole,
        "no extra depth": dataclasses.replace(whole, levels=0),
        "no prompt lookup": dataclasses.replace(whole, window=0),
        "neither": dataclasses.replace(whole, window=0, levels=0),
        "greedy answers alone, no sampled text": dataclasses.replace(whole, tokens=0),
        "sampled at temperature 1": dataclasses.replace(whole, temperature=1.0),
    }
    heads_only = measured(pair, None)
    medusa = [heads_only.tau("medusa", nodes) for nodes in options.sizes]
    for name, learning in list(variants.items())[: 2 if options.tiny else None]:
        half = measured(pair, learning)
        for kind in ("static", "dynamic"):
            ratios = [half.tau(kind, nodes) / one for nodes, one in zip(options.sizes, medusa, strict=True)]
            print(f"{name:38} {kind:8}", " ".join(f"{ratio:.3f}" for ratio in ratios))


def speed(pair: Pair, options: argparse.Namespace) -> None:
    """Tokens per second at 16 nodes; whole texts, decoded in turn."""
    heads_only, rescored = fitted(pair, None), fitted(pair, Learning(tokens=options.tokens))
    texts = encode_prompts(pair.base, pair.second_half, pair.new_tokens).texts[: options.texts]
    plans = {
        "autoregressive": (heads_only, Tree(())),
        "heads static": (heads_only, heads_only.plan("static", SPEED_NODES)),
        "heads+ngram static": (rescored, rescored.plan("static", SPEED_NODES)),
        "heads+ngram dynamic": (rescored, rescored.plan("dynamic", SPEED_NODES)),
    }
    decoders = {
        name: TreeDecoder(pair.base, pair.loaded.heads, plan, drafter=half.drafter)
        for name, (half, plan) in plans.items()
    }
    rates: dict[str, list[float]] = {name: [] for name in decoders}
    for round_number in range(options.repeats + 1):
        for name, decoder in decoders.items():
            begin = time.perf_counter()
            tokens = sum(len(decoder.generate(text.prompt, pair.new_tokens).tokens) for text in texts)
            if round_number:
                rates[name].append(tokens / (time.perf_counter() - begin))
    base = rates["heads static"]
    for name, speeds in rates.items():
        ratio = statistics.median(a / b for a, b in zip(speeds, base, strict=True))
        goal = SPEED_GOALS.get(name)
        outcome = "" if goal is None else f"  {'met' if ratio >= goal else 'MISSED'}, goal {goal}"
        print(f"{name:19} {statistics.median(speeds):8.0f} tokens/s, {ratio:.2f} x heads static{outcome}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "terms", "speed", "cost"))
    parser.add_argument("--model", choices=("tinystories", "pocket"), default="tinystories")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--tokens", type=int, default=Learning().tokens, help="sampled tokens to learn from")
    parser.add_argument("--decode", action="store_true", help="table: decode too")
    parser.add_argument("--texts", type=int, default=24, help="speed: texts of a round")
    parser.add_argument("--repeats", type=int, default=5, help="speed: rounds")
    add_tiny(parser)
    options = parser.parse_args()
    options.sizes = SIZES
    if options.tiny:
        options.sizes, options.tokens, options.texts, options.repeats = SIZES[:1], 400, 2, 1
    torch.set_num_threads(1)
    print(f"{machine(1)}, torch {torch.__version__}, numpy {np.__version__}")
    if options.what == "cost":
        from drafting_cost import cost

        cost(tiny=options.tiny)
        return
    pair = load(options.model, options.shared, tiny=options.tiny)
    {"table": table, "terms": terms, "speed": speed}[options.what](pair, options)


if __name__ == "__main__":
    main()
