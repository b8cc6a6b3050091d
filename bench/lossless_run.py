"""How a case of `lossless.py` is run and judged."""

from __future__ import annotations

import dataclasses
import itertools
import traceback
import warnings

import numpy as np
import torch
from lossless_cases import DRAWN, LOSSY, RULES, Case, prompts_of
from lossless_drafters import source_of
from lossless_stock import model_of, options_of, padded_on_the_left, padding_is_neutral, stock, up_to_end

from treeopt.decode.decoder import TreeDecoder, advance
from treeopt.decode.draft_metrics import Decoded, Step
from treeopt.decode.generate import tree_generate
from treeopt.decode.rules import Sample, Typical
from treeopt.drafting.plans import TreeSource
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.divergence import Cause, Judge, first_difference, tolerated
from treeopt.evaluate.validate_sample import p_of_counts, text_cells
from treeopt.models.base import Base
from treeopt.texts.encode import Text
from treeopt.verify.probe import check_trees

DRAWS = 256  # texts of a case of sampling
LEAST_P = 1e-6  # of a case of sampling
PROJECTED = ("electra",)  # whose LM head does not read the hidden states
LIMITED = ("gpt_neo-global", "gpt_neo-window", "phi3-longrope")  # that refuse some texts with E503
TWICE = ("longcat_flash",)  # whose config counts layers twice: a head for so many layers is refused with E213
SAME, ROUNDING, REFUSED, FAILED = "same", "rounding", "refused", "FAILED"


@dataclasses.dataclass(frozen=True)
class Result:
    """How a case ended, with tokens and steps, and what differed."""

    outcome: str
    tokens: int = 0
    steps: int = 0
    detail: str = ""
    p: float | None = None
    ended: bool = False  # whether an end token ended a text


def run(case: Case) -> Result:
    """Decode a case and compare with stock generate, or with the rule where that is lossy or draws."""
    base = None
    try:
        base = model_of(case)
        check_trees(base)
        prompts = prompts_of(case)
        padded = case.processors != "none" and len({len(prompt) for prompt in prompts}) > 1
        texts = stock(case, prompts, padded=padded)
        known = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
        source = source_of(case, base, known)
        if case.rule in DRAWN:
            return _drawn(case, base, source, prompts[0])
        made = _decoded(case, base, source, prompts)
        if case.rule in LOSSY:
            return _typical(base, prompts, made)
        result = _compared(case, base, source, prompts, texts, made)
        if padded and result.outcome == FAILED and not padding_is_neutral(case, prompts):
            return dataclasses.replace(result, outcome=REFUSED, detail="padding changes the texts of stock generate")
        return result
    except TreeoptError as error:
        limited = case.family in LIMITED and error.code is Code.CONTEXT_FULL
        refused = case.family in PROJECTED or (base is not None and not _runs(base))
        limited |= error.code is Code.NO_TREES and refused
        limited |= error.code is Code.DRAFT_MISMATCH and case.family in TWICE
        return Result(REFUSED if limited else FAILED, detail=str(error).splitlines()[0])
    except Exception as error:  # a crash is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
        return Result(FAILED, detail=f"{type(error).__name__}: {error} ({place})")


def _runs(base: Base) -> bool:
    """Whether the stock model runs at all; not every family does in every dtype."""
    try:
        base.model(torch.tensor([[1, 2]], device=base.device))
    except RuntimeError:
        return False
    return True


def _decoded(case: Case, base: Base, source: TreeSource, prompts: list[list[int]]) -> list[Decoded]:
    """The texts of our loop, in the way of the case."""
    if case.via == "generate":
        return _generated(case, base, source, prompts)
    decoder = TreeDecoder(base, None, source, acceptance=RULES[case.rule], probe=False)
    if case.via == "alone":
        return [decoder.generate(prompt, case.new) for prompt in prompts]
    if case.via == "interleaved":
        return _interleaved(decoder, prompts, case.new)
    if case.via == "steps" and case.new >= 2 * (source.depth + 1):
        return _rewound(decoder, prompts, case.new)
    return decoder.generate(prompts, case.new)


def _generated(case: Case, base: Base, source: TreeSource, prompts: list[list[int]]) -> list[Decoded]:
    """Through stock `generate`, with its processors and padding."""
    ids, mask = padded_on_the_left(prompts)
    with warnings.catch_warnings(action="ignore"):
        out = base.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=case.new,
            do_sample=False,
            return_dict_in_generate=True,
            custom_generate=tree_generate,
            stateless_processors=True,
            tree=source,
            **options_of(case),
        )
    texts = [up_to_end(row[ids.shape[1] :].tolist(), base) for row in out.sequences]
    made = []
    for text, lengths in zip(texts, out.step_lengths, strict=True):
        tokens = iter(text)
        made.append(Decoded([Step(itertools.islice(tokens, length)) for length in lengths], source.depth))
    return made


