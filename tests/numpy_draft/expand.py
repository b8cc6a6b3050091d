"""Expansion: the tree of one step, of the nodes most likely to be accepted, as in EAGLE-2 (arXiv:2406.16858).

Level by level, the likeliest nodes of the level above become parents, and the likeliest of all candidates are kept. The
probability of a node's path is that of its parent's path times that of its token, so the N likeliest nodes are a tree.
A node that is less likely than N others needs no children, so few parents are expanded. The smaller trees of a step are
parts of the larger ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numpy_draft.levels import LevelSession, Nodes
from treeopt.drafting.interface import Expansion, Floats, Ints
from treeopt.drafting.kernel.data import MAX_PARENTS

_FIRST_PARENTS = 4  # expanded first, or a quarter of the nodes; others only if their children can be in the tree


def expand(session: LevelSession, root: Nodes, nodes: int, depth: int) -> Expansion:
    """The `nodes` - 1 likeliest drafts below each row's root, at most `depth` levels deep; all where there are fewer.

    Args:
        session: of a drafter, after `begin`.
        root: the roots, one for each row.
        nodes: N, the root counted.
        depth: at most the drafter's levels.
    """
    rows, count, first = len(root.row), nodes - 1, max(_FIRST_PARENTS, nodes // 4)
    none = np.zeros((rows, 1), np.int64)
    if not count:
        return Expansion(none[:, 1:], none[:, 1:], none[:, 1:], np.zeros((rows, 0), np.float32))
    above = _Level(none, none, none, none, np.zeros((rows, 1), np.float32))  # the root, whose number is 0
    grandparents, made = root, 1
    known: Floats = np.full((rows, count), -np.inf, np.float32)  # the likeliest so far
    levels = []
    for level in range(depth):
        parents: list[Nodes] = []
        likely: list[Floats] = []
        tokens: list[Ints] = []
        done = 0
        # A few parents first: with their children known, those of the others are mostly too unlikely for the tree.
        while (promising := _promising(above, known)) > done:
            part = slice(done, promising if done else min(promising, first))
            parents.append(_followed(session, grandparents, above, part) if level else root)
            children = session.candidates(parents[-1])
            chances = children.log_probability.reshape(rows, part.stop - part.start, -1)
            likely.append((chances + above.log_probability[:, part, None]).reshape(rows, -1))
            tokens.append(children.tokens.reshape(rows, -1))
            known = -np.partition(-np.concatenate([known, likely[-1]], axis=1), count - 1, axis=1)[:, :count]
            done = part.stop
        if not done:
            break
        above = _best_of(np.concatenate(likely, axis=1), np.concatenate(tokens, axis=1), above, done, count, made)
        made += above.tokens.shape[1]
        levels.append(above)
        grandparents = Nodes.joined(parents, rows)
    return _likeliest(levels, count)


@dataclass(frozen=True, eq=False)
class _Level:
    """Nodes of one depth, the likeliest first: [B, n] each.

    `slots` is the index of the parent among the expanded nodes of the level above, `numbers` the index of each node
    among all nodes (the root is 0), `parents` that of its parent.
    """

    tokens: Ints
    slots: Ints
    numbers: Ints
    parents: Ints
    log_probability: Floats


def _promising(above: _Level, known: Floats) -> int:
    """The number of nodes of a level that may have children among the likeliest nodes: the largest of all rows."""
    # A child is at most as likely as its parent; of equally likely nodes the earlier one is kept.
    least = known.min(1, keepdims=True)
    return min(int((above.log_probability > least).sum(1).max()), MAX_PARENTS)


def _followed(session: LevelSession, grandparents: Nodes, above: _Level, part: slice) -> Nodes:
    """Some nodes of a level as `Nodes`, for their candidates."""
    slots = above.slots[:, part]
    each = np.arange(len(slots))[:, None] * (len(grandparents.row) // len(slots))
    return session.follow(grandparents, (slots + each).ravel(), above.tokens[:, part].ravel())


def _best_of(likely: Floats, tokens: Ints, above: _Level, expanded: int, count: int, made: int) -> _Level:
    """The `count` likeliest of the candidates [B, expanded * C] of a level."""
    each = np.arange(len(likely))[:, None]
    best = (-likely).argsort(1, kind="stable")[:, :count]
    slots = best // (likely.shape[1] // expanded)
    numbers = np.arange(made, made + best.shape[1])[None].repeat(len(best), 0)
    return _Level(tokens[each, best], slots, numbers, above.numbers[each, slots], likely[each, best])


def _likeliest(levels: list[_Level], count: int) -> Expansion:
    """The `count` likeliest nodes of all levels, renumbered."""
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
