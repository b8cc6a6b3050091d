"""The trees that a decoder verifies: one for all steps, one chosen for each row at each step, or by a schedule."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from treeopt.defaults import LEVELS, ONE_NODE
from treeopt.drafter import UNTRAINED_TOP, Drafter
from treeopt.drafting.heads import HeadsProposer
from treeopt.drafting.interface import (
    AcceptedPart,
    Drafts,
    Observed,
    Proposer,
    ProposerSession,
    SizeLimits,
    TokenLists,
    reads_of,
)
from treeopt.drafting.kernel.data import num_candidates
from treeopt.drafting.ngram import RecordProposer
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.block_module import BlockModule
from treeopt.models.draft_module import DraftModule, kind_of, most_levels
from treeopt.models.heads import MedusaHeads
from treeopt.policy import TreePolicy
from treeopt.schedule import Planned, Schedule
from treeopt.tree import Tree, check_tree_fits
from treeopt.verify.buffers import Buffers, compile_ranks

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

    def start(self, texts: TokenLists) -> ProposerSession:
        """A drafting session for a batch: for each row the end of its prompt and its first root."""

    def draft(self, session: ProposerSession, roots: Tensor, states: Tensor, context: int) -> Drafts:
        """The trees of one step.

        Roots int64 [B] are the next tokens of the texts in progress, states float [B, d] those that they were predicted
        from, `context` the cached tokens of the longest text.
        """


class StaticTree:
    """One tree for all rows and steps, filled with the candidates of a drafter.

    E101, E102 where it has levels or ranks that the drafter lacks.
    """

    def __init__(self, proposer: Proposer, tree: Tree, device: torch.device) -> None:
        self.tree, self.compiled = tree, compile_ranks(tree, device)
        _check_ranks(self.tree, proposer.depth, proposer.num_candidates)
        self.proposer, self.reads = proposer, reads_of(proposer)
        self.nodes, self.depth, self.window = self.tree.nodes, self.tree.depth, proposer.window

    def start(self, texts: TokenLists) -> ProposerSession:
        return self.proposer.start(texts, self.depth)

    def draft(self, session: ProposerSession, roots: Tensor, states: Tensor, context: int) -> Drafts:
        return session.fill(roots, states, self.compiled)


class PerStepTrees:
    """Trees of the nodes that are most likely to be accepted, chosen at every step for every row by the drafter."""

    tree = None

    def __init__(self, proposer: Proposer, policy: TreePolicy) -> None:
        self.proposer = proposer.by_probability if isinstance(proposer, HeadsProposer) else proposer
        self.nodes, self.window, self.reads = policy.nodes, proposer.window, reads_of(proposer)
        self.depth = min(policy.depth, proposer.depth)
        cost = tuple(cost for _, cost in policy.size_cost)
        self._limits = SizeLimits(policy.sizes, cost, self.depth, policy.path_tokens)

    def start(self, texts: TokenLists) -> ProposerSession:
        return self.proposer.start(texts, self.depth)

    def draft(self, session: ProposerSession, roots: Tensor, states: Tensor, context: int) -> Drafts:
        return session.grow(roots, states, self._limits)


class ScheduledTrees:
    """At each step the trees of the plan of a schedule for the texts in progress and the longest of them.

    One drafter follows the texts. It begins with the first step that drafts, one that reads the base's states with the
    prompt; steps without drafts run nothing of it.
    """

    tree = None

    def __init__(self, proposer: Proposer, schedule: Schedule, device: torch.device) -> None:
        self.proposer, self.schedule = proposer, schedule
        self.sources = [_source(proposer, plan, device) for plan in schedule.plans]
        self.nodes, self.window, self.reads = schedule.nodes, proposer.window, reads_of(proposer)
        self.depth = max(one.depth for one in self.sources)
        self._none = compile_ranks(Tree(()), device)

    def start(self, texts: TokenLists) -> ProposerSession:
        return LateSession(functools.partial(self.proposer.start, depth=self.depth), texts)

    def draft(self, session: ProposerSession, roots: Tensor, states: Tensor, context: int) -> Drafts:
        assert isinstance(session, LateSession)
        source = self.sources[self.schedule.index(len(roots), context)]
        if source.nodes == ONE_NODE:
            session.skip()
            return Drafts(roots[:, None], self._none)
        return source.draft(session.begun(), roots, states, context)


class LateSession(ProposerSession):
    """A session that begins with the first step that drafts; before, it only stores texts, unless it `read`s states.

    While it is idle nothing of the next states is read ahead: the next step probably does not draft either.
    """

    def __init__(self, start: Callable[[TokenLists], ProposerSession], texts: TokenLists):
        self._start, self._texts = start, [list(text) for text in texts]
        self._inner: ProposerSession | None = None
        self._idle = True

    def begun(self) -> ProposerSession:
        """The session, which drafts this step."""
        self._idle = False
        if self._inner is None:
            self._inner = self._start(self._texts)
        return self._inner

    def read(self, states: Sequence[Tensor]) -> None:
        """A drafter that reads the base's states takes those of each step, and so begins at once."""
        if self._inner is None:
            self._inner = self._start(self._texts)
        self._inner.read(states)

    def begin(self, roots: Tensor, states: Tensor) -> None:
        self.begun().begin(roots, states)

    def fill(self, roots: Tensor, states: Tensor, tree: Buffers) -> Drafts:
        return self.begun().fill(roots, states, tree)

    def grow(self, roots: Tensor, states: Tensor, limits: SizeLimits) -> Drafts:
        return self.begun().grow(roots, states, limits)

    def skip(self) -> None:
        self._idle = True
        if self._inner is not None:
            self._inner.skip()

    def observe(self, states: Tensor, logits: Tensor | None = None) -> Tensor | None:
        return None if self._idle or self._inner is None else self._inner.observe(states, logits)

    def look(self, observed: Observed) -> None:
        self.begun().look(observed)

    def keep(self, kept: AcceptedPart) -> None:
        if self._inner is not None:
            self._inner.keep(kept)
            return
        for text, tokens in zip(self._texts, kept.tokens, strict=True):
            text += tokens

    def select(self, rows: Sequence[int]) -> None:
        if self._inner is not None:
            self._inner.select(rows)
        else:
            self._texts = [self._texts[row] for row in rows]

    def mark(self) -> Any:
        lengths = [len(text) for text in self._texts]
        return lengths, self._idle, None if self._inner is None else (self._inner, self._inner.mark())

    def rewind(self, mark: Any) -> None:
        lengths, self._idle, begun = mark
        self._texts = [text[:length] for text, length in zip(self._texts, lengths, strict=True)]
        self._inner = None
        if begun is not None:
            self._inner, inner = begun
            self._inner.rewind(inner)


