"""Hub: which files of a repository are asked for, and whether the hub itself is used. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from looped import looped

from treeopt.errors import Code, TreeoptError
from treeopt.models import hub
from treeopt.texts.prompts import load_prompts


@looped("reachable", [True, False])
def test_repository_is_downloaded_only_where_the_hub_answers(reachable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads need their weights and config, a base its small files; without the hub the cache alone is searched."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        calls.append((name, options))
        return "/cache"

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(hub, "hub_reachable", lambda: reachable)
    assert hub.find_heads("owner/heads", ("w.safetensors",)) == hub.find_base("owner/base") == Path("/cache")
    heads, base = calls
    assert heads == (
        "owner/heads",
        {"allow_patterns": ["config.json", "w.safetensors"], "local_files_only": not reachable},
    )
    small = {"allow_patterns": ["*.json"], "ignore_patterns": ["*/*"]}
    assert base == ("owner/base", {**small, "local_files_only": not reachable})


def test_folder_without_a_model_hides_no_built_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the name `pocket`, such as for outputs; one with a model comes first."""
    (tmp_path / "pocket").mkdir()
    (tmp_path / "pocket" / "tree.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert hub.find_base("pocket") == hub.built_in("pocket")
    assert len(load_prompts("pocket", limit=1).prompts) == 1
    Path("pocket/config.json").touch()
    assert hub.find_base("pocket") == Path("pocket")


@looped(("reachable", "why"), [(True, "no such repository"), (False, "offline mode is on")])
def test_repository_that_is_not_found_is_one_error(reachable: bool, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the client raises is E301, with the name; an answer of the hub is its reason."""

    def fail(_name: str, **_options: Any) -> str:
        raise ValueError("no such repository\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr(hub, "hub_reachable", lambda: reachable)
    for find in (lambda: hub.find_heads("a/b", ()), lambda: hub.find_base("a/b")):
        with pytest.raises(TreeoptError) as caught:
            find()
        assert caught.value.code is Code.HUB_UNREACHABLE
        assert "a/b" in caught.value.what
        assert caught.value.why.startswith(why)


@contextlib.contextmanager
def hanging_hub(*, answers_probe: bool) -> Iterator[str]:
    """The address of a server that accepts and never answers, but for the first request where `answers_probe`."""
    held: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed at the end
            while True:
                held.append(server.accept()[0])
                threading.Thread(target=answer, args=(held[-1],), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        while raw := connection.recv(4096):
            if answers_probe and raw.startswith(b"HEAD / "):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        for one in held:
            one.close()


@looped("answers_probe", [False, True])
@pytest.mark.slow
def test_hub_that_hangs(answers_probe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that accepts and never answers, from the first request on or later, is one E301 after the timeout."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)  # as the variable of this name sets it
    monkeypatch.setattr(hub, "PROBE_SECONDS", 1.0)
    with hanging_hub(answers_probe=answers_probe) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        hub.hub_reachable.cache_clear()
        huggingface_hub.close_session()
        try:
            assert hub.hub_reachable() is answers_probe
            for find in (lambda: hub.find_heads("a/b", ()), lambda: hub.find_base("a/b")):
                with pytest.raises(TreeoptError) as caught:
                    find()
                assert caught.value.code is Code.HUB_UNREACHABLE
        finally:
            hub.hub_reachable.cache_clear()
            huggingface_hub.close_session()
