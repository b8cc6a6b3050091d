"""The calibration record: what is derived from its traces, its rules, and merging."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
from helpers import make_calibration, random_calibration
from hypothesis import given, settings
from hypothesis import strategies as st
from looped import looped
from per_step_traces import with_paths
from refusals import refusal_of

from treeopt.calibration import Calibration, Provenance
from treeopt.defaults import STEP_SIZES
from treeopt.errors import Code, TreeoptError
from treeopt.optimize.select_method import Fitter
from treeopt.optimize.tree_builder import tree_limits
from treeopt.traces import MISS, NONE, StepTraces

SEQUENCES = 8  # of the calibration that the merge tests take parts of


def two_texts() -> Calibration:
    """Three tokens and two, two heads, four ranks kept; rank 7 is a miss."""
    return make_calibration([np.array([[0, 1], [7, 0], [0, 0]]), np.array([[0, 0], [0, 0]])], top_k=4)


def fields(calibration: Calibration) -> dict[str, Any]:
    """Every field, comparable with ==."""
    return {
        "ranks": calibration.ranks.tolist(),
        "dtypes": (calibration.ranks.dtype, calibration.offsets.dtype),
        "offsets": calibration.offsets.tolist(),
        "prompt_ids": calibration.prompt_ids,
        "token_hashes": calibration.token_hashes,
        "top_k": calibration.top_k,
        "provenance": dataclasses.asdict(calibration.provenance),
    }


def part(whole: Calibration, members: set[int], **provenance: Any) -> Calibration:
    """The calibration of some sequences of another."""
    chosen = sorted(members)
    rows = [whole.sequence(s) for s in chosen]
    return Calibration(
        ranks=np.concatenate([np.zeros((0, whole.num_heads), np.uint8), *rows]),
        offsets=np.cumsum([0, *map(len, rows)]).astype(np.int64),
        prompt_ids=tuple(whole.prompt_ids[s] for s in chosen),
        token_hashes=tuple(whole.token_hashes[s] for s in chosen),
        top_k=whole.top_k,
        provenance=dataclasses.replace(whole.provenance, **provenance),
    )


def refusal(**changes: Any) -> TreeoptError:
    """The error with which the record refuses `two_texts` with some fields changed."""
    error = refusal_of(dataclasses.replace, two_texts(), **changes)
    assert error.code is Code.CALIBRATION_INVALID
    return error


def test_worked_example() -> None:
    """Misses are trials but no hits; ends of texts are neither."""
    calibration = two_texts()
    assert (MISS, NONE) == (254, 255)
    assert calibration.ranks.tolist() == [[0, 1], [254, 255], [255, 255], [0, 255], [255, 255]]
    assert calibration.offsets.tolist() == [0, 3, 5]
    assert (calibration.num_heads, calibration.positions, calibration.sequences) == (2, 5, 2)
    calibration = two_texts()
    assert calibration.hits.tolist() == [[2, 0, 0, 0], [0, 1, 0, 0]]
    assert calibration.trials.tolist() == [3, 1]
    assert calibration.accuracy.tolist() == [[2 / 3, 0, 0, 0], [0, 1, 0, 0]]


@looped("seed", range(5))
def test_hits_trials_accuracy_equal_counting(seed: int) -> None:
    """The derived figures equal those of a loop over sequences, positions and heads."""
    calibration = random_calibration(seed, sequences=12, length=30)
    hits = [[0] * calibration.top_k for _ in range(calibration.num_heads)]
    trials = [0] * calibration.num_heads
    for s in range(calibration.sequences):
        rows = calibration.sequence(s).tolist()
        for position, row in enumerate(rows):
            for head, rank in enumerate(row):
                if position + 1 + head < len(rows):
                    trials[head] += 1
                    if rank != MISS:
                        hits[head][rank] += 1
    assert calibration.hits.tolist() == hits
    assert calibration.trials.tolist() == trials
    assert calibration.accuracy.tolist() == [[n / trial for n in row] for row, trial in zip(hits, trials, strict=True)]
    assert trials == sorted(trials, reverse=True)


def naive_standard_error(calibration: Calibration, head: int, rank: int) -> float:
    """The ratio estimator's standard error with sequences as clusters, in plain Python."""
    clusters = []
    for s in range(calibration.sequences):
        column = calibration.sequence(s)[:, head].tolist()
        if column:
            clusters.append((column.count(rank), len(column) - column.count(NONE)))
    trials = sum(n for _, n in clusters)
    accuracy = sum(hits for hits, _ in clusters) / trials
    spread = sum((hits - accuracy * n) ** 2 for hits, n in clusters)
    return float(math.sqrt(len(clusters) / (len(clusters) - 1) * spread) / trials)


