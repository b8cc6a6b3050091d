"""Rules of engines, and damaged trees in their formats, by hand."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import random_calibration
from looped import looped
from refusals import refusal_of

from treeopt.defaults import MAX_DEPTH
from treeopt.engines import ENGINES
from treeopt.errors import Code, TreeoptError
from treeopt.export import lint, trees
from treeopt.export.lint import DRAFT_ROWS, ERROR, WARNING, check_exportable, engines_report, lint_tree
from treeopt.export.trees import adjacency_text, import_tree
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.build_job import BuildJob, run_job
from treeopt.tree import Tree


def rules(paths: list[Any], engine: str, **options: Any) -> list[tuple[str, str, int]]:
    """Rule, severity and number of paths of each finding."""
    found = lint_tree(Tree.from_paths(paths), engine, **options)
    return [(one.rule, one.severity, one.count) for one in found]


def test_rules_of_engines() -> None:
    """Each limit holds at its value, and one more breaks it."""
    medusa, eagle = ENGINES["medusa"], ENGINES["eagle"]
    chain = [[0] * n for n in range(1, 5)]
    assert rules(chain, "nxdi", num_heads=4) == []
    assert rules(chain, "nxdi", num_heads=3) == [("heads", ERROR, 1)]
    assert rules(chain, "medusa", num_heads=5) == []
    assert rules(chain, "medusa", num_heads=4) == [("heads-made", WARNING, 0)]  # its loader makes five heads
    assert rules([[0] * n for n in range(1, 7)], "medusa") == [("depth", ERROR, 1)]
    assert lint_tree(Tree.from_paths(chain), "nxdi", num_heads=2)[0].what == (
        "2 paths ([0, 0, 0], [0, 0, 0, 0]) deeper than the 2 heads"
    )
    assert rules([], "medusa") == [("empty", ERROR, 0)]
    assert rules([], "json") == []
    for engine in (medusa, eagle):
        if engine.max_rank is not None:
            ranks = [[rank] for rank in range(engine.max_rank + 2)]
            assert ("rank", ERROR, 1) in rules(ranks, engine.name)
            assert "rank" not in [rule for rule, *_ in rules(ranks[:-1], engine.name)]
    assert rules([[0], [1]], "eagle")[0] == ("one-level", ERROR, 0)
    # Children of [0] have none, those of [1] have: the drafter mixes up the rows.
    crossed = [[0], [1], [0, 0], [1, 0], [1, 0, 0]]
    assert ("draft-rows", ERROR, 1) in rules(crossed, "eagle")
    assert lint_tree(Tree.from_paths(crossed), "eagle")[0].paths == ((0,),)
    straight = [[0], [1], [0, 0], [1, 0], [0, 0, 0]]
    assert "draft-rows" not in [rule for rule, *_ in rules(straight, "eagle")]


@looped("engine", [name for name, engine in ENGINES.items() if engine.default_drafts])
def test_drafts_of_default_options(engine: str) -> None:
    """63 drafts are no warning, 64 are."""
    assert ENGINES[engine].default_drafts == 63
    paths = [[n] for n in range(8)] + [[n % 8, n // 8] for n in range(56)]
    assert ("rows", WARNING, 0) in rules(paths, engine)
    assert "rows" not in [rule for rule, *_ in rules(paths[:-1], engine)]


def test_trees_that_are_misread_are_not_exported() -> None:
    """E105 lists all broken rules; warnings are returned."""
    tree = Tree.from_paths([[0], [2], [0, 0]])
    error = refusal_of(check_exportable, tree, "nxdi-eagle")
    assert error.code is Code.TREE_NOT_EXPORTABLE
    assert error.at == "gap: 1 path ([2]) without the sibling of the next smaller rank"


def refused(folder: Path, content: str | bytes) -> TreeoptError:
    """Why a file with this content is not read."""
    file = folder / "tree"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return refusal_of(import_tree, file)


def test_growmap_that_is_no_mapping(tmp_path: Path) -> None:
    """A .pt file with a list."""
    stream = io.BytesIO()
    torch.save([1, 2], stream)
    error = refused(tmp_path, stream.getvalue())
    assert error.code is Code.ENGINE_FILE_INVALID
    assert "holds [1, 2], not a mapping" in error.what


def test_number_of_listed_paths_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With at most four nodes three paths are read, and four are refused for their number."""
    monkeypatch.setattr(trees, "MAX_NODES", 4)
    file = tmp_path / "tree"
    file.write_text("[[0], [1], [2]]")
    assert import_tree(file).tree.nodes == 4
    assert "lists 4 paths; a tree has 4 nodes at most" in refused(tmp_path, "[[0], [1], [2], [3]]").what


