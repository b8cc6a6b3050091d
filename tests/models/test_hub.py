"""Hub: which files of a repository are asked for, and whether the hub itself is used. Nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from treeopt.errors import Code, TreeoptError
from treeopt.models import hub


@pytest.mark.parametrize("reachable", [True, False])
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


@pytest.mark.parametrize(("reachable", "why"), [(True, "no such repository"), (False, "offline mode is on")])
def test_repository_that_is_not_found_is_one_error(reachable: bool, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the client raises is E301, with the option; an answer of the hub is its reason."""

    def fail(_name: str, **_options: Any) -> str:
        raise ValueError("no such repository\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr(hub, "hub_reachable", lambda: reachable)
    for find, option in ((lambda: hub.find_heads("a/b", ()), "--heads"), (lambda: hub.find_base("a/b"), "--model")):
        with pytest.raises(TreeoptError) as caught:
            find()
        assert caught.value.code is Code.HUB_UNREACHABLE
        assert caught.value.at == f"{option} a/b"
        assert caught.value.why.startswith(why)
