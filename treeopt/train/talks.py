"""Conversations with a base model: user turns from seeds or written by the model, and the model's answers."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError, check_counts
from treeopt.models.auto_batch import in_parts
from treeopt.models.base import Base
from treeopt.texts.answers import AnswerOptions, continue_texts
from treeopt.texts.encode import Text, check_known, encode, render_chat
from treeopt.texts.prompts import Message, Prompt

_MARK = "treeopt-user-turn"  # a user turn in rendered chats: the text before it is the prompt for a user turn


@dataclass(frozen=True)
class SelfTalk:
    """Seeds that the model writes itself; at temperature 1.

    Args:
        count: conversations, or openings where the model has no chat template.
        turns: user turns of each; more than one needs a chat template.
        opening_tokens: most tokens of a user turn or opening.

    Raises:
        ValueError: where a number is not whole or below 1.
    """

    count: int
    turns: int = 1
    opening_tokens: int = 32

    def __post_init__(self) -> None:
        check_counts(count=self.count, turns=self.turns, opening_tokens=self.opening_tokens)


@dataclass
class Talk:
    """One conversation in progress."""

    id: str
    users: list[Message] = field(default_factory=list)  # user turns to come; the first may be a system message
    said: list[Message] = field(default_factory=list)  # messages so far
    prompt: list[int] = field(default_factory=list)  # token ids of the current turn
    text: str | None = None  # plain text to continue, where there is no conversation
    rows: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""  # the reason why no further turn follows


def talk_of(prompt: Prompt) -> Talk:
    """A conversation from a prompt; the answers in it are left out, as the model gives its own."""
    if prompt.messages is None:
        return Talk(prompt.id, text=prompt.text)
    said = [message for message in prompt.messages if message["role"] != "assistant"]
    return Talk(prompt.id, users=[*said, *({"role": "user", "content": turn} for turn in prompt.later)])


def user_turns(talk: Talk) -> int:
    return sum(message["role"] == "user" for message in talk.users)


def opening_of(prompt: Prompt) -> str:
    """The text of a prompt, or its first user turn."""
    if prompt.messages is None:
        return (prompt.text or "").strip()
    return next((m["content"] for m in prompt.messages if m["role"] == "user"), "").strip()


@dataclass(frozen=True)
class Writer:
    """A base model that answers a batch of conversations, and ends those with an excluded opening."""

    base: Base
    tokenizer: PreTrainedTokenizerBase
    options: AnswerOptions
    excluded: frozenset[str]

    def answer_all(self, talks: Sequence[Talk]) -> None:
        """Answer the user turns until none is left."""
        self._exclude(talks)
        while open_talks := [talk for talk in talks if not talk.ended]:
            for talk in open_talks:
                while talk.users:
                    talk.said.append(talk.users.pop(0))
                    if talk.said[-1]["role"] == "user":
                        break
                messages = tuple(talk.said) if talk.text is None else None
                prompt = Prompt(talk.id, messages, talk.text, None)
                template, vocab = self.options.chat_template, self.base.vocab_size
                talk.prompt, _ = encode(prompt, self.tokenizer, chat_template=template, vocab=vocab)
            self._answer(open_talks)
            for talk in open_talks:
                talk.ended = talk.ended or ("" if talk.users else "done")

    def write_all(self, talks: Sequence[Talk], self_talk: SelfTalk) -> None:
        """Write user turns and answers."""
        for _ in range(self_talk.turns):
            open_talks = [talk for talk in talks if not talk.ended]
            if has_template(self.base, self.options.chat_template):
                self._write_users(open_talks, self_talk.opening_tokens)
            else:
                self._write_openings(open_talks, self_talk.opening_tokens)
            self._exclude(open_talks)
            self._answer([talk for talk in open_talks if not talk.ended])

    def _exclude(self, talks: Sequence[Talk]) -> None:
        """End the conversations with the opening of an evaluation prompt."""
        for talk in talks:
            messages = (*talk.said, *talk.users) if talk.text is None else None
            if opening_of(Prompt(talk.id, messages, talk.text, None)) in self.excluded:
                talk.ended = "an evaluation prompt"

    def _write_users(self, talks: Sequence[Talk], budget: int) -> None:
        for talk in talks:
            messages = [*talk.said, {"role": "user", "content": _MARK}]
            rendered = render_chat(self.tokenizer, messages, talk.id, tokenize=False)
            talk.prompt = list(self.tokenizer(rendered.partition(_MARK)[0], add_special_tokens=False)["input_ids"])
        for talk, tokens in self._continued(talks, budget, 1.0):
            text = self.tokenizer.decode(tokens, skip_special_tokens=True).strip()
            if not text:
                talk.ended = "the model wrote an empty turn"
                continue
            talk.said.append({"role": "user", "content": text})
            talk.prompt = render_chat(self.tokenizer, talk.said, talk.id, add_generation_prompt=True)

    def _write_openings(self, talks: Sequence[Talk], budget: int) -> None:
        begin = self.tokenizer.bos_token_id
        begin = self.tokenizer.eos_token_id if begin is None else begin
        if begin is None:
            what = f"the tokenizer of {self.base.name} has no token that begins or ends a text"
            raise TreeoptError(Code.MODEL_INVALID, what, fix="give seed prompts with --prompts")
        for talk in talks:
            talk.prompt = [begin]
        for talk, tokens in self._continued(talks, budget, 1.0):
            if set(tokens) & set(self.base.eos_ids):
                talk.ended = "the text ended in its opening"
                continue
            talk.prompt = [begin, *tokens]
            talk.text = self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _answer(self, talks: Sequence[Talk]) -> None:
        for talk, answer in self._continued(talks, self.options.max_new_tokens, self.options.temperature):
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            if talk.text is None:
                talk.said.append({"role": "assistant", "content": text})
                fields: dict[str, Any] = {"messages": list(talk.said)}
            else:
                fields = {"text": talk.text, "output": text}
            span = [len(talk.prompt), len(talk.prompt) + len(answer)]
            talk.rows.append({"id": talk.id, **fields, "ids": talk.prompt + answer, "answers": [span]})
            if answer[-1] not in self.base.eos_ids:
                talk.ended = "the answer was cut"

    def _continued(self, talks: Sequence[Talk], budget: int, temperature: float) -> Iterator[tuple[Talk, list[int]]]:
        """The conversations whose prompt fits into the context, with the model's continuations."""
        fitting = []
        for talk in talks:
            check_known(talk.prompt, self.base.vocab_size, talk.id)
            if not talk.prompt or len(talk.prompt) + budget > self.base.context:
                talk.ended = "too long for the context" if talk.prompt else "no tokens"
            else:
                fitting.append(talk)
        if fitting:
            texts = [Text(talk.id, talk.prompt, []) for talk in fitting]
            write = functools.partial(continue_texts, self.base, max_new_tokens=budget, temperature=temperature)
            done = in_parts(self.options.auto_batch, texts, write)
            yield from zip(fitting, (text.answer for text in done), strict=True)


def has_template(base: Base, chat_template: bool) -> bool:
    """Whether requests go through a chat template."""
    return chat_template and base.tokenizer is not None and base.tokenizer.chat_template is not None
