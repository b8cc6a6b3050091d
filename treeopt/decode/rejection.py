"""Speculative sampling: a chain drawn from a draft model, and the rejection rule of Leviathan et al. and Chen et al.

Drafts that are listed, as in trees, are accepted by one draw of the target at every node (`Sample`). Drafts that are
drawn from a distribution q can be accepted more often: draft x with probability min(1, p(x) / q(x)), and after the
first rejection the next token is drawn from max(0, p - q), normalised. Both give the distribution of the target.

Sources: arXiv:2211.17192, algorithm 1; arXiv:2302.01318, algorithm 2.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from treeopt.decode.rules import NOT_A_NUMBER, Sample, best, draw
from treeopt.defaults import MAX_DEPTH
from treeopt.drafter import Drafter
from treeopt.drafting.block import BlockProposer, BlockSession, ConditionalSession
from treeopt.drafting.interface import Drafts, ProposerSession, reads_of
from treeopt.drafting.model import FIRST, ModelProposer, ModelSession
from treeopt.drafting.module import ModuleProposer, ModuleSession
from treeopt.drafting.parallel import LevelsAtOnce, ParallelProposer, ParallelSession
from treeopt.drafting.plans import proposer_for
from treeopt.models.base import Base
from treeopt.models.draft_module import kind_of, over_tokens
from treeopt.models.given import GivenModel, as_draft
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_ranks

NUM_DRAFTS = 4  # of a chain: the best for a 7B model with a draft of 68M (arXiv:2401.10774, appendix B)
_MOST_SEEDS = 1 << 63
_OTHER_SEED = 0x5851F42D4C957F2D  # drafts are drawn independently of the target's draws


@dataclass(frozen=True)
class Rejection(Sample):
    """Speculative sampling by the probabilities of a draft model; settings and distribution are those of `Sample`.

    It is for the drafts of a `DrawnChain`. Drafts of other trees are accepted as by `Sample`.
    """

    def accept(self, drafts: Drafts, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        q = drafts.drawn_from
        if q is None or self.temperature == 0:
            return super().accept(drafts, logits, generator)
        p = self.scores(logits).softmax(-1)  # [B, N, V]
        drawn = drafts.tokens[:, 1:, None]
        likely, under_q = (each.gather(2, drawn)[..., 0] for each in (p[:, :-1], q))
        uniform = torch.rand(likely.shape, generator=generator, device=likely.device)
        node = (uniform * under_q < likely).long().cumprod(1).sum(1)  # the first of a chain that is rejected ends it
        rows = torch.arange(len(node), device=node.device)
        rest = (p[rows, node] - pad(q, (0, 0, 0, 1))[rows, node]).clamp(min=0)  # after the last draft there is no q
        # By rounding nothing may remain where p is q; then nothing was rejected either, or p is as good.
        rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[rows, node])
        return node, draw(rest.log(), generator)


class DrawnChain:
    """Chains of tokens drawn from a draft model: at every step one, each token after the ones before.

    Args:
        base: the base model.
        draft: the draft model, in any form of a model.
        rule: the settings of the draft's distribution, which need not be those of the target's; at temperature 0 each
            draft is the draft model's most likely token.
        num_drafts: length of the chain, at least 1.

    Raises:
        TreeoptError: as `ModelProposer`.
        ValueError: where the length is out of range.
    """

    tree = None

    def __init__(self, base: Base, draft: GivenModel, rule: Sample, num_drafts: int = NUM_DRAFTS) -> None:
        if not 1 <= num_drafts <= MAX_DEPTH:
            raise ValueError(f"num_drafts is {num_drafts}, not from 1 to {MAX_DEPTH}")
        model = as_draft(draft, base)
        assert model is not None
        self._rule = rule
        made = Drafter.model_only(num_drafts, 1, model.fingerprint, kind_of(model.model))
        self._proposer = proposer_for(base, None, made, model)
        self.reads = reads_of(self._proposer)
        self._chain = compile_ranks(Tree.chain(num_drafts), base.device)
        self.nodes, self.depth, self.window = num_drafts + 1, num_drafts, ModelProposer.window

    def start(self, texts: Sequence[Sequence[int]]) -> ProposerSession:
        if isinstance(self._proposer, BlockProposer):
            blocks = _DrawnBlock if self._proposer.module.token_head is None else _DrawnConditional
            return blocks(self._proposer, texts, self._rule)
        if isinstance(self._proposer, ParallelProposer):
            return _DrawnParallel(self._proposer, texts, self._rule)
        assert isinstance(self._proposer, ModelProposer)
        made = _DrawnModule if isinstance(self._proposer, ModuleProposer) else _Drawn
        return made(self._proposer, texts, self._rule)

    def draft(self, session: ProposerSession, roots: Tensor, states: Tensor, context: int) -> Drafts:
        assert isinstance(session, _Draws)
        session.roots = roots
        tokens, drawn_from = session.drawn(self.depth)
        tokens = torch.cat([roots[:, None], tokens.to(roots.device)], dim=1)
        return Drafts(tokens, self._chain, drawn_from=drawn_from.to(roots.device))


class _Draws(ABC):
    """Tokens drawn from the logits of a draft."""

    source: Any
    roots: Tensor  # of the step

    def __init__(self, proposer: Any, texts: Sequence[Sequence[int]], rule: Sample) -> None:
        super().__init__(proposer, texts, proposer.depth)  # type: ignore[call-arg]  # of the session it is a part of
        self._rule, self._generator = rule, None
        if rule.seed is not None:
            seed = (rule.seed ^ _OTHER_SEED) % _MOST_SEEDS
            self._generator = torch.Generator(proposer.draft.device).manual_seed(seed)

    @abstractmethod
    def after(self, level: int, tokens: Sequence[Tensor]) -> Tensor:
        """Logits [B, V] of a level's token, after those drawn before it."""

    def drawn(self, count: int) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B, count] drawn one after another, and the distribution float [B, count, V] of each."""
        tokens, drawn_from = list[Tensor](), []
        model, vocab_size = self.source.draft.model, self.source.vocab_size
        for level in range(count):
            logits = self.after(level, tokens)
            scores = over_tokens(self._rule.scores(logits[:, :vocab_size]), model, vocab_size)
            if self._rule.temperature == 0:
                top = best(scores)
                surely = torch.where(top == NOT_A_NUMBER, torch.nan, 0.0).to(scores)
                scores = torch.full_like(scores, -torch.inf).scatter_(1, top[:, None].clamp(min=0), surely[:, None])
            drawn_from.append(scores.softmax(-1))
            tokens.append(draw(scores, self._generator))
        if (torch.stack(tokens) == NOT_A_NUMBER).any():
            raise self.source.draft.not_finite("logits")
        return torch.stack(tokens, 1), torch.stack(drawn_from, 1)


class _Drawn(_Draws, ModelSession):
    def after(self, level: int, tokens: Sequence[Tensor]) -> Tensor:
        return self.follow(tokens[-1].clamp(min=0)) if level else self.advance()


class _DrawnModule(_Drawn, ModuleSession):
    """The same with a draft module, by the order of its base classes."""


class _DrawnAtOnce(_Draws, LevelsAtOnce):
    def after(self, level: int, tokens: Sequence[Tensor]) -> Tensor:
        if not level:
            self._levels = self.all_levels(self.roots)
        return self._levels[:, level]


class _DrawnBlock(_DrawnAtOnce, BlockSession):
    """The same with a block drafter, whose levels do not depend on each other."""


class _DrawnParallel(_DrawnAtOnce, ParallelSession):
    """The same with a P-EAGLE head."""


class _DrawnConditional(_Draws, ConditionalSession):
    """The same with a block drafter whose levels depend on the token above."""

    def after(self, level: int, tokens: Sequence[Tensor]) -> Tensor:
        if not level:
            return self.first(self.roots)[:, 0]
        return self.extend(tokens[-1][:, None].numpy(force=True), FIRST)[:, 0]
