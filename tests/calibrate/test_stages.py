"""Options, chunks and what a run tells its work folder, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import chat_base, random_heads, tiny_base

from treeopt.calibrate.job import CalibrationOptions
from treeopt.calibrate.pipeline import _check_rows, _put, answer_shard, as_calibration, run_calibration
from treeopt.calibration import Provenance
from treeopt.drafter import Drafter
from treeopt.drafting.learn import Learning
from treeopt.errors import Code, TreeoptError
from treeopt.models.auto_batch import AutoBatch
from treeopt.runs.shards import Shard
from treeopt.runs.work import Work


@pytest.mark.parametrize(("options", "sampled", "greedy", "answers"), [
    ({}, False, True, "greedy"),
    ({"temperature": 0.5, "seed": 3}, True, False, "sampled at 0.5, seed 3"),
    ({"temperature": 2.0}, True, False, "sampled at 2.0, seed 0"),
    ({"responses": True}, False, False, "given"),
    ({"responses": True, "temperature": 0.5}, False, False, "given"),
])  # fmt: skip
def test_origin_of_answers(options: Any, sampled: bool, greedy: bool, answers: str) -> None:
    """Answers of the model are greedy or sampled; those that prompts bring are neither."""
    chosen = CalibrationOptions(**options)
    assert (chosen.sampled, chosen.greedy, chosen.answers) == (sampled, greedy, answers)


def test_chunks_of_other_texts_are_refused() -> None:
    """Lengths are those of the answers, and every array has a row for each token."""
    lengths, rows = np.array([2, 1]), np.zeros((3, 4), np.uint8)
    _check_rows({"lengths": lengths, "ranks": rows, "probability": rows}, [2, 1])
    for arrays, given in (
        ({"lengths": lengths, "ranks": rows}, [1, 2]),
        ({"lengths": lengths, "ranks": rows[:2]}, [2, 1]),
        ({"lengths": lengths, "ranks": rows, "probability": rows[:2]}, [2, 1]),
        ({"ranks": rows}, [2, 1]),
    ):
        with pytest.raises(TreeoptError) as caught:
            _check_rows(arrays, given)
        assert caught.value.code is Code.RESUME_INVALID


def test_rows_of_a_chunk_go_to_their_texts() -> None:
    """Texts of 1, 2 and 3 tokens; a chunk has the third and the first, another the second."""
    whole: dict[str, Any] = {}
    ends = np.array([1, 3, 6])
    _put(whole, {"ranks": np.array([[5], [6], [7], [8]], np.uint8), "lengths": np.array([3, 1])}, ends, [2, 0])
    _put(whole, {"ranks": np.array([[1], [2]], np.uint8), "lengths": np.array([2])}, ends, [1])
    assert list(whole) == ["ranks"]
    assert whole["ranks"].dtype == np.uint8
    assert whole["ranks"].tolist() == [[8], [1], [2], [5], [6], [7]]


def test_calibration_of_no_text() -> None:
    """It has the levels of the traces."""
    none = as_calibration([], [], 7, Provenance("m", "i", "", "", {}, {}, {}), levels=3)
    assert (none.ranks.shape, none.offsets.tolist(), none.top_k, none.sequences) == ((0, 3), [0], 7, 0)


class Noted(Work):
    """A work folder that notes what processes agree on, and where the other ones end."""

    def __init__(self, target: Path) -> None:
        super().__init__(target)
        self.notes: list[str] = []

    def agree(self, what: str, value: str) -> None:
        self.notes.append(f"{what} {value}")

    def leader_only(self) -> None:
        self.notes.append("leader only")

    def chunk(self, name: str, make: Any) -> Any:
        self.notes.append(name)
        return super().chunk(name, make)


def test_what_processes_do_together(tmp_path: Path) -> None:
    """Answers are of all, traces are joined by the first; of a shard, all know the number of batches before."""
    base = chat_base()
    heads, prompts = random_heads(base, 2), ["w1 w2", "w3", "w4 w5 w6"]
    options: dict[str, Any] = {"max_new_tokens": 3, "batch_size": 2}
    work = Noted(tmp_path / "run")
    run_calibration(base, heads, prompts, work=work, **options)
    answers, traces = ["answers-000000", "answers-000001"], ["traces-000000", "traces-000001"]
    assert work.notes == [*answers, "leader only", *traces]
    work = Noted(tmp_path / "shard")
    made = answer_shard(base, heads, prompts, Learning(0), work=work, shard=Shard(1, 2), **options)
    assert work.notes == ["answers-000001", "number of batches 1", "leader only"]
    assert list(made.chunks) == ["answers-000001"]
    work = Noted(tmp_path / "learned")
    learned = run_calibration(base, heads, prompts, learning=Learning(0, ngram=False), work=work, **options).learned
    assert learned is not None
    ids = " ".join(one.id for one in (learned.drafter, *learned.folds))
    assert work.notes == [*answers, f"drafter {ids}", "leader only", *traces]


@pytest.mark.parametrize("drafter", [None, Drafter.heads_only(2, 4)])
def test_progress_and_origin(drafter: Drafter | None) -> None:
    """Texts that are answered and traced are counted; the last note has the share of the first level's best guesses."""
    base, notes = chat_base(), []
    run = run_calibration(
        base,
        random_heads(base, 2),
        ["w1 w2", "w3", "w4 w5 w6"],
        drafter=drafter,
        max_new_tokens=5,
        batch_size=2,
        progress=lambda done, total, note: notes.append((done, total, note)),
    )
    made = run.calibration
    assert made.provenance.drafter_id == ("" if drafter is None else drafter.id)
    share = made.hits[0, 0] / made.trials[0]
    level = "head 1" if drafter is None else "level 1"
    assert [(done, total) for done, total, note in notes if note == "answers"][-1] == (3, 3)
    assert notes[-1] == (3, 3, f"{level} top-1 {share:.1%}")
    assert [(done, total) for done, total, note in notes if note.startswith(level)] == [(2, 3), (3, 3)]
    assert (run.heads, run.learned, len(run.texts)) == (2, None, 3)


