"""Texts in progress on a draft model, whose trees are computed a level at a time: one forward over its new nodes each.

They attend to their text and, in the cache after it, to their ancestors.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.models.base import Base
from treeopt.verify.cache import TreeCache, aligned, bucket
from treeopt.verify.masks import TreeMasks, layer_windows
from treeopt.verify.paths import PathForward, Ways
from treeopt.verify.states import check_memory, joined, selected

Ints = NDArray[np.int64]


class LevelSession:
    """B texts in progress. Per step: `append` new tokens of the texts and `keep` them, then `extend` by each level.

    `lengths` are the cached tokens of each text. E502 where the model's layers cannot attend to a tree.
    """

    def __init__(self, base: Base, rows: int) -> None:
        self._base, self._context = base, base.context
        causal = getattr(getattr(base.model, "wiring", None), "causal_kinds", ())
        self._masks = TreeMasks(base, 1, 0, layer_windows(base.model.config), causal=causal)
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
            cache=self._cache,
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


State = tuple[int, Any]  # the number of tokens, and the cache that has them; None of no tokens

_KEPT = 2  # states of each text: a step that is begun twice goes back by one
_NONE: State = (0, None)


class StateLevels:
    """B texts in progress on a model of the route of paths, as `LevelSession`; `ways` are those of the probe.

    Each new level runs one token a node, on copies of states. A state cannot go back: the last two of each text are
    kept, and its tokens with what a draft module read beside them, from which any other is made again. Texts run one by
    one, so that no state sees a pad.
    """

    def __init__(self, base: Base, rows: int, ways: Ways) -> None:
        self._forward = PathForward(base, 1, 0, ways)
        self._context = base.context
        self._fitting: set[tuple[int, int]] = set()  # as in `check_memory`
        self.lengths = [0] * rows
        self._texts = [torch.zeros(0, dtype=torch.long, device=base.device)] * rows
        self.hidden: Tensor | None = None  # as of `LevelSession`
        # Beside each token: float [n, h], the base's states for a draft module; [0] for a draft model.
        self._read = [torch.zeros(0, dtype=base.dtype, device=base.device)] * rows
        self._width: int = base.model.config.get_text_config().hidden_size
        self._states: list[list[State]] = [[_NONE] for _ in range(rows)]
        self._drop()

    def _drop(self) -> None:
        """Forget trees and tokens that were appended and are not kept."""
        self._appended: tuple[Tensor, Tensor, list[Any]] | None = None
        self._level: list[Any] = []  # the cache of each text with a row for each node of the last level
        self._depth = 0

    def append(self, tokens: Tensor, *, logits_to_keep: int = 0, hidden: Tensor | None = None) -> Tensor:
        """As `LevelSession.append`."""
        read = self._read[0].new_zeros(len(tokens), 0) if hidden is None else hidden.clone()
        parts, states, caches = [], [], []
        for index, new in enumerate(tokens):
            logits, state, cache = self._after(index, new, read[index], logits_to_keep or len(new))
            parts.append(logits)
            states.append(state[:, -len(new) :])
            caches.append(cache)
        if hidden is not None:
            self.hidden = torch.cat(states)
            # MTP layers after the first read their states at the row before, also where a part of a text runs again.
            read[:, 1:, self._width :] = self.hidden[:, :-1, self._width :]
        self._appended = tokens, read, caches
        return torch.cat(parts)

    def _after(self, index: int, new: Tensor, read: Tensor, logits_to_keep: int = 1) -> tuple[Tensor, Tensor, Any]:
        """As `_run`, after a text and more tokens, which may be none where some are pending."""
        before, cache = self._states[index][-1]
        ids, read = torch.cat([self._texts[index][before:], new]), torch.cat([self._read[index][before:], read])
        return self._run(ids[None], _copy(cache), before, read[None], logits_to_keep)

    @torch.inference_mode()  # always, as tensors made in this mode cannot be written outside it
    def _run(
        self, ids: Tensor, cache: Any, before: int, read: Tensor, logits_to_keep: int = 1, level: int = 0
    ) -> tuple[Tensor, Tensor, Any]:
        """One forward over rows of n tokens after a cache of as many rows, which is changed: logits, states, cache."""
        rows, count = ids.shape
        positions = torch.arange(before, before + count, device=ids.device).clamp(max=self._context - 1)
        mask = torch.ones(rows, before + count, dtype=torch.long, device=ids.device)
        given = {"hidden": read, "level": level} if read.numel() else {}
        return self._forward.run(ids, cache, mask, positions.expand(rows, -1), logits_to_keep, **given)

    def extend(self, tokens: Tensor, parents: Ints) -> Tensor:
        """As `LevelSession.extend`. E403 where the nodes need more memory than is free."""
        self._check_memory(tokens.numel(), [self._whole(index) for index in range(len(tokens))])
        parts, states, level = [], [], []
        for index, new in enumerate(tokens):
            above = torch.from_numpy(parents[index if len(parents) > 1 else 0])
            first = self._depth == 0  # below the text
            cache = joined([self._whole(index)], [len(new)]) if first else selected(self._level[index], above)
            read = self._read[index][:0] if self.hidden is None else self.hidden[index, above][:, None]
            logits, state, after = self._nodes(new[:, None], cache, self.lengths[index] + self._depth, read)
            parts.append(logits[:, 0])
            states.append(state[:, 0])
            level.append(after)
        self.hidden = None if self.hidden is None else torch.stack(states)
        self._level = level
        self._depth += 1
        return torch.stack(parts)

    def _nodes(self, ids: Tensor, cache: Any, before: int, read: Tensor) -> tuple[Tensor, Tensor, Any]:
        """One token in each row; one row after the other where the probe found that rows of one token are wrong."""
        level = self._depth + 1
        if self._forward.ways.joint:
            return self._run(ids, cache, before, read, level=level)
        each = torch.arange(len(ids), device=ids.device)[:, None]
        reads = read if read.numel() else [read] * len(ids)
        made = [
            self._run(ids[row], selected(cache, row), before, own[None], level=level)
            for row, own in zip(each, reads, strict=True)
        ]
        logits, states = (torch.cat(part) for part in zip(*(one[:2] for one in made), strict=True))
        return logits, states, joined([one[2] for one in made], [1] * len(made))

    def _check_memory(self, rows: int, caches: Sequence[Any]) -> None:
        check_memory(self._forward.base, rows, self.lengths, caches, self._fitting)

    def _whole(self, index: int) -> Any:
        """The cache of all tokens of a text."""
        length = self.lengths[index]
        if self._states[index][-1][0] < length:
            self._push(index, length, self._after(index, self._texts[index][:0], self._read[index][:0])[2])
        return self._states[index][-1][1]

    def _push(self, index: int, length: int, cache: Any) -> None:
        self._states[index] = [*self._states[index], (length, cache)][-_KEPT:]

    def keep(self, lengths: Sequence[int]) -> None:
        """As `LevelSession.keep`."""
        for index, (length, before) in enumerate(zip(lengths, self.lengths, strict=True)):
            if self._appended is None or length <= before:
                self._texts[index], self._read[index] = self._texts[index][:length], self._read[index][:length]
                self._states[index] = [state for state in self._states[index] if state[0] <= length] or [_NONE]
                continue
            new, read, cache = (part[index] for part in self._appended)
            if length < before + len(new):  # the rest were pads
                new, read = new[: length - before], read[: length - before]
                cache = self._after(index, new, read)[2]
            self._push(index, length, cache)
            self._texts[index] = torch.cat([self._texts[index], new])
            self._read[index] = torch.cat([self._read[index], read])
        self.lengths = list(lengths)
        self._drop()

    def after(self, hidden: Tensor) -> None:
        """As `LevelSession.after`."""
        self.keep(self.lengths)
        self.hidden = hidden[:, None]

    def select(self, rows: Sequence[int]) -> None:
        """As `LevelSession.select`."""
        self.lengths = [self.lengths[row] for row in rows]
        self._texts = [self._texts[row] for row in rows]
        self._read = [self._read[row] for row in rows]
        self._states = [self._states[row] for row in rows]
        self._drop()

    def branch(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """As `LevelSession.branch`; the states along a text are made by one more pass. E403 as `extend`."""
        self._check_memory(len({*zip(rows, lengths, strict=True)}), [self._states[row][-1][1] for row in rows])
        texts, reads = [self._texts[row] for row in rows], [self._read[row] for row in rows]
        made: dict[tuple[int, int], State] = {}
        for row, length in sorted(set(zip(rows, lengths, strict=True))):
            before, cache = made.get((row, -1), _NONE)
            if length > before:
                ids, read = self._texts[row][None, before:length], self._read[row][None, before:length]
                cache = self._run(ids, _copy(cache), before, read)[2]
            made[row, length] = made[row, -1] = length, cache
        self.lengths = list(lengths)
        self._texts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
        self._read = [read[:length] for read, length in zip(reads, lengths, strict=True)]
        self._states = [[made[row, length]] for row, length in zip(rows, lengths, strict=True)]
        self._drop()


def _copy(cache: Any) -> Any:
    return None if cache is None else joined([cache], [1])
