"""Validate: whether tree decoding is lossless, gives the predicted tokens per step, and is faster.

Every prompt is decoded in one process by stock `generate`, by prompt lookup of transformers, by our own loop without a
tree (autoregressive), and by our loop with the tree. The prediction is independent of the decoder: a teacher-forced
pass over the texts of stock `generate`, and replay.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from transformers import PreTrainedTokenizerBase

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Sample, Typical
from treeopt.drafter import Drafter
from treeopt.drafting.memory import Memory
from treeopt.errors import Code, TreeoptError, counted, memory_as_error
from treeopt.evaluate import divergence
from treeopt.evaluate.baselines import (
    AUTOREGRESSIVE,
    GENERATE,
    LOOKUP,
    LOOKUP_TOKENS,
    TREE,
    Trial,
    autoregressive,
    seeded,
    with_decoder,
    with_generate,
)
from treeopt.evaluate.runs import JUDGED, Inputs, Measured, Runs, ValidateOptions, decode_all
from treeopt.evaluate.validate_sample import SampleValidation, validate_sample
from treeopt.files.schedules import GivenPlan, as_plan_for
from treeopt.models.base import Base
from treeopt.models.compatibility import heads_like
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_draft, as_heads
from treeopt.models.logits import rows_at_once
from treeopt.policy import TreePolicy
from treeopt.progress import Progress, silent
from treeopt.schedule import Planned, Schedule
from treeopt.texts.encode import Text, as_texts
from treeopt.texts.prompts import GivenPrompts
from treeopt.traces import MAX_RANKS
from treeopt.tree import Tree, check_tree_fits

_OURS = (AUTOREGRESSIVE, TREE)  # decoders that must give the text of stock generate; prompt lookup is not ours
SAMPLED = "sampled generate"  # stock generate, sampling at the temperature of the rule
SEED = 0  # of it
_LENGTHS = (1, 2, 3)  # of the n-grams of typical texts
_DOUBLE = 2  # a number in float64 takes as much memory as so many in float32
Tokens = Sequence[int]


@dataclass(frozen=True)
class Validation(Measured):
    """The results of a validation under greedy acceptance."""

    # every text that is not that of stock generate, those of prompt lookup included; `judged` finds their causes
    differences: tuple[divergence.Difference, ...]

    @property
    def lossless(self) -> bool:
        """Whether every text of our loop is, token for token, that of stock greedy `generate`."""
        return not self.our_differences

    @property
    def our_differences(self) -> tuple[divergence.Difference, ...]:
        """Differences of the tree and of autoregressive decoding by our loop."""
        return tuple(found for found in self.differences if found.decoder in _OURS)

    @property
    def differing(self) -> int:
        """Number of texts with a difference of ours."""
        return len({one.prompt_id for one in self.our_differences})

    @property
    def num_judged(self) -> int:
        """Number of differing texts with a known cause."""
        return self.differing - len(self._unjudged())

    def judged(self, base: Base, most: int = JUDGED) -> Validation:
        """A copy with the causes of our differences in at most `most` texts, each by a float64 forward."""
        texts, judge = {text.prompt_id: text for text in self.texts}, divergence.Judge(base, self.nodes)
        chosen = set(self._unjudged()[:most])
        decided = [
            judge.decide(one, texts[one.prompt_id]) if one.decoder in _OURS and one.prompt_id in chosen else one
            for one in self.differences
        ]
        return dataclasses.replace(self, differences=tuple(decided))

    def _unjudged(self) -> list[str]:
        return list(
            dict.fromkeys(one.prompt_id for one in self.our_differences if one.cause is divergence.Cause.UNJUDGED)
        )

    @property
    def failures(self) -> tuple[divergence.Difference, ...]:
        """Our differences but ties and, in half precision, rounding and unjudged ones."""
        return tuple(found for found in self.our_differences if not divergence.tolerated(found, self.made_by["dtype"]))

    @property
    def prediction_misses(self) -> tuple[Trial, ...]:
        """Texts equal to those of stock generate, whose number of steps was not predicted."""
        return tuple(one for one in self.metrics.trials if one.same and one.steps != one.predicted_steps)

    def check(self, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Raise E501 with the first failures."""
        texts = len({one.prompt_id for one in self.failures})
        if texts:
            fix = f"--judge {self.differing} judges all" if self.differing > self.num_judged else ""
            causes = divergence.counted_causes(self.failures)
            raise TreeoptError(
                Code.NOT_LOSSLESS,
                f"{texts} of {len(self.metrics.trials)} texts differ from greedy decoding ({causes})",
                at=divergence.listed(self.failures, tokenizer),
                why="in float64 the gap of the logits is 0 (tie), below the dtype's resolution (rounding), or a bug",
                fix=fix if self.made_by["dtype"] == "float32" else "repeat with --dtype float32",
            )


