"""Hidden states and logits of finished texts, at every position, by one teacher-forced forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from treeopt.models.base import Base
from treeopt.models.compatibility import check_states_fit
from treeopt.texts.encode import Text


@torch.inference_mode()
def hidden_states(base: Base, texts: Sequence[Text]) -> list[Tensor]:
    """Hidden states of the answers, one [G, d] a text: row i is the state that predicts answer token i."""
    # The last token is left out, as none follows it. A causal model does not attend to padding on the right.
    inputs = [text.prompt + text.answer[:-1] for text in texts]
    ids = torch.full((len(texts), max(map(len, inputs))), base.pad_id)
    for row, tokens in enumerate(inputs):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    logits, hidden = base.forward(ids.to(base.device), use_cache=False, logits_to_keep=1)
    base.check_finite(logits, hidden)
    check_states_fit(base, hidden)
    return [hidden[row, len(t.prompt) - 1 : len(t.prompt) - 1 + len(t.answer)] for row, t in enumerate(texts)]


@torch.inference_mode()
def answer_logits(base: Base, text: Text) -> Tensor:
    """The whole model's logits float [G, V] at an answer's positions; row i predicts answer token i."""
    ids = torch.tensor([text.prompt + text.answer[:-1]], device=base.device)
    logits, hidden = base.forward(ids, use_cache=False, logits_to_keep=len(text.answer))
    base.check_finite(logits, hidden)
    return logits[0]
