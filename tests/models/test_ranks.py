"""Ranks: the one order of guesses, against a sort written out in plain Python."""

from __future__ import annotations

import torch
from looped import looped
from torch import Tensor

from treeopt.models.logits import rank_of, top_ids

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tied_logits(seed: int, dtype: torch.dtype, *, rows: int = 20, vocab: int = 37) -> Tensor:
    """Logits from nine values only, both zeros among them, so that most tokens tie with others."""
    values = torch.tensor([-2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, float("-inf")], dtype=dtype)
    picks = torch.randint(len(values), (rows, vocab), generator=torch.Generator().manual_seed(seed))
    return values[picks]


def order_of(row: Tensor) -> list[int]:
    """All token ids from rank 0 on: logit down, id up."""
    scores = row.tolist()
    return sorted(range(len(scores)), key=lambda token: (-scores[token], token))


def test_float64_is_ranked_as_float32() -> None:
    """As stock `generate` compares, whatever the number of tokens that are asked for."""
    logits = torch.zeros(1, 61, dtype=torch.float64)
    logits[0, 2], logits[0, 5] = 1.0, 1.0 + 1e-12
    for count in (3, 50):
        assert top_ids(logits, count)[0, :3].tolist() == [2, 5, 0]
    assert [int(rank_of(logits, torch.tensor([token]))) for token in (2, 5, 0)] == [0, 1, 2]


def test_rank_of_hand_written() -> None:
    """Equal logits are ranked by the smaller id, and -0.0 equals 0.0."""
    logits = torch.tensor([[0.0, 3.0, -0.0, 3.0, -1.0]])
    ranks = [int(rank_of(logits, torch.tensor([token]))) for token in range(5)]
    assert ranks == [2, 0, 3, 1, 4]


@looped("dtype", DTYPES)
@looped("seed", range(3))
def test_rank_of_brute_force(dtype: torch.dtype, seed: int) -> None:
    """The rank is the token's place in a full sort by (logit down, id up)."""
    logits = tied_logits(seed, dtype)
    for token in range(logits.shape[1]):
        ranks = rank_of(logits, torch.full((len(logits),), token))
        assert ranks.tolist() == [order_of(row).index(token) for row in logits]


@looped("dtype", DTYPES)
def test_rank_of_continuous_logits(dtype: torch.dtype) -> None:
    """Normal logits, where ties are rare or come from rounding to the dtype, follow the same rule."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(200, 61, generator=generator).to(dtype)
    ids = torch.randint(61, (200,), generator=generator)
    ranks = rank_of(logits, ids)
    assert ranks.tolist() == [order_of(row).index(int(token)) for row, token in zip(logits, ids, strict=True)]
    assert ranks.dtype == torch.int32


@looped("dtype", DTYPES)
@looped("count", [1, 2, 10, 37])
def test_top_ids_brute_force(dtype: torch.dtype, count: int) -> None:
    """The first so many tokens of the full sort come out, in its order."""
    logits = tied_logits(4, dtype)
    assert top_ids(logits, count).tolist() == [order_of(row)[:count] for row in logits]


def test_top_ids_extreme_values() -> None:
    """The largest, smallest and subnormal floats and both infinities are in order."""
    low, high, tiny = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max, 1e-45
    row = [0.0, low, float("inf"), -tiny, tiny, high, float("-inf"), -0.0]
    assert top_ids(torch.tensor(row), 8).tolist() == [2, 5, 4, 0, 7, 3, 1, 6]


def test_top_ids_leading_dimensions() -> None:
    """Any leading dimensions are kept."""
    logits = tied_logits(6, torch.float32, rows=6)
    assert torch.equal(top_ids(logits.view(2, 3, -1), 4), top_ids(logits, 4).view(2, 3, 4))
