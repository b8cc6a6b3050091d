"""The built-in model: small enough, complete, found by name, and judged on what it never saw."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from treeopt.errors import Code, TreeoptError
from treeopt.files.bundled import data_root, pocket, pocket_draft
from treeopt.files.strict_yaml import load
from treeopt.models.base import load_base
from treeopt.models.layouts import load_heads
from treeopt.models.pair import load_pair
from treeopt.texts.answers import continue_texts
from treeopt.texts.encode import encode_prompts
from treeopt.texts.prompts import load_prompts
from treeopt.train.corpus import Document, is_unseen
from treeopt.train.pocket_draft import judge


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


def test_draft_model_is_small_and_reads_as_pocket() -> None:
    """By name and by folder: below 1 MB with its card, pocket's tokenizer and vocabulary, at least pocket's context."""
    target = load_base("pocket", device="cpu")
    assert target.tokenizer is not None
    for name in ("pocket-draft", str(pocket_draft())):
        draft = load_base(name, device="cpu")
        assert (draft.name, draft.vocab_size, draft.eos_ids) == (name, target.vocab_size, target.eos_ids)
        assert draft.context >= target.context
        assert draft.tokenizer is not None
        assert draft.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    assert sum(path.stat().st_size for path in pocket_draft().iterdir()) < 1_000_000
    assert not list(pocket_draft().glob("tokenizer*"))


def test_copied_draft_model_has_no_tokenizer(tmp_path: Path) -> None:
    """Elsewhere its files are those of any model without a tokenizer; heads of that name do not exist."""
    assert load_base(str(shutil.copytree(pocket_draft(), tmp_path / "copy")), device="cpu").tokenizer is None
    with pytest.raises(TreeoptError) as error:
        load_heads("pocket-draft")
    assert error.value.code is Code.FILE_MISSING


def test_draft_model_often_has_the_best_token_of_pocket() -> None:
    """On answers to prompts that neither was trained on, it agrees about as often as its card says."""
    figures = json.loads((pocket_draft() / "losses.json").read_text())
    target, draft = (load_base(name, dtype="float32", device="cpu") for name in ("pocket", "pocket-draft"))
    prompts = encode_prompts(target, load_prompts("pocket", limit=48), 128).texts
    texts = continue_texts(target, prompts, 128)
    ids, begins = [torch.tensor(text.prompt + text.answer) for text in texts], [len(text.prompt) for text in texts]
    assert judge(target, draft.model, ids, begins)["top1"] == pytest.approx(figures["answers_top1"], abs=0.04)
    card = (pocket_draft() / "README.md").read_text()
    for name in ("seen", "unseen", "answers"):
        assert f"{figures[f'{name}_kl']:.3f}" in card, name
        assert f"{figures[f'{name}_top1']:.1%}" in card, name
    assert f"{figures['parameters']:,} parameters" in card


def test_card_states_both_losses() -> None:
    """The card holds the training and the held-out loss that the recipe's run wrote down."""
    losses = json.loads((pocket() / "losses.json").read_text())
    card = (pocket() / "README.md").read_text()
    for name in ("train_loss", "unseen_loss"):
        assert f"{losses[name]:.3f}" in card, name
