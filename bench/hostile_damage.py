"""One run of `hostile.py`: a description, the command line, and the damage done before it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MODEL = ["--heads", "model/heads", "--model", "model"]
SHORT = [*MODEL, "--prompts", "prompts.jsonl", "--limit", "2", "--max-new-tokens", "8"]
VALIDATE = ["validate", *SHORT, "--tree", "mine.yaml"]
GENERATE = ["generate", "def f(x):", *MODEL, "--tree", "mine.yaml", "--max-new-tokens", "8"]
CALIBRATE = ["calibrate", *SHORT, "-o", "new.safetensors"]


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        what: description of the damage.
        arguments: arguments of the program.
        prepare: changes the run's folder before.
        stdin: content of standard input.
    """

    what: str
    arguments: list[str]
    prepare: Callable[[], object] = lambda: None
    stdin: bytes = b""


def write(name: str, content: str | bytes) -> Callable[[], object]:
    """A preparation that writes a file."""
    raw = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return lambda: Path(name).write_bytes(raw)


def edit(name: str, **changes: object) -> Callable[[], object]:
    """A preparation that changes keys of a JSON file; None removes a key."""

    def change() -> None:
        data = json.loads(Path(name).read_text()) | changes
        Path(name).write_text(json.dumps({key: value for key, value in data.items() if value is not None}))

    return change


def flip(name: str, place: int) -> Callable[[], object]:
    """A preparation that changes one byte."""

    def change() -> None:
        raw = bytearray(Path(name).read_bytes())
        raw[place % len(raw)] ^= 0x41
        Path(name).write_bytes(raw)

    return change


def remove(name: str, folder: bool = False) -> Callable[[], object]:
    """A preparation that removes a file; with `folder` it makes a folder of that name."""

    def change() -> None:
        Path(name).unlink()
        if folder:
            Path(name).mkdir()

    return change


def index(content: str) -> Callable[[], object]:
    """A preparation that moves the model's weights to another folder and writes an index of shards."""

    def change() -> None:
        Path("model/model.safetensors").rename("elsewhere.safetensors")
        Path("model/model.safetensors.index.json").write_text(content)

    return change


def tree(*lines: str) -> str:
    """The text of a tree file."""
    return "\n".join(["schema: treeopt.tree/1", *lines]) + "\n"


def paths(*ranks: str) -> str:
    """A tree file with these paths."""
    lines = [f"- {{path: [{one}]}}" for one in ranks]
    return tree(f"nodes: {len(ranks) + 1}", "paths:" if lines else "paths: []", *lines)


def header(text: bytes, length: int | None = None) -> bytes:
    """The first bytes of a safetensors file, with any header."""
    return struct.pack("<Q", len(text) if length is None else length) + text
