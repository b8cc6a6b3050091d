"""The likeliest tokens of logits with their log-probabilities: all that the host reads of the logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from treeopt.models.logits import top_ids


def top_logprobs(logits: Tensor, count: int, *, others: bool = True) -> Tensor:
    """The `count` likeliest tokens of each row; all other tokens share the rest of the probability equally.

    Args:
        logits: float [..., V].
        count: K, at most V.
        others: whether the log-probability of the other tokens is needed; else it is 0, or NaN where a logit is.

    Returns:
        int32 [..., 2 K + 1], one tensor for one transfer: the tokens, the likeliest first; the bits of their
        log-probabilities in float32; the bits of the log-probability of each other token.
    """
    tokens = top_ids(logits, count)
    scores = logits.float()
    top = scores.gather(-1, tokens)
    if not others:
        norm = scores.logsumexp(-1, keepdim=True)
        return torch.cat([tokens.int(), (top - norm).view(torch.int32), (norm - norm).view(torch.int32)], dim=-1)
    # The rest is summed by itself: 1 - the sum of the largest would be mostly rounding.
    rest = scores.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    norm = torch.logaddexp(top.logsumexp(-1, keepdim=True), rest)
    each_other = rest - norm - math.log(max(1, logits.shape[-1] - count))
    return torch.cat([tokens.int(), (top - norm).view(torch.int32), each_other.view(torch.int32)], dim=-1)
