"""Profile: seconds of one decode step by the size of the tree, measured on the machine that will run it.

The timed code is `TreeDecoder.step`: draft, verify all nodes in one forward, accept, keep. All sizes take turns in
every round, so that changes in the machine's load affect all alike; the first round is not counted. A timed step
follows some steps of the same size, as in decoding: right after the step of a large tree the processor's caches contain
other data (the one-node step of a small model is then a quarter slower, and every overhead too small).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from numbers import Integral

import numpy as np
import torch
from numpy.typing import NDArray

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import Drafter
from treeopt.drafting.kernel_data import num_candidates
from treeopt.drafting.record_proposer import check_drafter
from treeopt.errors import Code, TreeoptError, check_counts
from treeopt.evaluate.memory import memory_as_error
from treeopt.evaluate.timed_step import AcceptDeepest, TimedStep, random_prompts
from treeopt.latency import (
    DEFAULT_CONTEXT,
    DEFAULT_NODES,
    DEFAULT_REPEATS,
    ONE_NODE,
    LatencyPoint,
    LatencyProfile,
)
from treeopt.models.base import Base, check_heads_fit, heads_like
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_heads
from treeopt.models.heads import MedusaHeads
from treeopt.models.layouts import LoadedHeads
from treeopt.optimize.grow import Growth, grow
from treeopt.optimize.values import IndependentValues
from treeopt.policy import STEP_SIZES, Plan, TreePolicy
from treeopt.progress import Progress, silent
from treeopt.tree import Tree
from treeopt.verify.probe import check_trees
from treeopt.version import VERSION

MOST_NODES = 16_384  # of a timed step; its mask takes 1 GB in float32
MOST_BATCH = 1 << 31  # texts of a timed step; about the maximum that torch can count
_QUARTILES = (0.25, 0.5, 0.75)
_DIGITS = 9  # decimals of a second: the clock counts nanoseconds
# Accuracies of the generic tree: 0.6 for rank 0 of the first head, falling by depth and by rank like measured ones.
_FIRST, _BY_DEPTH, _BY_RANK = 0.6, 0.85, 2.0


def measure_profile(
    model: GivenModel,
    heads: GivenHeads | None,
    *,
    nodes: Sequence[int] = DEFAULT_NODES,
    contexts: Sequence[int] = (DEFAULT_CONTEXT,),
    batches: Sequence[int] = (1,),
    repeats: int = DEFAULT_REPEATS,
    drafter: Drafter | None = None,
    progress: Progress = silent,
) -> LatencyProfile:
    """Time one decode step of a generic tree of each size, at each batch and context.

    At each batch and context the prompts are prefilled once; all sizes share that key-value cache.

    Args:
        model: the base model: a causal language model of transformers, a folder or hub name, or a `Base`.
        heads: its draft heads: `MedusaHeads`, what `load_heads` gives, or a folder or hub name; None where the drafter
            has none.
        nodes: sizes, root counted; the one-node step, which all overheads refer to, is always measured. With a drafter
            the maximum is 254.
        contexts: tokens in the cache before the step; they are random, as only their number matters.
        batches: texts decoded together.
        repeats: counted steps of each size.
        drafter: time steps whose trees it chooses; by default those of one tree of the heads' candidates, or without
            heads of the candidates of an n-gram drafter with an empty table.
        progress: called after each round of steps.

    Raises:
        TreeoptError: E212 where the heads do not fit the base; E230 where these levels and this vocabulary make no tree
            of a given size, or it is above `MOST_NODES`; E403 where there is too little memory; E502 where the base
            cannot verify trees; E503 where a context is empty, or does not fit into that of the model together with the
            tree's depth; as `load_base` and `load_heads`.
        TypeError: where model or heads have another type.
        ValueError: where a number is out of range.

    Example:
        >>> import treeopt
        >>> profile = treeopt.measure_profile("pocket", "pocket", nodes=(2, 4), contexts=(16,), repeats=1)
        >>> [point.nodes for point in profile.points]
        [1, 2, 4]
    """
    _check_numbers(nodes, contexts, batches, repeats)
    nodes, contexts, batches = ([int(number) for number in numbers] for numbers in (nodes, contexts, batches))
    base, loaded = as_base(model), None if heads is None else as_heads(heads)
    if loaded is not None:
        check_heads_fit(base, loaded.heads, loaded.name)
    heads = None if loaded is None else heads_like(base, loaded.heads)
    if drafter is not None:
        check_drafter(drafter, base, heads)
        nodes = [min(size, STEP_SIZES[-1]) for size in nodes]
    trees = _trees(base, heads, nodes, drafter)
    depth = _deepest(trees, drafter)
    _check_contexts(contexts, depth, base)
    check_trees(base)
    decoders = [_decoder(tree, base, heads, drafter) for tree in trees]
    pairs = [(batch, context) for batch in sorted(set(batches)) for context in sorted(set(contexts))]
    rounds = repeats + 1  # the first is the warm-up
    points: list[LatencyPoint] = []
    for i, (batch, context) in enumerate(pairs):
        spent = np.empty((rounds, len(trees)))
        with memory_as_error("fewer nodes, shorter contexts or smaller batches"):
            prompts = random_prompts(base, batch, context)
            cached = decoders[-1].prefill(list(prompts), depth + 1)
            steps = [TimedStep(decoder, cached, prompts) for decoder in decoders]
            for row in range(rounds):
                spent[row] = [step.after_lead_in() for step in steps]
                progress(i * rounds + row + 1, len(pairs) * rounds, f"batch {batch}, context {context}")
        points += _points(trees, batch, context, spent[1:])
    return LatencyProfile.from_points(points, _provenance(base, loaded, repeats, drafter))


def largest_context(
    base: Base, heads: MedusaHeads | None, nodes: Sequence[int] = DEFAULT_NODES, drafter: Drafter | None = None
) -> int:
    """The largest context that leaves room for a step of each of these sizes; below 1 where there is none.

    Raises:
        TreeoptError: E230 where there is no tree of a size.
    """
    return _room(base, _deepest(_trees(base, heads, nodes, drafter), drafter))


def generic_growth(nodes: int, levels: int, ranks: int) -> Growth:
    """Growth of a tree with the shape of measured ones: accuracies fall by depth and by rank.

    Args:
        nodes: the budget, root counted.
        levels: the maximum depth.
        ranks: ranks of each level.
    """
    depth, rank = np.arange(levels)[:, None], np.arange(min(ranks, nodes))[None, :]
    return grow(IndependentValues(_FIRST * _BY_DEPTH**depth / (1.0 + rank) ** _BY_RANK), nodes)


def _decoder(tree: Tree, base: Base, heads: MedusaHeads | None, drafter: Drafter | None) -> TreeDecoder:
    """The decoder of one size; that of one node needs neither heads nor drafter."""
    rule = AcceptDeepest()
    if tree.nodes == ONE_NODE:
        return TreeDecoder(base, None, tree, acceptance=rule, probe=False)
    plan: Plan = tree
    if drafter is not None:
        plan = TreePolicy(tree.nodes, drafter.depth, drafter.id)
    elif heads is None:
        drafter = Drafter.untrained(base.vocab_size)
        plan = dataclasses.replace(tree, drafter=drafter.id)
    return TreeDecoder(base, heads, plan, drafter=drafter, acceptance=rule, probe=False)


def _check_numbers(nodes: Sequence[int], contexts: Sequence[int], batches: Sequence[int], repeats: int) -> None:
    """Raise ValueError where a list is empty or a number is no whole number from 1; E403 above `MOST_BATCH`."""
    for name, numbers in (("nodes", nodes), ("contexts", contexts), ("batches", batches)):
        if isinstance(numbers, str) or not isinstance(numbers, Sequence) or not numbers:
            raise ValueError(f"{name} {numbers!r}: it is a list of at least one number")
        if not all(isinstance(number, Integral) and not isinstance(number, bool) for number in numbers):
            raise ValueError(f"{name} {numbers!r}: a number is not whole")
    for name, numbers in (("nodes", nodes), ("batches", batches), ("repeats", [repeats])):
        for number in numbers:
            check_counts(**{name: number})
    if max(batches) > MOST_BATCH:
        what = f"a batch of {max(batches)} texts does not fit into any memory"
        raise TreeoptError(Code.OUT_OF_MEMORY, what, fix="a smaller --batch")


def _trees(base: Base, heads: MedusaHeads | None, nodes: Sequence[int], drafter: Drafter | None) -> list[Tree]:
    """The generic tree of each size, ascending, the one-node tree first; each contains the ones before it."""
    sizes = sorted({ONE_NODE, *nodes})
    if sizes[-1] > MOST_NODES:
        what = f"a step of {sizes[-1]} nodes is not timed: its mask alone has {sizes[-1]}^2 numbers"
        raise TreeoptError(Code.PROFILE_INVALID, what, fix=f"--sizes up to {MOST_NODES}")
    if heads is None:
        record = drafter or Drafter.untrained(base.vocab_size)
        levels, ranks = record.depth, num_candidates(record, base.vocab_size)
    else:
        levels, ranks = heads.num_heads, base.vocab_size
    growth = generic_growth(sizes[-1], levels, ranks)
    largest = len(growth.values) + 1
    if sizes[-1] > largest:
        what = f"there is no tree of {sizes[-1]} nodes: {levels} levels of {ranks} tokens make {largest}"
        raise TreeoptError(Code.PROFILE_INVALID, what, fix=f"--sizes up to {largest}")
    return [growth.tree(size) for size in sizes]


def _deepest(trees: Sequence[Tree], drafter: Drafter | None) -> int:
    """The maximum depth of any tree; that of trees chosen per step is the number of the drafter's levels."""
    return trees[-1].depth if drafter is None or trees[-1].nodes == ONE_NODE else drafter.depth


