"""Conversion of a user's prompts (a file name, strings, chat messages, rows of a data set) to `PromptSet`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from treeopt.errors import Code, TreeoptError
from treeopt.files.tensors import canonical_json
from treeopt.models.base import Base
from treeopt.texts.encode import Skipped, Text, encode_prompts
from treeopt.texts.prompts import PromptSet, as_prompt, load_prompts, row_id

# One row: a request, a row of a prompt file, or a conversation.
GivenRow = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
GivenPrompts = PromptSet | str | os.PathLike[str] | Iterable[GivenRow]

GIVEN = "given"  # name of prompts that are objects, not a file
_KINDS = (
    "{} are a file name, a list of strings, of rows such as {{'instruction': ...}} or of conversations, one list of "
    "chat messages, or {}; not an object of type {}"
)


def as_prompt_set(prompts: GivenPrompts, *, answers: bool = False) -> PromptSet:
    """The prompts that a user gave.

    Args:
        prompts: a name as for `load_prompts`; a list whose elements are requests (strings), rows as in a prompt file,
            or conversations (lists of `{"role": ..., "content": ...}`); one such conversation; or a `PromptSet`.
        answers: require an answer in each row.

    Raises:
        TreeoptError: E302 for a row without a usable field, E303 where there is no row; as `load_prompts`.
        TypeError: where the prompts are of another type.
    """
    if isinstance(prompts, PromptSet):
        return prompts
    if isinstance(prompts, (str, os.PathLike)):
        return load_prompts(os.fspath(prompts), answers=answers)
    digest, rows = given_rows(prompts, "prompts", "what treeopt.load_prompts gives")
    made = tuple(as_prompt(row, row_id(digest, i), GIVEN, i, answers) for i, row in enumerate(rows))
    return PromptSet(GIVEN, digest, made)


def as_texts(
    base: Base, prompts: GivenPrompts | Sequence[Text], max_new_tokens: int, *, chat_template: bool = True
) -> tuple[Sequence[Text], tuple[Skipped, ...]]:
    """The token ids of prompts, and the prompts that do not fit into the context; `Text` records are not changed.

    Raises:
        TreeoptError: as `as_prompt_set` and `encode_prompts`.
        TypeError: as `as_prompt_set`.
    """
    if isinstance(prompts, (list, tuple)) and prompts and all(isinstance(text, Text) for text in prompts):
        return prompts, ()
    rows: Any = prompts
    encoded = encode_prompts(base, as_prompt_set(rows), max_new_tokens, chat_template=chat_template)
    return encoded.texts, encoded.skipped


def given_rows(given: Any, noun: str, record: str) -> tuple[str, list[Any]]:
    """The sha256 of the rows of a list, and the rows, with conversations as `{"messages": [...]}`.

    Args:
        given: strings, mappings or conversations; or the messages of one conversation.
        noun: the name of the rows, for errors.
        record: the record that may be given instead, for errors.

    Raises:
        TreeoptError: E303 where there is no row.
        TypeError: where it is not a list of such rows.
    """
    if isinstance(given, (bytes, Mapping, set, frozenset)) or not isinstance(given, Iterable):
        raise TypeError(_KINDS.format(noun, record, type(given).__name__))
    listed = list(given)
    if not listed:
        raise TreeoptError(Code.PROMPTS_EMPTY, f"the list of {noun} is empty")
    conversation = all(isinstance(row, Mapping) and {"role", "content"} <= row.keys() for row in listed)
    rows = [_row(row) for row in ([listed] if conversation else listed)]
    wrong = [type(row).__name__ for row in rows if not isinstance(row, (str, dict))]
    if wrong:
        raise TypeError(_KINDS.format(noun, record, f"{type(given).__name__} with a {wrong[0]} in it"))
    try:
        return hashlib.sha256(canonical_json(rows).encode()).hexdigest(), rows
    except (TypeError, ValueError) as error:
        what = f"{noun} hold a value that JSON cannot represent: {error}"
        raise TreeoptError(Code.PROMPTS_INVALID, what) from error


def _row(row: Any) -> Any:
    """A row as in a prompt file."""
    if isinstance(row, (list, tuple)) and row and all(isinstance(message, Mapping) for message in row):
        return {"messages": [dict(message) for message in row]}
    return dict(row) if isinstance(row, Mapping) else row
