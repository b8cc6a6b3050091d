"""The kernel's part about one node: its candidates, the terms of their scores, and their probabilities."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from treeopt.drafting.compiled import compiled
from treeopt.drafting.kernel_data import (
    CACHE_TERM,
    EMPTY,
    HEAD,
    HEAD_TERM,
    NGRAM,
    OTHER,
    PRIOR,
    PRIOR_TERM,
    RATIO_TERM,
    TOP,
    VOTES,
    Doubles,
    Floats,
    Ints,
    Kernel,
    Record,
    Scratch,
    StepArrays,
)
from treeopt.drafting.kernel_text import cache_terms, count_votes, likeliest_voted, matches
from treeopt.ngram_table import CONTEXT, HASH_MASK, MULTIPLIERS, ORDER_BITS

_HASH, _SHIFT = 2654435769, 12  # Knuth's multiplicative hash; its lowest bits are the token's
Found = tuple[int, int, int, int]  # candidates, which of them was looked up, length of the match, cache lengths


@compiled
def candidates(k: Kernel, row: int, depth: int, source: int) -> int:
    """Write the candidates of a node and their scores to `k.work.token` and `k.work.score`.

    Args:
        k: the kernel's arrays; the row's text is indexed up to its root, the node's drafts are in `k.work.path`.
        row: of the batch.
        depth: of the node, which is the number of its drafts.
        source: index of the node's logits in `k.step.seen`: that of the level (`k.record.sources`), or of a draft
            model's logits after the node; -1 where there are none.

    Returns:
        Number of candidates, all different.
    """
    count, looked_up, length, lengths = terms_of(k, row, depth, source)
    terms, scores, weights = k.work.terms, k.work.score, k.record.weights[depth]
    head, prior, ngram, cache = weights[HEAD], weights[PRIOR], weights[NGRAM], k.record.cache[depth, lengths]
    for i in range(count):
        scores[i] = terms[PRIOR_TERM, i] * prior + terms[HEAD_TERM, i] * head
        scores[i] = scores[i] + terms[RATIO_TERM, i] * ngram + terms[CACHE_TERM, i] * cache
    scores[looked_up] += k.record.lookup[depth, length]
    return count


@compiled
def terms_of(k: Kernel, row: int, depth: int, source: int) -> Found:
    """Write the candidates of a node and the terms of their scores to `k.work.token` and `k.work.terms`.

    Returns:
        Number of candidates; the one that followed the latest longest match; length of that match; number of
        `CACHE_LENGTHS` that were found.
    """
    record, work = k.record, k.work
    count, width = _first_candidates(k, row, source), record.tokens.shape[1]
    if not width:
        _head_terms(k, row, source, count)
        _clear(work, count)
        return count, 0, 0, 0
    found, length, place = matches(k, row, depth)
    voters, lengths, rest = 0, 0, 1.0
    if record.settings[VOTES] and found:
        voters, lengths, rest = count_votes(k, row, found)
    empty = record.settings[EMPTY]
    context = 0 if empty else context_row(k, row, depth)
    successors = k.step.frequent[row] if empty else record.tokens[context]
    ratios = k.step.frequent_ratios[row] if empty else record.ratios[context]
    for i in range(width):
        count = _add(work.slots, work.token, successors[i], count)
    # Without a match the root takes the place of the token after it; its weight is 0.
    followed = k.texts.tokens[k.step.text[row], place + 1 if length else k.step.end[row] - 1]
    count = _add(work.slots, work.token, followed, count)
    looked_up = work.slots[followed] - 1
    for i in range(likeliest_voted(k, voters)):
        count = _add(work.slots, work.token, work.voted[work.likeliest[i]], count)
    _head_terms(k, row, source, count)
    for i in range(count):
        work.terms[PRIOR_TERM, i] = record.prior[work.token[i]]
        work.terms[RATIO_TERM, i] = ratios[width]  # the backoff
    for i in range(width - 1, -1, -1):  # of equal successors the first counts
        work.terms[RATIO_TERM, work.slots[successors[i]] - 1] = ratios[i]
    if lengths:
        cache_terms(work, count, voters, rest)
    _clear(work, count)
    return count, looked_up, length, lengths


@compiled
def _first_candidates(k: Kernel, row: int, source: int) -> int:
    """The likeliest tokens of the logits, or the most frequent tokens below the heads; returns their number."""
    count = 0
    if source < 0:
        for i in range(len(k.record.frequent)):
            count = _add(k.work.slots, k.work.token, k.record.frequent[i], count)
        return count
    for i in range(min(k.record.settings[TOP], k.step.seen.shape[2] // 2)):
        count = _add(k.work.slots, k.work.token, k.step.seen[row, source, i], count)
    return count


@compiled
def _clear(work: Scratch, count: int) -> None:
    """Clear the map of the candidates."""
    for i in range(count):
        work.slots[work.token[i]] = 0


@compiled
def _add(slots: NDArray[np.int32], tokens: Ints, token: int, count: int) -> int:
    """Add a candidate that is not one yet to `Scratch.slots` and `Scratch.token`; returns the number of candidates."""
    if slots[token]:
        return count
    tokens[count] = token
    slots[token] = count + 1
    return count + 1


@compiled
def _head_terms(k: Kernel, row: int, source: int, count: int) -> None:
    """Write the candidates' log-probabilities by the logits; the other terms are 0."""
    terms, work = k.work.terms, k.work
    known, width, place = 0, k.step.seen.shape[2] // 2, 0
    if source >= 0:
        place = source % len(work.map_key)
        _map_logprobs(k.step, work, source, row, place)
        known = min(k.record.settings[TOP], width)
    tokens, values = work.map_token[place], work.map_value[place]
    other = k.step.values[row, source, -1] if source >= 0 else np.float32(0.0)
    for i in range(count):
        terms[HEAD_TERM, i] = terms[PRIOR_TERM, i] = terms[RATIO_TERM, i] = terms[CACHE_TERM, i] = np.float32(0.0)
        if i < known:  # these are the first candidates, in their order
            terms[HEAD_TERM, i] = k.step.values[row, source, width + i]
        elif source >= 0:
            terms[HEAD_TERM, i] = _logprob(tokens, values, work.token[i], other)


