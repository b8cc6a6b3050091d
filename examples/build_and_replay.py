"""Calibrate heads, build trees, predict their tokens per step by replay, and count the steps of the decoder.

python examples/build_and_replay.py
python examples/build_and_replay.py --model MODEL --heads HEADS --prompts PROMPTS.jsonl --limit 64
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import treeopt


def main(arguments: Sequence[str] | None = None) -> None:
    """Print expected, predicted and measured tokens per step of trees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket", help="folder or hub name of a causal language model")
    parser.add_argument("--heads", default="pocket", help="folder or hub name of its Medusa heads")
    parser.add_argument("--prompts", default="pocket", help="a prompt file, or a name of `treeopt list`")
    parser.add_argument("--limit", type=int, default=15, help="prompts; trees are built from the first two thirds")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    given = parser.parse_args(arguments)

    # The model answers each prompt; for each token of the answers, its rank among the guesses of each head is stored.
    base, heads = treeopt.load_base(given.model), treeopt.load_heads(given.heads)
    prompts = treeopt.load_prompts(given.prompts, limit=given.limit)
    run = treeopt.run_calibration(base, heads, prompts, max_new_tokens=given.max_new_tokens)
    texts = len(run.texts)
    fitted = run.calibration.select(range(texts * 2 // 3))
    others = run.calibration.select(range(texts * 2 // 3, texts))
    print(f"{texts} texts: trees are built from {fitted.sequences}, and judged on the others")

    print(f"{'tree':>14}  {'expected':>8}  {'predicted':>9}  {'measured':>8}")
    published = treeopt.load_tree("mc_sim_7b_63")
    trees = {f"{nodes} nodes": treeopt.build_tree(fitted, nodes) for nodes in (4, 64)}
    for name, tree in {**trees, "mc_sim_7b_63": published}.items():
        expected = treeopt.replay(tree, fitted).tokens_per_step
        predicted = treeopt.replay(tree, others).tokens_per_step
        # The decoder runs the model with the tree on the texts that were left out. No drafts beyond the budget count.
        decoder = treeopt.TreeDecoder(base, heads.heads, tree)
        decoded = [decoder.generate(text.prompt, len(text.answer)) for text in run.texts[fitted.sequences :]]
        assert [one.tokens for one in decoded] == [text.answer for text in run.texts[fitted.sequences :]]
        measured = sum(len(one.tokens) for one in decoded) / sum(len(one.step_lengths) for one in decoded)
        print(f"{name:>14}  {expected:8.3f}  {predicted:9.3f}  {measured:8.3f}")
    print("The decoder's texts are those of stock generate, and its tokens per step are those that replay predicts.")


if __name__ == "__main__":
    main()
