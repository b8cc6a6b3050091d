"""Loss: targets by plain loops, losses and gradients by full logits, and never all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from head_ranks import head_ranks
from largest import LargestTensor
from looped import looped
from tiny import HIDDEN, VOCAB, random_heads, tiny_base
from torch import Tensor, nn
from torch.nn import functional as F

from treeopt.models import logits
from treeopt.models.heads import MedusaHeads
from treeopt.texts.encode import Text
from treeopt.traces import NONE
from treeopt.train import loss
from treeopt.train.loss import IGNORED, head_losses, hits, targets, weighted


def naive_losses(heads: MedusaHeads, hidden: Tensor, true: Tensor, base_lm_head: nn.Linear) -> Tensor:
    """Each head's cross-entropy by its full logits; 0 for a head without a target."""
    logits = heads(hidden, base_lm_head)  # [H, n, V]
    losses = []
    for h in range(heads.num_heads):
        target = true[:, h]
        known = (target != IGNORED).any()
        losses.append(F.cross_entropy(logits[h], target, ignore_index=IGNORED) if known else logits[h].sum() * 0)
    return torch.stack(losses)


def some_rows(rows: int, heads: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden states and targets, a third of them ignored."""
    rng = torch.Generator().manual_seed(seed)
    true = torch.randint(VOCAB, (rows, heads), generator=rng)
    true[torch.rand(true.shape, generator=rng) < 1 / 3] = IGNORED
    return torch.randn(rows, HIDDEN, generator=rng), true


def gradients(heads: MedusaHeads) -> list[Tensor]:
    """The gradient of each parameter, and none left behind."""
    found = [parameter.grad for parameter in heads.parameters()]
    heads.zero_grad()
    return [grad for grad in found if grad is not None]


def loop_targets(ids: list[int], answers: list[int], num_heads: int) -> list[list[int]]:
    """Targets of one text, by the definition."""
    rows = []
    for t in range(len(ids)):
        row = []
        for h in range(1, num_heads + 1):
            inside = t + 1 + h < len(ids) and answers[t + 1] > 0 and answers[t + 1 + h] == answers[t + 1]
            row.append(ids[t + 1 + h] if inside else IGNORED)
        rows.append(row)
    return rows


@looped("length", [1, 2, 3, 9, 40])
@looped("num_heads", [1, 3, 5])
def test_targets_brute_force(length: int, num_heads: int) -> None:
    """On random texts with random answers, targets are those of loops over positions and heads."""
    rng = torch.Generator().manual_seed(length)
    ids = torch.randint(VOCAB, (8, length), generator=rng)
    starts = torch.rand(8, length, generator=rng) < 0.25
    answers = starts.cumsum(1) * (torch.rand(8, length, generator=rng).cumsum(1) * 0.7 % 1 < 0.6)
    found = targets(ids, answers, num_heads)
    assert found.tolist() == [loop_targets(*row, num_heads) for row in zip(ids.tolist(), answers.tolist(), strict=True)]
    assert length < 9 or ((found != IGNORED).any() and (found == IGNORED).any())


def test_targets_by_hand() -> None:
    """A prompt, an answer of four tokens, a question, an answer of two: each head stays inside one answer."""
    ids = torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17]])
    answers = torch.tensor([[0, 1, 1, 1, 1, 0, 2, 2]])
    none = IGNORED
    assert targets(ids, answers, 3)[0].tolist() == [
        [12, 13, 14],  # the hidden state of the prompt's last token: token 11 is the root
        [13, 14, none],
        [14, none, none],
        [none] * 3,  # the root is the answer's last token
        [none] * 3,  # the root is a question's token
        [17, none, none],
        [none] * 3,
        [none] * 3,
    ]


def test_targets_are_what_calibration_scores() -> None:
    """The ranks of targets under the heads at prompt end and on are the rows of a calibration's trace."""
    base = tiny_base("llama")
    heads = random_heads(base, 3)
    prompt, answer = [3, 9, 20], [7, 1, 50, 33, 20, 9, 4]
    (trace,) = head_ranks(base, heads, [Text("a:0", prompt, answer)], VOCAB)
    ids = torch.tensor([prompt + answer])
    true = targets(ids, torch.tensor([[0] * 3 + [1] * 7]), 3)[0]
    with torch.no_grad():
        _, hidden = base.forward(ids)
        order = heads(hidden[0], base.lm_head).argsort(-1, descending=True)  # [H, T, V]
    for i, row in enumerate(trace.tolist()):
        t = len(prompt) - 1 + i
        for h, rank in enumerate(row):
            assert (rank == NONE) == (true[t, h] == IGNORED)
            assert rank == NONE or order[h, t, rank] == true[t, h] == answer[i + 1 + h]
    assert (true[: len(prompt) - 1] == IGNORED).all()


@looped("rows_alive", [1, 7, 1000])
@looped("blocks", [0, 1, 2])
@looped("shared_head", [False, True])
def test_head_losses_naive(monkeypatch: pytest.MonkeyPatch, rows_alive: int, blocks: int, shared_head: bool) -> None:
    """Losses and gradients are those of full logits, in chunks of any size, with and without LM heads of their own."""
    monkeypatch.setattr(logits, "LOGITS_BYTES", rows_alive * VOCAB * 4)
    base = tiny_base("llama")
    heads = random_heads(base, 3, blocks=blocks, shared=shared_head)
    hidden, true = some_rows(40, 3)
    true[:, 2] = IGNORED  # a head without a target
    found, wanted = (make(heads, hidden, true, base.lm_head) for make in (head_losses, naive_losses))
    torch.testing.assert_close(found, wanted)
    assert found[2] == 0
    if blocks == 0 and shared_head:
        return  # nothing to train
    weighted(found).backward()
    found_gradients = gradients(heads)
    assert base.lm_head.weight.grad is None
    weighted(wanted).backward()
    for one, other in zip(found_gradients, gradients(heads), strict=True):
        torch.testing.assert_close(one, other)
        assert one.numel() == 0 or one.any()


@looped("name", ["head_losses", "hits"])
def test_shared_lm_head_with_bias(name: str) -> None:
    """The bias of a shared LM head belongs to the logits."""
    lm_head = nn.Linear(HIDDEN, VOCAB)
    with torch.no_grad():
        lm_head.bias.normal_(std=5.0)
    heads = random_heads(tiny_base("llama"), 2, shared=True)
    hidden, true = some_rows(30, 2)
    bare = nn.Linear(HIDDEN, VOCAB, bias=False)
    bare.weight = lm_head.weight
    if name == "head_losses":
        torch.testing.assert_close(
            head_losses(heads, hidden, true, lm_head), naive_losses(heads, hidden, true, lm_head)
        )
        assert lm_head.bias.grad is None
    else:
        assert hits(heads, hidden, true, lm_head).tolist() == naive_hits(heads, hidden, true, lm_head)
    function = getattr(loss, name)
    assert not torch.equal(function(heads, hidden, true, lm_head), function(heads, hidden, true, bare))


@looped("dtype", [torch.bfloat16, torch.float16])
def test_shared_lm_head_of_half_precision(dtype: torch.dtype) -> None:
    """float32 heads train on the LM head of a base in half precision, as on its values in float32."""
    lm_head = nn.Linear(HIDDEN, VOCAB, bias=True).to(dtype)
    exact = nn.Linear(HIDDEN, VOCAB)
    exact.load_state_dict(lm_head.state_dict())
    heads = random_heads(tiny_base("llama"), 2, shared=True)
    hidden, true = some_rows(30, 2)
    assert torch.equal(head_losses(heads, hidden, true, lm_head), head_losses(heads, hidden, true, exact))
    assert torch.equal(hits(heads, hidden, true, lm_head), hits(heads, hidden, true, exact))


def test_head_losses_without_rows() -> None:
    """A batch in which nothing can be guessed has loss 0 and gradients of 0."""
    base = tiny_base("llama")
    heads = random_heads(base, 2)
    hidden, true = torch.zeros(0, HIDDEN), torch.zeros(0, 2, dtype=torch.int64)
    losses = head_losses(heads, hidden, true, base.lm_head)
    losses.sum().backward()
    assert losses.tolist() == [0, 0]
    assert all(not grad.any() for grad in gradients(heads))
    assert hits(heads, hidden, true, base.lm_head).tolist() == [[0] * 5, [0] * 5]


def test_weighted() -> None:
    """0.8 to the power of the head, from 1: 0.8 + 0.64 + 0.512 for three losses of 1."""
    assert weighted(torch.ones(3)).item() == pytest.approx(1.952)
    assert weighted(torch.tensor([0.0, 1.0, 0.0])).item() == pytest.approx(0.64)


def naive_hits(heads: MedusaHeads, hidden: Tensor, true: Tensor, base_lm_head: nn.Linear) -> list[list[int]]:
    """Hits among the first 1 .. 5, by sorting every row."""
    with torch.no_grad():
        logits = heads(hidden, base_lm_head).tolist()
    counts = [[0] * 5 for _ in range(heads.num_heads)]
    for n, row in enumerate(true.tolist()):
        for h, token in enumerate(row):
            if token != IGNORED:
                order = sorted(range(VOCAB), key=lambda i, z=logits[h][n]: (-z[i], i))
                for top in range(5):
                    counts[h][top] += token in order[: top + 1]
    return counts


@looped("rows_alive", [1, 7, 1000])
@looped("shared_head", [False, True])
def test_hits_brute_force(monkeypatch: pytest.MonkeyPatch, rows_alive: int, shared_head: bool) -> None:
    """Hits among the first guesses are those of a full sort; ignored targets are no trials."""
    monkeypatch.setattr(logits, "LOGITS_BYTES", rows_alive * VOCAB * 4)
    base = tiny_base("llama")
    heads = random_heads(base, 2, shared=shared_head)
    hidden, true = some_rows(300, 2)
    found = hits(heads, hidden, true, base.lm_head).tolist()
    assert found == naive_hits(heads, hidden, true, base.lm_head)
    assert found[0][4] > found[0][0] > 0


@looped("shared_head", [False, True])
def test_logits_are_never_all_alive(monkeypatch: pytest.MonkeyPatch, shared_head: bool) -> None:
    """In loss, backward and hits no tensor outgrows the LM heads and a chunk of logits; full logits do by far."""
    vocab, hidden_size, rows = 2000, 8, 512
    alive = 16 * vocab
    monkeypatch.setattr(logits, "LOGITS_BYTES", alive * 4)
    heads = MedusaHeads(3, 1, hidden_size, None if shared_head else vocab)
    lm_head = nn.Linear(hidden_size, vocab, bias=False)
    hidden, true = torch.randn(rows, hidden_size), torch.randint(vocab, (rows, 3))
    bound = max(alive, 3 * vocab * hidden_size)
    with LargestTensor() as chunked:
        weighted(head_losses(heads, hidden, true, lm_head)).backward()
        hits(heads, hidden, true, lm_head)
    with LargestTensor() as naive:
        weighted(naive_losses(heads, hidden, true, lm_head)).backward()
    assert chunked.values <= bound
    assert naive.values >= 3 * rows * vocab > 10 * bound


def test_loss_is_asked_for_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is told how many rows may be alive: its operator is one, so the test above does not see inside."""
    monkeypatch.setattr(logits, "LOGITS_BYTES", 16 * VOCAB * 4)
    rows, stock = [], F.linear_cross_entropy

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        rows.append(kwargs["options"].batch_chunk_size)
        return stock(*args, **kwargs)

    monkeypatch.setattr(loss.F, "linear_cross_entropy", noted)
    base = tiny_base("llama")
    head_losses(random_heads(base, 2), *some_rows(40, 2), base.lm_head)
    assert rows == [16, 16]
