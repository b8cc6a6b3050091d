"""The tree of one step, against every path over a tiny vocabulary."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_scorer import Scorer
from looped import looped
from naive_draft import Case, random_case

from treeopt.drafter import Drafter
from treeopt.drafting.interface import Expansion, Ints
from treeopt.drafting.kernel.data import MAX_PARENTS
from treeopt.drafting.trace import node_ranks

Path = tuple[int, ...]


def tree_of(scorer: Scorer, logits: torch.Tensor, recent: Ints, nodes: int, depth: int) -> Expansion:
    """The trees of all rows."""
    return scorer.session(logits, recent, depth).expand(nodes, depth)


def grown(case: Case, nodes: int, depth: int | None = None) -> Expansion:
    """The trees of all rows of a case."""
    model = Scorer(case.drafter)
    depth = case.drafter.depth if depth is None else depth
    logits = torch.from_numpy(case.logits[: min(depth, case.drafter.num_heads)])
    return tree_of(model, logits, case.recent, nodes, depth)


def paths_of(expansion: Expansion, row: int) -> list[Path]:
    """The path of each node, in the nodes' order; a parent that does not stand before its child is an error."""
    paths: list[Path] = [()]
    for token, parent in zip(expansion.tokens[row].tolist(), expansion.parents[row].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def all_paths(case: Case, row: int, depth: int) -> dict[Path, float]:
    """Every path of candidates, with the sum of its log-probabilities."""
    naive = case.naive(row)
    found: dict[Path, float] = {}
    level: dict[Path, float] = {(): 0.0}
    for _ in range(depth):
        level = {
            (*path, token): above + own
            for path, above in level.items()
            for token, own in naive.log_probabilities(list(path)).items()
        }
        found |= level
    return found


def two_rows(top: int) -> tuple[Scorer, torch.Tensor]:
    """Two plain heads over three tokens, chances (0.5, 0.3, 0.2) and (0.7, 0.2, 0.1); in row 1 reversed."""
    chances = torch.tensor([[[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], [[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]]])
    return Scorer(Drafter.heads_only(2, top)), chances.log()


def test_tree_by_hand() -> None:
    """0.5 of (0), 0.35 of (0 0), 0.3 of (1), 0.21 of (1 0), 0.2 of (2)."""
    model, logits = two_rows(3)
    found = tree_of(model, logits, np.zeros((2, 1), np.int64), 6, 2)
    assert found.tokens.tolist() == [[0, 0, 1, 0, 2], [2, 2, 1, 2, 0]]
    assert found.parents.tolist() == [[0, 1, 0, 3, 0]] * 2
    assert found.depths.tolist() == [[1, 2, 1, 2, 1]] * 2
    assert np.exp(found.log_probability[0]).tolist() == pytest.approx([0.5, 0.35, 0.3, 0.21, 0.2])
    assert found.log_probability[1].tolist() == pytest.approx(found.log_probability[0].tolist())


def test_fewer_candidates_than_nodes() -> None:
    """Two candidates a node and two levels are six drafts, whatever is asked for."""
    model, logits = two_rows(2)
    found = tree_of(model, logits, np.zeros((2, 1), np.int64), 64, 2)
    assert sorted(paths_of(found, 1)) == [(1,), (1, 1), (1, 2), (2,), (2, 1), (2, 2)]


def test_no_row_is_longer_than_its_candidates() -> None:
    """Repeated candidates are no nodes: a lone row has all paths once; of several the shorter are filled up."""
    for seed in range(8):
        case = random_case(seed)
        together = grown(case, 1000, 1)
        for row in range(3):
            one = Case(case.table, case.drafter, case.logits[:, row : row + 1], case.recent[row : row + 1])
            assert sorted(paths_of(grown(one, 1000, 1), 0)) == sorted(all_paths(one, 0, 1))
        assert together.tokens.shape[1] == max(len(all_paths(case, row, 1)) for row in range(3))


def test_parents_are_limited() -> None:
    """Of 20 drafts of level 1 only the first `MAX_PARENTS` have children, though the other ones' would be likelier."""
    logits = torch.cat([torch.linspace(0.1, 0, 20), torch.full((20,), -30.0)]).expand(2, 1, 40).clone()
    logits[1] = torch.tensor([50.0] + [0.0] * 39)  # the child is as likely as its parent
    model = Scorer(Drafter.heads_only(2, 20))
    found = tree_of(model, logits, np.zeros((1, 1), np.int64), 64, 2)
    paths = paths_of(found, 0)
    assert {path[0] for path in paths if len(path) == 2} == set(range(MAX_PARENTS))
    assert sum(len(path) == 1 for path in paths) == 20


def naive_places(paths: list[Path], true: list[int]) -> list[int]:
    """Number of each prefix among the paths, counted from 1."""
    orders = []
    for length in range(1, len(true) + 1):
        prefix = tuple(true[:length])
        orders.append(paths.index(prefix) + 1 if prefix in paths else len(paths) + 1)
    return orders


@looped("nodes", [1, 2, 6, 30])
def test_places_equal_a_naive_walk(nodes: int) -> None:
    """Every continuation of up to five tokens, the text's end among them, is looked up path by path."""
    for seed in range(4):
        check_places(random_case(seed, rows=1), seed, nodes)


def check_places(case: Case, seed: int, nodes: int) -> None:
    """Of one row's tree."""
    expansion = grown(case, nodes)
    paths = paths_of(expansion, 0)
    vocab = len(case.table.unigram)
    rng = np.random.default_rng(seed)
    texts = [list(path) + rng.integers(-1, vocab, 3).tolist() for path in [(), *paths]]
    for true in [*texts, [], [-1, 0, 0], *map(list, itertools.product(range(vocab), repeat=2))]:
        assert node_ranks(expansion, np.array([true], np.int64)).tolist() == [naive_places(paths, true)]


SEVERAL = grown(random_case(5), 10)


@given(st.lists(st.lists(st.integers(-1, 3), min_size=4, max_size=4), min_size=3, max_size=3))
def test_places_of_several_rows(true: list[list[int]]) -> None:
    """Each row is looked up in its own tree."""
    naive = [naive_places(paths_of(SEVERAL, row), true[row]) for row in range(3)]
    assert node_ranks(SEVERAL, np.array(true)).tolist() == naive


def test_places_by_hand() -> None:
    """A tree of 0, 1 and 0 0: a miss at one level is a miss at all below, even where a later token is in the tree."""
    none = np.zeros((1, 3), np.float32)
    tree = Expansion(
        np.array([[0, 1, 0]]), np.array([[0, 0, 1]]), np.array([[1, 1, 2]]), none, np.array([3]), np.array([4])
    )
    wanted = {(0, 0, 0): [1, 3, 4], (1, 0, 0): [2, 4, 4], (2, 0, 0): [4, 4, 4], (0, -1, -1): [1, 4, 4]}
    for true, orders in wanted.items():
        assert node_ranks(tree, np.array([true])).tolist() == [orders]


def test_of_equally_likely_nodes_the_shallower_is_first() -> None:
    """Two drafts of 0.5 each with a sure child: both come before their children."""
    logits = torch.tensor([[[0.0, 0.0]], [[50.0, 0.0]]])
    found = tree_of(Scorer(Drafter.heads_only(2, 2)), logits, np.zeros((1, 1), np.int64), 5, 2)
    assert found.depths.tolist() == [[1, 1, 2, 2]]
    assert found.tokens.tolist() == [[0, 1, 0, 0]]
    assert found.parents.tolist() == [[0, 0, 1, 2]]
