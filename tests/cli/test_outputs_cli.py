"""What commands may replace: nothing of the user's without --force, and no input at all."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import click
import pytest
from helpers import random_calibration
from looped import looped
from program import error_number, treeopt

from treeopt.cli.app import COMMANDS
from treeopt.files.bundled import pocket
from treeopt.files.calibrations import save_calibration
from treeopt.files.trees import save_tree
from treeopt.tree import Tree

PRECIOUS = "precious"


@pytest.fixture(autouse=True)
def _files() -> None:
    """A tree, a calibration, a model with heads and prompts."""
    save_tree(Tree.chain(2), "t.yaml")
    save_calibration(random_calibration(1), "calibration.safetensors")
    Path("prompts.txt").write_text("Once upon a time\n")
    shutil.copytree(pocket(), "model")


def refused(*arguments: str | Path, target: str | Path) -> str:
    """The number of the error of a command that must leave its target as it is."""
    before = Path(target).read_bytes()
    number = error_number(treeopt(*arguments, status=3))
    assert Path(target).read_bytes() == before
    return number


def test_every_command_that_writes_has_force() -> None:
    """A command that writes a file has --force, and no other."""
    for name in COMMANDS:
        command: click.Command = importlib.import_module(f"treeopt.cli.{name}_command").run
        options = {option for parameter in command.params for option in parameter.opts}
        writes = {"--output", "--svg"} & options
        assert bool(writes) == ("--force" in options), name


def test_weights_of_a_model_are_kept() -> None:
    """No output replaces a model's weights or its config."""
    weights, config = Path("model/model.safetensors"), Path("model/config.json")
    for target in (weights, config):
        assert refused("compile", "t.yaml", "-o", target, target=target) == "E202"
        assert refused("build", "-o", target, target=target) == "E202"
        assert refused("render", "t.yaml", "-o", target, target=target) == "E202"


@looped("force", [[], ["--force"]])
def test_inputs_of_calibrate_are_kept(force: list[str]) -> None:
    """Heads, prompts, answers and drafter are never replaced, nor is the base that the heads' config names."""
    heads = Path("model/heads/medusa_lm_head.safetensors")
    given = ["calibrate", "--heads", "model/heads", "--model", "model", *force]
    for target in (heads, Path("model/heads/config.json"), Path("model/model.safetensors")):
        assert refused(*given, "--prompts", "prompts.txt", "-o", target, target=target) == "E204"
    assert refused(*given, "--prompts", "prompts.txt", "-o", "prompts.txt", target="prompts.txt") == "E204"
    assert refused(*given, "--responses", "prompts.txt", "-o", "prompts.txt", target="prompts.txt") == "E204"
    shutil.copy("calibration.safetensors", "d.safetensors")
    more = ["--prompts", "prompts.txt", "--drafter", "d.safetensors", "-o", "d.safetensors"]
    assert refused(*given, *more, target="d.safetensors") == "E204"


def test_base_that_the_heads_name_is_kept() -> None:
    """The base is an input also where only the heads' config names it."""
    config = Path("model/heads/config.json")
    config.write_text(config.read_text().replace("pocket", "model"))
    arguments = ["calibrate", "--heads", "model/heads", "--prompts", "prompts.txt", "--force", "-q"]
    target = Path("model/model.safetensors")
    assert refused(*arguments, "-o", target, target=target) == "E204"
    assert "is an input" in treeopt(*arguments, "-o", target, status=3).stderr


@looped("force", [[], ["--force"]])
def test_inputs_of_cheap_commands_are_kept(force: list[str]) -> None:
    """A tree, a calibration and a profile are never replaced by what is made from them."""
    Path("profile.yaml").write_text(PRECIOUS)
    cases = [
        (["compile", "t.yaml"], "t.yaml"),
        (["render", "t.yaml"], "t.yaml"),
        (["build"], "calibration.safetensors"),
        (["build", "--kind", "dynamic"], "calibration.safetensors"),
        (["build", "--profile", "profile.yaml", "--nodes", "auto"], "profile.yaml"),
        (["profile", "--drafter", "calibration.safetensors"], "calibration.safetensors"),
        (["learn", "--prompts", "prompts.txt", "--heads", "model/heads"], "prompts.txt"),
        (["distill", "--prompts", "prompts.txt"], "prompts.txt"),
        (["distill", "--self-talk", "1", "--exclude", "prompts.txt"], "prompts.txt"),
    ]
    for arguments, target in cases:
        assert refused(*arguments, *force, "-o", target, target=target) == "E204", arguments


@looped("output", ["-", "x" * 300 + ".svg", "no/such/p.svg", "model", "/proc/version", "/dev/stdout", "t.yaml/x.svg"])
def test_output_that_cannot_be_written_is_one_error(output: str) -> None:
    """Wrong names and places end with status 3 and E202 or E204, never with an exception."""
    for command in (["render", "t.yaml"], ["compile", "t.yaml"], ["build"], ["profile"], ["learn"], ["calibrate"]):
        assert error_number(treeopt(*command, "-o", output, status=3)) in ("E202", "E204"), command


def test_note_that_cannot_be_written_is_found_first() -> None:
    """Nothing is written or decoded where the note of an output cannot be."""
    Path("t.json.treeopt.yaml").mkdir()
    assert error_number(treeopt("export", "t.yaml", "--for", "trtllm", "-o", "t.json", status=3)) == "E204"
    assert not Path("t.json").exists()
