"""Rescored drafts and per-step trees: the text is the base's own, steps are those predicted, mismatches are refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from chances import ALPHA, counted, p_value, small_base, text_probabilities
from drafters import SIZE_COST, answered, learned, planted, prompts_of, quick_drafter
from helpers import random_tree
from predicted import predict
from tiny import but_slow, cycle_base, cycle_heads, random_heads, tiny_base

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Greedy, Rule, Sample, Typical
from treeopt.defaults import STEP_SIZES
from treeopt.drafter import Drafter, Level
from treeopt.drafting.interface import Drafts
from treeopt.drafting.kernel.data import num_candidates
from treeopt.drafting.kernel.session import KernelSession
from treeopt.drafting.plans import TreeSource, check_plan, trees_for
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.runs import trace
from treeopt.evaluate.validate import validate
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.policy import Plan, TreePolicy
from treeopt.texts.answers import hidden_states
from treeopt.texts.encode import Text
from treeopt.tree import Tree

NEW = 20
KINDS = ("static", "dynamic", "size_cost")
RULE = Sample(temperature=1.3, top_k=4, top_p=0.9)


@dataclasses.dataclass(frozen=True)
class Made:
    """A model with heads, and both drafters that were learned for it."""

    base: Base
    heads: MedusaHeads
    drafters: dict[bool, Drafter]
    texts: list[Text]


@pytest.fixture(scope="module")
def made() -> Made:
    """Learned on other prompts than those of `texts`."""
    base, heads = planted()
    texts = answered(base, prompts_of(1, 24))
    drafters = {correct: learned(base, heads, texts, ngram=correct).drafter for correct in (False, True)}
    return Made(base, heads, drafters, answered(base, prompts_of(2, 6, longest=40), NEW))


def plan_of(kind: str, drafter: Drafter, *, nodes: int = 16, depth: int | None = None) -> Plan:
    """A tree of random paths, or a policy."""
    levels = depth or drafter.depth
    if kind == "static":
        paths = [*Tree.chain(levels).paths, *((0,) * (n - 1) + (1,) for n in range(1, levels + 1)), (2,), (1, 0)]
        return Tree.from_paths(paths[: nodes - 1], drafter=drafter.id)
    return TreePolicy(nodes, levels, drafter.id, SIZE_COST if kind == "size_cost" else ())


@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_text_and_steps_of_drafters(made: Made, kind: str, correct: bool) -> None:
    """Every text is that of stock generate, in exactly the steps that the traces predict, prompt by prompt."""
    drafter = made.drafters[correct]
    plan = plan_of(kind, drafter)
    decoder = TreeDecoder(made.base, made.heads, plan, drafter=drafter)
    decoded = [decoder.generate(text.prompt, NEW) for text in made.texts]
    assert [one.tokens for one in decoded] == [text.answer for text in made.texts]
    predicted = predict(made.base, made.heads, plan, made.texts, drafter)
    assert [len(one.step_lengths) for one in decoded] == predicted.sums.steps.tolist()
    assert predicted.tokens_per_step > 1.05
    assert max(max(one.step_lengths) for one in decoded) > 2
    batch = decoder.generate([text.prompt for text in made.texts], NEW)
    assert [one.tokens for one in batch] == [text.answer for text in made.texts]
    if kind != "size_cost":  # in a batch the row that gains most decides the size for all
        assert batch == decoded


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("nodes", [2, 3, 9, 40, 254])
def test_steps_of_policies(made: Made, nodes: int, depth: int) -> None:
    """Policies of any size, less deep than their drafter, and larger than their trees, take the predicted steps."""
    drafter = made.drafters[True]
    policy = TreePolicy(nodes, depth, drafter.id)
    decoder = TreeDecoder(made.base, made.heads, policy, drafter=drafter)
    decoded = [decoder.generate(text.prompt, NEW) for text in made.texts[:3]]
    predicted = predict(made.base, made.heads, policy, made.texts[:3], drafter)
    assert [len(one.step_lengths) for one in decoded] == predicted.sums.steps.tolist()
    assert [one.tokens for one in decoded] == [text.answer for text in made.texts[:3]]


@pytest.mark.parametrize("correct", [False, True])
def test_node_ranks_are_the_decoders(made: Made, correct: bool) -> None:
    """The true path lies in the tree that the decoder itself would grow exactly where its traced order says so."""
    drafter = made.drafters[correct]
    text = made.texts[3]
    steps = trace(made.base, made.heads, [text], drafter, steps=drafter.depth).steps
    assert steps is not None
    [hidden] = hidden_states(made.base, [text])
    whole = [*text.prompt, *text.answer]
    for nodes in (2, 5, 16, 64, 253):
        trees = trees_for(made.base, made.heads, TreePolicy(nodes, drafter.depth, drafter.id), drafter)
        for i in range(0, len(text.answer), 3):
            end = len(text.prompt) + i + 1
            held = paths_of(drafts_of(trees, [whole[:end]], hidden[i : i + 1]))
            for depth in range(1, min(drafter.depth, len(whole) - end) + 1):
                assert (tuple(whole[end : end + depth]) in held) == (steps.node_rank[i, depth - 1] < nodes)


@torch.inference_mode()
def drafts_of(trees: TreeSource, texts: Sequence[Sequence[int]], hidden: torch.Tensor) -> Drafts:
    """What a step drafts behind these texts, whose last tokens are the roots."""
    root = torch.tensor([text[-1] for text in texts])
    return trees.draft(trees.start(texts), root, hidden, 1)


def paths_of(drafts: Drafts) -> set[tuple[int, ...]]:
    """The token paths of one row's tree, walked node by node."""
    tokens, parents = drafts.tokens[0].tolist(), drafts.tree.parents[0].tolist()
    paths: list[tuple[int, ...]] = [()]
    for token, parent in list(zip(tokens, parents, strict=True))[1:]:
        paths.append((*paths[parent], token))
    return set(paths)


