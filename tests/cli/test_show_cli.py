"""show, list, compile and render: what they print, lists of paths as trees, and hostile runs."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import make_calibration, random_calibration, random_tree
from looped import looped
from program import error_of, treeopt, treeopt_json
from safetensors.torch import load_file

from treeopt.files.calibrations import save_calibration
from treeopt.files.trees import load_tree, save_tree
from treeopt.optimize.tree_builder import build_tree
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_tree

WIDTH = 80


@pytest.fixture
def built() -> Tree:
    """A tree built from `c.safetensors`, in `t.yaml`."""
    save_calibration(random_calibration(1), "c.safetensors")
    tree = build_tree(random_calibration(1), 12)
    save_tree(tree, "t.yaml")
    return tree


def test_edited_trees_are_said_to_be(built: Tree) -> None:
    """show, diff, explain and validate warn of a file that was edited by hand, and of no other."""
    save_tree(built, "other.yaml")
    lines = {
        "show": ("show", "t.yaml"),
        "diff": ("show", "other.yaml", "--against", "t.yaml"),
        "explain": ("show", "t.yaml", "--path", "0", "--calibration", "c.safetensors"),
    }
    for line in lines.values():
        assert "edited by hand" not in treeopt(*line).stderr
    text = Path("t.yaml").read_text()
    Path("t.yaml").write_text(re.sub(r"replay: [0-9.]+", "replay: 1.5", text))
    for line in lines.values():
        assert "warning: t.yaml was edited by hand" in treeopt(*line).stderr


def test_tree_is_shown_with_what_is_expected(built: Tree) -> None:
    """Each figure of the file stands beside what it is; origin comes in plain lines, no Python in them."""
    text = treeopt("show", "t.yaml").stdout
    expected = built.expected
    assert expected is not None
    assert expected.cross_validated is not None
    lines = text.splitlines()
    assert lines[0] == f"12 nodes, depth {built.depth}, {len(built.leaves)} leaves"
    assert "method          values " in text
    assert (
        "calibration     model base, model id b1, heads heads, heads id h1, prompts prompts.json, sequences 20, "
        in text
    )
    [at] = [i for i, line in enumerate(lines) if line.startswith("tokens per step ")]
    assert lines[at].split()[3:5] == [f"{expected.independent:.4f}", "independent:"]
    assert lines[at + 1].split()[:2] == [f"{expected.replay:.4f}", "replay:"]
    assert lines[at + 2].split()[:2] == [f"{expected.cross_validated:.4f}", "cross-validated:"]
    assert f"{expected.low:.3f} to {expected.high:.3f} on as many new prompts" in lines[at + 3]
    assert not re.search(r"[{}]|None|': ", text)
    data = treeopt_json("show", "t.yaml")
    assert data["expected_tokens_per_step"] == vars(expected)
    assert (data["kind"], data["nodes"], data["leaves"]) == ("static", 12, len(built.leaves))
    assert data["source"] == built.source
    assert data["replay"] is None


@pytest.mark.usefixtures("built")
def test_equal_texts_make_no_error_smaller() -> None:
    """The standard error is that of clusters of texts, of which there is one where all are equal."""
    traces = random_calibration(1)
    save_calibration(dataclasses.replace(traces, token_hashes=("a",) * traces.sequences), "equal.safetensors")
    shown = (treeopt_json("show", "t.yaml", "--calibration", f"{name}.safetensors") for name in ("c", "equal"))
    errors = [one["replay"]["standard_error"] for one in shown]
    assert errors[0] > 0
    assert errors[1] is None


@pytest.mark.usefixtures("built")
def test_traces_of_other_heads_are_told() -> None:
    """Traces of other heads are replayed, and both outputs say that they are of others."""
    own = treeopt("show", "t.yaml", "--calibration", "c.safetensors")
    assert "other heads" not in own.stdout + own.stderr
    assert treeopt_json("show", "t.yaml", "--calibration", "c.safetensors")["replay"]["same_heads"] is True
    text = Path("t.yaml").read_text().replace('heads_id: "h1"', 'heads_id: "h2"')
    Path("t.yaml").write_text(text)
    other = treeopt("show", "t.yaml", "--calibration", "c.safetensors")
    assert "warning: t.yaml was made for other heads (h2, these are h1)" in other.stderr
    assert treeopt_json("show", "t.yaml", "--calibration", "c.safetensors")["replay"]["same_heads"] is False
    save_tree(Tree.chain(2), "chain.yaml")
    assert treeopt_json("show", "chain.yaml", "--calibration", "c.safetensors")["replay"]["same_heads"] is None


@looped("name", ["mc_sim_7b_63", "zephyr_stage2", "random.yaml", "root.yaml"])
def test_choices_round_trip(name: str) -> None:
    """`export --for json` prints one line that is the tree again, and nothing else."""
    save_tree(random_tree(4, nodes=30, depth=5, ranks=9), "random.yaml")
    save_tree(Tree(()), "root.yaml")
    result = treeopt("export", name, "--for", "json", "-q")
    assert result.stdout.count("\n") == 1
    assert [tuple(path) for path in json.loads(result.stdout)] == list(load_tree(name).paths)
    Path("c.py").write_text(f"choices = {result.stdout}")
    assert load_tree("c.py") == load_tree(name)
    assert treeopt("export", "c.py", "--for", "json", "-q").stdout == result.stdout


def test_pasted_list_through_every_command() -> None:
    """compile, render and show take a pasted list as they take the tree file of the same paths."""
    Path("mc.py").write_text("mc = [[0], [0, 0], [1],  # pasted\n      [0, 1], [0, 0, 0]]\n")
    save_tree(load_tree("mc.py"), "mc.yaml")
    treeopt("compile", "mc.py")
    made, wanted = load_file("mc.safetensors"), compile_tree(load_tree("mc.yaml"))
    assert made["attention_mask"].equal(wanted.attention_mask)
    assert made["retrieve_indices"].equal(wanted.retrieve_indices)
    treeopt("render", "mc.py", "-o", "list.svg")
    treeopt("render", "mc.yaml", "-o", "yaml.svg")
    one, other = (Path(name).read_text().splitlines() for name in ("list.svg", "yaml.svg"))
    assert one[:-2] == other[:-2]  # then the names of the files, and the mark
    assert treeopt("show", "mc.py").stdout == treeopt("show", "mc.yaml").stdout


def test_pasted_list_decodes() -> None:
    """validate and generate run the built-in model with a pasted list."""
    Path("mc.txt").write_text("[(0,), (1,), (0, 0), (0, 0, 0)]")
    few = ("--tree", "mc.txt", "--max-new-tokens", "12")
    data = treeopt_json("validate", *few, "--limit", "1")
    assert data["lossless"]
    assert data["tokens_per_step"] == data["predicted_tokens_per_step"]
    assert len(treeopt_json("generate", "import os", *few)["tokens"]) <= 12


def fits(lines: list[str]) -> None:
    assert len(lines) > 11
    assert max(len(line.expandtabs()) for line in lines) <= WIDTH


def test_list_fits_a_pipe() -> None:
    """No line is wider than 80 columns, tabs expanded."""
    lines = treeopt("list").stdout.splitlines()
    fits(lines)
    assert lines[0] == "tree\tnodes\tdepth\tfrom"


def test_list_fits_a_terminal() -> None:
    """On a terminal of 80 columns no row is folded."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(WIDTH), "TERM": "dumb"}
    done = subprocess.run([sys.executable, "-m", "treeopt", "list"], stdout=follower, env=environment, check=True)
    os.close(follower)
    assert done.returncode == 0
    text = os.read(leader, 1 << 16).decode()
    os.close(leader)
    lines = text.replace("\r", "").splitlines()
    fits(lines)
    assert len([line for line in lines if "arXiv:2401.10774" in line]) == 9
    assert len(lines) == 14


