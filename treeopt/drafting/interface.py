"""The interface of drafters, which propose candidates for the nodes of a tree, both in tracing and in decoding.

A `Proposer` is a drafter with the model that it drafts for. `start` opens a `ProposerSession` for the rows of a batch.
Each step makes these calls:

    root = session.begin(roots, states)              # P = B nodes, one for each row
    found = session.candidates(root)                 # tokens [P, C], best first, with log-probabilities
    nodes = session.follow(root, parents, tokens)    # chosen candidates become nodes of the next level
    ...
    session.keep(kept)                               # the tokens that were accepted

Each call takes all nodes of a level and all rows of the batch. Decoding fills a tree with candidates; tracing follows
the tokens of a finished text and looks up the rank of each. The calls are the same, so the ranks in a trace are exactly
those that the decoder uses.
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

NO_CANDIDATE = 1 << 30  # rank of a token that is not a candidate


@dataclass(frozen=True, eq=False)
class Nodes:
    """P nodes of one depth.

    Args:
        depth: of the nodes; 0 for roots.
        row: int64 [P], each node's row of the batch.
        state: arrays [P, ...] that the drafter defines, such as the last tokens on the path.
    """

    depth: int
    row: Ints
    state: tuple[NDArray[Any], ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[Nodes], rows: int) -> Nodes:
        """The nodes of all parts of one level, sorted by row; in a part, each of the `rows` rows has as many nodes."""
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
        tokens: int64 [P, C], different tokens where the score is finite.
        scores: float32 [P, C], descending; -inf where a node has fewer candidates.
        estimate: the function from the scores to `log_probability`.
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
    """C candidates of each of P nodes, from all sources, and the terms of their scores.

    Args:
        tokens: int64 [P, C].
        repeated: bool [P, C], whether an earlier candidate of the node is the same token.
        head: float32 [P, C], log-probability by the level's head; 0 for extra depth.
        prior: float32 [P, C], log of the token's frequency.
        ratios: float32 [P, C], log-ratio of the n-gram table.
        prompt_lookup: bool [P, C], whether the token followed the latest longest match.
        length: int64 [P], tokens of that match.
        cache: float32 [P, C], log-ratio of the cache of the text so far to the n-gram table.
        found: int64 [P], number of `CACHE_LENGTHS` that were found in the text so far.
    """

    tokens: Ints
    repeated: Bools
    head: Floats
    prior: Floats
    ratios: Floats
    prompt_lookup: Bools
    length: Ints
    cache: Floats
    found: Ints


@dataclass(frozen=True, eq=False)
class Drafts:
    """The tokens of one step's trees.

    Args:
        tokens: int64 [B, N], each node's token, the root's first; siblings that are not void have different tokens.
        tree: the compiled tree of all rows, or one for each.
        void: bool [B, N], nodes without a draft, which must not be accepted; None where there are none.
    """

    tokens: Tensor
    tree: Buffers
    void: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Kept:
    """The accepted part of one step, for drafters whose drafts depend on it.

    Args:
        tokens: for each row the tokens after the step's root: the accepted drafts, and the next root.
        paths: int64 [B, D+1], the nodes from the root to the accepted node, then `PAD`.
        logits: float [B, N, V], the base's logits after each node.
        hidden: float [B, N, d], the base's hidden states at each node.
    """

    tokens: Sequence[Sequence[int]]
    paths: Tensor
    logits: Tensor
    hidden: Tensor


@runtime_checkable
class Proposer(Protocol):
    """A drafter with the model that it drafts for."""

    @property
    def depth(self) -> int:
        """L, the number of levels."""

    @property
    def num_candidates(self) -> int:
        """The maximum number of candidates of a node."""

    @property
    def window(self) -> int:
        """The number of last tokens of a text that it reads, the root included; 0 if none."""

    @property
    def rows_at_once(self) -> int:
        """The maximum number of rows in tracing, where every position is a row; limits memory."""

    def start(self, texts: Sequence[Sequence[int]] | Ints, depth: int) -> ProposerSession:
        """A session for the rows of a batch.

        Args:
            texts: for each row its prompt and first root; in an array int64 [B, n], negative tokens at the start of a
                row are padding.
            depth: levels of each step, at most `self.depth`.
        """


class ProposerSession(ABC):
    """The drafting of a batch of texts in progress; see the module docstring."""

    @abstractmethod
    def begin(self, roots: Tensor, states: Tensor) -> Nodes:
        """Begin a step.

        Args:
            roots: int64 [B], each row's root, on the model's device.
            states: float [B, d], the hidden states that the roots were predicted from.

        Returns:
            The roots as nodes, one for each row.
        """

    @abstractmethod
    def candidates(self, nodes: Nodes) -> Candidates:
        """The candidates of each node for the level below it."""

    @abstractmethod
    def features(self, nodes: Nodes) -> Features:
        """The terms of the candidates' scores, for fitting the weights."""

    @abstractmethod
    def follow(self, nodes: Nodes, parents: Ints, tokens: Ints) -> Nodes:
        """Children of nodes as nodes of the next level.

        Args:
            nodes: P nodes.
            parents: int64 [P'], each child's parent among them.
            tokens: int64 [P'], the children's tokens, which need not be candidates.
        """

    def keep(self, kept: Kept) -> None:  # noqa: B027 - not all drafters read the text
        """Continue after the accepted tokens of a step."""

    def select(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Continue with these rows of the batch only."""

    def mark(self) -> Any:
        """The place in the texts, for `rewind`."""
        return None

    def rewind(self, mark: Any) -> None:  # noqa: B027
        """Undo the calls of `keep` since `mark`."""

    def check_finite(self, first: int) -> None:  # noqa: B027
        """Raise E504 where scores of the current step are not finite; the message counts rows from `first`."""

    def rank(self, nodes: Nodes, tokens: Ints) -> Ints:
        """The rank of one token, int64 [P], among the candidates of each node; `NO_CANDIDATE` if it is not one."""
        found = self.candidates(nodes)
        hit = (found.tokens == tokens[:, None]) & np.isfinite(found.scores)
        return np.where(hit.any(1), hit.argmax(1), NO_CANDIDATE)

    def fill(self, roots: Tensor, states: Tensor, tree: Buffers) -> Drafts:
        """Begin a step, and fill one tree: a node of rank r gets candidate r of its parent.

        Where a node has fewer candidates than the tree has ranks, its children of larger ranks are void.
        """
        nodes, rows = self.begin(roots, states), len(roots)
        tokens, scores = [], []
        for level in tree.levels:
            found = self.candidates(nodes)
            width = found.tokens.shape[1]
            slots = level.parents * width + np.minimum(level.ranks, width - 1)  # of each row's candidates
            tokens.append(found.tokens.reshape(rows, -1).take(slots, 1))  # [B, n]
            scores.append(found.scores.reshape(rows, -1).take(slots, 1))
            if tree.top_k > width:  # levels may have fewer candidates than others
                scores[-1][:, level.ranks >= width] = -np.inf
            if len(level.inner):
                first = np.arange(rows)[:, None] * (len(nodes.row) // rows)
                parents = (first + level.parents.take(level.inner)).ravel()
                nodes = self.follow(nodes, parents, tokens[-1].take(level.inner, 1).ravel())
        if not tokens:
            return Drafts(roots[:, None], tree)
        drafts = torch.from_numpy(np.concatenate(tokens, axis=1)).to(roots.device)
        void = ~np.isfinite(np.concatenate(scores, axis=1))
        return Drafts(torch.cat([roots[:, None], drafts], dim=1), tree, _with_root(void, roots) if void.any() else None)


def _with_root(void: Bools, roots: Tensor) -> Tensor:
    """bool [B, N] on the roots' device from the drafts' [B, N-1]."""
    return torch.from_numpy(np.pad(void, ((0, 0), (1, 0)))).to(roots.device)
