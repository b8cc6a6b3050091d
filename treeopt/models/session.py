"""Texts being decoded through trees: prefixes, cache, masks and positions around a stock model's own forward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.cache import TreeCache
from treeopt.models.masks import TreeMasks, layer_windows
from treeopt.tree import Tree

_ATTENTION = ("eager", "sdpa")  # what reads a float mask rightly; flex attention aborts the process on it


class TreeForward:
    """A tree made ready for one model; `begin` starts a session for each text or batch, as many as are wanted.

    Args:
        base: the model.
        tree: the tree.
        compile: run the tree's forward, and only that, through `torch.compile`.
    """

    def __init__(self, base: Base, tree: Tree, *, compile: bool = False) -> None:
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
        self.tree = tree
        self.depths = torch.tensor(tree.depths, device=base.device)
        paths = [np.flatnonzero(row) for row in tree.ancestors]
        # The node at each depth of every node's path; beyond its end the root, which nobody looks at.
        rows = pad_sequence([torch.from_numpy(path) for path in paths], batch_first=True)
        self.paths = rows.to(base.device)  # [N, D+1]
        self.path_to = [row[: depth + 1] for row, depth in zip(self.paths, tree.depths, strict=True)]
        self._windows = layer_windows(base.model.config)
        self._masks: TreeMasks | None = None

    def begin(self, prompts: Sequence[Tensor], max_new_tokens: int) -> tuple[Session, Tensor, Tensor]:
        """Prefill prompts (each int64 [T], of any lengths); room is made for `max_new_tokens` more in each row.

        Returns:
            The session, and logits [B, V] and hidden states [B, d] at each prompt's last token.

        Raises:
            TreeoptError: E503 where prompt and new tokens do not fit into the context.
        """
        lengths = [len(prompt) for prompt in prompts]
        for row, length in enumerate(lengths):
            if not length:
                raise TreeoptError(Code.CONTEXT_FULL, f"prompt {row} holds no tokens", fix="give at least one token")
            if length + max_new_tokens > self.base.context:
                what = f"{length} prompt tokens and {max_new_tokens} new ones; the context holds {self.base.context}"
                where = f"prompt {row}" if len(lengths) > 1 else ""
                raise TreeoptError(
                    Code.CONTEXT_FULL, what, at=where, fix="shorten the prompt or ask for fewer new tokens"
                )
        capacity = max(lengths) + max_new_tokens + self.tree.nodes
        if self._masks is None or self._masks.capacity < capacity:
            self._masks = TreeMasks(self.tree, self._windows, capacity, self.base.dtype, self.base.device)
        session = Session(self, self._masks, TreeCache(capacity, self.base.layers), lengths)
        last = 1 if len(lengths) == 1 else session.ends[:, None] - 1
        # Padded on the right and without a mask: a stock forward is causal, so no prompt sees its padding.
        logits, hidden = self.base.forward(
            pad_sequence(list(prompts), batch_first=True),
            past_key_values=session.cache,
            use_cache=True,
            logits_to_keep=last,
        )
        return session, logits[:, -1], pick(hidden, [length - 1 for length in lengths])


def pick(states: Tensor, places: Sequence[int]) -> Tensor:
    """One place of each row: [B, n, ...] -> [B, ...]."""
    if len(places) == 1:
        return states[:, places[0]]
    rows = torch.arange(len(places), device=states.device)
    return states[rows, torch.tensor(places, device=states.device)]


class Session:
    """B texts in progress. Per step: `verify(tokens)`, then `keep(nodes)`.

    Attributes:
        lengths: cached tokens of each row.
    """

    def __init__(self, forward: TreeForward, masks: TreeMasks, cache: TreeCache, lengths: list[int]) -> None:
        self.cache = cache
        self.lengths = lengths
        self._forward = forward
        self._masks = masks

    @functools.cached_property
    def ends(self) -> Tensor:
        """The lengths as int64 [B]; only a batch needs them."""
        return torch.tensor(self.lengths, device=self._forward.base.device)

    def verify(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """One forward over all nodes of all rows: int64 [B, N] -> logits [B, N, V], hidden states [B, N, d]."""
        forward, longest = self._forward, max(self.lengths)
        width = longest + tokens.shape[1]
        if width > self.cache.capacity:
            what = f"a text of {longest} tokens has used up the room that was made for it"
            raise TreeoptError(Code.CONTEXT_FULL, what, fix="drop ended rows, or prefill with more new tokens")
        if len(self.lengths) == 1:
            mask = self._masks.at(longest)
            positions = (forward.depths + longest)[None]
        else:
            mask = self._masks.at_each(self.ends, width)
            positions = forward.depths + self.ends[:, None]
            self.cache.write_at(self.ends[:, None] + torch.arange(tokens.shape[1], device=tokens.device), width)
        if longest + forward.tree.depth >= forward.base.context:
            # Nodes beyond the context hold drafts beyond the budget, which are never emitted: any valid position does.
            positions = positions.clamp(max=forward.base.context - 1)
        return forward.verifier.forward(
            tokens, attention_mask=mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        )

    def keep(self, nodes: Sequence[int]) -> None:
        """Of each row's tree keep the path from the root to one node, and drop the rest."""
        forward, depths = self._forward, self._forward.tree.depths
        longest = 1 + max(depths[node] for node in nodes)
        if len(nodes) == 1:
            if nodes[0] >= longest:  # else the path is nodes 0 to n-1, and in place
                self.cache.move(forward.path_to[nodes[0]] + self.lengths[0], self.lengths[0])
        elif longest > 1:
            start = self.ends[:, None]
            self.cache.move(forward.paths[list(nodes), :longest] + start, start)
        self._set_lengths([length + 1 + depths[node] for length, node in zip(self.lengths, nodes, strict=True)])

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.cache.select(torch.tensor(list(rows), device=self._forward.base.device))
        self.cache.write_at(None, 0)
        self._set_lengths([self.lengths[row] for row in rows])

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.cache.truncate(max(lengths))
        self.__dict__.pop("ends", None)
