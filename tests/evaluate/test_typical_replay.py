"""Typical acceptance predicted: exact on texts of the tree itself, and for other trees what its definition says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from drafters import SIZE_COST, planted, prompts_of, quick_drafter
from helpers import random_tree
from tiny import cycle_base, cycle_heads, random_heads, tiny_base

from treeopt.decode.rules import Typical
from treeopt.drafter import Drafter
from treeopt.evaluate.baselines import Call, with_generate
from treeopt.evaluate.inputs import Inputs, num_ranks
from treeopt.evaluate.typical_replay import typical_replay
from treeopt.evaluate.validate_typical import rule_traces
from treeopt.evaluate.validation import ValidateOptions
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.policy import Plan, TreePolicy
from treeopt.texts.encode import Text
from treeopt.tree import Tree

NEW = 19
RULES = (Typical(0.7, 0.09, 0.3), Typical(1.5, 0.02, 0.5), Typical(0.5, 0.5, 0.99))
GAPS = Tree.from_paths([(0,), (9,), (0, 1), (0, 40), (9, 0), (9, 60)])  # 6 drafts, ranks up to 60
TREES = (
    Tree.chain(3),
    random_tree(5, nodes=30, depth=3, ranks=8),
    Tree(()),
    Tree(tuple((r,) for r in range(61))),
    GAPS,
)


def inputs_of(base: Base, heads: MedusaHeads | None, tree: Plan, drafter: Drafter | None = None) -> Inputs:
    """A tree and six prompts."""
    return Inputs(base, heads, tree, drafter, None, prompts_of(3, 6), (), ValidateOptions(max_new_tokens=NEW))


def decoded(inputs: Inputs, rule: Typical, new: int = NEW) -> tuple[list[Text], list[int]]:
    """Texts of the rule, one in a batch, and the steps of each."""
    decoder = inputs.decoder(rule)
    made = [decoder.generate(text.prompt, new) for text in inputs.texts]
    texts = [dataclasses.replace(text, answer=one.tokens) for text, one in zip(inputs.texts, made, strict=True)]
    return texts, [len(one.step_lengths) for one in made]


def predicted(inputs: Inputs, texts: Sequence[Text], rule: Typical, tree: Plan | None = None) -> list[int]:
    """The steps of each text by replay; the traces are those of the inputs' tree."""
    found = typical_replay(tree or inputs.tree, *rule_traces(inputs, texts, rule), rule)
    assert found.tokens == sum(len(text.answer) for text in texts)
    return found.steps_by_sequence().tolist()


def ended(base: Base) -> Base:
    """The model, which ends a text by a token that it often writes."""
    base.model.generation_config.eos_token_id = with_generate(base)([prompts_of(3, 6)[0].prompt], 9, Call(0))[0].tokens[
        -1
    ]
    return base


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree.nodes} nodes")
def test_replay_on_its_texts_is_the_decoder(tree: Tree, rule: Typical) -> None:
    """The steps of the tree that decoded the texts, text by text; random heads, so many drafts are off the text."""
    base = tiny_base("llama", 1)
    inputs = inputs_of(base, random_heads(base, 3, 1), tree)
    texts, steps = decoded(inputs, rule)
    assert predicted(inputs, texts, rule) == steps


@pytest.mark.parametrize(("plan", "count"), [(GAPS, 61), (Tree(()), 1), (TreePolicy(12, 2, "d"), 11)])
def test_traced_candidates_reach_the_last_rank(plan: Plan, count: int) -> None:
    """A static tree has ranks up to its last one, whatever its nodes; a policy one child fewer than nodes."""
    assert num_ranks(plan) == count
    base = tiny_base("llama", 1)
    if isinstance(plan, Tree):
        traces, _ = rule_traces(inputs_of(base, random_heads(base, 3, 1), plan), prompts_with_answers(), RULES[0])
        assert traces.target is not None
        assert traces.target.probability.shape == (6, 3, count)


def prompts_with_answers() -> list[Text]:
    """Two texts of three tokens."""
    return [dataclasses.replace(text, answer=[3, 5, 7]) for text in prompts_of(3, 2)]


@pytest.mark.parametrize("new", [1, 2, 7, 19])
@pytest.mark.parametrize("end", [False, True])
def test_replay_on_its_texts_where_they_are_cut(new: int, end: bool) -> None:
    """Texts that end by budget or by an end token within an accepted path, with heads that are often right."""
    base = cycle_base(disturbed=0.06)
    base = ended(base) if end else base
    inputs = inputs_of(base, cycle_heads(base, 3), Tree.from_paths([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]))
    texts, steps = decoded(inputs, RULES[0], new)
    assert predicted(inputs, texts, RULES[0]) == steps
    assert new < 7 or sum(steps) < sum(len(text.answer) for text in texts)
    assert not end or new < 19 or any(len(text.answer) < new for text in texts)


