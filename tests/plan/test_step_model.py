"""The hardware model by hand: operators, seconds, memory and profiles, and what the Medusa paper found with it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hand_shape import SHAPE
from looped import looped
from refusals import refusal_of

from treeopt.errors import Code, TreeoptError
from treeopt.models.shapes import named_shape
from treeopt.plan.devices import DEVICES, Device, device_preset
from treeopt.plan.operators import Operator, StepSetting, drafting_operators, forward_operators
from treeopt.plan.planner import Acceptance, SpeedPlan, plan_speedup
from treeopt.plan.step_model import Efficiency, StepModel
from treeopt.shape import Attention, Drafting, Matrix, ModelShape

SLOW, WIDE = Device("slow memory", {"any": 100.0}, 10.0), Device("wide memory", {"any": 100.0}, 1000.0)
POWERS = tuple(2**power for power in range(10))
PAPER = tuple(range(16, 129, 16))  # candidates in the paper's charts, with one


@looped(
    "device, efficiency, drafting, expected",
    [
        (SLOW, Efficiency(), Drafting(), 472.2),
        (WIDE, Efficiency(), Drafting(), 70.44),
        (WIDE, Efficiency(0.5, 0.25), Drafting(), 141.36),
        (WIDE, Efficiency(0.5, 0.25, 0.01, 0.5, 0.25), Drafting(), 142.2),
        (WIDE, Efficiency(0.5, 0.25, 0.01, 0.5, 0.25), Drafting(host_seconds=0.125), 142.325),
    ],
)
def test_seconds_by_hand(device: Device, efficiency: Efficiency, drafting: Drafting, expected: float) -> None:
    """Each operator takes the longer of its two times; nine operators are started."""
    model = StepModel(SHAPE, device, drafting=drafting, efficiency=efficiency)
    assert model.seconds([3], 2, 10)[0] == pytest.approx(expected, rel=1e-12)


def test_one_node_drafts_nothing() -> None:
    """Heads, host and the time of trees count from two nodes on."""
    plain = StepModel(SHAPE, WIDE)
    costly = StepModel(SHAPE, WIDE, drafting=Drafting(3, 1, 7, host_seconds=5.0), efficiency=Efficiency(tree=7.0))
    assert costly.seconds([1], 1, 10)[0] == plain.seconds([1], 1, 10)[0]
    assert costly.seconds([2], 1, 10)[0] - plain.seconds([2], 1, 10)[0] > 12.0


def test_memory_by_hand() -> None:
    """Weights, heads and a draft model in the dtype of weights, the cache in that of the cache."""
    shape = SHAPE  # 30 in matrices, 35 in the LM head, 35 others; 20 cached numbers a token
    assert StepModel(shape, WIDE).memory(3, 2, 10) == 2 * 100 + 2 * 20 * 2 * 13
    assert StepModel(shape, WIDE, StepSetting("int4", "float8")).memory(3, 2, 10) == 50 + 20 * 2 * 13
    drafting = Drafting(heads=2, blocks=1, head_rows=7, draft=shape, levels=1)
    heads = 2 * (5 + 7) * 5
    assert StepModel(shape, WIDE, drafting=drafting).memory(3, 2, 10) == 2 * (200 + heads) + 2 * 40 * 2 * 13


def test_profile_has_the_modelled_seconds() -> None:
    """One and two nodes are in every profile; quartiles are the figure itself."""
    model = StepModel(SHAPE, WIDE)
    profile = model.profile([8, 4], [2, 1], [10], {"model": "by hand"})
    assert profile.curve(2)[0].tolist() == [1, 2, 4, 8]
    assert profile.curve(2)[1].tolist() == model.seconds([1, 2, 4, 8], 2, 10).tolist()
    assert all(point.low == point.seconds == point.high for point in profile.points)


def planned(name: str = "llama-7b", *, nodes: Any = POWERS, batch: int = 1, context: int = 1024) -> SpeedPlan:
    """The paper's machine, formulas and acceptance."""
    model = StepModel(named_shape(name), device_preset("a100-80gb-pcie"))
    return plan_speedup(model, nodes, [batch], [context])


