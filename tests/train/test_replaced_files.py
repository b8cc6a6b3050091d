"""What a training may replace: no base, no texts, no checkpoints and no metrics that are not its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from looped import looped
from runs import SMALL, noise, walks
from tiny import chat_base, tiny_base

from treeopt.errors import Code, TreeoptError
from treeopt.train.medusa1 import train_heads


@looped("options", [{}, {"overwrite": True}])
def test_base_is_never_replaced_by_heads(tmp_path: Path, options: dict[str, bool]) -> None:
    """The folder of a base takes no heads, whatever is asked for, and stays byte for byte."""
    chat = chat_base()
    chat.model.save_pretrained(tmp_path / "base")
    before = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    with pytest.raises(TreeoptError) as caught:
        train_heads(chat, walks(10), tmp_path / "base", SMALL, **options)
    assert caught.value.code is Code.FILE_UNWRITABLE
    assert {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()} == before


@looped("name", ["metrics.jsonl", "config.json", "checkpoints/data.jsonl"])
def test_data_is_never_replaced(tmp_path: Path, name: str) -> None:
    """Texts that lie where the run would write are refused, and stay; elsewhere in the folder they may lie."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / name).write_text('{"medusa_num_heads": 2}')
    texts = dataclasses.replace(noise(20), names=(str(tmp_path / name),))
    with pytest.raises(TreeoptError) as caught:
        train_heads(tiny_base("llama"), texts, tmp_path, SMALL, overwrite=True)
    assert caught.value.code is Code.FILE_UNWRITABLE
    assert (tmp_path / name).read_text() == '{"medusa_num_heads": 2}'


def test_data_beside_the_heads(tmp_path: Path) -> None:
    """Texts in the folder of the heads are no reason to refuse."""
    (tmp_path / "data.jsonl").write_text("")
    texts = dataclasses.replace(noise(20), names=(str(tmp_path / "data.jsonl"),))
    train_heads(tiny_base("llama"), texts, tmp_path, dataclasses.replace(SMALL, steps=2))
    assert (tmp_path / "data.jsonl").exists()


def test_base_among_the_checkpoints_is_kept(tmp_path: Path) -> None:
    """A base in the folder that a run removes is an input: refused with and without overwriting."""
    folder = tmp_path / "runs" / "checkpoints" / "checkpoint-100"
    tiny_base("llama").model.save_pretrained(folder)
    before = sorted(path.name for path in folder.iterdir())
    for overwrite in (False, True):
        with pytest.raises(TreeoptError) as caught:
            train_heads(folder, noise(6), tmp_path / "runs", SMALL, overwrite=overwrite)
        assert caught.value.code is Code.FILE_UNWRITABLE
    assert sorted(path.name for path in folder.iterdir()) == before


def test_foreign_checkpoints_are_kept(tmp_path: Path) -> None:
    """A folder of that name without a note of ours is the user's."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine.txt").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(TreeoptError, match="treeopt train did not write"):
            train_heads(tiny_base("llama"), noise(6), tmp_path, SMALL, overwrite=overwrite)
    assert (tmp_path / "checkpoints" / "mine.txt").read_text() == "precious"


def test_linked_checkpoints_are_kept(tmp_path: Path) -> None:
    """A link in the place of the folder that a run empties."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "scratch")
    with pytest.raises(TreeoptError, match="is a link, but checkpoints would be written"):
        train_heads(tiny_base("llama"), noise(6), tmp_path, SMALL, overwrite=True)


def test_foreign_metrics_are_kept(tmp_path: Path) -> None:
    """Metrics hold no mark, so a file of that name is replaced by overwriting alone."""
    (tmp_path / "metrics.jsonl").write_text("mine")
    with pytest.raises(TreeoptError) as caught:
        train_heads(tiny_base("llama"), noise(6), tmp_path, SMALL)
    assert caught.value.code is Code.FILE_EXISTS
    assert (tmp_path / "metrics.jsonl").read_text() == "mine"
