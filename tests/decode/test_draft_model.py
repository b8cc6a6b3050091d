"""Decoding with a draft model: stock text in the predicted steps, and sampled texts with the base's distribution."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from chances import ALPHA, DrawnPerChild, counted, p_value, small_base, text_probabilities
from decoding import stock
from drafters import SIZE_COST, answered, prompts_of
from helpers import random_tree
from naive_draft import random_drafter
from predicted import predict
from tiny import TREE_FAMILIES, but_slow, cycle_base, random_heads, tiny_base

import treeopt
from treeopt.decode.decoder import Decoded, TreeDecoder
from treeopt.decode.rules import Rule, Sample
from treeopt.defaults import MODEL, MODEL_NGRAM
from treeopt.drafter import Drafter
from treeopt.drafting.kernel.data import num_candidates
from treeopt.drafting.learn import Learning, learn
from treeopt.drafting.token_recycling import TokenRecycling
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.given import as_draft, load_draft
from treeopt.policy import Plan, TreePolicy
from treeopt.texts.answers import AnswerOptions
from treeopt.tree import Tree

NEW = 16
VOCAB = 13  # so that two random models often agree


def drafter_of(draft: Base, name: str, seed: int = 0, *, levels: int = 5) -> Drafter:
    """A random drafter with a draft model."""
    rng = np.random.default_rng(seed)
    _, drafter = random_drafter(rng, draft.vocab_size, "voted", 20)
    level = dataclasses.replace(drafter.levels[0], head=1.0)
    made = dataclasses.replace(drafter, levels=(level,) * levels, num_heads=0, draft=draft.fingerprint)
    return made if name == MODEL_NGRAM else dataclasses.replace(made, ngram_table=None, window=0, voted=0)


def plans_of(drafter: Drafter) -> list[Plan]:
    """A random tree, a policy, and one with costs of sizes."""
    ranks = min(4, num_candidates(drafter))
    tree = random_tree(3, nodes=min(14, 1 + ranks * drafter.depth), depth=drafter.depth, ranks=ranks)
    return [
        dataclasses.replace(tree, drafter=drafter.id),
        TreePolicy(12, drafter.depth, drafter.id),
        TreePolicy(16, drafter.depth, drafter.id, SIZE_COST),
    ]


def chain_of(drafter: Drafter) -> Tree:
    return dataclasses.replace(Tree.chain(drafter.depth), drafter=drafter.id)


def steps_of(decoded: list[Decoded]) -> list[int]:
    return [len(one.step_lengths) for one in decoded]


@pytest.mark.parametrize("number", but_slow(range(len(TREE_FAMILIES)), 0))
def test_families(number: int) -> None:
    """Base and draft of every family: stock text in the predicted steps, alone and in a batch."""
    base = tiny_base(TREE_FAMILIES[number], 1, vocab_size=VOCAB)
    draft = tiny_base(TREE_FAMILIES[(number + 3) % len(TREE_FAMILIES)], 2, vocab_size=VOCAB)
    texts = answered(base, prompts_of(number, 2, longest=40, vocab=VOCAB), NEW)
    prompts = [text.prompt for text in texts]
    assert texts[0].answer == stock(base, prompts[0], NEW)
    plans = plans_of(drafter := drafter_of(draft, (MODEL, MODEL_NGRAM)[number % 2], number))
    del plans[number % 3]  # all kinds with all families would take a minute
    for plan in plans:
        decoder = TreeDecoder(base, None, plan, drafter=drafter, draft=draft)
        decoded = [decoder.generate(prompt, NEW) for prompt in prompts]
        assert [one.tokens for one in decoded] == [text.answer for text in texts]
        predicted = predict(base, None, plan, texts, drafter, draft)
        assert steps_of(decoded) == predicted.sums.steps.tolist()
        batch = decoder.generate(prompts, NEW)
        assert [one.tokens for one in batch] == [text.answer for text in texts]
        if not isinstance(plan, TreePolicy) or not plan.size_cost:  # there one row decides the size for all
            assert batch == decoded


def test_a_model_that_drafts_for_itself() -> None:
    """Every draft of a chain is accepted: each step but the last has all levels and the root."""
    base = tiny_base("qwen2", 3)
    drafter = Drafter.model_only(5, 4, base.fingerprint)
    decoder = TreeDecoder(base, None, chain_of(drafter), drafter=drafter, draft=base)
    for prompt in ([3], list(range(1, 30))):
        assert decoder.generate(prompt, 6 * 4).step_lengths == [6] * 4


def test_rows_that_end_and_rows_that_are_rewound() -> None:
    """Rows end at different places, and steps after a rewind are those of before."""
    base, draft = tiny_base("llama", 1, vocab_size=VOCAB), tiny_base("llama", 2, vocab_size=VOCAB)
    texts = answered(base, prompts_of(4, 4, longest=30, vocab=VOCAB), NEW)
    prompts = [text.prompt for text in texts]
    drafter = drafter_of(draft, MODEL_NGRAM)
    decoder = TreeDecoder(base, None, TreePolicy(12, 5, drafter.id), drafter=drafter, draft=draft)
    rows = decoder.prefill(prompts, 3 * NEW)
    decoder.step(rows)
    mark = rows.mark()
    first = [decoder.step(rows) for _ in range(4)]
    rows.rewind(mark)
    assert [decoder.step(rows) for _ in range(4)] == first
    base.model.generation_config.eos_token_id = [texts[0].answer[4], texts[1].answer[9]]
    batch = decoder.generate(prompts, NEW)
    assert batch == [decoder.generate(prompt, NEW) for prompt in prompts]
    assert [one.tokens for one in batch] == [stock(base, prompt, NEW) for prompt in prompts]
    assert len({len(one.tokens) for one in batch}) > 1


def test_text_beyond_the_context_of_the_draft_model() -> None:
    """A text may be longer than the draft model's context; its drafts are then poor, and the text is the same."""
    base, draft = tiny_base("gpt2", 1, vocab_size=VOCAB), tiny_base("gpt2", 2, vocab_size=VOCAB, n_positions=32)
    drafter = drafter_of(draft, MODEL)
    prompt = prompts_of(1, 1, longest=60, vocab=VOCAB)[0].prompt * 3
    for plan in plans_of(drafter):
        decoder = TreeDecoder(base, None, plan, drafter=drafter, draft=draft)
        assert decoder.generate(prompt, NEW).tokens == stock(base, prompt, NEW)


