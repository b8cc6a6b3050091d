"""The kernel's functions as Python runs them, where an index out of bounds is an error; nothing is compiled.

Cases of the other files of tests are run again with these functions, and every entry point against the naive drafter.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from looped import looped
from naive_draft import SOURCES, Case, bounds, random_case

from treeopt.drafter import Drafter
from treeopt.drafting.interface import NO_CANDIDATE, Expansion, SizeLimits
from treeopt.drafting.kernel import compiled
from treeopt.traces import MISS
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_ranks

KERNEL = ("nodes", "trees", "session")
NEAR = 1e-3
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kernel() -> Iterator[SimpleNamespace]:
    """Copies of the kernel's modules, and of tests that import them, without compilation."""
    package = sys.modules["treeopt.drafting.kernel"]
    names = [*(f"treeopt.drafting.kernel.{name}" for name in KERNEL), "kernel_scorer"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "compiled", lambda function: function)
        for name in KERNEL:
            patch.setattr(package, name, None, raising=False)
            delattr(package, name)
        for name in names:
            patch.setitem(sys.modules, name, ModuleType(name))
            del sys.modules[name]
        modules = SimpleNamespace(**{name.rsplit(".")[-1]: importlib.import_module(name) for name in names})
        for name in ("test_scores", "test_kernel", "test_expand", "test_sources"):
            setattr(modules, name, loaded(name, patch))
        yield modules


