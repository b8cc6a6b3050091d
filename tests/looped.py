"""Many cases in one test: what `pytest.mark.parametrize` does, without a test for each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Test = Callable[..., None]


def looped(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test for one case after the other; the error of a case names it.

    Each case has a `tmp_path` and a `monkeypatch` of its own; other fixtures, and the current folder, are made once.

    Args:
        names: parameters of the test, separated by commas, or several.
        cases: a value for each case, or a tuple of values where there are several names.
    """
    several = not isinstance(names, str) or "," in names
    listed = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    given = [one if several else (one,) for one in cases]
    assert given, "no case"

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for number, values in enumerate(given):
                with pytest.MonkeyPatch.context() as patch:
                    own = {**fixtures, **dict(zip(listed, values, strict=True))}
                    if "monkeypatch" in own:
                        own["monkeypatch"] = patch
                    if "tmp_path" in own:
                        own["tmp_path"] = own["tmp_path"] / f"case{number}"
                        own["tmp_path"].mkdir()
                    try:
                        test(**own)
                    except BaseException as error:
                        error.add_note(f"case {number + 1} of {len(given)}: {', '.join(map(repr, values))}")
                        raise

        parameters = [one for name, one in signature.parameters.items() if name not in listed]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate
