"""Texts in progress on any stock model with a cache: at each step the root-to-leaf paths of the trees as a batch.

This is the route of models that take no tree mask, such as those with a recurrent state. Each text has a cache of its
own, of its committed tokens; the accepted tokens after them are pending: the rows of the next batch begin with them.
They are committed, by a forward of their own, once that costs less than to replay them. Nothing has to be rewound.
Pads are on the right, after all that is read, and no state of a row with pads is kept.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from treeopt.models.base import Base, now
from treeopt.tree import ROOT
from treeopt.verify.buffers import PAD, Buffers, once_a_tree
from treeopt.verify.masks import frequency_switch
from treeopt.verify.session import NodePath, check_lengths
from treeopt.verify.states import Unlike, check_memory, joined, taken

Ints = NDArray[np.int64]

_TIMED = 32  # tokens of the forward that tells the price of a token
_TIMES = 3


@dataclass(frozen=True)
class Ways:
    """What the probe found to be exact for a model."""

    joint: bool  # several texts in one forward, their caches padded on the left
    crop: bool  # `crop` of the cache drops its last tokens. Else accepted tokens are replayed
    masked: bool = True  # forwards get a 2-D mask, as from stock `generate`


@dataclass(frozen=True)
class PathRows:
    """The paths of one tree as rows: those of L leaves."""

    nodes: Ints  # int64 [L, D+1], the nodes of each row from the root on, then `PAD`
    row: Ints  # int64 [N], one of the rows that hold each node; its place in it is its depth
    depth: Ints  # int64 [N]
    slot: Ints  # int64 [N], the number of the node among those that are read from its row

    @property
    def count(self) -> int:
        return len(self.nodes)

    @functools.cached_property
    def width(self) -> int:
        """D + 1 of the nodes that are there."""
        return int(self.depth.max()) + 1


def rows_of(paths: Ints, tokens: Ints | None = None) -> PathRows:
    """The rows of a tree, from the path to each node int64 [N, D+1]; nodes of equal tokens int64 [N] are one."""
    keys = [tuple(int(node if tokens is None else tokens[node]) for node in path if node != PAD) for path in paths]
    first: dict[tuple[int, ...], int] = {}
    for node, key in enumerate(keys):
        first.setdefault(key, node)
    inner = {key[:-1] for key in keys}
    leaves = [key for key in first if key not in inner]
    row_of, read = {key: row for row, key in enumerate(leaves)}, [1] * len(leaves)
    # An inner node is read from a row below it from which few nodes are read, so that few logits are computed.
    for key in sorted(first, key=len, reverse=True):
        if key in inner:
            read[row_of[key]] += 1
        if len(key) > 1:
            other = row_of.get(key[:-1], row_of[key])
            row_of[key[:-1]] = min(other, row_of[key], key=lambda row: read[row])
    row = np.array([row_of[key] for key in keys], np.int64)
    slot, taken_slots = np.zeros(len(keys), np.int64), [0] * len(leaves)
    for key, node in first.items():
        slot[node] = taken_slots[row_of[key]]
        taken_slots[row_of[key]] += 1
    slot = slot[[first[key] for key in keys]]
    return PathRows(paths[[first[key] for key in leaves]], row, np.array([len(key) - 1 for key in keys]), slot)


@once_a_tree
def _static_rows(tree: Buffers) -> PathRows:
    return rows_of(tree.paths.numpy(force=True))


class PathForward:
    """As `TreeForward`, by the paths of trees; `ways` are those of the probe.

    `fixed` is the price of a forward besides its tokens, in tokens: what it costs to commit. None measures it once. It
    changes which forwards are run, never their results, but for rounding.
    """

    def __init__(self, base: Base, nodes: int, depth: int, ways: Ways, *, fixed: float | None = None) -> None:
        self.base, self.nodes, self.depth = base, nodes, depth
        # One node is always accepted, and its forwards are those of stock `generate`, whose caches record no past.
        self.ways = replace(ways, crop=ways.crop and nodes > 1)
        self.context = base.context
        if fixed is not None:
            self.fixed = fixed

    @functools.cached_property
    def fixed(self) -> float:
        return fixed_price(self.base)

    def begin(self, prompts: Sequence[Tensor], max_new_tokens: int) -> tuple[PathSession, Tensor, list[Tensor]]:
        """As `TreeForward.begin`; each prompt by a forward of its own."""
        lengths = [len(prompt) for prompt in prompts]
        check_lengths(lengths, max_new_tokens, self.base, self.context)
        switch = frequency_switch(self.base.model.config)
        limit = self.context if switch is None or max(lengths) > switch else min(switch, self.context)
        texts, logits, hidden = [], [], []
        for prompt in prompts:
            text = _Text(self._new_cache(), prompt[:0])
            last, states = self.extend(text, prompt)
            texts.append(text)
            logits.append(last[:, -1])
            hidden.append(states[0])
        return PathSession(self, texts, limit), torch.cat(logits), hidden

    def extend(self, text: _Text, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Commit tokens int64 [n] of a text, in place; logits [1, 1, V] and hidden states [1, n, d]."""
        text.own()
        length = text.length + len(tokens)
        positions = torch.arange(text.length, length, device=tokens.device)[None]
        mask = torch.ones(1, length, dtype=torch.long, device=tokens.device)
        logits, hidden, text.cache = self.run(tokens[None], text.cache, mask, positions, 1)
        self.crop(text.cache, 0)
        text.length = length
        text.pending, text.price, text.steps = tokens[:0], 0, 0
        return logits, hidden

    def run(
        self, ids: Tensor, cache: Any, mask: Tensor, positions: Tensor, logits_to_keep: int | Tensor, **inputs: Any
    ) -> tuple[Tensor, Tensor, Any]:
        """One forward; mask and positions are passed as stock `generate` does, where a model could make its own."""
        if self.ways.masked:
            inputs["attention_mask"] = mask
        return self.base.continued(ids, cache, position_ids=positions, logits_to_keep=logits_to_keep, **inputs)

    def crop(self, cache: Any, tokens: int) -> None:
        """Drop the last tokens of a cache where that is right; of none, the past that it has recorded."""
        if self.ways.crop:
            if not getattr(cache, "is_croppable", False):
                raise ValueError("its cache cannot be cropped")  # to the probe
            cache.crop(-tokens)

    def _new_cache(self) -> Any:
        """A cache that records the past for `crop`; otherwise the model's forward makes its own, as of any kind."""
        if not self.ways.crop:
            return None
        cache = DynamicCache(config=self.base.model.config.get_text_config(decoder=True))
        cache.activate_past_recording()
        return cache


