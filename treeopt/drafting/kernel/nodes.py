"""The kernel's part about one node: matches and votes of the text, its candidates, their scores and sources."""

import math

import numpy as np
from numpy.typing import NDArray

from treeopt.drafter import CACHE_LENGTHS, MAX_MATCH
from treeopt.drafting.interface import Ints
from treeopt.drafting.kernel.compiled import compiled
from treeopt.drafting.kernel.data import CACHE, HEAD, NGRAM, PRIOR, Doubles, Kernel, Record, Scratch, Texts
from treeopt.drafting.kernel.memory import followed, recall, token_after
from treeopt.ngram_table import CONTEXT, HASH_MASK, MULTIPLIERS, ORDER_BITS

_LENGTHS = len(CACHE_LENGTHS)


@compiled
def index_up_to(texts: Texts, text: int, end: int) -> None:
    """Index the first `end` tokens of a text, and no others; indexed tokens must not have changed since."""
    tokens, latest, previous = texts.tokens[text], texts.latest[text], texts.previous[text]
    done = texts.indexed[text]
    while done > end:
        done -= 1
        latest[tokens[done]] = previous[done]
    while done < end:
        token = tokens[done]
        previous[done] = latest[token]
        done += 1
        latest[token] = done
    texts.indexed[text] = done


@compiled
def matches(k: Kernel, row: int, depth: int) -> tuple[int, int, int]:
    """Find the matches of a path of `depth` drafts, `k.work.path`, in the text before the root, and in the memory.

    A match at place p: the tokens up to and including p equal the last tokens of text and path. Returns their number,
    the length of the longest, and its latest place.
    """
    text, root, path = k.step.text[row], k.step.end[row] - 1, k.work.path
    tokens, previous = k.texts.tokens[text], k.texts.previous[text]
    window = k.record.window
    start = max(0, root + 1 - window)  # of the window; a match of a deeper path begins that much later
    first = max(0, root + 1 - window + depth)
    place = k.texts.latest[text, path[depth - 1] if depth else tokens[root]] - 1
    found, longest, best = 0, 0, 0
    while window and place >= first:
        length, most = 1, min(depth + MAX_MATCH, place - start + 1)
        while length < most:
            last = path[depth - 1 - length] if length < depth else tokens[root + depth - length]
            if tokens[place - length] != last:
                break
            length += 1
        if length > longest:
            longest, best = length, place
        k.work.places[found], k.work.lengths[found] = place, length
        found += 1
        place = previous[place] - 1
    own = found
    if window:
        found = followed(k, depth, found)
    for i in range(own, found):
        if k.work.lengths[i] > longest:  # of equal ones the text's own counts
            longest, best = k.work.lengths[i], k.work.places[i]
    return found, longest, best


@compiled
def count_votes(k: Kernel, row: int, found: int) -> tuple[int, int, float]:
    """Weigh the tokens that followed the `found` matches: P_last(y) = rest * P_0(y) + weight of y (`treeopt.drafter`).

    Returns the number of different tokens, the number of `CACHE_LENGTHS` found, and the rest.
    """
    prior, work, kinds = k.record.cache_prior, k.work, k.record.kinds
    counts, alone = work.kind_counts, work.kind_weights
    counts[:] = 0
    alone[0] = 0.0
    for i in range(found):
        counts[kinds[work.lengths[i]]] += 1
    places, left, last = 0, 1.0, 0
    for kind in range(_LENGTHS, 0, -1):  # `left` is what the longer lengths leave to this and the shorter ones
        places += counts[kind]
        left *= prior / (places + prior)
        alone[kind] = left / prior
        last = max(last, kind if counts[kind] else 0)
    for kind in range(1, _LENGTHS + 1):  # a vote counts for all lengths that match at its place
        alone[kind] += alone[kind - 1]
    voters = 0
    for i in range(found - 1, -1, -1):
        token = token_after(k, row, work.places[i])
        if not work.voters[token]:
            work.voted[voters], work.votes[voters] = token, 0.0
            voters += 1
            work.voters[token] = voters
        work.votes[work.voters[token] - 1] += alone[kinds[work.lengths[i]]]
    return voters, last, left


@compiled
def likeliest_voted(k: Kernel, voters: int) -> int:
    """Write the indices of the tokens with the largest weights, of equal ones the smallest; returns their number."""
    most, kept = k.record.voted, 0
    votes, voted, likeliest = k.work.votes, k.work.voted, k.work.likeliest
    for i in range(voters):
        at = kept
        while at:
            other = likeliest[at - 1]
            if votes[i] < votes[other] or (votes[i] == votes[other] and voted[i] > voted[other]):
                break
            if at < most:
                likeliest[at] = other
            at -= 1
        if at < most:
            likeliest[at] = i
            kept = min(kept + 1, most)
    return kept


@compiled
def cache_terms(work: Scratch, candidates: int, voters: int, rest: float) -> None:
    """Write log(P_last / P_0) of the candidates, and clear the map of the tokens with votes."""
    terms = work.terms
    without = np.float32(np.log(rest))
    for i in range(candidates):
        voter = work.voters[work.token[i]]
        if voter:
            share = work.votes[voter - 1] * np.exp(-np.float64(terms[PRIOR, i] + terms[NGRAM, i]))
            terms[CACHE, i] = np.log(share + rest)
        else:
            terms[CACHE, i] = without
    for i in range(voters):
        work.voters[work.voted[i]] = 0


