"""Runs: every prompt decoded by every baseline, turn by turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treeopt.decode.rules import Greedy
from treeopt.evaluate.baselines import GENERATE, STOCK, Baseline, Run, warm_up
from treeopt.evaluate.validation import ValidateOptions
from treeopt.models.base import Base
from treeopt.progress import Progress
from treeopt.texts.encode import Skipped, Text, next_turn

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
) -> Runs:
    """Decode all turns of all prompts by every baseline; a later turn follows the answer of stock generate.

    Each baseline first decodes a few tokens of the first batch, which are not timed.
    """
    baselines, left_out = warm_up(
        baselines,
        [text.prompt for text in prompts[: options.batch_size]],
        min(_WARM_UP_TOKENS, options.max_new_tokens),
    )
    exact = isinstance(options.acceptance, Greedy)  # other rules give other texts
    done: list[tuple[Text, RunsByName]] = []
    skipped: list[Skipped] = []
    rounds = differing = 0
    total = sum(1 + len(prompt.later) for prompt in prompts)
    for start in range(0, len(prompts), options.batch_size):
        turns = list(prompts[start : start + options.batch_size])
        while turns:
            runs = decode_in_turns(baselines, [turn.prompt for turn in turns], options, first=rounds)
            rounds += 1
            texts = [
                dataclasses.replace(turn, answer=by_name[GENERATE][0].tokens)
                for turn, by_name in zip(turns, runs, strict=True)
            ]
            done += zip(texts, runs, strict=True)
            differing += sum(_differs(text, by_name) for text, by_name in zip(texts, runs, strict=True))
            progress(len(done), total, f"texts that differ: {differing}" if exact else "")
            following = [
                next_turn(base, text, options.max_new_tokens, chat_template=options.chat_template) for text in texts
            ]
            turns = [turn for turn in following if isinstance(turn, Text)]
            for text, turn in zip(texts, following, strict=True):
                if isinstance(turn, Skipped):
                    skipped.append(turn)
                    total -= len(text.later)
    done.sort(key=lambda one: one[0].prompt_id)  # a batch of dialogues is decoded turn by turn
    texts_done, runs_done = zip(*done, strict=True)
    return Runs(texts_done, runs_done, tuple(skipped), left_out, options.batch_size)


def decode_in_turns(
    baselines: Mapping[str, Baseline], prompts: Sequence[Sequence[int]], options: ValidateOptions, *, first: int
) -> list[RunsByName]:
    """The runs of each prompt of one batch.

    The baselines take turns; every batch and every repeat begins with another one. `first` counts the batches before.
    """
    runs: list[RunsByName] = [{name: [] for name in baselines} for _ in prompts]
    names = list(baselines)
    for repeat in range(options.repeats):
        begin = (first + repeat) % len(names)
        for name in names[begin:] + names[:begin]:
            for by_name, run in zip(runs, baselines[name](prompts, options.max_new_tokens), strict=True):
                by_name[name].append(run)
    return runs


def _differs(text: Text, runs: RunsByName) -> bool:
    """Whether a text of our loop is not that of stock generate."""
    return any(run.tokens != text.answer for name in runs.keys() - STOCK for run in runs[name])
