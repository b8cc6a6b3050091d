"""Answers: the base model's own continuations of prompts, turn by turn, by stock `generate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from treeopt.models.base import Base
from treeopt.texts.encode import Skipped, Text, next_turn


def answer_all(
    base: Base,
    prompts: Sequence[Text],
    max_new_tokens: int,
    *,
    batch_size: int,
    temperature: float = 0.0,
    chat_template: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Text], list[Skipped]]:
    """The prompts with the model's answers, by prompt id; later turns follow, each after the answer to the one before.

    Args:
        base: the base model.
        prompts: their token ids.
        max_new_tokens: budget of each answer; fewer where the model ends the text.
        batch_size: prompts run together.
        temperature: 0 is greedy; above, tokens are drawn from torch's own generator.
        chat_template: as when the prompts were encoded; for later turns.
        progress: told after each batch: texts that are done, and all.

    Returns:
        The answered texts, and the turns that no longer fitted into the context.
    """
    answered: list[Text] = []
    skipped: list[Skipped] = []
    pending, total = list(prompts), sum(1 + len(text.later) for text in prompts)
    while pending:
        # Prompts of like length share a batch, so that little is padding.
        pending.sort(key=lambda text: (len(text.prompt), text.prompt_id))
        done = len(answered)
        for start in range(0, len(pending), batch_size):
            batch = pending[start : start + batch_size]
            answered += continue_texts(base, batch, max_new_tokens, temperature=temperature)
            progress(len(answered), total)
        following = [next_turn(base, text, max_new_tokens, chat_template=chat_template) for text in answered[done:]]
        skipped += [turn for turn in following if isinstance(turn, Skipped)]
        pending = [turn for turn in following if isinstance(turn, Text)]
    return sorted(answered, key=lambda text: text.prompt_id), skipped


@torch.inference_mode()
def continue_texts(base: Base, texts: Sequence[Text], max_new_tokens: int, *, temperature: float = 0.0) -> list[Text]:
    """The texts with the base model's own continuation, by stock `generate`, up to and with the end-of-text token."""
    ids, mask = left_padded([text.prompt for text in texts], base.pad_id)
    out = base.generate(ids.to(base.device), mask.to(base.device), max_new_tokens, temperature=temperature)
    answers = out[:, ids.shape[1] :].tolist()
    return [
        dataclasses.replace(text, answer=cut_at_end(answer, base.eos_ids))
        for text, answer in zip(texts, answers, strict=True)
    ]


def left_padded(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Prompts as stock `generate` takes them: ids and mask, int64 [B, T]; the new tokens follow on the right."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


def cut_at_end(answer: list[int], eos_ids: Sequence[int]) -> list[int]:
    """The tokens up to and with the first that ends the text."""
    ends = [i for i, token in enumerate(answer) if token in eos_ids]
    return answer[: ends[0] + 1] if ends else answer
