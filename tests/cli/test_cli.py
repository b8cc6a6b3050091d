"""The program as a user meets it: outputs, exit statuses, errors, JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import random_calibration
from program import error_number, error_of, treeopt, treeopt_json

from treeopt.cli.app import COMMANDS
from treeopt.files.calibrations import save_calibration
from treeopt.files.trees import load_tree

HEADS = "models/tinystories-260k-medusa"
OPENINGS = "data/story_openings.json"


@pytest.fixture
def calibration_file() -> str:
    """A small calibration under the default name."""
    save_calibration(random_calibration(1), "calibration.safetensors")
    return "calibration.safetensors"


def test_commands_named_in_help_exist() -> None:
    """Every command of the table can be imported and helps itself."""
    for name in COMMANDS:
        assert "Usage:" in treeopt(name, "--help").stdout


@pytest.mark.usefixtures("calibration_file")
def test_build_prints_both_estimates_with_k() -> None:
    """The two figures are named, K is stated, and the JSON holds the same tree as the file."""
    text = treeopt("build", "--nodes", "16", "-o", "t.yaml").stdout
    assert "independent" in text
    assert "replay" in text
    assert "K = 16" in text
    data = treeopt_json("build", "--nodes", "16", "-o", "t.yaml")
    tree = load_tree("t.yaml")
    assert data["nodes"] == tree.nodes == 16
    assert (data["depth"], data["leaves"], data["top_k"]) == (tree.depth, len(tree.leaves), 16)
    assert [tuple(path) for path in data["paths"]] == list(tree.paths)
    assert tree.expected is not None
    expected = data["expected_tokens_per_step"]
    assert expected["independent"] == tree.expected.independent
    assert expected["replay"] == tree.expected.replay
    assert expected["low"] < expected["cross_validated"] == tree.expected.cross_validated < expected["high"]


@pytest.mark.usefixtures("calibration_file")
def test_build_beyond_all_value_warns() -> None:
    """A budget larger than what has value gives the real size and a warning."""
    result = treeopt("build", "--nodes", "1000000", "--max-rank", "1", "--max-depth", "1", "-o", "t.yaml")
    assert "warning: 3 nodes, not 1000000" in result.stderr


def test_compile_and_render_take_zoo_names() -> None:
    """A zoo name works wherever a tree file does; outputs are named after it and overwritten freely."""
    for _ in range(2):
        data = treeopt_json("compile", "mc_sim_7b_63")
        assert data["shapes"]["retrieve_indices"] == [42, 5]
        treeopt("render", "mc_sim_7b_63")
    assert Path("mc_sim_7b_63.safetensors").stat().st_size > 1000
    assert Path("mc_sim_7b_63.svg").read_text().startswith("<svg")
    assert "digraph" in (treeopt("render", "mc_sim_7b_63", "-o", "t.dot"), Path("t.dot").read_text())[1]


def test_unexpected_error_is_a_bug_with_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """What we did not foresee says that it is a bug, and shows its traceback only when asked."""

    def fail() -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("treeopt.cli.list_command.zoo", fail)
    result = treeopt("list", status=1)
    assert "this is a bug" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in treeopt("list", "--debug", status=1).stderr


def test_calibrate_refuses_an_existing_file_before_any_work(shared: Path) -> None:
    """A calibration took long: without --force it stays, and nothing is loaded."""
    Path("c.safetensors").write_text("precious")
    begin = ["calibrate", "--heads", "no-such-heads/", "--prompts", shared / OPENINGS]
    assert error_number(treeopt(*begin, "-o", "c.safetensors", status=3)) == "E202"
    assert Path("c.safetensors").read_text() == "precious"
    assert error_number(treeopt(*begin, "-o", "no/such/c.safetensors", status=3)) == "E204"


def test_progress_is_lines_where_there_is_no_terminal(shared: Path) -> None:
    """Without a terminal: lines with count and share on standard error, none with -q."""
    arguments = ["calibrate", "--heads", shared / HEADS, "--prompts", shared / OPENINGS, "--limit", "4", "--force"]
    arguments += ["--max-new-tokens", "8", "--batch-size", "2"]
    told = treeopt(*arguments).stderr
    assert re.search(r"^calibrate 2/4 50% \d+ s left  answers", told, flags=re.MULTILINE)
    assert re.search(r"^calibrate 2/4 50% \d+ s left  head 1 top-1", told, flags=re.MULTILINE)
    assert treeopt(*arguments, "-q").stderr == ""


@pytest.mark.slow
def test_interrupt_exits_130_and_is_resumed(shared: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle: exit 130, the batch in flight is stored, and --resume ends with the unbroken bytes."""
    command = [sys.executable, "-m", "treeopt", "calibrate", "--heads", str(shared / HEADS)]
    rest = ["--prompts", str(shared / OPENINGS), "--limit", "9", "--batch-size", "3", "--max-new-tokens", "100"]
    command += rest
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background shells hand it down ignored
    )
    assert process.stderr is not None
    for line in process.stderr:  # the first batch is finished
        if line.startswith("calibrate "):
            break
    os.kill(process.pid, signal.SIGINT)
    said = process.stderr.read()
    assert process.wait(timeout=60) == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    [folder] = tmp_path.iterdir()
    assert folder.name == "calibration.safetensors.partial"
    stored = len(list(folder.glob("*.safetensors")))
    assert 1 <= stored < 6
    assert "--resume" in said
    arguments = ["calibrate", "--heads", shared / HEADS, *rest]
    assert error_number(treeopt(*arguments, status=3)) == "E202"
    assert "max_new_tokens: started with 100, now 80" in error_of(
        "E205", *arguments, "--resume", "--max-new-tokens", "80"
    )
    treeopt(*arguments, "--resume")
    treeopt(*arguments, "-o", "unbroken.safetensors")
    names = ["calibration.safetensors", "unbroken.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert len({(tmp_path / name).read_bytes() for name in names}) == 1


def test_json_mode_prints_nothing_but_json() -> None:
    """A wrong command line is an object on standard error too."""
    command = [sys.executable, "-m", "treeopt", "build", "--nodes", "0", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert json.loads(done.stderr)["error"] == "usage"
