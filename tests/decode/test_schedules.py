"""Decoding by a schedule: stock text for any plans, and at each step the plan of the rows that are in progress."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import stock
from drafters import SIZE_COST, answered, learned, planted, prompts_of
from tiny import TREE_FAMILIES, but_slow, tiny_base

import treeopt
from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Greedy
from treeopt.drafter import Drafter
from treeopt.drafting import plans
from treeopt.drafting.interface import Drafts
from treeopt.drafting.plans import LateSession, ScheduledTrees, check_plan
from treeopt.errors import Code, TreeoptError
from treeopt.files.schedules import save_schedule
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.policy import Plan, TreePolicy
from treeopt.schedule import Schedule, ScheduledPlan
from treeopt.texts.encode import Text
from treeopt.tree import Tree

NEW = 16
PATHS = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
Case = tuple[Base, MedusaHeads | None, Drafter | None, Base | None, list[Text]]


def schedule_of(drafter: Drafter | None, *, per_step: bool = True, context: int = 20) -> Schedule:
    """None in a batch of four or more, then a chain, a static tree, and a policy, alone after some tokens."""
    name = "" if drafter is None else drafter.id
    chain, static = Tree.chain(3), Tree.from_paths(PATHS)
    chain, static = (dataclasses.replace(one, drafter=name) for one in (chain, static))
    last: Plan = TreePolicy(12, 3, name, ((4, 0.1), (12, 0.3))) if per_step else chain
    cells = [(1, context, static), (1, 100, last), (2, context, last), (2, 100, chain), (3, 100, chain)]
    return Schedule(tuple(ScheduledPlan(*key, plan) for *key, plan in [*cells, (4, 100, Tree(()))]))


@functools.cache
def drafter_named(name: str) -> Drafter | None:
    """The record of a drafter, learned once."""
    base, heads = planted()
    if name == "heads":
        return None
    if name == "model":
        return Drafter.model_only(4, 6, tiny_base("llama", 2).fingerprint)
    texts = answered(base, prompts_of(1, 8), 12)
    given = heads if name.startswith("heads") else None
    return learned(base, given, texts, levels=4, ngram=name != "heads, fitted", tokens=200, new=12).drafter


def case_of(name: str) -> Case:
    """A model with a drafter of each kind, and texts with its answers."""
    base, heads = planted()
    draft = tiny_base("llama", 2) if name == "model" else None
    given = heads if name.startswith("heads") else None
    return base, given, drafter_named(name), draft, answered(base, prompts_of(3, 6), NEW)


NAMES = ["heads", "heads, fitted", "heads+ngram", "ngram", "model"]


class Watched(Greedy):
    """Greedy, which keeps the tokens of each step's trees."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "seen", [])

    def accept(self, drafts: Drafts, logits: torch.Tensor, generator: Any) -> Any:
        self.seen.append((len(drafts.tokens), drafts))  # type: ignore[attr-defined]
        return super().accept(drafts, logits, generator)


