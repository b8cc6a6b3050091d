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
from looped import looped
from program import error_number, treeopt, treeopt_json

from treeopt.cli.app import COMMANDS
from treeopt.files.calibrations import save_calibration
from treeopt.files.trees import load_tree, save_tree
from treeopt.tree import Tree

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
def test_build_respects_its_limits() -> None:
    """--max-depth and --max-rank cut the tree."""
    data = treeopt_json("build", "--nodes", "40", "--max-depth", "2", "--max-rank", "3", "-o", "t.yaml")
    assert max(map(len, data["paths"])) == 2
    assert max(max(path) for path in data["paths"]) == 3
    assert treeopt_json("build", "--nodes", "40", "--max-rank", "1", "-o", "t.yaml")["top_k"] == 2


@pytest.mark.usefixtures("calibration_file")
def test_build_beyond_all_value_warns() -> None:
    """A budget larger than what has value gives the real size and a warning."""
    result = treeopt("build", "--nodes", "1000000", "--max-rank", "1", "--max-depth", "1", "-o", "t.yaml")
    assert "warning: 3 nodes, not 1000000" in result.stderr


def test_build_without_calibration_names_the_command() -> None:
    """The default calibration file is missing: exit 3 and the line to run."""
    result = treeopt("build", status=3)
    assert error_number(result) == "E201"
    assert "treeopt calibrate --model MODEL" in result.stderr


def test_compile_and_render_take_zoo_names() -> None:
    """A zoo name works wherever a tree file does; outputs are named after it and overwritten freely."""
    for _ in range(2):
        data = treeopt_json("compile", "mc_sim_7b_63")
        assert data["shapes"]["retrieve_indices"] == [42, 5]
        treeopt("render", "mc_sim_7b_63")
    assert Path("mc_sim_7b_63.safetensors").stat().st_size > 1000
    assert Path("mc_sim_7b_63.svg").read_text().startswith("<svg")
    assert "digraph" in (treeopt("render", "mc_sim_7b_63", "-o", "t.dot"), Path("t.dot").read_text())[1]


def test_list_and_show() -> None:
    """The zoo is listed; a tree is shown as text and replayed over a calibration."""
    assert "mc_sim_7b_63\t64\t4\tMedusa, arXiv:2401.10774\n" in treeopt("list").stdout
    assert len(treeopt_json("list")["trees"]) == 10
    save_calibration(random_calibration(2), "c.safetensors")
    save_tree(Tree.chain(3), "chain.yaml")
    text = treeopt("show", "chain.yaml", "--calibration", "c.safetensors").stdout
    assert "╙── root" in text
    assert "tokens per step" in text
    data = treeopt_json("show", "chain.yaml", "--calibration", "c.safetensors")
    assert data["replay"]["tokens_per_step"] > 1
    assert data["paths"] == [[0], [0, 0], [0, 0, 0]]


@looped(
    ("content", "number"),
    [
        ("", "E203"),
        ("schema: treeopt.tree/1\nnodes: 2\npaths:\n- {path: [0, 0]}\n", "E203"),
        ("schema: treeopt.tree/2\n", "E203"),
    ],
)
def test_broken_tree_is_one_error(content: str, number: str) -> None:
    """A tree file that is not one ends every command with exit 3 and its place."""
    Path("bad.yaml").write_text(content)
    for arguments in (["compile", "bad.yaml"], ["render", "bad.yaml"], ["show", "bad.yaml"]):
        result = treeopt(*arguments, status=3)
        assert error_number(result) == number
        assert re.search(r"bad\.yaml:\d+:\d+", result.stderr)
    assert sorted(path.name for path in Path().iterdir()) == ["bad.yaml"]


def test_error_as_json() -> None:
    """With --json the error is one object on standard error."""
    result = treeopt("show", "mc_sim_7b_36", "--json", status=3)
    error = json.loads(result.stderr)
    assert (error["error"], error["exit_status"], result.stdout) == ("E104", 3, "")
    assert "mc_sim_7b_63" in error["fix"]


def test_unexpected_error_is_a_bug_with_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """What we did not foresee says that it is a bug, and shows its traceback only when asked."""

    def fail() -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("treeopt.cli.list_command.zoo", fail)
    result = treeopt("list", status=1)
    assert "this is a bug" in result.stderr
    assert "Traceback" not in result.stderr
    assert "Traceback" in treeopt("list", "--debug", status=1).stderr


def test_usage_errors_exit_2() -> None:
    """What click refuses exits 2."""
    treeopt("build", "--nodes", "0", status=2)
    treeopt("calibrate", "--model", "x", status=2)
    treeopt("no-such-command", status=2)
    treeopt("calibrate", "--heads", "x", status=2)


def test_calibrate_refuses_an_existing_file_before_any_work(shared: Path) -> None:
    """A calibration took long: without --force it stays, and nothing is loaded."""
    Path("c.safetensors").write_text("precious")
    begin = ["calibrate", "--heads", "no-such-heads/", "--prompts", shared / OPENINGS]
    assert error_number(treeopt(*begin, "-o", "c.safetensors", status=3)) == "E202"
    assert Path("c.safetensors").read_text() == "precious"
    assert error_number(treeopt(*begin, "-o", "no/such/c.safetensors", status=3)) == "E204"


