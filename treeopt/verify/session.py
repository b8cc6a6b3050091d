"""Texts being decoded through trees: prefixes, cache, masks and positions around a stock model's own forward."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.tree import ROOT, Tree
from treeopt.verify.cache import TreeCache
from treeopt.verify.masks import PrefixMasks, TreeMasks, layer_windows
from treeopt.verify.shapes import Frame, Shape

NodePath = tuple[int, ...]  # nodes, the root first

_ATTENTION = ("eager", "sdpa")  # what reads a float mask rightly; flex attention aborts the process on it


class TreeForward:
    """A tree made ready for one model; `begin` starts a session for each text or batch, as many as are wanted.

    Args:
        base: the model.
        tree: the tree; or only its frame, where every step brings trees of its own.
        compile: run the tree's forward, and only that, through `torch.compile`.

    Attributes:
        shape: the tree's; None where there is only a frame.
        paths: of the tree, the nodes from the root to each node.
    """

    def __init__(self, base: Base, tree: Tree | Frame, *, compile: bool = False) -> None:
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
        fixed = tree if isinstance(tree, Tree) else None
        self.shape = Shape.of_tree(fixed, base.device) if fixed else None
        self.paths = [tuple(np.flatnonzero(row).tolist()) for row in fixed.ancestors] if fixed else []
        nodes = torch.tensor([node for path in self.paths for node in path], device=base.device)
        ends = itertools.accumulate(map(len, self.paths))
        self._known = {path: nodes[end - len(path) : end] for path, end in zip(self.paths, ends, strict=True)}
        self._windows = layer_windows(base.model.config)
        self._masks: TreeMasks | PrefixMasks | None = None

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
        session = Session(self, self._masks_for(capacity), TreeCache(capacity, self.base.layers), lengths)
        last = 1 if len(lengths) == 1 else session.ends[:, None] - 1
        # Padded on the right and without a mask: a stock forward is causal, so no prompt sees its padding.
        logits, hidden = self.base.forward(
            pad_sequence(list(prompts), batch_first=True),
            past_key_values=session.cache,
            use_cache=True,
            logits_to_keep=last,
        )
        return session, logits[:, -1], pick(hidden, [length - 1 for length in lengths])

    def on_device(self, path: NodePath) -> Tensor:
        """A path as int64 [n]; those of a tree that stays are there already."""
        known = self._known.get(path)
        return torch.tensor(path, device=self.base.device) if known is None else known

    def _masks_for(self, capacity: int) -> TreeMasks | PrefixMasks:
        """The masks behind prefixes of up to `capacity` tokens; larger ones made before do as well."""
        if self._masks is None or self._masks.capacity < capacity:
            given = (self._windows, capacity, self.base.dtype, self.base.device)
            tree = self.tree
            self._masks = TreeMasks.of_tree(tree, *given) if isinstance(tree, Tree) else PrefixMasks(tree.depth, *given)
        return self._masks


def pick(states: Tensor, places: Sequence[int]) -> Tensor:
    """One place of each row: [B, n, ...] -> [B, ...]."""
    if len(places) == 1:
        return states[:, places[0]]
    rows = torch.arange(len(places), device=states.device)
    return states[rows, torch.tensor(places, device=states.device)]


class Session:
    """B texts in progress. Per step: `verify(tokens)`, then `keep(paths)`.

    Attributes:
        lengths: cached tokens of each row.
    """

    def __init__(
        self, forward: TreeForward, masks: TreeMasks | PrefixMasks, cache: TreeCache, lengths: list[int]
    ) -> None:
        self.cache = cache
        self.lengths = lengths
        self._forward = forward
        self._masks = masks

    @functools.cached_property
    def ends(self) -> Tensor:
        """The lengths as int64 [B]; only a batch needs them."""
        return torch.tensor(self.lengths, device=self._forward.base.device)

    def verify(self, tokens: Tensor, shape: Shape | None = None) -> tuple[Tensor, Tensor]:
        """One forward over all nodes of all rows.

        Args:
            tokens: int64 [B, N].
            shape: the rows' trees, for a forward that knows only their frame; None is the forward's own tree.

        Returns:
            Logits [B, N, V] and hidden states [B, N, d].
        """
        forward, longest = self._forward, max(self.lengths)
        width = longest + tokens.shape[1]
        if width > self.cache.capacity:
            what = f"a text of {longest} tokens has used up the room that was made for it"
            raise TreeoptError(Code.CONTEXT_FULL, what, fix="drop ended rows, or prefill with more new tokens")
        masks, depths = self._of_step(shape, longest)
        if len(self.lengths) == 1:
            mask = masks.at(longest)
            positions = depths + longest
        else:
            mask = masks.at_each(self.ends, width)
            positions = depths + self.ends[:, None]
            self.cache.write_at(self.ends[:, None] + torch.arange(tokens.shape[1], device=tokens.device), width)
        if longest + forward.tree.depth >= forward.base.context:
            # Nodes beyond the context hold drafts beyond the budget, which are never emitted: any valid position does.
            positions = positions.clamp(max=forward.base.context - 1)
        return forward.verifier.forward(
            tokens, attention_mask=mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        )

    def keep(self, paths: Sequence[NodePath]) -> None:
        """Of each row's tree keep one path, the nodes from the root on, and drop the rest."""
        # A path that ends with node n - 1 is nodes 0 to n - 1, and in place.
        if any(path[-1] >= len(path) for path in paths):
            if len(paths) == 1:
                self.cache.move(self._forward.on_device(paths[0]) + self.lengths[0], self.lengths[0])
            else:
                longest = max(map(len, paths))
                # Beyond a path's end the root, where nobody looks.
                rows = [[*path, *[ROOT] * (longest - len(path))] for path in paths]
                start = self.ends[:, None]
                self.cache.move(torch.tensor(rows, device=start.device) + start, start)
        self._set_lengths([length + len(path) for length, path in zip(self.lengths, paths, strict=True)])

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.cache.select(torch.tensor(list(rows), device=self._forward.base.device))
        self.cache.write_at(None, 0)
        self._set_lengths([self.lengths[row] for row in rows])

    def _of_step(self, shape: Shape | None, longest: int) -> tuple[TreeMasks, Tensor]:
        """The masks of a step behind prefixes of up to `longest` tokens, and its nodes' depths int64 [1 or B, N]."""
        if isinstance(self._masks, TreeMasks):
            assert shape is None, "this forward was made for one tree"
            assert self._forward.shape is not None
            return self._masks, self._forward.shape.depths
        assert shape is not None, "this forward was made for trees that each step brings"
        return self._masks.before(shape, longest), shape.depths

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.cache.truncate(max(lengths))
        self.__dict__.pop("ends", None)
