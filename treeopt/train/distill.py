"""Self-distillation: answers of the base model, to train heads on (arXiv:2401.10774, section 2.3.2).

The prompts are single prompts, conversations (whose user turns each follow the model's own answers), or none at all
(self-talk: the model also writes the user turns, or the opening of a text).

Every answer is one row of the output, with the prompt exactly as the model read it, so that training sees the hidden
states that decoding will see. The rows are appended batch by batch to `OUT.partial`, which is renamed to OUT when all
are written. A run that was interrupted continues after its last whole batch and ends with the same bytes. Several
processes make the batches in a work folder, from which the first one appends them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError, disk_full
from treeopt.files.atomic import check_writable
from treeopt.files.read import is_regular, parse_json
from treeopt.models.base import Base
from treeopt.models.given import GivenModel, as_base
from treeopt.progress import Progress, silent
from treeopt.runs.lock import Lock
from treeopt.runs.work import Chunk, Keep, Make, Work, chunk_name, damaged, other_settings, unsaved
from treeopt.sampling import batch_seed
from treeopt.texts.answers import AnswerOptions
from treeopt.texts.encode import no_tokenizer
from treeopt.texts.prompts import GivenPrompts, PromptSet, Skipped, as_prompt_set
from treeopt.train.talks import SelfTalk, Talk, Writer, has_template, opening_of, talk_of, user_turns

_ROW_BEGIN = b'{"id": "'
_LONGEST = 1 << 28  # bytes of a line: a row of millions of tokens


@dataclass(frozen=True)
class FinishedRows:
    """The whole batches of an earlier run, and their rows, tokens and bytes."""

    batches: int = 0
    rows: int = 0
    tokens: int = 0
    bytes: int = 0


def rows_of(target: Path) -> Path:
    """The output whose work folder, `TARGET.rows.partial`, holds the rows that several processes make."""
    return target.with_name(target.name + ".rows")


def partial_of(target: Path) -> Path:
    """The unfinished file of `target`."""
    return target.with_name(target.name + ".partial")


def check_unfinished(target: Path, *, resume: bool, overwrite: bool) -> None:
    """Check that a run can begin or continue in the unfinished file of `target`.

    A run of several processes that was killed early has left the folder of its rows, and no file.
    """
    partial = partial_of(target)
    try:
        partial.exists()
    except OSError as error:  # for example a name that is too long with the suffix
        raise TreeoptError(Code.FILE_UNWRITABLE, f"{partial} cannot be written: {error.strerror}") from error
    if partial.is_symlink() or (partial.is_file() and partial.stat().st_nlink > 1):
        what = f"{partial} is a link, so answers would be written to a file of another name"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="remove the link, or choose another name with -o")
    if partial.exists() and not partial.is_file():
        kind = "a folder" if partial.is_dir() else "a device or pipe"
        what = f"{partial} is {kind}, but answers are written to a file of this name"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, fix="move it away, or choose another name with -o")
    Lock(partial).check()
    rows = rows_of(target)
    if resume and not (partial.exists() or rows.with_name(rows.name + ".partial").is_dir()):
        raise TreeoptError(Code.RESUME_INVALID, f"there is no unfinished {partial}", fix="leave out --resume")
    if partial.exists() and not (resume or overwrite):
        what = f"{partial} is an unfinished run"
        raise TreeoptError(Code.FILE_EXISTS, what, fix="continue with --resume, or start again with --force")


def kept_of(
    partial: Path, made_by: Mapping[str, Any], place: Callable[[str], int | None], batch_size: int
) -> FinishedRows:
    """The part of an unfinished file that is kept: all batches but the last, which may be half-written."""
    kept = before = FinishedRows()
    for index, length, row in _checked_rows(partial, made_by, place):
        if index // batch_size != kept.batches:
            before = kept
        tokens = sum(end - start for start, end in row["answers"])
        kept = FinishedRows(index // batch_size, kept.rows + 1, kept.tokens + tokens, kept.bytes + length)
    return FinishedRows(kept.batches, before.rows, before.tokens, before.bytes)


def check_whole(partial: Path, made_by: Mapping[str, Any], place: Callable[[str], int | None], rows: int) -> None:
    """Check a file that is to be renamed: it has the rows that the run wrote, of the run's settings and prompts."""
    if not partial.exists():
        raise TreeoptError(Code.SYSTEM_REFUSED, f"{partial} was deleted while it was written", fix="start again")
    try:
        found = sum(1 for _ in _checked_rows(partial, made_by, place))
    except TreeoptError as error:
        raise RuntimeError(f"{partial} is not what this run wrote: {error.what}") from error
    if found != rows:
        raise RuntimeError(f"{partial} has {found} rows, and this run wrote {rows}")


