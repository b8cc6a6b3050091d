"""One text being decoded through trees: prefix, cache, masks and positions around a stock model's own forward."""

from __future__ import annotations

import torch
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.cache import TreeCache
from treeopt.models.masks import TreeMasks, layer_windows
from treeopt.tree import Tree

_ATTENTION = ("eager", "sdpa")  # what reads a float mask rightly; flex attention aborts the process on it


class TreeForward:
    """A tree made ready for one model; serves any number of texts, one at a time.

    Use: `begin(ids)`, then per step `verify(tokens)` and `keep(nodes)`.
    """

    def __init__(self, base: Base, tree: Tree) -> None:
        attention = base.model.config._attn_implementation
        if attention not in _ATTENTION:
            raise TreeoptError(
                Code.NO_TREES,
                f"the model was loaded with {attention} attention",
                why="a tree needs attention that takes a mask of floats: eager or sdpa",
                fix='from_pretrained(..., attn_implementation="sdpa")',
            )
        self.base = base
        self.tree = tree
        self._windows = layer_windows(base.model.config)
        self._depths = torch.tensor(tree.depths, device=base.device)
        self._masks: TreeMasks | None = None

    def begin(self, ids: Tensor, max_new_tokens: int) -> tuple[Tensor, Tensor]:
        """Prefill a prompt (int64 [T]); room is made for `max_new_tokens` more.

        Returns:
            Logits [V] and hidden state [d] at the prompt's last token.

        Raises:
            TreeoptError: E503 where prompt and new tokens do not fit into the context.
        """
        total = len(ids) + max_new_tokens
        if not len(ids) or total > self.base.context:
            what = f"{len(ids)} prompt tokens and {max_new_tokens} new ones; the context holds {self.base.context}"
            raise TreeoptError(Code.CONTEXT_FULL, what, fix="shorten the prompt or lower --max-new-tokens")
        capacity = total + self.tree.nodes
        if self._masks is None or self._masks.capacity < capacity:
            self._masks = TreeMasks(self.tree, self._windows, capacity, self.base.dtype, self.base.device)
        self.cache = TreeCache(capacity)
        self.length = len(ids)
        # No mask is given: a stock forward on a prompt is causal.
        logits, hidden = self.base.forward(ids[None], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return logits[0, -1], hidden[0, -1]

    def verify(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """One forward over all nodes: tokens int64 [N] -> logits [N, V], hidden states [N, d]."""
        assert self._masks is not None, "begin comes first"
        # Nodes beyond the context hold drafts beyond the budget, which are never accepted: any valid position does.
        positions = (self._depths + self.length).clamp_(max=self.base.context - 1)
        logits, hidden = self.base.forward(
            tokens[None],
            attention_mask=self._masks.at(self.length),
            position_ids=positions[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        return logits[0], hidden[0]

    def keep(self, nodes: list[int]) -> None:
        """Keep the cache entries of the accepted nodes, root first, and drop the rest."""
        self.cache.keep(self.length, nodes)
        self.length += len(nodes)
