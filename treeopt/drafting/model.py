"""The drafters `model` and `model+ngram`: a draft model proposes the tokens, one forward for each level of the tree.

The draft model's log-probabilities are the first term of a candidate's score; with `model+ngram` the n-gram table and
the text so far give the others, as for heads. In tracing, the logits along the true tokens come from one pass over each
text; per-step trees are expanded as in decoding, from a copy of the cache for each position.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeopt.drafter import Drafter
from treeopt.drafting.interface import Bools, Drafts, Expansion, Floats, Ints, Observed, SizeLimits, TokenLists
from treeopt.drafting.kernel.data import MAX_PARENTS, KernelSource
from treeopt.drafting.kernel.session import KernelRows, top_logprobs
from treeopt.drafting.kernel.trees import NO_TOKEN, Ranked
from treeopt.drafting.ngram import check_drafter
from treeopt.models.base import Base
from treeopt.models.compatibility import check_draft
from treeopt.models.draft_module import StateModule, draft_reads
from treeopt.models.logits import rows_at_once
from treeopt.verify.buffers import Buffers
from treeopt.verify.probe import check_trees, levels_of
from treeopt.verify.session import pick

DRAFT_MODEL_SOURCE = "draft model"  # a name of `ProposerSession.sources`
_WHOLE_TEXT = 1 << 30  # tokens
PIECE = 512  # tokens of a text that are run at once
FIRST: Ints = np.zeros((1, 1), np.int64)  # the index of a single parent


class DraftSource(KernelSource):
    """A draft model or module, on any device, as the source of logits.

    E213 where it does not fit the base, E223 where the record needs none or is of another vocabulary.
    """

    beam = 0  # children of a node, and parents of a level, as in EAGLE-2; 0: as many as may be in the tree

    def __init__(self, base: Base, draft: Base, drafter: Drafter) -> None:
        check_draft(base, draft)
        check_drafter(drafter, base, None, draft)
        super().__init__(drafter, base.vocab_size, DRAFT_MODEL_SOURCE, f"the model {draft.name}")
        self.known = min(self.known, draft.vocab_size)
        self.base, self.draft, self.reads = base, draft, draft_reads(draft.model)
        found = draft.model.token_map if isinstance(draft.model, StateModule) else None
        self._tokens = None if found is None else found.numpy(force=True).astype(np.int32)

    def pack(self, logits: Tensor) -> Observed:
        """`top_logprobs` of logits on the host, with tokens of the base: [..., V_draft] -> int32 [..., 2 K + 1]."""
        others = self.drafter.ngram_table is not None  # else all candidates are among the likeliest
        packed = top_logprobs(logits[..., : self.vocab_size], self.known, others=others).numpy(force=True)
        if self._tokens is not None:
            packed[..., : self.known] = self._tokens[packed[..., : self.known]]
        return packed


class ModelProposer(DraftSource):
    """A draft model as a drafter. E502 where it cannot attend to a tree."""

    window = _WHOLE_TEXT

    def __init__(self, base: Base, draft: Base, drafter: Drafter) -> None:
        super().__init__(base, draft, drafter)
        check_trees(draft)
        self.rows_at_once = rows_at_once(draft.vocab_size, MAX_PARENTS)
        self._along: tuple[list[list[int]], Observed] | None = None

    def start(self, texts: TokenLists, depth: int, ends: TokenLists | None = None) -> ModelSession:
        return ModelSession(self, texts, depth) if ends is None else TracedModel(self, texts, depth, ends)

    def ids(self, tokens: Ints) -> Tensor:
        """Tokens of the base on the draft model's device; those that it does not have are its last one."""
        return torch.from_numpy(tokens.clip(0, self.draft.vocab_size - 1)).to(self.draft.device)

    def along(self, texts: TokenLists) -> Observed:
        """`pack` after every token of the texts: int32 [T, n, 2 K + 1]; those of the last texts are stored."""
        known = [list(text) for text in texts]
        if self._along is None or self._along[0] != known:
            self._along = known, self._pass(known)
        return self._along[1]

    @torch.inference_mode()
    def _pass(self, texts: TokenLists) -> Observed:
        """One pass over the texts, a few tokens at a time."""
        session, longest = levels_of(self.draft, len(texts)), max(map(len, texts))
        padded = _padded(texts)
        at_once = min(PIECE, rows_at_once(self.draft.vocab_size, len(texts)))
        parts = []
        for first in range(0, longest, at_once):
            part = padded[:, first : first + at_once]
            parts.append(self.pack(session.append(self.ids(part))))
            session.keep([first + part.shape[1]] * len(texts))
        return np.concatenate(parts, axis=1)


