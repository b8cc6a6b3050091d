"""Losses of Medusa-2: values and gradients by full logits and explicit sums, and never all logits at once."""

from __future__ import annotations

import math

import pytest
import torch
from largest import LargestTensor
from looped import looped
from tiny import HIDDEN, VOCAB, random_heads, tiny_base
from torch import Tensor, nn

from treeopt.models import logits as logits_module
from treeopt.models.heads import MedusaHeads
from treeopt.train.loss import IGNORED, joint_head_losses, kl_loss, lm_loss, next_tokens
from treeopt.train.medusa2 import heads_weight
from treeopt.train.settings import CONSTANT, SINE, JointSettings

ROWS = 23


@pytest.fixture(params=[1, 7, 100])
def _rows_of_a_part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many rows have their logits in memory at once."""
    monkeypatch.setattr(logits_module, "LOGITS_BYTES", request.param * VOCAB * 4)


def linear(seed: int) -> nn.Linear:
    """A random LM head."""
    layer = nn.Linear(HIDDEN, VOCAB)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(seed))
    return layer


def rows(seed: int, count: int = ROWS) -> Tensor:
    """Random hidden states with gradients."""
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def tokens(seed: int, *shape: int) -> Tensor:
    """Random tokens."""
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def probabilities(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Softmax by its definition, in float64."""
    powers = (hidden.double() @ layer.weight.double().T + layer.bias.double()).exp()
    return powers / powers.sum(-1, keepdim=True)


def gradients(value: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Gradients of a value with respect to tensors."""
    return list(torch.autograd.grad(value, inputs))


def test_next_tokens_of_written_rows() -> None:
    """The next token where it is in an answer: a text of two answers, and a shorter one that is padded."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 0, 0, 0]])
    answers = torch.tensor([[0, 1, 1, 0, 2, 2], [0, 0, 1, 0, 0, 0]])
    no = IGNORED
    assert next_tokens(ids, answers).tolist() == [[6, 7, no, 9, 10, no], [no, 13, no, no, no, no]]


@pytest.mark.usefixtures("_rows_of_a_part")
def test_lm_loss_is_the_mean_of_minus_log_p() -> None:
    """Value and gradients of hidden states, weight and bias, whatever number of rows is computed at once."""
    layer, hidden, true = linear(0), rows(1), tokens(2, ROWS)
    expected = -sum(probabilities(layer, hidden)[i, true[i]].log() for i in range(ROWS)) / ROWS
    found = lm_loss(layer, hidden, true)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    inputs = (hidden, layer.weight, layer.bias)
    for one, other in zip(gradients(found, *inputs), gradients(expected, *inputs), strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("_rows_of_a_part")
def test_kl_loss_is_the_sum_of_its_definition() -> None:
    """Value and gradients of KL(p_original || p), in this order; the original gets no gradient."""
    layer, original, hidden, original_hidden = linear(0), linear(1), rows(2), rows(3)
    q, p = probabilities(original, original_hidden).detach(), probabilities(layer, hidden)
    expected = sum((q[i] * (q[i].log() - p[i].log())).sum() for i in range(ROWS)) / ROWS
    found = kl_loss(layer, original, hidden, original_hidden)
    reverse = (p * (p.log() - q.log())).sum(-1).mean()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert found.item() != pytest.approx(reverse.item(), rel=1e-3)
    inputs = (hidden, layer.weight, layer.bias)
    for one, other in zip(gradients(found, *inputs), gradients(expected, *inputs), strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-6)
    kl_loss(layer, original, hidden, original_hidden).backward()
    assert original.weight.grad is None
    assert original_hidden.grad is None


@pytest.mark.usefixtures("_rows_of_a_part")
@looped("shared", [False, True])
def test_joint_head_losses_train_all(shared: bool) -> None:
    """Each head's loss by full logits, with gradients to heads, hidden states and, where shared, the LM head."""
    base = tiny_base("llama")
    heads, layer, hidden = random_heads(base, 3, shared=shared), linear(5), rows(1)
    true = tokens(2, ROWS, 3)
    true[torch.rand(true.shape, generator=torch.Generator().manual_seed(3)) < 1 / 3] = IGNORED
    expected = naive(heads, hidden, true, layer)
    found = joint_head_losses(heads, hidden, true, layer)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    inputs = (hidden, *heads.parameters(), *(layer.parameters() if shared else ()))
    scales = torch.tensor([0.8, 0.64, 0.512])
    for one, other in zip(
        gradients((scales * found).sum(), *inputs), gradients((scales * expected).sum(), *inputs), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def naive(heads: MedusaHeads, hidden: Tensor, true: Tensor, layer: nn.Linear) -> Tensor:
    """Mean of -log p of each head's targets, head by head and row by row."""
    losses = []
    for h in range(heads.num_heads):
        x = hidden
        for weight, bias in zip(heads.weight[:, h], heads.bias[:, h], strict=True):
            z = x @ weight.T + bias
            x = x + z * torch.sigmoid(z)
        logits = layer(x) if heads.lm_head is None else x @ heads.lm_head[h].T
        known = [i for i in range(len(true)) if true[i, h] != IGNORED]
        terms = [logits[i].exp().sum().log() - logits[i, true[i, h]] for i in known]
        losses.append(torch.stack(terms).sum() / len(known))
    return torch.stack(losses)


def test_logits_of_all_rows_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of both losses and of shared heads make no tensor of rows x vocabulary."""
    vocab, count = 997, 400
    monkeypatch.setattr(logits_module, "LOGITS_BYTES", 8 * vocab * 4)
    layer, original = nn.Linear(4, vocab), nn.Linear(4, vocab)
    hidden = torch.randn(count, 4, requires_grad=True)
    true = torch.randint(vocab, (count,))
    heads = MedusaHeads(2, 1, 4, None)
    with LargestTensor() as largest:
        lm_loss(layer, hidden, true).backward()
        kl_loss(layer, original, hidden, hidden.detach()).backward()
        joint_head_losses(heads, hidden, torch.stack([true, true], 1), layer).sum().backward()
    assert largest.values <= 8 * vocab


@looped(("schedule", "expected"), [(CONSTANT, [0.2, 0.2, 0.2]), (SINE, [0, 0.2 * math.sqrt(0.5), 0.2])])
def test_heads_weight(schedule: str, expected: list[float]) -> None:
    """Constant, or a quarter of a sine over the run: 0, half of the way up to sqrt(1/2), then the peak."""
    settings = JointSettings(heads_weight=0.2, heads_schedule=schedule)
    found = [heads_weight(settings, step, 10) for step in (0, 5, 10)]
    assert found == pytest.approx(expected)
