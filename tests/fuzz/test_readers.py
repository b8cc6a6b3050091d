"""Every reader of files, with damaged files: nothing but TreeoptError is raised, and nothing is written or run.

`bench/fuzz.py` has the same readers with many more files.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from conftest import ROOT_FOLDER
from damage import damage_bytes
from hostile_readers import READERS, Reader, folder_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treeopt.errors import TreeoptError
from treeopt.files import read

pytestmark = pytest.mark.slow

EXAMPLES = 12  # of each reader; slow ones have a quarter
LONGEST = 20_000  # characters of a message
# Events of Python that reading must not cause.
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "os.remove")
FORBIDDEN += ("os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod")
_seen: list[str] | None = None  # events, while a reader runs


def _note(event: str, given: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event.startswith(FORBIDDEN):
        _seen.append(event)
    elif event == "open" and isinstance(given[0], str) and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _seen.append(f"{given[0]} opened for writing")


sys.addaudithook(_note)


def refused(reader: Reader, path: Path) -> str:
    """The message of a reader's error, empty where it accepts the file; other exceptions pass through."""
    global _seen
    before = sorted(path.parent.rglob("*"))
    _seen = []
    try:
        reader.read(path)
        message = ""
    except TreeoptError as error:
        message = str(error)
        assert len(message) < LONGEST
    finally:
        events, _seen = _seen, None
    assert not events
    assert sorted(path.parent.rglob("*")) == before
    return message


@pytest.fixture(params=READERS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Reader, Path]:
    """A reader, and the path of its file in a folder with the other files that it needs."""
    reader = READERS[request.param]
    return reader, folder_of(request.param, tmp_path) / reader.file


@pytest.mark.quick
def test_valid_files_are_read(case: tuple[Reader, Path]) -> None:
    """The files that are damaged below are valid, so that damage is what is refused."""
    reader, path = case
    for raw in reader.valid():
        path.write_bytes(raw)
        reader.before(path)
        assert refused(reader, path) == ""


def test_damaged_files_are_refused_or_read(case: tuple[Reader, Path]) -> None:
    """Damage to bytes and to the structure of a format ends with a record or with TreeoptError."""
    reader, path = case
    valid = reader.valid()

    @settings(
        max_examples=EXAMPLES // 4 if reader.slow else EXAMPLES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32), st.sampled_from(valid), st.booleans())
    def damaged(seed: int, raw: bytes, structure: bool) -> None:
        path.write_bytes((reader.damage if structure else damage_bytes)(raw, Random(seed)))
        reader.before(path)
        refused(reader, path)

    damaged()


ODD = {
    "nothing": b"",
    "zeros": bytes(5000),
    "a byte order mark alone": b"\xef\xbb\xbf",
    "UTF-16": '{"schema": 1}'.encode("utf-16"),
    "UTF-16 without a mark": '{"schema": 1}'.encode("utf-16-le"),
    "Latin-1": b'{"a": "\xe9"}',
    "a surrogate": b'{"a": "\xed\xa0\x80"}',
    "an escaped surrogate": b'{"schema": "\\ud800", "text": "\\ud800"}',
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 20_000,
    "10**400": b'{"schema": 1' + b"0" * 400 + b', "nodes": 1' + b"0" * 400 + b"}",
    "5,000 digits": b'{"schema": ' + b"9" * 5000 + b"}",
    "not finite": b'{"schema": NaN, "nodes": Infinity, "tokens": -1e999}',
    "a key twice": b'{"schema": 1, "schema": 2}',
    "aliases": b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n",
    "a tag": b"!!python/object/apply:os.mkdir [made]\n",
    "a header of 2**63 bytes": b"\0\0\0\0\0\0\0\x80{}",
    "a header of 100 MB": (100_000_000).to_bytes(8, "little") + b"{}",
    "a pickle": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c\x04made\x85R.",
    "a zip": b"PK\x05\x06" + bytes(18),
    "parquet": b"PAR1\xff\xff\xff\x7fPAR1",
}


def test_odd_contents(case: tuple[Reader, Path]) -> None:
    """Contents that break parsers end with TreeoptError, or are read as what they may be."""
    reader, path = case
    for raw in ODD.values():
        path.write_bytes(raw)
        refused(reader, path)


def test_things_that_are_no_files(case: tuple[Reader, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, a pipe without a writer, and links to themselves, to nothing and to endless devices do not hang."""
    monkeypatch.setattr(read, "_WAIT_MS", 1)
    monkeypatch.setattr(read, "_MOST_PIPED", 1 << 20)
    reader, path = case
    for make in (
        Path.mkdir,
        os.mkfifo,
        lambda place: place.symlink_to(place),
        lambda place: place.symlink_to("nowhere"),
        lambda place: place.symlink_to("/dev/zero"),
        lambda place: place.symlink_to("/dev/null"),
    ):
        if path.is_file():
            path.unlink()
        make(path)
        refused(reader, path)
        (path.rmdir if path.is_dir() else path.unlink)()


# Public functions named load_*, read_* or import_* that no reader of the table enters, each with the reason.
EXCEPTIONS = {
    "load_draft_model": "options become a call of models.base.load_base",
    "load_models": "options become calls of models.base.load_base and models.head_files.load_heads",
    "load_for_plan": "options become calls of the loaders of the table",
    "load_with_prompts": "options become calls of the loaders of the table",
    "read_head": "the primitive below stored_configuration",
    "read_bytes": "the primitive below the readers",
    "read_note": "the primitive below RunFolder and the checkpoints of learn: tests/runs, tests/train",
    "read_settings": "the primitive below read_config",
    "read_start": "the primitive below read_bytes and read_text",
    "load_base": "its checks are in the table; weights are read by transformers: tests/models/test_base.py",
    "load_pair": "load_base and load_heads",
    "load_texts": "rows of read_texts, which is in the table",
}


@pytest.mark.quick
def test_every_public_reader_is_entered() -> None:
    """Every public load_*, read_* and import_* function is entered by a reader of the table, or has a reason."""
    public = {
        part.name
        for path in (ROOT_FOLDER / "treeopt").rglob("*.py")
        for part in ast.parse(path.read_text()).body
        if isinstance(part, ast.FunctionDef)
        and part.name.split("_")[0] in ("load", "read", "import")
        and "_" in part.name
    }
    entered = {name for reader in READERS.values() for name in reader.enters}
    assert not entered & set(EXCEPTIONS)
    assert public <= entered | set(EXCEPTIONS)
    assert set(EXCEPTIONS) <= public


@pytest.mark.quick
def test_entered_functions_are_called(tmp_path: Path) -> None:
    """The functions that the table names are called when a valid file is read."""
    for number, (name, reader) in enumerate(READERS.items()):
        if not reader.enters:
            continue
        place = tmp_path / str(number)
        place.mkdir()
        path = folder_of(name, place) / reader.file
        called: set[str] = set()

        def trace(frame: Any, event: str, _argument: Any, called: set[str] = called) -> None:
            if event == "call":
                called.add(frame.f_code.co_name)

        for raw in reader.valid():
            path.write_bytes(raw)
            reader.before(path)
            sys.setprofile(trace)
            try:
                reader.read(path)
            finally:
                sys.setprofile(None)
        assert set(reader.enters) <= called, name
