"""Training texts: token ids, and which of them are the model's own answers.

A row of a file is one of
    {"messages": [...]}                      a conversation; the assistant's turns are answers
    {"text" or "instruction" or "prompt": ..., "output": ...}    a prompt and its answer
    {"text": ...}                            plain text, all of it an answer; so is a line of a .txt file
    {..., "ids": [...], "answers": [[start, end], ...], "model_id": ...}    what `treeopt distill` wrote: exactly the
                                             tokens that the base model gave, used where the base is the same
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.texts.answers import cut_at_end
from treeopt.texts.encode import check_known, encode, render_chat
from treeopt.texts.prompts import ANSWERS, Message, as_prompt, read_rows, row_id

Span = tuple[int, int]  # from the first token of an answer to one past its last


@dataclass(frozen=True, eq=False)
class Example:
    """Token ids of one text (int32 [T]), and the spans of its answers."""

    ids: NDArray[np.int32]
    answers: tuple[Span, ...]

    @property
    def guessable(self) -> int:
        """Tokens that a first head could guess: all of the answers but their roots and a text's first token."""
        return sum(max(end - max(start, 1) - 1, 0) for start, end in self.answers)


_NO_ANSWER = Example(np.empty(0, np.int32), ())


@dataclass(frozen=True)
class TrainingTexts:
    """Examples with their origin.

    Args:
        examples: what to learn from.
        names: the files or data sets, as they were named.
        sha256: of each of them.
        cut: how many texts were longer than allowed.
        empty: how many rows held no answer.
        foreign: how many rows another model wrote, by what `treeopt distill` noted.
    """

    examples: tuple[Example, ...]
    names: tuple[str, ...]
    sha256: tuple[str, ...]
    cut: int
    empty: int
    foreign: int = 0


@dataclass(frozen=True)
class TextFile:
    """The rows of a file or data set as they stand, under its name, and the sha256 of them all."""

    name: str
    sha256: str
    rows: Sequence[Any]


def read_texts(name: str) -> TextFile:
    """The rows of a file or hub data set; what can be told of them without a model.

    Raises:
        TreeoptError: as `read_rows`.
    """
    return TextFile(name, *read_rows(name))


def load_texts(
    base: Base, files: Sequence[str | TextFile], *, length: int, chat_template: bool = True
) -> TrainingTexts:
    """Training texts from files or hub data sets, as token ids of at most `length`.

    Plain text longer than that becomes several examples; a longer conversation is cut and counted.

    Args:
        base: whose tokenizer and chat template are used.
        files: names as for prompts, or what `read_texts` gave.
        length: most tokens of an example.
        chat_template: put conversations and requests through the tokenizer's chat template, where it has one.

    Raises:
        TreeoptError: E302 for rows that are no texts or ids outside the vocabulary, E303 where nothing is left, and as
            `read_rows` and `encode`.
    """
    assert length >= 1
    examples: list[Example] = []
    names, digests, cut, empty, foreign = [], [], 0, 0, 0
    for file in (read_texts(file) if isinstance(file, str) else file for file in files):
        names.append(file.name)
        digests.append(file.sha256)
        for i, row in enumerate(file.rows):
            whole = _example(base, row, row_id(file.sha256, i), file.name, i, chat_template)
            parts = _windows(whole, length) if whole.answers == ((0, len(whole.ids)),) else [_cut(whole, length)]
            cut += len(parts) == 1 and len(whole.ids) > length
            kept = [part for part in parts if part.guessable]
            empty += not kept
            foreign += isinstance(row, dict) and row.get("model_id", base.fingerprint) != base.fingerprint
            examples += kept
    if not examples:
        what = f"{', '.join(names)} holds no text with an answer of two tokens or more"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, fix="treeopt distill writes texts to train on")
    return TrainingTexts(tuple(examples), tuple(names), tuple(digests), cut, empty, foreign)


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """A batch: `ids` and `answers` int64 [B, T], as `loss.targets` takes them; padded with 0 on the right.

    A causal model never sees padding on the right, so no attention mask is needed.
    """
    ids = [torch.from_numpy(example.ids).long() for example in examples]
    answers = [torch.zeros_like(row) for row in ids]
    for row, example in zip(answers, examples, strict=True):
        for number, (start, end) in enumerate(example.answers, start=1):
            row[start:end] = number
    return {"ids": pad_sequence(ids, batch_first=True), "answers": pad_sequence(answers, batch_first=True)}


