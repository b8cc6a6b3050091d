"""`treeopt build --nodes auto` over batches, contexts and kinds: the table, the schedule, and commands that take it."""

from __future__ import annotations

from pathlib import Path

import pytest
from looped import looped
from per_step_traces import traced
from program import error_of, treeopt, treeopt_json

from treeopt.files.calibrations import load_calibration, save_calibration
from treeopt.files.profiles import load_profile, save_profile
from treeopt.files.schedules import load_planned, save_schedule
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.verdict import verdicts_of
from treeopt.policy import TreePolicy
from treeopt.schedule import Schedule, ScheduledPlan
from treeopt.tree import Tree

SOURCE = {"model_id": "b1", "heads_id": "h1", "device": "cpu", "dtype": "float32", "threads": 1, "drafter": "d1"}
AUTO = ("build", "--nodes", "auto")
STATIC, DYNAMIC = ("--profile", "static.yaml"), ("--profile", "dynamic.yaml")


def seconds(nodes: int, batch: int, context: int) -> float:
    """Small batches verify for nothing, large ones pay for each token."""
    return 1e-3 * (max(1.0, nodes * batch / 12) + context / 8192)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration with per-step traces, a profile of each kind, and the same seconds as CSV."""
    monkeypatch.chdir(tmp_path)
    save_calibration(traced(1, sequences=20), "calibration.safetensors")
    places = [(nodes, batch, context) for nodes in (1, 2, 4, 8, 40) for batch in (1, 4, 16) for context in (512, 2048)]
    points = [LatencyPoint(*place, *[seconds(*place)] * 3) for place in places]
    for kind in ("static", "dynamic"):
        save_profile(LatencyProfile.from_points(points, {**SOURCE, "kind": kind}), f"{kind}.yaml")
    rows = [",".join(map(str, (*place, seconds(*place)))) for place in places]
    Path("steps.csv").write_text("\n".join(["tokens,batch,context,seconds", *rows]) + "\n")


@looped("profiles", [(*STATIC, *DYNAMIC), ("--profile", "steps.csv")])
def test_schedule_is_that_of_the_library(profiles: tuple[str, ...]) -> None:
    """Profiles of both kinds, or an engine's CSV: all candidates in JSON, the best of each cell in the file."""
    line = (*AUTO, *profiles, "--batch-size", "1,4,16", "--context", "512,2048", "-o", "s.yaml")
    data = treeopt_json(*line)
    schedule = load_planned("s.yaml")
    assert isinstance(schedule, Schedule)
    given = [load_profile(name) for name in profiles[1::2]]
    found = verdicts_of(load_calibration("calibration.safetensors"), given)
    assert schedule == found.schedule
    assert [one.key for one in schedule.cells] == [(b, c) for b in (1, 4, 16) for c in (512, 2048)]
    assert schedule.source["configuration"]["build"]["batch-size"] == [1, 4, 16]
    assert len(data["rows"]) == sum(len(one.settings) for one in found.verdicts)
    assert [row["nodes"] for row in data["rows"] if row["chosen"]] == [one.plan.nodes for one in schedule.cells]
    assert {row["kind"] for row in data["rows"]} == {"none", "chain", "static", "dynamic"}
    assert (data["left_out"], data["output"]) == ({}, "s.yaml")
    treeopt(*line)  # an unedited schedule is replaced


def test_table_has_a_line_for_each_kind() -> None:
    """One line for each batch, context and kind; the best is marked, and what lacks a profile has its command."""
    lines = treeopt(*AUTO, *STATIC, "--batch-size", "1,16", "-o", "s.yaml").stdout.splitlines()
    rows = [line.split("\t") for line in lines if "\t" in line]
    assert rows[0] == ["batch", "context", "plan", "tokens/step", "step", "tokens/s", "speedup", "90 %", ""]
    assert [row[:2] for row in rows[1:]] == [[b, "2048"] for b in ("1", "16") for _ in range(3)]
    assert [row[2].split()[0].strip(",") for row in rows[1:]] == ["none", "chain", "static"] * 2
    for batch in ("1", "16"):
        assert [row[8] for row in rows if row[0] == batch].count("best") == 1
    [left_out] = [line for line in lines if line.startswith("left out")]
    assert left_out.startswith("left out: per step: treeopt profile")
    assert "--batch-size 1,16 --context 2048" in left_out


