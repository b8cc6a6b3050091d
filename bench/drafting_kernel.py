"""Seconds of drafting in the compiled kernel: static and per-step trees, of a row alone and of 32, and tracing.

    python bench/drafting_kernel.py

Heads' products, top-k and log-sums are torch's and not in the times. The vocabulary has 32,000 tokens, five random
heads, eight levels and a table of random text. Last the same with a memory of 10 million tokens, which holds the texts
that are drafted for too, so that every row has matches: the goal is 20 % more time at most.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from decode import TINY_SHAPE
from drafting_cost import HEADS, LEVELS, VOCAB, random_drafter
from timing import add_tiny, interleaved, judged, machine
from transformers import LlamaConfig, LlamaForCausalLM

from treeopt.drafter import Drafter
from treeopt.drafting.interface import SizeLimits
from treeopt.drafting.kernel.session import top_logprobs
from treeopt.drafting.memory import Memory, search
from treeopt.drafting.ngram import RecordProposer
from treeopt.evaluate.profile import generic_growth
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_ranks

TEXT, POSITIONS, TRACED_NODES = 300, 120, 254
BATCH = 32
Run = Callable[[], object]


class Drafting:
    """Rows in the kernel, with the log-probabilities of their roots.

    Args:
        proposer: the drafter.
        rows: B; each has a text of its own.
    """

    def __init__(self, proposer: RecordProposer, rows: int) -> None:
        rng = np.random.default_rng(1)
        self.texts: list[list[int]] = (rng.zipf(1.3, (rows, TEXT)) % VOCAB).tolist()
        logits = torch.randn(HEADS, rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
        self.roots = torch.tensor([text[-1] for text in self.texts])
        self.session = proposer.start(self.texts, LEVELS)
        self.seen = top_logprobs(logits, proposer.known).transpose(0, 1).flatten(1).numpy()

    def static(self, nodes: int) -> Run:
        """One tree for all rows."""
        tree = compile_ranks(Tree(generic_growth(nodes, LEVELS, 10).tree(nodes).paths))

        def run() -> None:
            self.session.look(self.seen)
            self.session.fill(self.roots, self.roots, tree)

        return run

    def per_step(self, nodes: int) -> Run:
        """Trees of the likeliest nodes, compiled."""
        limits = SizeLimits((nodes,), (), LEVELS)

        def run() -> None:
            self.session.look(self.seen)
            self.session.grow(self.roots, self.roots, limits)

        return run


def tracing(proposer: RecordProposer, rounds: int, positions: int) -> None:
    """Ranks, confidences and per-step trees of the positions of one text."""
    drafting = Drafting(proposer, positions)
    text = drafting.texts[0]
    ends = list(range(len(text) - positions, len(text)))
    true = np.lib.stride_tricks.sliding_window_view(np.array([*text, *[0] * LEVELS]), LEVELS)[ends]
    session = proposer.start([text], LEVELS, [ends])

    def run() -> None:
        session.look(drafting.seen)
        session.begin(drafting.roots, drafting.roots)
        session.trace(true, confidence=True)
        session.expand(TRACED_NODES, LEVELS)

    seconds = interleaved({"trace": run}, repeats=rounds)["trace"]
    print(f"tracing: {seconds / positions * 1e6:.0f} us a position")


def remembering(base: Base, heads: MedusaHeads, drafter: Drafter, rows: int, rounds: int, *, tokens: int) -> None:
    """Drafting with a memory of so many tokens beside drafting without one."""
    memory, rng = Memory(12 * tokens), np.random.default_rng(2)
    source = RecordProposer(base, heads, drafter)
    without, within = Drafting(source, rows), Drafting(search(source, memory), rows)
    texts = [text[TEXT // 3 :] + text[: TEXT // 3] for text in within.texts]
    while memory.arrays.end[0] < tokens - rows * (TEXT + 1):
        memory.add(rng.zipf(1.3, 1000) % VOCAB)
    memory.add(*texts)
    print(f"a memory of {memory.num_tokens:,} tokens, {sum(one.nbytes for one in memory.arrays[:3]):,} bytes")
    for nodes in (16, 64):
        for name, method in (("static", Drafting.static), ("per step", Drafting.per_step)):
            runs = {"without": method(without, nodes), "within": method(within, nodes)}
            seconds = interleaved(runs, repeats=rounds)
            more = f"{seconds['within'] / rows * 1e6:.0f} us a row"
            ratio = seconds["within"] / seconds["without"]
            judged(f"{name}, {nodes} nodes, {rows} rows: with to without a memory", ratio, 1.2, more, most=True)


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
            for name, method in (("static", Drafting.static), ("per step", Drafting.per_step)):
                alone = interleaved({"row": method(one, nodes)}, repeats=rounds)["row"]
                each = interleaved({"rows": method(many, nodes)}, repeats=max(2, rounds // 4))["rows"] / batch
                print(f"{name}, {nodes} nodes: {alone * 1e6:.0f} us")
                judged(f"{name}, {nodes} nodes: a row of {batch} to a row alone", each / alone, 1.0, most=True)
        tracing(RecordProposer(base, heads, drafter), max(2, rounds // 12), positions)
        for rows in (1, batch):
            remembering(base, heads, drafter, rows, rounds, tokens=40_000 if options.tiny else 10_000_000)


if __name__ == "__main__":
    main()
