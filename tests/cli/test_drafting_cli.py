"""Drafters and trees chosen per step as a user meets them, on the built-in model, from learning to decoding."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from looped import looped
from made import FEW
from program import error_number, error_of, treeopt, treeopt_json

from treeopt.defaults import HEADS, STEP_SIZES
from treeopt.files.calibrations import load_calibration
from treeopt.files.drafters import load_drafter, save_drafter
from treeopt.files.trees import load_plan, load_tree
from treeopt.policy import TreePolicy


@pytest.fixture(autouse=True)
def _files(heads_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in a copy of that folder: trees and drafters work wherever they are moved together."""
    shutil.copytree(heads_files, tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")


TREES = ("static", "auto", "plain-auto")  # auto is per step


def test_validate_and_generate() -> None:
    """Every kind is lossless, in the steps that were predicted; the drafter is found beside the tree."""
    plain = treeopt_json("generate", "One day", "--tree", "plain.yaml", "--max-new-tokens", "12")
    for name in TREES:
        data = treeopt_json("validate", "--tree", f"{name}.yaml", "--limit", "2", "--max-new-tokens", "12")
        assert data["lossless"], name
        assert data["tokens_per_step"] == data["predicted_tokens_per_step"] > 1, name
        made = treeopt_json("generate", "One day", "--tree", f"{name}.yaml", "--max-new-tokens", "12")
        assert made["tokens"] == plain["tokens"], name


def test_tree_in_another_folder_names_its_drafter() -> None:
    """A tree alone in a folder misses its drafter's file, until that is named."""
    Path("alone").mkdir()
    shutil.move("dynamic.yaml", "alone/dynamic.yaml")
    line = ("generate", "One day", "--tree", "alone/dynamic.yaml", "--max-new-tokens", "8")
    assert "--drafter FILE" in error_of("E201", *line, "-q")
    assert treeopt_json(*line, "--drafter", "d.safetensors")["tokens"]


def test_built_elsewhere_names_the_drafter_from_there() -> None:
    """The drafter's file is named as seen from wherever the tree is written to."""
    Path("deep/er").mkdir(parents=True)
    treeopt("build", "--calibration", "c.safetensors", "--kind", "dynamic", "--nodes", "4", "-o", "deep/er/t.yaml")
    assert 'file: "../../d.safetensors"' in Path("deep/er/t.yaml").read_text().replace("'", '"')
    assert treeopt_json("generate", "One day", "--tree", "deep/er/t.yaml", "--max-new-tokens", "8")["tokens"]


def test_calibrate_writes_the_drafter_beside() -> None:
    """The drafter's name follows the output's whole stem; traces name file and id."""
    data = treeopt_json(
        "calibrate", "--limit", "2", "--max-new-tokens", "4", "--kind", "dynamic", "-o", "x.v2.safetensors"
    )
    drafter = load_drafter("x.v2.drafter.safetensors")
    calibration = load_calibration("x.v2.safetensors")
    assert data["drafter"] == data["learned"]["id"] == drafter.id == calibration.provenance.drafter_id
    assert calibration.provenance.drafter == "x.v2.drafter.safetensors"
    assert len(data["calibration_error"]) == calibration.num_heads
    assert Path("p.v1.drafter.safetensors").exists()


def test_calibrate_static_traces_no_trees() -> None:
    """--kind static leaves the traces of single steps out, and such traces build no policy."""
    treeopt("calibrate", *FEW, "--drafter", "d.safetensors", "--kind", "static", "-o", "s.safetensors")
    assert load_calibration("s.safetensors").steps is None
    assert "--kind dynamic" in error_of("E220", "build", "--calibration", "s.safetensors", "--kind", "dynamic")


def test_drafter_of_the_same_prompts_is_warned_of() -> None:
    """Calibrating on the prompts that a drafter was learned from is warned of: its figures are too high."""
    said = treeopt("calibrate", *FEW, "--drafter", "d.safetensors", "-o", "w.safetensors").stderr
    assert "the drafter was learned from these prompts" in said


def test_build_json_is_the_file() -> None:
    """The result of a dynamic build is what stands in its file."""
    data = treeopt_json("build", "--calibration", "c.safetensors", "--kind", "dynamic", "--nodes", "12", "-o", "t.yaml")
    policy = load_plan("t.yaml")
    assert isinstance(policy, TreePolicy)
    assert policy == load_plan("dynamic.yaml")
    assert (data["kind"], data["nodes"], data["depth"]) == ("dynamic", 12, policy.depth)
    assert data["drafter"] == policy.drafter == load_drafter("d.safetensors").id
    assert data["expected_tokens_per_step"]["replay"] == (policy.expected and policy.expected.replay)
    policy = load_plan("auto.yaml")
    assert isinstance(policy, TreePolicy)
    assert policy.size_cost or policy.nodes in STEP_SIZES  # priced sizes, or one that is faster
    assert policy.nodes <= 64


def test_curve_of_policies() -> None:
    """Each size once; the size of the built policy has its figure."""
    data = treeopt_json("curve", "--calibration", "c.safetensors", "--kind", "dynamic", "--largest", "12")
    policy = load_plan("dynamic.yaml")
    assert policy.expected is not None
    [point] = [point for point in data["points"] if point["nodes"] == 12]
    assert point["tokens_per_step"] == pytest.approx(policy.expected.replay, rel=1e-6)
    assert data["points"][0]["tokens_per_step"] == 1
    assert Path("curve.svg").exists()
    whole = treeopt_json("curve", "--calibration", "c.safetensors", "--kind", "dynamic")
    assert whole["points"][-1]["nodes"] == 254


def test_misses_of_a_batch_with_size_cost_are_explained() -> None:
    """Rows of a batch share one size, so other steps than predicted are no sign of a bug."""
    size_cost = "size_cost:\n- [2, 2.0]\n- [4, 2.6]\n- [12, 3.2]\n"
    text = Path("dynamic.yaml").read_text().replace("calibration:\n", size_cost + "calibration:\n")
    Path("size_cost.yaml").write_text(text)
    line = ("validate", "--tree", "size_cost.yaml", "--limit", "6", "--max-new-tokens", "24", "--batch-size", "6")
    said = treeopt(*line).stderr
    assert "share the largest size" in said
    assert "bug" not in said


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "existing drafter": (("learn", "-o", "d.safetensors"), "E202"),
    "existing drafter of traces": (("calibrate", "--kind", "dynamic", "-o", "p.v1.safetensors"), "E202"),
    "drafter as output": (("calibrate", "--drafter", "d.safetensors", "-o", "d.safetensors", "--force"), "E204"),
    "tree over a drafter": (("build", "--calibration", "plain.safetensors", "-o", "d.safetensors"), "E202"),
    "missing drafter": (("calibrate", "--drafter", "none.safetensors", "-o", "n.safetensors"), "E201"),
    "no drafter file": (("calibrate", "--drafter", "static.yaml", "-o", "n.safetensors"), "E203"),
    "traces of plain guesses": (("show", "static.yaml", "--calibration", "plain.safetensors"), "E223"),
    "traces of a drafter": (("show", "plain.yaml", "--calibration", "c.safetensors"), "E223"),
    "other drafter": (
        ("generate", "x", "--tree", "dynamic.yaml", "--drafter", "p.v1.drafter.safetensors", "-q"),
        "E223",
    ),
    "other drafter proved": (
        ("validate", "--tree", "static.yaml", "--drafter", "p.v1.drafter.safetensors", "-q"),
        "E223",
    ),
    "drafter for a plain tree": (("validate", "--tree", "plain.yaml", "--drafter", "d.safetensors", "-q"), "E223"),
    "plain traces": (("build", "--calibration", "plain.safetensors", "--kind", "dynamic"), "E220"),
    "curve of plain traces": (("curve", "--calibration", "plain.safetensors", "--kind", "dynamic"), "E220"),
    "one node": (("build", "--calibration", "c.safetensors", "--kind", "dynamic", "--nodes", "1"), "E103"),
    "many nodes": (("build", "--calibration", "c.safetensors", "--kind", "dynamic", "--nodes", "255"), "E103"),
    "compile": (("compile", "static.yaml"), "E105"),
    "compile a policy": (("compile", "dynamic.yaml"), "E203"),
    "policy over plain traces, shown": (("show", "auto.yaml", "--calibration", "plain.safetensors"), "E223"),
    "render a policy": (("render", "dynamic.yaml"), "E203"),
}


