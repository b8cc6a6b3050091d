"""The policy record: a tree that is chosen anew at every step.

At a step the drafter estimates for every path of drafts how likely it is to be accepted, and the N likeliest nodes are
verified. So there is no set of paths to store: only how many nodes, and whose estimates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treeopt.errors import Code, TreeoptError
from treeopt.tree import Tree

STEP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 254)  # nodes that a step may have, with the root


@dataclass(frozen=True)
class PolicyExpected:
    """What a calibration expects of a policy, in tokens per step (the root counted).

    `replay` is what a decoder yields on the calibration's own text, `estimated` what the drafter itself gave its trees
    there, `nodes` the mean size of a step's tree; `low` to `high` where `replay` will lie on as many new prompts in
    nine cases of ten, None where there were too few texts.
    """

    replay: float
    estimated: float
    nodes: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class TreePolicy:
    """How the tree of each step is chosen.

    Args:
        nodes: most nodes of a step, the root counted; all of them at every step where there is no size_cost.
        depth: most drafts in a row.
        drafter: id of the drafter whose estimates choose.
        size_cost: pairs of nodes and what a step of that size costs, in tokens that the same time yields otherwise;
            each step takes the size whose estimated tokens exceed its cost most.
        expected: tokens per step by the calibration it was made from.
        source: where it comes from: made_by, calibration, profile; not compared.

    Raises:
        TreeoptError: E103 where a rule above is broken.
    """

    nodes: int
    depth: int
    drafter: str
    size_cost: tuple[tuple[int, float], ...] = ()
    expected: PolicyExpected | None = field(default=None, compare=False)
    source: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.size_cost]
        fault = ""
        if not self.drafter:
            fault = "no drafter, whose estimates choose the nodes"
        elif self.nodes < 2 or self.depth < 1 or self.nodes > STEP_SIZES[-1]:
            fault = f"{self.nodes} nodes, {self.depth} deep: from 2 to {STEP_SIZES[-1]} nodes, 1 deep or more"
        elif sizes and (sizes != sorted(set(sizes)) or sizes[-1] != self.nodes or not set(sizes) <= set(STEP_SIZES)):
            fault = f"size_cost of {sizes} nodes; ascending, some of {list(STEP_SIZES)}, the last {self.nodes}"
        elif not all(0 <= price < math.inf for _, price in self.size_cost):
            fault = "a price is no number from 0"
        if fault:
            why = "a policy says how many nodes each step takes, and whose estimates choose them"
            raise TreeoptError(Code.TREE_INVALID, f"not a policy: {fault}", why=why)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that a step may have."""
        return tuple(size for size, _ in self.size_cost) or (self.nodes,)


Plan = Tree | TreePolicy  # what is verified at every step: one tree, or one that is chosen
