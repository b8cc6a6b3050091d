"""The kernel's part about sources: which of them had a token among the candidates of a node, and at which place.

`kernel_nodes.terms_of` joins the candidates of all sources; here the same lists are searched one source at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treeopt.drafting.compiled import compiled
from treeopt.drafting.kernel_data import EMPTY, TOP, VOTES, Ints, Kernel
from treeopt.drafting.kernel_nodes import context_row
from treeopt.drafting.kernel_text import count_votes, likeliest_voted, matches
from treeopt.drafting.kernel_trees import begin_row

LOGITS, TABLE, LOOKUP, VOTED = range(4)  # columns of the ranks, in the order in which candidates are collected
COLUMNS = 4
_ABSENT = -1


@compiled
def source_rows(k: Kernel, first: int, last: int, true: Ints, ranks: Ints) -> None:
    """Follow the true tokens [B, L]: ranks [B, L, COLUMNS], the place of each in the list of each source; -1 if none.

    Beyond the end of a text, where `true` is negative, all are -1.
    """
    for row in range(first, last):
        begin_row(k, row)
        for depth in range(true.shape[1]):
            token = true[row, depth]
            ranks[row, depth, :] = _ABSENT
            if token >= 0:
                _rank_sources(k, row, depth, token, ranks[row, depth])
            k.work.path[depth] = max(token, 0)


@compiled
def _rank_sources(k: Kernel, row: int, depth: int, token: int, ranks: Ints) -> None:
    """Write the place of a token in the lists of a node, whose drafts are in `k.work.path`."""
    record, work = k.record, k.work
    source, width = record.sources[depth], record.tokens.shape[1]
    listed = min(record.settings[TOP], k.step.seen.shape[2] // 2) if source >= 0 else len(record.frequent)
    tokens = k.step.seen[row, source] if source >= 0 else record.frequent
    ranks[LOGITS] = _place(tokens, listed, token)
    if not width:
        return
    found, length, place = matches(k, row, depth)
    voters = 0
    if record.settings[VOTES] and found:
        voters, _, _ = count_votes(k, row, found)
    successors = k.step.frequent[row] if record.settings[EMPTY] else record.tokens[context_row(k, row, depth)]
    ranks[TABLE] = _place(successors, width, token)
    if length and k.texts.tokens[k.step.text[row], place + 1] == token:
        ranks[LOOKUP] = 0
    for i in range(likeliest_voted(k, voters)):
        if work.voted[work.likeliest[i]] == token:
            ranks[VOTED] = i
    for i in range(voters):
        work.voters[work.voted[i]] = 0


@compiled
def _place(tokens: Ints | NDArray[np.int32], listed: int, token: int) -> int:
    """The first place of a token among the first `listed`; -1 if none."""
    for i in range(listed):
        if tokens[i] == token:
            return i
    return _ABSENT
