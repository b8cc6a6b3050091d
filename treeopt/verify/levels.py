"""Texts in progress on a draft model, whose trees are computed a level at a time: one forward over its new nodes each.

They attend to their text and, in the cache after it, to their ancestors.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.models.base import Base
from treeopt.verify.cache import TreeCache, aligned, bucket
from treeopt.verify.masks import TreeMasks, layer_windows

Ints = NDArray[np.int64]


class LevelSession:
    """B texts in progress. Per step: `append` new tokens of the texts and `keep` them, then `extend` by each level.

    `lengths` are the cached tokens of each text. E502 where the model's layers cannot attend to a tree.
    """

    def __init__(self, base: Base, rows: int) -> None:
        self._base, self._context = base, base.context
        self._masks = TreeMasks(base, 1, 0, layer_windows(base.model.config))
        self._cache = TreeCache(bucket(1), base.layers)
        self.hidden: Tensor | None = None  # of a draft module: float [B, n, h], its states at the last nodes
        self._level = 0  # of the last nodes; 0 for tokens of the texts
        self._depths: Ints
        self._visible: NDArray[np.bool_]
        self.keep([0] * rows)

    def extend(self, tokens: Tensor, parents: Ints) -> Tensor:
        """One forward over the next level of each row's tree, tokens int64 [B, n]; logits [B, n, V].

        `parents` int64 [1 or B, n] are indices in the level before; 0 in the first level. A draft module reads its own
        states at the parents: in the first level those that `after` chose.
        """
        if self.hidden is not None:
            self.hidden = self.hidden[torch.arange(len(tokens))[:, None], torch.from_numpy(parents)]
        above = self._visible[np.arange(len(self._visible))[:, None], parents]  # [1 or B, n, m]
        itself = np.broadcast_to(np.eye(tokens.shape[1], dtype=np.bool_), (len(above), *[tokens.shape[1]] * 2))
        self._visible = np.concatenate([above, itself], axis=2)
        depth = self._depths.max(initial=-1) + 1
        self._depths = np.append(self._depths, np.full(tokens.shape[1], depth))
        self._level = int(depth) + 1
        return self._run(tokens, self._depths, self._visible)

    def append(self, tokens: Tensor, *, logits_to_keep: int = 0, hidden: Tensor | None = None) -> Tensor:
        """One forward over n tokens after the texts, int64 [B, n]; `keep` tells how many of each row were real.

        `hidden` float [B, n, h] are the base's states for a draft module.
        """
        count, self.hidden, self._level = tokens.shape[1], hidden, 0
        return self._run(tokens, np.arange(count), np.tri(count, dtype=np.bool_)[None], logits_to_keep)

    def block(self, tokens: Tensor, visible: NDArray[np.bool_], hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One forward over n rows after the texts, int64 [B, n], of which each attends to those `visible` [n, n]:
        logits, and the states that a block drafter gives with them. `hidden` as of `append`.
        """
        self.hidden, self._level = hidden, 0
        return self._forward(tokens, np.arange(tokens.shape[1]), visible[None])

    def after(self, hidden: Tensor) -> None:
        """Begin trees of a draft module at its states float [B, h], and drop others."""
        self.keep(self.lengths)
        self.hidden = hidden[:, None]

    def _run(self, tokens: Tensor, depths: Ints, visible: NDArray[np.bool_], logits_to_keep: int = 0) -> Tensor:
        """The logits of `_forward`, whose states a draft module's next level reads."""
        logits, states = self._forward(tokens, depths, visible, logits_to_keep)
        self.hidden = None if self.hidden is None else states
        return logits

    @torch.inference_mode()  # always, as tensors made in this mode cannot be written outside it
    def _forward(
        self, tokens: Tensor, depths: Ints, visible: NDArray[np.bool_], logits_to_keep: int = 0
    ) -> tuple[Tensor, Tensor]:
        """One forward over the last n of m nodes; positions beyond the model's context are its last one.

        `depths` [m] are 0 right after the text, `visible` [1 or B, n, m] is whether each of the n attends to each node.
        """
        device, before = self._base.device, len(depths) - tokens.shape[1]
        longest = max(self.lengths)
        width = aligned(longest + len(depths))
        if width > self._cache.capacity:
            self._cache.grow(bucket(width), longest + before)
        starts = torch.tensor(self.lengths, device=device)
        self._cache.write_at(torch.arange(before, len(depths), device=device) + starts[:, None], width)
        below = torch.from_numpy(depths)[None].to(device)
        return self._base.forward(
            tokens,
            attention_mask=self._masks.last_nodes(torch.from_numpy(visible).to(device), below, starts, width),
            position_ids=(starts[:, None] + below[:, before:]).clamp(max=self._context - 1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **({} if self.hidden is None else {"hidden": self.hidden, "level": self._level}),
        )

    def keep(self, lengths: Sequence[int]) -> None:
        """Set the cached tokens of each text, which may be nodes of a chain after it, and drop all trees."""
        self.lengths = list(lengths)
        self._depths = np.zeros(0, np.int64)
        self._visible = np.zeros((1, 1, 0), np.bool_)
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