def test_default_weights_draft_as_the_heads(made: Made) -> None:
    """With the head's weight alone, with and without an n-gram table, drafts are those of the heads, bit for bit."""
    table = made.drafters[True]
    tree = random_tree(2, nodes=20, depth=3, ranks=6)
    rng = np.random.default_rng(0)
    hidden = torch.from_numpy(rng.normal(size=(5, made.base.hidden_size)).astype(np.float32))
    recent = rng.integers(0, made.base.vocab_size, (5, 32))
    recent = recent.tolist()
    wanted = drafts_of(trees_for(made.base, made.heads, tree), recent, hidden).tokens
    levels = (Level(),) * table.depth
    for drafter in (
        Drafter.heads_only(3, 6),
        Drafter(levels[:3], 3, 6),
        dataclasses.replace(table, levels=levels, top=made.base.vocab_size),
    ):
        own = dataclasses.replace(tree, drafter=drafter.id)
        assert drafts_of(trees_for(made.base, made.heads, own, drafter), recent, hidden).tokens.equal(wanted)
    own = dataclasses.replace(tree, drafter=table.id)
    assert not drafts_of(trees_for(made.base, made.heads, own, table), recent, hidden).tokens.equal(wanted)


@pytest.mark.parametrize("kind", but_slow(KINDS, "dynamic"))
@pytest.mark.parametrize("rule", but_slow([Sample(), RULE], RULE))
def test_sample_distribution_of_drafters(kind: str, rule: Sample) -> None:
    """Texts are distributed as plain sampling distributes them, whatever drafts and however the tree is chosen."""
    base = small_base()
    heads = random_heads(base, 2, 3)
    drafter = quick_drafter(base, heads)
    decoder = TreeDecoder(base, heads, plan_of(kind, drafter), drafter=drafter, acceptance=rule, probe=False)
    assert p_value(counted(decoder, rounds=4), text_probabilities(base, rule)) > ALPHA


