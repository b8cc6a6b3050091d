"""The families in docs/families.md are those that bench/families.py runs."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
from conftest import ROOT_FOLDER


def test_the_table_has_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has the names of bench/tiny_families.py in order, each with the verdict that the script expects."""
    monkeypatch.syspath_prepend(str(ROOT_FOLDER / "bench"))
    script: Any = importlib.import_module("tiny_families")
    page = (ROOT_FOLDER / "docs" / "families.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z0-9_-]+) \| (lossless|refused) \|", page, flags=re.MULTILINE))
    assert tuple(rows) == script.FAMILIES
    assert tuple(name for name, verdict in rows.items() if verdict == "lossless") == script.TREE_FAMILIES
    lossless, refused = len(script.TREE_FAMILIES), len(script.FAMILIES) - len(script.TREE_FAMILIES)
    assert f"{lossless} are lossless, {refused} are refused" in page
