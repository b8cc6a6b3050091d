"""Sampled answers of the base model, up to a number of tokens."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from treeopt.files.work import Chunk, Keep, chunk_name, pack_rows, unpack_rows, unsaved
from treeopt.models.auto_batch import AutoBatch, in_parts
from treeopt.models.base import Base
from treeopt.models.device import generator_states, set_generator_states
from treeopt.progress import Progress, silent
from treeopt.texts.answers import Drawn, sample_texts
from treeopt.texts.encode import Text

_SLACK = 20  # whole rounds may exceed the number of tokens by a share of 1 / _SLACK
_NOTE = "tokens sampled"
_Sample = Callable[[Sequence[Text], int], list[Drawn]]  # of a batch, with a budget of new tokens


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
    base: Base, texts: Sequence[Text], drawing: Drawing, *, progress: Progress = silent, keep: Keep = unsaved
) -> Iterator[Drawn]:
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
        progress: called at the beginning and after each batch with the tokens so far, their expected number, and the
            share of new answers among those of the round.
        keep: stores each batch with the state of the generator after it, so that a resumed run draws the same.

    Yields:
        The answers with the model's greedy choices, each batch when it is finished, by the length of the prompts.
    """
    if not drawing.tokens:
        return
    counted, written = len(texts), max(1, _size(texts))
    prompts = [Text(text.prompt_id, text.prompt, []) for text in texts]  # without source, so without later turns
    most = min(drawing.batch_size, _answers(drawing.tokens, counted, written))
    prompts *= -(-most // len(prompts))  # with few prompts, each several times in one batch
    prompts.sort(key=lambda text: (len(text.prompt), text.prompt_id))
    sample = _kept(base, drawing, itertools.count(), keep)
    known: set[int] = set()  # hashes of the answers, which take less memory than the answers
    torch.manual_seed(drawing.seed)
    made = repeated = 0
    progress(made, drawing.tokens, _NOTE)
    while made < drawing.tokens and repeated < len(prompts):  # stops when short answers only repeat
        chosen, limit = _round(prompts, made, drawing.tokens, counted, written)
        before, answered = len(known), 0
        for batch in _batches(chosen, drawing, limit - made, sample):
            answers = [one.text for one in batch]
            made, answered = made + _size(answers), answered + len(answers)
            counted, written = counted + len(answers), written + _size(answers)
            known.update(hash((text.prompt_id, *text.answer)) for text in answers)
            to_come = (len(chosen) - answered) * written // counted
            total = made if made >= limit else max(drawing.tokens, made + to_come)
            progress(made, total, f"{_NOTE}, {(len(known) - before) / answered:.0%} of the answers new")
            yield from batch
        repeated = 0 if len(known) > before else repeated + answered
    if made < drawing.tokens:
        progress(made, made, f"{_NOTE}, no more answers are new")


def _round(prompts: Sequence[Text], made: int, tokens: int, counted: int, written: int) -> tuple[Sequence[Text], int]:
    """The prompts of the next round, and the most tokens after it."""
    needed, most = _answers(tokens - made, counted, written), tokens + tokens // _SLACK
    if needed >= len(prompts) or made + len(prompts) * written // counted <= most:
        return prompts, most
    return [prompts[i * len(prompts) // needed] for i in range(needed)], tokens


def _batches(prompts: Sequence[Text], drawing: Drawing, left: int, sample: _Sample) -> Iterator[list[Drawn]]:
    """Batches of answered prompts, with at most `left` tokens in all; the last answer is cut there."""
    for start in range(0, len(prompts), drawing.batch_size):
        batch = prompts[start : start + drawing.batch_size]
        answers = _first(sample(batch, min(drawing.max_new_tokens, left)), left)
        left -= sum(len(one.choices) for one in answers)
        yield answers
        if not left:
            return


def _kept(base: Base, drawing: Drawing, numbers: Iterator[int], keep: Keep) -> _Sample:
    """A function from a batch and its budget to sampled answers, which are stored under the next number."""

    def sample(batch: Sequence[Text], budget: int) -> list[Drawn]:
        def make() -> Chunk:
            sampled = functools.partial(sample_texts, base, max_new_tokens=budget, temperature=drawing.temperature)
            found = in_parts(drawing.auto_batch, batch, sampled)
            rows = [row for one in found for row in (one.text.answer, one.choices)]
            return pack_rows([*rows, *generator_states(base.device)])

        *rows, processor, device = unpack_rows(keep(chunk_name("sampled", next(numbers)), make))
        set_generator_states(base.device, processor, device)
        answers = zip(batch, rows[::2], rows[1::2], strict=True)
        return [Drawn(dataclasses.replace(text, answer=answer), choices) for text, answer, choices in answers]

    return sample


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
