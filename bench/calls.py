"""Time from a call of `tree_generate` to the model's first forward: the first call, and calls after it.

python bench/calls.py --shared ../shared
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from timing import add_tiny, goal_line, machine
from transformers import AutoModelForCausalLM, PreTrainedModel

from treeopt.decode.generate import tree_generate
from treeopt.drafter import Drafter
from treeopt.files.drafters import save_drafter
from treeopt.models.head_files import load_heads
from treeopt.policy import TreePolicy

GOAL = 1.0  # milliseconds of a later call
CALLS = 40
NODES = 16
PROMPT = [1, 403, 407]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    add_tiny(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine(1)}, torch {torch.__version__}; tinystories-260k, milliseconds to the first forward")
    models = options.shared / "models"
    model = AutoModelForCausalLM.from_pretrained(models / "tinystories-260k")
    heads = load_heads(models / "tinystories-260k-medusa").heads
    drafter = Drafter.untrained(model.config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "drafter.safetensors"
        save_drafter(drafter, file)
        plan = TreePolicy(NODES, drafter.depth, drafter.id)
        for name, given in {
            "heads and a tree of the zoo": {"heads": heads, "tree": "mc_sim_7b_63"},
            "a policy and the file of its drafter": {"tree": plan, "drafter": file},
            "nothing": {},
        }.items():
            first, *later = (to_first_forward(model, given) for _ in range(2 + CALLS * (not options.tiny)))
            label = f"later call with {name} (the first took {first:.1f})"
            print(goal_line(label, statistics.median(later), GOAL, "ms"))


def to_first_forward(model: PreTrainedModel, given: dict[str, Any]) -> float:
    """Milliseconds from the call of `tree_generate` by `generate` to the first forward of the model in it."""
    called: list[float] = []
    run: list[float] = []

    @functools.wraps(tree_generate)  # `generate` reads the names of the options from the signature
    def noted(*inputs: Any, **named: Any) -> Any:
        called.append(time.perf_counter())
        return tree_generate(*inputs, **named)

    hook = model.register_forward_pre_hook(lambda *_: run.append(time.perf_counter()))
    try:
        model.generate(torch.tensor([PROMPT]), max_new_tokens=4, custom_generate=noted, **given)
    finally:
        hook.remove()
    return (run[0] - called[0]) * 1e3


if __name__ == "__main__":
    main()
