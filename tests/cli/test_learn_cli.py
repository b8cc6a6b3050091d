"""`learn` and its recommended plan as a user meets them: the table, the file, and decoding with the file alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest
from looped import looped
from made import FEW, LITTLE, MODEL, OTHERS, plant
from program import error_number, treeopt, treeopt_json

from treeopt.evaluate.profile import TimedStep
from treeopt.files.drafters import load_drafter
from treeopt.files.trees import save_tree
from treeopt.models import given as pair_module
from treeopt.policy import TreePolicy
from treeopt.tree import Tree

HEADS = ("--heads", "pocket")


@pytest.fixture(scope="module")
def made(heads_files: Path, ngram_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a drafter without heads, which recommends a tree, and one with them, which recommends a policy."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copy(ngram_files / "d.safetensors", folder / "ngram-static.safetensors")
    shutil.copy(heads_files / "d.safetensors", folder / "heads-dynamic.safetensors")
    shutil.copy(heads_files / "p.v1.drafter.safetensors", folder / "none.safetensors")
    save_tree(Tree(()), folder / "root.yaml")
    return folder


@pytest.fixture(autouse=True)
def _in_folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


def stock(prompt: str) -> list[int]:
    """The text of the one-node tree."""
    tokens: list[int] = treeopt_json("generate", prompt, *MODEL, "--max-new-tokens", "24", "--tree", "root.yaml")[
        "tokens"
    ]
    return tokens


@pytest.mark.slow
@looped("name, kind", [("ngram", "static"), ("heads", "dynamic")])
def test_the_file_alone(name: str, kind: str) -> None:
    """validate is lossless, in the predicted steps; generate gives the text of the model alone; no tree is named."""
    file = f"{name}-{kind}.safetensors"
    plan = load_drafter(file).plan
    assert plan is not None
    assert isinstance(plan, TreePolicy) == (kind == "dynamic")
    base = MODEL if name == "ngram" else HEADS
    data = treeopt_json("validate", *base, *OTHERS, "--drafter", file)
    assert data["lossless"]
    assert data["tokens_per_step"] == data["predicted_tokens_per_step"] > 1
    assert data["prediction_misses"] == []
    assert not any("made for" in one for one in data.get("warnings", ()))
    found = treeopt_json("generate", "import os", *base, "--max-new-tokens", "24", "--drafter", file)
    assert found["tokens"] == stock("import os")
    assert found["nodes"] == plan.nodes
    assert len(found["step_lengths"]) < 24
    assert treeopt("generate", "import os", *base, "--max-new-tokens", "24", "--drafter", file).stdout == found["text"]


def test_result_is_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """--json gives each size and kind, and the recommended one, which the file stores."""
    plant(monkeypatch, 0.02, 0.015)
    data = treeopt_json("learn", *MODEL, *FEW, *LITTLE, "-o", tmp_path / "d.safetensors")
    none, *sizes = data["sizes"]
    assert (none["nodes"], none["kind"], none["speedup"], none["dtype"]) == (1, "none", 1.0, "float32")
    assert [(one["nodes"], one["kind"]) for one in sizes] == [
        (nodes, kind) for nodes in (4, 12) for kind in ("static", "dynamic")
    ]
    for one in sizes:
        assert one["seconds"] == (0.02 if one["kind"] == "static" else 0.015)
        assert one["speedup"] == pytest.approx(one["tokens_per_step"] * 0.01 / one["seconds"])
    best = max(data["sizes"], key=lambda one: one["speedup"])
    assert data["recommended"] == best
    plan = load_drafter(tmp_path / "d.safetensors").plan
    assert plan is not None
    assert (plan.nodes, isinstance(plan, TreePolicy)) == (best["nodes"], best["kind"] == "dynamic")
    assert plan.expected is not None
    assert plan.expected.replay == best["tokens_per_step"]


def test_table_and_next_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row for each size and kind, the recommended one, and a command that works as printed; -q prints no notes."""
    plant(monkeypatch, 9.0, 0.0075)
    monkeypatch.chdir(tmp_path)
    result = treeopt("learn", *MODEL, *FEW, *LITTLE)
    pattern = r"^(none|static|per step)\t(\d+)\t(\d+)\t(\d\.\d{3})\t([\d.]+) ms\t[\d.]+\t(\d\.\d\d)$"
    rows = re.findall(pattern, result.stdout, re.M)
    assert [(row[0], row[1], row[4]) for row in rows] == [
        ("none", "1", "10.00"),
        *((kind, nodes, ms) for nodes in ("4", "12") for kind, ms in (("static", "9000.00"), ("per step", "7.50"))),
    ]
    fastest = max(rows, key=lambda row: float(row[5]))
    assert f"recommended: per step, {fastest[1]} nodes, depth {fastest[2]}\n" in result.stdout
    assert float(fastest[5]) == pytest.approx(float(fastest[3]) / 0.75, abs=0.01)
    following = re.search(r"next: treeopt (generate .*)$", result.stderr, re.M)
    assert following
    assert treeopt(*following[1].replace("'PROMPT'", "PROMPT").split()).stdout
    small = ("--limit", "4", "--max-new-tokens", "8", "--learn-tokens", "60", "--nodes", "4")
    quiet = treeopt("learn", *MODEL, "--prompts", "pocket", *small, "-q", "--force")
    assert "wrote" not in quiet.stderr
    assert "learning" not in quiet.stderr
    assert re.search(r"^recommended: ", quiet.stdout, re.M)


