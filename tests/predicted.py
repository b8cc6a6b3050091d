"""Prediction of the steps of a plan on finished texts, which nothing decodes."""

from __future__ import annotations

from collections.abc import Sequence

from treeopt.drafter import Drafter
from treeopt.evaluate.runs import step_depth, trace
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.optimize.per_step import replay_plan
from treeopt.optimize.replay import Replay
from treeopt.policy import Plan
from treeopt.texts.encode import Text


def predict(
    base: Base,
    heads: MedusaHeads | None,
    tree: Plan,
    texts: Sequence[Text],
    drafter: Drafter | None = None,
    draft: Base | None = None,
) -> Replay:
    """Replay over teacher-forced traces of these texts."""
    return replay_plan(tree, trace(base, heads, texts, drafter, draft, steps=step_depth(tree)))
