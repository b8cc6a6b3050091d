"""`--config`, and the configuration that files and results store."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from helpers import random_calibration
from looped import looped
from program import error_number, error_of, treeopt, treeopt_json

from treeopt.calibration import Calibration, Provenance, merged_provenance
from treeopt.cli.app import program
from treeopt.cli.configuration import (
    NOT_STORED,
    command_line,
    configuration_of,
    option_name,
    with_configuration,
)
from treeopt.files.configurations import command_lines, stored_configuration
from treeopt.files.trees import load_tree
from treeopt.version import VERSION

BUILT = {"build": {"nodes": 9, "max-rank": 4}}


def write(text: str) -> str:
    """The name of a configuration file with this text."""
    Path("run.yaml").write_text(text)
    return "run.yaml"


def nodes(*line: str) -> int:
    """The nodes of the tree that `build` makes with these options."""
    return int(treeopt_json("build", "--force", *line)["nodes"])


@pytest.mark.usefixtures("calibration")
def test_order_of_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line is before the file, that before the default; the environment sets no option."""
    file = write("nodes: 5\n")
    assert nodes() == 64
    assert nodes("--config", file) == 5
    assert nodes("--config", file, "--nodes", "9") == 9
    monkeypatch.setenv("TREEOPT_BUILD_NODES", "7")
    assert nodes() == 64


@pytest.mark.usefixtures("calibration")
def test_sections_and_other_commands() -> None:
    """An entry of the section counts first, entries of other commands are ignored, arguments are in lower case."""
    file = write("build: {nodes: 6}\nnodes: 5\nvalidate: {limit: 3}\n")
    assert nodes("--config", file) == 6
    assert nodes("--config", write("max-new-tokens: 5\nnodes: 4\n")) == 4
    assert treeopt_json("show", "--config", write("tree: mc_sim_7b_63\n"))["nodes"] == 64


def test_lists_and_flags(tasks: list[Calibration]) -> None:
    """A repeatable option takes a list, a flag true or false, an option with a file its name."""
    assert len(tasks) == 2
    file = write("calibration: [one.safetensors, two.safetensors]\nforce: true\nnodes: 8\n")
    found = treeopt_json("build", "--config", file)
    assert found["texts_fitted"] == 60
    assert found["configuration"]["build"]["calibration"] == ["one.safetensors", "two.safetensors"]
    assert treeopt_json("build", "--config", file)["nodes"] == 8  # --force
    assert nodes("--config", write("calibration: one.safetensors\nnodes: 8\n")) == 8


@looped(
    ("text", "places"),
    [
        ("nods: 5\n", ["run.yaml:1:7  nods: no command has this option; did you mean nodes?"]),
        ("build: {nods: 5}\n", ["run.yaml:1:15  build.nods: treeopt build has no such option; did you mean nodes?"]),
        ("buidl: {nodes: 5}\n", ["buidl: there is no such command; did you mean build?"]),
        ("nodes: [5]\n", ["run.yaml:1:8  nodes: takes one value"]),
        ("nodes: true\n", ["run.yaml:1:8  nodes: true is not a value of this option"]),
        ("nodes: null\n", ["run.yaml:1:8  nodes: has no value"]),
        ("nodes: few\n", ["run.yaml:1:8  nodes: 'few' is not a whole number or auto"]),
        ("force: 1\n", ["run.yaml:1:8  force: 1 is not true or false"]),
        ("kind: tall\nnodes: 0\n", ["run.yaml:1:7  kind: 'tall' is not one of", "run.yaml:2:8  nodes: 0 is not in"]),
        ("json: true\n", ["run.yaml:1:7  json: no command has this option"]),
        ("config: other.yaml\n", ["run.yaml:1:9  config: no command has this option"]),
        ("validate: {limit: 3}\n", ["run.yaml has no option of treeopt build"]),
        ("- nodes\n", ["run.yaml is no mapping"]),
        ("nodes: 010\n", ["run.yaml:1:8"]),
        ("nodes: 5\nnodes: 6\n", ["run.yaml:2:1"]),
        ("schema: treeopt.tree/1\npaths: []\n", ["run.yaml stores no configuration"]),
    ],
)
def test_wrong_files_are_errors_with_places(text: str, places: list[str]) -> None:
    """Unknown keys, wrong types and invalid values are one error with the place of each."""
    result = error_of("E203", "build", "--config", write(text))
    for place in places:
        assert place in result


