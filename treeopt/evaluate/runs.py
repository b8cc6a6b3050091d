"""Runs: every prompt decoded by every baseline, turn by turn."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treeopt.decode.draft_metrics import DraftMetrics
from treeopt.decode.rules import Greedy
from treeopt.evaluate.baselines import GENERATE, STOCK, WARMING, Baseline, Call, Run, warm_up
from treeopt.evaluate.validation import ValidateOptions
from treeopt.models.base import Base
from treeopt.progress import Progress
from treeopt.runs.division import Tally
from treeopt.texts.encode import Text, next_turn
from treeopt.texts.prompts import Skipped

_WARM_UP_TOKENS = 8

RunsByName = dict[str, list[Run]]  # by baseline, one run a repeat


@dataclass(frozen=True)
class Runs:
    """Texts and how they were decoded.

    Args:
        texts: prompts of all turns with the answers of stock generate, sorted by prompt id.
        by_text: the runs of each text.
        skipped: later turns that do not fit into the context.
        left_out: methods of transformers that do not support this model or batch size, with their error messages.
        batch_size: texts decoded together.
    """

    texts: tuple[Text, ...]
    by_text: tuple[RunsByName, ...]
    skipped: tuple[Skipped, ...]
    left_out: Mapping[str, str]
    batch_size: int


def decode_all(
    baselines: Mapping[str, Baseline],
    base: Base,
    prompts: Sequence[Text],
    options: ValidateOptions,
    progress: Progress,
    *,
    first_repeat: int = 0,
    content: Mapping[str, str] | None = None,
) -> Runs:
    """Decode all turns of all prompts by every baseline; a later turn follows the answer of stock generate.

    Each baseline first decodes a few tokens of the first batch, which are not timed; of a compiled base, each turn of
    each batch, so that its size of the cache is compiled. Several processes divide the batches; all of
    them get all runs, and E406 where they differ in what they decode or in `content`, ids of what decodes.
    """
    size = options.batch_size
    baselines, left_out = warm_up(
        baselines, [text.prompt for text in prompts[:size]], min(_WARM_UP_TOKENS, options.max_new_tokens)
    )
    options.division.check_same(lambda: _settings(base, prompts, options, [*left_out], content or {}))
    batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    once = dataclasses.replace(options, repeats=1)
    reported = _reported(progress, options.division.tally(), prompts, exact=isinstance(options.acceptance, Greedy))

    def decode(number: int) -> list[list[dict[str, Any]]]:
        made = []

        def decoded(turn: int, prompts: Sequence[Sequence[int]]) -> list[RunsByName]:
            call = Call(number, turn, first_repeat)
            if base.compile:
                decode_in_turns(baselines, prompts, once, call._replace(repeat=0, part=WARMING))
            made.append(decode_in_turns(baselines, prompts, options, call))
            return made[-1]

        for done, skipped in _turns(base, batches[number], options, decoded):
            reported(done, skipped)
        return [[_plain(by_name) for by_name in rows] for rows in made]

    done: list[tuple[Text, RunsByName]] = []
    skipped: list[Skipped] = []
    for batch, made in zip(batches, options.division.each(len(batches), decode), strict=True):
        known = [[_of_plain(by_name) for by_name in rows] for rows in made]
        for more, left in _turns(base, batch, options, lambda turn, _: known[turn]):  # noqa: B023 - used up here
            done += more
            skipped += [turn for _, turn in left]
    done.sort(key=lambda one: one[0].prompt_id)  # a batch of dialogues is decoded turn by turn
    texts_done, runs_done = zip(*done, strict=True)
    return Runs(texts_done, runs_done, tuple(skipped), left_out, size)


def _settings(
    base: Base, prompts: Sequence[Text], options: ValidateOptions, left_out: Sequence[str], content: Mapping[str, str]
) -> dict[str, Any]:
    """All that the texts depend on, in types of JSON."""
    named = {name: getattr(options, name) for name in ("max_new_tokens", "repeats", "batch_size", "chat_template")}
    texts = [[list(text.prompt), repr(text.later)] for text in prompts]
    return {
        **named,
        **base.versions(),
        "model_id": base.fingerprint,
        "dtype": base.dtype_name,
        "threads": torch.get_num_threads(),
        "acceptance": repr(options.acceptance),
        "prompts": hashlib.sha256(json.dumps(texts).encode()).hexdigest(),
        "methods left out": sorted(left_out),
        **content,
    }


def _turns(
    base: Base,
    batch: Sequence[Text],
    options: ValidateOptions,
    decoded: Callable[[int, Sequence[Sequence[int]]], list[RunsByName]],
) -> Iterator[tuple[list[tuple[Text, RunsByName]], list[tuple[Text, Skipped]]]]:
    """For each turn of a batch the texts with their runs, and the texts whose next turn does not fit, with that turn.

    `decoded` gives the runs of prompts, the texts of a turn (its number from 0).
    """
    turns = list(batch)
    for number in itertools.count():
        if not turns:
            return
        runs = decoded(number, [turn.prompt for turn in turns])
        texts = [
            dataclasses.replace(turn, answer=by_name[GENERATE][0].tokens)
            for turn, by_name in zip(turns, runs, strict=True)
        ]
        following = [
            next_turn(base, text, options.max_new_tokens, chat_template=options.chat_template) for text in texts
        ]
        left = [(text, turn) for text, turn in zip(texts, following, strict=True) if isinstance(turn, Skipped)]
        yield list(zip(texts, runs, strict=True)), left
        turns = [turn for turn in following if isinstance(turn, Text)]


def _reported(
    progress: Progress, tally: Tally, prompts: Sequence[Text], *, exact: bool
) -> Callable[[list[tuple[Text, RunsByName]], list[tuple[Text, Skipped]]], None]:
    """A function that reports what `_turns` gives, together with what other processes have made."""
    total = sum(1 + len(prompt.later) for prompt in prompts)

    def report(done: list[tuple[Text, RunsByName]], left: list[tuple[Text, Skipped]]) -> None:
        texts = tally("texts", len(done))
        differing = tally("differing", sum(_differs(text, by_name) for text, by_name in done))
        # The turns of this batch that are skipped are no longer expected after this report.
        progress(texts, total - tally("skipped", 0), f"texts that differ: {differing}" if exact else "")
        tally("skipped", sum(len(text.later) for text, _ in left))

    return report


def decode_in_turns(
    baselines: Mapping[str, Baseline], prompts: Sequence[Sequence[int]], options: ValidateOptions, call: Call
) -> list[RunsByName]:
    """The runs of each prompt of one batch.

    The baselines take turns; every batch, turn and repeat begins with another one. `call` is the first of the repeats.
    """
    runs: list[RunsByName] = [{name: [] for name in baselines} for _ in prompts]
    names = list(baselines)
    for repeat in range(call.repeat, call.repeat + options.repeats):
        begin = (call.batch + call.turn + repeat) % len(names)
        for name in names[begin:] + names[:begin]:
            found = baselines[name](prompts, options.max_new_tokens, call._replace(repeat=repeat))
            for by_name, run in zip(runs, found, strict=True):
                by_name[name].append(run)
    return runs


def _plain(runs: RunsByName) -> dict[str, Any]:
    """The runs of a text in types of JSON."""
    return {name: [dataclasses.asdict(run) for run in repeats] for name, repeats in runs.items()}


def _of_plain(plain: Mapping[str, Any]) -> RunsByName:
    """The runs of `_plain`."""
    return {name: [_run(run) for run in repeats] for name, repeats in plain.items()}


def _run(plain: Mapping[str, Any]) -> Run:
    drafts = plain["drafts"]
    if drafts is not None:
        drafts = DraftMetrics(**{**drafts, "acceptance_histogram": tuple(drafts["acceptance_histogram"])})
    return Run(**{**plain, "drafts": drafts})


def _differs(text: Text, runs: RunsByName) -> bool:
    """Whether a text of our loop is not that of stock generate."""
    return any(run.tokens != text.answer for name in runs.keys() - STOCK for run in runs[name])
