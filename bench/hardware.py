"""The hardware model: what the Medusa paper found with it, and its error against measured steps of this machine.

    python bench/hardware.py paper
    python bench/hardware.py fit --shared ../shared
    python bench/hardware.py gpu [--preset h200]

`paper` prints each statement of appendix G (arXiv:2401.10774) that needs no trained model of 7 billion parameters, with
the figure by the formulas. `fit` profiles pocket, tinystories and a random model of 30 million parameters, fits the
efficiency of this machine to some of them, and prints the errors of seconds and of overheads on steps and models that
were left out. Its seconds are CPU seconds of the one thread, so that other processes do not count; the models take
turns, and each step counts with its shortest time of all turns. `gpu` profiles random bfloat16 weights of Llama-3-8B's
shape on a GPU, with five heads that share the LM head, and fits the efficiency of the GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import add_tiny, machine
from transformers import LlamaConfig, LlamaForCausalLM

import treeopt.evaluate.profile as timed_step
from treeopt.defaults import ONE_NODE
from treeopt.evaluate.profile import measure_profile
from treeopt.latency import LatencyProfile
from treeopt.models.base import Base
from treeopt.models.given import load_pair
from treeopt.models.heads import MedusaHeads
from treeopt.models.shapes import model_shape, named_shape
from treeopt.plan.devices import Device, device_of_spec, device_preset
from treeopt.plan.fit import EfficiencyFit, MeasuredSteps, fit_efficiency
from treeopt.plan.operators import StepSetting, forward_operators
from treeopt.plan.planner import PlanBest, plan_speedup
from treeopt.plan.step_model import Efficiency, StepModel
from treeopt.shape import Drafting

CHARTED = (1, *range(16, 113, 16))  # sizes of the paper's charts
POWERS = tuple(2**power for power in range(10))
CPU = device_of_spec("flops=1e11,bandwidth=2e10")  # of the order of one core; the fit corrects it
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("paper", "fit", "gpu"))
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--preset", default="h200", help="the GPU, as of treeopt plan --device-preset")
    add_tiny(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(1))
    if given.what == "paper":
        paper()
    elif given.what == "gpu":
        gpu(given.preset, given.tiny)
    else:
        fit(given.shared, given.tiny)


def paper() -> None:
    """Print a line for each statement."""
    rows = forward_operators(named_shape("llama-33b"), np.array([1.0, 64.0]), 16, 1024, StepSetting())
    scores = next(one for one in rows if one.name == "scores")
    ratio = float((scores.flops[1] / scores.bytes[1]) / (scores.flops[0] / scores.bytes[0]))
    print(f"33B, batch 16, context 1,024: intensity of attention, 64 candidates / 1 | paper 41 | {ratio:.1f}")
    print(f"the same: FLOP/s of attention | paper 44, measured | {flops_ratio():.1f}")
    print(f"7B: tokens (batch x nodes) from which all linear layers are compute-bound | | {crossing()}")
    for name in ("llama-7b", "llama-13b", "llama-33b"):
        one = best(name, POWERS)
        text = f"fastest power of two {one.nodes} ({one.speedup:.2f}), of all sizes {one.any_nodes}"
        print(f"{name}, batch 1, context 1,024 | paper, 7B: rises to about 64, then falls | {text}")
    for batch, stated in ((1, "64"), (2, "64"), (4, "32"), (8, "16 to 32"), (16, "-"), (32, "falls"), (64, "falls")):
        one = best("llama-7b", CHARTED, batch=batch)
        print(
            f"7B, context 1,024, batch {batch}: fastest of 1, 16, 32, ... 112 | charts: {stated} | {one.nodes} "
            f"({one.speedup:.2f}); of all sizes {one.any_nodes} ({one.any_speedup:.2f})"
        )
    for batch in (1, 4, 32):
        gains = [best("llama-7b", POWERS, batch=batch, context=2**power) for power in range(7, 14)]
        sizes = ", ".join(f"{one.any_nodes} ({one.any_speedup:.2f})" for one in gains)
        print(f"7B, batch {batch}, contexts 128, 256, ... 8,192: fastest size | paper: gain shrinks | {sizes}")


def best(name: str, sizes: Sequence[int], batch: int = 1, context: int = 1024) -> PlanBest:
    """The fastest sizes on the paper's device."""
    model = StepModel(named_shape(name), device_preset("a100-80gb-pcie"))
    return plan_speedup(model, sizes, [batch], [context]).best[0]