@pytest.mark.usefixtures("calibration")
@looped(
    "given",
    [
        [],
        ["--nodes", "9"],
        ["--values", "joint", "--weights", "visits"],  # the defaults, which mean more where both are given
        ["--max-depth", "2", "--max-rank", "5"],
    ],
)
def test_stored_configuration_repeats_the_run(given: list[str]) -> None:
    """A tree that is built by the configuration of a tree is this tree, byte for byte."""
    treeopt("build", *given, "-o", "one.yaml")
    treeopt("build", "--config", "one.yaml", "-o", "other.yaml")
    assert Path("one.yaml").read_bytes() == Path("other.yaml").read_bytes()
    write(treeopt("show", "one.yaml", "--options").stdout)
    treeopt("build", "--config", "run.yaml", "-o", "third.yaml")
    assert Path("one.yaml").read_bytes() == Path("third.yaml").read_bytes()


@pytest.mark.usefixtures("calibration")
def test_every_kind_of_file_stores_its_configuration() -> None:
    """Trees, pictures, compiled trees and results have the options of their command; outputs are not among them."""
    found = treeopt_json("build", "--nodes", "9", "--max-rank", "4")
    assert found["configuration"]["build"] == BUILT["build"]
    assert found["configuration"]["defaults"]["values"] == "joint"
    assert not {"output", "force", "json", "quiet"} & found["configuration"]["defaults"].keys()
    assert stored_configuration("tree.yaml") == found["configuration"]
    for suffix in ("svg", "dot"):
        treeopt("render", "tree.yaml", "--title", "a--b -- c", "-o", f"tree.{suffix}")
        assert stored_configuration(f"tree.{suffix}")["render"] == {"tree": "tree.yaml", "title": "a--b -- c"}
    treeopt("compile", "tree.yaml")
    stored = stored_configuration("tree.safetensors")
    assert stored["compile"] == {"tree": "tree.yaml"}
    assert stored["inputs"] == {"tree.yaml": hashlib.sha256(Path("tree.yaml").read_bytes()).hexdigest()}
    assert stored["made-by"]["treeopt"] == VERSION
    treeopt("curve", "--largest", "8")
    assert stored_configuration("curve.svg")["curve"] == {"largest": 8}
    treeopt("plan", "--model", "llama-7b", "--device-preset", "a100-80gb-pcie", "--nodes", "4", "-o", "profile.yaml")
    assert stored_configuration("profile.yaml")["plan"]["nodes"] == [4]
    Path("result.json").write_text(json.dumps(found))
    assert stored_configuration("result.json") == found["configuration"]


def test_picture_with_a_configuration_is_xml(calibration: Calibration) -> None:
    """No text of the user ends the comment, and an unedited picture may still be replaced."""
    from xml.etree import ElementTree

    assert calibration.positions
    for _ in range(2):
        treeopt("render", "mc_sim_7b_63", "--title", "--> </svg> --", "-o", "tree.svg")
    root = ElementTree.fromstring(Path("tree.svg").read_text())
    assert root.tag.endswith("svg")


def measured(configuration: dict[str, Any], prompts: str = "p") -> Provenance:
    """The provenance of a calibration of these options and prompts."""
    found = with_configuration(random_calibration(1), {"calibrate": configuration} if configuration else {}).provenance
    return dataclasses.replace(found, prompts={prompts: "p.jsonl"})


def test_merged_configuration_is_that_of_every_part() -> None:
    """Of parts with other options none remain: `limit: 4` of two halves would make another calibration."""
    a, same = measured({"limit": 4, "skip": 0}), measured({"limit": 4, "skip": 0})
    assert merged_provenance(a, same).configuration == {"calibrate": {"limit": 4, "skip": 0}}
    assert merged_provenance(a, measured({"limit": 4, "skip": 4})).configuration == {}
    assert merged_provenance(a, measured({})).configuration == {}
    assert merged_provenance(a, measured({"limit": 4, "skip": 0}, "other prompts")).configuration == {}


@looped("third", [({"limit": 4}, "p"), ({"limit": 8}, "p"), ({}, "p"), ({"limit": 4}, "q")])
def test_order_of_merging_changes_no_configuration(third: tuple[dict[str, Any], str]) -> None:
    """Three calibrations in any order and grouping have the same provenance."""
    parts = [measured({"limit": 4}), measured({"limit": 4}), measured(*third)]
    found = [
        made
        for a, b, c in itertools.permutations(parts)
        for made in (merged_provenance(merged_provenance(a, b), c), merged_provenance(a, merged_provenance(b, c)))
    ]
    assert all(one == found[0] for one in found)
    assert found[0].configuration == ({"calibrate": {"limit": 4}} if third == ({"limit": 4}, "p") else {})