def _padded(rows: Sequence[Sequence[int] | Ints]) -> Ints:
    """int64 [B, n] of rows of tokens, then zeros."""
    padded: Ints = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded


class LevelRows(KernelRows):
    """A session whose logits below the root are known a level at a time, when the tokens of the level above are."""

    source: DraftSource
    _root: Observed  # int32 [B, 1, 2 K + 1], the packed logits after the roots, set by `begin`

    @abstractmethod
    def extend(self, tokens: Ints, parents: Ints) -> Tensor:
        """Logits [B, n, V_draft] after each token of the next level, int64 [B, n]; parents as of `LevelSession`."""

    def rank_after(self, seen: Observed, paths: Ints, most: int) -> Ranked:
        """As `rank`; `seen` int32 [B, n, 2 K + 1] packs the logits after the nodes."""
        self.set_step(seen)
        return self.rank(paths, np.arange(paths.shape[1]), most)

    def fill(self, roots: Tensor, states: Tensor, tree: Buffers) -> Drafts:
        self.begin(roots, states)
        rows, seen = len(roots), self._root
        paths: Ints = np.zeros((rows, 1, 0), np.int64)
        lost = np.zeros((rows, 1), np.bool_)  # of the parents
        tokens: list[Ints] = []
        void: list[Bools] = []
        for level in tree.levels:
            ranked = self.rank_after(seen, paths, int(level.ranks.max()) + 1)
            tokens.append(ranked.tokens[:, level.parents, level.ranks])
            void.append(np.isneginf(ranked.log_probability[:, level.parents, level.ranks]) | lost[:, level.parents])
            if len(level.inner):
                inner, above = tokens[-1][:, level.inner], level.parents[level.inner]
                paths = np.concatenate([paths[:, above], inner[:, :, None]], axis=2)
                lost = void[-1][:, level.inner]
                seen = self.source.pack(self.extend(inner, above[None]))
        if not tokens:
            return Drafts(roots[:, None], tree)
        drafts = torch.from_numpy(np.concatenate(tokens, axis=1)).to(roots.device)
        missing = np.concatenate(void, axis=1)
        with_void = None
        if missing.any():
            with_void = torch.from_numpy(np.pad(missing, ((0, 0), (1, 0)))).to(roots.device)
        return Drafts(torch.cat([roots[:, None], drafts], dim=1), tree, with_void)

    def grown(self, limits: SizeLimits) -> Expansion:
        """The likeliest nodes of each row's tree, a level at a time; those that `kernel.trees.grow_row` chooses.

        At each depth the likeliest become parents, at most `MAX_PARENTS`, unless N others are likelier. With a `beam`
        all of it do, and each has as many children (arXiv:2406.16858, section 4.1).
        """
        beam = self.source.beam
        rows, count = len(self._end), limits.sizes[-1] - 1
        each, most = np.arange(rows)[:, None], min(beam or max(1, count), self.source.num_candidates)
        seen, paths = self._root, np.zeros((rows, 1, 0), np.int64)
        above, likely = np.zeros((rows, 1), np.int64), np.zeros((rows, 1), np.float32)  # numbers and chances of parents
        levels: list[tuple[Ints, Ints, Ints, Floats]] = []  # tokens, parents, depths, chances
        known: Floats = np.full((rows, max(1, count)), -np.inf, np.float32)
        while True:
            ranked = self.rank_after(seen, paths, most)
            chances = (likely[:, :, None] + ranked.log_probability).reshape(rows, -1)
            order = np.argsort(-chances, axis=1, kind="stable")[:, : max(count, beam)]
            slots, chances = order // most, chances[each, order]
            tokens: Ints = ranked.tokens.reshape(rows, -1)[each, order]
            made = 1 + sum(level[0].shape[1] for level in levels)
            levels.append((tokens, above[each, slots], np.full_like(slots, len(levels) + 1), chances))
            known = -np.sort(-np.concatenate([known, chances], axis=1), axis=1)[:, : known.shape[1]]
            # A child is at most as likely as its parent; of equally likely nodes the one nearer to the root is kept.
            parents = min(int((chances > known[:, -1:]).sum(1).max()), MAX_PARENTS)
            if beam:
                parents = min(beam, int(np.isfinite(chances).sum(1).max()))
            if len(levels) == limits.depth or not parents:
                whole: list[Any] = [np.concatenate(parts, axis=1) for parts in zip(*levels, strict=True)]
                return _expansion(limits, *whole)
            slots, tokens, likely = slots[:, :parents], tokens[:, :parents], chances[:, :parents]
            paths = np.concatenate([paths[each, slots], tokens[:, :, None]], axis=2)
            above = np.broadcast_to(np.arange(made, made + parents), (rows, parents))
            seen = self.source.pack(self.extend(tokens, slots))


