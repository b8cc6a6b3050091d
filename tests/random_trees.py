"""Trees for tests: nodes and tokens at random, anew for every row and step, some of them right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from treeopt.drafting.interface import AcceptedPart, Drafts, ProposerSession
from treeopt.models.base import Base
from treeopt.verify.buffers import PAD, Buffers

WHOLE = 400  # recent tokens that hold any text here


def compile_parents(parents: Tensor, depth: int) -> Buffers:
    """One tree for each row, as `Buffers`: parents int64 [B, N], of nodes sorted by depth; that of the root is 0."""
    rows, nodes = parents.shape
    mask = torch.zeros(rows, nodes, nodes, dtype=torch.bool)
    paths = torch.full((rows, nodes, depth + 1), PAD)
    for row, above in enumerate(parents.tolist()):
        of_nodes: list[list[int]] = [[0]]
        for node in range(1, nodes):
            of_nodes.append([*of_nodes[above[node]], node])
        for node, path in enumerate(of_nodes):
            mask[row, node, path] = True
            paths[row, node, : len(path)] = torch.tensor(path)
    mask, paths = mask.to(parents.device), paths.to(parents.device)
    indices = torch.arange(nodes, device=parents.device).expand(rows, nodes)
    return Buffers(mask, mask.sum(-1) - 1, indices, paths, top_k=0)


class TextSession(ProposerSession):
    """Knows the end of each row's text, the root included, and proposes nothing."""

    def __init__(self, texts: Sequence[Sequence[int]], window: int) -> None:
        self.window = window
        self.texts = [list(text) for text in texts]

    def keep(self, kept: AcceptedPart) -> None:
        for text, tokens in zip(self.texts, kept.tokens, strict=True):
            text.extend(tokens)

    def select(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]

    def mark(self) -> list[list[int]]:
        return [list(text) for text in self.texts]

    def rewind(self, mark: list[list[int]]) -> None:
        self.texts = [list(text) for text in mark]

    @property
    def recent(self) -> list[list[int]]:
        """The last tokens of each row, as many as there are up to the window."""
        return [text[-self.window :] if self.window else [] for text in self.texts]

    def _nothing(self, *_given: object, **_more: object) -> NoReturn:
        raise AssertionError("random trees ask for no candidates")

    begin = fill = grow = expand = trace = candidates = features = _nothing


class RandomTrees:
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
        self.window = WHOLE if planted else 0
        self._base = base
        self._rng = np.random.default_rng(seed)

    def start(self, texts: Sequence[Sequence[int]]) -> TextSession:
        return TextSession(texts, self.window)

    def draft(self, session: ProposerSession, roots: Tensor, states: Tensor, context: int) -> Drafts:
        """A tree for every row."""
        assert isinstance(session, TextSession)
        return self.grown(roots.tolist(), session.recent if self.window else None)

    def grown(self, roots: list[int], recent: list[list[int]] | None) -> Drafts:
        """The same from each row's root and recent tokens."""
        right: list[list[int]] = [[]] * len(roots)
        if recent is not None:
            assert [row[-1] for row in recent] == roots
            right = [self._continued(np.array(row)) for row in recent]
        rows = [self._grown(first, path) for first, path in zip(roots, right, strict=True)]
        tokens, parents = torch.tensor(rows, device=self._base.device).unbind(1)
        return Drafts(tokens, compile_parents(parents, self.depth))

    def _continued(self, recent: np.ndarray) -> list[int]:
        """Up to `depth` tokens of the base's greedy continuation, or none."""
        text = torch.from_numpy(recent).to(self._base.device)
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
