"""The tree of one step: the nodes that are most likely to be accepted, as EAGLE-2 grows them (arXiv:2406.16858).

Level by level, the likeliest nodes of the level above become parents, and the likeliest of all candidates are kept. A
node's probability is its own times its parent's, so the N likeliest nodes are a tree. A node that is less likely than N
others needs no children, so few parents are expanded. The smaller trees of a step are parts of the larger ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from treeopt.drafting.interface import Floats, Ints, Nodes, ProposerSession
from treeopt.policy import STEP_SIZES

MAX_PARENTS = 16  # a level; more cost time and changed tokens per step by less than 0.1 % (docs/method.md)
_FIRST_PARENTS = 4  # of a level, or a quarter of the nodes; others are expanded only if their children can matter


@dataclass(frozen=True, eq=False)
class Expansion:
    """One tree a row, the likeliest nodes first; of equal ones a parent before its child.

    A row with fewer candidates than another is padded with repeated ones, of log-probability -inf.

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


def expand(session: ProposerSession, root: Nodes, nodes: int, depth: int) -> Expansion:
    """The `nodes` - 1 likeliest drafts below each row's root, at most `depth` levels deep; fewer where there are fewer.

    Args:
        session: of a drafter, its step begun.
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
        # First a few parents: their children mostly show that those of the others are too unlikely to matter.
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
    """Nodes of one depth, the likeliest first: [B, n] each; `slots` is the parent's place among those expanded above,
    `numbers` the nodes' own numbers among all nodes (the root's is 0), `parents` those of their parents.
    """

    tokens: Ints
    slots: Ints
    numbers: Ints
    parents: Ints
    log_probability: Floats


def _promising(above: _Level, known: Floats) -> int:
    """How many nodes of a level may have children among the likeliest, in the row that has the most of them."""
    # A child is no likelier than its parent, and of equally likely nodes the one that was there first stays.
    least = known.min(1, keepdims=True)
    return min(int((above.log_probability > least).sum(1).max()), MAX_PARENTS)


def _followed(session: ProposerSession, grandparents: Nodes, above: _Level, part: slice) -> Nodes:
    """Some nodes of a level, made ready to have children."""
    slots = above.slots[:, part]
    each = np.arange(len(slots))[:, None] * (len(grandparents.row) // len(slots))
    return session.follow(grandparents, (slots + each).ravel(), above.tokens[:, part].ravel())


def _best_of(likely: Floats, tokens: Ints, above: _Level, expanded: int, count: int, made: int) -> _Level:
    """The likeliest of the candidates [B, expanded * C] of a level."""
    each = np.arange(len(likely))[:, None]
    best = (-likely).argsort(1, kind="stable")[:, :count]
    slots = best // (likely.shape[1] // expanded)
    numbers = np.arange(made, made + best.shape[1])[None].repeat(len(best), 0)
    return _Level(tokens[each, best], slots, numbers, above.numbers[each, slots], likely[each, best])


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


def node_ranks(expansion: Expansion, true: Ints) -> Ints:
    """The place of each prefix of a true continuation among the nodes of its row's tree, the likeliest first.

    Args:
        expansion: n nodes for each row.
        true: int64 [B, D], the tokens that followed the root; negative beyond the end of the text.

    Returns:
        int64 [B, D]: 1 .. n; n + 1 where the tree does not hold it.
    """
    missing = expansion.tokens.shape[1] + 1
    numbers = np.arange(1, missing)
    places = np.full(true.shape, missing)
    node = np.zeros(len(true), np.int64)
    for level in range(true.shape[1]):
        here = (expansion.parents == node[:, None]) & (expansion.tokens == true[:, level, None])
        node = np.where(here, numbers, missing).min(1, initial=missing)  # no node's parent is the missing one
        places[:, level] = node
    return places


def expected_tokens(log_probability: Floats) -> Floats:
    """Estimated tokens of a step by the size of its tree: falling [B, n] -> float32 [B, len(STEP_SIZES)]."""
    total = np.cumsum(np.exp(log_probability.astype(np.float64)), axis=1)
    total = np.concatenate([np.zeros((len(total), 1)), total], axis=1)
    return (1 + total[:, [min(size, total.shape[1]) - 1 for size in STEP_SIZES]]).astype(np.float32)
