"""Sampled answers of the base model, up to a number of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from treeopt.models.base import Base
from treeopt.progress import Progress, silent
from treeopt.texts.answers import continue_texts
from treeopt.texts.encode import Text

_SLACK = 20  # whole rounds may exceed the number of tokens by a share of 1 / _SLACK


@dataclass(frozen=True)
class Drawing:
    """Options of `draw`.

    Args:
        tokens: number of tokens to sample.
        temperature: of the sampling.
        seed: of the sampling.
        max_new_tokens: most tokens of each answer.
        batch_size: prompts in one forward.
    """

    tokens: int
    temperature: float
    seed: int
    max_new_tokens: int
    batch_size: int


def draw(base: Base, texts: Sequence[Text], drawing: Drawing, *, progress: Progress = silent) -> Iterator[Text]:
    """Sample answers to the prompts, in rounds over all of them, until there are `tokens` tokens.

    A round takes all prompts where, by the mean length of the answers so far, all are needed, or the result exceeds
    `tokens` by at most a twentieth. Another round takes only as many prompts as are needed, evenly spread over prompts
    of all lengths, and the text that reaches `tokens` is cut there. So the result exceeds `tokens` by at most a
    twentieth. It falls short only where as many answers as there are prompts contain no new text.

    The texts depend on the prompts, the mean length of their answers, and `drawing`; those of whole rounds are equal
    for every `tokens` beyond one batch.

    Args:
        base: the base model.
        texts: the prompts, with answers from which the length of an answer is estimated.
        drawing: tokens, temperature, seed and batches.
        progress: called after each batch with the tokens so far and their expected number.

    Yields:
        The texts of each round, by ascending prompt id.
    """
    counted, written = len(texts), max(1, _size(texts))
    prompts = [Text(text.prompt_id, text.prompt, []) for text in texts]  # without source, so without later turns
    most = min(drawing.batch_size, _answers(drawing.tokens, counted, written))
    prompts *= -(-most // len(prompts))  # with few prompts, each several times in one batch
    prompts.sort(key=lambda text: (len(text.prompt), text.prompt_id))
    known: set[tuple[str, tuple[int, ...]]] = set()
    torch.manual_seed(drawing.seed)
    made = repeated = 0
    while made < drawing.tokens and repeated < len(prompts):  # stops when short answers only repeat
        chosen, limit = _round(prompts, made, drawing.tokens, counted, written)
        answered: list[Text] = []
        for batch in _batches(base, chosen, drawing, limit - made):
            answered += batch
            made += _size(batch)
            counted, written = counted + len(batch), written + _size(batch)
            to_come = (len(chosen) - len(answered)) * written // counted
            progress(made, made if made >= limit else max(drawing.tokens, made + to_come), "tokens to learn from")
        yield from sorted(answered, key=lambda text: text.prompt_id)
        new = {(text.prompt_id, tuple(text.answer)) for text in answered} - known
        known |= new
        repeated = 0 if new else repeated + len(answered)


def _round(prompts: Sequence[Text], made: int, tokens: int, counted: int, written: int) -> tuple[Sequence[Text], int]:
    """The prompts of the next round, and the most tokens after it."""
    needed, most = _answers(tokens - made, counted, written), tokens + tokens // _SLACK
    if needed >= len(prompts) or made + len(prompts) * written // counted <= most:
        return prompts, most
    return [prompts[i * len(prompts) // needed] for i in range(needed)], tokens


def _batches(base: Base, prompts: Sequence[Text], drawing: Drawing, left: int) -> Iterator[list[Text]]:
    """Batches of answered prompts, with at most `left` tokens in all; the last answer is cut there."""
    for start in range(0, len(prompts), drawing.batch_size):
        batch = prompts[start : start + drawing.batch_size]
        budget = min(drawing.max_new_tokens, left)
        texts = _first(continue_texts(base, batch, budget, temperature=drawing.temperature), left)
        left -= _size(texts)
        yield texts
        if not left:
            return


def _size(texts: Sequence[Text]) -> int:
    """Number of tokens of all answers."""
    return sum(len(text.answer) for text in texts)


def _answers(tokens: int, counted: int, written: int) -> int:
    """Number of answers for `tokens` tokens, where `counted` answers had `written` tokens."""
    return -(-tokens * counted // written)


def _first(texts: Sequence[Text], tokens: int) -> list[Text]:
    """The first texts, up to `tokens` tokens of answers; the last is cut there."""
    first = []
    for text in texts:
        if tokens:
            first.append(dataclasses.replace(text, answer=text.answer[:tokens]))
            tokens -= len(first[-1].answer)
    return first
