"""Self-distillation: texts that the base model itself writes, to train heads on (arXiv:2401.10774, section 2.3.2).

Three kinds of seeds: single prompts; conversations, whose user turns are put to the model one by one, each after its
own answers; and none at all (self-talk), where the model writes the user's part, or the opening, too.

Every answer becomes one row, with the prompt exactly as the model saw it, so that training sees the states that
decoding will be in. The rows are appended batch by batch to `OUT.partial`, which becomes OUT when all are written; a
run that was cut off goes on behind its last whole batch and ends with the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError, check_counts
from treeopt.files.atomic import check_writable
from treeopt.models.base import Base
from treeopt.models.given import GivenModel, as_base
from treeopt.progress import Progress, silent
from treeopt.sampling import LARGEST_SEED, check_seed, check_temperature
from treeopt.texts.encode import Skipped
from treeopt.texts.given_prompts import GivenPrompts, as_prompt_set
from treeopt.texts.prompts import PromptSet
from treeopt.train.disk import is_full
from treeopt.train.partial import Kept, kept_of, partial_of
from treeopt.train.talks import SelfTalk, Talk, Writer, first_words, has_template, seeded, turns_asked

_SEED_STEP = 1_000_003  # between the random seeds of two runs, so that their batches share none
_SELF = "self:{:08}"  # id of a conversation without a prompt
_DIGITS = 20  # more than any number of conversations has


@dataclass(frozen=True)
class Distilled:
    """What a run wrote.

    Args:
        rows: answers, in all.
        tokens: of these answers.
        new_rows: answers of this run.
        ended_early: conversations of this run that ended before their last turn, with an answer that was cut.
        skipped: seeds of this run that gave no answer, and why.
    """

    rows: int
    tokens: int
    new_rows: int
    ended_early: int
    skipped: tuple[Skipped, ...]


def distill(
    model: GivenModel,
    seeds: GivenPrompts | SelfTalk,
    path: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 16,
    chat_template: bool = True,
    exclude: GivenPrompts | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Distilled:
    """Write the base model's answers to a JSONL file that `train.data.load_texts` reads.

    A row holds the conversation (`messages`, the answer last) or `text` and `output`, the token `ids` of prompt and
    answer, the answer's span in `answers`, the base's fingerprint `model_id`, and `source`: what made it.

    Args:
        model: what answers: a causal language model of transformers, a folder or hub name, or a `Base`.
        seeds: prompts and conversations: a file name or another name as for `load_prompts`, a list of requests, rows or
            conversations, or a `PromptSet`; or `SelfTalk`.
        path: the file to write.
        tokenizer: the model's, where it does not lie beside its weights.
        max_new_tokens: budget of each answer; a conversation ends with an answer that was cut by it.
        temperature: 0 is greedy; above, answers are sampled.
        seed: of all sampling; results also depend on the batch size.
        batch_size: conversations run together.
        chat_template: put requests through the tokenizer's chat template, where it has one.
        exclude: prompts kept for judging: seeds of the same text, or the same first turn, are left out.
        resume: go on with `PATH.partial`.
        overwrite: replace the file, and drop a `PATH.partial`.
        progress: told after each batch.

    Raises:
        TreeoptError: E202 where the file or an unfinished one is there, E204 where it cannot be written, E205 where
            there is nothing to resume, or it was begun with other settings or is damaged, E302 where turns meet a
            tokenizer without a chat template, E304 where there is no tokenizer, E303 where no seed gave an answer, E403
            where the disk is full, E503 where self-talk does not fit into the context; as `load_base` and
            `load_prompts`.
        TypeError: where model or seeds are none of these.
        ValueError: where the seed is negative or beyond 63 bits, or the temperature is between 0 and 1e-6.

    Example:
        >>> import treeopt
        >>> done = treeopt.distill("pocket", ["import os", "def main():"], "answers.jsonl", max_new_tokens=12)
        >>> done.rows
        2
    """
    check_counts(max_new_tokens=max_new_tokens, batch_size=batch_size)
    check_seed(seed)
    check_temperature(temperature)
    target = check_writable(path, overwrite=overwrite)
    partial = partial_of(target, resume=resume, overwrite=overwrite)
    seeds = seeds if isinstance(seeds, SelfTalk) else as_prompt_set(seeds)
    exclude = None if exclude is None else as_prompt_set(exclude)
    base = as_base(model, tokenizer)
    _check_seeds(base, seeds, max_new_tokens, chat_template)
    if base.tokenizer is None:
        raise TreeoptError(Code.MODEL_INVALID, "the base model's folder holds no tokenizer, which prompts need")
    barred = frozenset(filter(None, map(first_words, exclude.prompts))) if exclude else frozenset()
    writer = Writer(base, base.tokenizer, max_new_tokens, temperature, chat_template, barred)
    source = _source(base, seeds, max_new_tokens, temperature, seed, batch_size, chat_template)
    if exclude:
        source["excluded"] = {"prompts": exclude.name, "sha256": exclude.sha256}
    made_by = {**source, "model_id": base.fingerprint}
    kept = kept_of(partial, made_by, _place(seeds), batch_size) if resume else Kept()
    run = _Run(seeds, writer, source, seed, batch_size, kept.rows, kept.tokens)
    try:
        with partial.open("ab") as stream:
            stream.truncate(kept.bytes)
            for number in range(kept.batches, -(-run.count // batch_size)):
                stream.write(run.batch(number))
                stream.flush()
                os.fsync(stream.fileno())
                progress(min((number + 1) * batch_size, run.count), run.count, f"{run.tokens} tokens")
    except TreeoptError:
        if not partial.stat().st_size:  # nothing that could be resumed
            partial.unlink()
        raise
    except OSError as error:
        if not is_full(error):
            raise
        fix = "make room; the same command with --resume goes on"
        raise TreeoptError(Code.OUT_OF_MEMORY, "the disk is full", at=str(partial), fix=fix) from error
    if not run.rows:
        partial.unlink()
        reasons = ", ".join(sorted({one.reason for one in run.skipped}))
        what = f"none of {run.count} seeds gave an answer in a context of {base.context} tokens: {reasons}"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, fix="other seeds, or a lower --max-new-tokens")
    os.replace(partial, target)
    return Distilled(run.rows, run.tokens, run.rows - kept.rows, run.ended_early, tuple(run.skipped))


@dataclass
class _Run:
    """A run at work: its batches one by one, and what was counted so far."""

    seeds: PromptSet | SelfTalk
    writer: Writer
    source: dict[str, Any]
    seed: int
    batch_size: int
    rows: int
    tokens: int
    ended_early: int = 0
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Conversations, in all."""
        return self.seeds.count if isinstance(self.seeds, SelfTalk) else len(self.seeds.prompts)

    def batch(self, number: int) -> bytes:
        """The rows of one batch, a line each."""
        torch.manual_seed((self.seed * _SEED_STEP + number) % (LARGEST_SEED + 1))
        first, last = number * self.batch_size, min((number + 1) * self.batch_size, self.count)
        if isinstance(self.seeds, SelfTalk):
            talks = [Talk(_SELF.format(i)) for i in range(first, last)]
            wanted = [self.seeds.turns] * len(talks)
            self.writer.talk_alone(talks, self.seeds)
        else:
            talks = [seeded(prompt) for prompt in self.seeds.prompts[first:last]]
            wanted = [turns_asked(talk) for talk in talks]
            self.writer.answer_all(talks)
        common = {"model_id": self.writer.base.fingerprint, "source": self.source}
        made = [{**row, **common} for talk in talks for row in talk.rows]
        self.rows += len(made)
        self.tokens += sum(end - start for row in made for start, end in row["answers"])
        self.ended_early += sum(0 < len(talk.rows) < turns for talk, turns in zip(talks, wanted, strict=True))
        self.skipped += [Skipped(t.id, len(t.prompt), t.over or "no answer") for t in talks if not t.rows]
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made).encode(errors="replace")


