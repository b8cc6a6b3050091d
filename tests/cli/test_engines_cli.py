"""export, import, lint, diff and explain: what they print and write, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import engine_readers as readers
import numpy as np
import pytest
from engine_trees import T
from helpers import make_calibration
from looped import looped
from program import error_number, error_of, treeopt, treeopt_json

from treeopt.calibration import Calibration
from treeopt.engines import ENGINES
from treeopt.export.lint import gaps
from treeopt.files.calibrations import save_calibration
from treeopt.files.trees import load_tree, save_tree
from treeopt.optimize.replay import replay
from treeopt.optimize.select_method import MEDUSA, Fitter, Limits
from treeopt.tree import Tree


@pytest.fixture(autouse=True)
def _files() -> None:
    """The running example in `t.yaml`."""
    save_tree(T, "t.yaml")


def test_export_prints_the_content_alone_and_names_the_engine_beside_it() -> None:
    """Standard output is the file; versions, setting and losses are notes."""
    result = treeopt("export", "t.yaml", "--for", "triton")
    assert result.stdout == "{0}, {1}, {0, 0}\n"
    assert "read by         Triton, tensorrtllm_backend: with TensorRT-LLM to 1.2.x" in result.stderr
    assert "medusa_choices" in result.stderr
    assert "lost            values" in result.stderr
    data = treeopt_json("export", "t.yaml", "--for", "nxdi")
    assert json.loads(data["content"]) == [[0], [1], [0, 0]]
    assert (data["nodes"], data["to"], data["output"]) == (4, "nxdi", None)
    assert "--medusa-speculation-length 4" in data["setting"]


def test_growmaps_are_known_by_their_suffix() -> None:
    """`.pt` is what the program loads, `.json` is text, and another suffix is refused."""
    treeopt("export", "t.yaml", "--for", "sequoia", "-o", "g.pt")
    assert readers.sequoia_pt(Path("g.pt").read_bytes()) == list(T.paths)
    treeopt("export", "t.yaml", "--for", "sequoia", "-o", "g.json")
    assert readers.sequoia(json.loads(Path("g.json").read_text())) == list(T.paths)
    assert error_number(treeopt("export", "t.yaml", "--for", "sequoia", "-o", "g.txt", status=3)) == "E204"


def test_existing_files_are_replaced_only_with_force() -> None:
    """An engine's file has no mark; an input is never replaced, and a refused tree leaves the file as it was."""
    treeopt("export", "t.yaml", "--for", "medusa", "-o", "x.py")
    assert error_number(treeopt("export", "t.yaml", "--for", "json", "-o", "x.py", status=3)) == "E202"
    treeopt("export", "t.yaml", "--for", "eagle", "-o", "x.py", "--force")
    assert Path("x.py").read_text() == "mc_sim_7b_63 = [[0], [1], [0, 0]]\n"
    assert error_number(treeopt("export", "x.py", "--for", "json", "-o", "x.py", "--force", status=3)) == "E204"
    assert error_number(treeopt("import", "x.py", "-o", "x.py", "--force", status=3)) == "E204"
    save_tree(Tree(((10,),)), "ten.yaml")
    refused = error_of("E105", "export", "ten.yaml", "--for", "medusa", "-o", "x.py", "--force")
    assert "rank: 1 path ([10]) with a rank above 9" in refused
    assert "fix: treeopt build --for medusa" in refused
    assert Path("x.py").read_text() == "mc_sim_7b_63 = [[0], [1], [0, 0]]\n"


def test_a_policy_and_an_unknown_engine_are_refused() -> None:
    """There is no file of paths for trees that are chosen per step, and no engine of that name."""
    Path("p.yaml").write_text("schema: treeopt.policy/1\n")
    assert error_number(treeopt("export", "p.yaml", "--for", "json", status=3)) == "E203"
    treeopt("export", "t.yaml", "--for", "vllm-tree", status=2)
    treeopt("export", "t.yaml", status=2)


def rising(texts: int = 24) -> Calibration:
    """Short texts with evenly spread ranks: their accuracies rise with the rank here and there."""
    rng = np.random.default_rng(5)
    made = make_calibration([rng.integers(0, 14, (30, 3)) for _ in range(texts)])
    made = dataclasses.replace(made, token_hashes=tuple(map(str, range(texts))))
    save_calibration(made, "calibration.safetensors")
    return made


MEDUSA_METHOD = ("--values", "independent", "--weights", "uniform")