@compiled
def _map_logprobs(step: StepArrays, work: Scratch, source: int, row: int, place: int) -> None:
    """Write log-probabilities of a row to one of the hash maps, if they are not in it."""
    key = row * step.seen.shape[1] + source
    if work.map_key[place] == key:
        return
    work.map_key[place] = key
    tokens, values = work.map_token[place], work.map_value[place]
    tokens[:] = -1
    most = len(tokens) - 1
    known = step.seen.shape[2] // 2
    for i in range(known):
        token = step.seen[row, source, i]
        slot = ((token * _HASH) >> _SHIFT) & most
        while tokens[slot] >= 0:
            slot = (slot + 1) & most
        tokens[slot], values[slot] = token, step.values[row, source, known + i]


@compiled
def _logprob(tokens: NDArray[np.int32], values: Floats, token: int, other: float) -> float:
    """Log-probability of a token by the hash map of a level's logits; `other` where it is not in it."""
    most = len(tokens) - 1
    slot = ((token * _HASH) >> _SHIFT) & most
    while tokens[slot] >= 0:
        if tokens[slot] == token:
            return values[slot]
        slot = (slot + 1) & most
    return other


@compiled
def context_row(k: Kernel, row: int, depth: int) -> int:
    """Row of the longest stored context of a path; keys as by `treeopt.drafter.context_keys`."""
    tokens, root, keys = k.texts.tokens[k.step.text[row]], k.step.end[row] - 1, k.record.keys
    key, best = np.int64(0), 0
    for back in range(min(CONTEXT, root + 1 + depth)):
        token = k.work.path[depth - 1 - back] if back < depth else tokens[root + depth - back]
        key += token * MULTIPLIERS[back]
        low = key & HASH_MASK
        searched = low + ((back + 1) << ORDER_BITS)
        bucket = low >> k.record.shift[0]
        for z in range(k.record.buckets[back, bucket], k.record.buckets[back, bucket + 1]):
            if keys[z] >= searched:
                best = z + 1 if keys[z] == searched else best
                break
    return best


@compiled
def normalise(record: Record, work: Scratch, depth: int, count: int) -> tuple[float, float]:
    """The largest score, that of all other tokens included, and the sum of exp(score - largest)."""
    other = record.weights[depth, OTHER]
    largest = other
    for i in range(count):
        largest = max(largest, work.score[i])
    total = math.exp(other - largest)
    for i in range(count):
        total += math.exp(work.score[i] - largest)
    return largest, total


@compiled
def log_probability(record: Record, depth: int, score: float, largest: float, total: float) -> float:
    """Estimated log-probability of a candidate: the softmax, through the level's calibration map."""
    first, end = record.map_ends[depth], record.map_ends[depth + 1]
    if first == end:
        return np.float32(score - largest - np.log(total))
    share = math.exp(score - largest)
    others = total - share
    if share <= 0.0:
        log_ratio = -math.inf
    elif others <= 0.0:
        log_ratio = math.inf
    else:
        log_ratio = math.log(share) - math.log(others)
    mapped = _interpolated(log_ratio, record.maps[0, first:end], record.maps[1, first:end])
    return np.float32(-max(-mapped, 0.0) - math.log1p(math.exp(-abs(mapped))))


@compiled
def _interpolated(at: float, x: Doubles, y: Doubles) -> float:
    """Linear between pairs, constant beyond them."""
    if at <= x[0]:
        return y[0]
    if at >= x[-1]:
        return y[-1]
    low = np.searchsorted(x, at, side="right") - 1
    return y[low] + (y[low + 1] - y[low]) / (x[low + 1] - x[low]) * (at - x[low])
