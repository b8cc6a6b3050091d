"""Profile: seconds of one decode step by the size of the tree, measured on the machine that will run it.

A step is the decoder's: draft with the heads at one position, verify all nodes in one forward, accept, keep. All sizes
take turns in every round, so that the machine's moods hit all alike; the first round is not counted. A timed step
follows some of its own size, as in decoding: right after a large tree's it would find the processor's caches emptied
(the one-node step of a small model is then a quarter slower, and every overhead too small).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeopt.decode import accept
from treeopt.drafter import Drafter
from treeopt.drafting.heads import NO_TOKEN, PlainProposer, Proposer
from treeopt.drafting.plans import DynamicProposer
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.memory import memory_as_error
from treeopt.latency import (
    DEFAULT_CONTEXT,
    DEFAULT_NODES,
    DEFAULT_REPEATS,
    ONE_NODE,
    LatencyPoint,
    LatencyProfile,
)
from treeopt.models.base import Base, check_heads_fit, heads_like
from treeopt.models.clock import now
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_heads
from treeopt.models.heads import MedusaHeads
from treeopt.models.layouts import LoadedHeads
from treeopt.optimize.grow import Growth, grow
from treeopt.optimize.values import IndependentValues
from treeopt.policy import STEP_SIZES, TreePolicy
from treeopt.progress import Progress, silent
from treeopt.sampling import check_seed
from treeopt.tree import Tree
from treeopt.verify.cache import TreeCache
from treeopt.verify.masks import PrefixMasks, TreeMasks, layer_windows
from treeopt.verify.probe import check_trees
from treeopt.verify.shapes import Shape
from treeopt.version import VERSION

MOST_NODES = 16_384  # of a timed step; the mask of one takes 1 GB in float32
MOST_BATCH = 1 << 31  # texts of a timed step; what torch can count is not much beyond
_LEAD_IN = 3  # steps of the same size before a timed one: what the size before left behind is gone
_QUARTILES = (0.25, 0.5, 0.75)
_DIGITS = 9  # decimals of a second: the clock counts nanoseconds
# The generic tree's accuracies: 0.6 for the first head's best guess, falling by depth and by rank as measured ones do.
_FIRST, _BY_DEPTH, _BY_RANK = 0.6, 0.85, 2.0


def measure_profile(
    model: GivenModel,
    heads: GivenHeads,
    *,
    nodes: Sequence[int] = DEFAULT_NODES,
    contexts: Sequence[int] = (DEFAULT_CONTEXT,),
    batches: Sequence[int] = (1,),
    repeats: int = DEFAULT_REPEATS,
    seed: int = 0,
    drafter: Drafter | None = None,
    progress: Progress = silent,
) -> LatencyProfile:
    """Time one decode step of a generic tree of each size, at each batch and context.

    A batch is timed as `batch` rows of one length, which share the tree's mask and positions; in the decoder, each row
    having its own length, it costs a little more.

    Args:
        model: the base model: a causal language model of transformers, a folder or hub name, or a `Base`.
        heads: its draft heads: `MedusaHeads`, what `load_heads` gives, or a folder or hub name.
        nodes: sizes, root counted; the one-node step, which all overheads refer to, is always measured. With a drafter
            254 at most.
        contexts: tokens in the cache before the step; random ones, as only their number matters.
        batches: texts decoded together.
        repeats: counted steps of each size.
        seed: of the tokens in the cache.
        drafter: time steps whose trees it chooses; else those of one tree of the heads' plain guesses.
        progress: told after each round of steps.

    Raises:
        TreeoptError: E212 where the heads do not fit the base; E230 where these heads and this vocabulary make no tree
            of a size asked for, or it is beyond `MOST_NODES`; E403 where there is too little memory; E502 where the
            base cannot verify trees; E503 where a context is empty, or does not fit into the model's own together with
            the tree's depth; as `load_base` and `load_heads`.
        TypeError: where model or heads are none of these.
        ValueError: where a number is out of range.

    Example:
        >>> import treeopt
        >>> profile = treeopt.measure_profile("pocket", "pocket", nodes=(2, 4), contexts=(16,), repeats=1)
        >>> [point.nodes for point in profile.points]
        [1, 2, 4]
    """
    if min((*nodes, *batches, repeats), default=0) < 1 or not (nodes and contexts and batches):
        given = f"nodes {list(nodes)}, contexts {list(contexts)}, batches {list(batches)}, repeats {repeats}"
        raise ValueError(f"{given}: none may be empty, and none below 1")
    check_seed(seed)
    base, loaded = as_base(model), as_heads(heads)
    check_heads_fit(base, loaded.heads, loaded.name)
    heads = heads_like(base, loaded.heads)
    if drafter is not None:
        nodes = [min(size, STEP_SIZES[-1]) for size in nodes]
    if max(batches) > MOST_BATCH:
        what = f"a batch of {max(batches)} texts does not fit into any memory"
        raise TreeoptError(Code.OUT_OF_MEMORY, what, fix="a smaller --batch")
    trees = _trees(base, heads, nodes)
    _check_contexts(contexts, _deepest(trees, drafter), base)
    check_trees(base)
    pairs = [(batch, context) for batch in sorted(set(batches)) for context in sorted(set(contexts))]
    rounds = repeats + 1  # the first is the warm-up
    points: list[LatencyPoint] = []
    for i, (batch, context) in enumerate(pairs):
        spent = np.empty((rounds, len(trees)))
        with memory_as_error("fewer nodes, shorter contexts or smaller batches"):
            steps = [_timed(tree, base, heads, context, drafter) for tree in trees]
            text = CachedText(base, batch, context, capacity=context + trees[-1].nodes, seed=seed)
            for row in range(rounds):
                spent[row] = [_in_stride(step, text) for step in steps]
                progress(i * rounds + row + 1, len(pairs) * rounds, f"batch {batch}, context {context}")
        points += _points(trees, batch, context, spent[1:])
    return LatencyProfile.from_points(points, _provenance(base, loaded, repeats, drafter))


def largest_context(
    base: Base, heads: MedusaHeads, nodes: Sequence[int] = DEFAULT_NODES, drafter: Drafter | None = None
) -> int:
    """The most cached tokens that leave room for a step of each of these sizes; below 1 where there is none.

    Raises:
        TreeoptError: E230 where there is no tree of a size.
    """
    return _room(base, _deepest(_trees(base, heads, nodes), drafter))


def generic_growth(nodes: int, heads: int, ranks: int) -> Growth:
    """Growth of a tree shaped like real ones: accuracies fall by depth and by rank.

    Args:
        nodes: the budget, root counted.
        heads: H, the deepest level.
        ranks: ranks of each head.
    """
    depth, rank = np.arange(heads)[:, None], np.arange(min(ranks, nodes))[None, :]
    return grow(IndependentValues(_FIRST * _BY_DEPTH**depth / (1.0 + rank) ** _BY_RANK), nodes)


class CachedText:
    """`batch` rows of `context` random tokens in a cache with room for a tree: where every timed step begins.

    Attributes:
        cache: holds `context` entries between steps.
        roots: int64 [B], the token that the base chooses after each row.
        hidden: [B, d], the state that chose it.
        tokens: int64 [B, context + 1], the text on the host, the root last.
    """

    @torch.inference_mode()
    def __init__(self, base: Base, batch: int, context: int, *, capacity: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        ids = torch.randint(base.vocab_size, (batch, context), generator=rng).to(base.device)
        self.context = context
        self.cache = TreeCache(capacity, base.layers)
        logits, hidden = base.forward(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.roots = logits[:, -1].argmax(-1)
        self.hidden = hidden[:, -1]
        self.tokens = torch.cat([ids, self.roots[:, None]], dim=1).numpy(force=True)

    def restore_(self) -> None:
        """Forget what a step has kept."""
        self.cache.crop(self.context - self.cache.get_seq_length())


class TimedStep:
    """One decode step of one tree after `context` cached tokens, made ready as the decoder makes it."""

    def __init__(self, tree: Tree, base: Base, heads: MedusaHeads, context: int) -> None:
        self.tree = tree
        self._base = base
        self._proposer: Proposer = PlainProposer(base, heads, tree)
        self._shape = Shape.of_tree(tree, base.device)
        masks = TreeMasks.of_tree(tree, layer_windows(base.model.config), context, base.dtype, base.device)
        self._mask = masks.at(context)
        # Random text accepts nothing, but keeping deep nodes means moving rows: every step keeps the same deep path.
        self._kept = torch.from_numpy(np.flatnonzero(tree.ancestors[-1])).to(base.device)

    @torch.inference_mode()
    def seconds(self, text: CachedText) -> float:
        """Run the step once on `text`, whose cache is as before afterwards."""
        begin = now(self._base)
        tokens = self.draft(text)
        logits = self.verify(tokens, text)
        choice = logits.max(-1).indices  # [B, N]
        last = accept.greedy(tokens, choice, self._shape)
        last.tolist()  # the decoder, too, waits here to know what to keep
        text.cache.move(self._kept + text.context, text.context)
        end = now(self._base)
        text.restore_()
        return end - begin

    def draft(self, text: CachedText) -> Tensor:
        """int64 [B, N]: the roots and a draft for every other node."""
        return self._proposer.propose(text.roots, text.hidden, None).tokens

    def verify(self, tokens: Tensor, text: CachedText) -> Tensor:
        """Logits [B, N, V] by one forward over all nodes of all rows."""
        positions = self._shape.depths + text.context
        logits, _ = self._base.forward(
            tokens,
            attention_mask=self._mask,
            position_ids=positions.expand(len(tokens), -1),
            past_key_values=text.cache,
            use_cache=True,
        )
        return logits


class ChosenStep(TimedStep):
    """The same where the tree is chosen at the step: its shape, mask and positions are made anew."""

    def __init__(self, tree: Tree, base: Base, heads: MedusaHeads, context: int, drafter: Drafter) -> None:
        super().__init__(Tree(()), base, heads, context)
        self.tree = tree
        proposer = DynamicProposer(base, heads, TreePolicy(tree.nodes, drafter.depth, drafter.id), drafter)
        self._chooser, self._context = proposer, context
        self._prefix = PrefixMasks(proposer.depth, layer_windows(base.model.config), context, base.dtype, base.device)
        self._kept = torch.arange(min(2, tree.nodes), device=base.device)  # a path that every tree has

    def draft(self, text: CachedText) -> Tensor:
        recent = np.pad(text.tokens, ((0, 0), (self._chooser.context, 0)), constant_values=NO_TOKEN)
        drafts = self._chooser.propose(text.roots, text.hidden, recent[:, -self._chooser.context :])
        assert drafts.shape is not None
        self._shape = drafts.shape
        self._mask = self._prefix.before(drafts.shape, self._context).at(self._context)
        return drafts.tokens


def _timed(tree: Tree, base: Base, heads: MedusaHeads, context: int, drafter: Drafter | None) -> TimedStep:
    """A step of that size; one node needs no drafter, as it needs no heads."""
    if drafter is None or tree.nodes == ONE_NODE:
        return TimedStep(tree, base, heads, context)
    return ChosenStep(tree, base, heads, context, drafter)


def _in_stride(step: TimedStep, text: CachedText) -> float:
    """Seconds of a step that follows `_LEAD_IN` of its own size."""
    for _ in range(_LEAD_IN):
        step.seconds(text)
    return step.seconds(text)


def _trees(base: Base, heads: MedusaHeads, nodes: Sequence[int]) -> list[Tree]:
    """The generic tree of each size, ascending, the one-node tree first; each contains the ones before it."""
    sizes = sorted({ONE_NODE, *nodes})
    if sizes[-1] > MOST_NODES:
        what = f"a step of {sizes[-1]} nodes is not timed: its mask alone would take {sizes[-1]}^2 numbers"
        raise TreeoptError(Code.PROFILE_INVALID, what, fix=f"--sizes up to {MOST_NODES}")
    growth = generic_growth(sizes[-1], heads.num_heads, base.vocab_size)
    largest = len(growth.values) + 1
    if sizes[-1] > largest:
        what = (
            f"there is no tree of {sizes[-1]} nodes: {heads.num_heads} heads of {base.vocab_size} tokens make {largest}"
        )
        raise TreeoptError(Code.PROFILE_INVALID, what, fix=f"--sizes up to {largest}")
    return [growth.tree(size) for size in sizes]


def _deepest(trees: Sequence[Tree], drafter: Drafter | None) -> int:
    """The greatest depth of any tree of any step; a drafter's trees go as deep as it has levels."""
    return trees[-1].depth if drafter is None or trees[-1].nodes == ONE_NODE else drafter.depth


