"""Training texts as people have them give the same examples as a file of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from looped import looped
from tiny import chat_base

from treeopt.errors import Code, TreeoptError
from treeopt.train.data import TrainingTexts, as_training_texts, load_texts

TALK = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4 w5 w6"}]
ROWS: list[Any] = ["w1 w2 w3 w4", {"prompt": "w3", "output": "w4 w5 w6"}, {"messages": TALK}]


def examples(texts: TrainingTexts) -> list[tuple[list[int], tuple[tuple[int, int], ...]]]:
    """Token ids and spans."""
    return [(example.ids.tolist(), example.answers) for example in texts.examples]


def test_rows_are_those_of_a_file(tmp_path: Path) -> None:
    """A list gives the examples that a file of the same rows gives; a record passes through."""
    base = chat_base()
    (tmp_path / "t.json").write_text(json.dumps(ROWS))
    wanted = load_texts(base, [str(tmp_path / "t.json")], length=64)
    for given in (ROWS, tmp_path / "t.json", str(tmp_path / "t.json")):
        assert examples(as_training_texts(base, given, length=64)) == examples(wanted)
    assert as_training_texts(base, wanted, length=2) is wanted
    talk = as_training_texts(base, TALK, length=64)
    assert examples(talk) == examples(wanted)[2:]
    assert (talk.names, len(talk.sha256)) == (("given",), 1)


def test_length_is_that_of_the_context_at_most() -> None:
    """Long texts are cut into windows of the length asked for, and never longer than the context."""
    base = chat_base()
    for length, longest in ((8, 8), (4096, base.context)):
        made = as_training_texts(base, ["w1 " * 600], length=length)
        assert max(len(example.ids) for example in made.examples) == longest


@looped("given", [None, 5, {"text": "a"}, [5], [None]])
def test_other_types_are_refused(given: object) -> None:
    """What holds no texts is a TypeError that says what is accepted."""
    with pytest.raises(TypeError, match="texts are a file name"):
        as_training_texts(chat_base(), given, length=8)  # type: ignore[arg-type]


@looped("given", [[], ["w1"], [{"prompt": "w1"}]])
def test_nothing_to_learn_from(given: list[Any]) -> None:
    """No text with an answer of two tokens is E303."""
    with pytest.raises(TreeoptError) as caught:
        as_training_texts(chat_base(), given, length=8)
    assert caught.value.code is Code.PROMPTS_EMPTY
