"""The interface of a drafter: what proposes candidates for the nodes of a tree, in tracing and in decoding alike.

A `Proposer` is a drafter made ready for one model. `start` opens a `ProposerSession` for the rows of a batch. Per step:

    root = session.begin(roots, states)              # P = B nodes, one for each row
    found = session.candidates(root)                 # tokens [P, C], best first, with log-probabilities
    nodes = session.follow(root, parents, tokens)    # chosen candidates become nodes of the next level
    ...
    session.keep(kept)                               # the tokens that verification accepted

All nodes of a level and all rows of the batch go through each call together. Decoding fills a tree with candidates;
tracing follows the tokens of a finished text and looks up the rank of each. The calls are the same, so a trace
holds exactly the ranks that the decoder will use.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.verify.buffers import Buffers

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

NO_CANDIDATE = 1 << 30  # rank of a token that is not among the candidates


@dataclass(frozen=True, eq=False)
class Nodes:
    """P nodes of one depth.

    Args:
        depth: of the nodes; 0 for roots.
        row: int64 [P], the row of the batch that each belongs to.
        state: arrays [P, ...] of the drafter's own, such as the last tokens on the path.
    """

    depth: int
    row: Ints
    state: tuple[NDArray[Any], ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[Nodes], rows: int) -> Nodes:
        """Parts of one level as one, row by row; each part has equally many nodes of each of the `rows` rows."""
        if len(parts) == 1:
            return parts[0]

        def join(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
            by_row = [array.reshape(rows, len(array) // rows, *array.shape[1:]) for array in arrays]
            whole = np.concatenate(by_row, axis=1)
            return whole.reshape(-1, *whole.shape[2:])

        states = zip(*(part.state for part in parts), strict=True)
        return cls(parts[0].depth, join([part.row for part in parts]), tuple(join(arrays) for arrays in states))


@dataclass(frozen=True, eq=False)
class Candidates:
    """C candidates of each of P nodes, best first.

    Args:
        tokens: int64 [P, C], all different where the score is finite.
        scores: float32 [P, C], falling; -inf where a node has fewer candidates.
        estimate: gives `log_probability` from the scores.
    """

    tokens: Ints
    scores: Floats
    estimate: Callable[[Floats], Floats]

    @functools.cached_property
    def log_probability(self) -> Floats:
        """float32 [P, C]: log of the estimated probability that each candidate is the next token."""
        return self.estimate(self.scores)


@dataclass(frozen=True, eq=False)
class Features:
    """C candidates of each of P nodes in the order of their sources, and the terms of their scores.

    Args:
        tokens: int64 [P, C].
        again: bool [P, C], the token occurs among those before it too.
        head: float32 [P, C], log-probability by the level's head; 0 beyond the heads.
        prior: float32 [P, C], log of the token's frequency.
        ratios: float32 [P, C], by the n-gram table.
        prompt_lookup: bool [P, C], the token followed the latest longest match.
        length: int64 [P], tokens of that match.
    """

    tokens: Ints
    again: Bools
    head: Floats
    prior: Floats
    ratios: Floats
    prompt_lookup: Bools
    length: Ints


@dataclass(frozen=True, eq=False)
class Drafts:
    """The tokens of one step's trees.

    Args:
        tokens: int64 [B, N], each node's token, the root's first; siblings that are not void hold different tokens.
        tree: the compiled tree of all rows, or one for each.
        void: bool [B, N], nodes without a draft, which must not be accepted; None where there are none.
    """

    tokens: Tensor
    tree: Buffers
    void: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Kept:
    """What verification kept of one step, for drafters that learn from it.

    Args:
        tokens: for each row the tokens after the step's root: the accepted drafts, and the next root.
        paths: int64 [B, D+1], the nodes from the root to the accepted node; `PAD` beyond.
        logits: float [B, N, V], the base's logits after each node.
        hidden: float [B, N, d], the base's hidden states at each node.
    """

    tokens: Sequence[Sequence[int]]
    paths: Tensor
    logits: Tensor
    hidden: Tensor


@runtime_checkable
class Proposer(Protocol):
    """A drafter made ready for one model."""

    @property
    def depth(self) -> int:
        """L, the number of levels."""

    @property
    def num_candidates(self) -> int:
        """The most candidates of a node."""

    @property
    def window(self) -> int:
        """How many of the last tokens of a text it reads, the root included; 0 where it reads none."""

    @property
    def rows_at_once(self) -> int:
        """Rows of a batch that fit into memory together, for tracing, where every position is a row."""

    def start(self, texts: Sequence[Sequence[int]] | Ints, depth: int) -> ProposerSession:
        """A session for the rows of a batch.

        Args:
            texts: for each row its prompt and first root; int64 [B, n] may begin with negative tokens, which are none.
            depth: levels of its steps, at most `depth`.
        """


class ProposerSession(ABC):
    """The drafting of a batch of texts in progress; see the module."""

    @abstractmethod
    def begin(self, roots: Tensor, states: Tensor) -> Nodes:
        """Begin a step.

        Args:
            roots: int64 [B], each row's root, on the model's device.
            states: float [B, d], the hidden states that chose the roots.

        Returns:
            The roots as nodes, one for each row.
        """

    @abstractmethod
    def candidates(self, nodes: Nodes) -> Candidates:
        """The candidates of each node for the level below it."""

    @abstractmethod
    def features(self, nodes: Nodes) -> Features:
        """The terms of the candidates' scores, for fitting their weights."""

    @abstractmethod
    def follow(self, nodes: Nodes, parents: Ints, tokens: Ints) -> Nodes:
        """Children of nodes as nodes of the next level.

        Args:
            nodes: P nodes.
            parents: int64 [P'], each child's parent among them.
            tokens: int64 [P'], the children's tokens, candidates or not.
        """

    def keep(self, kept: Kept) -> None:  # noqa: B027 - a drafter that reads no text stores nothing
        """Continue behind the tokens that a step kept."""

    def select(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Continue with these rows of the batch only."""

    def mark(self) -> Any:
        """The place in the texts, for `rewind`."""
        return None

    def rewind(self, mark: Any) -> None:  # noqa: B027
        """Forget what was kept since `mark`."""

    def check_finite(self, first: int) -> None:  # noqa: B027
        """Raise E504 where the scores of the step that was begun are not finite; `first` is the number of its row 0."""

    def rank(self, nodes: Nodes, tokens: Ints) -> Ints:
        """Rank of one token, int64 [P], among the candidates of each node; `NO_CANDIDATE` where it is none."""
        found = self.candidates(nodes)
        hit = (found.tokens == tokens[:, None]) & np.isfinite(found.scores)
        return np.where(hit.any(1), hit.argmax(1), NO_CANDIDATE)

    def fill(self, roots: Tensor, states: Tensor, tree: Buffers) -> Drafts:
        """Begin a step, and fill one tree: a node of rank r gets the candidate r of its parent.

        Where a node has fewer candidates than the tree asks for, the nodes beyond them are void.
        """
        nodes, rows = self.begin(roots, states), len(roots)
        tokens, scores = [], []
        for level in tree.levels:
            found = self.candidates(nodes)
            each = (rows, -1, found.tokens.shape[1])
            tokens.append(found.tokens.reshape(each)[:, level.parents, level.ranks])  # [B, n]
            scores.append(found.scores.reshape(each)[:, level.parents, level.ranks])
            if len(level.inner):
                first = np.arange(rows)[:, None] * (len(nodes.row) // rows)
                parents = (first + level.parents[level.inner]).ravel()
                nodes = self.follow(nodes, parents, tokens[-1][:, level.inner].ravel())
        if not tokens:
            return Drafts(roots[:, None], tree)
        drafts = torch.from_numpy(np.concatenate(tokens, axis=1)).to(roots.device)
        void = ~np.isfinite(np.concatenate(scores, axis=1))
        return Drafts(torch.cat([roots[:, None], drafts], dim=1), tree, _with_root(void, roots) if void.any() else None)


def _with_root(void: Bools, roots: Tensor) -> Tensor:
    """bool [B, N] on the roots' device from the drafts' [B, N-1]."""
    return torch.from_numpy(np.pad(void, ((0, 0), (1, 0)))).to(roots.device)
