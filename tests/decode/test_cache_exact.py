"""Drafters with a cache of the text so far: stock text in the predicted steps, for every source, family and window."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from chances import ALPHA, counted, p_value, small_base, text_probabilities
from decoding import stock
from drafters import SIZE_COST, answered, prompts_of
from helpers import random_tree
from naive_draft import SOURCES, random_drafter
from predicted import predict
from tiny import TREE_FAMILIES, but_slow, random_heads, tiny_base

from treeopt.decode.decoder import Decoded, TreeDecoder
from treeopt.decode.rules import Rule, Sample
from treeopt.drafter import Drafter
from treeopt.drafting.kernel.data import num_candidates
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.policy import Plan, TreePolicy
from treeopt.texts.encode import Text
from treeopt.tree import Tree

NEW = 20
SMALL_VOCAB = 13  # so that greedy text soon repeats itself
WINDOWS = (8, 20, 300, 0)


@dataclass(frozen=True)
class Made:
    """A random model with texts of its own, and a random drafter."""

    base: Base
    heads: MedusaHeads | None
    drafter: Drafter
    texts: list[Text]

    def decoder(self, plan: Plan, rule: Rule | None = None) -> TreeDecoder:
        """Of a plan for the drafter."""
        return TreeDecoder(self.base, self.heads, plan, drafter=self.drafter, acceptance=rule)

    def plans(self) -> dict[str, Plan]:
        """A random tree, a policy, and one with costs of sizes."""
        count = num_candidates(self.drafter)
        tree = random_tree(3, nodes=min(14, 1 + count), depth=self.drafter.depth, ranks=count)
        return {
            "static": dataclasses.replace(tree, drafter=self.drafter.id),
            "dynamic": TreePolicy(12, self.drafter.depth, self.drafter.id),
            "size_cost": TreePolicy(16, self.drafter.depth, self.drafter.id, SIZE_COST),
        }


def made_for(family: str, source: str, window: int, seed: int = 0, *, vocab: int = SMALL_VOCAB) -> Made:
    """Two prompts of 1 to 40 tokens, shorter and longer than the windows."""
    base = tiny_base(family, seed, vocab_size=vocab)
    rng = np.random.default_rng([seed, SOURCES.index(source), window])
    _, drafter = random_drafter(rng, vocab, source, window, mapped=seed % 2 == 1)
    heads = random_heads(base, drafter.num_heads, seed) if drafter.num_heads else None
    return Made(base, heads, drafter, answered(base, prompts_of(seed, 2, longest=40, vocab=vocab), NEW))


def steps_of(decoded: Sequence[Decoded]) -> list[int]:
    """The number of steps of each text."""
    return [len(one.step_lengths) for one in decoded]


def check_exact(made: Made) -> float:
    """Texts and steps of all plans, alone and in a batch; the mean tokens per step."""
    prompts = [text.prompt for text in made.texts]
    rates = []
    for kind, plan in made.plans().items():
        decoder = made.decoder(plan)
        decoded = [decoder.generate(prompt, NEW) for prompt in prompts]
        assert [one.tokens for one in decoded] == [text.answer for text in made.texts]
        predicted = predict(made.base, made.heads, plan, made.texts, made.drafter)
        assert steps_of(decoded) == predicted.sums.steps.tolist()
        rates.append(predicted.tokens_per_step)
        batch = decoder.generate(prompts, NEW)
        assert [one.tokens for one in batch] == [text.answer for text in made.texts]
        if kind != "size_cost":  # in a batch the row that gains most decides the size for all
            assert batch == decoded
    return float(np.mean(rates))


@pytest.mark.parametrize("number", but_slow(range(len(TREE_FAMILIES)), 0, 3, 7))
def test_families(number: int) -> None:
    """Every family, with one source and window each; the answers are those of stock generate."""
    made = made_for(TREE_FAMILIES[number], SOURCES[number % len(SOURCES)], WINDOWS[number % 4])
    assert made.texts[0].answer == stock(made.base, made.texts[0].prompt, NEW)
    check_exact(made)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("window", but_slow([4, 40], 4))
def test_sources(source: str, window: int) -> None:
    """Every source with windows that the text outgrows; drafts are often accepted."""
    assert check_exact(made_for("llama", source, window, 1)) > 1.1


@pytest.mark.parametrize("source", but_slow(SOURCES, "voted", "empty no heads"))
def test_tiny_vocabularies(source: str) -> None:
    """Vocabularies smaller than every list of candidates."""
    for vocab in (2, 3):
        check_exact(made_for("llama", source, 20, vocab, vocab=vocab))


@pytest.mark.parametrize("source", SOURCES)
def test_rows_that_end_leave_the_others_alone(source: str) -> None:
    """Rows end at different places; those that stay keep their own texts and caches."""
    made = made_for("llama", source, 20, 5)
    answers = [text.answer for text in made.texts]
    made.base.model.generation_config.eos_token_id = [answers[0][4], answers[1][9]]
    prompts = [text.prompt for text in made.texts]
    plans = made.plans()
    for kind in ("static", "dynamic"):
        decoder = made.decoder(plans[kind])
        batch = decoder.generate(prompts, NEW)
        assert batch == [decoder.generate(prompt, NEW) for prompt in prompts]
        assert [one.tokens for one in batch] == [stock(made.base, prompt, NEW) for prompt in prompts]
        assert len({len(one.tokens) for one in batch}) > 1


@pytest.mark.parametrize("source", SOURCES)
def test_rewound_rows_draft_as_before(source: str) -> None:
    """After a rewind the same steps follow as the first time, tokens and step lengths."""
    made = made_for("mistral", source, 20, 2)
    decoder = made.decoder(made.plans()["dynamic"])
    rows = decoder.prefill([text.prompt for text in made.texts], 3 * NEW)
    decoder.step(rows)
    mark = rows.mark()
    first = [decoder.step(rows) for _ in range(4)]
    rows.rewind(mark)
    assert [decoder.step(rows) for _ in range(4)] == first


@pytest.mark.parametrize("source", SOURCES)
def test_trees_of_every_rank(source: str) -> None:
    """A tree that asks every level for every candidate is drafted, though some levels have fewer."""
    made = made_for("llama", source, 20, 3)
    last = num_candidates(made.drafter) - 1
    paths = [(0,) * level + (rank,) for level in range(made.drafter.depth) for rank in range(last + 1)]
    plan = Tree.from_paths(paths, drafter=made.drafter.id)
    decoder = made.decoder(plan)
    decoded = [decoder.generate(text.prompt, NEW) for text in made.texts]
    assert [one.tokens for one in decoded] == [text.answer for text in made.texts]
    assert steps_of(decoded) == predict(made.base, made.heads, plan, made.texts, made.drafter).sums.steps.tolist()


def sampler(source: str, kind: str, rule: Rule) -> TreeDecoder:
    """A decoder of the small model whose texts are counted."""
    base = small_base()
    rng = np.random.default_rng([7, SOURCES.index(source)])
    _, drafter = random_drafter(rng, base.vocab_size, source, 20)
    made = Made(base, random_heads(base, drafter.num_heads, 3) if drafter.num_heads else None, drafter, [])
    return TreeDecoder(base, made.heads, made.plans()[kind], drafter=drafter, acceptance=rule, probe=False)


@pytest.mark.parametrize("kind", but_slow(["static", "dynamic", "size_cost"], "size_cost"))
@pytest.mark.parametrize("source", ["lm head", "empty no heads"])
def test_sample_distribution(source: str, kind: str) -> None:
    """Whole sampled texts are distributed as plain sampling distributes them, whatever the cache drafts."""
    rule = Sample(temperature=1.3, top_k=4, top_p=0.9) if kind == "dynamic" else Sample()
    decoder = sampler(source, kind, rule)
    assert p_value(counted(decoder, rounds=5), text_probabilities(small_base(), rule)) > ALPHA
