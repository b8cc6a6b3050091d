"""Makers of steps for tests of pictures, without a model."""

from __future__ import annotations

import numpy as np

from treeopt.drafted_step import DraftedStep
from treeopt.tree import Tree

WORDS = (
    " the",
    "\n",
    "\t\t",
    "<a&b>",
    "'\"",
    "日本語",
    "é",
    "🙂",
    "e\u0301",
    "\x1b[31m",
    " internationalization of it",
    "x",
)


def random_step(tree: Tree, seed: int) -> DraftedStep:
    """A step with tokens of any kind, whose accepted path ends at a random node."""
    rng = np.random.default_rng(seed)
    node, path = int(rng.integers(tree.nodes)), []
    while node:
        path.append(node)
        node = tree.parents[node]
    chances = (None, *rng.random(tree.nodes - 1).tolist())
    texts = tuple(WORDS[i] for i in rng.integers(len(WORDS), size=tree.nodes))
    return DraftedStep(
        tree=tree,
        tokens=tuple(range(100, 100 + tree.nodes)),
        texts=texts,
        probabilities=chances,
        accepted=(0, *reversed(path)),
        bonus=7,
        bonus_text=" end",
        number=3,
        prompt="Once upon\na time",
    )
