"""`--compile` and `--device-map`: what runs compiled or divided, and what these options exclude."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from program import all_commands, error_of, treeopt, treeopt_json
from torch._inductor.exc import InvalidCxxCompiler

from treeopt.cli import options as options_module
from treeopt.cli.console import Console
from treeopt.cli.drafters import load_draft_model
from treeopt.evaluate.profile import TimedStep
from treeopt.files.drafters import load_drafter
from treeopt.files.profiles import load_profile

MODEL = ("--model", "pocket", "--prompts", "pocket")
FEW = ("--limit", "4", "--max-new-tokens", "8")


@pytest.mark.slow
def test_learn_recommends_it(captures: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All sizes are timed both ways, each compiled once; the file names the faster way, and generate says so."""

    def seconds(step: TimedStep) -> float:
        step.decoder.step(step.rows)
        step.rows.rewind(step._start)
        return 0.001 if step.decoder.forward.fixed and step.decoder.trees.nodes == 3 else 0.01

    monkeypatch.setattr(TimedStep, "seconds", seconds)
    file = tmp_path / "d.safetensors"
    line = ("learn", *MODEL, *FEW, "--learn-tokens", "300", "--nodes", "3", "--nodes", "4", "--compile", "-o", file)
    found = treeopt_json(*line)
    assert captures.frame_count == 3  # one, three and four nodes: static and per-step trees of a size share theirs
    ways = [one["compiled"] for one in found["sizes"]]
    assert ways == [False] * 5 + [True] * 5
    assert found["recommended"]["compiled"]
    assert found["recommended"]["nodes"] == 3
    assert load_drafter(file).timed_compiled
    again = ("generate", "import os", "--model", "pocket", "--max-new-tokens", "4", "--drafter", file)
    eager, compiled = treeopt(*again), treeopt(*again, "--compile")
    assert eager.stdout == compiled.stdout
    assert "was timed with --compile" in eager.stderr
    assert "was timed with --compile" not in compiled.stderr
    assert "float32, compiled on cpu" in compiled.stderr


@pytest.mark.slow
def test_compare_does_both(captures: Any) -> None:
    """A table for each way; the texts and tokens per step are the same, and the fastest way is named."""
    line = ("compare", *MODEL, *FEW, "--repeats", "1", "--methods", "recycling", "--compile")
    settings = treeopt_json(*line)["settings"]
    assert captures.frame_count == 3  # one node, 16 and 81
    eager, compiled = (
        [(row["method"], row["mean_acceptance_length"], row["lossless"]) for row in settings[setting]["rows"]]
        for setting in ("float32", "float32, compiled")
    )
    assert len(eager) == 4
    assert eager == compiled
    assert {lossless for *_, lossless in compiled} == {True}
    assert "--nproc takes one --dtype, and no --compile" in treeopt(*line, "--force", "--nproc", "2", status=2).stderr


@pytest.mark.slow
def test_validate_and_profile(captures: Any, tmp_path: Path) -> None:
    """Validate decodes the same texts; a profile says that it is of compiled forwards."""
    line = ("validate", *MODEL, *FEW)
    eager, compiled = treeopt_json(*line), treeopt_json(*line, "--compile")
    assert captures.frame_count == 2
    assert compiled["lossless"]
    assert compiled["tokens_per_step"] == eager["tokens_per_step"]
    file = tmp_path / "p.yaml"
    sizes = ("--sizes", "2,4", "--context", "12", "--repeats", "2")
    treeopt("profile", "--model", "pocket", *sizes, "--compile", "-o", file)
    assert captures.frame_count == 5
    assert load_profile(file).provenance["compiled"] is True


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C++ compiler the error says what to install, before anything is decoded."""

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none)
    assert "g++" in error_of("E401", "generate", "import os", "--model", "pocket", "--compile", status=4)


class Reached(Exception):
    """The end of what a test runs."""


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of one prompt; outputs go beside it."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "import os"}) + "\n")
    return file


def test_every_command_with_a_device_takes_a_map() -> None:
    """The two options go together."""
    both = [{"device", "device_map"} & {one.name for one in command.params} for _, command in all_commands()]
    assert all(len(found) != 1 for found in both)
    assert sum(map(bool, both)) >= 10


def test_map_excludes_a_device(prompts: Path) -> None:
    calibrate = ("calibrate", "--heads", "pocket", "--prompts", prompts)
    found = treeopt(*calibrate, "--device", "cpu", "--device-map", "auto", status=2)
    assert "give either --device or --device-map" in found.stderr


def test_map_excludes_several_processes(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By --nproc, and by torchrun; nothing is started or written."""
    calibrate = ("calibrate", "--heads", "pocket", "--prompts", prompts, "--device-map", "auto")
    assert "run one process" in treeopt(*calibrate, "--nproc", "2", status=2).stderr
    monkeypatch.setattr(options_module, "is_one_of_several", lambda: True)
    assert "run one process" in treeopt(*calibrate, status=2).stderr
    assert list(prompts.parent.iterdir()) == [prompts]


def test_draft_model_is_on_the_device_of_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the first accelerator, which may be full, nor divided."""
    options = {"draft": "d", "dtype": "auto", "device": "auto", "device_map": "auto"}
    base: Any = types.SimpleNamespace(device=torch.device("cuda", 1))

    def load(name: str, _: Any, **on: str) -> None:
        assert (name, on) == ("d", {"dtype": "auto", "device": "cuda:1"})
        raise Reached

    monkeypatch.setattr("treeopt.models.draft_files.load_draft", load)
    with pytest.raises(Reached):
        load_draft_model(Console(as_json=False), options, base)


def test_map_belongs_to_stage_1(prompts: Path) -> None:
    train = ("train", "--data", prompts, "-o", "heads", "--stage", "2", "--device-map", "auto")
    assert "--device-map belongs to --stage 1" in treeopt(*train, status=2).stderr


def test_map_is_the_cpu_without_an_accelerator(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of calibrate are those of --device cpu, so that shards of both can be merged."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # also where there is one
    calibrate = ("calibrate", "--heads", "pocket", "--prompts", prompts, "--max-new-tokens", "4")
    treeopt(*calibrate, "--device", "cpu", "-o", "one.safetensors")
    treeopt(*calibrate, "--device-map", "auto", "-o", "two.safetensors")
    assert Path("one.safetensors").read_bytes() == Path("two.safetensors").read_bytes()
    treeopt("reproduce", "one.safetensors", "--device-map", "auto")
