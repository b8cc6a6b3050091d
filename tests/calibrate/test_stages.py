"""Options, chunks and what a run tells its work folder, by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from looped import looped
from teams import together
from tiny import chat_base, random_heads, tiny_base

from treeopt.calibrate.pipeline import (
    CalibrationOptions,
    Job,
    _check_rows,
    _put,
    as_calibration,
    calibrate,
    check_whole,
    job_of,
    run_calibration,
)
from treeopt.calibrate.results import Shard
from treeopt.calibration import Provenance
from treeopt.drafter import Drafter
from treeopt.drafting.learn import Learning
from treeopt.drafting.trace import TextTraces
from treeopt.errors import Code, TreeoptError
from treeopt.models.auto_batch import AutoBatch
from treeopt.progress import Progress, silent
from treeopt.runs.processes import Processes
from treeopt.runs.work import Chunk, Work
from treeopt.texts.encode import Text


@looped("options, sampled, greedy, answers", [
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
    assert (chosen.responses, chosen.steps) == (bool(options.get("responses")), False)


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
    assert as_calibration([], [], 7, Provenance("m", "i", "", "", {}, {}, {})).ranks.shape == (0, 1)


def test_texts_of_a_run() -> None:
    """Each text is there once, of the prompts of the run, and the longest answer is within the budget."""
    texts = [Text(f"p:{i}", [1], answer) for i, answer in enumerate(([2, 3, 4], [5]))]
    names = [text.prompt_id for text in texts]
    check_whole(texts, names, 3)
    for some, ids, budget in (
        (texts, names, 2),
        (texts, names[:1], 3),
        (texts[:1], names, 3),
        ([*texts, texts[0]], names, 3),
    ):
        with pytest.raises(RuntimeError, match=f"{len(some)} texts with answers of up to 3 tokens"):
            check_whole(some, ids, budget)


def test_step_traces_are_those_of_the_drafter() -> None:
    """The arrays of all texts are traces by name: ranks alone, with per-step trees, with the target's probabilities."""
    ranks, steps = np.zeros((2, 3), np.uint8), np.ones((2, 4), np.uint8)
    assert TextTraces.of({"ranks": ranks}).steps is None
    made = {"node_rank": steps, "expected_tokens": steps.astype(float), "confidence": steps.astype(float)}
    found = TextTraces.of({"ranks": ranks, **made, "probability": ranks})
    assert found.steps is not None
    assert found.target is not None
    assert found.steps.node_rank is steps


class Noted(Work):
    """A work folder that notes the batches of a run, and what its processes agree on."""

    def __init__(self, target: Path, **options: Any) -> None:
        super().__init__(target, **options)
        self.notes: list[str] = []

    def agree(self, what: str, value: str) -> None:
        self.notes.append(f"{what} {value}")
        super().agree(what, value)

    def each(self, part: str, numbers: Sequence[int], make: Any, progress: Progress = silent) -> Iterator[Chunk]:
        self.notes.append(f"{part} {list(numbers)}")
        return super().each(part, numbers, make, progress)


PROMPTS = ["w1 w2", "w3", "w4 w5 w6"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "batch_size": 2}


def divided(folder: Path, work: Callable[[Job], Any], **options: Any) -> list[tuple[Any, list[str]]]:
    """What each of two processes gets of a calibration in one folder, and the notes of its work."""
    bases = [chat_base(), chat_base()]  # `generate` changes its model's settings
    heads, learning = random_heads(bases[0], 2), options.pop("learning", None)

    def run(one: Processes) -> Any:
        noted = Noted(folder / "run", team=one)
        chosen = CalibrationOptions(work=noted, **OPTIONS, **options)
        return work(job_of(bases[one.rank], heads, PROMPTS, chosen, learning=learning)), noted.notes

    found: Any = together(run, 2)
    return list(found)


def test_processes_get_one_calibration(tmp_path: Path) -> None:
    """The first joins the traces of all to those of one process; the other gets None."""
    base = chat_base()
    alone = run_calibration(base, random_heads(base, 2), PROMPTS, **OPTIONS)
    (first, notes), other = divided(tmp_path, calibrate)
    assert notes == ["answers [0, 1]", "traces [0, 1]"]
    assert other == (None, notes)
    assert first.calibration.token_hashes == alone.calibration.token_hashes
    assert np.array_equal(first.calibration.ranks, alone.calibration.ranks)
    assert [text.answer for text in first.texts] == [text.answer for text in alone.texts]


def test_processes_agree_on_what_they_compute_alike(tmp_path: Path) -> None:
    """The drafters by their ids."""
    (first, notes), other = divided(tmp_path / "learned", calibrate, learning=Learning(0, ngram=False))
    ids = " ".join(one.id for one in (first.learned.drafter, *first.learned.folds))
    assert notes == ["answers [0, 1]", f"drafter {ids}", "traces [0, 1]"]
    assert other == (None, notes)
    assert first.learned.drafter.source["learning"]["ngram"] is False


@looped("drafter", [None, Drafter.heads_only(2, 4)])
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
    assert made.top_k == base.vocab_size < 253  # no more ranks than tokens


@looped("arguments, words", [
    ({"shard": Shard(0, 2), "learning": Learning()}, "shard and learning are both given"),
    ({"heads": None}, "heads is None: drafter="),
    ({"heads": None, "learning": Learning(ngram=False)}, "so nothing drafts"),
    ({"draft": "a model"}, "both heads and a draft model are given"),
    ({"drafter": Drafter.untrained(8), "learning": Learning()}, "drafter and learning are both given"),
    ({"shard": Shard(0, 2), "auto_batch": AutoBatch()}, "shard and auto_batch are both given"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
])  # fmt: skip
def test_contradictions_are_refused_first(arguments: Any, words: str) -> None:
    """ValueError before a model is loaded: there is no model of this name."""
    given = {"heads": "no heads", **arguments}
    with pytest.raises(ValueError, match=words):
        run_calibration("no model", given.pop("heads"), ["a"], **given)
    with pytest.raises(TypeError, match=r"learning is treeopt\.Learning or None, not an object of type int"):
        run_calibration("no model", "no heads", ["a"], learning=3)  # type: ignore[arg-type]


def test_heads_of_another_model_are_refused_before_any_answer() -> None:
    """E212 is raised when the heads are loaded."""
    notes: list[str] = []
    heads = random_heads(tiny_base("llama", vocab_size=7), 2)
    with pytest.raises(TreeoptError) as caught:
        run_calibration(chat_base(), heads, ["w1"], progress=lambda done, total, note: notes.append(note))
    assert caught.value.code is Code.HEADS_MISMATCH
    assert notes == []
