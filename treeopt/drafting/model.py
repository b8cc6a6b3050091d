"""The drafters `model` and `model+ngram`: a draft model proposes the tokens, one forward for each level of the tree.

The draft model's log-probabilities are the first term of a candidate's score; with `model+ngram` the n-gram table and
the text so far give the others, as for heads. In tracing, the logits along the true tokens come from one pass over each
text; per-step trees are expanded as in decoding, from a copy of the cache for each position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeopt.drafter import Drafter
from treeopt.drafting.interface import (
    Bools,
    Drafts,
    Expansion,
    Features,
    Floats,
    Ints,
    Observed,
    SizeLimits,
)
from treeopt.drafting.kernel.data import MAX_PARENTS, KernelSource
from treeopt.drafting.kernel.session import KernelRows, top_logprobs
from treeopt.drafting.kernel.trees import NO_TOKEN, Grown, Ranked, rank_rows
from treeopt.drafting.ngram import check_drafter
from treeopt.models.base import Base
from treeopt.models.compatibility import check_draft
from treeopt.models.logits import rows_at_once
from treeopt.verify.buffers import Buffers
from treeopt.verify.levels import LevelSession, static_levels
from treeopt.verify.probe import check_trees
from treeopt.verify.session import pick

DRAFT_MODEL_SOURCE = "draft model"  # a name of `ProposerSession.sources`
_WHOLE_TEXT = 1 << 30  # tokens
_PIECE = 512  # tokens of a text that are run at once


class ModelProposer(KernelSource):
    """A draft model as a drafter.

    Args:
        base: the base model.
        draft: the draft model, on any device.
        drafter: the record, which names the draft model by its id.

    Raises:
        TreeoptError: E213 where the draft model has another tokenizer, E223 where the record needs none or is of
            another vocabulary, E502 where the draft model cannot attend to a tree.
    """

    window = _WHOLE_TEXT

    def __init__(self, base: Base, draft: Base, drafter: Drafter) -> None:
        check_draft(base, draft)
        check_drafter(drafter, base, None, draft)
        check_trees(draft)
        read = drafter.top if drafter.ngram_table is None else drafter.top_logprobs or base.vocab_size
        known = min(base.vocab_size, draft.vocab_size, max(drafter.top, read))
        super().__init__(drafter, base.vocab_size, known, DRAFT_MODEL_SOURCE, f"the model {draft.name}")
        self.base, self.draft = base, draft
        self.rows_at_once = rows_at_once(draft.vocab_size, MAX_PARENTS)
        self._along: tuple[list[list[int]], Observed] | None = None

    def start(
        self, texts: Sequence[Sequence[int]], depth: int, ends: Sequence[Sequence[int]] | None = None
    ) -> ModelSession:
        return ModelSession(self, texts, depth) if ends is None else TracedModel(self, texts, depth, ends)

    def pack(self, logits: Tensor) -> Observed:
        """`top_logprobs` of the draft model's logits on the host: [..., V] -> int32 [..., 2 K + 1]."""
        others = self.drafter.ngram_table is not None  # else all candidates are among the likeliest
        return top_logprobs(logits[..., : self.vocab_size], self.known, others=others).numpy(force=True)

    def ids(self, tokens: Ints) -> Tensor:
        """Tokens of the base on the draft model's device; those that it does not have are its last one."""
        return torch.from_numpy(tokens.clip(0, self.draft.vocab_size - 1)).to(self.draft.device)

    def along(self, texts: Sequence[Sequence[int]]) -> Observed:
        """`pack` after every token of the texts: int32 [T, n, 2 K + 1]; those of the last texts are stored."""
        known = [list(text) for text in texts]
        if self._along is None or self._along[0] != known:
            self._along = known, self._pass(known)
        return self._along[1]

    @torch.inference_mode()
    def _pass(self, texts: Sequence[Sequence[int]]) -> Observed:
        """One pass over the texts, a few tokens at a time."""
        session, longest = LevelSession(self.draft, len(texts)), max(map(len, texts))
        padded = _padded(texts)
        at_once = min(_PIECE, rows_at_once(self.draft.vocab_size, len(texts)))
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


