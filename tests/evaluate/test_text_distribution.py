"""The test of the distribution of texts: cells against all texts listed, right rules pass, wrong ones are found."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from chances import PROMPT, DrawnPerChild, processed, small_base
from scipy import stats
from tiny import but_slow, random_heads
from torch import Tensor

from treeopt.decode import rules
from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Sample
from treeopt.drafting.interface import Drafts
from treeopt.evaluate.baselines import Baseline, seeded, with_decoder, with_generate
from treeopt.evaluate.validate_sample import (
    ALPHA,
    DistributionTest,
    adjusted_p,
    compare_texts,
    p_of_counts,
    p_of_two,
    text_cells,
)
from treeopt.models.base import Base
from treeopt.texts.encode import Text
from treeopt.tree import Tree

TREE = Tree.from_paths([path for depth in (1, 2, 3) for path in np.ndindex(*[2] * depth)])
DRAWS = 2000
RULE = Sample(temperature=0.8, top_k=4, top_p=0.95)


@pytest.fixture(scope="module")
def small() -> Base:
    """A model of five tokens."""
    return small_base()


def stock(base: Base, rule: Sample) -> Baseline:
    """Stock generate with the settings of a rule."""
    run = with_generate(base, temperature=rule.temperature, top_k=rule.top_k, top_p=rule.top_p)
    return seeded(base, run, 3, "generate")


def tree(base: Base, rule: Sample) -> Baseline:
    """The tree with this rule."""
    decoder = TreeDecoder(base, random_heads(base, 3, 3), TREE, acceptance=rule)
    return seeded(base, with_decoder(decoder), 3, "tree")


def result_of(base: Base, rule: Sample, right: Sample = RULE, draws: int = DRAWS) -> DistributionTest:
    """The test of a rule against the settings of the right one."""
    return compare_texts(base, Text("a:0", PROMPT, []), right.scores, (tree(base, rule), stock(base, right)), draws)


def listed(base: Base, rule: Sample, length: int) -> dict[tuple[int, ...], float]:
    """The probability of every text of so many tokens, by a forward for each and settings written anew.

    Texts end at an end token.
    """
    found: dict[tuple[int, ...], float] = {}
    ongoing = {(): 1.0}
    for _ in range(length):
        longer = {}
        with torch.inference_mode():
            logits = base.model(torch.tensor([[*PROMPT, *text] for text in ongoing])).logits[:, -1].double().numpy()
        for (text, p), row in zip(ongoing.items(), logits, strict=True):
            for token, one in enumerate(processed(row, rule)):
                (found if token in base.eos_ids else longer)[*text, token] = p * one
        ongoing = longer
    return found | ongoing


@pytest.mark.parametrize("ending", [False, True])
@pytest.mark.parametrize("draws", [60, 300, 2000])
def test_cells_are_a_partition_with_its_probabilities(draws: int, ending: bool) -> None:
    """Summed over all texts that a cell counts, the listed probabilities are the cell's; no cell is too small."""
    base = small_base()
    base.model.generation_config.eos_token_id = 2 if ending else None
    cells = text_cells(base, PROMPT, RULE.scores, 10 / draws)
    texts = listed(base, RULE, cells.length)
    sums = np.zeros(len(cells.probabilities))
    for text, p in texts.items():
        sums += p * cells.counts([text])
    np.testing.assert_allclose(sums, cells.probabilities, atol=1e-6)
    assert sums.sum() == pytest.approx(1)
    possible = cells.probabilities[cells.probabilities > 0]
    assert (possible >= 10 / draws - 1e-9).all()
    likely = [text for text, p in texts.items() if p >= 10 / draws]
    alone = [np.flatnonzero(cells.counts([text]))[0] for text in likely]
    assert len(set(alone)) == len(alone)  # each likely text has a cell; its rest may be another cell's
    assert cells.whole == pytest.approx(sum(texts[text] for text in likely), abs=1e-6)


