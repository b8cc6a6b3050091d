"""Texts in progress on a draft model, whose trees are computed a level at a time: one forward over its new nodes each.

They attend to their text and, in the cache after it, to their ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treeopt.models.base import Base
from treeopt.verify.buffers import Buffers, TreeLevel, once_a_tree
from treeopt.verify.cache import TreeCache, aligned, bucket
from treeopt.verify.masks import TreeMasks, layer_windows


class LevelSession:
    """B texts in progress. Per step: `append` new tokens of the texts and `keep` them, then `extend` by each level.

    `lengths` are the cached tokens of each text. E502 where the model's layers cannot attend to a tree.
    """

    def __init__(self, base: Base, rows: int) -> None:
        self.lengths = [0] * rows
        self._base, self._context = base, base.context
        self._masks = TreeMasks(base, 1, 0, layer_windows(base.model.config))
        self._cache = TreeCache(bucket(1), base.layers)
        self._nodes = 0  # of each row's tree

    @torch.inference_mode()  # always, as tensors made in this mode cannot be written outside it
    def extend(self, tokens: Tensor, depths: Tensor, visible: Tensor, *, logits_to_keep: int = 0) -> Tensor:
        """One forward over n more nodes of each row's tree, which has m nodes before; logits [B, n, V].

        Positions beyond the model's context are its last one.

        Args:
            tokens: int64 [B, n].
            depths: int64 [1 or B, m + n], of all nodes; that of a node right after the text is 0.
            visible: bool [1 or B, n, m + n], whether each new node attends to each node.
            logits_to_keep: number of last nodes whose logits are returned; 0 for all.
        """
        before, count = self._nodes, tokens.shape[1]
        longest = max(self.lengths)
        width = aligned(longest + before + count)
        if width > self._cache.capacity:
            self._cache.grow(bucket(width), longest + before)
        starts = torch.tensor(self.lengths, device=self._base.device)
        entries = torch.arange(before, before + count, device=self._base.device) + starts[:, None]
        self._cache.write_at(entries, width)
        logits, _ = self._base.forward(
            tokens,
            attention_mask=self._masks.last_nodes(visible, depths, starts, width),
            position_ids=(starts[:, None] + depths[:, before:]).clamp(max=self._context - 1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
        self._nodes += count
        return logits

    def append(self, tokens: Tensor, *, logits_to_keep: int = 0) -> Tensor:
        """`extend` by n tokens that follow the texts, int64 [B, n]; `keep` tells how many of each row were real."""
        count = tokens.shape[1]
        depths = torch.arange(count, device=tokens.device)
        visible = depths[:, None] >= depths
        return self.extend(tokens, depths[None], visible[None], logits_to_keep=logits_to_keep)

    def keep(self, lengths: Sequence[int]) -> None:
        """Set the cached tokens of each text, which may be nodes of a chain after it, and drop all trees."""
        self.lengths, self._nodes = list(lengths), 0
        self._cache.truncate(max(self.lengths))

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these rows (ascending) only; trees are dropped."""
        self.keep([self.lengths[row] for row in rows])
        self._cache.select(rows, max(self.lengths))

    @torch.inference_mode()
    def branch(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Replace the rows by copies of them: new row i is the first `lengths[i]` tokens of row `rows[i]`."""
        self._cache.branch(torch.tensor(rows, device=self._base.device))
        self.keep(lengths)


@dataclass(frozen=True, eq=False)
class StaticLevel:
    """One level of a static tree, with what the forward over its m inner nodes needs."""

    of: TreeLevel
    depths: Tensor  # int64 [1, M], of all inner nodes down to this level, which are nodes of the draft model
    visible: Tensor  # bool [1, m, M], which of these each of the last m attends to


@once_a_tree
def static_levels(tree: Buffers, device: torch.device) -> list[StaticLevel]:
    found: list[StaticLevel] = []
    depths, visible = torch.zeros(0, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.bool)
    for depth, level in enumerate(tree.levels):
        above = visible[torch.from_numpy(level.parents[level.inner])]
        visible = torch.cat([above, torch.eye(len(above), dtype=torch.bool)], dim=1)
        depths = torch.cat([depths, torch.full((len(level.inner),), depth)])
        found.append(StaticLevel(level, depths[None].to(device), visible[None].to(device)))
    return found
