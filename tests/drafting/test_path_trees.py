"""Per-step trees by path tokens: the best of all subtrees, replayed exactly, and decoded to the model's text."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from drafters import answered, learned, prompts_of
from looped import looped
from predicted import predict
from tiny import family

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import Drafter
from treeopt.drafting.interface import Expansion, SizeLimits
from treeopt.drafting.kernel.paths import accepted_paths, cut_to_paths, path_trees
from treeopt.drafting.trace import node_ranks
from treeopt.models.base import Base
from treeopt.policy import TreePolicy
from treeopt.texts.encode import Text
from treeopt.tree import Tree

BUDGETS = np.arange(1, 25)


def random_expansion(seed: int, rows: int = 3, nodes: int = 8, depth: int = 4) -> Expansion:
    """Trees of different sizes whose nodes are sorted by probability; ties and zeros included."""
    rng = np.random.default_rng(seed)
    tokens, parents, depths = (np.zeros((rows, nodes), np.int64) for _ in range(3))
    likely = np.full((rows, nodes), -np.inf, np.float32)
    drafts = rng.integers(1, nodes + 1, rows)
    for row, count in enumerate(drafts.tolist()):
        made = [(0, 0, 1.0)]  # depth, parent and probability of the root and the nodes
        while len(made) <= count:
            above = int(rng.choice([node for node in range(len(made)) if made[node][0] < depth]))
            made.append((made[above][0] + 1, above, made[above][2] * float(np.round(rng.random(), 1))))
        order = sorted(range(1, len(made)), key=lambda node: -made[node][2])  # stable: parents first
        number = {0: 0, **{node: place + 1 for place, node in enumerate(order)}}
        for place, node in enumerate(order):
            depths[row, place], parents[row, place] = made[node][0], number[made[node][1]]
            tokens[row, place] = place
            with np.errstate(divide="ignore"):
                likely[row, place] = np.log(np.float32(made[node][2]))
    return Expansion(tokens, parents, depths, likely, drafts, drafts + 1)


def chains_to(grown: Expansion, row: int, node: int) -> tuple[int, ...]:
    """The nodes from the first level to a node, from 1."""
    path: tuple[int, ...] = ()
    while node:
        path, node = (node, *path), int(grown.parents[row, node - 1])
    return path


def subtrees(grown: Expansion, row: int) -> Iterator[tuple[int, float]]:
    """Path tokens and expected tokens of every tree of a row's nodes."""
    paths = {node: chains_to(grown, row, node) for node in range(1, int(grown.drafts[row]) + 1)}
    for kept in itertools.chain.from_iterable(itertools.combinations(paths, n) for n in range(len(paths) + 1)):
        if all(set(paths[node]) <= set(kept) for node in kept):
            tree = Tree.from_paths([paths[node] for node in kept])
            yield tree.path_tokens, 1 + float(sum(np.exp(np.float64(grown.log_probability[row, n - 1])) for n in kept))


@looped("seed", range(12))
def test_each_budget_has_the_best_tree(seed: int) -> None:
    """No tree of at most as many path tokens has more expected tokens, and the tree that is cut is the promised one."""
    grown = random_expansion(seed)
    trees = path_trees(grown, BUDGETS, 4)
    for row in range(len(grown.tokens)):
        known = list(subtrees(grown, row))
        for number, budget in enumerate(BUDGETS.tolist()):
            best = max((total for price, total in known if price <= budget), default=1.0)
            assert trees.expected[row, number] == pytest.approx(max(best, 1.0), abs=1e-5)
    for number, budget in enumerate(BUDGETS.tolist()):
        cut = cut_to_paths(grown, SizeLimits((budget,), (), 4, path_tokens=True))
        for row in range(len(grown.tokens)):
            count = int(cut.drafts[row])
            made = Tree.from_paths([chains_to(cut, row, node) for node in range(1, count + 1)])
            assert made.path_tokens <= max(budget, 1)
            assert cut.size[row] == count + 1 == made.nodes
            total = 1 + np.exp(cut.log_probability[row, :count].astype(np.float64)).sum()
            assert total == pytest.approx(trees.expected[row, number], abs=1e-5)
            assert np.isneginf(cut.log_probability[row, count:]).all()


