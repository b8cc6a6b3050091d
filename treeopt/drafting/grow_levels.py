"""The tree of a step's likeliest nodes, grown a level at a time, for drafters that rank a whole level at once.

The nodes are those of `treeopt.drafting.kernel_trees.grow_row`, which grows the same tree node by node: at each depth
the likeliest nodes become parents, at most `MAX_PARENTS`, unless N others are likelier (EAGLE-2, arXiv:2406.16858).
"""

from __future__ import annotations

import numpy as np

from treeopt.drafting.interface import Bools, Expansion, Floats, Ints, SizeLimits
from treeopt.drafting.kernel_data import MAX_PARENTS
from treeopt.drafting.kernel_steps import Ranked
from treeopt.drafting.kernel_trees import NO_TOKEN, Grown


class GrownLevels:
    """The likeliest nodes of B rows. `add` takes a level's candidates, `expand` chooses the parents of the next one.

    Args:
        rows: B.
        nodes: the maximum, root counted.
        num_candidates: the maximum of a node.

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
