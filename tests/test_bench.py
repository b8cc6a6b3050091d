"""Each bench script runs, at a size of a second or two, with the command line of its documentation."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import random_calibration

from treeopt.calibrate.pipeline import run_calibration
from treeopt.files.calibrations import save_calibration
from treeopt.models.base import Base
from treeopt.models.head_files import LoadedHeads
from treeopt.texts.prompts import load_prompts

pytestmark = pytest.mark.bench  # minutes; make test-bench runs them

BENCH = Path(__file__).resolve().parent.parent / "bench"
# Script -> its command lines. {shared} is the folder of shared data, {file} a calibration, {folder} a new folder.
EXACT = (
    "--heads {shared}/models/tinystories-260k-medusa --prompts {shared}/data/story_openings.json --calibration {file}"
)
TABLE = "table --model tinystories --shared {shared} --decode"
CALLS = {
    "ablations": [
        *(f"{what} --calibration {{file}} -o {{file}}.svg" for what in ("dense", "levels", "sizes", "prompts")),
        "epsilon",
    ],
    "build": [""],
    "calibrate": ["--repeats 1"],
    "counters": ["--shared {shared}", "{file}"],
    "calls": ["--shared {shared}"],
    "ddtree": [""],
    "decode": ["--shared {shared}"],
    "doctor": ["--only heads", "--only eagle"],
    "drafting": [TABLE, "terms --shared {shared}", "speed --model pocket --shared {shared}", "cost"],
    "drafting_kernel": [""],
    "dynamic_trees": [""],
    "engine_configs": [""],
    "equality": ["--only heads --shared {shared} -o {file}"],
    "exact": [EXACT],
    "faults": ["writes --only compile", "stdout --only compile", "sizes --only compile"],
    "families": [""],
    "figures": ["tools -o {folder}"],
    "forward": ["--shared {shared}"],
    "hardware": ["paper", "fit --shared {shared}"],
    "fuzz": [""],
    "help": [""],
    "hostile": [""],
    "hybrid": [""],
    "intervals": [""],
    "learn": [""],
    "learned_text": ["pocket --heads pocket --shared {shared}"],
    "llama": ["pocket --shared {shared}"],
    "llama_lengths": ["--shared {shared}"],
    "lossless": ["", "--case 7", "--families paths --case 7", "--set drafter=eagle"],
    "make_hybrid": [],  # tests/test_making.py, as the next three
    "make_pocket": [],
    "make_module": [],
    "make_pocket_draft": [],
    "modules": [
        "--model pocket --shared {shared}",
        "--model tinystories --shared {shared}",
        "--model pocket --draft tests/data/pocket-dspark --alone --no-confidence --shared {shared}",
    ],
    "make_tinystories": [],
    "medusa2": ["--model pocket", "--shared {shared}"],
    "memory": ["stages", "stages --drafter heads+ngram --temperature 0.7", "vocabulary"],
    "mutation": ["--folder {folder}"],
    "optimiser": ["table --calibration {file}", "coverage --calibration {file}", "speed --calibration {file}"],
    "path_trees": ["{file}"],
    "pocket": [""],
    "recommended": ["--shared {shared} --model smollm2 tinystories"],
    "sampling": ["agree --shared {shared}", "loss --model pocket --shared {shared}", "paths"],
    "schemas": ["-o {file}"],
    "speed": ["tinystories --shared {shared}", "heads"],
    "step": ["pocket"],
    "streams": ["--model pocket --decode --shared {shared}", "--model tinystories --drafters ngram --shared {shared}"],
    "fusion": ["--model pocket --drafters heads --shared {shared}"],
    "verdict": [
        "--shared {shared} --model pocket smollm2",
        "--model pocket --dtype float32 --draft tests/data/pocket-dflash --batch 1",
    ],
    "walks": [""],
    "typical": ["--model pocket", "--model tinystories --kind dynamic --shared {shared}"],
}
PARTS = {
    "module_losses",
    "corpus",
    "timing",
    "drafting_halves",
    "drafting_cost",
    "drafting_terms",
    "hostile_damage",
    "hostile_runs",
    "known_texts",
    "lossless_cases",
    "lossless_drafters",
    "lossless_run",
    "lossless_shrink",
    "lossless_stock",
    "tiny_families",
    "mutation_child",
    "sampled_paths",
    "mutation_sites",
    "mutation_trees",
}  # modules that the scripts import


Bench = Callable[[str, str], str]


@pytest.fixture
def bench(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Bench]:
    """Run a script in this process, as `python bench/NAME.py ... --tiny`; the fixture's function returns its output."""
    known = set(sys.modules)

    def run(name: str, line: str) -> str:
        shared = request.getfixturevalue("shared") if "{shared}" in line else None
        given = line.format(shared=shared, file=tmp_path / "c.safetensors", folder=tmp_path / "work").split()
        monkeypatch.setattr(sys, "argv", [f"bench/{name}.py", *given, "--tiny"])
        runpy.run_path(str(BENCH / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    monkeypatch.syspath_prepend(str(BENCH))
    yield run
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]


def plain_calls() -> list[tuple[str, str]]:
    """Every script with each of its command lines, except those with a separate test."""
    return [(name, line) for name, lines in CALLS.items() for line in lines if line not in (EXACT, TABLE)]


@pytest.mark.parametrize(("name", "line"), plain_calls())
def test_bench_runs(bench: Bench, name: str, line: str, tmp_path: Path) -> None:
    """The script names the machine and prints figures, none of which is nan."""
    if name == "fuzz":
        pytest.importorskip("atheris", reason="fuzzing needs the package atheris")
    if "{file}" in line:
        save_calibration(random_calibration(1, sequences=120, length=12), tmp_path / "c.safetensors")
    printed = bench(name, line)
    assert "core" in printed.splitlines()[0]
    assert len(printed.splitlines()) > 1
    assert "nan" not in printed


def test_exact_is_exact(bench: Bench, base: Base, loaded: LoadedHeads, shared: Path, tmp_path: Path) -> None:
    """The bench of exactness finds every tree lossless and as predicted."""
    prompts = load_prompts(str(shared / "data" / "story_openings.json"), limit=8)
    found = run_calibration(base, loaded, prompts, max_new_tokens=40).calibration
    save_calibration(found, tmp_path / "c.safetensors")
    lines = bench("exact", EXACT).splitlines()
    assert len(lines) == 6
    assert all("lossless 2/2  steps as predicted 2/2" in line for line in lines[1:])


def test_steps_of_a_gpu_are_over_one_node(bench: Bench) -> None:
    """Each line has a step's milliseconds and their ratio to those of one node at the same batch."""
    points = re.findall(r"batch (\d+), (\d+) nodes: ([\d.]+) ms, ([\d.]+) of one node", bench("hardware", "gpu"))
    alone = {batch: float(milliseconds) for batch, nodes, milliseconds, _ in points if nodes == "1"}
    assert [(batch, nodes) for batch, nodes, _, _ in points] == [(b, n) for b in ("1", "4", "16") for n in ("1", "4")]
    for batch, _, milliseconds, ratio in points:
        assert float(ratio) == pytest.approx(float(milliseconds) / alone[batch], rel=0.03)


@pytest.mark.quick
def test_every_script_is_run() -> None:
    """Every script of bench/ is run here; every other module there is imported by one."""
    found = {path.stem: "__main__" in path.read_text() for path in BENCH.glob("*.py")}
    elsewhere = {"smollm2", "house"}  # run by make test-chat-model and make counts
    assert {name for name, runs in found.items() if runs} == {*CALLS, *elsewhere}
    assert {name for name, runs in found.items() if not runs} == PARTS
    used = {
        node.module
        for path in BENCH.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
    }
    assert used >= PARTS


def test_steps_of_an_engine_are_counted_and_priced(request: pytest.FixtureRequest) -> None:
    """Accepted drafts follow from the tokens between drafts, the last is cut; seconds are those of a step's tokens."""
    request.getfixturevalue("bench")
    script: Any = importlib.import_module("llama_lengths")
    steps = script.Steps()
    for text in ([(10, 4), (13, 0), (14, 4)], [(5, 2), (8, 2)]):  # tokens of the text, drafts made after them
        steps.begin()
        for tokens, drafts in text:
            steps.count(tokens, drafts)
    steps.begin()
    assert (steps.proposed, steps.accepted) == ([4, 0, 2], [2, 0, 2])
    assert steps.tokens_per_step == 1 + 4 / 3

    def run(_ids: Any, new: int, drafts: int, counts: Any = None) -> tuple[int, float]:
        if counts is not None and drafts:  # the first run warms and is not counted
            counts.accepted.append(1)
        return new, float(new * (1 + drafts) if counts is not None else 1e9)

    counted, seconds = script.run_all(SimpleNamespace(run=run), [[1], [2]], 5)
    assert [len(counted[drafts].accepted) for drafts in (0, 1, 10)] == [0, 2, 2]
    assert [seconds[drafts] for drafts in (0, 1, 2)] == [1, 4, 6]  # seconds of a token times tokens per step


def test_medusa2_keeps_the_texts_of_models_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Runs of two models with one --folder read the answers of their model, which are made once."""
    request.getfixturevalue("bench")  # finds the script, and forgets it afterwards
    script: Any = importlib.import_module("medusa2")
    made, read = [], []

    def distill(base: Any, _seeds: Any, file: Path, **_options: Any) -> None:
        made.append(base.name)
        file.write_text(base.name)

    def setting_of(options: Any, folder: Path) -> None:
        base = SimpleNamespace(name=options.model, context=8)
        read.append((options.model, script.made_texts(base, options, folder)))

    fakes = {"distill": distill, "setting_of": setting_of}
    fakes["load_texts"] = lambda _base, files, **_options: Path(files[0]).read_text()
    for name in ("load_prompts", "write_openings", "documents", "table"):
        fakes[name] = lambda *_given, **_options: None
    for name, fake in fakes.items():
        monkeypatch.setattr(script, name, fake)
    for model in ("tinystories", "pocket", "tinystories"):
        monkeypatch.setattr(sys, "argv", ["bench/medusa2.py", "--model", model, "--folder", str(tmp_path / "runs")])
        script.main()
    assert read == [("tinystories", "tinystories"), ("pocket", "pocket"), ("tinystories", "tinystories")]
    assert made == ["tinystories", "pocket"]


def test_drafting_decodes_what_it_predicts(bench: Bench) -> None:
    """The trees that bench/drafting.py decodes are lossless and take the predicted steps."""
    lines = [line for line in bench("drafting", TABLE).splitlines() if "lossless" in line]
    assert len(lines) == 4
    for line in lines:
        texts, measured, predicted = line.split(": lossless ")[1].split(", ")
        assert len(set(texts.split("/"))) == 1
        assert measured.split()[1] == predicted.split()[1]
