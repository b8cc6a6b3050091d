"""Profile files: what is written comes back equal, and what is no profile is one clear error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from looped import looped
from refusals import refusal_of

from treeopt.errors import Code, TreeoptError
from treeopt.files.profiles import load_profile, profile_yaml, save_profile
from treeopt.latency import LatencyPoint, LatencyProfile

PROVENANCE = {
    "made_by": "treeopt 0",
    "model": "../models/base: large",
    "heads": "heads # 2",
    "kind": "dynamic",
    "drafter": "0123456789abcdef",
    "drafter_name": "heads+ngram",
    "device": "NVIDIA H200",
    "dtype": "float32",
    "threads": 2,
    "attention": "sdpa",
    "repeats": 20,
    "versions": {"python": "3.11", "torch": "2.10", "transformers": "5.23"},
}
PROFILE = LatencyProfile(
    (
        LatencyPoint(1, 1, 512, 0.00123, 0.0012, 0.0013),
        LatencyPoint(8, 1, 512, 0.002, 0.002, 0.002),
        LatencyPoint(1, 4, 512, 1e-05, 9e-06, 2.0),
        LatencyPoint(8, 4, 512, 1e-05, 9e-06, 2.0, drafting=3.5e-06),
    ),
    PROVENANCE,
)
HEAD = "schema: treeopt.latency/1\npoints:\n"
GOOD = "- {nodes: 1, batch: 1, context: 8, seconds: 0.2, low: 0.1, high: 0.3}\n"

BROKEN: dict[str, tuple[str, str, str]] = {  # content, line:column, a word of the message
    "empty": ("", "1:1", "is empty"),
    "another schema": ("schema: treeopt.tree/1\npoints: []\n", "1:9", "treeopt.tree/1"),
    "no points": ("schema: treeopt.latency/1\n", "1:1", "points"),
    "points empty": ("schema: treeopt.latency/1\npoints: []\n", "2:9", "at least 1"),
    "unknown key": ("colour: red\n" + HEAD + GOOD, "1:9", "colour"),
    "unknown version": ("versions: {numpy: '2'}\n" + HEAD + GOOD, "1:19", "numpy"),
    "key of a point missing": (HEAD + GOOD + "- {nodes: 2}\n", "4:3", "batch"),
    "unknown key of a point": (HEAD + GOOD[:-2] + ", colour: 1}\n", "3:79", "colour"),
    "no nodes": (HEAD + GOOD.replace("nodes: 1", "nodes: 0"), "3:11", "greater than or equal to 1"),
    "nodes not whole": (HEAD + GOOD.replace("nodes: 1", "nodes: 1.5"), "3:11", "integer"),
    "seconds zero": (HEAD + GOOD.replace("0.2", "0.0"), "3:45", "greater than 0"),
    "seconds text": (HEAD + GOOD.replace("0.2", "'0.2'"), "3:45", "number"),
    "seconds infinite": (HEAD + GOOD.replace("0.2", "1.0e+999"), "3:45", "finite"),
    "seconds not a number": (HEAD + GOOD.replace("0.2", ".nan"), "3:45", "'.nan'"),
    "quartiles swapped": (HEAD + GOOD.replace("0.1", "0.25"), "3:3", "ascending"),
    "one size twice": (HEAD + GOOD + GOOD.replace("0.2", "0.25"), "4:3", "earlier point"),
    "negative low quartile": (HEAD + GOOD.replace("0.1", "-0.1"), "3:55", "greater than 0"),
    "threads text": ("threads: two\n" + HEAD + GOOD, "1:10", "integer"),
}


@looped("name", BROKEN)
def test_broken_file_is_one_error(tmp_path: Path, name: str) -> None:
    """What is no profile is E203 with file, line and column."""
    content, place, word = BROKEN[name]
    path = tmp_path / "broken.yaml"
    path.write_text(content)
    refused = refusal_of(load_profile, path)
    error = refused
    assert error.code is Code.FILE_INVALID
    found = re.match(re.escape(str(path)) + r":(\d+:\d+)(\s|$)", error.at)
    assert found, error.at
    assert found[1] == place
    assert word in error.what + error.at


def test_missing_file_names_the_command(tmp_path: Path) -> None:
    """No file is E201 with the line that makes one."""
    error = refusal_of(load_profile, tmp_path / "none.yaml")
    assert error.code is Code.FILE_MISSING
    assert "treeopt profile --model MODEL" in error.fix


def test_round_trip_is_equal_and_stable(tmp_path: Path) -> None:
    """A profile comes back equal with its provenance, and writes the same bytes again."""
    path = tmp_path / "profile.yaml"
    save_profile(PROFILE, path)
    first = path.read_bytes()
    loaded = load_profile(path)
    assert loaded == PROFILE
    assert loaded.provenance == PROVENANCE
    save_profile(loaded, path)  # overwritten unasked: cheap to make again
    assert path.read_bytes() == first


def test_one_line_a_point() -> None:
    """The text is what people read: one line a point, numbers in plain notation."""
    lines = profile_yaml(PROFILE).splitlines()
    assert "schema: treeopt.latency/1" in lines
    assert lines[-4:] == [
        "- {nodes: 1, batch: 1, context: 512, seconds: 0.00123, low: 0.0012, high: 0.0013}",
        "- {nodes: 8, batch: 1, context: 512, seconds: 0.002, low: 0.002, high: 0.002}",
        "- {nodes: 1, batch: 4, context: 512, seconds: 1.0e-05, low: 9.0e-06, high: 2.0}",
        "- {nodes: 8, batch: 4, context: 512, seconds: 1.0e-05, low: 9.0e-06, high: 2.0, drafting: 3.5e-06}",
    ]


def test_order_and_provenance_are_free(tmp_path: Path) -> None:
    """A file sorted by hand is a profile; provenance is optional, and its order leaves no trace."""
    path = tmp_path / "profile.yaml"
    *head, one, two, three = profile_yaml(PROFILE).splitlines()
    path.write_text("\n".join([*head, three, one, two]) + "\n")
    assert load_profile(path) == PROFILE
    bare = LatencyProfile(PROFILE.points)
    save_profile(bare, tmp_path / "bare.yaml")
    assert load_profile(tmp_path / "bare.yaml") == bare
    versions = dict(reversed(PROVENANCE["versions"].items()))  # type: ignore[attr-defined]  # a dict in the table above
    turned = dict(reversed({**PROVENANCE, "versions": versions}.items()))
    assert profile_yaml(LatencyProfile(PROFILE.points, turned)) == profile_yaml(PROFILE)


@looped("wrong", [{"colour": "red"}, {"threads": "two"}, {"versions": {"numpy": "2"}}])
def test_provenance_that_could_not_be_read_is_not_written(tmp_path: Path, wrong: dict[str, object]) -> None:
    """What the format does not hold is E230 before anything is written."""
    with pytest.raises(TreeoptError, match=next(iter(wrong))) as caught:
        save_profile(LatencyProfile(PROFILE.points, wrong), tmp_path / "profile.yaml")
    assert caught.value.code is Code.PROFILE_INVALID
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.floats(1e-12, 1e6), min_size=3, max_size=3))
def test_seconds_mean_the_same_to_every_reader(values: list[float]) -> None:
    """Any seconds are read back to the last bit by a plain YAML 1.1 reader."""
    low, median, high = sorted(values)
    text = profile_yaml(LatencyProfile((LatencyPoint(1, 1, 1, median, low, high),)))
    (line,) = yaml.safe_load(text)["points"]
    assert (line["low"], line["seconds"], line["high"]) == (low, median, high)


CSV = "tokens,batch,context,seconds\n8,4,512,0.5\n1,1,512,0.25\n"


def csv_file(folder: Path, content: str | bytes) -> Path:
    """An engine's own step times."""
    file = folder / "times.csv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def test_csv_of_step_times(tmp_path: Path) -> None:
    """Each line is a point without quartiles of its own, in any order; it names no drafter."""
    found = load_profile(csv_file(tmp_path, CSV))
    points = (LatencyPoint(1, 1, 512, 0.25, 0.25, 0.25), LatencyPoint(8, 4, 512, 0.5, 0.5, 0.5))
    assert (found.points, found.drafter) == (points, None)
    for same in ("\ufeff" + CSV, CSV.replace("\n", "\r\n"), CSV.replace(",", ", "), CSV + "\n"):
        assert load_profile(csv_file(tmp_path, same)).points == points


