"""Heads as pickles: no code in them is run, and what PyTorch did not write is refused without its warnings."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from head_states import make_state
from looped import looped
from refusals import refusal_of

from treeopt.errors import EXIT_INPUT, Code, TreeoptError
from treeopt.export.trees import import_tree
from treeopt.models.head_files import load_heads


class RunsCode:
    """Unpickles by running a shell command that leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.marker}'",)


def test_load_heads_plain_pt(tmp_path: Path) -> None:
    """A .pt with an ordered dictionary of tensors is read."""
    state = make_state()
    torch.save(state, tmp_path / "medusa_lm_head.pt")
    assert torch.equal(load_heads(tmp_path).heads.weight[0, 2], state["2.0.linear.weight"])


@looped("form", ["zip", "old", "pickle"])
def test_load_heads_running_code(tmp_path: Path, form: str) -> None:
    """A .pt that would run a command is refused, the command does not run, and no unsafe way out is proposed."""
    marker, file = tmp_path / "ran", tmp_path / "medusa_lm_head.pt"
    state = {**make_state(), "0.0.linear.weight": RunsCode(marker)}
    if form == "pickle":
        file.write_bytes(pickle.dumps(RunsCode(marker), protocol=2))
    else:
        torch.save(state, file, _use_new_zipfile_serialization=form == "zip")
    error = refusal_of(load_heads, tmp_path)
    assert not marker.exists()
    assert error.code is Code.PICKLE_REFUSED
    assert error.exit_status == EXIT_INPUT
    assert "weights_only=False" not in str(error)
    assert str(file) in str(error)


def pickles(marker: Path) -> dict[str, bytes]:
    """Pickles that are not files of plain tensors as PyTorch writes them by default."""

    def zipped(member: str, compression: int = zipfile.ZIP_STORED) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", compression) as archive:
            archive.writestr(member, pickle.dumps([RunsCode(marker)] + ["x"] * 5000, protocol=2))
        return stream.getvalue()

    def saved(value: object, **options: Any) -> bytes:
        stream = io.BytesIO()
        torch.save(value, stream, **options)
        return stream.getvalue()

    program = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), program)
    return {
        "code": pickle.dumps(RunsCode(marker)),
        "numbers": pickle.dumps({"a": 1}, protocol=2),
        "tensors": pickle.dumps(make_state()),
        "zip": zipped("weights.pkl"),
        "zip in folder": zipped("archive/data.pkl"),
        "zip, compressed": zipped("weights.pkl", zipfile.ZIP_DEFLATED),
        "protocol 4": saved(make_state(), pickle_protocol=4),
        "protocol 4, old form": saved(make_state(), pickle_protocol=4, _use_new_zipfile_serialization=False),
        "TorchScript": program.getvalue(),
    }


@looped("name", pickles(Path()))
def test_pickle_is_refused_without_warnings(tmp_path: Path, name: str, recwarn: pytest.WarningsRecorder) -> None:
    """A pickle or a zip with one that PyTorch does not read as plain tensors is E210, in `import` too."""
    file = tmp_path / "heads.pt"
    file.write_bytes(pickles(tmp_path / "ran")[name])
    recwarn.clear()
    for read in (load_heads, import_tree):
        with pytest.raises(TreeoptError) as caught:
            read(file)
        assert caught.value.code is Code.PICKLE_REFUSED
        assert str(file) in str(caught.value)
    assert not recwarn.list
    assert not (tmp_path / "ran").exists()


@looped("size", [1, 2, 3, 14, 15, 40, 200])
def test_part_of_a_checkpoint_is_damaged(tmp_path: Path, size: int, recwarn: pytest.WarningsRecorder) -> None:
    """The beginning of a file of PyTorch in its old form is E203, not a refused pickle."""
    file = tmp_path / "heads.pt"
    torch.save(make_state(), file, _use_new_zipfile_serialization=False)
    file.write_bytes(file.read_bytes()[:size])
    assert refusal_of(load_heads, file).code is Code.FILE_INVALID
    assert not recwarn.list


def test_damaged_pickle_gives_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A file in which torch sees another protocol of pickles is a damaged one of heads and of a tree, and no more."""
    file = tmp_path / "heads.pt"
    torch.save({}, file, _use_new_zipfile_serialization=False)
    file.write_bytes(file.read_bytes()[:15] + b"\x80\x00" + bytes(50))
    assert refusal_of(load_heads, file).code is Code.FILE_INVALID
    with pytest.raises(TreeoptError, match="is damaged"):
        import_tree(file)
    assert not recwarn.list


def test_running_code_would_run(tmp_path: Path) -> None:
    """The file of the test above is a real danger: unpickled without care, it runs its command."""
    marker = tmp_path / "ran"
    pickle.loads(pickle.dumps(RunsCode(marker)))
    assert marker.exists()


def test_load_heads_pt_of_something_else(tmp_path: Path) -> None:
    """A .pt that holds a bare tensor, or numbers, is not a checkpoint."""
    for content in (torch.zeros(3), {"0.0.weight": 3.0}):
        torch.save(content, tmp_path / "medusa_lm_head.pt")
        assert refusal_of(load_heads, tmp_path).code is Code.HEADS_INVALID


@looped("content", [b"", b"hello world this is not a pt", b"<html>", b"version https://git-lfs\n", b"PK\x03"])
def test_bytes_that_are_no_checkpoint_are_damage(tmp_path: Path, content: bytes) -> None:
    """An empty file, a web page or a git-lfs pointer is E203: damaged, not an attack."""
    file = tmp_path / "medusa_lm_head.pt"
    file.write_bytes(content)
    with pytest.raises(TreeoptError) as caught:
        load_heads(tmp_path)
    assert caught.value.code is Code.FILE_INVALID
