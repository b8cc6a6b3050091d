"""Many cases in one test: what `pytest.mark.parametrize` does, without a test for each."""

from __future__ import annotations

import functools
import inspect
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]


def looped(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test for one case after the other; the error of a case names it.

    Each case has a `monkeypatch` of its own, and a `tmp_path` with a copy of what the fixtures put there, which is the
    current folder where `tmp_path` was; other fixtures are made once.

    Args:
        names: parameters of the test, separated by commas, or several.
        cases: a value for each case, or a tuple of values where there are several names.
    """
    several = not isinstance(names, str) or "," in names
    listed = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    given = [one if several else (one,) for one in cases]
    assert given, "no case"

    def decorate(test: Test) -> Test:
        fixtures = {name: one for name, one in inspect.signature(test).parameters.items() if name not in listed}

        @functools.wraps(test)
        def run(**values: Any) -> None:
            folder, here = values["tmp_path"], Path.cwd()
            files = list(folder.iterdir())
            for number, case in enumerate(given):
                with pytest.MonkeyPatch.context() as patch:
                    own = _copied(folder, files, number)
                    if here.is_relative_to(folder):
                        patch.chdir(own / here.relative_to(folder))
                    mine = {name: one for name, one in values.items() if name in fixtures}
                    mine |= {name: one for name, one in {"tmp_path": own, "monkeypatch": patch}.items() if name in mine}
                    try:
                        test(**mine, **dict(zip(listed, case, strict=True)))
                    except BaseException as error:
                        error.add_note(f"case {number + 1} of {len(given)}: {', '.join(map(repr, case))}")
                        raise

        taken = {"tmp_path": inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD), **fixtures}
        run.__signature__ = inspect.Signature(list(taken.values()))  # type: ignore[attr-defined]
        return run

    return decorate


def _copied(folder: Path, files: list[Path], number: int) -> Path:
    """A new folder inside with copies of the files."""
    own = folder / f"case{number}"
    own.mkdir()
    for file in files:
        if file.is_dir():
            shutil.copytree(file, own / file.name, symlinks=True)
        else:
            shutil.copy2(file, own / file.name, follow_symlinks=False)
    return own
