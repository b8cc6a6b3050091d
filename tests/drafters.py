"""Drafters for tests: learned from tiny random models, small enough to be made anew by every test file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tiny import VOCAB, cycle_base, cycle_heads

from treeopt.drafter import Drafter
from treeopt.drafting.learn import Learned, Learning, learn
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import Text

SIZE_COST = ((1, 0.1), (2, 0.2), (6, 0.5), (8, 0.9), (16, 1.4))  # of policies: nodes, cost in tokens


def planted(num_heads: int = 3) -> tuple[Base, MedusaHeads]:
    """A model whose text its heads often know, and one of whose heads errs now and then."""
    base = cycle_base(disturbed=0.03)
    return base, cycle_heads(base, num_heads)


def prompts_of(seed: int, count: int, *, longest: int = 12, vocab: int = VOCAB) -> list[Text]:
    """Random prompts without answers, under ascending ids."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    return [Text(f"set:{i:08}", rng.integers(vocab, size=n).tolist(), []) for i, n in enumerate(lengths)]


def answered(base: Base, prompts: Sequence[Text], new: int = 20) -> list[Text]:
    """The prompts with the base's greedy answers."""
    return answer_all(base, prompts, AnswerOptions(max_new_tokens=new, batch_size=8))[0]


def learned(
    base: Base,
    heads: MedusaHeads | None,
    texts: Sequence[Text],
    *,
    ngram: bool = True,
    tokens: int = 400,
    new: int = 20,
    window: int = 32,
    levels: int = 5,
) -> Learned:
    """A drafter from these answered texts."""
    learning = Learning(tokens, ngram=ngram, window=window, levels=levels, top=6)
    return learn(base, heads, texts, learning, options=AnswerOptions(max_new_tokens=new, batch_size=8))


def quick_drafter(base: Base, heads: MedusaHeads, *, ngram: bool = True, seed: int = 0) -> Drafter:
    """A drafter learned from eight short texts."""
    texts = answered(base, prompts_of(seed, 8, vocab=base.vocab_size), 12)
    return learned(base, heads, texts, ngram=ngram, new=12).drafter