@compiled
def frequent_tokens(k: Kernel, row: int) -> None:
    """Write the most frequent tokens of a row's window, of equals the smaller id, and their ratios, then the backoff.

    Where the text has too few tokens, the smallest other ids follow.
    """
    frequent, ratios, counts = k.step.frequent[row], k.step.frequent_ratios[row], k.work.voters
    tokens, end = k.texts.tokens[k.step.text[row]], k.step.end[row]
    start = max(0, end - max(k.record.window, CONTEXT))
    for place in range(start, end):
        counts[tokens[place]] += 1
    width, kept = len(frequent), 0
    for place in range(start, end):
        token = tokens[place]
        if counts[token] < 0:  # a token that was seen before in this loop
            continue
        counts[token] = -counts[token]
        at = kept
        while at:
            other = frequent[at - 1]
            if counts[other] < counts[token] or (counts[other] == counts[token] and other < token):
                break
            if at < width:
                frequent[at] = other
            at -= 1
        if at < width:
            frequent[at] = token
            kept = min(kept + 1, width)
    prior, size = k.record.cache_prior, len(k.record.prior)
    total = end - start + prior
    ratios[:] = np.log(prior / total)
    for i in range(kept):
        ratios[i] = np.log((prior - counts[frequent[i]] * size) / total)
    token = 0
    while kept < width:
        if not counts[token]:
            frequent[kept] = token
            kept += 1
        token += 1
    for place in range(start, end):
        counts[tokens[place]] = 0


Found = tuple[int, int, int, int]


@compiled
def candidates(k: Kernel, row: int, depth: int, source: int) -> int:
    """Write the candidates of a node and their scores to `k.work.token` and `k.work.score`; returns their number.

    The row's text is indexed up to its root, and the node's `depth` drafts are in `k.work.path`. `source` is the index
    of its logits in `k.step.seen`: that of the level (`k.record.sources`) or of the node; -1 where there are none.
    """
    count, looked_up, length, lengths = terms_of(k, row, depth, source)
    terms, scores, weights = k.work.terms, k.work.score, k.record.weights[depth]
    head, prior, ngram, cache = weights[HEAD], weights[PRIOR], weights[NGRAM], k.record.cache[depth, lengths]
    for i in range(count):
        scores[i] = terms[PRIOR, i] * prior + terms[HEAD, i] * head
        scores[i] = scores[i] + terms[NGRAM, i] * ngram + terms[CACHE, i] * cache
    scores[looked_up] += k.record.lookup[depth, length]
    return count


@compiled
def terms_of(k: Kernel, row: int, depth: int, source: int) -> Found:
    """Write the candidates of a node and the terms of their scores to `k.work.token` and `k.work.terms`.

    Returns their number, the one that followed the latest longest match, its length, the number of lengths found.
    """
    record, work = k.record, k.work
    count, width = _first_candidates(k, row, source), record.tokens.shape[1]
    if not width:
        _head_terms(k, row, source, count)
        _clear(work, count)
        return count, 0, 0, 0
    found, length, place = matches(k, row, depth)
    voters, lengths, rest = 0, 0, 1.0
    if record.votes and found:
        voters, lengths, rest = count_votes(k, row, found)
    empty = record.empty
    context = 0 if empty else context_row(k, row, depth)
    successors = k.step.frequent[row] if empty else record.tokens[context]
    ratios = k.step.frequent_ratios[row] if empty else record.ratios[context]
    for i in range(width):
        count = _add(work.slots, work.token, successors[i], count)
    # Without a match the root takes the place of the token after it; its weight is 0.
    after = token_after(k, row, place) if length else k.texts.tokens[k.step.text[row], k.step.end[row] - 1]
    count = _add(work.slots, work.token, after, count)
    looked_up = work.slots[after] - 1
    for i in range(likeliest_voted(k, voters)):
        count = _add(work.slots, work.token, work.voted[work.likeliest[i]], count)
    _head_terms(k, row, source, count)
    for i in range(count):
        work.terms[PRIOR, i] = record.prior[work.token[i]]
        work.terms[NGRAM, i] = ratios[width]  # the backoff
    for i in range(width - 1, -1, -1):  # of equal successors the first counts
        work.terms[NGRAM, work.slots[successors[i]] - 1] = ratios[i]
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
    for i in range(min(k.record.top, k.step.seen.shape[2] // 2)):
        count = _add(k.work.slots, k.work.token, k.step.seen[row, source, i], count)
    return count


@compiled
def _clear(work: Scratch, count: int) -> None:
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
    other = k.step.values[row, source, -1] if source >= 0 else np.float32(0.0)
    for i in range(count):
        terms[HEAD, i] = other
        terms[PRIOR, i] = terms[NGRAM, i] = terms[CACHE, i] = np.float32(0.0)
    width = k.step.seen.shape[2] // 2 if source >= 0 else 0
    for i in range(width):
        slot = work.slots[k.step.seen[row, source, i]]
        if slot:
            terms[HEAD, slot - 1] = k.step.values[row, source, width + i]


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
        bucket = low >> k.record.shift
        for z in range(k.record.buckets[back, bucket], k.record.buckets[back, bucket + 1]):
            if keys[z] >= searched:
                best = z + 1 if keys[z] == searched else best
                break
    return best


@compiled
def normalise(record: Record, work: Scratch, depth: int, count: int) -> tuple[float, float]:
    """The largest score, that of all other tokens included, and the sum of exp(score - largest)."""
    other = record.other[depth]
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
    if at <= x[0]:
        return y[0]
    if at >= x[-1]:
        return y[-1]
    low = np.searchsorted(x, at, side="right") - 1
    return y[low] + (y[low + 1] - y[low]) / (x[low + 1] - x[low]) * (at - x[low])


@compiled
def begin_row(k: Kernel, row: int) -> None:
    """Index a row's text up to its root, which is no place of a match, search the memory, and count tokens if used."""
    index_up_to(k.texts, k.step.text[row], k.step.end[row] - 1)
    recall(k, row)
    if len(k.step.frequent):
        frequent_tokens(k, row)
