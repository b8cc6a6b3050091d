"""SuffixDecoding (arXiv:2411.04975) and SAM-Decoding (arXiv:2411.10666), written from their papers.

Both look for the last tokens of a text in the text so far and in earlier texts. A suffix trie of bounded depth holds
what either needs. SuffixDecoding grows trees, the text's own where two have one score (ArcticInference drafts chains by
default, from a trie of depth 64); SAM-Decoding drafts what followed the longest match.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from treeopt.defaults import STEP_SIZES
from treeopt.drafting.interface import AcceptedPart, Drafts, Expansion, ProposerSession, SizeLimits, TokenLists
from treeopt.drafting.kernel.session import compile_drafts
from treeopt.drafting.kernel.trees import NO_TOKEN
from treeopt.errors import Code, TreeoptError
from treeopt.progress import Progress
from treeopt.texts.encode import Text
from treeopt.verify.buffers import Buffers

DEPTH = 24  # tokens of the longest suffix with its continuation: the default of vLLM
SUFFIX, SAM = "SuffixDecoding", "SAM-Decoding"
_END = -1  # among the tokens of a trie, before the first text and after each one
Draft = tuple[int, int, int]  # its token, its parent (0 the root, i > 0 the i-th draft of the tree) and its depth


@dataclass(slots=True)
class SuffixNode:
    """The occurrences of a suffix."""

    places: list[int] = field(default_factory=list)  # of the token after each, in `SuffixTrie.tokens`; ascending
    children: defaultdict[int, SuffixNode] = field(default_factory=lambda: defaultdict(SuffixNode))


class SuffixTrie:
    """All suffixes of at most `DEPTH` tokens of some texts."""

    def __init__(self) -> None:
        self.root, self.tokens = SuffixNode(), [_END]

    def add(self, tokens: Iterable[int], active: list[SuffixNode]) -> list[SuffixNode]:
        """Continue a text, whose `active` suffixes end with its last token; returns the new ones, the longest last."""
        for token in tokens:
            self.tokens.append(token)
            active = [node.children[token] for node in [self.root, *active][:DEPTH]]
            for node in active:
                node.places.append(len(self.tokens))
        return active

    def follow(self, tokens: Iterable[int], active: list[SuffixNode]) -> list[SuffixNode]:
        """The suffixes that are known here after more tokens of another text."""
        for token in tokens:
            active = [node.children[token] for node in [self.root, *active][:DEPTH] if token in node.children]
        return active

    def learn(self, texts: Iterable[Text], method: SuffixMethod) -> SuffixTrie:
        """Add what a method learns from whole texts; returns the trie."""
        for text in texts:
            self.add([*(text.prompt if method.prompts else ()), *text.answer], [])
            self.tokens.append(_END)
        return self


@dataclass(frozen=True)
class SuffixMethod:
    """A method with its settings, of which a tree's are for `SUFFIX`, and a chain's for `SAM`."""

    name: str
    factor: float = 1.0  # drafts of a tree for each token of the match, at most
    least: float = 0.1  # the smallest product of frequencies of a draft in a tree
    prompts: bool = False  # whether earlier prompts are learned from, besides earlier answers
    bias: int = 5  # tokens by which a chain's match in earlier texts must be longer than one in the text itself
    latest: bool = False  # whether a chain follows the latest place of the match, and not the first

    def shown(self, learned: str = "earlier") -> str:
        """The settings and what is learned from, such as `factor 1, least 0.1, earlier answers`."""
        chain = f"bias {self.bias}{', latest place' if self.latest else ''}"
        settings = f"factor {self.factor:g}, least {self.least:g}" if self.name == SUFFIX else chain
        return f"{settings}, {learned} {'texts' if self.prompts else 'answers'}"


PUBLISHED = {SUFFIX: SuffixMethod(SUFFIX), SAM: SuffixMethod(SAM, prompts=True)}
GRID = {
    SUFFIX: [SuffixMethod(SUFFIX, *one) for one in itertools.product((1.0, 2.0, 4.0), (0.0, 0.1), (False, True))],
    SAM: [SuffixMethod(SAM, prompts=True, bias=bias, latest=latest) for bias in (0, 5) for latest in (False, True)],
}


def grow_tree(start: SuffixNode, size: int, depth: int, least: float) -> tuple[float, list[Draft]]:
    """A tree below a suffix, grown greedily by the product of frequencies, after the sum of these: its score."""
    score, drafts, number = 0.0, list[Draft](), itertools.count()
    heap: list[tuple[float, int, SuffixNode, Draft]] = []
    chance, node, above = -1.0, start, 0
    while True:
        total = sum(len(child.places) for child in node.children.values())
        for token, child in node.children.items() if above < depth else ():
            share = chance * len(child.places) / total
            if -share >= least:
                heapq.heappush(heap, (share, next(number), child, (token, len(drafts), above + 1)))
        if not heap or len(drafts) == size:
            return score, drafts
        chance, _, node, draft = heapq.heappop(heap)
        drafts.append(draft)
        score, above = score - chance, draft[2]


class SuffixText:
    """A text so far, and what it has in common with earlier ones."""

    def __init__(self, method: SuffixMethod, earlier: SuffixTrie, tokens: Sequence[int]) -> None:
        self.method, self.earlier, self.own = method, earlier, SuffixTrie()
        self._mine, self._known = list[SuffixNode](), list[SuffixNode]()
        self.add(tokens)

    def add(self, tokens: Sequence[int]) -> None:
        self._mine, self._known = self.own.add(tokens, self._mine), self.earlier.follow(tokens, self._known)

    def draft(self, most: int, depth: int) -> list[Draft]:
        """At most so many drafts, in at most so many levels; parents come first."""
        if self.method.name == SUFFIX:
            found = [self._tree(nodes, most, depth) for nodes in (self._mine, self._known)]
            return max(found, key=lambda one: one[0])[1]
        (length, place), (other, there) = self._match(self.own, self._mine), self._match(self.earlier, self._known)
        trie, place = (self.own, place) if length and other <= length + self.method.bias else (self.earlier, there)
        chain = trie.tokens[place : place + min(most, depth)] if length or other else []
        followed = itertools.takewhile(lambda token: token != _END, chain)
        return [(token, i, i + 1) for i, token in enumerate(followed)]

    def _tree(self, nodes: Sequence[SuffixNode], most: int, depth: int) -> tuple[float, list[Draft]]:
        """The tree with the best score of all suffixes, of equal ones that of the shortest."""
        best: tuple[float, list[Draft]] = (0.0, [])
        for length in range(len(nodes), 0, -1):
            size = min(most, int(self.method.factor * length))
            if size < best[0]:  # a draft adds at most 1 to the score, and shorter suffixes have no larger trees
                break
            found = grow_tree(nodes[length - 1], size, depth, self.method.least)
            best = found if found[0] >= best[0] else best
        return best

    def _match(self, trie: SuffixTrie, nodes: Sequence[SuffixNode]) -> tuple[int, int]:
        """Length and place in a trie of the longest suffix that occurred before; length 0 where none did."""
        tokens, last = trie.tokens, self.own.tokens
        for length in range(len(nodes), 0, -1):
            places = nodes[length - 1].places
            if len(places) > (trie is self.own):  # the last place in the text itself is the end of it
                place = places[(-2 if trie is self.own else -1) if self.method.latest else 0]
                while length < place and tokens[place - 1 - length] == last[-1 - length] != _END:  # beyond `DEPTH`
                    length += 1
                return length, place
        return 0, _END


def steps_of(texts: Iterable[Text], method: SuffixMethod, nodes: int, known: SuffixTrie | None = None) -> Iterator[int]:
    """The steps of each text by replay, with at most `nodes` (root counted), after known texts or those before it."""
    earlier = SuffixTrie() if known is None else known
    for text in texts:
        answer, at, steps = text.answer, 0, 0
        so_far = SuffixText(method, earlier, [*text.prompt, *answer[:1]])
        while at < len(answer):
            accepted = node = 0
            for number, (token, parent, depth) in enumerate(so_far.draft(nodes - 1, nodes - 1), start=1):
                if parent == node and answer[at + depth : at + depth + 1] == [token]:
                    node, accepted = number, depth
            so_far.add(answer[at + 1 : at + 2 + accepted])
            at, steps = at + 1 + accepted, steps + 1
        if known is None:
            earlier.learn([text], method)
        yield steps


def best_of_grid(name: str, texts: Sequence[Text], nodes: int, progress: Progress) -> SuffixMethod:
    """The settings of a method with the fewest steps on texts, by replay, each text after those before it."""
    steps, tokens = [], sum(len(text.answer) for text in texts)
    for number, method in enumerate(GRID[name], start=1):
        steps.append(sum(steps_of(texts, method, nodes)))
        progress(number, len(GRID[name]), f"{method.shown()}: {tokens / steps[-1]:.3f} tokens per step")
    return GRID[name][int(np.argmin(steps))]


@dataclass(eq=False)
class SuffixProposer:
    """A method as a drafter of per-step trees, from each text so far and from earlier texts, which stay as they are."""

    method: SuffixMethod
    earlier: SuffixTrie
    depth, num_candidates = STEP_SIZES[-1] - 1, STEP_SIZES[-1]
    window, rows_at_once = 1 << 30, 1

    def start(self, texts: TokenLists, depth: int, ends: TokenLists | None = None) -> SuffixSession:
        if ends is not None:
            raise self.refused("traced")
        return SuffixSession(self, texts)

    def refused(self, done: str) -> TreeoptError:
        what, why = f"trees of {self.method.name} cannot be {done}", "each step has its own, of a number of nodes"
        return TreeoptError(Code.DRAFTER_MISMATCH, what, why=why, fix="treeopt.TreePolicy(nodes, depth, name)")


class SuffixSession(ProposerSession):
    """Drafting for the rows of a batch, on the host; all state is the texts so far."""

    def __init__(self, proposer: SuffixProposer, texts: TokenLists) -> None:
        self._proposer, self.name = proposer, proposer.method.name
        self._rows = [SuffixText(proposer.method, proposer.earlier, text) for text in texts]

    def begin(self, roots: Tensor, states: Tensor) -> None:
        """Nothing to do: drafts depend on the texts alone."""

    def fill(self, roots: Tensor, states: Tensor, tree: Buffers) -> Drafts:
        raise self._proposer.refused("static")

    def grow(self, roots: Tensor, states: Tensor, limits: SizeLimits) -> Drafts:
        if limits.path_tokens:
            raise self._proposer.refused("chosen by path tokens")
        found = [row.draft(limits.sizes[-1] - 1, limits.depth) for row in self._rows]
        count = np.array([len(drafts) for drafts in found])
        nodes = int(count.max()) + 1
        padded = np.array([[*one, *[(NO_TOKEN, 0, 1)] * (nodes - len(one))] for one in found], np.int64)
        tokens, parents, depths = padded.transpose(2, 0, 1).copy()
        grown = Expansion(tokens, parents, depths, np.zeros(tokens.shape, np.float32), count, count + 1)
        return compile_drafts(grown, nodes, limits.depth, roots)

    def keep(self, kept: AcceptedPart) -> None:
        for row, tokens in zip(self._rows, kept.tokens, strict=True):
            row.add(tokens)

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def mark(self) -> list[list[int]]:
        return [row.own.tokens[1:] for row in self._rows]

    def rewind(self, mark: list[list[int]]) -> None:
        self._rows = [SuffixText(self._proposer.method, self._proposer.earlier, tokens) for tokens in mark]