@looped("seed", range(12))
def test_accepted_drafts_are_those_of_the_tree(seed: int) -> None:
    """Along every path of the candidates, and along one that leaves them."""
    grown = random_expansion(seed, rows=4)
    trees = path_trees(grown, BUDGETS, 4)
    for place in range(grown.tokens.shape[1]):
        true = np.full((4, 4), 99)
        for row in range(4):
            path = chains_to(grown, row, min(place + 1, int(grown.drafts[row])))
            true[row, : len(path)] = [node - 1 for node in path]  # the token of a node is its place
        found = accepted_paths(trees, node_ranks(grown, true))
        for number, budget in enumerate(BUDGETS.tolist()):
            cut = cut_to_paths(grown, SizeLimits((budget,), (), 4, path_tokens=True))
            expected = (node_ranks(cut, true) <= cut.drafts[:, None]).sum(1)
            assert found[:, number].tolist() == expected.tolist()


def test_a_step_takes_the_budget_that_pays() -> None:
    """Estimated tokens - cost decides; equal ones take the smaller."""
    grown = random_expansion(5)
    free = cut_to_paths(grown, SizeLimits((2, 24), (0.0, 0.0), 4, path_tokens=True))
    dear = cut_to_paths(grown, SizeLimits((2, 24), (0.0, 9.0), 4, path_tokens=True))
    small = cut_to_paths(grown, SizeLimits((2,), (), 4, path_tokens=True))
    assert dear.drafts.tolist() == small.drafts.tolist()
    assert (free.drafts >= dear.drafts).all()
    assert free.drafts.max() > dear.drafts.max()


@functools.cache
def recurrent() -> tuple[Base, Drafter, tuple[Text, ...]]:
    """A tiny model with a recurrent state, a drafter learned from its text, and other texts of it."""
    base = family("qwen3_5_text")
    known = answered(base, prompts_of(0, 12, vocab=base.vocab_size), 16)
    others = answered(base, prompts_of(1, 6, vocab=base.vocab_size), 16)
    return base, learned(base, None, known, tokens=600, new=16).drafter, tuple(others)


@looped("policy", [(6, ()), (24, ()), (64, ((2, 0.1), (8, 0.4), (64, 0.9)))])
def test_decoded_as_replayed(policy: tuple[int, tuple[tuple[int, float], ...]]) -> None:
    """Texts are those of the model, alone and in a batch; alone, the steps are those of replay."""
    base, drafter, texts = recurrent()
    size, cost = policy
    plan = TreePolicy(size, drafter.depth, drafter.id, cost, path_tokens=True)
    predicted = predict(base, None, plan, texts, drafter)
    decoder = TreeDecoder(base, None, plan, drafter=drafter)
    alone = [decoder.generate([text.prompt], 16)[0] for text in texts]
    assert [one.tokens for one in alone] == [text.answer for text in texts]
    assert [len(one.steps) for one in alone] == predicted.sums.steps.tolist()
    together = decoder.generate([text.prompt for text in texts], 16)
    assert [one.tokens for one in together] == [text.answer for text in texts]
    assert [len(one.steps) for one in together] == [len(one.steps) for one in alone]
    assert sum(len(one.steps) for one in alone) < sum(len(text.answer) for text in texts)


def test_a_step_verifies_no_more_path_tokens_than_its_budget() -> None:
    """Rows of a step's forward times their columns, without those that are replayed."""
    base, drafter, texts = recurrent()
    decoder = TreeDecoder(base, None, TreePolicy(12, drafter.depth, drafter.id, path_tokens=True), drafter=drafter)
    run, seen = decoder.forward.run, []  # type: ignore[union-attr]

    def noted(ids: torch.Tensor, *given: Any) -> Any:
        seen.append(tuple(ids.shape))
        return run(ids, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder.forward, "run", noted)
        patch.setattr(decoder.forward, "fixed", 0.0)  # everything is committed, so that nothing is replayed
        for text in texts:
            decoder.generate([text.prompt], 8)
    trees = [rows * columns for rows, columns in seen if rows > 1]
    assert trees
    assert max(trees) <= 12