def advice(found: Measured, plan: Planned | None = None) -> tuple[str, ...]:
    """Warnings that steps are not as predicted, or that the tree is not the fastest, each of one line or more."""
    texts = [_not_predicted(found, plan)]
    if isinstance(found, Validation):
        texts += [_slower(found), _slower_than_stock(found)]
    return tuple(text for text in texts if text)


def _not_predicted(found: Measured, plan: Planned | None) -> str:
    if isinstance(plan, Schedule) and found.batch_size > 1:
        if all(one.steps == one.predicted_steps for one in found.metrics.trials):
            return ""
        return (
            "not as predicted: a schedule follows the texts in progress and the longest of them, the prediction takes "
            "every batch as full and each text alone; it is exact at batch 1 only"
        )
    shared = isinstance(plan, TreePolicy) and len(plan.sizes) > 1 and found.batch_size > 1
    if shared and found.tokens_per_step != found.predicted.tokens_per_step:
        return (
            "not as predicted: texts of a batch share the largest size that is best for one of them, the prediction "
            "takes each alone"
        )
    if isinstance(found, SampleValidation):  # steps are not predicted one by one
        error = f"measured and predicted tokens per step differ by {found.z_score or 0:+.1f} standard errors"
        cause = "by rounding of probabilities near the edge of top-k or top-p, or there is a bug"
        return "" if found.as_predicted else f"{error}: {cause}"
    misses = found.prediction_misses if isinstance(found, Validation | TypicalValidation) else ()
    texts = counted(len(misses), "text")
    cause = "two candidates of nearly equal logits changed ranks by rounding, or there is a bug"
    return f"another number of steps than predicted in {texts}: {cause}" if misses else ""


def _slower(found: Validation) -> str:
    if found.speedup is None or found.overhead is None or found.speedup >= 1:
        return ""
    batch = f" (batch {found.batch_size})" if found.batch_size > 1 else ""
    size = counted(found.nodes, "node")
    text = (
        f"the tree is slower than autoregressive decoding{batch}: a step of {size} takes the time of "
        f"{found.overhead:.2f} autoregressive steps and yields {found.tokens_per_step:.2f} tokens\n"
    )
    if found.batch_size > 1:
        text += "  in a batch the device has less spare capacity for drafts than at batch 1\n"
    return text + "  treeopt profile measures the cost of each size, treeopt build --nodes auto chooses the best one"


def _slower_than_stock(found: Validation) -> str:
    rates = {name: found.metrics.tokens_per_second(name) for name in found.metrics.baselines}
    tree = rates[TREE]
    names = {GENERATE: "stock generate", LOOKUP: "prompt lookup, which needs no drafter,"}
    faster = [text for name, text in names.items() if tree and (rate := rates.get(name)) and rate.median > tree.median]
    return f"{' and '.join(faster)} decoded these texts faster than the tree" if faster else ""


@overload
def validate(
    model: Any, heads: Any, tree: Any, prompts: Any, *, acceptance: Sample, **options: Any
) -> SampleValidation: ...


@overload
def validate(
    model: Any, heads: Any, tree: Any, prompts: Any, *, acceptance: Typical, **options: Any
) -> TypicalValidation: ...


@overload
def validate(
    model: GivenModel,
    heads: GivenHeads | None,
    tree: GivenPlan | None,
    prompts: GivenPrompts | Sequence[Text],
    **options: Any,
) -> Validation: ...


