"""Making of the built-in models, at the smallest size that runs: corpus, base, heads and draft model."""

from __future__ import annotations

import copy
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from looped import looped
from recipes import SIZES, SOURCE, corpus, documents, script
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM

from treeopt.cli.app import program
from treeopt.files.bundled import data_root, pocket
from treeopt.files.strict_yaml import check, load
from treeopt.models.base import Base, load_base
from treeopt.models.given import load_pair
from treeopt.texts.answers import continue_texts
from treeopt.texts.encode import encode_prompts
from treeopt.texts.prompts import load_prompts
from treeopt.train.data import load_texts

pytestmark = pytest.mark.bench

making, drafting, stories = script("make_pocket"), script("make_pocket_draft"), script("make_tinystories")
hybrids = script("make_hybrid")
DEFINITION = re.compile(r" *(async )?(def|class) \w+.*:")
RECIPES = data_root("calibration") / "recipes"
HYBRID = Path(__file__).resolve().parent / "data" / "hybrid"


@pytest.fixture(scope="module")
def library() -> Any:
    """All of the standard library."""
    return corpus.standard_library()


def made(text: str) -> Any:
    """A document of one module."""
    return corpus.Document("made", "made.py", text)


def test_no_module_is_on_both_sides(library: Any) -> None:
    """All files of a package are on its side, and both sides hold many modules."""
    sides: dict[str, set[bool]] = {}
    for document in library:
        sides.setdefault(document.name.split("/")[0].removesuffix(".py"), set()).add(corpus.is_unseen(document, 10))
    assert all(len(found) == 1 for found in sides.values())
    unseen = sum(found == {True} for found in sides.values())
    assert 0.05 < unseen / len(sides) < 0.2


@looped("characters", [40, 320])
def test_openings_of_the_library(library: Any, characters: int) -> None:
    """Openings are parts of their document in order, never overlap, end with a definition, and are short enough."""
    count = 0
    for document in random.Random(0).sample(library, 100):
        at = 0
        for opening in corpus.openings(document, characters):
            assert len(opening) <= characters
            lines = opening.splitlines()
            assert len(lines) > 1
            assert DEFINITION.fullmatch(lines[-1])
            found = document.text.find(opening, at)
            assert found >= at
            assert document.text[found - 1] == "\n"
            at = found + len(opening)
            count += 1
    assert count > 100


def tiny_recipe() -> Any:
    """The built-in model's recipe, every size of it small."""
    raw = copy.deepcopy(load(RECIPES / "pocket.yaml").data)
    raw["corpus"]["unseen_one_in"] = 2
    raw["base"] = SIZES
    raw["openings"] = {"characters": 40, "built_in": 3, "seeds": 5}
    raw["answers"] = {"max_new_tokens": 8, "batch_size": 2}
    raw["heads"] |= {"num_heads": 2, "epochs": 1.0, "batch_size": 2, "holdout": 1}
    return making.Recipe.model_validate(raw)


@looped("text", ["", SOURCE, "a  b\t\n\n c .", "it 's n't , !", "ünïcode ✓ 漢字 🙂\r\n", "\x00\x7f"])
def test_tokenizer_round_trip(text: str) -> None:
    """Any text, of characters never trained on too, comes back byte for byte."""
    tokenizer = making.train_tokenizer([SOURCE], 300, 32)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.quick