@looped("seed", range(5))
def test_standard_error_equals_naive(seed: int) -> None:
    """The vectorised standard error equals the formula written out."""
    calibration = random_calibration(seed, sequences=12, length=30, heads=3)
    naive = [[naive_standard_error(calibration, head, rank) for rank in range(6)] for head in range(3)]
    np.testing.assert_allclose(calibration.standard_error(6), naive, rtol=1e-12)


def test_standard_error_with_an_empty_sequence() -> None:
    """A prompt that got no answer is no cluster."""
    rng = np.random.default_rng(0)
    tables = [rng.integers(0, 3, (length, 2)) for length in (9, 0, 7, 5, 0)]
    calibration = make_calibration(tables)
    naive = [[naive_standard_error(calibration, head, rank) for rank in range(3)] for head in range(2)]
    np.testing.assert_allclose(calibration.standard_error(3), naive, rtol=1e-12)


def test_standard_error_of_one_text_is_unknown() -> None:
    """One text has no spread between texts."""
    assert np.isnan(make_calibration([np.zeros((9, 2))]).standard_error(3)).all()


def test_none_and_ranks_in_wrong_places_are_refused() -> None:
    """A missing token inside a text breaks replay; a rank for a token that does not exist is refused, be it a miss."""
    ranks = two_texts().ranks.copy()
    ranks[0, 0] = NONE
    assert "NONE" in refusal(ranks=ranks).what
    for rank in (0, MISS):
        ranks = two_texts().ranks.copy()
        ranks[2, 0] = rank
        assert "NONE" in refusal(ranks=ranks).what


@looped("rank", [4, 16, 253])
def test_rank_beyond_kept_is_refused(rank: int) -> None:
    """A rank that was not kept must be stored as a miss."""
    ranks = two_texts().ranks.copy()
    ranks[0, 0] = rank
    assert "top_k is 4" in refusal(ranks=ranks).what


@looped("top_k", [0, -1, 254, 256])
def test_kept_out_of_range_is_refused(top_k: int) -> None:
    """Between 1 and 253 ranks are kept, so that the sentinels stay free."""
    assert "top_k is" in refusal(top_k=top_k).what


def test_most_ranks_kept_leave_the_sentinels_free() -> None:
    """With 253 ranks kept, rank 252 is a rank and 253 is a miss."""
    calibration = make_calibration([np.array([[252], [253], [0]])], top_k=253)
    assert calibration.ranks.tolist() == [[252], [254], [255]]
    assert calibration.hits[0, 252] == 1


@looped("ids", [("set:00000001", "set:00000000"), ("set:00000000", "set:00000000")])
def test_prompt_ids_not_ascending_are_refused(ids: tuple[str, str]) -> None:
    """Prompt ids ascend and differ, so that equal content has one form."""
    assert "prompt ids" in refusal(prompt_ids=ids).what


@looped("offsets", [[1, 3, 5], [0, 3, 4], [0, 6, 5], [0, 5], [0, 1, 3, 5]])
def test_offsets_that_do_not_fit_are_refused(offsets: list[int]) -> None:
    """Offsets run from 0 to the number of positions, one sequence a prompt."""
    assert "offsets" in refusal(offsets=np.array(offsets)).what


@looped("dtype", [np.int64, np.int8, np.float32])
def test_ranks_of_another_type_are_refused(dtype: type) -> None:
    """Ranks are uint8."""
    assert "uint8" in refusal(ranks=two_texts().ranks.astype(dtype)).what


def test_ranks_and_hashes_of_another_shape_are_refused() -> None:
    """Ranks have a row a position and a column a head; each prompt has one hash of its answer."""
    assert "[P, H]" in refusal(ranks=two_texts().ranks[:, 0].copy()).what
    assert "[P, H]" in refusal(ranks=two_texts().ranks[:, :0].copy()).what
    assert "token hashes" in refusal(token_hashes=("one",)).what


