"""Models and heads as people have them become the same records, and anything else is one clear error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from looped import looped
from tiny import chat_base, random_heads, tiny_base
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from treeopt.errors import Code, TreeoptError
from treeopt.files.bundled import pocket
from treeopt.models.base import load_base
from treeopt.models.given import as_base, as_heads
from treeopt.models.head_files import load_heads, save_heads


def test_base_from_a_name_a_path_and_a_model() -> None:
    """A name, a path, a loaded `Base` and a model of transformers are the same model with its tokenizer."""
    known = load_base("pocket", device="cpu")
    model = AutoModelForCausalLM.from_pretrained(pocket(), dtype=torch.float32)
    for given in ("pocket", str(pocket()), pocket(), model, known):
        base = as_base(given)
        assert base.fingerprint == known.fingerprint
        assert base.tokenizer is not None
        assert base.tokenizer("import os")["input_ids"] == known.tokenizer("import os")["input_ids"]
    assert as_base(known) is known
    assert as_base(model).name == str(pocket())
    assert as_base(model).model is model


def test_tokenizer_given_counts() -> None:
    """A tokenizer that is given replaces any other; a model without a folder has none of its own."""
    talking, silent = chat_base(), tiny_base("llama")
    assert talking.tokenizer is not None
    silent.model.eval()
    assert as_base(silent.model).tokenizer is None
    assert as_base(silent.model).name == "LlamaForCausalLM"
    assert as_base(silent.model, talking.tokenizer).tokenizer is talking.tokenizer
    assert as_base(silent, talking.tokenizer).tokenizer is talking.tokenizer
    assert silent.tokenizer is None
    assert as_base("pocket", talking.tokenizer).tokenizer is talking.tokenizer


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    """A model that was loaded from a folder without a tokenizer has none, and no hub is asked."""
    tiny_base("llama").model.save_pretrained(tmp_path)
    assert as_base(AutoModelForCausalLM.from_pretrained(tmp_path)).tokenizer is None


def test_heads_from_an_object_a_folder_and_a_record(tmp_path: Path) -> None:
    """The heads themselves, their folder by name or path, and `load_heads` give the same heads."""
    base = tiny_base("llama")
    heads = random_heads(base, 2)
    save_heads(heads, tmp_path, base="tiny")
    loaded = load_heads(tmp_path)
    for given in (heads, tmp_path, str(tmp_path), loaded):
        assert as_heads(given).fingerprint == loaded.fingerprint
    assert as_heads(heads).heads is heads
    assert as_heads(loaded) is loaded
    assert as_heads("pocket").heads.num_heads == 5


def _training() -> object:
    return tiny_base("llama").model.train()


def _encoder() -> object:
    config = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=16)
    return T5ForConditionalGeneration(config).eval()


def _headless() -> object:
    return tiny_base("llama").model.model.eval()


@looped(
    ("make", "word"),
    [(_training, "is in training mode"), (_encoder, "is not a causal"), (_headless, "is not a causal")],
)
def test_unfit_models_are_refused(make: Callable[[], object], word: str) -> None:
    """A model that would drop out, that has an encoder or no LM head, is E304 with what to do."""
    with pytest.raises(TreeoptError, match=word) as caught:
        as_base(make())
    assert caught.value.code is Code.MODEL_INVALID
    assert caught.value.fix


@looped("given", [None, 5, b"pocket", ["pocket"], torch.nn.Linear(2, 2), {"model": "pocket"}])
def test_other_types_are_refused(given: object) -> None:
    """What is neither model nor heads is a TypeError that says what is accepted and what came."""
    kind = f"not an object of type {type(given).__name__}"
    with pytest.raises(TypeError, match=f"a model is a causal language model of transformers, .*{kind}"):
        as_base(given)
    with pytest.raises(TypeError, match=f"heads are treeopt.MedusaHeads, .*{kind}"):
        as_heads(given)


def test_swapped_arguments_and_wrong_tokenizers() -> None:
    """Heads are no model, a model is no heads, and a name is no tokenizer."""
    base = tiny_base("llama")
    for wrong in (lambda: as_base(random_heads(base, 1)), lambda: as_heads(base), lambda: as_base(base, "pocket")):
        with pytest.raises(TypeError, match="not an object of type"):
            wrong()


def test_missing_folders_keep_their_errors() -> None:
    """A name of nothing is the loader's own error."""
    for call in (lambda: as_base("./none"), lambda: as_heads("./none")):
        with pytest.raises(TreeoptError) as caught:
            call()
        assert caught.value.code is Code.FILE_MISSING
