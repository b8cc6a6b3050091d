"""The manifest of an output folder: hashes of the files that a run wrote, so that a later run replaces only these."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import write_text
from treeopt.files.read import MOST_SETTINGS, parse_json, read_bytes, sha256_of

_HASH = re.compile("[0-9a-f]{64}")


class Manifest:
    """A JSON file `{name: sha256}` in the folder of the files that it lists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, names: Iterable[str], *, force: bool) -> None:
        """Raise E202 where a file of these names exists that no earlier run wrote, or that was changed since."""
        known = self._read()
        for name in () if force else (self.path.name, *names):
            file = self.path.with_name(name)
            if not file.exists() or (file == self.path and known):
                continue
            if known.get(name) != sha256_of(file):
                why = f"{self.path.name} lists the files of an earlier run; this one is not in it, or was changed"
                fix = "choose another folder with -o, or overwrite it with --force"
                raise TreeoptError(Code.FILE_EXISTS, f"{file} exists", why=why, fix=fix)

    def add(self, names: Iterable[str]) -> None:
        """List these files, where they exist, as they are now."""
        files = {name: self.path.with_name(name) for name in names}
        found = {name: sha256_of(file) for name, file in files.items() if file.is_file()}
        write_text(self.path, json.dumps(self._read() | found, indent=1) + "\n")

    def _read(self) -> dict[str, object]:
        try:
            data = parse_json(read_bytes(self.path, MOST_SETTINGS))
        except (TreeoptError, ValueError):
            return {}  # no manifest, or an unreadable one: no file is known
        valid = isinstance(data, dict) and all(isinstance(one, str) and _HASH.fullmatch(one) for one in data.values())
        return data if valid else {}
