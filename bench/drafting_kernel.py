"""Drafting in the compiled kernel against the same drafting in numpy, which is the oracle of the tests.

    python bench/drafting_kernel.py

Heads' products, top-k and log-sums are torch's and in neither time. Both draft after the same text, in turn, with a
vocabulary of 32,000, five random heads, eight levels and a table of random text. Goals are ratios of medians.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from decode import TINY_SHAPE
from drafting_cost import HEADS, LEVELS, VOCAB, random_drafter
from timing import add_tiny, interleaved, judged, machine
from transformers import LlamaConfig, LlamaForCausalLM

from treeopt.drafting.interface import SizeLimits
from treeopt.drafting.kernel.session import KernelSession
from treeopt.drafting.ngram import RecordProposer
from treeopt.evaluate.profile import generic_growth
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.models.logits import top_ids
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_ranks

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from numpy_draft.expand import expand
from numpy_draft.proposer import NumpyProposer

TEXT, POSITIONS, TRACED_NODES = 300, 120, 254
BATCH = 32
STATIC_GOAL, PER_STEP_GOAL, TRACE_GOAL = 8.0, 6.0, 8.0
Run = Callable[[], object]


class Drafting:
    """The same rows in the kernel and in numpy, with the logits of their roots.

    Args:
        proposer: the drafter.
        rows: B; each has a text of its own.
    """

    def __init__(self, proposer: RecordProposer, rows: int) -> None:
        rng = np.random.default_rng(1)
        self.texts: list[list[int]] = (rng.zipf(1.3, (rows, TEXT)) % VOCAB).tolist()
        self.logits = torch.randn(HEADS, rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
        self.roots = torch.tensor([text[-1] for text in self.texts])
        self.kernel = proposer.start(self.texts, LEVELS)
        assert isinstance(self.kernel, KernelSession)
        proposer.logits = self._given  # type: ignore[method-assign]
        observed = self.kernel.observe(self.roots)
        self._seen = observed.numpy()
        twin = NumpyProposer(proposer)
        twin.head_logits = self._given
        self.numpy = twin.start(self.texts, LEVELS)

    def _given(self, states: torch.Tensor, depth: int, known: torch.Tensor | None = None) -> torch.Tensor:
        return self.logits

    def look(self) -> None:
        """Give the kernel its log-probabilities, as the step before does."""
        self.kernel.look(self._seen)

    def torch_part(self) -> None:
        """What the numpy version's `begin` does in torch."""
        top_ids(self.logits, 16)
        self.logits.float().logsumexp(-1)

    def static(self, nodes: int) -> tuple[Run, Run]:
        """One tree for all rows: kernel and numpy."""
        tree = compile_ranks(Tree(generic_growth(nodes, LEVELS, 10).tree(nodes).paths))

        def kernel() -> None:
            self.look()
            self.kernel.fill(self.roots, self.roots, tree)

        return kernel, functools.partial(self.numpy.fill, self.roots, self.roots, tree)

    def per_step(self, nodes: int) -> tuple[Run, Run]:
        """Trees of the likeliest nodes: kernel and numpy. The kernel also compiles them."""
        limits = SizeLimits((nodes,), (), LEVELS)

        def kernel() -> None:
            self.look()
            self.kernel.grow(self.roots, self.roots, limits)

        def in_numpy() -> None:
            expand(self.numpy, self.numpy.begin(self.roots, self.roots), nodes, LEVELS)

        return kernel, in_numpy


def measure(drafting: Drafting, name: str, runs: tuple[Run, Run], goal: float, rounds: int) -> float:
    """Print one ratio; returns the kernel's seconds."""
    kernel, in_numpy = runs
    spent = interleaved({"kernel": kernel, "numpy": in_numpy, "torch": drafting.torch_part}, repeats=rounds)
    slow = spent["numpy"] - spent["torch"]
    more = f"{spent['kernel'] * 1e6:.0f} us, numpy {slow * 1e6:.0f} us"
    judged(f"{name}: kernel to numpy", slow / spent["kernel"], goal, more)
    return spent["kernel"]


def tracing(proposer: RecordProposer, rounds: int, positions: int) -> None:
    """Ranks, confidences and per-step trees of the positions of one text, with the log-probabilities given."""
    drafting = Drafting(proposer, positions)
    text = drafting.texts[0]
    ends = list(range(len(text) - positions, len(text)))
    true = np.lib.stride_tricks.sliding_window_view(np.array([*text, *[0] * LEVELS]), LEVELS)[ends]
    session = proposer.start([text], LEVELS, [ends])
    assert isinstance(session, KernelSession)
    windows = [text[:end] for end in ends]
    twin = drafting.numpy._proposer.start(windows, LEVELS)

    def kernel() -> None:
        session.look(drafting._seen)
        session.begin(drafting.roots, drafting.roots)
        session.trace(true, confidence=True)
        session.expand(TRACED_NODES, LEVELS)

    def in_numpy() -> None:
        nodes = root = twin.begin(drafting.roots, drafting.roots)
        for level in range(LEVELS):
            twin.rank(nodes, true[:, level])
            _ = twin.candidates(nodes).log_probability[:, 0]
            nodes = twin.follow(nodes, np.arange(positions), true[:, level])
        expand(twin, root, TRACED_NODES, LEVELS)

    measure(drafting, f"tracing {positions} positions", (kernel, in_numpy), TRACE_GOAL, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    add_tiny(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(1))
    rounds, batch, positions = (2, 3, 8) if options.tiny else (options.rounds, BATCH, POSITIONS)
    config = LlamaConfig(**TINY_SHAPE, vocab_size=VOCAB, max_position_embeddings=1024)
    base = Base(LlamaForCausalLM(config).eval(), None, "random")
    heads = MedusaHeads(HEADS, 1, base.hidden_size, None)
    drafter = random_drafter(4_000 if options.tiny else 400_000)
    with torch.inference_mode():
        one, many = (Drafting(RecordProposer(base, heads, drafter), rows) for rows in (1, batch))
        for nodes in (16, 64):
            for name, goal in (("static", STATIC_GOAL), ("per step", PER_STEP_GOAL)):
                method = {"static": Drafting.static, "per step": Drafting.per_step}[name]
                alone = measure(one, f"{name}, {nodes} nodes", method(one, nodes), goal, rounds)
                spent = interleaved({"rows": method(many, nodes)[0]}, repeats=max(2, rounds // 4))["rows"]
                each = spent / batch
                judged(f"{name}, {nodes} nodes: a row of {batch} to a row alone", each / alone, 1.0, most=True)
        tracing(RecordProposer(base, heads, drafter), max(2, rounds // 12), positions)


if __name__ == "__main__":
    main()
