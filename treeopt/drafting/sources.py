"""Which sources proposed the accepted drafts of a decoded text.

Several sources may have one token among their candidates of a node; the drafter joins their lists and scores each token
once, so a draft has no single author. Here every source is listed that had the token, with its place in that source's
own list (0 is the first).

Sources in the order in which candidates are collected:

    head, LM head, draft model    the likeliest tokens of logits
    n-gram                        successors of the longest stored context, in the n-gram table
    frequent                      the most frequent tokens, where there are no logits, or no stored contexts
    lookup                        the token that followed the latest longest match in the text so far (prompt lookup)
    text                          the tokens with the most votes of all matches in the text so far
    drafter                       a `Proposer` of the caller, whose sources are not known
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from treeopt.drafting.interface import Proposer
from treeopt.drafting.trace import positions_of
from treeopt.models.base import Base
from treeopt.texts.encode import Text
from treeopt.texts.hidden_states import hidden_states

BASE = "base"  # of the root of every step, which is the base model's own token


@torch.inference_mode()
def draft_sources(
    base: Base, proposer: Proposer, prompt: Sequence[int], steps: Sequence[Sequence[int]]
) -> list[list[Mapping[str, int]]]:
    """The sources of the accepted drafts of each step, by a teacher-forced pass over the finished text.

    The decoder is not slowed by it. In float32 the pass gives the logits of decoding up to rounding, as tracing does.

    Args:
        base: the base model.
        proposer: the drafter of the text.
        prompt: token ids.
        steps: the tokens of each step, its root first.

    Returns:
        For each step and each of its tokens after the root, the rank of the token in the list of every source that has
        it. Empty where no source has it, which only rounding can cause.

    Raises:
        TreeoptError: E504 where states or scores are not finite.
    """
    answer = [token for step in steps for token in step]
    if not proposer.depth or len(answer) == len(steps):
        return [[] for _ in steps]
    text = Text("0:00000000", list(prompt), answer)
    chosen = np.zeros(len(answer), np.bool_)
    chosen[np.cumsum([0, *(len(step) for step in steps[:-1])])] = True
    [states] = hidden_states(base, [text])
    roots = states[torch.from_numpy(chosen).to(states.device)]
    found = [
        row
        for positions in positions_of(proposer, [text], [roots], chosen)
        for row in positions.session.sources(positions.true)
    ]
    return [list(row[: len(step) - 1]) for row, step in zip(found, steps, strict=True)]
