"""Typical acceptance: predicted against measured tokens per step, for the tree that decoded the texts and for others.

    python bench/typical.py --model tinystories|pocket [--kind static|dynamic] [--shared ../shared] [--texts 64]

Trees (or per-step trees, by the heads with fitted weights) are built on greedy texts of the first half of the prompts.
For each epsilon, with delta = sqrt(epsilon) and temperature 0.7 as in the paper, every tree decodes texts of the second
half. Then the steps of every tree are predicted on the texts of every tree: by replay of the rule
(`treeopt.evaluate.typical_replay`), and by ranks alone, which ignore drafts that are not on the text. On texts that the
tree itself decoded, the prediction is exact. The last columns are the quality of each tree's texts.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from drafting import Half, Pair, fitted, load
from timing import add_tiny, machine

from treeopt.decode.rules import Rule, Typical
from treeopt.drafting.learn import Learning
from treeopt.evaluate.inputs import Inputs, num_ranks, replayed
from treeopt.evaluate.quality import quality
from treeopt.evaluate.typical_replay import typical_replay
from treeopt.evaluate.validate_typical import rule_traces
from treeopt.evaluate.validation import ValidateOptions
from treeopt.policy import Plan
from treeopt.texts.encode import Text, encode_prompts
from treeopt.tree import Tree

SIZES = (4, 16, 64)
EPSILONS = (0.03, 0.09, 0.25)
TEMPERATURE = 0.7
BATCH = 32


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Texts of one tree, and the number of steps of each."""

    texts: list[Text]
    steps: list[int]

    @property
    def tau(self) -> float:
        """Tokens per step."""
        return sum(len(text.answer) for text in self.texts) / sum(self.steps)


def decoded(inputs: Inputs, rule: Rule) -> Decoded:
    """The texts of a tree under a rule."""
    decoder, texts, steps = inputs.decoder(rule), [], []
    for start in range(0, len(inputs.texts), BATCH):
        part = inputs.texts[start : start + BATCH]
        made = decoder.generate([text.prompt for text in part], inputs.options.max_new_tokens)
        texts += [dataclasses.replace(text, answer=one.tokens) for text, one in zip(part, made, strict=True)]
        steps += [len(one.step_lengths) for one in made]
    return Decoded(texts, steps)


def trees(pair: Pair, kind: str, sizes: Sequence[int]) -> tuple[Half, dict[int, Plan]]:
    """The plans of these sizes, built on the first half."""
    half = fitted(pair, Learning(tokens=0, ngram=False) if kind == "dynamic" else None)
    return half, {nodes: half.plan(kind, nodes) for nodes in sizes}


def epsilon_table(inputs: dict[int, Inputs], greedy: Sequence[Text], epsilon: float) -> list[float]:
    """Print the table of one epsilon; the relative errors of predictions for other trees."""
    rule = Typical(TEMPERATURE, epsilon, math.sqrt(epsilon))
    found = {nodes: decoded(one, rule) for nodes, one in inputs.items()}
    widest = max(inputs.values(), key=lambda one: num_ranks(one.tree))
    errors = []
    for nodes, of in found.items():
        traces, entropy = rule_traces(widest, of.texts, rule)
        ranks = dataclasses.replace(traces, target=None)
        text_quality = quality(widest.base, of.texts, greedy)
        for other, measured in found.items():
            tree = inputs[other].tree
            predicted = typical_replay(tree, traces, entropy, rule)
            error = predicted.tokens_per_step / measured.tau - 1
            line = (
                f"epsilon {epsilon:<5g} texts of {nodes:3} nodes, tree of {other:3}: measured {measured.tau:.4f}  "
                f"predicted {predicted.tokens_per_step:.4f} ({error:+.2%})  "
                f"by ranks {replayed(tree, ranks).tokens_per_step:.4f}"
            )
            if other == nodes:
                same = sum(one == two for one, two in zip(predicted.steps_by_sequence(), of.steps, strict=True))
                line += f"  exact on {same}/{len(of.steps)} texts  log-likelihood {text_quality.log_likelihood:.4f}"
                line += f"  distinct-2 {text_quality.distinct[1]:.4f}  agreement {text_quality.agreement:.1%}"
            else:
                errors.append(error)
            print(line, flush=True)
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tinystories", "pocket"), default="tinystories")
    parser.add_argument("--kind", choices=("static", "dynamic"), default="static")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--texts", type=int, default=64)
    add_tiny(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(1))
    pair = load(options.model, options.shared, tiny=options.tiny)
    half, plans = trees(pair, options.kind, SIZES[:2] if options.tiny else SIZES)
    texts = encode_prompts(pair.base, pair.second_half, pair.new_tokens).texts[: options.texts]
    settings = ValidateOptions(max_new_tokens=pair.new_tokens)
    inputs = {
        nodes: Inputs(pair.base, pair.loaded.heads, plan, half.drafter, None, texts, (), settings)
        for nodes, plan in plans.items()
    }
    alone = dataclasses.replace(inputs[min(inputs)], heads=None, drafter=None, tree=Tree(()))
    greedy = decoded(alone, settings.acceptance).texts
    for nodes, one in inputs.items():
        print(f"greedy: tree of {nodes:3} nodes: {decoded(one, settings.acceptance).tau:.4f} tokens per step")
    errors = [
        error
        for epsilon in (EPSILONS[:1] if options.tiny else EPSILONS)
        for error in epsilon_table(inputs, greedy, epsilon)
    ]
    print(f"errors for other trees: mean {np.mean(errors):+.2%}, largest {max(errors, key=abs):+.2%}")


if __name__ == "__main__":
    main()
