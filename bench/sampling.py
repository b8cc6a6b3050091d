"""Trees under sampling: predicted against measured tokens per step, and what a tree for greedy text loses.

    python bench/sampling.py agree --model tinystories|pocket [--plans 200]
    python bench/sampling.py loss --model tinystories|pocket
    python bench/sampling.py paths [--texts 64] [--new-tokens 64]

`agree` draws plans at random: a temperature from 0.2 to 1.4, the drafter heads or heads+ngram, and a static tree or
per-step trees. The prediction of each is replay over the target's probabilities of texts that stock `generate` sampled
for some prompts; the measurement is the decoder's own texts, with other seeds, for other prompts. So the z-scores
(predicted - measured) / sqrt(sum of squared standard errors) have mean 0 and standard deviation 1 if both are unbiased
and their standard errors are right. Beside them stand the standard errors of the sum of probabilities and of the count
of accepted drafts over the same texts.

`loss` builds trees on the first half of the prompts and evaluates them on texts of the second half that are sampled at
each temperature: the tree built for greedy text, the tree built for the temperature, and the Medusa tree of each.

`paths` tests texts of tiny recurrent models, which verify trees by paths, by chi-square; see `sampled_paths.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drafting_halves import Pair, load
from sampled_paths import p_of_texts, small_family
from timing import add_tiny, machine

from treeopt.calibrate.pipeline import run_calibration
from treeopt.calibration import Calibration
from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Sample
from treeopt.drafter import Drafter
from treeopt.drafting.learn import Learning
from treeopt.optimize.intervals import by_text, difference_interval
from treeopt.optimize.per_step import replay_policy
from treeopt.optimize.replay import Replay, replay, standard_error
from treeopt.optimize.tree_builder import build_tree
from treeopt.policy import Plan, TreePolicy
from treeopt.texts.encode import encode_prompts
from treeopt.texts.prompts import PromptSet
from treeopt.tree import Tree

FARTHEST = 4.0  # z-scores beyond it are named
LOSS_TEMPERATURES = (0.7, 1.0)
LOSS_NODES = (16, 64)
PATHS = ("qwen3_5_text", "lfm2", "mamba2", "bamba")  # families of `paths`
PATHS_TEMPERATURES = (0.7, 1.0)


@dataclass(frozen=True)
class Agreement:
    """Tokens per step of one plan: predicted by probabilities, by the count over the same texts, and measured."""

    name: str
    predicted: float
    predicted_error: float
    counted_error: float
    measured: float
    measured_error: float

    @property
    def z(self) -> float:
        """The difference in standard errors."""
        return (self.predicted - self.measured) / math.hypot(self.predicted_error, self.measured_error)


def random_tree(rng: np.random.Generator, depth: int) -> Tree:
    """A tree of 2 to 48 nodes; ranks fall off geometrically."""
    nodes, ratio = int(rng.integers(2, 49)), rng.uniform(0.3, 0.8)
    paths: set[tuple[int, ...]] = {()}
    while len(paths) < nodes:
        parents = sorted(path for path in paths if len(path) < depth)
        parent = parents[int(len(parents) * rng.random() ** 2)]
        paths.add((*parent, int(rng.geometric(1 - ratio) - 1)))
    return Tree.from_paths(paths - {()})


def agreement(pair: Pair, drafters: Sequence[Drafter], seed: int, texts: int, new_tokens: int) -> Agreement:
    """One plan at one temperature, on two disjoint sets of prompts."""
    rng = np.random.default_rng(seed)
    temperature = round(float(rng.uniform(0.2, 1.4)), 2)
    drafter = [None, *drafters][rng.integers(1 + len(drafters))]
    depth = pair.loaded.heads.num_heads if drafter is None else drafter.depth
    per_step = drafter is not None and rng.random() < 0.5
    whole = [*pair.first_half.prompts, *pair.second_half.prompts]
    order = rng.permutation(len(whole))[: 2 * texts]
    halves = [sorted(order[:texts].tolist()), sorted(order[texts:].tolist())]
    predicted_on, measured_on = (
        dataclasses.replace(pair.first_half, prompts=tuple(whole[i] for i in half)) for half in halves
    )
    plan: Plan = random_tree(rng, depth)
    if per_step and drafter is not None:
        plan = TreePolicy(int(rng.integers(2, 49)), depth, drafter.id)
    elif drafter is not None:
        plan = dataclasses.replace(plan, drafter=drafter.id)
    run = run_calibration(
        pair.base,
        pair.loaded,
        predicted_on,
        drafter=drafter,
        max_new_tokens=new_tokens,
        batch_size=64,
        temperature=temperature,
        seed=2 * seed,
        steps=per_step,
    )
    found = replayed(plan, run.calibration)
    tokens, steps = decoded(pair, plan, drafter, Sample(temperature, seed=2 * seed + 1), measured_on, new_tokens)
    counted = standard_error(np.diff(run.calibration.offsets), found.sums.steps)
    predicted_error = standard_error(found.sums.tokens, found.sums.steps)
    measured_error = standard_error(tokens, steps)
    assert predicted_error is not None, "there are several texts"
    assert counted is not None
    assert measured_error is not None
    kind = f"{plan.nodes} nodes {'per step' if per_step else 'static'}, {'heads' if drafter is None else drafter.name}"
    name, measured = f"seed {seed}: {kind}, temperature {temperature}", float(tokens.sum() / steps.sum())
    return Agreement(name, found.tokens_per_step, predicted_error, counted, measured, measured_error)


def replayed(plan: Plan, calibration: Calibration) -> Replay:
    """Replay of a tree or policy."""
    return replay(plan, calibration) if isinstance(plan, Tree) else replay_policy(plan, calibration)


def decoded(
    pair: Pair, plan: Plan, drafter: Drafter | None, rule: Sample, prompts: PromptSet, new_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and steps of each text that the decoder samples, int64 [S] each."""
    decoder = TreeDecoder(pair.base, pair.loaded.heads, plan, drafter=drafter, acceptance=rule)
    encoded = encode_prompts(pair.base, prompts, new_tokens).texts
    texts = decoder.generate([text.prompt for text in encoded], new_tokens)
    return np.array([len(text.tokens) for text in texts]), np.array([len(text.step_lengths) for text in texts])