class ModelSession(KernelRows):
    """Drafting of a batch by a draft model; arguments as `KernelRows`."""

    source: ModelProposer

    def __init__(
        self,
        proposer: ModelProposer,
        texts: Sequence[Sequence[int]],
        depth: int,
        ends: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(proposer, texts, depth, ends)
        self._model = LevelSession(proposer.draft, len(texts))
        if ends is None:
            self._prefill([text[:-1] for text in texts])

    def _prefill(self, texts: Sequence[Sequence[int]]) -> None:
        """Run the texts, a piece at a time: a mask of a whole text by itself takes much memory."""
        for first in range(0, max(map(len, texts)), _PIECE):
            self._append([text[first : first + _PIECE] for text in texts], logits_to_keep=1)

    def _append(self, tokens: Sequence[Sequence[int] | Ints], *, logits_to_keep: int = 0) -> Tensor:
        """Append tokens to each text; logits as by `LevelSession.append`."""
        logits = self._model.append(self.source.ids(_padded(tokens)), logits_to_keep=logits_to_keep)
        self._model.keep([length + len(row) for length, row in zip(self._model.lengths, tokens, strict=True)])
        return logits

    def begin(self, roots: Tensor, states: Tensor) -> None:
        self._root = self.source.pack(self.advance()[:, None])

    def advance(self) -> Tensor:
        """Run the new tokens of the texts; logits [B, V_draft] after each root."""
        # The root is run again where a step is begun twice.
        cached = [min(length, end - 1) for length, end in zip(self._model.lengths, self._end.tolist(), strict=True)]
        self._model.keep(cached)
        new = self.after(cached)
        return pick(self._append(new), [len(tokens) - 1 for tokens in new])

    def after(self, first: Sequence[int]) -> list[Ints]:
        """For each row its tokens from a place on, the root the last; `first` is that place."""
        rows = zip(self._text.tolist(), first, self._end.tolist(), strict=True)
        return [self._texts.tokens[text, start:end] for text, start, end in rows]

    def follow(self, tokens: Tensor, depth: int) -> Tensor:
        """Run one more token of a chain below each root, int64 [B], with `depth` others before it; logits [B, V]."""
        device = self.source.draft.device
        depths = torch.arange(depth + 1, device=device)[None]
        visible = torch.ones(1, 1, depth + 1, dtype=torch.bool, device=device)
        ids = tokens.to(device).clamp(0, self.source.draft.vocab_size - 1)
        return self._model.extend(ids[:, None], depths, visible)[:, 0]

    def rank(self, seen: Observed, paths: Ints, most: int) -> Ranked:
        """Rank the candidates of n nodes of one depth, at most `most` of each.

        `seen` int32 [B, n, 2 K + 1] packs the logits after the nodes, whose drafts are `paths` int64 [B, n, depth].
        """
        self.set_step(seen)
        shape = (*paths.shape[:2], most)
        ranked = Ranked(np.zeros(shape, np.int64), np.zeros(shape, np.float32))
        self.in_threads(lambda kernel, part: rank_rows(kernel, *part, paths, ranked))
        return ranked

    def fill(self, roots: Tensor, states: Tensor, tree: Buffers) -> Drafts:
        self.begin(roots, states)
        rows, seen = len(roots), self._root
        paths: Ints = np.zeros((rows, 1, 0), np.int64)
        lost = np.zeros((rows, 1), np.bool_)  # of the parents
        tokens: list[Ints] = []
        void: list[Bools] = []
        for level in static_levels(tree, self.source.draft.device):
            of, most = level.of, int(level.of.ranks.max()) + 1
            ranked = self.rank(seen, paths, most)
            tokens.append(ranked.tokens[:, of.parents, of.ranks])
            void.append(np.isneginf(ranked.log_probability[:, of.parents, of.ranks]) | lost[:, of.parents])
            if len(of.inner):
                inner = tokens[-1][:, of.inner]
                paths = np.concatenate([paths[:, of.parents[of.inner]], inner[:, :, None]], axis=2)
                lost = void[-1][:, of.inner]
                logits = self._model.extend(self.source.ids(inner), level.depths, level.visible)
                seen = self.source.pack(logits)
        if not tokens:
            return Drafts(roots[:, None], tree)
        drafts = torch.from_numpy(np.concatenate(tokens, axis=1)).to(roots.device)
        missing = np.concatenate(void, axis=1)
        with_void = None
        if missing.any():
            with_void = torch.from_numpy(np.pad(missing, ((0, 0), (1, 0)))).to(roots.device)
        return Drafts(torch.cat([roots[:, None], drafts], dim=1), tree, with_void)

    def grow(self, roots: Tensor, states: Tensor, limits: SizeLimits) -> Drafts:
        self.begin(roots, states)
        grown = self._grown(limits.sizes[-1], limits.depth).grown(limits)
        nodes = min(int(grown.size.max()), int(grown.drafts.max()) + 1)
        return self.compile(grown, nodes, limits.depth, roots)

    def _grown(self, nodes: int, depth: int) -> GrownLevels:
        """The likeliest nodes of each row's tree, a level at a time."""
        device = self.source.draft.device
        grown = GrownLevels(len(self._end), nodes, self.source.num_candidates)
        grown.add(self.rank(self._root, grown.paths, grown.most))
        while grown.depth < depth and grown.expand():
            new = torch.from_numpy(grown.visible).to(device)
            depths = torch.from_numpy(grown.depths_of_parents).to(device)
            logits = self._model.extend(self.source.ids(grown.tokens_of_parents), depths, new)
            grown.add(self.rank(self.source.pack(logits), grown.paths, grown.most))
        return grown

    def expand(self, nodes: int, depth: int) -> Expansion:
        return self._grown(nodes, depth).expansion()

    def trace(self, true: Ints, *, confidence: bool = False) -> tuple[Ints, Floats]:
        self.set_step(self._after_true(true[:, :-1]))
        return super().trace(true, confidence=confidence)

    def candidates(self, true: Ints, count: int) -> Ints:
        self.set_step(self._after_true(true[:, :-1]))
        return super().candidates(true, count)

    def sources(self, true: Ints) -> list[list[dict[str, int]]]:
        self.set_step(self._after_true(true[:, :-1]))
        return super().sources(true)

    def features(self, true: Ints) -> Features:
        self.set_step(self._after_true(true))
        return super().features(true)

    def _after_true(self, true: Ints) -> Observed:
        """`ModelProposer.pack` after each root and after each true token [B, n] below it: int32 [B, n + 1, 2 K + 1]."""
        if not true.shape[1]:
            return self._root
        self._model.keep(self._model.lengths)  # nodes of a tree before
        below = self.source.pack(self._model.append(self.source.ids(true)))
        self._model.keep(self._model.lengths)  # the tokens are not text yet
        along: Observed = np.concatenate([self._root, below], axis=1)
        return along

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._model.select(rows)

    def rewind(self, mark: Any) -> None:
        """As `ProposerSession.rewind`. The last tokens are run again, as many as a step can have accepted before.

        So a step that is timed again and again does what a step of decoding does, at its most.
        """
        super().rewind(mark)
        lengths = zip(self._model.lengths, self._end.tolist(), strict=True)
        self._model.keep([max(0, min(length, end - 1 - self.depth)) for length, end in lengths])


class TracedModel(ModelSession):
    """Positions of finished texts as rows, whose logits along the text come from one pass over each text."""

    def __init__(
        self, proposer: ModelProposer, texts: Sequence[Sequence[int]], depth: int, ends: Sequence[Sequence[int]]
    ) -> None:
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
            self._model = LevelSession(self.source.draft, len(self._given))
        self._prefill(self._given)
        self._model.branch(self._text.tolist(), self._end.tolist())
        return super().expand(nodes, depth)

    def _after_true(self, true: Ints) -> Observed:
        seen: Observed = self._seen
        return seen


class GrownLevels:
    """The likeliest nodes of each row. `add` takes a level's candidates, `expand` chooses the parents of the next one.

    The nodes are those of `treeopt.drafting.kernel.trees.grow_row`, which grows the same tree node by node: at each
    depth the likeliest nodes become parents, at most `MAX_PARENTS`, unless N others are likelier (EAGLE-2).

    Attributes:
        most: the number of candidates that are needed of each node.
        depth: of the nodes that were added last.
        paths: int64 [B, p, depth], the drafts of the current parents, at first the roots.
        tokens_of_parents: int64 [B, p], the last of them.
        visible: bool [B, p, M], which of the M expanded nodes each of the last p descends from, itself included.
        depths_of_parents: int64 [1, M], depths of the expanded nodes; 0 is right below the root.
    """

    def __init__(self, rows: int, nodes: int, num_candidates: int) -> None:
        self.most = min(max(1, nodes - 1), num_candidates)
        self._count = nodes - 1
        self.depth = 0
        self.paths: Ints = np.zeros((rows, 1, 0), np.int64)
        self.visible: Bools = np.zeros((rows, 1, 0), np.bool_)
        self.depths_of_parents: Ints = np.zeros((1, 0), np.int64)
        self._known: Floats = np.full((rows, max(1, self._count)), -np.inf, np.float32)
        self._likely: Floats = np.zeros((rows, 1), np.float32)  # of the current parents
        self._numbers: Ints = np.zeros((rows, 1), np.int64)  # theirs among all added nodes; 0 the root
        self._made = 1
        self._levels: list[tuple[Ints, Ints, Floats, Ints]] = []  # tokens, parents' numbers, likelihood, parents' slots

    def add(self, ranked: Ranked) -> None:
        """Add the candidates of the current parents."""
        rows, _, width = ranked.tokens.shape
        likely = (self._likely[:, :, None] + ranked.log_probability).reshape(rows, -1)
        order = np.argsort(-likely, axis=1, kind="stable")[:, : self._count]
        each = np.arange(rows)[:, None]
        slots = order // width
        self._levels.append(
            (ranked.tokens.reshape(rows, -1)[each, order], self._numbers[each, slots], likely[each, order], slots)
        )
        self._known = -np.sort(-np.concatenate([self._known, likely[each, order]], axis=1), axis=1)[:, : self._count]
        self.depth += 1

    def expand(self) -> bool:
        """Make the likeliest of the added nodes parents; False where no child of any can be among the likeliest."""
        tokens, _, likely, slots = self._levels[-1]
        first = self._made
        self._made += tokens.shape[1]
        if not self._count or not tokens.shape[1]:
            return False
        # A child is at most as likely as its parent; of equally likely nodes the one nearer to the root is kept.
        promising = int((likely > self._known[:, -1:]).sum(1).max())
        parents = min(promising, MAX_PARENTS)
        if not parents:
            return False
        each = np.arange(len(tokens))[:, None]
        chosen = slots[:, :parents]
        self.tokens_of_parents: Ints = tokens[:, :parents]
        self.paths = np.concatenate([self.paths[each, chosen], self.tokens_of_parents[:, :, None]], axis=2)
        above = self.visible[each, chosen]
        more = self.depths_of_parents.shape[1] - above.shape[2]
        above = np.pad(above, ((0, 0), (0, 0), (0, more)))
        itself = np.broadcast_to(np.eye(parents, dtype=np.bool_), (len(tokens), parents, parents))
        self.visible = np.concatenate([above, itself], axis=2)
        depths = np.full((1, parents), self.depth - 1)
        self.depths_of_parents = np.concatenate([self.depths_of_parents, depths], axis=1)
        self._likely = likely[:, :parents]
        self._numbers = np.broadcast_to(np.arange(first, first + parents), (len(tokens), parents))
        return True

    def expansion(self) -> Expansion:
        """The likeliest nodes of each row; of equally likely ones those nearer to the root first."""
        tokens, parents, likely = (
            np.concatenate([level[part] for level in self._levels], axis=1) for part in (0, 1, 2)
        )
        depths = np.repeat(np.arange(1, len(self._levels) + 1), [level[0].shape[1] for level in self._levels])
        order = np.argsort(-likely, axis=1, kind="stable")[:, : self._count]
        real = int(np.isfinite(np.take_along_axis(likely, order, 1)).sum(1).max(initial=0))
        order = order[:, :real]
        each = np.arange(len(tokens))[:, None]
        numbers = np.zeros((len(tokens), tokens.shape[1] + 1), np.int64)
        numbers[each, order + 1] = np.arange(1, real + 1)
        chosen = likely[each, order]
        absent = np.isneginf(chosen)
        return Expansion(
            np.where(absent, NO_TOKEN, tokens[each, order]),
            np.where(absent, 0, numbers[each, parents[each, order]]),
            np.where(absent, 1, depths[order]),
            chosen,
        )

    def grown(self, limits: SizeLimits) -> Grown:
        """The expansion, with the size of each row that has the most estimated tokens - cost."""
        found = self.expansion()
        drafts = np.isfinite(found.log_probability).sum(1)
        total = 1 + np.cumsum(np.exp(found.log_probability.astype(np.float64)), axis=1)
        total = np.concatenate([np.ones((len(total), 1)), total], axis=1)
        sizes = np.array(limits.sizes)
        at = np.minimum(sizes - 1, total.shape[1] - 1)
        value = total[:, at].astype(np.float32) - np.array(limits.cost or (0.0,))
        return Grown(found.tokens, found.parents, found.depths, found.log_probability, drafts, sizes[value.argmax(1)])