def _write(name: str, content: str | bytes) -> Callable[[], object]:
    return lambda: Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())


def _traces() -> None:
    save_calibration(random_calibration(1), "c.safetensors")


def _other_depth() -> None:
    save_calibration(make_calibration([random_calibration(1, heads=2).ranks[:5] % 3]), "c.safetensors")


ORPHAN = "x = [[0], [1, 3]]"
# Name -> what stands there, the command line, the error's number (a number below 100: a status without an error).
HOSTILE: dict[str, tuple[Callable[[], object], tuple[str, ...], str | int]] = {
    "show an orphan": (_write("a.py", ORPHAN), ("show", "a.py"), "E203"),
    "compile an orphan": (_write("a.py", ORPHAN), ("compile", "a.py"), "E203"),
    "render an orphan": (_write("a.py", ORPHAN), ("render", "a.py"), "E203"),
    "show code": (_write("a.py", "import os\nos.remove('a.py')\n"), ("show", "a.py"), "E203"),
    "show a class": (_write("a.py", "class A:\n    x = [[0]]\n"), ("show", "a.py"), "E203"),
    "show many lists": (_write("a.py", "a = [[0]]\nb = [[0], [1]]\n"), ("show", "a.py"), "E203"),
    "show a deep list": (_write("a.json", "[" * 200_000), ("show", "a.json"), "E203"),
    "show a calibration": (_traces, ("show", "c.safetensors"), "E203"),
    "compile a calibration": (_traces, ("compile", "c.safetensors"), "E203"),
    "render a calibration": (_traces, ("render", "c.safetensors"), "E203"),
    "show a folder": (lambda: Path("f").mkdir(), ("show", "f"), "E203"),
    "compile a folder": (lambda: Path("f").mkdir(), ("compile", "f"), "E203"),
    "show nothing": (_write("e", ""), ("show", "e"), "E203"),
    "show no name": (lambda: None, ("show", ""), "E104"),
    "compile no name": (lambda: None, ("compile", ""), "E104"),
    "render no name": (lambda: None, ("render", ""), "E104"),
    "show a missing list": (lambda: None, ("show", "mc.py"), "E201"),
    "show a missing file of text": (lambda: None, ("show", "mc.txt"), "E201"),
    "show a long name": (lambda: None, ("show", "x" * 5000), "E104"),
    "show a control character": (lambda: None, ("show", "a\x1b[31mb"), "E104"),
    "show an endless file": (lambda: None, ("show", "/dev/zero"), "E203"),
    "show nothing from a device": (lambda: None, ("show", "/dev/null"), "E203"),
    "show bytes": (_write("b", bytes(range(256))), ("show", "b"), "E203"),
    "show large text": (_write("l.txt", "a" * 9_000_000), ("show", "l.txt"), "E203"),
    "show prose": (_write("p.txt", "Dear tree,\nyou are: well?\n"), ("show", "p.txt"), "E203"),
    "show a bare root": (_write("r.json", "[]"), ("show", "r.json"), 0),
    "compile a bare root": (_write("r.json", "[]"), ("compile", "r.json"), 0),
    "render a bare root": (_write("r.json", "[]"), ("render", "r.json"), 0),
    "compile rank 10": (_write("w.py", "[[10]]"), ("compile", "w.py"), 0),
    "compile the largest rank": (_write("w.py", f"[[{2**31 - 1}]]"), ("compile", "w.py"), 0),
    "compile a larger rank": (_write("w.py", f"[[{2**31}]]"), ("compile", "w.py"), "E203"),
    "compile 40000 nodes": (_write("n.py", str([[i] for i in range(40_000)])), ("compile", "n.py"), "E105"),
    "render 40000 nodes": (_write("n.py", str([[i] for i in range(40_000)])), ("render", "n.py"), 0),
    "render the deepest": (_write("d.py", str([[0] * i for i in range(1, 128)])), ("render", "d.py"), 0),
    "show the deepest": (_write("d.py", str([[0] * i for i in range(1, 128)])), ("show", "d.py"), 0),
    "compile over itself": (_write("a.safetensors", "[[0]]"), ("compile", "a.safetensors"), "E204"),
    "replay a deeper tree": (_other_depth, ("show", "mc_sim_7b_63", "--calibration", "c.safetensors"), "E101"),
    "replay over a tree": (_write("a.py", "[[0]]"), ("show", "a.py", "--calibration", "a.py"), "E203"),
    "replay over nothing": (lambda: None, ("show", "mc_sim_7b_63", "--calibration", "c.safetensors"), "E201"),
    "an engine that is none": (lambda: None, ("show", "mc_sim_7b_63", "--for", "python"), 2),
    "two trees": (lambda: None, ("show", "mc_sim_7b_63", "zephyr_stage2"), 2),
    "no tree": (lambda: None, ("show",), 2),
    "list a tree": (lambda: None, ("list", "mc_sim_7b_63"), 2),
    "curve of a list": (_write("a.py", "[[0]]"), ("curve", "--calibration", "a.py"), "E203"),
}


@looped("name", HOSTILE)
def test_hostile_runs(name: str) -> None:
    """Each ends in a right result or in one error with its number; no status is 1, and no refused run leaves a file."""
    prepare, line, end = HOSTILE[name]
    prepare()
    before = {path.name for path in Path().iterdir()}
    if isinstance(end, int):
        treeopt(*line, status=end)
    else:
        result = error_of(end, *line)
        assert len(result) < 1500 or "x" * 100 in result
        assert {path.name for path in Path().iterdir()} == before
        assert json.loads(treeopt(*line, "--json", status=3).stderr)["error"] == end
