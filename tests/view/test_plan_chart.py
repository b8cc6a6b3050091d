"""Charts of plans: a line for each batch, context and drafter, with the figures of the points."""

from __future__ import annotations

from typing import Any

from hand_shape import SHAPE
from looped import looped
from matplotlib.lines import Line2D

from treeopt.plan.devices import Device
from treeopt.plan.planner import Acceptance, PlanCandidate, SpeedPlan, plan_speedup
from treeopt.plan.step_model import StepModel
from treeopt.view.charts import plan_figure, render_plan

MODEL = StepModel(SHAPE, Device("a device", {"any": 100.0}, 50.0))


def plan(
    names: tuple[str, ...] = ("a",), batches: tuple[int, ...] = (1,), contexts: tuple[int, ...] = (8,)
) -> SpeedPlan:
    """Drafters with 1, 2, ... tokens per step at 16 nodes."""
    drafters = [Acceptance(name, (1, 16), (1.0, 2.0 + i)) for i, name in enumerate(names)]
    return plan_speedup([PlanCandidate(one, MODEL) for one in drafters], [1, 4, 16], batches, contexts)


@looped(
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


def test_axes_have_their_scales() -> None:
    """Nodes are on a log2 axis, all else but speedup on a logarithmic one."""
    upper, lower = plan_figure(plan(), "title").axes
    assert (upper.get_yscale(), lower.get_yscale(), lower.get_xscale()) == ("linear", "log", "log")
    assert lower.get_xlabel() == "nodes (root counted)"


def test_equal_plans_give_equal_bytes() -> None:
    """The title and every point are in the file."""
    text = render_plan(plan(batches=(1, 4)), "by <hand>")
    assert text == render_plan(plan(batches=(1, 4)), "by <hand>")
    assert "by &lt;hand&gt;" in text
    assert text.count("nodes: overhead") == 6
