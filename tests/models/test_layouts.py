"""Layouts: both published file forms are read alike, and every way to be wrong is refused by name."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
from pathlib import Path

import pytest
import safetensors.torch
import torch
from head_states import HEADS, HIDDEN, VOCAB, make_state
from looped import looped
from refusals import refusal_of
from torch import Tensor

from treeopt.errors import EXIT_ENVIRONMENT, EXIT_INPUT, Code, TreeoptError
from treeopt.models import hub
from treeopt.models.head_files import check_heads_writable, load_heads
from treeopt.models.head_layouts import from_state


def write(folder: Path, state: dict[str, Tensor], config: object = None) -> Path:
    """A heads folder with safetensors weights, and a config where one is given."""
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(state, folder / "medusa_lm_head.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_load_heads_both_forms(shared: Path) -> None:
    """The published .safetensors and .pt hold equal tensors, so they have one fingerprint."""
    folder = shared / "models" / "tinystories-260k-medusa"
    one = load_heads(folder / "medusa_lm_head.safetensors")
    other = load_heads(folder / "medusa_lm_head.pt")
    assert one.heads.num_heads == 5
    for name, tensor in one.heads.state_dict().items():
        assert torch.equal(tensor, other.heads.state_dict()[name])
    assert one.fingerprint == other.fingerprint


def test_load_heads_folder(shared: Path) -> None:
    """A folder gives its safetensors file, and the base's folder relative to itself, wherever one stands."""
    loaded = load_heads(shared / "models" / "tinystories-260k-medusa")
    assert loaded.file.name == "medusa_lm_head.safetensors"
    assert loaded.base == str(shared / "models" / "tinystories-260k")
    assert loaded.notes == ()


def test_from_state_twelve_heads() -> None:
    """Heads are counted as numbers: head 10 comes after head 9, not after head 1."""
    state = make_state(heads=12)
    heads = from_state(state, "made")
    assert heads.num_heads == 12
    assert torch.equal(heads.weight[0, 10], state["10.0.linear.weight"])


def test_load_heads_config_right_or_absent(tmp_path: Path) -> None:
    """A config that agrees, or none at all, leaves no note."""
    assert load_heads(write(tmp_path / "with", make_state(), {"medusa_num_heads": 3})).notes == ()
    bare = load_heads(write(tmp_path / "without", make_state()))
    assert (bare.notes, bare.base) == ((), None)


def test_load_heads_base_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base path is taken from the heads' folder, not from the current one; what is no folder stays a hub name."""
    (tmp_path / "base").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    near = load_heads(write(tmp_path / "near", make_state(), {"base_model_name_or_path": "../base"}))
    far = load_heads(write(tmp_path / "far", make_state(), {"base_model_name_or_path": "owner/base"}))
    assert near.base == str(tmp_path / "base")
    assert far.base == "owner/base"


@looped("name, share", itertools.product(["medusa_lm_head.safetensors", "medusa_lm_head.pt"], [0.5, 0.99]))
def test_load_heads_truncated(tmp_path: Path, shared: Path, name: str, share: float) -> None:
    """Half a file, or all but its end, is reported as damaged."""
    raw = (shared / "models" / "tinystories-260k-medusa" / name).read_bytes()
    (tmp_path / name).write_bytes(raw[: int(len(raw) * share)])
    error = refusal_of(load_heads, tmp_path)
    assert error.code is Code.FILE_INVALID
    assert name in error.what


WRONG_SHAPES: list[tuple[str, tuple[int, ...]]] = [
    ("0.1.weight", (VOCAB + 1, HIDDEN)),  # heads of different vocabularies
    ("0.1.weight", (VOCAB, HIDDEN + 1)),
    ("1.0.linear.weight", (HIDDEN, HIDDEN + 1)),
    ("1.0.linear.bias", (HIDDEN + 1,)),
    ("1.0.linear.bias", (1, HIDDEN)),
    ("{h}.0.linear.weight", (HIDDEN, HIDDEN + 1)),  # tensors that agree with each other
    ("{h}.0.linear.weight", (HIDDEN + 1, HIDDEN)),
    ("{h}.0.linear.bias", (HIDDEN + 1,)),
    ("{h}.1.weight", (VOCAB, HIDDEN + 1)),
    ("{h}.1.weight", (HIDDEN,)),
]