class ModelSession(LevelRows):
    """Drafting of a batch by a draft model; arguments as `KernelRows`."""

    source: ModelProposer
    first = 0  # the token of a text that the model's first row is

    def __init__(self, proposer: ModelProposer, texts: TokenLists, depth: int, ends: TokenLists | None = None) -> None:
        super().__init__(proposer, texts, depth, ends)
        self._model = levels_of(proposer.draft, len(texts))
        if ends is None:
            self.prefill([text[:-1] for text in texts])

    def prefill(self, texts: TokenLists) -> None:
        """Run the texts, a piece at a time: a mask of a whole text by itself takes much memory."""
        for first in range(0, max(map(len, texts)), PIECE):
            self._append([text[first : first + PIECE] for text in texts], logits_to_keep=1)

    def _append(self, tokens: Sequence[Sequence[int] | Ints], *, logits_to_keep: int = 0) -> Tensor:
        """Append tokens to each text; logits as by `LevelSession.append`."""
        return self.run(tokens, logits_to_keep)

    def run(self, tokens: Sequence[Sequence[int] | Ints], logits_to_keep: int, **inputs: Tensor) -> Tensor:
        """One forward over tokens that are then part of the texts."""
        logits = self._model.append(self.source.ids(_padded(tokens)), logits_to_keep=logits_to_keep, **inputs)
        self._model.keep([length + len(row) for length, row in zip(self._model.lengths, tokens, strict=True)])
        return logits

    def begin(self, roots: Tensor, states: Tensor) -> None:
        self._root = self.source.pack(self.advance()[:, None])

    def advance(self) -> Tensor:
        """Run the new tokens of the texts; logits [B, V_draft] after each root."""
        # The root is run again where a step is begun twice.
        ends, first = self._end.tolist(), self.first
        cached = [min(length, end - first - 1) for length, end in zip(self._model.lengths, ends, strict=True)]
        self._model.keep(cached)
        rows = zip(self._text.tolist(), cached, ends, strict=True)
        new = [self._texts.tokens[text, start + first : end] for text, start, end in rows]
        while max(map(len, new)) > PIECE:  # after many steps without drafts
            ends = [min(PIECE, len(tokens) - 1) for tokens in new]
            self._append([tokens[:end] for tokens, end in zip(new, ends, strict=True)], logits_to_keep=1)
            new = [tokens[end:] for tokens, end in zip(new, ends, strict=True)]
        return self._after_last(new, torch.tensor([len(row) - 1 for row in new], device=self.source.draft.device))

    def _after_last(self, tokens: Sequence[Sequence[int] | Ints], last: Tensor) -> Tensor:
        """Append tokens, of which `last` int64 [B] is each row's last; logits [B, V_draft] after it."""
        return pick(self._append(tokens), last)

    def extend(self, tokens: Ints, parents: Ints) -> Tensor:
        return self._model.extend(self.source.ids(tokens), parents)

    def follow(self, tokens: Tensor) -> Tensor:
        """Run one more token of a chain below each root, int64 [B]; logits [B, V]."""
        ids = self.source.ids(tokens.numpy(force=True))
        return self._model.extend(ids[:, None], FIRST)[:, 0]

    def prepare(self, true: Ints) -> None:
        if true.shape[1]:
            self._model.keep(self._model.lengths)  # nodes of a tree before
            below = self.source.pack(self._model.append(self.source.ids(true)))
            self._model.keep(self._model.lengths)  # the tokens are not text yet
            self.set_step(np.concatenate([self._root, below], axis=1))
        else:
            self.set_step(self._root)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._model.select(rows)

    def rewind(self, mark: Any) -> None:
        """As `ProposerSession.rewind`. The last tokens are run again, as many as a step can have accepted before.

        So a step that is timed again and again does what a step of decoding does, at its most.
        """
        super().rewind(mark)
        lengths = zip(self._model.lengths, self._end.tolist(), strict=True)
        self._model.keep([max(0, min(length, end - self.first - 1 - self.depth)) for length, end in lengths])


