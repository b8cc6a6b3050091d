"""`treeopt plan`: every drafter pays for what it computes, and what drafts is in the output."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from looped import looped
from per_step_traces import traced
from program import error_number, treeopt

from treeopt.calibration import Calibration
from treeopt.drafter import Drafter, Level
from treeopt.files.calibrations import save_calibration
from treeopt.files.drafters import save_drafter
from treeopt.files.profiles import load_profile

LLAMA = ("plan", "--model", "llama-7b", "--device-preset", "a100-80gb-pcie")
NGRAM = Drafter.untrained(50, 8)
HEADS_NGRAM = dataclasses.replace(Drafter.untrained(50, 12), num_heads=2, lm_head_levels=0)
MODEL = dataclasses.replace(Drafter.model_only(6, 4, "m1"), source={"draft": "llama-68m"})
DRAFT = ("--draft", "llama-68m", "--levels", "4")
HEADS = ("--calibration", "calibration.safetensors")


def as_json(*arguments: str) -> Any:
    """The one object of --json."""
    return json.loads(treeopt(*arguments, "--json").stdout)


def save(calibration: Calibration, name: str, drafter: Drafter, heads_id: str = "", *, file: bool = True) -> list[str]:
    """The traces of three levels as those of a drafter; the options that name them."""
    path = f"{name}.drafter.safetensors"
    if file:
        save_drafter(drafter, path)
    known = {"heads": heads_id, "heads_id": heads_id, "drafter_id": drafter.id, "drafter": path}
    provenance = dataclasses.replace(calibration.provenance, **known)
    save_calibration(dataclasses.replace(calibration, provenance=provenance), f"{name}.safetensors")
    return ["--calibration", f"{name}.safetensors"]


@pytest.fixture
def drafters(calibration: Calibration) -> list[str]:
    """The options of the calibrations of an n-gram drafter, of heads with an n-gram table, and of a draft model."""
    return [
        *save(calibration, "ngram", NGRAM),
        *save(calibration, "both", HEADS_NGRAM, "h1"),
        *save(calibration, "model", MODEL),
    ]


def seconds_of(found: Any) -> dict[str, float]:
    """Seconds of eight nodes, by the drafter's first name."""
    return {one["drafter"].split(".")[0]: one["seconds"] for one in found["points"] if one["nodes"] == 8}


def test_each_drafter_pays_for_its_own(drafters: list[str]) -> None:
    """A draft model is charged to the drafter that has one, heads by their number, and the host to all but the heads.

    The expected seconds are those of plans of one kind of drafting, without calibrations.
    """
    host = ("--nodes", "8", "--host-seconds", "0.001")
    alone = {
        name: as_json(*LLAMA, *host, *options)["points"][1]["seconds"]
        for name, options in {
            "ngram": (),
            "model": DRAFT,
            "both": ("--num-heads", "2"),
            "heads": ("--num-heads", "3", "--host-seconds", "0"),
        }.items()
    }
    found = as_json(*LLAMA, *host, *DRAFT, *HEADS, *drafters)
    assert seconds_of(found) == pytest.approx(alone)
    assert len(set(alone.values())) == 4
    assert found["best"][0]["drafter"] == "heads"  # equal tokens: the fastest step wins
    assert "warnings" not in found
    assert found["drafting"] == {
        "heads": "3 heads with LM heads of their own, 0 host seconds",
        "ngram.drafter.safetensors": "none, 0.001 host seconds",
        "both.drafter.safetensors": "2 heads with LM heads of their own, 0.001 host seconds",
        "model.drafter.safetensors": "draft model llama-68m, 4 levels, 0.001 host seconds",
    }
    lines = treeopt(*LLAMA, *host, *DRAFT, *HEADS, *drafters).stdout.splitlines()
    assert "drafting: both.drafter.safetensors: 2 heads with LM heads of their own, 0.001 host seconds" in lines
    assert sum("first nodes of one growth to" in line for line in lines) == 1


