"""What reaches the terminal: no control characters, whatever files, prompts and the command line hold."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT_FOLDER
from looped import looped
from program import error_of, treeopt

from treeopt.cli.console import Console
from treeopt.cli.terminal import printable, printable_cell

ESCAPE = "\x1b[31mred\x1b]0;title\x07"
SHOWN = "\\x1b[31mred\\x1b]0;title\\x07"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own."""
    command = [sys.executable, "-m", "treeopt", *arguments]
    own = {**os.environ, "PYTHONPATH": str(ROOT_FOLDER), **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=own)


@looped(
    ("text", "shown"),
    [
        ("plain τ é\n\tline", "plain τ é\n\tline"),
        (ESCAPE, SHOWN),
        ("\x00\r\x08\x7f\x9b", "\\x00\\r\\x08\\x7f\\x9b"),
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("\udc80", "\\udc80"),
        ("a\u2028b", "a\\u2028b"),
        ("👩\u200d💻", "👩\u200d💻"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    """Control characters, marks of direction and lone surrogates are written as escapes; all other text stays."""
    assert printable(text) == shown


def test_printable_cell_has_no_separators() -> None:
    """A cell of a table cannot add columns or rows."""
    assert printable_cell("a\tb\nc") == "a\\tb\\nc"


def test_tree_file_cannot_steer_the_terminal() -> None:
    """`show` escapes what a tree file says of itself, and E203 what its keys are called."""
    head = "schema: treeopt.tree/1\nnodes: 1\n"
    Path("t.yaml").write_text(head + 'reference: "\\e[31mred\\e]0;title\\a"\npaths: []\n')
    assert SHOWN in treeopt("show", "t.yaml").output
    assert "\x1b" not in treeopt("show", "t.yaml").output
    Path("bad.yaml").write_text(head + '"\\e[31mred\\e]0;title\\a": 5\npaths: []\n')
    failed = treeopt("show", "bad.yaml", status=3)
    assert SHOWN in failed.stderr
    assert "\x1b" not in failed.stderr


def test_file_names_and_arguments_cannot_steer_the_terminal() -> None:
    """A name on the command line is escaped in our errors and in click's."""
    for arguments in (["show", ESCAPE], [ESCAPE], ["show", "--calibration", ESCAPE, "mc_sim_7b_63"], ["list", ESCAPE]):
        done = run(*arguments)
        assert done.returncode in (2, 3)
        assert "\x1b" not in done.stdout + done.stderr
        assert "red" in done.stderr


def test_json_is_plain_ascii() -> None:
    """One object, whose escapes any reader turns back."""
    Path("t.yaml").write_text('schema: treeopt.tree/1\nnodes: 1\nreference: "τ\\e\\x9b"\npaths: []\n')
    printed = treeopt("show", "t.yaml", "--json").stdout
    assert printed.isascii()
    assert json.loads(printed)["source"]["reference"] == "τ\x1b\x9b"


def test_name_that_is_not_utf8_is_printed() -> None:
    """A file name of any bytes gives an error message, not an exception."""
    done = subprocess.run(
        [sys.executable.encode(), b"-m", b"treeopt", b"show", b"\xff\xfe.yaml"],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT_FOLDER)},
    )
    assert done.returncode == 3
    assert b"\\udcff\\udcfe.yaml" in done.stderr


def test_encoding_that_lacks_a_character_is_no_fault() -> None:
    """An output in ASCII or Latin-1 gets the drawing of a tree, in UTF-8 or with escapes."""
    for encoding in ("ascii",):
        done = run("show", "mc_sim_7b_63", PYTHONIOENCODING=encoding)
        assert (done.returncode, done.stderr) == (0, "")
        assert "root" in done.stdout


@looped("arguments", [["show", "mc_sim_7b_63"], ["show", "mc_sim_7b_63", "--json"], ["--help"]])
def test_closed_pipe_is_not_a_bug(arguments: list[str]) -> None:
    """Where the reader has gone before anything is printed: 141, as shells report it, and no message."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "treeopt", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT_FOLDER)}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, env=environment)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@looped("arguments", [["show", "mc_sim_7b_63"], ["list", "--json"], ["--help"]])
def test_full_output_is_the_environments_fault(arguments: list[str]) -> None:
    """Standard output on a full disk, written through a buffer as by default, ends with status 4 and one E403."""
    command = [sys.executable, "-m", "treeopt", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT_FOLDER), "PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert done.returncode == 4
    if "--json" in arguments:
        assert json.loads(done.stderr)["error"] == "E403"
    else:
        assert done.stderr.startswith("error[E403]: No space left on device")
        assert done.stderr.count("error[") == 1


@looped(
    ("arguments", "status", "number"),
    [
        (["list"], 4, "E404"),
        (["list", "--json"], 4, "E404"),
        (["--version"], 4, "E404"),
        (["show", "none", "--json"], 3, "E104"),
        (["show"], 2, ""),
        (["render", "mc_sim_7b_63", "-o", "tree.svg", "-q"], 0, ""),  # prints nothing
    ],
)
def test_closed_output_is_an_error(arguments: list[str], status: int, number: str) -> None:
    """A result that cannot be printed, as the caller closed standard output, is E404; other errors keep theirs."""
    command = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "treeopt", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT_FOLDER)}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert done.returncode == status
    if "--json" in arguments:
        assert json.loads(done.stderr)["error"] == number
    elif number:
        assert done.stderr.startswith(f"error[{number}]: ")
        assert done.stderr.count("error[") == 1
    assert ("standard output is closed" in done.stderr) == (number == "E404")


def test_unknown_command_names_the_close_ones() -> None:
    """A misspelt command is answered with the ones that are spelt alike."""
    assert "Did you mean 'build'?" in run("bild").stderr
    assert "Did you mean" not in run("xyzzy").stderr
    assert run("bild").returncode == run("xyzzy").returncode == 2


def test_nothing_but_the_terminal_prints() -> None:
    """No command prints past the place that escapes; `generate` writes the model's text, with a rule of its own."""
    calls = re.compile(r"click\.s?echo\(|\bprint\(|std(out|err)\.write\(")
    files = (ROOT_FOLDER / "treeopt").rglob("*.py")
    printing = {path.name for path in files if calls.search(path.read_text())}
    # The table of a terminal, whose cells are escaped; `interrupted` before anything is imported.
    assert printing == {"terminal.py", "console.py", "generate_command.py", "__init__.py"}


@looped(
    ("error", "number", "status"),
    [
        (MemoryError("21 GiB"), "E403", 4),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "E403", 4),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "E403", 4),
        (OSError(errno.ENOSPC, "No space left on device"), "E403", 4),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "E403", 4),
        (OSError(errno.EIO, "Input/output error", "x.yaml"), "E404", 4),
        (PermissionError(errno.EACCES, "Permission denied", "x.yaml"), "E404", 4),
    ],
)
def test_what_the_system_refuses_is_no_bug(
    error: Exception, number: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory, disk and permissions are the environment's, in any command, with the file where there is one."""

    def fail() -> None:
        raise error

    monkeypatch.setattr("treeopt.cli.list_command.zoo", fail)
    assert not getattr(error, "filename", None) or "at:  x.yaml" in error_of(number, "list", status=status)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@looped(
    ("arguments", "status"),
    [(["show", "nope"], 3), (["show", "nope", "--json"], 3), (["build", "--nodes", "0"], 2), (["list"], 0)],
)
def test_full_standard_error_leaves_the_status(arguments: list[str], status: int) -> None:
    """Where messages cannot be written, the exit status still says what happened."""
    command = [sys.executable, "-m", "treeopt", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT_FOLDER)}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=full, check=False, env=environment)
    assert done.returncode == status


def test_cells_of_tables_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt's category cannot colour a table, nor add a column or a row to it."""
    Console(False, False).table(["category", "texts"], [[f"{ESCAPE}\ta\nb", "1"]])
    assert capsys.readouterr().out.splitlines() == ["category\ttexts", f"{SHOWN}\\ta\\nb\t1"]
