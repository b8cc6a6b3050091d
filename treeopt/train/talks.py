"""Conversations with a base model: what the user says, from seeds or by the model itself, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.texts.answers import continue_texts
from treeopt.texts.encode import Text, check_known, encode, render_chat
from treeopt.texts.prompts import Message, Prompt

_MARK = "treeopt-user-turn"  # stands for what a user says where a chat template is asked for what comes before it


@dataclass(frozen=True)
class SelfTalk:
    """Seeds that the model writes itself, at temperature 1.

    Args:
        count: conversations, or openings where the model has no chat template.
        turns: user turns of each; more than one needs a chat template.
        opening_tokens: budget of what the model writes as the user, or as the opening.
    """

    count: int
    turns: int = 1
    opening_tokens: int = 32


@dataclass
class Talk:
    """One conversation in progress: what the user will say, and what was said."""

    id: str
    users: list[Message] = field(default_factory=list)  # still to come; first may be a system message
    said: list[Message] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)  # token ids of the turn at hand
    text: str | None = None  # plain text to continue, where there is no conversation
    rows: list[dict[str, Any]] = field(default_factory=list)
    over: str = ""  # why no further turn follows


def seeded(prompt: Prompt) -> Talk:
    """A conversation from a prompt; answers that it brings are left out, as the model gives its own."""
    if prompt.messages is None:
        return Talk(prompt.id, text=prompt.text)
    said = [message for message in prompt.messages if message["role"] != "assistant"]
    return Talk(prompt.id, users=[*said, *({"role": "user", "content": turn} for turn in prompt.later)])


def turns_asked(talk: Talk) -> int:
    """How many turns the user will take."""
    return sum(message["role"] == "user" for message in talk.users)


def first_words(prompt: Prompt) -> str:
    """How a prompt begins: its text, or the user's first turn."""
    if prompt.messages is None:
        return (prompt.text or "").strip()
    return next((m["content"] for m in prompt.messages if m["role"] == "user"), "").strip()


@dataclass(frozen=True)
class Writer:
    """The base model at work on conversations side by side, and the rules it writes by."""

    base: Base
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    temperature: float
    chat_template: bool
    barred: frozenset[str]  # first words of prompts kept for judging

    def answer_all(self, talks: Sequence[Talk]) -> None:
        """Put the users' turns to the model until none is left."""
        self._bar(talks)
        while open_talks := [talk for talk in talks if not talk.over]:
            for talk in open_talks:
                while talk.users:
                    talk.said.append(talk.users.pop(0))
                    if talk.said[-1]["role"] == "user":
                        break
                messages = tuple(talk.said) if talk.text is None else None
                asked = Prompt(talk.id, messages, talk.text, None)
                talk.prompt, _ = encode(asked, self.tokenizer, chat_template=self.chat_template)
            self._answer(open_talks)
            for talk in open_talks:
                talk.over = talk.over or ("" if talk.users else "done")

    def talk_alone(self, talks: Sequence[Talk], asked: SelfTalk) -> None:
        """Write both parts."""
        for _ in range(asked.turns):
            open_talks = [talk for talk in talks if not talk.over]
            if has_template(self.base, self.chat_template):
                self._write_users(open_talks, asked.opening_tokens)
            else:
                self._write_openings(open_talks, asked.opening_tokens)
            self._bar(open_talks)
            self._answer([talk for talk in open_talks if not talk.over])

    def _bar(self, talks: Sequence[Talk]) -> None:
        """End the conversations that begin as a prompt kept for judging does."""
        for talk in talks:
            messages = (*talk.said, *talk.users) if talk.text is None else None
            if first_words(Prompt(talk.id, messages, talk.text, None)) in self.barred:
                talk.over = "kept for judging"

    def _write_users(self, talks: Sequence[Talk], budget: int) -> None:
        """Write what the user says next."""
        for talk in talks:
            asked = [*talk.said, {"role": "user", "content": _MARK}]
            shown = render_chat(self.tokenizer, asked, talk.id, tokenize=False)
            talk.prompt = list(self.tokenizer(shown.partition(_MARK)[0], add_special_tokens=False)["input_ids"])
        for talk, said in self._continued(talks, budget, 1.0):
            text = self.tokenizer.decode(said, skip_special_tokens=True).strip()
            if not text:
                talk.over = "the model wrote an empty turn"
                continue
            talk.said.append({"role": "user", "content": text})
            talk.prompt = render_chat(self.tokenizer, talk.said, talk.id, add_generation_prompt=True)

    def _write_openings(self, talks: Sequence[Talk], budget: int) -> None:
        """Write how a text begins."""
        begin = self.tokenizer.bos_token_id
        begin = self.tokenizer.eos_token_id if begin is None else begin
        if begin is None:
            what = f"the tokenizer of {self.base.name} has no token that begins or ends a text"
            raise TreeoptError(Code.MODEL_INVALID, what, fix="give seed prompts with --prompts")
        for talk in talks:
            talk.prompt = [begin]
        for talk, said in self._continued(talks, budget, 1.0):
            if set(said) & set(self.base.eos_ids):
                talk.over = "the text ended in its opening"
                continue
            talk.prompt = [begin, *said]
            talk.text = self.tokenizer.decode(said, skip_special_tokens=True)

    def _answer(self, talks: Sequence[Talk]) -> None:
        """One answer to each conversation's prompt, noted as a row."""
        for talk, answer in self._continued(talks, self.max_new_tokens, self.temperature):
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            if talk.text is None:
                talk.said.append({"role": "assistant", "content": text})
                shown: dict[str, Any] = {"messages": list(talk.said)}
            else:
                shown = {"text": talk.text, "output": text}
            span = [len(talk.prompt), len(talk.prompt) + len(answer)]
            talk.rows.append({"id": talk.id, **shown, "ids": talk.prompt + answer, "answers": [span]})
            if answer[-1] not in self.base.eos_ids:
                talk.over = "the answer was cut"

    def _continued(self, talks: Sequence[Talk], budget: int, temperature: float) -> Iterator[tuple[Talk, list[int]]]:
        """Each conversation whose prompt fits into the context, with its continuation."""
        fitting = []
        for talk in talks:
            check_known(talk.prompt, self.base.vocab_size, talk.id)
            if not talk.prompt or len(talk.prompt) + budget > self.base.context:
                talk.over = "too long for the context" if talk.prompt else "no tokens"
            else:
                fitting.append(talk)
        if fitting:
            texts = [Text(talk.id, talk.prompt, []) for talk in fitting]
            done = continue_texts(self.base, texts, budget, temperature=temperature)
            yield from zip(fitting, (text.answer for text in done), strict=True)


def has_template(base: Base, chat_template: bool) -> bool:
    return chat_template and base.tokenizer is not None and base.tokenizer.chat_template is not None
