"""The recipe of the built-in draft model, at the smallest size that runs, and the loss that it is trained with."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes import SIZES, SOURCE, documents

from treeopt.files.bundled import data_root
from treeopt.files.schemas import check
from treeopt.files.strict_yaml import load
from treeopt.models.base import Base, load_base
from treeopt.train import pocket_draft
from treeopt.train.pocket_draft import SCHEMA, DraftRecipe, divergence, judge, make, mixture

RECIPE = data_root("calibration") / "recipes" / "pocket-draft.yaml"


def tiny_recipe(prompts: Path) -> DraftRecipe:
    """The draft model's recipe, every size of it small."""
    prompts.write_text(json.dumps({"text": "import os\n\n\ndef found(path):"}) + "\n")
    raw = {**load(RECIPE).data}
    raw["corpus"] = {"unseen_one_in": 2}
    raw["openings"] = {"characters": 40, "seeds": 5}
    raw["answers"] = {"max_new_tokens": 8, "batch_size": 2}
    raw["mixture"] = {"answers": 3, "answer_passes": 2}
    raw["draft"] = {**SIZES, "vocab_size": 2048}
    raw["judged"] = {"prompts": str(prompts), "max_new_tokens": 6}
    return DraftRecipe.model_validate(raw)


@pytest.fixture(scope="module")
def target() -> Base:
    return load_base("pocket", dtype="float32", device="cpu")


def test_make_trains_a_draft_of_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps leave a small model of the target's vocabulary, answers to seen modules alone, and figures."""
    texts = documents()
    monkeypatch.setattr(pocket_draft, "standard_library", lambda: texts)
    recipe = tiny_recipe(tmp_path / "prompts.jsonl")
    for name in ("one", "two"):
        make(recipe, tmp_path / name)
    folder = tmp_path / "one"
    draft = load_base(str(folder), device="cpu")
    assert (draft.vocab_size, draft.hidden_size, draft.context, draft.eos_ids) == (2048, 16, 32, (0,))
    assert draft.tokenizer is None
    weights = draft.lm_head.weight
    assert torch.equal(weights, weights.half().float())
    seeds = [json.loads(line) for line in (folder / "seeds.jsonl").read_text().splitlines()]
    assert {row["from"] for row in seeds} <= {texts[1].name, texts[2].name}
    figures = json.loads((folder / "losses.json").read_text())
    assert set(figures) == {"parameters"} | {f"{t}_{n}" for t in ("seen", "unseen", "answers") for n in ("kl", "top1")}
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    again = {name: (tmp_path / "two" / name).read_bytes() for name in files}
    assert [name for name in files if again[name] != files[name]] == ["answers.jsonl"]  # names the file of its seeds
    make(recipe, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == files


def test_training_comes_nearer_to_the_target(target: Base, tmp_path: Path) -> None:
    """After 40 steps on one text, the divergence on it is less than half of that of a model of 3 steps."""
    rows = [torch.tensor(target.tokenizer(SOURCE).input_ids)[:32] for _ in range(2)]  # type: ignore[misc]
    recipe, found = tiny_recipe(tmp_path / "prompts.jsonl"), []
    for steps in (3, 40):
        sizes = recipe.draft.model_copy(update={"steps": steps, "learning_rate": 0.03})
        longer = recipe.model_copy(update={"draft": sizes})
        pocket_draft.train_draft(longer, target, [rows], tmp_path / str(steps))
        found.append(judge(target, load_base(str(tmp_path / str(steps)), device="cpu").model, rows)["kl"])
    assert found[1] < found[0] / 2


def test_mixture_holds_blocks_once_and_answers_in_each_pass(tmp_path: Path) -> None:
    """A pass over the blocks has two passes over the answers, in batches of both sizes."""
    rows = [torch.tensor([i]) for i in range(5)]
    texts = [torch.tensor([10 + i]) for i in range(4)]
    batches = [[int(text) for text in batch] for batch in mixture(tiny_recipe(tmp_path / "p.jsonl"), rows, texts)]
    assert [len(batch) for batch in batches] == [2, 2, 1, 3, 1, 3, 1]
    assert sorted(text for batch in batches for text in batch) == [*range(5), *sorted([*range(10, 14)] * 2)]


def test_divergence_by_hand() -> None:
    """KL(target || draft) is the sum of p log(p / q), and 0 only where both are equal."""
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    wanted, drafted = torch.tensor(np.log([p, p])), torch.tensor(np.log([q, p]) + 3.0)  # logits have any offset
    found = divergence(wanted, drafted)
    assert found[0].item() == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2), abs=1e-6)
    assert found[1].item() == pytest.approx(0.0, abs=1e-6)


def test_judge_counts_the_predictions_of_answer_tokens(target: Base) -> None:
    """In a batch of texts of several lengths, the same tokens count as one at a time by hand."""
    chance = random.Random(0)
    texts = [torch.tensor([chance.randrange(2048) for _ in range(length)]) for length in (5, 9, 7, 3, 4, 6, 8, 2, 11)]
    begins = [3, 1, 6, 2, 3, 1, 4, 1, 2]
    draft: Any = load_base("pocket", dtype="float32", device="cpu").model
    with torch.no_grad():
        draft.model.norm.weight *= torch.linspace(0.2, 3.0, 192)
    losses, same = [], []
    for text, begin in zip(texts, begins, strict=True):
        with torch.no_grad():
            wanted, drafted = (model(text[None]).logits[0].double() for model in (target.model, draft))
        for i in range(begin, len(text)):  # token i is predicted at i - 1
            p, q = wanted[i - 1].softmax(-1), drafted[i - 1].softmax(-1)
            losses.append(float((p * (p / q).log()).sum()))
            same.append(int(p.argmax()) == int(q.argmax()))
    found = judge(target, draft, texts, begins)
    assert 0 < found["top1"] < 1
    assert found["top1"] == pytest.approx(np.mean(same))
    assert found["kl"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert judge(target, target.model, texts) == {"kl": pytest.approx(0.0, abs=1e-9), "top1": 1.0}


def test_recipe_is_valid_and_of_pocket(target: Base) -> None:
    """The recipe in the package makes a draft with the vocabulary, context and held-out modules of pocket."""
    recipe = check(load(RECIPE), DraftRecipe, SCHEMA)
    assert (recipe.draft.vocab_size, recipe.draft.context) == (target.vocab_size, target.context)
    of_target = load(data_root("calibration") / "recipes" / "pocket.yaml").data
    assert recipe.corpus.model_dump() == of_target["corpus"]
