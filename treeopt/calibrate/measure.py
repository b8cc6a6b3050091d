"""Measure: the base model's own continuations, and the rank of each of their tokens under each head.

Tokens are generated first, in batches; then one teacher-forced forward a batch gives the hidden states of every
position at once, from which all heads are ranked. (The original runs its heads at every decoding step.)
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.calibrate.prompts import PromptSet
from treeopt.calibrate.texts import Skipped, Text, encode_prompts, next_turn
from treeopt.calibration import MAX_RANKS, MISS, NONE, Calibration, Provenance, Ranks
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, check_heads_fit, heads_like
from treeopt.models.heads import MedusaHeads
from treeopt.models.layouts import LoadedHeads
from treeopt.models.ranks import rank_of
from treeopt.progress import Progress, silent

_LOGITS_BYTES = 64 * 1024 * 1024  # logits of all heads alive at once


@dataclass(frozen=True)
class CalibrationRun:
    """A calibration, the prompts left out, and how many ready-made answers were cut at the token budget."""

    calibration: Calibration
    skipped: tuple[Skipped, ...]
    answers_cut: int


def run_calibration(
    base: Base,
    loaded: LoadedHeads,
    prompts: PromptSet,
    *,
    max_new_tokens: int = 128,
    batch_size: int = 16,
    temperature: float = 0.0,
    seed: int = 0,
    chat_template: bool = True,
    responses: bool = False,
    progress: Progress = silent,
) -> CalibrationRun:
    """Trace the heads over continuations of the prompts.

    Args:
        base: the base model.
        loaded: its heads.
        prompts: what to continue, turn by turn where they have several, each after the model's answer to the one
            before; with `responses` each brings the answer to score, and only first turns are looked at.
        max_new_tokens: budget of each continuation; fewer where the model ends the text.
        batch_size: prompts run together; batched and single runs differ only by rounding.
        temperature: 0 is greedy; above, tokens are sampled with `seed` (and depend on the batch size).
        seed: of the sampling.
        chat_template: put requests through the tokenizer's chat template, where it has one.
        responses: score the prompts' own answers; nothing is generated.
        progress: told after each batch.

    Raises:
        TreeoptError: E212 where the heads do not fit the base, E303 where every prompt is too long, and as `encode`.
    """
    check_heads_fit(base, loaded.heads, loaded.name)
    heads = heads_like(base, loaded.heads)
    assert batch_size >= 1
    assert temperature >= 0
    encoded = encode_prompts(base, prompts, max_new_tokens, chat_template=chat_template, scored=responses)
    if temperature > 0:
        torch.manual_seed(seed)
    kept = min(MAX_RANKS, base.vocab_size)
    budget = None if responses else max_new_tokens
    traced: list[tuple[Text, Ranks]] = []
    skipped, pending = list(encoded.skipped), list(encoded.texts)
    total = sum(1 if responses else 1 + len(text.later) for text in pending)
    while pending:
        done = len(traced)
        told = functools.partial(_further, progress, done, total)
        traced += _trace_turn(base, heads, pending, kept, batch_size, budget, temperature, told)
        following = [
            next_turn(base, text, max_new_tokens, chat_template=chat_template)
            for text, _ in traced[done:]
            if not responses
        ]
        skipped += [turn for turn in following if isinstance(turn, Skipped)]
        pending = [turn for turn in following if isinstance(turn, Text)]
    traced.sort(key=lambda one: one[0].prompt_id)  # the record's order: by row, then by turn
    texts, rows = [text for text, _ in traced], [row for _, row in traced]
    answers = "given" if responses else "greedy" if temperature == 0 else f"sampled at {temperature}, seed {seed}"
    template = _template_hash(base, chat_template)
    provenance = _provenance(base, loaded, prompts, answers, max_new_tokens, template)
    return CalibrationRun(as_calibration(texts, rows, kept, provenance), tuple(skipped), encoded.answers_cut)


def _trace_turn(
    base: Base,
    heads: MedusaHeads,
    texts: Sequence[Text],
    kept: int,
    batch_size: int,
    max_new_tokens: int | None,
    temperature: float,
    progress: Callable[[int, str], None],
) -> list[tuple[Text, Ranks]]:
    """The texts, continued unless `max_new_tokens` is None, with their ranks; in no order to rely on."""
    # Prompts of like length share a batch, so that little is padding.
    order = sorted(texts, key=lambda text: (len(text.prompt), text.prompt_id))
    traced: list[tuple[Text, Ranks]] = []
    hits = trials = 0
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        if max_new_tokens is not None:
            batch = continue_texts(base, batch, max_new_tokens, temperature=temperature)
        for text, ranks in zip(batch, trace_texts(base, heads, batch, kept), strict=True):
            traced.append((text, ranks))
            hits += int(np.count_nonzero(ranks[:, 0] == 0))
            trials += int(np.count_nonzero(ranks[:, 0] != NONE))
        progress(len(traced), f"head 1 top-1 {hits / max(trials, 1):.1%}")
    return traced


def _further(progress: Progress, before: int, total: int, done: int, note: str) -> None:
    progress(before + done, total, note)


def _provenance(
    base: Base, loaded: LoadedHeads, prompts: PromptSet, answers: str, max_new_tokens: int, template: str
) -> Provenance:
    settings = {
        "answers": answers,
        "max_new_tokens": max_new_tokens,
        "chat_template": template,
        "eos": list(base.eos_ids),
        "dtype": base.dtype_name,
    }
    return Provenance(
        model=base.name,
        model_id=base.fingerprint,
        heads=loaded.name,
        heads_id=loaded.fingerprint,
        settings=settings,
        prompts={prompts.sha256: prompts.name},
        made_by=base.versions(),
    )


def as_calibration(texts: Sequence[Text], rows: Sequence[Ranks], kept: int, provenance: Provenance) -> Calibration:
    """The record of texts (in ascending order of prompt id) and their ranks (uint8 [G, H] each)."""
    return Calibration(
        ranks=np.concatenate(rows),
        offsets=np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64),
        prompt_ids=tuple(text.prompt_id for text in texts),
        token_hashes=tuple(_token_hash(text.answer) for text in texts),
        kept=kept,
        provenance=provenance,
    )


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


@torch.inference_mode()
def trace_texts(base: Base, heads: MedusaHeads, texts: Sequence[Text], kept: int) -> list[Ranks]:
    """Ranks of the continuations' tokens, one uint8 [G, H] a text; one forward for all texts.

    Row i is the state in which token g[i] is the root: the hidden state before it. Column h-1 is the rank of g[i+h]
    under head h; `MISS` from `kept` on, `NONE` beyond the end.
    """
    # The last token predicts nothing that came, so it is left out. Padding on the right is never seen: causality.
    inputs = [text.prompt + text.answer[:-1] for text in texts]
    ids = torch.full((len(texts), max(map(len, inputs))), base.pad_id)
    for row, tokens in enumerate(inputs):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    _, hidden = base.forward(ids.to(base.device), use_cache=False, logits_to_keep=1)
    states = [hidden[row, len(t.prompt) - 1 : len(t.prompt) - 1 + len(t.answer)] for row, t in enumerate(texts)]
    targets = torch.cat([_targets(text.answer, heads.num_heads) for text in texts]).to(base.device)  # [n, H]
    ranks = _rank_rows(base, heads, torch.cat(states), targets, kept)
    return list(np.split(ranks, np.cumsum([len(text.answer) for text in texts])[:-1]))


def _targets(answer: Sequence[int], num_heads: int) -> Tensor:
    """int64 [G, H]: the token that head h should guess at row i; -1 beyond the end."""
    padded = torch.tensor([*answer, *[-1] * num_heads])
    return padded.unfold(0, num_heads + 1, 1)[:, 1:]


def _rank_rows(base: Base, heads: MedusaHeads, hidden: Tensor, targets: Tensor, kept: int) -> NDArray[np.uint8]:
    """uint8 [n, H] from hidden [n, d] and targets [n, H]; the logits of a few rows are alive at a time."""
    out = torch.empty(targets.shape, dtype=torch.uint8)
    chunk = max(1, _LOGITS_BYTES // (heads.num_heads * base.vocab_size * hidden.element_size()))
    for start in range(0, len(hidden), chunk):
        true = targets[start : start + chunk].T  # [H, c]
        logits = heads(hidden[start : start + chunk], base.lm_head)  # [H, c, V]
        if not torch.isfinite(logits.sum(dtype=torch.float32)):
            raise TreeoptError(Code.NOT_FINITE, f"the heads give logits that are not numbers, in rows {start} and on")
        ranks = rank_of(logits.flatten(0, 1), true.flatten().clamp(min=0)).view(true.shape)
        ranks = ranks.masked_fill(ranks >= kept, MISS).masked_fill(true < 0, NONE)
        out[start : start + chunk] = ranks.T.to("cpu", torch.uint8)
    return out.numpy()


def _template_hash(base: Base, used: bool) -> str:
    template = base.tokenizer.chat_template if used and base.tokenizer is not None else None
    return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else "none"


def _token_hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:16]
