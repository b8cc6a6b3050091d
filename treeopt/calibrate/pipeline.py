"""Measure: the base model's own continuations, and the rank of each of their tokens under each head.

Tokens are generated first, in batches; then one teacher-forced forward a batch gives the hidden states of every
position at once, from which all heads are ranked. (The original runs its heads at every decoding step.)
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from treeopt.calibration import MAX_RANKS, NONE, Calibration, Provenance, Ranks, StepTraces
from treeopt.drafter import Drafter
from treeopt.drafting.heads import check_drafter
from treeopt.drafting.interface import Proposer
from treeopt.drafting.learn import Learned, Learning, learn
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import Traced, trace_texts
from treeopt.errors import check_counts
from treeopt.models.base import Base, check_heads_fit, heads_like
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_heads
from treeopt.models.layouts import LoadedHeads
from treeopt.progress import Progress, silent
from treeopt.sampling import check_seed, check_temperature
from treeopt.texts.answers import answer_all
from treeopt.texts.encode import Skipped, Text, encode_prompts
from treeopt.texts.given_prompts import GivenPrompts, as_prompt_set
from treeopt.texts.prompts import PromptSet


@dataclass(frozen=True)
class CalibrationRun:
    """A calibration, and what came with it.

    Args:
        calibration: the record.
        skipped: prompts that were left out.
        answers_cut: how many ready-made answers were cut at the token budget.
        heads: H; a drafter's levels go on beyond them.
        learned: the drafter that was learned on the way; None where none was asked for.
    """

    calibration: Calibration
    skipped: tuple[Skipped, ...]
    answers_cut: int
    heads: int
    learned: Learned | None = None


def run_calibration(
    model: GivenModel,
    heads: GivenHeads,
    prompts: GivenPrompts,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 128,
    batch_size: int = 16,
    temperature: float = 0.0,
    seed: int = 0,
    chat_template: bool = True,
    responses: bool = False,
    drafter: Drafter | None = None,
    learning: Learning | None = None,
    steps: bool = False,
    progress: Progress = silent,
) -> CalibrationRun:
    """Trace the heads over continuations of the prompts.

    Args:
        model: the base model: a causal language model of transformers, a folder or hub name, or a `Base`.
        heads: its heads: `MedusaHeads`, what `load_heads` gives, or a folder or hub name.
        prompts: what to continue: a file name or another name as for `load_prompts`, a list of requests, rows or
            conversations, or a `PromptSet`; turn by turn where they have several, each after the model's answer to the
            one before; with `responses` each brings the answer to score, and only first turns are looked at.
        tokenizer: the model's, where it does not lie beside its weights.
        max_new_tokens: budget of each continuation; fewer where the model ends the text.
        batch_size: prompts run together; batched and single runs differ only by rounding.
        temperature: 0 is greedy; above, tokens are sampled with `seed` (and depend on the batch size).
        seed: of the sampling.
        chat_template: put requests through the tokenizer's chat template, where it has one.
        responses: score the prompts' own answers; nothing is generated.
        drafter: whose candidates are ranked; the heads' plain guesses where None.
        learning: learn a drafter from these very prompts, and trace each text by what the others taught.
        steps: with a drafter, trace trees chosen per step too.
        progress: told after each batch; answers, drawn text, counted text and traces each begin at 0.

    Raises:
        TreeoptError: E212 where the heads do not fit the base, E223 where the drafter does not, E303 where every prompt
            is too long; as `load_base`, `load_heads`, `load_prompts` and `encode`.
        TypeError: where model, heads or prompts are none of these.
        ValueError: where the seed is negative or beyond 63 bits, or the temperature is between 0 and 1e-6.

    Example:
        >>> import treeopt
        >>> run = treeopt.run_calibration("pocket", "pocket", ["import os", "def main():"], max_new_tokens=12)
        >>> run.calibration.sequences, run.heads
        (2, 5)
        >>> treeopt.build_tree(run.calibration, nodes=4).nodes
        4
    """
    check_counts(max_new_tokens=max_new_tokens, batch_size=batch_size)
    base, loaded = as_base(model, tokenizer), as_heads(heads)
    prompts = as_prompt_set(prompts, answers=responses)
    check_heads_fit(base, loaded.heads, loaded.name)
    heads = heads_like(base, loaded.heads)
    if drafter is not None:
        check_drafter(drafter, base, heads)
    check_seed(seed)
    check_temperature(temperature)
    encoded = encode_prompts(base, prompts, max_new_tokens, chat_template=chat_template, scored=responses)
    texts, skipped = list(encoded.texts), list(encoded.skipped)
    if not responses:
        if temperature > 0:
            torch.manual_seed(seed)
        texts, left_out = answer_all(
            base,
            texts,
            max_new_tokens,
            batch_size=batch_size,
            temperature=temperature,
            chat_template=chat_template,
            progress=lambda done, total: progress(done, total, "answers"),
        )
        skipped += left_out
    learned = None
    if learning is not None:
        source = _source(base, loaded, prompts, learning, max_new_tokens)
        learned = learn(
            base,
            heads,
            texts,
            learning,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            source=source,
            progress=progress,
        )
        drafter, models = learned.drafter, learned.proposers(base, heads, texts)
    else:
        models = [proposer_for(base, heads, drafter)] * len(texts)
    top_k = min(MAX_RANKS, base.vocab_size)
    levels = drafter.depth if drafter is not None and steps else 0
    traced = _traced(base, texts, models, top_k, batch_size, steps=levels, progress=progress)
    answers = "given" if responses else "greedy" if temperature == 0 else f"sampled at {temperature}, seed {seed}"
    template = _template_hash(base, chat_template)
    provenance = _provenance(base, loaded, prompts, answers, max_new_tokens, template, drafter.id if drafter else "")
    calibration = as_calibration(texts, [one.ranks for one in traced], top_k, provenance, [one.steps for one in traced])
    return CalibrationRun(calibration, tuple(skipped), encoded.answers_cut, heads.num_heads, learned)


def _traced(
    base: Base,
    texts: Sequence[Text],
    models: Sequence[Proposer],
    top_k: int,
    batch_size: int,
    *,
    steps: int,
    progress: Progress,
) -> list[Traced]:
    """The traces of all texts, each under its own drafter, or of the heads' plain guesses where there is none."""
    traced: list[Traced] = []
    hits = trials = 0
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        traced += trace_texts(base, models[start : start + batch_size], batch, top_k, step_depth=steps)
        for one in traced[start:]:
            hits += int(np.count_nonzero(one.ranks[:, 0] == 0))
            trials += int(np.count_nonzero(one.ranks[:, 0] != NONE))
        progress(len(traced), len(texts), f"head 1 top-1 {hits / max(trials, 1):.1%}")
    return traced


