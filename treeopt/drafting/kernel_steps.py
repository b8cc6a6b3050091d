"""The entry points of the kernel: each works on rows `first` to `last` - 1 of a step, so that threads share its rows.

Rows of one text must be ascending in their ends, and worked on by one thread.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.drafting.compiled import compiled
from treeopt.drafting.interface import NO_CANDIDATE
from treeopt.drafting.kernel_data import Bools, Floats, Ints, Kernel, Shape
from treeopt.drafting.kernel_nodes import candidates, log_probability, normalise, terms_of
from treeopt.drafting.kernel_trees import Grown, Parents, Sizes, begin_row, best_score, fill_row, grow_row


class Terms(NamedTuple):
    """Terms of the scores of C candidates of a node in each of P rows; the first `width` are candidates.

    Args:
        tokens: int64 [P, C].
        terms: float32 [4, P, C], the rows of `Scratch.terms`.
        width: int64 [P].
        looked_up: int64 [P], the candidate from prompt lookup.
        length: int64 [P], tokens of its match.
        found: int64 [P], number of `CACHE_LENGTHS` found.
    """

    tokens: Ints
    terms: Floats
    width: Ints
    looked_up: Ints
    length: Ints
    found: Ints


class Compiled(NamedTuple):
    """Trees of B rows with N nodes, sorted by depth: the tensors of `Buffers`, with their tokens.

    Args:
        tokens: int64 [B, N].
        depths: int64 [B, N].
        paths: int64 [B, N, D+1], then -1.
        mask: uint8 [B, N, N].
        void: uint8 [B, N].
    """

    tokens: Ints
    depths: Ints
    paths: Ints
    mask: NDArray[np.uint8]
    void: NDArray[np.uint8]


class Ranked(NamedTuple):
    """The best candidates of n nodes in each of B rows, the best first.

    Args:
        tokens: int64 [B, n, M].
        log_probability: float32 [B, n, M], of the token; -inf where a node has fewer candidates.
    """

    tokens: Ints
    log_probability: Floats


@compiled
def rank_rows(k: Kernel, first: int, last: int, paths: Ints, ranked: Ranked) -> None:
    """Rank the candidates of nodes of one depth, whose drafts are paths int64 [B, n, depth].

    `k.step.seen` [B, n, 2 K + 1] are a draft model's logits after each node.
    """
    k.work.map_key[:] = -1
    scores, depth = k.work.score, paths.shape[2]
    for row in range(first, last):
        begin_row(k, row)
        for node in range(paths.shape[1]):
            for place in range(depth):
                k.work.path[place] = paths[row, node, place]
            count = candidates(k, row, depth, node)
            largest, total = normalise(k.record, k.work, depth, count)
            for rank in range(ranked.tokens.shape[2]):
                best = best_score(scores, count)
                if best < 0:
                    ranked.tokens[row, node, rank], ranked.log_probability[row, node, rank] = 0, -np.inf
                    continue
                chance = log_probability(k.record, depth, scores[best], largest, total)
                ranked.tokens[row, node, rank], ranked.log_probability[row, node, rank] = k.work.token[best], chance
                scores[best] = -np.inf


@compiled
def fill_rows(k: Kernel, first: int, last: int, shape: Shape, tokens: Ints, void: Bools) -> None:
    """Fill one tree for each row: tokens [B, N] and void [B, N], which is False."""
    k.work.map_key[:] = -1
    for row in range(first, last):
        begin_row(k, row)
        fill_row(k, row, shape, tokens[row], void[row])


@compiled
def grow_rows(k: Kernel, first: int, last: int, sizes: Sizes, grown: Grown, parents: Parents) -> None:
    """Grow the tree of each row's likeliest nodes, unless it has as many nodes as the largest size."""
    k.work.map_key[:] = -1
    for row in range(first, last):
        if grown.drafts[row] + 1 < sizes.nodes[-1]:
            begin_row(k, row)
            grow_row(k, row, sizes, grown, parents)


