"""The sources of drafts: the kernel against lists that are made naively, and a decoded text."""

from __future__ import annotations

import numpy as np
import torch
from drafters import planted, prompts_of
from kernel_scorer import Scorer
from looped import looped
from naive_draft import Case, naive_match, random_case

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafting.trace import draft_sources


def naive_sources(case: Case, row: int, path: list[int], token: int) -> dict[str, int]:
    """The place of a token in the list of each source, by the rules of `naive_draft`."""
    naive, level = case.naive(row), len(path)
    lists: dict[str, list[int]] = {}
    if level < len(naive.logits) or (case.drafter.num_heads and not naive.empty):
        scores = naive.logits[level] if level < len(naive.logits) else naive.table.unigram
        order = sorted(range(len(scores)), key=lambda one: (-scores[one], one))
        lists["head" if level < len(naive.logits) else "frequent"] = order[: case.drafter.top]
    table = naive.frequent() if naive.empty else list(naive.table.rows[naive.table.context(naive.text(path))])
    lists["frequent" if naive.empty else "n-gram"] = table
    recent = naive.recent if case.drafter.window else naive.recent[-1:]
    followed, length = naive_match(recent, path)
    lists["lookup"] = [followed] if length else []
    lists["text"] = naive.voted(path)
    return {name: tokens.index(token) for name, tokens in lists.items() if token in tokens}


@looped("source", ["heads", "voted", "no heads", "empty", "empty no heads"])
def test_sources_are_those_of_the_lists(source: str) -> None:
    """Every token of a small vocabulary, at every level: names and places equal those of the naive lists."""
    for seed in range(3):
        check_sources(random_case(seed, source=source), seed)


def check_sources(case: Case, seed: int) -> None:
    """Of random continuations of each row."""
    session = Scorer(case.drafter).session(torch.from_numpy(case.logits), case.recent, case.drafter.depth)
    vocab, rng = case.logits.shape[2] if case.logits.size else len(case.table.unigram), np.random.default_rng(seed)
    for _ in range(4):
        true = rng.integers(vocab, size=(len(case.recent), case.drafter.depth))
        for row, found in enumerate(session.sources(true)):
            path = true[row].tolist()
            assert found == [naive_sources(case, row, path[:d], path[d]) for d in range(len(path))]


def test_sources_beyond_the_end_are_empty() -> None:
    """A negative token is no token."""
    case = random_case(0, source="heads")
    session = Scorer(case.drafter).session(torch.from_numpy(case.logits), case.recent, case.drafter.depth)
    true = np.full((len(case.recent), case.drafter.depth), -5)
    assert session.sources(true) == [[{}] * case.drafter.depth] * len(case.recent)


def test_sources_of_a_decoded_text_are_the_ranks_of_its_paths() -> None:
    """With heads alone each accepted draft is the head's token of the rank that the accepted path has."""
    base, heads = planted()
    [prompt] = [text.prompt for text in prompts_of(3, 1)]
    tree = [[0], [1], [0, 0], [1, 0], [0, 0, 0]]
    decoder = TreeDecoder(base, heads, tree)
    steps = [list(step) for step in decoder.start(prompt, 24)]
    found = draft_sources(base, decoder.trees.proposer, prompt, steps)  # type: ignore[attr-defined]
    assert [len(one) for one in found] == [len(step) - 1 for step in steps]
    paths = [[sources["head"] for sources in step] for step in found]
    assert any(paths)
    assert all(path in [[], *tree] for path in paths)