def test_a_stored_text_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    """Half of a surrogate pair in the header of an array file is one error."""
    header = rb'{"__metadata__": {"treeopt": "\ud800"}}'
    (tmp_path / "c.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert error_number(treeopt("show", str(tmp_path / "c.safetensors"), "--options", status=3)) == "E203"


def test_device_is_not_stored() -> None:
    """Shards of other devices have one configuration; the name of the device is among the versions."""
    command = program.get_command(click.Context(program), "calibrate")
    assert command is not None
    context = command.make_context("calibrate", ["--device", "cuda:1", "--seed", "3", "--shard", "1/2"])
    stored = configuration_of(context)
    assert stored["calibrate"] == {"seed": 3}
    assert "device" not in stored["defaults"]
    divided = command.make_context("calibrate", ["--device-map", "auto", "--seed", "3"])
    assert configuration_of(divided) == stored


@pytest.mark.usefixtures("calibration")
def test_configuration_of_another_command_is_refused() -> None:
    """The defaults of `build` are not those of `curve`, although both have the options."""
    treeopt("build", "--nodes", "5")
    assert "tree.yaml has no option of treeopt curve" in treeopt("curve", "--config", "tree.yaml", status=3).stderr


def parsed(*line: str) -> click.Context:
    """The context of a command, parsed as the program parses it."""
    name, *rest = line
    above = program.make_context("treeopt", [name])
    command = program.get_command(above, name)
    assert command is not None
    return command.make_context(name, rest, parent=above)


LINES = {
    "plain": ["generate", "Once upon a time", "--model", "a b", "--nodes", "3"],
    "dashes": ["generate", "--model", "a b", "--tree", "a tree.yaml", "--", "--nodes is no option here"],
    "stdin": ["generate", "-", "--model", "a b", "--no-chat-template"],
    "config": ["validate", "--config", "run.yaml", "--judge", "2"],
    "repeated": ["learn", "--nodes", "4", "--nodes", "8", "--prompts", "-two.jsonl", "--config", "run.yaml"],
}


@looped("line", LINES.values())
def test_printed_command_has_the_same_parameters(line: list[str]) -> None:
    """With a file in play, the command alone gives the same values."""
    write(
        "limit: 3\nvalidate: {tree: 'it''s.yaml', repeats: 2, chat-template: false, max-new-tokens: 9}\n"
        "learn: {drafter: 'heads+ngram', seed: 7, force: false, levels: 12}\ndefaults: {dtype: bfloat16}\n"
    )
    given = parsed(*line)
    command = command_line(given)
    program_name, *words = shlex.split(command)
    again = parsed(*words)
    assert program_name == "treeopt"
    assert again.params.pop("json")
    assert again.params == {name: value for name, value in given.params.items() if name != "json"}
    assert "--config" not in words
    assert {"validate": "9", "learn": "12", "generate": "a b"}[words[0]] in words


def test_every_flag_of_a_command_is_written_as_it_is_typed() -> None:
    """`--no-` turns off a flag that has it; a flag without it that is off is not written."""
    for name in ("generate", "validate", "compare", "build", "calibrate"):
        command = program.get_command(click.Context(program), name)
        assert command is not None
        for one in command.params:
            if isinstance(one, click.Option) and one.is_flag and one.name not in NOT_STORED:
                for value in (True, False) if one.secondary_opts else (True,):
                    [line] = command_lines({name: {option_name(one): value}})
                    assert shlex.split(line)[-1] in (*one.opts, *one.secondary_opts)


@pytest.mark.usefixtures("calibration")
def test_names_of_before_are_read() -> None:
    """A stored configuration with the names of options in 0.1 builds the same tree; the default number of ranks too."""
    treeopt("build", "--nodes", "9", "--max-rank", "4", "-o", "now.yaml")
    text = Path("now.yaml").read_text()
    Path("old.yaml").write_text(text.replace("batch-size: 1", "batch: 1"))
    treeopt("build", "--config", "old.yaml", "-o", "again.yaml")
    assert Path("again.yaml").read_text() == text
    write("build: {nodes: 9}\ndefaults: {top-k: 32}\n")
    treeopt("build", "--config", "run.yaml", "-o", "default.yaml")
    treeopt("build", "--nodes", "9", "-o", "plain.yaml")
    assert load_tree("default.yaml") == load_tree("plain.yaml")
