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

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel

from treeopt.decode.batch import Rows
from treeopt.decode.rules import Greedy, Rule
from treeopt.drafter import Drafter
from treeopt.drafting.heads import Drafts, Proposer
from treeopt.drafting.plans import proposer_of
from treeopt.errors import Code, TreeoptError, first_line
from treeopt.files.policies import GivenPlan, as_plan_for
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.tree import ROOT
from treeopt.verify.probe import check_trees
from treeopt.verify.session import NodePath, TreeForward, pick
from treeopt.verify.shapes import Frame

Prompt = Tensor | Sequence[int]
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
    """A base model, what drafts for it, and a rule, ready to decode any number of texts.

    Args:
        base: a loaded `Base`, or any stock causal language model of `transformers`.
        heads: its draft heads; None only with the one-node tree, which is plain decoding on the same loop, or with a
            proposer.
        tree: at most as deep as there are heads, or as its drafter has levels; or the policy that chooses one per step;
            a list of paths, a file of either or a name of the zoo will do; not with a proposer, which brings its own.
        drafter: what the tree or policy was made for, or its file, where that is not the heads' plain guesses; the one
            that a tree's file names need not be given.
        proposer: what drafts, where it is not the heads' guesses in one tree.
        acceptance: `Greedy()`, `Sample(...)` or the lossy `Typical(...)`.
        compile: run the tree's forward through `torch.compile`: the first two steps then take many seconds, later ones
            less. Rounding differs from the eager forward.
        probe: check that the base can verify trees (once for each model); off where that is known.

    Raises:
        TreeoptError: E101, E102 where the tree asks for more than the heads give, E212 where the heads do not fit the
            base, E223 where the drafter does not, or the tree was made for another, E502 where the base cannot verify
            trees.
        ValueError: unless either a tree or a proposer is given.

    For which base and heads a tree was made is not compared here, as text and prediction hold for any; the command line
    warns where they are others.
    """

    def __init__(
        self,
        base: Base | PreTrainedModel,
        heads: MedusaHeads | None,
        tree: GivenPlan | None = None,
        *,
        drafter: Drafter | str | os.PathLike[str] | None = None,
        proposer: Proposer | None = None,
        acceptance: Rule | None = None,
        compile: bool = False,
        probe: bool = True,
    ) -> None:
        self.base = base if isinstance(base, Base) else Base(base, None, base.config.name_or_path)
        self.acceptance: Rule = acceptance or Greedy()
        if (tree is None) is (proposer is None):
            raise ValueError("a decoder takes either a tree or a proposer")
        if tree is not None:
            plan, drafter = as_plan_for(tree, drafter)
            proposer = proposer_of(self.base, heads, plan, drafter)
        assert proposer is not None
        self.proposer: Proposer = proposer
        self.tree = proposer.tree
        if probe:
            check_trees(self.base)
        frame = Frame(proposer.nodes, proposer.depth) if self.tree is None else self.tree
        self.forward = TreeForward(self.base, frame, compile=compile)

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
            ValueError: where the ids are no token ids of the model.
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
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, Integral):
            raise ValueError(f"max_new_tokens is {max_new_tokens!r}, not a whole number")
        if max_new_tokens < 1:
            raise TreeoptError(
                Code.CONTEXT_FULL, f"{max_new_tokens} new tokens were asked for", fix="ask for at least one"
            )
        session, logits, hidden = self.forward.begin(prompts, max_new_tokens)
        seed, generator = self.acceptance.seed, None
        if seed is not None:
            generator = torch.Generator(self.base.device).manual_seed(seed)
        context = self.proposer.context
        texts = [prompt[max(0, len(prompt) + 1 - context) :].tolist() for prompt in prompts] if context else []
        return Rows(session, self.acceptance.first(logits, generator), hidden, generator, texts, context)

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
        drafts = self.proposer.propose(rows._root, rows._hidden, rows.recent)
        shape = self.forward.shape if drafts.shape is None else drafts.shape
        assert shape is not None, "the proposer has no tree, and proposed none"
        if drafts.void is not None:
            shape = dataclasses.replace(shape, void=drafts.void)
        logits, hidden = rows._session.verify(drafts.tokens, drafts.shape)
        node, root = self.acceptance.judge(drafts.tokens, logits, shape, rows._generator)  # [B], [B]
        tokens, roots, paths = self._told(drafts, root, node)
        rows._session.keep(paths)
        steps = [[row[i] for i in path] for row, path in zip(tokens, paths, strict=True)]
        rows.advance_(steps, roots, root, pick(hidden, [path[-1] for path in paths]))
        return steps

    def _told(self, drafts: Drafts, root: Tensor, node: Tensor) -> tuple[list[list[int]], list[int], list[NodePath]]:
        """By one transfer to the host: each row's tokens (and more), its next root, its path to the accepted node."""
        columns = [drafts.tokens, root[:, None], node[:, None]]
        if drafts.shape is not None:
            columns.append(drafts.shape.parents.expand(drafts.tokens.shape))
        told: list[list[int]] = torch.cat(columns, dim=1).tolist()
        n = drafts.tokens.shape[1]
        roots, nodes = [row[n] for row in told], [row[n + 1] for row in told]
        if drafts.shape is None:
            return told, roots, [self.forward.paths[node] for node in nodes]
        return told, roots, [_path_to(node, row[n + 2 :]) for row, node in zip(told, nodes, strict=True)]


def _path_to(node: int, parents: Sequence[int]) -> NodePath:
    """The nodes from the root to a node."""
    path = [node]
    while path[0] != ROOT:
        path.insert(0, parents[path[0]])
    return tuple(path)


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
    if not isinstance(ids, Tensor) and (isinstance(ids, (str, bytes)) or not hasattr(ids, "__len__")):
        raise ValueError(f"a prompt is token ids, and not {type(ids).__name__}")
    alone = isinstance(ids, Tensor) or not any(isinstance(one, Sequence) or getattr(one, "ndim", 0) for one in ids)
    listed: Any = [ids] if alone else ids
    return [_one_prompt(one, base) for one in listed], alone


def _one_prompt(ids: Prompt, base: Base) -> Tensor:
    """The ids as int64 [T] on the model's device; ValueError where they are no token ids of one text."""
    try:
        prompt = torch.as_tensor(ids, device=base.device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"not token ids of one text: {first_line(error)}") from error
    if prompt.ndim == 2 and len(prompt) == 1:
        prompt = prompt[0]
    if prompt.ndim != 1 or (prompt.dtype not in _INTEGERS and len(prompt)):
        raise ValueError(
            f"token ids are {prompt.dtype} {list(prompt.shape)}, not integers [T] or [1, T]; a batch is a list of them"
        )
    if len(prompt) and not 0 <= int(prompt.min()) <= int(prompt.max()) < base.vocab_size:
        raise ValueError(f"a token id lies outside the vocabulary of {base.vocab_size}")
    return prompt.long()
