"""The scripts of examples/ run on the built-in model and print what they promise."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

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


def test_tour_ends_with_the_stock_text(example: Example) -> None:
    """The tour's tree decodes the text of its calibration, and larger trees take fewer steps."""
    printed = example("tour.py")
    assert "the text of the calibration, which stock generate wrote: True" in printed
    taus = [float(tau) for tau in re.findall(r"nodes: ([\d.]+) tokens per step", printed)]
    assert taus == sorted(taus)
    assert len(taus) == 6
