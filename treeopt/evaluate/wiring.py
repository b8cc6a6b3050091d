"""Whether a drafter is wired as it was trained: its hits beside those of the same weights with other wirings.

Texts are finished before: the share of positions whose token, d levels below the root, is the drafter's likeliest one
after the true tokens above is the hit rate of level d. The base is run once over each text, and its states are kept.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from treeopt.drafter import Drafter
from treeopt.drafting.block import ConditionalSession
from treeopt.drafting.heads import HeadsProposer
from treeopt.drafting.interface import Proposer, reads_of
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import positions_of
from treeopt.errors import counted
from treeopt.models.base import Base
from treeopt.models.block_module import BlockModule
from treeopt.models.draft_module import DraftModule, draft_reads, kind_of, most_levels
from treeopt.models.heads import MedusaHeads
from treeopt.models.variants import BEFORE_NORM, Draft, Variant, as_heads, variants_of
from treeopt.optimize.per_step import binned_errors
from treeopt.progress import Progress, silent
from treeopt.texts.answers import text_states
from treeopt.texts.encode import Text
from treeopt.verify.probe import same_route

AS_WIRED, ORDER = "as wired", "heads in another order"
LEVELS = 4  # that are printed
JUDGED = 2  # levels that decide: later ones have few positions, and depend on these
LEAST_TEXTS = 5  # of fewer, errors are not known well enough
LEAST_POSITIONS = 50  # of fewer, a sound drafter can look wrong by chance
ERRORS, LEAST = 3.0, 0.01  # a variant fits better by more than so many standard errors, and by this share of positions

# Who reads what how, by the beginning of a variant's name; docs/doctor.md has the sources.
ENGINES = {
    "state before the final norm": "llama.cpp hands DeepSeek's and GLM's MTP this state, vLLM and Medusa the normed",
    "states of one layer": "SpecForge, SGLang and DFlash name layers, speculators states, whose numbers are one more",
    "chained state": "vLLM chains DeepSeek's MTP by the state before its norm, SGLang by the normed one",
    "norms as": "Qwen3-Next and Qwen3.5 store norms less 1, others as they are",
    "embedding before state": "MiMo's MTP reads the state first, others the embedding",
    "state before embedding": "MiMo's MTP reads the state first, others the embedding",
    "rotary embedding": "llama.cpp's files of Llama have neighbours as pairs, those of transformers halves",
    "embedding of the state's own": "published modules read a state with the embedding of the token after it",
    "of the token after": "published modules read a state with the embedding of the token after it",
    "root in its row": "DFlash and DSpark read the root there",
    "d2t as": "SpecForge and speculators store distances from a token's own number",
    "mask in the root's row": "DFlash and DSpark read the root there",
    "first level by": "DFlash predicts by the row after the root, DSpark by the root's",
}
Counts = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Hits:
    """Hits of each text and level, and the positions that have such a token: int64 [T, levels]."""

    name: str
    hits: Counts
    positions: Counts

    @property
    def rates(self) -> list[float]:
        """The hit rate of each level, of all texts; 0 where no text is so long."""
        found: list[float] = (self.hits.sum(0) / np.maximum(1, self.positions.sum(0))).tolist()
        return found

    @property
    def enough(self) -> bool:
        """Whether there are enough texts and positions to judge by."""
        return len(self.hits) >= LEAST_TEXTS and bool(self.positions[:, 0].sum() >= LEAST_POSITIONS)

    def gain(self, other: Hits) -> tuple[float, float]:
        """The hit rate of the judged levels less that of another wiring, and its standard error, clustered by text.

        The error of a ratio of sums: of a text's difference less its share of the mean one.
        """
        levels = min(JUDGED, self.hits.shape[1], other.hits.shape[1])
        apart = (self.hits[:, :levels].sum(1) - other.hits[:, :levels].sum(1)).astype(float)
        counts = self.positions[:, :levels].sum(1).astype(float)
        texts, total = len(apart), max(1.0, counts.sum())
        mean = float(apart.sum() / total)
        residuals = apart - mean * counts
        return mean, float(math.sqrt((residuals**2).sum() * texts / max(1, texts - 1)) / total)

    def fits_better(self, other: Hits) -> bool:
        """Whether the gain is beyond chance and worth a change; see `ERRORS` and `LEAST`."""
        mean, error = self.gain(other)
        return self.enough and mean >= LEAST and mean > ERRORS * error


@dataclass(frozen=True, eq=False)
class WiringCheck:
    """What was found: a drafter as it is wired, its variants, and a guess by the last token alone."""

    wired: Hits
    variants: tuple[Hits, ...]
    bigram: float  # hit rate of level 1 of the commonest token after the root, of the other texts

    @property
    def better(self) -> list[Hits]:
        """The variants that fit better, the best first."""
        found = [one for one in self.variants if one.fits_better(self.wired)]
        return sorted(found, key=lambda one: -one.gain(self.wired)[0])

    @property
    def verdict(self) -> str:
        """In a sentence: as trained, another wiring, or not trained for this base."""
        if not self.wired.enough:
            texts, positions = len(self.wired.hits), int(self.wired.positions[:, 0].sum())
            found = f"{counted(texts, 'text')} with {counted(positions, 'position')}"
            return f"not judged: {found}; at least {LEAST_TEXTS} and {LEAST_POSITIONS} are needed"
        if self.too_weak:
            best = max(one.rates[0] for one in (self.wired, *self.variants))
            rates = f"level 1 is right {best:.1%} of the time at most, a guess by the last token {self.bigram:.1%}"
            return f"too weak for any wiring: {rates}. Not trained for this base, or for other texts"
        if not self.better:
            tried = f"none of {counted(len(self.variants), 'other wiring')} fits better; "
            tried += (
                f"level 1 is right {self.wired.rates[0]:.1%} of the time, a guess by the last token {self.bigram:.1%}"
            )
            return f"as trained: {tried}" if self.variants else "this kind of drafter has no other wiring to try"
        best_one = self.better[0]
        mean, error = best_one.gain(self.wired)
        said = [f": {text}" for name, text in ENGINES.items() if best_one.name.startswith(name)]
        gain = f"fits better by {mean:.1%} of the drafts of levels 1 and 2 (standard error {error:.1%})"
        return f"{best_one.name}: {gain}. The file or this loader has it wrong{''.join(said)}"

    @property
    def too_weak(self) -> bool:
        """Whether no wiring knows more than the last token."""
        return self.wired.enough and max(one.rates[0] for one in (self.wired, *self.variants)) <= self.bigram


@torch.inference_mode()
def check_wiring(base: Base, draft: Draft, texts: Sequence[Text], progress: Progress = silent) -> WiringCheck:
    """Measure a drafter and all of its variants on finished texts.

    Args:
        base: the base model.
        draft: heads, or a draft with its model.
        texts: prompts with answers of the base.
        progress: told of each variant.
    """
    last = int(base.model.config.get_text_config().num_hidden_layers)
    variants = [wired(base, draft), *variants_of(base, draft)]
    states = kept_states(base, texts, sorted({index for one in variants for index in one.reads}))
    found = []
    for number, variant in enumerate(variants):
        if all(index in states for index in variant.reads):
            if isinstance(variant.draft, Base) and isinstance(draft, Base) and isinstance(draft.model, DraftModule):
                same_route(variant.draft, draft)
            found.append(hits_of(base, variant, texts, states))
        progress(number + 1, len(variants), variant.name)
    if isinstance(draft, MedusaHeads) and (order := best_order(draft, texts, states[last], base)):
        ordered = Variant(ORDER, as_heads(draft, type(draft), order), (last,))
        found.append(hits_of(base, ordered, texts, states))
    return WiringCheck(found[0], tuple(found[1:]), bigram_rate(texts))


def wired(base: Base, draft: Draft) -> Variant:
    """A drafter as it is loaded."""
    last = int(base.model.config.get_text_config().num_hidden_layers)
    reads = () if isinstance(draft, MedusaHeads) else draft_reads(draft.model)
    return Variant(AS_WIRED, draft, reads or (last,))


def hits_of(base: Base, variant: Variant, texts: Sequence[Text], states: dict[int, list[Tensor]]) -> Hits:
    """The hits of a variant, from the states that were kept."""
    read = zip(*(states[index] for index in variant.reads), strict=True)
    draft, whole = variant.draft, [torch.cat(one, dim=-1) for one in read]
    if isinstance(draft, MedusaHeads):
        proposer: Proposer = HeadsProposer(base, draft)
    else:
        record = Drafter.model_only(min(LEVELS, most_levels(draft.model)), 1, draft.fingerprint, kind_of(draft.model))
        proposer = proposer_for(base, None, record, draft)
    if not reads_of(proposer):
        whole = [one[len(text.prompt) - 1 :][: len(text.answer)] for one, text in zip(whole, texts, strict=True)]
    found: list[tuple[NDArray[np.bool_], NDArray[np.bool_]]] = []
    for session, true in positions_of(proposer, texts, whole):
        ranks, _ = session.trace(true)
        found.append(((ranks == 0) & (true >= 0), true >= 0))
    starts = np.cumsum([0, *(len(text.answer) for text in texts)])[:-1]
    both = (np.concatenate(one).astype(np.int64) for one in zip(*found, strict=True))
    hits, positions = (np.add.reduceat(one, starts) for one in both)
    return Hits(variant.name, hits, positions)


@torch.inference_mode()
def confidence_errors(base: Base, draft: Draft, texts: Sequence[Text]) -> list[float]:
    """The expected calibration error of a confidence head at each level, as `binned_errors`; empty without one."""
    model = None if isinstance(draft, MedusaHeads) else draft.model
    if isinstance(draft, MedusaHeads) or not (isinstance(model, BlockModule) and model.wiring.confidence):
        return []
    record = Drafter.model_only(most_levels(draft.model), 1, draft.fingerprint, kind_of(draft.model))
    proposer, parts = proposer_for(base, None, record, draft), []
    for session, true in positions_of(proposer, texts, text_states(base.reading(draft_reads(draft.model)), texts)):
        assert isinstance(session, ConditionalSession)
        parts.append((session.odds(true)[1], session.trace(true)[0] == 0, true >= 0))
    odds, right, known = (np.concatenate(one) for one in zip(*parts, strict=True))
    errors: list[float] = binned_errors(1 / (1 + np.exp(-odds)), right, known).tolist()
    return errors


def kept_states(base: Base, texts: Sequence[Text], indices: Sequence[int]) -> dict[int, list[Tensor]]:
    """The hidden states of whole texts by number, one [T, d] a text, without that of the last token.

    `BEFORE_NORM` is left out where the model's final norm is not found.
    """
    kept = dict[int, list[Tensor]]()
    numbers = [index for index in indices if index != BEFORE_NORM]
    last = int(base.model.config.get_text_config().num_hidden_layers)
    for text in texts:
        ids = torch.tensor([[*text.prompt, *text.answer[:-1]]], device=base.device)
        with _norm_inputs(base) as norms:
            _, states = base.reading((*numbers, last)).forward(ids, use_cache=False, logits_to_keep=1)
        parts = list(states[0].chunk(len(numbers) + 1, dim=-1))
        for index, part in zip(numbers, parts, strict=False):
            kept.setdefault(index, []).append(part)
        for given, normed in norms:
            if normed.shape == parts[-1][None].shape and torch.equal(normed[0], parts[-1]):
                kept.setdefault(BEFORE_NORM, []).append(given[0])
                break
    return {index: one for index, one in kept.items() if len(one) == len(texts)}


@contextlib.contextmanager
def _norm_inputs(base: Base) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Inputs and outputs of the norms outside of the layers, while a forward runs."""
    seen: list[tuple[Tensor, Tensor]] = []

    def look(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(output, Tensor):
            seen.append((inputs[0], output))

    with contextlib.ExitStack() as hooks:
        for name, part in base.model.named_modules():
            if "Norm" in type(part).__name__ and ".layers." not in name:
                hooks.enter_context(part.register_forward_hook(look))
        yield seen


def best_order(heads: MedusaHeads, texts: Sequence[Text], states: Sequence[Tensor], base: Base) -> list[int] | None:
    """The order of heads in which each level has the head that hits it most; None where it is that of the file.

    Levels choose in their order, and a head is chosen once.
    """
    count = heads.num_heads
    hits = np.zeros((count, count), np.int64)  # of each head at each level
    proposer = HeadsProposer(base, heads)
    for text, whole in zip(texts, states, strict=True):
        own = whole[len(text.prompt) - 1 :][: len(text.answer)]
        for session, true in positions_of(proposer, [text], [own]):
            best = session.candidates(true, 1)[:, :, 0]
            hits += (best[:, :, None] == true[:, None, :count]).sum(0)
    order: list[int] = []
    for level in range(count):
        order.append(max((head for head in range(count) if head not in order), key=lambda head: int(hits[head, level])))
    return None if order == list(range(count)) else order


def bigram_rate(texts: Sequence[Text]) -> float:
    """The share of answers' tokens, from the second on, that follow the token before most often in the other texts."""
    pairs = [np.array([text.answer[:-1], text.answer[1:]]).T for text in texts]
    hits = 0
    for number, own in enumerate(pairs):
        others = [one for i, one in enumerate(pairs) if i != number]
        following: dict[int, Counter[int]] = defaultdict(Counter)
        for first, then in np.concatenate(others).tolist() if others else []:
            following[first][then] += 1
        best = {first: max(counts, key=lambda token: (counts[token], -token)) for first, counts in following.items()}
        hits += sum(best.get(first) == then for first, then in own.tolist())
    return hits / max(1, sum(map(len, pairs)))
