"""Profile: seconds of one decode step by the size of the tree, measured on the machine that will run it.

All sizes take turns in every round of `TreeDecoder.step`, so that changes in the machine's load affect all alike. A
size's seconds in a round are the shortest of three successive steps, after one that is not counted: right after the
step of a large tree the processor's caches contain other data. Where the drafter reads the text, each round is one
token further in a text of the model, and the last round has the context that is measured.

Where the paths of a tree are verified as a batch, sizes are path tokens, and a step is the mean of several in a row
that accept one draft each: what is replayed and committed differs from step to step.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeopt.decode.decoder import Rows, TreeDecoder, advance
from treeopt.decode.rules import Greedy, Sample
from treeopt.defaults import (
    CHAIN,
    HEADS,
    KINDS,
    ONE_NODE,
    PATH_TOKENS,
    PROFILE_CONTEXT,
    PROFILE_KINDS,
    PROFILE_NODES,
    PROFILE_REPEATS,
    STEP_SIZES,
)
from treeopt.drafter import UNTRAINED_TOP, Drafter
from treeopt.drafting.interface import Drafts, reads_of
from treeopt.drafting.kernel.data import num_candidates
from treeopt.drafting.ngram import check_drafter
from treeopt.drafting.plans import untrained
from treeopt.errors import Code, TreeoptError, check_choice, check_counts, counted, memory_as_error
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.models.base import Base, now
from treeopt.models.compatibility import heads_like
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_draft, as_heads
from treeopt.models.head_files import LoadedHeads
from treeopt.models.heads import MedusaHeads
from treeopt.optimize.grow import Growth, grow, grow_paths
from treeopt.optimize.values import IndependentValues
from treeopt.policy import Plan, TreePolicy
from treeopt.progress import Meter, Progress, silent
from treeopt.tree import Tree
from treeopt.verify.probe import check_trees, verifies_paths
from treeopt.version import VERSION

MOST_NODES = 16_384  # of a timed step; its mask takes 1 GB in float32
MOST_BATCH = 1 << 31  # texts of a timed step; about the maximum that torch can count
# Accuracies of the generic tree: 0.6 for rank 0 of the first head, falling by depth and by rank like measured ones.
_FIRST, _BY_DEPTH, _BY_RANK = 0.6, 0.85, 2.0
_SEED = 0
_MOST_SAMPLES = 8  # texts that are sampled, in one batch
_SAMPLE_TOKENS = 256  # of each; they fill `treeopt.drafter.WINDOW` together
_TEMPERATURE = 0.7  # of text that drafters are learned from
_QUARTILES = (0.25, 0.5, 0.75)
_DIGITS = 9  # decimals of a second: the clock counts nanoseconds
_PATH_STEPS = 8  # steps in a row on the route of paths
_TIMED = 3  # successive steps of one size, after one that fills the processor's caches


@dataclass(frozen=True)
class ProfileOptions:
    """What is timed, and how often.

    Args:
        nodes: sizes, root counted; the one-node step, which all overheads refer to, is always measured. Sizes of
            per-step trees above 254 are replaced by 254.
        contexts: tokens in the cache before the step; None for 512, or what fits into the model's context.
        batches: texts decoded together.
        repeats: rounds, each with the shortest of three steps of every size; the quieter half counts.
        kind: `static`, one tree for all steps, `dynamic`, a tree chosen per step, or `chain`, chains of the levels
            that the drafter has at most.
        draft: the draft model of the drafter, in any form that models have; None where it has none.

    Raises:
        TreeoptError: E403 for a batch that fits into no memory.
        ValueError: where a number is out of range, or there is no such kind.
    """

    nodes: Sequence[int] = PROFILE_NODES
    contexts: Sequence[int] | None = None
    batches: Sequence[int] = (1,)
    repeats: int = PROFILE_REPEATS
    kind: str = KINDS[0]
    draft: GivenModel | None = None

    def __post_init__(self) -> None:
        given = {"nodes": self.nodes, "batches": self.batches}
        if self.contexts is not None:
            given["contexts"] = self.contexts
        _check_numbers(**given)
        check_counts(repeats=self.repeats)
        check_choice("kind", self.kind, PROFILE_KINDS)
        for name, numbers in given.items():
            object.__setattr__(self, name, tuple(sorted(map(int, set(numbers)))))


def measure_profile(
    model: GivenModel,
    heads: GivenHeads | None,
    *,
    drafter: Drafter | None = None,
    progress: Progress = silent,
    **options: Any,
) -> LatencyProfile:
    """Time a decoding step by nodes, batch and context; trees are generic.

    At each batch and context the prompts are prefilled once; all sizes share that key-value cache. The cached tokens
    are random for the guesses of the heads, whose time does not depend on them, and else text of the model.

    Args:
        model: the base model: a causal language model of transformers, a folder or hub name, or a `Base`.
        heads: its draft heads: `MedusaHeads`, what `load_heads` gives, or a folder or hub name; None where the drafter
            has none.
        drafter: the drafter of the trees. By default static trees have the guesses of the heads, per-step trees are
            chosen by `Drafter.heads_only`. Without heads both are those of `draft`, or of `Drafter.untrained`.
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
    check_trees(base)
    record, trees, depth = _generic(base, used, drafter, draft, chosen)
    pairs = list(itertools.product(chosen.batches, _contexts(chosen.contexts, depth, base)))
    decoders = [_decoder(base, used, tree, record, chosen.kind, draft) for tree in trees]
    points: list[LatencyPoint] = []
    meter = Meter(progress)
    meter.begin(len(pairs) * (chosen.repeats + 1))
    for batch, context in pairs:
        meter.note = f"batch {batch}, context {context}"
        with memory_as_error("fewer nodes, shorter contexts or smaller batches"):
            dynamic = chosen.kind == KINDS[1]
            points += timed_rounds(decoders, batch, context, chosen.repeats, drafting=dynamic, meter=meter)
    return LatencyProfile.from_points(points, _provenance(base, loaded, chosen, record))


