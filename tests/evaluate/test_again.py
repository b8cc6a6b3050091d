"""What counts as measured in seconds, and the tolerance of numbers in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from treeopt.evaluate.again import compare_files


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def kinds(old: object, new: object, command: str) -> dict[str, str]:
    """The kinds of the differences of two results, by their place."""
    for name, data in (("old.json", old), ("new.json", new)):
        Path(name).write_text(json.dumps(data))
    return {one.place: one.kind for one in compare_files(Path("old.json"), Path("new.json"), command).differences}


def learned(figure: float) -> dict[str, object]:
    """A result of learn, with this as each of its figures."""
    size = {"tokens_per_step": figure, "seconds": figure, "speedup": figure}
    chain = {"tokens_per_step": figure, "speedup": figure, "replayed_tokens_per_step": figure}
    chains = {"alpha": figure, "cost_ratio": figure, "best_drafts": figure, "best_replayed_drafts": figure}
    chains |= {"alpha_sampled": figure}
    inner = [{**chain, "replayed_speedup": figure}]
    return {"sizes": [size], "recommended": size, "chains": {**chains, "chains": inner}}


def test_only_what_learn_times_is_seconds() -> None:
    """Tokens per step and acceptance rates of learn are results, and what follows from seconds is not."""
    found = kinds(learned(1.5), learned(2.5), "learn")
    results = {place for place, kind in found.items() if kind == "result"}
    inner = "chains.chains.0"
    assert results == {
        *("sizes.0.tokens_per_step", "chains.alpha", "chains.alpha_sampled"),
        *(f"{inner}.tokens_per_step", f"{inner}.replayed_tokens_per_step"),
    }
    assert set(found.values()) == {"result", "seconds"}
    assert len(found) == 15


def test_sizes_that_compare_times_are_seconds() -> None:
    """The row of a drafter's fastest size, and the method that is recommended, follow from the clock; others do not."""

    def result(fastest: str, figure: float) -> dict[str, object]:
        rows = [{"method": "ngram, static", "nodes": 16}, {"method": fastest, "nodes": figure}]
        return {"rows": rows, "recommended": fastest}

    old, new = result("ngram, static, fastest size", 4), result("ngram, per step, fastest size", 8)
    found = kinds(old, new, "compare")
    assert found == dict.fromkeys(("rows.1.method", "rows.1.nodes", "recommended"), "seconds")
    new["rows"][0]["nodes"] = 17  # type: ignore[index]
    assert kinds(old, new, "compare")["rows.0.nodes"] == "result"


@pytest.mark.parametrize(
    ("suffix", "number", "verdict"),
    [("csv", "1.000001", "within"), ("csv", "1.001", "differs"), ("svg", "1.000001", "differs")],
)
def test_cells_of_csv_are_numbers(suffix: str, number: str, verdict: str) -> None:
    """Another environment rounds the cells of CSV; lines of pictures have no tolerance, and none is stated."""
    old, new = Path(f"old.{suffix}"), Path(f"new.{suffix}")
    old.write_text("device,tokens_per_step\ncpu,1\n" if suffix == "csv" else OLD)
    new.write_text(
        f"device,tokens_per_step\ncuda,{number}\n" if suffix == "csv" else OLD.replace("<a>1", f"<a>{number}")
    )
    if suffix == "svg":
        new.write_text(new.read_text().replace('"torch": "1"', '"torch": "2"'))
    found = compare_files(old, new, "curve")
    assert found.of("environment")
    assert (found.verdict, bool(found.rule)) == (verdict, suffix == "csv")


OLD = """<svg>
<a>1</a>
<!-- treeopt configuration: {"curve": {}, "made-by": {"torch": "1"}} -->
</svg>
"""
