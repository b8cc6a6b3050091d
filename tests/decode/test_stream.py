"""Stream: pieces come step by step and make the whole text, whatever the tokens split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from treeopt.decode.stream import Piece, stream_text, whole_text

SENTENCE = "Once upon a time, naïve 日本語 🙂🙂 said  two spaces.\n And  a line."


@pytest.fixture(scope="module")
def stories(shared: Path) -> PreTrainedTokenizerBase:
    """The shared model's tokenizer: word pieces with their space, and bytes for what it does not know."""
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(shared / "models" / "tinystories-260k")
    return loaded


@pytest.fixture(scope="module")
def by_bytes() -> PreTrainedTokenizerBase:
    """A tokenizer like GPT-2's with one token a byte: every other character is split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("stride", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["stories", "by_bytes"])
def test_stream_is_the_whole_text(kind: str, stride: int, request: pytest.FixtureRequest) -> None:
    """Cut anywhere, the pieces make the text of all tokens, and no piece holds half a character."""
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer(SENTENCE, add_special_tokens=False)["input_ids"]
    pieces = list(stream_text((ids[i : i + stride] for i in range(0, len(ids), stride)), tokenizer))
    assert "".join(piece.text for piece in pieces) == whole_text(ids, tokenizer) == SENTENCE
    assert [token for piece in pieces for token in piece.tokens] == ids
    assert all("\ufffd" not in piece.text for piece in pieces)


def test_stream_does_not_hold_words_back(stories: PreTrainedTokenizerBase) -> None:
    """A token's text is there with its step, the space before it included."""
    ids = stories("Once upon", add_special_tokens=False)["input_ids"]
    pieces = list(stream_text([[token] for token in ids], stories))
    assert [piece.text for piece in pieces] == [" " * (i > 0 and t[0] == "▁") + t.strip("▁") for i, t in
                                                enumerate(stories.convert_ids_to_tokens(ids))]  # fmt: skip


def test_stream_ends_inside_a_character(by_bytes: PreTrainedTokenizerBase) -> None:
    """A text cut inside a character ends as the tokenizer decodes it, in a last piece without tokens."""
    ids = by_bytes("a🙂")["input_ids"][:-1]
    pieces = list(stream_text([ids[:1], ids[1:]], by_bytes))
    assert pieces == [Piece(ids[:1], "a"), Piece(ids[1:], ""), Piece([], whole_text(ids, by_bytes)[1:])]


def test_stream_leaves_special_tokens_out(stories: PreTrainedTokenizerBase) -> None:
    """The end-of-text token is counted and not shown."""
    ids = stories("The end.", add_special_tokens=False)["input_ids"]
    pieces = list(stream_text([ids, [stories.eos_token_id]], stories))
    assert pieces == [Piece(ids, "The end."), Piece([stories.eos_token_id], "")]


def test_stream_survives_broken_bytes(stories: PreTrainedTokenizerBase) -> None:
    """Bytes that are no UTF-8, whose neighbours the tokenizer decodes anew, do not stop the stream."""
    tokens = ["ad", "<0xAB>", "ck", "<0x3C>", "<0x64>", "<0x92>", "▁do", "ck"]
    ids: Any = stories.convert_tokens_to_ids(tokens)
    text = "".join(piece.text for piece in stream_text([[token] for token in ids], stories))
    assert text.startswith("ad")
    assert text.endswith("dock")


def test_stream_without_backend(stories: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that cannot decode in parts gives its text at the end."""
    ids = stories("One day", add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(type(stories), "backend_tokenizer", None)
    assert list(stream_text([ids], stories)) == [Piece(ids, ""), Piece([], "One day")]