def test_draft_model_without_draft_is_refused(drafters: list[str]) -> None:
    """The error names the drafter's own draft model and its levels as the remedy."""
    result = treeopt(*LLAMA, "--nodes", "8", *drafters, status=3)
    assert error_number(result) == "E240"
    assert "--draft llama-68m --levels 6" in result.stderr


def test_drafter_file_is_given_where_it_is_not_found(calibration: Calibration) -> None:
    """Without its file a drafter's kind is unknown; --drafter names it, and is matched by id."""
    options = [*LLAMA, "--nodes", "8", *save(calibration, "both", HEADS_NGRAM, "h1", file=False)]
    result = treeopt(*options, status=3)
    assert error_number(result) == "E240"
    assert "--drafter FILE" in result.stderr
    save_drafter(NGRAM, "both.drafter.safetensors")  # another drafter at the path of the calibration
    assert "--drafter FILE" in treeopt(*options, status=3).stderr
    save_drafter(HEADS_NGRAM, "moved.safetensors")
    found = as_json(*options, "--drafter", "moved.safetensors")
    assert found["drafting"]["both.drafter.safetensors"].startswith("2 heads")


@looped(
    ("line", "status", "says"),
    [
        ([*HEADS, "--num-heads", "2"], 3, "3 heads, and the options name 2"),
        (["--drafter", "ngram.drafter.safetensors"], 2, "--drafter belongs to --calibration"),
        (["--calibration", "model.safetensors", "--calibration", "other.safetensors", *DRAFT], 3, "draft models"),
    ],
)
@pytest.mark.usefixtures("drafters")
def test_options_that_fit_no_drafter_are_refused(
    line: list[str], status: int, says: str, calibration: Calibration
) -> None:
    """Costs that would be charged to nothing, or to the wrong drafter."""
    save(calibration, "other", Drafter.model_only(6, 4, "m2"))
    assert says in treeopt(*LLAMA, "--nodes", "8", *line, status=status).stderr
    assert not Path("p.yaml").exists()


def test_per_step_trees_pay_the_host() -> None:
    """Per-step trees by heads alone with a drafter's estimates: the seconds that are given."""
    drafter = Drafter((Level(),) * 2, 2, 4)
    assert drafter.name == "heads"
    save_drafter(drafter, "d.safetensors")
    save_calibration(traced(1, exact=True, drafter=drafter.id), "steps.safetensors")
    options = (*LLAMA, "--nodes", "8", "--calibration", "steps.safetensors", "--kind", "dynamic")
    [text] = as_json(*options, "--host-seconds", "0.001")["drafting"].values()
    assert text == "2 heads with LM heads of their own, 0.001 host seconds"


@looped(
    ("options", "text", "free"),
    [
        ((), "none, 0 host seconds", True),
        (("--num-heads", "5"), "5 heads with LM heads of their own, 0 host seconds", False),
        (("--num-heads", "5", "--shared-lm-head"), "5 heads with the base's LM head, 0 host seconds", False),
        (DRAFT, "draft model llama-68m, 4 levels, 0 host seconds", False),
    ],
)
def test_what_drafts_is_printed_and_in_the_profile(options: tuple[str, ...], text: str, free: bool) -> None:
    """The assumption is in the table's lines, in JSON, and in the provenance; free drafting is a warning too."""
    result = treeopt(*LLAMA, "--nodes", "8", *options, "-o", "p.yaml")
    assert f"drafting: {text}" in result.stdout.splitlines()
    assert load_profile("p.yaml").provenance["modelled"].endswith(f"; drafting: {text}")
    found = as_json(*LLAMA, "--nodes", "8", *options)
    assert list(found["drafting"].values()) == [text]
    assert ["drafting is taken as 0 seconds" in line for line in found.get("warnings", [])] == [True] * free
    assert ("drafting is taken as 0 seconds" in result.stderr) == free
