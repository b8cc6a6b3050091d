"""Functions over many logits: a few rows at a time have the bits of all rows at once, and smaller temporary tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from drafters import answered, planted, prompts_of
from looped import looped
from random_trees import compile_parents
from tiny import VOCAB, tiny_base
from torch import Tensor

from treeopt.decode import rules
from treeopt.decode.rules import Sample
from treeopt.drafting.heads import HeadsProposer
from treeopt.drafting.interface import Drafts
from treeopt.drafting.trace import Target, trace_texts
from treeopt.evaluate.validate import log_likelihood
from treeopt.models import logits as logits_module
from treeopt.models import logits as module
from treeopt.models.logits import rows_at_once, top_ids
from treeopt.texts.encode import Text
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_tree

ROWS = 12
TREE = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 2), (0, 1, 0), (0, 0, 0, 1), (3,)])


def logits_of(*shape: int, seed: int = 0) -> Tensor:
    """Random logits [..., V] with ties."""
    return (torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3).round() / 2


def ties() -> Callable[[], object]:
    """The order of equal logits."""
    values = logits_of(2, ROWS)
    return lambda: top_ids(values, VOCAB).tolist()


def draws(rule: Sample) -> Callable[[], object]:
    """A token after every node."""
    values = logits_of(2, ROWS).bfloat16()
    return lambda: rule.choose(values, None, torch.Generator().manual_seed(3)).tolist()


def typical(*, shared: bool) -> Callable[[], object]:
    """Drafts of two rows, in one tree or one each, after logits that make some of them likely."""
    tokens = torch.randint(VOCAB, (2, TREE.nodes), generator=torch.Generator().manual_seed(4))
    values = logits_of(2, TREE.nodes)
    for row in range(2):
        for node in range(1, TREE.nodes, 1 + row):
            values[row, TREE.parents[node], tokens[row, node]] += 6
    tree = compile_tree(TREE) if shared else compile_parents(torch.tensor([TREE.parents] * 2), TREE.depth)
    drafts = Drafts(tokens, tree)
    return lambda: rules.typical(drafts, values, temperature=0.7).tolist()


def likelihood() -> Callable[[], object]:
    """The likelihood of texts."""
    base = tiny_base("llama", 2)
    texts = [Text("0:00000000", [3, 1], list(range(ROWS))), Text("0:00000001", [3], [5])]
    return lambda: log_likelihood(base, texts)


CASES: dict[str, Callable[[], object]] = {
    "ties": ties(),
    "draws": draws(Sample(0.8)),
    "draws of few": draws(Sample(1.0, top_k=9, top_p=0.8)),
    "typical": typical(shared=True),
    "typical per row": typical(shared=False),
    "likelihood": likelihood(),
}


@looped("name, rows", itertools.product(CASES, [1, 2, 5]))
def test_parts_have_the_bits_of_the_whole(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for so many rows the result is that of all rows at once."""
    run = CASES[name]
    monkeypatch.setattr(module, "LOGITS_BYTES", 1 << 40)
    whole = run()
    monkeypatch.setattr(module, "LOGITS_BYTES", rows * VOCAB * 4)
    assert run() == whole


@looped("rows", [1, 3])
def test_target_probabilities_have_the_bits_of_the_whole(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Probabilities of candidates across the borders of parts, with the same candidates."""
    base, heads = planted()
    texts = [*answered(base, prompts_of(0, 3), 7), Text("set:00000009", [4], [5])]
    proposer, target = HeadsProposer(base, heads), Target.at_temperature(0.6, 9)
    traced = []
    for size in (1 << 40, rows * VOCAB * 4):
        monkeypatch.setattr(module, "LOGITS_BYTES", size)
        traced.append(trace_texts(base, [proposer] * 4, texts, 253, target=target))
    for whole, parts in zip(*traced, strict=True):
        assert whole.target is not None
        assert parts.target is not None
        assert whole.target.probability.any() == (len(whole.ranks) > 1)
        np.testing.assert_array_equal(parts.target.probability, whole.target.probability)


def test_keys_are_made_for_a_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of 8 bytes, and what they are made of, count as eight copies: with memory for 16 rows, 2 rows at a time."""
    made: list[int] = []
    whole = logits_module._top_keys

    def noted(part: Tensor, count: int) -> Tensor:
        made.append(len(part))
        return whole(part, count)

    monkeypatch.setattr(logits_module, "_top_keys", noted)
    monkeypatch.setattr(module, "LOGITS_BYTES", 16 * VOCAB * 4)
    assert top_ids(torch.zeros(5, VOCAB), 3).tolist() == [[0, 1, 2]] * 5  # all equal: their order takes keys
    assert made == [2, 2, 1]


def test_probabilities_are_made_for_a_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of draws, and of the target of traces, are asked for at most the rows that fit."""
    made: list[int] = []

    def noted(part: Tensor) -> Tensor:
        made.append(len(part))
        return part.float()

    monkeypatch.setattr(module, "LOGITS_BYTES", 12 * VOCAB * 4)
    rules.draw(logits_of(1, 7), None, noted)  # of memory for 12 rows, as top-p sorts the scores
    assert made == [3, 3, 1]
    made.clear()
    monkeypatch.setattr(module, "LOGITS_BYTES", 3 * VOCAB * 4)
    base, heads = planted()
    text = Text("set:00000000", [4], [5, 6, 7, 8])
    trace_texts(base, [HeadsProposer(base, heads)], [text], 253, target=Target(noted, 9))
    assert made == [3, 1]


def test_rows_at_once_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 bytes a logit; at least one row, whatever it takes."""
    monkeypatch.setattr(module, "LOGITS_BYTES", 1000)
    assert [rows_at_once(10), rows_at_once(10, 5), rows_at_once(10, 0), rows_at_once(10_000)] == [25, 5, 25, 1]
