"""A guard of the tests of hostile files: a reader that waits for a pipe fails, and does not stall the suite."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

GUARD_SECONDS = 300  # no test that passes depends on this number


@pytest.fixture(autouse=True)
def _guard() -> Iterator[None]:
    """Fail, and do not stall, where a reader waits for a pipe."""

    def hangs(*_given: Any) -> None:
        raise AssertionError("the reader hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(GUARD_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
