"""Drafter files: round trip, and damage of every kind refused."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import without_checksum
from looped import looped
from refusals import refusal_of

from treeopt.drafter import MAX_MATCH, Drafter, Level
from treeopt.drafting.count import NgramCounts
from treeopt.errors import Code, TreeoptError
from treeopt.files.drafters import SCHEMA, load_drafter, save_drafter
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.policy import PolicyExpected, TreePolicy
from treeopt.tree import Expected, Tree


def with_table() -> Drafter:
    """A drafter with a small n-gram table and a calibration map."""
    counts = NgramCounts(5)
    counts.add([1, 2, 3, 1, 2], [2, 3, 1, 2, 4])
    level = Level(0.5, 0.25, 1 / 3, tuple(0.1 * n for n in range(MAX_MATCH)), -3.0, ((-1.0, -2.0), (0.5, 0.25)))
    return Drafter((level, Level(), level), 2, 3, 16, counts.table(), {"prompts": {"sha": "p.json"}, "n": 1})


def no_heads() -> Drafter:
    """A drafter without heads, with an empty table and all that came with the cache."""
    cached = replace(Level(), cache=(0.5, 1 / 3, 0.1, -0.25, 2.0, 1e-9))
    table = NgramCounts(5).table()
    return Drafter((cached, Level(), cached), 0, 3, 16, table, {"x": 1}, cache_prior=1 / 7, voted=4, lm_head_levels=2)


def with_tree() -> Drafter:
    """With a tree and what is expected of it."""
    expected = Expected(1.75, 1.5, 16, 1.25, None, 2.0)
    tree = Tree.from_paths([(0,), (1,), (0, 0), (0, 2)], drafter=no_heads().id, expected=expected)
    return replace(no_heads(), plan=tree)


def with_policy() -> Drafter:
    """With a policy, costs of its sizes and what is expected of it."""
    expected = PolicyExpected(2.5, 2.25, 7.5, 2.0, None)
    policy = TreePolicy(8, 3, no_heads().id, ((1, 0.0), (4, 1 / 3), (8, 1.0)), expected=expected)
    return replace(no_heads(), plan=policy)


def bare(drafter: Drafter) -> Drafter:
    """The drafter and its plan, without what is expected and what sizes cost."""
    plan = drafter.plan
    assert plan is not None
    changes = {"size_cost": ()} if isinstance(plan, TreePolicy) else {}
    return replace(drafter, plan=replace(plan, expected=None, **changes))


DRAFTERS = {
    "table": with_table(),
    "heads": Drafter.heads_only(2, 7),
    "no heads": no_heads(),
    "tree": with_tree(),
    "policy": with_policy(),
    "policy of path tokens": replace(with_policy(), plan=replace(with_policy().plan, path_tokens=True)),
    "bare tree": bare(with_tree()),
    "bare policy": bare(with_policy()),
}


@looped("drafter", DRAFTERS.values())
def test_round_trip(tmp_path: Path, drafter: Drafter) -> None:
    """Numbers, table and source come back with the same id; equal content gives equal bytes."""
    for name in ("a", "b"):
        save_drafter(drafter, tmp_path / name)
    found = load_drafter(tmp_path / "a")
    assert found.id == drafter.id
    for field in fields(Drafter):
        if field.name != "ngram_table":
            assert getattr(found, field.name) == getattr(drafter, field.name)
    assert (found.plan and found.plan.expected) == (drafter.plan and drafter.plan.expected)
    assert found.plan is None or found.plan.source == {"drafter": str(tmp_path / "a")}
    assert (found.ngram_table is None) == (drafter.ngram_table is None)
    if found.ngram_table is not None and drafter.ngram_table is not None:
        assert found.ngram_table.num_tokens == drafter.ngram_table.num_tokens
        for name, array in drafter.ngram_table.arrays().items():
            np.testing.assert_array_equal(found.ngram_table.arrays()[name], array)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_existing_file_is_kept(tmp_path: Path) -> None:
    """What takes long to learn is overwritten only when that is asked for."""
    save_drafter(with_table(), tmp_path / "d")
    assert refusal_of(save_drafter, Drafter.heads_only(1, 1), tmp_path / "d").code is Code.FILE_EXISTS
    save_drafter(Drafter.heads_only(1, 1), tmp_path / "d", overwrite=True)
    assert load_drafter(tmp_path / "d").depth == 1


def test_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    """E201 with the command."""
    error = refusal_of(load_drafter, tmp_path / "none")
    assert error.code is Code.FILE_MISSING
    assert "treeopt learn" in error.fix


@pytest.mark.slow
def test_every_damaged_byte_is_refused(tmp_path: Path) -> None:
    """No damage is read as a drafter of the same id, also in files without a checksum; no other exception leaves."""
    save_drafter(with_table(), tmp_path / "d")
    whole, known = without_checksum(tmp_path / "d"), with_table()
    codes = set()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x15
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            found = load_drafter(tmp_path / "damaged")
        except TreeoptError as error:
            codes.add(error.code)
        else:  # the source, and how many tokens were counted, do not change the drafts
            assert found.id == known.id
    assert codes == {Code.FILE_INVALID, Code.DRAFTER_INVALID}


CHANGES: dict[str, dict[str, Any]] = {
    "another number": {"top": 2},
    "a table left out": {"num_tokens": None},
    "levels of another kind": {"levels": [1]},
    "a pair of three": {
        "levels": [{**vars(Level()), "prompt_lookup": [0.0] * MAX_MATCH, "calibration_map": [[1.0, 2.0, 3.0]]}]
    },
    "too few levels": {"levels": []},
    "unknown key": {"width": 3},
    "another prior": {"cache_prior": 2.0},
    "a prior of 0": {"cache_prior": 0.0},
    "a prior in words": {"cache_prior": "1"},
    "another number of voted candidates": {"voted": 1},
    "half a voted candidate": {"voted": 0.5},
    "levels of the LM head": {"lm_head_levels": 1},
    "no numbers for the cache": {"levels": [{**vars(Level()), "prompt_lookup": [0.0] * MAX_MATCH, "cache": None}]},
    "a plan of no kind": {"plan": {"paths": [[0]], "expected": None}},
    "a plan of another kind": {"plan": {"kind": "list", "paths": [[0]], "expected": None}},
    "a tree without paths": {"plan": {"kind": "static", "expected": None}},
    "a tree that is none": {"plan": {"kind": "static", "paths": [[0, 0]], "expected": None}},
    "paths of words": {"plan": {"kind": "static", "paths": [["0"]], "expected": None}},
    "a tree that expects something else": {"plan": {"kind": "static", "paths": [[0]], "expected": {"steps": 2.0}}},
    "a policy of one node": {"plan": {"kind": "dynamic", "nodes": 1, "depth": 1, "size_cost": [], "expected": None}},
    "sizes without costs": {"plan": {"kind": "dynamic", "nodes": 8, "depth": 1, "size_cost": [[8]], "expected": None}},
    "sizes of halves": {
        "plan": {"kind": "dynamic", "nodes": 8, "depth": 1, "size_cost": [[1.5, 0.0], [8, 1.0]], "expected": None}
    },
    "costs that are not in order": {
        "plan": {"kind": "dynamic", "nodes": 8, "depth": 1, "size_cost": [[8, 1.0], [4, 0.5]], "expected": None}
    },
}


@looped("name", CHANGES)
def test_changed_header_is_refused(tmp_path: Path, name: str) -> None:
    """A header that was changed breaks a rule, or its hash."""
    save_drafter(with_table(), tmp_path / "d")
    arrays, header = read_arrays(tmp_path / "d", SCHEMA)
    write_arrays(tmp_path / "x", arrays, {**header, **CHANGES[name]}, overwrite=False)
    with pytest.raises(TreeoptError, match="x") as caught:
        load_drafter(tmp_path / "x")
    broken_plan = "plan" in CHANGES[name] and caught.value.code is Code.TREE_INVALID
    assert broken_plan or caught.value.code in (Code.FILE_INVALID, Code.DRAFTER_INVALID)


def test_a_plan_of_another_file_is_the_drafters(tmp_path: Path) -> None:
    """The id of the drafter is not stored twice: a changed drafter does not keep the plan of the old one."""
    save_drafter(with_tree(), tmp_path / "d")
    arrays, header = read_arrays(tmp_path / "d", SCHEMA)
    assert no_heads().id not in str(header["plan"])
    write_arrays(tmp_path / "x", arrays, {**header, "cache_prior": 3.0}, overwrite=False)
    with pytest.raises(TreeoptError, match="was changed since it was written"):
        load_drafter(tmp_path / "x")


@looped("name", ["keys", "tokens", "ratios", "backoff", "unigram"])
@looped("change", ["gone", "scalar", "float64", "other"])
def test_changed_array_is_refused(tmp_path: Path, name: str, change: str) -> None:
    """An array that is missing, of another shape or type, or of other content."""
    save_drafter(with_table(), tmp_path / "d")
    arrays, header = read_arrays(tmp_path / "d", SCHEMA)
    own = arrays.pop(name)
    changed = {"scalar": np.zeros((), own.dtype), "float64": own.astype(np.float64), "other": own + own.dtype.type(1)}
    if change != "gone":
        arrays[name] = changed[change]
    write_arrays(tmp_path / "x", arrays, header, overwrite=False)
    assert refusal_of(load_drafter, tmp_path / "x").code in (Code.FILE_INVALID, Code.DRAFTER_INVALID)
