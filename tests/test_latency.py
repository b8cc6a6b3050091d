"""The latency record: its rules, its curves, smoothing and interpolation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from looped import looped
from refusals import refusal_of

from treeopt.errors import Code, TreeoptError
from treeopt.latency import LatencyPoint, LatencyProfile, repeated


def point(nodes: int, seconds: float, *, batch: int = 1, context: int = 512) -> LatencyPoint:
    """A point whose quartiles lie a tenth around the median."""
    return LatencyPoint(nodes, batch, context, seconds, 0.9 * seconds, 1.1 * seconds)


def profile_of(curve: dict[int, float], **where: int) -> LatencyProfile:
    """A profile of one curve, nodes -> seconds."""
    return LatencyProfile.from_points([point(nodes, seconds, **where) for nodes, seconds in curve.items()])


@looped(
    ("change", "word"),
    [
        ({"nodes": 0}, "nodes is 0"),
        ({"nodes": 2.0}, "nodes is 2.0"),
        ({"nodes": True}, "nodes is True"),
        ({"batch": 0}, "batch is 0"),
        ({"context": -1}, "context is -1"),
        ({"low": 0.0}, "low 0.0"),
        ({"seconds": -1.0}, "seconds -1.0"),
        ({"low": 2.5}, "low 2.5"),
        ({"high": 1.5}, "high 1.5"),
        ({"high": float("inf")}, "high inf"),
        ({"seconds": float("nan")}, "seconds nan"),
    ],
)
def test_broken_point_is_refused(change: dict[str, Any], word: str) -> None:
    """A point with a size below 1, or seconds that are not positive and ascending, is E230 that names them."""
    with pytest.raises(TreeoptError, match=word) as caught:
        LatencyPoint(**{"nodes": 4, "batch": 1, "context": 8, "seconds": 2.0, "low": 1.0, "high": 3.0, **change})
    assert caught.value.code is Code.PROFILE_INVALID
    assert (caught.value.code.number, caught.value.exit_status) == ("E230", 3)


def test_sizes_of_numpy_are_taken() -> None:
    """As integers of Python, which a file can hold."""
    found = LatencyPoint(*np.array([4, 2, 8]), 1.0, 1.0, 1.0)
    assert [type(size) for size in found.key] == [int, int, int]


def test_modelled_point_has_no_spread() -> None:
    """Quartiles may equal the median."""
    assert LatencyPoint(1, 1, 1, 0.5, 0.5, 0.5).key == (1, 1, 1)


@looped(
    ("points", "word"),
    [
        ([], "no points"),
        ([point(1, 1.0), point(1, 1.0)], "1 node, batch 1, context 512 occurs twice"),
        ([point(2, 1.0), point(1, 1.0)], "not sorted"),
        ([point(1, 1.0, batch=2), point(2, 1.0)], "not sorted"),
    ],
)
def test_broken_profile_is_refused(points: list[LatencyPoint], word: str) -> None:
    """A profile without points, with one size twice or out of order is E230."""
    with pytest.raises(TreeoptError, match=word) as caught:
        LatencyProfile(tuple(points))
    assert caught.value.code is Code.PROFILE_INVALID


def test_points_are_sorted_and_compared() -> None:
    """Points stand by batch, context, nodes; profiles are equal by points and provenance; equal sizes are named."""
    keys = [(2, 8, 1), (1, 16, 4), (1, 8, 4), (1, 16, 1)]
    profile = LatencyProfile.from_points([point(n, 1.0, batch=b, context=c) for b, c, n in keys])
    assert [p.key for p in profile.points] == [(1, 8, 4), (1, 16, 1), (1, 16, 4), (2, 8, 1)]
    assert profile.batches == (1, 2)
    assert profile.contexts == (8, 16)
    one, same = profile_of({1: 1.0}), profile_of({1: 1.0})
    assert one == same
    assert hash(one) == hash(same)
    assert one != LatencyProfile(one.points, {"device": "cpu"})
    points = [point(1, 1.0), point(1, 1.0, batch=2), point(1, 2.0), point(1, 1.0, context=9), point(1, 3.0)]
    assert repeated(points) == [2, 4]


def test_curve_of_each_batch_and_context() -> None:
    """A curve holds the raw medians of its own batch and context; without a context, of the largest with that batch."""
    profile = LatencyProfile.from_points(
        [
            *profile_of({1: 1.0, 4: 3.0, 2: 3.5}).points,
            *profile_of({1: 5.0}, context=1024).points,
            *profile_of({1: 7.0, 8: 9.0}, batch=2, context=256).points,
        ]
    )
    nodes, seconds = profile.curve(1, 512)
    assert (nodes.tolist(), seconds.tolist()) == ([1, 2, 4], [1.0, 3.5, 3.0])
    assert profile.curve()[1].tolist() == [5.0]
    assert profile.curve(2)[1].tolist() == [7.0, 9.0]


@looped(("batch", "context"), [(3, None), (1, 100), (2, 512)])
def test_unmeasured_curve_names_what_there_is(batch: int, context: int | None) -> None:
    """A batch or context that was not measured is E230 that lists those that were."""
    profile = LatencyProfile((point(1, 1.0), point(1, 1.0, batch=2, context=64)))
    with pytest.raises(TreeoptError, match="holds batch 1 with context 512, batch 2 with context 64") as caught:
        profile.curve(batch, context)
    assert caught.value.code is Code.PROFILE_INVALID
    assert f"batch {batch}" in caught.value.what


@looped(
    ("provenance", "kind", "drafter"),
    [
        ({}, None, None),
        ({"model_id": "m"}, None, ""),
        ({"model_id": "m", "drafter": "d1"}, None, "d1"),
        ({"model_id": "m", "kind": "dynamic"}, "dynamic", ""),
        ({"model_id": "m", "kind": "static", "drafter": "d1"}, "static", "d1"),
    ],
)
def test_kind_and_drafter(provenance: dict[str, str], kind: str | None, drafter: str | None) -> None:
    """A profile states the kind of its steps, and their drafter; points alone state nothing."""
    profile = LatencyProfile((point(1, 1.0),), provenance)
    assert (profile.kind, profile.drafter) == (kind, drafter)


def test_drafting_curve() -> None:
    """Drafting has a figure where it was measured; a figure that is not positive is E230."""
    points = [point(1, 1.0), dataclasses.replace(point(4, 2.0), drafting=0.5), point(8, 3.0)]
    sizes, seconds = LatencyProfile.from_points(points).drafting_curve()
    assert (sizes.tolist(), seconds.tolist()) == ([4], [0.5])
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        assert refusal_of(dataclasses.replace, point(4, 2.0), drafting=wrong).code is Code.PROFILE_INVALID