def test_one_cell_is_a_tree_or_policy() -> None:
    """With profiles of both kinds and one batch, the best plan is written as itself, with its expected figures."""
    data = treeopt_json(*AUTO, *STATIC, *DYNAMIC, "-o", "t.yaml")
    [best] = data["best"]
    plan = load_planned("t.yaml")
    assert not isinstance(plan, Schedule)
    assert (plan.nodes, best["kind"] == "dynamic") == (best["nodes"], isinstance(plan, TreePolicy))
    assert plan.expected is not None
    only = treeopt_json(*AUTO, *STATIC, *DYNAMIC, "--kind", "static", "-o", "only.yaml")
    assert {row["kind"] for row in only["rows"]} == {"none", "chain", "static"}
    assert isinstance(load_planned("only.yaml"), Tree)


def test_edge_is_said() -> None:
    """A best plan that is the largest measured one is a warning."""
    points = [LatencyPoint(n, b, 64, 1e-3, 1e-3, 1e-3) for n in (1, 2, 3) for b in (1, 2)]
    save_profile(LatencyProfile.from_points(points, {**SOURCE, "kind": "static"}), "few.yaml")
    stderr = treeopt(*AUTO, "--profile", "few.yaml", "--batch-size", "1,2", "-o", "s.yaml").stderr
    assert "at batch 1, context 64 the best, static, 3 nodes, is the largest that was measured" in stderr


def test_what_was_not_measured() -> None:
    """E230 for a batch or a context without seconds."""
    error_of("E230", *AUTO, *STATIC, "--batch-size", "1,3")
    error_of("E230", *AUTO, *STATIC, "--context", "512,513")
    error_of("E230", *AUTO, *STATIC, *STATIC)


@looped(
    "line",
    [
        ("build", "--batch-size", "1,4"),
        (*AUTO, "--batch-size", "1,4"),
        (*AUTO, *STATIC, "--context", "512,2048", "--for", "medusa"),
        (*AUTO, *STATIC, "--drafter", "auto", "--batch-size", "1,4"),
        (*AUTO, *STATIC, *STATIC, *DYNAMIC, "--profile", "steps.csv"),
        (*AUTO, *DYNAMIC, "--kind", "dynamic", "--batch-size", "1,4", "--max-rank", "3"),
        (*AUTO, *STATIC, "--batch-size", "1,x"),
    ],
)
def test_contradictory_options_exit_2(line: tuple[str, ...]) -> None:
    """Lists without a search, and options of one tree, are refused before any work."""
    assert treeopt(*line, status=2).stdout == ""
    assert not Path("tree.yaml").exists()


def test_schedule_is_shown_and_refused_as_a_tree() -> None:
    """`show` prints its cells; commands that need one tree give one error."""
    plans = [TreePolicy(8, 3, "d1"), Tree(Tree.chain(2).paths, drafter="d1"), Tree(())]
    save_schedule(Schedule(tuple(ScheduledPlan(4**i, 64, plan, 1.5, 1.25) for i, plan in enumerate(plans))), "s.yaml")
    lines = treeopt("show", "s.yaml").stdout.splitlines()
    rows = [line.split("\t") for line in lines if "\t" in line]
    assert [row[:3] for row in rows[1:]] == [
        ["1", "64", "per step, 8 nodes"],
        ["4", "64", "chain of 2"],
        ["16", "64", "none"],
    ]
    data = treeopt_json("show", "s.yaml")
    assert (data["kind"], data["nodes"], [one["plan"] for one in data["cells"]][2]) == ("schedule", 8, "none")
    for command in ("compile", "render"):
        assert "is a schedule" in error_of("E203", command, "s.yaml")
    assert "is a schedule" in error_of("E203", "export", "s.yaml", "--for", "medusa", "-o", "x.json")
    treeopt("show", "s.yaml", "--calibration", "calibration.safetensors", status=2)
