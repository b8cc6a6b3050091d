"""Tokens per step of the built-in model on modules that it was not trained on, and on others.

    python bench/pocket.py [--heads HEADS_LIKE_POCKET]

Trees are built from the first half of the texts for the built-in prompts and replayed on the second. The heads are
compared with a chain of their best guesses, and with a drafter of bigrams: the tokens that most often follow the last
one in the sources that the base was trained on. The last column replays the heads' tree on openings from modules that
base and heads were trained on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from corpus import Document, is_unseen, standard_library
from make_pocket import draw
from numpy.typing import NDArray
from timing import add_tiny, machine

from treeopt.calibrate.pipeline import as_calibration
from treeopt.calibration import Calibration, Provenance
from treeopt.drafting.heads import HeadsProposer
from treeopt.drafting.trace import TextTraces, trace_texts
from treeopt.files.bundled import data_root
from treeopt.files.strict_yaml import load
from treeopt.models.base import Base
from treeopt.models.given import load_pair
from treeopt.models.heads import MedusaHeads
from treeopt.optimize.replay import replay
from treeopt.optimize.tree_builder import build_tree
from treeopt.texts.answers import continue_texts
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import Prompt, PromptSet, load_prompts
from treeopt.traces import MAX_RANKS, MISS, NONE
from treeopt.tree import Tree

TOKENS = 128
SIZES = (8, 16, 64)
BATCH = 16


@dataclass(frozen=True)
class Tracer:
    """The built-in model, and its two drafters: the heads, and counts of bigrams."""

    base: Base
    heads: MedusaHeads
    followers: NDArray[np.int32]  # [V, V], counts of bigrams
    new_tokens: int

    def trace(self, prompts: PromptSet) -> tuple[Calibration, Calibration]:
        """The traces of answers to the prompts, by heads and by bigrams."""
        encoded = encode_prompts(self.base, prompts, self.new_tokens).texts
        texts = continue_texts(self.base, encoded, self.new_tokens)
        proposer = HeadsProposer(self.base, self.heads)
        traced: list[TextTraces] = []
        for start in range(0, len(texts), BATCH):
            part = texts[start : start + BATCH]
            traced += trace_texts(self.base, [proposer] * len(part), part, MAX_RANKS)
        bigrams = [TextTraces(bigram_ranks(text, self.followers, self.heads.num_heads)) for text in texts]
        unknown = Provenance("", "", "", "", {})
        return as_calibration(texts, traced, MAX_RANKS, unknown), as_calibration(texts, bigrams, MAX_RANKS, unknown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="pocket")
    parser.add_argument("--prompts", default="pocket")
    add_tiny(parser)
    options = parser.parse_args()
    new_tokens, some = (12, 8) if options.tiny else (TOKENS, None)
    torch.set_num_threads(1)
    base, loaded = load_pair(options.heads, None, dtype="float32")
    recipe = load(data_root("calibration") / "recipes" / "pocket.yaml").data
    seen = [d for d in standard_library() if not is_unseen(d, recipe["corpus"]["unseen_one_in"])][:some]
    tracer = Tracer(base, loaded.heads, bigram_counts(base, seen), new_tokens)
    heads, bigrams = tracer.trace(load_prompts(options.prompts, limit=some))
    rows = draw(seen, recipe["openings"]["characters"], some or 128, seed=1)
    prompts = tuple(Prompt(f"seen:{i:08}", None, row["text"], None) for i, row in enumerate(rows))
    known, _ = tracer.trace(PromptSet("seen", "", prompts))
    report(heads, bigrams, known)


def report(heads: Calibration, bigrams: Calibration, known: Calibration) -> None:
    """Print accuracies and tokens per step; `known` are traces of texts from modules that the base was trained on."""
    half = heads.sequences // 2
    parts = range(half), range(half, heads.sequences)
    (heads_a, heads_b), (bigrams_a, bigrams_b) = ([c.select(part) for part in parts] for c in (heads, bigrams))
    print(
        f"{machine(1)}; {heads.sequences} prompts, {heads.positions} tokens; evaluated on the last {heads_b.sequences}"
    )
    print("heads, top-1 accuracy:", " ".join(f"{share:.1%}" for share in heads_b.accuracy[:, 0]))
    chain = replay(Tree.chain(heads.num_heads), heads_b).tokens_per_step
    print(f"chain of {heads.num_heads + 1} nodes: {chain:.3f} tokens per step")
    for nodes in SIZES:
        tree = build_tree(heads_a, nodes)
        by_heads, by_bigrams = replay(tree, heads_b), replay(build_tree(bigrams_a, nodes), bigrams_b)
        print(
            f"{nodes:3} nodes: heads {by_heads.tokens_per_step:.3f}, bigrams alone {by_bigrams.tokens_per_step:.3f}, "
            f"heads on seen modules {replay(tree, known).tokens_per_step:.3f}"
        )


def bigram_counts(base: Base, documents: Sequence[Document]) -> NDArray[np.int32]:
    """int32 [V, V]: counts of each pair of tokens in the documents."""
    assert base.tokenizer is not None
    counts = np.zeros((base.vocab_size, base.vocab_size), np.int32)
    for ids in base.tokenizer([document.text for document in documents], verbose=False).input_ids:
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    return counts


def bigram_ranks(text: Text, followers: NDArray[np.int32], num_heads: int) -> NDArray[np.uint8]:
    """uint8 [G, H]: the rank of token g[i+h] among the followers of g[i+h-1]; ties go to the smaller id."""
    answer = np.array(text.answer)
    counts, true = followers[answer[:-1]], answer[1:, None]
    count = np.take_along_axis(counts, true, 1)
    before = (counts > count).sum(1) + ((counts == count) & (np.arange(counts.shape[1]) < true)).sum(1)
    ranks = np.where(before < MAX_RANKS, before, MISS).astype(np.uint8)  # of token g[1], g[2], ...
    padded = np.concatenate([ranks, np.full(num_heads, NONE, np.uint8)])
    return np.lib.stride_tricks.sliding_window_view(padded, num_heads)[: len(answer)].copy()


if __name__ == "__main__":
    main()
