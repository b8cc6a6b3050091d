"""The interface of drafters, which propose drafts for the nodes of a tree, both in tracing and in decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.verify.buffers import Buffers

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Observed = NDArray[np.int32]
TokenLists = Sequence[Sequence[int]]  # token ids of each text of a batch

NO_CANDIDATE = 1 << 30  # rank of a token that is not a candidate
DRAFTER = "drafter"  # the name of a drafter of the caller
NO_FLOATS: Floats = np.zeros((0, 0), np.float32)


class Features(NamedTuple):
    """The candidates of one node in each of P rows, from all sources, and the terms of their scores."""

    tokens: Ints  # [P, C], of which the first `width` are candidates
    terms: Floats  # [4, P, C], logs: probability by the head, frequency, ratios of n-gram table and cache
    width: Ints  # [P]
    looked_up: Ints  # [P], the candidate that followed the latest longest match
    length: Ints  # [P], tokens of that match
    found: Ints  # [P], number of `CACHE_LENGTHS` that were found in the text so far


@dataclass(frozen=True, eq=False)
class Drafts:
    """The tokens of one step's trees."""

    tokens: Tensor  # int64 [B, N], each node's token, the root's first; siblings that are not void have different ones
    tree: Buffers  # the compiled tree of all rows, or one for each
    void: Tensor | None = None  # bool [B, N], nodes without a draft, which must not be accepted
    drawn_from: Tensor | None = None  # float [B, N-1, V], the distribution that each draft of a chain was drawn from


@dataclass(frozen=True, eq=False)
class AcceptedPart:
    """The accepted part of one step, for drafters whose drafts depend on it."""

    tokens: TokenLists  # of each row those after the step's root: accepted drafts, and the next root
    paths: Tensor  # int64 [B, D+1], the nodes from the root to the accepted node, then `PAD`
    logits: Tensor  # float [B, N, V], the base's logits after each node
    hidden: Tensor  # float [B, N, d], the base's hidden states at each node
    drafts: Drafts  # the verified trees


class Expansion(NamedTuple):
    """One tree for each row, the likeliest nodes first; of equally likely nodes a parent before its child."""

    tokens: Ints  # [B, n], without the root
    parents: Ints  # [B, n], each node's parent: 0 is the root, i > 0 the node in column i - 1
    depths: Ints  # [B, n]
    log_probability: Floats  # [B, n], of each node's path, descending along a row; -inf beyond `drafts`
    drafts: Ints  # [B], the number of nodes
    size: Ints  # [B], the size with the most estimated tokens - cost, of `SizeLimits`; the root counts


@dataclass(frozen=True, eq=False)
class SizeLimits:
    """The trees that `ProposerSession.grow` may choose: a step takes the size with the most estimated tokens - cost."""

    sizes: tuple[int, ...]  # nodes, the root counted, or path tokens; ascending
    cost: tuple[float, ...]  # of a step of each size, in tokens
    depth: int  # the maximum
    path_tokens: bool = False  # whether sizes are budgets of path tokens


@runtime_checkable
class Proposer(Protocol):
    """A drafter with the model that it drafts for."""

    depth: int  # L, the number of levels
    num_candidates: int  # the maximum of a node
    window: int  # the number of last tokens of a text that it reads, the root included; 0 if none
    rows_at_once: int  # the maximum in tracing, where every position is a row; limits memory

    def start(self, texts: TokenLists, depth: int, ends: TokenLists | None = None) -> ProposerSession:
        """A session for the rows of a batch, each a prompt and its first root, with at most `self.depth` levels.

        In tracing `ends` are for each text the numbers of its tokens, ascending, that make a row each, the last of them
        the root.
        """


