"""Draft metrics: exact figures, against counts by hand and by a naive loop over the trees that were really drafted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from decoding import prompt_of, stock
from drafters import planted, prompts_of, quick_drafter
from helpers import random_tree
from naive_draft import random_level, random_table
from tiny import cycle_base, cycle_heads, tiny_base
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.draft_metrics import Decoded, DraftMetrics, Step
from treeopt.decode.generate import TreeGenerateOutput, tree_generate
from treeopt.drafter import Drafter
from treeopt.drafting.interface import Drafts, ProposerSession
from treeopt.drafting.plans import TreeSource, trees_for
from treeopt.models.base import Base
from treeopt.policy import TreePolicy
from treeopt.tree import Tree

NEW = 24
SIZES = ((1, 0.0), (2, 0.9), (6, 1.2), (8, 1.5), (16, 2.0))  # nodes and cost, so that one node pays at some steps


class Recorded:
    """A source of trees that notes every step's drafts."""

    def __init__(self, trees: TreeSource) -> None:
        self.trees, self.drafts = trees, []
        self.nodes, self.depth, self.window, self.tree = trees.nodes, trees.depth, trees.window, trees.tree

    def start(self, texts: Sequence[Sequence[int]]) -> ProposerSession:
        self.drafts.clear()
        return self.trees.start(texts)

    def draft(self, session: ProposerSession, roots: Tensor, states: Tensor, context: int) -> Drafts:
        self.drafts.append(self.trees.draft(session, roots, states, context))
        return self.drafts[-1]


def token_paths(drafts: Drafts, row: int) -> set[tuple[int, ...]]:
    """The tokens from the root to every draft of a row; void nodes and those below them hold none."""
    tree = drafts.tree
    parents = (tree.parents[row] if tree.per_row else tree.parents).tolist()
    paths: list[tuple[int, ...] | None] = [()]
    for node in range(1, len(parents)):
        above, void = paths[parents[node]], drafts.void is not None and bool(drafts.void[row, node])
        paths.append(None if above is None or void else (*above, int(drafts.tokens[row, node])))
    return {path for path in paths if path}


def naive(recorded: list[Drafts], texts: list[list[int]]) -> list[list[tuple[int, int]]]:
    """For each text its steps, as accepted and drafted tokens: a walk over the known text, one step after another.

    All rows are stepped together. A root that is the last token of its text is a step that is not among the recorded.
    """
    at, steps, left = [0] * len(texts), [[] for _ in texts], list(recorded)
    while any(at[i] < len(text) for i, text in enumerate(texts)):
        for i, text in enumerate(texts):
            if at[i] == len(text) - 1:
                steps[i].append((0, 0))
                at[i] += 1
        rows = [i for i, text in enumerate(texts) if at[i] < len(text)]
        if not rows:
            break
        drafts = left.pop(0)
        assert drafts.tokens[:, 0].tolist() == [texts[i][at[i]] for i in rows]
        for row, i in enumerate(rows):
            paths, follows = token_paths(drafts, row), texts[i][at[i] + 1 :]
            accepted = 0
            while accepted < len(follows) and tuple(follows[: accepted + 1]) in paths:
                accepted += 1
            steps[i].append((accepted, len(paths)))
            at[i] += 1 + accepted
    assert not left
    return steps


def figures(steps: list[tuple[int, int]], depth: int) -> dict[str, Any]:
    """The six figures of steps, by their definitions."""
    verified = [(accepted, drafted) for accepted, drafted in steps if drafted]
    drafted, accepted = sum(one for _, one in verified), sum(one for one, _ in verified)
    return {
        "num_drafts": len(verified),
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": sum(1 + one for one, _ in steps) / len(steps),
        "acceptance_histogram": [sum(one == k for one, _ in verified) for k in range(depth + 1)],
    }


def check(source: Recorded, base: Base, prompts: list[list[int]], new: int) -> list[Decoded]:
    """The decoded texts of a batch, after their metrics were compared with the naive count."""
    decoded = TreeDecoder(base, None, source).generate(prompts, new)
    assert [one.tokens for one in decoded] == [stock(base, prompt, new) for prompt in prompts]
    steps = naive(source.drafts, [one.tokens for one in decoded])
    for one, counted in zip(decoded, steps, strict=True):
        assert one.step_draft_tokens == [drafted for _, drafted in counted]
        assert one.draft_metrics.as_dict() == figures(counted, source.depth)
        assert one.draft_metrics.mean_acceptance_length == one.tokens_per_step
    together = DraftMetrics.total(one.draft_metrics for one in decoded)
    assert together.as_dict() == figures([step for counted in steps for step in counted], source.depth)
    return decoded


def metrics_of(budget: int, *, end: int | None = None, depth: int = 4) -> dict[str, Any]:
    """The figures of a chain whose drafts are all right."""
    base = cycle_base(1)
    if end is not None:
        base.model.generation_config.eos_token_id = stock(base, [3, 8], 20)[end]
    decoder = TreeDecoder(base, cycle_heads(base, 4, 1), Tree.chain(depth))
    return decoder.generate([3, 8], budget).draft_metrics.as_dict()


