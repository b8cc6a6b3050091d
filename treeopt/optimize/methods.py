"""Methods: the ways to estimate and grow a tree, and which of them compete for a wish."""

from __future__ import annotations

from dataclasses import dataclass

STRENGTHS = (64.0, 256.0, 1024.0)
VALUES = ("independent", "joint")
WEIGHTS = ("uniform", "visits")


@dataclass(frozen=True)
class Method:
    """How a tree is estimated and grown.

    `strength` is the back-off of joint values (observations a prior is worth; 0 for independent values).
    """

    values: str
    weights: str
    strength: float = 0.0
    refined: bool = False

    @property
    def is_paper(self) -> bool:
        """Whether this is the paper's method."""
        return self.values == "independent" and self.weights == "uniform" and not self.refined

    def __str__(self) -> str:
        name = f"{self.values}, {self.weights}"
        name += f", strength {self.strength:g}" if self.strength else ""
        return f"{name}, refined" if self.refined else name


MEDUSA = Method("independent", "uniform")


def candidates(values: str, weights: str, *, refined: bool, exactly: bool = False) -> list[Method]:
    """The methods that compete for these wishes, from the simplest on.

    The paper's is the first of them, unless exactly these values and weights are wanted; then joint values compete by
    their strength alone.
    """
    if values == "joint":
        found = [Method(values, weights, strength) for strength in STRENGTHS]
    else:
        found = [Method(values, weights)]
    if not exactly and MEDUSA not in found:
        found = [MEDUSA, *found]
    if refined:
        found += [Method(m.values, m.weights, m.strength, refined=True) for m in found]
    return found
