"""Draw: more of the model's own text, sampled, until there are so many tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from treeopt.calibrate.answers import continue_texts
from treeopt.calibrate.texts import Text
from treeopt.models.base import Base
from treeopt.progress import Progress, silent


@dataclass(frozen=True)
class Drawing:
    """What is drawn.

    Args:
        tokens: how many, in all.
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
    """More answers to the same prompts, in rounds over all of them: `tokens` tokens, exactly.

    A round that would give more than is missing takes only as many prompts as the mean answer says are needed, evenly
    spread over prompts of all lengths; the text that reaches `tokens` is cut there. There are fewer tokens only where
    as many answers as there are prompts bring no text that is new.

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
    tokens, batch_size = drawing.tokens, drawing.batch_size
    counted, written = len(texts), max(1, _size(texts))
    prompts = [Text(text.prompt_id, text.prompt, []) for text in texts]  # without a source: no later turns
    most = min(batch_size, _answers(tokens, counted, written))
    prompts *= -(-most // len(prompts))  # few prompts are answered several times at once
    prompts.sort(key=lambda text: (len(text.prompt), text.prompt_id))
    known: set[tuple[str, tuple[int, ...]]] = set()
    torch.manual_seed(drawing.seed)
    left, repeated = tokens, 0
    while left:
        asked = _spread(prompts, _answers(left, counted, written))
        answered: list[Text] = []
        for start in range(0, len(asked), batch_size):
            budget = min(drawing.max_new_tokens, left)
            batch = asked[start : start + batch_size]
            batch = _first(continue_texts(base, batch, budget, temperature=drawing.temperature), left)
            answered += batch
            left -= _size(batch)
            progress(tokens - left, tokens, "tokens to learn from")
            if not left:
                break
        yield from sorted(answered, key=lambda text: text.prompt_id)
        counted, written = counted + len(answered), written + _size(answered)
        new = {(text.prompt_id, tuple(text.answer)) for text in answered} - known
        known |= new
        repeated = 0 if new else repeated + len(answered)
        if repeated >= len(prompts):  # short answers have all been seen
            return


def _size(texts: Sequence[Text]) -> int:
    """Tokens of all answers."""
    return sum(len(text.answer) for text in texts)


def _answers(tokens: int, counted: int, written: int) -> int:
    """How many answers hold so many tokens, where `counted` of them held `written`."""
    return -(-tokens * counted // written)


def _spread(prompts: Sequence[Text], count: int) -> list[Text]:
    """So many of the prompts, evenly spread over them; all where there are no more."""
    if count >= len(prompts):
        return list(prompts)
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _first(texts: Sequence[Text], tokens: int) -> list[Text]:
    """The texts up to so many tokens of answers; the last is cut there."""
    kept = []
    for text in texts:
        if tokens:
            kept.append(dataclasses.replace(text, answer=text.answer[:tokens]))
            tokens -= len(kept[-1].answer)
    return kept
