"""Charts of plans: a line for each batch, context and drafter, with the figures of the points."""

from __future__ import annotations

from typing import Any

import pytest
from hand_shape import SHAPE
from matplotlib.lines import Line2D

from treeopt.plan.devices import Device
from treeopt.plan.operators import StepSetting
from treeopt.plan.planner import Acceptance, PlanCandidate, SpeedPlan, plan_speedup
from treeopt.plan.step_model import Efficiency, StepModel
from treeopt.shape import Drafting
from treeopt.view.charts import operators_figure, plan_figure, render_operators, render_plan

MODEL = StepModel(SHAPE, Device("a device", {"any": 100.0}, 50.0))


def plan(
    names: tuple[str, ...] = ("a",), batches: tuple[int, ...] = (1,), contexts: tuple[int, ...] = (8,)
) -> SpeedPlan:
    """Drafters with 1, 2, ... tokens per step at 16 nodes."""
    drafters = [Acceptance(name, (1, 16), (1.0, 2.0 + i)) for i, name in enumerate(names)]
    return plan_speedup([PlanCandidate(one, MODEL) for one in drafters], [1, 4, 16], batches, contexts)


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ({}, {"batch 1"}),
        ({"batches": (1, 4)}, {"batch 1", "batch 4"}),
        ({"contexts": (8, 64)}, {"context 8", "context 64"}),
        ({"names": ("a", "b")}, {"a", "b"}),
        ({"names": ("a", "b"), "batches": (1, 4)}, {"batch 1, a", "batch 1, b", "batch 4, a", "batch 4, b"}),
    ],
)
def test_every_line_has_the_figures_of_its_points(given: Any, labels: set[str]) -> None:
    """Both panels have a line for each label, through the points of the plan."""
    made = plan(**given)
    drawn = {line.get_gid(): line for line in plan_figure(made, "title").findobj(Line2D) if line.get_gid()}
    assert set(drawn) == {f"{figure} {label}" for figure in ("speedup", "overhead") for label in labels}
    found = {
        figure: sorted(tuple(xy) for name, line in drawn.items() if name.startswith(figure) for xy in line.get_xydata())
        for figure in ("speedup", "overhead")
    }
    for figure, points in found.items():
        assert points == sorted((point.nodes, getattr(point, figure)) for point in made.points)


@pytest.mark.parametrize("draw", [plan_figure, operators_figure])
def test_axes_have_their_scales(draw: Any) -> None:
    """Nodes are on a log2 axis, all else but speedup on a logarithmic one."""
    upper, lower = draw(plan(), "title").axes
    speeds = "linear" if draw is plan_figure else "log"
    assert (upper.get_yscale(), lower.get_yscale(), lower.get_xscale()) == (speeds, "log", "log")
    assert lower.get_xlabel() == "nodes (root counted)"


def test_equal_plans_give_equal_bytes() -> None:
    """The title and every point are in the file."""
    text = render_plan(plan(batches=(1, 4)), "by <hand>")
    assert text == render_plan(plan(batches=(1, 4)), "by <hand>")
    assert "by &lt;hand&gt;" in text
    assert text.count("nodes: overhead") == 6


def operators_plan(batches: tuple[int, ...] = (2,)) -> SpeedPlan:
    """Operators without attention to count by hand: m is [3, 5] in two layers, and there is one head of one block."""
    setting, slow = StepSetting("float32", attention="flash"), Efficiency(0.5, 0.25)
    device = Device("a device", {"any": 100.0}, 50.0)
    model = StepModel(SHAPE, device, setting, Drafting(heads=1), slow)
    return plan_speedup([PlanCandidate(Acceptance(), model)], [4, 16], batches, [8])


def operators_drawn(made: SpeedPlan) -> dict[str, list[tuple[float, float]]]:
    """The points of each line by its `gid`."""
    lines = operators_figure(made, "title").findobj(Line2D)
    return {line.get_gid(): [tuple(map(float, xy)) for xy in line.get_xydata()] for line in lines if line.get_gid()}


def test_operators_are_below_the_roof_and_at_their_latency() -> None:
    """The points of m by hand: 60 FLOPs a token, 30 weights read and 16 numbers moved a token, 4 bytes each.

    50 FLOP/s and 12.5 bytes/s are reached of 100 and 50.
    """
    drawn = operators_drawn(operators_plan())
    roofline, latency = [], []
    for nodes in (1, 4, 16):
        tokens = 2 * nodes
        flops, moved = 60.0 * tokens, 4.0 * (30 + 16 * tokens)
        seconds = max(flops / 50.0, moved / 12.5)
        roofline.append((flops / moved, flops / seconds))
        latency.append((nodes, seconds * 1e6))
    assert drawn["roofline m"] == [pytest.approx(one) for one in roofline]
    assert drawn["latency m"] == [pytest.approx(one) for one in latency]
    low, ridge, high = drawn["roof float32"]
    assert ridge == (2.0, 100.0)
    assert low[1] == pytest.approx(50.0 * low[0])
    assert high[1] == 100.0
    for name, points in drawn.items():
        if name.startswith("roofline"):
            assert all(low[0] < x < high[0] and y <= min(100.0, 50.0 * x) for x, y in points)


def test_operators_run_where_they_have_points() -> None:
    """Heads run for trees alone, cache writes have no FLOPs, and equal operators share a line."""
    drawn = operators_drawn(operators_plan())
    assert [x for x, _ in drawn["latency heads: LM heads"]] == [4, 16]
    assert [x for x, _ in drawn["latency kv writes"]] == [1, 4, 16]
    assert "roofline kv writes" not in drawn
    assert {"latency scores", "latency values"} <= set(drawn)  # key and value sizes differ
    named = {name.removeprefix("latency ") for name in drawn if name.startswith("latency")}
    assert {name.removeprefix("roofline ") for name in drawn if name.startswith("roofline")} == named - {"kv writes"}


def test_operators_are_those_of_the_first_batch() -> None:
    """A second batch changes nothing, and equal plans give equal bytes."""
    text = render_operators(operators_plan(), "title")
    assert text == render_operators(operators_plan((2, 4)), "title")
    assert "m, 16 nodes: 1920 FLOP, " in text