def test_build_under_limits_prints_what_they_cost() -> None:
    """The tree has no gap and no larger rank, and the loss is that of two trees built and judged alike."""
    calibration = rising()
    treeopt("build", "--nodes", "12", *MEDUSA_METHOD, "-o", "free.yaml")
    assert gaps(load_tree("free.yaml").paths, 9)
    data = treeopt_json("build", "--nodes", "12", *MEDUSA_METHOD, "--for", "nxdi-eagle", "-o", "closed.yaml")
    tree = load_tree("closed.yaml")
    assert not gaps(tree.paths, 9)
    assert tree.nodes == 12
    assert 'contiguous: "all levels"' in Path("closed.yaml").read_text()
    loss = data["limits"]["loss"]
    tokens = calibration.positions
    for name, contiguous in (("first", 0), ("second", 127)):
        fit = Fitter(calibration, Limits(12, 16, contiguous=contiguous)).choose([MEDUSA])
        assert fit.sums is not None
        assert loss[name] == pytest.approx(tokens / fit.sums.steps.sum(), rel=1e-12)
    assert loss["difference"] == pytest.approx(loss["second"] - loss["first"])
    assert loss["interval"]["low"] <= loss["difference"] <= loss["interval"]["high"]
    said = treeopt("build", "--nodes", "12", *MEDUSA_METHOD, "--max-rank", "3", "-o", "three.yaml").stdout
    assert load_tree("three.yaml").max_rank <= 3
    assert "limits: " in said
    assert " without them (cross-validated): " in said


@looped("engine", ENGINES)
def test_build_for_an_engine_can_be_exported_to_it(engine: str) -> None:
    """The tree breaks no rule of the engine that is an error, also where the unlimited tree would."""
    rising()
    treeopt("build", "--nodes", "20", *MEDUSA_METHOD, "-o", "free.yaml")
    said = treeopt("build", "--nodes", "20", *MEDUSA_METHOD, "--for", engine, "-o", "kept.yaml")
    assert f"limits of {engine}: " in said.stdout
    assert load_tree("kept.yaml").source["method"]["engine"] == engine
    treeopt("export", "kept.yaml", "--for", engine)
    if engine in ("sequoia", "nxdi-eagle", "eagle", "hydra"):
        treeopt("export", "free.yaml", "--for", engine, status=3)


def test_limits_belong_to_static_trees_of_one_drafter() -> None:
    """Per-step trees and a choice of drafters have no limits of engines; an engine's largest tree is one."""
    rising()
    for more in (["--kind", "dynamic"], ["--drafter", "auto"]):
        assert "--for" in treeopt("build", *more, "--for", "sequoia", status=2).stderr
    assert error_number(treeopt("build", "--nodes", "2049", "--for", "sequoia", status=3)) == "E105"


LISTS = (
    *("[[0], [1, 0]]", "[[0], [0]]", "[[], [0]]", "[[0], ['1']]", "[[0], [-1], 5]", "[[0], [1.0]]", "[[0], [True]]"),
    "[[], [0], [0], [2, 1]]",
)


@looped("text", LISTS)
def test_list_that_is_no_tree_is_refused(text: str) -> None:
    """The rules of engines are of trees; what is none is an invalid input, with reason and remedy."""
    Path("l.py").write_text(text)
    error = error_of("E203", "show", "l.py", "--for", "all")
    assert "a list that is not a tree" in error
    assert "fix: " in error


def test_lint_judges_by_every_engine_or_by_one() -> None:
    """With --for all the table shows all engines and the status is 0; with one engine an error gives 3."""
    Path("l.py").write_text("[[0], [10], [0, 1]]")
    result = treeopt("show", "l.py", "--for", "all")
    table = dict(line.split(maxsplit=1) for line in result.stdout.splitlines()[-9:])
    assert table == {
        "medusa": "1 error",
        "nxdi": "1 error",
        "nxdi-eagle": "1 error",
        "trtllm": "1 error",
        "triton": "ok",
        "sequoia": "1 error",
        "eagle": "1 error",
        "hydra": "1 error",
        "json": "ok",
    }
    assert "error: rank [medusa]: 1 path ([10]) with a rank above 9" in result.stdout
    assert "error: gap [trtllm]: 1 path ([10]) without the sibling of the next smaller rank on level 1" in result.stdout
    treeopt("show", "l.py", "--for", "triton")
    failed = treeopt("show", "l.py", "--for", "sequoia", status=3)
    assert "2 paths ([10], [0, 1])" in failed.stdout
    assert treeopt("show", "mc_sim_7b_63", "--for", "medusa").stdout == "medusa      ok\n"


