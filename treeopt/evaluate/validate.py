"""Validate: whether tree decoding is lossless, gives the predicted tokens per step, and is faster.

Every prompt is decoded in one process by stock `generate`, by prompt lookup of transformers, by our own loop without a
tree (autoregressive), and by our loop with the tree. The prediction is independent of the decoder: a teacher-forced
pass over the texts of stock `generate`, and replay.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from treeopt.calibrate.pipeline import as_calibration
from treeopt.calibration import MAX_RANKS, Calibration, Provenance
from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import Drafter
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import trace_texts
from treeopt.evaluate.baselines import TREE, Run, all_baselines
from treeopt.evaluate.divergence import Difference, first_difference
from treeopt.evaluate.memory import memory_as_error
from treeopt.evaluate.metrics import Metrics, Trial
from treeopt.evaluate.runs import Runs, decode_all
from treeopt.evaluate.validation import ValidateOptions, Validation
from treeopt.files.policies import GivenPlan, as_plan_for
from treeopt.models.base import Base, heads_like
from treeopt.models.draft import as_draft
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_heads
from treeopt.models.heads import MedusaHeads
from treeopt.optimize.per_step import replay_policy
from treeopt.optimize.prune import most_used
from treeopt.optimize.replay import Replay, replay
from treeopt.policy import Plan, TreePolicy
from treeopt.progress import Progress, silent
from treeopt.texts.encode import Skipped, Text
from treeopt.texts.given_prompts import GivenPrompts, as_texts
from treeopt.tree import Tree, check_tree_fits

_SMALLER = (4, 8, 16, 32)  # nodes of the parts of a tree that are replayed


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
) -> Validation:
    """Decode every prompt by every baseline and with the tree, and compare the results with the prediction.

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
            `draft`.

    Raises:
        TreeoptError: as `TreeDecoder` and the loaders; E303 where no prompt fits into the context, E503 for a `Text`.
        TypeError: where model, heads or prompts have another type, or there is no such option.
        ValueError: where a number is out of range, or neither a tree nor a drafter is given.

    Example:
        >>> import treeopt
        >>> found = treeopt.validate("pocket", "pocket", [[0], [1], [0, 0]], ["import os"], max_new_tokens=12)
        >>> found.lossless, found.tokens_per_step == found.predicted.tokens_per_step
        (True, True)
    """
    chosen = ValidateOptions(**options)
    base = as_base(model, tokenizer, dtype="float32")
    heads = None if heads is None else heads_like(base, as_heads(heads).heads)
    tree, drafter = as_plan_for(tree, drafter)
    texts, too_long = as_texts(base, prompts, chosen.max_new_tokens, chat_template=chosen.chat_template)
    draft = as_draft(chosen.draft, base)
    decoder = TreeDecoder(base, heads, tree, drafter=drafter, draft=draft)
    levels = 0 if heads is None else heads.num_heads
    _check_predictable(tree, base, levels if drafter is None else drafter.depth)
    with memory_as_error("a smaller batch, fewer new tokens or a smaller tree"):
        runs = decode_all(all_baselines(base, decoder), base, texts, chosen, progress)
        traces = trace(base, heads, runs.texts, drafter, draft, steps=_steps(tree))
    return _compare(base, tree, runs, traces, too_long).judged(base, chosen.judge)


def _check_predictable(tree: Plan, base: Base, levels: int) -> None:
    """Raise E101 or E102 where a tree has levels or ranks that are not traced."""
    if isinstance(tree, Tree):
        check_tree_fits(tree, heads=levels, ranks=min(MAX_RANKS, base.vocab_size), holder="the prediction")


def _compare(base: Base, tree: Plan, runs: Runs, traces: Calibration, too_long: Sequence[Skipped]) -> Validation:
    """The record of what was decoded and predicted; no difference is judged yet."""
    predicted = _replayed(tree, traces)
    steps = predicted.steps_by_sequence().tolist()
    sizes = [nodes for nodes in _SMALLER if nodes < tree.nodes]
    return Validation(
        metrics=Metrics(
            tuple(
                Trial(text.prompt_id, text.category, text.turn, by_name, count)
                for text, by_name, count in zip(runs.texts, runs.by_text, steps, strict=True)
            )
        ),
        differences=tuple(_differences(runs)),
        predicted=predicted,
        measured_by_depth=_by_depth([by_name[TREE][0] for by_name in runs.by_text], predicted.depth),
        expected_tokens_per_step=tree.expected.replay if tree.expected else None,
        nodes=tree.nodes,
        smaller={nodes: _replayed(_part(tree, traces, nodes), traces).tokens_per_step for nodes in sizes},
        skipped=(*too_long, *runs.skipped),
        left_out=runs.left_out,
        batch_size=runs.batch_size,
        made_by={
            **base.versions(),
            "threads": str(torch.get_num_threads()),
            "dtype": base.dtype_name,
            "attention": base.model.config._attn_implementation,
        },
        texts=runs.texts,
    )


def _differences(runs: Runs) -> Iterator[Difference]:
    """For each text and baseline the first repeat that differs from the first one of stock generate."""
    for text, by_name in zip(runs.texts, runs.by_text, strict=True):
        for name, repeats in by_name.items():
            wrong = next((run.tokens for run in repeats if run.tokens != text.answer), None)
            if wrong is not None:
                yield first_difference(text, name, wrong)


def _by_depth(runs: Sequence[Run], depth: int) -> tuple[float, ...]:
    """Share of steps that accepted d drafts or more, d = 1 .. `depth`."""
    lengths = np.array([length for run in runs for length in run.step_lengths])
    return tuple(float(np.mean(lengths > d)) for d in range(1, depth + 1))


def _part(tree: Plan, traces: Calibration, nodes: int) -> Plan:
    """The most used part of a tree; of a policy, the same policy with fewer nodes."""
    if isinstance(tree, Tree):
        return most_used(tree, traces, nodes)
    return TreePolicy(nodes, tree.depth, tree.drafter)


def _replayed(tree: Plan, traces: Calibration) -> Replay:
    return replay(tree, traces) if isinstance(tree, Tree) else replay_policy(tree, traces)


def _steps(tree: Plan) -> int:
    """Depth of the trees chosen per step; 0 for a static tree."""
    return tree.depth if isinstance(tree, TreePolicy) else 0


def predict(
    base: Base,
    heads: MedusaHeads | None,
    tree: Plan,
    texts: Sequence[Text],
    drafter: Drafter | None = None,
    draft: Base | None = None,
) -> Replay:
    """Replay over teacher-forced traces of these texts; nothing is decoded."""
    return _replayed(tree, trace(base, heads, texts, drafter, draft, steps=_steps(tree)))


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
    top_k = min(MAX_RANKS, base.vocab_size)
    provenance = Provenance("", "", "", "", {}, drafter_id=drafter.id if drafter else "")
    proposer = [proposer_for(base, heads, drafter, draft)]
    traced = [trace_texts(base, proposer, [text], top_k, step_depth=steps)[0] for text in texts]
    return as_calibration(texts, traced, top_k, provenance)
