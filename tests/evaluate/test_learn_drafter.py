"""`learn_drafter`: which plan is recommended, by planted seconds, and the whole chain from prompts to lossless text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafters import planted
from helpers import random_calibration
from looped import looped
from per_step_traces import traced, with_paths
from tiny import but_slow, chat_base
from tiny_modules import tiny_module

import treeopt
from treeopt.decode.decoder import Rows, TreeDecoder
from treeopt.drafting.learn import Learning
from treeopt.drafting.ngram import RecordProposer
from treeopt.evaluate import learn_drafter as module
from treeopt.evaluate import profile as timed_step
from treeopt.evaluate.learn_drafter import LearnedDrafter, learn_drafter, plans_of
from treeopt.evaluate.profile import TimedStep
from treeopt.evaluate.validate import validate
from treeopt.files.drafters import load_drafter, save_drafter
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.optimize.per_step import replay_policy
from treeopt.optimize.tree_builder import build_tree
from treeopt.policy import TreePolicy
from treeopt.tree import Tree

PROMPTS = [f"w{i} w{i + 1}" for i in range(1, 9)]
OTHERS = ["w20 w3", "w11", "w5 w9 w40"]
NEW = 16
LITTLE = Learning(300, levels=4, window=32)
Seconds = Callable[[int, bool], float]  # of a step, by its nodes and whether it has per-step trees

COSTS: dict[str, Seconds] = {
    "all alike": lambda _nodes, _dynamic: 0.01,
    "by nodes": lambda nodes, _dynamic: 0.01 * nodes,
    "slow above 4": lambda nodes, _dynamic: 0.01 + 0.1 * (nodes > 4),
    "per-step trees slow": lambda nodes, dynamic: 0.01 + 0.0001 * nodes + 10 * dynamic,
    "static trees slow": lambda nodes, dynamic: 0.01 + 0.0001 * nodes + 10 * (nodes > 1 and not dynamic),
}


@pytest.fixture(scope="module")
def base() -> Base:
    """A model with a tokenizer, whose text an n-gram table often knows."""
    return chat_base(template=None, disturbed=0.03)


@pytest.fixture(scope="module")
def heads() -> MedusaHeads:
    """Three heads for it."""
    return planted()[1]


def plant(monkeypatch: pytest.MonkeyPatch, cost: Seconds) -> None:
    """Replace the seconds of timed steps."""

    def seconds(step: TimedStep) -> float:
        return cost(step.decoder.trees.nodes, step.decoder.tree is None)

    monkeypatch.setattr(TimedStep, "seconds", seconds)


def learned(base: Base, heads: MedusaHeads | None = None, sizes: tuple[int, ...] = (4, 12)) -> LearnedDrafter:
    """A drafter from little text."""
    return learn_drafter(base, PROMPTS, heads, learning=LITTLE, sizes=sizes, max_new_tokens=NEW)


@pytest.mark.parametrize("name", but_slow([*COSTS], "by nodes", "static trees slow"))
def test_recommended_has_most_tokens_per_second(base: Base, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The plan with the most tokens per second is stored; one-node steps are the unit of the speedup."""
    cost = COSTS[name]
    plant(monkeypatch, cost)
    found = learned(base)
    assert [(one.nodes, one.kind) for one in found.figures] == [
        (1, "none"),
        *((nodes, kind) for nodes in (4, 12) for kind in ("static", "dynamic")),
    ]
    for one in found.figures:
        assert one.seconds == cost(one.nodes, one.kind == "dynamic")
        assert one.speedup == pytest.approx(one.tokens_per_step * cost(1, False) / one.seconds)
    best = found.recommended
    assert best.tokens_per_step / best.seconds == max(one.tokens_per_step / one.seconds for one in found.figures)
    assert found.drafter.plan is best.plan
    assert best.plan.drafter == found.drafter.id
    wanted = {
        "all alike": max(found.figures, key=lambda one: one.tokens_per_step),
        "by nodes": found.figures[0],  # no tree accepts as many tokens as it has nodes
        "slow above 4": max(found.figures[:3], key=lambda one: one.tokens_per_step),
    }
    if name in wanted:
        assert best is wanted[name]
    else:
        assert best.kind == ("static" if name == "per-step trees slow" else "dynamic")


