"""`treeopt doctor` of a drafter: its wiring, and what else lowers its acceptance: texts, precision, and its files."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from treeopt.errors import TreeoptError
from treeopt.evaluate.learn_drafter import outside_shares
from treeopt.evaluate.wiring import (
    ERRORS,
    LEAST,
    LEAST_TEXTS,
    Hits,
    WiringCheck,
    check_wiring,
    confidence_errors,
    hits_of,
    kept_states,
    wired,
)
from treeopt.models.base import Base
from treeopt.models.draft_files import in_dtype_of
from treeopt.models.draft_module import StateModule
from treeopt.models.head_files import CONFIG_FILE, LoadedHeads
from treeopt.models.tensors import read_config
from treeopt.models.variants import Draft
from treeopt.progress import Progress, silent
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import PromptSet, Skipped

OWN, SAMPLED, GIVEN = "own answers", "sampled answers", "given answers"
NO_TEMPLATE, TEMPLATE = "without the chat template", "with the chat template"
_FIXES = {
    SAMPLED: "sampled text accepts less than greedy text: where it is served, calibrate at its temperature",
    GIVEN: "the answers of the prompts' file accept less than the model's own: train and learn from its own text",
    NO_TEMPLATE: "the drafter fits text without the chat template better: it was trained without it, or with another",
    TEMPLATE: "the drafter fits text with the chat template better: it was trained with it (--chat-template)",
}


@dataclass(frozen=True, eq=False)
class TextHits:
    """Hits on other texts, and whether they say that these texts are a cause."""

    hits: Hits
    difference: float  # of the hit rate of the judged levels from that on the model's own answers
    error: float  # its standard error
    finding: str


Row = tuple[str, list[float], float, float]  # a name, hit rates by level, difference and its standard error


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What was found of a drafter."""

    wiring: WiringCheck  # the drafter beside its variants
    others: tuple[TextHits, ...]  # its hits on other texts
    causes: tuple[str, ...]  # a sentence for each thing beside the wiring that lowers acceptance
    calibration_errors: tuple[float, ...]  # of a confidence head, by level
    texts: int  # number of texts
    skipped: tuple[Skipped, ...] = ()  # prompts, and later turns, that do not fit into the context

    @property
    def rows(self) -> list[Row]:
        """The table: as wired, variants with the best first, other texts."""
        wired = self.wiring.wired
        variants = sorted(
            ((one.name, one.rates, *one.gain(wired)) for one in self.wiring.variants), key=lambda row: -row[2]
        )
        others = [(one.hits.name, one.hits.rates, one.difference, one.error) for one in self.others]
        return [(wired.name, wired.rates, 0.0, 0.0), *variants, *others]

    def as_dict(self) -> dict[str, Any]:
        """For a program."""
        names = ("name", "hits", "difference", "standard_error")
        return {
            "table": [dict(zip(names, row, strict=True)) for row in self.rows],
            "better": [one.name for one in self.wiring.better],
            "too_weak": self.wiring.too_weak,
            "guess": self.wiring.bigram,
            "verdict": self.wiring.verdict,
            "causes": list(self.causes),
            "calibration_errors": list(self.calibration_errors),
            "texts": self.texts,
            "skipped_prompts": self.skipped,
        }


def diagnose(
    base: Base,
    draft: Draft,
    prompts: PromptSet,
    options: AnswerOptions,
    *,
    texts: bool,
    given: PromptSet | None = None,
    progress: Progress = silent,
) -> Diagnosis:
    """Check a drafter on the base's own answers to prompts; with `texts` on others, too, such as `given` answers."""
    encoded = encode_prompts(base, prompts, options.max_new_tokens, chat_template=options.chat_template)
    own, turns = answer_all(base, encoded.texts, options)
    wiring = check_wiring(base, draft, own, progress)
    others = compare_texts(base, draft, own, prompts, options, given, progress) if texts else []
    causes = [one.finding for one in others if one.finding] + findings_in_files(base, draft)
    for name, share in outside_shares(draft if isinstance(draft, Base) else None, own).items():
        if share:
            causes.append(f"{share:.1%} of the tokens ({name}) are not in the draft vocabulary")
    errors, skipped = confidence_errors(base, draft, own), (*encoded.skipped, *turns)
    return Diagnosis(wiring, tuple(others), tuple(causes), tuple(errors), len(own), skipped)


