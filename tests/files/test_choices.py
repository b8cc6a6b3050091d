"""Lists of paths in files: pasted from anywhere they are the same tree, and what is no such list is one clear error."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import random_tree
from hypothesis import given, settings
from hypothesis import strategies as st
from looped import looped
from refusals import refusal_of

from treeopt.errors import Code, TreeoptError
from treeopt.files import choices
from treeopt.files.choices import choices_text
from treeopt.files.trees import load_plan, load_tree, save_tree
from treeopt.tree import Tree

SMALL = Tree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))
WRITTEN = {
    "bare": "[[0], [1], [0, 0], [0, 1], [0, 0, 0]]",
    "named": "mc_sim_7b_63 = [[0], [0, 0], [0, 0, 0], [1], [0, 1]]",
    "typed": "choices: list[list[int]] = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]\n",
    "tuples": "CHOICES = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))",
    "tuples in a list": "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]",
    "lines": "# a tree\nmc = [\n    [0],  # the best guess\n    [1],\n    [0, 0], [0, 1],\n    [0, 0, 0],\n]  # end\n",
    "JSON of many lines": "[\n  [\n    0\n  ],\n  [1], [0, 0], [0, 1], [0, 0, 0]\n]\n",
    "blank lines in front": "\n\n  \n[[0], [1], [0, 0], [0, 1], [0, 0, 0]]",
    "indented": "    mc = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]",
    "byte order mark": "\ufeff[[0], [1], [0, 0], [0, 1], [0, 0, 0]]",
    "Windows": "mc = [[0], [1],\r\n[0, 0], [0, 1], [0, 0, 0]]\r\n",
    "no blanks": "x=[[0],[1],[0,0],[0,1],[0,0,0]]",
    "hexadecimal": "[[0x0], [+1], [0, 0], [0, 1], [0, 0, 0]]",
}


@looped("name", ["tree.py", "tree.json", "tree.txt", "tree", "tree.yaml"])
@looped("notation", WRITTEN)
def test_every_notation_is_the_same_tree(tmp_path: Path, notation: str, name: str) -> None:
    """However it is written and whatever the file is called, the list is the tree of its paths."""
    (tmp_path / name).write_bytes(WRITTEN[notation].encode())
    assert load_tree(tmp_path / name) == SMALL
    assert load_plan(str(tmp_path / name)) == SMALL


@looped("text", ["[]", "x = []", "()", "[ # none\n]"])
def test_an_empty_list_is_the_root_alone(tmp_path: Path, text: str) -> None:
    """No path at all is a tree of one node."""
    (tmp_path / "tree.py").write_text(text)
    assert load_tree(tmp_path / "tree.py") == Tree(())


def test_published_lists_are_the_zoo(shared: Path, tmp_path: Path) -> None:
    """A list as it was published, in growth order, is the tree of the zoo."""
    published = json.loads((shared / "data" / "published_trees.json").read_text())["trees"]
    for name, paths in published.items():
        (tmp_path / "medusa_choices.py").write_text(f"{name} = {paths}\n")
        assert load_tree(tmp_path / "medusa_choices.py") == load_tree(name)


def notations(paths: list[tuple[int, ...]], order: random.Random) -> list[str]:
    """The paths as text, in several notations."""
    order.shuffle(paths)
    lists = [list(path) for path in paths]
    lines = "".join(f"    {path},  # depth {len(path)}\n" for path in paths)
    return [
        json.dumps(lists),
        json.dumps(lists, indent=2),
        str(paths),
        str(tuple(map(tuple, paths))),
        f"choices = {lists}",
        f"# choices\nchoices: list = [\n{lines}]\n",
        f"choices = (\n{lines})\n",
    ]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 40), order=st.randoms(use_true_random=False))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, seed: int, nodes: int, order: random.Random) -> None:
    """Any tree, in any order and notation, comes back equal; so does the line that we print of it."""
    tree = random_tree(seed, nodes=nodes, depth=6, ranks=40)
    path = tmp_path_factory.getbasetemp() / "choices.py"
    for text in (*notations(list(tree.paths), order), choices_text(tree)):
        path.write_text(text)
        assert load_tree(path) == tree, text
    save_tree([list(one) for one in tree.paths], path)
    assert load_tree(path) == tree


def test_printed_list_is_one_line_in_runtime_order() -> None:
    """What is printed is JSON and Python alike, sorted as the record is."""
    assert choices_text(SMALL) == "[[0], [1], [0, 0], [0, 1], [0, 0, 0]]"
    assert choices_text(Tree(())) == "[]"


WRONG: dict[str, tuple[str, str]] = {  # content, a word of the error
    "missing parent": ("[[0], [1, 3]]", "[1, 3]: its parent [1] is missing"),
    "missing parent, named": ("x = [[0], [1, 3]]", "[1, 3]: its parent [1] is missing"),
    "duplicate": ("[[0], [1], [0]]", "[0] occurs twice"),
    "root": ("[[], [0]]", "[] is the root"),
    "negative": ("[[0], [-1]]", "[-1] has a rank"),
    "bool": ("[[0], [True]]", "[True] is not a path"),
    "bool of JSON": ("[[0], [true]]", "[True] is not a path"),
    "float": ("[[0], [1.0]]", "[1.0] is not a path"),
    "text": ('[[0], ["1"]]', "['1'] is not a path"),
    "None": ("[[0], None]", "None is not a path"),
    "null": ("[[0], [null]]", "[None] is not a path"),
    "NaN": ("[[0], [NaN]]", "[nan] is not a path"),
    "complex": ("[[0], [1+2j]]", "(1+2j)"),
    "flat": ("[0, 0, 1]", "0 is not a path"),
    "nested": ("[[[0], [0, 0]]]", "[[0], [0, 0]] is not a path"),
    "list of dicts": ('[{"path": [0]}]', "type dict is not a path"),
    "too deep": (json.dumps([[0] * n for n in range(1, 130)]), "has 128 ranks"),
    "rank of 5000 digits": (f"[[0], [{'9' * 5000}]]", "5000 digits"),
    "rank of 5000 hexadecimal digits": (f"[[0], [0x{'f' * 5000}]]", "a number of 20000 bits"),
    "brackets without end": ("[" * 3000, "too many nested parentheses"),
    "brackets": ("x = " + "[" * 3000 + "]" * 3000, "too many nested parentheses"),
    "twenty brackets": ("[" * 20 + "]" * 20, "is not a path"),
    "two hundred brackets": ("x = " + "[" * 200 + "]" * 200, "is not a path"),
    "parentheses": ("(" * 3000 + ")" * 3000, "too many nested parentheses"),
    "many signs": ("x = [[" + "-" * 300_000 + "1]]", "is not a list of paths"),
    "a thousand signs": ("x = [[" + "-" * 1_500 + "1]]", "is not a list of paths"),
    "text with an odd escape": ("x = '\\d'", "holds a value of type str"),
    "numbers glued to words": ("[[0], [1or 1]]", "is not a list of paths"),
    "many sums": ("x = [[" + "1+" * 300_000 + "1]]", "is not a list of paths"),
    "many nots": ("x = [[" + "not " * 200_000 + "1]]", "is not a list of paths"),
    "many attributes": ("x = [[a" + ".a" * 300_000 + "]]", "is not a list of paths"),
    "call": ("x = __import__('os').system('touch pwned')", "more than lists and whole numbers"),
    "call in a list": ("[[0], [__import__('os').system('touch pwned')]]", "more than lists and whole numbers"),
    "comprehension": ("[[i] for i in range(9)]", "more than lists and whole numbers"),
    "f-string": ("[[0], [f'{1}']]", "more than lists and whole numbers"),
    "star": ("[[0], *[[1]]]", "more than lists and whole numbers"),
    "name": ("x = y", "more than lists and whole numbers"),
    "sum of lists": ("x = [[0]] + [[1]]", "more than lists and whole numbers"),
    "two statements": ("x = [[0]]\ny = [[1]]\n", "holds 2 lists, not one: x, y"),
    "statement behind": ("x = [[0]]; import os", "holds 2 statements"),
    "two targets": ("x = y = [[0]]", "is not a list of paths"),
    "attribute": ("x.y = [[0]]", "has no schema"),
    "augmented": ("(x) += [[0]]", "is not a list of paths"),
    "text on the right": ("x = 'abc'", "holds a value of type str"),
    "dict on the right": ("x = {}", "holds a value of type dict"),
    "set": ("({(0,)})", "holds a value of type set"),
    "number": ("(5)", "holds a value of type int"),
    "no end": ("x = [[0], [1", "was never closed"),
    "no comma": ("[[0] [1]]", "more than lists and whole numbers"),
    "garbage behind": ("[[0]] oak", "is not a list of paths"),
    "zero byte": ("[[0], [1\0]]", "holds zero bytes"),
    "keyword": ("import = [[0]]", "is not a list of paths"),
    "nothing behind the sign": ("x =", "is not a list of paths"),
    "only a comment": ("# [[0]]\n", "is empty"),
}


@looped("name", WRONG)
@pytest.mark.filterwarnings("error")
def test_what_is_no_list_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It is E203 with the entry or the place, nothing is run, and Python warns of nothing."""
    monkeypatch.chdir(tmp_path)
    content, word = WRONG[name]
    path = tmp_path / "tree.txt"
    path.write_text(content)
    error = refusal_of(load_tree, path)
    assert error.code is Code.FILE_INVALID
    assert word in error.what
    assert len(error.what) < 400
    assert "[[0], [1], [0, 0]]" in error.why + error.fix
    assert [file.name for file in tmp_path.iterdir()] == ["tree.txt"]