def _room(base: Base, depth: int) -> int:
    """Maximum number of cached tokens that leaves a position for the root and for each level below it."""
    return base.context - depth - 1


def _check_contexts(contexts: Sequence[int], depth: int, base: Base) -> None:
    """Raise E503 where a context is empty, or leaves no room for a tree of that depth."""
    room = _room(base, depth)
    for context in contexts:
        if not 1 <= context <= room:
            what = (
                f"{context} cached tokens, a root and {depth} drafts below it; the context of {base.name} is "
                f"{base.context} tokens"
            )
            raise TreeoptError(Code.CONTEXT_FULL, what, fix=f"--context from 1 to {room}" if room >= 1 else "")


def _points(trees: Sequence[Tree], batch: int, context: int, spent: NDArray[np.float64]) -> list[LatencyPoint]:
    """Medians and quartiles of `spent`, seconds [repeats, sizes]."""
    quartiles = np.quantile(spent, _QUARTILES, axis=0).round(_DIGITS).T.tolist()
    return [
        LatencyPoint(tree.nodes, batch, context, seconds=median, low=low, high=high)
        for tree, (low, median, high) in zip(trees, quartiles, strict=True)
    ]


def _provenance(base: Base, loaded: LoadedHeads | None, repeats: int, drafter: Drafter | None) -> dict[str, object]:
    versions = base.versions()
    by_drafter = {} if drafter is None else {"drafter": drafter.id}
    return {
        "made_by": f"treeopt {VERSION}",
        "model": base.name,
        "model_id": base.fingerprint,
        "heads": "" if loaded is None else loaded.name,
        "heads_id": "" if loaded is None else loaded.fingerprint,
        "device": versions["device"],
        "dtype": base.dtype_name,
        "threads": torch.get_num_threads(),
        "attention": base.model.config._attn_implementation,
        "repeats": repeats,
        **by_drafter,
        "versions": {name: versions[name] for name in ("python", "torch", "transformers")},
    }