def generic_growth(nodes: int, levels: int, ranks: int) -> Growth:
    """Growth of a tree with the shape of measured ones."""
    return grow(generic_values(levels, min(ranks, nodes)), nodes)


def generic_values(levels: int, ranks: int) -> IndependentValues:
    """Accuracies that fall by depth and by rank, as measured ones."""
    depth, rank = np.arange(levels)[:, None], np.arange(ranks)[None, :]
    return IndependentValues(_FIRST * _BY_DEPTH**depth / (1.0 + rank) ** _BY_RANK)


def _generic(
    base: Base, heads: MedusaHeads | None, drafter: Drafter | None, draft: Base | None, options: ProfileOptions
) -> tuple[Drafter | None, list[Tree], int]:
    """The drafter, or the one that measures by default, the generic tree of each size, and the greatest depth."""
    nodes, record, dynamic = options.nodes, drafter, options.kind == KINDS[1]
    if record is None and heads is None:
        _, record = untrained(base, draft)
    elif record is None and heads is not None and dynamic:
        record = Drafter.heads_only(heads.num_heads, min(UNTRAINED_TOP, base.vocab_size))
    if dynamic:
        nodes = [min(size, STEP_SIZES[-1]) for size in nodes]
        if verifies_paths(base):
            nodes = [max(known for known in STEP_SIZES if known <= size) for size in nodes]
    trees = _trees(base, heads, nodes, record, options.kind)
    per_step = dynamic and record is not None and trees[-1].nodes > ONE_NODE
    return record, trees, record.depth if per_step and record else trees[-1].depth


def _decoder(
    base: Base, heads: MedusaHeads | None, tree: Tree, record: Drafter | None, kind: str, draft: Base | None
) -> TreeDecoder:
    """The decoder of one size; that of one node needs neither heads nor drafter."""
    plan: Plan = tree
    if tree.nodes == ONE_NODE:
        heads = record = draft = None
    if record is not None:
        plan = dataclasses.replace(tree, drafter=record.id)
        if kind == KINDS[1]:  # a policy has fewer nodes than a tree may have
            plan = TreePolicy(tree.nodes, record.depth, record.id, path_tokens=verifies_paths(base))
    return TreeDecoder(base, heads, plan, drafter=record, draft=draft, acceptance=timed_rule(base), probe=False)


