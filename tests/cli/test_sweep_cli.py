"""`treeopt sweep` as a user meets it: tables, pictures, CSV beside JSON, and one clear error for what is wrong."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from naive_steps import uneven
from per_step_traces import traced
from program import error_number, treeopt, treeopt_json

from treeopt.calibration import Calibration
from treeopt.decode.rules import Typical
from treeopt.evaluate.validate import validate
from treeopt.files.calibrations import save_calibration
from treeopt.files.profiles import save_profile
from treeopt.files.trees import save_tree
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.sweep_dense import sweep_dense
from treeopt.optimize.sweep_levels import sweep_levels
from treeopt.optimize.sweep_sizes import sweep_sizes
from treeopt.optimize.sweep_texts import sweep_texts
from treeopt.tree import Tree

DENSE = ("sweep", "--dense", "--nodes", "8", "--largest", "14", "--trees", "12")
LEVELS = ("sweep", "--levels", "--nodes", "5,12")
SIZES = ("sweep", "--sizes", "--nodes", "4,9")
TEXTS = ("sweep", "--calibration-size", "--nodes", "8", "--draws", "2")
TRACED = {"dense": DENSE, "levels": LEVELS, "sizes": SIZES, "calibration-size": TEXTS}
EPSILON = (
    *("sweep", "--epsilon", "--heads", "pocket", "--tree", "t.yaml", "--limit", "2", "--max-new-tokens", "8"),
    *("--epsilons", "0.2,0.05"),
)


@pytest.fixture
def traces() -> Calibration:
    """Thirty different texts under the default name."""
    made = uneven(1, 30)
    save_calibration(made, "calibration.safetensors")
    return made


def csv_lines(name: str = "sweep.csv") -> list[dict[str, str]]:
    """The lines of a CSV by column."""
    with Path(name).open(newline="") as stream:
        return list(csv.DictReader(stream))


def rows_of(text: str) -> list[list[str]]:
    """The cells of the table."""
    return [line.split("\t") for line in text.splitlines() if "\t" in line]


@pytest.mark.usefixtures("traces")
@pytest.mark.parametrize("line", TRACED.values(), ids=TRACED)
def test_csv_holds_the_json(line: tuple[str, ...]) -> None:
    """Every point of the JSON is a line of the CSV with the same numbers; null is an empty cell; the SVG is one."""
    data = treeopt_json(*line, "-o", "s.svg")
    assert (data["sweep"], data["output"], data["csv"]) == (line[1].removeprefix("--"), "s.svg", "s.csv")
    lines = csv_lines("s.csv")
    assert len(lines) == len(data["points"]) >= 2
    for cells, point in zip(lines, data["points"], strict=True):
        for name, value in point.items():
            assert cells[name] == ("" if value is None else str(value)), name
        assert {cells[name] for name in cells.keys() - point.keys()} <= {""}
    assert ElementTree.parse("s.svg").getroot().tag.endswith("svg")


@pytest.mark.usefixtures("traces")
@pytest.mark.parametrize("line", TRACED.values(), ids=TRACED)
def test_same_command_gives_equal_bytes(line: tuple[str, ...]) -> None:
    """Twice the same seed: the same SVG and CSV; the second run needs --force for the CSV alone."""
    treeopt(*line)
    first = Path("sweep.svg").read_bytes(), Path("sweep.csv").read_bytes()
    refused = treeopt(*line, status=3)
    assert error_number(refused) == "E202"
    assert "sweep.csv exists" in refused.stderr
    assert (Path("sweep.svg").read_bytes(), Path("sweep.csv").read_bytes()) == first
    treeopt(*line, "--force")
    assert (Path("sweep.svg").read_bytes(), Path("sweep.csv").read_bytes()) == first
    treeopt(*line, "--csv", "other.csv")
    assert Path("other.csv").read_bytes() == first[1]


def test_dense_prints_what_the_library_finds(traces: Calibration) -> None:
    """The table has the best dense tree of each size beside the sparse ones, and the verdict its numbers."""
    found = sweep_dense(traces, sizes=(8,), trees=12, largest=14, seed=3)
    text = treeopt(*DENSE, "--seed", "3").stdout
    data = treeopt_json(*DENSE, "--seed", "3", "--force")
    header, *rows = rows_of(text)
    assert header[:4] == ["nodes", "best dense tree of at most as many", "widths", "Medusa tree"]
    of_twelve = [point.tokens_per_step for point in found.dense if point.nodes <= 12]
    assert {row[0]: row[1] for row in rows}["12"] == (f"{max(of_twelve):.3f}" if of_twelve else "-")
    dense = [point for point in data["points"] if point["trees"] == "dense"]
    assert [point["widths"] for point in dense] == ["x".join(map(str, one.widths)) for one in found.dense]
    assert [point["tokens_per_step"] for point in dense] == [one.tokens_per_step for one in found.dense]
    for verdict, shown in zip(found.verdicts, data["verdicts"], strict=True):
        assert (shown["beaten"], shown["trees"], shown["beats_all"]) == (verdict.beaten, 12, verdict.beats_all)
        said = "beats every one of" if verdict.beats_all else f"beats {verdict.beaten} and not all of"
        assert f"{said} 12 dense trees (random ones of the {found.possible:,} of at most 14 nodes)" in text
    assert data["possible"] == found.possible


@pytest.mark.usefixtures("traces")
def test_dense_with_a_profile_has_speedups() -> None:
    """A profile adds the second panel, the figures in the CSV, and cuts the sizes to those that it holds."""
    points = [LatencyPoint(n, 1, 512, s, s, s) for n, s in ((1, 0.1), (12, 0.21))]
    save_profile(LatencyProfile.from_points(points), "p.yaml")
    line = ("sweep", "--dense", "--nodes", "8", "--trees", "12", "--profile", "p.yaml")
    data = treeopt_json(*line)
    assert data["largest"] == max(point["nodes"] for point in data["points"]) == 12
    for point in data["points"]:
        assert point["overhead"] == pytest.approx((0.1 + 0.01 * (point["nodes"] - 1)) / 0.1)
        assert point["speedup"] == pytest.approx(point["tokens_per_step"] / point["overhead"])
    assert "speedup over autoregressive" in Path("sweep.svg").read_text()
    text = treeopt(*line, "--force").stdout
    assert "fastest by the profile: sparse " in text
    assert "(speedup " in rows_of(text)[1][3]


def test_levels_say_how_many_are_needed(traces: Calibration) -> None:
    """One line a size names the fewest levels within 1 %."""
    found = sweep_levels(traces, sizes=(5, 12))
    text = treeopt(*LEVELS).stdout
    assert [row[:3] for row in rows_of(text)[1:]] == [[str(p.nodes), str(p.levels), str(p.used)] for p in found.points]
    for nodes in (5, 12):
        assert f"{nodes} nodes: {found.enough(nodes)} of 3 levels are needed to lose less than 1 %" in text
    data = treeopt_json(*LEVELS, "--force")
    assert data["enough"] == {"5": found.enough(5), "12": found.enough(12)}
    assert [point["share"] for point in data["points"]] == [point.share for point in found.points]


def test_sizes_of_two_drafters_are_on_common_texts() -> None:
    """Two calibrations of the same texts: per-step trees where traced, and ratios to the Medusa tree of heads alone."""
    drafter = traced(2, sequences=14)
    drafter = dataclasses.replace(drafter, token_hashes=tuple(f"t{s}" for s in range(14)))
    heads = dataclasses.replace(uneven(2, 14), prompt_ids=drafter.prompt_ids)
    save_calibration(drafter, "ngram.safetensors")
    save_calibration(heads, "heads.safetensors")
    names = ("ngram.safetensors", "heads.safetensors")
    line = (*SIZES, *(part for name in names for part in ("--calibration", name)))
    data = treeopt_json(*line)
    found = sweep_sizes({"ngram.safetensors": drafter, "heads.safetensors": heads}, sizes=(4, 9))
    assert (data["medusa"], data["texts_distinct"], data["left_out"]) == ("heads.safetensors", 14, 0)
    assert [point["ratio"] for point in data["points"]] == [point.ratio for point in found.points]
    text = treeopt(*line, "--force").stdout
    names = [row[1] for row in rows_of(text)[1:] if row[0] == "4"]
    assert names[-2:] == ["Medusa tree, heads", "best static tree, heads"]
    assert "per-step trees, ngram" in names
    Path("a").mkdir()
    save_calibration(heads, "a/ngram.safetensors")
    same = treeopt(
        *SIZES, "--calibration", "ngram.safetensors", "--calibration", "a/ngram.safetensors", "--force"
    ).stdout
    assert {"independent tree, ngram.safetensors", "Medusa tree, a/ngram.safetensors"} <= {r[1] for r in rows_of(same)}
    alone = treeopt(*SIZES, "--calibration", "ngram.safetensors", "--force").stdout
    assert "no calibration is of heads alone" in alone


def test_calibration_size_says_how_many_prompts(traces: Calibration) -> None:
    """The line names the prompts from which on the interval ends below 1 %, or that there are none."""
    found = sweep_texts(traces, nodes=8, draws=2, seed=5)
    text = treeopt(*TEXTS, "--seed", "5").stdout
    data = treeopt_json(*TEXTS, "--seed", "5", "--force")
    assert [point["lost"] for point in data["points"]] == [point.lost for point in found.points]
    assert [(point["lost_low"], point["lost_high"]) for point in data["points"]] == [
        (point.interval.low, point.interval.high) for point in found.points if point.interval
    ]
    for method, count in data["enough"].items():
        best = found.enough(method)
        assert count == (None if best is None else best.texts)
        said = "prompts may lose 1 % or more" if best is None else f"{best.texts} prompts lose less than 1 %"
        assert said in text


def test_epsilon_is_validate_of_each() -> None:
    """Every line is a validation with that epsilon and its square root; greedy and sampled texts come first."""
    tree = Tree.from_paths([(0,), (1,), (0, 0)])
    save_tree(tree, "t.yaml")
    data = treeopt_json(*EPSILON)
    assert [(point["texts"], point["epsilon"]) for point in data["points"]] == [
        ("greedy", None),
        ("sampled", None),
        ("typical", 0.05),
        ("typical", 0.2),
    ]
    from treeopt.texts.prompts import load_prompts

    prompts = load_prompts("pocket", limit=2)
    for point in data["points"][2:]:
        rule = Typical(0.7, point["epsilon"], point["epsilon"] ** 0.5)
        alone = validate("pocket", "pocket", tree, prompts, acceptance=rule, max_new_tokens=8)
        assert point["delta"] == rule.delta
        assert point["tokens_per_step"] == alone.tokens_per_step
        assert point["log_likelihood"] == alone.quality["tree"].log_likelihood
        assert [point[f"distinct_{n}"] for n in (1, 2, 3)] == list(alone.quality["tree"].distinct)
        assert point["agreement_with_greedy"] == alone.quality["tree"].agreement
    assert [line["tokens_per_step"] for line in csv_lines()] == [str(p["tokens_per_step"]) for p in data["points"]]
    text = treeopt(*EPSILON, "--force").stdout
    assert "LOSSY" in text
    assert [row[0] for row in rows_of(text)[1:]] == [
        "greedy",
        "sampled",
        *(f"typical, epsilon {e}" for e in (0.05, 0.2)),
    ]


@pytest.mark.usefixtures("traces")
def test_interrupted_sweep_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the second epsilon: no file, and a line that says so."""
    save_tree(Tree.from_paths([(0,)]), "t.yaml")
    from treeopt.evaluate import sweep_epsilon as module

    real, calls = module.judge_typical, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(module, "judge_typical", interrupted)
    before = sorted(path.name for path in Path().iterdir())
    result = treeopt(*EPSILON, status=1)  # the program itself exits with 130
    assert "interrupted; sweep.svg is not written" in result.stderr
    assert sorted(path.name for path in Path().iterdir()) == before


