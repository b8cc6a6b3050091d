"""Drafters with a draft model against the naive drafter, which runs a forward over each node's whole text."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from looped import looped
from naive_draft import Table, bounds, naive_mapped, naive_of, random_drafter
from tiny import tiny_base

from treeopt.drafter import Drafter
from treeopt.drafting.interface import AcceptedPart, Expansion, SizeLimits
from treeopt.drafting.kernel.data import MAX_PARENTS
from treeopt.drafting.model import ModelProposer
from treeopt.drafting.trace import trace_texts
from treeopt.models.base import Base
from treeopt.texts.encode import Text
from treeopt.traces import NONE
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_ranks
from treeopt.verify.levels import LevelSession

SEEDS = int(os.environ.get("TREEOPT_SEEDS", "2"))
SOURCES = ("model", "no heads", "voted", "empty no heads")  # beside the draft model: nothing, or these
NO_STATE = torch.zeros(1, 1)


@dataclass(frozen=True)
class World:
    """A draft model, a drafter with it, and texts that repeat themselves."""

    base: Base
    draft: Base
    table: Table
    drafter: Drafter
    texts: list[Text]

    @property
    def proposer(self) -> ModelProposer:
        """The drafter with its models."""
        return ModelProposer(self.base, self.draft, self.drafter)

    def ranked(self, text: list[int]) -> Callable[[list[int]], list[tuple[int, float]]]:
        """Of a path below a text's end: all candidates with the log of their probability, the best first."""

        def of(path: list[int]) -> list[tuple[int, float]]:
            logits = [self.logits([*text, *path[:level]]) for level in range(len(path) + 1)]
            if self.drafter.ngram_table is not None:
                window = max(self.drafter.window, 4)
                naive = naive_of(self.drafter, self.table, logits, ([-1] * window + text)[-window:])
                found = naive.log_probabilities(path)
                return [(token, found[token]) for token, _ in naive.ranked(path)]
            level = self.drafter.levels[len(path)]
            scores = np.array(logits[-1]) - np.logaddexp.reduce(logits[-1])
            order = np.argsort(-scores, kind="stable")[: self.drafter.top]
            scores = scores[order] * level.head
            total = np.exp(scores).sum() + np.exp(level.other_logit)
            chances = [naive_mapped(float(np.exp(score) / total), level.calibration_map) for score in scores]
            return list(zip(order.tolist(), chances, strict=True))

        return of

    @torch.inference_mode()
    def logits(self, text: list[int]) -> list[float]:
        """The draft model's after a text, by one forward without a cache."""
        found: list[float] = self.draft.forward(torch.tensor([text]), use_cache=False)[0][0, -1].tolist()
        return found


def world(seed: int, source: str) -> World:
    """The texts need not be any model's own."""
    rng = np.random.default_rng([seed, SOURCES.index(source)])
    vocab = int(rng.integers(3, 9))
    base, draft = tiny_base("llama", seed, vocab_size=vocab), tiny_base("mistral", seed + 1, vocab_size=vocab)
    table, drafter = random_drafter(rng, vocab, "voted" if source == "model" else source, int(rng.choice([8, 200])))
    level = drafter.levels[0]
    levels = tuple(dataclasses.replace(level, head=0.5 + 0.3 * number) for number in range(4))
    drafter = dataclasses.replace(drafter, levels=levels, num_heads=0, draft=draft.fingerprint)
    if source == "model":
        drafter = dataclasses.replace(drafter, ngram_table=None, window=0, voted=0)
    texts = []
    for number in range(3):
        length = int(rng.integers(4, 30))
        tokens = np.resize(rng.integers(vocab, size=rng.integers(2, 8)), length)
        prompt = int(rng.integers(1, length - 1))
        texts.append(Text(f"set:{number}", tokens[:prompt].tolist(), tokens[prompt:].tolist()))
    return World(base, draft, table, drafter, texts)