def sampler(name: str, dynamic: bool, rule: Rule) -> TreeDecoder:
    """A decoder of the small model whose texts are counted."""
    base = small_base()
    draft = tiny_base("llama", 8, vocab_size=base.vocab_size, initializer_range=0.2)
    drafter = drafter_of(draft, name, 7, levels=3)
    plan = plans_of(drafter)[dynamic]
    return TreeDecoder(base, None, plan, drafter=drafter, draft=draft, acceptance=rule, probe=False)


@pytest.mark.parametrize(("name", "dynamic"), [(MODEL, True), (MODEL_NGRAM, False)])
def test_sample_distribution(name: str, dynamic: bool) -> None:
    """Whole sampled texts are distributed as plain sampling distributes them."""
    rule = Sample(temperature=1.3, top_k=4, top_p=0.9) if dynamic else Sample()
    assert p_value(counted(sampler(name, dynamic, rule), rounds=3), text_probabilities(small_base(), rule)) > ALPHA


@pytest.mark.slow
def test_sample_planted_wrong_rule() -> None:
    """A rule that draws for each child accepts drafts too often: the same test fails."""
    decoder = sampler(MODEL, False, DrawnPerChild())
    assert p_value(counted(decoder, rounds=5), text_probabilities(small_base(), Sample())) < ALPHA