def naive_seconds(nodes: int, batch: int, context: int) -> float:
    """Table 5 of appendix G for Llama-7B on an A100, written out, with the LM head, the writes and the new keys."""
    h, i, n, d, layers, keys = 4096, 11008, 32, 128, 32, context + nodes
    total = 2 * 2 * batch * nodes * n * d / 1935e9
    for rows, columns in [(h, h)] * 4 + [(i, h)] * 2 + [(h, i)]:
        flops = 2 * batch * nodes * rows * columns
        moved = 2 * (rows * columns + batch * nodes * (rows + columns))
        total += max(flops / 312e12, moved / 1935e9)
    for _ in range(2):
        flops = 2 * batch * n * nodes * keys * d
        moved = 2 * (batch * n * nodes * d + batch * n * keys * d + batch * n * nodes * keys)
        total += max(flops / 312e12, moved / 1935e9)
    head = 2 * (32000 * h + batch * nodes * (32000 + h))
    return layers * total + max(2 * batch * nodes * 32000 * h / 312e12, head / 1935e9)


@looped("batch, context", [(1, 1024), (1, 8192), (8, 128), (64, 1024)])
def test_plan_is_that_of_the_naive_formulas(batch: int, context: int) -> None:
    """Seconds, overhead and speedup of every point, and the best of all sizes."""
    plan = planned(batch=batch, context=context)
    one = naive_seconds(1, batch, context)
    speedups = {}
    for nodes in range(1, 513):
        speedups[nodes] = (1 + 0.477 * math.log(nodes)) * one / naive_seconds(nodes, batch, context)
    for point in plan.points:
        assert point.seconds == pytest.approx(naive_seconds(point.nodes, batch, context), rel=1e-12)
        assert point.overhead == pytest.approx(naive_seconds(point.nodes, batch, context) / one, rel=1e-12)
        assert point.speedup == pytest.approx(speedups[point.nodes], rel=1e-12)
    assert plan.best[0].any_nodes == max(speedups, key=lambda nodes: (speedups[nodes], -nodes))
    assert plan.best[0].nodes == max(POWERS, key=lambda nodes: (speedups[nodes], -nodes))


def test_speedup_rises_to_64_or_128_nodes_and_falls() -> None:
    """Batch 1, context 1,024: the finding of appendix G; the continuous maximum is at 169 nodes."""
    speedups = [point.speedup for point in planned().points]
    top = int(np.argmax(speedups))
    assert POWERS[top] in (64, 128)
    assert np.all(np.diff(speedups[: top + 1]) > 0)
    assert np.all(np.diff(speedups[top:]) < 0)
    assert planned().best[0].any_nodes == 169


def test_large_batches_want_a_few_nodes() -> None:
    """From batch 32 on the best size is a few nodes, and every size of the paper's charts loses."""
    for batch in (32, 64):
        best = planned(batch=batch).best[0]
        assert 2 <= best.nodes <= 8
        assert 2 <= best.any_nodes <= 8
        charted = [point.speedup for point in planned(nodes=PAPER, batch=batch).points if point.nodes > 1]
        assert np.all(np.diff(charted) < 0)


def test_a_drafter_without_enough_sizes_ends_there() -> None:
    """Sizes beyond the largest calibrated one are left out; between calibrated sizes tokens are interpolated."""
    model = StepModel(named_shape("llama-7b"), DEVICES["a40"])
    small = plan_speedup(model, [2, 4, 8, 16], acceptance=Acceptance("small", (1, 2, 4), (1.0, 1.9, 2.5)))
    large = plan_speedup(model, [2, 4, 8, 16], acceptance=Acceptance("large", (1, 16), (1.0, 2.0)))
    assert [point.nodes for point in small.points] == [1, 2, 4]
    assert [point.nodes for point in large.points] == [1, 2, 4, 8, 16]
    assert small.best[0].nodes == 4
    assert small.points[-1].tokens_per_step == 2.5
    assert large.points[3].tokens_per_step == 1 + 7 / 15
    between = plan_speedup(model, [16], acceptance=small.acceptance)
    assert [point.nodes for point in between.points] == [1]
    assert between.best[0].any_nodes == 4


