"""Divergence: why two greedy texts of one model differ, decided by a float64 forward at the first difference.

Greedy decoding takes the largest logit. Where two logits are closer than rounding can tell apart, two correct
computations (a token at a time, a tree at once) may choose different tokens. The cause is measured:

    tie        in float64 both tokens have the largest logit: each text is a greedy text
    rounding   in float64 they differ, by less than the error of the run's dtype in such a gap at this position
    bug        a gap that rounding does not explain: the decoder, not the arithmetic, chose the token
    undecided  the float64 copy cannot be made or run on this machine (memory, quantised weights)
    unjudged   not computed, because a float64 forward of a large model takes long
"""

import contextlib
import copy
import dataclasses
import enum
import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_submodules
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treeopt.models.base import Base
from treeopt.models.devices import weight_of
from treeopt.texts.encode import Text
from treeopt.texts.prompts import row_of

ENDED = -1  # in place of a token, where a text had already ended
# The resolution is the largest error of three computations; those of the two texts are others, with larger errors.
_MARGIN = 2.0
_HALF = ("bfloat16", "float16")
_SHOWN = 5  # differences in a message


class Cause(enum.Enum):
    TIE = "tie"
    ROUNDING = "rounding"
    BUG = "bug"
    UNDECIDED = "undecided"
    UNJUDGED = "unjudged"


