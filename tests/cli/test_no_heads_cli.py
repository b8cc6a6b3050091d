"""Models without heads as a user meets them: `--model` alone, from learning to decoding, and what does not go."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest
from looped import looped
from made import FEW, MODEL, OTHERS
from program import error_of, treeopt, treeopt_json

from treeopt.drafter import Drafter
from treeopt.files.bundled import pocket
from treeopt.files.calibrations import load_calibration
from treeopt.files.drafters import load_drafter, save_drafter
from treeopt.files.profiles import load_profile
from treeopt.files.trees import load_plan
from treeopt.models import given as pair_module

LITTLE = ("--learn-tokens", "600")
SIZES = ("--sizes", "2,8", "--context", "8", "--repeats", "1")


@pytest.fixture(scope="module")
def made(heads_files: Path, ngram_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a drafter without heads, and all that is made with it; and the like of the heads."""
    folder = tmp_path_factory.mktemp("made") / "here"
    shutil.copytree(ngram_files, folder)
    for name, one in {"with-heads": "d.safetensors", "heads": "plain.safetensors", "heads.yaml": "plain.yaml"}.items():
        shutil.copy(heads_files / one, (folder / name).with_suffix(Path(one).suffix))
    return folder


@pytest.fixture(autouse=True)
def _in_folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


@pytest.fixture
def _no_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads heads fails."""

    def load(*_names: Any, **_options: Any) -> NoReturn:
        raise AssertionError("heads were loaded")

    monkeypatch.setattr(pair_module, "load_heads", load)


def test_records_name_no_heads() -> None:
    """Drafter, traces, trees and profile hold no heads and one base; the number of levels is that of --levels."""
    drafter, calibration, profile = (
        load_drafter("d.safetensors"),
        load_calibration("c.safetensors"),
        load_profile("p.yaml"),
    )
    assert (drafter.num_heads, drafter.depth, drafter.source["heads"], drafter.source["heads_id"]) == (0, 5, "", "")
    source = calibration.provenance
    assert (source.heads, source.heads_id, source.drafter_id) == ("", "", drafter.id)
    assert calibration.num_heads == 5
    assert (profile.provenance["heads_id"], profile.provenance["drafter"]) == ("", drafter.id)
    assert profile.provenance["model_id"] == source.model_id
    for name in ("static", "dynamic", "auto"):
        plan = load_plan(f"{name}.yaml")
        assert (plan.drafter, plan.source["calibration"]["heads_id"]) == (drafter.id, "")


@pytest.mark.usefixtures("_no_heads")
@looped(("name", "base"), [("static", MODEL), ("dynamic", ()), ("auto", MODEL)])
def test_lossless_as_predicted(name: str, base: tuple[str, ...]) -> None:
    """Every kind is lossless, in the predicted steps; the built-in model's heads are not loaded either."""
    data = treeopt_json("validate", *base, "--tree", f"{name}.yaml", *OTHERS)
    assert data["lossless"]
    assert data["tokens_per_step"] == data["predicted_tokens_per_step"] > 1
    assert data["tokens_per_step"] == pytest.approx(data["expected_tokens_per_step"], rel=1e-6)
    assert "warnings" not in data or not any("made for" in one for one in data["warnings"])


@pytest.mark.slow
@pytest.mark.usefixtures("_no_heads")
def test_generate_takes_the_model_of_the_drafter(tmp_path: Path) -> None:
    """Without --model and --heads the base is that which the drafter's file names, not the built-in one."""
    shutil.copytree(pocket(), tmp_path / "other")
    drafter = load_drafter("d.safetensors")
    named = dataclasses.replace(drafter, source={**drafter.source, "model": str(tmp_path / "other")})
    save_drafter(named, tmp_path / "n.safetensors")
    line = ("generate", "import os", "--tree", "static.yaml", "--drafter", tmp_path / "n.safetensors")
    assert f"model    {tmp_path / 'other'} " in treeopt(*line).stderr
    assert "model    pocket " in treeopt(*line, "--model", "pocket").stderr


