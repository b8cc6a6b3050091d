"""Texts in progress on a stock model: the KV cache, and one forward over a compiled tree at each step.

Other rooms use of a forward `begin`, and of a session `lengths`, `verify`, `keep`, `select`, `mark` and `rewind`:
another route of verification has these. All else is how trees with masks are run.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.tree import ROOT
from treeopt.verify.buffers import Buffers
from treeopt.verify.cache import Arena, Slots, TreeCache, aligned, bucket, compiled, padded, with_standard_strides
from treeopt.verify.masks import Mask, TreeMasks, check_frequencies, frequency_switch, layer_windows, tree_context

NodePath = Sequence[int]  # nodes, the root first

_ATTENTION = ("eager", "sdpa")  # these accept a float mask; flex attention aborts the process


class TreeForward:
    """A model with the masks of its trees, which have at most so many nodes and levels.

    `compile` runs the forward over trees, and no other forward, through `torch.compile`, with fixed shapes. E502 where
    the model's attention cannot verify trees.
    """

    def __init__(self, base: Base, nodes: int, depth: int, *, compile: bool = False) -> None:
        attention = base.model.config._attn_implementation
        if attention not in _ATTENTION:
            what = f"the model was loaded with {attention} attention"
            why = "a tree needs attention that takes a mask of floats: eager or sdpa"
            raise TreeoptError(Code.NO_TREES, what, why=why, fix='from_pretrained(..., attn_implementation="sdpa")')
        self.base = base
        self.verifier = compiled(base, nodes) if compile else base
        self.fixed = compile
        config = base.model.config
        self.context = tree_context(base.context, config, nodes)  # read once: it takes longer than a mask
        self._switch = frequency_switch(config)
        self.nodes = nodes
        self.depth = depth
        self._windows = layer_windows(config)
        self._arena, self._masks = self._memory()
        self._user: weakref.ref[Session] | None = None  # the session that writes to both
        self._lock = threading.Lock()  # texts may begin in several threads

    def begin(self, prompts: Sequence[Tensor], max_new_tokens: int) -> tuple[Session, Tensor, list[Tensor]]:
        """Prefill prompts (each int64 [T], of any lengths), for at most `max_new_tokens` more in each row.

        The memory of the cache and the masks is kept for the next session; a session that begins while another is in
        use has its own, so that each may run in a thread. E503 where prompt and new tokens do not fit into the context.

        Returns:
            The session, logits [B, V] at each prompt's last token, and hidden states [T, d] of each prompt.
        """
        lengths = [len(prompt) for prompt in prompts]
        check_lengths(lengths, max_new_tokens, self.base, self.context)
        with self._lock:
            if self._user is not None and self._user() is not None:
                self._arena, self._masks = self._memory()
            cache = TreeCache(self.capacity(max(lengths)), self.base.layers, self._arena, whole=self.fixed)
            session = Session(self, cache, self._masks, lengths, max(lengths) + max_new_tokens + self.nodes)
            self._user = weakref.ref(session)
        last = 1 if len(lengths) == 1 else session.ends[:, None] - 1
        # Padded on the right without a mask: a stock forward is causal, so no prompt attends to its padding.
        # As in stock `generate`, positions are given: a few models count them otherwise.
        ids = pad_sequence(list(prompts), batch_first=True)
        logits, hidden = self.base.forward(
            ids,
            position_ids=torch.arange(ids.shape[1], device=ids.device)[None],
            cache=session.cache,
            use_cache=True,
            logits_to_keep=last,
        )
        return session, logits[:, -1], [states[:length] for states, length in zip(hidden, lengths, strict=True)]

    @functools.cached_property
    def numbers(self) -> Tensor:
        """int64 [N]: 0, 1, ..."""
        return torch.arange(self.nodes, device=self.base.device)

    def capacity(self, length: int) -> int:
        """The capacity of a cache in which a tree follows `length` tokens."""
        return min(bucket(length + self.nodes), aligned(self.context + self.nodes))

    def positions(self, lengths: Sequence[int]) -> int:
        """The number of positions that a forward after prompts of these lengths may use."""
        return self.context if self._switch is None or max(lengths) > self._switch else min(self._switch, self.context)

    def _memory(self) -> tuple[Arena, TreeMasks]:
        """Memory of a session's cache and masks."""
        return Arena(), TreeMasks(self.base, self.nodes, self.depth, self._windows, whole=self.fixed)


