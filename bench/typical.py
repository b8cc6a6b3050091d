"""Typical acceptance: predicted against measured tokens per step, for the tree that decoded the texts and for others.

    python bench/typical.py --model tinystories|pocket [--kind static|dynamic] [--shared ../shared] [--texts 64]

Trees (or per-step trees, by the heads with fitted weights) are built on greedy texts of the first half of the prompts.
For each epsilon, with delta = sqrt(epsilon) and temperature 0.7 as in the paper, every tree decodes texts of the second
half. Then the steps of every tree are predicted on the texts of every tree: by replay of the rule, and by ranks alone,
which ignore drafts that are not on the text. On texts that the tree itself decoded, both are exact. The last columns
are the quality of each tree's texts.

The rule accepts the longest path of drafts with p > min(epsilon, delta * exp(-H)), p and H the base's probability and
entropy at the draft's position; then comes the base's likeliest token. Let the texts be decoded by this rule.

- Their tokens are drafts that the rule accepted, and likeliest tokens. With delta < 1 a likeliest token passes too: its
  probability is at least exp(-H), which is above delta * exp(-H). So every node on the text is accepted.
- With the tree that decoded the texts, the token after an accepted path is none of its children, as the rule would have
  accepted it. So the accepted path is exactly the deepest node on the text, and replay equals the decoder's steps.
- Another tree accepts the path to its deepest node on the text, and may accept drafts that are not on it. The
  probabilities of their first tokens are traced, after the text; those of the tokens after these are not. So replay
  adds one level where a child of the deepest node is likely enough, and continues with the text as if it held that
  child. This is an approximation, because the text depends on the tree.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from drafting import Half, fitted
from drafting_halves import Pair, load
from numpy.typing import NDArray
from timing import add_tiny, machine

from treeopt.calibration import Calibration
from treeopt.decode.rules import Rule, Typical
from treeopt.drafting.learn import Learning
from treeopt.evaluate.runs import Inputs, ValidateOptions, num_ranks
from treeopt.evaluate.validate import quality
from treeopt.optimize.per_step import replay_plan, replay_policy, sizes_of, traced_steps
from treeopt.optimize.replay import Replay, children_of, replay, visits
from treeopt.policy import Plan
from treeopt.schedule import Schedule
from treeopt.texts.answers import answer_logits
from treeopt.texts.encode import Text, encode_prompts
from treeopt.tree import Tree

SIZES = (4, 16, 64)
EPSILONS = (0.03, 0.09, 0.25)
TEMPERATURE = 0.7
BATCH = 32
# Probabilities are float16. A draft that the decoder rejected must not be accepted by rounding.
_ROUNDING = 1 + 2**-10

Bools = NDArray[np.bool_]


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
            assert not isinstance(tree, Schedule)
            predicted = typical_replay(tree, traces, entropy, rule)
            error = predicted.tokens_per_step / measured.tau - 1
            line = (
                f"epsilon {epsilon:<5g} texts of {nodes:3} nodes, tree of {other:3}: measured {measured.tau:.4f}  "
                f"predicted {predicted.tokens_per_step:.4f} ({error:+.2%})  "
                f"by ranks {replay_plan(tree, ranks).tokens_per_step:.4f}"
            )
            if other == nodes:
                same = sum(one == two for one, two in zip(predicted.sums.steps, of.steps, strict=True))
                line += f"  exact on {same}/{len(of.steps)} texts  log-likelihood {text_quality.log_likelihood:.4f}"
                line += f"  distinct-2 {text_quality.distinct[1]:.4f}  agreement {text_quality.agreement:.1%}"
            else:
                errors.append(error)
            print(line, flush=True)
    return errors


@torch.inference_mode()
def rule_traces(inputs: Inputs, texts: Sequence[Text], rule: Typical) -> tuple[Calibration, NDArray[np.float32]]:
    """What the rule needs of the base on these texts: traces with the candidates' probabilities, and entropies [P]."""
    base = inputs.base
    target = ((answer_logits(base, text).float() / rule.temperature).softmax(-1) for text in texts)
    entropy = torch.cat([torch.special.entr(one).sum(-1) for one in target]).numpy(force=True)
    return inputs.traces(texts, lambda logits: logits.float() / rule.temperature), entropy


def typical_replay(tree: Plan, traces: Calibration, entropy: NDArray[np.float32], rule: Typical) -> Replay:
    """The steps of a tree or policy under typical acceptance.

    Args:
        tree: any tree or policy of the drafter of the traces.
        traces: of texts that the rule decoded with any tree; their target is the base at the rule's temperature.
            Drafts of ranks that were not traced are accepted where they are on the text.
        entropy: float32 [P], of the target at each position, in nats.
        rule: the rule.

    Raises:
        TreeoptError: as `replay` and `replay_policy`.
    """
    on_text = replay(tree, traces) if isinstance(tree, Tree) else replay_policy(tree, traces)
    accepted = on_text.accepted + _more(tree, traces, on_text, _acceptable(traces, entropy, rule))
    return Replay(accepted.astype(np.int8), visits(accepted), traces.offsets, on_text.depth)


def _acceptable(traces: Calibration, entropy: NDArray[np.float32], rule: Typical) -> Bools:
    """bool [P, H, R]: whether the candidate of rank r at level h of step i is likely enough, after g[i+h-1]."""
    assert traces.target is not None
    threshold = np.minimum(rule.epsilon, rule.delta * np.exp(-entropy.astype(np.float64))) * _ROUNDING  # [P]
    levels = traces.num_heads
    # Past the end of a text the probability is 0, whatever the threshold.
    at = np.minimum(np.arange(len(threshold))[:, None] + np.arange(1, levels + 1), len(threshold) - 1)
    found: Bools = traces.target.probability > threshold[at][:, :, None]
    return found


def _more(tree: Plan, traces: Calibration, on_text: Replay, acceptable: Bools) -> Bools:
    """bool [P]: whether a child of the deepest node on the text is likely enough; it is not on the text."""
    rows = np.arange(len(acceptable))
    depth = on_text.accepted.astype(np.int64)
    level = np.minimum(depth, traces.num_heads - 1)
    if isinstance(tree, Tree):
        children = np.zeros((tree.nodes, acceptable.shape[2]), np.bool_)  # [N, R]
        for node, path in enumerate(tree.paths, start=1):
            if path[-1] < acceptable.shape[2]:
                children[tree.parents[node], path[-1]] = True
        nodes = children_of(tree).along(traces.ranks)
        inside = children[np.where(nodes < tree.nodes, nodes, 0).max(axis=1, initial=0)]
    else:
        assert traces.target is not None
        assert traces.target.places is not None
        inside = traces.target.places[rows, level] < sizes_of(tree, traced_steps(traces))[:, None]
    found: Bools = (acceptable[rows, level] & inside).any(1) & (depth < on_text.depth)
    return found


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