class TracedModel(ModelSession):
    """Positions of finished texts as rows, whose logits along the text come from one pass over each text."""

    def __init__(self, proposer: ModelProposer, texts: TokenLists, depth: int, ends: TokenLists) -> None:
        super().__init__(proposer, texts, depth, ends)
        self._given = texts
        # Beyond the end of a text the last logits are repeated; no token follows there.
        last = np.array([len(text) - 1 for text in texts])[self._text, None]
        places = np.minimum(self._end[:, None] - 1 + np.arange(depth), last)
        self._seen = proposer.along(texts)[self._text[:, None], places]

    def begin(self, roots: Tensor, states: Tensor) -> None:
        self.set_step(self._seen)
        self._root = self._seen[:, :1]

    def expand(self, nodes: int, depth: int) -> Expansion:
        self._model.keep([0] * len(self._model.lengths))
        if len(self._model.lengths) != len(self._given):
            self._model = levels_of(self.source.draft, len(self._given))
        self.prefill(self._given)
        self._model.branch(self._text.tolist(), self._end.tolist())
        return super().expand(nodes, depth)

    def prepare(self, true: Ints) -> None:
        self.set_step(self._seen)


def _expansion(limits: SizeLimits, tokens: Ints, parents: Ints, depths: Ints, likely: Floats) -> Expansion:
    """The likeliest of all nodes, of equally likely ones those nearer to the root first, and the best size."""
    order = np.argsort(-likely, axis=1, kind="stable")[:, : limits.sizes[-1] - 1]
    drafts = np.isfinite(np.take_along_axis(likely, order, 1)).sum(1)
    order = order[:, : drafts.max(initial=0)]
    each = np.arange(len(tokens))[:, None]
    numbers = np.zeros((len(tokens), tokens.shape[1] + 1), np.int64)
    numbers[each, order + 1] = np.arange(1, order.shape[1] + 1)
    chosen: Floats = likely[each, order]
    absent = np.isneginf(chosen)
    total = 1 + np.cumsum(np.exp(chosen.astype(np.float64)), axis=1)
    total = np.concatenate([np.ones((len(total), 1)), total], axis=1)
    sizes = np.array(limits.sizes)
    value = total[:, np.minimum(sizes, total.shape[1]) - 1].astype(np.float32) - np.array(limits.cost or (0.0,))
    return Expansion(
        np.where(absent, NO_TOKEN, tokens[each, order]),
        np.where(absent, 0, numbers[each, parents[each, order]]),
        np.where(absent, 1, depths[each, order]),
        chosen,
        drafts,
        sizes[value.argmax(1)],
    )