@pytest.mark.parametrize(("arguments", "words"), [
    ({"shard": Shard(0, 2), "learning": Learning()}, "shard and learning are both given"),
    ({"heads": None}, "heads is None: drafter="),
    ({"heads": None, "learning": Learning(ngram=False)}, "so nothing drafts"),
    ({"draft": "a model"}, "both heads and a draft model are given"),
    ({"shard": Shard(0, 2), "auto_batch": AutoBatch()}, "shard and auto_batch are both given"),
])  # fmt: skip
def test_contradictions_are_refused_first(arguments: Any, words: str) -> None:
    """ValueError before a model is loaded: there is no model of this name."""
    given = {"heads": "no heads", **arguments}
    with pytest.raises(ValueError, match=words):
        run_calibration("no model", given.pop("heads"), ["a"], **given)
    with pytest.raises(TypeError, match=r"learning is treeopt\.Learning or None, not an object of type int"):
        run_calibration("no model", "no heads", ["a"], learning=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"shard": Shard(0, 2), "responses": True}])
def test_shards_of_answers_have_something_to_divide(options: Any) -> None:
    """Without a shard, or with given answers, ValueError."""
    with pytest.raises(ValueError, match="nothing to divide"):
        answer_shard("no model", "no heads", ["a"], Learning(), **options)


def test_heads_of_another_model_are_refused_before_any_answer() -> None:
    """E212 is raised when the heads are loaded."""
    notes: list[str] = []
    heads = random_heads(tiny_base("llama", vocab_size=7), 2)
    with pytest.raises(TreeoptError) as caught:
        run_calibration(chat_base(), heads, ["w1"], progress=lambda done, total, note: notes.append(note))
    assert caught.value.code is Code.HEADS_MISMATCH
    assert notes == []
