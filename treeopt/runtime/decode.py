"""The decoder: propose, verify, accept, keep, on a stock model; one text or a batch, by any rule of acceptance.

Nothing is lost under an exact rule: greedy text is the one that plain greedy decoding gives (up to rounding of the
model's own forward), sampled text is distributed as plain sampling distributes it. The typical rule is lossy.

Whoever has a loop of their own embeds the decoder by two calls:

    rows = decoder.prefill([[1, 403, 407], [1, 311]], max_new_tokens=64)
    while rows.indices:                      # which of the prompts are still in progress
        for tokens in decoder.step(rows):    # one forward: a list for each row, its root and the accepted drafts
            ...
        rows.keep([...])                     # drop the rows whose text has ended
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, check_heads_fit, heads_like
from treeopt.models.heads import MedusaHeads
from treeopt.models.probe import check_trees
from treeopt.models.session import Session, TreeForward, pick
from treeopt.runtime import propose
from treeopt.runtime.accept import NOT_A_NUMBER
from treeopt.runtime.buffers import compile_tree
from treeopt.runtime.rules import Greedy, Rule
from treeopt.tree import Tree, check_tree_fits

Prompt = Tensor | Sequence[int]


@dataclass(frozen=True)
class Decoded:
    """A generated text: its tokens, and how many of them each step emitted."""

    tokens: list[int]
    step_lengths: list[int]

    @property
    def tokens_per_step(self) -> float:
        """tau of this text."""
        return len(self.tokens) / len(self.step_lengths)


class Rows:
    """Texts in progress, one a row; made by `TreeDecoder.prefill`, advanced by `TreeDecoder.step`.

    Attributes:
        indices: which prompt each row came from.
        roots: each row's next token, chosen but not yet emitted; the next step emits it first.
    """

    def __init__(self, session: Session, root: Tensor, hidden: Tensor, generator: torch.Generator | None) -> None:
        self.indices = list(range(len(session.lengths)))
        self.roots: list[int] = root.tolist()
        self._session = session
        self._root = root  # int64 [B]
        self._hidden = hidden  # [B, d], the states that chose the roots
        self._generator = generator

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows (0 .. B-1, ascending) only; they are numbered anew."""
        if len(rows) == len(self.indices):
            return
        self.indices = [self.indices[row] for row in rows]
        self.roots = [self.roots[row] for row in rows]
        if rows:
            self._session.select(rows)
            self._root, self._hidden = self._root[list(rows)], self._hidden[list(rows)]

    def check(self) -> None:
        """Raise E504 where a row's next token was chosen from scores that are no numbers."""
        if NOT_A_NUMBER in self.roots:
            row = self.roots.index(NOT_A_NUMBER)
            where = f"prompt {self.indices[row]}, after {self._session.lengths[row]} tokens of prompt and text"
            raise TreeoptError(Code.NOT_FINITE, "the base model gives logits that are not numbers", at=where)


