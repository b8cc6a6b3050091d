"""What an output may replace: only files of ours that are cheap and unedited, and never an input."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import random_calibration
from looped import looped
from refusals import refusal_of

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import write_text
from treeopt.files.calibrations import save_calibration
from treeopt.files.configurations import write_note
from treeopt.files.outputs import BUFFERS, PICTURE, TREE, check_no_input, check_output, write_marked
from treeopt.files.trees import load_tree, save_policy, save_tree
from treeopt.policy import TreePolicy
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_tree, save_buffers


def test_texts_that_are_not_utf8_are_written(tmp_path: Path) -> None:
    """As names of files can be: the character is replaced, and the mark holds."""
    write_marked(tmp_path / "a.svg", "<svg>\udcff</svg>\n", PICTURE)
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<svg>?</svg>")
    check_output(tmp_path / "a.svg", kind=PICTURE, force=False, inputs=())


def refusal(path: Path | str, kind: str | None = None, *, force: bool = False, inputs: tuple[Path, ...] = ()) -> Code:
    """The error's code."""
    error = refusal_of(check_output, path, kind=kind, force=force, inputs=inputs)
    return error.code


def written(folder: Path, kind: str) -> Path:
    """A file of one of the cheap kinds, as its command writes it."""
    target, tree = folder / kind.replace(" ", "-"), Tree.chain(3)
    if kind == TREE:
        save_tree(tree, target)
    elif kind == BUFFERS:
        save_buffers(compile_tree(tree), tree, target)
    else:
        target = target.with_suffix(".svg")
        write_marked(target, "<svg/>\n", PICTURE)
    return target


@looped("kind", [TREE, BUFFERS, PICTURE])
def test_unedited_file_of_the_same_kind_is_replaced(tmp_path: Path, kind: str) -> None:
    """A tree replaces a tree, a compiled tree a compiled tree, a picture a picture; nothing replaces another kind."""
    target = written(tmp_path, kind)
    assert check_output(target, kind=kind, force=False) == target
    for other in {TREE, BUFFERS, PICTURE, None} - {kind}:
        assert refusal(target, other) is Code.FILE_EXISTS
        assert check_output(target, kind=other, force=True)


@looped("kind", [TREE, BUFFERS, PICTURE])
@looped("place", [0, 60, -130, -1])
def test_edited_file_is_kept(tmp_path: Path, kind: str, place: int) -> None:
    """One byte changed anywhere, or one line added, makes the file the user's."""
    target = written(tmp_path, kind)
    raw = bytearray(target.read_bytes())
    raw[place % len(raw)] ^= 1
    target.write_bytes(raw)
    assert refusal(target, kind) is Code.FILE_EXISTS
    raw[place % len(raw)] ^= 1
    target.write_bytes(raw + b"# mine\n")
    assert refusal(target, kind) is Code.FILE_EXISTS
    target.write_bytes(raw)
    assert check_output(target, kind=kind, force=False)


@looped("suffix", [".svg", ".dot", ".yaml", ""])
def test_tree_of_any_name_is_read_again(tmp_path: Path, suffix: str) -> None:
    """The mark of a tree is a comment of YAML, whatever its file is called."""
    target = tmp_path / f"t{suffix}"
    save_tree(Tree.chain(3), target)
    assert load_tree(target) == Tree.chain(3)
    assert check_output(target, kind=TREE, force=False)


def test_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    """A private file stays private."""
    target = tmp_path / "t.yaml"
    save_tree(Tree.chain(3), target)
    target.chmod(0o600)
    save_tree(Tree.chain(2), target)
    assert target.stat().st_mode & 0o777 == 0o600


def test_kinds_that_replace_each_other(tmp_path: Path) -> None:
    """`build` writes policies and trees: either replaces the other; a calibration carries a mark, and is still kept."""
    save_policy(TreePolicy(8, 3, "abc"), tmp_path / "t.yaml")
    assert check_output(tmp_path / "t.yaml", kind=TREE, force=False)
    target = tmp_path / "c.safetensors"
    save_calibration(random_calibration(1), target)
    for kind in (TREE, BUFFERS, PICTURE, None):
        assert refusal(target, kind) is Code.FILE_EXISTS


@looped("content", [b"", b"precious", b"# treeopt tree\n", b"\xff" * 500, b"\x08" + b"\0" * 7 + b"{}"])
def test_foreign_file_is_kept(tmp_path: Path, content: bytes) -> None:
    """Whatever treeopt did not write stays without --force."""
    target = tmp_path / "t"
    target.write_bytes(content)
    for kind in (TREE, BUFFERS, PICTURE, None):
        assert refusal(target, kind) is Code.FILE_EXISTS
        assert check_output(target, kind=kind, force=True)


