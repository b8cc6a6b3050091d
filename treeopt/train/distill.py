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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from treeopt.calibrate.answers import continue_texts
from treeopt.calibrate.prompts import Message, Prompt, PromptSet
from treeopt.calibrate.texts import Skipped, Text, check_known, encode, render_chat
from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import check_writable
from treeopt.models.base import Base
from treeopt.progress import Progress, silent
from treeopt.train.resume import begun_otherwise

_MARK = "treeopt-user-turn"  # stands for what a user says where a chat template is asked for what comes before it
_SEED_STEP = 1_000_003  # between the random seeds of two runs, so that their batches share none


@dataclass(frozen=True)
class SelfTalk:
    """Seeds that the model writes itself, at temperature 1.

    Args:
        count: conversations, or openings where the model has no chat template.
        turns: user turns of each; more than one needs a chat template.
        opening_tokens: budget of what the model writes as the user, or as the opening.
    """

    count: int
    turns: int = 1
    opening_tokens: int = 32


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


@dataclass
class _Talk:
    """One conversation in progress: what the user will say, and what was said."""

    id: str
    users: list[Message] = field(default_factory=list)  # still to come; first may be a system message
    said: list[Message] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)  # token ids of the turn at hand
    text: str | None = None  # plain text to continue, where there is no conversation
    rows: list[dict[str, Any]] = field(default_factory=list)
    over: str = ""  # why no further turn follows


def distill(
    base: Base,
    seeds: PromptSet | SelfTalk,
    path: str | os.PathLike[str],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 16,
    chat_template: bool = True,
    exclude: PromptSet | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Distilled:
    """Write the base model's answers to a JSONL file that `train.data.load_texts` reads.

    A row holds the conversation (`messages`, the answer last) or `text` and `output`, the token `ids` of prompt and
    answer, the answer's span in `answers`, the base's fingerprint `model_id`, and `source`: what made it.

    Args:
        base: the model that answers.
        seeds: prompts and conversations, or `SelfTalk`.
        path: the file to write.
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
        TreeoptError: E202 where the file or an unfinished one is there, E205 where there is nothing to resume or it was
            begun with other settings, E302 where turns meet a tokenizer without a chat template, E304 where there is no
            tokenizer, E303 where no seed gave an answer, E503 where self-talk does not fit into the context.
    """
    assert max_new_tokens >= 1
    assert batch_size >= 1
    target = check_writable(path, overwrite=overwrite)
    partial = target.with_name(target.name + ".partial")
    if isinstance(seeds, SelfTalk) and 1 + seeds.opening_tokens + max_new_tokens > base.context:
        what = (
            f"openings of {seeds.opening_tokens} tokens and {max_new_tokens} new ones; the context holds {base.context}"
        )
        raise TreeoptError(Code.CONTEXT_FULL, what, fix="lower --opening-tokens or --max-new-tokens")
    talks = list(_self_talks(seeds) if isinstance(seeds, SelfTalk) else _seeded(seeds))
    turns = [seeds.turns if isinstance(seeds, SelfTalk) else max(1, _asked(talk)) for talk in talks]
    if max(turns, default=1) > 1 and not _has_template(base, chat_template):
        what = f"{base.name} has no chat template in use, so it cannot talk in {max(turns)} turns"
        why = "several messages become one text only by the model's chat template"
        raise TreeoptError(Code.PROMPTS_INVALID, what, why=why, fix="give prompts of one turn, or --turns 1")
    barred = frozenset(filter(None, map(_first_words, exclude.prompts))) if exclude else frozenset()
    if base.tokenizer is None:
        raise TreeoptError(Code.MODEL_INVALID, "the base model's folder holds no tokenizer, which prompts need")
    writer = _Writer(base, base.tokenizer, max_new_tokens, temperature, chat_template, barred)
    source = _source(base, seeds, max_new_tokens, temperature, seed, batch_size, chat_template)
    if exclude:
        source["excluded"] = {"prompts": exclude.name, "sha256": exclude.sha256}
    batches = [talks[start : start + batch_size] for start in range(0, len(talks), batch_size)]
    made_by = {**source, "model_id": base.fingerprint}
    kept = _kept(partial, made_by, [talk.id for talk in talks], batch_size, resume=resume, overwrite=overwrite)
    rows, tokens = kept.rows, kept.tokens
    skipped: list[Skipped] = []
    ended_early = 0
    with partial.open("ab") as stream:
        stream.truncate(kept.bytes)
        for number in range(kept.batches, len(batches)):
            torch.manual_seed(seed * _SEED_STEP + number)
            batch = batches[number]
            if isinstance(seeds, SelfTalk):
                writer.talk_alone(batch, seeds)
            else:
                writer.answer_all(batch)
            made = [{**row, "model_id": base.fingerprint, "source": source} for talk in batch for row in talk.rows]
            stream.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made).encode(errors="replace"))
            stream.flush()
            os.fsync(stream.fileno())
            rows += len(made)
            tokens += sum(end - start for row in made for start, end in row["answers"])
            wanted = turns[number * batch_size :][: len(batch)]
            ended_early += sum(0 < len(talk.rows) < asked for talk, asked in zip(batch, wanted, strict=True))
            skipped += [Skipped(t.id, len(t.prompt), t.over or "no answer") for t in batch if not t.rows]
            progress(min((number + 1) * batch_size, len(talks)), len(talks), f"{tokens} tokens")
    if not rows:
        partial.unlink()
        reasons = ", ".join(sorted({one.reason for one in skipped}))
        what = f"none of {len(talks)} seeds gave an answer in a context of {base.context} tokens: {reasons}"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, fix="other seeds, or a lower --max-new-tokens")
    os.replace(partial, target)
    return Distilled(rows, tokens, rows - kept.rows, ended_early, tuple(skipped))


