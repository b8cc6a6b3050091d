"""Drafters of a record: candidates of heads or LM head, n-gram table and text so far, scored by the tokens before them.

Their logits are known when a step begins. Another drafter of this kind overrides `RecordProposer.logits`.
"""

from collections.abc import Sequence

from torch import Tensor

from treeopt.drafter import Drafter
from treeopt.drafting.interface import ProposerSession
from treeopt.drafting.kernel.data import LogitsSource
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.compatibility import check_states_fit, heads_like
from treeopt.models.heads import MedusaHeads
from treeopt.models.logits import rows_at_once
from treeopt.ngram_table import CONTEXT

HEAD_SOURCE, LM_HEAD_SOURCE = "head", "LM head"  # names of logits, for `ProposerSession.sources`


class RecordProposer(LogitsSource):
    """A drafter record, and the model that it drafts for; without heads the LM head serves in the first levels.

    E101 where the record needs heads and none are given, E212 where the heads do not fit the base, E223 where the
    record does not fit base or heads.
    """

    def __init__(self, base: Base, heads: MedusaHeads | None, drafter: Drafter) -> None:
        if heads is None and drafter.num_heads:
            raise TreeoptError(Code.TREE_TOO_DEEP, "no heads were given", fix="heads=treeopt.load_heads(...).heads")
        self.base = base
        self.heads = None if heads is None else heads_like(base, heads)
        check_drafter(drafter, base, heads)
        name, of = (HEAD_SOURCE, "a head on") if drafter.num_heads else (LM_HEAD_SOURCE, "the LM head of")
        super().__init__(drafter, base.vocab_size, name, f"{of} {base.name}")
        self.window = 0 if drafter.ngram_table is None else max(drafter.window, CONTEXT)
        self.rows_at_once = rows_at_once(base.vocab_size, drafter.num_heads or min(1, drafter.lm_head_levels))

    def start(
        self, texts: Sequence[Sequence[int]], depth: int, ends: Sequence[Sequence[int]] | None = None
    ) -> ProposerSession:
        # Imported here as it imports numba, which takes half a second.
        from treeopt.drafting.kernel.session import KernelSession

        return KernelSession(self, texts, depth, ends)

    def logits(self, states: Tensor, depth: int, known: Tensor | None = None) -> Tensor:
        """Logits at states [B, d]: float [min(depth, H), B, V] of the heads, or [0 or 1, B, V] of the LM head."""
        if self.heads is not None or self.drafter.lm_head_levels:
            check_states_fit(self.base, states)
        if self.heads is not None:
            logits: Tensor = self.heads(states, self.base.lm_head, min(depth, self.heads.num_heads))
            return logits
        if not min(depth, self.drafter.lm_head_levels):
            return states.new_zeros(0, len(states), self.vocab_size)
        if known is not None and self.base.logits_of_lm_head:  # with one text, it takes as long as for all nodes
            return known[None]
        return self.base.lm_logits(states)[None]


def check_drafter(drafter: Drafter, base: Base, heads: MedusaHeads | None, draft: Base | None = None) -> None:
    """Raise E223 unless a drafter was made for as many heads, for a draft model if one is given, and the vocabulary."""
    if not isinstance(drafter, Drafter):
        raise TypeError(f"drafter is treeopt.Drafter or None, not an object of type {type(drafter).__name__}")
    faults = []
    num_heads = 0 if heads is None else heads.num_heads
    if drafter.num_heads != num_heads:
        faults.append(f"it was made for {drafter.num_heads} heads, there are {num_heads}")
    if bool(drafter.draft) != (draft is not None):
        made = "with a draft model" if drafter.draft else "without one"
        faults.append(f"it was made {made}, and there is {'no' if draft is None else 'a'} draft model")
    table = drafter.ngram_table
    if table is not None and table.vocab_size != base.vocab_size:
        faults.append(f"its vocabulary holds {table.vocab_size} tokens, the base's {base.vocab_size}")
    if faults:
        what = f"the drafter does not fit {base.name}: {'; '.join(faults)}"
        fix = (
            f"--model {drafter.source.get('model', 'MODEL')}, for which it was learned, or treeopt learn for this model"
        )
        if not num_heads and drafter.num_heads:
            fix = "--heads HEADS, or in Python heads=treeopt.load_heads(...)"
        elif drafter.draft and draft is None:
            fix = f"--draft {drafter.source.get('draft') or 'DRAFT'}, or in Python draft=..."
        elif draft is not None and not drafter.draft:
            fix = "leave out --draft, or in Python draft=None"
        elif num_heads and not drafter.num_heads:
            fix = "leave the heads out: --model MODEL without --heads, or in Python heads=None"
        raise TreeoptError(Code.DRAFTER_MISMATCH, what, fix=fix)
