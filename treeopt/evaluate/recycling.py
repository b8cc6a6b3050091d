"""What Token Recycling learns from texts: its matrix, and the ranks that a tree is built from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from treeopt.calibrate.record import as_calibration
from treeopt.calibration import MISS, NONE, Calibration, Provenance, Ranks
from treeopt.drafting.token_recycling import TokenRecycling
from treeopt.drafting.trace import TextTraces
from treeopt.models.ranks import top_ids
from treeopt.texts.encode import Text
from treeopt.texts.hidden_states import hidden_states

Ints = NDArray[np.int64]


@torch.inference_mode()
def recycle_texts(drafter: TokenRecycling, texts: Sequence[Text], batch_size: int = 16) -> Calibration:
    """Recycle the logits along finished texts, one text after the other, and rank each text's tokens before.

    This is a simulation by one teacher-forced forward a batch: the matrix sees the tokens of the texts alone. A decoder
    recycles the rejected nodes of its trees as well, so its matrix and its tokens per step differ.

    Args:
        drafter: its matrix is changed.
        texts: prompts with the base's answers.
        batch_size: texts of one forward.

    Returns:
        The ranks of the answers' tokens among the successors known before each position.

    Raises:
        TreeoptError: as `hidden_states`.
    """
    base, width = drafter.base, drafter.num_candidates
    matrix: Ints = drafter.matrix.numpy(force=True).copy()
    rows: list[Ranks] = []
    for start in range(0, len(texts), batch_size):
        part = texts[start : start + batch_size]
        for text, states in zip(part, hidden_states(base, part), strict=True):
            found = top_ids(base.lm_logits(states), width).numpy(force=True)
            rows.append(_recycled(matrix, np.asarray(text.answer, np.int64), found, drafter.depth))
    drafter.matrix.copy_(torch.from_numpy(matrix))
    return as_calibration(texts, list(map(TextTraces, rows)), width, Provenance("", "", "", "", {}))


def _recycled(matrix: Ints, answer: Ints, found: Ints, depth: int) -> Ranks:
    """uint8 [G, depth] ranks of an answer int64 [G]; rows of `matrix` are overwritten on the way.

    Row i of `found` int64 [G, K] holds the likeliest tokens after the token before answer token i.
    """
    ranks = np.full((len(answer), depth), NONE, np.uint8)
    for i in range(len(answer)):
        if i:  # the prompt's last token is not recycled, as in decoding
            matrix[answer[i - 1]] = found[i]
        true = answer[i + 1 : i + 1 + depth]
        hit = matrix[answer[i : i + len(true)]] == true[:, None]
        ranks[i, : len(true)] = np.where(hit.any(1), hit.argmax(1), MISS)
    return ranks
