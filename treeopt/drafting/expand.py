"""Expand: the tree of one step, of the nodes that are likeliest to be accepted (arXiv:2406.16858 grows such trees too).

Level by level, the likeliest nodes of the level above become parents; of all candidates the likeliest stay. A node's
probability is its own times its parent's, so the N likeliest are a tree. A node that is less likely than N others needs
no children, so few are looked at, and the smaller trees of one step are part of the larger ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treeopt.drafting.ngram import DraftModel, Floats, Ints, Nodes, Start
from treeopt.policy import STEP_SIZES

MAX_PARENTS = 16  # a level; more cost time and changed tokens per step by less than 0.1 % (docs/method.md)
_FIRST_PARENTS = (
    4  # of a level, or a quarter of the nodes; whether others matter is asked when their children are known
)


@dataclass(frozen=True, eq=False)
class Expansion:
    """One tree a row, the likeliest nodes first; of equal ones the parent before its child.

    A row with fewer candidates than another is filled up with repeated ones, of log-probability -inf.

    Args:
        tokens: int64 [B, n], without the root.
        parents: int64 [B, n], each node's parent: 0 is the root, i is node i - 1 of these.
        depths: int64 [B, n].
        log_probability: float32 [B, n], falling along a row.
    """

    tokens: Ints
    parents: Ints
    depths: Ints
    log_probability: Floats


def expand(model: DraftModel, start: Start, nodes: int, depth: int) -> Expansion:
    """The `nodes` - 1 likeliest drafts of each row, `depth` levels deep at most; fewer where there are not so many."""
    rows, count, first = len(start.root.row), nodes - 1, max(_FIRST_PARENTS, nodes // 4)
    none = np.zeros((rows, 1), np.int64)
    if not count:
        return Expansion(none[:, 1:], none[:, 1:], none[:, 1:], np.zeros((rows, 0), np.float32))
    above = _Level(none, none, none, none, np.zeros((rows, 1), np.float32))  # the root, whose name is 0
    grandparents, made = start.root, 1
    known: Floats = np.full((rows, count), -np.inf, np.float32)  # the likeliest so far
    levels = []
    for level in range(depth):
        parents: list[Nodes] = []
        likely: list[Floats] = []
        tokens: list[Ints] = []
        done = 0
        # First a few parents: their children mostly show that those of the others are too unlikely to matter.
        while (wanted := _promising(above, known)) > done:
            part = slice(done, wanted if done else min(wanted, first))
            parents.append(_followed(model, start, grandparents, above, part) if level else start.root)
            children = model.children(start, parents[-1])
            chances = model.log_probability(level, children.scores).reshape(rows, part.stop - part.start, -1)
            likely.append((chances + above.log_probability[:, part, None]).reshape(rows, -1))
            tokens.append(children.tokens.reshape(rows, -1))
            known = -np.partition(-np.concatenate([known, likely[-1]], axis=1), count - 1, axis=1)[:, :count]
            done = part.stop
        if not done:
            break
        above = _best_of(np.concatenate(likely, axis=1), np.concatenate(tokens, axis=1), above, done, count, made)
        made += above.tokens.shape[1]
        levels.append(above)
        grandparents = _joined(parents, rows)
    return _likeliest(levels, count)


@dataclass(frozen=True, eq=False)
class _Level:
    """Nodes of one depth, the likeliest first: [B, n] each; `slots` is the parent's place among those expanded above,
    `names` the nodes' own numbers among all nodes (the root's is 0), `parents` those of their parents.
    """

    tokens: Ints
    slots: Ints
    names: Ints
    parents: Ints
    log_probability: Floats


def _promising(above: _Level, known: Floats) -> int:
    """How many nodes of a level may have children among the likeliest, in the row that has the most of them."""
    # A child is no likelier than its parent, and of equally likely nodes the one that was there first stays.
    least = known.min(1, keepdims=True)
    return min(int((above.log_probability > least).sum(1).max()), MAX_PARENTS)


def _followed(model: DraftModel, start: Start, grandparents: Nodes, above: _Level, part: slice) -> Nodes:
    """Some nodes of a level, made ready to have children."""
    slots = above.slots[:, part]
    each = np.arange(len(slots))[:, None] * (len(grandparents.row) // len(slots))
    return model.follow(start, grandparents, (slots + each).ravel(), above.tokens[:, part].ravel())


def _joined(parts: list[Nodes], rows: int) -> Nodes:
    """Nodes of several parts of one level, row by row."""
    if len(parts) == 1:
        return parts[0]
    arrays = (
        np.concatenate([array.reshape(rows, len(array) // rows, *array.shape[1:]) for array in own], axis=1)
        for own in zip(*((part.row, part.context, part.matched) for part in parts), strict=True)
    )
    return Nodes(parts[0].depth, *(array.reshape(rows * array.shape[1], *array.shape[2:]) for array in arrays))


def _best_of(likely: Floats, tokens: Ints, above: _Level, expanded: int, count: int, made: int) -> _Level:
    """The likeliest of the candidates [B, expanded * C] of a level."""
    each = np.arange(len(likely))[:, None]
    best = (-likely).argsort(1, kind="stable")[:, :count]
    slots = best // (likely.shape[1] // expanded)
    names = np.arange(made, made + best.shape[1])[None].repeat(len(best), 0)
    return _Level(tokens[each, best], slots, names, above.names[each, slots], likely[each, best])


def _likeliest(levels: list[_Level], count: int) -> Expansion:
    """So many of all levels' nodes, numbered anew."""
    tokens, parents, likely = (
        np.concatenate(part, axis=1)
        for part in zip(*((one.tokens, one.parents, one.log_probability) for one in levels), strict=True)
    )
    depths = np.repeat(np.arange(1, len(levels) + 1), [one.tokens.shape[1] for one in levels])
    real = int((likely > -np.inf).sum(1).max())  # repeated candidates come last
    best = (-likely).argsort(1, kind="stable")[:, : min(count, real)]
    each = np.arange(len(best))[:, None]
    number = np.zeros((len(best), tokens.shape[1] + 1), np.int64)
    number[each, best + 1] = np.arange(1, best.shape[1] + 1)
    return Expansion(tokens[each, best], number[each, parents[each, best]], depths[best], likely[each, best])


def orders_of(expansion: Expansion, true: Ints) -> Ints:
    """Which node of its row's tree each prefix of a true continuation is.

    Args:
        expansion: n nodes a row.
        true: int64 [B, D], the tokens that came after the root; negative beyond the end of the text.

    Returns:
        int64 [B, D]: the node's number, 1 .. n; n + 1 where the tree does not hold it.
    """
    missing = expansion.tokens.shape[1] + 1
    numbers = np.arange(1, missing)
    orders = np.full(true.shape, missing)
    node = np.zeros(len(true), np.int64)
    for level in range(true.shape[1]):
        here = (expansion.parents == node[:, None]) & (expansion.tokens == true[:, level, None])
        node = np.where(here, numbers, missing).min(1, initial=missing)  # no node's parent is the missing one
        orders[:, level] = node
    return orders


def tokens_by_size(log_probability: Floats) -> Floats:
    """Estimated tokens of a step by the size of its tree: falling [B, n] -> float32 [B, len(STEP_SIZES)]."""
    total = np.cumsum(np.exp(log_probability.astype(np.float64)), axis=1)
    total = np.concatenate([np.zeros((len(total), 1)), total], axis=1)
    return (1 + total[:, [min(size, total.shape[1]) - 1 for size in STEP_SIZES]]).astype(np.float32)
