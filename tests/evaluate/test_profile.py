"""Profile: every size is timed by `TreeDecoder.step`, always after the same text. Nothing about speed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import quick_drafter
from tiny import TREE_FAMILIES, VOCAB, cycle, cycle_base, family, random_heads, tiny_base
from torch import Tensor

from treeopt.decode.decoder import Rows, TreeDecoder
from treeopt.defaults import KINDS
from treeopt.drafter import Drafter, Level
from treeopt.drafting.count import NgramCounts
from treeopt.drafting.plans import PerStepTrees, StaticTree
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate import profile as profile_module
from treeopt.evaluate.profile import AcceptFixed, TimedStep, generic_growth, measure_profile, model_texts
from treeopt.models.base import Base
from treeopt.models.head_files import LoadedHeads
from treeopt.models.heads import MedusaHeads
from treeopt.models.tensors import fingerprint
from treeopt.policy import TreePolicy
from treeopt.tree import Tree
from treeopt.verify.paths import PathForward

CONTEXT = 20


def loaded_heads(base: Base, num_heads: int = 3) -> LoadedHeads:
    """Random heads, as if they came from a file."""
    heads = random_heads(base, num_heads)
    return LoadedHeads(heads, "heads", Path("heads"), None, fingerprint(heads), ())


@pytest.fixture
def base() -> Base:
    """A tiny llama with a context of 256 tokens."""
    return tiny_base("llama")


def test_profile_holds_every_size(base: Base) -> None:
    """All pairs of batch and context have all sizes, one node and quartiles included."""
    done: list[tuple[int, int, str]] = []
    profile = measure_profile(
        base,
        loaded_heads(base),
        nodes=(9, 4, 9),
        contexts=(30, 12),
        batches=(2, 1),
        repeats=3,
        progress=lambda *told: done.append(told),
    )
    sizes = itertools.product((1, 2), (12, 30), (1, 4, 9))
    assert [p.key for p in profile.points] == list(sizes)
    assert all(0 < p.low <= p.seconds <= p.high for p in profile.points)
    assert [at for at, _, _ in done] == list(range(1, 17))
    assert {(total, note) for _, total, note in done} == {
        (16, f"batch {b}, context {c}") for b in (1, 2) for c in (12, 30)
    }


def test_profile_says_where_it_was_made(base: Base) -> None:
    """Provenance names model, heads, device, dtype, threads, attention, repeats and versions."""
    source = measure_profile(base, loaded_heads(base), nodes=(2,), contexts=(8,), repeats=1).provenance
    assert (source["model"], source["heads"], source["device"]) == ("tiny-llama", "heads", "cpu")
    assert (source["dtype"], source["threads"], source["repeats"]) == ("float32", 1, 1)
    assert source["attention"] in ("sdpa", "eager")
    assert source["versions"].keys() == {"python", "torch", "transformers"}


def test_rounds_interleave_and_the_quiet_ones_count(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes take turns in every round; the shortest of the last three of a turn's four steps counts.

    The first round does not count, and of the other five the three with the least seconds in all do.
    """
    order: list[int] = []
    rounds = {1: [0.1, 7.0, 50.0, 5.0, 90.0, 9.0], 5: [0.1, 8.0, 50.0, 10.0, 9.5, 6.0]}

    def planted(step: TimedStep) -> float:
        order.append(step.decoder.tree.nodes)
        turn, place = divmod(len(order) - 1, 4)
        seconds = rounds[order[-1]][turn // 2]
        return 0.01 if not place else seconds + (place != 1 + turn % 3) * 100.0

    monkeypatch.setattr(TimedStep, "seconds", planted)
    monkeypatch.setattr("treeopt.evaluate.profile._TIMED", 3)  # that of the program; the other tests' is less
    profile = measure_profile(base, loaded_heads(base), nodes=(1, 5), contexts=(8,), repeats=5)
    assert order == [1, 1, 1, 1, 5, 5, 5, 5] * 6
    assert [(p.nodes, p.low, p.seconds, p.high) for p in profile.points] == [(1, 6.0, 7.0, 8.0), (5, 7.0, 8.0, 9.0)]


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_is_priced(base: Base, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where drafting takes longer, the steps do; of per-step trees the profile states how long."""
    heads = loaded_heads(base)
    drafter = quick_drafter(base, heads.heads)
    clock = [0.0]
    slow = [0.0]

    def slower(source: type) -> None:
        draft = source.draft

        def planted(trees: Any, *given: Any) -> Any:
            clock[0] += slow[0] * trees.nodes
            return draft(trees, *given)

        monkeypatch.setattr(source, "draft", planted)

    def step(decoder: TreeDecoder, rows: Rows) -> Any:
        clock[0] += 1.0
        return run(decoder, rows)

    run = TreeDecoder.step
    monkeypatch.setattr(TreeDecoder, "step", step)
    slower(StaticTree)
    slower(PerStepTrees)
    monkeypatch.setattr("treeopt.evaluate.profile.now", lambda _base: clock[0])
    for each in (0.25, 2.0):
        slow[0] = each
        profile = measure_profile(base, heads, nodes=(4, 9), contexts=(8,), repeats=2, drafter=drafter, kind=kind)
        assert [(p.nodes, p.seconds) for p in profile.points] == [(n, 1.0 + each * n) for n in (1, 4, 9)]
        assert [p.drafting for p in profile.points] == [each * n if kind == "dynamic" else None for n in (1, 4, 9)]


@pytest.mark.parametrize(
    ("with_drafter", "kind", "plan"),
    [(False, "static", Tree), (False, "dynamic", TreePolicy), (True, "static", Tree), (True, "dynamic", TreePolicy)],
)
def test_steps_are_those_of_kind_and_drafter(
    base: Base, with_drafter: bool, kind: str, plan: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoders that are timed have the plan and the drafter that the profile names."""
    heads = loaded_heads(base)
    drafter = quick_drafter(base, heads.heads) if with_drafter else None
    made: list[tuple[object, Drafter | None]] = []

    class Recorded(TreeDecoder):
        def __init__(self, base: Base, heads: Any, plan: Any, *, drafter: Drafter | None = None, **more: Any) -> None:
            made.append((plan, drafter))
            super().__init__(base, heads, plan, drafter=drafter, **more)

    monkeypatch.setattr(profile_module, "TreeDecoder", Recorded)
    found = measure_profile(base, heads, nodes=(4,), contexts=(8,), repeats=1, drafter=drafter, kind=kind)
    used, record = made[1]
    assert made[0] == (Tree(()), None)
    assert isinstance(used, plan)
    assert used.nodes == 4
    by_default = Drafter.heads_only(3, 16).id if kind == "dynamic" else ""
    wanted = drafter.id if drafter is not None else by_default
    assert (found.kind, found.drafter, used.drafter, record.id if record else "") == (kind, wanted, wanted, wanted)
    assert found.provenance["drafter_name"] == ("heads+ngram" if with_drafter else "heads")


def test_a_drafter_reads_text_of_the_model(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round is one token further in the model's text, and the last round is at the context."""
    heads = loaded_heads(base)
    drafter = quick_drafter(base, heads.heads)
    seen: list[tuple[int, list[int]]] = []
    begin = TimedStep.__init__

    def noted(step: TimedStep, decoder: TreeDecoder, cached: Rows, prompts: Tensor) -> None:
        seen.append((cached.session.lengths[0], [*prompts[0].tolist(), cached.roots[0]]))
        begin(step, decoder, cached, prompts)

    monkeypatch.setattr(TimedStep, "__init__", noted)
    measure_profile(base, heads, nodes=(4,), contexts=(30,), repeats=3, drafter=drafter)
    lengths, texts = [length for length, _ in seen[1::2]], [text for _, text in seen[1::2]]
    assert lengths == [27, 28, 29, 30]
    assert len(texts[-1]) == 31
    first = model_texts(base, 1, 30)[:, :27]
    stock = base.generate(first, torch.ones_like(first), 4)
    assert texts[-1] == stock[0].tolist()
    assert all(text == texts[-1][: len(text)] for text in texts)
    seen.clear()
    measure_profile(base, heads, nodes=(4,), contexts=(30,), repeats=3)
    assert {length for length, _ in seen} == {30}


def test_texts_of_the_model(base: Base) -> None:
    """Texts are the same at every call, end with different samples, and follow the rule of a model that has one."""
    texts = model_texts(base, 10, 600)
    assert texts.shape == (10, 600)
    assert texts.equal(model_texts(base, 10, 600))
    ends = {tuple(row[-200:].tolist()) for row in texts}
    assert len(ends) == 8
    assert texts[0, -200:].equal(texts[8, -200:])
    sure = cycle_base()
    with torch.no_grad():
        sure.lm_head.weight.mul_(20.0)
    text = model_texts(sure, 1, 24)[0]
    assert torch.as_tensor(cycle(0))[text[:-1]].tolist() == text[1:].tolist()


def timed(decoder: TreeDecoder, batch: int, depth: int = 3) -> TimedStep:
    """A step after `CONTEXT` random tokens."""
    prompts = torch.randint(VOCAB, (batch, CONTEXT), generator=torch.Generator().manual_seed(1))
    return TimedStep(decoder, decoder.prefill(list(prompts), depth + 1), prompts)


def deepest(base: Base, tree: Tree) -> TreeDecoder:
    """A decoder as the profile makes it."""
    return TreeDecoder(base, random_heads(base, 3), tree, acceptance=AcceptFixed(), probe=False)


@pytest.mark.parametrize("family", TREE_FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_step_can_be_run_again(family: str, batch: int) -> None:
    """After a step the next one verifies the same tokens after the same text, and emits the same deep path."""
    base = tiny_base(family)
    tree = generic_growth(16, 3, VOCAB).tree()
    step = timed(deepest(base, tree), batch)
    roots = step.rows.roots
    wanted = [step.decoder.step(step.rows) for _ in range(2)]
    assert [len(tokens) for tokens in wanted[0]] == [tree.depth + 1] * batch
    assert wanted[0] != wanted[1]
    again = timed(deepest(base, tree), batch)
    for _ in range(3):
        assert again.seconds() > 0
        assert again.rows.roots == roots
    assert [again.decoder.step(again.rows) for _ in range(2)] == wanted


def test_one_node_runs_no_heads(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that overheads refer to runs no head; every other runs the heads that its tree needs."""
    ran: list[int] = []
    forward = MedusaHeads.forward

    def noted(heads: MedusaHeads, *given: object, **named: object) -> Tensor:
        logits = forward(heads, *given, **named)
        ran.append(len(logits))
        return logits

    monkeypatch.setattr(MedusaHeads, "forward", noted)
    measure_profile(base, loaded_heads(base), nodes=(1,), contexts=(8,), repeats=1)
    assert ran == []
    measure_profile(base, loaded_heads(base), nodes=(2,), contexts=(8,), repeats=1)
    assert set(ran) == {1}


def test_generic_trees_grow_out_of_each_other() -> None:
    """Every size has its exact number of nodes and contains the smaller ones; depth and width grow with it."""
    growth = generic_growth(256, 5, 32_000)
    trees = [growth.tree(nodes) for nodes in (1, 2, 4, 16, 64, 256)]
    assert [tree.nodes for tree in trees] == [1, 2, 4, 16, 64, 256]
    assert all(set(a.paths) < set(b.paths) for a, b in itertools.pairwise(trees))
    assert trees[-1].depth == 5
    assert trees[4].max_rank >= 3


def test_chains_of_the_levels_that_there_are(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes beyond the levels are left out, and each step that is timed has a chain."""
    plans: list[Tree] = []

    def recorded(base: Base, heads: MedusaHeads, plan: Tree, **options: Any) -> TreeDecoder:
        plans.append(plan)
        return TreeDecoder(base, heads, plan, **options)

    monkeypatch.setattr(profile_module, "TreeDecoder", recorded)
    found = measure_profile(base, random_heads(base, 3), nodes=(2, 4, 9), contexts=(8,), repeats=1, kind="chain")
    assert ([point.nodes for point in found.points], found.kind) == ([1, 2, 4], "chain")
    assert plans == [Tree.chain(drafts) for drafts in (0, 1, 3)]


def test_steps_of_a_recurrent_model_are_by_path_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are path tokens of the best trees of each, and accepted tokens are replayed by the steps that are timed."""
    recurrent = family("qwen3_5_text")
    options: dict[str, Any] = {"nodes": (2, 7, 12), "contexts": (8,), "repeats": 1}
    run, widths = PathForward.run, []

    def noted(forward: PathForward, ids: Tensor, *given: Any) -> Any:
        widths.append(ids.shape[1] if len(ids) > 1 else 0)
        return run(forward, ids, *given)

    monkeypatch.setattr(PathForward, "run", noted)
    monkeypatch.setattr(PathForward, "fixed", 1e9)  # nothing is committed
    found = measure_profile(recurrent, random_heads(recurrent, 3), **options)
    assert found.path_tokens
    sizes = [point.nodes for point in found.points]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert set(sizes) <= {leaves * (depth + 1) for leaves in range(1, 7) for depth in range(4)}
    assert max(widths) > 12  # a tree of at most four levels, and what several steps accepted
    per_step = measure_profile(recurrent, None, **options, kind="dynamic")
    assert [point.nodes for point in per_step.points] == [1, 2, 6, 12]  # those that are traced
    chains = measure_profile(recurrent, random_heads(recurrent, 3), **options, kind="chain")
    assert ([point.nodes for point in chains.points], chains.path_tokens) == ([1, 2], True)
    assert not measure_profile(tiny_base("llama"), None, nodes=(2,), contexts=(8,), repeats=1).path_tokens


def test_context_must_leave_room_for_the_tree(base: Base) -> None:
    """The largest context that fits is timed, one token more is E503 that names it."""
    loaded = loaded_heads(base)
    room = 256 - generic_growth(8, 3, VOCAB).tree().depth - 1
    assert measure_profile(base, loaded, nodes=(8,), repeats=1).contexts == (room,)  # the default of 512 does not fit
    for context in (room + 1, 0):
        with pytest.raises(TreeoptError) as caught:
            measure_profile(base, loaded, nodes=(8,), contexts=(8, context), repeats=1)
        assert caught.value.code is Code.CONTEXT_FULL
        assert f"1 to {room}" in caught.value.fix


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_context_leaves_room_for_the_drafters_levels(family: str) -> None:
    """A drafter's trees go deeper than there are heads; learned positions end where the context does."""
    base = tiny_base(family)
    loaded = loaded_heads(base, 1)
    count = NgramCounts(VOCAB)
    count.add([1, 2, 3, 1, 2], [2, 3, 1, 2, 3])
    drafter = Drafter((Level(),) * 6, 1, 4, 32, count.table())
    room = base.context - 6 - 1
    found = measure_profile(base, loaded, nodes=(8,), contexts=(room,), repeats=1, drafter=drafter, kind="dynamic")
    assert found.contexts == (room,)
    with pytest.raises(TreeoptError) as caught:
        measure_profile(base, loaded, nodes=(8,), contexts=(room + 1,), repeats=1, drafter=drafter, kind="dynamic")
    assert caught.value.code is Code.CONTEXT_FULL
    options = {"repeats": 1, "drafter": drafter}
    depth = generic_growth(8, 6, 5).tree().depth
    assert measure_profile(base, loaded, nodes=(1,), kind="dynamic", **options).contexts == (base.context - 1,)
    assert measure_profile(base, loaded, nodes=(8,), **options).contexts == (base.context - depth - 1,)


def test_size_without_a_tree_is_refused() -> None:
    """One head of eight tokens makes nine nodes: ten are E230."""
    base = tiny_base("llama", vocab_size=8)
    loaded = loaded_heads(base, 1)
    assert measure_profile(base, loaded, nodes=(9,), contexts=(8,), repeats=1).curve()[0].tolist() == [1, 9]
    with pytest.raises(TreeoptError, match="no tree of 10 nodes: the largest has 9") as caught:
        measure_profile(base, loaded, nodes=(10,), contexts=(8,), repeats=1)
    assert caught.value.code is Code.PROFILE_INVALID


def test_models_and_heads_that_cannot_draft_are_refused(base: Base) -> None:
    """Heads of another size are E212, a recurrent model is E502."""
    with pytest.raises(TreeoptError) as caught:
        measure_profile(tiny_base("llama", hidden_size=48), loaded_heads(base), nodes=(2,), contexts=(8,), repeats=1)
    assert caught.value.code is Code.HEADS_MISMATCH
    recurrent = tiny_base("mamba")
    with pytest.raises(TreeoptError) as caught:
        measure_profile(recurrent, loaded_heads(recurrent), nodes=(2,), contexts=(8,), repeats=1)
    assert caught.value.code is Code.NO_TREES


def test_static_trees_of_a_drafter_may_be_larger_than_policies(base: Base) -> None:
    """The default sizes of `treeopt profile` include 256 nodes, more than per-step trees have."""
    drafter = Drafter.untrained(base.vocab_size)
    profile = measure_profile(base, None, nodes=(1, 256), contexts=(8,), repeats=1, drafter=drafter)
    assert [point.nodes for point in profile.points] == [1, 256]