def _interleaved(decoder: TreeDecoder, prompts: list[list[int]], new: int) -> list[Decoded]:
    """Several texts in progress on one decoder, a step of each in turn."""
    made = [Decoded([], decoder.trees.depth) for _ in prompts]
    going = dict(enumerate(decoder.start(prompt, new) for prompt in prompts))
    while going:
        for row, steps in list(going.items()):
            step = next(steps, None)
            if step is None:
                del going[row]
            else:
                made[row].steps.append(step)
    return made


def _rewound(decoder: TreeDecoder, prompts: list[list[int]], new: int) -> list[Decoded]:
    """A batch whose first two steps are undone and made again."""
    made = [Decoded([], decoder.trees.depth) for _ in prompts]
    rows = decoder.prefill(prompts, new)
    mark = rows.mark()
    for _ in range(2):
        decoder.step(rows)
    rows.rewind(mark)
    for steps in advance(decoder, rows, dict.fromkeys(rows.indices, new), frozenset(decoder.base.eos_ids)):
        for row, step in steps.items():
            made[row].steps.append(step)
    return made


def _compared(
    case: Case,
    base: Base,
    source: TreeSource,
    prompts: list[list[int]],
    texts: list[list[int]],
    made: list[Decoded],
) -> Result:
    """The result of an exact rule: every text is that of stock generate, or the difference has a cause."""
    outcome = SAME
    details: list[str] = []
    for prompt, text, one in zip(prompts, texts, made, strict=True):
        if sum(one.step_lengths) != len(one.tokens):
            outcome, details = FAILED, [*details, f"{len(one.tokens)} tokens in steps of {one.step_lengths}"]
        if one.tokens == text:
            continue
        found = first_difference(Text("row", prompt, text), "tree", one.tokens)
        if case.processors == "none":
            found = Judge(base, source.nodes).decide(found, Text("row", prompt, text))
        details.append(f"token {found.position} is {found.found_token}, not {found.greedy_token}: {found.cause.value}")
        excused = tolerated(found, case.dtype) or (found.cause is Cause.ROUNDING and case.dtype == "float32")
        outcome = FAILED if not excused or outcome == FAILED else ROUNDING
    tokens, steps = sum(len(one.tokens) for one in made), sum(len(one.step_lengths) for one in made)
    ended = any(text[-1] in base.eos_ids for text in texts)
    return Result(outcome, tokens, steps, "; ".join(details), ended=ended)


@torch.inference_mode()
def _typical(base: Base, prompts: list[list[int]], made: list[Decoded]) -> Result:
    """The result of the typical rule: by one plain forward, each step's first token is the likeliest, and each draft is
    as likely as the rule demands."""
    rule = LOSSY["typical"]
    assert isinstance(rule, Typical)
    slack = 0.05 if base.dtype is torch.bfloat16 else 1e-3
    for prompt, one in zip(prompts, made, strict=True):
        ids = torch.tensor([[*prompt, *one.tokens]], device=base.device)
        given = {"attention_mask": torch.ones_like(ids), "position_ids": torch.ones_like(ids).cumsum(1) - 1}
        logits = base.forward(ids, use_cache=False, **given)[0][0, len(prompt) - 1 : -1].double().cpu()
        p = (logits / rule.temperature).softmax(-1)
        least = torch.special.entr(p).sum(-1).neg().exp().mul(rule.delta).clamp_max(rule.epsilon)
        chosen = p[torch.arange(len(p)), torch.tensor(one.tokens)]
        roots = torch.zeros(len(p), dtype=torch.bool)
        roots[np.cumsum([0, *one.step_lengths[:-1]])] = True
        right = torch.where(roots, chosen >= p.amax(-1) * (1 - slack), chosen > least * (1 - slack))
        if not right.all():
            return Result(FAILED, detail=f"token {int((~right).nonzero()[0])} is not one that the rule accepts")
    return Result(SAME, sum(len(one.tokens) for one in made), sum(len(one.step_lengths) for one in made))


def _drawn(case: Case, base: Base, source: TreeSource, prompt: list[int]) -> Result:
    """The result of a rule that draws: a chi-square test of the texts of one prompt."""
    rule = RULES[case.rule]
    assert isinstance(rule, Sample)
    cells = text_cells(base, prompt, rule.scores, 10 / DRAWS)
    if not cells.length:
        return Result(SAME, p=1.0)
    decoder = TreeDecoder(base, None, source, acceptance=rule, probe=False)
    made = decoder.generate([prompt] * DRAWS, cells.length)
    p = p_of_counts(cells.counts([one.tokens for one in made]), cells.probabilities)
    tokens, steps = sum(len(one.tokens) for one in made), sum(len(one.step_lengths) for one in made)
    return Result(SAME if p >= LEAST_P else FAILED, tokens, steps, "" if p >= LEAST_P else f"p = {p:.2g}", p)
