"""Which of the verified drafts are accepted: pure functions on tensors, all rows of a batch at once.

`greedy` is exact for any choice that the target makes once at every node: its most likely token, or one draw from its
distribution. `typical` is lossy: it accepts drafts that are likely enough.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from treeopt.drafting.interface import Drafts

NOT_A_NUMBER = -1  # instead of a chosen token, where scores were not finite: no draft equals it
_MANY = 1 << 20  # scores from which a CPU searches for the largest in two stages
EPSILON, DELTA = 0.09, 0.3  # the released defaults of typical acceptance


def best(scores: Tensor) -> Tensor:
    """The first largest score of each row: float [..., V] -> int64 [...]; `NOT_A_NUMBER` where a row holds a NaN."""
    part = _part(scores.shape[-1]) if scores.device.type == "cpu" and scores.numel() >= _MANY else 0
    if not part:
        top = scores.max(-1)  # as argmax, several times faster in bfloat16 on a CPU, and it hands NaN on
        return top.indices.masked_fill_(top.values.isnan(), NOT_A_NUMBER)
    # A CPU finds the largest value in a tenth of the time that its index takes, so the index is searched in one part.
    parts = scores.float().reshape(*scores.shape[:-1], -1, part)  # [..., V / part, part]
    top = parts.amax(-1).max(-1)
    held = top.indices[..., None, None].expand(*top.indices.shape, 1, part)
    place = parts.gather(-2, held)[..., 0, :].max(-1).indices + top.indices * part
    return place.masked_fill_(top.values.isnan(), NOT_A_NUMBER)


@functools.cache
def _part(vocab: int) -> int:
    """Into parts of how many tokens a vocabulary divides evenly, some hundreds each; 0 where it does not."""
    return max((size for size in range(64, 513) if vocab % size == 0), default=0)


def draw(scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token of each row's softmax: float [..., V] -> int64 [...]; `NOT_A_NUMBER` where a row holds a NaN.

    The largest of p / e, with e exponential, falls on each token with its probability p; `torch.multinomial` draws one
    sample in the same way, but stops at a NaN.
    """
    waits = torch.empty_like(scores).exponential_(generator=generator).clamp_min_(torch.finfo(scores.dtype).tiny)
    return best(scores.softmax(-1).div_(waits))


def greedy(drafts: Drafts, choice: Tensor) -> Tensor:
    """The deepest node whose every draft is what the target itself chooses there.

    A draft is right when it equals the choice at its parent. Siblings that are not void hold different tokens, so all
    right nodes lie on one path; nodes are sorted by depth, so the last of them is the deepest. No path is padded, so
    nothing but a draft can be accepted, whatever its token id.

    Args:
        drafts: the trees of all rows.
        choice: int64 [B, N], the target's choice after each node; one for all the paths that go through it.

    Returns:
        int64 [B]: the accepted node; 0, the root, where no draft is right.
    """
    tokens = drafts.tokens
    right = _right(tokens != drafts.tree.at_parents(choice), drafts)
    return right.mul(torch.arange(tokens.shape[1], device=tokens.device)).amax(-1)


def typical(
    drafts: Drafts, logits: Tensor, *, temperature: float, epsilon: float = EPSILON, delta: float = DELTA
) -> Tensor:
    """The end of the longest path of likely enough drafts (arXiv:2401.10774, section 2.3.1). LOSSY.

    A draft is kept where p(draft) > min(epsilon, delta * exp(-H(p))), with p the base's distribution at its parent and
    H its entropy in nats. The root is always kept; of equally long paths the likeliest wins, then the first.

    Args:
        drafts: the trees of all rows.
        logits: float [B, N, V], the base's logits after each node.
        temperature: of p, above 0.
        epsilon: no draft needs more than this probability.
        delta: how much of exp(-H), the probability of a token in an even distribution of that entropy, a draft needs.

    Returns:
        int64 [B]: the accepted node; 0, the root, where no draft is likely enough.
    """
    tree = drafts.tree
    p = (logits.float() / temperature).softmax(-1)
    bar = (torch.special.entr(p).sum(-1).neg().exp() * delta).clamp_max(epsilon)  # [B, N]
    rows = torch.arange(len(drafts.tokens), device=logits.device)[:, None]
    likely = p[rows, tree.parents, drafts.tokens]  # [B, N], each draft's probability at its parent
    wrong = ~(likely > tree.at_parents(bar))
    length = _right(wrong, drafts) * (tree.position_ids + 1)
    longest = length == length.amax(-1, keepdim=True)
    steps = torch.where(wrong, 0.0, likely.log())  # paths with a wrong node are excluded; -inf * 0 would be NaN
    path = tree.along_paths(steps)  # log likelihood of each node's path
    return torch.where(longest, path, -torch.inf).argmax(-1)


def _right(wrong: Tensor, drafts: Drafts) -> Tensor:
    """bool [B, N]: whether no draft of a node's path is wrong; the root was chosen before the tree was drafted."""
    wrong = wrong if drafts.void is None else wrong | drafts.void
    return drafts.tree.along_paths(wrong.float()) == 0  # a count, so exact
