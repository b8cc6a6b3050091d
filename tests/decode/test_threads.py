"""Threads that share one decoder: each text is the one that it is alone."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from decoding import prompt_of, stock
from random_trees import RandomTrees
from tiny import tiny_base
from torch import Tensor

from treeopt.decode.decoder import TreeDecoder
from treeopt.verify.buffers import Buffers
from treeopt.verify.session import Session, TreeForward

THREADS = 4
NEW = 24
DEPTH = 4  # of the trees: at most 5 tokens a step, so every text has the steps that are held up
HELD = 4  # first steps of a text
SECONDS = 60.0  # after which a thread that waits for one that has failed fails too


@pytest.fixture
def steps_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads have prepared a step before the first of them runs it."""
    inputs, together, steps = Session.inputs, threading.Barrier(THREADS), threading.local()

    def held(session: Session, tokens: Tensor, tree: Buffers) -> dict[str, Any]:
        made = inputs(session, tokens, tree)
        steps.count = getattr(steps, "count", 0) + 1
        if steps.count <= HELD:
            together.wait(SECONDS)
        return made

    monkeypatch.setattr(Session, "inputs", held)


@pytest.mark.usefixtures("steps_together")
@pytest.mark.parametrize("family", ["llama", "qwen2-mixed"])
@pytest.mark.parametrize("seed", range(2))
def test_own_trees_in_threads(family: str, seed: int) -> None:
    """Trees of one thread's text are not hidden by, nor seen in, the mask of another's."""
    base = tiny_base(family, 2)
    prompts = [prompt_of(THREADS * seed + i)[:6] + [i] * 4 for i in range(THREADS)]
    decoder = TreeDecoder(base, None, RandomTrees(base, nodes=24, depth=DEPTH, seed=seed), probe=False)
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda prompt: decoder.generate(prompt, NEW).tokens, prompts))
    assert found == [stock(base, prompt, NEW) for prompt in prompts]


def test_texts_that_begin_at_once_have_their_own_memory() -> None:
    """Threads that begin at the same time do not take the memory of one cache."""
    forward, rounds, together = TreeForward(tiny_base("llama"), 1, 0), 30, threading.Barrier(THREADS)

    def begin(token: int) -> Session:
        together.wait(SECONDS)
        return forward.begin([torch.tensor([token, 3])], 4)[0]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in range(rounds):
                begun = list(pool.map(begin, range(THREADS)))
                places = {session.cache.layers[0].key_buffer.data_ptr() for session in begun}
                assert len(places) == THREADS
                del begun
    finally:
        sys.setswitchinterval(before)
