"""Schedule files: round trip, moved with their drafter, and refused where they are not right."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from looped import looped
from refusals import refusal_of

from treeopt.drafter import Drafter
from treeopt.errors import Code, TreeoptError
from treeopt.files.drafters import save_drafter
from treeopt.files.outputs import written_kind
from treeopt.files.schedules import as_plan, as_plan_for, load_plan_for, load_planned, save_schedule, schedule_yaml
from treeopt.files.trees import load_plan, load_tree, plan_id, save_tree
from treeopt.policy import TreePolicy
from treeopt.schedule import Schedule, ScheduledPlan
from treeopt.tree import Tree

DRAFTER = Drafter.heads_only(2, 4)
VALUED = Tree.from_paths([(0,), (1,), (0, 0)], (0.5, 0.3, 0.25))
HEADS = Schedule((ScheduledPlan(1, 512, VALUED, 1.9, 1.2, 1.1, 1.3), ScheduledPlan(16, 512, Tree(()), 1.0, 1.0)))
SOURCE = {"made_by": "treeopt x", "calibration": {"heads_id": "h", "prompts": 4}}
COSTED = TreePolicy(8, 3, DRAFTER.id, ((1, 0.123456), (8, 1.5)))
OF_DRAFTER = Schedule(
    (
        ScheduledPlan(1, 128, COSTED, 2.5, 1.4),
        ScheduledPlan(1, 512, dataclasses.replace(VALUED, drafter=DRAFTER.id)),
        ScheduledPlan(4, 128, TreePolicy(20, 3, DRAFTER.id)),
        ScheduledPlan(4, 512, COSTED),
        ScheduledPlan(8, 128, dataclasses.replace(COSTED, path_tokens=True)),
        ScheduledPlan(16, 128, Tree(())),
    ),
    SOURCE,
)


@looped("schedule", [HEADS, OF_DRAFTER])
def test_round_trip(tmp_path: Path, schedule: Schedule) -> None:
    """All of it comes back, is written again to the byte, and carries the mark; equal plans are stored once."""
    path = tmp_path / "s.yaml"
    save_schedule(schedule, path)
    found = load_planned(path)
    assert isinstance(found, Schedule)
    assert (found, found.source) == (schedule, schedule.source)
    assert plan_id(found) == plan_id(schedule)
    save_schedule(found, tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_bytes() == path.read_bytes()
    assert path.read_text().count("- kind: ") == len(schedule.plans)
    assert written_kind(path) == "tree"
    assert as_plan(path) == as_plan(schedule) == schedule


def test_drafter_is_found_from_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written in one folder, and moved with the drafter, a schedule still finds it; without it, E201 names both."""
    monkeypatch.chdir(tmp_path)
    Path("a/b").mkdir(parents=True)
    save_drafter(DRAFTER, "a/d.safetensors")
    save_schedule(dataclasses.replace(OF_DRAFTER, source={"drafter": "a/d.safetensors"}), "a/b/s.yaml")
    os.rename("a", "elsewhere")
    for load in (load_plan_for, as_plan_for):
        plan, drafter = load("elsewhere/b/s.yaml")
        assert drafter is not None
        assert plan.drafter == drafter.id == DRAFTER.id
    os.remove("elsewhere/d.safetensors")
    error = refusal_of(load_plan_for, "elsewhere/b/s.yaml")
    assert error.code is Code.FILE_MISSING
    assert "s.yaml" in error.what


def test_a_schedule_is_no_tree(tmp_path: Path) -> None:
    """Who wants one tree or policy gets one error with what takes a schedule; trees are loaded as before."""
    save_schedule(HEADS, tmp_path / "s.yaml")
    for load in (load_tree, load_plan):
        error = refusal_of(load, tmp_path / "s.yaml")
        assert error.code is Code.FILE_INVALID
        assert "is a schedule, with a plan by batch and context (treeopt.schedule/1), not a tree" in error.what
        assert "treeopt generate" in error.fix
    save_tree(VALUED, tmp_path / "t.yaml")
    assert load_planned(tmp_path / "t.yaml") == VALUED
    assert load_planned("mc_sim_7b_63") == load_tree("mc_sim_7b_63")


def test_id_is_of_what_is_verified() -> None:
    """Figures leave the id; another plan or place changes it."""
    bare = Schedule(tuple(ScheduledPlan(*one.key, one.plan) for one in HEADS.cells))
    others = [
        Schedule((HEADS.cells[0],)),
        Schedule((HEADS.cells[0], dataclasses.replace(HEADS.cells[1], context=64))),
        Schedule((HEADS.cells[0], dataclasses.replace(HEADS.cells[1], plan=VALUED))),
        VALUED,
    ]
    assert plan_id(bare) == plan_id(HEADS)
    assert len({plan_id(one) for one in (HEADS, *others)}) == 5


CHANGES = {
    "a plan that is not there": ("plan: 0,", "plan: 7,"),
    "a plan after the last": ("- {batch: 16", "- {batch: 8, context: 128, plan: 4}\n- {batch: 16"),
    "a plan of no cell": ("- kind: none", "- kind: none\n- kind: dynamic\n  nodes: 4\n  depth: 2"),
    "a batch of none": ("{batch: 16", "{batch: 0"),
    "a batch of too many": ("{batch: 16", "{batch: 2147483648"),
    "half a context": ("context: 128", "context: 128.5"),
    "cells out of order": ("{batch: 16", "{batch: 2"),
    "unknown key": ("plans:", "width: 3\nplans:"),
    "unknown kind": ("- kind: none", "- kind: other"),
    "key of another kind": ("- kind: none", "- kind: none\n  nodes: 4"),
    "too many nodes": ("nodes: 20", "nodes: 300"),
    "no drafter": (f'id: "{DRAFTER.id}"', 'id: ""'),
    "a path without its parent": ("path: [0, 0]", "path: [3, 0]"),
    "a value above its parent's": ("[0, 0], value: 0.25", "[0, 0], value: 0.75"),
    "a path without value": ("{path: [1], value: 0.3}", "{path: [1]}"),
    "a figure below one": ("tokens_per_step: 2.5", "tokens_per_step: 0.5"),
    "no number": ("speedup: 1.4", "speedup: .nan"),
    "low above high": ("speedup: 1.4", "speedup: 1.4, low: 1.5, high: 1.3"),
}


@looped("name", CHANGES)
def test_broken_file_is_refused(tmp_path: Path, name: str) -> None:
    """Every fault is E203 that names the file; nothing is left out in silence."""
    old, new = CHANGES[name]
    text = schedule_yaml(OF_DRAFTER)
    assert old in text
    (tmp_path / "s.yaml").write_text(text.replace(old, new))
    with pytest.raises(TreeoptError, match=r"s\.yaml") as caught:
        load_planned(tmp_path / "s.yaml")
    assert caught.value.code is Code.FILE_INVALID
