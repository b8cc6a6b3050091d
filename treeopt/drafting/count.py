"""Count the base model's greedy choices after the tokens of prompts, greedy answers and sampled answers.

A forward pass over finished text is needed only where the choices are not known from the writing of the text: a greedy
answer consists of the choices, and those of a sampled answer are recorded while it is written.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping, Sequence

import torch

from treeopt.drafting.ngram_counts import NgramCounts
from treeopt.files.work import SILENT, Chunk, Recording, chunk_name, pack_rows, unpack_rows
from treeopt.models.auto_batch import AutoBatch, in_parts
from treeopt.models.base import Base
from treeopt.models.logits import rows_at_once
from treeopt.ngram_table import CONTEXT
from treeopt.texts.answers import Drawn
from treeopt.texts.encode import Text
from treeopt.texts.hidden_states import hidden_states


def count_drawn(counts: NgramCounts, drawn: Drawn) -> None:
    """Count the choices of a sampled answer, the first of them after the prompt; the prompt itself is only context."""
    context = drawn.text.prompt[-CONTEXT:]
    tokens = [*context, *drawn.text.answer[:-1]]
    first = len(context) - 1
    counts.add(tokens, [0] * first + drawn.choices, first=first)  # successors before the first are not read


def count_texts(
    base: Base,
    texts: Sequence[Text],
    counts: Mapping[str, NgramCounts],
    *,
    greedy: bool,
    batch_size: int,
    auto_batch: AutoBatch | None = None,
    recording: Recording = SILENT,
) -> None:
    """Count the choices after every token of prompts and answers, but the last token of each text.

    Args:
        base: the base model.
        texts: prompts with answers.
        counts: by prompt id, the counts to which a text is added.
        greedy: whether the answers are the base's greedy choices. Then only the prompts go through the model, each of
            several equal ones once.
        batch_size: prompts or texts in one forward.
        auto_batch: halves the forwards where memory runs out.
        recording: its progress is called at the beginning and after each batch with the number of finished prompts or
            texts; the choices of each batch are stored.
    """
    alike: dict[bytes, list[Text]] = {}  # by the bytes of their tokens, as a tuple of integers takes tenfold
    for text in texts:
        tokens = text.prompt if greedy else [*text.prompt, *text.answer]
        alike.setdefault(array("i", tokens).tobytes(), []).append(text)
    rows = sorted(alike, key=len)  # similar lengths: little padding
    note = "prompts counted" if greedy else "texts counted"
    recording.progress(0, len(rows), note)
    batches = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    makes = {
        chunk_name("counted", i): functools.partial(_choices, base, batch, auto_batch)
        for i, batch in enumerate(batches)
    }
    recording.share(makes, recording.progress)
    done = 0
    for (name, make), batch in zip(makes.items(), batches, strict=True):
        found = unpack_rows(recording.keep(name, make))
        for row, choices in zip(batch, found, strict=True):
            for text in alike[row]:
                tokens, known = [*text.prompt, *text.answer], text.answer if greedy else []
                counts[text.prompt_id].add(tokens[:-1], [*choices, *known])
        done += len(batch)
        recording.progress(done, len(rows), note)


def _choices(base: Base, rows: Sequence[bytes], auto_batch: AutoBatch | None) -> Chunk:
    """The choices in the rows of one batch, given as bytes, so that only its tokens are integers at once."""
    tokens = [array("i", row).tolist() for row in rows]
    return pack_rows(in_parts(auto_batch, tokens, functools.partial(choices_in, base)))


@torch.inference_mode()
def choices_in(base: Base, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The base's greedy choice after each token of each row, but the last token, by one teacher-forced forward."""
    texts = [Text("", list(row[:1]), list(row[1:])) for row in rows]
    size = rows_at_once(base.vocab_size)
    found = []
    for hidden in hidden_states(base, texts):
        parts = [base.lm_logits(part).argmax(-1) for part in torch.split(hidden, size)]
        found.append(torch.cat(parts).tolist())
    return found
