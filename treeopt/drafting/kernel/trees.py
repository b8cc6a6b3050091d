"""The kernel's part about trees: the candidates of one tree's nodes, and the tree of a step's likeliest nodes.

A node of a per-step tree becomes a parent when it is taken, the likeliest first (EAGLE-2, arXiv:2406.16858, by a
best-first search), so smaller trees of a step are parts of larger ones.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeopt.drafting.interface import NO_CANDIDATE, Bools, Expansion, Features, Floats, Ints
from treeopt.drafting.kernel.compiled import compiled
from treeopt.drafting.kernel.data import MAX_PARENTS, Doubles, Kernel, Shape
from treeopt.drafting.kernel.nodes import begin_row, candidates, log_probability, normalise, terms_of

_TAKEN = np.float32(-np.inf)  # score of a candidate that is a node already
NO_TOKEN = -1  # of padding; no token of a text equals it
_ROUNDING = 1e-4  # tokens; far above the rounding of a sum of probabilities


class Sizes(NamedTuple):
    """What limits the trees that are grown."""

    nodes: Ints  # [S], ascending, the sizes to choose from, the root counted; the last is the maximum
    cost: Doubles  # [S], of a step of each size, in tokens
    depth: int  # the maximum


class Parents(NamedTuple):
    """The expanded nodes of one row's tree, at most E, with their remaining candidates."""

    node: Ints  # [E], 0 the root
    depth: Ints  # [E]
    likely: Floats  # [E], the log-probability of the node's path
    tokens: Ints  # [E, C], its candidates
    scores: Floats  # [E, C], -inf where the candidate is a node already
    width: Ints  # [E], its number of candidates
    norms: Doubles  # [E, 2], of `normalise`
    best: Ints  # [E], the likeliest remaining candidate
    chance: Floats  # [E], the log-probability of the path to it; -inf where none remains
    at_depth: Ints  # [L + 1], expanded nodes of each depth


def new_parents(most: int, width: int, depth: int) -> Parents:
    """Memory for the parents of one row's tree: E, C and L."""
    return Parents(
        node=np.zeros(most, np.int64),
        depth=np.zeros(most, np.int64),
        likely=np.zeros(most, np.float32),
        tokens=np.zeros((most, width), np.int64),
        scores=np.zeros((most, width), np.float32),
        width=np.zeros(most, np.int64),
        norms=np.zeros((most, 2)),
        best=np.zeros(most, np.int64),
        chance=np.zeros(most, np.float32),
        at_depth=np.zeros(depth + 1, np.int64),
    )


@compiled
def best_score(scores: Floats, count: int) -> int:
    """The index of the largest of the first scores, of equal ones the first; -1 where all are taken."""
    best, most = -1, _TAKEN
    for i in range(count):
        if scores[i] > most:
            best, most = i, scores[i]
    return best


@compiled
def _fill_children(k: Kernel, row: int, node: int, shape: Shape, tokens: Ints, void: Bools) -> None:
    """Write the tokens of a node's children: of rank r its candidate r. One without a candidate is void."""
    scores, count = k.work.score, 0
    if not void[node]:
        above = node
        for place in range(shape.depths[node] - 1, -1, -1):
            k.work.path[place] = tokens[above]
            above = shape.parents[above]
        count = candidates(k, row, shape.depths[node], k.record.sources[shape.depths[node]])
    rank, best = -1, -1
    for child in range(shape.first[node], shape.last[node]):
        while rank < shape.ranks[child]:
            if best >= 0:
                scores[best] = _TAKEN
            rank += 1
            best = best_score(scores, count)
        void[child] = best < 0
        tokens[child] = tokens[0] if best < 0 else k.work.token[best]


@compiled
def grow_row(k: Kernel, row: int, sizes: Sizes, grown: Expansion, parents: Parents) -> None:
    """Grow the tree of a row's likeliest nodes.

    Only the first `MAX_PARENTS` nodes of a depth are expanded. With several sizes growth ends where no larger one can
    be chosen: each further node is at most as likely as the next one.
    """
    likely, most = grown.log_probability[row], sizes.nodes[-1] - 1
    parents.at_depth[:] = 0
    made, expanded, total, at = 0, 0, 1.0, 0
    value = -np.inf
    expanded = _expand(k, row, 0, np.float32(0.0), grown, parents, expanded)
    while True:
        chosen = _likeliest_parent(parents, expanded)
        chance = parents.chance[chosen]
        while at < len(sizes.nodes) and (made + 1 == sizes.nodes[at] or chance == _TAKEN):
            if np.float32(total) - sizes.cost[at] > value:
                value, grown.size[row] = np.float32(total) - sizes.cost[at], sizes.nodes[at]
            at += 1
            if at < len(sizes.nodes) and not _worth(sizes, at, value, total, math.exp(chance)):
                at = len(sizes.nodes)
        if made >= most or chance == _TAKEN or at == len(sizes.nodes):
            break
        parent = parents.node[chosen]
        depth = parents.depth[chosen] + 1
        grown.tokens[row, made] = parents.tokens[chosen, parents.best[chosen]]
        grown.parents[row, made], grown.depths[row, made], likely[made] = parent, depth, chance
        made += 1
        total += math.exp(np.float64(chance))
        _next_candidate(k, parents, chosen)
        if depth < sizes.depth and parents.at_depth[depth] < MAX_PARENTS and made < most:
            expanded = _expand(k, row, made, chance, grown, parents, expanded)
    grown.drafts[row] = made
    likely[made:] = _TAKEN
    grown.tokens[row, made:], grown.parents[row, made:], grown.depths[row, made:] = NO_TOKEN, 0, 1


