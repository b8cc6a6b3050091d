"""Draw: more of the model's own text, sampled, until there are so many tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from treeopt.models.base import Base
from treeopt.progress import Progress, silent
from treeopt.texts.answers import continue_texts
from treeopt.texts.encode import Text

_SLACK = 20  # the share of the tokens that whole rounds may bring too much is one in so many


@dataclass(frozen=True)
class Drawing:
    """What is drawn.

    Args:
        tokens: how many, in all; `draw` says how nearly.
        temperature: of the sampling.
        seed: of the sampling.
        max_new_tokens: budget of each answer.
        batch_size: prompts run together.
    """

    tokens: int
    temperature: float
    seed: int
    max_new_tokens: int
    batch_size: int


def draw(base: Base, texts: Sequence[Text], drawing: Drawing, *, progress: Progress = silent) -> Iterator[Text]:
    """More answers to the same prompts, in rounds over all of them, until there are `tokens` tokens.

    A round is whole where by the mean answer so far it is needed whole, or brings at most a twentieth of `tokens` too
    much. Any other takes only as many prompts as are needed, evenly spread over prompts of all lengths, and the text
    that reaches `tokens` is cut there. So there is at most a twentieth too much, and nothing where the prompts are
    many. There is too little only where as many answers as there are prompts bring no text that is new.

    The texts depend on the prompts, their answers' mean length, and what `drawing` says; those of whole rounds are the
    same for every `tokens` beyond one batch.

    Args:
        base: the base model.
        texts: the prompts, with answers of the length to expect.
        drawing: what is drawn.
        progress: told after each batch: tokens drawn, and to be drawn.

    Yields:
        The texts of each round by ascending prompt id.
    """
    counted, written = len(texts), max(1, _size(texts))
    prompts = [Text(text.prompt_id, text.prompt, []) for text in texts]  # without a source: no later turns
    most = min(drawing.batch_size, _answers(drawing.tokens, counted, written))
    prompts *= -(-most // len(prompts))  # few prompts are answered several times at once
    prompts.sort(key=lambda text: (len(text.prompt), text.prompt_id))
    known: set[tuple[str, tuple[int, ...]]] = set()
    torch.manual_seed(drawing.seed)
    made = repeated = 0
    while made < drawing.tokens and repeated < len(prompts):  # else short answers have all been seen
        asked, limit = _round(prompts, made, drawing.tokens, counted, written)
        answered: list[Text] = []
        for batch in _batches(base, asked, drawing, limit - made):
            answered += batch
            made += _size(batch)
            counted, written = counted + len(batch), written + _size(batch)
            to_come = (len(asked) - len(answered)) * written // counted
            progress(made, made if made >= limit else max(drawing.tokens, made + to_come), "tokens to learn from")
        yield from sorted(answered, key=lambda text: text.prompt_id)
        new = {(text.prompt_id, tuple(text.answer)) for text in answered} - known
        known |= new
        repeated = 0 if new else repeated + len(answered)


def _round(prompts: Sequence[Text], made: int, tokens: int, counted: int, written: int) -> tuple[Sequence[Text], int]:
    """The prompts of the next round, and the tokens that there may be after it."""
    needed, most = _answers(tokens - made, counted, written), tokens + tokens // _SLACK
    if needed >= len(prompts) or made + len(prompts) * written // counted <= most:
        return prompts, most
    return [prompts[i * len(prompts) // needed] for i in range(needed)], tokens


def _batches(base: Base, asked: Sequence[Text], drawing: Drawing, left: int) -> Iterator[list[Text]]:
    """The prompts with answers of so many tokens at most; the last is cut there."""
    for start in range(0, len(asked), drawing.batch_size):
        batch = asked[start : start + drawing.batch_size]
        budget = min(drawing.max_new_tokens, left)
        kept = _first(continue_texts(base, batch, budget, temperature=drawing.temperature), left)
        left -= _size(kept)
        yield kept
        if not left:
            return


def _size(texts: Sequence[Text]) -> int:
    """Tokens of all answers."""
    return sum(len(text.answer) for text in texts)


def _answers(tokens: int, counted: int, written: int) -> int:
    """How many answers hold so many tokens, where `counted` of them held `written`."""
    return -(-tokens * counted // written)


def _first(texts: Sequence[Text], tokens: int) -> list[Text]:
    """The texts up to so many tokens of answers; the last is cut there."""
    kept = []
    for text in texts:
        if tokens:
            kept.append(dataclasses.replace(text, answer=text.answer[:tokens]))
            tokens -= len(kept[-1].answer)
    return kept
