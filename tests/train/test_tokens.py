"""Texts: tokenizers and chat templates that do not do what their model needs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from looped import looped
from tiny import VOCAB, chat_base

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.texts.encode import Text, encode, next_turn
from treeopt.texts.prompts import Prompt
from treeopt.train.data import load_texts
from treeopt.train.distill import SelfTalk, distill

BROKEN = ["{% for x in %}", "{{ raise_exception('no') }}", "{{ 1 // 0 }}", "{{ messages.nosuch.nosuch }}"]


def base_with_more_words() -> Base:
    """A base whose tokenizer knows one token more than its weights."""
    base = chat_base()
    assert base.tokenizer is not None
    base.tokenizer.add_tokens(["beyond"])
    return base


def asked(text: str) -> Prompt:
    """A request in a chat."""
    return Prompt("set:0", ({"role": "user", "content": text},), None, None)


def test_encode_token_that_the_model_does_not_know() -> None:
    """A token beyond the vocabulary is E304 where it turns up, in prompts and in answers; other texts work."""
    base = base_with_more_words()
    assert encode(asked("w1"), base.tokenizer, chat_template=True, vocab=base.vocab_size)[0]
    for prompt in (asked("w1 beyond"), dataclasses.replace(asked("w1"), answer="beyond")):
        with pytest.raises(TreeoptError, match=f"token {VOCAB} in prompt set:0") as caught:
            encode(prompt, base.tokenizer, chat_template=True, vocab=base.vocab_size)
        assert caught.value.code is Code.MODEL_INVALID


def test_next_turn_token_that_the_model_does_not_know() -> None:
    """A later turn of a dialogue is looked at too."""
    base = base_with_more_words()
    prompt = dataclasses.replace(asked("w1"), later=("beyond",))
    with pytest.raises(TreeoptError, match=f"token {VOCAB}"):
        next_turn(base, Text("set:0", [1], [2], prompt), 4)


def test_load_texts_token_that_the_model_does_not_know(tmp_path: Path) -> None:
    """Texts to train on are looked at as well, conversations and plain ones."""
    base = base_with_more_words()
    chat = {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 beyond"}]}
    for row in (chat, {"text": "w1 beyond"}):
        (tmp_path / "data.jsonl").write_text(json.dumps(row))
        with pytest.raises(TreeoptError, match=f"token {VOCAB}"):
            load_texts(base, [str(tmp_path / "data.jsonl")], length=32)


def test_distill_token_that_the_model_does_not_know(tmp_path: Path) -> None:
    """What the chat template writes around a turn is looked at too; nothing is written."""
    base = base_with_more_words()
    assert base.tokenizer is not None
    base.tokenizer.chat_template = "beyond <user> {{ messages[0].content }} <bot>"
    with pytest.raises(TreeoptError, match=f"token {VOCAB}"):
        distill(base, SelfTalk(1), tmp_path / "out.jsonl", max_new_tokens=4)
    assert not (tmp_path / "out.jsonl").exists()


@looped("template", BROKEN)
def test_encode_template_that_fails(template: str) -> None:
    """A chat template is a program: whatever it raises is E302, and --no-chat-template is a way out."""
    base = chat_base(template=template)
    with pytest.raises(TreeoptError, match="chat template fails") as caught:
        encode(asked("w1"), base.tokenizer, chat_template=True)
    assert caught.value.code is Code.PROMPTS_INVALID
    assert "--no-chat-template" in caught.value.fix
    assert encode(asked("w1"), base.tokenizer, chat_template=False)[0]
