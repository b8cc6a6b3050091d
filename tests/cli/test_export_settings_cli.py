"""export --calibration: settings on standard output, what is not derived, files, and the comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import random_calibration
from looped import looped
from program import error_number, error_of, treeopt, treeopt_json

from treeopt.calibration import Calibration
from treeopt.engines import SETTINGS
from treeopt.files.calibrations import save_calibration
from treeopt.files.profiles import save_profile
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.chains import replay_chain

LINE = ("export", "--for", "vllm", "--calibration", "c.safetensors")


@pytest.fixture
def traces() -> Calibration:
    """Thirty texts in `c.safetensors`, and a profile of two batches in `p.yaml`."""
    made = random_calibration(11, sequences=30)
    save_calibration(made, "c.safetensors")
    points = [(n, batch, 1 + cost * (n - 1)) for batch, cost in ((1, 0.05), (8, 0.5)) for n in (1, 2, 3, 4, 5, 8)]
    save_profile(LatencyProfile.from_points(LatencyPoint(n, b, 512, s, s, s) for n, b, s in points), "p.yaml")
    return made


def test_settings_go_to_standard_output(traces: Calibration) -> None:
    """The content alone can be passed to the engine; figures are notes."""
    result = treeopt(*LINE, "--profile", "p.yaml")
    config = json.loads(result.stdout)
    length = config["num_speculative_tokens"]
    assert config == {"method": "medusa", "num_speculative_tokens": length}
    promise = replay_chain(traces, length).tokens_per_step
    assert f"{promise:.4f} tokens per step" in result.stderr
    assert "not derived: model" in result.stderr
    found = treeopt_json(*LINE, "--profile", "p.yaml")
    assert found["settings"] == config
    assert found["tokens_per_step"] == promise
    assert [row["batch"] for row in found["batches"]] == [1]


@pytest.mark.usefixtures("traces")
def test_every_engine_has_settings() -> None:
    """Each has its own name and promise; those of SGLang need traces of per-step trees."""
    line = ("--calibration", "c.safetensors", "--profile", "p.yaml")
    for engine in SETTINGS.keys() - {"sglang"}:
        found = treeopt_json("export", "--for", engine, *line)
        assert found["to"] == engine
        assert found["tokens_per_step"] > 1
    error_of("E220", "export", "--for", "sglang", *line)


@pytest.mark.usefixtures("traces")
def test_settings_go_to_a_file() -> None:
    """A file is replaced with --force alone, and an input never."""
    treeopt(*LINE, "--chain-length", "2", "-o", "s.json")
    assert json.loads(Path("s.json").read_text())["num_speculative_tokens"] == 2
    assert error_number(treeopt(*LINE, "--chain-length", "3", "-o", "s.json", status=3)) == "E202"
    treeopt(*LINE, "--chain-length", "3", "-o", "s.json", "--force")
    assert json.loads(Path("s.json").read_text())["num_speculative_tokens"] == 3
    assert error_number(treeopt(*LINE, "-o", "c.safetensors", "--force", status=3)) == "E204"


def test_length_is_not_guessed(traces: Calibration) -> None:
    """Without a profile the chains are printed, the setting is named, and no file is written or said to be."""
    result = treeopt(*LINE, "-o", "s.json")
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert rows[1] == ["0", "1.0000"]
    assert rows[3] == ["2", f"{replay_chain(traces, 2).tokens_per_step:.4f}"]
    assert "not derived: num_speculative_tokens" in result.stderr
    assert "s.json is not written" in result.stderr
    assert not Path("s.json").exists()
    Path("s.json").write_text("of before")
    found = treeopt_json(*LINE, "-o", "s.json", "--force")
    assert found["output"] is None
    assert any("s.json is not written" in warning for warning in found["warnings"])
    assert Path("s.json").read_text() == "of before"


def test_comparison(traces: Calibration) -> None:
    """The engine's mean is compared with a chain of its own length, and the verdict printed."""
    Path("m.json").write_text(json.dumps({"acceptance_histogram": [10, 10, 10]}))
    result = treeopt(*LINE, "--measured", "m.json")
    promised = replay_chain(traces, 2)
    assert "measured        2.0000" in result.stdout
    found = treeopt_json(*LINE, "--measured", "m.json")["comparison"]
    assert found["measured"] == 2.0
    assert found["promised"] == pytest.approx(promised.tokens_per_step, rel=0.05)
    assert found["measured_rates"] == pytest.approx([2 / 3, 1 / 3])
    assert found["as_promised"] == (found["interval"][0] <= 2.0 <= found["interval"][1])
    several = {"acceptance_histogram": [1, 2, 3], "acceptance_histogram_by_draft_length": {"1": [1, 1], "2": [0, 1, 3]}}
    Path("m.json").write_text(json.dumps(several))
    assert "had 1, 2 drafts" in treeopt(*LINE, "--measured", "m.json").stderr
    Path("m.json").write_text(json.dumps({"avg_spec_accept_length": 2.0}))
    assert error_number(treeopt(*LINE, "--measured", "m.json", status=3)) == "E230"
    assert treeopt_json(*LINE, "--chain-length", "2", "--measured", "m.json")["comparison"]["measured_rates"] is None


@pytest.mark.usefixtures("traces")
@looped(
    "line",
    [
        ["export", "--for", "vllm"],
        ["export", "--for", "medusa", "--calibration", "c.safetensors"],
        ["export", "mc_sim_7b_63", "--for", "vllm"],
        ["export", "mc_sim_7b_63", "--for", "medusa", "--calibration", "c.safetensors"],
        ["export", "mc_sim_7b_63", "--for", "medusa", "--chain-length", "2"],
        [*LINE, "--chain-length", "0"],
        [*LINE, "--nodes", "4"],
        ["export", "--for", "sglang", "--calibration", "c.safetensors", "--chain-length", "2"],
        ["export", "--for", "trtllm", "--calibration", "c.safetensors", "--nodes", "4"],
        [*LINE, "--nodes", "1"],
        [*LINE, "--measured="],
    ],
)
def test_trees_and_settings_are_not_mixed(line: list[str]) -> None:
    """A tree or a calibration, and the formats of each, are usage errors otherwise."""
    treeopt(*line, status=2)