def test_arrays_are_read_only() -> None:
    """Ranks, offsets and the rows of a sequence cannot be written to."""
    calibration = two_texts()
    for array in (calibration.ranks, calibration.offsets, calibration.sequence(0)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


MEMBERS = st.sets(st.integers(0, SEQUENCES - 1))
MADE_BY = st.dictionaries(st.sampled_from(["torch", "device"]), st.sampled_from(["2.10", "2.11", "cpu", 3]))
PROMPTS = st.dictionaries(st.sampled_from(["sha1", "sha2"]), st.sampled_from(["a.json", "b.json", "c.json"]))
NAMES = st.sampled_from(["here/base", "there/base"])


@st.composite
def parts(draw: st.DrawFn) -> Calibration:
    """Some sequences of one calibration, measured anywhere."""
    whole = random_calibration(1, sequences=SEQUENCES, length=6, heads=2, top_k=4)
    provenance = {"made_by": draw(MADE_BY), "prompts": draw(PROMPTS), "model": draw(NAMES), "heads": draw(NAMES)}
    return part(whole, draw(MEMBERS), **provenance)


@settings(max_examples=60, deadline=None)
@given(one=parts(), other=parts())
def test_merge_is_commutative(one: Calibration, other: Calibration) -> None:
    """The order of merging leaves no trace in any field."""
    assert fields(one.merge(other)) == fields(other.merge(one))


@settings(max_examples=60, deadline=None)
@given(one=parts(), other=parts(), third=parts())
def test_merge_is_associative(one: Calibration, other: Calibration, third: Calibration) -> None:
    """The grouping of merging leaves no trace in any field."""
    assert fields(one.merge(other).merge(third)) == fields(one.merge(other.merge(third)))


@settings(max_examples=30, deadline=None)
@given(one=parts())
def test_merge_is_idempotent(one: Calibration) -> None:
    """A calibration merged with itself is itself."""
    assert fields(one.merge(one)) == fields(one)


@settings(max_examples=40, deadline=None)
@given(one=MEMBERS, other=MEMBERS)
def test_merge_is_the_union(one: set[int], other: set[int]) -> None:
    """Merged parts are the part of all their sequences; a prompt in both counts once."""
    whole = random_calibration(2, sequences=SEQUENCES, length=6)
    assert fields(part(whole, one).merge(part(whole, other))) == fields(part(whole, one | other))


def test_merge_keeps_both_names_of_a_version() -> None:
    """Where versions differ, both are kept, sorted."""
    whole = two_texts()
    merged = part(whole, {0}, made_by={"torch": "2.11"}).merge(part(whole, {1}, made_by={"torch": "2.10"}))
    assert merged.provenance.made_by == {"torch": "2.10 | 2.11"}


@looped(
    ("change", "word"),
    [
        ({"model_id": "b2"}, "model_id"),
        ({"heads_id": "h2"}, "heads_id"),
        ({"settings": {"answers": "sampled"}}, "settings"),
        ({"settings": {"answers": "greedy", "seed": 0}}, "settings"),
    ],
)
def test_merge_of_another_measurement_is_refused(change: dict[str, Any], word: str) -> None:
    """Another model, other heads or other settings do not merge."""
    whole = two_texts()
    error = refusal_of(whole.merge, part(whole, {0}, **change))
    assert error.code is Code.CALIBRATION_MISMATCH
    assert word in error.what
    assert word in error.at


@looped(("heads", "top_k"), [(3, 4), (2, 5)])
def test_merge_of_another_shape_is_refused(heads: int, top_k: int) -> None:
    """Another number of heads or of ranks kept does not merge."""
    assert (
        refusal_of(two_texts().merge, make_calibration([np.zeros((3, heads))], top_k=top_k, ids=["set:00000009"])).code
        is Code.CALIBRATION_MISMATCH
    )


def test_merge_of_two_traces_or_answers_of_one_prompt_is_refused() -> None:
    """One prompt has one trace; equal ranks of different answers are different traces."""
    other = make_calibration([np.array([[1, 1], [7, 0], [0, 0]])], top_k=4)
    error = refusal_of(two_texts().merge, other)
    assert error.code is Code.CALIBRATION_MISMATCH
    assert "set:00000000" in error.what
    whole = two_texts()
    assert (
        refusal_of(whole.merge, dataclasses.replace(whole, token_hashes=("other", whole.token_hashes[1]))).code
        is Code.CALIBRATION_MISMATCH
    )


def test_provenance_names_and_versions_do_not_hinder_merging() -> None:
    """Only weights and settings decide what merges."""
    here = Provenance("a", "b1", "c", "h1", {"answers": "greedy"}, {"x": "y"}, {"torch": "2"})
    there = Provenance("z", "b1", "z", "h1", {"answers": "greedy"})
    assert here.mergeable() == there.mergeable()


def with_steps(seed: int, **changes: Any) -> Calibration:
    """Random traces with trees of steps."""
    made = random_calibration(seed, sequences=5, length=9)
    rng = np.random.default_rng(seed)
    node_rank = np.minimum(rng.integers(1, 80, made.ranks.shape).cumsum(1), MISS)
    arrays: dict[str, Any] = {
        "node_rank": np.where(made.ranks == NONE, NONE, node_rank).astype(np.uint8),
        "expected_tokens": 1 + rng.random((made.positions, len(STEP_SIZES))).astype(np.float32).cumsum(1),
        "confidence": rng.random(made.ranks.shape).astype(np.float16),
    }
    return dataclasses.replace(made, steps=StepTraces(**{**arrays, **changes}))


def test_steps_go_with_their_sequences() -> None:
    """Selecting and merging keep the traces of each sequence's steps with it."""
    whole = with_steps(1)
    parts = [whole.select([s]) for s in range(whole.sequences)]
    joined = functools.reduce(Calibration.merge, parts[::-1])
    assert whole.steps is not None
    assert joined.steps is not None
    assert parts[2].steps is not None
    own = slice(whole.offsets[2], whole.offsets[3])
    for name in ("node_rank", "expected_tokens", "confidence"):
        np.testing.assert_array_equal(getattr(joined.steps, name), getattr(whole.steps, name))
        np.testing.assert_array_equal(getattr(parts[2].steps, name), getattr(whole.steps, name)[own])


def test_merge_with_and_without_steps_is_refused() -> None:
    """Traces of steps are of all texts or of none; they are not dropped in silence, in whichever order."""
    whole = with_steps(1)
    bare = dataclasses.replace(whole.select([0]), steps=None)
    for one, other in ((whole.select([1, 2]), bare), (bare, whole.select([1, 2]))):
        with pytest.raises(TreeoptError, match="per-step trees") as caught:
            one.merge(other)
        assert caught.value.code is Code.CALIBRATION_MISMATCH
        assert "--kind" in caught.value.fix
    assert bare.merge(bare).steps is None


def test_traces_by_path_tokens_go_with_their_sequences() -> None:
    """They are selected and merged like the others; of some texts alone they are refused."""
    whole = with_paths(with_steps(1))
    joined = functools.reduce(Calibration.merge, [whole.select([s]) for s in range(whole.sequences)][::-1])
    assert joined.steps is not None
    assert whole.steps is not None
    for name in ("path_accepted", "path_expected"):
        np.testing.assert_array_equal(getattr(joined.steps, name), getattr(whole.steps, name))
    error = refusal_of(whole.select([0]).merge, with_steps(1).select([1]))
    assert error.code is Code.CALIBRATION_MISMATCH
    assert "per-step trees" in error.what


def test_merge_with_no_texts_keeps_the_steps() -> None:
    """A calibration without texts holds no traces to lose: merged on either side it changes nothing."""
    whole, nothing = with_steps(1), dataclasses.replace(with_steps(1).select([]), steps=None)
    for merged in (whole.merge(nothing), nothing.merge(whole)):
        assert merged.steps is not None
        np.testing.assert_array_equal(merged.steps.node_rank, whole.steps.node_rank if whole.steps else None)


DIFFERENCES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "drafter": ({"drafter_id": "d1"}, ["drafter_id: none and d1"]),
    "two": ({"drafter_id": "d1", "heads_id": "h2"}, ["heads_id: h1 and h2", "drafter_id: none and d1"]),
    "setting": ({"settings": {"answers": "sampled"}}, ["settings answers: greedy and sampled"]),
    "setting of one": ({"settings": {"answers": "greedy", "seed": 0}}, ["settings seed: not there and 0"]),
    "type of a setting": ({"settings": {"answers": ["greedy"]}}, ["settings answers: greedy and ['greedy']"]),
}