def test_faults_are_named_together(tmp_path: Path) -> None:
    """Several faults are one error."""
    (tmp_path / "tree.json").write_text("[[0], [0], [2, 1]]")
    error = refusal_of(load_tree, tmp_path / "tree.json")
    assert "[0] occurs twice" in error.what
    assert error.at == "[2, 1]: its parent [2] is missing"


def test_place_of_a_fault(tmp_path: Path) -> None:
    """Line and column are those of the file, blank lines in front counted."""
    for text, place in (("\n\nx = [[0], [1\n", "3:11"), ("\n# a\nx = [[0],\n  [y()]]", "3:5"), ("x = 1\ny = 2", "2:1")):
        (tmp_path / "tree.py").write_text(text)
        assert refusal_of(load_tree, tmp_path / "tree.py").at == f"{tmp_path / 'tree.py'}:{place}"


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    """A byte that is no UTF-8 is refused, in a comment too."""
    (tmp_path / "tree.py").write_bytes(b"# caf\xe9\nx = [[0]]")
    with pytest.raises(TreeoptError, match=r"is not UTF-8 text \(byte 5\)"):
        load_tree(tmp_path / "tree.py")


def test_large_python_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON of any size that is read is read; of Python, whose parser is hungry, less."""
    monkeypatch.setattr(choices, "MAX_PYTHON", 20)
    (tmp_path / "tree.py").write_text("[[0], [1], [2], [3], [4]]")
    assert load_tree(tmp_path / "tree.py").nodes == 6
    (tmp_path / "tree.py").write_text("[[0], [1], [2], [3], ]")
    with pytest.raises(TreeoptError, match="a list in Python may have 20"):
        load_tree(tmp_path / "tree.py")


@pytest.mark.slow
def test_hundred_thousand_paths_take_little_memory(tmp_path: Path) -> None:
    """The largest list in Python that is read takes no more than a gigabyte."""
    text = "[" + ", ".join(f"({rank},)" for rank in range(95_000)) + "]"
    assert 900_000 < len(text) < choices.MAX_PYTHON
    (tmp_path / "tree.py").write_text(text)
    code = "import resource, treeopt; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); "
    code += f"print(treeopt.load_tree({str(tmp_path / 'tree.py')!r}).nodes)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "95001\n", done.stderr