def _checked_rows(
    partial: Path, made_by: Mapping[str, Any], place: Callable[[str], int | None]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The whole rows of a run, each with the index of its conversation and its bytes; E205 for any other row."""
    last = 0
    for number, line, row in _rows(partial):
        begun = {**row["source"], "model_id": row["model_id"]}
        if begun != made_by:
            raise other_settings(partial, begun, made_by)
        at = f"{partial}:{number}"
        found = place(row["id"])
        if found is None:
            what = f"answers {row['id']}, which is not among these prompts: give the same --prompts, --skip and --limit"
            raise damaged(partial, what, at=at)
        if found < last:
            raise damaged(partial, "holds rows in another order than the prompts", at=at)
        last = found
        yield found, len(line) + 1, row


def _rows(partial: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """The whole rows with their line's number and bytes; an incomplete last line is left out."""
    for number, line in enumerate(_lines(partial), start=1):
        at = f"{partial}:{number}"
        if not line.endswith(b"\n"):
            if line[: len(_ROW_BEGIN)] != _ROW_BEGIN[: len(line)]:
                raise damaged(partial, "ends with a line that treeopt distill did not write", at=at)
            return
        row = _row(line)
        if row is None:
            raise damaged(partial, "holds a line that treeopt distill did not write", at=at)
        yield number, line[:-1], row


def _lines(partial: Path) -> Iterator[bytes]:
    """The lines with their ends; a file may be of any size, a line may not."""
    if not is_regular(partial):
        raise damaged(partial, "is not a regular file")
    try:
        with partial.open("rb") as stream:
            while line := stream.readline(_LONGEST + 1):
                if len(line) > _LONGEST:
                    raise damaged(partial, f"has a line of more than {_LONGEST:,} bytes")
                yield line
    except OSError as error:
        raise damaged(partial, f"cannot be read: {error.strerror}") from error


def _row(line: bytes) -> dict[str, Any] | None:
    """A row that `treeopt distill` wrote; None for another line."""
    try:
        row = parse_json(line)
        known = isinstance(row["id"], str) and isinstance(row["source"], dict) and isinstance(row["model_id"], str)
        spans = all(0 <= start <= end <= len(row["ids"]) for start, end in row["answers"])
    except (ValueError, KeyError, TypeError):
        return None
    return row if known and spans else None


_SELF = "self:{:08}"  # id of a conversation without a prompt
_DIGITS = 20  # more digits than any number of conversations has


@dataclass(frozen=True)
class DistillOptions(AnswerOptions):
    """How `distill` answers prompts and writes the answers; the fields of `AnswerOptions`, and these.

    Args:
        resume: continue `PATH.partial`.
        overwrite: replace the file, and delete `PATH.partial`.
        work: stores finished batches beside `PATH.partial`, and divides them among processes; None for one process.
    """

    max_new_tokens: int = 256
    resume: bool = False
    overwrite: bool = False
    work: Work | None = None


@dataclass(frozen=True)
class Distilled:
    """The result of `distill`.

    Args:
        rows: answers in the file.
        tokens: tokens of these answers.
        new_rows: answers of this run.
        ended_early: conversations of this run that ended before their last turn, with an answer that was cut.
        skipped: prompts of this run without an answer, and the reasons.
    """

    rows: int
    tokens: int
    new_rows: int
    ended_early: int
    skipped: tuple[Skipped, ...]


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
    """Write the base model's answers to a JSONL file that `train.data.load_texts` reads.

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
    chosen = DistillOptions(**options)
    target = check_writable(path, overwrite=chosen.overwrite)
    with _leading(target, chosen):
        prompts = prompts if isinstance(prompts, SelfTalk) else as_prompt_set(prompts)
        excluded = None if exclude is None else as_prompt_set(exclude)
        base = as_base(model, tokenizer)
        _check_prompts(base, prompts, chosen)
        source = _source(base, prompts, excluded, chosen)
        run = _Run(prompts, _writer(base, excluded, chosen), source)
        kept = _write(run, target, chosen, progress)
    return Distilled(run.rows, run.tokens, run.rows - kept.rows, run.ended_early, tuple(run.skipped))


@contextlib.contextmanager
def _leading(target: Path, options: DistillOptions) -> Iterator[None]:
    """Context in which no other run writes the unfinished file of `target`, which is checked."""
    if options.work is not None and options.work.follows:  # the first process has the lock for all
        yield
        return
    with Lock(partial_of(target)):
        check_unfinished(target, resume=options.resume, overwrite=options.overwrite)
        try:
            yield
        finally:
            if options.work is not None:
                options.work.release()


def _write(run: _Run, target: Path, options: DistillOptions, progress: Progress) -> FinishedRows:
    """Make the rows that an earlier run has not left, and rename the file when it has all; what that run has left."""
    base, partial, place, work = run.writer.base, partial_of(target), _place(run.prompts), options.work
    made_by = {**run.source, "model_id": base.fingerprint}
    resumed = options.resume and partial.exists()
    kept = kept_of(partial, made_by, place, options.batch_size) if resumed else FinishedRows()
    run.rows, run.tokens = kept.rows, kept.tokens
    if work is None:
        _append(run, partial, kept, progress)
    else:
        settings = {**made_by, **base.versions(), "threads": torch.get_num_threads()}
        _share(run, partial, kept, progress, work=work, settings=settings)
        _append(run, partial, kept, progress, keep=work.chunk)
    check_whole(partial, made_by, place, run.rows)
    if work is not None:
        work.remove()
    if not run.rows:
        partial.unlink()
        reasons = ", ".join(sorted({one.reason for one in run.skipped}))
        what = f"none of {run.count} prompts gave an answer in a context of {base.context} tokens: {reasons}"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, fix="other prompts, or a lower --max-new-tokens")
    os.replace(partial, target)
    return kept


@dataclass
class _Run:
    """The batches of a run, and the counts of those that are written."""

    prompts: PromptSet | SelfTalk
    writer: Writer
    source: dict[str, Any]
    rows: int = 0
    tokens: int = 0
    ended_early: int = 0
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of conversations."""
        return self.prompts.count if isinstance(self.prompts, SelfTalk) else len(self.prompts.prompts)

    def batches(self, first: int) -> Iterator[tuple[str, Make]]:
        """The batches from a number on, and the names of their chunks; self-talk can have more than memory holds."""
        for number in range(first, -(-self.count // self.writer.options.batch_size)):
            yield chunk_name("rows", number), functools.partial(self._batch, number)

    def lines(self, chunk: Chunk) -> bytes:
        """The rows of a batch, a line each, which are counted."""
        arrays, data = chunk
        self.rows += data["rows"]
        self.tokens += data["tokens"]
        self.ended_early += data["ended_early"]
        self.skipped += [Skipped(**one) for one in data["skipped"]]
        return arrays["lines"].tobytes()

    def _batch(self, number: int) -> Chunk:
        """The rows of one batch, a line each, and their counts."""
        seed, size = self.writer.options.seed, self.writer.options.batch_size
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


def _share(
    run: _Run, partial: Path, kept: FinishedRows, progress: Progress, *, work: Work, settings: dict[str, Any]
) -> None:
    """Make the remaining batches in all processes; then the first one goes on alone."""
    work.begin(settings)
    if not work.follows:
        partial.touch()
    try:
        work.share(dict(run.batches(kept.batches)), progress)
        work.leader_only()
    finally:
        if not (work.follows or work.chunks or partial.stat().st_size):
            partial.unlink()  # there is nothing to resume


def _append(run: _Run, partial: Path, kept: FinishedRows, progress: Progress, *, keep: Keep = unsaved) -> None:
    """Append the remaining batches to the unfinished file; delete it where the first one fails."""
    size = run.writer.options.batch_size
    try:
        with partial.open("ab") as stream:
            stream.truncate(kept.bytes)
            for number, (name, make) in enumerate(run.batches(kept.batches), start=kept.batches + 1):
                stream.write(run.lines(keep(name, make)))
                stream.flush()
                os.fsync(stream.fileno())
                progress(min(number * size, run.count), run.count, f"{run.tokens} tokens")
    except TreeoptError:
        if not partial.stat().st_size:  # there is nothing to resume
            partial.unlink()
        raise
    except OSError as error:
        if not disk_full(error):
            raise
        fix = "free some space; the same command with --resume continues"
        raise TreeoptError(Code.OUT_OF_MEMORY, "the disk is full", at=str(partial), fix=fix) from error


def _writer(base: Base, excluded: PromptSet | None, options: DistillOptions) -> Writer:
    """The base model as a writer of answers; raise E304 where it has no tokenizer."""
    if base.tokenizer is None:
        raise no_tokenizer()
    openings = frozenset(filter(None, map(opening_of, excluded.prompts))) if excluded else frozenset()
    return Writer(base, base.tokenizer, options, openings)


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


def _place(prompts: PromptSet | SelfTalk) -> Callable[[str], int | None]:
    """A function from a conversation's id to its index among all; None for an unknown id."""
    if isinstance(prompts, PromptSet):
        return {prompt.id: i for i, prompt in enumerate(prompts.prompts)}.get
    count = prompts.count

    def place(name: str) -> int | None:
        digits = name.removeprefix(_SELF.partition("{")[0])
        i = int(digits) if digits.isdecimal() and len(digits) < _DIGITS else count
        return i if i < count and name == _SELF.format(i) else None

    return place


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
