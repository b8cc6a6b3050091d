"""Rules: sampled text is distributed as plain sampling; typical acceptance is what its definition says."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from chances import ALPHA, PROMPT, counted, p_value, small_base, text_probabilities
from helpers import random_tree
from looped import looped
from numpy.typing import NDArray
from random_trees import compile_parents
from tiny import but_slow, cycle_base, cycle_heads, random_heads
from torch import Tensor

from treeopt.decode import rules
from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Greedy, Rule, Sample, Typical
from treeopt.drafting.interface import Drafts
from treeopt.models.base import Base
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_tree

SETTINGS = {
    "plain": Sample(),
    "cold": Sample(temperature=0.6),
    "hot": Sample(temperature=1.7),
    "top-k": Sample(top_k=3),
    "top-p": Sample(top_p=0.8),
    "all": Sample(temperature=1.3, top_k=4, top_p=0.9),
}
FULL = Tree.from_paths([path for depth in (1, 2, 3) for path in np.ndindex(*[2] * depth)])  # 1 + 2 + 4 + 8 nodes


@pytest.fixture(scope="module")
def small() -> Base:
    """The model whose texts are counted."""
    return small_base()


def counts_of(base: Base, tree: Tree, rule: Rule) -> NDArray[np.float64]:
    """How often each text came out of a decoder with this tree and rule."""
    return counted(TreeDecoder(base, random_heads(base, 3, 3), tree, acceptance=rule), rounds=6)


@pytest.mark.parametrize("name", but_slow([*SETTINGS], "plain", "top-p", "cold"))
def test_sample_distribution(small: Base, name: str) -> None:
    """Whole texts out of a full tree are distributed as plain sampling distributes them."""
    rule = SETTINGS[name]
    assert p_value(counts_of(small, FULL, rule), text_probabilities(small, rule)) > ALPHA


def test_sample_seed(small: Base) -> None:
    """Equal seeds give equal texts, whatever was drawn before; other seeds others."""
    heads = random_heads(small, 3, 3)
    rows = [PROMPT] * 8
    one, same, other = (
        TreeDecoder(small, heads, FULL, acceptance=Sample(seed=seed)).generate(rows, 20) for seed in (7, 7, 8)
    )
    assert one == same != other
    assert len({tuple(row.tokens) for row in one}) > 1


def test_typical_is_marked_lossy() -> None:
    """Only a typical rule above temperature 0 is lossy."""
    assert [rule.lossy for rule in (Greedy(), Sample(0.7), Typical(0), Typical())] == [False, False, False, True]
    assert (Typical().epsilon, Typical().delta) == (0.09, 0.3)


def typical_by_hand(
    tree: Tree, tokens: list[int], logits: NDArray[np.float64], temperature: float, epsilon: float, delta: float
) -> int:
    """Every candidate path by itself, as the paper tells it."""
    best = (0, 0.0, 0)
    for node in range(tree.nodes):
        path = [i for i in range(tree.nodes) if tree.ancestors[node, i]]
        accepted, likelihood = True, 0.0
        for parent, child in itertools.pairwise(path):
            z = logits[parent] / temperature
            p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
            entropy = -float((p[p > 0] * np.log(p[p > 0])).sum())
            accepted &= bool(p[tokens[child]] > min(epsilon, delta * math.exp(-entropy)))
            likelihood += math.log(max(p[tokens[child]], 1e-300))
        if accepted and (len(path) - 1, likelihood) > (best[0], best[1] if best[0] else -math.inf):
            best = (len(path) - 1, likelihood, node)
    return best[2]


def taken(tree: Tree, tokens: Tensor, logits: Tensor, temperature: float, epsilon: float, delta: float) -> list[int]:
    """The nodes that `rules.typical` takes for a batch."""
    drafts = Drafts(tokens, compile_tree(tree))
    return rules.typical(drafts, logits, temperature=temperature, epsilon=epsilon, delta=delta).tolist()


@looped("seed", range(30))
def test_typical_brute_force(seed: int) -> None:
    """Rows of random trees, drafts and logits end where every path tried by itself ends."""
    rng = np.random.default_rng(seed)
    tree = random_tree(seed, nodes=(1, 6, 25)[seed % 3], depth=4, ranks=4)
    tokens = rng.integers(12, size=(5, tree.nodes))
    logits = rng.normal(size=(5, tree.nodes, 12)) * (0.5, 1.5, 4)[seed // 10]
    temperature, epsilon, delta = (0.7, 0.09, 0.3) if seed % 2 else (1.3, 0.2, 0.6)
    wanted = [
        typical_by_hand(tree, row.tolist(), scores, temperature, epsilon, delta)
        for row, scores in zip(tokens, logits, strict=True)
    ]
    given = torch.from_numpy(tokens), torch.from_numpy(logits).float()
    assert taken(tree, *given, temperature, epsilon, delta) == wanted


@pytest.mark.parametrize(("epsilon", "node"), [(0.5, 0), (0.4375, 1)])
def test_typical_threshold_itself_is_not_enough(epsilon: float, node: int) -> None:
    """A draft of probability 0.5 is accepted above the threshold, and not at it."""
    logits = torch.tensor([[[0.0, 0.0, -torch.inf]] * 2])
    assert taken(Tree(((0,),)), torch.tensor([[2, 1]]), logits, 1.0, epsilon, 9.0) == [node]


def test_typical_accepts_what_is_sure() -> None:
    """A probability that rounds to 1 is enough for the strictest bounds."""
    logits = torch.tensor([[[0.0, 50.0, 0.0]] * 2])
    assert taken(Tree(((0,),)), torch.tensor([[2, 1]]), logits, 0.01, 1.0, 1.0) == [1]


@looped("seed", range(10))
def test_typical_brute_force_own_trees(seed: int) -> None:
    """Rows with a tree each end where every path of their own tree tried by itself ends."""
    rng = np.random.default_rng(seed)
    depths = (1, 2, 4, 6, 4)  # so that no row's depths do for another
    trees = [random_tree(10 * seed + row, nodes=25, depth=d, ranks=30 // d) for row, d in enumerate(depths)]
    tokens, logits = rng.integers(12, size=(5, 25)), rng.normal(size=(5, 25, 12)) * 1.5
    rows = zip(trees, tokens.tolist(), logits, strict=True)
    wanted = [typical_by_hand(*row, 0.7, 0.09, 0.3) for row in rows]
    compiled = compile_parents(torch.tensor([tree.parents for tree in trees]), 6)
    drafts = Drafts(torch.from_numpy(tokens), compiled)
    found = rules.typical(drafts, torch.from_numpy(logits).float(), temperature=0.7, epsilon=0.09, delta=0.3)
    assert found.tolist() == wanted
    assert len(set(wanted)) > 1


def test_typical_hand_computed() -> None:
    """Two even tokens: the bar is min(0.09, 0.3 exp(-log 2)) = 0.09; a token of 0.08 fails it, one of 0.1 does not."""
    tree = Tree(((0,), (1,), (0, 0)))
    parent = torch.tensor([0.5, 0.5, 0.0]).log()
    even = torch.stack([parent] * 4)[None]
    assert taken(tree, torch.tensor([[2, 2, 1, 0]]), even, 1, 0.09, 0.3) == [2]  # 0.5 > 0.09; token 2 has nothing
    assert taken(tree, torch.tensor([[2, 2, 2, 0]]), even, 1, 0.09, 0.3) == [0]
    for p, node in ((0.08, 0), (0.10, 2)):  # H of (0.1, 0.9) is 0.325, of (0.08, 0.92) 0.279: epsilon is the bar
        skewed = torch.tensor([1 - p, p, 0.0]).log().expand(1, 4, 3)
        assert taken(tree, torch.tensor([[2, 2, 1, 2]]), skewed, 1, 0.09, 0.3) == [node]
    flat = torch.zeros(1, 4, 8)  # p = 1/8 = exp(-H): the bar is 0.3 / 8 at delta 0.3, and 1/8 itself at delta 1
    assert taken(tree, torch.tensor([[0, 1, 2, 3]]), flat, 1, 1.0, 0.3) == [3]
    assert taken(tree, torch.tensor([[0, 1, 2, 3]]), flat, 1, 1.0, 1.0) == [0]


def test_typical_ties_by_likelihood() -> None:
    """Of two accepted paths of one length the likelier wins, wherever it stands; a longer one beats both."""
    tree = Tree(((0,), (1,), (1, 0)))
    logits = torch.tensor([0.3, 0.6, 0.1]).log().expand(1, 4, 3)
    assert taken(tree, torch.tensor([[2, 0, 1, 2]]), logits, 1, 0.2, 1.0) == [2]
    assert taken(tree, torch.tensor([[2, 1, 0, 2]]), logits, 1, 0.2, 1.0) == [1]
    assert taken(tree, torch.tensor([[2, 1, 0, 1]]), logits, 1, 0.2, 1.0) == [3]


def test_typical_root_unconditional() -> None:
    """A root that the model would never choose stays; nothing behind it is padding that could be accepted."""
    logits = torch.full((1, 3, 4), -30.0)
    logits[..., 0] = 0.0  # token 0 is certain everywhere
    assert taken(Tree.chain(2), torch.tensor([[3, 1, 0]]), logits, 0.7, 0.09, 0.3) == [0]
    assert taken(Tree.chain(2), torch.tensor([[3, 0, 1]]), logits, 0.7, 0.09, 0.3) == [1]
    assert taken(Tree(()), torch.tensor([[3]]), logits[:, :1], 0.7, 0.09, 0.3) == [0]


def test_typical_accepts_more_than_greedy() -> None:
    """Through a decoder: steps are fewer than under the greedy rule, and each root is the model's first choice."""
    base = cycle_base(2, disturbed=0.05)
    decoders = [
        TreeDecoder(base, cycle_heads(base, 4, 2), Tree.chain(4), acceptance=rule)
        for rule in (Greedy(), Typical(temperature=1.5))
    ]
    exact, lossy = (decoder.generate([[3, 8], [9], [4, 1]], 60) for decoder in decoders)
    assert sum(len(one.step_lengths) for one in lossy) < sum(len(one.step_lengths) for one in exact)
    starts = np.cumsum([0, *lossy[0].step_lengths[:-1]])
    ids = torch.tensor([[3, 8, *lossy[0].tokens]])
    with torch.inference_mode():
        first = base.model(ids).logits[0].argmax(-1)
    assert all(lossy[0].tokens[at] == first[1 + at] for at in starts)