def _profile(**provenance: str) -> None:
    """A profile of 1 to 256 nodes."""
    points = [LatencyPoint(n, 1, 512, 0.1, 0.1, 0.1) for n in (1, 256)]
    save_profile(LatencyProfile.from_points(points, provenance or None), "p.yaml")


ERRORS: dict[str, tuple[tuple[str, ...], str]] = {
    "no calibration": ((*LEVELS, "--calibration", "none.safetensors"), "E201"),
    "no file of traces": ((*DENSE, "--calibration", "t.yaml"), "E203"),
    "one text, dense": ((*DENSE, "--calibration", "one.safetensors"), "E303"),
    "one text, levels": ((*LEVELS, "--calibration", "one.safetensors"), "E303"),
    "one text, sizes": ((*SIZES, "--calibration", "one.safetensors"), "E303"),
    "one text, calibration size": ((*TEXTS, "--calibration", "one.safetensors"), "E303"),
    "nine prompts": ((*TEXTS, "--calibration", "nine.safetensors"), "E303"),
    "sizes beyond the traces": (("sweep", "--sizes", "--nodes", "4,120000"), "E102"),
    "levels beyond the traces": (("sweep", "--levels", "--nodes", "4,120000"), "E102"),
    "dense beyond the traces": (("sweep", "--dense", "--nodes", "120000"), "E102"),
    "prompts beyond the traces": (("sweep", "--calibration-size", "--nodes", "120000"), "E102"),
    "profile of another drafter": ((*DENSE, "--profile", "p.yaml"), "E223"),
    "no profile": ((*DENSE, "--profile", "none.yaml"), "E201"),
    "batch of no profile": ((*DENSE, "--profile", "p.yaml", "--batch", "3"), "E230"),
    "other texts": ((*SIZES, "--calibration", "calibration.safetensors", "--calibration", "nine.safetensors"), "E221"),
    "picture of another format": ((*DENSE, "-o", "s.png"), "E204"),
    "table of another format": ((*DENSE, "--csv", "s.txt"), "E204"),
    "picture over the traces": ((*DENSE, "-o", "calibration.safetensors"), "E204"),
    "a folder": ((*DENSE, "-o", "."), "E204"),
    "no folder": ((*DENSE, "-o", "none/s.svg"), "E204"),
    "no tree": (("sweep", "--epsilon", "--tree", "none.yaml"), "E201"),
}


