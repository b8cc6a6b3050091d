"""A drafter that knows the true text: random trees on one path of which the text continues, among wrong siblings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from treeopt.models.base import Base

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from random_trees import RandomTrees


class KnownTexts(RandomTrees):
    """Random trees with a random shape at each step for each row, which hold the true continuation.

    Args:
        base: whose texts they are.
        texts: each prompt followed by its true text; a row that follows none of them gets wrong drafts.
        nodes: of every tree.
        depth: the maximum of any node.
        seed: of shapes and wrong tokens.
        whole: whether the true path is as deep as it can be at every step; else its depth is random, and may be 0.
    """

    def __init__(
        self, base: Base, texts: Sequence[Sequence[int]], nodes: int, depth: int, seed: int = 0, *, whole: bool = False
    ) -> None:
        super().__init__(base, nodes, depth, seed)
        self._texts, self._whole = [list(text) for text in texts], whole

    def _continued(self, recent: np.ndarray) -> list[int]:
        known, most = recent.tolist(), min(self.depth, self.nodes - 1)
        depth = most if self._whole else int(self._rng.integers(most + 1))
        found = (text for text in self._texts if text[: len(known)] == known)
        return next(found, known)[len(known) :][:depth]
