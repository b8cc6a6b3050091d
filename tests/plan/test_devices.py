"""Devices that are given as numbers: what is read, and what is refused."""

from __future__ import annotations

import pytest
from looped import looped

from treeopt.errors import TreeoptError
from treeopt.plan.devices import device_of_spec


def test_device_has_the_numbers_of_its_text() -> None:
    """FLOP/s of every dtype, bytes per second, and bytes of memory, which may be left out."""
    device = device_of_spec("flops=2e14, bandwidth=3e12,memory=8e10")
    assert (device.flops, device.bandwidth, device.memory) == ({"any": 2e14}, 3e12, 8e10)
    assert device_of_spec("bandwidth=1,flops=1e21").memory is None  # the least and the greatest figure


@looped(
    "spec, said",
    [
        ("flops=1,bandwidth=1,watts=3", "'watts' is none of"),
        ("flops=1,bandwidth=1,flops=1", "'flops' occurs twice"),
        ("flops=1", "bandwidth missing"),
        ("memory=1", "flops and bandwidth missing"),
        ("flops=one,bandwidth=1", "'one' is not a finite number"),
        ("flops=-1,bandwidth=1", "'-1' is not a finite number"),
        ("flops=inf,bandwidth=1", "'inf' is not a finite number"),
    ],
)
def test_other_texts_are_refused(spec: str, said: str) -> None:
    """E240 names the part."""
    with pytest.raises(TreeoptError, match=said) as caught:
        device_of_spec(spec)
    assert caught.value.code.number == "E240"
