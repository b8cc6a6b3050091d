"""`--device-map`: the options that it excludes, and where there is nothing to divide the model among."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from program import all_commands, treeopt

from treeopt.cli import options as options_module
from treeopt.cli.console import Console
from treeopt.cli.drafters import load_draft_model


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

    monkeypatch.setattr("treeopt.models.given.load_draft", load)
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
