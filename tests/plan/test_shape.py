"""The shape of a matrix: what numbers it may have."""

from __future__ import annotations

import pytest

from treeopt.errors import TreeoptError
from treeopt.shape import Matrix


def test_all_experts_may_be_active() -> None:
    """At most as many copies are active as exist (E240)."""
    assert Matrix("m", 2, 3, count=4, experts=5, active=5).parameters == 2 * 3 * 4 * 5
    with pytest.raises(TreeoptError, match="6 of 5 experts"):
        Matrix("m", 2, 3, experts=5, active=6)
