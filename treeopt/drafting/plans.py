"""Corrected and dynamic drafting: proposers that look at the tokens before each draft."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.drafter import Drafter
from treeopt.drafting.expand import Expansion, expand, tokens_by_size
from treeopt.drafting.heads import Drafts, PlainProposer, Proposer
from treeopt.drafting.ngram import DraftModel, Floats, Ints, Start
from treeopt.drafting.trace import check_drafter
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, check_heads_fit, heads_like
from treeopt.models.heads import MedusaHeads
from treeopt.policy import STEP_SIZES, Plan, TreePolicy
from treeopt.tree import Tree, check_tree_fits
from treeopt.verify.shapes import Shape


def proposer_of(base: Base, heads: MedusaHeads | None, plan: Plan, drafter: Drafter | None) -> Proposer:
    """Who drafts for a tree or a policy.

    Raises:
        TreeoptError: as `check_plan` and the proposers.
    """
    check_plan(plan, drafter)
    if isinstance(plan, Tree) and not plan.drafter:
        return PlainProposer(base, heads, plan)
    assert drafter is not None
    if heads is None:
        raise TreeoptError(Code.TREE_TOO_DEEP, "no heads were given", fix="heads=treeopt.load_heads(...).heads")
    if isinstance(plan, Tree):
        return CorrectedProposer(base, heads, plan, drafter)
    return DynamicProposer(base, heads, plan, drafter)


def check_plan(plan: Plan, drafter: Drafter | None) -> None:
    """What can be checked of a tree or policy and its drafter before any model is loaded.

    Raises:
        TreeoptError: E223 where the plan was made for another drafter, or for one and none is given; E101, E102 where a
            tree asks for more levels or candidates than its drafter has.
    """
    wanted = plan.drafter
    if wanted and (drafter is None or drafter.id != wanted):
        given = "none was given" if drafter is None else f"the one given is {drafter.id}"
        what = f"the tree was made for drafter {wanted}; {given}"
        raise TreeoptError(
            Code.DRAFTER_MISMATCH, what, fix="--drafter FILE, or in Python drafter=treeopt.load_drafter(FILE)"
        )
    if isinstance(plan, Tree) and not wanted and drafter is not None:
        what = f"the tree was made for the heads' plain guesses, not for drafter {drafter.id}"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="leave the drafter out, or build a tree for it")
    if isinstance(plan, Tree) and drafter is not None:
        _check_candidates(plan, drafter)


def num_candidates(drafter: Drafter, vocab_size: int | None = None) -> int:
    """Candidates of each node: the likeliest tokens of its level, the successors of its context, and one match.

    Args:
        drafter: the drafter.
        vocab_size: of the base, which bounds them; None where it is not known yet.
    """
    table = drafter.ngram_table
    if table is None:
        return min(drafter.top, vocab_size or drafter.top)
    return min(min(drafter.top, table.vocab_size) + int(table.tokens.shape[1]) + 1, table.vocab_size)


def _check_candidates(tree: Tree, drafter: Drafter, vocab_size: int | None = None) -> None:
    """Raise E101 or E102 where a tree asks for a level or a candidate that its drafter does not have."""
    count = num_candidates(drafter, vocab_size)
    check_tree_fits(tree, heads=drafter.depth, ranks=max(count, tree.max_rank + 1), holder="the drafter")
    if tree.max_rank >= count:
        path = next(path for path in tree.paths if max(path) >= count)
        what = f"the tree asks for rank {max(path)}; its drafter has {count} candidates a level, ranks 0 to {count - 1}"
        raise TreeoptError(Code.RANK_TOO_LARGE, what, at=str(list(path)), fix=f"treeopt build --max-rank {count - 1}")


class _Drafting:
    """What both have in common: heads, drafter, and the start of a step."""

    def __init__(self, base: Base, heads: MedusaHeads, drafter: Drafter, depth: int) -> None:
        check_heads_fit(base, heads, "given")
        check_drafter(drafter, base, heads)
        self.heads = heads_like(base, heads)
        self.depth = depth
        self._base = base
        self._model = DraftModel(drafter)
        self.context = self._model.window

    def _start(self, hidden: Tensor, recent: NDArray[np.int64] | None) -> Start:
        assert recent is not None, "this proposer looks at recent tokens"
        wanted = min(self.depth, self.heads.num_heads)
        return self._model.begin(self.heads(hidden, self._base.lm_head, wanted), recent, self.depth)

    def _sent(self, array: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(array).to(self._base.device)


class CorrectedProposer(_Drafting):
    """One tree for all steps; a node's rank counts among the candidates that its own parent's token leaves.

    Where a node has fewer different candidates than the tree asks for, the nodes beyond them repeat a sibling; they
    are void and never accepted, as replay counts them.

    Args:
        base: the base model.
        heads: its draft heads.
        tree: at most as deep as the drafter has levels.
        drafter: what corrects the heads.

    Raises:
        TreeoptError: E101, E102 where the tree asks for more than the drafter gives, E212 or E223 where heads or
            drafter do not fit the base.
    """

    def __init__(self, base: Base, heads: MedusaHeads, tree: Tree, drafter: Drafter) -> None:
        super().__init__(base, heads, drafter, tree.depth)
        _check_candidates(tree, drafter, base.vocab_size)
        self.nodes, self.tree = tree.nodes, tree
        self._levels = _levels(tree)
        # The likeliest tokens of a level all differ; a candidate beyond them may repeat one of them.
        self._distinct = min(drafter.top, base.vocab_size)

    def propose(self, root: Tensor, hidden: Tensor, recent: NDArray[np.int64] | None) -> Drafts:
        start = self._start(hidden, recent)
        rows = len(start.root.row)
        tokens = np.empty((rows, self.nodes), np.int64)
        tokens[:, 0] = start.after[:, start.after.shape[1] - self.depth - 1]
        void = np.zeros((rows, self.nodes), np.bool_)
        nodes, first = start.root, 1
        for parents, ranks, inner, within in self._levels:
            children = self._model.children(start, nodes)
            ordered = children.tokens.reshape(rows, -1, children.tokens.shape[1])
            drafts = ordered[:, parents, ranks]  # [B, n]
            tokens[:, first : first + len(ranks)] = drafts
            if ranks.max() >= self._distinct:
                scores = children.scores.reshape(ordered.shape)[:, parents, ranks]
                void[:, first : first + len(ranks)] = ~np.isfinite(scores)
            first += len(ranks)
            if len(inner):
                places = (np.arange(rows)[:, None] * ordered.shape[1] + within).ravel()
                nodes = self._model.follow(start, nodes, places, drafts[:, inner].ravel())
        return Drafts(self._sent(tokens), void=self._sent(void) if void.any() else None)


Level = tuple[Ints, Ints, Ints, Ints]


def _levels(tree: Tree) -> list[Level]:
    """For each depth: of its nodes the parents (counted among the inner nodes above) and ranks; which of them are inner
    nodes (counted among themselves), and those ones' parents.
    """
    depths, parents = np.array(tree.depths), np.array(tree.parents)
    inner = np.zeros(tree.nodes, np.bool_)
    inner[parents[1:]] = True
    number = np.zeros(tree.nodes, np.int64)
    found = []
    for depth in range(1, tree.depth + 1):
        nodes = np.flatnonzero(depths == depth)
        above = number[parents[nodes]]
        ranks = np.array([tree.paths[node - 1][-1] for node in nodes])
        going = np.flatnonzero(inner[nodes])
        number[nodes[going]] = np.arange(len(going))
        found.append((above, ranks, going, above[going]))
    return found


class DynamicProposer(_Drafting):
    """At every step and for every row the nodes that are likeliest to be accepted.

    Args:
        base: the base model.
        heads: its draft heads.
        policy: how many nodes.
        drafter: whose estimates choose them.

    Raises:
        TreeoptError: as `CorrectedProposer`.
    """

    tree = None

    def __init__(self, base: Base, heads: MedusaHeads, policy: TreePolicy, drafter: Drafter) -> None:
        super().__init__(base, heads, drafter, min(policy.depth, drafter.depth))
        self.nodes = policy.nodes
        self._sizes = np.array(policy.sizes)
        self._prices = np.array([price for _, price in policy.size_cost])

    def propose(self, root: Tensor, hidden: Tensor, recent: NDArray[np.int64] | None) -> Drafts:
        start = self._start(hidden, recent)
        tree = expand(self._model, start, self.nodes, self.depth)
        tokens = start.after[:, start.after.shape[1] - self.depth - 1]
        return self._laid_out(tokens, tree, self._size(tree.log_probability))

    def _size(self, log_probability: Floats) -> int:
        """Nodes of this step: what the row that gains most from a larger tree asks for."""
        if len(self._sizes) == 1:
            return self.nodes
        total = tokens_by_size(log_probability)[:, np.searchsorted(STEP_SIZES, self._sizes)]
        return int(self._sizes[(total - self._prices).argmax(1).max()])

    def _laid_out(self, roots: Ints, tree: Expansion, nodes: int) -> Drafts:
        """The tree's likeliest nodes in order of their depths, as tensors."""
        rows, drafts = len(roots), min(nodes - 1, tree.tokens.shape[1])
        order = tree.depths[:, :drafts].argsort(1, kind="stable")
        each = np.arange(rows)[:, None]
        number = np.zeros((rows, drafts + 1), np.int64)
        number[each, order + 1] = np.arange(1, drafts + 1)
        tokens = np.concatenate([roots[:, None], tree.tokens[each, order]], axis=1)
        parents = np.concatenate([np.zeros((rows, 1), np.int64), number[each, tree.parents[each, order]]], axis=1)
        return Drafts(self._sent(tokens), Shape.from_parents(self._sent(parents), self.depth))
