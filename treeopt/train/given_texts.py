"""Conversion of a user's training texts (a file name, strings, rows, conversations) to `TrainingTexts`."""

from __future__ import annotations

import os
from collections.abc import Iterable

from treeopt.models.base import Base
from treeopt.texts.given_prompts import GIVEN, GivenRow, given_rows
from treeopt.train.data import TextFile, TrainingTexts, load_texts

GivenTexts = TrainingTexts | str | os.PathLike[str] | Iterable[GivenRow]


def as_training_texts(base: Base, texts: GivenTexts, *, length: int) -> TrainingTexts:
    """Training texts, as token ids of at most `length`, and at most the model's context.

    Args:
        base: the model of the tokenizer.
        texts: a file or hub data set as for `load_texts`; a list whose elements are plain texts (strings), rows with an
            answer such as `{"prompt": ..., "output": ...}`, or conversations; one conversation; or `TrainingTexts`.
        length: most tokens of a text.

    Raises:
        TreeoptError: as `load_texts`; E303 where the list is empty.
        TypeError: where the texts are of another type.
    """
    if isinstance(texts, TrainingTexts):
        return texts
    length = min(length, base.context)
    if isinstance(texts, (str, os.PathLike)):
        return load_texts(base, [os.fspath(texts)], length=length)
    digest, rows = given_rows(texts, "texts", "TrainingTexts")
    return load_texts(base, [TextFile(GIVEN, digest, rows)], length=length)


def names_of(texts: GivenTexts) -> tuple[str, ...]:
    """The names of the texts' files or data sets, as the user gave them; empty for objects."""
    if isinstance(texts, TrainingTexts):
        return texts.names
    return (os.fspath(texts),) if isinstance(texts, (str, os.PathLike)) else ()