@pytest.mark.parametrize("num_heads", but_slow([1, 3], 3))
@pytest.mark.parametrize("vocab", but_slow([2, 5], 2))
@pytest.mark.parametrize("kind", KINDS)
def test_tiny_vocabularies(kind: str, vocab: int, num_heads: int) -> None:
    """Vocabularies smaller than every list of candidates, trees and policies larger than what there is to draft."""
    base = tiny_base("llama", vocab, vocab_size=vocab)
    heads = random_heads(base, num_heads, 1)
    texts = answered(base, prompts_of(5, 4, vocab=vocab), 12)
    for drafter in (quick_drafter(base, heads), quick_drafter(base, heads, ngram=False)):
        tree = random_tree(1, nodes=min(4, 1 + vocab), depth=drafter.depth, ranks=vocab)
        plan = dataclasses.replace(tree, drafter=drafter.id) if kind == "static" else plan_of(kind, drafter)
        decoder = TreeDecoder(base, heads, plan, drafter=drafter)
        decoded = [decoder.generate(text.prompt, 12) for text in texts]
        assert [one.tokens for one in decoded] == [text.answer for text in texts]
        predicted = predict(base, heads, plan, texts, drafter)
        assert [len(one.step_lengths) for one in decoded] == predicted.sums.steps.tolist()


def widest(made: Made, correct: bool) -> Tree:
    """A tree that asks for every candidate of its drafter, and for children of the last ones."""
    drafter = made.drafters[correct]
    table = drafter.ngram_table
    count = drafter.top + (0 if table is None else table.tokens.shape[1] + 1)
    last = range(drafter.top - 2, count)
    paths = [(rank,) for rank in range(count)] + [(rank, child) for rank in last for child in (0, 1, count - 1)]
    return Tree.from_paths(paths, drafter=drafter.id)


@pytest.mark.parametrize("correct", [False, True])
def test_every_candidate_is_predicted(made: Made, correct: bool) -> None:
    """A tree of all candidates takes the predicted steps, though some repeat others; so does a batch."""
    drafter, tree = made.drafters[correct], widest(made, correct)
    found = validate(made.base, made.heads, tree, made.texts, drafter=drafter, max_new_tokens=NEW)
    assert found.lossless
    assert [one.steps for one in found.metrics.trials] == [one.predicted_steps for one in found.metrics.trials]
    batch = TreeDecoder(made.base, made.heads, tree, drafter=drafter).generate([t.prompt for t in made.texts], NEW)
    assert [len(one.step_lengths) for one in batch] == [one.steps for one in found.metrics.trials]


