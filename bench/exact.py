"""Losslessness and predicted = measured, prompt by prompt, for five trees on all prompts of a file.

    python bench/exact.py --heads HEADS --prompts PROMPTS --calibration calibration.safetensors

The tests check the same on a few prompts. Trees: one node, a chain, a wide tree, 64 and 256 nodes; float32.
"""

from __future__ import annotations

import argparse

import torch
from timing import add_tiny, machine

from treeopt.decode.decoder import TreeDecoder
from treeopt.evaluate.runs import trace
from treeopt.files.calibrations import load_calibration
from treeopt.models.given import load_pair
from treeopt.optimize.per_step import replay_plan
from treeopt.optimize.tree_builder import build_tree
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import load_prompts
from treeopt.tree import Tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--calibration", default="calibration.safetensors")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--limit", type=int)
    add_tiny(parser)
    options = parser.parse_args()
    if options.tiny:
        options.limit, options.max_new_tokens = 2, 12
    torch.set_num_threads(1)
    base, loaded = load_pair(options.heads, None, dtype="float32")
    calibration = load_calibration(options.calibration)
    prompts = load_prompts(options.prompts, limit=options.limit)
    texts = []
    for text in encode_prompts(base, prompts, options.max_new_tokens).texts:
        ids = torch.tensor([text.prompt])
        stock = base.generate(ids, torch.ones_like(ids), options.max_new_tokens)[0, len(text.prompt) :].tolist()
        texts.append(Text(text.prompt_id, text.prompt, stock))
    trees = {
        "one node": Tree(()),
        "chain": Tree.chain(loaded.heads.num_heads),
        "wide": Tree.from_paths([(rank,) for rank in range(40)]),
        "64 nodes": build_tree(calibration, 64),
        "256 nodes": build_tree(calibration, 256),
    }
    print(f"{machine(1)}; {len(texts)} prompts, {options.max_new_tokens} tokens")
    for name, tree in trees.items():
        decoder = TreeDecoder(base, loaded.heads, tree)
        decoded = [decoder.generate(text.prompt, options.max_new_tokens) for text in texts]
        lossless = sum(one.tokens == text.answer for one, text in zip(decoded, texts, strict=True))
        predicted = replay_plan(tree, trace(base, loaded.heads, texts))
        steps = predicted.sums.steps.tolist()
        exact = sum(len(one.step_lengths) == step for one, step in zip(decoded, steps, strict=True))
        measured = sum(len(one.tokens) for one in decoded) / sum(len(one.step_lengths) for one in decoded)
        print(
            f"{name:9}  lossless {lossless}/{len(texts)}  steps as predicted {exact}/{len(texts)}  "
            f"tokens per step {measured:.6f}, predicted {predicted.tokens_per_step:.6f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