@pytest.mark.slow
@pytest.mark.usefixtures("_no_heads")
@looped("base", [MODEL, ("--drafter", "ngram")])
def test_calibrate_learns_without_heads(base: tuple[str, ...], tmp_path: Path) -> None:
    """--model alone, and --drafter ngram of the built-in model: a drafter is learned, and its levels are traced."""
    output = tmp_path / "c.safetensors"
    data = treeopt_json("calibrate", *base, *FEW, *LITTLE, "--levels", "3", "-o", output)
    assert (data["heads"], data["levels"], len(data["accuracy"])) == (0, 3, 3)
    drafter = load_drafter(tmp_path / "c.drafter.safetensors")
    assert (drafter.num_heads, drafter.depth) == (0, 3)
    assert data["drafter"] == drafter.id == load_calibration(output).provenance.drafter_id
    assert data["learned"]["source"]["heads_id"] == ""


@pytest.mark.slow
def test_levels_below_the_heads(tmp_path: Path) -> None:
    """With heads --levels counts them too, and a drafter has at least as many."""
    for levels, depth in (("6", 6), ("2", 5)):
        output = tmp_path / f"{levels}.safetensors"
        more = ("--max-new-tokens", "24", "--learn-tokens", "300", "--nodes", "4", "--levels", levels)
        treeopt("learn", *FEW, *more, "-o", output)
        assert load_drafter(output).depth == depth


@pytest.mark.usefixtures("_no_heads")
def test_profile_without_drafter(tmp_path: Path) -> None:
    """--model alone times static trees of an n-gram drafter with an empty table, whose id the profile names."""
    data = treeopt_json("profile", *MODEL, *SIZES, "-o", tmp_path / "p.yaml")
    assert [point["nodes"] for point in data["points"]] == [1, 2, 8]
    source = data["provenance"]
    untrained = Drafter.untrained(load_drafter("d.safetensors").ngram_table.vocab_size)
    assert (source["heads"], source["drafter"], source["drafter_name"]) == ("", untrained.id, "ngram")


REFUSED = {  # command, calibration, profile -> error, fix
    "another drafter": ("build --nodes auto", "c", "heads", "E223", "--drafter d.safetensors --kind static"),
    "a drafter for heads": ("build --nodes auto", "heads", "static", "E223", "--heads pocket --kind static"),
    "static for dynamic": ("build --nodes auto --kind dynamic", "c", "static", "E230", "d.safetensors --kind dynamic"),
    "dynamic for static": ("build --nodes auto", "c", "p", "E230", "--drafter d.safetensors --kind static"),
    "curve, another drafter": ("curve", "c", "heads", "E223", "--drafter d.safetensors --kind static"),
    "curve, dynamic for static": ("curve", "c", "p", "E230", "--drafter d.safetensors --kind static"),
    "curve, static for dynamic": ("curve --kind dynamic", "c", "static", "E230", "d.safetensors --kind dynamic"),
}


