"""The decoder: propose, verify, accept, keep, on a stock model; greedy, one text at a time.

Nothing is lost: the text is the one that plain greedy decoding gives (up to rounding of the model's own forward).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, check_heads_fit, heads_like
from treeopt.models.heads import MedusaHeads
from treeopt.models.probe import check_trees
from treeopt.models.session import TreeForward
from treeopt.runtime import accept, propose
from treeopt.runtime.buffers import compile_tree
from treeopt.tree import ROOT, Tree, check_tree_fits


@dataclass(frozen=True)
class Decoded:
    """A generated text: its tokens, and how many of them each step emitted."""

    tokens: list[int]
    step_lengths: list[int]

    @property
    def tokens_per_step(self) -> float:
        """tau of this text."""
        return len(self.tokens) / len(self.step_lengths)


class TreeDecoder:
    """A base model, its heads and a tree, ready to decode.

    Args:
        base: a loaded `Base`, or any stock causal language model of `transformers`.
        heads: its draft heads; None only with the one-node tree, which is plain decoding on the same loop.
        tree: at most as deep as there are heads.
        probe: check that the base can verify trees; off where the same base has just been checked.

    Raises:
        TreeoptError: E101, E102 where the tree asks for more than the heads give, E212 where the heads do not fit the
            base, E502 where the base cannot verify trees.
    """

    def __init__(
        self, base: Base | PreTrainedModel, heads: MedusaHeads | None, tree: Tree, *, probe: bool = True
    ) -> None:
        self.base = base if isinstance(base, Base) else Base(base, None, base.config.name_or_path)
        self.tree = tree
        self.heads = heads
        if heads is not None:
            check_heads_fit(self.base, heads, "given")
            self.heads = heads_like(self.base, heads)
        num_heads = heads.num_heads if heads is not None else 0
        check_tree_fits(tree, heads=num_heads, ranks=self.base.vocab_size, holder="the model")
        if probe:
            check_trees(self.base)
        self.forward = TreeForward(self.base, tree)
        self.buffers = compile_tree(tree, self.base.device)
        self.parents = torch.tensor(tree.parents, device=self.base.device)

    def generate(self, ids: Tensor | Sequence[int], max_new_tokens: int) -> Decoded:
        """Continue one prompt greedily.

        Args:
            ids: the prompt's token ids, int64 [T] or [1, T].
            max_new_tokens: at most so many; fewer where the model ends the text (that token is included).

        Raises:
            TreeoptError: E503 where the prompt is empty or does not fit into the context with the new tokens.
        """
        steps = list(self.start(ids, max_new_tokens))
        return Decoded([token for step in steps for token in step], [len(step) for step in steps])

    @torch.inference_mode()
    def start(self, ids: Tensor | Sequence[int], max_new_tokens: int) -> Decoding:
        """Prefill a prompt; iterating over the result runs one step at a time and yields the tokens of each."""
        prompt = _one_prompt(ids, self.base)
        if max_new_tokens < 1:
            raise TreeoptError(
                Code.CONTEXT_FULL, f"{max_new_tokens} new tokens were asked for", fix="ask for at least one"
            )
        logits, hidden = self.forward.begin(prompt, max_new_tokens)
        if not torch.isfinite(logits).all():
            raise TreeoptError(Code.NOT_FINITE, f"{self.base.name} gives logits that are not numbers after the prompt")
        return Decoding(self, logits.argmax(-1), hidden, max_new_tokens)


def _one_prompt(ids: Tensor | Sequence[int], base: Base) -> Tensor:
    """The ids as int64 [T] on the model's device; ValueError where they are no token ids of one text."""
    prompt = torch.as_tensor(ids, device=base.device)
    if prompt.ndim == 2 and len(prompt) == 1:
        prompt = prompt[0]
    if prompt.ndim != 1 or (prompt.is_floating_point() and len(prompt)):
        raise ValueError(f"token ids are {prompt.dtype} {list(prompt.shape)}, not integers [T] or [1, T]")
    if len(prompt) and not 0 <= int(prompt.min()) <= int(prompt.max()) < base.vocab_size:
        raise ValueError(f"a token id lies outside the vocabulary of {base.vocab_size}")
    return prompt.long()


class Decoding(Iterator[list[int]]):
    """One text in progress. A decoder serves one at a time: starting the next one ends this."""

    def __init__(self, decoder: TreeDecoder, root: Tensor, hidden: Tensor, budget: int) -> None:
        self._decoder = decoder
        self._root = root  # int64 [], chosen but not yet emitted
        self._hidden = hidden  # [d], the state that chose it
        self._left = budget
        self._eos = frozenset(decoder.base.eos_ids)
        self._session = decoder.forward.cache

    @torch.inference_mode()
    def __next__(self) -> list[int]:
        """The tokens of one step: the root, then the accepted drafts, cut at the end of the text or of the budget."""
        if self._left <= 0:
            raise StopIteration
        if self._session is not self._decoder.forward.cache:
            raise RuntimeError("this decoder has started another text; use one decoder for each text in progress")
        root = int(self._root)
        if self._left == 1 or root in self._eos:  # the last token needs no verification
            return self._emit([root])
        tokens = self._propose()
        logits, hidden = self._decoder.forward.verify(tokens)
        choice = logits.max(-1).indices  # as argmax, and several times faster in bfloat16 on a CPU
        last = accept.greedy(tokens, choice, self._decoder.parents, self._decoder.buffers.attention_mask)
        nodes = self._path_to(int(last))
        self._decoder.forward.keep(nodes)
        self._root, self._hidden = choice[last], hidden[last]
        return self._emit(tokens[nodes].tolist())

    def _propose(self) -> Tensor:
        """int64 [N]: the root and a draft for every other node."""
        decoder, depth = self._decoder, self._decoder.tree.depth
        if not depth:
            return self._root.view(1)
        assert decoder.heads is not None
        logits = decoder.heads(self._hidden[None], decoder.base.lm_head, depth)[:, 0]  # [D, V]
        return propose.plain_drafts(self._root, logits, decoder.buffers)

    def _path_to(self, node: int) -> list[int]:
        """Nodes from the root to `node`."""
        path = [node]
        while path[-1] != ROOT:
            path.append(self._decoder.tree.parents[path[-1]])
        return path[::-1]

    def _emit(self, tokens: list[int]) -> list[int]:
        ends = [i for i, token in enumerate(tokens) if token in self._eos]
        kept = tokens[: min(self._left, ends[0] + 1 if ends else len(tokens))]
        self._left = 0 if ends and ends[0] < len(kept) else self._left - len(kept)
        return kept
