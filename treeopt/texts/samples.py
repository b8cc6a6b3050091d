"""Sampled answers of the base model, up to a number of tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from treeopt.models.auto_batch import AutoBatch, in_parts
from treeopt.models.base import Base
from treeopt.progress import Progress, silent
from treeopt.runs.work import ALONE, BatchRun, Chunk, pack_rows, unpack_rows
from treeopt.sampling import sample_seed
from treeopt.texts.answers import Drawn, sample_texts
from treeopt.texts.encode import Text

_SLACK = 20  # whole rounds may exceed the number of tokens by a share of 1 / _SLACK
_NOTE = "tokens sampled"


@dataclass(frozen=True)
class Drawing:
    """Options of `draw`.

    Args:
        tokens: number of tokens to sample.
        temperature: of the sampling.
        seed: of the sampling.
        max_new_tokens: most tokens of each answer.
        batch_size: prompts in one forward.
        auto_batch: halves the forwards where memory runs out.
    """

    tokens: int
    temperature: float
    seed: int
    max_new_tokens: int
    batch_size: int
    auto_batch: AutoBatch | None = None


def draw(
    base: Base,
    texts: Sequence[Text],
    drawing: Drawing,
    *,
    run: BatchRun[Chunk] = ALONE,
    progress: Progress = silent,
) -> Iterator[Drawn]:
    """Sample answers to the prompts, in rounds over all of them, until there are `tokens` tokens.

    A round takes all prompts where all are needed, or the result exceeds `tokens` by at most a twentieth; another takes
    as many as are needed, spread over prompts of all lengths, and the text that reaches `tokens` is cut there. The
    number of a batch seeds it, so those of a round can be made in any order and place. There are fewer tokens only
    where as many answers as there are prompts contain no new text.
    """
    if not drawing.tokens:
        return
    counted, written = len(texts), max(1, _size(texts))
    prompts = [Text(text.prompt_id, text.prompt, []) for text in texts]  # without source, so without later turns
    most = min(drawing.batch_size, _answers(drawing.tokens, counted, written))
    prompts *= -(-most // len(prompts))  # with few prompts, each several times in one batch
    prompts.sort(key=lambda text: (len(text.prompt), text.prompt_id))
    known: set[int] = set()  # hashes of the answers, which take less memory than the answers
    made = repeated = number = 0
    progress(made, drawing.tokens, _NOTE)
    while made < drawing.tokens and repeated < len(prompts):  # stops when short answers only repeat
        chosen, limit = _round(prompts, made, drawing.tokens, counted, written)
        before, answered = len(known), 0
        batches = [chosen[start : start + drawing.batch_size] for start in range(0, len(chosen), drawing.batch_size)]
        for batch in _drawn(base, drawing, batches, number, limit - made, run, progress):
            answers = [one.text for one in batch]
            made, answered = made + _size(answers), answered + len(answers)
            counted, written = counted + len(answers), written + _size(answers)
            known.update(hash((text.prompt_id, *text.answer)) for text in answers)
            to_come = (len(chosen) - answered) * written // counted
            total = made if made >= limit else max(drawing.tokens, made + to_come)
            progress(made, total, f"{_NOTE}, {(len(known) - before) / answered:.0%} of the answers new")
            yield from batch
        number += len(batches)
        repeated = 0 if len(known) > before else repeated + answered
    if made < drawing.tokens:
        progress(made, made, f"{_NOTE}, no more answers are new")


def _round(prompts: Sequence[Text], made: int, tokens: int, counted: int, written: int) -> tuple[Sequence[Text], int]:
    """The prompts of the next round, and the most tokens after it."""
    needed, most = _answers(tokens - made, counted, written), tokens + tokens // _SLACK
    if needed >= len(prompts) or made + len(prompts) * written // counted <= most:
        return prompts, most
    return [prompts[i * len(prompts) // needed] for i in range(needed)], tokens


def _drawn(
    base: Base,
    drawing: Drawing,
    batches: Sequence[Sequence[Text]],
    first: int,
    left: int,
    run: BatchRun[Chunk],
    progress: Progress,
) -> Iterator[list[Drawn]]:
    """The batches of a round, numbered from `first`, with answers: at most `left` tokens, at which the last is cut."""
    budget = min(drawing.max_new_tokens, left)

    def make(number: int) -> Chunk:
        torch.manual_seed(sample_seed(drawing.seed, number))
        sample = functools.partial(sample_texts, base, max_new_tokens=budget, temperature=drawing.temperature)
        found = in_parts(drawing.auto_batch, batches[number - first], sample)
        return pack_rows([row for one in found for row in (one.text.answer, one.choices)])

    made = run.each("sampled", range(first, first + len(batches)), make, progress)
    for batch, chunk in zip(batches, made, strict=True):
        rows = unpack_rows(chunk)
        answers = zip(batch, rows[::2], rows[1::2], strict=True)
        whole = [Drawn(dataclasses.replace(text, answer=answer), choices) for text, answer, choices in answers]
        found = _first(whole, left)
        left -= sum(len(one.choices) for one in found)
        yield found
        if not left:
            return


def _size(texts: Sequence[Text]) -> int:
    """Number of tokens of all answers."""
    return sum(len(text.answer) for text in texts)


def _answers(tokens: int, counted: int, written: int) -> int:
    """Number of answers for `tokens` tokens, where `counted` answers had `written` tokens."""
    return -(-tokens * counted // written)


def _first(answers: Sequence[Drawn], tokens: int) -> list[Drawn]:
    """The first answers, up to `tokens` tokens; the last is cut there."""
    first = []
    for one in answers:
        if tokens:
            text = dataclasses.replace(one.text, answer=one.text.answer[:tokens])
            first.append(Drawn(text, one.choices[:tokens]))
            tokens -= len(text.answer)
    return first