def _check_seeds(base: Base, seeds: PromptSet | SelfTalk, max_new_tokens: int, chat_template: bool) -> None:
    """Raise E503 where self-talk does not fit into the context, E302 where turns have no template."""
    if isinstance(seeds, SelfTalk) and 1 + seeds.opening_tokens + max_new_tokens > base.context:
        what = (
            f"openings of {seeds.opening_tokens} tokens and {max_new_tokens} new ones; the context holds {base.context}"
        )
        raise TreeoptError(Code.CONTEXT_FULL, what, fix="lower --opening-tokens or --max-new-tokens")
    turns = seeds.turns if isinstance(seeds, SelfTalk) else max(turns_asked(seeded(one)) for one in seeds.prompts)
    if turns > 1 and not has_template(base, chat_template):
        what = f"{base.name} has no chat template in use, so it cannot talk in {turns} turns"
        why = "several messages become one text only by the model's chat template"
        raise TreeoptError(Code.PROMPTS_INVALID, what, why=why, fix="give prompts of one turn, or --turns 1")


def _place(seeds: PromptSet | SelfTalk) -> Callable[[str], int | None]:
    """From a conversation's id to its place among all; None for the id of none."""
    if isinstance(seeds, PromptSet):
        return {prompt.id: i for i, prompt in enumerate(seeds.prompts)}.get
    count = seeds.count

    def place(name: str) -> int | None:
        digits = name.removeprefix(_SELF.partition("{")[0])
        i = int(digits) if digits.isdecimal() and len(digits) < _DIGITS else count
        return i if i < count and name == _SELF.format(i) else None

    return place


def _source(
    base: Base,
    seeds: PromptSet | SelfTalk,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch_size: int,
    chat_template: bool,
) -> dict[str, Any]:
    """What makes a row what it is; the same in every row of a run."""
    if isinstance(seeds, SelfTalk):
        origin: dict[str, Any] = {"self_talk": vars(seeds)}
    else:
        origin = {"prompts": seeds.name, "sha256": seeds.sha256}
    answers = "greedy" if temperature == 0 else f"sampled at {temperature}"
    settings = {
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "batch_size": batch_size,
        "chat_template": has_template(base, chat_template),
    }
    if isinstance(seeds, PromptSet) and seeds.prompts[0].row:
        settings["skip"] = seeds.prompts[0].row  # batches begin there
    return {"model": base.name, "answers": answers, **origin, **settings}
