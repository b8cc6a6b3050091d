"""The families in docs/develop/families.md are those that bench/families.py runs."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
from conftest import ROOT_FOLDER
from looped import looped

from treeopt.decode.decoder import TreeDecoder
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, check_runs

ROUTES = ("tree", "paths")


def test_the_table_has_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has the names of bench/tiny_families.py in order, each with the verdict that the script expects."""
    monkeypatch.syspath_prepend(str(ROOT_FOLDER / "bench"))
    script: Any = importlib.import_module("tiny_families")
    page = (ROOT_FOLDER / "docs" / "develop" / "families.md").read_text()
    row = re.compile(r"^\| ([a-z0-9_-]+) \| (lossless|refused) \| [a-z-]+ \| (tree|paths)?", flags=re.MULTILINE)
    rows = {name: (verdict, route) for name, verdict, route in row.findall(page)}
    assert tuple(rows) == script.FAMILIES
    by_route = {route: tuple(name for name, found in rows.items() if found == ("lossless", route)) for route in ROUTES}
    assert by_route == {"tree": script.TREE_FAMILIES, "paths": script.PATH_FAMILIES}
    counts = [len(names) for names in by_route.values()]
    summary = "Of {} families, {} are lossless by a tree mask and {} by paths; {} are refused."
    assert summary.format(len(rows), *counts, len(rows) - sum(counts)) in page


@looped("probe", [True, False])
def test_several_hidden_states_for_each_token(monkeypatch: pytest.MonkeyPatch, probe: bool) -> None:
    """Gemma 3n is refused with the reason of its row, and is loaded all the same, as a teacher needs no trees."""
    monkeypatch.syspath_prepend(str(ROOT_FOLDER / "bench"))
    script: Any = importlib.import_module("tiny_families")
    model = script.tiny_model("gemma3n_text")
    check_runs(Base(model, None, "tiny"))
    with pytest.raises(TreeoptError, match=r"Gemma3nForCausalLM \(gemma3n_text\) cannot verify trees") as caught:
        TreeDecoder(model, probe=probe).generate([3, 8, 5], 4)
    assert caught.value.code is Code.NO_TREES
    page = (ROOT_FOLDER / "docs" / "develop" / "families.md").read_text()
    assert f"| gemma3n_text | refused | refused |  |  | {caught.value.why} |" in page
