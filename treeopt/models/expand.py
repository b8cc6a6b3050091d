"""Expand: the tree of one step, of the nodes that are likeliest to be accepted (arXiv:2406.16858 grows such trees too).

Level by level, the likeliest nodes of the level above become parents; of all candidates the likeliest stay. A node's
probability is its own times its parent's, so the N likeliest are a tree, and with as many parents a level as there are
nodes they are the N likeliest of all. Smaller trees of one step are part of larger ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treeopt.models.draft import DraftModel, Floats, Ints, Start

MAX_PARENTS = 16  # a level; more cost time and changed tokens per step by less than 0.1 % (docs/method.md)


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
    rows = len(start.root.row)
    width = min(nodes - 1, MAX_PARENTS)
    parents = start.root
    above: Floats = np.zeros((rows, 1), np.float32)  # log-probability of the parents
    names: Ints = np.zeros((rows, 1), np.int64)  # their numbers among all nodes, the root's is 0
    each = np.arange(rows)[:, None]
    levels: list[tuple[Ints, Ints, Floats]] = []
    made = 1
    for level in range(depth):
        children = model.children(start, parents)
        candidates = children.tokens.shape[1]
        likely = model.log_probability(level, children.scores).reshape(rows, -1, candidates) + above[..., None]
        likely = likely.reshape(rows, -1)
        best = (-likely).argsort(1, kind="stable")[:, : nodes - 1]
        slots = best // candidates
        tokens, kept = children.tokens.reshape(rows, -1)[each, best], likely[each, best]
        levels.append((tokens, names[each, slots], kept))
        names = made + np.arange(best.shape[1])[None, :width].repeat(rows, 0)
        made += best.shape[1]
        above = kept[:, :width]
        if level + 1 < depth:
            inside = (slots[:, :width] + each * (likely.shape[1] // candidates)).ravel()
            parents = model.follow(start, parents, inside, tokens[:, :width].ravel())
    return _likeliest(levels, nodes - 1)


def _likeliest(levels: list[tuple[Ints, Ints, Floats]], count: int) -> Expansion:
    """So many of all levels' nodes, numbered anew."""
    tokens, parents, likely = (np.concatenate(part, axis=1) for part in zip(*levels, strict=True))
    depths = np.repeat(np.arange(1, len(levels) + 1), [level[0].shape[1] for level in levels])
    real = int((likely > -np.inf).sum(1).max())  # repeated candidates come last
    best = (-likely).argsort(1, kind="stable")[:, : min(count, real)]
    each = np.arange(len(best))[:, None]
    number = np.zeros((len(best), tokens.shape[1] + 1), np.int64)
    number[each, best + 1] = np.arange(1, best.shape[1] + 1)
    return Expansion(
        tokens[each, best], number[each, parents[each, best]], depths[best], likely[each, best].astype(np.float32)
    )


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
