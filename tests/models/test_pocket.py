"""The built-in model: small enough, complete, found by name, and judged on what it never saw."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from treeopt.errors import Code, TreeoptError
from treeopt.files.bundled import pocket
from treeopt.models.base import load_base
from treeopt.models.given import load_pair
from treeopt.models.head_files import load_heads
from treeopt.texts.prompts import load_prompts

DRAFT = pocket().with_name("pocket-draft")


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
    (tmp_path / "pocket" / "other.pt").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TreeoptError) as error:
        load_heads("pocket")
    assert error.value.code is Code.FILE_MISSING


def test_draft_model_is_small_and_reads_as_pocket() -> None:
    """By name and by folder: below 1 MB with its card, pocket's tokenizer and vocabulary, at least pocket's context."""
    target = load_base("pocket", device="cpu")
    assert target.tokenizer is not None
    for name in ("pocket-draft", str(DRAFT)):
        draft = load_base(name, device="cpu")
        assert (draft.name, draft.vocab_size, draft.eos_ids) == (name, target.vocab_size, target.eos_ids)
        assert draft.context >= target.context
        assert draft.tokenizer is not None
        assert draft.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    assert sum(path.stat().st_size for path in DRAFT.iterdir()) < 1_000_000
    assert not list(DRAFT.glob("tokenizer*"))


def test_copied_draft_model_has_no_tokenizer(tmp_path: Path) -> None:
    """Elsewhere its files are those of any model without a tokenizer; heads of that name do not exist."""
    assert load_base(str(shutil.copytree(DRAFT, tmp_path / "copy")), device="cpu").tokenizer is None
    with pytest.raises(TreeoptError) as error:
        load_heads("pocket-draft")
    assert error.value.code is Code.FILE_MISSING


def test_card_states_both_losses() -> None:
    """The card holds the training and the held-out loss that the recipe's run wrote down."""
    losses = json.loads((pocket() / "losses.json").read_text())
    card = (pocket() / "README.md").read_text()
    for name in ("train_loss", "unseen_loss"):
        assert f"{losses[name]:.3f}" in card, name
