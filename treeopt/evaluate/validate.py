"""Validate: is tree decoding lossless, does it do what was predicted, and is it faster.

Every prompt is decoded in one process, as often as asked, by stock `generate`, by prompt lookup (stock too), by our own
loop one token a step without heads, and by our loop with the tree. The prediction comes from a separate teacher-forced
pass over the text of stock `generate`, and replay.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from treeopt.calibrate.pipeline import as_calibration
from treeopt.calibration import MAX_RANKS, Calibration, Provenance
from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import Drafter
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import trace_texts
from treeopt.errors import first_line
from treeopt.evaluate.baselines import Run, Way, with_decoder, with_generate
from treeopt.evaluate.divergence import Difference, first_difference
from treeopt.evaluate.memory import memory_as_error
from treeopt.evaluate.metrics import AUTOREGRESSIVE, GENERATE, LOOKUP, TREE, Figures, Trial
from treeopt.evaluate.validation import JUDGED, Validation
from treeopt.files.policies import GivenPlan, as_plan_for
from treeopt.models.base import Base, heads_like
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_heads
from treeopt.models.heads import MedusaHeads
from treeopt.optimize.per_step import replay_policy
from treeopt.optimize.prune import most_used
from treeopt.optimize.replay import Replay, replay
from treeopt.policy import Plan, TreePolicy
from treeopt.progress import Progress, silent
from treeopt.texts.encode import Skipped, Text, next_turn
from treeopt.texts.given_prompts import GivenPrompts, as_texts
from treeopt.tree import Tree, check_tree_fits

_WARM_UP_TOKENS = 8
_LOOKUP_TOKENS = 10  # drafts of one prompt lookup: the value of transformers' own documentation
_SMALLER = (4, 8, 16, 32)  # nodes of the parts whose tokens per step are worked out


def validate(
    model: GivenModel,
    heads: GivenHeads,
    tree: GivenPlan,
    prompts: GivenPrompts | Sequence[Text],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    drafter: Drafter | str | os.PathLike[str] | None = None,
    max_new_tokens: int = 128,
    repeats: int = 1,
    batch_size: int = 1,
    chat_template: bool = True,
    judge: int = JUDGED,
    progress: Progress = silent,
) -> Validation:
    """Decode every prompt in all ways, turn by turn, and compare.

    Args:
        model: a causal language model of transformers, a `Base`, or a folder or hub name, then loaded in float32.
        heads: its draft heads: `MedusaHeads`, what `load_heads` gives, or a folder or hub name.
        tree: the tree to prove, a list of paths, or the policy that chooses one per step; or the file of one.
        prompts: a name as for `load_prompts`, a list of requests, rows or conversations, a `PromptSet`, or token ids as
            `Text`, whose continuation is ignored. Later turns each follow stock generate's answer to the one before.
        tokenizer: the model's, where it does not lie beside its weights.
        drafter: what the tree was made for, or its file; the one that a tree's file names need not be given.
        max_new_tokens: budget of each continuation.
        repeats: times that each text is decoded each way; the ways take turns.
        batch_size: prompts decoded together, in all ways; figures are then of batches.
        chat_template: put requests through the tokenizer's chat template, where it has one.
        judge: differing texts of ours that are judged, as `Validation.judged` does; 0 leaves all of them open.
        progress: told after each text.

    Raises:
        TreeoptError: as `TreeDecoder` and the loaders; E303 where no prompt fits into the context, E503 for a `Text`.
        TypeError: where model, heads or prompts are none of these.
        ValueError: where a number is out of range.

    Example:
        >>> import treeopt
        >>> found = treeopt.validate("pocket", "pocket", [[0], [1], [0, 0]], ["import os"], max_new_tokens=12)
        >>> found.lossless, found.tokens_per_step == found.predicted.tokens_per_step
        (True, True)
    """
    if min(max_new_tokens, repeats, batch_size) < 1 or judge < 0:
        given = f"max_new_tokens {max_new_tokens}, repeats {repeats}, batch_size {batch_size}, judge {judge}"
        raise ValueError(f"{given}: the first three are 1 or more, and judge 0 or more")
    base, heads = as_base(model, tokenizer, dtype="float32"), as_heads(heads).heads
    tree, drafter = as_plan_for(tree, drafter)
    prompts, left_aside = as_texts(base, prompts, max_new_tokens, chat_template=chat_template)
    decoder = TreeDecoder(base, heads, tree, drafter=drafter)
    if isinstance(tree, Tree):
        levels = heads.num_heads if drafter is None else drafter.depth
        check_tree_fits(tree, heads=levels, ranks=min(MAX_RANKS, base.vocab_size), holder="the prediction")
    plain = TreeDecoder(base, None, Tree(()), probe=False)
    ways = {
        GENERATE: with_generate(base),
        LOOKUP: with_generate(base, prompt_lookup_num_tokens=_LOOKUP_TOKENS),
        AUTOREGRESSIVE: with_decoder(plain),
        TREE: with_decoder(decoder),
    }
    batches = [prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size)]
    with memory_as_error("a smaller batch, fewer new tokens or a smaller tree"):
        left_out = _warm_up(ways, [text.prompt for text in batches[0]], min(_WARM_UP_TOKENS, max_new_tokens))
        texts, runs, skipped = _decode_all(ways, base, batches, max_new_tokens, repeats, chat_template, progress)
        traces = trace(base, heads_like(base, heads), texts, drafter, steps=_steps(tree))
    predicted = _replayed(tree, traces)
    trials = [
        Trial(text.prompt_id, text.category, text.turn, run, steps)
        for text, run, steps in zip(texts, runs, predicted.steps_by_sequence().tolist(), strict=True)
    ]
    found = Validation(
        figures=Figures(tuple(trials)),
        differences=tuple(_differences(texts, runs)),
        predicted=predicted,
        measured_by_depth=_by_depth([run[TREE][0] for run in runs], predicted.depth),
        expected_tokens_per_step=tree.expected.replay if tree.expected else None,
        nodes=tree.nodes,
        smaller={
            nodes: _replayed(_part(tree, traces, nodes), traces).tokens_per_step
            for nodes in _SMALLER
            if nodes < tree.nodes
        },
        skipped=(*left_aside, *skipped),
        left_out=left_out,
        batch_size=batch_size,
        made_by={
            **base.versions(),
            "threads": str(torch.get_num_threads()),
            "dtype": base.dtype_name,
            "attention": base.model.config._attn_implementation,
        },
        texts=tuple(texts),
    )
    return found.judged(base, judge)


def predict(
    base: Base, heads: MedusaHeads | None, tree: Plan, texts: Sequence[Text], drafter: Drafter | None = None
) -> Replay:
    """What the tree will do on these very texts, without decoding: teacher-forced ranks, then replay."""
    return _replayed(tree, trace(base, heads, texts, drafter, steps=_steps(tree)))


def trace(
    base: Base, heads: MedusaHeads | None, texts: Sequence[Text], drafter: Drafter | None = None, *, steps: int = 0
) -> Calibration:
    """The ranks on these very texts, by teacher-forced passes, one text at a time; and trees per step, `steps` deep."""
    top_k = min(MAX_RANKS, base.vocab_size)
    provenance = Provenance("", "", "", "", {}, drafter_id=drafter.id if drafter else "")
    proposer = [proposer_for(base, heads, drafter)]
    traced = [trace_texts(base, proposer, [text], top_k, step_depth=steps)[0] for text in texts]
    return as_calibration(texts, [one.ranks for one in traced], top_k, provenance, [one.steps for one in traced])


def _steps(tree: Plan) -> int:
    """How deep the trees chosen per step are; 0 where there is one tree."""
    return tree.depth if isinstance(tree, TreePolicy) else 0


def _replayed(tree: Plan, traces: Calibration) -> Replay:
    return replay(tree, traces) if isinstance(tree, Tree) else replay_policy(tree, traces)


def _part(tree: Plan, traces: Calibration, nodes: int) -> Plan:
    """The most used part of a tree; of a policy, the same with fewer nodes."""
    if isinstance(tree, Tree):
        return most_used(tree, traces, nodes)
    return TreePolicy(nodes, tree.depth, tree.drafter)


def _warm_up(ways: dict[str, Way], prompts: Sequence[Sequence[int]], max_new_tokens: int) -> dict[str, str]:
    """Run each way once; prompt lookup, which takes no batches and not every cache, is taken out where it fails."""
    left_out = {}
    for name, way in list(ways.items()):
        try:
            way(prompts, max_new_tokens)
        except Exception as error:  # transformers raises many kinds for one fact: there is no prompt lookup here
            if name != LOOKUP:
                raise
            left_out[name] = first_line(error)
            del ways[name]
    return left_out


def _decode_all(
    ways: Mapping[str, Way],
    base: Base,
    batches: Sequence[Sequence[Text]],
    max_new_tokens: int,
    repeats: int,
    chat_template: bool,
    progress: Progress,
) -> tuple[list[Text], list[dict[str, list[Run]]], list[Skipped]]:
    """All turns of all prompts with stock generate's answers, how each was decoded, and the turns left out."""
    done: list[tuple[Text, dict[str, list[Run]]]] = []
    skipped: list[Skipped] = []
    rounds = differing = 0
    total = sum(1 + len(prompt.later) for batch in batches for prompt in batch)
    for batch in batches:
        turns = list(batch)
        while turns:
            found = _in_turns(ways, [turn.prompt for turn in turns], max_new_tokens, repeats, first=rounds)
            rounds += 1
            texts = [
                dataclasses.replace(turn, answer=runs[GENERATE][0].tokens)
                for turn, runs in zip(turns, found, strict=True)
            ]
            done += zip(texts, found, strict=True)
            for text, runs in zip(texts, found, strict=True):
                differing += any(run.tokens != text.answer for way in (AUTOREGRESSIVE, TREE) for run in runs[way])
            progress(len(done), total, f"texts that differ: {differing}")
            following = [next_turn(base, text, max_new_tokens, chat_template=chat_template) for text in texts]
            turns = [turn for turn in following if isinstance(turn, Text)]
            for text, turn in zip(texts, following, strict=True):
                if isinstance(turn, Skipped):
                    skipped.append(turn)
                    total -= len(text.later)
    done.sort(key=lambda one: one[0].prompt_id)  # a batch of dialogues has all their first turns first
    return [text for text, _ in done], [runs for _, runs in done], skipped


