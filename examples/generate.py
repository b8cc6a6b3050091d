"""Generate with a tree inside stock `generate` of transformers, and compare with `generate` alone.

    python examples/generate.py
    python examples/generate.py --model MODEL --prompt "Once upon a time"
    python examples/generate.py --model MODEL --heads HEADS --tree tree.yaml

Without heads the drafts come from the text so far; `--drafter` takes a drafter of `treeopt learn`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import treeopt

PROMPT = "import os\n\ndef main():\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the text, its steps, and whether it equals that of stock `generate`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket", help="folder or hub name of a causal language model")
    parser.add_argument("--heads", help="folder or hub name of its Medusa heads")
    parser.add_argument("--tree", help="a tree file, or a name of `treeopt list`")
    parser.add_argument("--drafter", help="a drafter file of `treeopt learn`")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    given = parser.parse_args(arguments)
    if given.model == "pocket" and not (given.heads or given.drafter):
        given.heads = "pocket"
    if given.heads and not given.tree:
        given.tree = "mc_sim_7b_63"

    base = treeopt.load_base(given.model)
    assert base.tokenizer is not None, "the model has no tokenizer"
    heads = treeopt.load_heads(given.heads).heads.to(base.device, base.dtype) if given.heads else None
    inputs = base.tokenizer(given.prompt, return_tensors="pt").to(base.device)
    options = {"max_new_tokens": given.max_new_tokens, "do_sample": False}
    expected = base.model.generate(**inputs, **options)
    out = base.model.generate(
        **inputs,
        **options,
        return_dict_in_generate=True,
        custom_generate=treeopt.tree_generate,  # all that changes
        heads=heads,
        tree=given.tree,
        drafter=given.drafter,
    )
    print(base.tokenizer.decode(out.sequences[0]))
    (steps,) = out.step_lengths
    print(f"\n{sum(steps)} tokens in {len(steps)} steps: {out.tokens_per_step:.3f} tokens per step")
    print(f"tokens of each step: {' '.join(map(str, steps))}")
    print(f"equal to stock generate: {out.sequences.equal(expected)}")


if __name__ == "__main__":
    main()
