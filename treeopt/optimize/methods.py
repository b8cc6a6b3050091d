"""Methods of estimating and growing a tree, and the candidates among them for given options."""

from __future__ import annotations

from dataclasses import dataclass

from treeopt.errors import check_choice

STRENGTHS = (64.0, 256.0, 1024.0)
VALUES = ("independent", "joint")
WEIGHTS = ("uniform", "visits")


@dataclass(frozen=True)
class Method:
    """How a tree is estimated and grown.

    `strength` is the weight of the prior of joint values, in observations; 0 for independent values.
    """

    values: str
    weights: str
    strength: float = 0.0
    refined: bool = False

    @property
    def is_medusa(self) -> bool:
        """Whether this method builds the Medusa tree."""
        return self.values == "independent" and self.weights == "uniform" and not self.refined

    def __str__(self) -> str:
        name = f"{self.values}, {self.weights}"
        name += f", strength {self.strength:g}" if self.strength else ""
        return f"{name}, refined" if self.refined else name


MEDUSA = Method("independent", "uniform")


def candidates(values: str, weights: str, *, refined: bool, exactly: bool = False) -> list[Method]:
    """The candidate methods for these options, the simplest first.

    The Medusa tree is the first candidate, unless `exactly` these values and weights are to be used. Joint values are
    candidates with each strength.

    Raises:
        ValueError: where values or weights are not of `VALUES` or `WEIGHTS`.
    """
    check_choice("values", values, VALUES)
    check_choice("weights", weights, WEIGHTS)
    if values == "joint":
        found = [Method(values, weights, strength) for strength in STRENGTHS]
    else:
        found = [Method(values, weights)]
    if not exactly and MEDUSA not in found:
        found = [MEDUSA, *found]
    if refined:
        found += [Method(m.values, m.weights, m.strength, refined=True) for m in found]
    return found
