"""Chi-square tests of generated texts against plain sampling, on a model small enough to list all its texts."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from tiny import tiny_base
from torch import Tensor

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Sample
from treeopt.drafting.interface import Drafts
from treeopt.models.base import Base

SMALL = 5  # tokens of the model whose texts are counted
LENGTH = 4  # 5^4 = 625 texts
PROMPT = [1, 4, 2]
ALPHA = 1e-4  # of a true rule failing; seeds are fixed, so it fails never or always


def small_base() -> Base:
    """A model of five tokens, uneven but with no text out of reach."""
    return tiny_base("llama", 3, vocab_size=SMALL, initializer_range=0.12)


@torch.inference_mode()
def text_probabilities(base: Base, rule: Sample) -> NDArray[np.float64]:
    """The probability of each text of `LENGTH` tokens under plain sampling, by the definition of the settings."""
    texts = list(itertools.product(range(SMALL), repeat=LENGTH))
    ids = torch.tensor([[*PROMPT, *text] for text in texts])
    logits = base.model(ids).logits[:, len(PROMPT) - 1 : -1].double()
    p = np.array([[processed(place, rule) for place in row] for row in logits.numpy()])
    chosen = np.take_along_axis(p, np.array(texts)[..., None], axis=2)[..., 0]
    return np.prod(chosen, axis=1)


def counted(decoder: TreeDecoder, *, rows: int = 512, rounds: int = 12) -> NDArray[np.float64]:
    """How often each text came out of the decoder, out of rows * rounds."""
    torch.manual_seed(0)
    counts = np.zeros(SMALL**LENGTH)
    for _ in range(rounds):
        for one in decoder.generate([PROMPT] * rows, LENGTH):
            counts[int(np.polyval(one.tokens, SMALL))] += 1
    return counts


def processed(logits: NDArray[np.float64], rule: Sample) -> NDArray[np.float64]:
    """Softmax after temperature, top-k and top-p, written anew: the oracle of the warpers."""
    z = logits / rule.temperature
    order = np.argsort(-z)
    kept = order[: rule.top_k or None]
    p = np.exp(z - z.max())
    share = np.cumsum(p[kept]) / p[kept].sum()
    kept = kept[: int(np.searchsorted(share, rule.top_p)) + 1] if rule.top_p < 1 else kept
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


def p_value(counts: NDArray[np.float64], probabilities: NDArray[np.float64]) -> float:
    """Of a chi-square test; rare texts are counted together, one that cannot be makes it 0."""
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * counts.sum()
    order = np.argsort(expected)[::-1]
    often = order[expected[order] >= 5]
    rest = np.setdiff1d(order, often)
    found, wanted = counts[often], expected[often]
    if expected[rest].sum() > 0:
        found, wanted = np.append(found, counts[rest].sum()), np.append(wanted, expected[rest].sum())
    statistic = float((((found - wanted) ** 2) / wanted).sum())
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


class DrawnPerChild(Sample):
    """Wrong: a draw for every child instead of one for every node, so drafted tokens come too often."""

    def accept(self, drafts: Drafts, logits: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        choice = self.choose(logits, drafts, generator)
        at_parents = logits.index_select(1, drafts.tree.parents)
        own = self.choose(at_parents, drafts, generator)  # a draw at the parent, for each node
        right = (own == drafts.tokens)[:, None, :] | ~drafts.tree.attention_mask
        right[:, :, 0] = True
        node = right.all(-1).mul(torch.arange(drafts.tokens.shape[1])).amax(-1)
        return node, choice.gather(1, node[:, None])[:, 0]
