"""Speculative sampling with drafts that are drawn: whole texts by a chi-square test, and the acceptance rate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chances import ALPHA, PROMPT, SMALL, counted, p_value, processed, small_base, text_probabilities
from decoding import stock
from tiny import but_slow, tiny_base
from torch import Tensor

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rejection import DrawnChain, Rejection
from treeopt.decode.rules import Greedy, Sample
from treeopt.drafting.interface import Drafts
from treeopt.models.base import Base

WARPED = {"temperature": 1.3, "top_k": 4, "top_p": 0.9}


def small_draft() -> Base:
    """A model of the same tokens with other probabilities."""
    return tiny_base("llama", 8, vocab_size=SMALL, initializer_range=0.2)


def decoder_of(rule: Sample | Greedy, settings: Sample, num_drafts: int = 3) -> TreeDecoder:
    """The small model with a chain drawn by the settings."""
    base = small_base()
    return TreeDecoder(base, None, DrawnChain(base, small_draft(), settings, num_drafts), acceptance=rule, probe=False)


@pytest.mark.parametrize("settings", [{}, WARPED])
@pytest.mark.parametrize("num_drafts", but_slow([1, 3], 3))
def test_whole_texts(settings: dict[str, float], num_drafts: int) -> None:
    """Texts of rejection are distributed as plain sampling distributes them, from the same settings or others."""
    rule = Rejection(**settings)
    made = counted(decoder_of(rule, Sample(), num_drafts), rounds=4)
    assert p_value(made, text_probabilities(small_base(), rule)) > ALPHA


class AcceptAll(Rejection):
    """Wrong: every draft is accepted."""

    def accept(self, drafts: Drafts, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        end = torch.full((len(logits),), logits.shape[1] - 1)
        return end, self.first(logits[:, -1], generator)


class DrawAgainFromTarget(Rejection):
    """Wrong: after a rejection the next token is drawn from p instead of the rest."""

    def accept(self, drafts: Drafts, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        node, _ = super().accept(drafts, logits, generator)
        return node, self.first(logits[torch.arange(len(node)), node], generator)


@pytest.mark.parametrize("wrong", [AcceptAll, DrawAgainFromTarget])
def test_planted_wrong_rules(wrong: type[Rejection]) -> None:
    """The same test finds rules that do not have the target's distribution."""
    assert p_value(counted(decoder_of(wrong(), Sample()), rounds=4), text_probabilities(small_base(), Sample())) < ALPHA


def test_seeded_drafts_are_independent_of_seeded_draws() -> None:
    """One seed for the chain and the rule gives two streams; equal ones would tie drafts to the roots before them."""
    made = counted(decoder_of(Rejection(seed=5), Sample(seed=5)), rows=2000, rounds=1)
    assert p_value(made, text_probabilities(small_base(), Sample())) > ALPHA


def test_one_draw_a_node_is_exact_for_drawn_drafts_too() -> None:
    """`Sample` accepts a drawn draft that equals its own draw; texts have the same distribution."""
    made = counted(decoder_of(Sample(), Sample()), rounds=4)
    assert p_value(made, text_probabilities(small_base(), Sample())) > ALPHA


@pytest.mark.slow
@torch.inference_mode()
def test_acceptance_rates() -> None:
    """The first draft is accepted with probability sum_x min(p, q); by one draw a node with sum_x p q."""
    base, draft = small_base(), small_draft()
    rule = Sample()
    shares: dict[str, list[float]] = {"rejection": [], "one draw": []}
    for root in range(SMALL):
        ids = torch.tensor([[*PROMPT, root]])
        p, q = (processed(one.forward(ids)[0][0, -1].double().numpy(), rule) for one in (base, draft))
        shares["rejection"].append(np.minimum(p, q).sum())
        shares["one draw"].append((p * q).sum())
    first = processed(base.forward(torch.tensor([PROMPT]))[0][0, -1].double().numpy(), rule)
    for name, each in (("rejection", Rejection()), ("one draw", Sample())):
        expected = float(first @ np.array(shares[name]))
        torch.manual_seed(0)
        decoder = decoder_of(each, Sample(), 1)
        steps = [one.step_lengths[0] - 1 for _ in range(12) for one in decoder.generate([PROMPT] * 512, 2)]
        deviation = np.sqrt(expected * (1 - expected) / len(steps))
        assert abs(np.mean(steps) - expected) < 4.5 * deviation, name
    assert np.mean(shares["rejection"]) > 1.3 * np.mean(shares["one draw"])


def test_seeds_and_greedy() -> None:
    """Equal seeds give equal texts; the greedy rule gives the greedy text; drafts of the base itself never fail."""
    base = tiny_base("llama", 1)
    chain = DrawnChain(base, tiny_base("mistral", 2), Sample(seed=3), 4)
    rule = Rejection(seed=5)
    first, second = (TreeDecoder(base, None, chain, acceptance=rule).generate([1, 2, 3], 30) for _ in range(2))
    assert first == second
    greedy = TreeDecoder(base, None, chain, acceptance=Greedy()).generate([1, 2, 3], 30)
    assert greedy.tokens == stock(base, [1, 2, 3], 30)
    same = DrawnChain(base, base, Sample(seed=3), 4)
    decoded = TreeDecoder(base, None, same, acceptance=rule).generate([[1, 2, 3], list(range(20))], 25)
    assert [one.step_lengths for one in decoded] == [[5] * 5] * 2


def test_lengths_out_of_range() -> None:
    """A chain has a length that a tree may have."""
    base = small_base()
    for count in (0, 10_000):
        with pytest.raises(ValueError, match="num_drafts"):
            DrawnChain(base, small_draft(), Sample(), count)


def test_temperature_0() -> None:
    """Drafts at temperature 0 are the draft model's best tokens; the rule at temperature 0 is greedy."""
    base = tiny_base("llama", 1)
    decoder = TreeDecoder(base, None, DrawnChain(base, base, Sample(0), 4), acceptance=Rejection(0))
    decoded = decoder.generate([1, 2, 3], 25)
    assert decoded.tokens == stock(base, [1, 2, 3], 25)
    assert decoded.step_lengths == [5] * 5
    made = counted(decoder_of(Rejection(), Sample(0)), rounds=4)
    assert p_value(made, text_probabilities(small_base(), Sample())) > ALPHA
