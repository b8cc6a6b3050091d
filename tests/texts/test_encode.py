"""Prompts as token ids: with and without a chat template, first turns and later ones."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
from refusals import refusal_of
from tiny import tiny_base
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.texts.encode import Text, encode, joins_turns, next_turn
from treeopt.texts.prompts import Prompt, Skipped

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(shared: Path) -> PreTrainedTokenizerBase:
    """The shared model's tokenizer, which has no chat template."""
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(shared / "models" / "tinystories-260k")
    assert loaded.chat_template is None
    return loaded


def test_encode_without_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Without a template a request is encoded as it stands, as plain text is; answers get no special tokens."""
    asked = Prompt("a:0", ({"role": "user", "content": "One day"},), None, "a bird")
    plain = Prompt("a:1", None, "One day", None)
    ids, answer = encode(asked, tokenizer, chat_template=True)
    assert ids == tokenizer("One day")["input_ids"]
    assert answer == tokenizer("a bird", add_special_tokens=False)["input_ids"]
    assert encode(plain, tokenizer, chat_template=True) == (ids, [])


def test_encode_with_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """A template is used for requests and chats, not for plain text, and not where it is switched off."""
    templated = copy.deepcopy(tokenizer)
    templated.chat_template = TEMPLATE
    chat = (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "Hu"},
    )

    def texts(prompt: Prompt, **options: bool) -> str:
        return templated.decode(encode(prompt, templated, **options)[0], skip_special_tokens=True)

    asked = Prompt("a:0", chat[:1], None, None)
    assert texts(asked, chat_template=True) == "[user] Hi\n[assistant]"
    assert texts(asked, chat_template=False) == "Hi"
    assert texts(Prompt("a:1", None, "Hi", None), chat_template=True) == "Hi"
    whole = texts(Prompt("a:2", chat, None, None), chat_template=True)
    assert whole == "[user] Hi\n[assistant] Ho\n[user] Hu\n[assistant]"


def test_encode_chat_needs_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """A conversation cannot become one text without a template."""
    chat = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"})
    templated = copy.deepcopy(tokenizer)
    templated.chat_template = TEMPLATE
    for one_tokenizer, used in ((tokenizer, True), (templated, False)):
        error = refusal_of(encode, Prompt("set:7", chat, None, None), one_tokenizer, chat_template=used)
        assert error.code is Code.PROMPTS_INVALID
        assert "set:7" in error.what


def tiny_like(tokenizer: PreTrainedTokenizerBase) -> Base:
    """A random model that speaks the tokenizer's vocabulary."""
    return Base(tiny_base("llama", vocab_size=512).model, tokenizer, "tiny")


def test_next_turn_with_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """The model's answer goes back through the template, without its end-of-text token."""
    templated = copy.deepcopy(tokenizer)
    templated.chat_template = TEMPLATE
    base = tiny_like(templated)
    prompt = Prompt("set:00000007", ({"role": "user", "content": "Hi"},), None, None, "writing", later=("Hu", "Ha"))
    ids, _ = encode(prompt, templated, chat_template=True)
    answer = [*tokenizer("Ho", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    text = next_turn(base, Text(prompt.id, ids, answer, prompt), 8)
    assert isinstance(text, Text)
    decoded = templated.decode(text.prompt, skip_special_tokens=True)
    assert decoded == "[user] Hi\n[assistant] Ho\n[user] Hu\n[assistant]"
    assert (text.prompt_id, text.turn, text.category, text.later) == ("set:00000007.02", 2, "writing", ("Ha",))
    assert not joins_turns(base, [text])


def test_next_turn_without_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Without a template what was said stands line by line; what no longer fits is left out by name."""
    base = tiny_like(tokenizer)
    prompt = Prompt("set:00000007", ({"role": "user", "content": "Once"},), None, None, later=("Then",))
    answer = tokenizer(" upon a time", add_special_tokens=False)["input_ids"]
    text = Text(prompt.id, encode(prompt, tokenizer, chat_template=True)[0], answer, prompt)
    found = next_turn(base, text, 8)
    assert isinstance(found, Text)
    assert found.prompt == tokenizer(f"Once\n{tokenizer.decode(answer)}\nThen")["input_ids"]
    assert next_turn(base, found, 8) is None
    assert joins_turns(base, [text])
    long = next_turn(base, text, base.context)
    assert long == Skipped("set:00000007.02", len(found.prompt), "too long for the context")


def test_encode_without_tokenizer() -> None:
    """A base model without a tokenizer cannot take prompts."""
    assert refusal_of(encode, Prompt("set:0", None, "Hi", None), None, chat_template=True).code is Code.MODEL_INVALID


def test_half_a_surrogate_pair_in_a_conversation(tokenizer: PreTrainedTokenizerBase) -> None:
    """Half of a surrogate pair goes through a chat template as a question mark, as it does without one."""
    templated = copy.deepcopy(tokenizer)
    templated.chat_template = TEMPLATE
    prompts = [Prompt("set:0", ({"role": "user", "content": text},), None, None) for text in ("a\ud800b", "a?b")]
    broken, whole = (encode(prompt, templated, chat_template=True) for prompt in prompts)
    assert broken == whole


def test_template_that_refuses_a_conversation(tokenizer: PreTrainedTokenizerBase) -> None:
    """What a template raises is an error of the prompt, with the template's words."""
    templated = copy.deepcopy(tokenizer)
    templated.chat_template = "{{ raise_exception('roles must take turns') }}"
    prompt = Prompt("set:7", ({"role": "user", "content": "Hi"},), None, None)
    with pytest.raises(TreeoptError, match="fails on prompt set:7") as caught:
        encode(prompt, templated, chat_template=True)
    assert "roles must take turns" in caught.value.why
    assert caught.value.code is Code.PROMPTS_INVALID
    assert "--no-chat-template" in caught.value.fix


def test_turns_of_a_dialogue_share_its_id() -> None:
    """Only the suffix of a later turn is cut, so ids with points stay apart, even one that looks like a turn's."""
    first = Prompt("v1.a", ({"role": "user", "content": "a"},), None, None, later=("b", "c"))
    second = first.after("x")
    third = second.after("y")
    assert [one.id for one in (first, second, third)] == ["v1.a", "v1.a.02", "v1.a.03"]
    assert {one.dialogue for one in (first, second, third)} == {"v1.a"}
    assert Text(third.id, [1], [], third).dialogue == "v1.a"
    assert Text("v1.02", [1], []).dialogue == "v1.02"
    assert Prompt("v1.02", None, "a", None).dialogue == "v1.02"
