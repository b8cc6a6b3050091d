"""Prompts as people have them, in Python as in files, and the faults of rows that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from looped import looped
from refusals import refusal_of
from tiny import chat_base

from treeopt.errors import Code, TreeoptError
from treeopt.texts.encode import Text, as_texts, encode_prompts
from treeopt.texts.prompts import (
    Prompt,
    PromptSet,
    as_prompt_set,
    load_prompts,
)

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "w3 w4"}]
ROWS: list[Any] = ["w1 w2", {"text": "w5"}, {"messages": CHAT}, {"turns": ["w6", "w7"], "category": "c"}]


def contents(prompts: PromptSet) -> list[tuple[Any, ...]]:
    """What is asked, without ids."""
    return [(p.messages, p.text, p.answer, p.category, p.turn, p.later) for p in prompts.prompts]


def test_rows_are_those_of_a_file(tmp_path: Path) -> None:
    """A list gives the prompts that a file of the same rows gives."""
    (tmp_path / "p.json").write_text(json.dumps(ROWS))
    wanted = contents(load_prompts(str(tmp_path / "p.json")))
    for given in (ROWS, tuple(ROWS), iter(ROWS), tmp_path / "p.json", str(tmp_path / "p.json")):
        assert contents(as_prompt_set(given)) == wanted
    record = load_prompts(tmp_path / "p.json")
    assert as_prompt_set(record) is record


def test_conversations_in_both_forms() -> None:
    """One list of messages is one prompt; a list of such lists is as many."""
    one = as_prompt_set(CHAT)
    assert [prompt.messages for prompt in one.prompts] == [tuple(CHAT)]
    many = as_prompt_set([CHAT, CHAT[1:], "w9"])
    assert [prompt.messages for prompt in many.prompts] == [
        tuple(CHAT),
        tuple(CHAT[1:]),
        ({"role": "user", "content": "w9"},),
    ]


def test_ids_tell_rows_and_contents_apart() -> None:
    """Prompts of one list have ids of their own in its order; equal lists have equal ones, others do not."""
    ids = [prompt.id for prompt in as_prompt_set(["a", "a", "b"]).prompts]
    assert sorted(ids) == ids
    assert len(set(ids)) == 3
    assert ids == [prompt.id for prompt in as_prompt_set(["a", "a", "b"]).prompts]
    assert not set(ids) & {prompt.id for prompt in as_prompt_set(["a", "a", "c"]).prompts}


def test_answers_are_demanded() -> None:
    """Where answers are scored each row must bring one."""
    given = as_prompt_set([{"prompt": "a", "output": "b"}], answers=True)
    assert [prompt.answer for prompt in given.prompts] == ["b"]
    with pytest.raises(TreeoptError, match="row 1 of given has no answer"):
        as_prompt_set([{"prompt": "a", "output": "b"}, "c"], answers=True)


def test_texts_are_encoded_or_taken() -> None:
    """Texts pass through; prompts become token ids, and what does not fit is named."""
    base = chat_base()
    texts = [Text("a:0", [3, 5], [])]
    assert as_texts(base, texts, 4) == (texts, ())
    made, skipped = as_texts(base, ["w1 w2", "w3 " * 300], 4)
    assert [text.prompt for text in made] == [base.tokenizer("<user> w1 w2 <bot>")["input_ids"]]
    assert [one.reason for one in skipped] == ["too long for the context"]


@looped("given", [None, 5, b"prompts", {"prompt": "a"}, {"a"}, [5], ["a", None], [["a"]], [[]], [b"a"]])
def test_other_types_are_refused(given: object) -> None:
    """What holds no prompts is a TypeError that says what is accepted."""
    with pytest.raises(TypeError, match=r"prompts are a file name, a list of strings, of rows such as \{'instr"):
        as_prompt_set(given)  # type: ignore[arg-type]


@looped(
    ("given", "code"),
    [
        ([], Code.PROMPTS_EMPTY),
        ((), Code.PROMPTS_EMPTY),
        ([{"colour": "red"}], Code.PROMPTS_INVALID),
        ([{"prompt": 5}], Code.PROMPTS_INVALID),
        ([""], Code.PROMPTS_INVALID),
        ([{"role": "user", "content": 5}], Code.PROMPTS_INVALID),
        ([{"role": "assistant", "content": "a"}], Code.PROMPTS_INVALID),
        ([{"prompt": "a", "score": float("nan")}], Code.PROMPTS_INVALID),
        ([{"prompt": "a", "score": np.float32(1)}], Code.PROMPTS_INVALID),
        ("none.json", Code.FILE_MISSING),
    ],
)
def test_rows_without_prompts(given: Any, code: Code) -> None:
    """Rows without anything to ask are the errors of a file of such rows."""
    assert refusal_of(as_prompt_set, given).code is code


def test_reasons_of_prompts_that_are_left_out_are_sorted() -> None:
    """Where none is left, each reason is named once; given answers are cut at the limit and counted."""
    base = chat_base()
    long = " ".join(["w3"] * base.context)

    def encoded(*rows: tuple[str, str]) -> Any:
        prompts = tuple(Prompt(f"set:{i:08}", None, text, answer) for i, (text, answer) in enumerate(rows))
        return encode_prompts(base, PromptSet("set", "sha", prompts), 3, chat_template=False, scored=True)

    error = refusal_of(encoded, (long, "w1"), ("w2", ""), (long, "w1"))
    assert error.code is Code.PROMPTS_EMPTY
    reasons = error.what.partition(f"in {base.context}: ")[2].split(", ")
    assert len(reasons) == 2
    assert reasons == sorted(reasons)
    assert "none of 3 prompts is run with 3 new tokens" in error.what
    found = encoded(("w1", "w1 w2 w3"), ("w2", "w1 w2 w3 w4"), ("w2", ""))
    assert (len(found.texts), len(found.skipped), found.answers_cut) == (2, 1, 1)
    assert [len(text.answer) for text in found.texts] == [3, 3]
