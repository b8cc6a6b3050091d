"""`treeopt compare`: the table, JSON, CSV and picture, and what is refused before any model is loaded."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import click
import pytest
from looped import looped
from matplotlib.collections import LineCollection
from program import treeopt, treeopt_json

from treeopt.cli.app import program
from treeopt.evaluate.baselines import Spread
from treeopt.evaluate.comparison import CompareOptions, Comparison, Figures, Row
from treeopt.evaluate.comparison_report import picture_rows
from treeopt.view.charts import Bar, bar_of, bars_figure, render_bars

QUICK = ("--limit", "4", "--max-new-tokens", "8", "--repeats", "2", "--learn-tokens", "0")


def made() -> Comparison:
    """Two methods that ran, by category, and one that was left out."""
    speed, ratio = Spread(500.0, 450.0, 550.0), Spread(1.5, 1.4, 1.625)
    parts = {"a": Figures(2, 2.5, speed, ratio), "b": Figures(1, 1.25, None, None)}
    return Comparison(
        rows=(
            Row("autoregressive", 1, Figures(3, 1.0, speed, Spread(1.0, 1.0, 1.0)), 3, {}, {1: parts["a"]}),
            Row("ngram, static", 16, Figures(3, 2.0, speed, ratio), 2, parts, {1: parts["a"], 2: parts["b"]}),
            Row("model", None, left_out="no draft model"),
        ),
        texts=(),
        learned=2,
        dropped=0,
        skipped=(),
        repeats=3,
        made_by={"dtype": "float32"},
    )


def test_json_has_a_row_for_each_method() -> None:
    """The keys are those that are documented; the built-in model has heads and a draft model."""
    data = treeopt_json("compare", *QUICK, "--methods", "lookup,medusa,assisted")
    assert [row["method"] for row in data["rows"]] == [
        *("autoregressive", "generate", "prompt lookup", "assisted generation", "Medusa tree")
    ]
    by_method = {row["method"]: row for row in data["rows"]}
    tree = by_method["Medusa tree"]
    keys = {"method", "nodes", "mean_acceptance_length", "tokens_per_second", "speedup", "lossless", "by_category"}
    assert keys <= tree.keys()
    assert (tree["nodes"], tree["lossless"], tree["left_out"]) == (16, True, None)
    assert min(tree["mean_acceptance_length"], by_method["assisted generation"]["mean_acceptance_length"]) > 1.2
    assert len(tree["quartiles"]["speedup"]) == 2
    assert (by_method["prompt lookup"]["nodes"], by_method["autoregressive"]["mean_acceptance_length"]) == (11, 1.0)
    assert (data["learned"], data["texts"]) == (2, 2)
    made_with = data["made_with"]
    assert len({made_with[name] for name in ("model_id", "heads_id", "draft_id")} - {""}) == 3
    assert "tree_id" not in made_with


@pytest.mark.slow
def test_one_repeat_has_no_quartiles() -> None:
    """Null in JSON."""
    found = treeopt_json("compare", *QUICK, "--limit", "2", "--methods", "lookup", "--repeats", "1")
    assert all(row["quartiles"] == {"tokens_per_second": None, "speedup": None} for row in found["rows"])
    assert all(row["speedup"] is not None for row in found["rows"])
    assert all(row["same_texts"] == row["texts"] for row in found["rows"] if row["lossless"])


@pytest.mark.slow
def test_several_dtypes() -> None:
    """A table and a result for each; in half precision equal texts are counted, and none is called lossless."""
    given = ("compare", *QUICK, "--methods", "recycling", "--dtype", "float32,bfloat16")
    text = treeopt(*given).stdout
    one, other = text.split("equal in bfloat16: ")
    assert "\tlossless\n" in one
    assert "equal in bfloat16" in one
    assert re.search(r"^stock generate\t1\t1\.000\t.*\t2/2$", one, flags=re.MULTILINE)
    assert "lossless" not in other
    assert re.search(r"^fastest, plain decoding: b?float\d\d, autoregressive, [\d.]+ tokens/s$", other, re.MULTILINE)
    assert re.search(r"^fastest, recommended: b?float\d\d, .*, [\d.]+ tokens/s$", other, re.MULTILINE)
    both = {"float32", "bfloat16"}
    found = treeopt_json(*given)["settings"]
    assert {name: one["made_with"]["dtype"] for name, one in found.items()} == {name: name for name in both}
    assert "--nproc takes one --dtype" in treeopt(*given, "--nproc", "2", status=2).stderr


def test_methods_that_cannot_run_and_defaults() -> None:
    """With --model alone there are neither heads nor a draft model; defaults are those of the library."""
    prompts = ("--model", "pocket", "--prompts", "pocket")
    data = treeopt_json("compare", *QUICK, *prompts, "--methods", "medusa,assisted")
    reasons = {row["method"]: (row["left_out"], row["speedup"], row["lossless"]) for row in data["rows"][2:]}
    assert reasons == {
        "assisted generation": ("no draft model was given (--draft)", None, None),
        "Medusa tree": ("no heads were given (--heads)", None, None),
    }
    command = program.get_command(click.Context(program), "compare")
    assert command is not None
    shown = {option.name: option.default for option in command.params}
    ours = {field.name: field.default for field in dataclasses.fields(CompareOptions)}
    for name in ours.keys() & shown.keys() - {"methods", "prompts_learn", "memory"}:
        assert shown[name] == ours[name], name
    assert {"texts", "learn_limit", "learn_tokens", "max_new_tokens", "nodes", "repeats"} <= ours.keys() & shown.keys()


def test_table_and_files() -> None:
    """The table has a line a method; the picture is written, and replaced without --force."""
    given = ("compare", *QUICK, "--methods", "recycling", "--svg", "c.svg")
    text = treeopt(*given).stdout
    assert re.search(r"^autoregressive\t1\t1\.000\t\d+ .*\tyes$", text, flags=re.MULTILINE)
    assert re.search(r"^token recycling, published tree\t81\t\d\.\d{3}\t", text, flags=re.MULTILINE)
    assert "learned from 2 prompts, compared on 2 other texts" in text
    assert "token recycling" in Path("c.svg").read_text()
    drawn = re.findall(r">([^<>]+)</text>", Path("c.svg").read_text())
    assert "pocket: methods compared, 16 nodes" in drawn
    assert any(re.fullmatch(r"cpu, \d+ threads?, float32; 2 texts, \d repeats?, batch 1\.", line) for line in drawn), (
        drawn
    )
    treeopt("compare", *QUICK, "--methods", "generate", "--svg", "c.svg")
    assert "token recycling" not in Path("c.svg").read_text()


def test_picture_holds_every_figure_and_is_the_same_again() -> None:
    """The bars are the methods that ran; a lossy one is named; equal figures give equal bytes."""
    bars = [bar_of(*row) for row in picture_rows([made()])]
    assert bars == [
        Bar("autoregressive", 1.0, 1.0, 1.0, 1.0, lossless=True),
        Bar("ngram, static", 2.0, 1.5, 1.4, 1.625, lossless=False),
    ]
    picture = render_bars(bars, "title\x07 of $mine")
    assert picture == render_bars(bars, "title of $mine")
    assert "1.50 (2.00 tokens/step), not lossless" in picture
    axes = bars_figure(bars, "title").axes[0]
    assert axes.yaxis_inverted(), "the first method is on top"


def test_bars_have_quartiles_and_room_for_their_figures() -> None:
    """Whiskers reach from the lower to the upper quartile, and the longest names and figures stay in the picture."""
    bars = [
        Bar("n" * 60, 4.25, 1.5, 1.25, 2.0, lossless=False),
        Bar("autoregressive", 1.0, 1.0, 1.0, 1.0, lossless=True),
    ]
    figure = bars_figure(bars, "title", "a machine")
    figure.draw_without_rendering()
    [axes] = figure.axes
    [lines] = [one for one in axes.collections if isinstance(one, LineCollection)]
    assert [one[:, 0].tolist() for one in lines.get_segments()] == [[1.25, 2.0], [1.0, 1.0]]
    assert "quartiles" in axes.get_xlabel()
    assert figure.get_supxlabel() == "a machine"
    for text in (*axes.texts, *axes.get_yticklabels()):
        box = text.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width


def test_slower_methods_are_drawn_as_such() -> None:
    """A bar below 1 has another color and the word, and its figures stand right of the dotted line."""
    bars = [Bar("a", 1.5, speed, speed, speed, True) for speed in (0.93, 1.5)]
    [axes] = bars_figure(bars, "").axes
    assert len({patch.get_facecolor() for patch in axes.patches}) == 2
    [slow, fast] = axes.texts
    assert (slow.get_text(), fast.get_text()) == ("0.93, slower (1.50 tokens/step)", "1.50 (1.50 tokens/step)")
    assert [text.xy[0] for text in (slow, fast)] == [1.0, 1.5]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("unloaded")
@looped(
    ("arguments", "status", "word"),
    [
        (("--methods", "hydra"), 2, "no method 'hydra'"),
        (("--nodes", "1"), 2, "nodes"),
        (("--nodes", "255"), 2, "nodes"),
        (("--repeats", "0"), 2, "repeats"),
        (("--svg", "c.png"), 3, ".svg"),
        (("--model", "somewhere"), 2, "--prompts"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(arguments: tuple[str, ...], status: int, word: str) -> None:
    """Names and numbers are checked first."""
    assert word in treeopt("compare", *arguments, status=status).output
