"""SmolLM2-135M-Instruct, a real chat model: texts are lossless in float32, and predicted equals measured."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

import treeopt
from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import Drafter
from treeopt.evaluate.learn_drafter import outside_shares
from treeopt.files.bundled import data_root
from treeopt.files.strict_yaml import load
from treeopt.models.base import Base, load_base
from treeopt.models.compatibility import heads_like
from treeopt.models.draft_files import load_draft
from treeopt.models.head_files import load_heads
from treeopt.policy import TreePolicy
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import load_prompts
from treeopt.tree import Tree

pytestmark = pytest.mark.smollm2

NEW_TOKENS = 24
HEADS = Path(__file__).resolve().parent.parent / "data" / "smollm2-heads"  # of calibration/recipes/smollm2.yaml


@pytest.fixture(scope="module")
def folder() -> Path:
    """The model folder; tests are skipped without it."""
    found = Path(os.environ.get("TREEOPT_CHAT_MODEL", "build/smollm2"))
    if not (found / "model.safetensors").is_file():
        pytest.skip(f"needs the model of `python bench/smollm2.py {found}` ({found} is absent)")
    return found.resolve()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def chat(request: pytest.FixtureRequest, folder: Path) -> Base:
    """The model in each dtype."""
    return load_base(str(folder), device="cpu", dtype=request.param)


@pytest.fixture(scope="module")
def texts(chat: Base, shared: Path) -> list[Text]:
    """Two AlpacaEval prompts in the model's chat template."""
    prompts = load_prompts(str(shared / "data" / "alpaca_eval.json"), skip=600, limit=2)
    return encode_prompts(chat, prompts, NEW_TOKENS, chat_template=True).texts


def stock(base: Base, text: Text) -> list[int]:
    """The text of stock greedy `generate`."""
    ids = torch.tensor([text.prompt])
    found = base.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return found[0, len(text.prompt) :].tolist()


def test_none_is_stock_generate(chat: Base, texts: list[Text]) -> None:
    """Plain decoding gives the texts of stock `generate` in every dtype: its forward calls are the same."""
    decoder = TreeDecoder(chat, None, Tree(()))
    for text in texts:
        assert decoder.generate(text.prompt, NEW_TOKENS).tokens == stock(chat, text)


def test_trees_of_the_text_are_lossless_and_as_predicted(chat: Base, texts: list[Text]) -> None:
    """A static and a per-step tree of 8 nodes, without anything learned; in half precision near ties may differ."""
    drafter = Drafter.untrained(chat.vocab_size)
    plans = (TreePolicy(8, drafter.depth, drafter.id), Tree.chain(3))
    for plan in (plans[0], dataclasses.replace(plans[1], drafter=drafter.id)):
        found = treeopt.validate(chat, None, plan, texts, drafter=drafter, max_new_tokens=NEW_TOKENS)
        assert not found.failures
        assert found.prediction_misses == ()
        assert found.tokens_per_step > 1.1
        if chat.dtype == torch.float32:
            assert found.lossless
            assert found.predicted.tokens_per_step == pytest.approx(found.tokens_per_step)


def test_tokens_per_second_decide_in_each_dtype(chat: Base, shared: Path) -> None:
    """learn's recommendation is the fastest by its own figures, with a model whose vocabulary is large."""
    prompts = load_prompts(str(shared / "data" / "alpaca_eval.json"), limit=2)
    learning = treeopt.Learning(0, levels=3)
    found = treeopt.learn_drafter(chat, prompts, learning=learning, sizes=(2, 8), max_new_tokens=16)
    best = max(found.figures, key=lambda one: one.tokens_per_second)
    assert found.recommended in (best, found.figures[0])
    assert found.recommended.speedup >= 1.0


def test_heads_of_the_recipe(chat: Base, texts: list[Text]) -> None:
    """The committed heads fit the model, rank its answers better than chance, and their tree is lossless."""
    heads = heads_like(chat, load_heads(HEADS).heads)
    tree = Tree(((0,), (1,), (2,), (0, 0), (0, 1)))
    found = treeopt.validate(chat, heads, tree, texts, max_new_tokens=NEW_TOKENS)
    assert not found.failures
    assert found.prediction_misses == ()
    assert found.tokens_per_step > 1.05
    if chat.dtype == torch.float32:
        assert found.lossless


@pytest.mark.quick
def test_recipe_is_that_of_the_heads() -> None:
    """The options of the recipe are those that the heads were trained with; the texts are on the command line."""
    recipe = load(data_root("calibration") / "recipes" / "smollm2.yaml").data
    stored = json.loads((HEADS / "config.json").read_text())["treeopt"]["configuration"]["train"]
    texts = stored.pop("data")
    assert texts == ["answers.jsonl", "selftalk.jsonl"]
    assert {"model": recipe["model"], "dtype": recipe["dtype"], **recipe["train"]} == stored


@pytest.mark.parametrize(("name", "kind", "levels"), [("eagle3", "eagle", 4), ("dflash", "block", 7)])
def test_trained_draft_modules(name: str, kind: str, levels: int, chat: Base, texts: list[Text]) -> None:
    """Static and per step: as predicted, in float32 lossless; most tokens of the answers are in its vocabulary."""
    draft = load_draft(str(HEADS.with_name(f"smollm2-{name}")), chat)
    assert draft.notes == ()
    drafter = Drafter.model_only(levels, 8, draft.fingerprint, kind)
    tree = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)])
    for plan in (TreePolicy(8, 4, drafter.id), dataclasses.replace(tree, drafter=drafter.id)):
        found = treeopt.validate(chat, None, plan, texts, drafter=drafter, draft=draft, max_new_tokens=NEW_TOKENS)
        assert found.prediction_misses == ()
        assert found.tokens_per_step > 1.3
        if chat.dtype == torch.float32:
            assert found.lossless
    assert outside_shares(draft, texts).get("all", 0.0) < 0.5
