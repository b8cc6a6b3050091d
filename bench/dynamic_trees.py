"""Tokens per step of the dynamic trees that treeopt chooses: replay beside a simulation of SGLang's choice.

    python bench/dynamic_trees.py

The texts and probabilities are made up (tests/eagle_simulation.py): half of the texts choose the numbers, and the
engine is simulated on the same and on the other half. Goal: the engine is within 3 % of the replay of its texts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from timing import add_tiny, judged, machine

from treeopt.calibration import Calibration
from treeopt.optimize.chains import DynamicTree, choose_dynamic_tree, replay_dynamic_tree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from eagle_simulation import MadeUpDrafter, engine_steps, traces_of

LEVELS, WIDTH = 4, 6
SIZES = (2, 4, 6, 8, 12, 16, 24, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=60)
    parser.add_argument("--length", type=int, default=60)
    add_tiny(parser)
    options = parser.parse_args()
    if options.tiny:
        options.texts, options.length = 4, 12
    print(f"{machine(1)}; {options.texts} texts of {options.length} tokens, {LEVELS} levels, {WIDTH} candidates")
    texts = [MadeUpDrafter(seed, options.length, LEVELS, WIDTH) for seed in range(options.texts)]
    fitted, other = texts[::2], texts[1::2]
    traces, held_out = traces_of(fitted), traces_of(other)
    worst = 0.0
    for nodes in SIZES:
        shape = choose_dynamic_tree(traces, None, nodes).shape
        assert shape is not None
        pairs = [compared(shape, traces, fitted), compared(shape, held_out, other)]
        worst = max(worst, *(abs(engine / replayed - 1) for replayed, engine in pairs))
        exact = "exact   " if shape.replays_exactly(LEVELS) else "estimate"
        row = "; ".join(f"{replayed:.4f} {engine:.4f}" for replayed, engine in pairs)
        print(f"steps {shape.steps} top_k {shape.top_k:2} nodes {nodes:2} {exact}: replay, engine {row}", flush=True)
    judged("largest difference of the engine from its replay", worst, 0.03, most=True)


def compared(shape: DynamicTree, traces: Calibration, texts: list[MadeUpDrafter]) -> tuple[float, float]:
    """Tokens per step by replay and by the simulated engine."""
    steps = np.array([len(engine_steps(text, shape.steps, shape.top_k, shape.nodes)) for text in texts])
    return replay_dynamic_tree(traces, shape).tokens_per_step, float(traces.positions / steps.sum())


if __name__ == "__main__":
    main()
