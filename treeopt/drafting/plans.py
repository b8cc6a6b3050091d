"""The trees that a decoder verifies: one for all steps, or one chosen for each row at each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from treeopt.drafter import Drafter
from treeopt.drafting.heads import HeadsProposer
from treeopt.drafting.interface import Drafts, Proposer, ProposerSession, SizeLimits
from treeopt.drafting.kernel.data import num_candidates
from treeopt.drafting.ngram import RecordProposer
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.policy import Plan, TreePolicy
from treeopt.tree import Tree, check_tree_fits
from treeopt.verify.buffers import compile_ranks

UNTRAINED_NODES = 16  # of the per-step trees where nothing was learned


@runtime_checkable
class TreeSource(Protocol):
    """The trees of a decoder's steps, with their tokens."""

    nodes: int  # N, the largest number of any tree, root counted
    depth: int  # of the deepest node of any tree
    window: int  # the number of last tokens of each text that are read, the root included; 0 if none

    @property
    def tree(self) -> Tree | None:
        """The tree of all rows and steps; None where each step has its own."""

    def start(self, texts: Sequence[Sequence[int]]) -> ProposerSession:
        """A drafting session for a batch: for each row the end of its prompt and its first root."""

    def draft(self, session: ProposerSession, roots: Tensor, states: Tensor) -> Drafts:
        """The trees of one step: roots int64 [B], and the states float [B, d] that they were predicted from."""


class StaticTree:
    """One tree for all rows and steps, filled with the candidates of a drafter.

    E101, E102 where it has levels or ranks that the drafter lacks.
    """

    def __init__(self, proposer: Proposer, tree: Tree, device: torch.device) -> None:
        self.tree, self.compiled = tree, compile_ranks(tree, device)
        _check_ranks(self.tree, proposer.depth, proposer.num_candidates)
        self.proposer = proposer
        self.nodes, self.depth, self.window = self.tree.nodes, self.tree.depth, proposer.window

    def start(self, texts: Sequence[Sequence[int]]) -> ProposerSession:
        return self.proposer.start(texts, self.depth)

    def draft(self, session: ProposerSession, roots: Tensor, states: Tensor) -> Drafts:
        return session.fill(roots, states, self.compiled)


class PerStepTrees:
    """Trees of the nodes that are most likely to be accepted, chosen at every step for every row by the drafter."""

    tree = None

    def __init__(self, proposer: Proposer, policy: TreePolicy) -> None:
        self.proposer = proposer.by_probability if isinstance(proposer, HeadsProposer) else proposer
        self.nodes, self.window = policy.nodes, proposer.window
        self.depth = min(policy.depth, proposer.depth)
        self._limits = SizeLimits(policy.sizes, tuple(cost for _, cost in policy.size_cost), self.depth)

    def start(self, texts: Sequence[Sequence[int]]) -> ProposerSession:
        return self.proposer.start(texts, self.depth)

    def draft(self, session: ProposerSession, roots: Tensor, states: Tensor) -> Drafts:
        return session.grow(roots, states, self._limits)


def trees_for(
    base: Base,
    heads: MedusaHeads | None,
    plan: Plan,
    drafter: Drafter | Proposer | None = None,
    draft: Base | None = None,
) -> TreeSource:
    """The trees of a decoder. The tree of the root alone, plain decoding, runs neither drafter, heads nor draft model.

    `drafter` is the record that the plan was made for, or a `Proposer`; None for a tree of the `heads` drafter.
    """
    if isinstance(drafter, Drafter) or drafter is None:
        check_plan(plan, drafter)
        if plan.nodes == 1:
            heads = drafter = draft = None
        proposer = proposer_for(base, heads, drafter, draft)
        if heads is None and drafter is None and (depth := plan.depth):
            what = f"no heads were given, and the tree drafts {depth} tokens ahead"
            raise TreeoptError(
                Code.TREE_TOO_DEEP, what, fix="--heads HEADS, or in Python heads=treeopt.load_heads(...).heads"
            )
    else:
        proposer = drafter
    if isinstance(plan, TreePolicy):
        return PerStepTrees(proposer, plan)
    return StaticTree(proposer, plan, base.device)


def untrained(base: Base) -> tuple[TreePolicy, Drafter]:
    """The plan and drafter of a model that nothing was learned for, and that has no heads."""
    drafter = Drafter.untrained(base.vocab_size)
    return TreePolicy(UNTRAINED_NODES, drafter.depth, drafter.id), drafter


def proposer_for(base: Base, heads: MedusaHeads | None, drafter: Drafter | None, draft: Base | None = None) -> Proposer:
    """The `Proposer` of a drafter record and a model; of the `heads` drafter without a record."""
    if draft is not None:
        if heads is not None or drafter is None:
            raise ValueError("a draft model needs the record of a drafter, and takes no heads")
        # Imported here as it imports numba, which takes half a second.
        from treeopt.drafting.model import ModelProposer

        return ModelProposer(base, draft, drafter)
    if drafter is not None and (drafter.ngram_table is not None or heads is None):
        return RecordProposer(base, heads, drafter)
    return HeadsProposer(base, heads, drafter)


def check_plan(plan: Plan, drafter: Drafter | None) -> None:
    """Raise E223, E101 or E102 where a plan was made for another drafter, or has levels or ranks that it lacks."""
    if plan.drafter and (drafter is None or drafter.id != plan.drafter):
        given = "none was given" if drafter is None else f"the one given is {drafter.id}"
        what = f"the tree was made for drafter {plan.drafter}; {given}"
        raise TreeoptError(
            Code.DRAFTER_MISMATCH, what, fix="--drafter FILE, or in Python drafter=treeopt.load_drafter(FILE)"
        )
    if isinstance(plan, Tree) and not plan.drafter and drafter is not None:
        what = f"the tree was made for the heads alone, not for drafter {drafter.id}"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix="leave the drafter out, or build a tree for it")
    if isinstance(plan, Tree) and drafter is not None:
        _check_ranks(plan, drafter.depth, num_candidates(drafter))


def _check_ranks(tree: Tree, depth: int, candidates: int) -> None:
    """Raise E101 or E102 where a tree has levels or ranks that its drafter does not have."""
    check_tree_fits(tree, heads=depth, ranks=max(candidates, tree.max_rank + 1), holder="the drafter")
    if tree.max_rank >= candidates:
        path = next(path for path in tree.paths if max(path) >= candidates)
        what = f"the tree has rank {max(path)}; its drafter has {candidates} candidates a level"
        raise TreeoptError(
            Code.RANK_TOO_LARGE, what, at=str(list(path)), fix=f"treeopt build --max-rank {candidates - 1}"
        )
