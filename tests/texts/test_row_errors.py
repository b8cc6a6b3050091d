"""Faults of rows that are no prompts, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import chat_base

from treeopt.errors import Code, TreeoptError
from treeopt.texts.encode import encode_prompts
from treeopt.texts.prompts import Prompt, PromptSet, answer_fault, fault_of, fields_of, shown

STRING = "and must be a string"


@pytest.mark.parametrize(("row", "fault", "fix"), [
    ("", "is an empty string", '"Name a bird." or {"instruction": "Name a bird."}'),
    (3, "is a number (3) and must be an object or a string", '{"instruction": "Name a bird."}'),
    ({}, "has no usable field", '{"instruction": "..."} or {"text": "..."}'),
    ({"text": None}, f"has a field `text` that is null {STRING}", '{"text": "..."}'),
    ({"messages": None, "text": 5}, f"has a field `text` that is a number (5) {STRING}", '{"text": "..."}'),
    ({"text": "", "prompt": 1}, f"has a field `prompt` that is a number (1) {STRING}", '{"prompt": "..."}'),
    ({"prompt": ["a", ""]}, "has an empty string in `prompt[1]`", '{"prompt": "..."}'),
    ({"turns": []}, "has an empty list in the field `turns`", '{"turns": ["...", "..."]}'),
    ({"turns": None}, "has a field `turns` that is null and must be a list of strings", '{"turns": ["...", "..."]}'),
    ({"turns": ["a", 2]}, f"has a `turns[1]` that is a number (2) {STRING}", '{"turns": ["...", "..."]}'),
])  # fmt: skip
def test_faults_of_rows(row: Any, fault: str, fix: str) -> None:
    """The first field that is not null, in the order in which fields are read."""
    assert fault_of(row) == (fault, fix)


@pytest.mark.parametrize(("messages", "fault"), [
    ({}, "has a field `messages` that is an object and must be a list of messages"),
    ([], "has an empty list in the field `messages`"),
    (["a"], 'has a `messages[0]` that is a string ("a") and must be an object with `role` and `content`'),
    ([{"content": "x"}], "has a `messages[0]` without `role`"),
    ([{"role": "user", "content": "x"}, {"role": "user"}], "has a `messages[1]` without `content`"),
    ([{"role": 1, "content": "x"}], f"has a `messages[0].role` that is a number (1) {STRING}"),
    (
        [{"role": "a", "content": "x"}, {"role": "b", "content": "x"}, {"role": "a", "content": "x"}],
        'has no message of the role "user" in the field `messages`: its roles are "a", "b"',
    ),
])  # fmt: skip
def test_faults_of_messages(messages: Any, fault: str) -> None:
    """The first message with a fault, or the roles."""
    assert fault_of({"messages": messages})[0] == fault


def test_values_in_words() -> None:
    """Up to 40 characters, quotes counted; 200 characters of names."""
    assert shown("a" * 38) == f'a string ("{"a" * 38}")'
    assert shown("a" * 39) == "a string"
    assert [shown(one) for one in (None, True, [1], b"x")] == [
        "null",
        "a boolean (true)",
        "a list",
        "of the type bytes (\"b'x'\")",
    ]
    assert fields_of({"a": 1, "b": 2}) == "a, b"
    assert fields_of({"a" * 200: 1}) == "a" * 200
    assert fields_of({"a" * 201: 1}) == "a" * 200 + "..."
    assert fields_of("text") == ""
    assert answer_fault({"other": 1}, ["output"]) == "has no answer to score"
    assert answer_fault({"output": ""}, ["answer", "output"]) == "has an empty string in the field `output`"


def test_reasons_of_prompts_that_are_left_out_are_sorted() -> None:
    """Where none is left, each reason is named once; given answers are cut at the limit and counted."""
    base = chat_base()
    long = " ".join(["w3"] * base.context)

    def encoded(*rows: tuple[str, str]) -> Any:
        prompts = tuple(Prompt(f"set:{i:08}", None, text, answer) for i, (text, answer) in enumerate(rows))
        return encode_prompts(base, PromptSet("set", "sha", prompts), 3, chat_template=False, scored=True)

    with pytest.raises(TreeoptError) as caught:
        encoded((long, "w1"), ("w2", ""), (long, "w1"))
    assert caught.value.code is Code.PROMPTS_EMPTY
    reasons = caught.value.what.partition(f"in {base.context}: ")[2].split(", ")
    assert len(reasons) == 2
    assert reasons == sorted(reasons)
    assert "none of 3 prompts can be run with 3 new tokens" in caught.value.what
    found = encoded(("w1", "w1 w2 w3"), ("w2", "w1 w2 w3 w4"), ("w2", ""))
    assert (len(found.texts), len(found.skipped), found.answers_cut) == (2, 1, 1)
    assert [len(text.answer) for text in found.texts] == [3, 3]
