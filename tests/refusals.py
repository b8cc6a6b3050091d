"""The error that a call ends with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from treeopt.errors import TreeoptError


def refusal_of(call: Callable[..., object], *given: Any, **options: Any) -> TreeoptError:
    """The error of a call that must have one."""
    with pytest.raises(TreeoptError) as caught:
        call(*given, **options)
    return caught.value