def compare_texts(
    base: Base,
    draft: Draft,
    own: Sequence[Text],
    prompts: PromptSet,
    options: AnswerOptions,
    given: PromptSet | None = None,
    progress: Progress = silent,
) -> list[TextHits]:
    """The hits as wired on other texts, beside those on the model's own greedy answers.

    Texts: answers sampled at temperature 1; `given` answers; own answers with or without the chat template, the other
    of both, where the tokenizer has one; and own answers in the other precision.
    """
    first = measured(base, draft, own, OWN)
    found = []
    for name, texts in _sets(base, prompts, options, given):
        other = measured(base, draft, texts, name)
        found.append(_compared(first, other, higher=name in (TEMPLATE, NO_TEMPLATE)))
        progress(len(found), 4, name)
    dtype = "bfloat16" if base.dtype_name == "float32" else "float32"
    if _quantised(base) or getattr(base.model, "hf_device_map", None) is not None:
        return found  # such a model is not copied
    copied = base.in_dtype(dtype)
    other = measured(copied, in_dtype_of(copied, draft) if isinstance(draft, Base) else draft, own, f"in {dtype}")
    progress(4, 4, other.name)
    mean, error = other.gain(first)
    finding = f"the drafter fits {dtype} better" if other.fits_better(first) else ""
    return [*found, TextHits(other, mean, error, finding)]


def measured(base: Base, draft: Draft, texts: Sequence[Text], name: str) -> Hits:
    """The hits of a drafter as it is wired."""
    variant = dataclasses.replace(wired(base, draft), name=name)
    return hits_of(base, variant, texts, kept_states(base, texts, sorted(set(variant.reads))))


def _sets(
    base: Base, prompts: PromptSet, options: AnswerOptions, given: PromptSet | None
) -> Iterator[tuple[str, Sequence[Text]]]:
    template, most = options.chat_template, options.max_new_tokens
    encoded = encode_prompts(base, prompts, most, chat_template=template).texts
    yield SAMPLED, _answered(base, encoded, dataclasses.replace(options, temperature=1.0))
    if given is not None:
        yield GIVEN, encode_prompts(base, given, most, chat_template=template, scored=True).texts
    if getattr(base.tokenizer, "chat_template", None):
        other, changed = list[Text](), dataclasses.replace(options, chat_template=not template)
        with contextlib.suppress(TreeoptError):  # such as a template that refuses these messages
            other += encode_prompts(base, prompts, most, chat_template=not template).texts
        if other and [text.prompt for text in other] != [text.prompt for text in encoded]:
            yield (NO_TEMPLATE if template else TEMPLATE), _answered(base, other, changed)


def _answered(base: Base, prompts: Sequence[Text], options: AnswerOptions) -> list[Text]:
    texts, _ = answer_all(base, [dataclasses.replace(text, answer=[]) for text in prompts], options)
    return texts


def _compared(own: Hits, other: Hits, *, higher: bool) -> TextHits:
    (mean, error), (of_own, own_error) = rate(other), rate(own)
    difference, error = mean - of_own, math.hypot(error, own_error)
    sure = (
        min(len(own.hits), len(other.hits)) >= LEAST_TEXTS
        and abs(difference) >= LEAST
        and abs(difference) > ERRORS * error
    )
    cause = sure and (difference > 0) is higher
    return TextHits(other, difference, error, _FIXES[other.name] if cause else "")


def rate(hits: Hits) -> tuple[float, float]:
    """The hit rate of the judged levels, and its standard error, clustered by text."""
    return hits.gain(dataclasses.replace(hits, hits=hits.hits * 0))


def _quantised(base: Base) -> bool:
    return getattr(base.model.config, "quantization_config", None) is not None


def findings_of_heads(loaded: LoadedHeads | None) -> list[str]:
    """Whether a checkpoint's config says another number of heads than its file has."""
    said = None if loaded is None else read_config(loaded.file.parent / CONFIG_FILE).get("medusa_num_heads")
    if loaded is None or type(said) is not int or said == loaded.heads.num_heads:
        return []
    return [f"config.json says {said} heads, the file has {loaded.heads.num_heads}: an engine may run the former"]


def findings_in_files(base: Base, draft: Draft) -> list[str]:
    """What the files of base and drafter say: an adapter that is not used, copies that differ, and a quantised base."""
    notes = (*base.notes, *(draft.notes if isinstance(draft, Base) else ()))
    found = [note.removeprefix("warning: ") for note in notes if "adapter" in note or note not in base.notes]
    model = draft.model if isinstance(draft, Base) else None
    if isinstance(model, StateModule) and model.wiring.own_embeddings:
        own, of_base = model.get_input_embeddings().weight, base.model.get_input_embeddings().weight
        if own.shape == of_base.shape:
            apart = float((own - of_base).detach().norm() / of_base.detach().norm())
            if apart > 1e-2:
                found.append(f"its embeddings differ from the base's by {apart:.0%}: another revision, or trained")
    if _quantised(base):
        found.append(
            "the base is quantised: compare with a drafter that was trained on it, or with the base unquantised"
        )
    return found
