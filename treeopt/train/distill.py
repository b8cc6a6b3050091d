"""Self-distillation: answers of the base model, to train heads on (arXiv:2401.10774, section 2.3.2).

The prompts are single prompts, conversations (whose user turns each follow the model's own answers), or none at all
(self-talk: the model also writes the user turns, or the opening of a text).

Every answer is one row of the output, with the prompt exactly as the model read it, so that training sees the hidden
states that decoding will see. Finished batches are stored in the folder `OUT.partial`, from which an interrupted run
continues, and which several processes may fill together.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError, check_counts
from treeopt.files.atomic import check_writable, write_bytes
from treeopt.models.auto_batch import in_parts
from treeopt.models.base import Base
from treeopt.models.given import GivenModel, as_base
from treeopt.progress import Progress, silent
from treeopt.runs.work import Chunk, Work, chunk_name
from treeopt.sampling import batch_seed
from treeopt.texts.answers import AnswerOptions, continue_texts
from treeopt.texts.encode import Text, check_known, encode, has_template, no_tokenizer, render_chat
from treeopt.texts.prompts import GivenPrompts, Message, Prompt, PromptSet, Skipped, as_prompt_set

_MARK = "treeopt-user-turn"  # a user turn in rendered chats: the text before it is the prompt for a user turn


@dataclass(frozen=True)
class SelfTalk:
    """Seeds that the model writes itself; at temperature 1.

    Args:
        count: conversations, or openings where the model has no chat template.
        turns: user turns of each; more than one needs a chat template.
        opening_tokens: most tokens of a user turn or opening.

    Raises:
        ValueError: where a number is not whole or below 1.
    """

    count: int
    turns: int = 1
    opening_tokens: int = 32

    def __post_init__(self) -> None:
        check_counts(count=self.count, turns=self.turns, opening_tokens=self.opening_tokens)


@dataclass
class Talk:
    """One conversation in progress."""

    id: str
    users: list[Message] = field(default_factory=list)  # user turns to come; the first may be a system message
    said: list[Message] = field(default_factory=list)  # messages so far
    prompt: list[int] = field(default_factory=list)  # token ids of the current turn
    text: str | None = None  # plain text to continue, where there is no conversation
    rows: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""  # the reason why no further turn follows


def talk_of(prompt: Prompt) -> Talk:
    """A conversation from a prompt; the answers in it are left out, as the model gives its own."""
    if prompt.messages is None:
        return Talk(prompt.id, text=prompt.text)
    said = [message for message in prompt.messages if message["role"] != "assistant"]
    return Talk(prompt.id, users=[*said, *({"role": "user", "content": turn} for turn in prompt.later)])


def _opened(base: Base, talk: Talk, options: AnswerOptions) -> list[int]:
    """The token ids of a conversation with its next user turn, which is taken from `users`."""
    while talk.users:
        talk.said.append(talk.users.pop(0))
        if talk.said[-1]["role"] == "user":
            break
    prompt = Prompt(talk.id, tuple(talk.said) if talk.text is None else None, talk.text, None)
    return encode(prompt, base.tokenizer, chat_template=options.chat_template, vocab=base.vocab_size)[0]


def user_turns(talk: Talk) -> int:
    return sum(message["role"] == "user" for message in talk.users)


def opening_of(prompt: Prompt) -> str:
    """The text of a prompt, or its first user turn."""
    if prompt.messages is None:
        return (prompt.text or "").strip()
    return next((m["content"] for m in prompt.messages if m["role"] == "user"), "").strip()


@dataclass(frozen=True)
class Writer:
    """A base model that answers a batch of conversations, and ends those with an excluded opening."""

    base: Base
    tokenizer: PreTrainedTokenizerBase
    options: AnswerOptions
    excluded: frozenset[str]

    def answer_all(self, talks: Sequence[Talk]) -> None:
        """Answer the user turns until none is left."""
        self._exclude(talks)
        while open_talks := [talk for talk in talks if not talk.ended]:
            for talk in open_talks:
                talk.prompt = _opened(self.base, talk, self.options)
            self._answer(open_talks)
            for talk in open_talks:
                talk.ended = talk.ended or ("" if talk.users else "done")

    def write_all(self, talks: Sequence[Talk], self_talk: SelfTalk) -> None:
        """Write user turns and answers."""
        for _ in range(self_talk.turns):
            open_talks = [talk for talk in talks if not talk.ended]
            if has_template(self.base, self.options.chat_template):
                self._write_users(open_talks, self_talk.opening_tokens)
            else:
                self._write_openings(open_talks, self_talk.opening_tokens)
            self._exclude(open_talks)
            self._answer([talk for talk in open_talks if not talk.ended])

    def _exclude(self, talks: Sequence[Talk]) -> None:
        """End the conversations with the opening of an evaluation prompt."""
        for talk in talks:
            messages = (*talk.said, *talk.users) if talk.text is None else None
            if opening_of(Prompt(talk.id, messages, talk.text, None)) in self.excluded:
                talk.ended = "an evaluation prompt"

    def _write_users(self, talks: Sequence[Talk], budget: int) -> None:
        for talk in talks:
            messages = [*talk.said, {"role": "user", "content": _MARK}]
            rendered = render_chat(self.tokenizer, messages, talk.id, tokenize=False)
            talk.prompt = list(self.tokenizer(rendered.partition(_MARK)[0], add_special_tokens=False)["input_ids"])
        for talk, tokens in self._continued(talks, budget, 1.0):
            text = self.tokenizer.decode(tokens, skip_special_tokens=True).strip()
            if not text:
                talk.ended = "the model wrote an empty turn"
                continue
            talk.said.append({"role": "user", "content": text})
            talk.prompt = render_chat(self.tokenizer, talk.said, talk.id, add_generation_prompt=True)

    def _write_openings(self, talks: Sequence[Talk], budget: int) -> None:
        begin = self.tokenizer.bos_token_id
        begin = self.tokenizer.eos_token_id if begin is None else begin
        if begin is None:
            what = f"the tokenizer of {self.base.name} has no token that begins or ends a text"
            raise TreeoptError(Code.MODEL_INVALID, what, fix="give seed prompts with --prompts")
        for talk in talks:
            talk.prompt = [begin]
        for talk, tokens in self._continued(talks, budget, 1.0):
            if set(tokens) & set(self.base.eos_ids):
                talk.ended = "the text ended in its opening"
                continue
            talk.prompt = [begin, *tokens]
            talk.text = self.tokenizer.decode(tokens, skip_special_tokens=True)

    def _answer(self, talks: Sequence[Talk]) -> None:
        for talk, answer in self._continued(talks, self.options.max_new_tokens, self.options.temperature):
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            if talk.text is None:
                talk.said.append({"role": "assistant", "content": text})
                fields: dict[str, Any] = {"messages": list(talk.said)}
            else:
                fields = {"text": talk.text, "output": text}
            span = [len(talk.prompt), len(talk.prompt) + len(answer)]
            talk.rows.append({"id": talk.id, **fields, "ids": talk.prompt + answer, "answers": [span]})
            if answer[-1] not in self.base.eos_ids:
                talk.ended = "the answer was cut"

    def _continued(self, talks: Sequence[Talk], budget: int, temperature: float) -> Iterator[tuple[Talk, list[int]]]:
        """The conversations whose prompt fits into the context, with the model's continuations."""
        fitting = []
        for talk in talks:
            check_known(talk.prompt, self.base.vocab_size, talk.id)
            if not talk.prompt or len(talk.prompt) + budget > self.base.context:
                talk.ended = "too long for the context" if talk.prompt else "no tokens"
            else:
                fitting.append(talk)
        if fitting:
            texts = [Text(talk.id, talk.prompt, []) for talk in fitting]
            write = functools.partial(continue_texts, self.base, max_new_tokens=budget, temperature=temperature)
            done = in_parts(self.options.auto_batch, texts, write)
            yield from zip(fitting, (text.answer for text in done), strict=True)


