"""Draft: the scores of the next drafts, given the heads' logits and the tokens before them.

The same code drafts at run time and ranks the true tokens when traces are measured, so the two cannot disagree. All
rows and all parents of a level go through each operation together. It runs in numpy on the host, whatever the model
runs on: a level is some thirty operations on small arrays, which cost four times as much in torch, and as many kernel
launches on a GPU (docs/method.md); only the heads' logits are fetched from there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from treeopt.drafter import CONTEXT, MAX_MATCH, Drafter, context_keys
from treeopt.models.ranks import top_ids

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
_NOWHERE = -2  # equals no token, and not the -1 before a text's begin


@dataclass(frozen=True, eq=False)
class Start:
    """What a step knows before its first level; B rows.

    Args:
        logits: float32 [H', B, V], of the heads.
        norms: float32 [H', B], log of the sum of their exponentials.
        top: int64 [H', B, M], the heads' likeliest tokens, the likeliest first.
        past: int64 [B, R - 1 + depth], the last tokens before the root, and room that holds none.
        after: int64 [B, R + depth], those with the root, and the root again for the room.
        root: the roots, whose children come first.
    """

    logits: Floats
    norms: Floats
    top: Ints
    past: Ints
    after: Ints
    root: Nodes


@dataclass(frozen=True, eq=False)
class Nodes:
    """P nodes, all of one depth, whose children are wanted.

    Args:
        depth: theirs; 0 is the root's.
        row: int64 [P], the row that each belongs to.
        context: int64 [P, CONTEXT], the last tokens on the way to each, its own first.
        matched: float32 [P, R - 1], for place j of the text 1 + how many tokens up to place j + depth are those that
            lead to the node.
    """

    depth: int
    row: Ints
    context: Ints
    matched: Floats


@dataclass(frozen=True, eq=False)
class Candidates:
    """C candidates of each of P nodes, and what speaks for each.

    Args:
        tokens: int64 [P, C].
        again: bool [P, C], the token stands among those before it too.
        head: float32 [P, C], log-probability by the level's head; 0 beyond the heads.
        prior: float32 [P, C], log of the token's frequency.
        ratios: float32 [P, C], by the transitions.
        prompt_lookup: bool [P, C], the token followed the latest longest match.
        length: int64 [P], tokens of that match.
    """

    tokens: Ints
    again: Bools
    head: Floats
    prior: Floats
    ratios: Floats
    prompt_lookup: Bools
    length: Ints


@dataclass(frozen=True, eq=False)
class Children:
    """Candidates of each of P nodes in order of their scores; of equal ones the first in the head's own order.

    Args:
        tokens: int64 [P, C], all different where the score is not -inf.
        scores: float32 [P, C]; -inf fills up.
        other_logit: score of all other tokens together.
    """

    tokens: Ints
    scores: Floats
    other_logit: float


class DraftModel:
    """A drafter made ready to draft.

    Attributes:
        drafter: the record.
        window: R, how many of a text's last tokens it wants to see, the root included.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.window = max(drafter.window, CONTEXT) if drafter.ngram_table else 1
        # Matches grow by one a level; those beyond MAX_MATCH weigh as it does. 1 + length is what nodes hold.
        beyond = drafter.depth + 1
        self._copied = np.array(
            [(0.0, 0.0, *level.prompt_lookup, *level.prompt_lookup[-1:] * beyond) for level in drafter.levels],
            np.float32,
        )
        self._recency = np.arange(self.window - 1, dtype=np.float32)
        self._odds = [np.array(level.calibration_map, np.float64).T for level in drafter.levels]
        table = drafter.ngram_table
        if table is None:
            return
        # Key 0, which no context has, stands for row 0; one behind all others keeps a search inside.
        self._keys = np.concatenate([[0], table.keys, [np.iinfo(np.int64).max]])
        self._tokens, self._prior = table.tokens, table.unigram.astype(np.float32)
        # A row's ratios, and its backoff behind them.
        self._ratios = np.concatenate([table.ratios, table.backoff[:, None]], axis=1).astype(np.float32)
        self._frequent = np.argsort(-self._prior, kind="stable")[: drafter.top]

    def begin(self, logits: Tensor, recent: Ints, depth: int) -> Start:
        """Prepare a step of every row.

        Args:
            logits: float [H', B, V], of the first min(depth, H) heads, at the states that chose the roots.
            recent: int64 [B, window], the last tokens with the root as the last; -1 where there are none.
            depth: levels that will be asked for.
        """
        top = top_ids(logits, min(self.drafter.top, logits.shape[-1]))
        scores = logits.float()
        norms = scores.logsumexp(-1)
        roots = recent[:, -1:]
        past = np.full((len(recent), recent.shape[1] - 1 + depth), _NOWHERE)
        past[:, : recent.shape[1] - 1] = recent[:, :-1]
        return Start(
            logits=scores.numpy(force=True),
            norms=norms.numpy(force=True),
            top=top.numpy(force=True),
            past=past,
            after=np.concatenate([recent, np.repeat(roots, depth, axis=1)], axis=1),
            root=Nodes(0, np.arange(len(recent)), recent[:, -1 : -CONTEXT - 1 : -1], self._matched(recent)),
        )

    def _matched(self, recent: Ints) -> Floats:
        """1 + how many tokens (`MAX_MATCH` at most) up to each place equal the last ones: [B, R] -> [B, R - 1]."""
        matched = np.ones((len(recent), recent.shape[1] - 1), np.float32)
        if not self.drafter.window:
            return matched
        going = np.ones(matched.shape, np.bool_)
        for back in range(min(MAX_MATCH, matched.shape[1])):
            last = recent[:, -1 - back, None]
            going[:, back:] &= (recent[:, : matched.shape[1] - back] == last) & (last >= 0)
            going[:, :back] = False
            if not going.any():
                break
            matched += going
        return matched

    def follow(self, start: Start, nodes: Nodes, parents: Ints, tokens: Ints) -> Nodes:
        """Children of nodes as nodes themselves.

        Args:
            start: of the step.
            nodes: P nodes.
            parents: int64 [P'], each child's parent among them.
            tokens: int64 [P'], the children's.
        """
        depth, row = nodes.depth + 1, nodes.row.take(parents)
        if self.drafter.ngram_table is None:
            return Nodes(depth, row, tokens[:, None], nodes.matched.take(parents, 0))
        context = np.empty((len(parents), CONTEXT), np.int64)
        context[:, 0] = tokens
        context[:, 1:] = nodes.context[:, :-1].take(parents, 0)
        matched = nodes.matched
        if self.drafter.window:
            places = start.past[:, depth : depth + matched.shape[1]].take(row, 0)
            matched = matched.take(parents, 0) * (places == tokens[:, None]) + np.float32(1)
        else:
            matched = matched.take(parents, 0)
        return Nodes(depth, row, context, matched)

    def children(self, start: Start, nodes: Nodes) -> Children:
        """Candidates of each node with their scores.

        Args:
            start: of the step.
            nodes: P nodes.
        """
        numbers = self.drafter.levels[nodes.depth]
        if self.drafter.ngram_table is None:
            tokens = start.top[nodes.depth].take(nodes.row, 0)
            return Children(tokens, self._head(start, nodes, tokens) * np.float32(numbers.head), numbers.other_logit)
        found = self.candidates(start, nodes)
        scores = found.head * np.float32(numbers.head)
        scores += found.prior * np.float32(numbers.prior)
        scores += found.ratios * np.float32(numbers.ngram)
        scores += found.prompt_lookup * self._copied[nodes.depth].take(found.length + 1)[:, None]
        scores[found.again] = -np.inf
        order = (-scores).argsort(1, kind="stable")
        each = np.arange(len(order))[:, None]
        return Children(found.tokens[each, order], scores[each, order], numbers.other_logit)

    def log_probability(self, depth: int, scores: Floats) -> Floats:
        """Estimated log-probability of candidates: scores [P, C] of the children of nodes of one depth -> [P, C]."""
        level = self.drafter.levels[depth]
        highest = np.maximum(scores.max(1, keepdims=True), np.float32(level.other_logit))
        shares = np.exp(scores - highest)
        total = shares.sum(1, keepdims=True) + np.exp(np.float32(level.other_logit) - highest)
        if not level.calibration_map:
            plain: Floats = scores - highest - np.log(total)
            return plain
        with np.errstate(divide="ignore"):  # log-odds of 0 and 1 are infinite, and so beyond the last pairs
            odds = np.log(shares) - np.log(total - shares)
        mapped = np.interp(odds, *self._odds[depth]).astype(np.float32)
        likely: Floats = np.where(np.isneginf(scores), np.float32(-np.inf), -np.logaddexp(np.float32(0), -mapped))
        return likely

    def candidates(self, start: Start, nodes: Nodes) -> Candidates:
        """Of each node: its level's top, the successors of its context, and what followed the latest longest match."""
        if self.drafter.ngram_table is None:
            return self._uncorrected(start, nodes)
        top = start.top[nodes.depth].take(nodes.row, 0) if nodes.depth < len(start.top) else self._frequent
        row = self._rows(nodes.context)
        theirs, ratios = self._tokens.take(row, 0), self._ratios.take(row, 0)
        # The longest match, and of equals the latest: places count from 0 to R - 2, so both fit into one number.
        latest = (nodes.matched * np.float32(self.window) + self._recency).argmax(1)
        place = np.arange(len(latest))
        length = nodes.matched[place, latest].astype(np.int64) - 1
        first, width = top.shape[-1], theirs.shape[1]
        tokens = np.empty((len(latest), first + width + 1), np.int64)
        tokens[:, :first] = top
        tokens[:, first:-1] = theirs
        # Without any match this is the root once more, which does no harm.
        tokens[:, -1] = start.after[nodes.row, latest + (nodes.depth + 1)]
        same = tokens[:, :, None] == tokens[:, None, :]  # [P, C, C]
        again = same.argmax(2) != np.arange(tokens.shape[1])  # the first that equals it is another
        prompt_lookup = same[:, :, -1].copy()
        same[:, :, -1] = True  # what equals no successor has the ratio behind theirs, the backoff
        return Candidates(
            tokens=tokens,
            again=again,
            head=self._head(start, nodes, tokens),
            prior=self._prior.take(tokens),
            ratios=ratios[place[:, None], same[:, :, first:].argmax(2)],
            prompt_lookup=prompt_lookup,
            length=length,
        )

    def _uncorrected(self, start: Start, nodes: Nodes) -> Candidates:
        """The candidates of a drafter without transitions: the head alone speaks for them."""
        tokens = start.top[nodes.depth].take(nodes.row, 0)
        head, none = self._head(start, nodes, tokens), np.zeros(tokens.shape, np.float32)
        no = np.zeros(tokens.shape, np.bool_)
        return Candidates(tokens, no, head, none, none, no, np.zeros(len(tokens), np.int64))

    def _rows(self, context: Ints) -> Ints:
        """Row of the longest stored context: int64 [P, CONTEXT] -> [P]."""
        keys = context_keys(context)
        places = self._keys.searchsorted(keys)
        rows: Ints = (places * (self._keys.take(places) == keys)).max(1)  # longer contexts lie behind shorter ones
        return rows

    def _head(self, start: Start, nodes: Nodes, tokens: Ints) -> Floats:
        """Log-probabilities of tokens [P, C] by the level's head."""
        if nodes.depth >= len(start.logits):
            return np.zeros(tokens.shape, np.float32)
        logits, norms = start.logits[nodes.depth], start.norms[nodes.depth]
        found: Floats
        if len(logits) == 1:
            found = logits[0].take(tokens) - norms[0]
        else:
            found = logits[nodes.row[:, None], tokens] - norms.take(nodes.row)[:, None]
        return found
