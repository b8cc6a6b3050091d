"""Learn a drafter, measure its trees, and recommend one, in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from treeopt.calibrate.pipeline import CalibrationRun, run_calibration
from treeopt.calibration import Calibration
from treeopt.decode.decoder import TreeDecoder
from treeopt.defaults import LEARN_SIZES
from treeopt.drafter import KINDS, Drafter
from treeopt.drafting.learn import Learning
from treeopt.errors import check_counts
from treeopt.evaluate.memory import memory_as_error
from treeopt.evaluate.timed_step import AcceptDeepest, TimedStep
from treeopt.latency import ONE_NODE
from treeopt.models.base import Base
from treeopt.models.draft import as_draft
from treeopt.models.fit import heads_like
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_heads
from treeopt.optimize.leviathan import ChainPrediction, cost_ratio, predict_chains, sampled_acceptance
from treeopt.optimize.per_step import build_policy
from treeopt.optimize.tree_builder import build_tree
from treeopt.policy import STEP_SIZES, Plan, TreePolicy
from treeopt.progress import Progress, silent
from treeopt.texts.encode import Text
from treeopt.texts.given_prompts import GivenPrompts
from treeopt.tree import Tree

_DEPTHS = (1, 2, 3, 4)  # of static trees of a draft model, beside those of any depth: each level costs it a forward
_SAMPLED = 16  # answers by which the acceptance rate under sampling is estimated
_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 40  # of timed steps, beside the first, which is not counted
_SECONDS = 1.5  # of all timed steps together, where that takes a number of rounds in between


@dataclass(frozen=True)
class PlanFigures:
    """A tree or policy of a drafter and its figures.

    Args:
        plan: the tree or policy.
        nodes: its size, root counted.
        tokens_per_step: on texts left out of the fit.
        seconds: of one step, the shortest of those that were timed.
        speedup: tokens per second over those of autoregressive decoding in the same loop, without prefill.
    """

    plan: Plan
    nodes: int
    tokens_per_step: float
    seconds: float
    speedup: float

    @property
    def kind(self) -> str:
        """`static` or `dynamic`."""
        return KINDS[isinstance(self.plan, TreePolicy)]


@dataclass(frozen=True)
class LearnedDrafter:
    """The result of `learn_drafter`.

    Args:
        drafter: with the recommended plan.
        figures: of each size and kind.
        run: the calibration, each text traced by a drafter that was learned without it, and the folds' drafters.
        chains: with a draft model, what Leviathan's formulas say of chains, and replay; its cost ratio is measured.
        sampled_alpha: with a draft model, its acceptance rate under sampling at temperature 1, along some answers.
    """

    drafter: Drafter
    figures: tuple[PlanFigures, ...]
    run: CalibrationRun
    chains: ChainPrediction | None = None
    sampled_alpha: float | None = None

    @property
    def recommended(self) -> PlanFigures:
        """The figures of the recommended plan: the most tokens per second, and of equal ones the fewest nodes."""
        return max(self.figures, key=lambda one: one.speedup)


def learn_drafter(
    model: GivenModel,
    prompts: GivenPrompts,
    heads: GivenHeads | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    learning: Learning | None = None,
    sizes: Sequence[int] = LEARN_SIZES,
    progress: Progress = silent,
    **options: Any,
) -> LearnedDrafter:
    """Learn a drafter from the model's own text, and recommend a tree or policy for it.

    The recommended plan is the one with the most tokens per second: cross-validated tokens per step over the seconds of
    a step. With a draft model, which runs once for each level, static trees of limited depth are candidates too. The
    steps are timed on this machine at batch 1, at the end of the text of median length.

    Args:
        model: the base model: a causal language model of transformers, a folder or hub name, or a `Base`.
        prompts: as for `run_calibration`.
        heads: its heads, as for `run_calibration`; None for a drafter without heads.
        tokenizer: of the model; None takes the one beside the model's weights.
        learning: how the drafter is learned; None for the defaults.
        sizes: numbers of nodes, root counted, at most 254. A static tree and per-step trees of each size are measured
            (of one node the static tree alone). A tree is smaller where more nodes accept nothing more.
        progress: called after each batch, and after each round of timed steps.
        options: fields of `CalibrationOptions`.

    Raises:
        TreeoptError: as `run_calibration`, `build_tree` and `TreeDecoder`.
        ValueError: as `run_calibration`; where there is no size, or one is out of range.

    Examples:
        >>> import treeopt
        >>> prompts = ["import os", "def main():"]
        >>> found = treeopt.learn_drafter("pocket", prompts, learning=treeopt.Learning(200), max_new_tokens=12)
        >>> found.drafter.num_heads, found.drafter.plan.drafter == found.drafter.id
        (0, True)
    """
    _check_sizes(sizes)
    base, loaded = as_base(model, tokenizer), None if heads is None else as_heads(heads)
    draft = options["draft"] = as_draft(options.get("draft"), base)
    run = run_calibration(
        base, loaded, prompts, learning=learning or Learning(), steps=True, progress=progress, **options
    )
    assert run.learned is not None
    used = None if loaded is None else heads_like(base, loaded.heads)
    plans = _plans(run.calibration, sizes, _DEPTHS if draft is not None else ())
    rule = AcceptDeepest()
    with memory_as_error("smaller sizes"):
        decoders = [
            TreeDecoder(base, None, Tree(()), acceptance=rule),
            *(
                TreeDecoder(base, used, plan, drafter=run.learned.drafter, draft=draft, acceptance=rule, probe=False)
                for plan in plans
            ),
        ]
        plain, of_draft, *seconds = _timed(decoders, draft, run.texts, progress)
    figures = tuple(
        PlanFigures(plan, plan.nodes, tau, one, tau * plain / one)
        for plan, tau, one in zip(plans, map(_tokens_per_step, plans), seconds, strict=True)
    )
    chains = None if draft is None else predict_chains(run.calibration, cost_ratio(of_draft, plain))
    alpha = None if draft is None else _sampled_alpha(base, draft, run.texts[:_SAMPLED])
    found = LearnedDrafter(run.learned.drafter, figures, run, chains, alpha)
    drafter = dataclasses.replace(found.drafter, plan=found.recommended.plan)
    return dataclasses.replace(found, drafter=drafter)


def _check_sizes(sizes: Sequence[int]) -> None:
    """Raise ValueError unless there are sizes, and a policy may have each of them."""
    if not sizes:
        raise ValueError("sizes is empty")
    check_counts(**{f"sizes[{i}]": size for i, size in enumerate(sizes)})
    if max(sizes) > STEP_SIZES[-1]:
        raise ValueError(f"sizes {list(sizes)}: at most {STEP_SIZES[-1]} nodes")


def _plans(calibration: Calibration, sizes: Sequence[int], depths: Sequence[int]) -> list[Plan]:
    """Trees of each size, of any depth and of at most these, and a policy; no tree twice, of one node a tree alone."""
    plans: list[Plan] = []
    for size in sorted(set(sizes)):
        limits = [*(depth for depth in depths if depth < calibration.num_heads), None]
        for tree in (build_tree(calibration, size, max_depth=limit) for limit in limits):
            if tree not in plans:
                plans.append(tree)
        if size > ONE_NODE:
            plans.append(build_policy(calibration, size))
    return plans


@torch.inference_mode()
def _sampled_alpha(base: Base, draft: Base, texts: Sequence[Text]) -> float:
    """The mean of sum_x min(p, q) over the tokens of the answers, p of the base and q of the draft model."""
    shares, tokens = [], 0
    for text in texts:
        ids = torch.tensor([[*text.prompt, *text.answer[:-1]]])
        inside = ids.clamp(max=draft.vocab_size - 1)[:, -draft.context :]
        keep = min(len(text.answer), inside.shape[1])
        p = base.forward(ids.to(base.device), use_cache=False, logits_to_keep=keep)[0][0].float().softmax(-1)
        q = draft.forward(inside.to(draft.device), use_cache=False, logits_to_keep=keep)[0][0].float()
        q = q[:, : base.vocab_size].softmax(-1)
        q = torch.nn.functional.pad(q, (0, base.vocab_size - q.shape[1]))
        shares.append(keep * sampled_acceptance(p.numpy(force=True), q.numpy(force=True)))
        tokens += keep
    return sum(shares) / tokens


def _timed(
    decoders: Sequence[TreeDecoder], draft: Base | None, texts: Sequence[Text], progress: Progress
) -> list[float]:
    """Seconds of a step of the first decoder, of the draft model alone (0 where there is none), and of the others.

    All take turns, at the end of the text of median length.
    """
    base = decoders[0].base
    depth = max(decoder.trees.depth for decoder in decoders) + 1
    known = sorted(([*text.prompt, *text.answer] for text in texts), key=len)[len(texts) // 2]
    prompts = torch.tensor([known[: max(1, base.context - depth)]], device=base.device)
    largest = max(decoders, key=lambda one: (one.trees.nodes, one.trees.depth))
    cached = largest.prefill(list(prompts), depth)
    steps = [TimedStep(decoder, cached, prompts) for decoder in decoders]
    if draft is None:
        plain, *others = _shortest(steps, progress)
        return [plain, 0.0, *others]
    alone = TreeDecoder(draft, None, Tree(()), acceptance=decoders[0].acceptance)
    last = prompts[:, -max(1, draft.context - 1) :].to(draft.device)
    steps.insert(1, TimedStep(alone, alone.prefill(list(last), 1), last))
    return _shortest(steps, progress)


def _shortest(steps: Sequence[TimedStep], progress: Progress) -> list[float]:
    """Seconds of each step, the shortest of several rounds.

    All steps take turns. What else runs on the machine can only lengthen a step, and on a busy one it lengthens most.
    """
    warm_up = sum(step.after_lead_in() for step in steps)
    rounds = min(max(_FEWEST_ROUNDS, int(_SECONDS / warm_up)), _MOST_ROUNDS)
    spent = np.empty((rounds, len(steps)))
    for row in range(rounds):
        spent[row] = [step.after_lead_in() for step in steps]
        progress(row + 1, rounds, "timed steps")
    shortest: list[float] = spent.min(0).tolist()
    return shortest


def _tokens_per_step(plan: Plan) -> float:
    """The plan's expected tokens per step: cross-validated, where there are enough texts for it."""
    assert plan.expected is not None
    cross_validated = getattr(plan.expected, "cross_validated", None)
    return plan.expected.replay if cross_validated is None else cross_validated