class TreeDecoder:
    """A base model, its heads, a tree and a rule, ready to decode any number of texts.

    Args:
        base: a loaded `Base`, or any stock causal language model of `transformers`.
        heads: its draft heads; None only with the one-node tree, which is plain decoding on the same loop.
        tree: at most as deep as there are heads.
        acceptance: `Greedy()`, `Sample(...)` or the lossy `Typical(...)`.
        compile: run the tree's forward through `torch.compile`: the first two steps then take many seconds, later ones
            less. Rounding differs from the eager forward.
        probe: check that the base can verify trees (once for each model); off where that is known.

    Raises:
        TreeoptError: E101, E102 where the tree asks for more than the heads give, E212 where the heads do not fit the
            base, E502 where the base cannot verify trees.
    """

    def __init__(
        self,
        base: Base | PreTrainedModel,
        heads: MedusaHeads | None,
        tree: Tree,
        *,
        acceptance: Rule | None = None,
        compile: bool = False,
        probe: bool = True,
    ) -> None:
        self.base = base if isinstance(base, Base) else Base(base, None, base.config.name_or_path)
        self.tree = tree
        self.acceptance: Rule = acceptance or Greedy()
        self.heads = heads
        if heads is not None:
            check_heads_fit(self.base, heads, "given")
            self.heads = heads_like(self.base, heads)
        elif tree.depth:
            what = f"no heads were given, and the tree drafts {tree.depth} tokens ahead"
            raise TreeoptError(Code.TREE_TOO_DEEP, what, fix="heads=treeopt.load_heads(...).heads")
        num_heads = heads.num_heads if heads is not None else 0
        check_tree_fits(tree, heads=num_heads, ranks=self.base.vocab_size, holder="the model")
        if probe:
            check_trees(self.base)
        self.forward = TreeForward(self.base, tree, compile=compile)
        self.buffers = compile_tree(tree, self.base.device)
        self._paths = [path.tolist() for path in self.forward.path_to]
        self.parents = torch.tensor(tree.parents, device=self.base.device)

    @overload
    def generate(self, ids: Prompt, max_new_tokens: int) -> Decoded: ...

    @overload
    def generate(self, ids: Sequence[Prompt], max_new_tokens: int) -> list[Decoded]: ...

    def generate(self, ids: Prompt | Sequence[Prompt], max_new_tokens: int) -> Decoded | list[Decoded]:
        """Continue one prompt, or a list of prompts in one batch.

        Args:
            ids: one prompt's token ids, int64 [T] or [1, T] or a list of numbers; or a list of such prompts, of any
                lengths, without padding.
            max_new_tokens: at most so many for each; fewer where the model ends the text (that token is included).

        Returns:
            One `Decoded`, or one for each prompt of a list. In float32 and under the greedy rule a prompt gives the
            same text in any batch.

        Raises:
            TreeoptError: E503 where a prompt is empty or does not fit into the context with the new tokens, E504 where
                the model's logits are no numbers.
        """
        prompts, alone = _prompts(ids, self.base)
        made = [Decoded([], []) for _ in prompts]
        for step in self.start_all(prompts, max_new_tokens):
            for index, tokens in step.items():
                made[index].tokens.extend(tokens)
                made[index].step_lengths.append(len(tokens))
        return made[0] if alone else made

    def start(self, ids: Prompt, max_new_tokens: int) -> Iterator[list[int]]:
        """Prefill one prompt at once; iterating over the result runs one step at a time and yields its tokens.

        Arguments and errors are those of `generate`. Several texts may be in progress on one decoder.
        """
        prompts, alone = _prompts(ids, self.base)
        if not alone:
            raise ValueError("start continues one prompt; generate takes a list of them")
        return (step[0] for step in self.start_all(prompts, max_new_tokens))

    def start_all(self, ids: Sequence[Prompt], max_new_tokens: int) -> Iterator[dict[int, list[int]]]:
        """Prefill a batch of prompts at once; iterating runs one step at a time.

        Arguments and errors are those of `generate`.

        Yields:
            By the prompt's place among `ids`, the tokens of one step of every text that is still in progress.
        """
        rows = self.prefill(ids, max_new_tokens)
        return advance(self, rows, dict.fromkeys(rows.indices, max_new_tokens), frozenset(self.base.eos_ids))

    @torch.inference_mode()
    def prefill(self, ids: Sequence[Prompt], max_new_tokens: int) -> Rows:
        """Run the prompts, one forward for all, and choose each one's first token.

        Args:
            ids: prompts as for `generate`.
            max_new_tokens: room made in each row; a row must not be stepped on when its budget is spent.

        Raises:
            TreeoptError: as `generate`.
        """
        prompts, _ = _prompts(ids, self.base)
        if max_new_tokens < 1:
            raise TreeoptError(
                Code.CONTEXT_FULL, f"{max_new_tokens} new tokens were asked for", fix="ask for at least one"
            )
        session, logits, hidden = self.forward.begin(prompts, max_new_tokens)
        seed, generator = self.acceptance.seed, None
        if seed is not None:
            generator = torch.Generator(self.base.device).manual_seed(seed)
        return Rows(session, self.acceptance.first(logits, generator), hidden, generator)

    @torch.inference_mode()
    def step(self, rows: Rows) -> list[list[int]]:
        """Verify one tree a row, all in one forward; the rows are advanced in place.

        The device is waited for once. Ends of text and budgets are the caller's: a run of tokens is not cut.

        Returns:
            For each row its root and the accepted drafts, 1 to D + 1 tokens.

        Raises:
            TreeoptError: E504 where a root was chosen from logits that are no numbers.
        """
        rows.check()
        tokens = self._propose(rows)  # [B, N]
        logits, hidden = rows._session.verify(tokens)
        node, root = self.acceptance.judge(
            tokens, logits, self.parents, self.buffers.attention_mask, rows._generator
        )  # [B], [B]
        told = torch.cat([tokens, root[:, None], node[:, None]], dim=1).tolist()
        nodes = [row[-1] for row in told]
        rows._session.keep(nodes)
        rows.roots = [row[-2] for row in told]
        rows._root, rows._hidden = root, pick(hidden, nodes)
        return [[row[i] for i in self._paths[node]] for row, node in zip(told, nodes, strict=True)]

    def _propose(self, rows: Rows) -> Tensor:
        """int64 [B, N]: each row's root and a draft for every other node."""
        if not self.tree.depth:
            return rows._root[:, None]
        assert self.heads is not None
        logits = self.heads(rows._hidden, self.base.lm_head, self.tree.depth)  # [D, B, V]
        return propose.plain_drafts(rows._root, logits, self.buffers)