@looped("name", REFUSED)
def test_refusals(name: str) -> None:
    """One error with its number and status 3, before any work, and no file is touched."""
    line, number = REFUSED[name]
    before = {path: path.read_bytes() for path in Path().iterdir()}
    result = error_of(number, *line)
    assert {path: path.read_bytes() for path in Path().iterdir()} == before
    if name.endswith("a policy"):
        assert "a tree for each step" in result
        assert "treeopt generate" in result
    assert json.loads(treeopt(*line, "--json", status=3).stderr)["error"] == number


STATIC_ONLY = ("--values independent", "--weights uniform", "--max-rank 2", "--max-depth 2", "--for medusa")


@looped("option", STATIC_ONLY)
def test_static_options_are_refused(option: str) -> None:
    """What has no meaning for trees chosen per step is a usage error of build and curve."""
    commands = ("build", "curve") if option.startswith("--max-rank") else ("build",)
    for command in commands:
        result = treeopt(command, "--calibration", "c.safetensors", "--kind", "dynamic", *option.split(), status=2)
        assert "belongs to --kind static" in result.stderr


def test_static_tree_is_shown_and_drawn() -> None:
    """A tree of a drafter heads+ngram is shown and drawn as any other, and both name the drafter."""
    drafter = load_drafter("d.safetensors").id
    assert drafter in treeopt("show", "static.yaml").stdout
    assert treeopt_json("show", "static.yaml")["drafter"] == drafter
    assert treeopt_json("show", "plain.yaml")["drafter"] == HEADS
    assert load_tree("static.yaml").drafter == drafter
    replayed = treeopt_json("show", "static.yaml", "--calibration", "c.safetensors")["replay"]
    expected = load_tree("static.yaml").expected
    assert expected is not None
    assert replayed["tokens_per_step"] == pytest.approx(expected.replay, rel=1e-6)
    treeopt("render", "static.yaml", "-o", "t.svg")
    assert f"of drafter {drafter}" in Path("t.svg").read_text()