@pytest.mark.parametrize("rule", [Greedy(), Sample(seed=3), Typical(0.7, 0.01, 0.1)])
def test_repeated_candidates_are_never_accepted(made: Made, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that repeats one outside the tree is void by every rule: replay does not count it either."""
    drafter = made.drafters[True]
    ranks = range(drafter.top, num_candidates(drafter))
    tree = Tree.from_paths([(rank,) for rank in ranks] + [(rank, 0) for rank in ranks], drafter=drafter.id)
    drafted: list[Drafts] = []
    fill = KernelSession.fill

    def noted(self: KernelSession, *given: object) -> Drafts:
        drafted.append(fill(self, *given))  # type: ignore[arg-type]
        return drafted[-1]

    monkeypatch.setattr(KernelSession, "fill", noted)
    accepted: list[bool] = []

    class Noted(type(rule)):  # type: ignore[misc]  # any of the three rules
        def accept(self, drafts: Drafts, *given: object) -> tuple[torch.Tensor, torch.Tensor]:
            node, root = super().accept(drafts, *given)
            accepted.append(drafts.void is not None and bool(drafts.void[0, node]))
            return node, root

    rule = Noted(**{field.name: getattr(rule, field.name) for field in dataclasses.fields(rule) if field.init})
    decoder = TreeDecoder(made.base, made.heads, tree, drafter=drafter, acceptance=rule)
    for text in made.texts:
        decoder.generate(text.prompt, NEW)
    assert sum(drafts.void is not None for drafts in drafted) > 20
    assert not any(accepted)


@pytest.mark.parametrize("correct", [False, True])
def test_rank_beyond_the_candidates_is_refused(made: Made, correct: bool) -> None:
    """One rank more than the drafter has candidates is E102, with their number, in decoder and validation."""
    drafter, tree = made.drafters[correct], widest(made, correct)
    beyond = dataclasses.replace(tree, paths=(*tree.paths, (*tree.paths[-1], tree.max_rank + 1)))
    for call in (
        lambda: TreeDecoder(made.base, made.heads, beyond, drafter=drafter),
        lambda: validate(made.base, made.heads, beyond, made.texts, drafter=drafter),
        lambda: check_plan(beyond, drafter),
    ):
        with pytest.raises(TreeoptError, match=f"has {tree.max_rank + 1} candidates a level") as caught:
            call()
        assert caught.value.code is Code.RANK_TOO_LARGE


def test_candidates_of_small_vocabularies() -> None:
    """There are no more candidates than tokens, and a heads drafter has their number only with its base."""
    base = tiny_base("llama", vocab_size=5)
    heads = random_heads(base, 1)
    drafter = quick_drafter(base, heads)
    assert num_candidates(drafter) == 5
    plain = Drafter.heads_only(1, 6)
    assert (num_candidates(plain), num_candidates(plain, 5)) == (6, 5)
    wide = Tree.from_paths([(rank,) for rank in range(6)], drafter=plain.id)
    check_plan(wide, plain)
    with pytest.raises(TreeoptError, match="5 candidates"):
        TreeDecoder(base, heads, wide, drafter=plain)


def mismatches(made: Made) -> list[tuple[Plan, Drafter | None]]:
    """Plans with a drafter that is not theirs."""
    own, other = made.drafters[True], made.drafters[False]
    plain = random_tree(1, nodes=4, depth=2, ranks=2)
    return [
        (plan_of("static", own), None),
        (plan_of("static", own), other),
        (plan_of("dynamic", own), None),
        (plan_of("dynamic", own), other),
        (plain, own),
    ]


def test_other_drafters_are_refused(made: Made) -> None:
    """A plan of another drafter, of one that is not given, and of none, are E223 in decoder and validation."""
    for plan, drafter in mismatches(made):
        calls: Sequence[object] = (
            lambda plan=plan, drafter=drafter: trees_for(made.base, made.heads, plan, drafter),
            lambda plan=plan, drafter=drafter: TreeDecoder(made.base, made.heads, plan, drafter=drafter),
            lambda plan=plan, drafter=drafter: validate(made.base, made.heads, plan, made.texts, drafter=drafter),
            lambda plan=plan, drafter=drafter: predict(made.base, made.heads, plan, made.texts, drafter),
        )
        for call in calls:
            with pytest.raises(TreeoptError) as caught:
                call()  # type: ignore[operator]  # four calls of one kind
            assert caught.value.code is Code.DRAFTER_MISMATCH


def test_drafter_of_another_model_is_refused(made: Made) -> None:
    """Another number of heads and another vocabulary are E223, both named."""
    drafter = made.drafters[True]
    small = tiny_base("llama", vocab_size=13)
    with pytest.raises(TreeoptError, match=r"3 heads, there are 2; its vocabulary holds 61 tokens, .* 13") as caught:
        TreeDecoder(small, random_heads(small, 2), plan_of("dynamic", drafter), drafter=drafter)
    assert caught.value.code is Code.DRAFTER_MISMATCH


def test_tree_deeper_than_the_drafter_is_refused(made: Made) -> None:
    """A static tree has at most as many levels as its drafter; a policy drafts as deep as there are levels."""
    drafter = made.drafters[True]
    deep = dataclasses.replace(Tree.chain(drafter.depth + 1), drafter=drafter.id)
    with pytest.raises(TreeoptError) as caught:
        TreeDecoder(made.base, made.heads, deep, drafter=drafter)
    assert caught.value.code is Code.TREE_TOO_DEEP
    policy = TreePolicy(8, 200, drafter.id)
    assert trees_for(made.base, made.heads, policy, drafter).depth == drafter.depth


def test_size_cost_chooses_sizes(made: Made) -> None:
    """Free nodes are all taken, dear ones never; without size_cost every step has the same number."""
    drafter = made.drafters[True]
    hidden = torch.randn(3, made.base.hidden_size, generator=torch.Generator().manual_seed(0))
    recent = np.random.default_rng(0).integers(0, 61, (3, 32)).tolist()
    for size_cost, nodes in (((), 16), (((1, 0.0), (16, 0.0)), 16), (((1, 0.0), (16, 20.0)), 1)):
        trees = trees_for(made.base, made.heads, TreePolicy(16, 3, drafter.id, size_cost), drafter)
        assert drafts_of(trees, recent, hidden).tokens.shape == (3, nodes)


def test_matches_are_looked_up_in_the_prompt() -> None:
    """A text that its prompt holds already is drafted from there, though heads and n-gram table have not learned it."""
    base = cycle_base()
    heads = random_heads(base, 1, 7)
    texts = answered(base, prompts_of(4, 4), 6)
    table = learned(base, heads, texts, tokens=0, new=6).drafter
    level = Level(head=0.0, prompt_lookup=tuple(float(n) for n in range(1, 13)))
    drafter = dataclasses.replace(table, levels=(level,) * 3, window=128)
    tree = dataclasses.replace(Tree.chain(3), drafter=drafter.id)
    [whole] = answered(base, [Text("set:0", [5], [])], 100)
    [text] = answered(base, [Text("set:0", [5, *whole.answer[:70]], [])], 24)
    decoded = TreeDecoder(base, heads, tree, drafter=drafter).generate(text.prompt, 24)
    assert decoded.tokens == text.answer
    assert decoded.step_lengths == [4] * 6


def test_recent_holds_the_root() -> None:
    """The last column of what a drafter sees is the root itself: a wrong one drafts from the wrong context."""
    base = cycle_base()
    heads = cycle_heads(base, 1)
    texts = answered(base, prompts_of(4, 16), 20)
    table = learned(base, heads, texts, window=0).drafter
    level = Level(head=0.0, ngram=1.0, prior=1.0)
    drafter = dataclasses.replace(table, levels=(level,) * 3)
    tree = dataclasses.replace(Tree.chain(3), drafter=drafter.id)
    decoded = TreeDecoder(base, heads, tree, drafter=drafter).generate(texts[0].prompt, 20)
    assert decoded.tokens == texts[0].answer
    assert decoded.step_lengths == [4] * 5


def test_batch_takes_the_size_that_most_gains(made: Made) -> None:
    """The rows of a step share one size: the largest that any of them would take alone."""
    drafter, text = made.drafters[True], made.texts[3]
    steps = trace(made.base, made.heads, [text], drafter, steps=drafter.depth).steps
    assert steps is not None
    gain = steps.expected_tokens[:, STEP_SIZES.index(16)] - 1
    size_cost = ((1, 0.0), (16, float(np.median(gain))))  # half of the rows are worth it
    policy = TreePolicy(16, drafter.depth, drafter.id, size_cost)
    trees = trees_for(made.base, made.heads, policy, drafter)
    [hidden] = hidden_states(made.base, [text])
    recent = [[*text.prompt, *text.answer[: i + 1]] for i in range(len(text.answer))]

    def size(rows: slice) -> int:
        return drafts_of(trees, recent[rows], hidden[rows]).tokens.shape[1]

    alone = [size(slice(i, i + 1)) for i in range(len(recent))]
    assert set(alone) == {1, 16}
    assert size(slice(None)) == 16