def validate(
    model: GivenModel,
    heads: GivenHeads | None,
    tree: GivenPlan | None,
    prompts: GivenPrompts | Sequence[Text],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafter: Drafter | str | os.PathLike[str] | None = None,
    progress: Progress = silent,
    **options: Any,
) -> Measured:
    """Decode every prompt with the tree and by every baseline; compare with the prediction.

    Args:
        model: a causal language model of transformers, a `Base`, or a folder or hub name, then loaded in float32.
        heads: its draft heads: `MedusaHeads`, what `load_heads` gives, or a folder or hub name; None where the drafter
            has none.
        tree: a tree, a list of paths, the policy that chooses a tree per step, or the file of one of these; None
            for the one that the drafter recommends.
        prompts: a name as for `load_prompts`, a list of requests, rows or conversations, a `PromptSet`, or token ids as
            `Text`, whose answer is ignored. A later turn follows the answer of stock generate to the turn before.
        tokenizer: the model's, where it is not in the folder of its weights.
        drafter: the tree's drafter, or its file; not needed where the tree's file names it.
        progress: called after each text.
        options: fields of `ValidateOptions`: `max_new_tokens`, `repeats`, `batch_size`, `chat_template`, `judge`,
            `draft`, `acceptance`, `draws`, `memory`.

    Returns:
        The record of the acceptance rule: `Validation` for `Greedy` (the default), `SampleValidation` for `Sample`,
        `TypicalValidation` for `Typical`.

    Raises:
        TreeoptError: as `TreeDecoder` and the loaders; E303 where no prompt fits into the context, E503 for a `Text`.
        TypeError: where model, heads or prompts have another type, or there is no such option.
        ValueError: where a number is out of range, two `Text` records have one `prompt_id`, or neither a tree nor a
            drafter is given.

    Examples:
        >>> import treeopt
        >>> found = treeopt.validate("pocket", "pocket", [[0], [1], [0, 0]], ["import os"], max_new_tokens=12)
        >>> found.lossless, found.tokens_per_step == found.predicted.tokens_per_step
        (True, True)
    """
    inputs, decoder = make_inputs(model, heads, tree, prompts, tokenizer, drafter, options)
    found = divided_validate(inputs, decoder, progress)
    assert found is not None, "only commands divide a run among processes"
    return found


def divided_validate(inputs: Inputs, decoder: TreeDecoder, progress: Progress) -> Measured | None:
    """What `validate` does with its checked arguments; None in a process that follows another."""
    base, texts, chosen = inputs.base, inputs.texts, inputs.options
    with memory_as_error("a smaller batch, fewer new tokens or a smaller tree"):
        if isinstance(chosen.acceptance, Sample):
            return validate_sample(inputs, chosen.acceptance, progress)
        if isinstance(chosen.acceptance, Typical):
            return validate_typical(inputs, chosen.acceptance, progress)
        baselines = {
            GENERATE: with_generate(base),
            LOOKUP: with_generate(base, prompt_lookup_num_tokens=LOOKUP_TOKENS),
            AUTOREGRESSIVE: autoregressive(base),
            TREE: with_decoder(decoder),
        }
        runs = decode_all(baselines, base, texts, chosen, progress, content=inputs.content)
        if chosen.division.follows:
            return None
        found = inputs.measured(runs, inputs.traces(runs.texts, batches=runs.batches))
    return Validation(**found, differences=tuple(_differences(runs))).judged(base, chosen.judge)


def make_inputs(
    model: GivenModel,
    heads: GivenHeads | None,
    tree: GivenPlan | None,
    prompts: GivenPrompts | Sequence[Text],
    tokenizer: PreTrainedTokenizerBase | None,
    drafter: Drafter | str | os.PathLike[str] | None,
    options: Mapping[str, Any],
) -> tuple[Inputs, TreeDecoder]:
    """The checked arguments of `validate`, and the decoder of the tree under their acceptance rule."""
    chosen = ValidateOptions(**options)
    base = as_base(model, tokenizer, dtype="float32")
    heads = None if heads is None else heads_like(base, as_heads(heads).heads)
    tree, drafter = as_plan_for(tree, drafter)
    texts, too_long = as_texts(base, prompts, chosen.max_new_tokens, chat_template=chosen.chat_template)
    before = chosen.memory.copy() if isinstance(chosen.memory, Memory) else None
    inputs = Inputs(base, heads, tree, drafter, as_draft(chosen.draft, base), texts, too_long, chosen, before)
    decoder = inputs.decoder(chosen.acceptance)
    if isinstance(chosen.acceptance, Sample) and (isinstance(tree, Schedule) or chosen.memory is not None):
        what = f"the steps {'with a memory' if chosen.memory else 'of a schedule'} are not predicted under sampling"
        raise TreeoptError(Code.GENERATE_UNSUPPORTED, what, why="replay needs its texts", fix="validate it greedily")
    for one in (plan for plan in (tree.plans if isinstance(tree, Schedule) else [tree]) if isinstance(plan, Tree)):
        levels = drafter.depth if drafter is not None else heads.num_heads if heads is not None else 0
        check_tree_fits(one, heads=levels, ranks=min(MAX_RANKS, base.vocab_size), holder="the prediction")
    return inputs, decoder