@pytest.fixture(scope="module")
def profiles(made: Path) -> None:
    """Profiles of static trees: of the heads, and of the drafter without heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        treeopt("profile", *SIZES, "-o", "heads.p.yaml")
        treeopt("profile", *MODEL, *SIZES, "--drafter", "d.safetensors", "-o", "static.p.yaml")
        shutil.copy("p.yaml", "p.p.yaml")


@pytest.mark.usefixtures("profiles")
@looped("name", REFUSED)
def test_profiles_of_other_steps_are_refused(name: str, tmp_path: Path) -> None:
    """A profile of another drafter is E223, of the other kind E230; the fix measures the steps that are needed."""
    command, calibration, profile, number, fix = REFUSED[name]
    output = tmp_path / ("t.svg" if command.startswith("curve") else "t.yaml")
    files = ("--calibration", f"{calibration}.safetensors", "--profile", f"{profile}.p.yaml", "-o", output)
    assert fix in error_of(number, *command.split(), *files)
    assert not output.exists()


@pytest.mark.usefixtures("profiles")
def test_profile_of_static_trees_is_taken(tmp_path: Path) -> None:
    """The profile that the fix of a refusal measures works."""
    line = ("build", "--nodes", "auto", "--calibration", "c.safetensors", "--profile", "static.p.yaml")
    assert treeopt_json(*line, "-o", tmp_path / "t.yaml")["nodes"] in range(1, 9)


HEADS = ("--heads", "pocket")
USAGE = {
    "ngram uses no heads": [
        ("calibrate", *HEADS, "--drafter", "ngram", *FEW),
        ("learn", *HEADS, "--drafter", "ngram", *FEW),
    ],
    "needs --heads": [
        ("calibrate", *MODEL, "--drafter", "heads", *FEW),
        ("calibrate", *MODEL, "--drafter", "heads+ngram", *FEW),
        ("learn", *MODEL, "--drafter", "heads+ngram", *FEW),
    ],
    "Missing option '--prompts'": [
        ("calibrate", *MODEL),
        ("learn", *MODEL),
        ("validate", *MODEL, "--tree", "static.yaml"),
    ],
    "belongs to --drafter heads+ngram, ngram, model+ngram, eagle+ngram": [
        ("calibrate", "--levels", "3"),
        ("calibrate", *MODEL, "--drafter", "d.safetensors", "--levels", "3", *FEW),
    ],
    "is not heads+ngram or ngram or model+ngram or eagle+ngram or": [
        ("learn", "--drafter", "heads"),
        ("learn", "--drafter", "d.safetensors"),
    ],
    "a file of that name is ./ngram": [
        ("generate", "x", *MODEL, "--tree", "static.yaml", "--drafter", "ngram"),
        ("validate", *MODEL, *FEW, "--tree", "static.yaml", "--drafter", "ngram"),
        ("profile", *MODEL, "--drafter", "ngram"),
    ],
}


@pytest.mark.usefixtures("unloaded")
@looped("text", USAGE)
def test_options_that_do_not_go_together(text: str) -> None:
    """A usage error with a remedy, before any model is loaded."""
    for line in USAGE[text]:
        assert text in treeopt(*line, status=2).stderr


WRONG = {
    "drafts without heads, and --heads is given": [
        ("generate", "x", *HEADS, "--tree", "static.yaml"),
        ("generate", "x", *HEADS, *MODEL, "--tree", "dynamic.yaml"),
        ("validate", *HEADS, "--tree", "static.yaml", *FEW),
        ("calibrate", *HEADS, "--drafter", "d.safetensors", *FEW, "-o", "new.safetensors"),
        ("profile", *HEADS, "--drafter", "d.safetensors", "-o", "new.yaml"),
    ],
    "drafts with heads, and only --model is given": [
        ("generate", "x", *MODEL, "--tree", "heads.yaml"),
        ("validate", *MODEL, "--tree", "heads.yaml", *FEW),
        ("calibrate", *MODEL, "--drafter", "with-heads.safetensors", *FEW, "-o", "new.safetensors"),
        ("profile", *MODEL, "--drafter", "with-heads.safetensors", "-o", "new.yaml"),
    ],
}


@pytest.mark.usefixtures("unloaded")
@looped("text", WRONG)
def test_files_that_do_not_fit(text: str) -> None:
    """A tree or drafter that contradicts --heads or --model is E223 before a model is loaded, with the remedy."""
    for line in WRONG[text]:
        refused = error_of("E223", *line)
        assert text in refused
        assert re.search(r"^ +fix: .*--heads", refused, re.M)
        assert json.loads(treeopt(*line, "--json", status=3).stderr)["error"] == "E223"


@pytest.mark.slow
def test_a_file_named_ngram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`./ngram` is a file; `ngram` is the drafter, even where there is such a file."""
    drafter = Path("d.safetensors").read_bytes()
    monkeypatch.chdir(tmp_path)
    Path("ngram").write_bytes(drafter)
    known = treeopt_json("calibrate", *MODEL, *FEW, "--drafter", "./ngram", "-o", "c.safetensors")
    assert known["drafter"] == load_drafter("ngram").id
    assert known["learned"] is None
    assert known["warnings"][0].endswith("(--drafter ngram traces each text by a drafter that was learned without it)")
    assert treeopt_json("calibrate", *MODEL, *FEW, *LITTLE, "--drafter", "ngram", "-o", "d.safetensors")["learned"]
