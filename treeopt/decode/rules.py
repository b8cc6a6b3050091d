"""The acceptance rules: greedy and sample are exact, typical is lossy.

A rule gets the base's logits after every node of every row, and returns the accepted node and the token after it.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from treeopt.drafting.interface import Drafts
from treeopt.models.logits import rows_at_once
from treeopt.sampling import check_seed, check_temperature

NOT_A_NUMBER = -1  # in place of a chosen token where scores are NaN; no draft equals it
_MANY = 1 << 17  # from this number of scores on, a CPU searches for the largest in two stages
_SCORED = 4  # top-p sorts tokens with their ids, which takes so much more memory than other functions over logits
EPSILON, DELTA = 0.09, 0.3  # the released defaults of typical acceptance
_SURE = 1 - 2**-20  # a draft with a probability that rounds to 1 is likely enough for any epsilon


def best(scores: Tensor) -> Tensor:
    """The first largest score of each row: float [..., V] -> int64 [...]; `NOT_A_NUMBER` where a row holds a NaN."""
    scores = scores.float() if scores.dtype is torch.float64 else scores  # as stock `generate`
    part = _part(scores.shape[-1]) if scores.device.type == "cpu" and scores.numel() >= _MANY else 0
    if not part:
        top = scores.max(-1)  # like argmax; several times faster in bfloat16 on a CPU, and propagates NaN
        return top.indices.masked_fill_(top.values.isnan(), NOT_A_NUMBER)
    # On a CPU the largest value takes a tenth of the time of its index, so the index is searched in one part only.
    parts = scores.float().reshape(*scores.shape[:-1], -1, part)  # [..., V / part, part]
    top = parts.amax(-1).max(-1)
    index = top.indices[..., None, None].expand(*top.indices.shape, 1, part)
    place = parts.gather(-2, index)[..., 0, :].max(-1).indices + top.indices * part
    return place.masked_fill_(top.values.isnan(), NOT_A_NUMBER)


@functools.cache
def _part(vocab: int) -> int:
    """The divisor of the vocabulary size from 32 to 512 that is nearest above its root, or below; 0 without any."""
    root, sizes = math.sqrt(vocab), [size for size in range(32, 513) if vocab % size == 0]
    return min(sizes, key=lambda size: (size < root, abs(size - root)), default=0)


def draw(
    logits: Tensor, generator: torch.Generator | None = None, score: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """One sample of each row's softmax: float [..., V] -> int64 [...]; `NOT_A_NUMBER` where a row holds a NaN.

    The argmax of p / e, with e exponentially distributed, is each token with its probability p, as in
    `torch.multinomial`, which raises an error for a NaN. `score` takes logits [n, V] to the scores that are sampled
    from, a few rows at a time.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    noise = torch.empty_like(rows, dtype=rows.dtype if score is None else torch.float32)
    noise.exponential_(generator=generator).clamp_min_(torch.finfo(noise.dtype).tiny)
    size = rows_at_once(rows.shape[-1], _SCORED)
    parts = zip(torch.split(rows, size), torch.split(noise, size), strict=True)
    found = [best((part if score is None else score(part)).softmax(-1).div_(of)) for part, of in parts]
    return torch.cat(found).view(logits.shape[:-1])


def greedy(drafts: Drafts, choice: Tensor) -> Tensor:
    """int64 [B]: the deepest node on whose path every draft equals the target's choice int64 [B, N] after its parent.

    Siblings have different tokens, unless void, so all such nodes are on one path. Nodes are sorted by depth: it is the
    last.
    """
    if drafts.tokens.shape[1] == 1:
        return drafts.tokens.new_zeros(len(choice))
    wrong = drafts.tokens != drafts.tree.at_parents(choice)
    if drafts.void is not None:
        wrong |= drafts.void
    return drafts.tree.last_without(wrong)


def typical(
    drafts: Drafts, logits: Tensor, *, temperature: float, epsilon: float = EPSILON, delta: float = DELTA
) -> Tensor:
    """int64 [B]: the end of the longest path of likely enough drafts (arXiv:2401.10774, section 2.3.1). LOSSY.

    A draft is accepted where p(draft) > min(epsilon, delta * exp(-H(p))), with p the base's distribution at
    `temperature` after its parent, by logits [B, N, V], and H the entropy of p in nats. The root is always accepted. Of
    equally long paths the likeliest is taken, of equally likely ones the first.
    """
    tree = drafts.tree
    likely, entropy = _likely(drafts, logits, temperature)
    threshold = (entropy.neg().exp() * delta).clamp_max(min(epsilon, _SURE))  # [B, N]
    wrong = ~(likely > tree.at_parents(threshold))
    refused = wrong if drafts.void is None else wrong | drafts.void
    length = (tree.along_paths(refused.float()) == 0) * (tree.position_ids + 1)  # a count, so exact
    longest = length == length.amax(-1, keepdim=True)
    steps = torch.where(wrong, 0.0, likely.log())  # paths with a wrong node are excluded; -inf * 0 would be NaN
    path = tree.along_paths(steps)  # log likelihood of each node's path
    return torch.where(longest, path, -torch.inf).argmax(-1)


