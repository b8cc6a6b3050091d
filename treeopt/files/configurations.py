"""Configurations: options of commands in YAML files, and those that are stored in the files that commands write.

A file for `--config` has names of options, without dashes in front, and their values. An entry with the name of a
command has options of this command alone, which come before those beside it. A stored configuration has the same form,
with an entry of the command that wrote the file, and one of the
options that were not given, which have the command's defaults:

    configuration:
      build:
        nodes: 64
      defaults:
        calibration: ["calibration.safetensors"]
        kind: "static"

The values under `defaults` are used, and count as not given: some options mean more where they are given. Two more
entries are for `treeopt reproduce`, and no options: `inputs` has the SHA-256 of each file that was read, by its name,
and `made-by` the versions.

Texts, CSV, other pictures than SVG and DOT, and files for engines cannot hold it: other readers would refuse it. A note
beside them, `NAME.treeopt.yaml`, holds it with the SHA-256 of its file, so that it is not taken for that of another.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import write_text
from treeopt.files.read import MOST_SETTINGS, header_of, parse_json, read_bytes, read_head, sha256_of

if TYPE_CHECKING:
    from treeopt.files.strict_yaml import Document, Where


KEY = "configuration"
_MOST_READ = 1 << 27  # bytes of a picture or report
_PICTURES = (b"<svg", b"<?xml", b"//", b"digraph", b"<!DOCTYPE html>")
_START = 16  # bytes that show the kind of a file
DEFAULTS = "defaults"  # the entry of options that are not given
INPUTS, MADE_BY = "inputs", "made-by"  # entries that are no options
NO_COMMANDS = (DEFAULTS, INPUTS, MADE_BY)
_CONFIG_FILE = "config.json"  # of heads, in their folder
_NOTE_FILES = (_CONFIG_FILE, "treeopt.json")  # of heads; of adapters
_COMMENT = "treeopt configuration: "  # of pictures and reports
_NOTE_START = 4096  # bytes of a note with its comment and schema
_NOTE_SUFFIX, _NOTE_SCHEMA = ".treeopt.yaml", "treeopt.made/1"  # of notes beside files
_HEADER_PARTS = ((), ("provenance",), ("source",), ("treeopt",))  # of a file's header or data that may have the key

Configuration = Mapping[str, Mapping[str, Any]]


def read_configuration(path: str | os.PathLike[str]) -> tuple[Document, Where]:
    """The document of a file for `--config`, and the place of its options, which files of treeopt store."""
    from treeopt.files import strict_yaml

    file = Path(path)
    if not file.exists():
        raise TreeoptError(Code.FILE_MISSING, f"there is no file {path}")
    if not file.is_dir() and note_of(file).is_file():
        with contextlib.suppress(TreeoptError):  # the note of an earlier file of this name may be beside it
            document = _document(file)
            if (place := _place(document.data)) is not None:
                return document, place
        return strict_yaml.Document(file, _noted(file), {}), ()
    document = _document(file)
    if not isinstance(document.data, dict):
        raise TreeoptError(Code.FILE_INVALID, f"{path} is no mapping", at=document.at(()), fix=_FIX)
    place = _place(document.data)
    if place is None and ("schema" in document.data or not document.marks):
        raise _none_stored(file)
    return document, place or ()


def _document(file: Path) -> Document:
    """The document in a file, or in a folder of heads; one that is not YAML has no marks."""
    from treeopt.files import strict_yaml

    data = _header(file)
    return strict_yaml.load(file) if data is None else strict_yaml.Document(file, data, {})


def _place(data: Any) -> Where | None:
    """The place of the configuration in the data of a file; None where it has none."""
    for place in _HEADER_PARTS:
        part = _part(data, place)
        if isinstance(part, dict) and isinstance(part.get(KEY), dict):
            return (*place, KEY)
    return None


def stored_configuration(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """The configuration that is stored in a file of treeopt, or in a folder of heads; E203 without one."""
    document, place = read_configuration(path)
    found = _part(document.data, place)
    if not isinstance(found, dict) or not all(isinstance(options, dict) for options in found.values()):
        raise _none_stored(Path(path))
    return found


def configuration_yaml(configuration: Configuration, indent: str = "") -> str:
    """The lines of a configuration, one for each option, each with its line end."""
    lines = []
    for command, options in configuration.items():
        lines.append(f"{indent}{command}:" if options else f"{indent}{command}: {{}}")
        quoted = command == INPUTS  # names of files
        lines += [f"{indent}  {flow(name) if quoted else name}: {_value(value)}" for name, value in options.items()]
    return "".join(f"{line}\n" for line in lines)


def command_lines(configuration: Configuration, *more: str, arguments: Sequence[str] = ()) -> list[str]:
    """The commands of a configuration as they can be typed again, without defaults, each with `more` at its end."""
    return [
        shlex.join(["treeopt", *name.split(), *_command_words(options, more, arguments)])
        for name, options in configuration.items()
        if name not in NO_COMMANDS
    ]


def _command_words(options: Mapping[str, Any], more: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """The arguments and options of one command; arguments that look like options are last, after `--`."""
    values = [options[name] for name in arguments if name in options]
    typed = [str(one) for value in values for one in (value if isinstance(value, (list, tuple)) else [value])]
    words = [word for name, value in options.items() if name not in arguments for word in _words(name, value)]
    if any(one.startswith("-") and one != "-" for one in typed):
        return [*words, *more, "--", *typed]
    return [*typed, *words, *more]


def _words(option: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    values = value if isinstance(value, (list, tuple)) else [value]
    return [word for one in values for word in (f"--{option}", str(one))]


def stored_lines(source: Mapping[str, Any]) -> list[str]:
    """The lines about the configuration in the source of a record, for its YAML file; none where it has none."""
    if not source.get(KEY):
        return []
    return [f"{KEY}:", *configuration_yaml(source[KEY], "  ").splitlines()]


def entries(source: Mapping[str, Any], *names: str) -> list[str]:
    """The lines of these entries in YAML, as far as a record's source has them: values, and blocks of values."""
    lines: list[str] = []
    for name in (name for name in names if name in source):
        value = source[name]
        if not isinstance(value, Mapping):
            lines.append(f"{name}: {flow(value)}")
        elif value:
            lines += [f"{name}:", *(f"  {key}: {flow(one)}" for key, one in value.items())]
    return lines


