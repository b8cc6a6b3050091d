"""`treeopt build` and `treeopt curve` where they are asked for a method, too much, or have too little to go by."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import make_calibration, random_calibration, stretches
from looped import looped
from per_step_traces import traced, with_paths
from program import error_number, treeopt, treeopt_json

from treeopt.calibration import Calibration
from treeopt.cli.app import program
from treeopt.cli.console import Console
from treeopt.engines import ENGINES
from treeopt.files.calibrations import save_calibration
from treeopt.files.profiles import save_profile
from treeopt.files.trees import load_plan, load_tree
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.per_step import build_policy
from treeopt.optimize.select_method import Fitter, candidates
from treeopt.optimize.tree_builder import build_tree, tree_limits

METHODS = [("independent", "visits"), ("joint", "uniform"), ("joint", "visits"), ("independent", "uniform")]


@pytest.fixture
def shuffled() -> Calibration:
    """Heads that err independently, where the Medusa tree is best in cross-validation."""
    made = random_calibration(3, sequences=30)
    save_calibration(made, "calibration.safetensors")
    return made


@looped(("values", "weights"), METHODS)
def test_both_options_build_exactly_that_method(shuffled: Calibration, values: str, weights: str) -> None:
    """Values and weights that the user names are built, although the Medusa tree is better in cross-validation."""
    assert treeopt_json("build", "--nodes", "12")["method"] == "independent, uniform"
    options = ["--values", values, "--weights", weights]
    data = treeopt_json("build", "--nodes", "12", *options, "-o", "t.yaml")
    assert data["method"].startswith(f"{values}, {weights}")
    assert all(name.startswith(f"{values}, {weights}") for name in data["cross_validated_steps"])
    [chosen] = [m for m in candidates(values, weights) if str(m) == data["method"]]
    assert load_tree("t.yaml") == Fitter(shuffled, tree_limits(shuffled, 12)).build(chosen).tree()


@looped(
    "arguments",
    [
        ["build", "--nodes", "131073"],
        ["build", "--nodes", "9" * 30],
        ["build", "--calibration", "calibration.safetensors", "--calibration", "one.safetensors", "--nodes", "131073"],
        ["curve", "--largest", "1000000"],
    ],
)
def test_tree_that_no_file_holds_is_refused_before_any_work(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above 131,072 nodes the error names the bound, nothing is grown and nothing is written."""
    for name in ("calibration", "one"):
        save_calibration(random_calibration(1, heads=5), f"{name}.safetensors")
    monkeypatch.setattr("treeopt.optimize.select_method.grow", lambda *_, **__: pytest.fail("a tree was grown"))
    result = treeopt(*arguments, status=3)
    assert "error[E204]" in result.stderr
    assert "131,072" in result.stderr
    assert not Path("tree.yaml").exists()
    assert not Path("curve.svg").exists()
    assert "131,072" in treeopt(arguments[0], "--help").stdout


def copies(texts: int, distinct: int) -> Calibration:
    """So many texts, of which only the first ones differ."""
    made = stretches(1, distinct)
    rows = [made.sequence(i % distinct) for i in range(texts)]
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return dataclasses.replace(
        made,
        ranks=np.concatenate(rows),
        offsets=offsets,
        prompt_ids=tuple(f"set:{i:08}" for i in range(texts)),
        token_hashes=tuple(made.token_hashes[i % distinct] for i in range(texts)),
    )


@looped("texts", [1, 7])
def test_one_text_in_any_number_of_copies_has_no_interval(texts: int) -> None:
    """Neither build nor curve names an interval; programs read null."""
    save_calibration(copies(texts, 1), "calibration.safetensors")
    result = treeopt("build", "--nodes", "8")
    assert "an interval needs two different ones" in result.stderr
    assert " to " not in result.stdout
    found = treeopt_json("curve", "--largest", "8")
    assert {point["sampling"] for point in found["points"]} == {point["prediction"] for point in found["points"]}
    assert found["points"][0]["sampling"] is None
    assert (found["texts"], found["texts_distinct"]) == (texts, 1)
    shown = treeopt("curve", "--largest", "8")
    assert "an interval needs" in shown.stderr
    assert "\t-\t" in shown.stdout
    assert "nan" not in shown.stdout + shown.stderr + result.stdout + Path("curve.svg").read_text()


@pytest.mark.usefixtures("calibration")
def test_engines_that_refuse_the_tree_are_named() -> None:
    """They are those that `export` refuses; with --for nothing is said of others."""
    result = treeopt("build", "--nodes", "24", "--json", "-o", "tree.yaml")
    refused = {one for one in ENGINES if CliRunner().invoke(program, ["show", "tree.yaml", "--for", one]).exit_code}
    assert {*json.loads(result.stdout)["not_exportable_to"]} == refused > set()
    line = "treeopt build --for ENGINE builds within the limits of one"
    assert line in treeopt("build", "--nodes", "24", "-o", "tree.yaml", "--force").stdout
    assert line not in treeopt("build", "--nodes", "24", "--for", "medusa", "-o", "tree.yaml", "--force").stdout