def _in_turns(
    ways: Mapping[str, Way], prompts: Sequence[Sequence[int]], max_new_tokens: int, repeats: int, first: int
) -> list[dict[str, list[Run]]]:
    """For each prompt all runs by way. The ways take turns, and each batch and repeat begins with another of them."""
    runs: list[dict[str, list[Run]]] = [{name: [] for name in ways} for _ in prompts]
    names = list(ways)
    for repeat in range(repeats):
        begin = (first + repeat) % len(names)
        for name in names[begin:] + names[:begin]:
            for own, run in zip(runs, ways[name](prompts, max_new_tokens), strict=True):
                own[name].append(run)
    return runs


def _differences(texts: Sequence[Text], runs: Sequence[Mapping[str, Sequence[Run]]]) -> Iterator[Difference]:
    """For each text and way the first repeat that is not stock generate's first."""
    for text, by_way in zip(texts, runs, strict=True):
        for way, repeats in by_way.items():
            wrong = next((run.tokens for run in repeats if run.tokens != text.answer), None)
            if wrong is not None:
                yield first_difference(text, way, wrong)


def _by_depth(runs: Sequence[Run], depth: int) -> tuple[float, ...]:
    lengths = np.array([length for run in runs for length in run.step_lengths])
    return tuple(float(np.mean(lengths > d)) for d in range(1, depth + 1))