_SELF = "self:{:08}"  # id of a conversation without a prompt


@dataclass(frozen=True)
class DistillOptions(AnswerOptions):
    """How `distill` answers prompts and writes the answers; the fields of `AnswerOptions`, and these.

    Args:
        resume: continue `PATH.partial`.
        overwrite: replace the file, and delete `PATH.partial`.
        work: stores finished batches in `PATH.partial`, and divides them among processes; None is one process.
    """

    max_new_tokens: int = 256
    resume: bool = False
    overwrite: bool = False
    work: Work | None = None


@dataclass(frozen=True)
class Distilled:
    """The result of `distill`."""

    rows: int  # answers in the file
    tokens: int  # tokens of these answers
    ended_early: int  # conversations that ended before their last turn, with an answer that was cut
    skipped: tuple[Skipped, ...]  # prompts without an answer, and the reasons


def distill(
    model: GivenModel,
    prompts: GivenPrompts | SelfTalk,
    path: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    exclude: GivenPrompts | None = None,
    progress: Progress = silent,
    **options: Any,
) -> Distilled:
    """Write the base model's answers to a JSONL file; `train.data.load_texts` reads it.

    A row holds the conversation (`messages`, the answer last) or `text` and `output`, the token `ids` of prompt and
    answer, the answer's span in `answers`, the base's fingerprint `model_id`, and its origin in `source`.

    Args:
        model: the base model: a causal language model of transformers, a folder or hub name, or a `Base`.
        prompts: prompts and conversations: a file name or other name as for `load_prompts`, a list of requests, rows or
            conversations, or a `PromptSet`; or `SelfTalk`.
        path: the file to write.
        tokenizer: of the model; None takes the one beside the model's weights.
        exclude: evaluation prompts: prompts with the same text, or the same first turn, are left out.
        progress: called after each batch.
        options: fields of `DistillOptions`: `max_new_tokens` (a conversation ends with an answer that reaches it),
            `batch_size`, `temperature`, `seed`, `chat_template`, `resume`, `overwrite`.

    Raises:
        TreeoptError: E202 where the file or an unfinished one exists, E204 where it cannot be written, or another
            process is writing it, E205 where there is no run to resume, or it has other settings or is damaged, E302
            where several turns need a chat template and there is none, E303 where no seed gave an answer, E304 where
            there is no tokenizer, E403 where the disk is full, E503 where self-talk does not fit into the context; as
            `load_base` and `load_prompts`.
        TypeError: where model or prompts are of another type, or there is no such option.
        ValueError: where a number is out of range.

    Examples:
        >>> import treeopt
        >>> done = treeopt.distill("pocket", ["import os", "def main():"], "answers.jsonl", max_new_tokens=12)
        >>> done.rows
        2
    """
    done = divided_distill(model, prompts, path, DistillOptions(**options), tokenizer, exclude, progress)
    assert done is not None, "only commands divide a run among processes"
    return done


