"""Pretrain and the recipe of the built-in model, at the smallest size that runs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import SIZES, SOURCE, documents

from treeopt.files.bundled import data_root
from treeopt.files.strict_yaml import load
from treeopt.models.base import load_base
from treeopt.models.pair import load_pair
from treeopt.train import pocket
from treeopt.train.data import load_texts
from treeopt.train.pocket import BasePart, Recipe, draw, make
from treeopt.train.pretrain import END, blocks, mean_loss, pretrain, train_tokenizer


def tiny_recipe() -> Recipe:
    """The built-in model's recipe, every size of it small."""
    raw = copy.deepcopy(load(data_root("calibration") / "recipes" / "pocket.yaml").data)
    raw["corpus"]["unseen_one_in"] = 2
    raw["base"] = SIZES
    raw["openings"] = {"characters": 40, "built_in": 3, "seeds": 5}
    raw["answers"] = {"max_new_tokens": 8, "batch_size": 2}
    raw["heads"] |= {"num_heads": 2, "epochs": 1.0, "batch_size": 2, "holdout": 1}
    return Recipe.model_validate(raw)


@pytest.mark.parametrize("text", ["", SOURCE, "a  b\t\n\n c .", "it 's n't , !", "ünïcode ✓ 漢字 🙂\r\n", "\x00\x7f"])
def test_tokenizer_round_trip(text: str) -> None:
    """Any text, of characters never trained on too, comes back byte for byte."""
    tokenizer = train_tokenizer([SOURCE], 300, 32)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_tokenizer_size_and_end() -> None:
    """The vocabulary has the size asked for, and its token 0 ends texts."""
    tokenizer = train_tokenizer([SOURCE] * 3, 280, 32)
    assert len(tokenizer) == 280
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == (END, 0)
    assert max(tokenizer(SOURCE).input_ids) < 280
    assert len(tokenizer(SOURCE).input_ids) < len(SOURCE)


def test_blocks_by_hand() -> None:
    """Texts follow one another, each with its end; the last, shorter block is dropped."""
    tokenizer = train_tokenizer(["ab"], 258, 32)
    ids = [*tokenizer("abc").input_ids, 0, *tokenizer("de").input_ids, 0]
    found = blocks(tokenizer, ["abc", "de"], 2)
    assert found.flatten().tolist() == ids[: len(ids) // 2 * 2]
    assert found.dtype is torch.int64
    assert blocks(tokenizer, ["abc"], 100).shape == (0, 100)


def test_pretrain_saves_a_model_with_its_losses(tmp_path: Path) -> None:
    """The folder holds a model in half precision with its tokenizer, and the losses are of that model."""
    tokenizer = train_tokenizer([SOURCE], 300, 32)
    rows = blocks(tokenizer, [SOURCE] * 6, 32)
    losses = pretrain(BasePart(**SIZES), tokenizer, rows[2:], rows[:2], tmp_path)
    base = load_base(str(tmp_path), device="cpu")
    assert (base.vocab_size, base.hidden_size, base.context, base.eos_ids) == (300, 16, 32, (0,))
    assert base.tokenizer is not None
    assert base.tokenizer.decode(base.tokenizer(SOURCE).input_ids) == SOURCE
    weights = base.lm_head.weight
    assert torch.equal(weights, weights.bfloat16().float())
    assert losses["unseen_loss"] == pytest.approx(mean_loss(base.model, rows[:2]), rel=1e-5)
    assert losses["train_loss"] == pytest.approx(mean_loss(base.model, rows[2:4]), rel=1e-5)


def test_mean_loss_counts_every_block() -> None:
    """The mean over blocks run in several batches is that over blocks run alone."""
    from tiny import VOCAB, tiny_base

    model: Any = tiny_base("llama").model
    rows = torch.randint(VOCAB, (11, 9), generator=torch.Generator().manual_seed(0))
    alone = [mean_loss(model, row[None]) for row in rows]
    assert mean_loss(model, rows) == pytest.approx(sum(alone) / 11, rel=1e-5)


def test_draw_is_sorted_and_seeded() -> None:
    """Openings are drawn by seed, kept in the order of their documents, and all where fewer are there than asked."""
    texts = documents()
    everything = draw(texts, 40, 1000, seed=0)
    assert draw(texts, 40, 4, seed=0) == draw(texts, 40, 4, seed=0) != draw(texts, 40, 4, seed=1)
    places = [everything.index(row) for row in draw(texts, 40, 4, seed=0)]
    assert len(places) == 4
    assert places == sorted(places)


def test_make_writes_everything_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe leaves base, heads, prompts of unseen modules and answers to seen ones; again, nothing changes."""
    texts = documents()
    monkeypatch.setattr(pocket, "standard_library", lambda: texts)
    make(tiny_recipe(), tmp_path)
    base, loaded = load_pair(str(tmp_path / "heads"), None, device="cpu")
    assert (base.vocab_size, loaded.heads.num_heads, loaded.heads.lm_head) == (300, 2, None)
    rows = {
        name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("prompts.jsonl", "seeds.jsonl", "answers.jsonl")
    }
    assert {row["from"] for row in rows["prompts.jsonl"]} == {texts[0].name}
    assert {row["from"] for row in rows["seeds.jsonl"]} <= {texts[1].name, texts[2].name}
    assert [len(rows[name]) for name in ("prompts.jsonl", "seeds.jsonl")] == [3, 5]
    assert [row["text"] for row in rows["answers.jsonl"]] == [row["text"] for row in rows["seeds.jsonl"]]
    assert load_texts(base, [str(tmp_path / "answers.jsonl")], length=32).cut == 0
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert set(losses) == {"seen_tokens", "unseen_tokens", "train_loss", "unseen_loss"}
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    make(tiny_recipe(), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
