"""Prompts as token ids, and the prompts that do not fit into the context."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError, first_line
from treeopt.models.base import Base
from treeopt.texts.prompts import GivenPrompts, Message, Prompt, PromptSet, Skipped, as_prompt_set


class _Tokens:
    """A field of token ids, stored as int32: 4 bytes a token, where a list of integers takes about 40."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, record: object, owner: type) -> list[int]:
        if record is None:
            raise AttributeError("the field has no default")  # as `dataclass` reads it from the class
        stored: array[int] = record.__dict__[self._name]
        return stored.tolist()

    def __set__(self, record: object, tokens: Iterable[int]) -> None:
        record.__dict__[self._name] = array("i", tokens)


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt and of its answer, each a new list when it is read; `source` is the prompt, where known."""

    prompt_id: str
    prompt: _Tokens = _Tokens()
    answer: _Tokens = _Tokens()
    source: Prompt | None = None

    @property
    def turn(self) -> int:
        """Turn of a dialogue, from 1."""
        return self.source.turn if self.source else 1

    @property
    def dialogue(self) -> str:
        """The id that all turns of the prompt's dialogue share: that of its first turn."""
        return self.source.dialogue if self.source else self.prompt_id

    @property
    def category(self) -> str | None:
        """The category in the prompt file, where it has one."""
        return self.source.category if self.source else None

    @property
    def later(self) -> tuple[str, ...]:
        """The user turns after this one."""
        return self.source.later if self.source else ()


@dataclass(frozen=True)
class Encoded:
    """Prompts as token ids, prompts left out, and the number of given answers that were cut at the token budget."""

    texts: Sequence[Text]
    skipped: tuple[Skipped, ...]
    answers_cut: int


def encode(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, *, chat_template: bool, vocab: int | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of its answer, if it has one; newlines join messages without a template."""
    if tokenizer is None:
        raise no_tokenizer()
    messages = prompt.messages
    if messages is not None and chat_template and tokenizer.chat_template is not None:
        ids = render_chat(tokenizer, messages, f"prompt {prompt.id}", add_generation_prompt=True)
    elif messages is not None and prompt.turn > 1:
        ids = tokenizer(_whole_text("\n".join(message["content"] for message in messages)))["input_ids"]
    elif messages is not None and len(messages) > 1:
        what = f"prompt {prompt.id} is a conversation, but no chat template is in use"
        why = "only a chat template makes one text of several messages"
        fix = "use a tokenizer with a chat template, or prompts with `instruction` or `text`"
        raise TreeoptError(Code.PROMPTS_INVALID, what, why=why, fix=fix)
    else:
        text = prompt.text if messages is None else messages[0]["content"]
        ids = tokenizer(_whole_text(text))["input_ids"]
    answer = tokenizer(_whole_text(prompt.answer), add_special_tokens=False)["input_ids"] if prompt.answer else []
    if vocab is not None:
        check_known((*ids, *answer), vocab, prompt.id)
    return list(ids), list(answer)


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], name: str, **options: Any) -> Any:
    """A conversation by the tokenizer's chat template: token ids, or text with `tokenize=False`; else E302."""
    whole = [{**message, "content": _whole_text(message["content"])} for message in messages]
    try:
        return tokenizer.apply_chat_template(whole, return_dict=False, **options)
    except Exception as error:  # a template is a program, so it may raise anything
        what = f"the tokenizer's chat template fails on {name}"
        why = f"{type(error).__name__}: {first_line(error)}"
        fix = "change the messages, or leave the template out with --no-chat-template"
        raise TreeoptError(Code.PROMPTS_INVALID, what, why=why, fix=fix) from error


def no_tokenizer() -> TreeoptError:
    """E304 for a base model without a tokenizer."""
    what = "the base model's folder holds no tokenizer, which prompts need"
    return TreeoptError(Code.MODEL_INVALID, what, fix="put the tokenizer's files beside the model's weights")


def check_known(ids: Iterable[int], vocab: int, prompt_id: str) -> None:
    """Raise E304 where a tokenizer gave token ids of `vocab` or more, which the model does not have."""
    unknown = next((token for token in ids if token >= vocab), None)
    if unknown is not None:
        what = f"the tokenizer gives token {unknown} in prompt {prompt_id}, but the model has {vocab} tokens"
        raise TreeoptError(Code.MODEL_INVALID, what, why="the tokenizer does not belong to the model's weights")


def encode_prompts(
    base: Base, prompts: PromptSet, max_new_tokens: int, *, chat_template: bool = True, scored: bool = False
) -> Encoded:
    """Token ids of the prompts that fit with `max_new_tokens` more, and, if `scored`, have an answer; E303 for none."""
    assert max_new_tokens >= 1
    texts, skipped, cut = [], [], 0
    for prompt in prompts.prompts:
        ids, answer = encode(prompt, base.tokenizer, chat_template=chat_template, vocab=base.vocab_size)
        reason = _misfit(base, ids, max_new_tokens)
        if not reason and scored and not answer:
            reason = "empty answer"
        if reason:
            skipped.append(Skipped(prompt.id, len(ids), reason))
            continue
        cut += scored and len(answer) > max_new_tokens
        texts.append(Text(prompt.id, ids, answer[:max_new_tokens], prompt))
    if not texts:
        reasons = ", ".join(sorted({s.reason for s in skipped}))
        what = f"none of {len(skipped)} prompts is run with {max_new_tokens} new tokens in {base.context}: {reasons}"
        fix = "prompts with answers" if reasons == "empty answer" else "lower --max-new-tokens"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, fix=fix)
    return Encoded(texts, tuple(skipped), cut)


