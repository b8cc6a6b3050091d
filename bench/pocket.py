"""Is the built-in model's drafting learned or memorised? Tokens per step on modules that it never saw.

    python bench/pocket.py [--heads HEADS_LIKE_POCKET]

Trees are built from the first half of the built-in prompts' texts and replayed on the second. Beside the heads stand a
chain of their best guesses and a drafter that knows only bigrams: the tokens that most often followed the one before,
counted in the sources that the base was trained on. The last line replays the heads' tree on openings from modules that
base and heads did learn from.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from timing import add_tiny, machine

from treeopt.calibrate.pipeline import as_calibration
from treeopt.calibration import MAX_RANKS, MISS, NONE, Calibration, Provenance, Ranks
from treeopt.drafting.heads import HeadsProposer
from treeopt.drafting.trace import trace_texts
from treeopt.files.bundled import data_root
from treeopt.files.strict_yaml import load
from treeopt.models.pair import load_pair
from treeopt.optimize.replay import replay
from treeopt.optimize.tree_builder import build_tree
from treeopt.texts.answers import continue_texts
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import Prompt, PromptSet, load_prompts
from treeopt.train.corpus import is_unseen, standard_library
from treeopt.train.pocket import draw
from treeopt.tree import Tree

TOKENS = 128
SIZES = (8, 16, 64)


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
    assert base.tokenizer is not None
    followers = np.zeros((base.vocab_size, base.vocab_size), np.int32)
    for ids in base.tokenizer([d.text for d in seen], verbose=False).input_ids:
        np.add.at(followers, (ids[:-1], ids[1:]), 1)

    proposer = HeadsProposer(base, loaded.heads)

    def traced(part: Sequence[Text]) -> list[Ranks]:
        return [one.ranks for one in trace_texts(base, [proposer] * len(part), part, MAX_RANKS)]

    def traces(prompts: PromptSet) -> tuple[Calibration, Calibration]:
        texts = continue_texts(base, encode_prompts(base, prompts, new_tokens).texts, new_tokens)
        rows = [ranks for part in (texts[i : i + 16] for i in range(0, len(texts), 16)) for ranks in traced(part)]
        bigram = [bigram_ranks(text, followers, loaded.heads.num_heads) for text in texts]
        nowhere = Provenance("", "", "", "", {})
        return as_calibration(texts, rows, MAX_RANKS, nowhere), as_calibration(texts, bigram, MAX_RANKS, nowhere)

    heads, bigrams = traces(load_prompts(options.prompts, limit=some))
    known = draw(seen, recipe["openings"]["characters"], some or 128, seed=1)
    learned, _ = traces(
        PromptSet("seen", "", tuple(Prompt(f"seen:{i:08}", None, r["text"], None) for i, r in enumerate(known)))
    )
    half = heads.sequences // 2
    parts = [slice(0, half), slice(half, None)]
    (heads_a, heads_b), (bigrams_a, bigrams_b) = (
        [c.select(range(c.sequences)[p]) for p in parts] for c in (heads, bigrams)
    )
    print(f"{machine(1)}; {heads.sequences} prompts, {heads.positions} tokens; judged on the last {heads_b.sequences}")
    print("heads, first guess right:", " ".join(f"{share:.1%}" for share in heads_b.accuracy[:, 0]))
    chain = replay(Tree.chain(loaded.heads.num_heads), heads_b).tokens_per_step
    print(f"chain of {loaded.heads.num_heads + 1} nodes: {chain:.3f} tokens per step")
    for nodes in SIZES:
        tree = build_tree(heads_a, nodes)
        by_heads, by_bigrams = replay(tree, heads_b), replay(build_tree(bigrams_a, nodes), bigrams_b)
        print(
            f"{nodes:3} nodes: heads {by_heads.tokens_per_step:.3f}, bigrams alone {by_bigrams.tokens_per_step:.3f}, "
            f"heads on seen modules {replay(tree, learned).tokens_per_step:.3f}"
        )


def bigram_ranks(text: Text, followers: NDArray[np.int32], num_heads: int) -> NDArray[np.uint8]:
    """uint8 [G, H]: the rank of token g[i+h] among what followed g[i+h-1]; ties go to the smaller id."""
    answer = np.array(text.answer)
    counts, true = followers[answer[:-1]], answer[1:, None]
    own = np.take_along_axis(counts, true, 1)
    before = (counts > own).sum(1) + ((counts == own) & (np.arange(counts.shape[1]) < true)).sum(1)
    ranks = np.where(before < MAX_RANKS, before, MISS).astype(np.uint8)  # of token g[1], g[2], ...
    padded = np.concatenate([ranks, np.full(num_heads, NONE, np.uint8)])
    return np.lib.stride_tricks.sliding_window_view(padded, num_heads)[: len(answer)].copy()


if __name__ == "__main__":
    main()