@pytest.mark.parametrize("cost", [(), SIZE_COST])
def test_replay_of_policies_on_their_texts_is_the_decoder(cost: tuple[tuple[int, float], ...]) -> None:
    """The same for trees chosen per step, of one size and of several."""
    base, heads = planted(3)
    base = ended(base)
    drafter = quick_drafter(base, heads)
    inputs = inputs_of(base, heads, TreePolicy(16, drafter.depth, drafter.id, cost), drafter)
    rule = Typical(2.0, 0.02, 0.5)
    texts, steps = decoded(inputs, rule)
    greedy = [with_generate(base)([text.prompt], NEW, Call(0))[0].tokens for text in texts]
    assert [text.answer for text in texts] != greedy  # the rule accepts what greedy decoding does not
    assert predicted(inputs, texts, rule) == steps


def test_replay_of_policies_counts_only_their_nodes() -> None:
    """A step of two nodes accepts its one draft where it is on the text or likely enough, whatever others are."""
    base, heads = planted(3)
    drafter = quick_drafter(base, heads)
    rule = Typical(0.5, 0.04, 0.99)
    large = inputs_of(base, heads, TreePolicy(16, drafter.depth, drafter.id), drafter)
    texts, _ = decoded(large, rule)
    traces, entropy = rule_traces(large, texts, rule)
    assert traces.target is not None
    probability = traces.target.probability[:-1, 0].astype(float)  # [P-1, R], of the next position
    likely = probability > np.minimum(0.04, 0.99 * np.exp(-entropy[1:].astype(float)))[:, None]
    expected = likely[:, 0] | (traces.ranks[:-1, 0] == 0)
    assert (likely[:, 1:].any(1) & ~expected).any()
    found = typical_replay(TreePolicy(2, drafter.depth, drafter.id), traces, entropy, rule)
    np.testing.assert_array_equal(found.accepted[:-1], expected)


def naive_steps(base: Base, heads: MedusaHeads, tree: Tree, text: Text, rule: Typical) -> int:
    """The steps by the definition in the module's docstring, one forward for each distribution."""

    def after(count: int) -> tuple[list[float], torch.Tensor]:
        with torch.inference_mode():
            logits, hidden = base.forward(torch.tensor([[*text.prompt, *text.answer[:count]]]))
        return [one / rule.temperature for one in logits[0, -1].tolist()], hidden[0, -1]

    def likely_enough(count: int, token: int) -> bool:
        scores, _ = after(count)
        weights = [math.exp(one - max(scores)) for one in scores]
        p = [one / sum(weights) for one in weights]
        entropy = -sum(one * math.log(one) for one in p if one)
        return p[token] > min(rule.epsilon, rule.delta * math.exp(-entropy))

    position = steps = 0
    while position < len(text.answer):
        with torch.inference_mode():
            guesses = heads(after(position)[1][None])[:, 0].argsort(dim=-1, descending=True, stable=True).tolist()
        path: tuple[int, ...] = ()
        while True:
            children = [node[-1] for node in tree.paths if node[:-1] == path]
            follows = position + len(path) + 1  # the place of the children's token in the answer
            if follows >= len(text.answer):
                more = 0
                break
            on_text = [rank for rank in children if guesses[len(path)][rank] == text.answer[follows]]
            if not on_text:
                more = any(likely_enough(follows, guesses[len(path)][rank]) for rank in children)
                break
            path = (*path, *on_text)
        position += 1 + len(path) + more
        steps += 1
    return steps


@pytest.mark.parametrize("rule", RULES[:2], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_replay_of_other_trees_is_the_definition(seed: int, rule: Typical) -> None:
    """On texts of a large tree the steps of a small one, and the other way round; text by text."""
    base = tiny_base("llama", seed)
    heads = random_heads(base, 3, seed)
    large, small = random_tree(seed, nodes=40, depth=3, ranks=8), random_tree(seed + 9, nodes=9, depth=3, ranks=5)
    differs = 0
    for one, other in ((large, small), (small, large)):
        texts, steps = decoded(inputs_of(base, heads, one), rule)
        found = predicted(inputs_of(base, heads, large), texts, rule, other)
        assert found == [naive_steps(base, heads, other, text, rule) for text in texts]
        differs += found != steps
    assert differs


def test_replay_accepts_more_than_ranks_do() -> None:
    """A draft that is likely enough and not on the text counts: with a lower threshold there are fewer steps."""
    base = tiny_base("llama", 1)
    inputs = inputs_of(base, random_heads(base, 3, 1), Tree.from_paths([(5,), (9,)]))
    texts, _ = decoded(inputs_of(base, inputs.heads, Tree(())), RULES[1])
    high, low = (sum(predicted(inputs, texts, Typical(1.5, epsilon, 0.99))) for epsilon in (1.0, 1e-6))
    assert low < high