@looped("source", SOURCES)
@looped("seed", range(SEEDS))
def test_ranks_are_the_naive_ones(seed: int, source: str) -> None:
    """Every position and level of every text."""
    made = world(seed, source)
    found = trace_texts(made.base, [made.proposer] * 3, made.texts, 253)
    sure = total = 0
    for text, traced in zip(made.texts, found, strict=True):
        for place in range(len(text.answer)):
            ranked = made.ranked([*text.prompt, *text.answer[: place + 1]])
            after = text.answer[place + 1 :]
            for level in range(made.drafter.depth):
                rank = int(traced.ranks[place, level])
                if level >= len(after):
                    assert rank == NONE
                    continue
                low, high = bounds(ranked(after[:level]), after[level])
                assert low <= rank <= high
                sure, total = sure + (low == high), total + 1
    assert sure > 0.6 * total > 0


def likeliest(made: World, text: list[int], nodes: int, depth: int) -> list[tuple[float, tuple[int, ...]]]:
    """The likeliest paths by going through all levels, of each of which the likeliest become parents."""
    ranked = made.ranked(text)
    found: list[tuple[float, tuple[int, ...]]] = []
    parents: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(depth):
        children = [
            (likely + chance, (*path, token)) for likely, path in parents for token, chance in ranked(list(path))
        ]
        children.sort(key=lambda one: -one[0])
        found += children
        parents = children[:MAX_PARENTS]
    return sorted(found, key=lambda one: -one[0])[: nodes - 1]


def paths_of(tree: Expansion, row: int) -> dict[tuple[int, ...], float]:
    """The paths of a row's nodes, with the log of their probability."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths[1:], tree.log_probability[row].tolist(), strict=True))


@looped("source", SOURCES)
def test_a_session_that_decodes_traces_too(source: str) -> None:
    """Ranks and terms after given tokens are those of tracing, before and after a tree was grown."""
    made = world(4, source)
    rows = [[*text.prompt, *text.answer] for text in made.texts]
    true = np.random.default_rng(0).integers(made.base.vocab_size, size=(3, made.drafter.depth))
    whole = [[*row, *after] for row, after in zip(rows, true.tolist(), strict=True)]
    tracing = made.proposer.start(whole, made.drafter.depth, [[len(row)] for row in rows])
    decoding = made.proposer.start(rows, made.drafter.depth)
    roots = torch.tensor([row[-1] for row in rows])
    for session in (tracing, decoding):
        session.begin(roots, NO_STATE.expand(3, 1))
    for _ in range(2):
        np.testing.assert_array_equal(decoding.trace(true)[0], tracing.trace(true)[0])
        for depth in range(made.drafter.depth):
            ours, theirs = (session.features(true[:, :depth]) for session in (decoding, tracing))
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            np.testing.assert_allclose(ours.terms, theirs.terms, atol=1e-4)
        tree = decoding.expand(9, 3)
    np.testing.assert_allclose(tree.log_probability, tracing.expand(9, 3).log_probability, atol=1e-3)


@pytest.mark.slow
@looped("source", SOURCES)
@looped("nodes", [3, 24])
def test_the_likeliest_nodes(source: str, nodes: int) -> None:
    """Each row's tree has the likeliest nodes, in decoding and, at every position of a text, in tracing."""
    made = world(5, source)
    rows = [[*text.prompt, *text.answer] for text in made.texts]
    decoding = made.proposer.start(rows, 3)
    roots = torch.tensor([row[-1] for row in rows])
    decoding.begin(roots, NO_STATE.expand(3, 1))
    tracing = made.proposer.start(rows, 3, [[2, len(row)] for row in rows])
    tracing.begin(roots.repeat_interleave(2), NO_STATE.expand(6, 1))
    in_decoding, in_tracing = decoding.expand(nodes, 3), tracing.expand(nodes, 3)
    for row, tokens in enumerate(rows):
        for tree, at, text in (
            (in_decoding, row, tokens),
            (in_tracing, 2 * row, tokens[:2]),
            (in_tracing, 2 * row + 1, tokens),
        ):
            oracle = likeliest(made, text, nodes, 3)
            found = paths_of(tree, at)
            assert all(tree.parents[at] <= np.arange(tree.parents.shape[1]))
            np.testing.assert_allclose(
                sorted(found.values(), reverse=True)[: len(oracle)], [chance for chance, _ in oracle], atol=1e-3
            )
            least = oracle[-1][0] + 1e-3
            assert {path for chance, path in oracle if chance > least} <= set(found)