def flops_ratio() -> float:
    """FLOP/s of the attention products of 64 candidates over those of one, by the model."""
    model = StepModel(named_shape("llama-33b"), device_preset("a100-80gb-pcie"))
    scores = next(one for one in model.operators([1, 64], 16, 1024) if one.name == "scores")
    rates = scores.flops / model.seconds_of(scores)
    return float(rates[1] / rates[0])


def crossing() -> int:
    """The number of tokens from which every matrix of Llama-7B takes longer to compute than to read."""
    model = StepModel(named_shape("llama-7b"), device_preset("a100-80gb-pcie"))
    tokens = np.arange(1.0, 1025.0)
    linear = [one for one in model.operators(tokens, 1, 1024) if one.name not in ("scores", "values", "kv writes")]
    bound = np.all([computing > moving for computing, moving in map(model.times, linear)], axis=0)
    return int(tokens[bound][0])


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with heads, and the model of its steps."""

    base: Base
    heads: MedusaHeads
    steps: StepModel


def fit(shared: Path, tiny: bool) -> None:
    """Profile three models in turn, and print the errors of fits to some of them."""
    vars(timed_step)["now"] = lambda base: time.process_time()
    models = {
        "pocket": loaded("pocket", "pocket"),
        "tinystories": loaded(shared / "models/tinystories-260k", shared / "models/tinystories-260k-medusa"),
        "random": random_model(tiny),
    }
    options: dict[str, Any] = {
        "nodes": [1, 2, 4, 8, 16, 32, 64],
        "contexts": [64, 384],
        "batches": [1, 4],
        "repeats": 5,
    }
    if tiny:
        options = {"nodes": [1, 2, 4], "contexts": [16, 64], "repeats": 1}
    turns: dict[str, list[LatencyProfile]] = {name: [] for name in models}
    for _ in range(1 if tiny else 3):
        for name, one in models.items():
            turns[name].append(measure_profile(one.base, one.heads, **options))
    measured = {name: MeasuredSteps(shortest(turns[name]), one.steps) for name, one in models.items()}
    print("steps of | fitted to | median and largest error of seconds | of overheads")
    for known in (("pocket",), ("tinystories",), ("pocket", "tinystories"), tuple(models)):
        found = fit_efficiency([measured[name] for name in known])
        label = " and ".join(known)
        show(found, label)
        for name in [name for name in models if name not in known]:
            print(line_of(name, label, found.efficiency, measured[name]))


def show(found: EfficiencyFit, label: str) -> None:
    """The efficiency, and the errors of seconds of the fitted steps and of those left out."""
    numbers = ", ".join(f"{name} {value:.3g}" for name, value in vars(found.efficiency).items())
    print(f"efficiency by {label}: {numbers}")
    print(f"the fitted | {label} | {found.fitted.median:.1%}, {found.fitted.largest:.1%} |")
    for held in found.held_out:
        errors = f"{held.median:.1%}, {held.largest:.1%}" if held.errors else "too few steps are left"
        print(f"left out by {held.by} | {label} | {errors} |")


def gpu(preset: str, tiny: bool) -> None:
    """Steps of a large random model by nodes and batch, and a fit to them."""
    if not (tiny or torch.cuda.is_available()):
        sys.exit("NOT RUN: torch finds no CUDA device here; --tiny runs on the CPU")
    device, sizes = device_preset(preset), {"hidden_size": 64, "num_hidden_layers": 1} if tiny else LARGE
    place, rows = ("cpu", 512) if tiny else ("cuda", 128_256)
    config = LlamaConfig(vocab_size=rows, num_key_value_heads=8, **sizes)
    with torch.device(place):
        base = Base(LlamaForCausalLM(config).bfloat16().eval(), None, "random")
        weight = torch.zeros(1, 5, base.hidden_size, base.hidden_size, dtype=torch.bfloat16)
        heads = MedusaHeads.from_tensors(weight, weight[..., 0], None)
    nodes, context, repeats = ([4], 64, 1) if tiny else ([2, 16, 64, 128, 256], 512, 4)
    profile = measure_profile(base, heads, nodes=nodes, contexts=[context], batches=[1, 4, 16], repeats=repeats)
    alone = {point.batch: point.seconds for point in profile.points if point.nodes == ONE_NODE}
    print(f"{'CPU' if tiny else torch.cuda.get_device_name()}, torch {torch.__version__}, context {context}")
    for point in profile.points:
        over = point.seconds / alone[point.batch]
        print(f"batch {point.batch}, {point.nodes} nodes: {point.seconds * 1e3:.2f} ms, {over:.2f} of one node")
    steps = model_of(base, heads, device, "bfloat16").steps
    show(fit_efficiency([MeasuredSteps(profile, steps)]), preset)


def line_of(name: str, label: str, efficiency: Efficiency, steps: MeasuredSteps) -> str:
    """The errors of a model that the fit did not see; of seconds, and of overheads."""
    seconds, ratios = second_errors(efficiency, steps), overhead_errors(efficiency, steps)
    return (
        f"{name} | {label} | {np.median(seconds):.1%}, {max(seconds):.1%} | "
        f"{np.median(ratios):.1%}, {max(ratios):.1%}; without a fit "
        f"{np.median(overhead_errors(Efficiency(), steps)):.1%}"
    )


def second_errors(efficiency: Efficiency, steps: MeasuredSteps) -> list[float]:
    """|modelled / measured - 1| of the seconds of every step."""
    model = dataclasses.replace(steps.model, efficiency=efficiency)
    return [abs(float(model.seconds([p.nodes], p.batch, p.context)[0]) / p.seconds - 1.0) for p in steps.profile.points]


def overhead_errors(efficiency: Efficiency, steps: MeasuredSteps) -> list[float]:
    """|modelled / measured - 1| of the overhead of every size above one."""
    model = dataclasses.replace(steps.model, efficiency=efficiency)
    alone = {(p.batch, p.context): p.seconds for p in steps.profile.points if p.nodes == ONE_NODE}
    errors = []
    for point in steps.profile.points:
        if point.nodes > ONE_NODE:
            modelled = model.seconds([point.nodes, ONE_NODE], point.batch, point.context)
            overhead = point.seconds / alone[point.batch, point.context]
            errors.append(abs(float(modelled[0] / modelled[1]) / overhead - 1.0))
    return errors


def shortest(profiles: Sequence[LatencyProfile]) -> LatencyProfile:
    """Each step with its shortest time of several profiles."""
    pairs = zip(*(profile.points for profile in profiles), strict=True)
    points = [min(points, key=lambda point: point.seconds) for points in pairs]
    return LatencyProfile.from_points(points, profiles[0].provenance)


def loaded(name: str | Path, heads: str | Path) -> Model:
    """A model and its heads from their folders."""
    base, found = load_pair(str(heads), str(name), device="cpu", dtype="float32")
    return model_of(base, found.heads)


def random_model(tiny: bool) -> Model:
    """A Llama of 30 million parameters (its weights do not matter), and five heads."""
    width, layers = (64, 1) if tiny else (512, 8)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
    )
    base = Base(LlamaForCausalLM(config).eval(), None, "random")
    return model_of(base, MedusaHeads(5, 1, width, 4096).eval())


def model_of(base: Base, heads: MedusaHeads, device: Device = CPU, dtype: str = "float32") -> Model:
    """The model with the shape of its config."""
    setting = StepSetting(dtype, attention="flash")
    with tempfile.TemporaryDirectory() as folder:
        base.model.config.save_pretrained(folder)
        shape = model_shape(folder)
    rows = None if heads.lm_head is None else int(heads.lm_head.shape[1])
    drafting = Drafting(heads.num_heads, int(heads.weight.shape[0]), rows)
    return Model(base, heads, StepModel(shape, device, setting, drafting))


if __name__ == "__main__":
    main()
