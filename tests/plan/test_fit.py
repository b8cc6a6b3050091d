"""What a plan rests on: a device by its text or fitted to measured steps, the shape of a model, tokens per step."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from helpers import random_calibration
from looped import looped

from treeopt.errors import Code, TreeoptError
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.models.shapes import named_shape
from treeopt.optimize.curve import default_sizes, measure_curve
from treeopt.optimize.select_method import Fitter, candidates
from treeopt.optimize.tree_builder import tree_limits
from treeopt.plan.devices import Device, device_of_spec
from treeopt.plan.fit import MeasuredSteps, _Steps, fit_efficiency
from treeopt.plan.operators import StepSetting
from treeopt.plan.planner import Acceptance, calibrated_acceptance
from treeopt.plan.step_model import Efficiency, StepModel
from treeopt.shape import Drafting, Matrix

DEVICE = Device("a device", {"any": 1e13}, 1e12)
TRUE = Efficiency(compute=0.4, bandwidth=0.7, launch=2e-5, step=5e-3, tree=8e-3)
SIZES, BATCHES, CONTEXTS = [1, 2, 8, 32, 128, 512], [1, 8], [64, 1024]


def steps(name: str, efficiency: Efficiency = TRUE, noise: float = 0.0, seed: int = 0) -> MeasuredSteps:
    """Steps of a device with this efficiency; the model that is given with them does not have it."""
    heads = Drafting(heads=3, head_rows=32_000)
    model = StepModel(named_shape(name), DEVICE, StepSetting("float32"), heads)
    exact = dataclasses.replace(model, efficiency=efficiency).profile(SIZES, BATCHES, CONTEXTS, {})
    rng = np.random.default_rng(seed)
    points = []
    for point in exact.points:
        value = float(point.seconds * np.exp(noise * rng.standard_normal()))
        points.append(LatencyPoint(point.nodes, point.batch, point.context, value, value, value))
    return MeasuredSteps(LatencyProfile.from_points(points), model)


def test_known_efficiency_is_found_again() -> None:
    """Without noise all five numbers come back, and steps that were left out are exact."""
    fit = fit_efficiency([steps(name) for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")])
    for name, value in vars(TRUE).items():
        assert getattr(fit.efficiency, name) == pytest.approx(value, rel=0.02), name
    assert [one.by for one in fit.held_out] == ["nodes", "batch and context", "model"]
    curves = 3 * len(BATCHES) * len(CONTEXTS)
    wanted = [len(SIZES) * curves, (len(SIZES) - 1) * curves, len(SIZES) * curves, len(SIZES) * curves]
    assert [len(one.errors) for one in (fit.fitted, *fit.held_out)] == wanted  # one node is never left out by nodes
    for one in (fit.fitted, *fit.held_out):
        assert one.largest < 0.005, one.by
        assert not one.skipped


def test_fit_to_one_of_two_models_has_no_step() -> None:
    """By model, each of two is predicted from the other, whose `launch` contains `step`."""
    fit = fit_efficiency([steps("qwen2.5-0.5b"), steps("qwen2.5-3b")])
    by_model = fit.held_out[2]
    assert by_model.by == "model"
    assert 0.01 < by_model.largest < 0.2


@looped("sizes, kept, skipped", [([1, 8], 0, ("8 nodes",)), ([1, 2, 8], 2, ())])
def test_fold_without_trees_is_skipped(sizes: list[int], kept: int, skipped: tuple[str, ...]) -> None:
    """Eight steps of one node alone do not determine `tree`: what leaves only these is not left out, but named."""
    sources = [steps("qwen2.5-0.5b"), steps("qwen2.5-3b")]
    for i, source in enumerate(sources):
        points = [point for point in source.profile.points if point.nodes in sizes]
        sources[i] = MeasuredSteps(LatencyProfile.from_points(points), source.model)
    by_nodes, *others = fit_efficiency(sources).held_out
    assert len(by_nodes.errors) == kept * 2 * len(BATCHES) * len(CONTEXTS)
    assert by_nodes.skipped == skipped
    assert all(not one.skipped for one in others)
    if not kept:
        assert np.isnan([by_nodes.median, by_nodes.largest]).all()


def test_fold_that_leaves_too_few_steps_is_skipped() -> None:
    """Six steps of one curve and three of another: five numbers need the six, and six of the nine by nodes."""
    source = steps("qwen2.5-0.5b")
    known = [p for p in source.profile.points if p.batch == 1 and (p.context == 64 or p.nodes in (1, 2, 8))]
    assert len(known) == len(SIZES) + 3
    fit = fit_efficiency([MeasuredSteps(LatencyProfile.from_points(known), source.model)])
    by_nodes, by_curve = fit.held_out
    assert (len(by_nodes.errors), by_nodes.skipped) == (7, ())
    assert (len(by_curve.errors), by_curve.skipped) == (3, ("batch 1, context 64",))
    fit = fit_efficiency([MeasuredSteps(LatencyProfile.from_points(known[:6]), source.model)])
    assert [one.by for one in fit.held_out] == ["nodes"]
    assert fit.held_out[0].errors == ()
    assert fit.held_out[0].skipped == ("2 nodes", "8 nodes", "32 nodes", "128 nodes", "512 nodes")


def test_numbers_that_no_step_depends_on() -> None:
    """Bandwidth bounds all operators: any fast enough computation fits, and the peak is taken and named."""
    fit = fit_efficiency([steps("qwen2.5-0.5b", dataclasses.replace(TRUE, compute=100.0))])
    assert fit.undetermined == ("compute",)
    assert fit.efficiency.compute >= 1
    assert fit.fitted.largest < 0.01
    assert "compute is not determined" in "\n".join(part for part in fit.parts() if isinstance(part, str))
    assert fit_efficiency([steps("qwen2.5-0.5b")]).undetermined == ()


def test_fit_extrapolates_to_a_larger_model() -> None:
    """Fitted to 0.5 billion parameters, it predicts 14 billion; the bare formulas are far off."""
    fit = fit_efficiency([steps("qwen2.5-0.5b", noise=0.03)])
    larger = steps("qwen2.5-14b")
    assert fit.efficiency.step == 0.0
    assert np.median(_Steps.of([larger]).errors(fit.efficiency)) < 0.06
    assert np.median(_Steps.of([larger]).errors(Efficiency())) > 0.2


def test_errors_are_of_steps_that_were_left_out() -> None:
    """One size is three times slower than the model allows: its error shows where it was left out."""
    measured = steps("qwen2.5-0.5b")
    changed = [
        dataclasses.replace(p, seconds=3 * p.seconds, low=3 * p.low, high=3 * p.high) if p.nodes == 8 else p
        for p in measured.profile.points
    ]
    fit = fit_efficiency([MeasuredSteps(LatencyProfile.from_points(changed), measured.model)])
    by_nodes = fit.held_out[0]
    assert by_nodes.by == "nodes"
    for error, point in zip(by_nodes.errors, [p for p in changed if p.nodes > 1], strict=True):
        if point.nodes == 8:
            assert error == pytest.approx(2 / 3, abs=0.02)  # 1 - 1/3 of the measured seconds


def test_short_steps_count_as_much_as_long_ones() -> None:
    """The longest step takes twice its time: the others are still modelled, as they would not be in plain seconds."""
    exact = steps("qwen2.5-0.5b")
    long = max(point.seconds for point in exact.profile.points)
    changed = [
        dataclasses.replace(p, seconds=2 * p.seconds, low=2 * p.low, high=2 * p.high) if p.seconds == long else p
        for p in exact.profile.points
    ]
    fit = fit_efficiency([MeasuredSteps(LatencyProfile.from_points(changed), exact.model)])
    assert np.median(_Steps.of([exact]).errors(fit.efficiency)) < 0.1


def test_too_few_steps_are_refused() -> None:
    """Five steps do not give five numbers."""
    measured = steps("qwen2.5-0.5b")
    few = MeasuredSteps(LatencyProfile.from_points(measured.profile.points[:5]), measured.model)
    with pytest.raises(TreeoptError, match="too few") as caught:
        fit_efficiency([few])
    assert caught.value.code is Code.PLAN_INVALID


def test_all_experts_may_be_active() -> None:
    """At most as many copies are active as exist (E240)."""
    assert Matrix("m", 2, 3, count=4, experts=5, active=5).parameters == 2 * 3 * 4 * 5
    with pytest.raises(TreeoptError, match="6 of 5 experts"):
        Matrix("m", 2, 3, experts=5, active=6)


def test_device_has_the_numbers_of_its_text() -> None:
    """FLOP/s of every dtype, bytes per second, and bytes of memory, which may be left out."""
    device = device_of_spec("flops=2e14, bandwidth=3e12,memory=8e10")
    assert (device.flops, device.bandwidth, device.memory) == ({"any": 2e14}, 3e12, 8e10)
    assert device_of_spec("bandwidth=1,flops=1e21").memory is None  # the least and the greatest figure


@looped(
    "spec, said",
    [
        ("flops=1,bandwidth=1,watts=3", "is not flops=NUMBER"),
        ("flops=1,bandwidth=1,flops=1", "is not flops=NUMBER"),
        ("flops=1", "is not flops=NUMBER"),
        ("memory=1", "is not flops=NUMBER"),
        ("flops=one,bandwidth=1", "is not flops=NUMBER"),
        ("flops=-1,bandwidth=1", "is -1, not a number from 1 to"),
        ("flops=nan,bandwidth=1", "is nan, not a number from 1 to"),
        ("flops=inf,bandwidth=1", "is inf, not a number from 1 to"),
    ],
)
def test_other_texts_are_refused(spec: str, said: str) -> None:
    """E240 with the form, or the number."""
    with pytest.raises(TreeoptError, match=said) as caught:
        device_of_spec(spec)
    assert caught.value.code.number == "E240"


def test_logarithm_begins_at_one() -> None:
    """1 + 0.477 ln N: one token at one node, 2.984 at 64 (the paper's chart begins at 1 and has about 3 there)."""
    assert Acceptance().at(np.array([1.0, 64.0])).tolist() == [1.0, 1 + 0.477 * math.log(64)]
    assert Acceptance().at(np.array([64.0]))[0] == pytest.approx(2.9838, abs=1e-4)


def test_calibration_gives_the_cross_validated_curve() -> None:
    """The figures are those of `measure_curve`, which differ from those of the fitted texts."""
    calibration = random_calibration(3, sequences=40)
    found = calibrated_acceptance(calibration, 24)
    fitter = Fitter(calibration, tree_limits(calibration, 24))
    method = fitter.choose(candidates("joint", "visits")).method
    curve = measure_curve(fitter, method, default_sizes(24))
    assert found.sizes == tuple(point.nodes for point in curve.points)
    assert found.tokens == tuple(point.tokens_per_step for point in curve.points)
    assert found.tokens[0] == 1.0
    assert found.tokens[-1] != pytest.approx(1 + fitter.build(method).values.sum(), abs=1e-6)
    between = found.at(np.array([5.0]))[0]  # between 4 and 6
    assert between == pytest.approx((found.tokens[3] + found.tokens[4]) / 2)
    assert found.largest == found.sizes[-1] <= 24
    assert dict(found.provenance)["heads_id"] == calibration.provenance.heads_id