def test_calibrated_traced_and_replayed() -> None:
    """A drafter is learned with a draft model, and the replay of its traces is what the decoder does."""
    base, draft = cycle_base(disturbed=0.03), cycle_base()  # the draft model is often right
    texts = answered(base, prompts_of(0, 3), NEW)
    for ngram in (False, True):
        options = AnswerOptions(max_new_tokens=NEW, batch_size=4)
        learned = learn(base, None, texts, Learning(200, ngram=ngram), options=options, draft=draft)
        assert learned.drafter.name == (MODEL_NGRAM if ngram else MODEL)
        assert learned.drafter.draft == draft.fingerprint
        for plan in plans_of(learned.drafter)[:2]:
            decoder = TreeDecoder(base, None, plan, drafter=learned.drafter, draft=draft)
            decoded = [decoder.generate(text.prompt, NEW) for text in texts]
            predicted = predict(base, None, plan, texts, learned.drafter, draft)
            assert steps_of(decoded) == predicted.sums.steps.tolist()
            assert predicted.tokens_per_step > 1.3


def test_inside_stock_generate() -> None:
    """`custom_generate` takes a draft model, and keeps its decoder from call to call."""
    base, draft = tiny_base("llama", 1, vocab_size=VOCAB), tiny_base("llama", 2, vocab_size=VOCAB)
    drafter = drafter_of(draft, MODEL)
    learned = {"tree": TreePolicy(8, 4, drafter.id), "drafter": drafter}
    ids = torch.tensor([[1, 2, 3]])
    for more in (learned, learned, {}):
        options = {"max_new_tokens": NEW, "draft": draft.model, **more}
        found = base.model.generate(ids, custom_generate=treeopt.tree_generate, **options)
        assert found[0, 3:].tolist() == stock(base, [1, 2, 3], NEW)


def test_models_and_records_that_do_not_fit() -> None:
    """Another vocabulary, a record without or with a draft model, and heads beside one are refused, with the reason."""
    base, draft = tiny_base("llama", 1, vocab_size=VOCAB), tiny_base("llama", 2, vocab_size=VOCAB)
    drafter = drafter_of(draft, MODEL)
    plan = TreePolicy(8, 4, drafter.id)
    other = tiny_base("llama", 2, vocab_size=VOCAB + 1)
    with pytest.raises(TreeoptError, match="14 tokens, the base 13") as caught:
        TreeDecoder(base, None, plan, drafter=drafter, draft=other)
    assert caught.value.code is Code.DRAFT_MISMATCH
    with pytest.raises(TreeoptError, match="made with a draft model, and there is no draft model") as caught:
        TreeDecoder(base, None, plan, drafter=drafter)
    assert caught.value.code is Code.DRAFTER_MISMATCH
    untrained = Drafter.untrained(VOCAB)
    with pytest.raises(TreeoptError, match="made without one, and there is a draft model"):
        TreeDecoder(base, None, TreePolicy(8, 4, untrained.id), drafter=untrained, draft=draft)
    with pytest.raises(ValueError, match="heads alone are not enough"):
        TreeDecoder(base, random_heads(base, 2), draft=draft)
    with pytest.raises(ValueError, match="takes a tree and the record"):
        TreeDecoder(base, None, plan, drafter=TokenRecycling(base), draft=draft)
    with pytest.raises(ValueError, match="takes no heads"):
        TreeDecoder(base, random_heads(base, 2), plan, drafter=drafter, draft=draft)
    recurrent = tiny_base("mamba", 2, vocab_size=VOCAB)
    with pytest.raises(TreeoptError) as caught:
        TreeDecoder(base, None, plan, drafter=drafter, draft=recurrent)
    assert caught.value.code is Code.NO_TREES


@pytest.mark.parametrize("load", [load_draft, as_draft])
def test_missing_draft_model_is_named_as_such(load: Callable[..., Base | None]) -> None:
    """By the loader of the command line and by the functions that take a model in any form."""
    with pytest.raises(TreeoptError) as caught:
        load("./missing", tiny_base("llama", 0))
    assert caught.value.code is Code.FILE_MISSING
    assert "there is no model ./missing" in caught.value.what
    assert "--model" not in str(caught.value)
