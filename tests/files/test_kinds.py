"""What is given in place of a tree: one error that says what the file is, and what was expected."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import random_calibration
from looped import looped
from refusals import refusal_of
from safetensors.numpy import save_file

from treeopt.drafter import Drafter
from treeopt.errors import Code, TreeoptError
from treeopt.files import read as files_read
from treeopt.files import strict_yaml, tensors
from treeopt.files.bundled import pocket, prompt_sets, zoo
from treeopt.files.calibrations import save_calibration
from treeopt.files.drafters import save_drafter
from treeopt.files.profiles import save_profile
from treeopt.files.trees import load_plan, load_tree, save_policy
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.policy import TreePolicy
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_tree, save_buffers


def unedited(path: Path) -> str:
    """The schema of a file that was not edited."""
    return tensors.unedited_schema(path) or ""


def _calibration(path: Path) -> None:
    save_calibration(random_calibration(1), path)


def _many_prompts(path: Path) -> None:
    """A calibration whose header is longer than what a look at the first bytes would see."""
    save_calibration(random_calibration(1, sequences=2000, length=2), path)


def _profile(path: Path) -> None:
    save_profile(LatencyProfile.from_points([LatencyPoint(1, 1, 8, seconds=1.0, low=1.0, high=1.0)], {}), path)


def _compiled(path: Path) -> None:
    tree = Tree.chain(2)
    save_buffers(compile_tree(tree), tree, path)


def _copy(source: Path):
    return lambda path: path.write_bytes(source.read_bytes())


MADE = {  # maker of a file, what the error says it is, what is to be done with it
    "a calibration": (_calibration, "is a calibration", "treeopt build --calibration"),
    "a long calibration": (_many_prompts, "is a calibration", "treeopt build --calibration"),
    "a drafter": (lambda path: save_drafter(Drafter.heads_only(2, top=4), path), "is a drafter", "treeopt build"),
    "a compiled tree": (_compiled, "is a compiled tree", "the tree that it was compiled from"),
    "a profile": (_profile, "is a latency profile (treeopt.latency/1)", "--profile FILE"),
    "a prompt set": (_copy(prompt_sets()["alpaca_eval"]), "is a description of prompts", "--prompts"),
    "heads": (_copy(pocket() / "heads" / "medusa_lm_head.safetensors"), "is a safetensors file", ""),
    "another safetensors": (lambda path: save_file({"a": np.zeros(2)}, path), "is a safetensors file", ""),
    "a checkpoint": (lambda path: torch.save({"a": torch.zeros(1)}, path), "is not UTF-8 text", ""),
    "a config": (_copy(pocket() / "config.json"), "has no schema", ""),
    "a picture": (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99)), "is not UTF-8 text (byte 0)", ""),
    "our picture": (lambda path: path.write_text('<svg xmlns="">'), "has no schema", ""),
    "UTF-16": (lambda path: path.write_bytes("[[0]]".encode("utf-16")), "is not UTF-8 text (byte 0)", ""),
    "UTF-16 without a mark": (lambda path: path.write_bytes("[[0]]".encode("utf-16-le")), "holds zero bytes", ""),
    "nothing": (lambda path: path.write_bytes(b""), "is empty", ""),
    "blanks": (lambda path: path.write_bytes(b"  \n\n"), "is empty", ""),
    "bytes": (lambda path: path.write_bytes(bytes(range(256)) * 9), "is not", ""),
    "a YAML list": (lambda path: path.write_text("- [0]\n- [0, 0]\n"), "has no schema", ""),
    "a JSON object": (lambda path: path.write_text('{"mc": [[0]]}'), "has no schema", ""),
    "a word": (lambda path: path.write_text("oak\n"), "has no schema", ""),
    "prose": (lambda path: path.write_text("Trees are: planted, here.\nAnd there\n"), "", ""),
    "prompts": (_copy(prompt_sets()["pocket"]), "", ""),
    "9 MB of text": (lambda path: path.write_bytes(b"oak " * 2_250_000), "has 9,000,000 bytes; at most 8,388,608", ""),
    "9 MB of brackets": (lambda path: path.write_bytes(b"[" * 9_000_000), "has 9,000,000 bytes", ""),
    "a folder": (lambda path: path.mkdir(), "is a folder", "name a file in it"),
    "no end": (lambda path: path.symlink_to("/dev/zero"), "bytes; at most 8,388,608 are read", ""),
}


@looped("name", MADE)
def test_other_files_are_named(tmp_path: Path, name: str) -> None:
    """Every other kind of file is E203 that says what it is, what was expected, and what it is for."""
    make, kind, use = MADE[name]
    path = tmp_path / "given"
    make(path)
    for load in (load_tree, load_plan):
        refused = refusal_of(load, path)
        error = refused
        assert error.code is Code.FILE_INVALID
        assert f"{path} {kind}" in error.what or kind in error.what
        assert use in error.fix
        assert "a tree is a YAML file of treeopt (treeopt.tree/1), a list of paths" in error.why
        assert str(path) in error.at
        assert len(str(error)) < 1200


def test_policy_is_no_one_tree(tmp_path: Path) -> None:
    """A policy is loaded as a plan; as a tree it is refused with what to do."""
    save_policy(TreePolicy(4, 2, "d1"), tmp_path / "p.yaml")
    assert load_plan(tmp_path / "p.yaml") == TreePolicy(4, 2, "d1")
    with pytest.raises(TreeoptError, match="is a policy") as caught:
        load_tree(tmp_path / "p.yaml")
    assert "treeopt generate" in caught.value.fix


@looped("given", [[[0]], None, 5, b"tree.yaml", Tree(())])
def test_a_name_is_text(given: object) -> None:
    """A list is no name; the error says which function takes it."""
    with pytest.raises(TypeError, match=r"treeopt\.Tree\.from_paths makes a tree of a list"):
        load_tree(given)  # type: ignore[arg-type]


def test_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """A pipe has no length and cannot be read twice: both forms of a tree come through."""
    for content in ("x = [[0], [0, 0]]", zoo()["mc_sim_7b_63"].read_text()):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        writer = threading.Thread(target=pipe.write_text, args=(content,))
        writer.start()
        assert load_plan(pipe).nodes in (3, 64)
        writer.join()
        pipe.unlink()


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system refuses to open is E404 with the system's reason, a tree and an array file alike."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "t.yaml").write_text("[[0]]")
    for module, load in ((strict_yaml, load_tree), (files_read, files_read.read_bytes)):
        monkeypatch.setattr(module, "read_start", refuse)
        with pytest.raises(TreeoptError, match="cannot be read: Permission denied") as caught:
            load(tmp_path / "t.yaml")
        assert caught.value.code is Code.SYSTEM_REFUSED


def test_header_of_the_greatest_length_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte more is not read: the file is then none of ours."""
    path = tmp_path / "c.safetensors"
    _calibration(path)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    for read in (strict_yaml.schema_of, unedited):
        monkeypatch.setattr(files_read, "MAX_HEADER", length)
        assert read(path).startswith("treeopt.")
        monkeypatch.setattr(files_read, "MAX_HEADER", length - 1)
        assert read(path) == ""
