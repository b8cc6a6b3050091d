"""Verdict: why two greedy texts of one model part, decided by computing that position in float64.

Greedy decoding takes the largest logit. Where two logits lie closer than rounding can tell apart, two right ways of
computing them (a token at a time, a tree at once) may choose differently. Whether that is what happened is measured:

    tie        in float64 both tokens have the largest logit: each text is a greedy text
    rounding   in float64 they differ, by less than the run's dtype gets wrong in such a gap at this very position
    bug        a gap that rounding does not explain: the decoder, not the arithmetic, chose the token
    undecided  the float64 copy cannot be made or run here (memory, quantised weights)
    unjudged   nobody has asked: a float64 forward takes long where a model is large
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_submodules
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel

from treeopt.models.base import Base
from treeopt.texts.encode import Text

ENDED = -1  # stands for a token where a text had already ended
# The resolution is the worst of three ways of computing; the two that parted are others, and may do somewhat worse.
_MARGIN = 2.0
_HALF = ("bfloat16", "float16")


class Verdict(enum.Enum):
    """What made two texts part."""

    TIE = "tie"
    ROUNDING = "rounding"
    BUG = "bug"
    UNDECIDED = "undecided"
    UNJUDGED = "unjudged"


@dataclass(frozen=True)
class Difference:
    """The first place where a text parts from that of stock greedy `generate`.

    Args:
        prompt_id: whose text.
        way: which text: `tree`, `one by one`, ...
        position: index among the new tokens.
        greedy_token: stock generate's; `ENDED` where it had ended.
        found_token: the other text's; `ENDED` where it had ended.
        verdict: why.
        gap: in float64, the largest logit minus the lesser of the two tokens': the top-2 gap where stock chose the
            largest. Not a number where a text had ended, or nothing was computed.
        resolution: the largest error of the run's dtype in the gap between one of the two and any third token here.
            Not a number where the gap is not.
    """

    prompt_id: str
    way: str
    position: int
    greedy_token: int
    found_token: int
    verdict: Verdict
    gap: float
    resolution: float


def forgiven(difference: Difference, dtype: str) -> bool:
    """Whether a difference leaves decoding as good as lossless in a run's dtype (`float32`, `bfloat16`, ...).

    A tie always does: both are greedy texts. Rounding does in bfloat16 and float16, where stock `generate` itself
    parts from its own text when it is batched or padded differently; in float32 it does not, because there texts agree
    in practice, and float32 is what proves a decoder right. For the same reason an unjudged difference is forgiven in
    half precision, which proves nothing in any case, and never in float32.
    """
    open_in_half = (Verdict.ROUNDING, Verdict.UNJUDGED)
    return difference.verdict is Verdict.TIE or (difference.verdict in open_in_half and dtype in _HALF)


def first_difference(text: Text, way: str, found: Sequence[int]) -> Difference:
    """Where `found`, made by `way`, parts from the answer of stock generate; they differ. It is not judged yet.

    Where one has ended and the other goes on there are no two logits to compare: that is a bug at once.
    """
    greedy = text.answer
    assert list(greedy) != list(found), "the texts are the same"
    shared = min(len(greedy), len(found))
    at = next((i for i in range(shared) if greedy[i] != found[i]), shared)
    one, other = (tokens[at] if at < len(tokens) else ENDED for tokens in (greedy, found))
    verdict = Verdict.BUG if ENDED in (one, other) else Verdict.UNJUDGED
    return Difference(text.prompt_id, way, at, one, other, verdict, math.nan, math.nan)


class Judge:
    """Decides why texts of one model part; makes the float64 copy when first asked.

    Args:
        base: the model that decoded.
        width: tokens of one verification, N of the tree: how wide the forwards were that may have rounded.
    """

    def __init__(self, base: Base, width: int) -> None:
        self._base = base
        self._width = width

    @torch.inference_mode()
    def decide(self, difference: Difference, text: Text) -> Difference:
        """Why a text parts from stock generate's: an unjudged difference of `text`, prompt and stock's answer."""
        if difference.verdict is not Verdict.UNJUDGED:
            return difference
        one, other = difference.greedy_token, difference.found_token
        prefix = torch.tensor([*text.prompt, *text.answer[: difference.position]])
        exact = self._exact_logits(prefix)
        if exact is None:
            return dataclasses.replace(difference, verdict=Verdict.UNDECIDED)
        gap = float(exact.max() - torch.minimum(exact[one], exact[other]))
        resolution = self._resolution(prefix, exact, (one, other))
        # Rounding of a float64 dot product of length d, far below anything that a dtype of a run can tell apart.
        tie = self._base.hidden_size * torch.finfo(torch.float64).eps * float(exact.abs().max())
        rounding = Verdict.ROUNDING if gap <= _MARGIN * resolution else Verdict.BUG
        verdict = Verdict.TIE if gap <= tie else rounding
        return dataclasses.replace(difference, verdict=verdict, gap=gap, resolution=resolution)

    @functools.cached_property
    def _exact(self) -> PreTrainedModel | None:
        """The model in float64 on the CPU; None where it cannot be had."""
        with contextlib.suppress(Exception):  # no room, weights that cannot be cast: many kinds for one fact
            return _in_float64(self._base.model)
        return None

    def _exact_logits(self, prefix: Tensor) -> Tensor | None:
        """float64 [V] after `prefix` (int64 [T]), by one plain forward without a cache; None where it cannot be had."""
        if self._exact is None:
            return None
        with _Float64(), contextlib.suppress(RuntimeError, MemoryError):
            logits: Tensor = self._exact(prefix[None], use_cache=False, logits_to_keep=1).logits
            return logits[0, -1].double()
        return None

    def _resolution(self, prefix: Tensor, exact: Tensor, tokens: tuple[int, int]) -> float:
        """The largest error, over all ways of computing in the run's dtype, in a gap between one of `tokens` and any.

        The gap and not the logit counts: an error that all logits share changes no choice.
        """
        errors = self._run_logits(prefix) - exact  # [ways, V]
        return float(max((errors - errors[:, [token]]).abs().max() for token in tokens))

    def _run_logits(self, prefix: Tensor) -> Tensor:
        """float64 [3, V] after `prefix`, in the run's dtype: all at once, the last token alone, the last of a block.

        A block is as wide as the tree, so its matrix products are those of a verification; what follows the token in
        it is not seen by it.
        """
        ids = prefix.to(self._base.device)
        rows = [self._base.forward(ids[None], use_cache=False, logits_to_keep=1)[0][0, -1]]
        for width in (1, max(1, min(self._width, self._base.context - len(ids) + 1))):
            if len(ids) < 2:
                break
            cache = DynamicCache(config=self._base.model.config)
            self._base.forward(ids[None, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            block = ids[-1:].expand(width)
            rows.append(self._base.forward(block[None], past_key_values=cache, use_cache=True)[0][0, 0])
        return torch.stack(rows).double().cpu()


def _in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy on the CPU. Tensors are moved there one by one before they are cast: the device holds nothing more."""
    memo: dict[int, Any] = {}  # what deepcopy takes for a copy that it has made already
    for tensor in (*model.parameters(), *model.buffers()):
        moved = tensor.detach().cpu()
        moved = moved.to(torch.float64 if moved.is_floating_point() else moved.dtype, copy=True)
        memo[id(tensor)] = nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved
    copied: PreTrainedModel = copy.deepcopy(model, memo)
    remove_hook_from_submodules(copied)  # those of `device_map` would send its inputs elsewhere
    return copied.to("cpu", torch.float64)


class _Float64(TorchFunctionMode):
    """Within it, what asks for float32 gets float64.

    Stock models drop to float32 for norms, softmax and rotary angles whatever their own dtype is; a float64 copy alone
    would be no more exact there than the run that it judges.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        wide = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