def test_note_that_is_an_input_or_foreign_is_kept(tmp_path: Path) -> None:
    """Beside an output only a note of treeopt is replaced; an input never is."""
    target, note = tmp_path / "choices.json", tmp_path / "choices.json.treeopt.yaml"
    note.write_text("my notes\n")
    assert refusal(target, None) is Code.FILE_EXISTS
    for force in (False, True):
        assert refusal(target, None, force=force, inputs=(note,)) is Code.FILE_UNWRITABLE
    assert check_output(target, force=True)
    write_text(target, "{}")
    write_note(target, {"export": {}})
    assert check_output(target, force=True)
    target.unlink()
    assert check_output(target, force=False)


@looped("force", [False, True])
def test_input_is_never_replaced(tmp_path: Path, force: bool) -> None:
    """Output = input, also through a symbolic or hard link, is E204 with and without --force."""
    source, link, hard = tmp_path / "t.yaml", tmp_path / "link.yaml", tmp_path / "hard.yaml"
    save_tree(Tree.chain(2), source)
    link.symlink_to(source)
    hard.hardlink_to(source)
    for target in (source, link, hard):
        assert refusal(target, TREE, force=force, inputs=(source,)) is Code.FILE_UNWRITABLE


def test_file_of_an_input_folder_is_never_replaced(tmp_path: Path) -> None:
    """The files of a model's folder are inputs; a calibration that is kept beside them is not."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "notes.md"):
        (folder / name).write_bytes(b"{}")
        assert refusal(folder / name, force=True, inputs=(folder,)) is Code.FILE_UNWRITABLE
    save_calibration(random_calibration(1), folder / "c.safetensors")
    assert refusal(folder / "c.safetensors", inputs=(folder,)) is Code.FILE_EXISTS
    assert check_output(folder / "c.safetensors", force=True, inputs=(folder,))
    assert check_output(folder / "new.safetensors", force=False, inputs=(folder,))


def test_inputs_that_are_no_files_are_passed_over(tmp_path: Path) -> None:
    """Options that were left out, hub names and names of the zoo are no files."""
    save_tree(Tree.chain(2), tmp_path / "t.yaml")
    check_no_input(
        tmp_path / "t.yaml", None, "", "owner/name", "mc_sim_7b_63", "~nobody-of-this-name/x", tmp_path / "none"
    )


@looped("name", ["", "-"])
def test_name_that_is_no_file_name_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty name, and the name of standard output elsewhere, are E204."""
    monkeypatch.chdir(tmp_path)
    assert refusal(name) is Code.FILE_UNWRITABLE
    assert list(tmp_path.iterdir()) == []


def test_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """A name beyond what the file system takes is E204 before any work; the longest possible one is written."""
    assert refusal(tmp_path / ("x" * 300)) is Code.FILE_UNWRITABLE
    longest = tmp_path / ("x" * 250 + ".yaml")
    assert check_output(longest, force=False)
    save_tree(Tree.chain(2), longest)
    assert load_tree(longest) == Tree.chain(2)


def test_link_to_nothing_is_refused(tmp_path: Path) -> None:
    """A dangling link, or one that points at itself, is E204 with and without --force, and stays."""
    for name, goal in (("dangling", "nowhere"), ("loop", "loop")):
        (tmp_path / name).symlink_to(goal)
        for force in (False, True):
            with pytest.raises(TreeoptError, match="is a symbolic link to") as caught:
                check_output(tmp_path / name, force=force)
            assert caught.value.code is Code.FILE_UNWRITABLE
        assert (tmp_path / name).is_symlink()


def test_pipes_and_full_disks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named pipe cannot be written whole or not at all; a disk without room is E403, the environment's fault."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert refusal(pipe, force=True) is Code.FILE_UNWRITABLE
    assert pipe.is_fifo()
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=10**9, free=1000))
    assert refusal(tmp_path / "t.yaml") is Code.OUT_OF_MEMORY


def test_link_is_written_through(tmp_path: Path) -> None:
    """Writing to a link writes its file; the link stays."""
    target, link = tmp_path / "t.yaml", tmp_path / "link.yaml"
    target.write_text("old")
    link.symlink_to(target)
    save_tree(Tree.chain(2), link)
    assert link.is_symlink()
    assert load_tree(target) == Tree.chain(2)