def trees_for(
    base: Base,
    heads: MedusaHeads | None,
    plan: Planned,
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
            fix = "--heads HEADS, or in Python heads=treeopt.load_heads(...).heads"
            raise TreeoptError(Code.TREE_TOO_DEEP, what, fix=fix)
    else:
        proposer = drafter
    return _source(proposer, plan, base.device)


def _source(proposer: Proposer, plan: Planned, device: torch.device) -> TreeSource:
    """The trees of a plan; a schedule without drafts is plain decoding."""
    if isinstance(plan, Schedule) and plan.nodes > ONE_NODE:
        return ScheduledTrees(proposer, plan, device)
    if isinstance(plan, TreePolicy):
        return PerStepTrees(proposer, plan)
    return StaticTree(proposer, plan if isinstance(plan, Tree) else Tree(()), device)


def untrained(base: Base, draft: Base | None = None) -> tuple[TreePolicy, Drafter]:
    """The plan and drafter of a model, or of a draft model or module for it, that nothing was learned for."""
    if draft is None:
        drafter = Drafter.untrained(base.vocab_size)
    else:
        levels, top = min(LEVELS, most_levels(draft.model)), min(UNTRAINED_TOP, draft.vocab_size)
        drafter = Drafter.model_only(levels, top, draft.fingerprint, kind_of(draft.model))
    return TreePolicy(UNTRAINED_NODES, drafter.depth, drafter.id), drafter


def proposer_for(base: Base, heads: MedusaHeads | None, drafter: Drafter | None, draft: Base | None = None) -> Proposer:
    """The `Proposer` of a drafter record and a model; of the `heads` drafter without a record."""
    if draft is not None:
        if heads is not None or drafter is None:
            raise ValueError(
                "a draft model needs the record of the drafter that the tree was made for, and takes no heads"
            )
        # Imported here as they import numba, which takes half a second.
        from treeopt.drafting.block import BlockProposer
        from treeopt.drafting.model import ModelProposer
        from treeopt.drafting.module import ModuleProposer
        from treeopt.drafting.parallel import ParallelProposer

        if isinstance(draft.model, BlockModule):
            return BlockProposer(base, draft, drafter)
        if isinstance(draft.model, DraftModule):
            return (ParallelProposer if draft.model.wiring.levels else ModuleProposer)(base, draft, drafter)
        return ModelProposer(base, draft, drafter)
    if drafter is not None and (drafter.ngram_table is not None or heads is None):
        return RecordProposer(base, heads, drafter)
    return HeadsProposer(base, heads, drafter)


def check_plan(plan: Planned, drafter: Drafter | None) -> None:
    """Raise E223, E101 or E102 where a plan was made for another drafter, or has levels or ranks that it lacks."""
    if isinstance(plan, Schedule):
        for one in plan.plans:
            check_plan(one, drafter)
        return
    if plan.drafter and (drafter is None or drafter.id != plan.drafter):
        given = "none was given" if drafter is None else f"the one given is {drafter.id}"
        what = f"the tree was made for drafter {plan.drafter}; {given}"
        fix = "--drafter FILE, or in Python drafter=treeopt.load_drafter(FILE)"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix=fix)
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
        fix = f"treeopt build --max-rank {candidates - 1}"
        raise TreeoptError(Code.RANK_TOO_LARGE, what, at=str(list(path)), fix=fix)