def test_tokens_per_step_are_of_texts_left_out(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Static trees: cross-validated; policies: replayed over traces of drafters that were learned without the text."""
    plant(monkeypatch, COSTS["all alike"])
    found = learned(base)
    calibration = found.run.calibration
    optimistic = 0
    for one in found.figures[1:]:
        if isinstance(one.plan, TreePolicy):
            assert one.tokens_per_step == pytest.approx(replay_policy(one.plan, calibration).tokens_per_step, rel=1e-5)
        else:
            expected = build_tree(calibration, one.nodes).expected
            assert expected is not None
            assert one.tokens_per_step == expected.cross_validated
            optimistic += expected.cross_validated < expected.replay
    assert optimistic  # some tree was chosen by the texts, so that the check above can fail
    assert found.run.learned is not None
    assert len(found.run.learned.folds) == 4
    assert all(fold.id != found.drafter.id for fold in found.run.learned.folds)


@pytest.mark.parametrize(("second", "rounds"), [(1.0, 5), (0.055, 10), (1e-6, 40)])
def test_shortest_step_counts(base: Base, monkeypatch: pytest.MonkeyPatch, second: float, rounds: int) -> None:
    """All steps take turns; the first round is not counted, and of the others the shortest step is."""
    order: list[int] = []

    def seconds(step: TimedStep) -> float:
        order.append(step.decoder.trees.nodes)
        turn = (len(order) - 1) // 20  # five steps, four times each
        return second / 2 if turn == 0 else second * (1.5 if turn % 2 else 1.0)

    monkeypatch.setattr(TimedStep, "seconds", seconds)
    for where, name, value in ((module, "_FEWEST_ROUNDS", 5), (module, "_MOST_ROUNDS", 40), (timed_step, "_TIMED", 3)):
        monkeypatch.setattr(where, name, value)  # those of the program; the other tests' are fewer
    told: list[tuple[int, int]] = []
    found = learn_drafter(
        base,
        PROMPTS,
        learning=LITTLE,
        sizes=(4, 12),
        max_new_tokens=NEW,
        progress=lambda done, total, note: told.append((done, total)) if note == "timed steps" else None,
    )
    assert order == [nodes for nodes in (1, 4, 4, 12, 12) for _ in range(4)] * (rounds + 1)
    assert told == [(row, rounds) for row in range(1, rounds + 1)]
    assert [one.seconds for one in found.figures] == [second] * 5
    assert [one.speedup for one in found.figures] == [one.tokens_per_step for one in found.figures]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("with_heads", but_slow([False, True], True))
def test_from_prompts_to_text(
    base: Base, heads: MedusaHeads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, with_heads: bool
) -> None:
    """The file alone decodes other prompts to the text of stock generate, in the predicted steps."""
    given = heads if with_heads else None
    plant(monkeypatch, COSTS["per-step trees slow" if kind == "static" else "static trees slow"])
    found = learned(base, given)
    file = tmp_path / "d.safetensors"
    save_drafter(found.drafter, file)
    again = load_drafter(file)
    assert again.plan is not None
    assert found.recommended.kind == kind
    assert (again.id, again.num_heads, again.plan.drafter) == (found.drafter.id, 3 * with_heads, again.id)
    assert again.plan.expected == found.recommended.plan.expected
    for drafter in (str(file), again, found.drafter):
        validated = validate(base, given, None, OTHERS, drafter=drafter, max_new_tokens=NEW)
        assert (validated.lossless, validated.prediction_misses) == (True, ())
        assert validated.nodes == found.recommended.nodes
        assert validated.tokens_per_step > 1.2
    ids = torch.tensor([[5, 9, 40]])
    options = {"input_ids": ids, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    stock = base.model.generate(**options)
    ours = base.model.generate(
        **options,
        custom_generate=treeopt.tree_generate,
        heads=given,
        drafter=str(file),
        return_dict_in_generate=True,
    )
    assert ours.sequences.tolist() == stock.tolist()
    decoded = TreeDecoder(base, given, drafter=file).generate(ids[0], NEW)
    assert (tuple(decoded.step_lengths),) == ours.step_lengths
    assert decoded.tokens == stock[0, 3:].tolist()


@pytest.mark.parametrize("with_heads", [False, True])
def test_none_is_recommended_where_no_tree_pays(
    base: Base, heads: MedusaHeads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, with_heads: bool
) -> None:
    """The file then holds the tree of the root alone, and its decoder runs neither drafter nor heads, nor a mask."""
    plant(monkeypatch, lambda nodes, _dynamic: 0.01 + 0.1 * (nodes > 1))
    given = heads if with_heads else None
    found = learned(base, given)
    assert (found.recommended, found.recommended.kind) == (found.figures[0], "none")
    assert (found.recommended.nodes, found.recommended.speedup) == (1, 1.0)
    save_drafter(found.drafter, tmp_path / "d.safetensors")
    again = load_drafter(tmp_path / "d.safetensors")
    assert again.plan == Tree((), drafter=found.drafter.id)
    assert again.timed_dtype == "float32"
    masks: list[object] = []
    handle = base.model.register_forward_pre_hook(
        lambda _model, _args, kwargs: masks.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    monkeypatch.setattr(RecordProposer, "start", None)
    monkeypatch.setattr(MedusaHeads, "forward", None)
    decoder = TreeDecoder(base, given, drafter=again)
    masks.clear()  # of the probe
    assert decoder.generate([5, 9], 6).step_lengths == [1] * 6
    handle.remove()
    assert masks == [None] * 6
    ids = torch.tensor([[5, 9]])
    options = {"input_ids": ids, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    ours = base.model.generate(**options, custom_generate=treeopt.tree_generate, heads=given, drafter=again)
    assert ours.tolist() == base.model.generate(**options).tolist()


def test_fastest_dtype_is_stored(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are timed in every dtype, and the file names that of the recommended plan; the plans are the same."""

    def seconds(step: TimedStep) -> float:
        slow = 1.5 if step.decoder.base.dtype_name == "float32" else 1.0
        return slow * (0.01 + 0.1 * (step.decoder.trees.nodes > 4))

    monkeypatch.setattr(TimedStep, "seconds", seconds)
    found = learn_drafter(
        base, PROMPTS, learning=LITTLE, sizes=(4, 12), dtypes=("bfloat16", "float32"), max_new_tokens=NEW
    )
    assert [one.dtype for one in found.figures] == ["float32"] * 5 + ["bfloat16"] * 5
    half = len(found.figures) // 2
    assert [one.plan for one in found.figures[:half]] == [one.plan for one in found.figures[half:]]
    assert [one.speedup for one in found.figures[:half]] == pytest.approx([one.speedup for one in found.figures[half:]])
    assert (found.recommended.dtype, found.recommended.nodes, found.drafter.timed_dtype) == ("bfloat16", 4, "bfloat16")
    assert base.dtype_name == "float32"
    with pytest.raises(ValueError, match="dtypes 'int8'"):
        learn_drafter(base, PROMPTS, learning=LITTLE, sizes=(4,), dtypes=("int8",), max_new_tokens=NEW)


def test_drafts_are_timed_in_the_dtype_of_their_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """As commands load them; a module reads its own base's embeddings."""
    base, seen = chat_base(), set()

    def seconds(step: TimedStep) -> float:
        own, draft = step.decoder.base, getattr(getattr(step.decoder.trees, "proposer", None), "draft", None)
        if draft is not None:
            same = draft.model.of_base[0] is own.model.get_input_embeddings()
            seen.add((own.dtype_name, draft.dtype_name, same))
        return 0.01

    monkeypatch.setattr(TimedStep, "seconds", seconds)
    given = {"draft": tiny_module(base, "eagle3", 1), "dtypes": ("bfloat16",), "max_new_tokens": 8}
    learn_drafter(base, PROMPTS, learning=LITTLE, sizes=(4,), **given)
    assert seen == {("float32", "float32", True), ("bfloat16", "bfloat16", True)}


def test_chains_of_a_draft_are_timed() -> None:
    """With a draft, chains of one to four drafts are plans, each once, with their tokens per step; else none is."""
    calibration = random_calibration(0, heads=6)
    chains = [Tree.chain(drafts).paths for drafts in (1, 2, 3, 4)]
    for with_draft in (True, False):
        plans = [plan for plan in plans_of(calibration, (8,), with_draft=with_draft) if isinstance(plan, Tree)]
        assert [sum(plan.paths == chain for plan in plans) for chain in chains] == [int(with_draft)] * 4
        assert all(plan.expected is not None for plan in plans)
    for heads, size, depths in ((2, 4, [0, 1, 2]), (6, 2, [0, 1])):  # as deep as levels and the largest size allow
        two = plans_of(random_calibration(0, heads=heads), (size,), with_draft=True)
        trees = [plan for plan in two if isinstance(plan, Tree)]
        assert [plan.depth for plan in trees if plan.nodes == plan.depth + 1] == depths


def test_sizes_between_those_of_path_tokens() -> None:
    """Per-step trees are traced at some sizes only: another takes the one below, before it is timed."""
    plans = plans_of(with_paths(traced(0)), (20,), with_draft=False)
    assert [plan.path_tokens for plan in plans if isinstance(plan, TreePolicy)] == [True]
    assert [plan.nodes for plan in plans if isinstance(plan, TreePolicy)] == [16]


def test_equal_trees_are_measured_once(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of one token leave nothing to draft: all static trees have one node, and none is recommended."""
    plant(monkeypatch, COSTS["all alike"])
    found = learn_drafter(base, PROMPTS, learning=LITTLE, sizes=(12, 4, 12), max_new_tokens=1)
    assert [(one.nodes, one.kind) for one in found.figures] == [(1, "none"), (4, "dynamic"), (12, "dynamic")]
    assert {one.tokens_per_step for one in found.figures} == {1.0}
    assert found.drafter.plan == Tree((), (), drafter=found.drafter.id)


def test_steps_fit_into_a_small_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached text of timed steps leaves room for the deepest draft."""
    base = chat_base(template=None, disturbed=0.03)
    base.model.config.max_position_embeddings = NEW + 4
    base.model.generation_config.eos_token_id = None
    cached: list[int] = []

    class Recorded(TimedStep):
        def __init__(self, decoder: TreeDecoder, rows: Rows, prompts: torch.Tensor) -> None:
            cached.append(prompts.shape[1])
            super().__init__(decoder, rows, prompts)

    monkeypatch.setattr(module, "TimedStep", Recorded)
    found = learned(base)
    assert set(cached) == {NEW + 4 - found.drafter.depth - 1}


@looped("sizes", [(), (0,), (8, 255), (8.5,), (True,)])
def test_wrong_sizes_are_refused_at_once(base: Base, sizes: tuple[int, ...]) -> None:
    """A size that no policy may have is an error before any answer is generated."""
    told: list[str] = []
    with pytest.raises(ValueError, match="sizes"):
        learn_drafter(base, PROMPTS, sizes=sizes, progress=lambda *about: told.append(about[2]))
    assert told == []