def agree(pair: Pair, plans: int, texts: int, new_tokens: int, learn_tokens: int) -> None:
    """Print the z-scores of random plans."""
    learning = Learning(tokens=learn_tokens)
    learned = run_calibration(
        pair.base, pair.loaded, pair.first_half, max_new_tokens=new_tokens, batch_size=64, learning=learning
    ).learned
    assert learned is not None
    found = []
    for seed in range(plans):
        found.append(agreement(pair, [learned.drafter], seed, texts, new_tokens))
        if abs(found[-1].z) > FARTHEST:
            print(f"beyond {FARTHEST:g}: {found[-1]}", flush=True)
    scores = [one.z for one in found]
    print(f"{plans} plans, {texts} texts of {new_tokens} tokens each for the prediction and for the measurement")
    print(
        f"z-scores: mean {statistics.fmean(scores):+.3f}, standard deviation {statistics.pstdev(scores):.3f}, "
        f"largest {max(map(abs, scores)):.2f}, beyond 2: {sum(abs(z) > 2 for z in scores)} of {plans}, "
        f"beyond {FARTHEST:g}: {sum(abs(z) > FARTHEST for z in scores)}"
    )
    ratio = statistics.median(one.predicted_error / one.counted_error for one in found if one.counted_error > 0)
    print(f"standard error of the sum of probabilities / of the count of accepted drafts: median {ratio:.3f}")


def calibrated(
    pair: Pair, prompts: PromptSet, new_tokens: int, temperature: float, drafter: Drafter | None
) -> Calibration:
    """Traces of the answers to prompts."""
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "batch_size": 64, "temperature": temperature}
    return run_calibration(pair.base, pair.loaded, prompts, drafter=drafter, **options).calibration