def changed(key: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Heads in which tensors of this name have another shape."""
    return make_state() | {key.format(h=h): torch.zeros(shape) for h in range(HEADS)}


REFUSED: list[tuple[dict[str, Tensor], str]] = [
    ({}, "no tensors"),
    ({key: one for key, one in make_state().items() if key != "1.0.linear.bias"}, "lacks 1.0.linear.bias"),
    ({key: one for key, one in make_state().items() if not key.startswith("1.")}, "1.1.weight"),
    ({**make_state(), "2.4.weight": torch.zeros(VOCAB, HIDDEN)}, "2.4.weight"),  # a second LM head
    (make_state() | {f"medusa_head.{i}.weight": torch.zeros(1) for i in range(9)}, "medusa_head.5.weight and 3 more"),
    *((changed(*wrong), "has shape") for wrong in WRONG_SHAPES),
    ({"0.0.weight": torch.zeros(())}, ""),
    ({"0.0.linear.weight": torch.zeros(()), "0.0.linear.bias": torch.zeros(())}, ""),
    ({"0.0.weight": torch.zeros(4, 3, dtype=torch.int64)}, "torch.int64"),
    ({"30000000.0.weight": torch.zeros(4, 3)}, "head 30000000"),  # makes no list of as many
]


@looped("state, said", REFUSED)
def test_tensors_that_are_no_heads_are_refused(state: dict[str, Tensor], said: str) -> None:
    """E211 names what is missing, unexpected, or of another shape or type."""
    error = refusal_of(from_state, state, "made")
    assert error.code is Code.HEADS_INVALID
    assert said in error.what


def test_load_heads_missing_folder(tmp_path: Path) -> None:
    """A path that is not there, and a folder without weights, are missing files."""
    absent = refusal_of(load_heads, tmp_path / "absent")
    assert (absent.code, absent.exit_status) == (Code.FILE_MISSING, EXIT_INPUT)
    assert "absent" in absent.what
    assert "medusa_lm_head.safetensors" in refusal_of(load_heads, tmp_path).what


def test_load_heads_hub_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub name ends offline in one environment error, and no connection is tried."""
    tried: list[object] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "hub_reachable", lambda: False)
    monkeypatch.setattr(socket.socket, "connect", lambda _self, address: tried.append(address))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    error = refusal_of(load_heads, "owner/some-medusa-heads")
    assert (error.code, error.exit_status) == (Code.HUB_UNREACHABLE, EXIT_ENVIRONMENT)
    assert "owner/some-medusa-heads" in error.what
    assert tried == []


def test_load_heads_name_without_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare name can be no heads repository: it is a missing folder."""
    monkeypatch.chdir(tmp_path)
    assert refusal_of(load_heads, "some-heads").code is Code.FILE_MISSING


def test_fingerprint_follows_weights(tmp_path: Path, shared: Path) -> None:
    """The fingerprint is that of the weights, not of the folder, and changes with one value."""
    file = shared / "models" / "tinystories-260k-medusa" / "medusa_lm_head.safetensors"
    shutil.copyfile(file, tmp_path / file.name)
    assert load_heads(tmp_path).fingerprint == load_heads(file).fingerprint
    state = safetensors.torch.load_file(file)
    state["0.0.linear.bias"] = state["0.0.linear.bias"] + 1.0
    assert load_heads(write(tmp_path / "other", state)).fingerprint != load_heads(file).fingerprint


@looped("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    """A NaN would win every comparison and score 100 %: E504 with the name of the heads, and no word of layouts."""
    state = make_state()
    state["1.0.linear.bias"][2] = value
    error = refusal_of(load_heads, write(tmp_path / "broken", state))
    assert error.code is Code.NOT_FINITE
    assert error.what.startswith(f"the heads {tmp_path / 'broken'}")
    assert "1.0.linear.bias" in error.what
    assert "layout" not in str(error)


@looped("config", [[1], "text", 5, {"base_model_name_or_path": 5}, {"base_model_name_or_path": ["a"]}])
def test_load_heads_config_of_another_kind(tmp_path: Path, config: object) -> None:
    """A config that is no object, or a base that is no name, is a damaged file, and it is named."""
    error = refusal_of(load_heads, write(tmp_path, make_state(), config))
    assert error.code is Code.FILE_INVALID
    assert "config.json" in error.what


@looped("claimed", [2, "three", [3], {"a": 3}, 3.5, True, 10**40])
def test_load_heads_number_of_another_kind(tmp_path: Path, claimed: object) -> None:
    """Whatever config.json holds as the number of heads, the weights win and nothing is said."""
    loaded = load_heads(write(tmp_path, make_state(), {"medusa_num_heads": claimed, "medusa_num_layers": claimed}))
    assert loaded.heads.num_heads == 3
    assert loaded.notes == ()


@looped("base", ["", "x" * 5000, "a\0b"])
def test_load_heads_base_that_is_no_folder(tmp_path: Path, base: str) -> None:
    """A base that can be no path stays a name, and an empty one is none."""
    assert load_heads(write(tmp_path, make_state(), {"base_model_name_or_path": base})).base == (base or None)


def test_heads_in_the_older_file_are_heads(tmp_path: Path) -> None:
    """A .pt checkpoint is not put out of use by a .safetensors beside it, unless that is asked for."""
    torch.save(make_state(), tmp_path / "medusa_lm_head.pt")
    with pytest.raises(TreeoptError) as caught:
        check_heads_writable(tmp_path, overwrite=False)
    assert caught.value.code is Code.FILE_EXISTS
    check_heads_writable(tmp_path, overwrite=True)