@compiled
def _worth(sizes: Sizes, at: int, value: float, total: float, chance: float) -> bool:
    """Whether a size from `at` on can be better than `value`, if each further node has at most this probability."""
    begin = sizes.nodes[at - 1]
    for i in range(at, len(sizes.nodes)):
        if total + (sizes.nodes[i] - begin) * chance - sizes.cost[i] > value - _ROUNDING:
            return True
    return False


@compiled
def _expand(k: Kernel, row: int, node: int, likely: float, grown: Expansion, parents: Parents, expanded: int) -> int:
    """Make a node (0 the root) a parent; returns the number of parents."""
    depth = grown.depths[row, node - 1] if node else 0
    above = node
    for place in range(depth - 1, -1, -1):
        k.work.path[place] = grown.tokens[row, above - 1]
        above = grown.parents[row, above - 1]
    count = candidates(k, row, depth, k.record.sources[depth])
    for i in range(count):
        parents.tokens[expanded, i], parents.scores[expanded, i] = k.work.token[i], k.work.score[i]
    parents.norms[expanded, 0], parents.norms[expanded, 1] = normalise(k.record, k.work, depth, count)
    parents.node[expanded], parents.depth[expanded], parents.likely[expanded] = node, depth, likely
    parents.width[expanded], parents.best[expanded] = count, -1
    parents.at_depth[depth] += 1
    _next_candidate(k, parents, expanded)
    return expanded + 1


@compiled
def _next_candidate(k: Kernel, parents: Parents, parent: int) -> None:
    """Take the best candidate of a parent, and find the next one."""
    scores = parents.scores[parent]
    if parents.best[parent] >= 0:
        scores[parents.best[parent]] = _TAKEN
    best = best_score(scores, parents.width[parent])
    parents.best[parent], parents.chance[parent] = best, _TAKEN
    if best >= 0:
        norms, depth = parents.norms[parent], parents.depth[parent]
        chance = log_probability(k.record, depth, scores[best], norms[0], norms[1])
        parents.chance[parent] = parents.likely[parent] + np.float32(chance)


@compiled
def _likeliest_parent(parents: Parents, expanded: int) -> int:
    """The parent of the likeliest next node; of equally likely ones that of the smallest depth, then the first."""
    best = 0
    for i in range(1, expanded):
        if parents.chance[i] > parents.chance[best] or (
            parents.chance[i] == parents.chance[best] and parents.depth[i] < parents.depth[best]
        ):
            best = i
    return best


class Compiled(NamedTuple):
    """Trees of B rows with N nodes, sorted by depth: the tensors of `Buffers`, with their tokens."""

    tokens: Ints  # [B, N]
    depths: Ints  # [B, N]
    paths: Ints  # [B, N, D+1], then -1
    mask: NDArray[np.uint8]  # [B, N, N]
    void: NDArray[np.uint8]  # [B, N]


class Ranked(NamedTuple):
    """The best candidates of n nodes in each of B rows, the best first."""

    tokens: Ints  # [B, n, M]
    log_probability: Floats  # [B, n, M], of the token; -inf where a node has fewer candidates


@compiled
def rank_rows(k: Kernel, first: int, last: int, paths: Ints, sources: Ints, ranked: Ranked) -> None:
    """Rank the candidates of nodes of one depth, whose drafts are paths int64 [B, n, depth].

    `sources` int64 [n] are the indices of their logits in `k.step.seen`, -1 where there are none.
    """
    scores, depth = k.work.score, paths.shape[2]
    for row in range(first, last):
        begin_row(k, row)
        for node in range(paths.shape[1]):
            for place in range(depth):
                k.work.path[place] = paths[row, node, place]
            count = candidates(k, row, depth, sources[node])
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
    for row in range(first, last):
        begin_row(k, row)
        tokens[row, 0] = k.texts.tokens[k.step.text[row], k.step.end[row] - 1]
        for node in range(tokens.shape[1]):
            if shape.first[node] < shape.last[node]:
                _fill_children(k, row, node, shape, tokens[row], void[row])


@compiled
def grow_rows(k: Kernel, first: int, last: int, sizes: Sizes, grown: Expansion, parents: Parents) -> None:
    """Grow the tree of each row's likeliest nodes, unless it has as many nodes as the largest size."""
    for row in range(first, last):
        if grown.drafts[row] + 1 < sizes.nodes[-1]:
            begin_row(k, row)
            grow_row(k, row, sizes, grown, parents)


@compiled
def compile_rows(grown: Expansion, number: Ints, made: Compiled) -> None:
    """Sort each row's first nodes by depth, and compile the tree; the root's token is left to the caller."""
    rows, nodes = made.tokens.shape
    number[0] = 0
    made.paths[:] = -1
    made.mask[:] = 0
    for row in range(rows):
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
            if place >= 0 and scores[place] > _TAKEN:  # a node without probability is void in a tree
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
def terms_of_rows(k: Kernel, true: Ints, out: Features) -> None:
    """The terms of the candidates' scores after the true tokens [B, depth]; beyond them the first is repeated."""
    depth = true.shape[1]
    for row in range(len(true)):
        begin_row(k, row)
        for place in range(depth):
            k.work.path[place] = max(true[row, place], 0)
        count, looked_up, length, found = terms_of(k, row, depth, k.record.sources[depth])
        for i in range(out.tokens.shape[1]):
            candidate = i if i < count else 0
            out.tokens[row, i] = k.work.token[candidate]
            for term in range(len(out.terms)):
                out.terms[term, row, i] = k.work.terms[term, candidate]
        out.width[row], out.looked_up[row], out.length[row], out.found[row] = count, looked_up, length, found
