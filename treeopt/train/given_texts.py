"""Training texts as people have them: a file name, strings, rows, conversations, or a record of ours."""

from __future__ import annotations

import os
from collections.abc import Iterable

from treeopt.models.base import Base
from treeopt.texts.given_prompts import GIVEN, GivenRow, given_rows
from treeopt.train.data import TextFile, TrainingTexts, load_texts

GivenTexts = TrainingTexts | str | os.PathLike[str] | Iterable[GivenRow]


def as_training_texts(base: Base, texts: GivenTexts, *, length: int) -> TrainingTexts:
    """Texts to learn from, as token ids of at most `length`, and at most the model's context.

    Args:
        base: whose tokenizer is used.
        texts: a file or hub data set as for `load_texts`; a list whose elements are plain texts (strings), rows with an
            answer such as `{"prompt": ..., "output": ...}`, or conversations; one conversation; or `TrainingTexts`.
        length: most tokens of a text.

    Raises:
        TreeoptError: as `load_texts`; E303 where the list is empty.
        TypeError: where it is none of these.
    """
    if isinstance(texts, TrainingTexts):
        return texts
    length = min(length, base.context)
    if isinstance(texts, (str, os.PathLike)):
        return load_texts(base, [os.fspath(texts)], length=length)
    digest, rows = given_rows(texts, "texts", "TrainingTexts")
    return load_texts(base, [TextFile(GIVEN, digest, rows)], length=length)


def names_of(texts: GivenTexts) -> tuple[str, ...]:
    """The files or data sets that texts come from, as they were named; none where they came as objects."""
    if isinstance(texts, TrainingTexts):
        return texts.names
    return (os.fspath(texts),) if isinstance(texts, (str, os.PathLike)) else ()
