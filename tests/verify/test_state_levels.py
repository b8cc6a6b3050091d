"""Levels of trees on copies of a recurrent draft model's states are those of forwards over each path."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT_FOLDER
from decoding import stock
from drafters import answered, prompts_of
from looped import looped
from mtp_checkpoints import VOCAB as MTP_VOCAB
from mtp_checkpoints import WIDTH, write
from predicted import predict
from refusals import refusal_of
from torch import Tensor

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import Drafter
from treeopt.errors import Code
from treeopt.models.base import Base, load_base
from treeopt.models.draft_files import load_draft
from treeopt.policy import TreePolicy
from treeopt.tree import Tree
from treeopt.verify import levels as module
from treeopt.verify.levels import StateLevels
from treeopt.verify.probe import levels_of
from treeopt.verify.states import selected, size_of

STATES = "qwen3_5_text"
TOLERANCE = 1e-3  # of logits; a wrong state is off by more than 0.1
VOCAB = 13  # so that two random models often agree
TEXTS = ([3, 8, 5, 1, 9, 9, 2], [4], [7, 7, 2, 11, 10, 2, 6, 1, 5, 12, 0, 1])


@functools.cache
def family(name: str, seed: int = 0) -> Base:
    """A tiny random model of a family of bench/tiny_families.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT_FOLDER / "bench"))
        made: Any = importlib.import_module("tiny_families")
    return Base(made.tiny_model(name, seed=seed, attention="eager", vocab=VOCAB), None, name)


@torch.inference_mode()
def after(base: Base, tokens: list[int]) -> Tensor:
    """Logits [V] after the last of these tokens, by one forward without a cache."""
    ids = torch.tensor([tokens])
    return base.forward(ids, attention_mask=torch.ones_like(ids), use_cache=False)[0][0, -1]


def grown(base: Base, session: Any, texts: list[list[int]], seed: int) -> float:
    """Compute three levels of random trees after texts; the largest difference of any logits."""
    rng, worst = np.random.default_rng(seed), 0.0
    paths: list[list[list[int]]] = [[[]] for _ in texts]  # of the parents, by row
    for depth in range(3):
        parents = rng.integers(1 + depth, size=(len(texts), 2 + depth))
        tokens = rng.integers(VOCAB, size=parents.shape)
        paths = [
            [[*paths[row][p], int(t)] for p, t in zip(parents[row], tokens[row], strict=True)]
            for row in range(len(texts))
        ]
        logits = session.extend(torch.from_numpy(tokens), parents)
        for row, text in enumerate(texts):
            for node, path in enumerate(paths[row]):
                worst = max(worst, float((logits[row, node] - after(base, [*text, *path])).abs().max()))
    return worst


def begun(base: Base) -> StateLevels:
    """A session with all texts, which were appended with pads."""
    session = levels_of(base, len(TEXTS))
    assert isinstance(session, StateLevels)
    longest = max(map(len, TEXTS))
    logits = session.append(torch.tensor([[*text, *[0] * (longest - len(text))] for text in TEXTS]))
    for row, text in enumerate(TEXTS):
        torch.testing.assert_close(logits[row, len(text) - 1], after(base, text), rtol=0, atol=TOLERANCE)
    session.keep([len(text) for text in TEXTS])
    return session


@looped("name", [STATES, "rwkv"])
def test_levels_are_the_sequential_forward(name: str) -> None:
    """Trees after texts with pads, after one token more, after texts that went back by one and by many tokens."""
    base, texts = family(name), [list(text) for text in TEXTS]
    session = begun(base)
    assert grown(base, session, texts, 1) < TOLERANCE
    session.keep(session.lengths)
    session.append(torch.tensor([[1], [2], [3]]))
    session.keep([len(text) + 1 for text in texts])
    texts = [[*text, new] for text, new in zip(texts, (1, 2, 3), strict=True)]
    assert grown(base, session, texts, 2) < TOLERANCE
    session.keep([len(texts[0]) - 1, 1, 4])
    texts = [texts[0][:-1], texts[1][:1], texts[2][:4]]
    assert grown(base, session, texts, 3) < TOLERANCE


def test_rows_go_on_after_select_and_branch() -> None:
    """Selected rows, and copies of rows cut at any place, continue their own texts."""
    base = family(STATES)
    session = begun(base)
    session.select([0, 2])
    session.branch([1, 0, 1, 1], [12, 4, 5, 12])
    new = session.append(torch.tensor([[7], [8], [9], [10]]))
    for row, (text, length, token) in enumerate(((2, 12, 7), (0, 4, 8), (2, 5, 9), (2, 12, 10))):
        torch.testing.assert_close(new[row, 0], after(base, [*TEXTS[text][:length], token]), rtol=0, atol=TOLERANCE)
    session.keep([length + 1 for length in session.lengths])
    texts = [[*TEXTS[2], 7], [*TEXTS[0][:4], 8], [*TEXTS[2][:5], 9], [*TEXTS[2], 10]]
    assert grown(base, session, texts, 5) < TOLERANCE