def test_calibrate_errors_are_clear(shared: Path) -> None:
    """A missing folder, a missing prompt file, prompts without a field, and an unreachable hub."""
    Path("bad.json").write_text('[{"foo": 1}]')
    heads, openings = shared / HEADS, shared / OPENINGS
    cases: list[tuple[Path | str, Path | str, str, int]] = [
        ("no-such-heads/", openings, "E201", 3),
        (heads, "no-such.json", "E201", 3),
        (heads, "bad.json", "E302", 3),
        ("owner/heads", openings, "E301", 4),
        (heads, "alpaca_eval", "E301", 4),
        (heads, "owner/prompts", "E301", 4),
        (shared / "models/tinystories-260k", openings, "E211", 3),
    ]
    for head, prompts, number, status in cases:
        result = treeopt("calibrate", "--heads", head, "--prompts", prompts, "-q", status=status)
        assert error_number(result) == number, (head, prompts)
    assert not Path("calibration.safetensors").exists()


def test_whole_job_on_the_real_model(shared: Path) -> None:
    """Calibrate, build, validate: the figures agree with each other, and force overwrites with equal bytes."""
    model = ["--heads", shared / HEADS, "--prompts", shared / OPENINGS, "--limit", "8", "--max-new-tokens", "32"]
    data = treeopt_json("calibrate", *model, "--batch-size", "1")
    assert (data["heads"], data["prompts"], data["skipped"], data["positions"]) == (5, 8, 0, 8 * 32)
    assert data["trials"] == [8 * (32 - h) for h in range(1, 6)]
    assert [len(row) for row in data["accuracy"]] == [32] * 5
    first = Path("calibration.safetensors").read_bytes()
    treeopt("calibrate", *model, "--batch-size", "1", "--force", "-q")
    assert Path("calibration.safetensors").read_bytes() == first
    built = treeopt_json("build", "--nodes", "24", "-o", "t.yaml")
    found = treeopt_json("validate", *model, "--tree", "t.yaml")
    assert found["lossless"] is True
    assert found["tokens"] == 8 * 32
    assert found["tokens_per_step"] == found["tokens"] / found["steps"] == found["predicted_tokens_per_step"]
    # The very texts that were calibrated: expected = measured.
    assert found["expected_tokens_per_step"] == built["expected_tokens_per_step"]["replay"]
    assert found["tokens_per_step"] == pytest.approx(found["expected_tokens_per_step"], abs=1e-6)
    assert found["speedup"] == pytest.approx(found["tokens_per_step"] / found["overhead"])
    assert found["tokens_per_second"].keys() == {"tree", "autoregressive", "generate", "prompt_lookup"}
    text = treeopt("validate", *model, "--tree", "t.yaml").stdout
    assert "lossless        yes: 8/8 texts" in text
    assert "steps agree on 8/8 texts" in text


def test_validate_refuses_a_tree_deeper_than_the_heads(shared: Path) -> None:
    """Six heads asked of five: exit 3."""
    save_tree(Tree.chain(6), "deep.yaml")
    arguments = ["validate", "--heads", shared / HEADS, "--prompts", shared / OPENINGS, "--tree", "deep.yaml", "-q"]
    assert error_number(treeopt(*arguments, status=3)) == "E101"


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
    refused = treeopt(*arguments, "--resume", "--max-new-tokens", "80", status=3)
    assert error_number(refused) == "E205"
    assert "max_new_tokens: started with 100, now 80" in refused.stderr
    treeopt(*arguments, "--resume")
    treeopt(*arguments, "-o", "unbroken.safetensors")
    names = ["calibration.safetensors", "unbroken.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert len({(tmp_path / name).read_bytes() for name in names}) == 1


def test_closed_pipe_ends_quietly() -> None:
    """`treeopt show ... | head -1` prints no error."""
    line = f"{sys.executable} -m treeopt show mc_sim_7b_63 | head -1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "64 nodes, depth 4, 42 leaves\n"
    assert done.stderr == ""


def test_cheap_output_does_not_replace_a_calibration(calibration_file: str) -> None:
    """compile, build and render refuse to write over hours of work: E202, and the file stays."""
    before = Path(calibration_file).read_bytes()
    for arguments in (["compile", "mc_sim_7b_63"], ["render", "mc_sim_7b_63"], ["build"]):
        number = error_number(treeopt(*arguments, "-o", calibration_file, status=3))
        assert number in ("E202", "E204")  # E204: build's own input
    assert Path(calibration_file).read_bytes() == before


def test_json_mode_prints_nothing_but_json() -> None:
    """A wrong command line is an object on standard error too."""
    command = [sys.executable, "-m", "treeopt", "build", "--nodes", "0", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert json.loads(done.stderr)["error"] == "usage"


def test_validate_finds_an_unusable_tree_before_decoding(shared: Path) -> None:
    """A rank that no prediction could score ends validate before any text is decoded."""
    save_tree(Tree(((300,),)), "wide.yaml")
    arguments = ["validate", "--heads", shared / HEADS, "--prompts", shared / OPENINGS, "--tree", "wide.yaml", "-q"]
    assert error_number(treeopt(*arguments, status=3)) == "E102"


def test_too_little_memory_is_not_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """MemoryError ends with the environment's exit status."""

    def fail() -> None:
        raise MemoryError("21 GiB")

    monkeypatch.setattr("treeopt.cli.list_command.zoo", fail)
    assert error_number(treeopt("list", status=4)) == "E403"
