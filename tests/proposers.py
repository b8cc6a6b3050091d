"""A proposer for tests: trees and tokens at random, anew for every row and step, some of them right."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.drafting.heads import NO_TOKEN, Drafts
from treeopt.models.base import Base
from treeopt.verify.shapes import Shape

WHOLE = 400  # recent tokens that hold any text here


class RandomProposer:
    """Random trees of `nodes` nodes, siblings with different tokens; the greedy continuation is planted in every other.

    Args:
        base: whose text is continued.
        nodes: of every tree.
        depth: of the deepest node that may be.
        seed: of shapes and tokens.
        planted: whether right drafts are among them, beyond those that chance brings; they are made from the recent
            tokens, so these had better be right.
    """

    tree = None

    def __init__(self, base: Base, nodes: int, depth: int, seed: int = 0, *, planted: bool = True) -> None:
        self.nodes, self.depth = nodes, depth
        self.context = WHOLE if planted else 0
        self._base = base
        self._rng = np.random.default_rng(seed)

    def propose(self, root: Tensor, hidden: Tensor, recent: NDArray[np.int64] | None) -> Drafts:
        """A tree for every row."""
        right: list[list[int]] = [[]] * len(root)
        if recent is not None:
            assert recent[:, -1].tolist() == root.tolist()
            right = [self._continued(row[row != NO_TOKEN]) for row in recent]
        rows = [self._grown(first, path) for first, path in zip(root.tolist(), right, strict=True)]
        tokens, parents = torch.tensor(rows).unbind(1)
        return Drafts(tokens, Shape.from_parents(parents, self.depth))

    def _continued(self, recent: NDArray[np.int64]) -> list[int]:
        """Up to `depth` tokens of the base's greedy continuation, or none."""
        text = torch.from_numpy(recent)
        path: list[int] = []
        for _ in range(int(self._rng.integers(min(self.depth, self.nodes - 1) + 1)) * int(self._rng.integers(2))):
            ids = torch.cat([text, text.new_tensor(path)])[-self._base.context :]
            path.append(int(self._base.model(ids[None], use_cache=False).logits[0, -1].argmax()))
        return path

    def _grown(self, root: int, right: list[int]) -> tuple[list[int], list[int]]:
        """Tokens and parents of a tree that holds the path `right`; the order within a level is random."""
        paths = [tuple(right[:length]) for length in range(len(right) + 1)]
        known = set(paths)
        while len(paths) < self.nodes:
            parent = paths[self._rng.integers(len(paths))]
            path = (*parent, int(self._rng.integers(self._base.vocab_size)))
            if len(path) <= self.depth and path not in known:
                paths.append(path)
                known.add(path)
        order = self._rng.random(len(paths))
        paths = [path for _, _, path in sorted(zip(map(len, paths), order, paths, strict=True))]
        index = {path: node for node, path in enumerate(paths)}
        return [root, *(path[-1] for path in paths[1:])], [0, *(index[path[:-1]] for path in paths[1:])]