@dataclass(frozen=True)
class Difference:
    """The first difference between a text and that of stock greedy `generate`.

    The gap is NaN where a text had ended, or nothing was computed, and the resolution with it.
    """

    prompt_id: str
    decoder: str  # of the text: `tree`, `autoregressive` or `prompt lookup`
    position: int  # index among the new tokens
    greedy_token: int  # of stock generate; `ENDED` where it had ended
    found_token: int  # of the other text; `ENDED` where it had ended
    cause: Cause
    gap: float  # in float64, the largest logit minus the smaller one of the two tokens: the top-2 gap if one is largest
    resolution: float  # the largest error of the run's dtype in the gap between one of the two and any token here

    def text(self, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
        """`row 3, token 12: greedy 5 'a', tree 7 'b', gap 0.1, resolution 0.2: rounding`."""
        greedy, found = (_named(token, tokenizer) for token in (self.greedy_token, self.found_token))
        gap = "" if math.isnan(self.gap) else f", gap {self.gap:.2g}, resolution {self.resolution:.2g}"
        place = f"{row_of(self.prompt_id)}, token {self.position}"
        return f"{place}: greedy {greedy}, {self.decoder} {found}{gap}: {self.cause.value}"


def _named(token: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    if token == ENDED:
        return "had ended"
    return f"{token}" if tokenizer is None else f"{token} {tokenizer.convert_ids_to_tokens(token)!r}"


def listed(differences: Sequence[Difference], tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """The first ones, a line each."""
    lines, more = [one.text(tokenizer) for one in differences[:_SHOWN]], len(differences) - _SHOWN
    return "\n".join([*lines, f"and {more} more; --json lists all"] if more > 0 else lines)


def counted_causes(differences: Sequence[Difference]) -> str:
    """`2 rounding, 1 bug`."""
    return ", ".join(f"{n} {name}" for name, n in Counter(one.cause.value for one in differences).items())


def tolerated(difference: Difference, dtype: str) -> bool:
    """Whether a difference does not count as a failure in a run's dtype (`float32`, `bfloat16`, ...).

    A tie is tolerated: both are greedy texts. Rounding is tolerated in half precision, where stock `generate` itself
    gives another text in another batch, and so are unjudged differences; in float32, which proves a decoder correct,
    they are failures.
    """
    allowed_in_half = (Cause.ROUNDING, Cause.UNJUDGED)
    return difference.cause is Cause.TIE or (difference.cause in allowed_in_half and dtype in _HALF)


def first_difference(text: Text, decoder: str, found: Sequence[int]) -> Difference:
    """The first difference between `found` and the answer of stock generate, not judged yet.

    Where only one of the texts has ended there are no two logits to compare, and the cause is a bug.
    """
    greedy = text.answer
    assert list(greedy) != list(found), "the texts are the same"
    at = num_common(greedy, found)
    one, other = (tokens[at] if at < len(tokens) else ENDED for tokens in (greedy, found))
    cause = Cause.BUG if ENDED in (one, other) else Cause.UNJUDGED
    return Difference(text.prompt_id, decoder, at, one, other, cause, math.nan, math.nan)


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens before the first difference."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


class Judge:
    """Finds the causes of differences between texts of one model, whose trees have at most `width` nodes."""

    def __init__(self, base: Base, width: int) -> None:
        self._base, self._width = base, width

    @torch.inference_mode()
    def decide(self, difference: Difference, text: Text) -> Difference:
        """A copy of an unjudged difference of a text of our loop with its cause."""
        if difference.cause is not Cause.UNJUDGED:
            return difference
        tokens = [difference.greedy_token, difference.found_token]
        prefix = torch.tensor([*text.prompt, *text.answer[: difference.position]])
        exact = self._exact_logits(prefix)
        if exact is None:
            return dataclasses.replace(difference, cause=Cause.UNDECIDED)
        gap = float(exact.max() - exact[tokens].min())
        # The largest error of a gap between one of the two and any token; one that all logits share does not count
        errors = self._run_logits(prefix) - exact  # [3, V]
        resolution = float(max((errors - errors[:, [token]]).abs().max() for token in tokens))
        # Rounding error of a float64 dot product of length d, far below the resolution of the run's dtype.
        tie = self._base.hidden_size * torch.finfo(torch.float64).eps * float(exact.abs().max())
        rounding = Cause.ROUNDING if gap <= _MARGIN * resolution else Cause.BUG
        cause = Cause.TIE if gap <= tie else rounding
        return dataclasses.replace(difference, cause=cause, gap=gap, resolution=resolution)

    @functools.cached_property
    def _exact(self) -> PreTrainedModel | None:
        """The model in float64 on the CPU; None where it cannot be made."""
        with contextlib.suppress(Exception):  # too little memory, or weights that cannot be cast: many types
            return _in_float64(self._base.model)
        return None

    def _exact_logits(self, prefix: Tensor) -> Tensor | None:
        """float64 [V] after `prefix`, by one forward without a cache; None where it cannot be computed."""
        if self._exact is None:
            return None
        with _Float64(), contextlib.suppress(RuntimeError, MemoryError):
            logits: Tensor = self._exact(prefix[None], use_cache=False, logits_to_keep=1).logits
            return logits[0, -1].double()
        return None

    def _run_logits(self, prefix: Tensor) -> Tensor:
        """float64 [3, V] in the run's dtype: all tokens at once; the last alone; the last in a block of tree size."""
        ids = prefix.to(self._base.device)
        rows = [self._base.forward(ids[None], use_cache=False, logits_to_keep=1)[0][0, -1]]
        for width in (1, max(1, min(self._width, self._base.context - len(ids) + 1))):
            if len(ids) < 2:
                break
            _, _, cache = self._base.continued(ids[None, :-1], logits_to_keep=1)
            rows.append(self._base.continued(ids[-1:].expand(width)[None], cache)[0][0, 0])
        return torch.stack(rows).double().cpu()


def _in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy on the CPU. Each tensor is moved there before it is cast, so that no memory of the device is needed."""
    copies: dict[str, Tensor] = {}
    first: dict[int, str] = {}  # names of tensors, of which other names may share one
    for name in [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]:
        tensor = operator.attrgetter(name)(model)
        if tensor.is_meta or first.setdefault(id(tensor), name) == name:
            moved = weight_of(model, name).detach().cpu()
            copies[name] = moved.to(torch.float64 if moved.is_floating_point() else moved.dtype, copy=True)
    # Loading an offloaded weight replaces all tensors of its module, so their ids are read when all are loaded.
    memo: dict[int, Any] = {}  # copies that deepcopy takes as already made
    for name, double in copies.items():
        tensor = operator.attrgetter(name)(model)
        if id(tensor) not in memo:
            memo[id(tensor)] = nn.Parameter(double, requires_grad=False) if isinstance(tensor, nn.Parameter) else double
    exact: PreTrainedModel = copy.deepcopy(model, memo)
    remove_hook_from_submodules(exact)  # those of `device_map` move inputs to its devices
    if isinstance(exact, PreTrainedModel):
        exact.set_experts_implementation("eager")  # the grouped products of mixtures of experts have no float64
    return exact.to("cpu", torch.float64)


class _Float64(TorchFunctionMode):
    """Casts to float32 are casts to float64: stock models compute norms, softmax and rotary angles in float32."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        wide = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return (Tensor.double if func is Tensor.float else func)(*map(_widened, args), **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@torch.inference_mode()
def gaps_of(base: Base, name: str, differing: Iterable[tuple[Text, Sequence[int]]]) -> Iterator[float]:
    """The difference of the logits of the two tokens where each text first differs, where neither has ended."""
    for text, tokens in differing:
        found = first_difference(text, name, tokens)
        if ENDED not in (found.greedy_token, found.found_token):
            prefix = torch.tensor([[*text.prompt, *text.answer[: found.position]]], device=base.device)
            logits = base.forward(prefix, use_cache=False, logits_to_keep=1)[0][0, -1].float()
            yield abs(float(logits[found.greedy_token] - logits[found.found_token]))