def _room(base: Base, depth: int) -> int:
    """Cached tokens that leave a position for the root and for each level below it."""
    return base.context - depth - 1


def _check_contexts(contexts: Sequence[int], depth: int, base: Base) -> None:
    room = _room(base, depth)
    for context in contexts:
        if not 1 <= context <= room:
            what = (
                f"{context} cached tokens, a root and {depth} drafts below it; {base.name} holds {base.context} tokens"
            )
            raise TreeoptError(Code.CONTEXT_FULL, what, fix=f"--context from 1 to {room}" if room >= 1 else "")


def _points(trees: Sequence[Tree], batch: int, context: int, spent: NDArray[np.float64]) -> list[LatencyPoint]:
    """Medians and quartiles of `spent`, seconds [repeats, sizes]."""
    quartiles = np.quantile(spent, _QUARTILES, axis=0).round(_DIGITS).T.tolist()
    return [
        LatencyPoint(tree.nodes, batch, context, seconds=median, low=low, high=high)
        for tree, (low, median, high) in zip(trees, quartiles, strict=True)
    ]


def _provenance(base: Base, loaded: LoadedHeads, repeats: int, drafter: Drafter | None) -> dict[str, object]:
    found = base.versions()
    chosen = {} if drafter is None else {"drafter": drafter.id}
    return {
        "made_by": f"treeopt {VERSION}",
        "model": base.name,
        "model_id": base.fingerprint,
        "heads": loaded.name,
        "heads_id": loaded.fingerprint,
        "device": found["device"],
        "dtype": base.dtype_name,
        "threads": torch.get_num_threads(),
        "attention": base.model.config._attn_implementation,
        "repeats": repeats,
        **chosen,
        "versions": {name: found[name] for name in ("python", "torch", "transformers")},
    }
