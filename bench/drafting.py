"""Drafters: tokens per step on held-out texts against their goals, ablations, and speed.

    python bench/drafting.py table --model tinystories|pocket [--tokens 400000] [--decode]
    python bench/drafting.py terms --model tinystories|pocket
    python bench/drafting.py speed --model tinystories|pocket
    python bench/drafting.py cost

`table` learns and builds on the first half of the prompts (rows 0-255 of the story openings; pocket was not trained on
the modules of its prompts) and evaluates on the second: the Medusa tree, prompt lookup, then static and per-step trees
of the drafters heads, heads+ngram and ngram (no heads), and of ngram when nothing was learned. Figures are by replay
over traces of the second half, which equals decoding step by step (prompt lookup is decoded); `--decode` also decodes.
Both models are small and repeat themselves, so n-grams and lookup gain more on them than on large models.

`terms` leaves out sources of the score, one at a time, and evaluates repetitive texts and others apart. `speed` times
whole texts, in turn, in one run. `cost` times drafting alone, without the heads' matrix products, relative to a step of
a 134M model with 32,000 tokens, and the cache's part of it.
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
from drafting_halves import TOP_K, Pair, load, others, traces
from drafting_terms import terms
from numpy.typing import NDArray
from timing import add_tiny, judged, machine

from treeopt.calibration import Calibration
from treeopt.decode.decoder import TreeDecoder
from treeopt.defaults import LEARN_TOKENS
from treeopt.drafter import Drafter
from treeopt.drafting.learn import Learning
from treeopt.evaluate.baselines import LOOKUP_TOKENS, Call, with_generate
from treeopt.models.base import Base
from treeopt.optimize.per_step import build_policy, calibration_error, replay_policy
from treeopt.optimize.replay import replay
from treeopt.optimize.tree_builder import build_tree
from treeopt.policy import Plan, TreePolicy
from treeopt.texts.encode import Text, encode_prompts
from treeopt.traces import MISS, NONE
from treeopt.tree import Tree

SIZES = (8, 16, 32, 64)
GOALS = {
    ("tinystories", "static"): (2.03, 2.15, 2.25, 2.31),
    ("tinystories", "dynamic"): (2.18, 2.40, 2.55, 2.61),
    ("pocket", "static"): (1.70, 1.85, 1.89, 1.89),
    ("pocket", "dynamic"): (1.85, 2.01, 2.04, 2.06),
}
NO_HEADS_GOAL = 0.95  # of ngram: its tokens per step over those of heads+ngram
LOOKUP_GOAL = 1.8  # of ngram with 16 nodes: its tokens per step over those of prompt lookup
SPEED_GOALS = {"heads+ngram static": 1.25, "heads+ngram dynamic": 1.15}
SPEED_NODES = 16


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


def fitted(pair: Pair, learning: Learning | None, *, heads: bool = True, draft: Base | None = None) -> Half:
    """Learn on the first half and trace it; there are no traces for evaluation yet."""
    run = traces(pair, evaluated=False, learning=learning, heads=heads, draft=draft)
    drafter = None if run.learned is None else run.learned.drafter
    return Half(run.calibration, run.calibration.select([]), drafter)


def measured(pair: Pair, learning: Learning | None, *, heads: bool = True, draft: Base | None = None) -> Half:
    """The same with traces of the second half, without texts that are in both halves."""
    half = fitted(pair, learning, heads=heads, draft=draft)
    evaluated = traces(pair, evaluated=True, drafter=half.drafter, heads=heads, draft=draft).calibration
    return dataclasses.replace(half, evaluated=evaluated.select(others(half.fitted, evaluated)))


def table(pair: Pair, options: argparse.Namespace) -> None:
    """Tokens per step of every drafter and kind, as ratios to the Medusa tree of the same run."""
    sizes, learning = options.sizes, Learning(tokens=options.tokens)
    halves = {
        "heads": measured(pair, None),
        "heads, calibrated": measured(pair, Learning(ngram=False, top=TOP_K)),
        "heads+ngram": measured(pair, learning),
        "ngram": measured(pair, learning, heads=False),
        "nothing learned": measured(pair, dataclasses.replace(learning, tokens=0), heads=False),
    }
    lines = {
        "Medusa tree": (halves["heads"], "medusa"),
        "heads static": (halves["heads"], "static"),
        "heads dynamic": (halves["heads, calibrated"], "dynamic"),
        "heads+ngram static": (halves["heads+ngram"], "static"),
        "heads+ngram dynamic": (halves["heads+ngram"], "dynamic"),
        "ngram static": (halves["ngram"], "static"),
        "ngram dynamic": (halves["ngram"], "dynamic"),
        "nothing learned static": (halves["nothing learned"], "static"),
        "nothing learned dynamic": (halves["nothing learned"], "dynamic"),
    }
    taus = {name: [half.tau(kind, nodes) for nodes in sizes] for name, (half, kind) in lines.items()}
    print(f"{'nodes':24}", *(f"{nodes:>14}" for nodes in sizes))
    for name, (_, kind) in lines.items():
        cells = [f"{tau:.3f} ({tau / one:.3f})" for tau, one in zip(taus[name], taus["Medusa tree"], strict=True)]
        print(f"{name:24}", *(f"{cell:>14}" for cell in cells))
        if name.startswith("heads+ngram"):
            say_goals(taus[name], taus["Medusa tree"], GOALS[options.model, kind])
        elif name.startswith("ngram"):
            say_goals(taus[name], taus[f"heads+{name}"], [NO_HEADS_GOAL] * len(sizes), "of heads+ngram")
    lookup = prompt_lookup(pair, halves["ngram"])
    if 16 in sizes:
        print(f"prompt lookup {lookup:.3f}; ngram static, 16 nodes, over it:")
        say_goals([taus["ngram static"][sizes.index(16)]], [lookup], [LOOKUP_GOAL], "")
    say_drafters(halves)
    if options.decode:
        decoded(pair, {name: line for name, line in lines.items() if "ngram" in name}, sizes)


def say_goals(taus: Sequence[float], over: Sequence[float], goals: Sequence[float], note: str = "") -> None:
    """Print ratios beside their goals."""
    ratios = [tau / one for tau, one in zip(taus, over, strict=True)]
    cells = [
        f"{'met' if ratio >= goal else 'MISSED'} {ratio:.3f} >= {goal:.2f}"
        for ratio, goal in zip(ratios, goals, strict=False)
    ]
    print(f"{'  goal ' + note:24}", *(f"{cell:>14}" for cell in cells))


def say_drafters(halves: dict[str, Half]) -> None:
    """Print what each drafter with an n-gram table consists of, and the calibration errors of its levels."""
    for name, half in halves.items():
        drafter = half.drafter
        if drafter is None or drafter.ngram_table is None:
            continue
        found = drafter.ngram_table
        errors, chance = calibration_error(half.evaluated), chance_error(half.evaluated)
        print(
            f"{name}: {found.num_tokens:,} tokens, {found.contexts:,} contexts, {found.bytes / 1e6:.1f} MB, prior of "
            f"the cache {drafter.cache_prior:g}; evaluated on {half.evaluated.sequences} texts, "
            f"{half.evaluated.positions} tokens"
        )
        cells = " ".join(f"{error:.4f} ({one:.4f})" for error, one in zip(errors, chance, strict=True))
        print(f"  calibration error of P(accept) by level, and that of exact estimates on as many tokens: {cells}")
        excess = np.sqrt(np.maximum(errors**2 - chance**2, 0))
        judged(f"  {name}: the largest calibration error without the part of chance", excess.max(), 0.01, most=True)


def chance_error(calibration: Calibration, draws: int = 20) -> NDArray[np.float64]:
    """float64 [H]: the mean calibration error where each guess is right with exactly the estimated probability."""
    assert calibration.steps is not None
    generator, confidence = np.random.default_rng(1), calibration.steps.confidence.astype(np.float64)
    known = calibration.ranks != NONE
    errors = []
    for _ in range(draws):
        right = generator.random(confidence.shape) < confidence
        drawn = np.where(known, np.where(right, 0, MISS), NONE).astype(np.uint8)
        steps = dataclasses.replace(calibration.steps, node_rank=np.where(known, MISS, NONE).astype(np.uint8))
        errors.append(calibration_error(dataclasses.replace(calibration, ranks=drawn, steps=steps)))
    found: NDArray[np.float64] = np.mean(errors, axis=0)
    return found


def evaluated_texts(pair: Pair, half: Half) -> list[Text]:
    """The prompts that a drafter is evaluated on."""
    ids = set(half.evaluated.prompt_ids)
    return [t for t in encode_prompts(pair.base, pair.second_half, pair.new_tokens).texts if t.prompt_id in ids]


def prompt_lookup(pair: Pair, half: Half) -> float:
    """Tokens per step of prompt lookup by transformers, on the texts for evaluation."""
    decode = with_generate(pair.base, prompt_lookup_num_tokens=LOOKUP_TOKENS)
    runs = [decode([text.prompt], pair.new_tokens, Call(0))[0] for text in evaluated_texts(pair, half)]
    return sum(len(run.tokens) for run in runs) / sum(len(run.step_lengths) for run in runs)


def decoded(pair: Pair, lines: dict[str, tuple[Half, str]], sizes: Sequence[int]) -> None:
    """Decode, and compare texts with greedy decoding and tokens per step with the prediction."""
    texts = evaluated_texts(pair, next(iter(lines.values()))[0])
    autoregressive = TreeDecoder(pair.base, None, Tree(()))
    greedy = [autoregressive.generate(text.prompt, pair.new_tokens).tokens for text in texts]
    for name, (half, kind) in lines.items():
        for nodes in sizes:
            heads = pair.loaded.heads if half.drafter and half.drafter.num_heads else None
            decoder = TreeDecoder(pair.base, heads, half.plan(kind, nodes), drafter=half.drafter)
            made = [decoder.generate(text.prompt, pair.new_tokens) for text in texts]
            same = sum(one.tokens == text for one, text in zip(made, greedy, strict=True))
            tau = sum(len(one.tokens) for one in made) / sum(len(one.step_lengths) for one in made)
            predicted = half.tau(kind, nodes)
            print(
                f"{name} {nodes}: lossless {same}/{len(texts)}, measured {tau:.6f}, predicted {predicted:.6f}",
                flush=True,
            )


def speed(pair: Pair, options: argparse.Namespace) -> None:
    """Tokens per second at 16 nodes; whole texts, decoded in turn."""
    learning = Learning(tokens=options.tokens)
    heads_only, rescored = fitted(pair, None), fitted(pair, learning)
    no_heads = fitted(pair, learning, heads=False)
    texts = encode_prompts(pair.base, pair.second_half, pair.new_tokens).texts[: options.texts]
    plans = {
        "autoregressive": (heads_only, Tree(())),
        "heads static": (heads_only, heads_only.plan("static", SPEED_NODES)),
        "heads+ngram static": (rescored, rescored.plan("static", SPEED_NODES)),
        "heads+ngram dynamic": (rescored, rescored.plan("dynamic", SPEED_NODES)),
        "ngram static": (no_heads, no_heads.plan("static", SPEED_NODES)),
        "ngram dynamic": (no_heads, no_heads.plan("dynamic", SPEED_NODES)),
    }
    decoders = {
        name: TreeDecoder(pair.base, None if half is no_heads else pair.loaded.heads, plan, drafter=half.drafter)
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
    parser.add_argument("--tokens", type=int, default=LEARN_TOKENS, help="sampled tokens to learn from")
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
    if options.what == "terms":
        terms(pair, options.sizes, Learning(tokens=options.tokens), tiny=options.tiny)
        return
    {"table": table, "speed": speed}[options.what](pair, options)


if __name__ == "__main__":
    main()
