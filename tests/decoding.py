"""What tests of decoding share: trees of several forms, random prompts, and the text of stock greedy generate."""

from __future__ import annotations

import numpy as np
import torch
from helpers import random_tree
from tiny import VOCAB

from treeopt.models.base import Base
from treeopt.tree import Tree

HEADS = 5
TREES = {
    "one node": Tree(()),
    "chain": Tree.chain(5),
    "wide": Tree(tuple((rank,) for rank in range(VOCAB))),  # every token is drafted: each step accepts one or more
    "64 nodes": random_tree(64, nodes=64, depth=4, ranks=10),
    "256 nodes": random_tree(256, nodes=256, depth=5, ranks=30),
}


def stock(base: Base, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The base model's own greedy continuation."""
    ids = torch.tensor([prompt], device=base.device)
    out = base.generate(ids, torch.ones_like(ids), max_new_tokens)
    return out[0, len(prompt) :].tolist()


def prompt_of(seed: int, *, longest: int = 40) -> list[int]:
    """A random prompt of 1 to `longest` tokens."""
    rng = np.random.default_rng(seed)
    return rng.integers(VOCAB, size=rng.integers(1, longest + 1)).tolist()