def _source(
    base: Base, loaded: LoadedHeads, prompts: PromptSet, learning: Learning, max_new_tokens: int
) -> dict[str, Any]:
    """Where a learned drafter comes from."""
    return {
        "model": base.name,
        "model_id": base.fingerprint,
        "dtype": base.dtype_name,
        "heads": loaded.name,
        "heads_id": loaded.fingerprint,
        "prompts": {prompts.sha256: prompts.name},
        "rows": [prompts.prompts[0].row, prompts.prompts[-1].row],
        "max_new_tokens": max_new_tokens,
        "learning": dataclasses.asdict(learning),
        "made_by": base.versions(),
    }


def _provenance(
    base: Base,
    loaded: LoadedHeads,
    prompts: PromptSet,
    answers: str,
    max_new_tokens: int,
    template: str,
    drafter_id: str,
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
        drafter_id=drafter_id,
    )


def as_calibration(
    texts: Sequence[Text],
    rows: Sequence[Ranks],
    top_k: int,
    provenance: Provenance,
    steps: Sequence[StepTraces | None] = (),
) -> Calibration:
    """The record of texts (in ascending order of prompt id), their ranks (uint8 [G, H] each), and trees of steps."""
    known = [one for one in steps if one is not None]
    return Calibration(
        ranks=np.concatenate(rows),
        offsets=np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64),
        prompt_ids=tuple(text.prompt_id for text in texts),
        token_hashes=tuple(_token_hash(text.answer) for text in texts),
        top_k=top_k,
        provenance=provenance,
        steps=StepTraces.joined(known) if known else None,
    )


def _template_hash(base: Base, used: bool) -> str:
    template = base.tokenizer.chat_template if used and base.tokenizer is not None else None
    return hashlib.sha256(str(template).encode()).hexdigest()[:16] if template else "none"


def _token_hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:16]
