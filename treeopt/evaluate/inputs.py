"""What a validation decodes: the model, its plan and the prompts; and replay over texts, the prediction of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeopt.calibrate.pipeline import as_calibration
from treeopt.calibration import MAX_RANKS, Calibration, Provenance
from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Rule
from treeopt.drafter import Drafter
from treeopt.drafting.interface import Proposer
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import Target, TextTraces, trace_texts
from treeopt.evaluate.baselines import TREE
from treeopt.evaluate.metrics import Metrics, Trial
from treeopt.evaluate.runs import Runs
from treeopt.evaluate.validation import ValidateOptions
from treeopt.files.policies import plan_id
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.models.tensors import fingerprint
from treeopt.optimize.per_step import replay_policy
from treeopt.optimize.replay import Replay, TextSums, most_used, replay
from treeopt.policy import Plan, TreePolicy
from treeopt.texts.encode import Text
from treeopt.texts.prompts import Skipped
from treeopt.tree import Tree

_SMALLER = (4, 8, 16, 32)  # nodes of the parts of a tree that are replayed


@dataclass(frozen=True, eq=False)
class Inputs:
    """The checked arguments of `validate`.

    Args:
        base: the base model.
        heads: its draft heads; None where the drafter has none.
        tree: a tree or policy.
        drafter: of the tree; None for the heads alone.
        draft: the draft model of the drafter; None where it has none.
        texts: the prompts.
        skipped: prompts that do not fit into the context.
        options: how they are decoded.
    """

    base: Base
    heads: MedusaHeads | None
    tree: Plan
    drafter: Drafter | None
    draft: Base | None
    texts: Sequence[Text]
    skipped: tuple[Skipped, ...]
    options: ValidateOptions

    def decoder(self, rule: Rule) -> TreeDecoder:
        """The decoder of the tree with this acceptance rule."""
        return TreeDecoder(self.base, self.heads, self.tree, drafter=self.drafter, draft=self.draft, acceptance=rule)

    @property
    def content(self) -> dict[str, str]:
        """Ids of all that drafts, for the comparison of processes."""
        return {
            "tree": plan_id(self.tree),
            "drafter": "" if self.drafter is None else self.drafter.id,
            "heads_id": "" if self.heads is None else fingerprint(self.heads),
            "draft_id": "" if self.draft is None else self.draft.fingerprint,
        }

    def measured(self, runs: Runs, predicted: Replay, smaller: Mapping[int, float]) -> dict[str, Any]:
        """The fields of `Measured`; the prediction is of the texts of the runs, in their order."""
        return {
            "metrics": _metrics(runs, predicted.sums),
            "predicted": predicted,
            "measured_by_depth": _by_depth(runs, predicted.depth),
            "expected_tokens_per_step": self.tree.expected.replay if self.tree.expected else None,
            "nodes": self.tree.nodes,
            "smaller": smaller,
            "skipped": (*self.skipped, *runs.skipped),
            "left_out": runs.left_out,
            "repeats": self.options.repeats,
            "batch_size": runs.batch_size,
            "made_by": {
                **self.base.versions(),
                "threads": str(torch.get_num_threads()),
                "dtype": self.base.dtype_name,
                "attention": self.base.model.config._attn_implementation,
            },
            "texts": runs.texts,
        }

    def traces(self, texts: Sequence[Text]) -> Calibration:
        """The teacher-forced traces of these texts."""
        return self.record(texts, self.traced(texts))

    def traced(self, texts: Sequence[Text], scores: Callable[[Tensor], Tensor] | None = None) -> list[TextTraces]:
        """The teacher-forced traces of each text; with `scores`, the probabilities that are their softmax, too."""
        target = None if scores is None else Target(scores, min(num_ranks(self.tree), self.base.vocab_size))
        proposer = proposer_for(self.base, self.heads, self.drafter, self.draft)
        return _traced(self.base, proposer, texts, step_depth(self.tree), target)

    def record(self, texts: Sequence[Text], traced: Sequence[TextTraces]) -> Calibration:
        """The traces of texts as a calibration."""
        return _record(self.base, self.drafter, texts, traced)


def _metrics(runs: Runs, predicted: TextSums) -> Metrics:
    """The metrics of decoded texts, whose tokens and steps with the tree are predicted."""
    rows = zip(runs.texts, runs.by_text, predicted.steps.tolist(), predicted.tokens.tolist(), strict=True)
    return Metrics(
        tuple(
            Trial(text.prompt_id, text.category, text.turn, by_name, steps, tokens)
            for text, by_name, steps, tokens in rows
        )
    )


def _by_depth(runs: Runs, depth: int) -> tuple[float, ...]:
    """Share of the tree's steps that accepted d drafts or more, d = 1 .. `depth`; of the first repeats."""
    lengths = np.array([length for by_name in runs.by_text for length in by_name[TREE][0].step_lengths])
    return tuple(float(np.mean(lengths > d)) for d in range(1, depth + 1))


def predict(
    base: Base,
    heads: MedusaHeads | None,
    tree: Plan,
    texts: Sequence[Text],
    drafter: Drafter | None = None,
    draft: Base | None = None,
) -> Replay:
    """Replay over teacher-forced traces of these texts; nothing is decoded."""
    return replayed(tree, trace(base, heads, texts, drafter, draft, steps=step_depth(tree)))


def trace(
    base: Base,
    heads: MedusaHeads | None,
    texts: Sequence[Text],
    drafter: Drafter | None = None,
    draft: Base | None = None,
    *,
    steps: int = 0,
) -> Calibration:
    """Ranks on these texts, one teacher-forced pass a text; with `steps`, also the per-step trees of that depth."""
    traced = _traced(base, proposer_for(base, heads, drafter, draft), texts, steps)
    return _record(base, drafter, texts, traced)


def _traced(
    base: Base, proposer: Proposer, texts: Sequence[Text], steps: int, target: Target | None = None
) -> list[TextTraces]:
    top_k = min(MAX_RANKS, base.vocab_size)
    return [trace_texts(base, [proposer], [text], top_k, step_depth=steps, target=target)[0] for text in texts]


def _record(base: Base, drafter: Drafter | None, texts: Sequence[Text], traced: Sequence[TextTraces]) -> Calibration:
    provenance = Provenance("", "", "", "", {}, drafter_id=drafter.id if drafter else "")
    return as_calibration(texts, traced, min(MAX_RANKS, base.vocab_size), provenance)


def replayed(tree: Plan, traces: Calibration) -> Replay:
    """The steps of a tree or policy on traces."""
    return replay(tree, traces) if isinstance(tree, Tree) else replay_policy(tree, traces)


def step_depth(tree: Plan) -> int:
    """Depth of the trees chosen per step; 0 for a static tree."""
    return tree.depth if isinstance(tree, TreePolicy) else 0


def num_ranks(tree: Plan) -> int:
    """The number of candidates of a node that may be nodes of the tree, at least 1."""
    return max(1, tree.max_rank + 1 if isinstance(tree, Tree) else tree.nodes - 1)


def parts(tree: Plan, traces: Calibration) -> dict[int, Plan]:
    """The most used parts of a tree, by their nodes; of a policy, the same policy with fewer nodes."""
    sizes = [nodes for nodes in _SMALLER if nodes < tree.nodes]
    if isinstance(tree, Tree):
        return {nodes: most_used(tree, traces, nodes) for nodes in sizes}
    return {nodes: TreePolicy(nodes, tree.depth, tree.drafter) for nodes in sizes}
