"""Scores of candidates, from a drafter record, the heads' logits and the tokens before each draft.

Scores are computed by numpy on the host for every device. A level takes about thirty operations on small arrays, which
are slower in torch on a CPU, and would be a kernel launch each on a GPU (docs/method.md). Only the heads' logits are
transferred.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from numpy_draft.levels import Candidates, Nodes
from numpy_draft.votes import Votes
from treeopt.drafter import CACHE_LENGTHS, MAX_MATCH, Drafter
from treeopt.drafting.interface import Features, Floats, Ints
from treeopt.models.logits import top_ids
from treeopt.ngram_table import CONTEXT, context_keys

_NOWHERE = -2  # differs from every token, and from the -1 before the start of a text


@dataclass(frozen=True, eq=False)
class Step:
    """The arrays of one step of B rows, made before its first level.

    Args:
        logits: float32 [H', B, V], of the heads, or of the LM head in their place.
        norms: float32 [H', B], their logsumexp.
        top: int64 [H', B, M], their likeliest tokens, the likeliest first.
        past: int64 [B, R - 1 + depth], the last tokens before the root, then `depth` entries without a token.
        after: int64 [B, R + depth], the last tokens with the root, then `depth` copies of the root.
        root: the roots as nodes.
        frequent: for an empty n-gram table, the row of the empty context for each text: tokens int32 [B, S] and ratios
            float32 [B, S + 1], the last the backoff; None otherwise.
    """

    logits: Floats
    norms: Floats
    top: Ints
    past: Ints
    after: Ints
    root: Nodes
    frequent: tuple[NDArray[np.int32], Floats] | None


class Scorer:
    """Scores of a drafter record, independent of any text.

    The state of its nodes is (context, matched). `context` is int64 [P, CONTEXT], the last tokens of the path to each
    node, in reverse order. `matched` is float32 [P, R - 1]: for position j of the text, 1 + the number of tokens up to
    position j + depth that equal the last tokens of the path.

    Attributes:
        drafter: the record.
        window: the maximum number of last tokens of a text that it reads, the root included.
        logit_levels: H', the number of levels with logits, of heads or of the LM head.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.window = max(drafter.window, CONTEXT) if drafter.ngram_table else 1
        self.logit_levels = drafter.num_heads or drafter.lm_head_levels
        # Matches grow by one a level; those beyond MAX_MATCH have its weight. The index is 1 + length.
        beyond = drafter.depth + 1
        self._lookup_weight = np.array(
            [(0.0, 0.0, *level.prompt_lookup, *level.prompt_lookup[-1:] * beyond) for level in drafter.levels],
            np.float32,
        )
        self._cache_weight = np.array([(0.0, *level.cache) for level in drafter.levels], np.float32)
        self._uses_cache = bool(drafter.voted or self._cache_weight.any())
        # Number of CACHE_LENGTHS that are at most a match's length, by 1 + length.
        longest = MAX_MATCH + beyond + 1
        self._kinds = np.searchsorted(CACHE_LENGTHS, np.arange(-1, longest), side="right")
        successors = drafter.ngram_table.tokens.shape[1] if drafter.ngram_table else 0
        self._slots = np.arange(drafter.top + successors + 1 + drafter.voted)  # in small vocabularies some repeat
        self._recency = np.arange(self.window - 1, dtype=np.float32)
        self._maps = [np.array(level.calibration_map, np.float64).T for level in drafter.levels]
        table = drafter.ngram_table
        if table is None:
            return
        # Key 0, which no context has, is that of row 0; the last key keeps the result of a search in range.
        self._keys = np.concatenate([[0], table.keys, [np.iinfo(np.int64).max]])
        self._tokens, self._prior = table.tokens, table.unigram.astype(np.float32)
        # The ratios of a row, then its backoff.
        self._ratios = np.concatenate([table.ratios, table.backoff[:, None]], axis=1).astype(np.float32)
        extra = drafter.top if drafter.num_heads and not table.empty else 0
        self._frequent = np.argsort(-self._prior, kind="stable")[:extra]

    def begin(self, logits: Tensor, recent: Ints, depth: int) -> Step:
        """Prepare a step of every row.

        Args:
            logits: float [H', B, V], of the first min(depth, H') levels, or [1, B, V] where they are the same for all.
            recent: int64 [B, R], the last tokens, the root last; -1 where there are none.
            depth: levels of the step.
        """
        table = self.drafter.ngram_table
        top = top_ids(logits, min(self.drafter.top, logits.shape[-1]))
        scores = logits.float()
        norms = scores.logsumexp(-1)
        if (
            0 < (known := max(self.drafter.top, self.drafter.top_logprobs)) < logits.shape[-1]
            and self.drafter.top_logprobs
        ):
            others = torch.ones(scores.shape, dtype=torch.bool).scatter_(-1, top_ids(logits, known), False)
            rest = scores.masked_fill(~others, -torch.inf).logsumexp(-1, keepdim=True)
            scores = torch.where(others, rest - math.log(logits.shape[-1] - known), scores)
        roots = recent[:, -1:]
        past = np.full((len(recent), recent.shape[1] - 1 + depth), _NOWHERE)
        past[:, : recent.shape[1] - 1] = recent[:, :-1]
        state = recent[:, -1 : -CONTEXT - 1 : -1], self._matched(recent)
        levels = min(depth, self.logit_levels)
        return Step(
            logits=_for_levels(scores, levels),
            norms=_for_levels(norms, levels),
            top=_for_levels(top, levels),
            past=past,
            after=np.concatenate([recent, np.repeat(roots, depth, axis=1)], axis=1),
            root=Nodes(0, np.arange(len(recent)), state),
            frequent=self._frequent_tokens(recent) if table is not None and table.empty else None,
        )

    def _frequent_tokens(self, recent: Ints) -> tuple[NDArray[np.int32], Floats]:
        """The most frequent tokens of each text, and their ratios to the uniform distribution, then the backoff."""
        prior, size, width = self.drafter.cache_prior, len(self._prior), self._tokens.shape[1]
        tokens = np.empty((len(recent), width), np.int32)
        ratios = np.empty((len(recent), width + 1), np.float32)
        for row, text in enumerate(recent):
            found, counts = np.unique(text[text >= 0], return_counts=True)
            total = counts.sum() + prior
            most = (-counts).argsort(kind="stable")[:width]
            others = np.setdiff1d(np.arange(min(size, width + len(found))), found)  # enough to fill the row
            tokens[row] = np.append(found[most], others)[:width]
            ratios[row] = np.log(prior / total)
            ratios[row, : len(most)] = np.log((counts[most] * size + prior) / total)
        return tokens, ratios

    def _matched(self, recent: Ints) -> Floats:
        """1 + the number of tokens (at most `MAX_MATCH`) up to each position that equal the last ones: [B, R - 1]."""
        width = recent.shape[1]
        matched = np.ones((len(recent), width - 1), np.float32)
        if not self.drafter.window:
            return matched
        last = recent[:, -1:]
        row, place = ((recent[:, :-1] == last) & (last >= 0)).nonzero()
        flat = recent.ravel()
        start, end = row * width, row * width + width - 1  # of each row in `flat`
        for back in range(1, MAX_MATCH + 1):
            if not len(row):
                break
            matched[row, place] = 1 + back
            before = np.maximum(place - back, 0)
            tokens = flat.take(start + before)
            longer = (tokens == flat.take(end - back)) & (tokens >= 0) & (place >= back)
            row, place, start, end = row[longer], place[longer], start[longer], end[longer]
        return matched

    def follow(self, step: Step, nodes: Nodes, parents: Ints, tokens: Ints) -> Nodes:
        """Children of nodes as nodes; arguments as for `LevelSession.follow`."""
        depth, row = nodes.depth + 1, nodes.row.take(parents)
        above, matched = nodes.state
        if self.drafter.ngram_table is None:
            return Nodes(depth, row, (tokens[:, None], matched.take(parents, 0)))
        context = np.empty((len(parents), CONTEXT), np.int64)
        context[:, 0] = tokens
        context[:, 1:] = above[:, :-1].take(parents, 0)
        if self.drafter.window:
            places = step.past[:, depth : depth + matched.shape[1]].take(row, 0)
            matched = matched.take(parents, 0) * (places == tokens[:, None]) + np.float32(1)
        else:
            matched = matched.take(parents, 0)
        return Nodes(depth, row, (context, matched))

    def candidates(self, step: Step, nodes: Nodes) -> Candidates:
        """Candidates of each node by descending score; equal scores in the order of `Features`."""
        level = self.drafter.levels[nodes.depth]

        def estimate(scores: Floats) -> Floats:
            return self.log_probability(nodes.depth, scores)

        if self.drafter.ngram_table is None:
            tokens = step.top[nodes.depth].take(nodes.row, 0)
            return Candidates(tokens, self._head(step, nodes, tokens) * np.float32(level.head), estimate)
        found = self._features(step, nodes, cache=self._uses_cache)
        scores = found.prior * np.float32(level.prior)
        if nodes.depth < len(step.logits):
            scores += found.head * np.float32(level.head)
        scores += found.ratios * np.float32(level.ngram)
        scores += found.cache * self._cache_weight[nodes.depth].take(found.found)[:, None]
        scores += found.prompt_lookup * self._lookup_weight[nodes.depth].take(found.length + 1)[:, None]
        scores[found.repeated] = -np.inf
        order = _flat((-scores).argsort(1, kind="stable"), scores.shape[1])
        return Candidates(found.tokens.take(order), scores.take(order), estimate)

    def log_probability(self, depth: int, scores: Floats) -> Floats:
        """Estimated log-probability of candidates: scores [P, C] of the children of nodes of one depth -> [P, C]."""
        level = self.drafter.levels[depth]
        highest = np.maximum(scores.max(1, keepdims=True), np.float32(level.other_logit))
        shares = np.exp(scores - highest)
        total = shares.sum(1, keepdims=True) + np.exp(np.float32(level.other_logit) - highest)
        if not level.calibration_map:
            softmax: Floats = scores - highest - np.log(total)
            return softmax
        with np.errstate(divide="ignore"):  # log-odds of 0 and 1 are infinite, beyond the first and last pair
            log_odds = np.log(shares) - np.log(total - shares)
        mapped = np.interp(log_odds, *self._maps[depth]).astype(np.float32)
        likely: Floats = np.where(np.isneginf(scores), np.float32(-np.inf), -np.logaddexp(np.float32(0), -mapped))
        return likely

    def features(self, step: Step, nodes: Nodes) -> Features:
        """The features of the head's top, the context's successors, and the token after the latest longest match."""
        if self.drafter.ngram_table is None:
            return self._head_features(step, nodes)
        return self._features(step, nodes, cache=True)

    def _features(self, step: Step, nodes: Nodes, *, cache: bool) -> Features:
        """The features with an n-gram table; without `cache` its term is 0."""
        context, matched = nodes.state
        top = step.top[nodes.depth].take(nodes.row, 0) if nodes.depth < len(step.top) else self._frequent
        if step.frequent is None:
            row = self._rows(context)
            successors, ratios = self._tokens.take(row, 0), self._ratios.take(row, 0)
        else:
            frequent, frequent_ratios = step.frequent
            successors, ratios = frequent.take(nodes.row, 0), frequent_ratios.take(nodes.row, 0)
        # The longest match, of equally long ones the latest: positions are below R, so one number holds both.
        latest = (matched * np.float32(self.window) + self._recency[: matched.shape[1]]).argmax(1)
        length = matched.max(1).astype(np.int64) - 1
        votes = self._votes(step, nodes) if cache else Votes.none(len(latest))
        first, last = top.shape[-1], top.shape[-1] + successors.shape[1]
        tokens = np.empty((len(latest), last + 1 + self.drafter.voted), np.int64)
        tokens[:, :first] = top
        tokens[:, first:last] = successors
        # Without a match this is a copy of the root, with weight 0.
        tokens[:, last] = step.after.take(nodes.row * step.after.shape[1] + latest + (nodes.depth + 1))
        if self.drafter.voted:
            tokens[:, last + 1 :] = votes.likeliest(tokens[:, last], self.drafter.voted)
        same = tokens[:, :, None] == tokens[:, None, :]  # [P, C, C]
        repeated = same.argmax(2) != self._slots[: tokens.shape[1]]  # an earlier candidate is equal
        looked_up = same[:, last].copy()
        same[:, :, last] = True  # a token that is not among the successors has the last ratio, the backoff
        ratio = ratios.take(_flat(same[:, :, first : last + 1].argmax(2), ratios.shape[1]))
        prior = self._prior.take(tokens)
        return Features(
            tokens=tokens,
            repeated=repeated,
            head=self._head(step, nodes, tokens),
            prior=prior,
            ratios=ratio,
            prompt_lookup=looked_up,
            length=length,
            cache=votes.log_ratio(tokens, prior + ratio),
            found=votes.found,
        )

    def _votes(self, step: Step, nodes: Nodes) -> Votes:
        """The votes of the places in the text where the last tokens of each path occurred before."""
        matched = nodes.state[1]
        node, place = (matched > 1).nonzero()
        kind = self._kinds.take(matched.take(node * matched.shape[1] + place).astype(np.int64))
        after = step.after.take(nodes.row.take(node) * step.after.shape[1] + place + (nodes.depth + 1))
        return Votes.of(node, kind, after, len(matched), self.drafter.cache_prior)

    def _head_features(self, step: Step, nodes: Nodes) -> Features:
        """The features without an n-gram table: the head's log-probability is the only term."""
        tokens = step.top[nodes.depth].take(nodes.row, 0)
        head, zeros = self._head(step, nodes, tokens), np.zeros(tokens.shape, np.float32)
        false = np.zeros(tokens.shape, np.bool_)
        none = np.zeros(len(tokens), np.int64)
        return Features(tokens, false, head, zeros, zeros, false, none, zeros, none)

    def _rows(self, context: Ints) -> Ints:
        """Row of the longest stored context: int64 [P, CONTEXT] -> [P]."""
        keys = context_keys(context)
        places = self._keys.searchsorted(keys)
        rows: Ints = (places * (self._keys.take(places) == keys)).max(1)  # rows of longer contexts have larger indices
        return rows

    def _head(self, step: Step, nodes: Nodes, tokens: Ints) -> Floats:
        """Log-probabilities of tokens [P, C] by the level's head."""
        if nodes.depth >= len(step.logits):
            return np.zeros(tokens.shape, np.float32)
        logits, norms = step.logits[nodes.depth], step.norms[nodes.depth]
        found: Floats
        if len(logits) == 1:
            found = logits[0].take(tokens) - norms[0]
        else:
            found = logits[nodes.row[:, None], tokens] - norms.take(nodes.row)[:, None]
        return found


def _for_levels(values: Tensor, levels: int) -> NDArray[Any]:
    """A host array [levels, ...] from a tensor with as many levels, or with one for all."""
    host = values.numpy(force=True)
    return np.broadcast_to(host, (levels, *host.shape[1:]))


def _flat(columns: Ints, width: int) -> Ints:
    """Indices into a flattened array [P, width] of the columns [P, C] of each row; `take` is faster with these."""
    return columns + (np.arange(len(columns)) * width)[:, None]
