"""Tokenizers and vocabularies that differ from those of the model, in each command that reads text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from looped import looped
from program import error_of, treeopt
from tiny import chat_base, random_heads, tiny_base

from treeopt.files.trees import save_tree
from treeopt.models.head_files import save_heads
from treeopt.tree import Tree

OUT = ("-o", "o.safetensors")
MANY = ("--prompts", "prompts.jsonl", "--max-new-tokens", "4")
TREE = ("--tree", "two.yaml")
DRAFT = ("--draft", "draft")
COMMANDS: dict[str, tuple[str, ...]] = {
    "calibrate": ("calibrate", "--heads", "heads", *MANY, *OUT),
    "learn": ("learn", *MANY, "--learn-tokens", "20", *OUT),
    "distill": ("distill", *MANY, "-o", "o.jsonl"),
    "validate": ("validate", "--heads", "heads", *TREE, *MANY),
    "compare": ("compare", "--methods", "lookup", *MANY, "--svg", "o.svg"),
    "generate": ("generate", "w9 extra", "--no-chat-template", "--heads", "heads", *TREE),
    "train": ("train", "--data", "data.jsonl", "--steps", "1", "-o", "out"),
}
DRAFTS: dict[str, tuple[str, ...]] = {
    "calibrate": ("calibrate", "--drafter", "model", *DRAFT, *MANY, *OUT),
    "learn": ("learn", *DRAFT, *MANY, *OUT),
    "compare": ("compare", "--methods", "model", *DRAFT, *MANY, "--svg", "o.svg"),
    "generate": ("generate", "w9", *DRAFT, "--acceptance", "rejection", "--seed", "1"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that agrees with its tokenizer, its heads, a draft model, and texts with a word `extra`."""
    folder = tmp_path_factory.mktemp("models")
    base = chat_base()
    assert base.tokenizer is not None
    for name in ("base", "draft"):
        base.model.save_pretrained(folder / name)
        base.tokenizer.save_pretrained(folder / name)
    save_heads(random_heads(base, 2), folder / "heads", base="base")
    save_tree(Tree(((0,), (0, 0))), folder / "two.yaml")
    said = [{"role": "user", "content": "extra"}, {"role": "assistant", "content": "w9 w10 extra w12"}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": f"w{i} extra"}) + "\n" for i in range(9, 13)))
    (folder / "data.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    return folder


@pytest.fixture(autouse=True)
def _copied(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models, tmp_path, dirs_exist_ok=True)


def edit(folder: str, change: Callable[[dict[str, int]], None]) -> None:
    """Change the vocabulary of a folder's tokenizer."""
    file = Path(folder, "tokenizer.json")
    data = json.loads(file.read_text())
    change(data["model"]["vocab"])
    file.write_text(json.dumps(data))


def more(vocab: dict[str, int]) -> None:
    """A word more than the model has tokens."""
    vocab["extra"] = max(vocab.values()) + 1


def swapped(vocab: dict[str, int]) -> None:
    """Two words with each other's ids: another tokenizer of the same size."""
    vocab["w9"], vocab["w10"] = vocab["w10"], vocab["w9"]


def refused(line: tuple[str, ...], number: str, words: str) -> None:
    """One error with a number, and no file under the name of an output."""
    assert words in error_of(number, *line, "--model", "base", "--device", "cpu", "-q")
    assert not [path for path in Path().glob("o*") if path.is_file()]
    assert not list(Path("out").glob("medusa_lm_head*"))


@looped("line", COMMANDS.values())
def test_token_that_the_model_does_not_have(line: tuple[str, ...]) -> None:
    """A tokenizer with more tokens than the model, where a text has one of them: E304 with token and place."""
    edit("base", more)
    refused(line, "E304", "the tokenizer gives token 61")


def test_larger_tokenizer_whose_tokens_are_not_used() -> None:
    """Some models have padded tokenizers: what no text needs is no error."""
    edit("base", more)
    Path("prompts.jsonl").write_text('{"text": "w9 w10"}\n{"text": "w11 w12"}\n')
    treeopt("calibrate", "--heads", "heads", "--model", "base", *MANY, *OUT, "--device", "cpu")


@looped("line", DRAFTS.values())
@looped("change", [more, swapped])
def test_draft_model_with_another_tokenizer(change: Callable[[dict[str, int]], None], line: tuple[str, ...]) -> None:
    """A draft model's tokenizer must be the base's, also where it has the same size: E213."""
    edit("draft", change)
    refused(line, "E213", "the draft model draft does not fit base")


@looped("name", ["calibrate", "validate", "generate"])
def test_heads_of_another_vocabulary(name: str) -> None:
    """Heads with LM heads of another size are E212."""
    save_heads(random_heads(tiny_base("llama", vocab_size=59), 2), Path("heads"), base="base", overwrite=True)
    refused(COMMANDS[name], "E212", "vocabulary 59, the base has 61")
