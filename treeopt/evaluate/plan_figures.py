"""Plans of a drafter with their figures: none, and trees and policies of several sizes, whose steps are timed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treeopt.calibration import Calibration
from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import KINDS
from treeopt.evaluate.timed_step import TimedStep, prefilled
from treeopt.latency import ONE_NODE
from treeopt.models.base import Base
from treeopt.optimize.budget import fastest
from treeopt.optimize.per_step import build_policy
from treeopt.optimize.tree_builder import build_tree
from treeopt.policy import Plan, TreePolicy
from treeopt.progress import Progress
from treeopt.texts.encode import Text

NONE = "none"  # the kind of the tree of the root alone: plain decoding
_DEPTHS = (1, 2, 3, 4)  # of static trees of a draft model, beside those of any depth: each level costs it a forward
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
        speedup: tokens per second over those of autoregressive decoding in the same loop, dtype and forward, without
            prefill.
        dtype: of the model.
        compiled: whether the forward was compiled.
    """

    plan: Plan
    nodes: int
    tokens_per_step: float
    seconds: float
    speedup: float
    dtype: str
    compiled: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Tokens per step over the seconds of a step."""
        return self.tokens_per_step / self.seconds

    @property
    def setting(self) -> str:
        """The dtype, and `compiled` where the forward was."""
        return setting_of(self.dtype, compiled=self.compiled)

    @property
    def kind(self) -> str:
        """`static`, `dynamic`, or `none` for plain decoding."""
        return NONE if self.nodes == ONE_NODE else KINDS[isinstance(self.plan, TreePolicy)]


def setting_of(dtype: str, *, compiled: bool) -> str:
    """A dtype, with `compiled` where the forward is."""
    return f"{dtype}, compiled" if compiled else dtype


def fastest_of(figures: Sequence[PlanFigures]) -> PlanFigures:
    """The plan and setting with the most tokens per second by `fastest`.

    Args:
        figures: those of the first setting first; in each setting those of none first.

    Returns:
        The figures of none where no plan of its setting pays, and those of the first setting where no other pays.
    """
    best: list[PlanFigures] = []
    for setting in dict.fromkeys(one.setting for one in figures):
        none, *others = [one for one in figures if one.setting == setting]
        chosen = fastest([one.speedup for one in others])
        best.append(none if chosen is None else others[chosen])
    first, *others = best
    chosen = fastest([one.tokens_per_second / first.tokens_per_second for one in others])
    return first if chosen is None else others[chosen]


def plans_of(calibration: Calibration, sizes: Sequence[int], *, with_draft: bool) -> list[Plan]:
    """None, and of each size the best tree and, where the calibration has traces for it, a policy; no tree twice.

    A chain is the best tree of its size where chains accept most.

    Args:
        calibration: the traces of the drafter.
        sizes: numbers of nodes, root counted. A tree is smaller where more nodes accept nothing more.
        with_draft: whether a draft model drafts: then there are trees of limited depth too.
    """
    plans: list[Plan] = [build_tree(calibration, ONE_NODE)]
    limits = [*(depth for depth in _DEPTHS if with_draft and depth < calibration.num_heads), None]
    for size in sorted({*sizes} - {ONE_NODE}):
        for tree in (build_tree(calibration, size, max_depth=limit) for limit in limits):
            if tree not in plans:
                plans.append(tree)
        if calibration.steps is not None:
            plans.append(build_policy(calibration, size))
    return plans


def figures_of(plans: Sequence[Plan], seconds: Sequence[float], base: Base) -> tuple[PlanFigures, ...]:
    """The figures of plans, the first of them none, with the seconds of their steps on a base."""
    plain = seconds[0]
    expected = [_tokens_per_step(plan) for plan in plans]
    return tuple(
        PlanFigures(plan, plan.nodes, tau, one, tau * plain / one, base.dtype_name, base.compile)
        for plan, tau, one in zip(plans, expected, seconds, strict=True)
    )


def timed(
    groups: Sequence[Sequence[TreeDecoder]],
    texts: Sequence[Text],
    progress: Progress,
    alone: TreeDecoder | None = None,
) -> tuple[list[list[float]], float]:
    """Seconds of a step of each decoder, which all take turns at the end of the text of median length.

    Args:
        groups: decoders with `AcceptDeepest` as their rule, those of one base together.
        texts: of these bases, with their answers.
        progress: called after each round.
        alone: a decoder of one node of the draft model; None where there is none.

    Returns:
        The seconds of each group, and those of `alone`, or 0.
    """
    text = sorted(([*text.prompt, *text.answer] for text in texts), key=len)[len(texts) // 2]
    chosen = [*groups, *([] if alone is None else [[alone]])]
    steps = [_steps_after(text, decoders) for decoders in chosen]
    spent = iter(_shortest([step for group in steps for step in group], progress))
    seconds = [[next(spent) for _ in group] for group in steps]
    return seconds[: len(groups)], 0.0 if alone is None else seconds[-1][0]


def _steps_after(text: Sequence[int], decoders: Sequence[TreeDecoder]) -> list[TimedStep]:
    """The steps of the decoders of one base after a text, or after its last tokens that leave room for a step."""
    base = decoders[0].base
    depth = max(decoder.trees.depth for decoder in decoders) + 1
    prompts = torch.tensor([text[-max(1, base.context - depth) :]], device=base.device)
    return [
        TimedStep(decoder, cached, prompts)
        for decoder, cached in zip(decoders, prefilled(decoders, prompts, depth), strict=True)
    ]


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
