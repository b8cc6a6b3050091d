"""Drafting of a batch by the compiled kernel, for drafters whose logits are known when a step begins."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from treeopt.drafting import kernel_steps
from treeopt.drafting.interface import Drafts, Expansion, Observed, ProposerSession, SizeLimits
from treeopt.drafting.kernel_data import MAX_PARENTS, Kernel, Shape
from treeopt.drafting.kernel_rows import KernelRows, Scored, with_roots
from treeopt.drafting.kernel_trees import Grown, Sizes, new_parents
from treeopt.verify.buffers import Buffers


class Source(Scored, Protocol):
    """What a session reads of its drafter; see `RecordProposer`."""

    def observe(self, states: Tensor, depth: int, logits: Tensor | None = None) -> Tensor: ...

    def shape(self, tree: Buffers) -> Shape: ...


class KernelSession(KernelRows, ProposerSession):
    """Drafting of a batch; arguments as `KernelRows`."""

    source: Source

    def observe(self, states: Tensor, logits: Tensor | None = None) -> Tensor:
        return self.source.observe(states, self.depth, logits).flatten(1)

    def look(self, observed: Observed) -> None:
        self.looked = observed

    def begin(self, roots: Tensor, states: Tensor) -> None:
        seen = self.observe(states).numpy(force=True) if self.looked is None else self.looked
        self.set_step(seen)

    def fill(self, roots: Tensor, states: Tensor, tree: Buffers) -> Drafts:
        self.begin(roots, states)
        shape, rows = self.source.shape(tree), len(self._end)
        tokens, void = np.empty((rows, tree.nodes), np.int64), np.zeros((rows, tree.nodes), np.bool_)
        self.in_threads(lambda kernel, part: kernel_steps.fill_rows(kernel, *part, shape, tokens, void))
        if not void.any():
            return Drafts(with_roots(torch.from_numpy(tokens).to(roots.device), roots), tree)
        both = torch.from_numpy(np.stack([tokens, void])).to(roots.device)  # one transfer
        return Drafts(with_roots(both[0], roots), tree, both[1].bool())

    def grow(self, roots: Tensor, states: Tensor, limits: SizeLimits) -> Drafts:
        self.begin(roots, states)
        sizes = Sizes(np.array(limits.sizes), np.array(limits.cost or (0.0,)), np.array([limits.depth]))
        grown = self._grown(sizes)
        nodes = int(grown.size.max())
        if len(limits.sizes) > 1 and (grown.drafts + 1 < nodes).any():
            self._grow(grown, Sizes(np.array([nodes]), np.zeros(1), sizes.depth))
        return self.compile(grown, min(nodes, int(grown.drafts.max()) + 1), limits.depth, roots)

    def expand(self, nodes: int, depth: int) -> Expansion:
        grown = self._grown(Sizes(np.array([nodes]), np.zeros(1), np.array([depth])))
        most = int(grown.drafts.max(initial=0))
        return Expansion(
            grown.tokens[:, :most], grown.parents[:, :most], grown.depths[:, :most], grown.log_probability[:, :most]
        )

    def _grown(self, sizes: Sizes) -> Grown:
        """The trees of all rows."""
        rows, most = len(self._end), max(0, int(sizes.nodes[-1]) - 1)
        grown = Grown(
            tokens=np.zeros((rows, most), np.int64),
            parents=np.zeros((rows, most), np.int64),
            depths=np.zeros((rows, most), np.int64),
            log_probability=np.zeros((rows, most), np.float32),
            drafts=np.zeros(rows, np.int64),
            size=np.ones(rows, np.int64),
        )
        self._grow(grown, sizes)
        return grown

    def _grow(self, grown: Grown, sizes: Sizes) -> None:
        depth, nodes = int(sizes.depth[0]), int(sizes.nodes[-1])
        [work] = self.working(1)
        most = min(nodes, 1 + MAX_PARENTS * depth) + 1

        def rows(kernel: Kernel, part: tuple[int, int]) -> None:
            kernel_steps.grow_rows(kernel, *part, sizes, grown, new_parents(most, len(work.token), depth))

        self.in_threads(rows)
