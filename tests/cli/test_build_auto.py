"""`treeopt build --drafter auto`: one table over drafters and kinds, and the plan of the fastest."""

from __future__ import annotations

from pathlib import Path

import pytest
from looped import looped
from per_step_traces import traced
from program import treeopt, treeopt_json

from treeopt.files.calibrations import save_calibration
from treeopt.files.profiles import save_profile
from treeopt.files.trees import load_plan
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.policy import TreePolicy

ALL = ("--calibration", "d1.safetensors", "--calibration", "d2.safetensors")
AUTO = ("build", "--drafter", "auto")
SOURCE = {"model_id": "b1", "heads_id": "h1", "device": "cpu", "dtype": "float32", "threads": 1}


def profile(name: str, drafter: str, kind: str, factor: float, longer: float | None = None) -> None:
    """A profile file; a step of N nodes takes 1 + factor * N milliseconds, one node a millisecond.

    At a context of 4096, where there is one, with the factor `longer`.
    """
    factors = {512: factor} | ({} if longer is None else {4096: longer})
    points = [
        LatencyPoint(n, 1, context, *[1e-3 * (1 if n == 1 else 1 + one * n)] * 3)
        for context, one in factors.items()
        for n in (1, 2, 8, 40)
    ]
    named = {"kind": kind, "drafter": drafter, "drafter_name": {"d1": "ngram", "d2": "model"}[drafter]}
    save_profile(LatencyProfile.from_points(points, {**SOURCE, **named}), name)


@pytest.fixture(autouse=True)
def _files() -> None:
    """Two drafters' calibrations, and profiles of three of the four drafters and kinds; d2's policy is the fastest."""
    for seed, drafter in ((1, "d1"), (2, "d2")):
        save_calibration(traced(seed, exact=True, drafter=drafter), f"{drafter}.safetensors")
    profile("s1.yaml", "d1", "static", 0.2)
    profile("s2.yaml", "d2", "static", 0.2)
    profile("p2.yaml", "d2", "dynamic", 0.001)


PROFILES = ("--profile", "s1.yaml", "--profile", "s2.yaml", "--profile", "p2.yaml")


def test_fastest_policy_is_written_with_all_rows() -> None:
    """The winner is a policy of the second drafter; the rows hold every drafter and kind, with nulls where unknown."""
    data = treeopt_json(*AUTO, *ALL, *PROFILES)
    assert (data["drafter"], data["kind"], data["output"]) == ("model", "dynamic", "tree.yaml")
    plan = load_plan("tree.yaml")
    assert isinstance(plan, TreePolicy)
    assert (plan.drafter, plan.nodes, plan.depth) == ("d2", data["nodes"], data["depth"])
    rows = {(row["drafter"], row["kind"]): row for row in data["rows"]}
    assert list(rows) == [("ngram", "static"), ("ngram", "dynamic"), ("model", "static"), ("model", "dynamic")]
    assert [row["chosen"] for row in rows.values()] == [False, False, False, True]
    absent = rows["ngram", "dynamic"]
    assert (absent["missing"], absent["tokens_per_second"], absent["nodes"]) == ("no profile", None, None)
    assert absent["fix"].startswith("treeopt profile --heads heads --drafter d.safetensors --kind dynamic")
    for row in rows.values():
        if row["nodes"]:
            assert row["tokens_per_second"] == pytest.approx(row["tokens_per_step"] / row["seconds"])
            assert row["speedup"] == pytest.approx(row["tokens_per_second"] * 1e-3)
    known = [row["tokens_per_second"] for row in rows.values() if row["nodes"]]
    assert rows["model", "dynamic"]["tokens_per_second"] == max(known)


def test_report_has_a_row_for_each_and_the_command_of_the_missing_one() -> None:
    """Columns in a pipe; what has no profile is named with the command that makes it."""
    lines = treeopt(*AUTO, *ALL, *PROFILES).stdout.splitlines()
    assert lines[0].split("\t") == ["drafter", "trees", "nodes", "tokens/step", "step", "tokens/s", "speedup"]
    assert [line.split("\t")[:2] for line in lines[1:5]] == [
        ["ngram", "static"],
        ["ngram", "per step"],
        ["model", "static"],
        ["model", "per step"],
    ]
    assert lines[2].split("\t")[2:] == ["-"] * 5
    [left_out] = [line for line in lines if line.startswith("left out")]
    assert left_out.startswith("left out: ngram, per step: no profile; treeopt profile --heads heads")
    assert any(line.startswith("fastest: model, per step, ") for line in lines)


def test_drafters_are_compared_at_one_context() -> None:
    """The longest that all profiles have: where one was also timed at a longer one, its drafts are not cheaper."""
    profile("long.yaml", "d1", "static", 0.4, longer=0.0001)
    both = ("--profile", "long.yaml", "--profile", "s2.yaml", "--kind", "static")
    data = treeopt_json(*AUTO, *ALL, *both)
    assert data["rows"] == treeopt_json(*AUTO, *ALL, *both, "--context", "512", "--force")["rows"]
    assert data["drafter"] == "model"
    assert treeopt_json(*AUTO, *ALL, "--profile", "long.yaml", "--kind", "static", "--force")["drafter"] == "ngram"


def test_kind_and_nodes_leave_less_to_choose_from() -> None:
    """With --kind static a tree is written, with --nodes one of that size."""
    data = treeopt_json(*AUTO, *ALL, *PROFILES, "--kind", "static", "--nodes", "6", "-o", "six.yaml")
    assert [(row["kind"], row["nodes"]) for row in data["rows"]] == [("static", 6), ("static", 6)]
    plan = load_plan("six.yaml")
    assert (plan.nodes, plan.drafter) == (6, {"ngram": "d1", "model": "d2"}[data["drafter"]])


@looped(
    "line",
    [
        (*AUTO, *ALL, *PROFILES, "--for", "medusa"),
        (*AUTO, *ALL, *PROFILES, "--kind", "dynamic", "--max-rank", "3"),
        ("build", "--calibration", "d1.safetensors", "--nodes", "auto", *PROFILES, "--profile", "s1.yaml"),
        ("build", "--drafter", "ngram", *ALL),
    ],
)
def test_contradictory_options_exit_2(line: tuple[str, ...]) -> None:
    """Options for one drafter, several profiles of one, and drafters by name are refused before any work."""
    assert treeopt(*line, status=2).stdout == ""
    assert not Path("tree.yaml").exists()
