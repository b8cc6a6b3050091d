"""The one order of guesses: logit down, token id up. Calibration ranks by it, and the runtime drafts by it."""

from __future__ import annotations

import torch
from torch import Tensor

_CACHED_VALUES = 1 << 18  # logits compared at once on a CPU: they and the flags stay in its cache
_SPARE = 16  # tokens looked at beyond those asked for, lest the last of them ties with one not looked at
_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1


def rank_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Rank of one token in each row: #(z > z*) + #(z = z*, smaller id).

    Args:
        logits: float [n, V].
        ids: int64 [n], each in 0 .. V-1.

    Returns:
        int32 [n].
    """
    assert ids.shape == logits.shape[:1], f"{list(ids.shape)} ids for logits {list(logits.shape)}"
    if logits.device.type != "cpu":
        return _rank_rows(logits, ids)
    rows = max(1, _CACHED_VALUES // logits.shape[1])
    parts = zip(torch.split(logits, rows), torch.split(ids, rows), strict=True)
    return torch.cat([_rank_rows(*part) for part in parts])


def _rank_rows(logits: Tensor, ids: Tensor) -> Tensor:
    true = logits.gather(1, ids[:, None])  # [n, 1]
    # Comparing into floats and summing them is exact below 2^24 and, on a CPU, ten times faster than through booleans.
    flags = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    above = torch.gt(logits, true, out=flags).sum(-1).int()
    tied = (torch.eq(logits, true, out=flags).sum(-1) > 1).nonzero().flatten()
    if len(tied):
        before = torch.arange(logits.shape[1], device=logits.device) < ids[tied, None]
        above[tied] += ((logits[tied] == true[tied]) & before).sum(-1, dtype=torch.int32)
    return above


def top_ids(logits: Tensor, count: int) -> Tensor:
    """The `count` tokens of rank 0, 1, 2 ... in each row; `rank_of` gives their column back.

    `torch.topk` alone leaves the order of equal logits open. In general logit and id become one integer key without
    ties. A CPU, which need not be waited for, looks first: mostly no two of the largest are equal, or the equal ones
    are all among a few more, which are quickly put in order.

    Args:
        logits: float16, bfloat16 or float32 [..., V].
        count: 1 .. V.

    Returns:
        int64 [..., count].
    """
    if logits.device.type == "cpu" and count + _SPARE <= logits.shape[-1]:
        top = logits.topk(count + _SPARE, dim=-1)
        if not (top.values[..., 1 : count + 1] == top.values[..., :count]).any():
            return top.indices[..., :count]
        if (top.values[..., count - 1] > top.values[..., -1]).all():
            ids, order = top.indices.sort(-1)
            order = top.values.gather(-1, order).sort(stable=True, dim=-1, descending=True).indices
            return ids.gather(-1, order)[..., :count]
    bits = (logits.float() + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, which it equals
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers these compare as the floats do
    ids = torch.arange(logits.shape[-1], device=logits.device)
    key = (ordered.long() << _ID_BITS) + (_ID_MASK - ids)
    return _ID_MASK - (key.topk(count, dim=-1).values & _ID_MASK)