def _example(base: Base, row: Any, prompt_id: str, name: str, index: int, chat_template: bool) -> Example:
    fields: dict[str, Any] = row if isinstance(row, dict) else {"text": row}
    if "ids" in fields and fields.get("model_id") == base.fingerprint:
        return _given(fields, base.vocab_size, name, index)
    messages = fields.get("messages")
    if isinstance(messages, list):
        asked = as_prompt(row, prompt_id, name, index, answers=False)  # checks the messages
        if not any(message["role"] == "assistant" for message in messages):
            return _NO_ANSWER
        if chat_template and base.tokenizer is not None and base.tokenizer.chat_template is not None:
            return _conversation(base, messages, name, index)
    answered = isinstance(messages, list) or any(fields.get(field) for field in ANSWERS)
    asked = as_prompt(fields, prompt_id, name, index, answers=answered)
    if not answered and asked.text is None:
        return _NO_ANSWER
    ids, answer = encode(asked, base.tokenizer, chat_template=chat_template, vocab=base.vocab_size)
    if answered:
        end = list(base.eos_ids[:1])  # the answer was whole: its end is learned with it
        return Example(_array([*ids, *answer, *end]), ((len(ids), len(ids) + len(answer) + len(end)),))
    return Example(_array(ids), ((0, len(ids)),))


def _given(fields: dict[str, Any], vocab_size: int, name: str, index: int) -> Example:
    ids, answers = fields["ids"], fields.get("answers")
    if not (isinstance(ids, list) and isinstance(answers, list) and _whole_numbers(ids, vocab_size - 1)):
        raise _misfit(name, index)
    for span in answers:
        if not (isinstance(span, list) and _whole_numbers(span, len(ids)) and len(span) == 2 and span[0] <= span[1]):
            raise _misfit(name, index)
    return Example(_array(ids), tuple((start, end) for start, end in answers))


def _whole_numbers(values: Sequence[Any], most: int) -> bool:
    return all(isinstance(value, int) and 0 <= value <= most for value in values)


def _misfit(name: str, index: int) -> TreeoptError:
    what = f"row {index} of {name} has token ids or answer spans that do not fit together or the vocabulary"
    why = "`ids` are token ids of the base, `answers` [start, end] places among them"
    return TreeoptError(Code.PROMPTS_INVALID, what, why=why, fix="write the file again with treeopt distill")


def _conversation(base: Base, messages: Sequence[Message], name: str, index: int) -> Example:
    """A conversation by the chat template; an answer begins where the template asks for one."""
    assert base.tokenizer is not None
    render = functools.partial(render_chat, base.tokenizer, name=f"row {index} of {name}")
    ids = render(messages)
    check_known(ids, base.vocab_size, f"{name}:{index}")
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(messages[:i], add_generation_prompt=True)
            after = render(messages[: i + 1])
            if ids[: len(before)] != before or ids[: len(after)] != after:
                raise TreeoptError(
                    Code.PROMPTS_INVALID,
                    f"row {index} of {name}: the chat template changes earlier turns when later ones follow",
                    why="an answer must be found among the tokens of the whole conversation",
                    fix="split it into single turns, or write the file with treeopt distill, which keeps token ids",
                )
            spans.append((len(before), len(before) + len(cut_at_end(ids[len(before) : len(after)], base.eos_ids))))
    return Example(_array(ids), tuple(spans))


def _array(ids: Sequence[int]) -> NDArray[np.int32]:
    return np.asarray(ids, np.int32)


def _windows(example: Example, length: int) -> list[Example]:
    parts = [example.ids[start : start + length] for start in range(0, len(example.ids), length)]
    return [Example(part, ((0, len(part)),)) for part in parts]


def _cut(example: Example, length: int) -> Example:
    spans = tuple((start, min(end, length)) for start, end in example.answers if start < length)
    return Example(example.ids[:length], spans)
