"""The steps of a decoded text with the texts of their tokens and the sources of the accepted drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rejection import DrawnChain
from treeopt.decode.stream import token_texts
from treeopt.drafting.interface import DRAFTER
from treeopt.drafting.model import DRAFT_MODEL_SOURCE
from treeopt.drafting.plans import PerStepTrees, StaticTree
from treeopt.drafting.sources import BASE, draft_sources

Sources = Mapping[str, int | None]


@dataclass(frozen=True)
class DecodedStep:
    """One step of a text.

    Args:
        tokens: its root, which is the base model's own token, and the accepted drafts.
        texts: what each token adds to the text; empty where a character of several bytes is not complete.
        sources: of each token by name, with its rank in that source's list; see `treeopt.drafting.sources`. None is the
            rank of a draft that was drawn at random, and of one whose source is not known.
    """

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    sources: tuple[Sources, ...]


def decoded_steps(decoder: TreeDecoder, prompt: Sequence[int], steps: Sequence[Sequence[int]]) -> list[DecodedStep]:
    """The steps of a text that was decoded, by one more forward over the whole text.

    Args:
        decoder: the decoder of the text; its base has a tokenizer.
        prompt: token ids.
        steps: the tokens of each step.

    Raises:
        TreeoptError: E504 where states or scores are not finite.
    """
    tokenizer, trees = decoder.base.tokenizer, decoder.trees
    assert tokenizer is not None
    texts = iter(token_texts([token for step in steps for token in step], tokenizer))
    found: Sequence[Sequence[Sources]]
    if isinstance(trees, StaticTree | PerStepTrees):
        found = draft_sources(decoder.base, trees.proposer, prompt, steps)
    else:
        name = DRAFT_MODEL_SOURCE if isinstance(trees, DrawnChain) else DRAFTER
        found = [[{name: None}] * (len(step) - 1) for step in steps]
    return [
        DecodedStep(tuple(step), tuple(next(texts) for _ in step), ({BASE: 0}, *sources))
        for step, sources in zip(steps, found, strict=True)
    ]