def check_lengths(lengths: Sequence[int], max_new_tokens: int, base: Base, context: int) -> None:
    """Raise E503 where a prompt is empty, or does not fit into the context with the new tokens; longrope: as masks."""
    for row, length in enumerate(lengths):
        if not length:
            raise TreeoptError(Code.CONTEXT_FULL, f"prompt {row} holds no tokens", fix="give at least one token")
        if length + max_new_tokens > context:
            holder = "the context" if context == base.context else "the model with this tree"
            what = f"{length} prompt tokens and {max_new_tokens} new ones; {holder} holds {max(context, 0)}"
            where = f"prompt {row}" if len(lengths) > 1 else ""
            fix = "shorten the prompt, or generate fewer new tokens" if context == base.context else ""
            raise TreeoptError(Code.CONTEXT_FULL, what, at=where, fix=fix)
    switch = frequency_switch(base.model.config)
    if switch is not None:
        check_frequencies(switch, lengths, max_new_tokens)


def pick(states: Tensor, places: Tensor) -> Tensor:
    """The entry at one place of each row, int64 [B]: [B, n, ...] -> [B, ...]."""
    if states.shape[1] == 1:
        return states[:, 0]
    if len(places) == 1:
        return states[0].index_select(0, places)
    return states[torch.arange(len(places), device=places.device), places]


