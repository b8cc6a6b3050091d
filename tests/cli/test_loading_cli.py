"""Every command that loads a base model refuses one whose weights are missing, and says what one does not use."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from looped import looped
from program import error_of, treeopt, treeopt_json

from treeopt.files.bundled import pocket

State = dict[str, torch.Tensor]
COMMANDS = {
    "calibrate": "calibrate --heads pocket --prompts pocket --model {model} -o {out}.safetensors",
    "learn": "learn --heads pocket --prompts pocket --model {model} -o {out}.safetensors",
    "validate": "validate --heads pocket --prompts pocket --model {model} --tree mc_sim_7b_63",
    "generate": "generate text --heads pocket --model {model} --tree mc_sim_7b_63",
    "profile": "profile --heads pocket --model {model} -o {out}",
    "distill": "distill --model {model} --self-talk 1 -o {out}.jsonl",
    "train": "train --model {model} --data {data} -o {out}",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the built-in model, to be damaged."""
    return Path(shutil.copytree(pocket(), tmp_path / "model"))


def rewrite(model: Path, change: Callable[[State], State]) -> None:
    """Write its weights anew."""
    file = model / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(file)), file, metadata={"format": "pt"})


@looped("line", COMMANDS.values())
def test_missing_weights_are_refused(line: str, model: Path, tmp_path: Path) -> None:
    """A base that lacks a weight ends every command in E304 by its name, and nothing is written."""
    rewrite(model, lambda state: {key: value for key, value in state.items() if "layers.1.mlp.up" not in key})
    (tmp_path / "data.jsonl").write_text('{"text": "def f(x):"}\n')
    names = {"model": model, "out": tmp_path / "out.yaml", "data": tmp_path / "data.jsonl"}
    assert "model.layers.1.mlp.up_proj.weight" in error_of("E304", *(word.format(**names) for word in line.split()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "model"]


def test_unused_weights_are_said(model: Path, tmp_path: Path) -> None:
    """Weights that the base does not use are a warning, with heads and without, also with --quiet and for programs."""
    rewrite(model, lambda state: {**state, "medusa_head.0.weight": torch.zeros(3)})
    generate = ["generate", "text", "--heads", "pocket", "--model", model, "--tree", "mc_sim_7b_63"]
    distill = ["distill", "--model", model, "--self-talk", "1", "--opening-tokens", "1", "-o", tmp_path / "out.jsonl"]
    for command in (generate, distill):
        assert "does not use: medusa_head.0.weight" in treeopt(*command, "--max-new-tokens", "1").stderr
    assert "does not use: medusa_head.0.weight" in treeopt(*generate, "--max-new-tokens", "1", "--quiet").stderr
    data = treeopt_json(*generate, "--max-new-tokens", "1")
    assert "does not use: medusa_head.0.weight" in data["warnings"][0]