def divided_distill(
    model: GivenModel,
    prompts: GivenPrompts | SelfTalk,
    path: str | os.PathLike[str],
    chosen: DistillOptions,
    tokenizer: PreTrainedTokenizerBase | None = None,
    exclude: GivenPrompts | None = None,
    progress: Progress = silent,
) -> Distilled | None:
    """What `distill` does; None in a process that follows another."""
    target = check_writable(path, overwrite=chosen.overwrite)
    work = chosen.work or Work(target, resume=chosen.resume, overwrite=chosen.overwrite)
    prompts = prompts if isinstance(prompts, SelfTalk) else as_prompt_set(prompts)
    excluded = None if exclude is None else as_prompt_set(exclude)
    base = as_base(model, tokenizer)
    _check_prompts(base, prompts, chosen)
    if base.tokenizer is None:
        raise no_tokenizer()
    openings = frozenset(filter(None, map(opening_of, excluded.prompts))) if excluded else frozenset()
    writer = Writer(base, base.tokenizer, chosen, openings)
    run = _Run(prompts, writer, chosen, _source(base, prompts, excluded, chosen))
    try:
        return _write(run, target, work, progress)
    except BaseException:
        if not work.chunks:
            work.remove()
        raise
    finally:
        work.release()


def _write(run: _Run, target: Path, work: Work, progress: Progress) -> Distilled | None:
    """Make the batches that an earlier run has not stored; in the first process, write the rows of all."""
    base, options = run.writer.base, run.options
    numbers = range(-(-run.count // options.batch_size))
    made_by = {**run.source, "model_id": base.fingerprint, "count": run.count}
    work.begin({**made_by, **base.versions(), "threads": torch.get_num_threads()})
    chunks = work.each("rows", numbers, run.batch, progress)
    if work.follows:
        return None
    sums: Counter[str] = Counter()
    skipped: list[Skipped] = []
    for number, (_, data) in enumerate(chunks, start=1):
        skipped += [Skipped(**one) for one in data["skipped"]]
        sums.update({name: data[name] for name in ("rows", "tokens", "ended_early")})
        progress(min(number * options.batch_size, run.count), run.count, f"{sums['tokens']} tokens")
    if not sums["rows"]:
        work.remove()
        reasons = ", ".join(sorted({one.reason for one in skipped}))
        what = f"none of {run.count} prompts gave an answer in a context of {base.context} tokens: {reasons}"
        fix = f"other prompts{', or a lower --max-new-tokens' if 'too long' in reasons else ''}"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, fix=fix)
    stored = (work.chunk(chunk_name("rows", number), functools.partial(run.batch, number)) for number in numbers)
    write_bytes(target, (arrays["lines"].tobytes() for arrays, _ in stored), overwrite=options.overwrite)
    work.remove()
    return Distilled(**sums, skipped=tuple(skipped))


@dataclass(frozen=True)
class _Run:
    """The batches of a run."""

    prompts: PromptSet | SelfTalk
    writer: Writer
    options: DistillOptions
    source: dict[str, Any]

    @property
    def count(self) -> int:
        return self.prompts.count if isinstance(self.prompts, SelfTalk) else len(self.prompts.prompts)

    def batch(self, number: int) -> Chunk:
        """The rows of one batch, a line each, and their counts."""
        seed, size = self.options.seed, self.options.batch_size
        torch.manual_seed(batch_seed(seed, number))
        first, last = number * size, min((number + 1) * size, self.count)
        if isinstance(self.prompts, SelfTalk):
            talks = [Talk(_SELF.format(i)) for i in range(first, last)]
            turns = [self.prompts.turns] * len(talks)
            self.writer.write_all(talks, self.prompts)
        else:
            talks = [talk_of(prompt) for prompt in self.prompts.prompts[first:last]]
            turns = [user_turns(talk) for talk in talks]
            self.writer.answer_all(talks)
        common = {"model_id": self.writer.base.fingerprint, "source": self.source}
        rows = [{**row, **common} for talk in talks for row in talk.rows]
        counts = {
            "rows": len(rows),
            "tokens": sum(end - start for row in rows for start, end in row["answers"]),
            "ended_early": sum(0 < len(talk.rows) < most for talk, most in zip(talks, turns, strict=True)),
            "skipped": [vars(Skipped(t.id, len(t.prompt), t.ended or "no answer")) for t in talks if not t.rows],
        }
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(errors="replace")
        return {"lines": np.frombuffer(lines, np.uint8)}, counts


def _check_prompts(base: Base, prompts: PromptSet | SelfTalk, options: DistillOptions) -> None:
    """Raise E503 where self-talk does not fit into the context, E302 where several turns have no chat template."""
    budget = options.max_new_tokens
    if isinstance(prompts, SelfTalk) and 1 + prompts.opening_tokens + budget > base.context:
        what = f"openings of {prompts.opening_tokens} tokens and {budget} new ones; the context holds {base.context}"
        raise TreeoptError(Code.CONTEXT_FULL, what, fix="lower --opening-tokens or --max-new-tokens")
    turns = prompts.turns if isinstance(prompts, SelfTalk) else max(user_turns(talk_of(one)) for one in prompts.prompts)
    if turns > 1 and not has_template(base, options.chat_template):
        what = f"{base.name} has no chat template in use, so it cannot talk in {turns} turns"
        why = "only a chat template makes one text of several messages"
        raise TreeoptError(Code.PROMPTS_INVALID, what, why=why, fix="give prompts of one turn, or --turns 1")
    for one in () if isinstance(prompts, SelfTalk) else prompts.prompts:
        _opened(base, talk_of(one), options)  # a template's error comes now, not after hours of other answers


def _source(
    base: Base, prompts: PromptSet | SelfTalk, excluded: PromptSet | None, options: DistillOptions
) -> dict[str, Any]:
    """The origin of the rows; equal in all rows of a run."""
    answers = "greedy" if options.temperature == 0 else f"sampled at {options.temperature}"
    source: dict[str, Any] = {"model": base.name, "answers": answers}
    if base.adapter is not None:
        source["adapter"] = base.adapter.name
    if isinstance(prompts, SelfTalk):
        source["self_talk"] = vars(prompts)
    else:
        source |= {"prompts": prompts.name, "sha256": prompts.sha256}
    source |= {
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "batch_size": options.batches,
        "chat_template": has_template(base, options.chat_template),
    }
    if isinstance(prompts, PromptSet) and prompts.prompts[0].row:
        source["skip"] = prompts.prompts[0].row  # the first batch begins there
    if excluded:
        source["excluded"] = {"prompts": excluded.name, "sha256": excluded.sha256}
    return source
