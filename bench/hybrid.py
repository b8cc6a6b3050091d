"""Trees on a recurrent model, verified as paths: tokens per second against autoregressive decoding, in one run.

    python bench/hybrid.py [--model tests/data/hybrid] [--prompts pocket]

An n-gram drafter is learned on the first prompts; `learn_drafter` times a step of none and of static and per-step trees
of each size, and recommends a plan. Then other texts are decoded by all plans and by stock `generate` in turn, as
bench/recommended.py does, which says how the figures are made. `none` is plain decoding in this package's loop. First
the texts of the recommended plan are compared with those of stock `generate`. Path tokens are leaves × (depth + 1).
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from recommended import Effort, decoded, label, race
from timing import add_tiny, machine

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafting.learn import Learning
from treeopt.evaluate.learn_drafter import fastest_of, learn_drafter
from treeopt.models.base import Base, load_base
from treeopt.policy import Plan
from treeopt.texts.encode import encode
from treeopt.texts.prompts import load_prompts
from treeopt.tree import Tree
from treeopt.verify.probe import route_of

STOCK = "stock generate"
MODEL = Path(__file__).resolve().parent.parent / "tests" / "data" / "hybrid"
FULL = Effort(sizes=(2, 3, 4, 6, 8, 16), known=64, learned=20_000, texts=4, new_tokens=96, repeats=10)
TINY = Effort((2, 4), known=4, learned=100, texts=1, new_tokens=8, repeats=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--prompts", default="pocket")
    add_tiny(parser)
    options = parser.parse_args()
    effort = TINY if options.tiny else FULL
    torch.set_num_threads(1)
    base = load_base(options.model, dtype="float32", device="cpu")
    print(f"{machine(1)}, torch {torch.__version__}")
    print(f"{base.model.config.model_type}, {base.model.num_parameters():,} parameters, trees as {route_of(base)}")
    prompts = load_prompts(options.prompts)
    known = dataclasses.replace(prompts, prompts=prompts.prompts[: effort.known])
    texts = [encode(one, base.tokenizer, chat_template=True)[0] for one in prompts.prompts[-effort.texts :]]
    found = learn_drafter(
        base,
        known,
        learning=Learning(effort.learned),
        sizes=effort.sizes,
        max_new_tokens=effort.new_tokens,
        batch_size=32,
    )
    plans = {label(one): one for one in found.figures}
    decoders = {name: TreeDecoder(base, None, one.plan, drafter=found.drafter) for name, one in plans.items()}
    none, chosen = label(found.figures[0]), label(fastest_of(found.figures))
    print(f"recommended is {chosen}: {price(plans[chosen].plan)}")
    same = sum(
        decoders[chosen].generate(text, effort.new_tokens).tokens == greedy(base, text, effort.new_tokens)
        for text in texts
    )
    print(f"texts equal to those of stock generate: {same}/{len(texts)}")

    def run(name: str, _: int) -> tuple[float, float]:
        if name != STOCK:
            return decoded(decoders[name], texts, effort.new_tokens)
        begin = time.thread_time()
        tokens = sum(len(greedy(base, text, effort.new_tokens)) for text in texts)
        return 1.0, tokens / (time.thread_time() - begin)

    expected = {STOCK: 1.0} | {name: one.speedup for name, one in plans.items()}
    race(run, expected, none, chosen, effort.repeats)


def price(plan: Plan) -> str:
    """The size of a policy; of a static tree its nodes, leaves, depth and path tokens."""
    if not isinstance(plan, Tree):
        return f"at most {plan.nodes} {plan.unit}"
    return f"{plan.nodes} nodes, {len(plan.leaves)} leaves, depth {plan.depth}, {plan.path_tokens} path tokens"


def greedy(base: Base, ids: Sequence[int], new_tokens: int) -> list[int]:
    """The new tokens of stock `generate`."""
    rows = torch.tensor([list(ids)])
    made: list[int] = base.generate(rows, torch.ones_like(rows), new_tokens)[0, len(ids) :].tolist()
    return made


if __name__ == "__main__":
    main()