def loss(pair: Pair, new_tokens: int, learn_tokens: int) -> None:
    """Print tokens per step at each temperature of trees built for greedy text and for the temperature."""
    learning = Learning(tokens=learn_tokens)
    learned = run_calibration(
        pair.base, pair.loaded, pair.first_half, max_new_tokens=new_tokens, batch_size=64, learning=learning
    ).learned
    assert learned is not None
    for drafter in (None, learned.drafter):
        greedy = calibrated(pair, pair.first_half, new_tokens, 0.0, drafter)
        for temperature in LOSS_TEMPERATURES:
            fitted = calibrated(pair, pair.first_half, new_tokens, temperature, drafter)
            fresh = calibrated(pair, pair.second_half, new_tokens, temperature, drafter)
            name = f"{'heads' if drafter is None else drafter.name}, temperature {temperature}"
            for nodes in LOSS_NODES:
                print_loss(name, greedy, fitted, fresh, nodes)


def print_loss(name: str, greedy: Calibration, fitted: Calibration, fresh: Calibration, nodes: int) -> None:
    """Print the tokens per step of trees on fresh texts, and the interval of the loss of the tree for greedy text."""
    counted = dataclasses.replace(fitted, target=None)
    trees = {
        "greedy": build_tree(greedy, nodes),
        "sampled": build_tree(fitted, nodes),
        "counted": build_tree(counted, nodes),
        "Medusa": build_tree(greedy, nodes, values="independent", weights="uniform"),
    }
    sums = {key: replay(tree, fresh).sums for key, tree in trees.items()}
    one, two = (by_text(fresh.token_hashes, sums[key].tokens, sums[key].steps) for key in ("sampled", "greedy"))
    gain = difference_interval(one[0], one[1], two[1], two[0])
    assert gain is not None
    tau = {key: found.tokens_per_step for key, found in sums.items()}
    print(
        f"{name}, {nodes} nodes: for greedy text {tau['greedy']:.4f}, for the temperature {tau['sampled']:.4f} "
        f"({tau['sampled'] / tau['greedy'] - 1:+.2%}; difference {gain.low:+.4f} to {gain.high:+.4f}, 90 %), "
        f"from counts {tau['counted']:.4f}, Medusa tree of greedy text {tau['Medusa']:.4f}",
        flush=True,
    )


def paths(families: Sequence[str], texts: int, new_tokens: int) -> None:
    """Print the p-value of each family and temperature."""
    found = []
    for family in families:
        base = small_family(family, new_tokens + 16)
        for temperature in PATHS_TEMPERATURES:
            p, tokens_per_step = p_of_texts(base, Sample(temperature, seed=1), texts, new_tokens)
            found.append(p)
            print(f"{family}, temperature {temperature}: p {p:.3g}, {tokens_per_step:.2f} tokens per step", flush=True)
    print(f"{len(found)} tests of {texts} texts of {new_tokens} tokens, least p {min(found):.2g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["agree", "loss", "paths"])
    parser.add_argument("--model", choices=["tinystories", "pocket"], default="tinystories")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--texts", type=int, default=64, help="of each side of `agree`; of `paths`")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each text of `agree` and `paths`")
    add_tiny(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(1))
    if options.what == "paths":
        texts, new_tokens = (2, 8) if options.tiny else (options.texts, options.new_tokens)
        paths(PATHS[:1] if options.tiny else PATHS, texts, new_tokens)
        return
    pair = load(options.model, options.shared, tiny=options.tiny)
    if options.what == "agree":
        plans, texts, new_tokens = (2, 4, 12) if options.tiny else (options.plans, options.texts, options.new_tokens)
        agree(pair, plans, texts, new_tokens, 300 if options.tiny else 20_000)
    else:
        loss(pair, pair.new_tokens, 300 if options.tiny else 100_000)


if __name__ == "__main__":
    main()
