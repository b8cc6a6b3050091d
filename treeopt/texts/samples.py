"""Sampled answers of the base model, up to a number of tokens."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch

from treeopt.models.auto_batch import in_parts
from treeopt.models.base import Base
from treeopt.progress import Progress, silent
from treeopt.runs.work import ALONE, BatchRun, Chunk, pack_rows, unpack_rows
from treeopt.sampling import sample_seed
from treeopt.texts.answers import AnswerOptions, Drawn, sample_texts
from treeopt.texts.encode import Text

_SLACK = 20  # whole rounds may exceed the number of tokens by a share of 1 / _SLACK
_NOTE = "tokens sampled"


def draw(
    base: Base,
    texts: Sequence[Text],
    tokens: int,
    options: AnswerOptions,
    *,
    first: int = 0,
    run: BatchRun[Chunk] = ALONE,
    progress: Progress = silent,
) -> Iterator[Drawn]:
    """Sample answers to the prompts, in rounds over all of them, until there are `tokens` tokens.

    A round takes all prompts where all are needed, or the result exceeds `tokens` by at most a twentieth; another takes
    as many as are needed, spread over prompts of all lengths, and the text that reaches `tokens` is cut there. The
    number of a batch seeds it, so those of a round can be made in any order and place; the `first` has that number.
    There are fewer tokens only where as many answers as there are prompts contain no new text.
    """
    if not tokens:
        return
    counted, written = len(texts), max(1, _size(texts))
    prompts = [Text(text.prompt_id, text.prompt, []) for text in texts]  # without source, so without later turns
    most = min(options.batch_size, _answers(tokens, counted, written))
    prompts *= -(-most // len(prompts))  # with few prompts, each several times in one batch
    prompts.sort(key=lambda text: (len(text.prompt), text.prompt_id))
    known: set[int] = set()  # hashes of the answers, which take less memory than the answers
    made, repeated, number = 0, 0, first
    progress(made, tokens, _NOTE)
    while made < tokens and repeated < len(prompts):  # stops when short answers only repeat
        chosen, limit = _round(prompts, made, tokens, counted, written)
        before, answered = len(known), 0
        batches = [chosen[start : start + options.batch_size] for start in range(0, len(chosen), options.batch_size)]
        for batch in _drawn(base, options, batches, number, limit - made, run, progress):
            answers = [one.text for one in batch]
            made, answered = made + _size(answers), answered + len(answers)
            counted, written = counted + len(answers), written + _size(answers)
            known.update(hash((text.prompt_id, *text.answer)) for text in answers)
            to_come = (len(chosen) - answered) * written // counted
            total = made if made >= limit else max(tokens, made + to_come)
            progress(made, total, f"{_NOTE}, {(len(known) - before) / answered:.0%} of the answers new")
            yield from batch
        number += len(batches)
        repeated = 0 if len(known) > before else repeated + answered
    if made < tokens:
        progress(made, made, f"{_NOTE}, no more answers are new")


def _round(prompts: Sequence[Text], made: int, tokens: int, counted: int, written: int) -> tuple[Sequence[Text], int]:
    """The prompts of the next round, and the most tokens after it."""
    needed, most = _answers(tokens - made, counted, written), tokens + tokens // _SLACK
    if needed >= len(prompts) or made + len(prompts) * written // counted <= most:
        return prompts, most
    return [prompts[i * len(prompts) // needed] for i in range(needed)], tokens


def _drawn(
    base: Base,
    options: AnswerOptions,
    batches: Sequence[Sequence[Text]],
    first: int,
    left: int,
    run: BatchRun[Chunk],
    progress: Progress,
) -> Iterator[list[Drawn]]:
    """The batches of a round, numbered from `first`, with answers: at most `left` tokens, at which the last is cut."""
    budget = min(options.max_new_tokens, left)

    def make(number: int) -> Chunk:
        torch.manual_seed(sample_seed(options.seed, number))
        sample = functools.partial(sample_texts, base, max_new_tokens=budget, temperature=options.temperature)
        found = in_parts(options.auto_batch, batches[number - first], sample)
        return pack_rows([row for one in found for row in (one.text.answer, one.choices)])

    made = run.each("sampled", range(first, first + len(batches)), make, progress)
    for batch, chunk in zip(batches, made, strict=True):
        rows, found = unpack_rows(chunk), []
        for text, answer, choices in zip(batch, rows[::2], rows[1::2], strict=True):
            if left:
                found.append(Drawn(dataclasses.replace(text, answer=answer[:left]), choices[:left]))
                left -= len(found[-1].choices)
        yield found
        if not left:
            return


def _size(texts: Sequence[Text]) -> int:
    """Number of tokens of all answers."""
    return sum(len(text.answer) for text in texts)


def _answers(tokens: int, counted: int, written: int) -> int:
    """Number of answers for `tokens` tokens, where `counted` answers had `written` tokens."""
    return -(-tokens * counted // written)
