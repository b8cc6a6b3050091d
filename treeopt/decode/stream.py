"""Streaming: the text of each step as soon as its tokens are decoded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from treeopt.decode.draft_metrics import Step


@dataclass(frozen=True)
class Piece:
    """The tokens of one step, and the text that they complete.

    `text` is empty where the step ends inside a character of several bytes; the text of the step that completes the
    character contains it.
    """

    tokens: Step
    text: str


def stream_text(steps: Iterable[Step], tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """The pieces of a text, one for each step; at the end a piece without tokens where text is left.

    The joined texts of the pieces equal `whole_text` of all tokens, except for bytes that are not UTF-8: some
    tokenizers then decode the bytes before them differently, after their text was yielded.

    Args:
        steps: the tokens of each step, as from `TreeDecoder.start`.
        tokenizer: the base model's. One without a `tokenizers` backend gives its text at the end.
    """
    tokens: list[int] = []
    shown = ""
    decoder = _Incremental(tokenizer)
    for step in steps:
        tokens += step
        text = decoder.add(step)
        shown += text
        yield Piece(step, text)
    whole = whole_text(tokens, tokenizer)
    if whole.startswith(shown) and whole != shown:
        yield Piece(Step(), whole[len(shown) :])


def token_texts(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text that each token completes, joined as those of `stream_text`; the last has what is left at the end."""
    decoder = _Incremental(tokenizer)
    texts = [decoder.add([token]) for token in tokens]
    shown, whole = "".join(texts), whole_text(list(tokens), tokenizer)
    if texts and whole.startswith(shown):
        texts[-1] += whole[len(shown) :]
    return texts


def whole_text(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of all tokens, without special tokens; spaces are not cleaned up."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class _Incremental:
    """Incremental decoding of tokens; an incomplete character is held back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend if isinstance(backend, Tokenizer) else None
        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, tokens: list[int]) -> str:
        if self._backend is None:
            return ""
        return "".join(self._add_one(self._backend, token) for token in tokens)

    def _add_one(self, backend: Tokenizer, token: int) -> str:
        try:
            return self._stream.step(backend, token) or ""
        except Exception:  # the library's only type: bytes that are not UTF-8 changed the text before them
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(backend, token) or ""
