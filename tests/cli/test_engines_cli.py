"""export, import and lint: what they print and write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import engine_readers as readers
import pytest
from engine_trees import T
from program import error_number, treeopt, treeopt_json

from treeopt.engines import ENGINES
from treeopt.files.trees import load_tree, save_tree
from treeopt.tree import Tree


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in an empty folder, with the running example in `t.yaml`."""
    monkeypatch.chdir(tmp_path)
    save_tree(T, "t.yaml")


def test_export_prints_the_content_alone_and_names_the_engine_beside_it() -> None:
    """Standard output is the file; versions, setting and losses are notes."""
    result = treeopt("export", "t.yaml", "--to", "triton")
    assert result.stdout == "{0}, {1}, {0, 0}\n"
    assert "read by   Triton, tensorrtllm_backend: with TensorRT-LLM to 1.2.x" in result.stderr
    assert "medusa_choices" in result.stderr
    assert "lost      values" in result.stderr
    data = treeopt_json("export", "t.yaml", "--to", "nxdi")
    assert json.loads(data["content"]) == [[0], [1], [0, 0]]
    assert (data["nodes"], data["to"], data["output"]) == (4, "nxdi", None)
    assert "--medusa-speculation-length 4" in data["setting"]


@pytest.mark.parametrize("engine", ENGINES)
def test_export_and_import_are_inverse(engine: str) -> None:
    """What a command wrote, the other reads as the same paths."""
    name = "x.pt" if engine == "sequoia" else "x.txt"
    assert f"wrote {name}" in treeopt("export", "t.yaml", "--to", engine, "-o", name).stderr
    said = treeopt("import", name, "-o", "back.yaml").stdout
    assert f"{name} is a" in said
    assert "4 nodes, depth 2, 2 leaves" in said
    assert "assumed   the ranks are those of the" in said
    assert load_tree("back.yaml") == T


def test_growmaps_are_known_by_their_suffix() -> None:
    """`.pt` is what the program loads, `.json` is text, and another suffix is refused."""
    treeopt("export", "t.yaml", "--to", "sequoia", "-o", "g.pt")
    assert readers.sequoia_pt(Path("g.pt").read_bytes()) == list(T.paths)
    treeopt("export", "t.yaml", "--to", "sequoia", "-o", "g.json")
    assert readers.sequoia(json.loads(Path("g.json").read_text())) == list(T.paths)
    assert error_number(treeopt("export", "t.yaml", "--to", "sequoia", "-o", "g.txt", status=3)) == "E204"


def test_existing_files_are_replaced_only_with_force() -> None:
    """An engine's file has no mark; an input is never replaced, and a refused tree leaves the file as it was."""
    treeopt("export", "t.yaml", "--to", "medusa", "-o", "x.py")
    assert error_number(treeopt("export", "t.yaml", "--to", "json", "-o", "x.py", status=3)) == "E202"
    treeopt("export", "t.yaml", "--to", "eagle", "-o", "x.py", "--force")
    assert Path("x.py").read_text() == "mc_sim_7b_63 = [[0], [1], [0, 0]]\n"
    assert error_number(treeopt("export", "x.py", "--to", "json", "-o", "x.py", "--force", status=3)) == "E204"
    assert error_number(treeopt("import", "x.py", "-o", "x.py", "--force", status=3)) == "E204"
    save_tree(Tree(((10,),)), "ten.yaml")
    refused = treeopt("export", "ten.yaml", "--to", "medusa", "-o", "x.py", "--force", status=3)
    assert error_number(refused) == "E105"
    assert "rank: 1 path ([10]) with a rank above 9" in refused.stderr
    assert "fix: treeopt build --for medusa" in refused.stderr
    assert Path("x.py").read_text() == "mc_sim_7b_63 = [[0], [1], [0, 0]]\n"


def test_a_policy_and_an_unknown_engine_are_refused() -> None:
    """There is no file of paths for trees that are chosen per step, and no engine of that name."""
    Path("p.yaml").write_text("schema: treeopt.policy/1\n")
    assert error_number(treeopt("export", "p.yaml", "--to", "json", status=3)) == "E203"
    treeopt("export", "t.yaml", "--to", "vllm-tree", status=2)
    treeopt("export", "t.yaml", status=2)


def test_trees_of_a_learned_drafter_are_refused() -> None:
    """Their ranks mean nothing to an engine; without the drafter's file no format takes them."""
    save_tree(Tree(T.paths, drafter="abc"), "d.yaml")
    for engine in ENGINES:
        refused = treeopt("export", "d.yaml", "--to", engine, status=3)
        assert error_number(refused) == "E105"
        assert "the tree was made for drafter abc" in refused.stderr


def test_import_says_what_was_dropped() -> None:
    """Name, comments and order of a pasted list are gone in the tree file."""
    Path("m.py").write_text("# pasted\nmine = [[0], [0, 0], [1]]\n")
    said = treeopt("import", "m.py").stdout
    for dropped in ("the order of the list", "comments", "the name mine"):
        assert f"dropped   {dropped}" in said
    assert 'reference: "m.py, a list of paths"' in Path("tree.yaml").read_text()
    assert treeopt_json("import", "m.py")["paths"] == [[0], [1], [0, 0]]  # our file is replaced without --force
