"""Trees as engines make them: EAGLE-2's (arXiv:2406.16858) of drafters that run level by level, DDTree's of blocks.

At each level the k likeliest nodes of the level become parents, by the product of the drafter's own probabilities, and
each of them has k children; of all nodes the N - 1 likeliest are verified. Depth and k are the best of a grid, by
replay over the texts that other methods learn from.

DDTree's trees are the N - 1 likeliest nodes by the product of a block drafter's own probabilities, which know nothing
of the drafts above a node, or only the token above where a head of the block reads it.
"""

from collections.abc import Sequence

import numpy as np

from treeopt.calibrate.pipeline import as_calibration
from treeopt.calibration import Calibration, Provenance
from treeopt.defaults import BLOCK
from treeopt.drafter import Drafter
from treeopt.drafting.block import BlockProposer
from treeopt.drafting.model import ModelProposer
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import TextTraces, trace_texts
from treeopt.models.base import Base
from treeopt.models.draft_module import kind_of, most_levels
from treeopt.optimize.per_step import build_policy, replay_policy
from treeopt.policy import TreePolicy
from treeopt.progress import Progress
from treeopt.texts.encode import Text
from treeopt.traces import MAX_RANKS

# Of the grid; published: depths 5 to 7, k 8 and 10. Ours are up to 8 deep, and a tree with k = 1 is a chain.
DEPTHS, TOP_KS = (4, 6, 8), (1, 2, 3, 4, 8, 10)
_BATCH = 4  # texts of a forward
_KNOWN = 256  # tokens of a node whose probabilities are normalised; at deep levels of a block others have some


def eagle2_drafter(base: Base, draft: Base, depth: int, top_k: int) -> ModelProposer:
    """The drafter whose per-step trees are EAGLE-2's."""
    known = min(_KNOWN, draft.vocab_size)
    record = Drafter.model_only(depth, known, draft.fingerprint, kind_of(draft.model))
    proposer = proposer_for(base, None, record, draft)
    assert isinstance(proposer, ModelProposer)
    proposer.beam = top_k
    return proposer


def ddtree_drafter(base: Base, draft: Base, known: int = _KNOWN) -> BlockProposer | ModelProposer:
    """The drafter whose per-step trees are DDTree's; probabilities that depend on the token above are taken as such."""
    known = min(known, draft.vocab_size)
    record = Drafter.model_only(most_levels(draft.model), known, draft.fingerprint, BLOCK)
    proposer = proposer_for(base, None, record, draft)
    assert isinstance(proposer, (BlockProposer, ModelProposer))
    return proposer


def per_step_traces(base: Base, proposer: ModelProposer | BlockProposer, texts: Sequence[Text]) -> Calibration:
    """Traces of a drafter's per-step trees of any size on texts."""
    traced: list[TextTraces] = []
    for start in range(0, len(texts), _BATCH):
        part = texts[start : start + _BATCH]
        traced += trace_texts(
            base, [proposer] * len(part), part, min(MAX_RANKS, base.vocab_size), step_depth=proposer.depth
        )
    provenance = Provenance("", "", "", "", {}, drafter_id=proposer.drafter.id)
    return as_calibration(texts, traced, MAX_RANKS, provenance)


def tokens_per_step(traces: Calibration, nodes: int) -> float:
    """Of trees of N nodes, by replay."""
    return replay_policy(build_policy(traces, nodes), traces).tokens_per_step


def best_eagle2(
    base: Base, draft: Base, texts: Sequence[Text], nodes: int, progress: Progress
) -> tuple[ModelProposer, TreePolicy, str]:
    """The drafter and policy of the best depth and k of the grid, and their numbers."""
    grid = [(depth, top_k) for depth in DEPTHS for top_k in TOP_KS]
    found = []
    for number, (depth, top_k) in enumerate(grid):
        traces = per_step_traces(base, eagle2_drafter(base, draft, depth, top_k), texts)
        found.append(tokens_per_step(traces, nodes))
        progress(number + 1, len(grid), f"depth {depth}, top-k {top_k}: {found[-1]:.3f} tokens per step")
    depth, top_k = grid[int(np.argmax(found))]
    drafter = eagle2_drafter(base, draft, depth, top_k)
    return drafter, TreePolicy(nodes, depth, drafter.drafter.id), f"depth {depth}, top-k {top_k}"
