"""`treeopt build` and `treeopt curve` as a user meets them: estimates and sizes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from helpers import random_calibration, stretches
from looped import looped

from treeopt.calibration import Calibration
from treeopt.cli.app import program
from treeopt.facts import machine
from treeopt.files.calibrations import save_calibration
from treeopt.files.profiles import save_profile
from treeopt.files.trees import load_tree
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.budget import step_seconds
from treeopt.optimize.curve import default_sizes
from treeopt.optimize.select_method import Fitter, candidates
from treeopt.optimize.tree_builder import build_tree, tree_limits


def treeopt(*arguments: str, status: int = 0) -> Result:
    """Run the program in this process and check its exit status."""
    result = CliRunner().invoke(program, list(arguments))
    assert result.exit_code == status, result.output + repr(result.exception)
    return result


def treeopt_json(*arguments: str) -> dict[str, Any]:
    """The one JSON object on standard output."""
    parsed: dict[str, Any] = json.loads(treeopt(*arguments, "--json").stdout)
    return parsed


@pytest.fixture
def profile() -> LatencyProfile:
    """Cheap up to 8 nodes, dear from 16 on, in `profile.yaml`."""
    seconds = {1: 0.01, 2: 0.0101, 8: 0.0104, 16: 0.02, 80: 0.1}
    made = LatencyProfile.from_points(LatencyPoint(n, 1, 512, s, s, s) for n, s in seconds.items())
    save_profile(made, "profile.yaml")
    return made


BOTH = ("--calibration", "one.safetensors", "--calibration", "two.safetensors")


def test_build_is_joint_and_visits_by_default(calibration: Calibration) -> None:
    """The defaults give the library's tree, its method and its figures, in the file and in the JSON alike."""
    data = treeopt_json("build", "--nodes", "24", "-o", "t.yaml")
    tree, wanted = load_tree("t.yaml"), build_tree(calibration, 24)
    assert tree == wanted
    assert wanted.expected is not None
    expected = wanted.expected
    assert data["expected_tokens_per_step"] == {
        "independent": expected.independent,
        "replay": expected.replay,
        "cross_validated": expected.cross_validated,
        "low": expected.low,
        "high": expected.high,
    }
    assert expected.cross_validated is not None
    assert data["expected_tokens_per_step"]["low"] < expected.cross_validated < data["expected_tokens_per_step"]["high"]
    assert data["method"].startswith("joint, visits, strength ")
    names = ["independent, uniform", *(f"joint, visits, strength {s}" for s in (64, 256, 1024))]
    assert list(data["cross_validated_steps"]) == names
    steps = data["cross_validated_steps"][data["method"]]
    assert expected.cross_validated == pytest.approx(calibration.positions / steps, rel=1e-6)
    assert [tuple(path) for path in data["paths"]] == list(tree.paths)
    assert data["values"] == list(tree.values or ())
    assert (data["nodes"], data["depth"], data["leaves"]) == (24, tree.depth, len(tree.leaves))
    assert not {"auto", "judged"} & data.keys()


@pytest.mark.usefixtures("calibration")
def test_build_prints_what_the_json_holds() -> None:
    """The text names the method, the three estimates and the interval on new prompts."""
    expected = treeopt_json("build", "--nodes", "24")["expected_tokens_per_step"]
    text = treeopt("build", "--nodes", "24").stdout
    assert re.search(r"^method +joint, visits, strength \d+$", text, flags=re.MULTILINE)
    for name in ("independent", "replay", "cross_validated"):
        assert f"{expected[name]:.3f} {name.replace('_', '-')}: " in text
    assert f"{expected['low']:.3f} to {expected['high']:.3f} on" in text
    assert "180 more prompts would halve that" in text


def test_auto_takes_the_fastest_size(profile: LatencyProfile, calibration: Calibration) -> None:
    """The tree has the size with the most tokens per second, whose figures are printed."""
    data = treeopt_json("build", "--nodes", "auto", "--profile", "profile.yaml", "-o", "t.yaml")
    assert data["nodes"] == data["auto"]["best"]["nodes"] == 8
    best = data["auto"]["best"]
    assert best["overhead"] == pytest.approx(step_seconds(profile, 8) / step_seconds(profile, 1))
    assert best["speedup"] == pytest.approx(best["tokens_per_step"] / best["overhead"])
    assert load_tree("t.yaml") == build_tree(calibration, 8)
    text = treeopt("build", "--nodes", "auto", "--profile", "profile.yaml").stdout
    assert re.search(r"^by the profile +fastest: 8 nodes, \d\.\d{3} tokens/step, overhead", text, flags=re.MULTILINE)


def test_several_calibrations_are_one(tasks: list[Calibration], profile: LatencyProfile) -> None:
    """Two parts of the texts give the tree of all texts, of a given and of the fastest size."""
    assert len(tasks) == 2
    assert treeopt_json("build", *BOTH, "--nodes", "12", "-o", "t.yaml")["texts_fitted"] == 60
    assert load_tree("t.yaml") == build_tree(stretches(1), 12)
    treeopt("build", *BOTH, "--nodes", "auto", "--profile", "profile.yaml", "-o", "fastest.yaml")
    assert profile.largest() == 80
    assert load_tree("fastest.yaml") == build_tree(stretches(1), 8)