@pytest.mark.usefixtures("traces")
@pytest.mark.parametrize(("line", "number"), ERRORS.values(), ids=ERRORS)
def test_wrong_input_is_one_error_and_no_file(line: tuple[str, ...], number: str) -> None:
    """Exit status 3, one numbered error, and the folder as it was."""
    save_calibration(uneven(2, 1), "one.safetensors")
    nine = uneven(3, 9)
    save_calibration(dataclasses.replace(nine, token_hashes=tuple(f"n{s}" for s in range(9))), "nine.safetensors")
    save_tree(Tree.from_paths([(0,)]), "t.yaml")
    _profile(drafter="other")
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    assert error_number(treeopt(*line, "-q", status=3)) == number
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


USAGE = {
    "no sweep": (("sweep",), "give one of --dense, --levels"),
    "two sweeps": (("sweep", "--dense", "--levels"), "give one of --dense and --levels"),
    "trees of levels": ((*LEVELS, "--trees", "3"), "--trees belongs to --dense"),
    "draws of dense": ((*DENSE, "--draws", "3"), "--draws belongs to --calibration-size"),
    "seed of sizes": ((*SIZES, "--seed", "1"), "--seed belongs to --dense or --calibration-size"),
    "heads of dense": ((*DENSE, "--heads", "h"), "--heads belongs to --epsilon"),
    "temperature of levels": ((*LEVELS, "--temperature", "1"), "--temperature belongs to --epsilon"),
    "nodes of epsilon": ((*EPSILON, "--nodes", "3"), "--nodes belongs to"),
    "epsilons of dense": ((*DENSE, "--epsilons", "0.1"), "--epsilons belongs to --epsilon"),
    "two calibrations": ((*DENSE, "--calibration", "a", "--calibration", "b"), "only --sizes"),
    "two sizes": (("sweep", "--calibration-size", "--nodes", "4,8"), "one number of --nodes"),
    "one calibration twice": (
        (*SIZES, "--calibration", "a", "--calibration", "./a"),
        "--calibration ./a is given twice",
    ),
    "calibration of epsilon": ((*EPSILON, "--calibration", "a"), "--calibration belongs to --dense or --levels"),
    "batch without profile": ((*DENSE, "--batch", "2"), "choose from a --profile"),
    "no number": (("sweep", "--sizes", "--nodes", "4,x"), "whole numbers from 1"),
    "no node": (("sweep", "--sizes", "--nodes", "0"), "whole numbers from 1"),
    "far too many nodes": (("sweep", "--sizes", "--nodes", "999999999999"), "131,072 nodes at most"),
    "too large": (("sweep", "--dense", "--largest", "5000"), "--largest"),
    "epsilon 0": ((*EPSILON, "--epsilons", "0"), "above 0 and at most 1"),
    "epsilon above 1": ((*EPSILON, "--epsilons", "0.1,1.5"), "above 0 and at most 1"),
    "epsilon nan": ((*EPSILON, "--epsilons", "nan"), "above 0 and at most 1"),
    "epsilon in words": ((*EPSILON, "--epsilons", "small"), "above 0 and at most 1"),
    "temperature 0": ((*EPSILON, "--temperature", "0"), "--temperature 0"),
    "model without prompts": (("sweep", "--epsilon", "--model", "m"), "--prompts"),
}


@pytest.mark.usefixtures("traces", "unloaded")
@pytest.mark.parametrize(("line", "said"), USAGE.values(), ids=USAGE)
def test_wrong_options_are_usage_errors(line: tuple[str, ...], said: str) -> None:
    """Exit status 2, before any model is loaded, and no file."""
    result = treeopt(*line, status=2)
    assert said in " ".join(result.stderr.split())
    assert [path.name for path in Path().iterdir()] == ["calibration.safetensors"]


@pytest.mark.usefixtures("traces")
def test_foreign_files_are_never_replaced() -> None:
    """A picture or table of the user's, in the place of an output, is refused without --force and kept."""
    for name in ("sweep.svg", "sweep.csv"):
        Path(name).write_text("mine\n")
        assert error_number(treeopt(*LEVELS, "-q", status=3)) == "E202"
        assert Path(name).read_text() == "mine\n"
        Path(name).unlink()
    treeopt(*LEVELS, "-o", "a.svg")
    assert error_number(treeopt(*LEVELS, "-o", "b.svg", "--csv", "calibration.safetensors", "-q", "--force", status=3))
