"""The recommended plan in a drafter file: round trip, and damage refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from looped import looped

from treeopt.drafter import Drafter
from treeopt.errors import Code, TreeoptError
from treeopt.files.drafters import SCHEMA, load_drafter, save_drafter
from treeopt.files.schedules import as_plan_for, plan_of
from treeopt.files.tensors import read_arrays, write_arrays
from treeopt.policy import Plan, PolicyExpected, TreePolicy
from treeopt.tree import Expected, Tree

DRAFTER = Drafter.untrained(40, 4)
STATIC = Tree.from_paths(
    [(0,), (1,), (0, 2)], drafter=DRAFTER.id, expected=Expected(1.8, 1.9, 32, cross_validated=1.7, low=1.5, high=1.9)
)
PLANS: dict[str, Plan] = {
    "one node": Tree((), (), drafter=DRAFTER.id),
    "static": STATIC,
    "dynamic": TreePolicy(12, 3, DRAFTER.id, expected=PolicyExpected(2.5, 2.4, 12.0)),
    "size_cost": TreePolicy(8, 4, DRAFTER.id, ((1, 0.125), (8, 1.5)), PolicyExpected(2.5, 2.4, 5.5, 2.1, 2.9)),
}


def written(folder: Path, name: str) -> Path:
    """The file of the drafter with a plan."""
    path = folder / "d.safetensors"
    save_drafter(dataclasses.replace(DRAFTER, plan=PLANS[name]), path)
    return path


@looped("name", PLANS)
def test_round_trip(tmp_path: Path, name: str) -> None:
    """Paths or settings and expected tokens per step return; the id is that of the drafter without a plan."""
    path, plan = written(tmp_path, name), PLANS[name]
    found, drafter = as_plan_for(None, path)
    assert drafter is not None
    assert (drafter.id, drafter.plan) == (DRAFTER.id, found)
    assert (found.drafter, found.expected, found.source) == (DRAFTER.id, plan.expected, {"drafter": str(path)})
    if isinstance(plan, Tree):
        assert isinstance(found, Tree)
        assert found.paths == plan.paths
    else:
        assert found == plan
    save_drafter(drafter, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_without_a_plan(tmp_path: Path) -> None:
    """E223 with the remedy; neither tree nor drafter is a ValueError; a tree that is given counts."""
    save_drafter(DRAFTER, tmp_path / "d")
    for given in (DRAFTER, tmp_path / "d"):
        with pytest.raises(TreeoptError, match="recommends no tree") as caught:
            as_plan_for(None, given)
        assert caught.value.code == Code.DRAFTER_MISMATCH
        assert "--tree FILE" in caught.value.fix
        assert caught.value.what.startswith(f"drafter {DRAFTER.id} " if given is DRAFTER else f"{given}, drafter ")
    made = dataclasses.replace(DRAFTER, source={"model": "tiny-llama"})
    with pytest.raises(TreeoptError, match=f"F, drafter {made.id} of tiny-llama, recommends no tree, and none was"):
        plan_of(made, "F")
    with pytest.raises(ValueError, match="give a tree, or a drafter"):
        as_plan_for(None)
    other = TreePolicy(4, 2, DRAFTER.id)
    assert as_plan_for(other, written(tmp_path, "static"))[0] is other
    assert plan_of(dataclasses.replace(DRAFTER, plan=other)) is other


def test_plan_of_another_drafter() -> None:
    """A drafter refuses the plan of another one, and one of the heads alone."""
    for other in (Drafter.untrained(41, 4).id, ""):
        with pytest.raises(TreeoptError) as caught:
            dataclasses.replace(DRAFTER, plan=Tree(((0,),), drafter=other))
        assert caught.value.code is Code.DRAFTER_INVALID


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown kind": ("static", {"kind": "other"}),
    "unknown key": ("static", {"width": 3}),
    "a rank below 0": ("static", {"paths": [[-1]]}),
    "a path without its parent": ("static", {"paths": [[0, 1]]}),
    "expected of a policy": ("static", {"expected": {"estimated": 1.0}}),
    "one node": ("dynamic", {"nodes": 1}),
    "half a level": ("dynamic", {"depth": 1.5}),
    "a size without cost": ("size_cost", {"size_cost": [[8]]}),
    "sizes that descend": ("size_cost", {"size_cost": [[8, 1.5], [1, 0.1]]}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_plan_is_refused(tmp_path: Path, name: str) -> None:
    """Every fault is E203 or E222 that names the file, or E103 with the rule; no other exception leaves."""
    kind, change = CHANGES[name]
    arrays, header = read_arrays(written(tmp_path, kind), SCHEMA)
    write_arrays(tmp_path / "x", arrays, {**header, "plan": {**header["plan"], **change}}, overwrite=False)
    with pytest.raises(TreeoptError) as caught:
        load_drafter(tmp_path / "x")
    assert caught.value.code in (Code.FILE_INVALID, Code.DRAFTER_INVALID, Code.TREE_INVALID)
