"""SuffixDecoding (arXiv:2411.04975) and SAM-Decoding (arXiv:2411.10666) by replay, written from their papers.

Both look for the last tokens of a text in the text so far and in earlier texts. A suffix trie of bounded depth holds
what either needs: counts of continuations, and the first and the latest place of each. SuffixDecoding grows the trees
of the paper, the text's own where two have one score; ArcticInference drafts chains by default, from a trie of depth
64.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from treeopt.texts.encode import Text

DEPTH = 24  # tokens of the longest suffix with its continuation: the default of vLLM


@dataclass(slots=True)
class Node:
    """The occurrences of a suffix."""

    count: int = 0
    first: int = -1  # the place of the token after the first occurrence, in `Trie.tokens`
    latest: int = -1
    before: int = -1  # the same of the one before the latest
    children: dict[int, Node] = field(default_factory=dict)


class Trie:
    """All suffixes of at most `DEPTH` tokens of some texts."""

    def __init__(self) -> None:
        self.root, self.tokens = Node(), [-1]

    def add(self, tokens: Iterable[int], active: list[Node] | None = None) -> list[Node]:
        """Continue a text, whose `active` suffixes end with its last token; returns the new ones, the longest last."""
        active = active or []
        for token in tokens:
            self.tokens.append(token)
            active = [node.children.setdefault(token, Node()) for node in [self.root, *active][:DEPTH]]
            for node in active:
                node.count += 1
                node.before, node.latest = node.latest, len(self.tokens)
                node.first = node.first if node.first >= 0 else node.latest
        return active

    def follow(self, tokens: Iterable[int], active: list[Node]) -> list[Node]:
        """The suffixes that are known here after more tokens of another text."""
        for token in tokens:
            known = [self.root, *active][:DEPTH]
            active = [node.children[token] for node in known if token in node.children]
        return active


@dataclass(frozen=True)
class Method:
    """A method with its settings; `prompts` tells whether earlier prompts are learned from, besides earlier answers."""

    name: str
    factor: float = 1.0
    least: float = 0.1
    bias: int = 5
    latest: bool = False
    prompts: bool = False

    def __str__(self) -> str:
        settings = f"factor {self.factor:g}, least {self.least:g}" if self.name == SUFFIX else f"bias {self.bias}"
        place = ", latest place" if self.latest else ""
        return f"{settings}{place}, earlier {'texts' if self.prompts else 'answers'}"


SUFFIX, SAM = "SuffixDecoding", "SAM-Decoding"
PUBLISHED = {SUFFIX: Method(SUFFIX), SAM: Method(SAM, prompts=True)}
GRID = {
    SUFFIX: [
        Method(SUFFIX, factor, least, prompts=prompts)
        for factor, least, prompts in itertools.product((1.0, 2.0, 4.0), (0.0, 0.1), (False, True))
    ],
    SAM: [
        Method(SAM, bias=bias, latest=latest, prompts=True) for bias, latest in itertools.product((0, 5), (False, True))
    ],
}


def accepted_of_tree(nodes: Sequence[Node], true: Sequence[int], most: int, method: Method) -> tuple[float, int]:
    """The best score of a suffix's trees, each grown greedily by the product of frequencies, and accepted drafts."""
    best = (0.0, 0)
    for length, start in enumerate(nodes, start=1):
        budget, score, accepted, number = min(most, int(method.factor * length)), 0.0, 0, itertools.count()
        heap = [(-1.0, next(number), start, 0, True)]
        for _ in range(budget + 1):  # the first is the suffix itself
            if not heap:
                break
            negative, _, node, depth, right = heapq.heappop(heap)
            score -= negative if depth else 0
            accepted = max(accepted, depth if right else 0)
            total = sum(child.count for child in node.children.values())
            for token, child in node.children.items():
                share = negative * child.count / total
                if -share >= method.least:
                    follows = right and depth < len(true) and true[depth] == token
                    heapq.heappush(heap, (share, next(number), child, depth + 1, follows))
        best = max(best, (score, accepted), key=lambda one: one[0])
    return best


def accepted_of_chain(tokens: Sequence[int], place: int, true: Sequence[int], most: int) -> int:
    """Accepted drafts of a chain of the tokens from a place on."""
    pairs = zip(tokens[place : place + most], true, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def place_of(nodes: Sequence[Node], tokens: Sequence[int], text: Trie, *, latest: bool) -> tuple[int, int]:
    """Length and place among `tokens` of the longest suffix of a text that occurred before; (0, -1) where none did."""
    own, last = tokens is text.tokens, text.tokens
    for length in range(len(nodes), 0, -1):
        node = nodes[length - 1]
        place = (node.before if own else node.latest) if latest else node.first
        if place >= 0 and (not own or node.count > 1):
            while length < place and tokens[place - 1 - length] == last[-1 - length] >= 0:  # beyond the trie's depth
                length += 1
            return length, place
    return 0, -1


def steps_of(texts: Sequence[Text], method: Method, nodes: int) -> Iterator[int]:
    """The steps of each text, in their order, with `nodes` a step, the root counted."""
    earlier = Trie()
    for text in texts:
        own, steps, at = Trie(), 0, 0
        mine = own.add(text.prompt)
        known = earlier.follow(text.prompt, [])
        fresh: Sequence[int] = text.answer[:1]
        while at < len(text.answer):
            mine, known = own.add(fresh, mine), earlier.follow(fresh, known)
            true, most = text.answer[at + 1 :], nodes - 1
            if method.name == SUFFIX:
                found = [accepted_of_tree(part, true, most, method) for part in (mine, known)]
                accepted = max(found, key=lambda one: one[0])[1]
            else:
                length, place = place_of(mine, own.tokens, own, latest=method.latest)
                other, there = place_of(known, earlier.tokens, own, latest=method.latest)
                use = (earlier.tokens, there) if other - method.bias > length or place < 0 else (own.tokens, place)
                accepted = accepted_of_chain(*use, true, most) if use[1] >= 0 else 0
            fresh, at, steps = text.answer[at + 1 : at + 2 + accepted], at + 1 + accepted, steps + 1
        earlier.add([*(text.prompt if method.prompts else ()), *text.answer])
        earlier.tokens.append(-1)
        yield steps
