"""Progress of long work: parts are counted up to their number."""

from __future__ import annotations

from treeopt.progress import Meter


def test_parts_are_counted_to_the_end_of_the_task() -> None:
    """Reports never pass the number of parts; after the end of a task nothing is reported."""
    seen: list[tuple[int, int, str]] = []
    meter = Meter(lambda done, total, note: seen.append((done, total, note)))
    meter.add(1)  # no task has begun
    meter.begin(5)
    meter.note = "a"
    meter.add(2)
    meter.add(0)
    meter.end()
    meter.add(1)
    meter.begin(2)
    meter.add(3)
    assert seen == [(2, 5, "a"), (5, 5, "a"), (2, 2, "a")]
