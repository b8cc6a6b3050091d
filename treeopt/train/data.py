"""Training texts: token ids, and the spans of the answers among them.

A row of a file is one of
    {"messages": [...]}                      a conversation; the assistant's turns are answers
    {"text" or "instruction" or "prompt": ..., "output": ...}    a prompt and its answer
    {"text": ...}                            plain text, all of it an answer; so is a line of a .txt file
    {..., "ids": [...], "answers": [[start, end], ...], "model_id": ...}    a row of `treeopt distill`; its token ids
                                             are used where the base is the one that wrote them
"""

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
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
from treeopt.texts.encode import check_known, encode, has_template, render_chat
from treeopt.texts.prompts import ANSWERS, GIVEN, GivenRow, Message, as_prompt, fault_of, given_rows, read_rows, row_id

Span = tuple[int, int]  # from the first token of an answer to one past its last


@dataclass(frozen=True, eq=False)
class Example:
    """Token ids of one text (int32 [T]), and the spans of its answers."""

    ids: NDArray[np.int32]
    answers: tuple[Span, ...]

    @property
    def guessable(self) -> int:
        """Number of targets of the first head: all tokens of the answers but their roots and a text's first token."""
        return sum(max(end - max(start, 1) - 1, 0) for start, end in self.answers)


_NO_ANSWER = Example(np.empty(0, np.int32), ())


@dataclass(frozen=True)
class TrainingTexts:
    """Examples with their origin."""

    examples: tuple[Example, ...]  # the texts
    names: tuple[str, ...]  # of the files or data sets, as the user gave them
    sha256: tuple[str, ...]  # of each file or data set
    cut: int  # number of texts that were cut at the length
    empty: int  # number of rows without an answer
    foreign: int = 0  # number of rows of another model, by the `model_id` of `treeopt distill`


GivenTexts = TrainingTexts | str | os.PathLike[str] | Iterable[GivenRow]


@dataclass(frozen=True)
class TextFile:
    """The unchanged rows of a file or data set, its name, and the sha256 of all rows."""

    name: str
    sha256: str
    rows: Sequence[Any]


def read_texts(name: str) -> TextFile:
    """The rows of a file or hub data set; this needs no model."""
    return TextFile(name, *read_rows(name))


