"""Recognition of files by their content, so that an error names the kind of a file that is not a tree."""

from __future__ import annotations

import json
from pathlib import Path

from treeopt.errors import Code, TreeoptError
from treeopt.files import strict_yaml
from treeopt.files.read import MAX_HEADER, is_regular, read_start, unreadable

TREE_FORMATS = (
    "a tree is a YAML file of treeopt (treeopt.tree/1), a list of paths such as [[0], [1], [0, 0]] in JSON or Python, "
    "or a name from `treeopt list`"
)
# Schema of treeopt's other files -> their kind and their use.
OURS = {
    "treeopt.calibration/1": ("a calibration", "treeopt build --calibration FILE makes a tree of it"),
    "treeopt.shard/1": ("a shard of a calibration", "treeopt merge SHARDS -o FILE makes a calibration of all shards"),
    "treeopt.answers/1": ("a shard of answers", "treeopt merge SHARDS -o FILE joins all shards"),
    "treeopt.drafter/1": ("a drafter", "treeopt calibrate --drafter FILE, and treeopt build, make a tree for it"),
    "treeopt.buffers/1": ("a compiled tree", "give the tree that it was compiled from"),
    "treeopt.latency/1": ("a latency profile", "treeopt build --nodes auto --profile FILE makes a tree with it"),
    "treeopt.prompts/1": ("a description of prompts", "give it to --prompts"),
    "treeopt.policy/1": ("a policy, with a tree for each step", "give it to treeopt generate"),
}
_MAGIC = (
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"GIF8", "a GIF picture"),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a zip archive or a PyTorch checkpoint"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"PAR1", "a parquet file"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\xff\xfe", "text in UTF-16, not in UTF-8"),
    (b"\xfe\xff", "text in UTF-16, not in UTF-8"),
    (b"<svg", "an SVG picture"),
    (b"<?xml", "an XML document"),
    (b"<!DOCTYPE", "a web page"),
    (b"<html", "a web page"),
)


def read_text(path: Path, formats: str) -> bytes:
    """The bytes of a file that may be UTF-8 text.

    Args:
        path: an existing file; a pipe is read to its end.
        formats: the formats that are expected, for the error.

    Raises:
        TreeoptError: E203 where it is a folder, a binary file of treeopt, of another known format, or too large.
    """
    most = strict_yaml.MAX_BYTES
    try:
        raw, size = read_start(path, most + 1)
    except IsADirectoryError as error:
        raise refusal(path, "is a folder", formats, at=str(path), fix="name a file in it") from error
    except (OSError, ValueError) as error:
        raise refusal(path, f"cannot be read: {unreadable(error)}", formats) from error
    kind, use = _binary_kind(raw)
    if kind:
        raise refusal(path, f"is {kind}", formats, fix=use)
    if len(raw) > most:
        raise refusal(path, f"has {size:,} bytes; at most {most:,} are read", formats)
    return raw


def schema_of(path: Path) -> str:
    """The schema of a safetensors file of treeopt; empty for any other file, a folder and a pipe."""
    if not is_regular(path):
        return ""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return _schema(stream.read(length)) if length <= MAX_HEADER else ""


def refusal(path: Path, what: str, formats: str, *, at: str = "", fix: str = "") -> TreeoptError:
    """E203: a file is not of the expected formats."""
    return TreeoptError(Code.FILE_INVALID, f"{path} {what}", at=at or f"{path}:1:1", why=formats, fix=fix)


def _binary_kind(raw: bytes) -> tuple[str, str]:
    """The kind of the bytes and, for a file of treeopt, its use; empty where they may be text."""
    length = int.from_bytes(raw[:8], "little")
    if raw[8:9] == b"{" and 2 <= length <= MAX_HEADER:
        return OURS.get(_schema(raw[8 : 8 + length]), ("a safetensors file", ""))
    return next(((kind, "") for magic, kind in _MAGIC if raw.startswith(magic)), ("", ""))


def _schema(header: bytes) -> str:
    """The schema in the header of a safetensors file of treeopt; empty for any other file."""
    try:
        return str(json.loads(json.loads(header)["__metadata__"]["treeopt"])["schema"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
