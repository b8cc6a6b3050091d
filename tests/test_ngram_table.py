"""NgramTable: the record's rules, and its keys against integers without bounds."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from looped import looped
from naive_draft import naive_key, random_table

from treeopt.errors import Code, TreeoptError
from treeopt.ngram_table import CONTEXT, NgramTable, context_keys

ONE = 1 << 60  # the least key of one token


def arrays(**changes: Any) -> dict[str, Any]:
    """Two contexts, rows of two, a vocabulary of three; with changes."""
    parts: dict[str, Any] = {
        "keys": np.array([ONE + 5, 2 * ONE + 3]),
        "tokens": np.array([[0, 1], [2, 0], [1, 2]], np.int32),
        "ratios": np.array([[0, 0], [1, 0.5], [2, -0.5]], np.float16),
        "backoff": np.array([0, -0.5, -1], np.float16),
        "unigram": np.array([-0.5, -1, -2], np.float16),
        "num_tokens": 7,
    }
    return parts | changes


def test_properties() -> None:
    """Sizes come from the arrays: 2 x 8 + 6 x 4 + 6 x 2 + 3 x 2 + 3 x 2 bytes."""
    table = NgramTable(**arrays())
    assert (table.vocab_size, table.contexts, table.bytes) == (3, 2, 64)


def test_arrays_are_read_only() -> None:
    """A record's arrays cannot be written into."""
    for array in NgramTable(**arrays()).arrays().values():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_no_context_at_all() -> None:
    """Row 0 alone is a table."""
    none = arrays(keys=np.zeros(0, np.int64), tokens=np.zeros((1, 2), np.int32), backoff=np.zeros(1, np.float16))
    assert NgramTable(**none | {"ratios": np.zeros((1, 2), np.float16)}).contexts == 0


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "keys of another type": ({"keys": np.array([ONE, 2 * ONE], np.uint64)}, "keys are uint64 [2]"),
    "keys of two dimensions": ({"keys": np.array([[ONE, 2 * ONE]])}, "keys are int64 [1, 2]"),
    "keys of no dimension": ({"keys": np.array(ONE)}, "keys are int64 []"),
    "too few rows": ({"tokens": np.zeros((2, 2), np.int32)}, "tokens are int32 [2, 2]"),
    "tokens of another type": ({"tokens": np.zeros((3, 2), np.int64)}, "tokens are int64 [3, 2]"),
    "tokens of one dimension": ({"tokens": np.zeros(3, np.int32)}, "tokens are int32 [3]"),
    "tokens of no dimension": ({"tokens": np.array(0, np.int32)}, "tokens are int32 []"),
    "rows of none": (
        {"tokens": np.zeros((3, 0), np.int32), "ratios": np.zeros((3, 0), np.float16)},
        "tokens are int32 [3, 0]",
    ),
    "ratios of another width": ({"ratios": np.zeros((3, 1), np.float16)}, "ratios are float16 [3, 1]"),
    "ratios of another type": ({"ratios": np.zeros((3, 2), np.float32)}, "ratios are float32 [3, 2]"),
    "backoff of another length": ({"backoff": np.zeros(2, np.float16)}, "backoff are float16 [2]"),
    "unigram of another type": ({"unigram": np.zeros(3, np.float32)}, "unigram are float32 [3]"),
    "unigram of two dimensions": ({"unigram": np.zeros((3, 1), np.float16)}, "unigram are float16 [3, 1]"),
    "unigram of no dimension": ({"unigram": np.array(0, np.float16)}, "unigram are float16 []"),
    "a ratio that is not finite": ({"ratios": np.full((3, 2), np.nan, np.float16)}, "ratios are not finite"),
    "an infinite backoff": ({"backoff": np.array([0, -np.inf, 0], np.float16)}, "backoff are not finite"),
    "an infinite frequency": ({"unigram": np.array([0, 0, -np.inf], np.float16)}, "unigram are not finite"),
    "falling keys": ({"keys": np.array([2 * ONE, ONE])}, "keys are not ascending"),
    "equal keys": ({"keys": np.array([ONE, ONE])}, "keys are not ascending"),
    "a key of no token": ({"keys": np.array([ONE - 1, ONE])}, "1 to 4 tokens"),
    "a key of five tokens": ({"keys": np.array([ONE, 5 * ONE])}, "1 to 4 tokens"),
    "a token too large": ({"tokens": np.full((3, 2), 3, np.int32)}, "outside the vocabulary of 3"),
    "a negative token": ({"tokens": np.full((3, 2), -1, np.int32)}, "outside the vocabulary of 3"),
    "a successor below the rest": ({"backoff": np.array([0, 0.75, -1], np.float16)}, "below its row's backoff"),
}


@looped("case", BROKEN)
def test_broken_record_is_refused(case: str) -> None:
    """Every rule is checked when the record is made."""
    change, message = BROKEN[case]
    with pytest.raises(TreeoptError, match=re.escape(message)) as caught:
        NgramTable(**arrays(**change))
    assert caught.value.code is Code.DRAFTER_INVALID


def test_context_keys_by_hand() -> None:
    """Token 1 then token 0 (the last): the second multiplier alone, under two tokens' bits."""
    keys = context_keys(np.array([0, 1, 0, 0]))
    assert [hex(key) for key in keys] == [
        "0x1000000000000000",
        "0x2ade47ddbde5c099",
        "0x3ade47ddbde5c099",
        "0x4ade47ddbde5c099",
    ]


@given(st.lists(st.integers(-1, 2**31 - 1), min_size=CONTEXT, max_size=CONTEXT))
def test_context_keys_equal_integers_without_bounds(context: list[int]) -> None:
    """Sums that overflow are taken modulo 2^60, for each number of tokens."""
    wanted = [naive_key(tuple(reversed(context[:length]))) for length in range(1, CONTEXT + 1)]
    assert context_keys(np.array(context)).tolist() == wanted


def test_context_keys_leading_dimensions() -> None:
    """Any leading dimensions are kept, the argument too."""
    context = np.arange(24).reshape(2, 3, 4)
    keys = context_keys(context)
    assert np.array_equal(keys[1, 2], context_keys(np.array([20, 21, 22, 23])))
    assert np.array_equal(context, np.arange(24).reshape(2, 3, 4))


@looped("seed", range(3))
def test_random_tables_are_accepted(seed: int) -> None:
    """What other tests are made of keeps the rules."""
    assert random_table(np.random.default_rng(seed), 5).record().vocab_size == 5
