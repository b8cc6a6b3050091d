"""The built-in model: small enough, complete, found by name, and judged on what it never saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from treeopt.errors import Code, TreeoptError
from treeopt.files.bundled import data_root, pocket
from treeopt.files.strict_yaml import load
from treeopt.models.layouts import load_heads
from treeopt.models.pair import load_pair
from treeopt.texts.prompts import load_prompts
from treeopt.train.corpus import Document, is_unseen


def test_pocket_is_small() -> None:
    """At most 3 million parameters with its heads, and 8 MB with everything beside them."""
    base, loaded = load_pair("pocket", None, device="cpu")
    parameters = {id(p): p.numel() for module in (base.model, loaded.heads) for p in module.parameters()}
    assert sum(parameters.values()) <= 3_000_000
    assert 4 <= loaded.heads.num_heads <= 5
    assert sum(path.stat().st_size for path in pocket().rglob("*") if path.is_file()) <= 8_000_000


def test_pocket_goes_by_its_name_and_not_by_its_place() -> None:
    """Records and reports name `pocket`, the same on every machine."""
    base, loaded = load_pair("pocket", None, device="cpu")
    assert (base.name, loaded.name, loaded.base) == ("pocket", "pocket", "pocket")
    assert load_prompts("pocket", limit=3).name == "pocket"


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user has something called pocket, that is meant."""
    (tmp_path / "pocket").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TreeoptError) as error:
        load_heads("pocket")
    assert error.value.code is Code.FILE_MISSING


def test_prompts_come_from_modules_that_were_never_trained_on() -> None:
    """Each built-in prompt names its source, and the recipe's split puts that on the unseen side."""
    recipe = load(data_root("calibration") / "recipes" / "pocket.yaml").data
    rows = [json.loads(line) for line in (pocket() / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == recipe["openings"]["built_in"]
    for row in rows:
        module = row["from"].partition("/")[0].removesuffix(".py")
        assert is_unseen(Document(module, row["from"], row["text"]), recipe["corpus"]["unseen_one_in"]), row["from"]


def test_card_states_both_losses() -> None:
    """The card holds the training and the held-out loss that the recipe's run wrote down."""
    losses = json.loads((pocket() / "losses.json").read_text())
    card = (pocket() / "README.md").read_text()
    for name in ("train_loss", "unseen_loss"):
        assert f"{losses[name]:.3f}" in card, name
