"""The kernel's candidates and scores of single nodes, for tests that compare them with rules written out."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from treeopt.drafter import Drafter
from treeopt.drafting.interface import Features, Floats, Ints
from treeopt.drafting.kernel.compiled import compiled
from treeopt.drafting.kernel.data import NO_MEMORY, Kernel, record_arrays
from treeopt.drafting.kernel.nodes import begin_row, candidates, log_probability, normalise
from treeopt.drafting.kernel.session import KernelSession, top_logprobs
from treeopt.drafting.memory import Memory
from treeopt.ngram_table import CONTEXT


@dataclass(frozen=True)
class Nodes:
    """P nodes of one depth: their rows int64 [P], and the drafts above each int64 [P, depth]."""

    row: Ints
    path: Ints


@dataclass(frozen=True)
class Candidates:
    """C candidates of each of P nodes, best first; scores are -inf where a node has fewer."""

    tokens: Ints
    scores: Floats


@dataclass(frozen=True)
class Step:
    """A begun step of all rows."""

    session: Any
    root: Nodes


@compiled
def candidates_of_nodes(k: Kernel, rows: Ints, paths: Ints, tokens: Ints, scores: Floats, counts: Ints) -> None:
    """All candidates of each node, in the order in which they were proposed."""
    for node in range(len(rows)):
        begin_row(k, rows[node])
        for place in range(paths.shape[1]):
            k.work.path[place] = paths[node, place]
        counts[node] = candidates(k, rows[node], paths.shape[1], k.record.sources[paths.shape[1]])
        for i in range(counts[node]):
            tokens[node, i], scores[node, i] = k.work.token[i], k.work.score[i]


@compiled
def log_probabilities(k: Kernel, depth: int, scores: Floats, likely: Floats) -> None:
    """Of given scores [P, C], each row's finite ones first."""
    for node in range(len(scores)):
        count = 0
        while count < scores.shape[1] and scores[node, count] > -np.inf:
            k.work.score[count] = scores[node, count]
            count += 1
        largest, total = normalise(k.record, k.work, depth, count)
        for i in range(count):
            likely[node, i] = log_probability(k.record, depth, scores[node, i], largest, total)


class Scorer:
    """The kernel with a drafter record, and no model."""

    def __init__(self, drafter: Drafter, memory: Memory | None = None) -> None:
        self.drafter = drafter
        self.memory = NO_MEMORY if memory is None else memory.arrays
        self.window = max(drafter.window, CONTEXT) if drafter.ngram_table else 1
        self.record = record_arrays(drafter)

    def session(self, logits: torch.Tensor, recent: Ints, depth: int) -> KernelSession:
        """A session with one step begun.

        Args:
            logits: float [H', B, V].
            recent: int64 [B, R], the last tokens, the root last; -1 where there are none.
            depth: levels.
        """
        table, top = self.drafter.ngram_table, self.drafter.top
        vocab = table.vocab_size if table is not None else logits.shape[-1]
        known = min(vocab, max(top, self.drafter.top_logprobs or vocab))
        known = min(top, vocab) if table is None else known
        if len(logits) > 1:  # each level has its own, also without heads
            sources = [level if level < len(logits) else -1 for level in range(self.drafter.depth)]
        else:
            sources = self.record.sources.tolist()
        record = self.record._replace(sources=np.array(sources))
        texts = [row[int((row < 0).cumprod().sum()) :].tolist() for row in recent]
        texts = [[vocab if token < 0 else token for token in text] for text in texts]
        source: Any = SimpleNamespace(
            logits_of="the test",
            logits_name="head",
            record=record,
            vocab_size=vocab + 1,
            known=known,
            memory=self.memory,
        )
        session = KernelSession(source, texts, depth)
        session.look(
            top_logprobs(logits, known).transpose(0, 1).flatten(1).numpy()
            if len(logits)
            else np.zeros((len(recent), 0), np.int32)
        )
        session.begin(logits, logits)
        return session

    def begin(self, logits: torch.Tensor, recent: Ints, depth: int) -> Step:
        rows = np.arange(len(recent))
        return Step(self.session(logits, recent, depth), Nodes(rows, np.zeros((len(recent), 0), np.int64)))

    def follow(self, step: Step, nodes: Nodes, parents: Ints, tokens: Ints) -> Nodes:
        """Children of nodes."""
        return Nodes(nodes.row[parents], np.column_stack([nodes.path[parents], tokens]).astype(np.int64))

    def candidates(self, step: Step, nodes: Nodes) -> Candidates:
        """By falling score; of equal scores in the order in which they were proposed."""
        kernel = self._kernel(step)
        shape = len(nodes.row), len(kernel.work.token)
        tokens, scores = np.zeros(shape, np.int64), np.full(shape, -np.inf, np.float32)
        candidates_of_nodes(
            kernel, nodes.row, np.ascontiguousarray(nodes.path), tokens, scores, np.zeros(shape[0], np.int64)
        )
        order = np.argsort(-scores, axis=1, kind="stable")
        return Candidates(np.take_along_axis(tokens, order, 1), np.take_along_axis(scores, order, 1))

    def features(self, step: Step, nodes: Nodes) -> Features:
        """As `ProposerSession.features`."""
        assert nodes.row.tolist() == step.root.row.tolist(), "one node of each row"
        return step.session.features(nodes.path)

    def log_probability(self, depth: int, scores: Floats) -> Floats:
        """Of the children of nodes of one depth: scores [P, C] -> [P, C]."""
        step = self.begin(
            torch.zeros(self.drafter.num_heads, 1, self.record.prior.size or 4), np.zeros((1, 4), np.int64), 1
        )
        likely = np.full(scores.shape, -np.inf, np.float32)
        kernel = self._kernel(step)
        width = max(scores.shape[1], len(kernel.work.score))
        work = kernel.work._replace(score=np.zeros(width, np.float32))
        log_probabilities(kernel._replace(work=work), depth, np.ascontiguousarray(scores, np.float32), likely)
        return likely

    def _kernel(self, step: Step) -> Kernel:
        return step.session.kernel(step.session.working(1)[0])


def listed(session: Any, path: list[int]) -> tuple[list[int], float]:
    """The candidates at the end of a path, best first, and the probability of the best one."""
    kernel = session.kernel(session.working(1)[0])
    width = len(kernel.work.token)
    tokens, scores = np.zeros((1, width), np.int64), np.full((1, width), -np.inf, np.float32)
    drafts = np.array([path], np.int64).reshape(1, -1)
    candidates_of_nodes(kernel, np.zeros(1, np.int64), drafts, tokens, scores, np.zeros(1, np.int64))
    order = np.argsort(-scores[0], kind="stable")[: int(np.isfinite(scores).sum())]
    likely = np.full(scores.shape, -np.inf, np.float32)
    log_probabilities(kernel, len(path), scores[:, order], likely)
    return tokens[0, order].tolist(), float(np.exp(likely[0, 0]))