def _differences(runs: Runs) -> Iterator[divergence.Difference]:
    """For each text and baseline the first repeat that differs from the first one of stock generate."""
    for trial in runs.trials:
        for name, repeats in trial.runs.items():
            wrong = next((run.tokens for run in repeats if run.tokens != trial.text.answer), None)
            if wrong is not None:
                yield divergence.first_difference(trial.text, name, wrong)


@dataclass(frozen=True)
class Quality:
    """The measures of texts of one decoder."""

    log_likelihood: float  # mean over all tokens of log p(token) in nats, p the base's distribution at temperature 1
    distinct: tuple[float, ...]  # distinct-1, distinct-2 and distinct-3
    agreement: float  # with the greedy texts of the same prompts


def quality(base: Base, texts: Sequence[Text], greedy: Sequence[Text]) -> Quality:
    """The measures of texts, beside the greedy texts of the same prompts."""
    answers = [text.answer for text in texts]
    return Quality(
        log_likelihood(base, texts),
        tuple(distinct(answers, n) for n in _LENGTHS),
        agreement(answers, [text.answer for text in greedy]),
    )


@torch.inference_mode()
def log_likelihood(base: Base, texts: Sequence[Text]) -> float:
    """Mean of log p(token) in nats over all tokens of all answers, from one teacher-forced pass a text."""
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([[*text.prompt, *text.answer]], device=base.device)
        size = len(text.answer)
        logits = base.forward(ids, use_cache=False, logits_to_keep=size + 1)[0][0, :-1]  # [G, V]
        rows = rows_at_once(base.vocab_size, _DOUBLE)
        parts = zip(torch.split(logits, rows), torch.split(ids[0, -size:, None], rows), strict=True)
        logs = torch.cat([part.double().log_softmax(-1).gather(1, true) for part, true in parts])
        total, count = total + float(logs.sum()), count + size
    if math.isnan(total):
        raise base.not_finite("logits")
    return total / count


def distinct(answers: Sequence[Tokens], n: int) -> float:
    """Distinct n-grams / n-grams of all texts, which cross no texts (arXiv:1510.03055 divides by tokens)."""
    found = [tuple(answer[i : i + n]) for answer in answers for i in range(len(answer) - n + 1)]
    return len(set(found)) / len(found) if found else 0.0


def agreement(answers: Sequence[Tokens], greedy: Sequence[Tokens]) -> float:
    """Tokens before the first difference to the greedy text / tokens of the longer text of the two, both summed."""
    pairs = list(zip(answers, greedy, strict=True))
    return sum(divergence.num_common(*pair) for pair in pairs) / sum(max(map(len, pair)) for pair in pairs)


@dataclass(frozen=True)
class TypicalValidation(Measured):
    """The results of a validation under typical acceptance."""

    rule: Typical  # temperature, epsilon and delta
    # of the texts, by the name of their baseline: greedy (stock generate), sampled, and typical (the tree)
    quality: Mapping[str, Quality]

    @property
    def prediction_misses(self) -> tuple[Trial, ...]:
        """Texts whose number of steps was not predicted."""
        return tuple(one for one in self.metrics.trials if one.steps != one.predicted_steps)


def validate_typical(inputs: Inputs, rule: Typical, progress: Progress) -> TypicalValidation | None:
    """Decode every prompt greedily, by sampling, and with the tree, and compare the texts and the steps.

    The steps are predicted on the tree's own texts. The token after an accepted path is none of its children, as the
    rule would have accepted it, so the accepted path is the deepest node on the text, as in the replay of exact rules.
    None in a process that follows another.
    """
    base = inputs.base
    baselines = {
        GENERATE: with_generate(base),
        SAMPLED: seeded(base, with_generate(base, temperature=rule.temperature), SEED, SAMPLED),
        AUTOREGRESSIVE: autoregressive(base),
        TREE: with_decoder(inputs.decoder(rule)),
    }
    runs = decode_all(baselines, base, inputs.texts, inputs.options, progress, content=inputs.content)
    if inputs.options.division.follows:
        return None
    texts = {
        name: [dataclasses.replace(one.text, answer=one.runs[name][0].tokens) for one in runs.trials]
        for name in (GENERATE, SAMPLED, TREE)
    }
    return TypicalValidation(
        **inputs.measured(runs, inputs.traces(texts[TREE])),
        rule=rule,
        quality={name: quality(base, found, texts[GENERATE]) for name, found in texts.items()},
    )
