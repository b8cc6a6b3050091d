"""What was made for another base or other heads is warned of, by every command that is given it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from drafters import answered, learned, prompts_of
from helpers import random_calibration
from looped import looped
from program import treeopt

from treeopt.files.calibrations import save_calibration
from treeopt.files.drafters import save_drafter
from treeopt.files.profiles import load_profile, save_profile
from treeopt.files.trees import save_tree
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.models.base import Base
from treeopt.models.head_files import LoadedHeads
from treeopt.optimize.tree_builder import build_tree
from treeopt.tree import Tree

PLAIN = Tree.chain(2)


@pytest.fixture
def line(shared: Path) -> list[str]:
    """The options that name the small model's heads."""
    return ["--heads", str(shared / "models" / "tinystories-260k-medusa")]


def source(base: Base, loaded: LoadedHeads, **changed: str) -> dict[str, Any]:
    """What a tree file says of the calibration behind it."""
    ids = {"model": "m", "model_id": base.fingerprint, "dtype": "float32", "heads_id": loaded.fingerprint}
    return {"calibration": {**ids, **changed}}


@looped(
    ("changed", "said"),
    [
        ({}, ""),
        ({"model_id": "0123"}, "t.yaml was made for another base model (0123, this is {base})"),
        ({"heads_id": "4567"}, "t.yaml was made for other heads (4567, these are {heads})"),
        (
            {"model_id": "0123", "heads_id": "4567"},
            "made for another base model (0123, this is {base}) and other heads",
        ),
        ({"model_id": "0123", "dtype": "bfloat16"}, ""),  # the same weights have another id in another dtype
    ],
)
def test_generate_warns_of_trees(
    base: Base, loaded: LoadedHeads, line: list[str], changed: dict[str, str], said: str
) -> None:
    """Base and heads are compared, both named; ids of a base only within one dtype."""
    save_tree(dataclasses.replace(PLAIN, source=source(base, loaded, **changed)), "t.yaml")
    result = treeopt("generate", "One day", "--tree", "t.yaml", "--max-new-tokens", "4", "-q", *line)
    if said:
        assert said.format(base=base.fingerprint, heads=loaded.fingerprint) in result.stderr
    else:
        assert result.stderr == ""


def test_every_command_warns_of_drafters(base: Base, loaded: LoadedHeads, shared: Path, line: list[str]) -> None:
    """validate, generate, calibrate and profile warn of a drafter that was learned with another base."""
    texts = answered(base, prompts_of(1, 4, vocab=base.vocab_size), 12)
    drafter = learned(base, loaded.heads, texts, new=12).drafter
    source = {"model_id": "0123", "heads_id": loaded.fingerprint}
    save_drafter(dataclasses.replace(drafter, source=source), "d.safetensors")
    save_tree(dataclasses.replace(PLAIN, drafter=drafter.id), "t.yaml")
    given = ["--drafter", "d.safetensors", "-q", *line]
    prompts = ["--prompts", str(shared / "data" / "story_openings.json"), "--limit", "1", "--max-new-tokens", "4"]
    for command in (
        ["validate", "--tree", "t.yaml", *prompts],
        ["generate", "One day", "--tree", "t.yaml", "--max-new-tokens", "4"],
        ["calibrate", *prompts],
        ["profile", "--sizes", "2", "--repeats", "1", "--context", "8"],
    ):
        assert "the drafter was made for another base model (0123, this is" in treeopt(*command, *given).stderr


def test_what_we_write_names_its_base(base: Base, shared: Path, line: list[str]) -> None:
    """A tree, a drafter and a profile of this very model, as the commands write them, are warned of by none."""
    prompts = ["--prompts", str(shared / "data" / "story_openings.json"), "--limit", "2", "--max-new-tokens", "12"]
    treeopt("calibrate", "--drafter", "heads+ngram", "--learn-tokens", "50", "-o", "c.safetensors", *prompts, *line)
    drafter = ["--drafter", "c.drafter.safetensors"]
    treeopt("profile", "--sizes", "2,4", "--repeats", "1", "--context", "8", *drafter, *line)
    build = ["build", "--calibration", "c.safetensors", "--nodes", "4", "-o", "t.yaml"]
    treeopt(*build)
    assert load_profile("profile.yaml").provenance["model_id"] == base.fingerprint
    for command in (
        ["validate", "--tree", "t.yaml", *prompts, *line],
        ["build", "--calibration", "c.safetensors", "--nodes", "auto", "--profile", "profile.yaml", "-o", "a.yaml"],
    ):
        assert "was made for" not in treeopt(*command).stderr
    text = Path("t.yaml").read_text()
    Path("other.yaml").write_text(text.replace(base.fingerprint, "0" * 16))
    assert base.fingerprint in text
    assert (
        "other.yaml was made for another base model"
        in treeopt("validate", "--tree", "other.yaml", *prompts, *line).stderr
    )


@looped(("dtype", "warned"), [("float32", True), ("bfloat16", False)])
def test_build_warns_of_profiles(dtype: str, warned: bool) -> None:
    """A profile of another base than the calibration's is warned of, where both ran in one dtype."""
    points = [LatencyPoint(n, 1, 64, 0.001 * n, 0.001 * n, 0.001 * n) for n in (1, 2, 8)]
    save_profile(LatencyProfile.from_points(points, {"model_id": "0123", "dtype": dtype}), "other.yaml")
    save_calibration(random_calibration(1), "c.safetensors")
    said = treeopt("build", "--calibration", "c.safetensors", "--nodes", "auto", "--profile", "other.yaml").stderr
    assert ("the profile was made for another base model (0123, this is b1)" in said) is warned
    assert "modelled" not in said


@looped("command", ["build", "curve"])
def test_modelled_profiles_are_named(command: str) -> None:
    """A profile of `treeopt plan` is no measurement: model and device are named beside the model of the traces."""
    points = [LatencyPoint(n, 1, 64, 0.001 * n, 0.001 * n, 0.001 * n) for n in (1, 2, 8)]
    made = {"model": "llama-7b", "device": "a40", "modelled": "treeopt plan"}
    save_profile(LatencyProfile.from_points(points, made), "p.yaml")
    save_calibration(random_calibration(1), "c.safetensors")
    auto = ("--nodes", "auto") if command == "build" else ("--largest", "8")
    said = treeopt(command, "--calibration", "c.safetensors", *auto, "--profile", "p.yaml").stderr
    assert "warning: the seconds are modelled (llama-7b on a40), not measured; the traces are of " in said


def test_tree_source_holds_the_dtype() -> None:
    """A tree names the dtype of its calibration, in which its base has the id that it names."""
    calibration = random_calibration(1)
    settings = {**calibration.provenance.settings, "dtype": "bfloat16"}
    provenance = dataclasses.replace(calibration.provenance, settings=settings)
    tree = build_tree(dataclasses.replace(calibration, provenance=provenance), 4)
    assert tree.source["calibration"]["dtype"] == "bfloat16"
    assert "dtype" not in build_tree(calibration, 4).source["calibration"]
