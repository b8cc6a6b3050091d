"""`calibrate`, `build`, `curve` and `show` under sampling, and what `calibrate` prints of accuracies."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers import make_calibration, random_calibration, stretches
from looped import looped
from program import error_of, treeopt, treeopt_json
from sampled_traces import of_drafter, sampled

from treeopt.calibrate.results import CalibrationRun
from treeopt.calibration import Calibration
from treeopt.cli.calibrate_command import report_calibration
from treeopt.cli.console import Console
from treeopt.files.calibrations import load_calibration, save_calibration
from treeopt.files.profiles import save_profile
from treeopt.files.trees import load_tree
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.intervals import by_text
from treeopt.optimize.replay import replay, standard_error
from treeopt.optimize.select_method import Fitter, candidates
from treeopt.optimize.tree_builder import tree_limits


@pytest.fixture
def traces() -> Calibration:
    """Texts sampled at temperature 0.7, under the default name."""
    made = sampled(1, texts=20)
    save_calibration(made, "calibration.safetensors")
    return made


def test_calibrate_at_a_temperature_traces_probabilities() -> None:
    """The file has the temperature and probabilities, and the tree's figure is their sum."""
    common = ("calibrate", "--heads", "pocket", "--limit", "6", "--max-new-tokens", "12", "--batch-size", "6")
    result = treeopt(*common, "--temperature", "0.7", "--seed", "3", "-o", "sampled.safetensors")
    assert "sampled at temperature 0.7, with the target's probabilities of 32 candidates per head" in result.stdout
    made = load_calibration("sampled.safetensors")
    assert made.temperature == 0.7
    assert made.target is not None
    assert made.target.probability.shape == (*made.ranks.shape, 32)
    treeopt("build", "--nodes", "6", "--calibration", "sampled.safetensors", "--temperature", "0.7", "-o", "tree.yaml")
    tree = load_tree("tree.yaml")
    expected = replay(tree, made)
    assert expected.expected_drafts is not None
    assert tree.expected is not None
    assert tree.expected.replay == pytest.approx(expected.tokens_per_step, rel=1e-6)
    assert yaml.safe_load(Path("tree.yaml").read_text())["calibration"]["temperature"] == "0.7"
    treeopt(*common, "-o", "greedy.safetensors")
    greedy = load_calibration("greedy.safetensors")
    assert (greedy.temperature, greedy.target) == (0.0, None)


@looped("command", [("build",), ("build", "--kind", "dynamic", "--nodes", "8"), ("curve",)])
def test_another_temperature_is_refused(command: tuple[str, ...], traces: Calibration) -> None:
    """E220 names the temperature of the traces, and the command that makes others; nothing is written."""
    save_calibration(of_drafter(traces), "calibration.safetensors", overwrite=True)
    for asked, found in (("1.0", "temperature 0.7"), ("0", "temperature 0.7")):
        assert found in error_of("E220", *command, "--temperature", asked)
    save_calibration(random_calibration(1), "calibration.safetensors", overwrite=True)
    assert "greedy texts" in treeopt("build", "--temperature", "0.7", status=3).stderr
    assert not list(Path().glob("*.yaml"))
    assert not list(Path().glob("*.svg"))
    treeopt("build", "--nodes", "4", "--temperature", "0", "-o", "greedy.yaml")


@pytest.mark.usefixtures("traces")
def test_show_prints_the_standard_error() -> None:
    """Replay over sampled texts: the sum, its standard error, and that it is a sum."""
    treeopt("build", "--nodes", "8")
    data = treeopt_json("show", "tree.yaml", "--calibration", "calibration.safetensors")
    found = replay(load_tree("tree.yaml"), load_calibration())
    assert data["replay"]["tokens_per_step"] == found.tokens_per_step
    by_cluster = by_text(load_calibration().clusters, found.sums.tokens, found.sums.steps)
    assert data["replay"]["standard_error"] == standard_error(*by_cluster)
    printed = treeopt("show", "tree.yaml", "--calibration", "calibration.safetensors").stdout
    assert f"standard error {standard_error(*by_cluster):.4f}" in printed
    assert "sampled at temperature 0.7" in printed


def test_curve_is_of_sums(traces: Calibration) -> None:
    """The points of the curve are sums of probabilities."""
    data = treeopt_json("curve", "--largest", "6")
    sizes = [point["nodes"] for point in data["points"]]
    fitter = Fitter(traces, tree_limits(traces, 6))
    method = fitter.choose(candidates("joint", "visits")).method
    found = [sums.tokens_per_step for sums in fitter.cross_validated_sums(method, sizes)]
    assert [point["tokens_per_step"] for point in data["points"]] == found


@pytest.mark.usefixtures("traces")
def test_drafters_at_different_temperatures_are_not_compared() -> None:
    """`build --drafter auto` takes texts of one temperature."""
    other = of_drafter(sampled(2, texts=20))
    settings = {**other.provenance.settings, "temperature": 1.0}
    other = dataclasses.replace(other, provenance=dataclasses.replace(other.provenance, settings=settings))
    save_calibration(other, "other.safetensors")
    seconds = {1: 0.01, 8: 0.011}
    points = (LatencyPoint(n, 1, 512, s, s, s) for n, s in seconds.items())
    save_profile(LatencyProfile.from_points(points), "profile.yaml")
    assert "different temperatures" in error_of(
        "E221",
        *("build", "--drafter", "auto", "--profile", "profile.yaml"),
        *("--calibration", "calibration.safetensors", "--calibration", "other.safetensors"),
    )


def run_of(hashes: str) -> CalibrationRun:
    """A run over as many texts as there are letters, equal letters being equal texts."""
    made: Calibration = dataclasses.replace(stretches(1, len(hashes)), token_hashes=tuple(hashes))
    return CalibrationRun(made, (), 0, made.num_heads)


@looped("hashes", ["a", "aaaaaa"])
def test_one_text_in_any_number_of_copies_has_no_error(hashes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No standard error is printed, neither 0 nor nan, and programs read null."""
    report_calibration(Console(False, False), run_of(hashes), "c.safetensors", None)
    text = capsys.readouterr().out
    assert "±" not in text
    assert "nan" not in text
    assert f"{len(hashes)} text{'s' if len(hashes) > 1 else ''}, 1 distinct, " in text
    report_calibration(Console(True, False), run_of(hashes), "c.safetensors", None)
    data = json.loads(capsys.readouterr().out)
    assert data["standard_error_top_1"] == [None] * 3
    assert (data["prompts"], data["texts_distinct"]) == (len(hashes), 1)


def test_levels_that_no_text_reached_have_no_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    """A dash where there were no trials, not 0.0 %."""
    run = run_of("ab")
    short = make_calibration([np.zeros((3, 3), int)])  # the third level would guess the fourth token after the first
    report_calibration(Console(False, False), dataclasses.replace(run, calibration=short), "c.safetensors", None)
    *_, last = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("head")]
    assert last == ["head", "3", "-", "-", "-", "-", "-", "0"]