def by_hand(drafts: int, drafted: int, accepted: int, length: float, histogram: list[int]) -> dict[str, Any]:
    """The figures in the order of the JSON."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "draft_acceptance_rate")
    rest = {"mean_acceptance_length": length, "acceptance_histogram": histogram}
    return dict(zip(names, (drafts, drafted, accepted, accepted / drafted if drafted else None), strict=True)) | rest


def test_budget_inside_a_step() -> None:
    """23 tokens in steps of five: the last step verifies four drafts, and the two beyond the budget do not count."""
    assert metrics_of(23) == by_hand(5, 20, 18, 23 / 5, [0, 0, 1, 0, 4])


def test_last_root_without_a_forward() -> None:
    """21 tokens: the last root is a step, but no draft and not in the histogram."""
    assert metrics_of(21) == by_hand(4, 16, 16, 21 / 5, [0, 0, 0, 0, 4])
    assert metrics_of(1) == by_hand(0, 0, 0, 1.0, [0] * 5)


def test_end_of_text_inside_a_step() -> None:
    """Drafts accepted behind an end token do not count; an end token that is a root needs no forward."""
    assert metrics_of(20, end=7) == by_hand(2, 8, 6, 8 / 2, [0, 0, 1, 0, 1])
    assert metrics_of(20, end=5) == by_hand(1, 4, 4, 6 / 2, [0, 0, 0, 0, 1])
    assert metrics_of(20, end=0) == by_hand(0, 0, 0, 1.0, [0] * 5)


def test_one_node() -> None:
    """The one-node tree verifies no drafts, so there is no rate."""
    assert metrics_of(9, depth=0) == by_hand(0, 0, 0, 1.0, [0])


@pytest.mark.parametrize("rows", [1, 6])
def test_static_tree(rows: int) -> None:
    """Rows of a batch that accept different numbers of drafts and end apart."""
    base = cycle_base(2, disturbed=0.02)
    prompts = [prompt_of(seed, longest=9) for seed in range(rows)]
    base.model.generation_config.eos_token_id = [stock(base, prompts[0], 40)[5], stock(base, prompts[-1], 40)[17]]
    tree = random_tree(2, nodes=40, depth=4, ranks=5)
    source = Recorded(trees_for(base, cycle_heads(base, 4, 2), tree))
    decoded = check(source, base, prompts, NEW)
    assert {drafted for one in decoded for drafted in one.step_draft_tokens} <= {0, 39}
    if rows > 1:
        assert len({one.draft_metrics for one in decoded}) > 3


@pytest.mark.slow
def test_static_tree_with_void_nodes() -> None:
    """Nodes without a candidate are no draft tokens, row by row."""
    base, heads = planted(2)
    drafter = quick_drafter(base, heads)
    count = trees_for(base, heads, TreePolicy(2, drafter.depth, drafter.id), drafter).proposer.num_candidates
    ranks = range(count)
    tree = Tree.from_paths([(rank,) for rank in ranks] + [(rank, 0) for rank in ranks], drafter=drafter.id)
    decoded = check(
        Recorded(trees_for(base, heads, tree, drafter)), base, [text.prompt for text in prompts_of(3, 4)], NEW
    )
    assert len({drafted for one in decoded for drafted in one.step_draft_tokens}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("size_cost", [(), SIZES])
@pytest.mark.parametrize("rows", [1, 5])
def test_per_step_trees(rows: int, size_cost: tuple[tuple[int, float], ...]) -> None:
    """A tree for each row and step; with costs their sizes vary, one node among them."""
    base, heads = planted(3)
    drafter = quick_drafter(base, heads)
    policy = TreePolicy(16, drafter.depth, drafter.id, size_cost)
    prompts = [text.prompt for text in prompts_of(6, rows)]
    decoded = check(Recorded(trees_for(base, heads, policy, drafter)), base, prompts, NEW)
    sizes = {drafted + 1 for one in decoded for drafted in one.step_draft_tokens[:-1]}
    assert sizes == ({1, 6} if size_cost else {16})


def test_padding_of_per_step_trees() -> None:
    """A row with fewer candidates than the row beside it is padded, and the padding is not counted."""
    rng, base = np.random.default_rng(1), tiny_base("llama", 3, vocab_size=12)
    table = random_table(rng, 12)
    drafter = Drafter((random_level(rng),) * 2, 0, 2, 8, table.record())
    source = Recorded(trees_for(base, None, TreePolicy(100, 2, drafter.id), drafter))
    decoded = check(source, base, [text.prompt for text in prompts_of(5, 6, vocab=12)], 12)
    assert sum(drafts.void is not None for drafts in source.drafts) > 3
    verified = [drafted for one in decoded for drafted in one.step_draft_tokens]
    assert len(set(verified)) > 2
    for drafts in source.drafts:  # the distinct paths, without a look at what is called void
        every = dataclasses.replace(drafts, void=None)
        rows = range(len(drafts.tokens))
        assert [token_paths(every, row) for row in rows] == [token_paths(drafts, row) for row in rows]


def test_custom_loop() -> None:
    """The steps of `start` and `step` are lists of tokens that know the drafts verified for them."""
    base = cycle_base(1)
    decoder = TreeDecoder(base, cycle_heads(base, 4, 1), Tree.chain(4))
    text = stock(base, [3, 8], 11)
    steps = list(decoder.start([3, 8], 11))
    assert steps == [text[:5], text[5:10], text[10:]]
    assert [step.num_draft_tokens for step in steps] == [4, 4, 0]
    (step,) = decoder.step(decoder.prefill([[3, 8]], 2))
    assert (step, step.num_draft_tokens) == (text[:5], 4)


class EndsAt(StoppingCriteria):
    """Ends each row at its first token of `ends`."""

    def __init__(self, ends: list[int], prompt: int) -> None:
        self.ends, self.prompt = torch.tensor(ends), prompt

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        return torch.isin(input_ids[:, self.prompt :], self.ends).any(1)


def generated(base: Base, ids: list[list[int]], tree: Any, heads: Any, **options: Any) -> TreeGenerateOutput:
    """The record of stock `generate` with the trees."""
    base.model.generation_config.pad_token_id = 0
    out = base.model.generate(
        torch.tensor(ids),
        attention_mask=torch.ones(len(ids), len(ids[0]), dtype=torch.long),
        do_sample=False,
        return_dict_in_generate=True,
        custom_generate=tree_generate,
        tree=tree,
        heads=heads,
        **options,
    )
    assert isinstance(out, TreeGenerateOutput)
    return out


def test_tree_generate_is_the_decoder() -> None:
    """In stock `generate` the same steps, row by row, and the figures of the whole batch."""
    base = cycle_base(2, disturbed=0.02)
    heads, tree = cycle_heads(base, 4, 2), random_tree(2, nodes=40, depth=4, ranks=5)
    prompts = [[3, 8], [40, 1], [7, 9], [11, 2]]
    base.model.generation_config.eos_token_id = stock(base, prompts[0], 40)[5]
    decoded = TreeDecoder(base, heads, tree).generate(prompts, NEW)
    found = generated(base, prompts, tree, heads, max_new_tokens=NEW)
    assert found.step_lengths == tuple(tuple(one.step_lengths) for one in decoded)
    assert found.step_draft_tokens == tuple(tuple(one.step_draft_tokens) for one in decoded)
    assert found.draft_metrics == DraftMetrics.total(one.draft_metrics for one in decoded)
    assert found.draft_metrics.mean_acceptance_length == found.tokens_per_step


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (7, by_hand(2, 8, 6, 8 / 2, [0, 0, 1, 0, 1])),
        (5, by_hand(2, 8, 4, 6 / 2, [1, 0, 0, 0, 1])),  # known only after the forward, so its drafts were verified
    ],
)
def test_tree_generate_stopped_by_a_criterion(place: int, expected: dict[str, Any]) -> None:
    """A criterion ends a text inside a step: accepted drafts behind the end do not count."""
    base = cycle_base(1)
    ends = StoppingCriteriaList([EndsAt([stock(base, [3, 8], 20)[place]], 2)])
    found = generated(base, [[3, 8]], Tree.chain(4), cycle_heads(base, 4, 1), max_new_tokens=20, stopping_criteria=ends)
    assert found.sequences.shape[1] == 2 + place + 1
    assert found.draft_metrics.as_dict() == expected


def test_total_of_different_depths() -> None:
    """Sums before ratios; a shorter histogram is continued with zeros."""
    one = DraftMetrics.of_steps([2, 1, 1], [3, 3, 0], 1)
    other = DraftMetrics.of_steps([4, 3], [5, 4], 3)
    both = DraftMetrics.total([one, other])
    assert both == DraftMetrics(5, 15, (1, 1, 1, 1))
    assert (both.num_drafts, both.num_accepted_tokens, both.draft_acceptance_rate) == (4, 6, 6 / 15)
    assert both.mean_acceptance_length == 11 / 5


def test_counts_that_contradict() -> None:
    """More tokens than a step can have, none, and lists of different lengths are errors."""
    with pytest.raises(ValueError, match="a step of 3 tokens verified 1 draft tokens"):
        DraftMetrics.of_steps([3], [1], 4)
    with pytest.raises(ValueError, match="a step of 0 tokens verified 4 draft tokens"):
        DraftMetrics.of_steps([0], [4], 4)
    with pytest.raises(ValueError, match="shorter"):
        DraftMetrics.of_steps([1, 1], [1], 1)


def test_step_is_a_list() -> None:
    """A step equals the list of its tokens; a cut one keeps the drafts that were verified."""
    step = Step([4, 5, 6], 7)
    assert step == [4, 5, 6]
    assert (step.cut(2), step.cut(2).num_draft_tokens) == ([4, 5], 7)