def test_lint_compares_the_depth_with_the_heads() -> None:
    """A tree of four levels needs four heads where heads draft."""
    save_tree(Tree.chain(4), "c.yaml")
    failed = treeopt("show", "c.yaml", "--for", "nxdi", "--num-heads", "3", status=3)
    assert "error: heads [nxdi]: 1 path ([0, 0, 0, 0]) deeper than the 3 heads" in failed.stdout
    treeopt("show", "c.yaml", "--for", "nxdi", "--num-heads", "4")
    treeopt("show", "c.yaml", "--for", "sequoia", "--num-heads", "3")


def test_diff_lists_paths_and_the_gain() -> None:
    """Paths of one tree alone have - and +; tokens per step are those of replay, with a paired interval."""
    calibration = rising()
    save_tree(Tree(((0,), (1,), (0, 1)), (0.5, 0.25, 0.125)), "other.yaml")
    lines = treeopt("show", "t.yaml", "--against", "other.yaml").stdout.splitlines()
    assert lines == [
        "- t.yaml: 4 nodes, depth 2, 2 leaves",
        "+ other.yaml: 4 nodes, depth 2, 2 leaves",
        "2 paths in both, 1 removed, 1 added",
        "- [0, 0]",
        "+ [0, 1]  0.1250",
    ]
    data = treeopt_json("show", "t.yaml", "--against", "other.yaml", "--calibration", "calibration.safetensors")
    assert (data["removed"], data["added"], data["shared"]) == ([[0, 0]], [[0, 1]], 2)
    steps = data["tokens_per_step"]
    for name, key in (("t.yaml", "first"), ("other.yaml", "second")):
        assert steps[key] == pytest.approx(replay(load_tree(name), calibration).tokens_per_step)
    same = treeopt_json("show", "t.yaml", "--against", "t.yaml", "--calibration", "calibration.safetensors")[
        "tokens_per_step"
    ]
    assert (same["difference"], same["interval"]["low"], same["interval"]["high"]) == (0.0, 0.0, 0.0)
    save_tree(Tree(tuple((rank,) for rank in range(12))), "wide.yaml")  # clearly better on evenly spread ranks
    traces = ("--calibration", "calibration.safetensors")
    better = treeopt_json("show", "t.yaml", "--against", "wide.yaml", *traces)["tokens_per_step"]
    worse = treeopt_json("show", "wide.yaml", "--against", "t.yaml", *traces)["tokens_per_step"]
    assert 0 < better["interval"]["low"] < better["difference"] < better["interval"]["high"]
    assert worse["difference"] == -better["difference"]
    assert worse["interval"]["high"] == pytest.approx(-better["interval"]["low"], rel=0.2)
    save_tree(Tree(T.paths, drafter="abc"), "d.yaml")
    assert error_number(treeopt("show", "t.yaml", "--against", "d.yaml", status=3)) == "E223"


def test_explain_by_the_values_of_the_file() -> None:
    """Place, cut-off and margin are read off the values."""
    save_tree(Tree(((0,), (1,), (0, 0)), (0.5, 0.125, 0.25)), "v.yaml")
    data = treeopt_json("show", "v.yaml", "--path", "0,0")
    assert (data["value"], data["place"], data["cut_off"], data["margin"]) == (0.25, 2, 0.125, 0.125)
    assert [prefix["share"] for prefix in data["prefixes"]] == [0.5, 0.5]
    said = treeopt("show", "v.yaml", "--path", "[1]").stdout
    assert "[1] is in v.yaml, which has 3 paths" in said
    assert "place           3 by value; the tree has 3 places" in said
    assert error_number(treeopt("show", "v.yaml", "--path", "2", status=3)) == "E106"
    assert error_number(treeopt("show", "v.yaml", "--path", "[]", status=3)) == "E106"
    assert error_number(treeopt("show", "t.yaml", "--path", "0", status=3)) == "E106"
    treeopt("show", "v.yaml", "--path", "zero", status=2)


