"""`treeopt reproduce`: files of every kind are made again; changed inputs and other results are told apart."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers import stretches
from looped import looped
from program import error_number, error_of, treeopt
from tiny import random_heads, tiny_base

from treeopt.cli.app import program
from treeopt.cli.reproduce_command import compare_files
from treeopt.files.bundled import zoo
from treeopt.files.calibrations import save_calibration
from treeopt.files.configurations import stored_configuration
from treeopt.files.trees import load_tree
from treeopt.models.head_files import save_heads

FEW = ("--limit", "2", "--max-new-tokens", "8", "--device", "cpu")
LEARN = ("--drafter", "ngram", "--learn-tokens", "60", "--levels", "2")
TINY = ("--num-heads", "1", "--batch-size", "2", "--length", "96", "--shared-lm-head", "--device", "cpu")


def files() -> dict[str, bytes]:
    """The content of every file below the working folder, by its name."""
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def reproduced(file: str, *more: str, status: int = 0) -> dict[str, Any]:
    """The result of reproduce, after checking that no file was changed, added or left behind."""
    before = files()
    result = CliRunner().invoke(program, ["reproduce", file, "--json", *more])
    assert result.exit_code == status, result.output + repr(result.exception)
    assert files() == before
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def saved(name: str, *arguments: str) -> str:
    """The name of a file with the result of a command with --json."""
    Path(name).write_text(treeopt(*arguments, "--json").stdout)
    return name


@pytest.mark.usefixtures("calibration")
def test_files_without_a_model_are_identical() -> None:
    """Trees, pictures, compiled trees, figures, profiles, files of engines and merged calibrations."""
    for i, name in enumerate(("even", "odd")):
        save_calibration(stretches(1).select(range(i, 60, 2)), f"{name}.safetensors")
    lines = {
        "tree.yaml": "build --nodes 9",
        "both.yaml": "build --calibration even.safetensors --calibration odd.safetensors --nodes 6",
        "tree.svg": "render tree.yaml --title a--b\U0001f600",
        "tree.dot": "render mc_sim_7b_63",
        "tree.safetensors": "compile tree.yaml",
        "curve.svg": "curve --largest 6",
        "profile.yaml": "plan --model llama-7b --device-preset a100-80gb-pcie --nodes 4",
        "small.yaml": "plan --model llama-7b --device-preset l4 --nodes 2 --host-seconds 5e-05 --chart chart.svg",
        "medusa.json": "export tree.yaml --for medusa",
        "read.yaml": "import medusa.json",
        "merged.safetensors": "merge even.safetensors odd.safetensors",
        "report.html": "report --calibration calibration.safetensors --tree tree.yaml --largest 4",
    }
    for output, line in lines.items():
        treeopt(*line.split(), "-o", output)
    for file in (*lines, "chart.svg"):
        found = reproduced(file)
        assert (file, found["verdict"], found["difference"]) == (file, "identical", None)
    assert reproduced("tree.yaml")["command"] == "treeopt build --nodes 9"
    assert reproduced("tree.svg")["command"] == "treeopt render tree.yaml --title 'a--b\U0001f600'"


@pytest.mark.usefixtures("calibration")
def test_title_of_a_report_is_no_path() -> None:
    """Paths of a report are stored without folders, and its title as it was given."""
    treeopt("report", "--calibration", "calibration.safetensors", "--title", "Latency of /v1/chat", "-o", "r.html")
    assert stored_configuration("r.html")["report"]["title"] == "Latency of /v1/chat"


@pytest.mark.usefixtures("calibration")
def test_results_of_any_name_and_of_converted_heads() -> None:
    """A result in JSON is known by its content; that of `heads convert` names its folder."""
    treeopt("build", "--nodes", "4", "-o", "named.yaml")
    Path("show.out").write_text(treeopt("show", "named.yaml", "--json").stdout)
    assert reproduced("show.out")["verdict"] == "identical"
    save_heads(random_heads(tiny_base("llama"), 2), Path("heads"), base="base")
    converted = saved("convert.json", "heads", "convert", "heads", "--for", "vllm", "-o", "for-vllm")
    assert reproduced(converted)["verdict"] == "equal"


@pytest.mark.usefixtures("calibration")
def test_results_without_a_model_are_equal() -> None:
    """A result of --json is made again with what its command writes, in another place; only that name differs."""
    found = reproduced(saved("build.json", "build", "--nodes", "9", "-o", "t.yaml"))
    assert (found["verdict"], found["difference"]) == ("equal", None)
    assert reproduced(saved("show.json", "show", "t.yaml"))["verdict"] == "identical"
    plan = saved("plan.json", "plan", "--model", "llama-7b", "--device-preset", "l4", "--host-seconds", "5e-05")
    Path(plan).write_text(Path(plan).read_text().replace('"model":', '"note": "\\ud83d\\ude00", "model":', 1))
    assert "host-seconds: 5.0e-05" in treeopt("show", plan, "--options").stdout
    Path("host.yaml").write_text("plan:\n  host-seconds: 5e-5\n")  # a text to YAML 1.1
    treeopt("plan", "--model", "llama-7b", "--device-preset", "l4", "--config", "host.yaml")


@pytest.mark.slow
def test_calibrations_and_drafters_are_identical() -> None:
    """With a drafter that is learned and named in the file; then the drafter, and trees for it in another folder."""
    treeopt("calibrate", *LEARN, *FEW, "-o", "c.safetensors")
    treeopt("build", "--calibration", "c.safetensors", "--kind", "dynamic", "--nodes", "4", "-o", "policy.yaml")
    Path("sub").mkdir()
    treeopt("build", "--calibration", "c.safetensors", "--nodes", "4", "-o", "sub/tree.yaml")
    treeopt("calibrate", "--drafter", "c.drafter.safetensors", *FEW, "-o", "sub/traced.safetensors")
    for file in (
        *("c.safetensors", "c.drafter.safetensors"),
        *("policy.yaml", "sub/tree.yaml", "sub/traced.safetensors"),
    ):
        found = reproduced(file)
        assert (file, found["verdict"], found["difference"]) == (file, "identical", None)


def test_shards_are_identical() -> None:
    """A shard is made with its own number, which is no option of the configuration; so is the merged calibration."""
    for i in range(2):
        treeopt("calibrate", *FEW, "--batch-size", "1", "--shard", f"{i}/2", "-o", f"{i}.safetensors")
    treeopt("merge", "0.safetensors", "1.safetensors", "-o", "all.safetensors")
    for file in ("1.safetensors", "all.safetensors"):
        assert reproduced(file)["verdict"] == "identical", file


def test_measurements_are_equal_but_for_seconds() -> None:
    """Profiles, validations, decodings and learned plans; a result that missed a threshold is compared too."""
    treeopt("profile", "--sizes", "2", "--context", "8", "--repeats", "1", "--device", "cpu", "-o", "p.yaml")
    treeopt("build", "--calibration", saved_calibration(), "--nodes", "4", "-o", "tree.yaml")
    decode = ("--tree", "tree.yaml", "--max-new-tokens", "6", "--device", "cpu")
    result = CliRunner().invoke(
        program, ["validate", "--limit", "1", *decode, "--repeats", "1", "--min-tokens-per-step", "9", "--json"]
    )
    assert result.exit_code == 6
    Path("validate.json").write_text(result.stdout)
    result = CliRunner().invoke(program, ["generate", *decode, "--json"], input="import os\n")
    Path("generate.json").write_text(result.stdout)
    result = CliRunner().invoke(program, ["generate", "-", *decode, "--json"], input="import os\n")
    Path("dash.json").write_text(result.stdout)
    for file in ("dash.json", "p.yaml", "validate.json", "generate.json"):
        found = reproduced(file)
        assert (file, found["verdict"]) == (file, "equal")


def saved_calibration() -> str:
    """The name of a calibration of the built-in heads."""
    treeopt("calibrate", *FEW, "-o", "c.safetensors")
    return "c.safetensors"


@pytest.mark.slow
def test_texts_and_heads_are_identical() -> None:
    """Distilled texts by the note beside them, and heads in a folder."""
    talk = ("--self-talk", "8", "--max-new-tokens", "24", "--device", "cpu")
    treeopt("distill", *talk, "-o", "texts.jsonl")
    treeopt("train", "--data", "texts.jsonl", *TINY, "--steps", "1", "-o", "heads")
    assert reproduced("texts.jsonl")["verdict"] == "identical"
    assert reproduced("heads")["verdict"] == "identical"
    assert stored_configuration("texts.jsonl")["distill"]["self-talk"] == 8
    joint = ("--stage", "2", "--rank", "1", "--force", "-o", "joint")
    treeopt("train", "--data", "texts.jsonl", *TINY, "--steps", "1", *joint)
    for folder in ("joint", "joint/adapter"):
        assert reproduced(folder)["verdict"] in ("identical", "equal"), folder


@looped(("to", "made"), [("vllm", "out"), ("medusa", "out"), ("nxdi", "out/medusa_heads.pt")])
def test_converted_heads_are_identical(to: str, made: str) -> None:
    """Heads for engines, by their config or, where they have none, by the note beside the file."""
    save_heads(random_heads(tiny_base("llama"), 2), Path("heads"), base="base")
    treeopt("heads", "convert", "heads", "--for", to, "-o", "out")
    assert reproduced(made)["verdict"] == "identical"
    save_heads(random_heads(tiny_base("llama"), 2, seed=1), Path("heads"), base="base", overwrite=True)
    assert reproduced(made, status=6)["verdict"] == "differs"


@pytest.mark.usefixtures("calibration")
def test_changed_and_missing_inputs_are_refused() -> None:
    """E207 for another content, before the command runs, and E201 for a missing file; --map says where it is."""
    treeopt("build", "--nodes", "9", "-o", "tree.yaml")
    Path("moved").mkdir()
    shutil.move("calibration.safetensors", "moved/c.safetensors")
    before = files()
    result = error_of("E201", "reproduce", "tree.yaml")
    assert "calibration.safetensors" in result
    assert "--map OLD=NEW" in result
    found = reproduced("tree.yaml", "--map", "calibration.safetensors=moved/c.safetensors")
    assert found["verdict"] == "equal"
    save_calibration(stretches(2), "calibration.safetensors")
    for more in ([], ["--map", "calibration.safetensors=tree.yaml"]):
        assert "an input changed since tree.yaml was made" in error_of("E207", "reproduce", "tree.yaml", *more)
    Path("calibration.safetensors").unlink()
    assert files() == before


@pytest.mark.usefixtures("calibration")
@looped("text", ["calibration.safetensors", "=a", "a=", "nothing=tree.yaml"])
def test_wrong_maps_are_usage_errors(text: str) -> None:
    """A map has two names, and the first is that of an input."""
    treeopt("build", "--nodes", "9", "-o", "tree.yaml")
    treeopt("reproduce", "tree.yaml", "--map", text, status=2)


def test_folder_of_inputs_is_mapped() -> None:
    """A folder that was renamed is given once, for all that is in it."""
    Path("a").mkdir()
    save_calibration(stretches(1), "a/c.safetensors")
    treeopt("build", "--calibration", "a/c.safetensors", "--nodes", "5", "-o", "tree.yaml")
    Path("a").rename("b")
    assert reproduced("tree.yaml", "--map", "a=b")["verdict"] == "equal"


def error_number_of_last(text: str) -> str:
    """The number of the only error in a text."""
    [number] = re.findall(r"^error\[(E\d+)\]", text, flags=re.MULTILINE)
    return str(number)


@pytest.mark.usefixtures("calibration")
def test_other_result_is_shown_with_its_place() -> None:
    """E506 with old and new values: here of a tree with a value and a path that its command does not give."""
    treeopt("build", "--nodes", "9", "-o", "tree.yaml")
    text = Path("tree.yaml").read_text()
    old = re.search(r"path: \[0\], value: ([0-9.]+)", text)
    assert old is not None
    Path("tree.yaml").write_text(text.replace(old[0], "path: [0], value: 0.25"))
    result = treeopt("reproduce", "tree.yaml", status=6)
    assert error_number_of_last(result.stderr) == "E506"
    assert f"paths.0.value: 0.25 -> {old[1]}" in result.stderr
    assert "tree.yaml is different" in result.stdout
    found = reproduced("tree.yaml", status=6)
    assert found["difference"] == {"place": "paths.0.value", "old": 0.25, "new": float(old[1])}


@pytest.mark.usefixtures("calibration")
def test_file_without_hashes_is_refused_with_its_command() -> None:
    """A file of an earlier version names the command; a file without a configuration says so."""
    treeopt("build", "--nodes", "9", "-o", "tree.yaml")
    kept = re.sub(r"  inputs:\n.*?(?=paths:)", "", Path("tree.yaml").read_text(), flags=re.DOTALL)
    Path("old.yaml").write_text(kept)
    assert "treeopt build --nodes 9" in error_of("E203", "reproduce", "old.yaml")
    assert error_number(treeopt("reproduce", "calibration.safetensors", status=3)) == "E203"
    assert error_number(treeopt("reproduce", "no.yaml", status=3)) == "E201"


@pytest.mark.usefixtures("calibration")
def test_error_of_the_command_is_that_of_reproduce() -> None:
    """The command fails as it would alone, and leaves nothing."""
    treeopt("build", "--nodes", "9", "-o", "tree.yaml")
    treeopt("render", "tree.yaml", "-o", "tree.svg")
    text = Path("tree.svg").read_text().replace('"theme": "auto"', '"theme": "none"')
    Path("bad.svg").write_text(text)
    before = files()
    result = treeopt("reproduce", "bad.svg", status=3)
    assert error_number_of_last(result.stderr) == "E203"
    assert "theme" in result.stderr
    assert files() == before


@pytest.mark.usefixtures("calibration")
def test_note_is_that_of_its_file_alone() -> None:
    """A note beside a file is not taken for that of a file with another content, nor is another file for a note."""
    treeopt("export", "mc_sim_7b_63", "--for", "medusa", "-o", "medusa.json")
    assert stored_configuration("medusa.json")["export"] == {"tree": "mc_sim_7b_63", "for": "medusa"}
    assert stored_configuration("medusa.json.treeopt.yaml") == stored_configuration("medusa.json")
    Path("medusa.json").write_text("[[0]]")
    assert "was changed" in error_of("E203", "reproduce", "medusa.json")
    Path("medusa.json.treeopt.yaml").write_text("nodes: 3\n")
    assert "is not a note of treeopt" in treeopt("show", "medusa.json", "--options", status=3).stderr


def test_picture_of_seconds_is_refused() -> None:
    """The speeds in the bars of compare are never the same again; its JSON is compared."""
    options = (
        "--methods",
        "lookup",
        "--test-limit",
        "1",
        "--learn-limit",
        "1",
        "--max-new-tokens",
        "4",
        "--repeats",
        "1",
    )
    treeopt("compare", *options, "--device", "cpu", "--svg", "bars.svg")
    assert error_number(treeopt("reproduce", "bars.svg", status=3)) == "E203"


@looped("name", sorted(zoo()))
def test_bundled_tree_is_published_or_made_here(name: str) -> None:
    """A tree in trees/ names its publication, or stores how it is made and is made again by this test."""
    path = zoo()[name]
    if load_tree(name).source.get("reference"):
        treeopt("show", name, "--for", "json")
        return
    os.chdir(path.parent.parent)
    treeopt("reproduce", path)


@pytest.mark.usefixtures("calibration")
def test_edited_records_are_refused() -> None:
    """E207 for hashes that are no texts."""
    treeopt("build", "--nodes", "5", "-o", "tree.yaml")
    text = Path("tree.yaml").read_text()
    edited = re.sub(r'(calibration.safetensors"?): "?\w{64}"?', r"\1: 5", text)
    assert edited != text
    Path("tree.yaml").write_text(edited)
    assert error_number_of_last(treeopt("reproduce", "tree.yaml", status=3).stderr) == "E207"


def test_what_is_measured_is_left_out() -> None:
    """Seconds and what follows from them, in the results of commands that measure, and rows chosen by them."""
    rows = [{"method": "ngram, static", "nodes": 16}, {"method": "ngram, static, fastest size", "nodes": 4}]
    old = {"rows": rows, "speedup": 1.5, "tokens_per_step": 2.0, "recommended": "a"}
    for change, name, place in (
        ({"speedup": 2.5, "recommended": "b"}, "compare", None),
        ({"rows": [rows[0], {**rows[1], "nodes": 8}]}, "compare", None),
        ({"rows": [{**rows[0], "nodes": 8}, rows[1]]}, "compare", "rows.0.nodes"),
        ({"tokens_per_step": 3.0, "speedup": 2.5}, "learn", "tokens_per_step"),
        ({"speedup": 2.5}, "plan", "speedup"),
    ):
        for file, data in (("old.json", old), ("new.json", {**old, **change})):
            Path(file).write_text(json.dumps(data))
        _, found = compare_files(Path("old.json"), Path("new.json"), name)
        assert (found and found["place"]) == place