@pytest.mark.slow
def test_warnings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Figures from too few texts are warned of; where no tree is faster than one node, none is recommended."""
    plant(monkeypatch, 9.0, 9.0)
    line = ("learn", *MODEL, "--prompts", "pocket", "--max-new-tokens", "12", *LITTLE, "-o", tmp_path / "d.safetensors")
    assert "recommended: none: no tree is faster" in (few := treeopt(*line, "--limit", "4")).stdout
    assert "tokens/step of 4 different texts are unreliable" in few.stderr
    plant(monkeypatch, 0.001, 0.001)
    data = treeopt_json(*line, "--limit", "6", "--force")
    assert data["recommended"]["kind"] != "none"
    assert not any("different texts" in one for one in data["warnings"])


@pytest.mark.slow
def test_several_dtypes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """--dtype A,B: learned in the first, timed in both; generate takes the faster one, and warns in the other."""

    def seconds(step: TimedStep) -> float:
        nodes = step.decoder.trees.nodes
        return (0.02 if step.decoder.base.dtype_name == "float32" else 0.01) * (1 + 9 * (nodes > 4))

    monkeypatch.setattr(TimedStep, "seconds", seconds)
    file = tmp_path / "d.safetensors"
    result = treeopt("learn", *MODEL, *FEW, *LITTLE, "--dtype", "float32,bfloat16", "-o", file)
    assert re.search(r"^fastest without a drafter: bfloat16, 100.0 tokens/s$", result.stdout, re.M)
    assert re.search(r"^recommended: .*4 nodes.*, in bfloat16$", result.stdout, re.M)
    assert load_drafter(file).timed_dtype == "bfloat16"
    line = ("generate", "import os", *MODEL, "--max-new-tokens", "4", "--drafter", file)
    found = treeopt_json(*line)
    assert found["made_by"]["dtype"] == "bfloat16"
    assert not any("fastest in" in one for one in found.get("warnings", ()))
    found = treeopt_json(*line, "--dtype", "float32")
    assert found["made_by"]["dtype"] == "float32"
    assert any("the drafter's tree is the fastest in bfloat16" in one for one in found["warnings"])
    divided = ("--dtype", "float32,bfloat16", "--device-map", "auto")
    assert "--device-map takes one --dtype" in treeopt("learn", *MODEL, *FEW, *divided, status=2).stderr
    for wrong in ("float32,float32", "float32,auto", "float64", ""):
        assert "auto, or one or several of" in treeopt("learn", *MODEL, "--dtype", wrong, status=2).stderr


def test_nothing_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tree, drafter and heads: per-step trees of 16 nodes, said so, lossless, in the predicted steps."""

    def load(*_names: Any, **_options: Any) -> NoReturn:
        raise AssertionError("heads were loaded")

    monkeypatch.setattr(pair_module, "load_heads", load)
    line = ("generate", "import os", "--max-new-tokens", "24")
    assert "nothing was learned" in treeopt(*line).stderr
    found = treeopt_json(*line)
    assert (found["tokens"], found["nodes"]) == (stock("import os"), 16)
    data = treeopt_json("validate", *OTHERS)
    assert data["lossless"]
    assert data["tokens_per_step"] == data["predicted_tokens_per_step"] > 1


USAGE = {
    "0 is not in the range 2<=x<=254": ("learn", *MODEL, *FEW, "--nodes", "0"),
    "128 is not in the range 1<=x<=127": ("learn", *MODEL, *FEW, "--levels", "128"),
    "255 is not in the range 2<=x<=254": ("learn", *MODEL, *FEW, "--nodes", "8", "--nodes", "255"),
    "--heads needs --tree, or --drafter": ("generate", "x", *HEADS),
    "or --drafter with the tree that it recommends": ("validate", *HEADS, *OTHERS),
}
WRONG = {
    "recommends no tree": ("generate", "x", *HEADS, "--drafter", "none.safetensors"),
    "treeopt learn stores one; calibrate does not": ("validate", *HEADS, *OTHERS, "--drafter", "none.safetensors"),
    "drafts with heads, and only --model is given": ("generate", "x", *MODEL, "--drafter", "heads-dynamic.safetensors"),
    "drafts without heads, and --heads is given": ("generate", "x", *HEADS, "--drafter", "ngram-static.safetensors"),
    "there is no drafter nowhere": ("generate", "x", *MODEL, "--drafter", "nowhere"),
    "ngram-static.safetensors exists": ("learn", *MODEL, *FEW, "-o", "ngram-static.safetensors"),
}


@pytest.mark.usefixtures("unloaded")
@looped("text", USAGE)
def test_usage_errors(text: str) -> None:
    """A usage error before any model is loaded."""
    assert text in " ".join(treeopt(*USAGE[text], status=2).stderr.split())


@pytest.mark.usefixtures("unloaded")
@looped("text", WRONG)
def test_files_that_do_not_fit(text: str) -> None:
    """E223, E201 or E202 before any model is loaded."""
    refused = treeopt(*WRONG[text], status=3)
    assert error_number(refused) == ("E201" if "no drafter" in text else "E202" if "exists" in text else "E223")
    assert text in refused.stderr
    assert json.loads(treeopt(*WRONG[text], "--json", status=3).stderr)["error"] == error_number(refused)


@pytest.mark.slow
def test_interrupted_while_timing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-C after all else is learned leaves the work folder alone, and says how to continue."""

    def seconds(_step: TimedStep) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(TimedStep, "seconds", seconds)
    monkeypatch.chdir(tmp_path)
    said = treeopt("learn", *MODEL, *FEW, *LITTLE, status=1).stderr  # click's runner ends so; the program exits 130
    assert "interrupted; the same command with --resume continues" in said
    assert [path.name for path in tmp_path.iterdir()] == ["drafter.safetensors.partial"]
