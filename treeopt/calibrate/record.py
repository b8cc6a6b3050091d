"""A calibration from traced texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from treeopt.calibration import Calibration, Provenance
from treeopt.drafting.trace import TextTraces
from treeopt.texts.encode import Text
from treeopt.traces import joined


def as_calibration(
    texts: Sequence[Text], traced: Sequence[TextTraces], top_k: int, provenance: Provenance, *, levels: int = 1
) -> Calibration:
    """The calibration of traced texts.

    Args:
        texts: by ascending prompt id.
        traced: their traces, in this order; a part may have those of several texts, and one of all is not copied.
        top_k: ranks that are told apart.
        provenance: the origin.
        levels: of traces, where there is no text.
    """
    ranks = [one.ranks for one in traced] or [np.zeros((0, levels), np.uint8)]
    return Calibration(
        ranks=ranks[0] if len(ranks) == 1 else np.concatenate(ranks),
        offsets=np.concatenate([[0], np.cumsum([len(text.answer) for text in texts])]).astype(np.int64),
        prompt_ids=tuple(text.prompt_id for text in texts),
        token_hashes=tuple(_token_hash(text.answer) for text in texts),
        top_k=top_k,
        provenance=provenance,
        steps=joined([one.steps for one in traced]),
        target=joined([one.target for one in traced]),
    )


def check_whole(texts: Sequence[Text], prompt_ids: Sequence[str], budget: int) -> None:
    """Raise RuntimeError, for a fault of this program, unless the texts are those of a run, each of them once.

    Args:
        texts: with their answers; later turns of a prompt too.
        prompt_ids: of the run's prompts.
        budget: most tokens of an answer.
    """
    found = {text.prompt_id for text in texts}
    longest = max((len(text.answer) for text in texts), default=0)
    if len(found) < len(texts) or {text.dialogue for text in texts} != set(prompt_ids) or longest > budget:
        what = f"{len(texts)} texts with answers of up to {longest} tokens"
        raise RuntimeError(f"{what} are not those of {len(prompt_ids)} prompts with up to {budget} new tokens")


def _token_hash(tokens: Sequence[int]) -> str:
    """The first digits of an answer's sha256."""
    return hashlib.sha256(np.asarray(tokens, np.int32).tobytes()).hexdigest()[:16]