def _check_numbers(**given: Sequence[int]) -> None:
    """Raise ValueError for an empty list or a number that is not whole or below 1; E403 above `MOST_BATCH`."""
    for name, numbers in given.items():
        if isinstance(numbers, str) or not isinstance(numbers, Sequence) or not numbers:
            raise ValueError(f"{name} {numbers!r}: it is a list of at least one number")
        for number in numbers:
            check_counts(0 if name == "contexts" else 1, **{name: number})
    if max(given["batches"]) > MOST_BATCH:
        what = f"a batch of {max(given['batches'])} texts does not fit into any memory"
        raise TreeoptError(Code.OUT_OF_MEMORY, what, fix="a smaller --batch-size")


def _trees(
    base: Base, heads: MedusaHeads | None, nodes: Sequence[int], record: Drafter | None, kind: str
) -> list[Tree]:
    """The generic tree or the chain of each size, ascending, the one-node tree first.

    Of nodes each contains those before. Of path tokens a size that no tree has is replaced by the next smaller one.
    """
    sizes = sorted({ONE_NODE, *nodes})
    if sizes[-1] > MOST_NODES:
        what = f"a step of {sizes[-1]} nodes is not timed: its mask alone has {sizes[-1]}^2 numbers"
        raise TreeoptError(Code.PROFILE_INVALID, what, fix=f"--sizes up to {MOST_NODES}")
    levels, ranks = 0 if heads is None else heads.num_heads, base.vocab_size
    if record is not None:
        levels, ranks = record.depth, num_candidates(record, base.vocab_size)
    if kind == CHAIN:
        return [Tree.chain(size - 1) for size in sizes if size <= levels + 1]
    if kind == KINDS[0] and verifies_paths(base):
        values = generic_values(levels, min(ranks, sizes[-1]))
        trees = [grow_paths(values, size).tree() for size in sizes]
        return list({tree.path_tokens: tree for tree in trees}.values())
    growth = generic_growth(sizes[-1], levels, ranks)
    largest = len(growth.values) + 1
    if sizes[-1] > largest:
        most = f"{counted(levels, 'level')} of {counted(ranks, 'token')}"
        what = f"there is no tree of {sizes[-1]} nodes: the largest has {largest} ({most})"
        raise TreeoptError(Code.PROFILE_INVALID, what, fix=f"--sizes up to {largest}")
    return [growth.tree(size) for size in sizes]


def _contexts(contexts: Sequence[int] | None, depth: int, base: Base) -> Sequence[int]:
    """The contexts, or the default that fits; E503 where one is empty, or leaves no room for a tree of that depth."""
    room = base.context - timed_tokens(base, depth)
    chosen = (max(1, min(PROFILE_CONTEXT, room)),) if contexts is None else contexts
    for context in chosen:
        if not 1 <= context <= room:
            what = (
                f"{context} cached tokens and {base.context - room} of timed steps, whose trees are {depth} deep; the "
                f"context of {base.name} is {base.context} tokens"
            )
            raise TreeoptError(Code.CONTEXT_FULL, what, fix=f"--context from 1 to {room}" if room >= 1 else "")
    return chosen


def _provenance(
    base: Base, loaded: LoadedHeads | None, options: ProfileOptions, record: Drafter | None
) -> dict[str, object]:
    versions = base.versions()
    return {
        "made_by": f"treeopt {VERSION}",
        "model": base.name,
        "model_id": base.fingerprint,
        "heads": "" if loaded is None else loaded.name,
        "heads_id": "" if loaded is None else loaded.fingerprint,
        "kind": options.kind,
        **({"unit": PATH_TOKENS} if verifies_paths(base) else {}),
        **({} if record is None else {"drafter": record.id}),
        "drafter_name": HEADS if record is None else record.name,
        "device": versions["device"],
        "dtype": base.dtype_name,
        "threads": torch.get_num_threads(),
        "attention": base.model.config._attn_implementation,
        "repeats": options.repeats,
        **({"compiled": True} if base.compile else {}),
        "versions": {name: versions[name] for name in ("python", "torch", "transformers")},
    }