def loaded(name: str, patch: pytest.MonkeyPatch) -> ModuleType:
    """Another copy of a file of tests, which imports what is in `sys.modules` now."""
    spec = importlib.util.spec_from_file_location(f"uncompiled_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, spec.name, module)  # where dataclasses look their types up
    with np.errstate(all="ignore"):
        spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _as_compiled() -> Iterator[None]:
    """Sums of hashes overflow, and logarithms of 0 are -inf, without a warning."""
    with np.errstate(all="ignore"):
        yield


EACH = [(seed, source) for seed in range(2) for source in SOURCES]


@looped("source", SOURCES)
def test_cases_of_every_source(source: str, kernel: SimpleNamespace) -> None:
    """Candidates, filled trees, sizes, trees of the likeliest nodes and sources against the naive drafter."""
    for seed in range(2):
        case = random_case(seed, source=source, mapped=seed % 3 == 0)
        kernel.test_scores.check_against_naive(case, seed)
        kernel.test_scores.check_log_probability(case, seed)
        kernel.test_kernel.check_filled(case, seed)
        kernel.test_kernel.check_growth(case, 17)
        if "lm head" not in source:
            kernel.test_sources.check_sources(case, seed)
    kernel.test_scores.check_against_naive(random_case(0, window=0, source=source), 0)
    kernel.test_kernel.check_sizes(0, source)


@looped("name", [
    "test_scores.test_latest_longest_match_by_hand",
    "test_scores.test_weight_of_a_match_is_that_of_its_length",
    "test_scores.test_backs_off_to_the_longest_stored_context",
    "test_scores.test_log_probability_is_mapped_between_and_beyond_pairs",
    "test_kernel.test_selected_rows_keep_their_texts",
    "test_expand.test_tree_by_hand",
    "test_expand.test_parents_are_limited",
    "test_expand.test_of_equally_likely_nodes_the_shallower_is_first",
    "test_sources.test_sources_beyond_the_end_are_empty",
])  # fmt: skip
def test_tests_of_the_compiled_kernel_pass(name: str, kernel: SimpleNamespace) -> None:
    """Those by hand."""
    file, test = name.split(".")
    getattr(getattr(kernel, file), test)()


@pytest.mark.quick
def test_a_text_is_rewound(kernel: SimpleNamespace) -> None:
    """As in the compiled kernel, for one text."""
    kernel.test_kernel.check_rewound(0)


def begun(kernel: SimpleNamespace, case: Case) -> Any:
    """A session with a step begun."""
    return kernel.kernel_scorer.Scorer(case.drafter).session(
        torch.from_numpy(case.logits), case.recent, case.drafter.depth
    )


@looped(("seed", "source"), EACH)
def test_traces_are_the_naive_ones(seed: int, source: str, kernel: SimpleNamespace) -> None:
    """Rank of the true token, chance of the best candidate, and the best three candidates, at every level."""
    case = random_case(seed, source=source, mapped=seed == 1)
    rng, vocab = np.random.default_rng(seed), len(case.table.unigram)
    true = rng.integers(vocab, size=(len(case.recent), case.drafter.depth))
    session = begun(kernel, case)
    ranks, best = session.trace(true, confidence=True)
    tokens = session.candidates(true, 3)
    assert session.trace(true)[1].shape == (0, 0)
    for row, path in enumerate(true.tolist()):
        naive = case.naive(row)
        for level, token in enumerate(path):
            ranked = naive.ranked(path[:level])
            low, high = bounds(ranked, token)
            found = int(ranks[row, level])
            assert (MISS if found == NO_CANDIDATE else found) in range(low, high + 1)
            assert best[row, level] == pytest.approx(max(naive.log_probabilities(path[:level]).values()), abs=NEAR)
            for rank, other in enumerate(tokens[row, level].tolist()):
                low, high = bounds(ranked, other) if rank < len(ranked) else (rank, rank)
                assert low <= rank <= high
                assert (other < 0) == (rank >= len(ranked))


def test_traces_beyond_the_end_follow_token_0(kernel: SimpleNamespace) -> None:
    """A negative token is traced as token 0, at its own level and below."""
    case = random_case(0, source="heads")
    shape = len(case.recent), case.drafter.depth
    [ended, zeros] = [begun(kernel, case).trace(np.full(shape, token), confidence=True) for token in (-1, 0)]
    assert ended[0].tolist() == zeros[0].tolist()
    assert ended[1].tolist() == zeros[1].tolist()
    [ended, zeros] = [begun(kernel, case).candidates(np.full(shape, token), 2) for token in (-1, 0)]
    assert ended.tolist() == zeros.tolist()


@looped("depth", [0, 1])
def test_ranked_nodes_are_the_naive_ones(depth: int, kernel: SimpleNamespace) -> None:
    """Two nodes of a row with logits of their own: their candidates, the best first; beyond these token 0 and -inf."""
    case = random_case(4, rows=1, source="lm head")
    session, vocab = begun(kernel, case), len(case.table.unigram)
    logits = torch.from_numpy(np.random.default_rng(depth).normal(size=(1, 2, vocab)).astype(np.float32))
    paths = np.array([[[0] * depth, [1] * depth]], np.int64)
    seen = kernel.kernel_scorer.top_logprobs(logits, session.source.known).numpy()
    session.set_step(seen)
    ranked = kernel.trees.Ranked(np.zeros((1, 2, vocab + 1), np.int64), np.zeros((1, 2, vocab + 1), np.float32))
    session.in_threads(lambda k, part: kernel.trees.rank_rows(k, *part, paths, np.arange(2), ranked))
    for node in range(2):
        naive = case.naive(0)
        naive.logits[depth:] = [logits[0, node].tolist()] * (case.drafter.depth - depth)
        wanted = naive.log_probabilities(paths[0, node].tolist())
        values = ranked.log_probability[0, node].tolist()
        found = dict(zip(ranked.tokens[0, node, : len(wanted)].tolist(), values, strict=False))
        assert found == pytest.approx(wanted, abs=NEAR)
        assert values == sorted(values, reverse=True)
        assert values[len(wanted) :] == [-math.inf] * (vocab + 1 - len(wanted))
        assert ranked.tokens[0, node, len(wanted) :].tolist() == [0] * (vocab + 1 - len(wanted))


@pytest.mark.quick
def test_compiled_trees_by_hand(kernel: SimpleNamespace) -> None:
    """Drafts 5, 6 below 5, 7, and a void fourth node: sorted by depth, the void one the likeliest again."""
    session = begun(kernel, random_case(0, rows=1))
    root = int(session._texts.tokens[0, int(session._end[0]) - 1])
    grown = Expansion(
        tokens=np.array([[5, 6, 7, -1]]),
        parents=np.array([[0, 1, 0, 0]]),
        depths=np.array([[1, 2, 1, 1]]),
        log_probability=np.zeros((1, 4), np.float32),
        drafts=np.array([3]),
        size=np.array([5]),
    )
    drafts = kernel.session.compile_drafts(grown, 5, 2, torch.tensor([root]))
    assert drafts.tokens.tolist() == [[root, 5, 7, 5, 6]]
    assert drafts.void.tolist() == [[False, False, False, True, False]]
    assert drafts.tree.position_ids.tolist() == [[0, 1, 1, 1, 2]]
    paths = [[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 3, -1], [0, 1, 4]]
    assert drafts.tree.retrieve_indices.tolist() == [paths]
    mask = [[column in path for column in range(5)] for path in paths]
    assert drafts.tree.attention_mask.tolist() == [mask]
    assert kernel.session.compile_drafts(grown, 4, 2, torch.tensor([root])).void is None


@pytest.mark.quick
def test_likeliest_votes_by_hand(kernel: SimpleNamespace) -> None:
    """Of weights 2, 3, 2, 3 of tokens 9, 5, 4, 7: 5 and 7, then 4, the smaller id of equal ones."""
    weights, tokens = np.array([2.0, 3.0, 2.0, 3.0]), np.array([9, 5, 4, 7])
    for most, wanted in ((1, [1]), (2, [1, 3]), (3, [1, 3, 2]), (4, [1, 3, 2, 0]), (9, [1, 3, 2, 0])):
        work = SimpleNamespace(votes=weights, voted=tokens, likeliest=np.full(most, -1))
        k = SimpleNamespace(record=SimpleNamespace(voted=most), work=work)
        count = kernel.nodes.likeliest_voted(k, 4)
        assert work.likeliest[:count].tolist() == wanted


@pytest.mark.quick
@looped(("text", "width", "wanted"), [
    ([3, 1, 3, 0, 2], 2, [3, 0]),  # once each: 0 before 1 and 2
    ([2, 2, 0], 3, [2, 0, 1]),  # then an id that is not in the text
    ([5, 4, 3, 2, 1, 0], 1, [0]),
    ([0, 1, 2, 2, 3, 3, 3], 4, [3, 2, 0, 1]),
])  # fmt: skip
def test_frequent_tokens_by_hand(text: list[int], width: int, wanted: list[int], kernel: SimpleNamespace) -> None:
    """By falling count, then by id: log((6 * count + 2) / (n + 2)) of n tokens and a vocabulary of 6."""
    record = SimpleNamespace(window=20, prior=np.zeros(6, np.float32), cache_prior=2.0)
    step = SimpleNamespace(
        frequent=np.full((1, width), -7), frequent_ratios=np.zeros((1, width + 1)), text=[0], end=[len(text)]
    )
    voters = np.zeros(6, np.int32)
    texts = SimpleNamespace(tokens=np.array([text]))
    k = SimpleNamespace(record=record, step=step, texts=texts, work=SimpleNamespace(voters=voters))
    kernel.nodes.frequent_tokens(k, 0)
    assert step.frequent[0].tolist() == wanted
    counts = [text.count(token) for token in wanted] + [0]
    assert step.frequent_ratios[0].tolist() == pytest.approx([math.log((6 * n + 2) / (len(text) + 2)) for n in counts])
    assert not voters.any()


def of_heads(kernel: SimpleNamespace) -> Any:
    """A step of one text with root 1: two heads of two candidates each."""
    logits = torch.tensor([[[0.5, 0.3, 0.2]], [[0.7, 0.2, 0.1]]]).log()
    return kernel.kernel_scorer.Scorer(Drafter.heads_only(2, 2)).session(logits, np.array([[1]]), 2)


def test_grown_trees_have_no_more_nodes_than_candidates(kernel: SimpleNamespace) -> None:
    """Two levels of two candidates are seven nodes, and the root is the caller's."""
    session = of_heads(kernel)
    seen = session._step.seen.reshape(1, -1)
    asked = []
    session.observe = lambda states: asked.append(states) or torch.from_numpy(seen)
    drafts = session.grow(torch.tensor([2]), "states", SizeLimits((64,), (0.0,), 2))
    assert asked == ["states"]
    assert drafts.tokens.tolist() == [[2, 0, 1, 0, 0, 1, 1]]  # by depth, then by chance: 0.35, 0.21, 0.1, 0.06
    assert drafts.void is None
    session.look(seen)
    chosen = session.grow(torch.tensor([2]), "states", SizeLimits((2, 4, 8), (0.0, 0.4, 2.0), 2))
    # 0.5 with two nodes; 0.5 + 0.35 + 0.3 with four, less 0.4; at most 1.72 with seven, less 2.
    assert chosen.tokens.tolist() == [[2, 0, 1, 0]]


@pytest.mark.quick
def test_filled_trees_by_hand(kernel: SimpleNamespace) -> None:
    """A tree of ranks that all nodes have is not void anywhere; one of rank 2 is void below two candidates."""
    session = of_heads(kernel)
    seen = session._step.seen.reshape(1, -1)
    for paths, tokens, void in (
        ([[0], [1], [1, 0]], [[2, 0, 1, 0]], None),
        ([[0], [2], [2, 0]], [[2, 0, 1, 1]], [[False, False, True, True]]),
    ):
        session.look(seen)
        found = session.fill(torch.tensor([2]), "states", compile_ranks(Tree.from_paths(paths)))
        assert found.tokens.tolist() == tokens
        assert (found.void if found.void is None else found.void.tolist()) == void


@pytest.mark.quick
@looped(("costs", "chance", "worth"), [
    ((0.0, 0.4, 2.0), 0.2, True),  # two more nodes give 0.4 and cost 0.4: equal up to rounding
    ((0.0, 0.4, 2.0), 0.19, False),
    ((0.0, 9.0, 2.0), 0.3, False),  # six more nodes give 1.8
    ((0.0, 9.0, 2.0), 0.34, True),
])  # fmt: skip
def test_growth_that_can_pay_by_hand(
    costs: tuple[float, ...], chance: float, worth: bool, kernel: SimpleNamespace
) -> None:
    """From two nodes with 1.5 tokens to four or eight."""
    sizes = kernel.trees.Sizes(np.array([2, 4, 8]), np.array(costs), 2)
    assert kernel.trees._worth(sizes, 1, 1.5, 1.5, chance) is worth


@pytest.mark.quick
@looped(("rows", "threads", "parts"), [
    ([5, 1, 6], 4, [(0, 5), (5, 6), (6, 12)]),  # of the places 0, 3, 6 and 9 the next beginnings of texts
    ([1, 1, 1, 1, 1, 1, 1], 2, [(0, 3), (3, 7)]),
    ([1, 1, 1, 1, 1, 1, 1], 1, [(0, 7)]),
    ([9], 4, [(0, 9)]),
])  # fmt: skip
def test_parts_of_threads_by_hand(
    rows: list[int],
    threads: int,
    parts: list[tuple[int, int]],
    kernel: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread begins with a text, and has at least two rows of the batch for each thread."""
    monkeypatch.setattr(kernel.session, "_LEAST_ROWS", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    session = of_heads(kernel)
    session._text, session._end = np.repeat(np.arange(len(rows)), rows), np.ones(sum(rows), np.int64)
    assert session._parts() == parts