def fixed_price(base: Base) -> float:
    """What a forward costs besides its tokens, in tokens, measured on this machine; a power of 2.

    Rounded, so that runs on one machine take the same decisions; they change no text in float32.
    """

    def seconds(tokens: int) -> float:
        spent = []
        for _ in range(_TIMES):
            begin = now(base)
            base.forward(torch.zeros(1, tokens, dtype=torch.long, device=base.device), logits_to_keep=1)
            spent.append(now(base) - begin)
        return min(spent)

    tokens = max(2, min(_TIMED, base.context))
    with torch.inference_mode():
        one, many = seconds(1), seconds(tokens)
    each = max((many - one) / (tokens - 1), one * 1e-4)
    return float(2 ** round(math.log2(max(one / each - 1, 1.0))))


@dataclass
class _Text:
    """A text in progress; `cache` has its first `length` tokens, `pending` int64 [k] are those after them."""

    cache: Any
    pending: Tensor
    length: int = 0
    price: int = 0  # tokens that were replayed since the last commit
    steps: int = 0  # since then
    shared: bool = False  # whether a mark refers to the cache too

    @property
    def total(self) -> int:
        return self.length + len(self.pending)

    def own(self) -> None:
        """Make the cache one that a forward may change."""
        if self.shared:
            self.cache, self.shared = joined([self.cache], [1]), False