class Session:
    """B texts in progress. Per step: `verify(tokens, tree)`, then `keep(paths)`.

    `lengths` are those of the prompts, `limit` the entries of a row that may be used, drafts included.
    """

    def __init__(
        self, forward: TreeForward, cache: TreeCache, masks: TreeMasks, lengths: list[int], limit: int
    ) -> None:
        self.cache = cache
        self._forward, self._masks = forward, masks
        self._limit = limit
        self._positions = forward.positions(lengths)
        self._lengths = lengths  # of each row of the cache
        self._live = list(range(len(lengths)))  # the rows of the cache that are in progress
        self._slots: Slots | None = None  # where some rows of a compiled forward have ended

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each row in progress."""
        return [self._lengths[row] for row in self._live]

    @functools.cached_property
    def ends(self) -> Tensor:
        """The lengths as int64 [B], for batches; of ended rows too where the forward is compiled."""
        return torch.tensor(self._lengths, device=self._forward.base.device)

    def verify(self, tokens: Tensor, tree: Buffers) -> tuple[Tensor, Tensor]:
        """One forward over all nodes, with tokens int64 [B, N]: logits [B, N, V] and hidden states [B, N, d].

        E503 where reserved space is used up. Where the forward is compiled, the results are valid until the next one.
        """
        logits, hidden = self._forward.verifier.forward(**self.inputs(tokens, tree))
        if self._slots is not None:
            logits, hidden = self._slots.live(logits), self._slots.live(hidden)
        if logits.shape[1] == tree.nodes:
            return logits, hidden
        return logits[:, : tree.nodes], hidden[:, : tree.nodes]

    def inputs(self, tokens: Tensor, tree: Buffers) -> dict[str, Any]:
        """Arguments of `Base.forward` for `verify`, and the cache made ready for that forward."""
        forward, longest = self._forward, max(self._lengths)
        if forward.fixed:
            if tree.nodes < forward.nodes:
                tokens = pad(tokens, (0, forward.nodes - tree.nodes))
                tree = padded(tree, forward.nodes)
            if self._slots is not None:
                tokens, tree = self._slots.fill(tokens), self._slots.fill_trees(tree)
            tokens = with_standard_strides(tokens)
        self._make_room(longest + tree.nodes)
        starts = longest if len(self._lengths) == 1 else self.ends[:, None]
        depths = tree.position_ids
        positions = (depths if tree.per_row else depths[None]) + starts  # [1 or B, N]
        if longest + forward.depth >= self._positions:
            # Nodes beyond them are drafts beyond the budget, which are never emitted; any valid position works.
            positions = positions.clamp(max=self._positions - 1)
        return {
            "ids": tokens,
            "attention_mask": self._mask(tree, starts),
            "position_ids": with_standard_strides(positions) if forward.fixed else positions,
            "cache": self.cache,
            "use_cache": True,
        }

    def keep(self, paths: Sequence[NodePath], on_device: Tensor | None = None) -> None:
        """Keep one path of each row's tree, the nodes from the root on, and drop the other nodes.

        `on_device` are the same as int64 [B, n] on the device, if available; negative beyond the end of a path.
        """
        # A path of n nodes that ends with node n - 1 is nodes 0 to n - 1, which need no move.
        if any(path[-1] >= len(path) for path in paths):
            longest = max(map(len, paths))
            if on_device is None:
                rows = [[*path, *[ROOT] * (longest - len(path))] for path in paths]
                on_device = torch.tensor(rows, device=self._forward.base.device)
            nodes = on_device[:, :longest]
            if len(self._lengths) == 1:
                self.cache.move(nodes[0] + self._lengths[0], self._lengths[0])
            else:
                if self._slots is not None:
                    nodes = self._slots.fill(nodes)
                start = self.ends[:, None]
                # Beyond the end of a path the root is copied, to entries that are hidden.
                self.cache.move(nodes.clamp(min=ROOT) + start, start)
        self.rewind([length + len(path) for length, path in zip(self.lengths, paths, strict=True)])

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these rows (ascending) only; a compiled forward goes on with all, and those are cut out."""
        if self._forward.fixed:
            self._live = [self._live[row] for row in rows]
            live = set(self._live)
            # Ended rows go on at the start of their entries, where they never reach the capacity.
            self._lengths = [length if row in live else 0 for row, length in enumerate(self._lengths)]
            self.__dict__.pop("ends", None)
            self._slots = Slots(self._live, len(self._lengths), self._forward.base.device)
            return
        kept = [self._lengths[row] for row in rows]
        self.cache.select(rows, max(kept))
        self._live = list(range(len(rows)))
        self._lengths = kept
        self.rewind(kept)

    def mark(self) -> list[int]:
        """The place in the texts, for `rewind`."""
        return self.lengths

    def rewind(self, lengths: Sequence[int]) -> None:
        """Set the cached tokens of each row; entries beyond them are dropped."""
        self._lengths = self._lengths.copy()
        for row, length in zip(self._live, lengths, strict=True):
            self._lengths[row] = length
        self.cache.truncate(max(self._lengths))
        self.__dict__.pop("ends", None)

    def _make_room(self, entries: int) -> None:
        """Make the capacity of the cache at least `entries`; E503 beyond the limit."""
        if entries > self._limit:
            what = f"a text of {max(self.lengths)} tokens has used up its reserved space"
            raise TreeoptError(Code.CONTEXT_FULL, what, fix="drop ended rows, or prefill with more new tokens")
        if entries > self.cache.capacity:
            longest = max(self._lengths)
            self.cache.grow(self._forward.capacity(longest), longest)
        self._masks.reserve(self.cache.capacity)

    def _mask(self, tree: Buffers, starts: int | Tensor) -> Mask:
        """The mask of a forward, with the cache made ready to be written and read by it."""
        forward, longest, nodes = self._forward, max(self._lengths), tree.nodes
        alone, fixed = len(self._lengths) == 1, forward.fixed
        unmasked = {}
        if nodes == 1 and not fixed and min(self._lengths) == longest:
            if self._masks.made_by_model:  # as in stock `generate`, so that half precision rounds alike
                self.cache.write_at(None, longest + 1)
                return None
            unmasked = self._masks.autoregressive(longest, len(self._lengths))
        width = self.cache.capacity if fixed else longest + 1 if unmasked else aligned(longest + nodes)
        entries = None
        if fixed or not (alone or unmasked):
            entries = forward.numbers[None, :nodes] + starts
        self.cache.write_at(entries, width)
        if alone:
            return self._masks.one_row(tree, longest, width, unmasked)
        return self._masks.rows(tree, self.ends, width, unmasked)
