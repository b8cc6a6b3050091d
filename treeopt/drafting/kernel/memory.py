"""The kernel's part about a memory across texts: contexts of `CONTEXT` tokens by their hash, and a path's matches."""

from treeopt.drafter import MAX_MATCH
from treeopt.drafting.interface import Ints
from treeopt.drafting.kernel.compiled import compiled
from treeopt.drafting.kernel.data import RECALLED, Kernel, Remembered
from treeopt.ngram_table import CONTEXT, HASH_MASK, MULTIPLIERS, ORDER_BITS

_SHORTEST = 6  # tokens of a match that counts; shorter ones tell less than the n-gram table


@compiled
def remember(memory: Remembered, text: Ints) -> None:
    """Store a text over the oldest tokens, with a separator after it."""
    size, place = len(memory.tokens), memory.end[0]
    for i in range(len(text) + 1):
        at = place % size
        memory.tokens[at] = text[i] + 1 if i < len(text) else 0
        if CONTEXT - 1 <= i < len(text):
            key = 0
            for back in range(CONTEXT):
                key += text[i - back] * MULTIPLIERS[back]
            slot = (key & HASH_MASK) >> (ORDER_BITS - memory.bits)
            memory.previous[at] = memory.latest[slot]
            memory.latest[slot] = at + 1
        place += 1
    memory.end[0] = place


@compiled
def recall(k: Kernel, row: int) -> None:
    """Find the last `CONTEXT` or more tokens of a row's text in the memory: at most `RECALLED` places, latest first."""
    memory, recalled = k.memory, k.work.recalled
    tokens, root = k.texts.tokens[k.step.text[row]], k.step.end[row] - 1
    recalled[1, :] = 0
    size, most = len(memory.tokens), min(2 * MAX_MATCH, root + 1)
    if not size or most < CONTEXT:
        return
    key = 0
    for back in range(CONTEXT):
        key += tokens[root - back] * MULTIPLIERS[back]
    at = memory.latest[(key & HASH_MASK) >> (ORDER_BITS - memory.bits)] - 1
    newest, age = memory.end[0] - 1, -1
    for i in range(RECALLED):
        older = (newest - at) % size
        if at < 0 or older <= age:  # a place that was overwritten continues with later ones
            break
        age, length = older, 0
        while length < most and memory.tokens[(at - length) % size] == tokens[root - length] + 1:
            length += 1
        recalled[0, i], recalled[1, i] = at, length if length >= CONTEXT else 0
        at = memory.previous[at] - 1


@compiled
def followed(k: Kernel, depth: int, found: int) -> int:
    """Add the recalled places that a path of `depth` drafts follows to the `found` matches; returns the number of all.

    Place p is written as -1 - p. A match counts as one of half its length in the text itself: tokens follow there about
    as often (docs/develop/method.md).
    """
    memory, size, work = k.memory.tokens, len(k.memory.tokens), k.work
    for i in range(RECALLED):
        at, length = work.recalled[0, i], work.recalled[1, i]
        if not length or length + depth < _SHORTEST:
            continue
        drafts = 0
        while drafts < depth and memory[(at + 1 + drafts) % size] == work.path[drafts] + 1:
            drafts += 1
        if drafts == depth and memory[(at + 1 + depth) % size]:
            work.places[found], work.lengths[found] = -1 - (at + depth) % size, (length + depth) // 2
            found += 1
    return found


@compiled
def token_after(k: Kernel, row: int, place: int) -> int:
    """The token after a match in the text of a row, or in the memory; 0 where a thread has just ended a text there."""
    own, tokens = k.texts.tokens[k.step.text[row]], k.memory.tokens
    token: int = own[place + 1] if place >= 0 else max(0, tokens[-place % len(tokens)] - 1)
    return token
