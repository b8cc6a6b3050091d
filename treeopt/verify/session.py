"""Texts in progress on a stock model: the KV cache, and one forward over a compiled tree at each step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.tree import ROOT
from treeopt.verify.buffers import Buffers
from treeopt.verify.cache import TreeCache
from treeopt.verify.masks import PrefixMasks, TreeMasks, layer_windows

NodePath = Sequence[int]  # nodes, the root first

_ATTENTION = ("eager", "sdpa")  # these accept a float mask; flex attention aborts the process


class TreeForward:
    """A model with the masks of its trees; `begin` starts a session for one text or a batch, any number of times.

    Args:
        base: the model.
        nodes: the maximum of any tree, root counted.
        depth: the maximum of any node.
        compile: run the forward over trees, and no other forward, through `torch.compile`.

    Raises:
        TreeoptError: E502 where the model's attention cannot verify trees.
    """

    def __init__(self, base: Base, nodes: int, depth: int, *, compile: bool = False) -> None:
        attention = base.model.config._attn_implementation
        if attention not in _ATTENTION:
            raise TreeoptError(
                Code.NO_TREES,
                f"the model was loaded with {attention} attention",
                why="a tree needs attention that takes a mask of floats: eager or sdpa",
                fix='from_pretrained(..., attn_implementation="sdpa")',
            )
        self.base = base
        self.verifier = dataclasses.replace(base, model=torch.compile(base.model)) if compile else base
        self.nodes = nodes
        self.depth = depth
        self._windows = layer_windows(base.model.config)
        self._prefix: PrefixMasks | None = None
        self._built: tuple[Buffers, TreeMasks] | None = None

    def begin(self, prompts: Sequence[Tensor], max_new_tokens: int) -> tuple[Session, Tensor, Tensor]:
        """Prefill prompts (each int64 [T], of any lengths), with space for `max_new_tokens` more in each row.

        Returns:
            The session, and logits [B, V] and hidden states [B, d] at each prompt's last token.

        Raises:
            TreeoptError: E503 where prompt and new tokens do not fit into the context.
        """
        lengths = [len(prompt) for prompt in prompts]
        self._check_lengths(lengths, max_new_tokens)
        capacity = max(lengths) + max_new_tokens + self.nodes
        session = Session(self, TreeCache(capacity, self.base.layers), lengths)
        last = 1 if len(lengths) == 1 else session.ends[:, None] - 1
        # Padded on the right without a mask: a stock forward is causal, so no prompt attends to its padding.
        logits, hidden = self.base.forward(
            pad_sequence(list(prompts), batch_first=True),
            past_key_values=session.cache,
            use_cache=True,
            logits_to_keep=last,
        )
        return session, logits[:, -1], pick(hidden, [length - 1 for length in lengths])

    def masks(self, tree: Buffers, length: int, capacity: int) -> TreeMasks:
        """The masks of a tree after prefixes of up to `length` tokens.

        Those of a static tree are built once, for prefixes of up to `capacity` tokens.
        """
        if self._prefix is None or self._prefix.capacity < capacity:
            self._prefix = PrefixMasks(self.depth, self._windows, capacity, self.base)
        if tree.per_row:
            return self._prefix.before(tree, length)
        if self._built is None or self._built[0] is not tree or self._built[1].capacity < capacity:
            self._built = tree, self._prefix.before(tree, self._prefix.capacity)
        return self._built[1]

    def _check_lengths(self, lengths: Sequence[int], max_new_tokens: int) -> None:
        for row, length in enumerate(lengths):
            if not length:
                raise TreeoptError(Code.CONTEXT_FULL, f"prompt {row} holds no tokens", fix="give at least one token")
            if length + max_new_tokens > self.base.context:
                what = f"{length} prompt tokens and {max_new_tokens} new ones; the context holds {self.base.context}"
                where = f"prompt {row}" if len(lengths) > 1 else ""
                raise TreeoptError(
                    Code.CONTEXT_FULL, what, at=where, fix="shorten the prompt, or generate fewer new tokens"
                )


def pick(states: Tensor, places: Sequence[int]) -> Tensor:
    """The entry at one index of each row: [B, n, ...] -> [B, ...]."""
    if len(places) == 1:
        return states[:, places[0]]
    rows = torch.arange(len(places), device=states.device)
    return states[rows, torch.tensor(places, device=states.device)]


class Session:
    """B texts in progress. Per step: `verify(tokens, tree)`, then `keep(paths)`.

    Attributes:
        lengths: cached tokens of each row.
    """

    def __init__(self, forward: TreeForward, cache: TreeCache, lengths: list[int]) -> None:
        self.cache = cache
        self.lengths = lengths
        self._forward = forward

    @functools.cached_property
    def ends(self) -> Tensor:
        """The lengths as int64 [B], for batches."""
        return torch.tensor(self.lengths, device=self._forward.base.device)

    def verify(self, tokens: Tensor, tree: Buffers) -> tuple[Tensor, Tensor]:
        """One forward over all nodes of all rows.

        Args:
            tokens: int64 [B, N], each node's token.
            tree: the tree of all rows, or one for each.

        Returns:
            Logits [B, N, V] and hidden states [B, N, d].

        Raises:
            TreeoptError: E503 where the reserved space of a text is used up.
        """
        forward, longest = self._forward, max(self.lengths)
        width = longest + tokens.shape[1]
        if width > self.cache.capacity:
            what = f"a text of {longest} tokens has used up its reserved space"
            raise TreeoptError(Code.CONTEXT_FULL, what, fix="drop ended rows, or prefill with more new tokens")
        masks = forward.masks(tree, longest, self.cache.capacity)
        depths = tree.position_ids.view(-1, tree.nodes)  # [1 or B, N]
        if len(self.lengths) == 1:
            mask = masks.at(longest)
            positions = depths + longest
        else:
            mask = masks.at_each(self.ends, width)
            positions = depths + self.ends[:, None]
            self.cache.write_at(self.ends[:, None] + torch.arange(tokens.shape[1], device=tokens.device), width)
        if longest + forward.depth >= forward.base.context:
            # Nodes beyond the context are drafts beyond the budget, which are never emitted; any valid position works.
            positions = positions.clamp(max=forward.base.context - 1)
        return forward.verifier.forward(
            tokens, attention_mask=mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        )

    def keep(self, paths: Sequence[NodePath], on_device: Tensor | None = None) -> None:
        """Keep one path of each row's tree, the nodes from the root on, and drop the other nodes.

        Args:
            paths: one for each row.
            on_device: the same as int64 [B, n] on the device, if available; negative beyond the end of a path.
        """
        # A path of n nodes that ends with node n - 1 is nodes 0 to n - 1, which need no move.
        if any(path[-1] >= len(path) for path in paths):
            longest = max(map(len, paths))
            if on_device is None:
                rows = [[*path, *[ROOT] * (longest - len(path))] for path in paths]
                on_device = torch.tensor(rows, device=self._forward.base.device)
            # Beyond the end of a path the root is copied, to entries that are hidden.
            nodes = on_device[:, :longest].clamp(min=ROOT)
            if len(paths) == 1:
                self.cache.move(nodes[0] + self.lengths[0], self.lengths[0])
            else:
                start = self.ends[:, None]
                self.cache.move(nodes + start, start)
        self.rewind([length + len(path) for length, path in zip(self.lengths, paths, strict=True)])

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these rows only."""
        self.cache.select(torch.tensor(list(rows), device=self._forward.base.device))
        self.cache.write_at(None, 0)
        self.rewind([self.lengths[row] for row in rows])

    def rewind(self, lengths: Sequence[int]) -> None:
        """Set the cached tokens of each row; entries beyond them are dropped."""
        self.lengths = list(lengths)
        self.cache.truncate(max(self.lengths))
        self.__dict__.pop("ends", None)