@looped("name", DIFFERENCES)
def test_differences_are_named_with_both_values(name: str) -> None:
    """The error holds a line for each thing that differs, with two different values, and nothing that is equal."""
    change, lines = DIFFERENCES[name]
    whole = two_texts()
    error = refusal_of(whole.check_comparable, part(whole, {0}, **change))
    assert error.at.splitlines() == lines
    assert error.fix


def test_distinct_texts_are_those_with_tokens_and_a_hash_of_their_own() -> None:
    """Equal texts count once, and a text without a token not at all."""
    whole = random_calibration(3, sequences=6)
    assert dataclasses.replace(whole, token_hashes=tuple("abcaba")).distinct == 3
    empty = dataclasses.replace(whole.select([0, 1]), ranks=whole.ranks[:0], offsets=np.zeros(3, np.int64))
    assert empty.distinct == 0


def test_turns_of_a_dialogue_are_one_cluster() -> None:
    """They depend on each other: their cluster is the first turn's, and the error that of whole dialogues."""
    turns = random_calibration(5, sequences=12, length=30)
    ids = tuple(f"set:{row:08}{turn}" for row in range(6) for turn in ("", ".02"))
    turns = dataclasses.replace(turns, prompt_ids=ids, token_hashes=tuple("abcdefghijkl"))
    assert turns.clusters == tuple("aacceeggiikk")
    assert turns.distinct == 6
    for head, rank in ((0, 0), (1, 2)):
        hits, trials = ((turns.ranks[:, head] == rank), (turns.ranks[:, head] != NONE))
        ends = turns.offsets[::2]
        of = [hits[a:b].sum() - turns.accuracy[head, rank] * trials[a:b].sum() for a, b in itertools.pairwise(ends)]
        expected = np.sqrt(np.square(of).sum() * 6 / 5) / trials.sum()
        assert turns.standard_error(3)[head, rank] == pytest.approx(expected)
    fitter = Fitter(turns, tree_limits(turns, 8))
    assert (fitter.folds()[::2] == fitter.folds()[1::2]).all()