def _seeded(prompts: PromptSet) -> Iterator[_Talk]:
    """Conversations from prompts; answers that they bring are left out, as the model gives its own."""
    for prompt in prompts.prompts:
        if prompt.messages is None:
            yield _Talk(prompt.id, text=prompt.text)
        else:
            said = [message for message in prompt.messages if message["role"] != "assistant"]
            yield _Talk(prompt.id, users=[*said, *({"role": "user", "content": turn} for turn in prompt.later)])


def _self_talks(asked: SelfTalk) -> Iterator[_Talk]:
    return (_Talk(f"self:{i:08}") for i in range(asked.count))


def _asked(talk: _Talk) -> int:
    """How many turns the user will take."""
    return sum(message["role"] == "user" for message in talk.users)


def _first_words(prompt: Prompt) -> str:
    """How a prompt begins: its text, or the user's first turn."""
    if prompt.messages is None:
        return (prompt.text or "").strip()
    return next((m["content"] for m in prompt.messages if m["role"] == "user"), "").strip()


@dataclass(frozen=True)
class _Writer:
    """The base model at work on conversations side by side, and the rules it writes by."""

    base: Base
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    temperature: float
    chat_template: bool
    barred: frozenset[str]  # first words of prompts kept for judging

    def answer_all(self, talks: Sequence[_Talk]) -> None:
        """Put the users' turns to the model until none is left."""
        self._bar(talks)
        while open_talks := [talk for talk in talks if not talk.over]:
            for talk in open_talks:
                while talk.users:
                    talk.said.append(talk.users.pop(0))
                    if talk.said[-1]["role"] == "user":
                        break
                messages = tuple(talk.said) if talk.text is None else None
                asked = Prompt(talk.id, messages, talk.text, None)
                talk.prompt, _ = encode(asked, self.tokenizer, chat_template=self.chat_template)
            self._answer(open_talks)
            for talk in open_talks:
                talk.over = talk.over or ("" if talk.users else "done")

    def talk_alone(self, talks: Sequence[_Talk], asked: SelfTalk) -> None:
        """Write both parts."""
        for _ in range(asked.turns):
            open_talks = [talk for talk in talks if not talk.over]
            if _has_template(self.base, self.chat_template):
                self._write_users(open_talks, asked.opening_tokens)
            else:
                self._write_openings(open_talks, asked.opening_tokens)
            self._bar(open_talks)
            self._answer([talk for talk in open_talks if not talk.over])

    def _bar(self, talks: Sequence[_Talk]) -> None:
        """End the conversations that begin as a prompt kept for judging does."""
        for talk in talks:
            messages = (*talk.said, *talk.users) if talk.text is None else None
            if _first_words(Prompt(talk.id, messages, talk.text, None)) in self.barred:
                talk.over = "kept for judging"

    def _write_users(self, talks: Sequence[_Talk], budget: int) -> None:
        """Write what the user says next."""
        for talk in talks:
            shown = render_chat(self.tokenizer, [*talk.said, {"role": "user", "content": _MARK}], tokenize=False)
            talk.prompt = list(self.tokenizer(shown.partition(_MARK)[0], add_special_tokens=False)["input_ids"])
        for talk, said in self._continued(talks, budget, 1.0):
            text = self.tokenizer.decode(said, skip_special_tokens=True).strip()
            if not text:
                talk.over = "the model wrote an empty turn"
                continue
            talk.said.append({"role": "user", "content": text})
            talk.prompt = render_chat(self.tokenizer, talk.said, add_generation_prompt=True)

    def _write_openings(self, talks: Sequence[_Talk], budget: int) -> None:
        """Write how a text begins."""
        begin = self.tokenizer.bos_token_id
        begin = self.tokenizer.eos_token_id if begin is None else begin
        if begin is None:
            what = f"the tokenizer of {self.base.name} has no token that begins or ends a text"
            raise TreeoptError(Code.MODEL_INVALID, what, fix="give seed prompts with --prompts")
        for talk in talks:
            talk.prompt = [begin]
        for talk, said in self._continued(talks, budget, 1.0):
            if set(said) & set(self.base.eos_ids):
                talk.over = "the text ended in its opening"
                continue
            talk.prompt = [begin, *said]
            talk.text = self.tokenizer.decode(said, skip_special_tokens=True)

    def _answer(self, talks: Sequence[_Talk]) -> None:
        """One answer to each conversation's prompt, noted as a row."""
        for talk, answer in self._continued(talks, self.max_new_tokens, self.temperature):
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            if talk.text is None:
                talk.said.append({"role": "assistant", "content": text})
                shown: dict[str, Any] = {"messages": list(talk.said)}
            else:
                shown = {"text": talk.text, "output": text}
            span = [len(talk.prompt), len(talk.prompt) + len(answer)]
            talk.rows.append({"id": talk.id, **shown, "ids": talk.prompt + answer, "answers": [span]})
            if answer[-1] not in self.base.eos_ids:
                talk.over = "the answer was cut"

    def _continued(self, talks: Sequence[_Talk], budget: int, temperature: float) -> Iterator[tuple[_Talk, list[int]]]:
        """Each conversation whose prompt fits into the context, with its continuation."""
        fitting = []
        for talk in talks:
            check_known(talk.prompt, self.base.vocab_size, talk.id)
            if not talk.prompt or len(talk.prompt) + budget > self.base.context:
                talk.over = "too long for the context" if talk.prompt else "no tokens"
            else:
                fitting.append(talk)
        if fitting:
            texts = [Text(talk.id, talk.prompt, []) for talk in fitting]
            done = continue_texts(self.base, texts, budget, temperature=temperature)
            yield from zip(fitting, (text.answer for text in done), strict=True)