def random_prompts(base: Base, batch: int, context: int) -> Tensor:
    """Random tokens as int64 [B, T], the same at every call."""
    return torch.randint(base.vocab_size, (batch, context), generator=_generator()).to(base.device)


def model_texts(base: Base, batch: int, context: int) -> Tensor:
    """Text of the model as int64 [B, T], the same at every call, for drafters whose time depends on the text.

    A row is a sequence of sampled texts, each begun by a random token, and each of the first rows ends with another
    one.
    """
    length = min(_SAMPLE_TOKENS, context, base.context - 2)
    if length < 1:
        return random_prompts(base, batch, context)
    repeats = -(-context // length)
    count = min(_MOST_SAMPLES, max(batch, repeats))
    samples = _samples(base, count, length)
    rows = [torch.cat([samples[(row + 1 + i) % count] for i in range(repeats)])[-context:] for row in range(batch)]
    return torch.stack(rows).to(base.device)


def _samples(base: Base, count: int, length: int) -> Tensor:
    """int64 [count, length], sampled by autoregressive decoding."""
    first = torch.randint(base.vocab_size, (count,), generator=_generator()).tolist()
    begin = base.model.generation_config.bos_token_id
    starts = [[token] if begin is None else [int(begin), token] for token in first]
    decoder = TreeDecoder(base, None, Tree(()), acceptance=Sample(_TEMPERATURE, seed=_SEED), probe=False)
    rows = decoder.prefill(starts, length)
    texts: list[list[int]] = [[] for _ in starts]
    for step in advance(decoder, rows, dict.fromkeys(rows.indices, length), frozenset()):
        for row, tokens in step.items():
            texts[row] += tokens
    return torch.tensor(texts)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


@dataclass(frozen=True)
class AcceptFixed(Greedy):
    """Greedy acceptance at its full cost, whose result is replaced by the last node, a deepest one, or the first draft.

    Random text accepts nothing, but keeping a deep path means moving cache entries, which a timed step must include. On
    the route of paths the accepted tokens are replayed or committed: as many as a typical step accepts.
    """

    shallow: bool = False

    def accept(self, drafts: Drafts, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        node, root = super().accept(drafts, logits, generator)
        last = drafts.tokens.shape[1] - 1
        return node.fill_(min(1, last) if self.shallow else last), root


def timed_rule(base: Base) -> AcceptFixed:
    """The rule of timed steps."""
    return AcceptFixed(shallow=verifies_paths(base))


def timed_tokens(base: Base, depth: int) -> int:
    """The tokens by which timed steps of trees of this depth exceed the text."""
    return depth + 1 + (2 * _PATH_STEPS if verifies_paths(base) else 0)


class TimedStep:
    """A step of a decoder after cached texts, which can be run again and again; the mean of several by paths.

    Prompts int64 [B, T], or as many of their last tokens as it reads, are `cached` by a decoder of the same base whose
    trees are as large and deep, or more: all sizes share one cache.
    """

    def __init__(self, decoder: TreeDecoder, cached: Rows, prompts: Tensor) -> None:
        self.decoder = decoder
        texts = [[*text, root] for text, root in zip(prompts.tolist(), cached.roots, strict=True)]
        drafting = decoder.trees.start(texts)
        if reads_of(decoder.trees):  # the last state for every token: a step takes as long whatever is read
            drafting.read([one.expand(len(text) - 1, -1) for one, text in zip(cached.hidden, texts, strict=True)])
        self.rows = Rows(cached.session, drafting, cached.roots, cached.root, cached.hidden, None, None, [])
        self._start = self.rows.mark()
        self._context = max(cached.session.lengths)

    def seconds(self) -> float:
        """Run the step, and return the rows to the state before it."""
        steps = _PATH_STEPS if self.decoder.acceptance == AcceptFixed(shallow=True) else 1
        begin = now(self.decoder.base)
        for _ in range(steps):
            self.decoder.step(self.rows)
        end = now(self.decoder.base)
        self.rows.rewind(self._start)
        return (end - begin) / steps

    @torch.inference_mode()
    def drafting_seconds(self) -> float:
        """Seconds of choosing the tree and its tokens again, without verifying it; the shortest of several."""
        spent = []
        for _ in range(_TIMED):
            begin = now(self.decoder.base)
            self.decoder.trees.draft(self.rows.drafting, self.rows.root, self.rows.hidden, self._context)
            spent.append(now(self.decoder.base) - begin)
        return min(spent)

    def after_lead_in(self) -> float:
        """Seconds of a step that follows a step of the same size: the shortest of several."""
        self.seconds()
        return min(self.seconds() for _ in range(_TIMED))


def prefilled(decoders: Sequence[TreeDecoder], prompts: Tensor, max_new_tokens: int) -> list[Rows]:
    """The texts [B, T] in the cache of the largest decoder, for all; a compiled one runs one size, and has its own."""
    largest = max(decoders, key=lambda one: (one.trees.nodes, one.trees.depth))
    if largest.base.compile:
        return [decoder.prefill(list(prompts), max_new_tokens) for decoder in decoders]
    return [largest.prefill(list(prompts), max_new_tokens)] * len(decoders)


def timed_rounds(
    decoders: Sequence[TreeDecoder], batch: int, context: int, repeats: int, *, drafting: bool, meter: Meter
) -> list[LatencyPoint]:
    """Steps of several decoders after the same texts, timed in turn; one node is first, the largest and deepest last.

    The cache has `context` tokens, at the last round where a decoder reads the text. With `drafting` drafting alone is
    timed too. Figures are medians and quartiles of the quieter half of the rounds, after one that warms up; a round is
    quieter where its steps take less time in all: other load lasts for whole rounds.
    """
    rounds, base = repeats + 1, decoders[-1].base
    window, depth = decoders[-1].trees.window, decoders[-1].trees.depth
    # Raises at once where not even the hidden states of the texts fit: texts are made as lists, which takes long.
    torch.empty(batch, context, base.hidden_size, dtype=base.dtype, device=base.device)
    texts = (model_texts if window else random_prompts)(base, batch, context)
    moves = window and not base.compile  # compiled steps share no cache that one of them could advance
    begin = max(1, context - rounds + 1) if moves else context
    texts = texts[:, :begin]
    cached = prefilled(decoders, texts, context - begin + timed_tokens(base, depth))
    found = np.zeros((2, rounds, len(decoders)))
    for row in range(rounds):
        length = texts.shape[1]
        steps = [
            TimedStep(decoder, rows, texts[:, max(0, length + 1 - max(1, decoder.trees.window)) :])  # with the root
            for decoder, rows in zip(decoders, cached, strict=True)
        ]
        for i, step in enumerate(steps):
            found[:, row, i] = step.after_lead_in(), step.drafting_seconds() if drafting else 0.0
        if length < context:  # one token on in the text
            texts = torch.cat([texts, cached[0].root[:, None]], dim=1)
            steps[0].decoder.step(steps[0].rows)
            cached = [steps[0].rows] * len(steps)
        meter.add(1)
    spent, alone = found[:, 1:]
    quiet = spent.sum(1).argsort(kind="stable")[: -(-repeats // 2)]
    quartiles = np.quantile(spent[quiet], _QUARTILES, axis=0).round(_DIGITS).T.tolist()
    drafted = np.median(alone[quiet], axis=0).round(_DIGITS).tolist()
    return [
        LatencyPoint(_size(decoder), batch, context, median, low, high, each or None)
        for decoder, (low, median, high), each in zip(decoders, quartiles, drafted, strict=True)
    ]


def _size(decoder: TreeDecoder) -> int:
    """The size of a decoder's trees, in path tokens on the route of paths; of per-step trees their budget."""
    tree = decoder.trees.tree
    return decoder.trees.nodes if tree is None or not verifies_paths(decoder.base) else tree.path_tokens
