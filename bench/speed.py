"""Tokens per second of drafters by kind and size, relative to stock `generate`; the price of heads on a 110M model.

    python bench/speed.py tinystories|pocket|heads [--shared ../shared] [--tokens 400000]

Drafters are learned, and trees built, on the first half of the prompts; whole texts of the second half are decoded, all
ways in turn, in one run. `heads` times a step of 8 nodes with five heads that share the LM head of a 110M model in
bfloat16, relative to the model's bare forward over 8 nodes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from decode import HEADS, SMALL_SHAPE, TINY_SHAPE, random_pair, stock_tokens, tokens_of, tokens_per_second
from drafting import SIZES, fitted
from drafting_halves import load
from forward import step_and_forward
from timing import add_tiny, judged, machine

from treeopt.decode.decoder import TreeDecoder
from treeopt.defaults import LEARN_TOKENS
from treeopt.drafting.learn import Learning
from treeopt.evaluate.profile import generic_growth
from treeopt.texts.encode import encode_prompts

STATIC_GOAL, PER_STEP_GOAL, BEST_GOAL, HEADS_GOAL = 2.6, 1.05, 2.0, 1.06
KINDS = ("static", "dynamic")


def speeds(model: str, options: argparse.Namespace) -> None:
    """Every drafter, kind and size against stock `generate`."""
    pair = load(model, options.shared, tiny=options.tiny)
    learning = Learning(tokens=options.tokens)
    sizes = SIZES[:1] if options.tiny else SIZES
    ways: dict[str, Callable[[list[int]], int]] = {
        "stock generate": lambda ids: stock_tokens(pair.base, ids, pair.new_tokens)
    }
    for name, heads in (("heads+ngram", True), ("ngram", False)):
        half = fitted(pair, learning, heads=heads)
        for kind in KINDS:
            for nodes in sizes:
                decoder = TreeDecoder(
                    pair.base, pair.loaded.heads if heads else None, half.plan(kind, nodes), drafter=half.drafter
                )
                ways[f"{name} {kind} {nodes}"] = tokens_of(decoder, pair.new_tokens)
    texts = encode_prompts(pair.base, pair.second_half, pair.new_tokens).texts[: options.texts]
    pace = tokens_per_second(ways, [text.prompt for text in texts], options.repeats)
    stock = pace.pop("stock generate")
    print(f"\n{model}: stock generate {stock:.0f} tokens/s")
    for name, rate in pace.items():
        print(f"{name:22} {rate:6.0f} tokens/s  {rate / stock:.2f} x stock generate")
    best = {kind: max((name for name in pace if kind in name), key=pace.__getitem__) for kind in KINDS}
    static, dynamic = (pace[best[kind]] for kind in KINDS)
    if model == "tinystories":
        judged(f"best static ({best['static']}) to stock generate", static / stock, STATIC_GOAL)
        judged(f"best per step ({best['dynamic']}) to best static", dynamic / static, PER_STEP_GOAL)
    else:
        judged("best drafter, kind and size to stock generate", max(static, dynamic) / stock, BEST_GOAL)


def heads_price(options: argparse.Namespace) -> None:
    """A step of 8 nodes with heads over the forward of 8 nodes alone."""
    shape = TINY_SHAPE if options.tiny else SMALL_SHAPE
    base, shared, _ = random_pair(shape, torch.bfloat16)
    decoder = TreeDecoder(base, shared, generic_growth(8, HEADS, base.vocab_size).tree())
    step, bare = step_and_forward(decoder, [7] * 256, 3 if options.tiny else 40)
    judged("110M, bfloat16, 8 nodes, shared LM head: step to bare forward", step / bare, HEADS_GOAL, most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tinystories", "pocket", "heads"))
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--tokens", type=int, default=LEARN_TOKENS, help="sampled tokens to learn from")
    parser.add_argument("--texts", type=int, default=8, help="texts of a round")
    parser.add_argument("--repeats", type=int, default=4, help="rounds")
    add_tiny(parser)
    options = parser.parse_args()
    if options.tiny:
        options.tokens, options.texts, options.repeats = 400, 1, 1
    torch.set_num_threads(1)
    print(f"{machine(1)}, torch {torch.__version__}")
    if options.what == "heads":
        heads_price(options)
    else:
        speeds(options.what, options)


if __name__ == "__main__":
    main()
