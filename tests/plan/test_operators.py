"""FLOPs and bytes of operators, against numbers computed by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hand_shape import SHAPE
from looped import looped

from treeopt.errors import Code, TreeoptError
from treeopt.models.shapes import named_shape
from treeopt.plan.operators import Operator, StepSetting, drafting_operators, forward_operators
from treeopt.shape import Attention, Drafting, Matrix, ModelShape

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
        ({"bare": True}, {"m": 252.0, "scores": 1728.0}),
    ],
)
def test_bytes_by_hand(setting: dict[str, Any], expected: dict[str, float]) -> None:
    """Bytes follow the dtypes of weights, activations and cache, and the kind of attention."""
    found = forward(**setting)
    assert {name: found[name][1] for name in expected} == expected


def test_bare_formulas_leave_out_what_the_paper_does() -> None:
    """Neither LM head nor writes, and as many keys as cached tokens, or as new ones in prefill."""
    assert set(forward(bare=True)) == {"m", "scores", "values"}
    assert forward(bare=True)["scores"][0] == 2880.0
    assert forward(bare=True, nodes=10.0, cached=0)["scores"][0] == 9600.0


def test_window_limits_the_keys() -> None:
    """A window of 6 leaves 5 cached tokens; the new ones are all read."""
    assert forward(WINDOW)["scores"][0] == 2304.0
    assert forward(WINDOW, cached=3) == forward(cached=3)


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


def test_attention_intensity_of_the_paper() -> None:
    """Llama-33B, batch 16, context 1,024: 64 candidates have 41 times the intensity of one (appendix G.2)."""
    found = forward_operators(named_shape("llama-33b"), np.array([1.0, 64.0]), 16, 1024, StepSetting(bare=True))
    for one in found:
        if one.name in ("scores", "values"):
            assert (one.flops[1] / one.bytes[1]) / (one.flops[0] / one.bytes[0]) == pytest.approx(41.32, abs=0.01)


def test_prefill_of_llama_7b_by_hand() -> None:
    """1,024 tokens: 2 x 1024 x 4096^2 FLOPs in each projection of each layer, 2 x 1024^2 x 4096 in the scores."""
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
    with pytest.raises(TreeoptError) as caught:
        wrong()
    assert caught.value.code is Code.PLAN_INVALID
