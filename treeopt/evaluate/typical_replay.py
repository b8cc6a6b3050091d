"""Replay of typical acceptance: the steps of a tree on texts that the typical rule decoded.

The rule accepts the longest path of drafts with p > min(epsilon, delta * exp(-H)), p and H the base's probability and
entropy at the draft's position; then comes the base's likeliest token. Let the texts be decoded by this rule.

- Their tokens are drafts that the rule accepted, and likeliest tokens. With delta < 1 a likeliest token passes too: its
  probability is at least exp(-H), which is above delta * exp(-H). So every node on the text is accepted.
- With the tree that decoded the texts, the token after an accepted path is none of its children, as the rule would have
  accepted it. So the accepted path is exactly the deepest node on the text, and replay equals the decoder's steps.
- Another tree accepts the path to its deepest node on the text, and may accept drafts that are not on it. The
  probabilities of their first tokens are traced, after the text; those of the tokens after these are not. So replay
  adds one level where a child of the deepest node is likely enough, and continues with the text as if it held that
  child. This is an approximation, because the text depends on the tree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.decode.rules import Typical
from treeopt.optimize.per_step import replay_policy, sizes_of, traced_steps
from treeopt.optimize.replay import Replay, deepest_nodes, replay, visits
from treeopt.policy import Plan
from treeopt.tree import Tree

# Probabilities are float16. A draft that the decoder rejected must not be accepted by rounding.
_ROUNDING = 1 + 2**-10

Bools = NDArray[np.bool_]


def typical_replay(tree: Plan, traces: Calibration, entropy: NDArray[np.float32], rule: Typical) -> Replay:
    """The steps of a tree or policy under typical acceptance.

    Args:
        tree: any tree or policy of the drafter of the traces.
        traces: of texts that the rule decoded with any tree; their target is the base at the rule's temperature.
            Drafts of ranks that were not traced are accepted where they are on the text.
        entropy: float32 [P], of the target at each position, in nats.
        rule: the rule.

    Raises:
        TreeoptError: as `replay` and `replay_policy`.
    """
    on_text = replay(tree, traces) if isinstance(tree, Tree) else replay_policy(tree, traces)
    accepted = on_text.accepted + _more(tree, traces, on_text, _acceptable(traces, entropy, rule))
    return Replay(accepted.astype(np.int8), visits(accepted), traces.offsets, on_text.depth)


def _acceptable(traces: Calibration, entropy: NDArray[np.float32], rule: Typical) -> Bools:
    """bool [P, H, R]: whether the candidate of rank r at level h of step i is likely enough, after g[i+h-1]."""
    assert traces.target is not None
    threshold = np.minimum(rule.epsilon, rule.delta * np.exp(-entropy.astype(np.float64))) * _ROUNDING  # [P]
    levels = traces.num_heads
    # Past the end of a text the probability is 0, whatever the threshold.
    at = np.minimum(np.arange(len(threshold))[:, None] + np.arange(1, levels + 1), len(threshold) - 1)
    found: Bools = traces.target.probability > threshold[at][:, :, None]
    return found


def _more(tree: Plan, traces: Calibration, on_text: Replay, acceptable: Bools) -> Bools:
    """bool [P]: whether a child of the deepest node on the text is likely enough; it is not on the text."""
    rows = np.arange(len(acceptable))
    depth = on_text.accepted.astype(np.int64)
    level = np.minimum(depth, traces.num_heads - 1)
    if isinstance(tree, Tree):
        children = np.zeros((tree.nodes, acceptable.shape[2]), np.bool_)  # [N, R]
        for node, path in enumerate(tree.paths, start=1):
            if path[-1] < acceptable.shape[2]:
                children[tree.parents[node], path[-1]] = True
        inside = children[deepest_nodes(tree, traces.ranks)]
    else:
        assert traces.target is not None
        assert traces.target.places is not None
        inside = traces.target.places[rows, level] < sizes_of(tree, traced_steps(traces))[:, None]
    found: Bools = (acceptable[rows, level] & inside).any(1) & (depth < on_text.depth)
    return found