def test_standard_error_of_equal_texts_is_that_of_one() -> None:
    """Each text three times over tells as much as each once, and one text in many copies tells nothing."""
    once = random_calibration(5, sequences=6, length=30)
    once = dataclasses.replace(once, token_hashes=tuple("abcdef"))
    chosen = [s for s in range(6) for _ in range(3)]
    rows = [once.sequence(s) for s in chosen]
    thrice = Calibration(
        ranks=np.concatenate(rows),
        offsets=np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64),
        prompt_ids=tuple(f"set:{i:08}" for i in range(18)),
        token_hashes=tuple("abcdef"[s] for s in chosen),
        top_k=once.top_k,
        provenance=once.provenance,
    )
    np.testing.assert_allclose(thrice.standard_error(3), once.standard_error(3), rtol=1e-12)
    same = dataclasses.replace(thrice, token_hashes=("a",) * 18)
    assert np.isnan(same.standard_error(3)).all()


def test_merge_of_another_drafter_is_refused() -> None:
    """Ranks among other candidates do not mix; the drafter's file may be named otherwise."""
    one = random_calibration(1)
    other = dataclasses.replace(one, provenance=dataclasses.replace(one.provenance, drafter_id="d1"))
    with pytest.raises(TreeoptError, match="drafter_id") as caught:
        one.merge(other)
    assert caught.value.code is Code.CALIBRATION_MISMATCH
    named = dataclasses.replace(other, provenance=dataclasses.replace(other.provenance, drafter="d"))
    assert other.merge(named).provenance.drafter_id == "d1"


STEP_FAULTS: dict[str, dict[str, Any]] = {
    "node_rank are": {"node_rank": np.ones((3, 4), np.uint8)},
    "expected_tokens are": {"expected_tokens": np.ones((3, 2), np.float32)},
    "confidence are": {"confidence": np.ones((3, 4), np.float16)},
    "node_rank is not uint8": {
        "node_rank": np.ones(random_calibration(1, sequences=5, length=9).ranks.shape, np.int64)
    },
    "NONE exactly": {"node_rank": np.ones(random_calibration(1, sequences=5, length=9).ranks.shape, np.uint8)},
    "not finite": {
        "expected_tokens": np.full(
            (random_calibration(1, sequences=5, length=9).positions, len(STEP_SIZES)), np.nan, np.float32
        )
    },
}


@looped("fault", STEP_FAULTS)
def test_wrong_steps_are_refused(fault: str) -> None:
    """Traces of steps have a row for every position, and end where the text does."""
    with pytest.raises(TreeoptError, match=fault) as caught:
        with_steps(1, **STEP_FAULTS[fault])
    assert caught.value.code is Code.CALIBRATION_INVALID


def test_part_after_the_whole_is_refused() -> None:
    """A longer path is never among fewer nodes than a part of it."""
    good = with_steps(1)
    assert good.steps is not None
    node_rank = good.steps.node_rank.copy()
    row = int(np.flatnonzero(node_rank[:, 1] != NONE)[0])
    node_rank[row, :2] = (9, 4)
    with pytest.raises(TreeoptError, match="precedes"):
        with_steps(1, node_rank=node_rank)
