"""Whether heads and states belong to a base model."""

from __future__ import annotations

import copy

from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads


def check_states_fit(base: Base, states: Tensor) -> None:
    """Raise E502 where hidden states [..., d] are not as wide as the input of the LM head."""
    width = states.shape[-1]
    if width != base.hidden_size:
        what = f"{base.name} has a layer between its hidden states (width {width}) and its LM head ({base.hidden_size})"
        why = "heads and n-gram drafters give the LM head the hidden states"
        fix = "a draft model, or drafts from the text so far (without --heads, --tree and --drafter)"
        raise TreeoptError(Code.NO_TREES, what, why=why, fix=fix)


def check_heads_fit(base: Base, heads: MedusaHeads, name: str) -> None:
    """Raise E212 unless heads and base have the same hidden size and vocabulary."""
    faults = []
    if heads.hidden_size != base.hidden_size:
        faults.append(f"hidden size {heads.hidden_size}, the base has {base.hidden_size}")
    if heads.vocab_size is not None and heads.vocab_size != base.vocab_size:
        faults.append(f"vocabulary {heads.vocab_size}, the base has {base.vocab_size}")
    if faults:
        what = f"the heads {name} do not fit {base.name}: {'; '.join(faults)}"
        raise TreeoptError(Code.HEADS_MISMATCH, what, fix="name with --model the base model that they were trained on")


def heads_like(base: Base, heads: MedusaHeads) -> MedusaHeads:
    """The heads on the base's device and in its dtype: a copy where they are not."""
    if (heads.bias.device, heads.bias.dtype) == (base.device, base.dtype):
        return heads
    return copy.deepcopy(heads).to(base.device, base.dtype)