@looped("vocab", [1, 31, 512, 6000, 40009, 40000])
@looped("dtype", [torch.float32, torch.bfloat16])
def test_best_is_the_first_largest(vocab: int, dtype: torch.dtype) -> None:
    """Whatever the vocabulary's size: argmax, the first of equal scores, and the sentinel where a row holds NaN."""
    rng = torch.Generator().manual_seed(vocab)
    scores = torch.randint(-3, 4, (6, 5, vocab), generator=rng).to(dtype)  # full of ties
    wanted = torch.from_numpy(scores.float().numpy().argmax(-1))  # numpy promises the first
    assert torch.equal(rules.best(scores), wanted)
    scores[2, 3, vocab // 2] = torch.nan
    scores[4, 0] = -torch.inf
    wanted[2, 3], wanted[4, 0] = rules.NOT_A_NUMBER, 0
    assert torch.equal(rules.best(scores), wanted)


@looped("rows", [1, 10])
def test_best_of_float64_is_that_of_float32(rows: int) -> None:
    """Stock `generate` compares in float32, however many the scores are."""
    scores = torch.zeros(rows, 40000, dtype=torch.float64)
    scores[:, 3], scores[:, 7] = 1 - 1e-12, 1
    assert rules.best(scores).tolist() == [3] * rows


def test_nan_is_never_a_token() -> None:
    """NaN among the scores gives the sentinel, for the best and for a draw; infinities are scores like others."""
    scores = torch.tensor([[0.0, 1.0, -torch.inf], [0.0, torch.nan, 9.0]])
    assert rules.best(scores).tolist() == [1, rules.NOT_A_NUMBER]
    assert rules.draw(scores[1:]).tolist() == [rules.NOT_A_NUMBER]
    torch.manual_seed(0)
    assert set(rules.draw(scores[:1].expand(200, 3)).tolist()) == {0, 1}