@pytest.mark.parametrize("name", NAMES)
def test_text_is_stocks_and_plans_are_those_of_the_rows(name: str) -> None:
    """Rows end at different times; each step has the plan of those that are left, and the text is stock generate's."""
    base, heads, drafter, draft, texts = case_of(name)
    schedule = schedule_of(drafter, per_step=name != "heads")
    base.model.generation_config.eos_token_id = [texts[0].answer[3], texts[1].answer[9]]
    wanted = [stock(base, text.prompt, NEW) for text in texts]
    assert len({len(one) for one in wanted}) > 1
    decoder = TreeDecoder(base, heads, schedule, drafter=drafter, draft=draft)
    rows, left, made = decoder.prefill([text.prompt for text in texts], NEW + 8), dict.fromkeys(range(6), NEW), [[]] * 6
    sizes: list[tuple[int, int]] = []
    while rows.indices:
        context, batch = max(rows.session.lengths), len(rows.indices)
        plan, alone = schedule.at(batch, context), None
        if isinstance(plan, TreePolicy) or plan.nodes > 1:
            alone = TreeDecoder(base, heads, plan, drafter=drafter, draft=draft)
        before = [texts[i].prompt + made[i] for i in rows.indices]
        emitted = decoder.step(rows)
        sizes.append((batch, plan.nodes))
        most = plan.nodes - 1
        assert all(step.num_draft_tokens <= most for step in emitted)
        if isinstance(plan, Tree):  # the drafts are those of a decoder with this plan alone
            for text, step in zip(before, emitted, strict=True):
                one = [[0]] if alone is None else alone.generate(text, plan.depth + 1).steps[:1]
                assert alone is None or list(step)[: len(one[0])] == list(one[0])
        for i, step in zip(rows.indices, emitted, strict=True):
            made[i] = made[i] + list(step)
            ends = [at + 1 for at, token in enumerate(made[i]) if token in base.eos_ids]
            left[i] = 0 if ends or len(made[i]) >= NEW else NEW - len(made[i])
            made[i] = made[i][: min([*ends, NEW])]
        rows.keep([row for row, i in enumerate(rows.indices) if left[i] > 0])
    assert made == wanted
    assert {nodes for _, nodes in sizes} >= {1, 4}
    decoded = decoder.generate([text.prompt for text in texts], NEW)
    assert [one.tokens for one in decoded] == wanted


@pytest.mark.parametrize("family", but_slow(TREE_FAMILIES, "llama", "gpt2"))
def test_families(family: str) -> None:
    """Nothing learned: a schedule of none, a chain, a tree and a policy gives stock's texts, alone and in a batch."""
    base = tiny_base(family, 3)
    drafter = Drafter.untrained(base.vocab_size)
    texts = answered(base, [Text(f"set:{i}", [3, 8, 5, 21, 9][i:] * 4, []) for i in range(4)], NEW)
    decoder = TreeDecoder(base, None, schedule_of(drafter, context=30), drafter=drafter)
    assert [one.tokens for one in decoder.generate([text.prompt for text in texts], NEW)] == [
        text.answer for text in texts
    ]
    for text in texts:
        assert decoder.generate(text.prompt, NEW).tokens == text.answer


@pytest.mark.parametrize("name", NAMES[1:])
def test_one_plan_everywhere_takes_its_own_steps(name: str) -> None:
    """A schedule with one plan gives the very steps of that plan, alone and in a batch."""
    base, heads, drafter, draft, texts = case_of(name)
    assert drafter is not None
    static = [dataclasses.replace(one, drafter=drafter.id) for one in (Tree.chain(3), Tree.from_paths(PATHS))]
    prompts = [text.prompt for text in texts]
    for plan in (*static, TreePolicy(8, 3, drafter.id, SIZE_COST[:4])):
        schedule = Schedule((ScheduledPlan(1, 1, plan),))
        one, other = (TreeDecoder(base, heads, each, drafter=drafter, draft=draft) for each in (plan, schedule))
        for given in (prompts[:3], prompts[0]):
            assert other.generate(given, NEW) == one.generate(given, NEW)