@looped("source", SOURCES)
def test_filled_trees(source: str) -> None:
    """A static tree holds the naive candidates by rank, step after step; ranks without a candidate are void."""
    made = world(7, source)
    ranks = made.proposer.num_candidates
    static = Tree.from_paths({(0,), (1,), (ranks - 1,), (0, 0), (1, 1), (1, 1, 0), (1, 1, 1), (0, 0, 0)})
    tree, parents = compile_ranks(static), static.parents
    rows = [[*text.prompt, text.answer[0]] for text in made.texts]
    session = made.proposer.start(rows, 3)
    rng = np.random.default_rng(0)
    for _ in range(4):
        drafts = session.fill(torch.tensor([row[-1] for row in rows]), NO_STATE.expand(len(rows), 1), tree)
        for row, text in enumerate(rows):
            tokens = drafts.tokens[row].tolist()
            void = [False] * len(tokens) if drafts.void is None else drafts.void[row].tolist()
            ranked, paths = made.ranked(text), [[]]
            for node, path in enumerate(static.paths, start=1):
                above = paths[parents[node]]
                paths.append(None if above is None or void[node] else [*above, tokens[node]])
                candidates = [] if above is None else ranked(above)
                assert void[node] == (path[-1] >= len(candidates))
                if not void[node]:
                    chosen = dict(candidates)[tokens[node]]
                    assert abs(chosen - candidates[path[-1]][1]) < 1e-3
        new = [rng.integers(made.base.vocab_size, size=rng.integers(1, 5)).tolist() for _ in rows]
        session.keep(AcceptedPart(new, torch.zeros(0), torch.zeros(0), torch.zeros(0), drafts))
        rows = [row + more for row, more in zip(rows, new, strict=True)]
        if len(rows) == 3:
            session.select([0, 2])
            rows = [rows[0], rows[2]]


@looped("source", SOURCES)
def test_sizes_by_cost(source: str) -> None:
    """Of several sizes each row takes the one with the most estimated tokens less its cost."""
    made = world(9, source)
    rows = [[*text.prompt, *text.answer] for text in made.texts]
    limits = SizeLimits((2, 4, 12), (0.0, 0.3, 1.0), 3)
    roots = torch.tensor([row[-1] for row in rows])
    for row, text in enumerate(rows):
        session = made.proposer.start([text], 3)
        drafts = session.grow(roots[row : row + 1], NO_STATE, limits)
        chances = np.exp([chance for chance, _ in likeliest(made, text, 12, 3)])
        values = [1 + chances[: size - 1].sum() - cost for size, cost in zip(limits.sizes, limits.cost, strict=True)]
        nodes = min(limits.sizes[int(np.argmax(values))], len(chances) + 1)
        assert drafts.tokens.shape[1] == nodes


def test_a_rewound_step_runs_accepted_tokens_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is timed again and again runs as many tokens of the text as a step can accept, and the root."""
    made = world(3, "model")
    text = [*made.texts[0].prompt, *made.texts[0].answer] * 3
    session = made.proposer.start([text], 3)
    counts: list[int] = []
    append = LevelSession.append

    def counted(texts: LevelSession, tokens: torch.Tensor, *, logits_to_keep: int = 0) -> torch.Tensor:
        counts.append(tokens.shape[1])
        return append(texts, tokens, logits_to_keep=logits_to_keep)

    monkeypatch.setattr(LevelSession, "append", counted)
    roots = torch.tensor([text[-1]])
    session.begin(roots, NO_STATE)
    first = session.expand(9, 3).tokens.tolist()
    mark = session.mark()
    session.rewind(mark)
    session.begin(roots, NO_STATE)
    assert session.expand(9, 3).tokens.tolist() == first
    assert counts == [1, 4]
