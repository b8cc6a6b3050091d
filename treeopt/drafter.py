"""The drafter record: how the scores of draft tokens are corrected by the tokens before them.

Levels are counted as heads are: level h drafts token t+1+h. The score of token y at level h, after the text so far and
the drafts of the levels above, is

    head[h] * log p_h(y)  +  prior[h] * log U(y)  +  transition[h] * ratio(y | last tokens)  +  copied[h][m] where y
    followed the latest longest match, m tokens long, of the last tokens with the text before

with p_h the head's distribution, U and ratio those of `treeopt.transitions`. Levels beyond the heads have no p_h. The
softmax of these scores over a level's candidates, and `outside` for all others together, estimates the probability of
each; the level's `odds` map it to how often such a candidate came.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treeopt.errors import Code, TreeoptError
from treeopt.transitions import CONTEXT, Transitions

LONGEST = 12  # matches of so many tokens or more weigh alike
NO_CHANCE = -40.0  # log of a probability that is none
LEARN_TOKENS = 400_000  # drawn to learn from unless another number is asked for
PLAIN, CORRECTED = "plain", "corrected"  # drafters by name
KINDS = ("static", "dynamic")  # of trees: one for all steps, or one chosen per step


@dataclass(frozen=True)
class Level:
    """The fitted numbers of one level; see the module.

    Args:
        head, prior, transition: weights of the three logarithms.
        copied: `LONGEST` numbers, of matches of 1, 2, .. tokens; the last is that of longer ones too.
        outside: score of all tokens that are no candidates.
        odds: pairs of log-odds, estimated and found, both ascending; between them lines, beyond them level. None at all
            leaves estimates as they are.
    """

    head: float = 1.0
    prior: float = 0.0
    transition: float = 0.0
    copied: tuple[float, ...] = (0.0,) * LONGEST
    outside: float = NO_CHANCE
    odds: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Drafter:
    """Fitted numbers for every level, and the transitions that they weigh.

    Args:
        levels: one a level; at least as many as there are heads.
        num_heads: H.
        top: candidates that each level takes from its head: its likeliest tokens.
        window: how many of the last tokens are searched for matches, at least `CONTEXT`; 0 searches none.
        transitions: None for a drafter of plain head scores.
        source: where it comes from: model, heads, the text it learned from, versions.

    Raises:
        TreeoptError: E222 where a rule above is broken.
    """

    levels: tuple[Level, ...]
    num_heads: int
    top: int
    window: int = 0
    transitions: Transitions | None = None
    source: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fault = self._fault()
        if fault:
            raise TreeoptError(Code.DRAFTER_INVALID, f"not a drafter: {fault}")

    def _fault(self) -> str:
        if not 1 <= self.num_heads <= len(self.levels):
            return f"{len(self.levels)} levels for {self.num_heads} heads"
        if self.top < 1 or (self.window != 0 and self.window < CONTEXT):
            return f"{self.top} candidates of each head and a window of {self.window} tokens"
        if len(self.levels) > self.num_heads and self.transitions is None:
            return "levels beyond the heads need transitions"
        for number, level in enumerate(self.levels, start=1):
            pairs = [value for pair in level.odds for value in pair]
            numbers = (level.head, level.prior, level.transition, level.outside, *level.copied, *pairs)
            if len(level.copied) != LONGEST or not all(map(math.isfinite, numbers)):
                return f"level {number} holds what is no number, or not {LONGEST} copied"
            if any(a[0] >= b[0] or a[1] > b[1] for a, b in zip(level.odds, level.odds[1:], strict=False)):
                return f"the odds of level {number} do not ascend"
        return ""

    @classmethod
    def plain(cls, num_heads: int, top: int) -> Drafter:
        """No correction: drafts are those of the heads alone."""
        return cls((Level(),) * num_heads, num_heads, top)

    @property
    def depth(self) -> int:
        """Levels, and so the greatest depth of its trees."""
        return len(self.levels)

    @functools.cached_property
    def id(self) -> str:
        """Hash of all that decides which tokens are drafted; traces and trees name it."""
        settings = [self.num_heads, self.top, self.window, [dataclasses.astuple(level) for level in self.levels]]
        digest = hashlib.sha256(json.dumps(settings).encode())
        if self.transitions is not None:
            for name, array in sorted(self.transitions.arrays().items()):
                digest.update(name.encode() + array.tobytes())
        return digest.hexdigest()[:16]