@looped("wrong", [([0], [1], [1]), ([1], [0], [1]), ([1], [1], [0]), ([2**40], [1], [1]), ([2], [], [1])])
def test_numbers_out_of_range_are_refused(wrong: tuple[list[int], list[int], list[int]]) -> None:
    """E240 for sizes, batches and contexts that are missing, below 1 or too large."""
    assert refusal_of(plan_speedup, StepModel(SHAPE, WIDE), *wrong).code is Code.PLAN_INVALID


@looped(
    "wrong",
    [
        {"compute": 0.0},
        {"compute": 1e-320},
        {"compute": 1e308},
        {"bandwidth": -1.0},
        {"launch": math.nan},
        {"launch": 1e308},
        {"step": math.inf},
    ],
)
def test_impossible_efficiency_is_refused(wrong: dict[str, float]) -> None:
    """Shares are positive, and seconds are not negative."""
    with pytest.raises(TreeoptError, match=next(iter(wrong))):
        Efficiency(**wrong)


def test_presets_have_sources_and_order() -> None:
    """Every device has a source; 8 bits are at least as fast as 16, and these faster than float32."""
    assert len(DEVICES) >= 12
    for name, device in DEVICES.items():
        assert device.name == name
        assert len(device.source) > 10
        assert device.peak("float32") < device.peak("bfloat16") == device.peak("int4") == device.peak("float16")
        assert device.flops.get("float8", device.peak("bfloat16")) >= device.peak("bfloat16")
    paper = device_preset("A100-80GB-PCIe")
    assert (paper.peak("float16"), paper.bandwidth, paper.memory) == (312e12, 1935e9, 80e9)


def test_unknown_device_and_dtype_are_refused() -> None:
    """Similar names, and the dtypes that a device has."""
    error = refusal_of(device_preset, "a100")
    assert "a100-80gb-pcie" in error.fix or "a100-40gb-pcie" in error.fix
    assert "bfloat16" in refusal_of(device_preset("a100-80gb-pcie").peak, "float8").fix


EXPERTS = dataclasses.replace(SHAPE, matrices=(Matrix("e", 3, 5, experts=4, active=2),))
WINDOW = dataclasses.replace(SHAPE, attention=(dataclasses.replace(SHAPE.attention[0], window=6),))


def by_name(operators: list[Operator]) -> dict[str, tuple[float, float, float]]:
    """FLOPs, bytes and calls of each operator."""
    found: dict[str, tuple[float, float, float]] = {}
    for one in operators:
        before = found.get(one.name, (0.0, 0.0, 0.0))
        flops, moved, calls = (float(values[0]) for values in (one.flops, one.bytes, one.calls))
        found[one.name] = (before[0] + flops, before[1] + moved, before[2] + calls)
    return found


def forward(shape: ModelShape = SHAPE, nodes: float = 3.0, batch: int = 2, cached: int = 10, **setting: Any) -> Any:
    """The operators of two texts with three new tokens after ten."""
    return by_name(forward_operators(shape, np.array([nodes]), batch, cached, StepSetting(**setting)))


def test_forward_by_hand() -> None:
    """Two texts, three new tokens, ten cached, 16 bits: keys are 13."""
    assert forward() == {
        "m": (360.0, 252.0, 2.0),
        "scores": (3744.0, 2160.0, 2.0),
        "values": (2496.0, 1856.0, 2.0),
        "kv writes": (0.0, 240.0, 2.0),
        "lm_head": (420.0, 214.0, 1.0),
    }


@looped(
    "setting, expected",
    [
        ({"dtype": "int4", "kv_dtype": "float8"}, {"m": 207.0, "scores": 1848.0, "kv writes": 120.0}),
        ({"dtype": "float32"}, {"m": 504.0, "scores": 4320.0, "kv writes": 480.0}),
        ({"attention": "flash"}, {"m": 252.0, "scores": 912.0, "values": 608.0}),
    ],
)
def test_bytes_by_hand(setting: dict[str, Any], expected: dict[str, float]) -> None:
    """Bytes follow the dtypes of weights, activations and cache, and the kind of attention."""
    found = forward(**setting)
    assert {name: found[name][1] for name in expected} == expected


def test_window_limits_the_keys() -> None:
    """A window of 6 leaves 5 cached tokens."""
    assert forward(WINDOW)["scores"][0] == 2304.0
    assert forward(WINDOW, cached=3) == forward(cached=3)
    assert StepModel(WINDOW, WIDE).memory(3, 2, 10) == 2 * 100 + 2 * 20 * 2 * (5 + 3)


