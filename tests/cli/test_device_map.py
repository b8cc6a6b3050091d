"""`--device-map`: the options that it excludes, and where there is nothing to divide the model among."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from program import all_commands, treeopt

from treeopt.cli import options as options_module

RUN = ("import os", "--heads", "pocket", "--max-new-tokens", "2")


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


def test_map_excludes_a_device() -> None:
    found = treeopt("generate", *RUN, "--device", "cpu", "--device-map", "auto", status=2)
    assert "give either --device or --device-map" in found.stderr


def test_map_excludes_several_processes(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By --nproc, and by torchrun; nothing is started or written."""
    calibrate = ("calibrate", "--model", "pocket", "--prompts", prompts, "--device-map", "auto")
    assert "run one process" in treeopt(*calibrate, "--nproc", "2", status=2).stderr
    monkeypatch.setattr(options_module, "is_one_of_several", lambda: True)
    assert "run one process" in treeopt("generate", *RUN, "--device-map", "auto", status=2).stderr
    assert list(prompts.parent.iterdir()) == [prompts]


def test_map_belongs_to_stage_1(prompts: Path) -> None:
    train = ("train", "--data", prompts, "-o", "heads", "--stage", "2", "--device-map", "auto")
    assert "--device-map belongs to --stage 1" in treeopt(*train, status=2).stderr


def test_map_is_the_cpu_without_an_accelerator(prompts: Path) -> None:
    """The files of calibrate are those of --device cpu, so that shards of both can be merged."""
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    calibrate = ("calibrate", "--heads", "pocket", "--prompts", prompts, "--max-new-tokens", "4")
    treeopt(*calibrate, "--device", "cpu", "-o", "one.safetensors")
    treeopt(*calibrate, "--device-map", "auto", "-o", "two.safetensors")
    assert Path("one.safetensors").read_bytes() == Path("two.safetensors").read_bytes()
    treeopt("reproduce", "one.safetensors", "--device-map", "auto")