@compiled
def compile_rows(k: Kernel, grown: Grown, number: Ints, made: Compiled) -> None:
    """Sort each row's first nodes by depth, and compile the tree."""
    rows, nodes = made.tokens.shape
    number[0] = 0
    made.paths[:] = -1
    made.mask[:] = 0
    for row in range(rows):
        made.tokens[row, 0] = k.texts.tokens[k.step.text[row], k.step.end[row] - 1]
        made.depths[row, 0] = made.paths[row, 0, 0] = 0
        made.mask[row, 0, 0] = 1
        made.void[row, 0] = 0
        depth, at = 1, 1
        while at < nodes:
            for i in range(nodes - 1):
                if grown.depths[row, i] != depth:
                    continue
                parent = number[grown.parents[row, i]]
                number[i + 1] = at
                void = i >= grown.drafts[row]  # padding: the likeliest draft again
                made.tokens[row, at] = max(grown.tokens[row, 0 if void else i], 0)
                made.void[row, at], made.depths[row, at] = void, depth
                for above in range(depth):
                    made.paths[row, at, above] = made.paths[row, parent, above]
                    made.mask[row, at, made.paths[row, parent, above]] = 1
                made.paths[row, at, depth] = at
                made.mask[row, at, at] = 1
                at += 1
            depth += 1


@compiled
def trace_rows(k: Kernel, first: int, last: int, true: Ints, ranks: Ints, confidence: Floats) -> None:
    """Follow the true tokens [B, L]: the rank of each among the candidates, and log-probability of the best one."""
    k.work.map_key[:] = -1
    scores = k.work.score
    for row in range(first, last):
        begin_row(k, row)
        for depth in range(true.shape[1]):
            token = max(true[row, depth], 0)
            count = candidates(k, row, depth, k.record.sources[depth])
            place = -1
            for i in range(count):
                if k.work.token[i] == token:
                    place = i
            rank = NO_CANDIDATE
            if place >= 0:
                rank = 0
                for i in range(count):
                    rank += scores[i] > scores[place] or (scores[i] == scores[place] and i < place)
            ranks[row, depth] = rank
            if len(confidence):
                largest, total = normalise(k.record, k.work, depth, count)
                best = best_score(scores, count)
                confidence[row, depth] = log_probability(k.record, depth, scores[best], largest, total)
            k.work.path[depth] = token


@compiled
def candidate_rows(k: Kernel, first: int, last: int, true: Ints, tokens: Ints) -> None:
    """Follow the true tokens [B, L]: the best candidates of each level, [B, L, R]; -1 where there are fewer."""
    k.work.map_key[:] = -1
    scores = k.work.score
    for row in range(first, last):
        begin_row(k, row)
        for depth in range(true.shape[1]):
            count = candidates(k, row, depth, k.record.sources[depth])
            for rank in range(tokens.shape[2]):
                best = best_score(scores, count)
                tokens[row, depth, rank] = -1 if best < 0 else k.work.token[best]
                if best >= 0:
                    scores[best] = -np.inf
            k.work.path[depth] = max(true[row, depth], 0)


@compiled
def terms_of_rows(k: Kernel, true: Ints, out: Terms) -> None:
    """The terms of the candidates' scores after the true tokens [B, depth]; beyond them the first is repeated."""
    k.work.map_key[:] = -1
    depth = true.shape[1]
    for row in range(len(true)):
        begin_row(k, row)
        for place in range(depth):
            k.work.path[place] = max(true[row, place], 0)
        count, looked_up, length, found = terms_of(k, row, depth, int(k.record.sources[depth]))
        for i in range(out.tokens.shape[1]):
            candidate = i if i < count else 0
            out.tokens[row, i] = k.work.token[candidate]
            for term in range(len(out.terms)):
                out.terms[term, row, i] = k.work.terms[term, candidate]
        out.width[row], out.looked_up[row], out.length[row], out.found[row] = count, looked_up, length, found
