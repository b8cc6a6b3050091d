"""Decode steps that are timed: after cached texts, again and again, and those of several decoders in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treeopt.decode.decoder import Rows, TreeDecoder, advance
from treeopt.decode.rules import Greedy, Sample
from treeopt.drafting.interface import Drafts
from treeopt.latency import LatencyPoint
from treeopt.models.base import Base, now
from treeopt.tree import Tree

_SEED = 0
_MOST_SAMPLES = 8  # texts that are sampled, in one batch
_SAMPLE_TOKENS = 256  # of each; they fill `treeopt.drafter.WINDOW` together
_TEMPERATURE = 0.7  # of text that drafters are learned from


def random_prompts(base: Base, batch: int, context: int) -> Tensor:
    """Random tokens as int64 [B, T], the same at every call."""
    check_memory(base, batch, context)
    return torch.randint(base.vocab_size, (batch, context), generator=_generator()).to(base.device)


def model_texts(base: Base, batch: int, context: int) -> Tensor:
    """Text of the model as int64 [B, T], the same at every call, for drafters whose time depends on the text.

    A row is a sequence of sampled texts that ends at the end of one, and each row of up to `_MOST_SAMPLES` ends with
    another one. The samples begin with a random token, after the token that begins a text where the model has one.
    """
    check_memory(base, batch, context)
    length = min(_SAMPLE_TOKENS, context, base.context - 2)
    if length < 1:
        return random_prompts(base, batch, context)
    count = min(_MOST_SAMPLES, max(batch, -(-context // length)))
    samples = _samples(base, count, length)
    repeats = -(-context // length)
    rows = [torch.cat([samples[(row + 1 + i) % count] for i in range(repeats)])[-context:] for row in range(batch)]
    return torch.stack(rows).to(base.device)


def check_memory(base: Base, batch: int, context: int) -> None:
    """Raise at once where not even the hidden states of these texts fit; texts are made as lists, which takes long."""
    torch.empty(batch, context, base.hidden_size, dtype=base.dtype, device=base.device)


def _samples(base: Base, count: int, length: int) -> Tensor:
    """int64 [count, length], sampled by autoregressive decoding."""
    first = torch.randint(base.vocab_size, (count,), generator=_generator()).tolist()
    begin = base.model.generation_config.bos_token_id
    starts = [[token] if begin is None else [int(begin), token] for token in first]
    rule = Sample(_TEMPERATURE, seed=_SEED)
    decoder = TreeDecoder(base, None, Tree(()), acceptance=rule, probe=False)
    rows = decoder.prefill(starts, length)
    texts: list[list[int]] = [[] for _ in starts]
    for step in advance(decoder, rows, dict.fromkeys(rows.indices, length), frozenset()):
        for row, tokens in step.items():
            texts[row] += tokens
    return torch.tensor(texts)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


_QUARTILES = (0.25, 0.5, 0.75)
_DIGITS = 9  # decimals of a second: the clock counts nanoseconds
_TIMED = 3  # successive steps of one size, after one that fills the processor's caches


@dataclass(frozen=True)
class AcceptDeepest(Greedy):
    """Greedy acceptance at its full cost, whose result is replaced by the last node, a deepest one.

    Random text accepts nothing, but keeping a deep path means moving cache entries, which a timed step must include.
    """

    def accept(self, drafts: Drafts, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        node, root = super().accept(drafts, logits, generator)
        return node.fill_(drafts.tokens.shape[1] - 1), root


class TimedStep:
    """A step of a decoder after cached texts, which can be run again and again.

    The texts, prompts int64 [B, T] or as many of their last tokens as the decoder reads, are `cached` by a decoder of
    the same base whose trees are at least as large and as deep: all sizes share the one cache.
    """

    def __init__(self, decoder: TreeDecoder, cached: Rows, prompts: Tensor) -> None:
        self.decoder = decoder
        texts = [[*text, root] for text, root in zip(prompts.tolist(), cached.roots, strict=True)]
        drafting = decoder.trees.start(texts)
        self.rows = Rows(cached.session, drafting, cached.roots, cached.root, cached.hidden, None, None)
        self._start = self.rows.mark()

    def seconds(self) -> float:
        """Run the step, and return the rows to the state before it."""
        begin = now(self.decoder.base)
        self.decoder.step(self.rows)
        end = now(self.decoder.base)
        self.rows.rewind(self._start)
        return end - begin

    @torch.inference_mode()
    def drafting_seconds(self) -> float:
        """Seconds of choosing the tree and its tokens again, without verifying it; the shortest of several."""
        spent = []
        for _ in range(_TIMED):
            begin = now(self.decoder.base)
            self.decoder.trees.draft(self.rows.drafting, self.rows.root, self.rows.hidden)
            spent.append(now(self.decoder.base) - begin)
        return min(spent)

    def advance(self) -> None:
        """Run the step and stay after it; the rows are then the `cached` of other steps."""
        self.decoder.step(self.rows)

    def after_lead_in(self) -> float:
        """Seconds of a step that follows a step of the same size: the shortest of several."""
        self.seconds()
        return min(self.seconds() for _ in range(_TIMED))


def prefilled(decoders: Sequence[TreeDecoder], prompts: Tensor, max_new_tokens: int) -> list[Rows]:
    """The texts [B, T] in the cache of the largest decoder, for all.

    A compiled forward runs trees of one size, so each compiled decoder has a cache of its own.
    """
    largest = max(decoders, key=lambda one: (one.trees.nodes, one.trees.depth))
    if largest.base.compile:
        return [decoder.prefill(list(prompts), max_new_tokens) for decoder in decoders]
    return [largest.prefill(list(prompts), max_new_tokens)] * len(decoders)


class TimedRounds:
    """Steps of several decoders after the same texts, timed in turn.

    The decoder of one node is first, the largest and deepest last. The cache has `context` tokens, at the last round
    where a decoder reads the text.
    """

    def __init__(self, decoders: Sequence[TreeDecoder], batch: int, context: int, rounds: int) -> None:
        largest = decoders[-1]
        self._decoders, self._batch, self._context = decoders, batch, context
        reads = largest.trees.window > 0
        texts = (model_texts if reads else random_prompts)(largest.base, batch, context)
        moves = reads and not largest.base.compile  # compiled steps share no cache that one of them could advance
        begin = max(1, context - rounds + 1) if moves else context
        self._texts = texts[:, :begin]
        self._cached = prefilled(decoders, self._texts, context - begin + largest.trees.depth + 1)
        self._spent: list[list[float]] = []
        self._drafting: list[list[float]] = []

    def run(self, *, drafting: bool) -> None:
        """Time a step of each decoder, and with `drafting` its drafting alone; then go one token on in the text."""
        steps = [
            TimedStep(decoder, cached, _read(decoder, self._texts))
            for decoder, cached in zip(self._decoders, self._cached, strict=True)
        ]
        spent, alone = [], []
        for step in steps:
            spent.append(step.after_lead_in())
            alone.append(step.drafting_seconds() if drafting else 0.0)
        self._spent.append(spent)
        self._drafting.append(alone)
        if self._texts.shape[1] < self._context:
            self._texts = torch.cat([self._texts, self._cached[0].root[:, None]], dim=1)
            steps[0].advance()
            self._cached = [steps[0].rows] * len(steps)

    def points(self) -> list[LatencyPoint]:
        """Medians and quartiles of the quieter half of the rounds, the first left out; of drafting the median.

        A round is quieter than another where its steps take less time in all: other load lasts for whole rounds, and
        lengthens long steps most.
        """
        spent, drafting = np.array(self._spent[1:]), np.array(self._drafting[1:])
        quiet = spent.sum(1).argsort(kind="stable")[: -(-len(spent) // 2)]
        quartiles = np.quantile(spent[quiet], _QUARTILES, axis=0).round(_DIGITS).T.tolist()
        alone_each = np.median(drafting[quiet], axis=0).round(_DIGITS).tolist()
        points = []
        for decoder, (low, median, high), alone in zip(self._decoders, quartiles, alone_each, strict=True):
            nodes = decoder.trees.nodes
            points.append(LatencyPoint(nodes, self._batch, self._context, median, low, high, alone or None))
        return points


def _read(decoder: TreeDecoder, texts: Tensor) -> Tensor:
    """The last tokens of texts [B, T] that a decoder reads, its root left out."""
    return texts[:, max(0, texts.shape[1] + 1 - max(1, decoder.trees.window)) :]