def test_blocks_by_hand() -> None:
    """Texts follow one another, each with its end; the last, shorter block is dropped."""
    tokenizer = making.train_tokenizer(["ab"], 258, 32)
    ids = [*tokenizer("abc").input_ids, 0, *tokenizer("de").input_ids, 0]
    found = making.blocks(tokenizer, ["abc", "de"], 2)
    assert found.flatten().tolist() == ids[: len(ids) // 2 * 2]
    assert found.dtype is torch.int64
    assert making.blocks(tokenizer, ["abc"], 100).shape == (0, 100)


def test_pretrain_saves_a_model_with_its_losses(tmp_path: Path) -> None:
    """The folder holds a model in half precision with its tokenizer, and the losses are of that model."""
    tokenizer = making.train_tokenizer([SOURCE], 300, 32)
    rows = making.blocks(tokenizer, [SOURCE] * 6, 32)
    losses = making.pretrain(making.BasePart(**SIZES), tokenizer, rows[2:], rows[:2], tmp_path)
    base = load_base(str(tmp_path), device="cpu")
    assert (base.vocab_size, base.hidden_size, base.context, base.eos_ids) == (300, 16, 32, (0,))
    assert base.tokenizer is not None
    assert base.tokenizer.decode(base.tokenizer(SOURCE).input_ids) == SOURCE
    weights = base.lm_head.weight
    assert torch.equal(weights, weights.bfloat16().float())
    assert losses["unseen_loss"] == pytest.approx(making.mean_loss(base.model, rows[:2]), rel=1e-5)
    assert losses["train_loss"] == pytest.approx(making.mean_loss(base.model, rows[2:4]), rel=1e-5)


def test_make_writes_everything_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe leaves base, heads, prompts of unseen modules and answers to seen ones; again, nothing changes."""
    texts = documents()
    monkeypatch.setattr(making, "standard_library", lambda: texts)
    making.make(tiny_recipe(), tmp_path)
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
    making.make(tiny_recipe(), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def tiny_draft_recipe(prompts: Path) -> Any:
    """The draft model's recipe, every size of it small."""
    prompts.write_text(json.dumps({"text": "import os\n\n\ndef found(path):"}) + "\n")
    raw = {**load(RECIPES / "pocket-draft.yaml").data}
    raw["corpus"] = {"unseen_one_in": 2}
    raw["openings"] = {"characters": 40, "seeds": 5}
    raw["answers"] = {"max_new_tokens": 8, "batch_size": 2}
    raw["mixture"] = {"answers": 3, "answer_passes": 2}
    raw["draft"] = {**SIZES, "vocab_size": 2048}
    raw["judged"] = {"prompts": str(prompts), "max_new_tokens": 6}
    return drafting.DraftRecipe.model_validate(raw)


@pytest.fixture(scope="module")
def target() -> Base:
    return load_base("pocket", dtype="float32", device="cpu")


def test_make_trains_a_draft_of_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps leave a small model of the target's vocabulary, answers to seen modules alone, and figures."""
    texts = documents()
    monkeypatch.setattr(drafting, "standard_library", lambda: texts)
    recipe = tiny_draft_recipe(tmp_path / "prompts.jsonl")
    for name in ("one", "two"):
        drafting.make(recipe, tmp_path / name)
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
    drafting.make(recipe, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == files


def test_mixture_holds_blocks_once_and_answers_in_each_pass(tmp_path: Path) -> None:
    """A pass over the blocks has two passes over the answers, in batches of both sizes."""
    rows = [torch.tensor([i]) for i in range(5)]
    texts = [torch.tensor([10 + i]) for i in range(4)]
    batches = [
        [int(text) for text in batch]
        for batch in drafting.mixture(tiny_draft_recipe(tmp_path / "p.jsonl"), rows, texts)
    ]
    assert [len(batch) for batch in batches] == [2, 2, 1, 3, 1, 3, 1]
    assert sorted(text for batch in batches for text in batch) == [*range(5), *sorted([*range(10, 14)] * 2)]


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
    found = drafting.judge(target, draft, texts, begins)
    assert 0 < found["top1"] < 1
    assert found["top1"] == pytest.approx(np.mean(same))
    assert found["kl"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert drafting.judge(target, target.model, texts) == {"kl": pytest.approx(0.0, abs=1e-9), "top1": 1.0}


@pytest.mark.quick
def test_recipe_is_valid_and_of_pocket(target: Base) -> None:
    """The recipe in the package makes a draft with the vocabulary, context and held-out modules of pocket."""
    recipe = check(load(RECIPES / "pocket-draft.yaml"), drafting.DraftRecipe, drafting.SCHEMA)
    assert (recipe.draft.vocab_size, recipe.draft.context) == (target.vocab_size, target.context)
    of_target = load(RECIPES / "pocket.yaml").data
    assert recipe.corpus.model_dump() == of_target["corpus"]


def test_prompts_come_from_modules_that_were_never_trained_on() -> None:
    """Each built-in prompt names its source, and the recipe's split puts that on the unseen side."""
    recipe = load(RECIPES / "pocket.yaml").data
    rows = [json.loads(line) for line in (pocket() / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == recipe["openings"]["built_in"]
    for row in rows:
        module = row["from"].partition("/")[0].removesuffix(".py")
        assert corpus.is_unseen(corpus.Document(module, row["from"], row["text"]), recipe["corpus"]["unseen_one_in"]), (
            row["from"]
        )


def test_draft_model_often_has_the_best_token_of_pocket() -> None:
    """On answers to prompts that neither was trained on, it agrees about as often as its card says."""
    figures = json.loads((pocket().with_name("pocket-draft") / "losses.json").read_text())
    target, draft = (load_base(name, dtype="float32", device="cpu") for name in ("pocket", "pocket-draft"))
    prompts = encode_prompts(target, load_prompts("pocket", limit=48), 128).texts
    texts = continue_texts(target, prompts, 128)
    ids, begins = [torch.tensor(text.prompt + text.answer) for text in texts], [len(text.prompt) for text in texts]
    assert drafting.judge(target, draft.model, ids, begins)["top1"] == pytest.approx(figures["answers_top1"], abs=0.04)
    card = (pocket().with_name("pocket-draft") / "README.md").read_text()
    for name in ("seen", "unseen", "answers"):
        assert f"{figures[f'{name}_kl']:.3f}" in card, name
        assert f"{figures[f'{name}_top1']:.1%}" in card, name
    assert f"{figures['parameters']:,} parameters" in card


def tiny_hybrid_recipe(**training: float) -> Any:
    """The hybrid's recipe, every size of it small."""
    raw = {**load(RECIPES / "hybrid.yaml").data}
    raw["corpus"] = {"unseen_one_in": 2}
    raw["hybrid"] |= {"layers": ["linear_attention", "full_attention"], "attention_heads": 2, "key_value_heads": 1}
    raw["hybrid"] |= {"intermediate_size": 24, "head_size": 16, "linear_heads": 2}
    raw["hybrid"] |= {"linear_key_size": 8, "linear_value_size": 8}
    raw["training"] |= {"length": 16, "sequences": 2, "steps": 8, "warmup_steps": 2, "decay_steps": 4}
    raw["training"] |= {"checkpoint_steps": 3, "watched": 2, "judged": 3, **training}
    return hybrids.HybridRecipe.model_validate(raw)


def files_of(folder: Path) -> dict[str, bytes]:
    """The content of every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_make_trains_a_hybrid_of_its_target(
    target: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run cut into parts makes the model of a run in one part, with the target's tokenizer, in half precision."""
    monkeypatch.setattr(hybrids, "standard_library", documents)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert hybrids.make(tiny_hybrid_recipe(), whole)
    capsys.readouterr()
    finished = [hybrids.make(tiny_hybrid_recipe(), parts, minutes=0.0) for _ in range(3)]
    assert finished == [False, False, True]
    steps = [int(line.split()[1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert steps == [3, 6, 8]
    made, expected = files_of(parts), files_of(whole)
    del made["training.pt"], expected["training.pt"]
    assert made == expected
    assert hybrids.make(tiny_hybrid_recipe(), parts)
    assert {name: content for name, content in files_of(parts).items() if name in made} == made
    model: Any = AutoModelForCausalLM.from_pretrained(whole)
    assert (type(model), model.dtype) == (Qwen3_5ForCausalLM, torch.bfloat16)
    assert model.config.layer_types == ["linear_attention", "full_attention"]
    assert model.lm_head.weight is model.get_input_embeddings().weight
    tokenizer = load_base(str(whole), device="cpu").tokenizer
    assert tokenizer is not None
    assert target.tokenizer is not None
    assert tokenizer(SOURCE).input_ids == target.tokenizer(SOURCE).input_ids
    figures = json.loads(made["losses.json"])
    kinds = [f"{text}_{name}" for text in ("seen", "unseen") for name in ("loss", "target_loss", "kl", "top1")]
    assert list(figures) == ["parameters", *kinds]


def test_hybrid_learns_its_target_from_seen_text_alone(
    target: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The divergence falls; a pass has each block of seen modules once, and none of unseen ones."""
    texts = documents()
    monkeypatch.setattr(hybrids, "standard_library", lambda: texts)
    trained: list[torch.Tensor] = []
    losses: list[float] = []
    step = hybrids._step

    def spied(*given: Any) -> float:
        trained.append(given[-1])
        losses.append(step(*given))
        return losses[-1]

    monkeypatch.setattr(hybrids, "_step", spied)
    hybrids.make(tiny_hybrid_recipe(steps=40, decay_steps=10), tmp_path / "made")
    assert target.tokenizer is not None
    seen = hybrids.blocks(target.tokenizer, [d.text for d in texts if not corpus.is_unseen(d, 2)], 16)
    rows = torch.cat(trained)
    blocks, of_pass = ([tuple(row) for row in part.tolist()] for part in (seen, rows[: len(seen) // 2 * 2]))
    assert {tuple(row) for row in rows.tolist()} <= set(blocks)
    assert Counter(of_pass) <= Counter(blocks)  # none twice in the first pass
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])


@pytest.mark.quick
@looped(
    ("step", "expected"),
    [(0, 0.5), (1, 1.0), (2, 1.0), (4, 1.0), (5, 0.75), (7, 0.25)],
)
def test_hybrid_learning_rate_by_hand(step: int, expected: float) -> None:
    """Two steps of warm-up, then a constant, and 4 steps down to 0."""
    settings = tiny_hybrid_recipe(learning_rate=1.0).training
    assert hybrids.rate(settings, step) == pytest.approx(expected)


@pytest.mark.quick
def test_hybrid_recipe_is_that_of_the_trained_model(target: Base) -> None:
    """The recipe is of pocket's text, and has the sizes of the model in tests/data."""
    recipe = check(load(RECIPES / "hybrid.yaml"), hybrids.HybridRecipe, hybrids.SCHEMA)
    assert recipe.corpus.model_dump() == load(RECIPES / "pocket.yaml").data["corpus"]
    made = hybrids.new_hybrid(recipe, target)
    model = AutoModelForCausalLM.from_pretrained(HYBRID)
    shapes = [{name: weight.shape for name, weight in one.state_dict().items()} for one in (made, model)]
    assert shapes[0] == shapes[1]
    assert made.config.layer_types == model.config.layer_types


def test_hybrid_is_small_and_as_its_card_says(target: Base) -> None:
    """At most 1.5 million parameters and 3 MB, without its MTP layer, and as near to pocket as its card says."""
    figures = json.loads((HYBRID / "losses.json").read_text())
    base = load_base(str(HYBRID), dtype="float32", device="cpu")
    assert base.model.num_parameters() == figures["parameters"] <= 1_500_000
    assert sum(path.lstat().st_size for path in HYBRID.iterdir() if "mtp" not in path.name) <= 3_000_000
    prompts = encode_prompts(target, load_prompts("pocket"), 1).texts
    found = drafting.judge(target, base.model, [torch.tensor(text.prompt) for text in prompts])
    assert found["top1"] == pytest.approx(figures["unseen_top1"], abs=0.05)
    assert found["kl"] == pytest.approx(figures["unseen_kl"], rel=0.2)
    card = (HYBRID / "README.md").read_text()
    assert f"{figures['parameters']:,} parameters" in card
    for text in ("seen", "unseen"):
        for name in ("loss", "target_loss", "kl"):
            assert f"{figures[f'{text}_{name}']:.3f}" in card, name
        assert f"{figures[f'{text}_top1']:.1%}" in card


def original(base: Base) -> dict[str, Any]:
    """The checkpoint in the format of llama2.c that becomes this model: its names, its order of rotary rows."""
    config = base.model.config
    weights = {}
    for name, weight in base.model.state_dict().items():
        module = name.removesuffix(".weight")
        if module.startswith("model.layers."):
            _, _, index, part = module.split(".", 3)
            [kind] = [kind for kind, found in stories.LAYER.items() if found == part]
            module = f"layers.{index}.{kind}"
        else:
            [module] = [kind for kind, found in stories.OTHERS.items() if found == module]
        if module.endswith(("wq", "wk")):  # halves [heads, 2, size / 2, d] back to pairs [heads, size / 2, 2, d]
            weight = weight.reshape(-1, 2, config.head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        weights[f"_orig_mod.{module}.weight"] = weight
    sizes = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "multiple_of": 4,
        "max_seq_len": config.max_position_embeddings,
        "dropout": 0.05,
    }
    return {"model": weights, "model_args": sizes, "iter_num": 1}


def sentencepiece(pieces: list[str]) -> bytes:
    """A SentencePiece model file of these pieces; all messages here are shorter than 128 bytes."""
    messages = (b"\x0a" + bytes([len(piece)]) + piece + b"\x15\0\0\0\0\x18\x01" for piece in map(str.encode, pieces))
    return b"".join(b"\x0a" + bytes([len(message)]) + message for message in messages) + b"\x12\x02\x18\x02"


def test_tinystories_is_the_shared_model(base: Base, tmp_path: Path) -> None:
    """The original checkpoint, stored and loaded as tensors only, becomes the shared model: the same logits."""
    torch.save(original(base), tmp_path / "stories260K.pt")
    stories.convert(torch.load(tmp_path / "stories260K.pt", weights_only=True)).save_pretrained(tmp_path / "model")
    made = load_base(str(tmp_path / "model"), device="cpu").model
    ids = torch.arange(3, 131)[None]
    with torch.inference_mode():
        assert torch.equal(made(ids).logits, base.model(ids).logits)
    expected, found = base.model.config.to_dict(), made.config.to_dict()
    assert {name for name in expected if found[name] != expected[name]} <= {"_name_or_path", "dtype"}


def test_tinystories_tokenizer_is_the_shared_one(base: Base, shared: Path, tmp_path: Path) -> None:
    """The SentencePiece model becomes the shared model's tokenizer: the same file, and the same tokens of texts."""
    assert base.tokenizer is not None
    vocabulary = base.tokenizer.get_vocab()
    pieces = sorted(vocabulary, key=lambda piece: vocabulary[piece])
    made = stories.tokenizer(sentencepiece(pieces))
    made.save_pretrained(tmp_path)
    folder = shared / "models" / "tinystories-260k"
    files = [json.loads((place / "tokenizer.json").read_text()) for place in (tmp_path, folder)]
    assert files[0] == files[1]
    for text in ("Once upon a time, there was a little girl named Lily.", " Zwölf\n\tcafé…", ""):
        assert made(text).input_ids == base.tokenizer(text).input_ids
        assert made.decode(made(text).input_ids) == base.tokenizer.decode(base.tokenizer(text).input_ids)


def test_tinystories_heads_are_made_by_commands(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--heads prints and runs the commands that write stories and train heads on them, for a folder that is there."""
    ran: list[list[str]] = []
    monkeypatch.setattr(stories.subprocess, "run", lambda command, check: ran.append(command[3:]))
    (tmp_path / "model").symlink_to(shared / "models" / "tinystories-260k")
    monkeypatch.setattr(sys, "argv", ["make_tinystories.py", str(tmp_path / "model"), "--heads"])
    stories.main()
    assert [command[0] for command in ran] == ["distill", "train"]
    printed = capsys.readouterr().out
    for command in ran:
        assert f"treeopt {' '.join(command)}\n" in printed
        found = program.get_command(click.Context(program), command[0])
        assert found is not None
        assert found.make_context(command[0], command[1:]).params["model"] == str(tmp_path / "model")