def as_texts(
    base: Base, prompts: GivenPrompts | Sequence[Text], max_new_tokens: int, *, chat_template: bool = True
) -> tuple[Sequence[Text], tuple[Skipped, ...]]:
    """The token ids of prompts, and the prompts that do not fit into the context; `Text` records are not changed."""
    if isinstance(prompts, (list, tuple)) and prompts and all(isinstance(text, Text) for text in prompts):
        if len({text.prompt_id for text in prompts}) < len(prompts):
            raise ValueError("two of the Text records have one prompt_id")
        return prompts, ()
    rows: Any = prompts
    encoded = encode_prompts(base, as_prompt_set(rows), max_new_tokens, chat_template=chat_template)
    return encoded.texts, encoded.skipped


def next_turn(base: Base, text: Text, max_new_tokens: int, *, chat_template: bool = True) -> Text | Skipped | None:
    """The prompt of the turn after a text with the model's `answer`; None where there is no further turn.

    It contains the answer as text, without special tokens. Where it does not fit, it is left out, with those after it.
    """
    if text.source is None or not text.later:
        return None
    assert base.tokenizer is not None, "a prompt with turns was encoded"
    prompt = text.source.after(str(base.tokenizer.decode(text.answer, skip_special_tokens=True)))
    ids, _ = encode(prompt, base.tokenizer, chat_template=chat_template, vocab=base.vocab_size)
    reason = _misfit(base, ids, max_new_tokens)
    return Skipped(prompt.id, len(ids), reason) if reason else Text(prompt.id, ids, [], prompt)


def has_template(base: Base, chat_template: bool) -> bool:
    """Whether requests go through a chat template, by an option."""
    return chat_template and base.tokenizer is not None and base.tokenizer.chat_template is not None


def joins_turns(base: Base, texts: Sequence[Text], *, chat_template: bool = True) -> bool:
    """Whether turns of the texts will be joined by newlines because there is no chat template."""
    return not has_template(base, chat_template) and any(text.later for text in texts)


def _misfit(base: Base, ids: Sequence[int], max_new_tokens: int) -> str:
    """The reason why a prompt cannot be answered with `max_new_tokens` tokens; empty where it can."""
    if not ids:
        return "no tokens"
    return "too long for the context" if len(ids) + max_new_tokens > base.context else ""


def _whole_text(text: str | None) -> str:
    """Text with half surrogate pairs, which JSON may hold and tokenizers refuse, replaced by question marks."""
    return (text or "").encode(errors="replace").decode()
