"""Sampling on the route of paths: a test that the tokens of long texts have the distribution of the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from known_texts import KnownTexts
from tiny_families import tiny_model

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Sample
from treeopt.evaluate.validate_sample import p_of_counts
from treeopt.models.base import Base

VOCAB = 5  # so few that drafts are often accepted
SPREAD = 0.5  # of the logits, so that no token is rare
BINS = 10


class Followers(KnownTexts):
    """Trees of four nodes: a path of two drafts, each the likeliest token after the one before alone, and one more.

    The drafts are no function of the random draws after them, so that the texts must have the model's distribution.
    """

    def __init__(self, base: Base, seed: int) -> None:
        super().__init__(base, [], 4, 3, seed)
        self.after = followers(base)

    def _continued(self, recent: np.ndarray) -> list[int]:
        first = self.after[recent[-1]]
        return [first, self.after[first]]


@torch.inference_mode()
def followers(base: Base) -> list[int]:
    """The likeliest token after each token alone."""
    after: list[int] = (
        base.forward(torch.arange(base.vocab_size)[:, None], use_cache=False)[0][:, -1].argmax(-1).tolist()
    )
    return after


def small_family(family: str, context: int) -> Base:
    """A tiny random model with few tokens, of logits that are near each other."""
    base = Base(tiny_model(family, vocab=VOCAB, context=context), None, family)
    with torch.inference_mode():
        logits = base.forward(torch.arange(context)[None] % VOCAB, use_cache=False)[0]
        base.lm_head.weight.mul_(SPREAD / logits.std())
    return base


def p_of_texts(base: Base, rule: Sample, texts: int, new_tokens: int) -> tuple[float, float]:
    """The p-value of a chi-square test of sampled texts, decoded with trees in one batch, and their tokens per step.

    A token is a number between 0 and 1: the probability of the tokens before it, where the follower of the last token
    is the first, plus a uniform share of its own. Under sampling these are independent and uniform.
    """
    rng = np.random.default_rng(0)
    prompts = rng.integers(VOCAB, size=(texts, 4))
    made = TreeDecoder(base, None, Followers(base, 1), acceptance=rule).generate(prompts.tolist(), new_tokens)
    ids = torch.from_numpy(np.concatenate([prompts, [one.tokens for one in made]], axis=1))
    with torch.inference_mode():
        logits = torch.cat([base.forward(row[None], use_cache=False)[0] for row in ids])[:, prompts.shape[1] - 1 : -1]
    shares = uniforms(
        rule.scores(logits).double().softmax(-1).numpy(), ids[:, prompts.shape[1] - 1 :].numpy(), base, rng
    )
    counts = np.histogram(shares, bins=BINS, range=(0, 1))[0]
    steps = sum(len(one.step_lengths) for one in made)
    return p_of_counts(counts, np.full(BINS, 1 / BINS)), ids[:, prompts.shape[1] :].numel() / steps


def uniforms(p: np.ndarray, tokens: np.ndarray, base: Base, rng: np.random.Generator) -> np.ndarray:
    """The numbers [T, n] of tokens int64 [T, n + 1], the first of which is only a token before; p is [T, n, V]."""
    first: Sequence[int] = followers(base)
    order = np.argsort(np.arange(VOCAB)[None] != np.array(first)[:, None], axis=1, kind="stable")[tokens[:, :-1]]
    place = (order == tokens[:, 1:, None]).argmax(-1)[..., None]
    sorted_p = np.take_along_axis(p, order, -1)
    own = np.take_along_axis(sorted_p, place, -1)[..., 0]
    before: np.ndarray = np.take_along_axis(sorted_p.cumsum(-1), place, -1)[..., 0] - own
    return before + own * rng.random(own.shape)