def test_explain_by_traces() -> None:
    """Values are the products of accuracies, places those of a sorted list, and the gain is that of replay."""
    calibration = rising()
    treeopt("build", "--nodes", "8", *MEDUSA_METHOD, "-o", "b.yaml")
    tree, accuracy = load_tree("b.yaml"), calibration.accuracy
    singles = [((r,), accuracy[0, r]) for r in range(16)]
    pairs = [((r, s), accuracy[0, r] * accuracy[1, s]) for r in range(16) for s in range(16)]
    triples = [((*p, s), v * accuracy[2, s]) for p, v in pairs for s in range(16)]
    order = [p for p, v in sorted([*singles, *pairs, *triples], key=lambda pv: (-pv[1], len(pv[0]), pv[0])) if v > 0]
    cut_off = dict([*singles, *pairs, *triples])[order[6]]
    inside, outside = order[6], order[9]
    for path, made in ((inside, True), (outside, False)):
        text = ",".join(map(str, path))
        data = treeopt_json("show", "b.yaml", "--path", text, "--calibration", "calibration.safetensors")
        assert data["in_tree"] == data["made_it"] == made
        assert data["place"] == order.index(path) + 1
        assert data["cut_off"] == pytest.approx(cut_off, rel=1e-9)
        assert data["value"] == pytest.approx(dict([*singles, *pairs, *triples])[path], rel=1e-9)
        gain = data["tokens_per_step"]
        below = {p for p in tree.paths if p[: len(path)] == path}
        above = {path[:length] for length in range(1, len(path) + 1)}
        for key, paths in (("first", {*tree.paths} - below), ("second", {*tree.paths} | above)):
            assert gain[key] == pytest.approx(replay(Tree.from_paths(paths), calibration).tokens_per_step)
    said = treeopt("show", "b.yaml", "--path", text, "--calibration", "calibration.safetensors").stdout
    assert "  out by " in said
    assert (
        error_number(treeopt("show", "b.yaml", "--path", "40", "--calibration", "calibration.safetensors", status=3))
        == "E102"
    )


HOSTILE: dict[str, tuple[str | bytes, tuple[str, ...], str]] = {
    "lint nothing": ("", ("show", "a.txt", "--for", "all"), "E203"),
    "lint deep nesting": ("[" * 100_000, ("show", "a.txt", "--for", "all"), "E203"),
    "lint code": ("[[0], __import__('os').mkdir('evil')]", ("show", "a.txt", "--for", "all"), "E203"),
    "lint a huge file": ("[" + "[0], " * 2_000_000 + "]", ("show", "a.txt", "--for", "all"), "E203"),
    "lint bytes": (bytes(range(256)), ("show", "a.txt", "--for", "all"), "E203"),
    "lint a missing file": ("", ("show", "b.yaml", "--for", "all"), "E201"),
    "lint an unknown name": ("", ("show", "b", "--for", "all"), "E104"),
    "import a cycle": ('{"0": ["1"], "2": ["3"], "3": ["2"]}', ("import", "a.txt"), "E206"),
    "import a missing file": ("", ("import", "b.json"), "E201"),
    "export an orphan": ("[[1, 0]]", ("export", "a.txt", "--for", "json"), "E203"),
    "export no draft": ("[]", ("export", "a.txt", "--for", "medusa"), "E105"),
    "diff an orphan": ("[[1, 0]]", ("show", "t.yaml", "--against", "a.txt"), "E203"),
    "diff over no calibration": ("[[0]]", ("show", "t.yaml", "--against", "a.txt", "--calibration", "t.yaml"), "E203"),
    "explain without values": ("[[0]]", ("show", "a.txt", "--path", "0"), "E106"),
    "explain an endless path": ("[[0]]", ("show", "a.txt", "--path", ",".join(["0"] * 500)), "E106"),
}


@looped("name", HOSTILE)
def test_hostile_run_is_one_error(name: str) -> None:
    """Each run ends in one error with its number, and leaves no file."""
    content, line, number = HOSTILE[name]
    Path("a.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    before = {path.name for path in Path().iterdir()}
    assert error_number(treeopt(*line, status=3)) == number
    assert json.loads(treeopt(*line, "--json", status=3).stderr)["error"] == number
    assert {path.name for path in Path().iterdir()} == before


def test_one_of_several_lists_is_imported() -> None:
    """--name chooses it; without one the error lists them."""
    Path("choices.py").write_text("one = [[0]]\ntwo = [[0], [1], [0, 0]]\n")
    assert "treeopt import FILE --name NAME" in error_of("E203", "import", "choices.py")
    treeopt("import", "choices.py", "--name", "two", "-o", "two.yaml")
    assert load_tree("two.yaml").paths == ((0,), (1,), (0, 0))