@looped("command", [["build", "--nodes", "auto"], ["curve"]])
def test_profile_without_one_node_is_refused_before_any_work(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overhead and speedup are over a step of one node, so a profile must hold it: no tree is grown otherwise."""
    save_calibration(stretches(1), "calibration.safetensors")
    points = [LatencyPoint(n, 1, 64, 0.01, 0.01, 0.01) for n in (8, 64)]
    save_profile(LatencyProfile.from_points(points), "p.yaml")
    monkeypatch.setattr("treeopt.optimize.select_method.grow", lambda *_, **__: pytest.fail("a tree was grown"))
    assert error_number(treeopt(*command, "--profile", "p.yaml", status=3)) == "E230"


@looped("command", [["build"], ["curve"], ["show", "mc_sim_7b_63"]])
@looped("texts", [0, 3])
def test_calibration_without_text_is_one_error(command: list[str], texts: int) -> None:
    """No texts, or texts without a token, are nothing to build, draw or replay from."""
    made = stretches(1, 3).select(range(texts))
    made = dataclasses.replace(made, ranks=made.ranks[:0], offsets=np.zeros(texts + 1, np.int64))
    save_calibration(made, "calibration.safetensors")
    assert error_number(treeopt(*command, "--calibration", "calibration.safetensors", status=3)) == "E303"


HOSTILE = {
    "texts of one token": [np.zeros((1, 4), int)] * 8,
    "all misses": [np.full((20, 4), 99)] * 8,
    "one head": [np.zeros((20, 1), int)] * 8,
    "always right": [np.zeros((20, 4), int)] * 8,
}


@looped("name", HOSTILE)
@looped("top_k", [1, 16])
def test_degenerate_traces_give_right_trees(name: str, top_k: int) -> None:
    """Nothing to guess, nothing guessed, or everything: the tree is the root alone, or the chain of best guesses."""
    made = make_calibration(HOSTILE[name], top_k=top_k)
    made = dataclasses.replace(made, token_hashes=tuple(f"text {s}" for s in range(8)))
    save_calibration(made, "calibration.safetensors")
    data = treeopt_json("build", "--nodes", "6", "--values", "independent", "--weights", "uniform")
    chain = {"one head": [[0]], "always right": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}
    assert data["paths"] == chain.get(name, [])
    assert data["expected_tokens_per_step"]["replay"] == 1.0 + len(data["paths"]) * (name in chain)
    assert treeopt_json("build", "--nodes", "6", "--max-rank", "300")["nodes"] >= data["nodes"]
    assert treeopt_json("curve", "--largest", "6")["points"]


def test_first_line_comes_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a pipe the first line does not wait for a tenth of the work; those after it come each 30 seconds or 10 %."""
    now = iter([0.0, 1.9, 2.0, 3.0, 31.9, 32.1, 33.0, 34.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with Console(False, False).progress("build") as update:
        for done in (1, 2, 3, 4, 5, 16, 17):
            update(done, 100, "")
    shown = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["2/100", "5/100", "16/100"]


def test_path_tokens_are_a_budget() -> None:
    """The tree keeps to it, names it in its source, and is another one than that of as many nodes; `show` prints it."""
    made = random_calibration(5, sequences=30, heads=4)
    save_calibration(made, "calibration.safetensors")
    data = treeopt_json("build", "--path-tokens", "40", "-o", "t.yaml")
    tree = load_tree("t.yaml")
    assert data["path_tokens"] == tree.path_tokens == len(tree.leaves) * (tree.depth + 1) <= 40
    assert "path_tokens: 40" in Path("t.yaml").read_text()
    assert tree == build_tree(made, path_tokens=40)
    assert treeopt_json("show", "t.yaml")["path_tokens"] == tree.path_tokens
    treeopt("reproduce", "t.yaml")


def test_path_tokens_of_per_step_trees() -> None:
    """The policy is that of the library, and its file and `show` name the unit; E220 without their traces."""
    made = with_paths(traced(3))
    save_calibration(made, "calibration.safetensors")
    line = ["build", "--kind", "dynamic", "--path-tokens", "24", "--force"]
    assert "at most 24 path tokens" in treeopt(*line).stdout
    assert load_plan("tree.yaml") == build_policy(made, 24, path_tokens=True)
    assert "path_tokens: 24\n" in Path("tree.yaml").read_text()
    assert treeopt_json("show", "tree.yaml")["unit"] == "path tokens"
    assert "24 path tokens" in treeopt("show", "tree.yaml").stdout
    save_calibration(traced(3), "calibration.safetensors", overwrite=True)
    assert error_number(treeopt(*line, status=3)) == "E220"


def test_path_tokens_go_with_neither_nodes_nor_engines() -> None:
    """One budget at a time, for no engine: those verify nodes."""
    save_calibration(random_calibration(5), "calibration.safetensors")
    several = ["--nodes", "auto", "--profile", "a.yaml", "--profile", "b.yaml"]
    for more in (["--nodes", "8"], ["--for", "medusa"], ["--nodes", "auto"], several, ["--drafter", "auto"]):
        treeopt("build", "--path-tokens", "16", *more, status=2)
    assert "leaves x (depth + 1), 152 without padding" in treeopt("show", "mc_sim_7b_63").stdout
    assert treeopt_json("show", "mc_sim_7b_63")["path_tokens"] == 210
