"""The kernel's part about texts: the index of places, matches of the last tokens of a path, and the votes of the cache.

A match of a path at place p of the text: the tokens up to and including p equal the last tokens of text and path. The
places of a token are a chain from its latest occurrence backward, as in the match finders of LZ77 compressors.
"""

from __future__ import annotations

import numpy as np

from treeopt.drafter import CACHE_LENGTHS, MAX_MATCH
from treeopt.drafting.compiled import compiled
from treeopt.drafting.kernel_data import CACHE_TERM, PRIOR_TERM, RATIO_TERM, VOTED, WINDOW_OF, Kernel, Scratch, Texts
from treeopt.ngram_table import CONTEXT

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
    """Find the matches of a path of `depth` drafts, `k.work.path`, in the text before the root.

    Returns:
        Their number, the length of the longest, and its latest place.
    """
    text, root, path = k.step.text[row], k.step.end[row] - 1, k.work.path
    tokens, previous = k.texts.tokens[text], k.texts.previous[text]
    window = k.record.settings[WINDOW_OF]
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
    return found, longest, best


@compiled
def count_votes(k: Kernel, row: int, found: int) -> tuple[int, int, float]:
    """The weights of the tokens that followed the `found` matches; see `treeopt.drafter` for the formula.

    The estimate P_last of the longest length found is linear in the votes: P_last(y) = rest * P_0(y) + weight of y.

    Returns:
        The number of different tokens, the number of `CACHE_LENGTHS` found, and the rest.
    """
    tokens, prior, work, kinds = k.texts.tokens[k.step.text[row]], k.record.cache_prior[0], k.work, k.record.kinds
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
        token = tokens[work.places[i] + 1]
        if not work.voters[token]:
            work.voted[voters], work.votes[voters] = token, 0.0
            voters += 1
            work.voters[token] = voters
        work.votes[work.voters[token] - 1] += alone[kinds[work.lengths[i]]]
    return voters, last, left


@compiled
def likeliest_voted(k: Kernel, voters: int) -> int:
    """Write the indices of the tokens with the largest weights, of equal ones the smallest; returns their number."""
    most, kept = k.record.settings[VOTED], 0
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
            share = work.votes[voter - 1] * np.exp(-np.float64(terms[PRIOR_TERM, i] + terms[RATIO_TERM, i]))
            terms[CACHE_TERM, i] = np.log(share + rest)
        else:
            terms[CACHE_TERM, i] = without
    for i in range(voters):
        work.voters[work.voted[i]] = 0


@compiled
def frequent_tokens(k: Kernel, row: int) -> None:
    """Write the most frequent tokens of a row's window, and their ratios to the uniform distribution, then the backoff.

    Of equally frequent tokens the smaller id is first; where the text has too few, the smallest other ids follow.
    """
    frequent, ratios, counts = k.step.frequent[row], k.step.frequent_ratios[row], k.work.voters
    tokens, end = k.texts.tokens[k.step.text[row]], k.step.end[row]
    start = max(0, end - max(k.record.settings[WINDOW_OF], CONTEXT))
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
    prior, size = k.record.cache_prior[0], len(k.record.prior)
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
