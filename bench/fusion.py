"""What the n-gram table and the text so far add to each drafter, by category of Spec-Bench.

    python bench/fusion.py --model pocket|tinystories|smollm2 [--drafters heads eagle ...] [--texts 10]

For each drafter X: tokens per step of X, of `ngram` and of `X+ngram` with trees of 16 nodes per step, by replay on the
model's greedy answers to the first questions of each category that fit into its context. Drafters are learned on the
first half of the model's prompts (bench/drafting_halves.py). Goals: `X+ngram` at least 10 % over X on all texts, and in
no category below X or `ngram` by more than the interval of 95 %, which draws questions.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from drafting_halves import Pair, load
from streams import DRAFTS, NODES, Learned, answered, ratio
from timing import add_tiny, judged, machine

from treeopt.drafting.interface import Ints
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import load_prompts

GOAL = 1.1
ALL = "all"


def questions(pair: Pair, shared: Path, count: int, *, tiny: bool) -> tuple[list[Text], list[str]]:
    """First questions of each category with greedy answers, and the category of each."""
    prompts = load_prompts(str(shared / "data" / "spec_bench.jsonl"))
    given, categories, taken = [], [], dict[str, int]()
    for text in encode_prompts(pair.base, prompts, pair.new_tokens).texts:
        category = str(text.category)
        taken[category] = taken.get(category, 0) + 1
        if taken[category] <= count:
            given.append(text.prompt)
            categories.append(category)
    most = 4 if tiny else None
    return answered(pair, given[:most]), categories[:most]


def compared(name: str, texts: Sequence[Text], categories: Sequence[str], steps: Mapping[str, Ints]) -> None:
    """Print tokens per step of X, ngram and X+ngram by category, and the ratios beside their goals."""
    tokens, each = np.array([len(text.answer) for text in texts]), np.arange(len(texts))
    fused = f"{name}+ngram"
    print(f"\n{'category':16} {'texts':>6} {name:>8} {'ngram':>8} {fused:>14}")
    below = []
    for category in (*dict.fromkeys(categories), ALL):
        part = np.array([category in (one, ALL) for one in categories])
        taus = [tokens[part].sum() / steps[one][part].sum() for one in (name, "ngram", fused)]
        print(f"{category:16} {part.sum():6} {taus[0]:8.3f} {taus[1]:8.3f} {taus[2]:14.3f}", flush=True)
        for other in (name, "ngram"):
            gain, low, high = ratio(steps[fused][part], steps[other][part], each[part])
            if category == ALL and other == name:
                judged(f"{fused} over {name}", gain, GOAL, f"95 %: {low:.3f} to {high:.3f}")
            elif high < 1:
                below.append(f"{category} {gain:.3f} of {other}")
    print(f"{'MISSED' if below else 'met   '}  {fused} below a part of it: {'; '.join(below) or 'in no category'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DRAFTS, default="pocket")
    parser.add_argument("--drafters", nargs="+", help="without `+ngram` [default: all of the model]")
    parser.add_argument("--texts", type=int, default=10, help="of each category, at most")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--tokens", type=int, default=50_000, help="sampled tokens to learn from")
    add_tiny(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pair, drafts = load(options.model, options.shared, tiny=options.tiny), DRAFTS[options.model]
    names = options.drafters or [*(["heads"] if pair.loaded else []), *drafts]
    tokens = 400 if options.tiny else options.tokens
    texts, categories = questions(pair, options.shared, options.texts, tiny=options.tiny)
    print(f"{machine(1)}; {options.model}, {len(texts)} texts, {NODES} nodes per step, {tokens:,} sampled tokens")
    table = Learned.of(pair, "ngram", tokens, drafts).steps(pair.base, texts, None)
    for name in names:
        both = {one: Learned.of(pair, one, tokens, drafts) for one in (name, f"{name}+ngram")}
        steps = {one: learned.steps(pair.base, texts, None) for one, learned in both.items()}
        compared(name, texts, categories, {**steps, "ngram": table})


if __name__ == "__main__":
    main()
