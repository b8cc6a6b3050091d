"""The models of `lossless.py`, and the texts of stock `generate`, which are kept for the cases of a block."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lossless_cases import CONTEXTS, DTYPES, NEW, Case
from tiny_families import VOCAB, tiny_model
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from treeopt.models.base import Base

place = "cpu"  # the device of all models; `lossless.py --device` sets it before the first


@functools.lru_cache(12)
def base_of(family: str, attention: str, dtype: str, context: str, block: int) -> Base:
    """A random model; with eager attention where the family has no other."""
    make = functools.partial(tiny_model, family, seed=block, dtype=DTYPES[dtype], context=CONTEXTS[context])
    try:
        model = make(attention=attention)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        model = make(attention="eager")
    return Base(model.to(place), None, family)


def model_of(case: Case) -> Base:
    """The case's model, with its end tokens."""
    base = base_of(case.family, case.attention, case.dtype, case.context, case.block)
    ends = np.random.default_rng([15, case.block]).permutation(VOCAB)[: case.ends].tolist()
    base.model.generation_config.eos_token_id = ends or None
    base.model.generation_config.pad_token_id = 0
    return base


class Noise(LogitsProcessor):
    """Adds noise that is a function of the text: the likeliest token is then a draw, the same in any order of calls."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        drawn = []
        for ids in input_ids.tolist():
            digest = hashlib.blake2b(repr(ids).encode(), digest_size=8).digest()
            drawn.append(np.random.default_rng(int.from_bytes(digest)).gumbel(size=scores.shape[-1]))
        return scores + torch.tensor(np.array(drawn), dtype=scores.dtype, device=scores.device)


def options_of(case: Case) -> dict[str, Any]:
    """Options of stock `generate` for the logits processors."""
    made: dict[str, dict[str, Any]] = {
        "none": {},
        "repetition penalty": {"repetition_penalty": 1.4},
        "no repeated pairs": {"no_repeat_ngram_size": 2},
        "least length": {"min_new_tokens": max(1, case.new // 2), "suppress_tokens": [3, 4]},
        "noise": {"logits_processor": LogitsProcessorList([Noise()])},
    }
    return made[case.processors]


_texts: dict[tuple[Any, ...], list[list[int]]] = {}


def stock(case: Case, prompts: Sequence[Sequence[int]], *, padded: bool = False) -> list[list[int]]:
    """The new tokens of stock greedy `generate` for each prompt, alone or, if `padded`, in one batch; they are kept."""
    base = model_of(case)
    new = case.new if padded or case.processors != "none" else min(NEW, base.context - max(map(len, prompts)))
    groups = [tuple(map(tuple, prompts))] if padded else [(tuple(prompt),) for prompt in prompts]
    where = (case.block, case.family, case.attention, case.dtype, case.context, case.ends, case.processors)
    found = []
    for group in groups:
        room = min(NEW, base.context - max(map(len, group))) if case.processors == "none" and not padded else new
        key = (*where, room, group)
        if key not in _texts:
            if next(iter(_texts), key)[0] != case.block:
                _texts.clear()
            _texts[key] = _generate(base, group, room, options_of(case))
        found += _texts[key]
    return [text[: case.new] for text in found]


def padding_is_neutral(case: Case, prompts: Sequence[Sequence[int]]) -> bool:
    """Whether stock `generate` gives the same texts with padding as without; for some families it does not."""
    plain = dataclasses.replace(case, processors="none")
    return stock(plain, prompts, padded=True) == stock(plain, prompts)


def _generate(base: Base, prompts: Sequence[Sequence[int]], new: int, options: dict[str, Any]) -> list[list[int]]:
    ids, mask = padded_on_the_left(prompts)
    with warnings.catch_warnings(action="ignore"):
        out = base.model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)
    return [up_to_end(row[ids.shape[1] :].tolist(), base) for row in out]


def padded_on_the_left(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Prompts as `generate` takes them: ids and mask int64 [B, T]."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=place), torch.tensor(mask, device=place)


def up_to_end(text: list[int], base: Base) -> list[int]:
    """The tokens up to the first end token."""
    return text[: next((i + 1 for i, token in enumerate(text) if token in base.eos_ids), len(text))]
