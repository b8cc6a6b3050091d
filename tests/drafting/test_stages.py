"""Learning in stages: until more text does not pay."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from drafters import answered, planted, prompts_of
from looped import looped
from program import treeopt
from tiny import chat_base, cycle_heads

from treeopt.calibrate.pipeline import run_calibration
from treeopt.drafting import learn as learning_module
from treeopt.drafting.learn import Learned, Learning, Stage, learn
from treeopt.optimize.replay import replay
from treeopt.texts.answers import AnswerOptions
from treeopt.texts.prompts import load_prompts
from treeopt.tree import Tree

SMALL = (40, 90, 160)


@pytest.fixture(autouse=True)
def _small_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning_module, "STAGES", SMALL)


def learned(**fields: Any) -> Learned:
    base, heads = planted()
    return learn(base, heads, answered(base, prompts_of(2, 6), 8), Learning(**fields), options=AnswerOptions(8, 4))


@looped(("pays", "count"), [(True, 3), (False, 2)])
def test_stages_end_where_one_does_not_pay(pays: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has none before it; each has at least its tokens, and at most a twentieth more."""
    monkeypatch.setattr(Stage, "pays", lambda *_: pays)
    stages = learned().stages
    assert len(stages) == count
    for stage, least_tokens in zip(stages, SMALL, strict=False):
        assert least_tokens <= stage.tokens <= 1.1 * least_tokens
    assert [f"{stage.tokens:,} sampled tokens: " in stage.line() for stage in stages] == [True] * count


def test_batches_of_two_stages_have_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so other seeds."""
    monkeypatch.setattr(Stage, "pays", lambda *_: True)
    numbers: list[int] = []
    plain = learning_module.draw

    def spied(*given: Any, first: int = 0, **named: Any) -> Any:
        numbers.append(first)
        return plain(*given, first=first, **named)

    monkeypatch.setattr(learning_module, "draw", spied)
    learned()
    assert numbers == [0, learning_module._APART, 2 * learning_module._APART]


def test_stages_stop_where_no_text_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than half of what was asked for: there is no more."""
    monkeypatch.setattr(Stage, "pays", lambda *_: True)
    monkeypatch.setattr(learning_module, "STAGES", (40, 10**9, 2 * 10**9))
    plain = learning_module.draw

    def short(base: Any, texts: Any, tokens: int, *given: Any, **named: Any) -> Any:
        return plain(base, texts, min(tokens, 60), *given, **named)

    monkeypatch.setattr(learning_module, "draw", short)
    assert [stage.tokens < 130 for stage in learned().stages] == [True, True]


def test_few_prompts_are_not_judged() -> None:
    """Of fewer prompts than folds each would be judged by counts of itself: the first stage is sampled."""
    base, heads = planted()
    found = learn(base, heads, answered(base, prompts_of(2, 3), 8), Learning(), options=AnswerOptions(8, 4))
    assert found.stages == ()
    assert 40 <= found.sampled < found.tokens < 90 + 3 * 20
    assert not any("counts of itself" in text for text in found.warnings(10**6))
    alone = learn(base, heads, answered(base, prompts_of(2, 1), 8), Learning(), options=AnswerOptions(8, 4))
    assert any("counts of itself" in text for text in alone.warnings(10**6))


def test_a_number_has_no_stages() -> None:
    assert learned(tokens=40).stages == ()
    assert learned(ngram=False).stages == ()
    assert (Learning(5).stages, Learning(0).stages, Learning(ngram=False).stages) == ((5,), (), ())
    assert Learning().stages == SMALL
    assert "fewer once more text does not pay" in Learning().announcement(load_prompts("pocket", limit=2), 8)


def test_turns_and_equal_answers_are_one_text_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the texts, each answered twice: as many sums, of twice the tokens, and no smaller error."""
    monkeypatch.setattr(Stage, "pays", lambda *_: False)
    base, heads = planted()
    texts = answered(base, prompts_of(2, 6), 8)
    again = [dataclasses.replace(text, prompt_id=f"{text.prompt_id} again") for text in texts]
    once, twice = (learn(base, heads, one, Learning(), options=AnswerOptions(8, 4)) for one in (texts, texts + again))
    assert len({tuple(text.answer) for text in texts}) == len(once.stages[0].answered) == len(twice.stages[0].answered)
    assert twice.stages[0].answered.sum() == 2 * once.stages[0].answered.sum()


def test_judged_as_replayed() -> None:
    """The tokens per step of the last stage are those of the chain on the drafter's own traces."""
    base = chat_base(disturbed=0.1)
    rows = [{"messages": [{"role": "user", "content": f"w{i}"}]} for i in range(6)]
    given: dict[str, Any] = {"learning": Learning(), "max_new_tokens": 8, "batch_size": 4}
    run = run_calibration(base, cycle_heads(base, 2), rows, **given)
    assert run.learned is not None
    drafter, stage = run.learned.drafter, run.learned.stages[-1]
    chain = dataclasses.replace(Tree.chain(drafter.depth), drafter=drafter.id)
    found = replay(chain, run.calibration)
    assert stage.tokens_per_step == pytest.approx(found.tokens_per_step, rel=1e-12)
    source = drafter.source["learning"]
    assert source["tokens"] == stage.tokens
    assert source["stages"][-1] == [stage.tokens, round(stage.tokens_per_step, 4)]


def test_command(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages are printed; a number, or auto, and nothing else."""
    monkeypatch.chdir(tmp_path)
    few = ("--limit", "4", "--max-new-tokens", "8", "--nodes", "4", "-o", "d.safetensors")
    assert " sampled tokens: " in treeopt("learn", *few).stdout
    assert "sampled tokens: " not in treeopt("learn", *few, "--force", "--learn-tokens", "50").stdout
    assert "'much' is not a whole number or auto" in treeopt("learn", *few, "--learn-tokens", "much", status=2).stderr


def stage(*steps: int) -> Stage:
    return Stage(10, np.full(len(steps), 8), np.array(steps), 2.0)


def test_a_gain_within_its_error_does_not_pay() -> None:
    """6 of 36 steps less: a gain of 0.2 with a standard error of 0.03 or of 0.41, by hand; and one below `PAYS`."""
    before = stage(18, 18)
    assert stage(15, 15).pays(before)
    assert not stage(5, 25).pays(before)
    assert not stage(355, 355).pays(stage(360, 360))


def test_line_of_one_text() -> None:
    assert stage(4).line() == "     10 sampled tokens: 2.000 by a chain, 2.0 s"
    assert set(stage(4).as_dict()) == {"tokens", "tokens_per_step", "standard_error", "seconds"}