def advance(
    decoder: TreeDecoder, rows: Rows, left: dict[int, int], eos: frozenset[int]
) -> Iterator[dict[int, list[int]]]:
    """Step until every row has ended.

    Args:
        decoder: who steps.
        rows: the texts in progress.
        left: each prompt's budget; counted down here. Who sets one to 0 between two steps ends that text.
        eos: tokens that end a text.

    Yields:
        The tokens of one step of every prompt in progress, cut at the end of its text or budget.
    """
    while True:
        rows.keep([row for row, i in enumerate(rows.indices) if left[i] > 0])
        if not rows.indices:
            return
        rows.check()
        # A root that is the last token needs no verification.
        roots = dict(zip(rows.indices, rows.roots, strict=True))
        emitted = {i: [root] for i, root in roots.items() if left[i] == 1 or root in eos}
        left.update(dict.fromkeys(emitted, 0))
        rows.keep([row for row, i in enumerate(rows.indices) if left[i] > 0])
        if rows.indices:
            for i, tokens in zip(rows.indices, decoder.step(rows), strict=True):
                emitted[i] = _cut(tokens, left[i], eos)
                left[i] = 0 if emitted[i][-1] in eos else left[i] - len(emitted[i])
        yield emitted


def _cut(tokens: list[int], left: int, eos: frozenset[int]) -> list[int]:
    """The tokens up to the budget, and up to the first end of text, which is included."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[: min(left, end)]


def _prompts(ids: Prompt | Sequence[Prompt], base: Base) -> tuple[list[Tensor], bool]:
    """The prompts as int64 [T] each on the model's device, and whether one was given by itself."""
    alone = isinstance(ids, Tensor) or not any(isinstance(one, Sequence) or getattr(one, "ndim", 0) for one in ids)
    listed: Any = [ids] if alone else ids
    return [_one_prompt(one, base) for one in listed], alone


def _one_prompt(ids: Prompt, base: Base) -> Tensor:
    """The ids as int64 [T] on the model's device; ValueError where they are no token ids of one text."""
    prompt = torch.as_tensor(ids, device=base.device)
    if prompt.ndim == 2 and len(prompt) == 1:
        prompt = prompt[0]
    if prompt.ndim != 1 or (prompt.is_floating_point() and len(prompt)):
        raise ValueError(
            f"token ids are {prompt.dtype} {list(prompt.shape)}, not integers [T] or [1, T]; a batch is a list of them"
        )
    if len(prompt) and not 0 <= int(prompt.min()) <= int(prompt.max()) < base.vocab_size:
        raise ValueError(f"a token id lies outside the vocabulary of {base.vocab_size}")
    return prompt.long()