def _has_template(base: Base, chat_template: bool) -> bool:
    return chat_template and base.tokenizer is not None and base.tokenizer.chat_template is not None


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
        "chat_template": _has_template(base, chat_template),
    }
    return {"model": base.name, "answers": answers, **origin, **settings}


@dataclass(frozen=True)
class _Kept:
    """What an earlier run left: whole batches, their rows, tokens and bytes."""

    batches: int = 0
    rows: int = 0
    tokens: int = 0
    bytes: int = 0


def _kept(
    partial: Path, made_by: Mapping[str, Any], ids: Sequence[str], batch_size: int, *, resume: bool, overwrite: bool
) -> _Kept:
    """What of an unfinished file is kept. Its last batch may be half-written, so that one is made again."""
    if not resume:
        if partial.exists() and not overwrite:
            what = f"{partial} is an unfinished run"
            raise TreeoptError(Code.FILE_EXISTS, what, fix="go on with --resume, or begin anew with --force")
        return _Kept()
    if not partial.is_file():
        raise TreeoptError(Code.RESUME_INVALID, f"there is no unfinished {partial}", fix="leave out --resume")
    number = {name: i // batch_size for i, name in enumerate(ids)}
    kept = before = _Kept()
    for line in partial.read_bytes().split(b"\n")[:-1]:
        try:
            row = json.loads(line)
            begun = {**row["source"], "model_id": row["model_id"]}
            batch = number.get(row["id"])
            tokens = sum(end - start for start, end in row["answers"])
        except (ValueError, KeyError, TypeError):
            break  # not whole: this batch is made again
        if begun != made_by:
            raise begun_otherwise(partial, begun, made_by)
        if batch is None:
            break  # of a prompt that a lower limit leaves out
        if batch != kept.batches:
            before = kept
        kept = _Kept(batch, kept.rows + 1, kept.tokens + tokens, kept.bytes + len(line) + 1)
    return _Kept(kept.batches, before.rows, before.tokens, before.bytes)