def test_experts_by_hand() -> None:
    """Six tokens compute two experts each, and read 3.9375 of four."""
    assert forward(EXPERTS)["e"] == (360.0, 310.125, 1.0)
    assert forward(EXPERTS, nodes=1.0, batch=1)["e"] == (60.0, 92.0, 1.0)
    many = forward(EXPERTS, nodes=1000.0)["e"]
    assert many[1] == pytest.approx(2 * 15 * 4 + 2 * 2000 * 2 * 8)


@looped(
    "drafting, expected",
    [
        (Drafting(3, 2, 7), {"residual blocks": (600.0, 540.0, 2.0), "LM heads": (420.0, 354.0, 1.0)}),
        (Drafting(3, 2), {"residual blocks": (600.0, 540.0, 2.0), "LM heads": (420.0, 214.0, 1.0)}),
        (Drafting(3, 0), {"LM heads": (420.0, 214.0, 1.0)}),
        (Drafting(), {}),
    ],
)
def test_heads_by_hand(drafting: Drafting, expected: dict[str, tuple[float, float, float]]) -> None:
    """Each head runs at one position of each text, whatever the size of the tree; one node needs no heads."""
    for nodes in (2.0, 64.0):
        assert by_name(drafting_operators(SHAPE, drafting, np.array([nodes]), 2, 10, StepSetting())) == expected
    alone = by_name(drafting_operators(SHAPE, drafting, np.array([1.0]), 2, 10, StepSetting()))
    assert all(figures == (0.0, 0.0, 0.0) for figures in alone.values())


@looped("nodes, flops, moved", [(1.0, 0.0, 0.0), (2.0, 60.0, 92.0), (3.0, 120.0, 184.0), (8.0, 420.0, 404.0)])
def test_draft_model_by_hand(nodes: float, flops: float, moved: float) -> None:
    """Three levels: one token, then the nodes of a level, (N - 1) / 3 rounded up; fewer levels for small trees."""
    drafting = Drafting(draft=SHAPE, levels=3)
    found = by_name(drafting_operators(SHAPE, drafting, np.array([nodes]), 1, 10, StepSetting()))
    assert found["m"][:2] == (flops, moved)


def test_figures_of_the_paper() -> None:
    """Llama-33B's attention intensity (appendix G.2), and the FLOPs of prefill of Llama-7B."""
    found = forward_operators(named_shape("llama-33b"), np.array([1.0, 64.0]), 16, 1024, StepSetting())
    for one in found:
        if one.name in ("scores", "values"):
            assert (one.flops[1] / one.bytes[1]) / (one.flops[0] / one.bytes[0]) == pytest.approx(41.37, abs=0.1)
    found = by_name(forward_operators(named_shape("llama-7b"), np.array([1024.0]), 1, 0, StepSetting()))
    assert found["q_proj"][0] == found["v_proj"][0] == 32 * 34_359_738_368
    assert found["gate_proj"][0] == 32 * 92_341_796_864
    assert found["scores"][0] == 32 * 8_589_934_592


@looped(
    "wrong",
    [
        lambda: StepSetting("bf16"),
        lambda: StepSetting(kv_dtype="int5"),
        lambda: StepSetting(attention="sdpa"),
        lambda: Matrix("m", 0, 5),
        lambda: Matrix("m", 3, 5, experts=2, active=3),
        lambda: Matrix("m", 3.5, 5),  # type: ignore[arg-type]
        lambda: Matrix("m", 1 << 50, 5),
        lambda: Attention(2, 5, 2, 3, 3),
        lambda: Attention(2, 4, 2, 3, 3, window=0),
        lambda: dataclasses.replace(SHAPE, matrices=()),
        lambda: dataclasses.replace(SHAPE, other=-1),
        lambda: Drafting(-1),
        lambda: Drafting(host_seconds=float("nan")),
        lambda: Drafting(draft=SHAPE),
        lambda: Drafting(levels=2),
    ],
)
def test_impossible_numbers_are_refused(wrong: Any) -> None:
    """E240 for unknown names, and numbers that no model has."""
    assert refusal_of(wrong).code is Code.PLAN_INVALID