@looped("name", ["dynamic", "auto"])
def test_policy_is_shown(name: str) -> None:
    """Sizes and costs, drafter, origin and expected figures are printed; replay gives the expected figure."""
    policy = load_plan(f"{name}.yaml")
    assert isinstance(policy, TreePolicy)
    assert policy.expected is not None
    text = treeopt("show", f"{name}.yaml", "--calibration", "c.safetensors").stdout
    assert text.startswith("a tree for each step: ")
    assert f"drafter         {policy.drafter} in d.safetensors; its estimates choose the nodes" in text
    assert f" {policy.expected.replay:.4f} replay: a decoder on" in text
    assert f" {policy.expected.estimated:.4f} estimated: " in text
    assert f"mean size       {policy.expected.nodes:.1f} nodes per step" in text
    assert f"replayed over c.safetensors: {policy.expected.replay:.4f} tokens per step" in text
    for size, cost in policy.size_cost:
        assert f"\n{size}\t{cost:.4f}\n" in text
    assert policy.size_cost or f"{policy.nodes} nodes at every step" in text
    assert "{" not in text
    data = treeopt_json("show", f"{name}.yaml", "--calibration", "c.safetensors")
    assert (data["kind"], data["nodes"], data["depth"]) == ("dynamic", policy.nodes, policy.depth)
    assert data["expected_tokens_per_step"] == vars(policy.expected)
    assert [tuple(pair) for pair in data["size_cost"]] == list(policy.size_cost)
    assert data["replay"]["tokens_per_step"] == pytest.approx(policy.expected.replay, rel=1e-6)


def test_drafter_of_other_heads_is_told() -> None:
    """A drafter that was learned with other heads still decodes losslessly, but its user should know."""
    drafter = load_drafter("d.safetensors")
    save_drafter(dataclasses.replace(drafter, source={**drafter.source, "heads_id": "others"}), "o.safetensors")
    line = ("generate", "One day", "--tree", "dynamic.yaml", "--max-new-tokens", "8")
    assert "the drafter was made for other heads (others" in treeopt(*line, "--drafter", "o.safetensors").stderr
    assert "other heads" not in treeopt(*line).stderr


def test_skipped_rows_are_left_out() -> None:
    """--skip and --limit name rows by their place in the file; skipping all of them is refused."""
    treeopt("calibrate", "--skip", "3", "--limit", "2", "--max-new-tokens", "8", "-o", "rows.safetensors")
    assert [prompt[-8:] for prompt in load_calibration("rows.safetensors").prompt_ids] == ["00000003", "00000004"]
    assert error_number(treeopt("calibrate", "--skip", "256", "-o", "none.safetensors", "-q", status=3)) == "E303"
