"""The acceptance rules: greedy and sample are exact, typical is lossy.

A rule gets the base's logits after every node, and returns the accepted node and the token after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from treeopt.decode import accept
from treeopt.drafting.interface import Drafts
from treeopt.sampling import check_seed, check_temperature

Score = Callable[[Tensor], Tensor]


@runtime_checkable
class Rule(Protocol):
    """The interface of an acceptance rule."""

    @property
    def lossy(self) -> bool:
        """Whether the text, or its distribution, may differ from that of the base model alone."""

    @property
    def seed(self) -> int | None:
        """Seed of the random draws of one text or batch; None uses torch's default generator."""

    def first(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """The token after each prompt: float [B, V] -> int64 [B]."""

    def accept(self, drafts: Drafts, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The accepted node int64 [B], and the token that follows it int64 [B].

        Args:
            drafts: the trees of all rows.
            logits: float [B, N, V], the base's logits after each node.
            generator: of random draws.
        """


class Exact(ABC):
    """A rule that chooses one token after every node, and follows the drafts that equal the choice."""

    lossy: ClassVar[bool] = False
    seed: int | None = None

    @abstractmethod
    def choose(self, logits: Tensor, drafts: Drafts | None, generator: torch.Generator | None) -> Tensor:
        """One token a row: float [..., V] -> int64 [...].

        Args:
            logits: float [B, N, V] after every node, or [B, V] at roots.
            drafts: the trees of all rows; None at roots.
            generator: of random draws.
        """

    def first(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        return self.choose(logits, None, generator)

    def accept(self, drafts: Drafts, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        choice = self.choose(logits, drafts, generator)
        node = accept.greedy(drafts, choice)
        return node, choice[:, 0] if choice.shape[1] == 1 else choice.gather(1, node[:, None])[:, 0]


@dataclass(frozen=True)
class Greedy(Exact):
    """The base's most likely token after every node: the text of autoregressive greedy decoding."""

    def choose(self, logits: Tensor, drafts: Drafts | None, generator: torch.Generator | None) -> Tensor:
        return accept.best(logits)


@dataclass(frozen=True)
class Sample(Exact):
    """Text with the distribution of autoregressive sampling, at any temperature, top-k and top-p.

    One token is drawn after every node, for all paths through it, and the draft that equals it is accepted. Drafts do
    not depend on the draws, so each emitted token is one sample of the target distribution at its position.

    Args:
        temperature: of the base's distribution; 0 is greedy.
        top_k: number of the likeliest tokens that are sampled from; 0 is all.
        top_p: probability of the likeliest tokens that are sampled from; 1 is all.
        seed: equal seeds give equal texts on one machine; None uses torch's default generator.

    Raises:
        ValueError: unless 1e-6 <= temperature < infinity (or 0), 0 <= top_k, 0 < top_p <= 1, 0 <= seed < 2^63.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    _warpers: LogitsProcessorList = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        _check_numbers(top_p=self.top_p)
        if not _whole(self.top_k) or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_k {self.top_k}, top_p {self.top_p}: not a whole number from 0, and a number above 0 and at most 1"
            )
        if self.seed is not None:
            check_seed(self.seed)
        # torch does not take integers of numpy.
        object.__setattr__(self, "seed", None if self.seed is None else int(self.seed))
        warpers = LogitsProcessorList()  # in the order of `generate`
        if self.temperature not in (0, 1):
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            warpers.append(TopKLogitsWarper(int(self.top_k)))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(float(self.top_p)))
        object.__setattr__(self, "_warpers", warpers)

    def choose(self, logits: Tensor, drafts: Drafts | None, generator: torch.Generator | None) -> Tensor:
        if self.temperature == 0:
            return accept.best(logits)
        return accept.draw(logits, generator, self.scores)

    def scores(self, logits: Tensor) -> Tensor:
        """Logits [..., V] after temperature, top-k and top-p, in float32; their softmax is sampled from."""
        rows = logits.float().flatten(0, -2)
        no_ids = rows.new_zeros(len(rows), 0, dtype=torch.long)  # these three use the scores alone
        scores: Tensor = self._warpers(no_ids, rows)
        return scores.view(logits.shape)


@dataclass(frozen=True)
class Typical:
    """Accept drafts that are likely enough (`accept.typical`); roots are the base's most likely tokens. LOSSY.

    Args:
        temperature: of the base's distribution; 0 is greedy, and exact.
        epsilon: upper bound of the probability that a draft needs.
        delta: factor of exp(-entropy); this product is what a draft needs where it is below epsilon.

    Raises:
        ValueError: unless 1e-6 <= temperature < infinity (or 0), 0 < epsilon <= 1, 0 < delta <= 1.
    """

    temperature: float = 0.7
    epsilon: float = accept.EPSILON
    delta: float = accept.DELTA
    seed: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        _check_numbers(epsilon=self.epsilon, delta=self.delta)
        check_temperature(self.temperature)
        if not (0 < self.epsilon <= 1 and 0 < self.delta <= 1):
            raise ValueError(f"epsilon {self.epsilon}, delta {self.delta}: both must be above 0 and at most 1")

    @property
    def lossy(self) -> bool:
        return self.temperature > 0

    def first(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        return accept.best(logits)

    def accept(self, drafts: Drafts, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        choice = accept.best(logits)
        if self.temperature == 0:
            node = accept.greedy(drafts, choice)
        else:
            node = accept.typical(drafts, logits, temperature=self.temperature, epsilon=self.epsilon, delta=self.delta)
        return node, choice.gather(1, node[:, None])[:, 0]


def _check_numbers(**given: float) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"{name} {value!r}: not a number")


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
