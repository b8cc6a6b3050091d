"""Hidden states of finished texts: one teacher-forced pass gives those of every position at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, check_base_finite
from treeopt.texts.encode import Text

LOGITS_BYTES = 64 * 1024 * 1024  # logits alive at once, wherever a whole text's are asked for


@torch.inference_mode()
def hidden_states(base: Base, texts: Sequence[Text]) -> list[Tensor]:
    """For each text [G, d]: row i is the state that chose answer token i, which would be a step's root.

    Raises:
        TreeoptError: E504 where the base gives states or logits that are no numbers.
    """
    # The last token predicts nothing that came, so it is left out. Padding on the right is never seen: causality.
    inputs = [text.prompt + text.answer[:-1] for text in texts]
    ids = torch.full((len(texts), max(map(len, inputs))), base.pad_id)
    for row, tokens in enumerate(inputs):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    logits, hidden = base.forward(ids.to(base.device), use_cache=False, logits_to_keep=1)
    check_base_finite(base, logits, hidden)
    return [hidden[row, len(t.prompt) - 1 : len(t.prompt) - 1 + len(t.answer)] for row, t in enumerate(texts)]


def check_finite(logits: Tensor, first: int) -> None:
    """Raise E504 where heads' logits, of rows `first` and on, are no numbers; the states they come from are checked."""
    if not torch.isfinite(logits.sum(dtype=torch.float32)):
        raise TreeoptError(Code.NOT_FINITE, f"the heads give logits that are not numbers, in rows {first} and on")