def _likely(drafts: Drafts, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Each draft's probability after its parent, and the entropy after each node, float32 [B, N]; by a few nodes."""
    rows, parents = torch.arange(len(drafts.tokens), device=logits.device)[:, None], drafts.tree.parents
    likely = torch.zeros(drafts.tokens.shape, device=logits.device)
    entropies: list[Tensor] = []
    first = 0
    for part in torch.split(logits, rows_at_once(logits.shape[-1], len(logits)), dim=1):
        p = (part.float() / temperature).softmax(-1)
        entropies.append(torch.special.entr(p).sum(-1))
        end = first + part.shape[1]
        after = p[rows, (parents - first).clamp(0, part.shape[1] - 1), drafts.tokens]
        likely = torch.where((first <= parents) & (parents < end), after, likely)
        first = end
    return likely, torch.cat(entropies, dim=1)


class Rule(ABC):
    """An acceptance rule; by default it follows the drafts that equal its choice after every node, which is exact."""

    seed: int | None = None  # of the random draws of one text or batch; None uses torch's default generator

    @property
    def lossy(self) -> bool:
        """Whether the text, or its distribution, may differ from that of the base model alone."""
        return False

    @abstractmethod
    def choose(self, logits: Tensor, drafts: Drafts | None, generator: torch.Generator | None) -> Tensor:
        """One token a row, int64 [...]: logits are [B, N, V] after every node of drafts, or [B, V] at roots."""

    def first(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """The token after each prompt: float [B, V] -> int64 [B]."""
        return self.choose(logits, None, generator)

    def accept(self, drafts: Drafts, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The accepted node int64 [B], and the token that follows it int64 [B]; logits are [B, N, V]."""
        choice = self.choose(logits, drafts, generator)
        node = greedy(drafts, choice)
        return node, choice[:, 0] if choice.shape[1] == 1 else choice.gather(1, node[:, None])[:, 0]


@dataclass(frozen=True)
class Greedy(Rule):
    """The text of autoregressive greedy decoding: the base's most likely token after every node."""

    def choose(self, logits: Tensor, drafts: Drafts | None, generator: torch.Generator | None) -> Tensor:
        return best(logits)


@dataclass(frozen=True)
class Sample(Rule):
    """Text with the distribution of autoregressive sampling; at any temperature, top-k and top-p.

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
        whole = isinstance(self.top_k, Integral) and not isinstance(self.top_k, bool)
        if not whole or self.top_k < 0 or not 0 < self.top_p <= 1:
            wanted = "not a whole number from 0, and a number above 0 and at most 1"
            raise ValueError(f"top_k {self.top_k}, top_p {self.top_p}: {wanted}")
        if self.seed is not None:
            check_seed(self.seed)
            object.__setattr__(self, "seed", int(self.seed))  # torch does not take integers of numpy
        warpers = LogitsProcessorList()  # in the order of `generate`
        if self.temperature not in (0, 1):
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            warpers.append(TopKLogitsWarper(int(self.top_k)))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(float(self.top_p)))
        object.__setattr__(self, "_warpers", warpers)

    def choose(self, logits: Tensor, drafts: Drafts | None, generator: torch.Generator | None) -> Tensor:
        return best(logits) if self.temperature == 0 else draw(logits, generator, self.scores)

    def scores(self, logits: Tensor) -> Tensor:
        """Logits [..., V] after temperature, top-k and top-p, in float32; their softmax is sampled from."""
        rows = logits.float().flatten(0, -2)
        no_ids = rows.new_zeros(len(rows), 0, dtype=torch.long)  # these three use the scores alone
        scores: Tensor = self._warpers(no_ids, rows)
        return scores.view(logits.shape)


@dataclass(frozen=True)
class Typical(Rule):
    """Accept drafts that are likely enough (lossy); roots are the base's most likely tokens.

    Args:
        temperature: of the base's distribution; 0 is greedy, and exact.
        epsilon: upper bound of the probability that a draft needs.
        delta: factor of exp(-entropy); this product is what a draft needs where it is below epsilon.

    Raises:
        ValueError: unless 1e-6 <= temperature < infinity (or 0), 0 < epsilon <= 1, 0 < delta <= 1.
    """

    temperature: float = 0.7
    epsilon: float = EPSILON
    delta: float = DELTA

    def __post_init__(self) -> None:
        _check_numbers(epsilon=self.epsilon, delta=self.delta)
        check_temperature(self.temperature)
        if not (0 < self.epsilon <= 1 and 0 < self.delta <= 1):
            raise ValueError(f"epsilon {self.epsilon}, delta {self.delta}: both must be above 0 and at most 1")

    @property
    def lossy(self) -> bool:
        return self.temperature > 0

    def choose(self, logits: Tensor, drafts: Drafts | None, generator: torch.Generator | None) -> Tensor:
        return best(logits)

    def accept(self, drafts: Drafts, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        choice = best(logits)
        node = typical(drafts, logits, **vars(self)) if self.lossy else greedy(drafts, choice)
        return node, choice.gather(1, node[:, None])[:, 0]


def _check_numbers(**given: float) -> None:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError(f"{name} {value!r}: not a number")
