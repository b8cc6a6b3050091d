"""Files of a model by its name: a local path, a repository in the cache, or the hub.

The client of the hub retries an unreachable host for about a minute without a message. Here one short request decides
whether it is used. Some requests of its HTTP client have no timeout; here they have one, so that a hub that accepts
and never answers ends a command. Data sets and other clients (hf-xet) are not covered.
"""

import functools
import os
from pathlib import Path
from typing import Any

from treeopt.errors import Code, TreeoptError, first_line
from treeopt.files.bundled import POCKET, model_folder, pocket

PROBE_SECONDS = 4.0
_WAITS = ("connect", "read", "write", "pool")  # parts of a request that a timeout is of
_FILE_SUFFIXES = (".json", ".jsonl", ".txt", ".parquet", ".pt", ".safetensors", ".yaml")  # names may hold other dots
_OF_MODELS = {".json", ".safetensors", ".bin", ".pt"}  # ends of the files of a model


@functools.cache
def hub_reachable() -> bool:
    """Whether the hub answers within 4 s; False in offline mode."""
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return False
    try:
        session = get_session()
        _bound(session, float(constants.HF_HUB_DOWNLOAD_TIMEOUT))
        session.head(constants.ENDPOINT, timeout=PROBE_SECONDS)
    except Exception:  # the types vary by version of the client
        return False
    return True


def _bound(session: Any, seconds: float) -> None:
    """Give every request of the client a timeout where it has none."""

    def bound(request: Any) -> None:
        given = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {part: given.get(part) or seconds for part in _WAITS}

    hooks = session.event_hooks
    session.event_hooks = {**hooks, "request": [*hooks.get("request", []), bound]}


def looks_local(name: str) -> bool:
    """Whether a name can only be a path: hub names are `name` or `owner/name`."""
    return name.startswith((".", os.sep, "~")) or name.endswith((os.sep, *_FILE_SUFFIXES)) or name.count("/") > 1


def here(name: str) -> Path | None:
    """The path of a name, where it exists; a folder without a model does not hide the built-in one of its name."""
    path = Path(os.path.expanduser(name))
    hides = model_folder(name) is None or not path.is_dir() or {one.suffix for one in path.glob("*")} & _OF_MODELS
    return path if os.path.lexists(path) and hides else None


def built_in(name: str) -> Path | None:
    """The folder of the built-in model of this name, if any; an existing path of that name has precedence."""
    return model_folder(name) if here(name) is None else None


def find_heads(name: str, weight_files: tuple[str, ...]) -> Path:
    """The folder or file of a heads checkpoint; `pocket` is the built-in one."""
    known = pocket() / "heads" if name == POCKET else None
    local = looks_local(name) or "/" not in name
    return _found(name, "heads checkpoint", known, local, allow_patterns=["config.json", *weight_files])


def find_base(name: str) -> Path:
    """The folder of a base model's files: a local one, the built-in one, or the small files of a hub repository."""
    known = built_in(name)
    return _found(name, "model", known, looks_local(name), allow_patterns=["*.json"], ignore_patterns=["*/*"])


def find_weights(name: str, folder: Path) -> Path:
    """The folder of a model's files with its weights, which `find_base` leaves on the hub."""
    if here(name) is not None or built_in(name) is not None:
        return folder
    patterns = ["*.json", "*.safetensors", "*.bin"]
    return _found(name, "model", None, looks_local(name), allow_patterns=patterns, ignore_patterns=["*/*"])


def _found(name: str, kind: str, known: Path | None, local: bool, **patterns: list[str]) -> Path:
    """A local path, else the built-in folder, else these files of a repository, downloaded where the hub answers."""
    path = here(name) or known
    if path is not None:
        return path
    if local:
        raise TreeoptError(Code.FILE_MISSING, f"there is no {kind} {name}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, **patterns, local_files_only=not hub_reachable()))
    except Exception as error:  # the client raises many types
        raise unreachable(name, error) from error


def unreachable(name: str, error: Exception) -> TreeoptError:
    """E301: the hub did not answer, or the error of its client."""
    if hub_reachable():
        what, fix = f"{name} cannot be loaded from the hub", "check the name, or use a local path"
        return TreeoptError(Code.HUB_UNREACHABLE, what, why=first_line(error), fix=fix)
    what = f"{name!r} is not a path here and not in the cache, and the hub cannot be reached"
    why = "offline mode is on, or the hub did not answer within 4 s"
    return TreeoptError(Code.HUB_UNREACHABLE, what, why=why, fix="use a local path, or repeat with a connection")