class ProposerSession(ABC):
    """The drafting of a batch of texts in progress.

    Each step of a decoder makes these calls, all for all rows of the batch:

        drafts = session.fill(roots, states, tree)       # the tokens of one tree's nodes, or
        drafts = session.grow(roots, states, limits)     # for each row a tree of its likeliest nodes
        session.keep(kept)                               # the tokens that were accepted
        observed = session.observe(states, logits)       # on the device: what the host needs of the next states
        session.look(host_copy_of_observed)              # the caller transfers it with the result of the step

    Tracing makes every position of a finished text a row, calls `begin`, and looks up the tokens that follow (`trace`,
    `candidates`, `expand`), by the same code.

    Two sessions do all this for drafters with logits: `kernel.session.KernelSession` where those of all levels are
    known when a step begins, `model.ModelSession` where each level takes a forward. A drafter without probabilities
    has static trees only, and defines `begin`, `fill` and what its texts need.
    """

    name = DRAFTER  # in messages, and as the source of its drafts

    def read(self, states: Sequence[Tensor]) -> None:  # noqa: B027 - few drafters read more than the last state
        """Take the base's states at the tokens of each text before its last root, float [n, d]."""

    @abstractmethod
    def begin(self, roots: Tensor, states: Tensor) -> None:
        """Begin a step; `fill` and `grow` do. States [B, d] are those that the roots int64 [B] were predicted from."""

    @abstractmethod
    def fill(self, roots: Tensor, states: Tensor, tree: Buffers) -> Drafts:
        """Begin a step, and fill one tree: a node of rank r gets candidate r of its parent.

        Where a node has fewer candidates than the tree has ranks, its children of larger ranks are void.
        """

    def grow(self, roots: Tensor, states: Tensor, limits: SizeLimits) -> Drafts:
        """Begin a step, and choose for each row the tree of its likeliest nodes; all rows have the largest size.

        Of path tokens each row has its best tree, by `kernel.paths`.
        """
        raise static_only(self.name, "chosen per step")

    def expand(self, nodes: int, depth: int) -> Expansion:
        """The `nodes` - 1 likeliest drafts of each row, at most `depth` levels deep; all where there are fewer."""
        raise static_only(self.name, "chosen per step")

    def trace(self, true: Ints, *, confidence: bool = False) -> tuple[Ints, Floats]:
        """Follow the tokens that followed the root of each row: int64 [B, L], negative beyond the end of the text.

        Returns int64 [B, L], the rank of each among the candidates of its level, or `NO_CANDIDATE`; and with
        `confidence` float32 [B, L], log of the estimated probability of each level's best candidate, else [0, 0].
        """
        raise static_only(self.name, "traced")

    def candidates(self, true: Ints, count: int) -> Ints:
        """int64 [B, L, R]: the best R candidates of each level after the true tokens; -1 where there are fewer."""
        raise static_only(self.name, "traced")

    def sources(self, true: Ints) -> list[list[dict[str, int]]]:
        """For each row and level by name the sources that have the true token, with its rank in their own lists.

        Empty beyond the end of the text. docs/pictures.md lists the names.
        """
        ranks = self.trace(true)[0].tolist()
        return [[{self.name: rank} if rank != NO_CANDIDATE else {} for rank in row] for row in ranks]

    def features(self, true: Ints) -> Features:
        """The terms of the candidates' scores after the true tokens int64 [B, depth], for fitting the weights."""
        raise static_only(self.name, "traced")

    def observe(self, states: Tensor, logits: Tensor | None = None) -> Tensor | None:
        """On the device, int32 [B, n]: what the host needs of the states of the next step; None if nothing.

        `logits` [B, V] are the base's at these states, if known.
        """
        return None

    def look(self, observed: Observed) -> None:  # noqa: B027 - not all drafters read states on the host
        """Take the host's copy of `observe`; otherwise `begin` transfers it."""

    def skip(self) -> None:  # noqa: B027
        """Draft nothing in this step: what `look` took is not of the states of the next one."""

    def keep(self, kept: AcceptedPart) -> None:  # noqa: B027 - not all drafters read the text
        """Continue after the accepted tokens of a step."""

    def select(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Continue with these rows of the batch only."""

    def mark(self) -> Any:
        """The place in the texts, for `rewind`."""
        return None

    def rewind(self, mark: Any) -> None:  # noqa: B027
        """Undo the calls of `keep` since `mark`."""

    def check_finite(self) -> None:  # noqa: B027 - others check what they read on the host
        """Raise E504 where scores of the current step are not finite."""


def reads_of(drafter: object) -> tuple[int, ...]:
    """The base's hidden states that a drafter's `reads` names, as of `Base.reading`; none where it has no such name.

    A session of a drafter that names some is given those of the prompt by `ProposerSession.read`.
    """
    return getattr(drafter, "reads", ())


def static_only(name: str, done: str) -> TreeoptError:
    """The error of a call that needs probabilities, or the state before a position that is not the last one."""
    why = "its candidates have ranks and no probabilities, and depend on all steps before"
    fix = "a static tree, such as token_recycling of `treeopt list`"
    return TreeoptError(Code.DRAFTER_MISMATCH, f"trees of {name} cannot be {done}", why=why, fix=fix)
