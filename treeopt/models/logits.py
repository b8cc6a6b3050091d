"""Logits: how many are in memory at once, and the order of tokens by logit (descending) and id (ascending)."""

import torch
from torch import Tensor

LOGITS_BYTES = 64 * 1024 * 1024  # of logits at once, in float32; with the temporary arrays of a function up to 256 MiB
_FLOAT32 = 4


def rows_at_once(vocab_size: int, levels: int = 1) -> int:
    """The number of positions whose float32 logits, of so many levels each, are in memory at once; at least 1."""
    return max(1, LOGITS_BYTES // (max(1, levels) * vocab_size * _FLOAT32))


_CACHED_VALUES = 1 << 18  # logits compared at once on a CPU: with the flags they fit into its cache
_SPARE = 16  # additional tokens that are sorted, as the last one may be tied with others
_KEY_COPIES = 8  # the keys of logits, and what they are made of, take as much memory as so many copies in float32
_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1


def rank_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Rank of one token in each row, #(z > z*) + #(z = z*, smaller id): logits [n, V], ids int64 [n] -> int32 [n]."""
    logits = logits.float() if logits.dtype is torch.float64 else logits  # as `top_ids`
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
    """The `count` tokens of rank 0, 1, 2 ... in each row, int64 [..., count]; `rank_of` gives their column back.

    `torch.topk` alone does not define the order of equal logits. In general logit and id are packed into one integer
    key without ties. On a CPU, where reading values needs no synchronisation, faster cases are tried first: mostly no
    two of the largest logits are equal, or all equal ones are among the `_SPARE` next, which are sorted.
    """
    logits = logits.float() if logits.dtype is torch.float64 else logits  # as stock `generate` compares
    if logits.device.type == "cpu" and count + _SPARE <= logits.shape[-1]:
        top = logits.topk(count + _SPARE, dim=-1)
        if not (top.values[..., 1 : count + 1] == top.values[..., :count]).any():
            return top.indices[..., :count]
        if (top.values[..., count - 1] > top.values[..., -1]).all():
            ids, order = top.indices.sort(-1)
            order = top.values.gather(-1, order).sort(stable=True, dim=-1, descending=True).indices
            return ids.gather(-1, order)[..., :count]
    vocab = logits.shape[-1]
    rows = logits.reshape(-1, vocab)
    if len(rows) <= rows_at_once(vocab, _KEY_COPIES):
        return _top_keys(logits, count)
    parts = [_top_keys(part, count) for part in torch.split(rows, rows_at_once(vocab, _KEY_COPIES))]
    return torch.cat(parts).view(*logits.shape[:-1], count)


def _top_keys(logits: Tensor, count: int) -> Tensor:
    """As `top_ids`, by integer keys."""
    bits = (logits.float() + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, which it equals
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # these integers have the order of the floats
    ids = torch.arange(logits.shape[-1], device=logits.device)
    key = (ordered.long() << _ID_BITS) + (_ID_MASK - ids)
    return _ID_MASK - (key.topk(count, dim=-1).values & _ID_MASK)