def test_drafter_begins_when_it_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the plan is none nothing of the drafter runs; it then knows the whole text."""
    base, _, drafter, _, texts = case_of("ngram")
    assert drafter is not None
    started: list[list[list[int]]] = []
    begin = LateSession.begun

    def watched(self: LateSession) -> Any:
        if self._inner is None:
            started.append([list(text) for text in self._texts])
        return begin(self)

    monkeypatch.setattr(LateSession, "begun", watched)
    prompt = texts[0].prompt
    plan = TreePolicy(8, 3, drafter.id)
    cells = (ScheduledPlan(1, len(prompt) + 9, Tree(())), ScheduledPlan(1, 200, plan))
    decoder = TreeDecoder(base, None, Schedule(cells), drafter=drafter)
    assert decoder.generate(prompt, NEW).tokens == texts[0].answer
    whole = prompt + texts[0].answer
    [[text]] = started
    assert text == whole[: len(prompt) + 11][-len(text) :]
    assert decoder.generate(prompt, 6).tokens == texts[0].answer[:6]
    assert len(started) == 1
    none = TreeDecoder(base, None, Schedule((ScheduledPlan(1, 1, Tree(())),)))
    assert none.tree == Tree(())
    assert none.generate(prompt, NEW).step_lengths == [1] * NEW


def test_rewound_rows_continue_from_the_mark() -> None:
    """Steps that began a drafter are undone, and done again with the same result."""
    base, _, drafter, _, texts = case_of("ngram")
    assert drafter is not None
    prompt = texts[0].prompt
    cells = (ScheduledPlan(1, len(prompt) + 2, Tree(())), ScheduledPlan(1, 200, TreePolicy(8, 3, drafter.id)))
    decoder = TreeDecoder(base, None, Schedule(cells), drafter=drafter)
    rows = decoder.prefill([prompt], 60)
    decoder.step(rows)
    for _ in range(3):
        mark = rows.mark()
        first = [decoder.step(rows) for _ in range(4)]
        rows.rewind(mark)
        assert [decoder.step(rows) for _ in range(2)] == first[:2]


def test_files_and_generate(tmp_path: Path) -> None:
    """`tree_generate` and the decoder take a schedule as a record and as a file that names its drafter."""
    base, _, drafter, _, texts = case_of("ngram")
    assert drafter is not None
    treeopt.save_drafter(drafter, tmp_path / "d.safetensors")
    schedule = dataclasses.replace(schedule_of(drafter), source={"drafter": str(tmp_path / "d.safetensors")})
    save_schedule(schedule, tmp_path / "s.yaml")
    ids = torch.tensor([texts[0].prompt])
    wanted = TreeDecoder(base, None, schedule, drafter=drafter).generate(texts[0].prompt, NEW)
    assert TreeDecoder(base, None, tmp_path / "s.yaml").generate(texts[0].prompt, NEW) == wanted
    given: list[dict[str, Any]] = [{"tree": schedule, "drafter": drafter}, {"tree": str(tmp_path / "s.yaml")}]
    for one in given * 2:
        found = base.model.generate(
            ids,
            max_new_tokens=NEW,
            do_sample=False,
            custom_generate=treeopt.tree_generate,
            return_dict_in_generate=True,
            **one,
        )
        assert found.sequences[0].tolist() == texts[0].prompt + texts[0].answer
        assert found.step_lengths == (tuple(wanted.step_lengths),)


def test_plans_that_do_not_fit() -> None:
    """E223 for plans of another drafter, E101 for one that is too deep."""
    base, heads, drafter, _, _ = case_of("heads+ngram")
    assert drafter is not None
    deep = dataclasses.replace(Tree.chain(9), drafter=drafter.id)
    cases = (
        (schedule_of(Drafter.untrained(base.vocab_size)), Code.DRAFTER_MISMATCH),
        (Schedule((ScheduledPlan(1, 1, Tree(())), ScheduledPlan(4, 1, deep))), Code.TREE_TOO_DEEP),
    )
    for schedule, code in cases:
        for check in (check_plan, lambda one, record: TreeDecoder(base, heads, one, drafter=record)):
            with pytest.raises(TreeoptError) as caught:
                check(schedule, drafter)
            assert caught.value.code is code


def test_sources() -> None:
    """A schedule's trees share one proposer, and the largest size and depth are those of its plans."""
    base, heads, drafter, _, _ = case_of("heads+ngram")
    found = plans.trees_for(base, heads, schedule_of(drafter), drafter)
    assert isinstance(found, ScheduledTrees)
    assert (found.nodes, found.depth, found.tree) == (12, 3, None)
    proposers: Sequence[Any] = [getattr(one, "proposer", None) for one in found.sources]
    assert all(one is found.proposer for one in proposers)