def load_texts(
    base: Base, files: Sequence[str | TextFile], *, length: int, chat_template: bool = True
) -> TrainingTexts:
    """Training texts from files or hub data sets, as token ids of at most `length`.

    Longer plain text becomes several examples; a longer conversation is cut and counted.
    """
    assert length >= 1
    examples: list[Example] = []
    names, digests, cut, empty, foreign = [], [], 0, 0, 0
    for file in (read_texts(file) if isinstance(file, str) else file for file in files):
        names.append(file.name)
        digests.append(file.sha256)
        for i, row in enumerate(file.rows):
            whole = _example(base, row, row_id(file.sha256, i), file.name, i, chat_template)
            spans = tuple((start, min(end, length)) for start, end in whole.answers if start < length)
            plain = whole.answers == ((0, len(whole.ids)),)
            parts = _windows(whole, length) if plain else [Example(whole.ids[:length], spans)]
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
    """A batch: `ids` and `answers` int64 [B, T], as for `loss.targets`, padded with 0 on the right.

    A causal model does not attend to padding on the right, so there is no attention mask.
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
    messages = None if fault_of("messages", fields.get("messages")) else fields["messages"]
    if messages is not None:
        if not any(message["role"] == "assistant" for message in messages):
            return _NO_ANSWER
        if has_template(base, chat_template):
            found = _conversation(base, messages, name, index)
            if "model_id" not in fields:
                return found
            first, last = found.answers[-1]  # the turns before it have rows of their own
            return Example(found.ids, ((first, last - _was_cut(base, fields)),))
    answered = messages is not None or any(fields.get(one) and isinstance(fields[one], str) for one in ANSWERS)
    prompt = as_prompt(fields, prompt_id, name, index, answers=answered)
    if not answered and (prompt.text is None or any(isinstance(fields.get(one), str) for one in ANSWERS)):
        return _NO_ANSWER
    ids, answer = encode(prompt, base.tokenizer, chat_template=chat_template, vocab=base.vocab_size)
    if answered:
        own = getattr(base.tokenizer, "eos_token_id", None)  # a given answer is whole, so its end is learned too
        end = [] if _was_cut(base, fields) else [own] if own in base.eos_ids else list(base.eos_ids[:1])
        return Example(_array([*ids, *answer, *end]), ((len(ids), len(ids) + len(answer) + len(end)),))
    return Example(_array(ids), ((0, len(ids)),))


def _was_cut(base: Base, fields: Mapping[str, Any]) -> bool:
    """Whether a row is of `treeopt distill`, by another model, and its answer was cut before an end token."""
    ids = fields.get("ids") if "model_id" in fields else None
    return isinstance(ids, list) and bool(ids) and ids[-1] not in base.eos_ids


def _given(fields: dict[str, Any], vocab_size: int, name: str, index: int) -> Example:
    """The example in a row of `treeopt distill`."""
    ids, answers = fields["ids"], fields.get("answers")
    spans: list[Any] = answers if isinstance(answers, list) else [None]
    known = isinstance(ids, list) and _whole_numbers(ids, vocab_size - 1)
    pairs = [isinstance(span, list) and _whole_numbers(span, len(ids)) and len(span) == 2 for span in spans if known]
    if not (known and all(pairs) and all(start <= end for start, end in spans)):
        what = f"row {index} of {name} has token ids or answer spans that do not fit together or the vocabulary"
        why = "`ids` are token ids of the base, `answers` [start, end] places among them"
        raise TreeoptError(Code.PROMPTS_INVALID, what, why=why, fix="write the file again with treeopt distill")
    return Example(_array(ids), tuple((start, end) for start, end in spans))


def _whole_numbers(values: Sequence[Any], most: int) -> bool:
    return all(isinstance(value, int) and 0 <= value <= most for value in values)


def _conversation(base: Base, messages: Sequence[Message], name: str, index: int) -> Example:
    """A conversation by the chat template; an answer begins after the template's generation prompt."""
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
                what = f"row {index} of {name}: the chat template changes earlier turns when later ones follow"
                why = "the answers must be parts of the token ids of the whole conversation"
                fix = "split it into single turns, or write the file with treeopt distill, which stores token ids"
                raise TreeoptError(Code.PROMPTS_INVALID, what, why=why, fix=fix)
            spans.append((len(before), len(before) + len(cut_at_end(ids[len(before) : len(after)], base.eos_ids))))
    return Example(_array(ids), tuple(spans))


def _array(ids: Sequence[int]) -> NDArray[np.int32]:
    return np.asarray(ids, np.int32)


def _windows(example: Example, length: int) -> list[Example]:
    """Plain text in parts."""
    parts = [example.ids[start : start + length] for start in range(0, len(example.ids), length)]
    return [Example(part, ((0, len(part)),)) for part in parts]


def as_training_texts(base: Base, texts: GivenTexts, *, length: int) -> TrainingTexts:
    """Training texts, as token ids of at most `length`, and at most the model's context."""
    if isinstance(texts, TrainingTexts):
        return texts
    length = min(length, base.context)
    if isinstance(texts, (str, os.PathLike)):
        return load_texts(base, [os.fspath(texts)], length=length)
    digest, rows = given_rows(texts, "texts", "TrainingTexts")
    return load_texts(base, [TextFile(GIVEN, digest, rows)], length=length)


def names_of(texts: GivenTexts) -> tuple[str, ...]:
    """The files or data sets, as the user named them; empty for objects."""
    if isinstance(texts, TrainingTexts):
        return texts.names
    return (os.fspath(texts),) if isinstance(texts, (str, os.PathLike)) else ()