@dataclass(frozen=True)
class _Ran:
    """Where a text's rows are in the cache of a forward, whose rows have so many tokens; `text` is its index in it."""

    cache: Any
    befores: list[Any]
    text: int
    first: int
    rows: int
    tokens: int


class PathSession:
    """B texts in progress, as `Session`; `limit` is the number of positions that may be used."""

    def __init__(self, forward: PathForward, texts: list[_Text], limit: int) -> None:
        self._forward, self._texts, self._limit = forward, texts, limit
        self._tokens: Tensor
        self._rows: list[PathRows] = []
        self._ran: list[_Ran] = []
        self._fitting: set[tuple[int, int]] = set()  # numbers of rows, and lengths, that fit into memory

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text, those pending included."""
        return [text.total for text in self._texts]

    def verify(self, tokens: Tensor, tree: Buffers) -> tuple[Tensor, Tensor]:
        """As `Session.verify`; `keep` must follow. E403 where the rows need more memory than is free."""
        self._ran, self._tokens = [], tokens
        self._rows = _rows_by_text(tokens, tree)
        everyone = list(range(len(self._texts)))
        texts, ways = self._texts, self._forward.ways
        # A row's pads must have positions too.
        fits = max(text.length for text in texts) + max(map(self._width, everyone)) <= self._limit
        if len(everyone) == 1 or (ways.joint and fits):
            with contextlib.suppress(Unlike):
                return self._verify(everyone)
        parts = [self._verify([index]) for index in everyone]
        return torch.cat([logits for logits, _ in parts]), torch.cat([hidden for _, hidden in parts])

    def _width(self, index: int) -> int:
        """Columns of a text's rows: its pending tokens and the tree, up to the last position."""
        text = self._texts[index]
        return max(1, min(len(text.pending) + self._rows[index].width, self._limit - text.length))

    def _verify(self, group: list[int]) -> tuple[Tensor, Tensor]:
        """One forward over the rows of some texts: logits [b, N, V] and hidden states [b, N, d]."""
        forward, texts = self._forward, [self._texts[index] for index in group]
        layouts = [self._rows[index] for index in group]
        counts = [layout.count for layout in layouts]
        firsts = np.cumsum([0, *counts]).tolist()
        width, longest = max(map(self._width, group)), max(text.length for text in texts)
        ids, columns = self._inputs(group, width)
        device = ids.device
        alone = len(texts) == 1 and counts == [1] and (forward.ways.crop or self._tokens.shape[1] == 1)
        befores = [text.cache for text in texts]
        if alone:
            texts[0].own()
            cache = texts[0].cache
        else:
            rows, caches = sum(layout.count for layout in self._rows), [text.cache for text in self._texts]
            check_memory(forward.base, rows, self.lengths, caches, self._fitting)
            cache = joined(befores, counts)
        starts = np.repeat([text.length for text in texts], counts)[:, None]
        mask = np.arange(longest + width) >= longest - starts
        positions = np.minimum(starts + np.arange(width), self._limit - 1)
        last = width == 1 or (columns == width - 1).all()
        logits, hidden, cache = forward.run(
            ids,
            cache,
            torch.from_numpy(mask.astype(np.int64)).to(device),
            torch.from_numpy(positions).to(device),
            1 if last else torch.from_numpy(columns).to(device),
        )
        for place, text in enumerate(texts):
            self._ran.append(_Ran(cache, befores, place, firsts[place], firsts[-1], width))
            text.steps += 1
            text.price += counts[place] * len(text.pending)
        row = np.stack([layout.row for layout in layouts]) + np.array(firsts[:-1])[:, None]
        slot = np.stack([layout.slot for layout in layouts])
        return _at(logits, row, np.zeros_like(slot) if last else slot), _at(hidden, row, columns[row, slot])

    def _inputs(self, group: list[int], width: int) -> tuple[Tensor, Ints]:
        """Token ids int64 [R, width] of all rows, and the columns int64 [R, k] that are read from each."""
        nodes = self._tokens.shape[1]
        pending = [self._texts[index].pending for index in group]
        offsets = np.cumsum([self._tokens.numel(), *map(len, pending)])
        places, columns = [], []
        most = max(int(self._rows[index].slot.max()) + 1 for index in group)
        for index, offset, before in zip(group, offsets, map(len, pending), strict=False):
            layout = self._rows[index]
            place = np.zeros((layout.count, before + layout.nodes.shape[1]), np.int64)
            place[:, :before] = offset + np.arange(before)
            place[:, before:] = index * nodes + layout.nodes.clip(ROOT)
            place = np.pad(place, ((0, 0), (0, max(0, width - place.shape[1]))))
            places.append(place[:, :width])
            column = np.full((layout.count, most), before)
            column[layout.row, layout.slot] = before + layout.depth
            columns.append(column.clip(max=self._width(index) - 1))
        flat = torch.cat([self._tokens.reshape(-1), *pending])
        return flat[torch.from_numpy(np.concatenate(places)).to(flat.device)], np.concatenate(columns)

    def keep(self, paths: Sequence[NodePath], on_device: Tensor | None = None) -> None:
        """As `Session.keep`: the path's tokens become part of the cache, or pending."""
        for index, path in enumerate(paths):
            text, ran, layout = self._texts[index], self._ran[index], self._rows[index]
            beyond = ran.tokens - len(text.pending) - len(path)  # tokens of the row that are pads or rejected
            if beyond <= 0 or self._forward.ways.crop:
                row = ran.first + int(layout.row[path[-1]])
                text.cache, text.shared = ran.cache, False
                if ran.rows > 1:
                    text.cache = taken(ran.cache, row, ran.rows, ran.befores, ran.text, ran.tokens)
                self._forward.crop(text.cache, max(0, beyond))
                text.length += len(text.pending) + len(path)
                text.pending, text.price, text.steps = text.pending[:0], 0, 0
                continue
            nodes = (
                torch.tensor(path, device=self._tokens.device) if on_device is None else on_device[index, : len(path)]
            )
            text.pending = torch.cat([text.pending, self._tokens[index, nodes]])
            # Once one more replay costs more than a step since the last commit did on average, with the commit.
            commit = self._forward.fixed + len(text.pending)
            if layout.count * len(text.pending) * text.steps > text.price + commit:
                self._forward.extend(text, text.pending)
        self._ran, self._rows = [], []

    def select(self, rows: Sequence[int]) -> None:
        """As `Session.select`."""
        self._texts = [self._texts[row] for row in rows]

    def mark(self) -> list[_Text]:
        """The place in the texts, for `rewind`; it holds on to their caches."""
        for text in self._texts:
            text.shared = True
        return [replace(text) for text in self._texts]

    def rewind(self, mark: list[_Text]) -> None:
        """Return to a mark. The caches are copied, so that the next step does not."""
        self._texts = [replace(text) for text in mark]
        for text in self._texts:
            text.own()


def _rows_by_text(tokens: Tensor, tree: Buffers) -> list[PathRows]:
    """The rows of each text's tree."""
    if not tree.per_row:
        return [_static_rows(tree)] * len(tokens)
    host = torch.cat([tokens[..., None], tree.paths], dim=-1).numpy(force=True)
    return [rows_of(each[:, 1:], each[:, 0]) for each in host]


def _at(values: Tensor, row: Ints, column: Ints) -> Tensor:
    """The entries at rows and columns int64 [b, N]: [R, W, ...] -> [b, N, ...]."""
    if values.shape[:2] == row.shape and row.shape[1] == 1:
        return values
    flat = torch.from_numpy(row * values.shape[1] + column).to(values.device)
    return values.flatten(0, 1)[flat]