def test_the_state_of_another_parent_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: nodes that begin with the state of the next node of the level above."""
    base = family(STATES)
    session = begun(base)
    monkeypatch.setattr(module, "selected", lambda cache, rows: selected(cache, rows.roll(1)))
    assert grown(base, session, [list(text) for text in TEXTS], 1) > 0.1


@torch.inference_mode()
def test_too_much_memory_is_one_error_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three copies of a state fit; six nodes of a level, or four places in texts, do not: no copy of them is made."""
    session = begun(family(STATES))
    each = max(size_of(states[-1][1]) for states in session._states)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=4 * each))
    session.extend(torch.tensor([[1], [2], [3]]), np.zeros((1, 1), np.int64))
    session.keep(session.lengths)
    monkeypatch.setattr(module, "joined", None)
    errors = [
        refusal_of(session.extend, torch.tensor([[1, 4], [2, 4], [3, 4]]), np.zeros((1, 2), np.int64)),
        refusal_of(session.branch, [0, 0, 2, 2], [3, 4, 5, 6]),
    ]
    for error, rows in zip(errors, (6, 4), strict=True):
        assert error.code is Code.OUT_OF_MEMORY
        assert error.what.startswith(f"{STATES}: {rows} paths of {each:,} bytes")


def test_a_recurrent_model_that_drafts_for_itself() -> None:
    """Every draft of a chain is accepted: each step but the last has all levels and the root."""
    base = family(STATES)
    drafter = Drafter.model_only(3, 4, base.fingerprint)
    chain = dataclasses.replace(Tree.chain(3), drafter=drafter.id)
    decoder = TreeDecoder(base, None, chain, drafter=drafter, draft=base)
    assert decoder.generate(TEXTS[0], 12).step_lengths == [4] * 3


def test_a_recurrent_draft_model_of_another_text() -> None:
    """With trees chosen per step: stock text, alone and in a batch, in the predicted steps."""
    base, draft = family(STATES), family("lfm2", 1)
    texts = answered(base, prompts_of(4, 3, vocab=VOCAB), 12)
    drafter = Drafter.model_only(3, 4, draft.fingerprint)
    plan = TreePolicy(8, 3, drafter.id)
    decoder = TreeDecoder(base, None, plan, drafter=drafter, draft=draft)
    batch = decoder.generate([text.prompt for text in texts], 12)
    assert [one.tokens for one in batch] == [stock(base, text.prompt, 12) for text in texts]
    assert [decoder.generate(text.prompt, 12) for text in texts] == batch
    predicted = predict(base, None, plan, texts, drafter, draft)
    assert [len(one.step_lengths) for one in batch] == predicted.sums.steps.tolist()
    assert sum(max(one.step_lengths) for one in batch) > len(batch)


@torch.inference_mode()
def test_mtp_layers_go_on_from_any_length(tmp_path: Path) -> None:
    """Copies of a text's first rows draft trees as that text by itself drafts each path, and so do selected ones."""
    write(tmp_path, "inkling_mm_model", count=3)
    draft = load_draft("mtp", load_base(str(tmp_path), dtype="float32"))
    chance = torch.Generator().manual_seed(0)
    ids, nodes = (torch.randint(0, MTP_VOCAB, shape, generator=chance) for shape in ((1, 12), (3, 2)))
    parents = np.array([[0, 0], [1, 0], [1, 1]])  # of two nodes of each level
    read = torch.zeros(1, 12, draft.model.state_width)
    read[..., :WIDTH] = torch.randn(1, 12, WIDTH, generator=chance)

    def begun(count: int) -> StateLevels:
        session = levels_of(draft, 1)
        assert isinstance(session, StateLevels)
        session.append(ids[:, :count], hidden=read[:, :count])
        session.keep([count])
        return session

    def alone(length: int, path: list[int]) -> Tensor:
        """Logits after a path below the first rows of the text."""
        session = begun(length)
        session.after(states[[length - 1]])
        for token in path:
            logits = session.extend(torch.tensor([[token]]), np.zeros((1, 1), np.int64))
        return logits[0, 0]

    def check(session: StateLevels, lengths: list[int]) -> None:
        session.after(states[[length - 1 for length in lengths]])
        paths: list[list[int]] = [[]]
        for tokens, above in zip(nodes, parents, strict=True):
            logits = session.extend(tokens.expand(len(lengths), -1), above[None])
            paths = [[*paths[parent], int(token)] for parent, token in zip(above, tokens, strict=True)]
            for row, length in enumerate(lengths):
                expected = torch.stack([alone(length, path) for path in paths])
                torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-5)

    copies = begun(12)
    assert copies.hidden is not None
    states = copies.hidden[0]
    copies.branch([0, 0, 0], [2, 8, 12])
    check(copies, [2, 8, 12])
    copies.select([0, 2])
    copies.keep([2, 9])  # a state that is made again
    check(copies, [2, 9])
