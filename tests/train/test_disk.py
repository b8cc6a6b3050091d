"""Full disks: known before a run where sizes are known, one error whoever meets them, and nothing half-written."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from looped import looped
from runs import SMALL, assert_same_run, noise
from safetensors import SafetensorError
from tiny import HIDDEN, VOCAB, tiny_base

from treeopt.errors import Code, TreeoptError, disk_full
from treeopt.files.atomic import in_words
from treeopt.models import head_files
from treeopt.train.medusa1 import train_heads

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def caused(error: Exception, cause: Exception) -> Exception:
    """An error raised from another."""
    error.__cause__ = cause
    return error


@looped(
    ("error", "full"),
    [
        (NO_SPACE, True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), True),
        (RuntimeError("basic_ios::clear: iostream error"), True),
        (caused(TreeoptError(Code.FILE_UNWRITABLE, "x cannot be written"), NO_SPACE), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (TreeoptError(Code.FILE_UNWRITABLE, "No space left on device.txt is a folder"), False),
    ],
)
def test_disk_full(error: Exception, full: bool) -> None:
    """A full disk is known by its number, by the words of the libraries that write, or by what it caused."""
    assert disk_full(error) == full


def test_sizes_in_words() -> None:
    """Bytes are said in the unit that people use."""
    assert [in_words(size) for size in (7, 7_100, 7_100_000, 7_160_000_000)] == [
        "7 bytes",
        "7.1 kB",
        "7.1 MB",
        "7.2 GB",
    ]


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let every disk have so many bytes free."""
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(total=10**12, free=size))


@pytest.mark.slow
@looped("shared_head", [False, True])
def test_room_is_checked_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_head: bool) -> None:
    """Three checkpoints of weights and two moments, a megabyte of logs: a byte less is E403 before anything is made."""
    settings = dataclasses.replace(SMALL, shared_lm_head=shared_head, holdout=0)
    weights = 2 * (HIDDEN * HIDDEN + HIDDEN) + (0 if shared_head else 2 * VOCAB * HIDDEN)
    needed = 3 * 3 * 4 * weights + 2**20
    free(monkeypatch, needed - 1)
    with pytest.raises(TreeoptError) as caught:
        train_heads(tiny_base("llama"), noise(20), tmp_path / "new" / "heads", settings)
    assert caught.value.code is Code.OUT_OF_MEMORY
    assert caught.value.exit_status == 4
    assert in_words(needed) in caught.value.what
    assert in_words(needed - 1) in caught.value.what
    assert list(tmp_path.iterdir()) == []
    free(monkeypatch, needed)
    train_heads(tiny_base("llama"), noise(20), tmp_path / "heads", settings)


def test_heads_beyond_every_disk_are_refused_at_once(tmp_path: Path) -> None:
    """A billion heads are refused by their size, before memory is asked for."""
    with pytest.raises(TreeoptError, match="GB on disk"):
        train_heads(tiny_base("llama"), noise(20), tmp_path, dataclasses.replace(SMALL, num_heads=10**9))
    assert list(tmp_path.iterdir()) == []


def failing(after: int, error: Exception, write: Callable[..., Any]) -> Callable[..., Any]:
    """A writer whose disk is full after so many calls: half of what it would write is there."""
    calls: list[int] = []

    def written(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) <= after:
            return write(*arguments, **options)
        target = next((one for one in arguments if isinstance(one, (str, Path))), None)
        if target is not None:
            Path(target).write_bytes(b"half")
        raise error

    return written


WRITERS: dict[str, tuple[Any, str, Exception]] = {
    "torch": (torch, "save", RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")),
    "safetensors": (safetensors.torch, "save_file", SafetensorError("I/O error: No space left on device")),
    "heads": (head_files, "write_files", NO_SPACE),
}
# The heads are written once, with their config; the others write at each checkpoint.
FAULTS = [(name, after) for name in WRITERS for after in (0, 1) if (name, after) != ("heads", 1)]


@pytest.mark.slow
@looped(("name", "after"), FAULTS)
def test_full_disk_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> None:
    """Whoever meets the full disk, it is E403; no heads and no half checkpoint stay, and --resume ends the run."""
    module, function, error = WRITERS[name]
    with monkeypatch.context() as patch:
        patch.setattr(module, function, failing(after, error, getattr(module, function)))
        if name == "safetensors":
            patch.setattr("transformers.trainer.safetensors.torch.save_file", getattr(module, function), raising=False)
        with pytest.raises(TreeoptError) as caught:
            train_heads(tiny_base("llama"), noise(20), tmp_path / "cut", SMALL)
    assert caught.value.code is Code.OUT_OF_MEMORY
    assert "--resume" in caught.value.fix
    assert {path.name for path in (tmp_path / "cut").iterdir()} <= {"checkpoints", "metrics.jsonl"}
    assert all((path / "whole.json").is_file() for path in (tmp_path / "cut" / "checkpoints").glob("checkpoint-*"))
    train_heads(tiny_base("llama"), noise(20), tmp_path / "cut", SMALL, resume=True)
    train_heads(tiny_base("llama"), noise(20), tmp_path / "whole", SMALL)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_other_failures_pass_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is no full disk stays what it is."""
    monkeypatch.setattr(torch, "save", failing(0, RuntimeError("a bug"), torch.save))
    with pytest.raises(RuntimeError, match="a bug"):
        train_heads(tiny_base("llama"), noise(20), tmp_path, SMALL)
    assert shutil.disk_usage(tmp_path).free > 0
