"""Trees on models that differ: levels in one forward, masks by cache index, rotary frequencies that change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decoding import stock
from looped import looped
from random_trees import RandomTrees
from refusals import refusal_of
from tiny import TREE_FAMILIES, VOCAB, tiny_base

from treeopt.decode.decoder import TreeDecoder
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.verify.levels import LevelSession
from treeopt.verify.masks import frequency_switch, index_window, tree_context
from treeopt.verify.probe import check_trees
from treeopt.verify.session import TreeForward

TOLERANCE = 2e-4


@torch.inference_mode()
def after(base: Base, tokens: list[int]) -> torch.Tensor:
    """Logits [V] after the last of these tokens, by one forward without a cache."""
    return base.forward(torch.tensor([tokens]), use_cache=False)[0][0, -1]


def grown(base: Base, texts: list[list[int]], seed: int) -> tuple[LevelSession, float]:
    """A session in which three levels of random trees were computed, and the largest difference of any logits."""
    rng = np.random.default_rng(seed)
    rows = len(texts)
    session = LevelSession(base, rows)
    longest = max(map(len, texts))
    padded = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    logits = session.append(padded)
    worst = max(float((logits[row, len(text) - 1] - after(base, text)).abs().max()) for row, text in enumerate(texts))
    session.keep([len(text) for text in texts])
    paths: list[list[list[int]]] = [[[]] for _ in texts]  # of the parents, by row
    for depth in range(3):
        count = 2 + depth
        parents = rng.integers(1 + depth, size=(rows, count))
        tokens = rng.integers(VOCAB, size=(rows, count))
        paths = [
            [[*paths[row][p], int(t)] for p, t in zip(parents[row], tokens[row], strict=True)] for row in range(rows)
        ]
        logits = session.extend(torch.from_numpy(tokens), parents)
        for row, text in enumerate(texts):
            for node, path in enumerate(paths[row]):
                worst = max(worst, float((logits[row, node] - after(base, [*text, *path])).abs().max()))
    return session, worst


def random_texts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(VOCAB, size=length).tolist() for length in lengths]


@looped("family", TREE_FAMILIES)
@looped("lengths", [(9,), (1, 30, 17)])
def test_levels_are_the_sequential_forward(family: str, lengths: tuple[int, ...]) -> None:
    """Every node of every level has the logits of its text and path, alone and in a batch, beyond sliding windows."""
    _, worst = grown(tiny_base(family), random_texts(1, lengths), 2)
    assert worst < TOLERANCE


def test_a_wrong_parent_is_seen() -> None:
    """Planted: a node below the neighbour of its parent has other logits."""
    base = tiny_base("llama")
    session = LevelSession(base, 1)
    session.append(torch.tensor([[3, 4, 5]]))
    session.keep([3])
    session.extend(torch.tensor([[7, 8]]), np.zeros((1, 2), np.int64))
    logits = session.extend(torch.tensor([[9, 9]]), np.array([[1, 0]]))
    assert float((logits[0, 1] - after(base, [3, 4, 5, 7, 9])).abs().max()) < TOLERANCE
    assert float((logits[0, 0] - after(base, [3, 4, 5, 7, 9])).abs().max()) > 10 * TOLERANCE


def test_rows_go_on_after_select_and_branch() -> None:
    """Selected rows, and copies of rows cut at any place, continue their own texts."""
    base = tiny_base("mistral")
    texts = random_texts(3, (12, 40, 25))
    session, _ = grown(base, texts, 4)
    session.keep([12, 40, 25])
    session.select([0, 2])
    new = session.append(torch.tensor([[5], [6]]))
    for row, (text, token) in enumerate(((texts[0], 5), (texts[2], 6))):
        assert float((new[row, 0] - after(base, [*text, token])).abs().max()) < TOLERANCE
    session.keep([13, 26])
    session.branch([1, 0, 1, 1], [26, 4, 10, 26])
    new = session.append(torch.tensor([[7], [8], [9], [10]]))
    whole = [[*texts[0], 5], [*texts[2], 6]]
    for row, (source, length, token) in enumerate(((1, 26, 7), (0, 4, 8), (1, 10, 9), (1, 26, 10))):
        assert float((new[row, 0] - after(base, [*whole[source][:length], token])).abs().max()) < TOLERANCE


def test_texts_outgrow_the_cache_and_the_context() -> None:
    """A cache grows with its text; positions beyond the context are its last one, and no forward fails."""
    base = tiny_base("gpt2", n_positions=64)
    session = LevelSession(base, 2)
    rng = np.random.default_rng(0)
    for _ in range(12):
        tokens = torch.from_numpy(rng.integers(VOCAB, size=(2, 25)))
        logits = session.append(tokens)
        session.keep([length + 25 for length in session.lengths])
    assert session.lengths == [300, 300]
    assert torch.isfinite(logits).all()


SWITCH = 40
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": SWITCH,
}


@pytest.fixture(scope="module")
def longrope() -> Base:
    """A model with two sets of rotary frequencies."""
    return tiny_base("phi3", 1, rope_parameters=ROPE, original_max_position_embeddings=SWITCH, sliding_window=None)


def text_of(base: Base, prompts: list[list[int]], new: int) -> list[list[int]]:
    """The texts with random trees, in which the true continuation is at every other step."""
    return [one.tokens for one in TreeDecoder(base, None, RandomTrees(base, 12, 4, 3)).generate(prompts, new)]


def prompt_of(length: int) -> list[int]:
    return [(7 * i + 3) % 61 for i in range(length)]


def test_longrope_on_each_side_of_its_switch(longrope: Base) -> None:
    """Texts that end at the switch, and texts that begin beyond it, are those of stock generate."""
    for prompts, new in (([prompt_of(SWITCH - 11), prompt_of(3)], 12), ([prompt_of(SWITCH + 1), prompt_of(60)], 12)):
        assert text_of(longrope, prompts, new) == [stock(longrope, prompt, new) for prompt in prompts]


@looped(("lengths", "new"), [([SWITCH - 11], 13), ([SWITCH], 2), ([3, SWITCH - 1], 9), ([3, SWITCH + 1], 2)])
def test_longrope_across_its_switch_is_refused(longrope: Base, lengths: list[int], new: int) -> None:
    """A text that crosses the switch, or a batch of both sides, is refused: a tree would read it otherwise."""
    error = refusal_of(text_of, longrope, [prompt_of(length) for length in lengths], new)
    assert error.code is Code.CONTEXT_FULL
    assert f"after {SWITCH} tokens" in error.what
    assert error.what.startswith(f"{' to '.join(map(str, lengths))} prompt tokens")


def test_frequency_switch_of_configs(longrope: Base) -> None:
    """Only longrope has a switch, that of the model or of one kind of layer."""
    assert frequency_switch(longrope.model.config) == SWITCH
    assert frequency_switch(tiny_base("llama").model.config) is None
    mixed = tiny_base("gemma3").model.config
    mixed.rope_parameters["full_attention"] = ROPE
    mixed.rope_parameters["sliding_attention"] = {**ROPE, "original_max_position_embeddings": 2 * SWITCH}
    assert frequency_switch(mixed) == SWITCH


@looped("window", [32, 256])
def test_gpt_neo_within_its_window(window: int) -> None:
    """GPT-Neo decodes losslessly up to the end of what its local layers see; one token more is refused."""
    base = tiny_base("gpt_neo", 2, window_size=window, max_position_embeddings=48)
    nodes = 12
    room = tree_context(base.context, base.model.config, nodes)
    assert room == min(window, 48) - nodes - 7
    check_trees(base)
    prompt = prompt_of(4)
    assert text_of(base, [prompt, [5]], room - 4) == [stock(base, prompt, room - 4), stock(base, [5], room - 4)]
    with pytest.raises(TreeoptError, match=f"the model with this tree holds {room}") as caught:
        text_of(base, [prompt], room - 3)
    assert caught.value.code is Code.CONTEXT_FULL


def test_index_window_of_configs() -> None:
    """The window of local layers counts only where there are any; other models have none."""
    local = tiny_base("gpt_neo").model.config
    assert index_window(local) == 8
    assert index_window(tiny_base("gpt_neo", attention_types=[[["global"], 2]]).model.config) == 256
    assert index_window(tiny_base("llama").model.config) is None


def test_prefill_has_the_positions_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's positions are given, from 0, as stock generate gives them: RoBERTa counts them otherwise."""
    base = tiny_base("llama")
    given: list[torch.Tensor] = []
    forward = Base.forward

    def noted(self: Base, ids: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given.append(inputs["position_ids"])
        return forward(self, ids, **inputs)

    monkeypatch.setattr(Base, "forward", noted)
    TreeForward(base, 1, 0).begin([torch.tensor([1, 2, 3]), torch.tensor([4])], 2)
    assert given[0].tolist() == [[0, 1, 2]]
