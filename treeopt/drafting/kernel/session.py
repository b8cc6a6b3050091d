"""Sessions whose candidates the kernel scores: the texts of a batch on the host, a step's logits, and the threads."""

import functools
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeopt.defaults import STEP_SIZES
from treeopt.drafting.interface import (
    NO_FLOATS,
    AcceptedPart,
    Drafts,
    Expansion,
    Features,
    Floats,
    Ints,
    Observed,
    ProposerSession,
    SizeLimits,
)
from treeopt.drafting.kernel import data, trees
from treeopt.drafting.kernel.compiled import note_compilation
from treeopt.drafting.kernel.memory import token_after
from treeopt.drafting.kernel.nodes import begin_row, context_row, count_votes, index_up_to, likeliest_voted, matches
from treeopt.drafting.kernel.paths import cut_to_paths
from treeopt.drafting.kernel.trees import Ranked, Sizes
from treeopt.errors import Code, TreeoptError
from treeopt.models.logits import top_ids
from treeopt.verify.buffers import Buffers, once_a_tree

_LEAST_ROWS = 4  # of a thread


class KernelRows(ProposerSession):
    """A session by texts on the host, with an index that grows with them; `set_step` gives it the logits of a step."""

    def __init__(
        self,
        source: data.KernelSource,
        texts: Sequence[Sequence[int]],
        depth: int,
        ends: Sequence[Sequence[int]] | None = None,
    ) -> None:
        note_compilation()
        self.source, self.depth = source, depth
        rows = [[len(text)] for text in texts] if ends is None else ends
        self._text = np.repeat(np.arange(len(texts)), [len(one) for one in rows])
        self._end: Ints = np.array([end for one in rows for end in one], np.int64)
        if not all(0 <= min(text, default=0) <= max(text, default=0) < source.vocab_size for text in texts):
            raise ValueError(f"a text has a token outside the vocabulary of {source.vocab_size}")  # not checked below
        shape = (len(texts), max(map(len, texts), default=1))
        latest, indexed = np.zeros((len(texts), source.vocab_size), np.int32), np.zeros(len(texts), np.int64)
        self._texts = data.Texts(np.zeros(shape, np.int64), latest, np.zeros(shape, np.int32), indexed)
        for row, text in zip(self._texts.tokens, texts, strict=True):
            row[: len(text)] = text
        self._works: list[data.Scratch] = []
        self.looked: Observed | None = None  # the log-probabilities of the next step, if they are known already

    def set_step(self, seen: Observed) -> None:
        """Begin a step with S sets of logits, int32 [B, ...] by `top_logprobs`; E504 where one is not finite."""
        self.looked = None
        record, rows, known = self.source.record, len(self._end), 2 * self.source.known + 1
        seen = np.ascontiguousarray(seen).reshape(rows, -1 if seen.size else 0, known)
        values = seen.view(np.float32)
        if np.isnan(values[:, :, self.source.known :]).any():
            raise TreeoptError(Code.NOT_FINITE, f"{self.source.logits_of} gives logits that are not finite")
        width = record.tokens.shape[1] if record.empty else 0
        self._step = data.StepArrays(
            text=self._text,
            end=self._end,
            seen=seen,
            values=values,
            frequent=np.zeros((rows if width else 0, width), np.int32),
            frequent_ratios=np.zeros((rows if width else 0, width + 1), np.float32),
        )
        if self._works and len(self._works[0].places) < self._texts.tokens.shape[1] + data.RECALLED:
            self._works = []

    def prepare(self, true: Ints) -> None:
        """Give the step the logits after true tokens int64 [B, n], where they were not known when it began."""

    def trace(self, true: Ints, *, confidence: bool = False) -> tuple[Ints, Floats]:
        true = np.ascontiguousarray(true)
        self.prepare(true[:, :-1])
        ranks = np.empty_like(true)
        best: Floats = np.empty(true.shape, np.float32) if confidence else NO_FLOATS
        self.in_threads(lambda kernel, part: trees.trace_rows(kernel, *part, true, ranks, best))
        return ranks, best

    def rank(self, paths: Ints, sources: Ints, most: int) -> Ranked:
        """Rank candidates, at most `most` of each node; see `rank_rows`."""
        shape = (*paths.shape[:2], most)
        ranked = Ranked(np.zeros(shape, np.int64), np.zeros(shape, np.float32))
        self.in_threads(lambda kernel, part: trees.rank_rows(kernel, *part, paths, sources, ranked))
        return ranked

    def candidates(self, true: Ints, count: int) -> Ints:
        self.prepare(true[:, :-1])
        followed, sources = np.maximum(true, 0), self.source.record.sources
        ranked = [
            self.rank(np.ascontiguousarray(followed[:, None, :level]), sources[level : level + 1], count)
            for level in range(true.shape[1])
        ]
        tokens = [np.where(np.isneginf(one.log_probability), -1, one.tokens) for one in ranked]
        return np.concatenate(tokens, axis=1)

    def sources(self, true: Ints) -> list[list[dict[str, int]]]:
        self.prepare(true[:, :-1])
        kernel = self.kernel(self.working(1)[0])
        found: list[list[dict[str, int]]] = []
        for row, path in enumerate(true.tolist()):
            begin_row(kernel, row)
            found.append([])
            for depth, token in enumerate(path):
                lists = self._lists(kernel, row, depth) if token >= 0 else {}
                found[-1].append({name: tokens.index(token) for name, tokens in lists.items() if token in tokens})
                kernel.work.path[depth] = max(token, 0)
        return found

    def _lists(self, k: data.Kernel, row: int, depth: int) -> dict[str, list[int]]:
        """The tokens that each source has for a node, whose drafts are in `k.work.path`."""
        record, at = k.record, k.record.sources[depth]
        logits = record.frequent if at < 0 else k.step.seen[row, at, : min(record.top, self.source.known)]
        lists = {"frequent" if at < 0 else self.source.logits_name: logits.tolist()}
        if not record.tokens.shape[1]:
            return lists
        found, length, place = matches(k, row, depth)
        voters = count_votes(k, row, found)[0] if record.votes and found else 0
        voted = k.work.voted[k.work.likeliest[: likeliest_voted(k, voters)]]
        k.work.voters[k.work.voted[:voters]] = 0
        successors = k.step.frequent[row] if record.empty else record.tokens[context_row(k, row, depth)]
        lists["frequent" if record.empty else "n-gram"] = successors.tolist()
        followed = [token_after(k, row, place)] if length else []
        return lists | {"lookup": followed, "text": voted.tolist()}

    def features(self, true: Ints) -> Features:
        self.prepare(true)
        record = self.source.record
        votes = record.window > 0  # weights of 0 need no votes, but their fit does
        [work] = self.working(1)
        points, width = len(true), len(work.token)
        found = Features(
            tokens=np.zeros((points, width), np.int64),
            terms=np.zeros((4, points, width), np.float32),
            width=np.zeros(points, np.int64),
            looked_up=np.zeros(points, np.int64),
            length=np.zeros(points, np.int64),
            found=np.zeros(points, np.int64),
        )
        kernel = self.kernel(work)._replace(record=record._replace(votes=votes))
        trees.terms_of_rows(kernel, np.ascontiguousarray(true), found)
        return found

    def skip(self) -> None:
        self.looked = None

    def keep(self, kept: AcceptedPart) -> None:
        longest = int(self._end.max()) + max(map(len, kept.tokens))
        if longest > self._texts.tokens.shape[1]:
            more = ((0, 0), (0, 2 * longest - self._texts.tokens.shape[1]))
            arrays = {name: np.pad(getattr(self._texts, name), more) for name in ("tokens", "previous")}
            self._texts = self._texts._replace(**arrays)
        for row, tokens in enumerate(kept.tokens):
            end = self._end[row]
            self._texts.tokens[self._text[row], end : end + len(tokens)] = tokens
        self._end = self._end + np.array([len(tokens) for tokens in kept.tokens], np.int64)

    def select(self, rows: Sequence[int]) -> None:
        chosen = list(rows)
        self._text, self._end = self._text[chosen], self._end[chosen]
        self.looked = None if self.looked is None else self.looked[chosen]

    def mark(self) -> tuple[Ints, Observed | None]:
        return self._end, self.looked

    def rewind(self, mark: tuple[Ints, Observed | None]) -> None:
        self._end, self.looked = mark
        for text, end in zip(self._text.tolist(), self._end.tolist(), strict=True):  # before other tokens are written
            index_up_to(self._texts, text, min(end - 1, int(self._texts.indexed[text])))

    def grow(self, roots: Tensor, states: Tensor, limits: SizeLimits) -> Drafts:
        self.begin(roots, states)
        if limits.path_tokens:
            grown = cut_to_paths(self.grown(SizeLimits((STEP_SIZES[-1],), (), limits.depth)), limits)
        else:
            grown = self.grown(limits)
        nodes = min(int(grown.size.max()), int(grown.drafts.max()) + 1)
        return compile_drafts(grown, nodes, limits.depth, roots)

    def expand(self, nodes: int, depth: int) -> Expansion:
        grown = self.grown(SizeLimits((nodes,), (), depth))
        most = int(grown.drafts.max(initial=0))
        cut = {name: getattr(grown, name)[:, :most] for name in ("tokens", "parents", "depths", "log_probability")}
        return grown._replace(**cut)

    @abstractmethod
    def grown(self, limits: SizeLimits) -> Expansion:
        """The trees of the likeliest nodes of each row: whole by the kernel, level by level by a draft model."""

    def kernel(self, work: data.Scratch) -> data.Kernel:
        return data.Kernel(self.source.record, self._step, self._texts, self.source.memory, work)

    def working(self, threads: int) -> list[data.Scratch]:
        """Working memory of so many threads."""
        while len(self._works) < threads:
            source, capacity = self.source, self._texts.tokens.shape[1]
            self._works.append(data.new_work(source.record, source.vocab_size, capacity))
        return self._works[:threads]

    def in_threads(self, run: Callable[[data.Kernel, tuple[int, int]], None]) -> None:
        """Run over all rows, parts of them in threads of their own."""
        parts = self._parts()
        kernels = [self.kernel(work) for work in self.working(len(parts))]
        if len(parts) == 1:
            run(kernels[0], parts[0])
        else:
            list(_threads(os.getpid()).map(run, kernels, parts))

    def _parts(self) -> list[tuple[int, int]]:
        """First row and end of the rows of each thread; rows of one text are in one part."""
        rows = len(self._end)
        count = min(torch.get_num_threads(), rows // _LEAST_ROWS)
        if count < 2:
            return [(0, rows)]
        starts = np.flatnonzero(np.diff(self._text, prepend=-1))  # of texts
        nearest = np.searchsorted(starts, np.arange(count) * rows // count)
        cuts = np.unique(starts[nearest[nearest < len(starts)]])
        return list(zip(cuts.tolist(), [*cuts[1:].tolist(), rows], strict=True))


def compile_drafts(grown: Expansion, nodes: int, depth: int, roots: Tensor) -> Drafts:
    """The first nodes of the trees as drafts below the roots int64 [B], by one transfer to their device."""
    rows = len(roots)
    line, path, square = rows * nodes, rows * nodes * (depth + 1), rows * nodes * nodes
    packed = np.zeros(2 * line + path + -(-(square + line) // 8), np.int64)  # mask and void are bytes

    def parts(whole: Any, flags: Any) -> tuple[Any, ...]:
        numbers = (whole[:line], whole[line : 2 * line], whole[2 * line : 2 * line + path])
        shapes = ((rows, nodes), (rows, nodes), (rows, nodes, depth + 1))
        mask, void = flags[:square].reshape(rows, nodes, nodes), flags[square : square + line].reshape(rows, nodes)
        return *(one.reshape(shape) for one, shape in zip(numbers, shapes, strict=True)), mask, void

    made = trees.Compiled(*parts(packed, packed[2 * line + path :].view(np.uint8)))
    trees.compile_rows(grown, np.zeros(nodes, np.int64), made)
    on_device = torch.from_numpy(packed).to(roots.device)
    tokens, depths, paths, mask, void = parts(on_device, on_device[2 * line + path :].view(torch.uint8))
    order = torch.arange(nodes, device=roots.device).expand(rows, nodes)
    tree = Buffers(mask.view(torch.bool), depths, order, paths, top_k=0)
    return Drafts(with_roots(tokens, roots), tree, void.view(torch.bool) if made.void.any() else None)


def with_roots(tokens: Tensor, roots: Tensor) -> Tensor:
    """The tokens with the caller's roots, so that the text never depends on what a drafter stores."""
    tokens[:, 0] = roots
    return tokens


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    """The threads of a process; a forked one has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix=f"treeopt-drafting-{process}")


def top_logprobs(logits: Tensor, count: int, *, others: bool = True) -> Tensor:
    """int32 [..., 2 K + 1]: the K likeliest tokens of logits [..., V], the bits of their log-probabilities, and others.

    All other tokens share the rest of the probability equally: the last column has the bits of the log-probability of
    each, or without `others` of 0, or of NaN where a logit is.
    """
    tokens = top_ids(logits, count)
    scores = logits.float()
    top = scores.gather(-1, tokens)
    if not others:
        norm = scores.logsumexp(-1, keepdim=True)
        return torch.cat([tokens.int(), (top - norm).view(torch.int32), (norm - norm).view(torch.int32)], dim=-1)
    # The rest is summed by itself: 1 - the sum of the largest would be mostly rounding.
    rest = scores.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    norm = torch.logaddexp(top.logsumexp(-1, keepdim=True), rest)
    each_other = rest - norm - math.log(max(1, logits.shape[-1] - count))
    return torch.cat([tokens.int(), (top - norm).view(torch.int32), each_other.view(torch.int32)], dim=-1)


@once_a_tree
def shape_of(tree: Buffers) -> data.Shape:
    """The kernel's arrays of a tree."""
    parents = tree.parents.numpy(force=True).astype(np.int64)
    nodes = np.arange(len(parents))
    children = parents.copy()
    children[0] = -1  # the root is no child
    return data.Shape(
        parents=parents,
        ranks=tree.ranks.astype(np.int64),
        depths=tree.position_ids.numpy(force=True).astype(np.int64),
        first=np.searchsorted(children, nodes),
        last=np.searchsorted(children, nodes, side="right"),
    )


class KernelSession(KernelRows):
    """A session whose logits are known when a step begins: `LogitsSource.logits` of the states of the roots."""

    source: data.LogitsSource

    def observe(self, states: Tensor, logits: Tensor | None = None) -> Tensor | None:
        packed = top_logprobs(self.source.logits(states, self.depth, logits), self.source.known)
        return packed.transpose(0, 1).flatten(1)

    def look(self, observed: Observed) -> None:
        self.looked = observed

    def begin(self, roots: Tensor, states: Tensor) -> None:
        if self.looked is None:
            observed = self.observe(states)
            assert observed is not None
            self.looked = observed.numpy(force=True)
        self.set_step(self.looked)

    def fill(self, roots: Tensor, states: Tensor, tree: Buffers) -> Drafts:
        self.begin(roots, states)
        shape, rows = shape_of(tree), len(self._end)
        tokens, void = np.empty((rows, tree.nodes), np.int64), np.zeros((rows, tree.nodes), np.bool_)
        self.in_threads(lambda kernel, part: trees.fill_rows(kernel, *part, shape, tokens, void))
        if not void.any():
            return Drafts(with_roots(torch.from_numpy(tokens).to(roots.device), roots), tree)
        both = torch.from_numpy(np.stack([tokens, void])).to(roots.device)  # one transfer
        return Drafts(with_roots(both[0], roots), tree, both[1].bool())

    def grown(self, limits: SizeLimits) -> Expansion:
        rows, most = len(self._end), max(0, limits.sizes[-1] - 1)
        grown = Expansion(
            tokens=np.zeros((rows, most), np.int64),
            parents=np.zeros((rows, most), np.int64),
            depths=np.zeros((rows, most), np.int64),
            log_probability=np.zeros((rows, most), np.float32),
            drafts=np.zeros(rows, np.int64),
            size=np.ones(rows, np.int64),
        )
        self._grow(grown, limits)
        nodes = int(grown.size.max(initial=0))
        if len(limits.sizes) > 1 and (grown.drafts + 1 < nodes).any():
            self._grow(grown, SizeLimits((nodes,), (), limits.depth))
        return grown

    def _grow(self, grown: Expansion, limits: SizeLimits) -> None:
        """Grow the trees that have fewer nodes than the largest size."""
        sizes = Sizes(np.array(limits.sizes), np.array(limits.cost or (0.0,)), limits.depth)
        [work] = self.working(1)
        most = min(limits.sizes[-1], 1 + data.MAX_PARENTS * limits.depth) + 1

        def rows(kernel: data.Kernel, part: tuple[int, int]) -> None:
            trees.grow_rows(kernel, *part, sizes, grown, trees.new_parents(most, len(work.token), limits.depth))

        self.in_threads(rows)
