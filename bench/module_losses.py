"""What a draft module learns: its divergence from the base, level by level, on texts whose states are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from make_pocket_draft import divergence
from torch import Tensor
from transformers import DynamicCache

from treeopt.models.base import CACHE
from treeopt.models.block_module import BlockModule
from treeopt.models.draft_module import DraftModule


@dataclass(frozen=True)
class Text:
    """A text and what the base gives for it.

    Args:
        ids: tokens int64 [T].
        read: the states that the module reads, side by side, [T, n * d].
        last: input of the LM head [T, d].
        inside: float [T], the probability that the base gives to the tokens that the module drafts.
    """

    ids: Tensor
    read: Tensor
    last: Tensor
    inside: Tensor


def losses(module: DraftModule, lm_head: Tensor, texts: Sequence[Text], levels: int) -> Tensor:
    """float [levels]: the mean divergence of each level from the base's distribution of the token that it drafts.

    The row of position i, at level d, reads token i + d and predicts token i + d + 1. Of a draft vocabulary the
    distributions are over its tokens, weighted by the probability that the base gives to them.
    """
    ids, read, last, inner = padded(texts)
    ends = torch.tensor([len(text.ids) for text in texts], device=ids.device)
    with torch.no_grad():
        wanted = torch.nn.functional.linear(last, lm_head)
    rows = ids.shape[1] - levels
    places, cache = torch.arange(rows, device=ids.device), DynamicCache()
    causal = places[:, None] >= places
    hidden, found = module.states(read[:, :rows]), []
    own = places[:, None] == places
    for level in range(1, levels + 1):
        mask = torch.cat([causal, *[own] * (level - 1)], dim=1)
        scores = torch.zeros(mask.shape, device=ids.device).masked_fill(~mask, torch.finfo(torch.float32).min)[
            None, None
        ]
        out = module(
            ids[:, level : level + rows],
            hidden,
            attention_mask=scores.expand(len(ids), -1, -1, -1),
            position_ids=(places + level - 1)[None],
            **{CACHE: cache},
            use_cache=True,
        )
        [hidden] = out.hidden_states
        inside = places[None] + level < ends[:, None] - 1
        apart = divergence(wanted[:, level : level + rows][inside], out.logits[inside])
        found.append((inner[:, level : level + rows][inside] * apart).mean())
    return torch.stack(found)


def padded(texts: Sequence[Text]) -> tuple[Tensor, ...]:
    """The fields of texts, each in one tensor [B, T, ...]."""
    fields_of = ([getattr(text, field.name) for text in texts] for field in fields(Text))
    return tuple(torch.nn.utils.rnn.pad_sequence(one, batch_first=True) for one in fields_of)


def block_losses(module: BlockModule, lm_head: Tensor, texts: Sequence[Text], anchors: int, seed: int) -> Tensor:
    """float [levels]: the same of a block drafter, at random roots of each text.

    The block of the root at position n attends to the states before n; level j predicts token n + j. With a confidence
    head its cross-entropy is added: whether the likeliest token of a level, after the text's own, is the base's.
    """
    ids, read, last, _ = padded(texts)
    levels, size, length, device = module.levels, module.wiring.size, ids.shape[1], ids.device
    ends = torch.tensor([len(text.ids) for text in texts], device=device)
    places, slots = torch.arange(length, device=device), torch.arange(size, device=device)
    chance = torch.rand(len(texts), anchors, generator=torch.Generator().manual_seed(seed)).to(device)
    roots = 1 + (chance * (ends - 2)[:, None]).long()  # [B, A], each with a token after it
    cache, least = DynamicCache(), torch.finfo(torch.float32).min
    own = torch.zeros(length, length, device=device).masked_fill(places[:, None] != places, least)[None, None]
    states = module.states(read)  # what attends to them is not read here
    module(ids, hidden=states, attention_mask=own, position_ids=places[None], **{CACHE: cache})
    cache.batch_repeat_interleave(anchors)
    flat, texts_of = roots.flatten(), torch.arange(len(texts), device=device).repeat_interleave(anchors)
    seen = torch.nn.functional.pad(places[None] < flat[:, None], (0, size), value=True)
    mask = torch.zeros(seen.shape, device=device).masked_fill(~seen, least)[:, None, None].expand(-1, 1, size, -1)
    blocks = ids[texts_of, flat][:, None].expand(-1, size)
    out = module(blocks, attention_mask=mask, position_ids=flat[:, None] + slots, **{CACHE: cache})
    at = flat[:, None] + torch.arange(levels, device=device)  # the positions whose states predict the levels' tokens
    inside = at < ends[texts_of, None] - 1
    with torch.no_grad():
        wanted = torch.nn.functional.linear(last[texts_of[:, None], at.clamp(max=length - 1)], lm_head)
    logits, [rows], unsure = out.logits, out.hidden_states, torch.zeros((), device=device)
    if module.token_head is not None:
        tokens, rows = (
            ids[texts_of[:, None], at.clamp(max=length - 1)].reshape(-1, 1),
            rows.reshape(len(at) * levels, 1, -1),
        )
        read = module.token_head.read(tokens, module.get_input_embeddings())
        logits, _ = module.token_head(0, logits.reshape(len(tokens), 1, -1), rows, read, rows[..., :0])
        logits = logits.view(len(at), levels, -1)
        right = (logits.argmax(-1) == wanted.argmax(-1)).float()
        sure = module.confidence(rows, tokens).view(len(at), levels)
        unsure = torch.nn.functional.binary_cross_entropy_with_logits(sure, right.to(sure.dtype), reduction="none")
    apart = (divergence(wanted, logits) + unsure) * inside
    return apart.sum(0) / inside.sum(0).clamp(min=1)