def test_cells_get_longer_with_more_certainty(small: Base) -> None:
    """Texts are as long as half the probability is in cells of one text; at least two tokens, at most six."""
    lengths = [text_cells(small, PROMPT, Sample(temperature=t).scores, 0.02).length for t in (2.0, 0.5, 0.01)]
    assert lengths[0] == 2
    assert lengths == sorted(lengths)
    assert lengths[-1] == 6


def test_cells_count_a_text_that_cannot_occur(small: Base) -> None:
    """A text outside top-k is in a cell of probability 0, and one such draw makes the p-value 0."""
    cells = text_cells(small, PROMPT, Sample(top_k=2).scores, 1e-6)
    texts = listed(small, Sample(top_k=2), 6)
    assert cells.length == 6
    assert sum(p > 0 for p in texts.values()) == 2**6 == sum(cells.probabilities > 0)
    impossible = [text for text, p in texts.items() if p == 0]
    for text in impossible[::97]:
        counts = cells.counts([text])
        assert cells.probabilities[counts > 0] == [0.0]
        assert p_of_counts(counts, cells.probabilities) == 0.0
    assert p_of_counts(cells.counts([text for text, p in texts.items() if p > 0]), cells.probabilities) > 0


def test_p_values_by_hand() -> None:
    """Pearson's statistic and degrees of freedom, from the definition."""
    counts, probabilities = np.array([30, 50, 20]), np.array([0.25, 0.5, 0.25])
    assert p_of_counts(counts, probabilities) == pytest.approx(stats.chi2.sf(1 + 0 + 1, 2))
    others = np.array([20, 50, 30])
    assert p_of_two(counts, others) == pytest.approx(stats.chi2.sf(4 * 25 / 25, 2))  # expected 25, 50, 25
    assert p_of_two(np.array([10, 0]), np.array([12, 0])) == 1.0  # one cell was drawn
    assert p_of_counts(np.array([10]), np.array([1.0])) == 1.0


def test_adjusted_p_counts_both_tests_of_a_prompt() -> None:
    """The least of the tree's p-values times their number; the control of stock generate does not count."""
    one = DistributionTest("a:0", 2, 100, 9, 0.5, 0.4, 0.03, 1e-9)
    other = DistributionTest("a:1", 2, 100, 9, 0.5, 0.02, 0.9, 1e-9)
    assert adjusted_p([one, other]) == pytest.approx(0.08)
    assert adjusted_p([one] * 20) == 1.0
    assert adjusted_p([]) is None


@pytest.mark.parametrize(
    "rule", but_slow([RULE, Sample(), Sample(temperature=1.5, top_p=0.7)], RULE, Sample()), ids=str
)
def test_right_rule_passes(small: Base, rule: Sample) -> None:
    """Neither test of the tree, nor the control, finds a difference where there is none."""
    found = result_of(small, rule, rule)
    assert min(found.p_base, found.p_stock, found.p_control) > 0.001
    assert (found.draws, found.prompt_id) == (DRAWS, "a:0")
    assert found.cells >= 10
    assert found.whole >= 0.5


class RootDrawAgain(Sample):
    """Wrong: the token after the step is the one that was drawn after the root, where it is possible at all."""

    def accept(self, drafts: Drafts, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        choice = self.choose(logits, drafts, generator)
        return rules.greedy(drafts, choice), choice[:, 0]


class Warm(Sample):
    """Wrong: the temperature is forgotten at the nodes of trees."""

    def choose(self, logits: Tensor, drafts: Drafts | None, generator: torch.Generator | None) -> Tensor:
        return super().choose(logits if drafts is None else logits * self.temperature, drafts, generator)


@pytest.mark.parametrize("wrong", [DrawnPerChild, RootDrawAgain, Warm])
def test_wrong_rule_is_found(small: Base, wrong: Callable[..., Sample]) -> None:
    """The tests of the tree find rules with another distribution; the control does not."""
    found = result_of(small, wrong(temperature=0.8, top_k=4, top_p=0.95))
    p = adjusted_p([found])
    assert p is not None
    assert p < ALPHA
    assert found.p_stock < 0.01
    assert found.p_control > 0.001
