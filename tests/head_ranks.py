"""Traces of the heads alone, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from treeopt.drafting.heads import HeadsProposer
from treeopt.drafting.trace import trace_texts
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.texts.encode import Text
from treeopt.traces import Ranks


def head_ranks(base: Base, heads: MedusaHeads, texts: Sequence[Text], top_k: int) -> list[Ranks]:
    """uint8 [G, H] for each text: the rank of every token of its answer under every head."""
    proposers = [HeadsProposer(base, heads)] * len(texts)
    return [traced.ranks for traced in trace_texts(base, proposers, texts, top_k)]
