"""Profile: seconds of one decode step by the size of the tree, measured on the machine that will run it.

All sizes take turns in every round of `TreeDecoder.step`, so that changes in the machine's load affect all alike. A
size's seconds in a round are the shortest of three successive steps, after one that is not counted: right after the
step of a large tree the processor's caches contain other data. Where the drafter reads the text, each round is one
token further in a text of the model, and the last round has the context that is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch

from treeopt.decode.decoder import TreeDecoder
from treeopt.defaults import HEADS, KINDS, ONE_NODE, PROFILE_CONTEXT, PROFILE_NODES, PROFILE_REPEATS, STEP_SIZES
from treeopt.drafter import UNTRAINED_TOP, Drafter
from treeopt.drafting.kernel.data import num_candidates
from treeopt.drafting.ngram import check_drafter
from treeopt.errors import Code, TreeoptError, check_choice, check_counts, counted, memory_as_error
from treeopt.evaluate.timed_step import AcceptDeepest, TimedRounds
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.models.base import Base
from treeopt.models.compatibility import heads_like
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_draft, as_heads
from treeopt.models.head_files import LoadedHeads
from treeopt.models.heads import MedusaHeads
from treeopt.optimize.grow import Growth, grow
from treeopt.optimize.values import IndependentValues
from treeopt.policy import Plan, TreePolicy
from treeopt.progress import Progress, silent
from treeopt.tree import Tree
from treeopt.verify.probe import check_trees
from treeopt.version import VERSION

MOST_NODES = 16_384  # of a timed step; its mask takes 1 GB in float32
MOST_BATCH = 1 << 31  # texts of a timed step; about the maximum that torch can count
# Accuracies of the generic tree: 0.6 for rank 0 of the first head, falling by depth and by rank like measured ones.
_FIRST, _BY_DEPTH, _BY_RANK = 0.6, 0.85, 2.0


@dataclass(frozen=True)
class ProfileOptions:
    """What is timed, and how often.

    Args:
        nodes: sizes, root counted; the one-node step, which all overheads refer to, is always measured. Sizes of
            per-step trees above 254 are replaced by 254.
        contexts: tokens in the cache before the step.
        batches: texts decoded together.
        repeats: rounds, each with the shortest of three steps of every size; the quieter half counts.
        kind: `static`, one tree for all steps, or `dynamic`, a tree chosen per step.
        draft: the draft model of the drafter, in any form that models have; None where it has none.

    Raises:
        TreeoptError: E403 for a batch that fits into no memory.
        ValueError: where a number is out of range, or there is no such kind.
    """

    nodes: Sequence[int] = PROFILE_NODES
    contexts: Sequence[int] = (PROFILE_CONTEXT,)
    batches: Sequence[int] = (1,)
    repeats: int = PROFILE_REPEATS
    kind: str = KINDS[0]
    draft: GivenModel | None = None

    def __post_init__(self) -> None:
        _check_numbers(self.nodes, self.contexts, self.batches, self.repeats)
        check_choice("kind", self.kind, KINDS)
        for name in ("nodes", "contexts", "batches"):
            object.__setattr__(self, name, tuple(sorted({int(number) for number in getattr(self, name)})))


def measure_profile(
    model: GivenModel,
    heads: GivenHeads | None,
    *,
    drafter: Drafter | None = None,
    progress: Progress = silent,
    **options: Any,
) -> LatencyProfile:
    """Time one decode step of a generic tree of each size, at each batch and context.

    At each batch and context the prompts are prefilled once; all sizes share that key-value cache. The cached tokens
    are random for the guesses of the heads, whose time does not depend on them, and else text of the model.

    Args:
        model: the base model: a causal language model of transformers, a folder or hub name, or a `Base`.
        heads: its draft heads: `MedusaHeads`, what `load_heads` gives, or a folder or hub name; None where the drafter
            has none.
        drafter: the drafter of the trees. By default static trees have the guesses of the heads, per-step trees are
            chosen by `Drafter.heads_only`, and without heads both are those of `Drafter.untrained`.
        progress: called after each round of steps.
        options: fields of `ProfileOptions`: `nodes`, `contexts`, `batches`, `repeats`, `kind`, `draft`.

    Raises:
        TreeoptError: E212 where the heads do not fit the base, E223 where the drafter does not; E230 where these levels
            and candidates make no tree of a given size, or it is above `MOST_NODES`; E403 where there is too little
            memory; E502 where the base cannot verify trees; E503 where a context is empty, or does not fit into that of
            the model together with the tree's depth; as `load_base` and `load_heads`.
        TypeError: where model, heads or drafter have another type, or there is no such option.
        ValueError: as `ProfileOptions`.

    Examples:
        >>> import treeopt
        >>> profile = treeopt.measure_profile("pocket", "pocket", nodes=(2, 4), contexts=(16,), repeats=1)
        >>> [point.nodes for point in profile.points]
        [1, 2, 4]
    """
    chosen = ProfileOptions(**options)
    base, loaded = as_base(model), None if heads is None else as_heads(heads)
    used = None if loaded is None else heads_like(base, loaded.heads, loaded.name)
    draft = as_draft(chosen.draft, base)
    if drafter is not None:
        check_drafter(drafter, base, used, draft)
    record, trees, depth = _generic(base, used, drafter, chosen)
    _check_contexts(chosen.contexts, depth, base)
    check_trees(base)
    decoders = [_decoder(base, used, tree, record, chosen.kind, draft) for tree in trees]
    pairs = [(batch, context) for batch in chosen.batches for context in chosen.contexts]
    rounds = chosen.repeats + 1  # the first is the warm-up
    points: list[LatencyPoint] = []
    for i, pair in enumerate(pairs):
        done = i * rounds
        with memory_as_error("fewer nodes, shorter contexts or smaller batches"):
            timing = TimedRounds(decoders, *pair, rounds)
            for row in range(rounds):
                timing.run(drafting=chosen.kind == KINDS[1])
                progress(done + row + 1, len(pairs) * rounds, f"batch {pair[0]}, context {pair[1]}")
        points += timing.points()
    return LatencyProfile.from_points(points, _provenance(base, loaded, chosen, record))


def largest_context(
    base: Base,
    heads: MedusaHeads | None,
    nodes: Sequence[int] = PROFILE_NODES,
    drafter: Drafter | None = None,
    kind: str = KINDS[0],
) -> int:
    """The largest context that leaves room for a step of each of these sizes; below 1 where there is none."""
    *_, depth = _generic(base, heads, drafter, ProfileOptions(nodes=nodes, kind=kind))
    return _room(base, depth)


def generic_growth(nodes: int, levels: int, ranks: int) -> Growth:
    """Growth of a tree with the shape of measured ones: accuracies fall by depth and by rank."""
    depth, rank = np.arange(levels)[:, None], np.arange(min(ranks, nodes))[None, :]
    return grow(IndependentValues(_FIRST * _BY_DEPTH**depth / (1.0 + rank) ** _BY_RANK), nodes)


def _generic(
    base: Base, heads: MedusaHeads | None, drafter: Drafter | None, options: ProfileOptions
) -> tuple[Drafter | None, list[Tree], int]:
    """The drafter, or the one that measures by default, the generic tree of each size, and the greatest depth."""
    nodes, record, dynamic = options.nodes, drafter, options.kind == KINDS[1]
    if record is None and heads is None:
        record = Drafter.untrained(base.vocab_size)
    elif record is None and heads is not None and dynamic:
        record = Drafter.heads_only(heads.num_heads, min(UNTRAINED_TOP, base.vocab_size))
    if dynamic:
        nodes = [min(size, STEP_SIZES[-1]) for size in nodes]
    trees = _trees(base, heads, nodes, record)
    per_step = dynamic and record is not None and trees[-1].nodes > ONE_NODE
    return record, trees, record.depth if per_step and record is not None else trees[-1].depth


def _decoder(
    base: Base, heads: MedusaHeads | None, tree: Tree, record: Drafter | None, kind: str, draft: Base | None
) -> TreeDecoder:
    """The decoder of one size; that of one node needs neither heads nor drafter."""
    rule = AcceptDeepest()
    plan: Plan = tree
    if tree.nodes == ONE_NODE:
        return TreeDecoder(base, None, tree, acceptance=rule, probe=False)
    if record is not None:
        policy = TreePolicy(tree.nodes, record.depth, record.id)
        plan = dataclasses.replace(tree, drafter=record.id) if kind == KINDS[0] else policy
    return TreeDecoder(base, heads, plan, drafter=record, draft=draft, acceptance=rule, probe=False)


def _check_numbers(nodes: Sequence[int], contexts: Sequence[int], batches: Sequence[int], repeats: int) -> None:
    """Raise ValueError for an empty list or a number that is not whole or below 1; E403 above `MOST_BATCH`."""
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
        raise TreeoptError(Code.OUT_OF_MEMORY, what, fix="a smaller --batch-size")


def _trees(base: Base, heads: MedusaHeads | None, nodes: Sequence[int], record: Drafter | None) -> list[Tree]:
    """The generic tree of each size, ascending, the one-node tree first; each contains the ones before it."""
    sizes = sorted({ONE_NODE, *nodes})
    if sizes[-1] > MOST_NODES:
        what = f"a step of {sizes[-1]} nodes is not timed: its mask alone has {sizes[-1]}^2 numbers"
        raise TreeoptError(Code.PROFILE_INVALID, what, fix=f"--sizes up to {MOST_NODES}")
    levels, ranks = 0 if heads is None else heads.num_heads, base.vocab_size
    if record is not None:
        levels, ranks = record.depth, num_candidates(record, base.vocab_size)
    growth = generic_growth(sizes[-1], levels, ranks)
    largest = len(growth.values) + 1
    if sizes[-1] > largest:
        most = f"{counted(levels, 'level')} of {counted(ranks, 'token')}"
        what = f"there is no tree of {sizes[-1]} nodes: the largest has {largest} ({most})"
        raise TreeoptError(Code.PROFILE_INVALID, what, fix=f"--sizes up to {largest}")
    return [growth.tree(size) for size in sizes]


def _room(base: Base, depth: int) -> int:
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


def _provenance(
    base: Base, loaded: LoadedHeads | None, options: ProfileOptions, record: Drafter | None
) -> dict[str, object]:
    versions = base.versions()
    by_drafter = {} if record is None else {"drafter": record.id}
    return {
        "made_by": f"treeopt {VERSION}",
        "model": base.name,
        "model_id": base.fingerprint,
        "heads": "" if loaded is None else loaded.name,
        "heads_id": "" if loaded is None else loaded.fingerprint,
        "kind": options.kind,
        **by_drafter,
        "drafter_name": HEADS if record is None else record.name,
        "device": versions["device"],
        "dtype": base.dtype_name,
        "threads": torch.get_num_threads(),
        "attention": base.model.config._attn_implementation,
        "repeats": options.repeats,
        **({"compiled": True} if base.compile else {}),
        "versions": {name: versions[name] for name in ("python", "torch", "transformers")},
    }
