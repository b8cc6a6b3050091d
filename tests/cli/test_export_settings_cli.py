"""export --calibration: settings on standard output, what is not derived, files, and the comparison."""

from __future__ import annotations

import dataclasses
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


def test_profiles_of_trees_or_another_model_are_doubted(traces: Calibration) -> None:
    """A chain is dearer than a tree of as many nodes where a draft runs once a level."""
    points = [LatencyPoint(n, 1, 512, 1 + n / 9, 1 + n / 9, 1 + n / 9) for n in (1, 2, 4, 8)]
    source = {"kind": "static", "drafter_name": "model", "drafter": "d1", "model_id": "another", "dtype": "float32"}
    save_profile(LatencyProfile.from_points(points, source), "p.yaml")
    provenance = dataclasses.replace(traces.provenance, drafter_id="d1")
    save_calibration(dataclasses.replace(traces, provenance=provenance), "c.safetensors", overwrite=True)
    found = treeopt(*LINE, "--profile", "p.yaml").stderr
    assert "chains are priced as trees of as many nodes" in found
    assert "was made for another base model" in found


@pytest.mark.usefixtures("traces")
def test_old_settings_are_not_taken_for_new_ones() -> None:
    """Where drafts do not pay nothing is written, and a file of an earlier profile is said to be out of date."""
    points = [LatencyPoint(n, 1, 512, n, n, n) for n in (1, 2, 4, 8)]
    save_profile(LatencyProfile.from_points(points), "slow.yaml")
    line = (*LINE, "--profile", "slow.yaml", "-o", "s.json")
    assert "s.json is not written: there is no setting\n" in treeopt(*line).stderr
    Path("s.json").write_text("{}")
    assert "no setting, and the old one is out of date" in treeopt(*line, "--force").stderr


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
    Path("m.json").write_text(json.dumps({"acceptance_histogram": [10, 10, 10]}), encoding="utf-8-sig")
    result = treeopt(*LINE, "--measured", "m.json")
    promised = replay_chain(traces, 2)
    assert "measured        2.0000" in result.stdout
    found = treeopt_json(*LINE, "--measured", "m.json")["comparison"]
    assert found["measured"] == 2.0
    assert found["promised"] == pytest.approx(promised.tokens_per_step, rel=0.05)
    assert found["measured_rates"] == pytest.approx([2 / 3, 1 / 3])
    assert found["as_promised"] == (found["interval"][0] <= 2.0 <= found["interval"][1])
    assert error_number(treeopt(*LINE, "--measured", "m.json", "-o", "m.json", "--force", status=3)) == "E204"
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
        ["export", "--for", "sglang", "--calibration", "c.safetensors", "--chain-length", "2", "--nodes", "4"],
        ["export", "--for", "sglang", "--measured", "c.safetensors", "--nodes", "4"],
        ["export", "mc_sim_7b_63", "--for", "medusa", "--method", "eagle"],
        [*LINE, "--method", "EAGLE"],
        ["export", "--for", "chain", "--calibration", "c.safetensors", "--method", "eagle"],
        ["export", "--for", "trtllm", "--calibration", "c.safetensors", "--nodes", "4"],
        [*LINE, "--nodes", "1"],
        [*LINE, "--measured="],
    ],
)
def test_trees_and_settings_are_not_mixed(line: list[str]) -> None:
    """A tree or a calibration, and the formats of each, are usage errors otherwise."""
    treeopt(*line, status=2)


@pytest.fixture
def counts() -> None:
    """The histogram of an engine in `m.json`, and its own step times in `t.csv`."""
    Path("m.json").write_text(json.dumps({"acceptance_histogram": [3000, 2500, 2000, 1500, 1000]}))
    Path("t.csv").write_text("tokens,batch,seconds\n1,1,1.0\n5,1,1.2\n1,8,1.0\n5,8,9.0\n")


@pytest.mark.usefixtures("counts")
def test_counters_alone_give_shorter_chains() -> None:
    """No calibration and no model: a table with intervals, and a hint where the chain was too short."""
    result = treeopt("export", "--for", "vllm", "--measured", "m.json")
    assert "estimated from 10,000 steps with 4 drafts" in result.stdout
    assert "a longer chain may be faster: 10.0% of the steps" in result.stderr
    assert "not derived: num_speculative_tokens" in result.stderr
    found = treeopt_json("export", "--for", "vllm", "--measured", "m.json")
    assert [row["drafts"] for row in found["estimates"]] == [0, 1, 2, 3, 4]
    assert found["estimates"][4]["tokens_per_step"] == pytest.approx(2.5)
    assert found["settings"] == {}


@pytest.mark.usefixtures("counts")
def test_counters_with_step_times_give_settings() -> None:
    """The CSV prices the chains; a batch whose steps are dear does not draft."""
    line = ("export", "--for", "vllm", "--measured", "m.json", "--profile", "t.csv")
    result = treeopt(*line)
    assert "not derived: method" in result.stderr
    found = treeopt_json(*line, "--method", "eagle3")["settings"]
    assert found["method"] == "eagle3"
    assert found["num_speculative_tokens"] == 4
    assert found["num_speculative_tokens_per_batch_size"] == [[1, 1, 4], [2, 8, 0]]


@pytest.mark.usefixtures("counts")
def test_synthetic_rates_of_counters() -> None:
    """At the measured length the rates are the engine's."""
    line = ("export", "--for", "llamacpp", "--measured", "m.json", "--chain-length", "4", "--synthetic")
    words = treeopt(*line, "--method", "draft-mtp", "-o", "s.txt")
    assert words.stdout == "" or "estimated" in words.stdout
    assert "--spec-synth-rates 0.7,0.45,0.25,0.1" in Path("s.txt").read_text()
    assert error_number(treeopt(*line[:6], "3", "--synthetic", status=3)) == "E230"
    assert error_number(treeopt("export", "--for", "trtllm", *line[3:], status=3)) == "E105"


@pytest.mark.usefixtures("traces")
def test_synthetic_rates_of_replay() -> None:
    """With a calibration they are those of replay."""
    found = treeopt_json(*LINE, "--chain-length", "2", "--synthetic")
    assert found["settings"]["rejection_sample_method"] == "synthetic"
    assert found["settings"]["synthetic_acceptance_rates"] == pytest.approx(found["acceptance_rates"], abs=1e-4)


@pytest.mark.usefixtures("counts")
def test_sglang_takes_a_length_with_counters() -> None:
    """Its counters are of a chain."""
    line = ("export", "--for", "sglang", "--measured", "m.json", "--chain-length", "3", "--method", "EAGLE")
    found = treeopt_json(*line)["settings"]
    assert list(found.values()) == ["EAGLE", 3, 1, 4]


def test_counters_without_positions_are_refused() -> None:
    """A mean alone gives no shorter chain; a wrong table of times is named."""
    Path("m.json").write_text(json.dumps({"avg_spec_accept_length": 2.0}))
    assert error_number(treeopt("export", "--for", "vllm", "--measured", "m.json", status=3)) == "E203"
    Path("m.json").write_text(json.dumps({"acceptance_histogram": [2, 1]}))
    Path("t.csv").write_text("nodes,seconds\n1,1.0\n")
    line = ("export", "--for", "vllm", "--measured", "m.json", "--profile", "t.csv")
    assert error_number(treeopt(*line, status=3)) == "E203"
