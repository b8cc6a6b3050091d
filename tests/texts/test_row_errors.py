"""The reasons of prompts that are left out, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import chat_base

from treeopt.errors import Code, TreeoptError
from treeopt.texts.encode import encode_prompts
from treeopt.texts.prompts import Prompt, PromptSet


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
