"""Cheap outputs never replace what took hours, nor their own input."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers import random_calibration

from treeopt.errors import Code, TreeoptError
from treeopt.files.calibrations import save_calibration
from treeopt.files.outputs import check_output
from treeopt.files.trees import load_tree, save_tree
from treeopt.tree import Tree


def refusal(path: Path, *inputs: Path) -> Code:
    """The error's code."""
    with pytest.raises(TreeoptError) as caught:
        check_output(path, *inputs)
    return caught.value.code


def test_calibration_is_not_replaced_by_a_cheap_file(tmp_path: Path) -> None:
    """A calibration stands in the way: E202; a file of any other kind does not."""
    target = tmp_path / "c.safetensors"
    save_calibration(random_calibration(1), target)
    assert refusal(target) is Code.FILE_EXISTS
    (tmp_path / "old.svg").write_bytes(b"\xff" * 100)
    (tmp_path / "empty").touch()
    assert check_output(tmp_path / "old.svg")
    assert check_output(tmp_path / "empty")


def test_input_is_not_overwritten(tmp_path: Path) -> None:
    """Output = input, also through a link, is E204."""
    source, link = tmp_path / "t.yaml", tmp_path / "link.yaml"
    source.touch()
    link.symlink_to(source)
    assert refusal(source, source) is Code.FILE_UNWRITABLE
    assert refusal(link, source) is Code.FILE_UNWRITABLE


def test_pipe_is_refused_and_stays(tmp_path: Path) -> None:
    """A named pipe cannot be written whole or not at all."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert refusal(pipe) is Code.FILE_UNWRITABLE
    assert pipe.is_fifo()


def test_link_is_written_through(tmp_path: Path) -> None:
    """Writing to a link writes its file; the link stays."""
    target, link = tmp_path / "t.yaml", tmp_path / "link.yaml"
    target.write_text("old")
    link.symlink_to(target)
    save_tree(Tree.chain(2), link)
    assert link.is_symlink()
    assert load_tree(target) == Tree.chain(2)