def test_calibrations_of_other_heads_are_not_joined(tasks: list[Calibration]) -> None:
    """E221, as of `treeopt merge`."""
    other = dataclasses.replace(tasks[1].provenance, heads_id="other")
    save_calibration(dataclasses.replace(tasks[1], provenance=other), "two.safetensors", overwrite=True)
    assert "E221" in treeopt("build", *BOTH, status=3).stderr


CONTRADICTIONS = {
    "auto without profile": ["--nodes", "auto"],
    "profile without auto": ["--profile", "profile.yaml"],
    "profile with a size": ["--nodes", "8", "--profile", "profile.yaml"],
    "nodes in words": ["--nodes", "many"],
    "no nodes": ["--nodes", "0"],
    "unknown values": ["--values", "both"],
    "unknown weights": ["--weights", "none"],
}


@pytest.mark.usefixtures("tasks", "profile")
@looped("name", CONTRADICTIONS)
def test_contradictory_options_exit_2(name: str) -> None:
    """A wrong command line is refused before any work, and nothing is written."""
    result = treeopt("build", *CONTRADICTIONS[name], status=2)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert not Path("tree.yaml").exists()


def test_curve_without_profile(calibration: Calibration) -> None:
    """Tokens per step of every size on texts left out; no seconds, no best; the picture is written."""
    data = treeopt_json("curve", "--largest", "24")
    fitter = Fitter(calibration, tree_limits(calibration, 24))
    method = fitter.choose(candidates("joint", "visits")).method
    assert (data["best"], data["method"], data["output"]) == (None, str(method), "curve.svg")
    sizes = [point["nodes"] for point in data["points"]]
    assert sizes == default_sizes(24)
    found = fitter.cross_validated_sums(method, sizes)
    for point, sums in zip(data["points"], found, strict=True):
        assert point["tokens_per_step"] == calibration.positions / sums.steps.sum()
        assert point["prediction"]["low"] <= point["sampling"]["low"] <= point["tokens_per_step"]
        assert (point["seconds"], point["overhead"], point["speedup"]) == (None, None, None)
    root = ElementTree.parse("curve.svg").getroot()
    assert root.tag.endswith("svg")
    drawn = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert drawn.count(f"{calibration.provenance.model or 'a model'}: static trees by size") == 1
    assert any(line.startswith("Tokens per step (1 + accepted drafts): ") for line in drawn)
    assert not any("Seconds of a step" in line for line in drawn)


@pytest.mark.usefixtures("calibration")
def test_curve_with_profile_marks_the_best(profile: LatencyProfile) -> None:
    """Sizes reach as far as the profile; the table marks the size with the greatest speedup."""
    data = treeopt_json("curve", "--profile", "profile.yaml", "-o", "c.svg")
    assert data["points"][-1]["nodes"] == 80
    assert data["best"] == max(data["points"], key=lambda point: float(point["speedup"]))["nodes"] == 8
    for point in data["points"]:
        assert point["overhead"] == step_seconds(profile, point["nodes"]) / step_seconds(profile, 1)
        assert point["speedup"] == point["tokens_per_step"] / point["overhead"]
    rows = [line.split("\t") for line in treeopt("curve", "--profile", "profile.yaml").stdout.splitlines()]
    assert rows[0] == ["nodes", "tokens/step", "new prompts, 90 %", "overhead", "speedup"]
    assert any("first nodes of one growth to 80 nodes; `treeopt build --nodes N`" in row[0] for row in rows)
    marked = [row for row in rows[1:] if "best" in row[0]]
    assert [row[0] for row in marked] == ["8 best"]
    root = ElementTree.parse("c.svg").getroot()
    assert root.tag.endswith("svg")
    drawn = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    [note] = [line for line in drawn if line.startswith("Seconds of a step: ")]
    assert machine(profile.provenance) in note
    assert note.endswith(f"batch 1, {max(profile.contexts)} tokens in the cache.")
    longer = [dataclasses.replace(one, batch=8, context=4096) for one in profile.points]
    save_profile(dataclasses.replace(profile, points=(*profile.points, *longer)), "two.yaml")
    treeopt("curve", "--profile", "two.yaml", "-o", "two.svg")
    assert note in Path("two.svg").read_text()


@pytest.mark.usefixtures("calibration", "profile")
def test_curve_stops_at_the_largest_asked_for() -> None:
    """--largest cuts the curve; beyond the profile the profile cuts it."""
    for asked, last in (("6", 6), ("500", 80)):
        points = treeopt_json("curve", "--profile", "profile.yaml", "--largest", asked)["points"]
        assert points[-1]["nodes"] == last


def test_profile_of_other_heads_is_told() -> None:
    """A profile measured with other heads than the calibration's makes a warning, not a silent answer."""
    points = [LatencyPoint(n, 1, 64, 0.001 * n, 0.001 * n, 0.001 * n) for n in (1, 2, 8)]
    save_profile(LatencyProfile.from_points(points, {"heads_id": "someone else's"}), "other.yaml")
    save_calibration(random_calibration(1), "c.safetensors")
    arguments = ["build", "--calibration", "c.safetensors", "--nodes", "auto", "--profile", "other.yaml"]
    assert "other heads" in treeopt(*arguments).stderr


def test_curve_refuses_another_picture_format() -> None:
    """A curve in a .png would be SVG text in disguise."""
    save_calibration(random_calibration(1), "c.safetensors")
    treeopt("curve", "--calibration", "c.safetensors", "-o", "c.png", status=3)
