"""The scripts and the notebook of examples/ run on the built-in model and print what they promise."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT_FOLDER

Example = Callable[..., str]


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Example:
    """Run a script as a program, in an empty folder that must stay empty; the fixture's function returns its output."""

    def run(name: str, *arguments: str) -> str:
        script = ROOT_FOLDER / "examples" / name
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        runpy.run_path(str(script), run_name="__main__")
        assert list(tmp_path.iterdir()) == []
        return capsys.readouterr().out

    return run


def test_every_example_has_a_test() -> None:
    """A script without a test of its own fails here."""
    tested = re.findall(r'example\("(\w+\.py)"', Path(__file__).read_text())
    assert sorted({path.name for path in (ROOT_FOLDER / "examples").glob("*.py")}) == sorted(tested)


def test_generate_gives_the_stock_text_in_fewer_steps(example: Example) -> None:
    """The steps sum to the tokens, and the text is that of stock `generate`."""
    printed = example("generate.py", "--max-new-tokens", "24")
    assert "equal to stock generate: True" in printed
    (steps,) = re.findall(r"^tokens of each step: ([\d ]+)$", printed, flags=re.MULTILINE)
    lengths = [int(step) for step in steps.split()]
    assert sum(lengths) == 24
    assert f"24 tokens in {len(lengths)} steps: {24 / len(lengths):.3f}" in printed


def test_build_and_replay_predicts_what_it_measures(example: Example) -> None:
    """Predicted and measured tokens per step are equal for every tree, and larger trees expect more."""
    printed = example("build_and_replay.py", "--limit", "9", "--max-new-tokens", "24")
    rows = re.findall(r"([\d.]+) +([\d.]+) +([\d.]+)$", printed, flags=re.MULTILINE)
    assert len(rows) == 3
    assert all(predicted == measured for _, predicted, measured in rows)
    assert float(rows[0][0]) < float(rows[1][0])


def test_chat_has_one_text_with_any_drafter(example: Example) -> None:
    """The conversation is the same with nothing learned and with the learned drafter."""
    printed = example("no_heads_chat.py", "--learn-tokens", "100", "--max-new-tokens", "12")
    untrained, learned = re.split(r"--- nothing learned ---|--- learned ---", printed)[1:]
    texts = [re.sub(r"\[[\d.]+ tokens per step\]", "", part).strip() for part in (untrained, learned)]
    assert texts[0] == texts[1]
    assert texts[0].count("model:") == 2
    assert len(re.findall(r"\[[\d.]+ tokens per step\]", printed)) == 4


NOTEBOOK = ROOT_FOLDER / "examples" / "treeopt.ipynb"
SVG = "image/svg+xml"


def outputs(notebook: Any) -> list[tuple[str, list[str]]]:
    """The printed text of each code cell, and its pictures."""
    shown = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [
        (
            "".join("".join(one["text"]) for one in cell if one.get("name") == "stdout"),
            ["".join(one["data"][SVG]) for one in cell if SVG in one.get("data", {})],
        )
        for cell in shown
    ]


def check_promises(cells: list[tuple[str, list[str]]]) -> None:
    """Decoding gives the stock text in the predicted steps, larger trees take fewer, and one picture has a path."""
    printed = [text for text, _ in cells]
    taus = [float(tau) for tau in re.findall(r"nodes: ([\d.]+) tokens per step", printed[3])]
    assert len(taus) == 6
    assert taus == sorted(taus)
    assert "the text of stock generate: True" in printed[6]
    steps = re.findall(r"(\d+) steps predicted, (\d+) measured", printed[7])
    assert len(steps) == 6
    assert all(predicted == measured for predicted, measured in steps)
    assert printed[8].count(": 4/4") == 4
    assert [len(pictures) for _, pictures in cells] == [0, 0, 0, 0, 1, 0, 1, 0, 0, 0]
    assert all("</svg>" in picture for _, pictures in cells for picture in pictures)


def test_notebook_shows_what_it_promises() -> None:
    """The stored outputs are those of a whole run from the top, small, without warnings and without a path."""
    notebook = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, 11))
    assert {one["output_type"] for cell in code for one in cell["outputs"]} == {"stream", "execute_result"}
    assert {one.get("name", "stdout") for cell in code for one in cell["outputs"]} == {"stdout"}
    check_promises(outputs(notebook))
    assert NOTEBOOK.stat().st_size < 50_000
    assert not re.search(r"/(tmp|home|root|work)/", NOTEBOOK.read_text())
    first = "".join(notebook["cells"][0]["source"])
    assert first.splitlines()[2].startswith("This takes about a minute")


def test_links_of_the_notebook_lead_somewhere() -> None:
    """Its links are files of this repository."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    text = " ".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)\)", " ".join(text.split()))
    assert len(links) == 3
    assert [link for link in links if not (NOTEBOOK.parent / link).is_file()] == []


@pytest.mark.slow
def test_notebook_runs_in_jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel executes all cells in an empty folder, which stays empty, and shows what the stored outputs promise."""
    nbclient, nbformat = (pytest.importorskip(name, reason="needs Jupyter") for name in ("nbclient", "nbformat"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT_FOLDER), prepend=os.pathsep)
    notebook = nbformat.read(NOTEBOOK, 4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    check_promises(outputs(notebook))
    assert list(tmp_path.iterdir()) == []