def test_deepest_path_is_read(tmp_path: Path) -> None:
    """A path of the greatest depth with those above it; without them it is refused."""
    file = tmp_path / "tree"
    file.write_text(str([list(path) for path in Tree.chain(MAX_DEPTH).paths]))
    assert import_tree(file).tree == Tree.chain(MAX_DEPTH)
    assert refused(tmp_path, "[[0], [1, 0]]").code is not None


@looped("paths", [[], [[0]], [[0], [1], [0, 0]], [[0], [0, 0], [0, 1], [0, 0, 0]]])
def test_children_by_number(paths: list[list[int]]) -> None:
    """Ids are given level by level, and the root is 0."""
    tree = Tree.from_paths(paths)
    children: dict[str, list[str]] = {}
    for node, path in enumerate([(), *tree.paths]):
        if path:
            children.setdefault(str([(), *tree.paths].index(path[:-1])), []).append(str(node))
    assert json.loads(adjacency_text(tree)) == children


def test_tree_is_built_flatter_until_it_is_read_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with one level less, though other rules are broken too; these are reported."""
    depths: list[int | None] = []
    rows, other = (SimpleNamespace(rule=rule) for rule in (DRAFT_ROWS, "drafter"))

    def run_job(_: Any, job: Any, **__: Any) -> Any:
        depths.append(job.max_depth)
        fit = SimpleNamespace(sums=None)
        made = {"fit": fit, "fitted": None, "budget": 8, "limits": SimpleNamespace(path_tokens=None)}
        return SimpleNamespace(tree=Tree.chain(job.max_depth or 4), **made)

    monkeypatch.setattr(lint, "run_job", run_job)
    monkeypatch.setattr(lint, "lint_tree", lambda tree, engine: [other, *([rows] if tree.depth > 2 else [])])
    monkeypatch.setattr(lint, "replayed_gain", lambda *_: None)
    made = lint.build_for(SimpleNamespace(), BuildJob(8, engine="eagle"))  # type: ignore[arg-type]
    assert depths == [None, 3, 2, None]  # the last one is without the limits
    assert (made.built.tree.depth, made.findings) == (2, (other,))


def test_gaps_are_found() -> None:
    """A path without its next smaller sibling, on the first levels only, in the order of the list."""
    paths = [(0,), (2,), (0, 1), (2, 0), (2, 3)]
    assert lint.gaps(paths, 2) == [(2,), (0, 1), (2, 3)]
    assert lint.gaps(paths, 1) == [(2,)]
    assert lint.gaps(paths, 0) == []


def test_advice_is_given_where_limits_refuse() -> None:
    """No --for helps a tree of another drafter; a rank beyond the engines' ten is a matter of their limits."""
    other = dataclasses.replace(Tree.chain(2), drafter="0123456789abcdef")
    assert str(list(engines_report(other))[-1]).endswith(", by its drafter")
    assert str(list(engines_report(Tree(((12,),))))[-1]).endswith("builds within the limits of one")


def test_the_tree_without_limits_has_as_many_path_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What limits cost is told at one budget, also where it is that of the fastest size."""
    built: list[Any] = []
    monkeypatch.setattr(lint, "run_job", lambda *given, **more: built.append(run_job(*given, **more)) or built[-1])
    points = [LatencyPoint(n, 1, 512, s, s, s) for n, s in ((1, 1.0), (4, 1.16), (16, 1.64), (32, 2.28))]
    profile = LatencyProfile.from_points(points, {"unit": "path tokens"})
    lint.build_for(random_calibration(5), BuildJob(nodes=None, max_rank=0, profile=profile))
    limited, free = (one.limits.path_tokens for one in built)
    assert limited == free is not None
