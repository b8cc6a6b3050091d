"""Logits that are not finite, of each model, in each command that runs one: E504 with the model's name, and no file."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from looped import looped
from program import error_of
from tiny import VOCAB, chat_base, random_heads, walk

from treeopt.drafter import Drafter
from treeopt.files.drafters import save_drafter
from treeopt.files.trees import save_tree
from treeopt.models.base import Base, load_base
from treeopt.models.head_files import save_heads
from treeopt.tree import Tree

TEXT = walk(0, VOCAB)
BAD = TEXT[19]  # the second token of every answer to TEXT[15:18]; loading runs the tokens 0 to 7 alone
MANY = ("--prompts", "prompts.jsonl", "--max-new-tokens", "6")
ONE = (" ".join(f"w{token}" for token in TEXT[15:18]), "--no-chat-template", "--max-new-tokens", "6")
LEARN = ("--learn-tokens", "60", "--batch-size", "2")
MADE = ("-o", "o.safetensors")
TREE = ("--tree", "two.yaml")
SMALL = ("--num-heads", "1", "--batch-size", "4", "--length", "64", "--shared-lm-head", "--steps", "2")
TRAIN = ("train", "--data", "data.jsonl", "-o", "out", "-q", *SMALL, "--log-every", "1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sound and bad models, heads and drafters, and texts."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert BAD > 7
        base = chat_base()
        stored(base, "base")
        heads = random_heads(base, 2)
        save_heads(heads, Path("heads"), base="base")
        with torch.no_grad():
            heads.lm_head[0] *= 3e38  # finite weights, whose products overflow
            base.model.get_input_embeddings().weight[BAD] = float("nan")
        save_heads(heads, Path("bad-heads"), base="base")
        stored(base, "bad")
        save_tree(Tree(((0,), (0, 0))), "two.yaml")
        draft = load_base("bad", device="cpu").fingerprint
        drafter = Drafter.model_only(2, 4, draft)
        drafter = dataclasses.replace(drafter, plan=Tree(((0,), (0, 0)), drafter=drafter.id))
        save_drafter(drafter, "drafter.safetensors")
        texts = [" ".join(f"w{token}" for token in TEXT[first:18]) for first in (16, 15, 14, 13)]
        Path("prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        said = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": f"w{BAD} w{BAD} w2 w3"}]
        Path("data.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 8)
    return folder


def stored(base: Base, name: str) -> None:
    """Save a model with its tokenizer."""
    base.model.save_pretrained(name)
    assert base.tokenizer is not None
    base.tokenizer.save_pretrained(name)


BASES: dict[str, tuple[str, ...]] = {
    "calibrate heads": ("calibrate", "--heads", "heads", *MANY, *MADE),
    "calibrate ngram": ("calibrate", "--drafter", "ngram", *MANY, *LEARN, *MADE),
    "calibrate heads+ngram": ("calibrate", "--drafter", "heads+ngram", "--heads", "heads", *MANY, *LEARN, *MADE),
    "calibrate model": ("calibrate", "--drafter", "model", "--draft", "base", *MANY, *MADE),
    "calibrate sampled": ("calibrate", "--heads", "heads", "--temperature", "1", *MANY, *MADE),
    "learn": ("learn", *MANY, *LEARN, *MADE),
    "distill": ("distill", *MANY, "-o", "o.jsonl"),
    "distill sampled": ("distill", "--temperature", "0.01", *MANY, "-o", "o.jsonl"),
    "validate": ("validate", "--heads", "heads", *TREE, *MANY),
    "validate sample": ("validate", "--heads", "heads", *TREE, *MANY, "--acceptance", "sample", "--draws", "0"),
    "validate typical": ("validate", "--heads", "heads", *TREE, *MANY, "--acceptance", "typical"),
    "compare": ("compare", "--methods", "lookup", *MANY, "--svg", "o.svg"),
    "generate": ("generate", *ONE, "--heads", "heads", *TREE),
    "generate per step": ("generate", *ONE),
    "profile": ("profile", "--heads", "heads", "--sizes", "2", "--context", "200", "--repeats", "1", "-o", "o.yaml"),
    "train": (*TRAIN,),
    "train stage 2": ("train", "--stage", "2", "--heads", "heads", *TRAIN[1:6], "--steps", "2", "--length", "64"),
}
HEADS: dict[str, tuple[str, ...]] = {
    "calibrate": ("calibrate", *MANY, *MADE),
    "calibrate heads+ngram": ("calibrate", "--drafter", "heads+ngram", *MANY, *LEARN, *MADE),
    "learn": ("learn", "--drafter", "heads+ngram", *MANY, *LEARN, *MADE),
    "validate": ("validate", *TREE, *MANY),
    "validate typical": ("validate", *TREE, *MANY, "--acceptance", "typical"),
    "compare": ("compare", "--methods", "heads", *MANY, "--svg", "o.svg"),
    "generate": ("generate", *ONE, *TREE),
    "profile": ("profile", "--sizes", "2", "--context", "8", "--repeats", "1", "-o", "o.yaml"),
    "train stage 2": ("train", "--stage", "2", *TRAIN[1:6], "--steps", "2", "--length", "64", "--log-every", "1"),
}
DRAFTS: dict[str, tuple[str, ...]] = {
    "calibrate": ("calibrate", "--drafter", "model", *MANY, *MADE),
    "calibrate model+ngram": ("calibrate", "--drafter", "model+ngram", *MANY, *LEARN, *MADE),
    "learn": ("learn", *MANY, *MADE),
    "validate": ("validate", "--drafter", "drafter.safetensors", *MANY),
    "compare": ("compare", "--methods", "model", *MANY, "--svg", "o.svg"),
    "generate": ("generate", *ONE, "--drafter", "drafter.safetensors"),
    "generate rejection": ("generate", *ONE, "--acceptance", "rejection", "--seed", "1", "--temperature", "0.01"),
}
CASES = [
    *((line, "the model bad ", "--model", "bad") for line in BASES.values()),
    *((line, "head", "--heads", "bad-heads") for line in HEADS.values()),
    *((line, "the model bad ", "--draft", "bad") for line in DRAFTS.values()),
]


@looped(("line", "who", "option", "value"), CASES)
def test_not_finite(
    models: Path,
    tmp_path: Path,
    line: tuple[str, ...],
    who: str,
    option: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One E504 that names the model, exit status 3, and nothing under the name of an output."""
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    base: tuple[str, ...] = () if option == "--model" else ("--model", "base")
    assert who in error_of("E504", *line, *base, option, value, "--device", "cpu", "-q").splitlines()[0]
    assert not [path for path in Path().glob("o*") if path.suffix != ".partial" and path.is_file()]
    assert not list(Path("out").glob("medusa_lm_head*"))
