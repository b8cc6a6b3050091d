"""Trees under a budget of path tokens against trees of nodes of at most that price, on texts left out of the fit.

    python bench/path_trees.py CALIBRATION ... [--budget 32 64 128]

The price of a tree whose paths are verified as a batch is leaves * (depth + 1) path tokens. `build --path-tokens` is
compared with the best tree of `build --nodes`: of all sizes within the budget the one with the most tokens per step on
the texts that both are evaluated on, an advantage for the other side. Both are fitted to one half of the texts and
replayed on the other; figures are those of both halves together. Then, for random accuracies, the sum of values is
compared with the greatest of all trees, and that from the usual number of candidates with that from 16 times as many.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator

import numpy as np
from optimiser import halves
from timing import add_tiny, judged, machine

from treeopt.calibration import Calibration
from treeopt.files.calibrations import load_calibration
from treeopt.optimize.grow import Growth, grow_paths
from treeopt.optimize.replay import TraceRows
from treeopt.optimize.select_method import Fitter, candidates
from treeopt.optimize.tree_builder import tree_limits
from treeopt.optimize.values import IndependentValues
from treeopt.tree import Tree

GOAL = 1.03
SHAPES = ((1, 4), (2, 2), (2, 3), (3, 2))  # heads, ranks


def trees(growth: Growth, budget: int) -> Iterator[Tree]:
    """The trees of all sizes that cost at most so many path tokens."""
    for nodes in range(2, len(growth.values) + 2):
        tree = growth.tree(nodes)
        if tree.path_tokens > budget:
            return
        yield tree


def compare(name: str, calibration: Calibration, budget: int) -> None:
    """Print the tokens per step of both kinds of trees on the halves left out, and judge their ratio."""
    half = calibration.sequences // 2
    sums = {"paths": [0.0, 0.0], "nodes": [0.0, 0.0]}
    shapes, loss = [], 0.0
    for chosen in (np.arange(half), np.arange(half, calibration.sequences)):
        fitted, others = halves(calibration, chosen)
        rows = TraceRows.of(others)
        path_fitter = Fitter(fitted, tree_limits(fitted, None, path_tokens=budget))
        fit = path_fitter.choose(candidates("joint", "visits"))
        larger = grow_paths(path_fitter.estimate(fit.method), budget, 256 * budget)
        loss = max(loss, float(larger.values.sum() / fit.growth.values.sum() - 1))
        by_nodes = Fitter(fitted, tree_limits(fitted, budget)).choose(candidates("joint", "visits")).growth
        replayed = [(tree, rows.replay(tree).sums) for tree in trees(by_nodes, budget)]
        best, other = max(replayed, key=lambda pair: pair[1].tokens_per_step)
        for kind, found in (("paths", rows.replay(fit.tree).sums), ("nodes", other)):
            sums[kind][0] += found.tokens.sum()
            sums[kind][1] += found.steps.sum()
        shapes.append(
            f"{fit.tree.nodes} nodes, {len(fit.tree.leaves)} leaves, depth {fit.tree.depth} against {best.nodes}, "
            f"{len(best.leaves)}, {best.depth}"
        )
    paths, nodes = (tokens / steps for tokens, steps in sums.values())
    print(f"{name}, {budget} path tokens: {paths:.4f} tokens per step, by nodes {nodes:.4f}; {'; '.join(shapes)}")
    print(f"  16 times as many candidates: the sum of values is {loss:.3%} greater")
    judged(f"{name}, {budget} path tokens, over trees of nodes", paths / nodes, GOAL)


def all_trees(heads: int, ranks: int) -> list[frozenset[tuple[int, ...]]]:
    """All prefix-closed sets of paths."""
    if not heads:
        return [frozenset()]
    below = all_trees(heads - 1, ranks)
    branches = [
        [frozenset(), *(frozenset({(rank,), *((rank, *path) for path in paths)}) for paths in below)]
        for rank in range(ranks)
    ]
    return [frozenset().union(*choice) for choice in itertools.product(*branches)]


def brute_force(seeds: int) -> None:
    """The greatest difference to the best of all trees, at every budget."""
    worst, cases = 0.0, 0
    for shape in SHAPES:
        known = [(Tree.from_paths(paths), sorted(paths)) for paths in all_trees(*shape)]
        for seed in range(seeds):
            table = np.random.default_rng(seed).random(shape)
            sums = [math.fsum(math.prod(table[i, r] for i, r in enumerate(p)) for p in paths) for _, paths in known]
            for budget in range(2, max(tree.path_tokens for tree, _ in known) + 1):
                best = max(total for total, (tree, _) in zip(sums, known, strict=True) if tree.path_tokens <= budget)
                found = grow_paths(IndependentValues(table), budget, 1 << 12)
                assert found.tree().path_tokens <= budget
                worst, cases = max(worst, abs(best - float(found.values.sum()))), cases + 1
    judged(f"largest difference to brute force, {cases} cases", worst, 1e-9, most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibrations", nargs="*", metavar="CALIBRATION")
    parser.add_argument("--budget", type=int, nargs="+", default=[32, 64, 128])
    add_tiny(parser)
    options = parser.parse_args()
    print(machine(1))
    for name in options.calibrations:
        for budget in options.budget[: 1 if options.tiny else None]:
            compare(name, load_calibration(name), budget)
    brute_force(1 if options.tiny else 50)


if __name__ == "__main__":
    main()
