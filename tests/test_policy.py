"""The policy record: what it refuses, and the sizes that a step may have."""

from __future__ import annotations

import math
from typing import Any

import pytest
from looped import looped

from treeopt.errors import Code, TreeoptError
from treeopt.policy import TreePolicy


def test_sizes() -> None:
    """Those of the size_cost, or the one that all steps have, of two nodes at least."""
    assert TreePolicy(2, 1, "d").sizes == (2,)
    assert TreePolicy(20, 3, "d").sizes == (20,)
    assert TreePolicy(8, 3, "d", ((1, 0.5), (4, 0.7), (8, 1.0))).sizes == (1, 4, 8)


FAULTS: dict[str, dict[str, Any]] = {
    "one node": {"nodes": 1},
    "more nodes than are traced": {"nodes": 255},
    "half a node": {"nodes": 8.5},
    "no number of nodes": {"nodes": "8"},
    "no depth": {"depth": 0},
    "half a level": {"depth": 2.5},
    "no number of levels": {"depth": True},
    "no drafter": {"drafter": ""},
    "size_cost of other nodes": {"size_cost": ((1, 0.5), (4, 1.0))},
    "falling": {"size_cost": ((4, 0.5), (1, 0.6), (8, 1.0))},
    "twice": {"size_cost": ((4, 0.5), (4, 0.6), (8, 1.0))},
    "size that is not traced": {"size_cost": ((5, 0.5), (8, 1.0))},
    "not a number": {"size_cost": ((4, math.nan), (8, 1.0))},
    "negative": {"size_cost": ((4, -1.0), (8, 1.0))},
}


@looped("name", FAULTS)
def test_faults(name: str) -> None:
    """What breaks a rule is E103."""
    TreePolicy(8, 3, "d", ((4, 0.5), (8, 1.0)))
    with pytest.raises(TreeoptError, match="not a policy") as caught:
        TreePolicy(**{"nodes": 8, "depth": 3, "drafter": "d", **FAULTS[name]})
    assert caught.value.code is Code.TREE_INVALID