def flow_mapping(fields: Mapping[str, Any]) -> str:
    """A mapping on one line of YAML, without fields that are None."""
    return f"{{{', '.join(f'{name}: {_value(value)}' for name, value in fields.items() if value is not None)}}}"


def note_of(path: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(path)}{_NOTE_SUFFIX}")


def write_note(path: str | os.PathLike[str], configuration: Configuration) -> None:
    """Write the note of a file that is written; the note of an earlier file of this name is replaced."""
    lines = [
        f"# how {Path(path).name} was made: treeopt reproduce makes it again",
        f"schema: {_NOTE_SCHEMA}",
        f"sha256: {flow(sha256_of(path))}",
        f"{KEY}:",
    ]
    write_text(note_of(path), "\n".join(lines) + "\n" + configuration_yaml(configuration, "  "))


def is_note(path: Path) -> bool:
    """Whether a file begins as a note does."""
    with open(path, "rb") as file:
        return f"schema: {_NOTE_SCHEMA}".encode() in file.read(_NOTE_START)


def _noted(path: Path) -> dict[str, Any]:
    """The configuration in the note of a file; E203 where it is of other content."""
    from treeopt.files import strict_yaml

    note = note_of(path)
    data = strict_yaml.load(note).data
    if not isinstance(data, dict) or data.get("schema") != _NOTE_SCHEMA or not isinstance(data.get(KEY), dict):
        raise TreeoptError(Code.FILE_INVALID, f"{note} is not a note of treeopt", at=str(note), fix="remove it")
    if data.get("sha256") != sha256_of(path):
        what = f"{path} was changed, or is another file, since {note.name} was written beside it"
        raise TreeoptError(Code.FILE_INVALID, what, at=str(note), fix=f"restore {path}, or remove the note")
    return dict(data[KEY])


def comment_of(configuration: Configuration) -> str:
    """The configuration as one line of a comment of SVG or DOT, which has no two dashes in a row."""
    return _COMMENT + json.dumps(configuration).replace("--", "-\\u002d")


_FIX = (
    "write names of options with their values, such as `nodes: 64`; treeopt show FILE --options prints those of a file"
)


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    return decimal(value) if isinstance(value, float) else flow(value)


def _part(data: Any, place: Where) -> Any:
    for key in place:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _none_stored(path: Path) -> TreeoptError:
    what = f"{path} stores no configuration"
    why = "files that Python code writes have none"
    fix = "a file that a treeopt command wrote, or a YAML file of options"
    return TreeoptError(Code.FILE_INVALID, what, why=why, fix=fix)


def _header(path: Path) -> dict[str, Any] | None:
    """What a file that is not YAML, or a folder of heads, says of itself; None for a file that may be YAML."""
    if path.is_dir():
        note = next((path / name for name in _NOTE_FILES if (path / name).is_file()), None)
        if note is None:
            what = f"{path} is a folder without {' or '.join(_NOTE_FILES)}"
            why = "of folders, those of heads and adapters store a configuration"
            raise TreeoptError(Code.FILE_INVALID, what, why=why, fix="name a file, or a folder of heads")
        return _json(read_bytes(note, MOST_SETTINGS))
    if read_head(path, _START).startswith(_PICTURES):
        text = _comment(read_bytes(path, _MOST_READ))
        return None if text is None else {KEY: _json(text.encode())}
    found = header_of(path)
    if found is None and read_head(path, 1) == b"{":  # of any characters; what a user wrote is read as YAML, with lines
        result = _json(read_bytes(path, _MOST_READ))
        return result if _place(result) is not None else None
    return found


def _comment(raw: bytes) -> str | None:
    """The configuration in the comment of a picture or a report."""
    for line in reversed(raw.decode(errors="replace").splitlines()):  # texts of a report come before the comment
        _, found, text = line.partition(_COMMENT)
        if found:
            return text.removesuffix(" -->")
    return None


def _json(raw: bytes) -> dict[str, Any]:
    try:
        found = parse_json(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


_UNPRINTED = re.compile("[\x7f-\x9f\ufeff\ufffe\uffff]")


def flow(value: Any) -> str:
    """A scalar in JSON notation, which is also YAML, with the characters escaped that YAML does not allow."""
    if isinstance(value, str):  # a file name that is not UTF-8 would make the file unreadable
        value = value.encode(errors="replace").decode()
    return _UNPRINTED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def decimal(value: float) -> str:
    """The shortest notation that reads back equal, with the decimal point that YAML 1.1 requires."""
    text = repr(float(value))
    mantissa, exponent, power = text.partition("e")
    return text if not exponent or "." in mantissa else f"{mantissa}.0e{power}"


_running: ContextVar[Configuration | None] = ContextVar("running", default=None)


@contextlib.contextmanager
def storing(configuration: Configuration) -> Iterator[None]:
    """Context in which heads and adapters are written with the configuration of a command."""
    before = _running.set(configuration)
    try:
        yield
    finally:
        _running.reset(before)


def with_stored(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a JSON file, with the configuration of the command that writes it; unchanged outside of commands."""
    running = _running.get()
    return dict(data) if running is None else {**data, KEY: running}
