"""The policy record: how the tree of each step is chosen.

At each step the drafter estimates the probability that a path of drafts is accepted, and the N most likely nodes are
verified, or the best tree of at most N path tokens. So a policy has no paths, only this number and the drafter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from treeopt.defaults import MAX_NODES, NODES, PATH_TOKENS, STEP_SIZES
from treeopt.errors import Code, TreeoptError
from treeopt.tree import Tree


@dataclass(frozen=True)
class PolicyExpected:
    """Expected tokens per step (root counted) of a policy, by its calibration.

    `replay` is the figure of a decoder on the calibration's texts, `estimated` the mean of the drafter's estimates,
    `nodes` the mean size of a step's tree; `low` to `high` is the 90 % prediction interval of `replay` on as many new
    prompts, None where there were too few texts.
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
        nodes: the largest size of a step, root counted; the size of every step where `size_cost` is empty. A budget of
            path tokens allows at most as many nodes.
        depth: levels of drafts.
        drafter: id of the drafter whose estimates choose the nodes.
        size_cost: pairs of a size and the cost of its step, in tokens that are decoded in the same time; each step
            takes the size with the greatest estimated tokens - cost.
        expected: tokens per step by the calibration it was made from.
        source: made_by, calibration and the drafter's file; not compared.
        path_tokens: whether sizes are budgets of path tokens, leaves * (depth + 1), for models that verify the paths of
            a tree as a batch.

    Raises:
        TreeoptError: E103 where a rule above is broken.
    """

    nodes: int
    depth: int
    drafter: str
    size_cost: tuple[tuple[int, float], ...] = ()
    expected: PolicyExpected | None = field(default=None, compare=False)
    source: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    path_tokens: bool = False

    def __post_init__(self) -> None:
        sizes, given, fault = [size for size, _ in self.size_cost], (self.nodes, self.depth), ""
        whole = all(isinstance(one, Integral) and not isinstance(one, bool) for one in given)
        if not self.drafter:
            fault = "no drafter, whose estimates choose the nodes"
        elif not (whole and 2 <= self.nodes <= STEP_SIZES[-1] and 1 <= self.depth <= MAX_NODES):
            shown = f"{self.nodes!r:.20} {self.unit}, {self.depth!r:.20} deep"
            fault = f"{shown}: integers, from 2 to {STEP_SIZES[-1]} and from 1 to {MAX_NODES}"
        elif sizes and (sizes != sorted(set(sizes)) or sizes[-1] != self.nodes or not set(sizes) <= set(STEP_SIZES)):
            fault = f"size_cost of {sizes} nodes; ascending, some of {list(STEP_SIZES)}, the last {self.nodes}"
        elif self.path_tokens and self.nodes not in STEP_SIZES:
            fault = f"{self.nodes} path tokens; one of {list(STEP_SIZES[1:])}, whose trees are traced"
        elif not all(0 <= cost < math.inf for _, cost in self.size_cost):
            fault = "a cost is negative or not finite"
        if fault:
            why = "a policy has the number of nodes of each step, and the drafter whose estimates choose them"
            raise TreeoptError(Code.TREE_INVALID, f"not a policy: {fault}", why=why, fix="numbers within these limits")
        object.__setattr__(self, "nodes", int(self.nodes))  # files and ids take no integers of numpy
        object.__setattr__(self, "depth", int(self.depth))

    @property
    def unit(self) -> str:
        """What `nodes` and the sizes are."""
        return PATH_TOKENS if self.path_tokens else NODES

    @property
    def chosen(self) -> str:
        """What a step verifies, in words."""
        by = ", by estimated tokens and cost" if self.size_cost else ""
        if self.path_tokens:
            return f"the best tree of at most {self.nodes} path tokens{by}"
        return f"{'at most ' if self.size_cost else ''}the {self.nodes} most likely nodes (root counted){by}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that a step may have."""
        return tuple(size for size, _ in self.size_cost) or (self.nodes,)


Plan = Tree | TreePolicy  # one tree for all steps, or one for each step