def test_csv_without_batch_and_context(tmp_path: Path) -> None:
    """Columns may be in any order; batch and context are 1 where there is one of each."""
    found = load_profile(csv_file(tmp_path, "seconds,tokens\n0.25,1\n0.5,8\n"))
    assert [(point.nodes, point.batch, point.context, point.seconds) for point in found.points] == [
        (1, 1, 1, 0.25),
        (8, 1, 1, 0.5),
    ]


WRONG_CSV = {
    "": "columns none",
    "tokens,batch\n1,1\n": "columns tokens, batch",
    "tokens,seconds,colour\n1,0.5,2\n": "columns tokens, seconds, colour",
    "tokens,tokens,seconds\n1,1,0.5\n": "columns tokens, tokens",
    "tokens,seconds\n1,fast\n": "line 2 has a cell that is not a number",
    "tokens,seconds\n1,0.5\n2.5,0.6\n": "line 3 has a cell that is not a number",
    "tokens,seconds\n1\n": "line 2 has a cell that is not a number",
    "tokens,seconds\n1,0.5,7\n": "line 2 has more cells than columns",
    "tokens,seconds\n,0.5\n": "line 2 has a cell that is not a number",
    f"tokens,seconds\n1,{'x' * 140_000}\n": "line 2 has a cell that is not a number",
    "tokens,seconds\n1,0\n": "line 2",
    "tokens,seconds\n1,nan\n": "line 2",
    "tokens,seconds\n1,inf\n": "line 2",
    "tokens,seconds\n-1,0.5\n": "line 2",
    "tokens,seconds\n2147483648,0.5\n": "not a whole number from 1 to 2,147,483,647",
    "tokens,seconds\n1,0.5\n1,0.6\n": "occurs twice",
    "tokens,seconds\n": "no points",
}


@looped("content", WRONG_CSV)
def test_wrong_csv_is_one_error(tmp_path: Path, content: str) -> None:
    """The message names the file and, of a cell, the line."""
    file = csv_file(tmp_path, content)
    error = refusal_of(load_profile, file)
    assert error.code is Code.FILE_INVALID
    assert str(file) in error.what
    assert WRONG_CSV[content] in error.what


def test_csv_of_bytes_is_one_error(tmp_path: Path) -> None:
    """What is not text in UTF-8 has no such columns."""
    assert refusal_of(load_profile, csv_file(tmp_path, b"\xff\xfet\x00o\x00")).code is Code.FILE_INVALID
