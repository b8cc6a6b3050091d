"""Every format of an engine, read back by readers that import nothing of treeopt, and by the importer."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import engine_readers as readers
import pytest
import torch
from conftest import ROOT_FOLDER
from engine_trees import T, closed_up, trees
from helpers import random_tree
from looped import looped
from refusals import refusal_of

from treeopt.drafter import Drafter
from treeopt.engines import ENGINES
from treeopt.errors import Code, TreeoptError
from treeopt.export.lint import ERROR, lint_tree
from treeopt.export.trees import ADJACENCY, GROWMAP, PATHS, WRITERS, Exported, export_tree, import_tree
from treeopt.files.drafters import save_drafter
from treeopt.tree import Tree

READERS: dict[str, Callable[[str], readers.Paths]] = {
    "medusa": readers.medusa,
    "nxdi": lambda text: readers.nxdi(text, 1 + len(json.loads(text))),  # `read` has the exported number
    "nxdi-eagle": readers.nxdi_eagle,
    "trtllm": readers.trtllm_python,
    "triton": readers.triton,
    "sequoia": lambda text: readers.sequoia(json.loads(text)),
    "eagle": readers.eagle,
    "hydra": readers.hydra,
    "json": lambda text: [tuple(path) for path in json.loads(text)],
}
GOLDEN = {
    "medusa": "[[0], [1], [0, 0]]\n",
    "nxdi": "[[0], [1], [0, 0]]\n",
    "nxdi-eagle": '{"0": ["1", "2"], "1": ["3"]}\n',
    "trtllm": "[[0], [1], [0, 0]]\n",
    "triton": "{0}, {1}, {0, 0}\n",
    "sequoia": (
        '{"roots": [[0], [1, 2], [3]], "branches": [[2], [1, 0], [0]], "Successors": [[1, 2], [3], [], []], '
        '"mask": [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], "depth": [0, 1, 1, 2], "size": 4}\n'
    ),
    "eagle": "mc_sim_7b_63 = [[0], [1], [0, 0]]\n",
    "hydra": "[[0], [1], [0, 0]]\n",
    "json": "[[0], [1], [0, 0]]\n",
}
LAYOUTS = {"nxdi-eagle": ADJACENCY, "sequoia": GROWMAP}


def read(exported: Exported) -> readers.Paths:
    """What the engine drafts from an export; NxD Inference also takes the number of the setting, as text."""
    text = exported.content.decode().strip()
    if exported.engine != "nxdi":
        return READERS[exported.engine](text)
    found = re.search(r"--medusa-speculation-length (\d+) ", exported.setting)
    assert found is not None
    return readers.nxdi(text, int(found[1]))


def written(tree: Tree, engine: str) -> str:
    """The text of an export."""
    return export_tree(tree, engine).content.decode()


def drafted(text: str, engine: str) -> readers.Paths | None:
    """What the engine drafts; None where it would mix up heads."""
    try:
        return READERS[engine](text)
    except ValueError:
        return None


def test_every_engine_has_writer_reader_and_golden() -> None:
    """The registry, the writers and these tests have the same names."""
    assert set(ENGINES) == set(WRITERS) == set(READERS) == set(GOLDEN)


@looped("engine", GOLDEN)
def test_running_example_is_golden(engine: str) -> None:
    """The tree of docs/develop/formats.md has exactly this text in each format."""
    exported = export_tree(T, engine)
    assert exported.content.decode() == GOLDEN[engine]
    assert read(exported) == [(0,), (1,), (0, 0)]
    assert READERS[engine](GOLDEN[engine].strip()) == [(0,), (1,), (0, 0)]
    assert exported.warnings == ()
    assert not set("{}") & set(exported.setting)


@looped("engine", GOLDEN)
def test_random_trees_are_read_back(engine: str, tmp_path: Path) -> None:
    """The engine's reader drafts exactly the paths of each tree that is not refused, the importer all but Triton's."""
    legal = 0
    for i, tree in enumerate(trees()):
        if any(finding.severity == ERROR for finding in lint_tree(tree, engine)):
            error = refusal_of(export_tree, tree, engine)
            assert error.code is Code.TREE_NOT_EXPORTABLE
            assert error.why
            assert error.fix
            continue
        legal += 1
        assert read(export_tree(tree, engine)) == list(tree.paths)
        if engine == "triton":  # which is written only
            continue
        (tmp_path / f"{i}.txt").write_text(written(tree, engine))
        found = import_tree(tmp_path / f"{i}.txt")
        assert found.tree == tree
        assert found.layout == LAYOUTS.get(engine, PATHS)
    assert legal >= 14


@looped("engine", ["medusa", "nxdi", "trtllm", "eagle", "hydra", "nxdi-eagle", "sequoia"])
def test_refused_trees_would_be_misread(engine: str) -> None:
    """For trees with one fault each, the unchecked text gives other paths than the tree's, or stops the reader."""
    faulty = {
        "medusa": Tree(((0,), (10,))),
        "nxdi": Tree(((0,), (0, 10))),
        "trtllm": Tree(((1,), (1, 0))),
        "eagle": Tree(((0,), (1,), (0, 0), (1, 0), (1, 0, 0))),
        "hydra": Tree(((0,), (1,), (1, 0))),
        "nxdi-eagle": Tree(((1,),)),
        "sequoia": Tree(((0,), (0, 1))),
    }[engine]
    assert [finding.severity for finding in lint_tree(faulty, engine)] == [ERROR]
    assert drafted(WRITERS[engine](faulty), engine) != list(faulty.paths)


def test_eagle_rule_holds_exactly_where_its_drafter_is_right() -> None:
    """For random trees of ranks to 9, the rules of EAGLE-1 are broken exactly where its drafts differ from the tree."""
    right = wrong = 0
    for seed in range(300):
        tree = random_tree(seed, nodes=4 + seed % 20, depth=2 + seed % 4, ranks=4)
        refused = bool(lint_tree(tree, "eagle"))
        try:
            misread = readers.eagle_drafts(tree.paths) != list(tree.paths)
        except IndexError:
            misread = True
        assert refused == misread, tree.paths
        right, wrong = right + (not misread), wrong + misread
    assert min(right, wrong) > 50


def test_hydra_rules_hold_exactly_where_its_heads_are_right() -> None:
    """For random trees, the rules of Hydra are broken exactly where its drafts differ from the tree."""
    right = wrong = 0
    for seed in range(200):
        any_tree = random_tree(seed, nodes=3 + seed % 10, depth=2 + seed % 3, ranks=3)
        for tree in (any_tree, closed_up(any_tree)):
            misread = drafted(WRITERS["hydra"](tree), "hydra") != list(tree.paths)
            assert bool(lint_tree(tree, "hydra")) == misread, tree.paths
            right, wrong = right + (not misread), wrong + misread
    assert min(right, wrong) > 50


def test_cpp_runtime_reads_every_legal_tree() -> None:
    """Packed prefixes of TensorRT-LLM collide for none of the trees that pass, and do for rank 16."""
    for tree in trees():
        if not lint_tree(tree, "triton"):
            assert readers.trtllm_cpp(list(tree.paths)) == list(tree.paths)
    collide = [(0,), (1,), (0, 16), (1, 0), (0, 16, 0), (1, 0, 1)]  # 0 and 16 in four bits each are 1 and 0
    assert readers.trtllm_cpp(collide) != collide


def test_growmap_pt_is_read_as_sequoia_does(tmp_path: Path) -> None:
    """The .pt file loads with weights_only, has tensors of int64 and the paths; equal trees give equal bytes."""
    for i, tree in enumerate(map(closed_up, trees(10))):
        raw = export_tree(tree, "sequoia", suffix=".pt").content
        assert readers.sequoia_pt(raw) == list(tree.paths)
        assert raw == export_tree(tree, "sequoia", suffix=".pt").content
        (tmp_path / f"{i}.pt").write_bytes(raw)
        assert import_tree(tmp_path / f"{i}.pt").tree == tree


def test_numbers_of_the_setting_are_those_of_the_tree() -> None:
    """NxD Inference counts the root, TensorRT-LLM does not; the heads are as many as the levels at least."""
    assert "--medusa-speculation-length 4 " in export_tree(T, "nxdi").setting
    assert "max_draft_len=3 " in export_tree(T, "trtllm").setting
    assert "H >= 2" in export_tree(T, "nxdi").setting


def _of_drafter(drafter: Drafter, folder: Path) -> Tree:
    """The running example for a drafter, whose file is in the folder."""
    save_drafter(drafter, folder / "d.safetensors")
    return Tree(T.paths, drafter=drafter.id, source={"drafter": str(folder / "d.safetensors")})


def test_trees_of_a_draft_model_are_for_engines_that_draft_alike(tmp_path: Path) -> None:
    """Sequoia drafts with a model too; EAGLE's formats and paths have a warning, formats of heads refuse."""
    tree = _of_drafter(Drafter.model_only(3, 8, "m1"), tmp_path)
    assert export_tree(tree, "sequoia").warnings == ()
    for engine in ("eagle", "nxdi-eagle", "hydra", "json"):
        assert [finding.rule for finding in export_tree(tree, engine).warnings] == ["drafter"]
    for engine in ("medusa", "nxdi", "trtllm", "triton"):
        with pytest.raises(TreeoptError, match=r"drafter \w+ \(model\)") as caught:
            export_tree(tree, engine)
        assert "draft model" in (caught.value.why or "")
        assert "only treeopt" not in (caught.value.why or "")


def test_trees_of_a_learned_drafter_are_refused(tmp_path: Path) -> None:
    """Candidates of an n-gram table are no engine's; a file of another drafter says nothing."""
    tree = _of_drafter(Drafter.untrained(100, 3), tmp_path)
    other = Tree(T.paths, drafter="another", source=tree.source)
    for engine in ENGINES:
        with pytest.raises(TreeoptError, match=r"\(ngram\)"):
            export_tree(tree, engine)
        with pytest.raises(TreeoptError, match="drafter another"):
            export_tree(other, engine)


def test_trees_fitted_to_heads_have_a_warning_for_draft_models() -> None:
    """A list says nothing about its drafts, a tree with a calibration does."""
    tree = Tree(T.paths, source={"calibration": {"model": "m"}})
    for engine in ENGINES:
        expected = ["drafter"] if engine in ("sequoia", "eagle", "nxdi-eagle", "hydra") else []
        assert [finding.rule for finding in export_tree(tree, engine).warnings] == expected
        assert export_tree(T, engine).warnings == ()


def test_text_formats_need_no_torch(tmp_path: Path) -> None:
    """Export and import of text load neither torch nor transformers."""
    code = "import sys, treeopt; treeopt.export_tree([[0]], 'sequoia'); open(sys.argv[1], 'w').write('[[0]]'); "
    code += "treeopt.import_tree(sys.argv[1]); print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    line = [sys.executable, "-c", code, str(tmp_path / "a.json")]
    done = subprocess.run(line, cwd=ROOT_FOLDER, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_tree_that_eagle_ships_passes() -> None:
    """The 25 drafts in EAGLE-1's choices.py are drafted as they are listed, and break none of its rules."""
    listed = [[0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0]]
    listed += [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0]]
    listed += [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]
    assert readers.eagle(written(Tree.from_paths(listed), "eagle")) == list(map(tuple, listed))


def test_list_of_paths_is_exported() -> None:
    """A list in any order is a tree, one that is none is refused as such."""
    assert export_tree([[0, 0], [1], [0]], "triton").content == b"{0}, {1}, {0, 0}\n"
    assert refusal_of(export_tree, [[0, 0]], "triton").code is Code.TREE_INVALID


PASTED = (
    "mc_sim_7b_63 = [(0,), (0, 0), (1,)]  # Medusa",
    "[[0], [1], [0, 0]]",
    "((0,), (1,), (0, 0))",
    "x: list = [\n[0],\n[1], [0, 0]]",
    "{'0': ['1', '2'], '1': ['3'], '2': []}",
    'tree = {"0": ["1", "2"], "1": ["3"]}  # NxDI',
)


@looped("text", PASTED)
def test_pasted_text_is_the_running_example(text: str, tmp_path: Path) -> None:
    """Whatever the notation, the tree is T."""
    (tmp_path / "a.txt").write_text(text)
    found = import_tree(tmp_path / "a.txt")
    assert found.tree == T
    assert len(found.assumed) == 1


@looped("text", ["[[1, 0], [0, 0]]", "((0, 0), (1, 0), (1,))", "[[0, 'x'], 3]", "[[[0], 1, 2]]", f"[{[0] * 200}]"])
def test_lists_that_are_no_trees_are_refused(text: str, tmp_path: Path) -> None:
    """A list of leaves, other entries than ranks, and a path that is too long."""
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(TreeoptError):
        import_tree(tmp_path / "a.txt")


def test_published_lists_are_imported(shared: Path, tmp_path: Path) -> None:
    """The nine lists of Medusa are read, exported for it, and read again as the same trees."""
    published = json.loads((shared / "data" / "published_trees.json").read_text())["trees"]
    assert len(published) == 9
    for name, paths in published.items():
        (tmp_path / "p.py").write_text(f"{name} = {paths}")
        tree = import_tree(tmp_path / "p.py").tree
        assert readers.medusa(written(tree, "medusa").strip()) == sorted(map(tuple, paths), key=lambda p: (len(p), p))


def _pt(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def _growmap(**changed: object) -> dict[str, object]:
    """The growmap of T with other parts."""
    return {**json.loads(GOLDEN["sequoia"]), **changed}


def _tensors(**changed: object) -> bytes:
    content = _growmap()
    content |= {name: torch.tensor(content[name]) for name in ("mask", "depth")}
    return _pt({**content, **changed})


class _Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("evil",)


HOSTILE: dict[str, tuple[str | bytes, str]] = {
    "Triton's braces": ("{0}, {1}, {0, 0}", "E203"),
    "nothing": ("", "E203"),
    "prose": ("Dear tree", "E203"),
    "a number": ("x = 3", "E203"),
    "code": ("__import__('os').mkdir('evil')", "E203"),
    "code in a list": ("[[0], __import__('os').mkdir('evil')]", "E203"),
    "an orphan": ("[[0], [1, 0]]", "E203"),
    "a duplicate": ("[[0], [0]]", "E203"),
    "a listed root": ("[[], [0]]", "E203"),
    "a float rank": ("[[0], [1.0]]", "E203"),
    "a bool rank": ("[[True]]", "E203"),
    "a negative rank": ("[[-1]]", "E203"),
    "a huge rank": (f"[[{10**30}]]", "E203"),
    "a string": ("['0', '1']", "E203"),
    "deep nesting": ("[" * 100_000, "E203"),
    "deep mapping": ('{"a":' * 50_000, "E203"),
    "large": ("[" + "[0], " * 2_000_000 + "]", "E203"),
    "many paths": ("[" + "[0], " * 140_000 + "[1]]", "E203"),
    "many nodes": ('{"0": [' + ", ".join(f'"{i}"' for i in range(1, 140_000)) + "]}", "E206"),
    "a set": ("{(0,), (1,)}", "E203"),
    "not UTF-8": (b"[[0]] # \xff", "E203"),
    "a tree of treeopt": ("schema: treeopt.tree/1\nnodes: 1\npaths: []\n", "E203"),
    "a tree of prompt tokens": ("{0: [[[0], 0.5, 3]]}", "E206"),
    "a cycle": ('{"0": ["1"], "2": ["3"], "3": ["2"]}', "E206"),
    "a node above itself": ('{"0": ["1"], "1": ["2"], "2": ["1"]}', "E206"),
    "the root as a child": ('{"0": ["1"], "1": ["0"]}', "E206"),
    "two parents": ('{"0": ["1", "2"], "1": ["3"], "2": ["3"]}', "E206"),
    "an id out of range": ('{"0": ["1", "7"]}', "E206"),
    "a key out of range": ('{"0": ["1"], "5": []}', "E206"),
    "ids out of order": ('{"0": ["2", "1"]}', "E206"),
    "ids as numbers": ('{"0": [1, 2]}', "E206"),
    "an id of words": ('{"0": ["one"]}', "E206"),
    "an id with a zero": ('{"0": ["01"]}', "E206"),
    "a negative id": ('{"0": ["-1"]}', "E206"),
    "a huge id": ('{"0": ["' + "9" * 5000 + '"]}', "E206"),
    "children that are no list": ('{"0": "12"}', "E206"),
    "a key twice": ('{"0": ["1"], "0": ["1", "2"]}', "E203"),
    "a key twice in Python": ("{'0': ['1'], '0': ['1', '2']}", "E203"),
    "a deep adjacency": (json.dumps({str(i): [str(i + 1)] for i in range(200)}), "E206"),
    "an unknown key": (json.dumps(_growmap(extra=1)), "E206"),
    "a missing key": (json.dumps({k: v for k, v in _growmap().items() if k != "mask"}), "E206"),
    "a wrong size": (json.dumps(_growmap(size=5)), "E206"),
    "a huge size": (json.dumps(_growmap(size=10**9)), "E206"),
    "a size of true": (json.dumps(_growmap(size=True)), "E206"),
    "a wrong mask": (json.dumps(_growmap(mask=[[1] * 4] * 4)), "E206"),
    "a float mask": (GOLDEN["sequoia"].replace("[[1, 0", "[[1.0, 0"), "E206"),
    "a wrong depth": (json.dumps(_growmap(depth=[0, 1, 1, 1])), "E206"),
    "wrong branches": (json.dumps(_growmap(branches=[[2], [0, 1], [0]])), "E206"),
    "wrong roots": (json.dumps(_growmap(roots=[[0], [1], [2, 3]])), "E206"),
    "a cyclic growmap": (json.dumps(_growmap(Successors=[[1, 2], [], [], [3]])), "E206"),
    "a successor out of range": (json.dumps(_growmap(Successors=[[1, 9], [3], [], []])), "E206"),
    "a successor below 0": (json.dumps(_growmap(Successors=[[1, -2], [3], [], []])), "E206"),
    "successors of words": (json.dumps(_growmap(Successors="abcd")), "E206"),
    "a pickle with code": (_pt({"roots": _Evil()}), "E210"),
    "a pickle of a list": (_pt([1, 2]), "E206"),
    "a damaged pickle": (_tensors()[:300], "E206"),
    "a zip of nothing": (b"PK\x03\x04" + bytes(100), "E206"),
    "a mask of another shape": (_tensors(mask=torch.ones(3, 3, dtype=torch.int64)), "E206"),
    "a mask of floats": (_tensors(mask=torch.ones(4, 4)), "E206"),
    "a mask that is huge": (_tensors(mask=torch.ones(1, dtype=torch.int64).expand(10**6, 10**6)), "E206"),
    "a mask without memory": (_tensors(mask=torch.ones(4, 4, dtype=torch.int64, device="meta")), "E206"),
    "a complex mask": (_tensors(mask=torch.ones(4, 4, dtype=torch.complex64)), "E206"),
    "digits of another script": ("{\u0663}", "E203"),
    "a mask that is a list": (_pt(_growmap()), "E206"),
    "an unknown key in a pickle": (_tensors(extra=1), "E206"),
}


@looped("name", HOSTILE)
def test_hostile_file_is_one_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong types, cycles, unknown keys, huge numbers and code give one short error, quickly, and run nothing."""
    monkeypatch.chdir(tmp_path)
    content, number = HOSTILE[name]
    Path("a.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    error = refusal_of(import_tree, "a.txt")
    assert error.code.number == number
    assert "a.txt" in str(error)
    assert len(str(error)) < 1500
    assert not Path("evil").exists()


SAID = {
    "a cycle": "nodes that are not below the root, such as 2",
    "a node above itself": "node 1 below node 2, where node 3 is due",
    "the root as a child": "node 0 below node 1, where node 2 is due",
    "two parents": "node 3 below node 2, where node 4 is due",
    "an id out of range": "node 7 below node 0, where node 2 is due",
    "ids out of order": "node 2 below node 0, where node 1 is due",
    "an unknown key": "unknown keys: 'extra'",
    "a missing key": "lacks mask",
    "a huge size": "size that are not those of its Successors",
    "a mask that is huge": "a mask that is not a tensor of whole numbers in memory",
    "a pickle with code": "more than tensors, lists and numbers (posix.mkdir)",
    "a key twice": "the key '0' twice",
    "an orphan": "[1, 0]: its parent [1] is missing",
}


@looped("name", SAID)
def test_error_names_the_fault(name: str, tmp_path: Path) -> None:
    """The message has the node, key or number that is wrong."""
    content, _ = HOSTILE[name]
    (tmp_path / "a.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert SAID[name] in refusal_of(import_tree, tmp_path / "a.txt").what


def test_missing_file_and_folder() -> None:
    """A name without a file, and a folder, are named as such."""
    for name, number in (("nowhere.json", "E201"), ("/", "E203")):
        assert refusal_of(import_tree, name).code.number == number


def test_readers_import_nothing_of_treeopt() -> None:
    """The oracles of these tests are independent of what they check."""
    source = Path(readers.__file__).read_text()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert len(imports) >= 5
    assert not [node for node in imports if "treeopt" in ast.unparse(node)]


LISTS = """# Trees of a repository.
mc_sim_7b_63 = [[0], [1], [0, 0]]

wide: list[list[int]] = [
    [0], [1], [2],  # one level
]
"""


def test_one_of_several_lists_is_chosen_by_name(tmp_path: Path) -> None:
    """Other lines of the file are not executed, and without a name the lists are told."""
    file = tmp_path / "choices.py"
    file.write_text(LISTS)
    assert import_tree(file, name="mc_sim_7b_63").tree.paths == T.paths
    assert import_tree(file, name="wide").tree.paths == ((0,), (1,), (2,))
    error = refusal_of(import_tree, file)
    assert "holds 2 lists, not one: mc_sim_7b_63, wide" in error.what
    assert error.fix == "treeopt import FILE --name NAME"
    file.write_text(LISTS + "import os\nprint(1)\nwide2 = wide\n")
    assert import_tree(file, name="wide").tree.paths == ((0,), (1,), (2,))
    assert "more than lists" in refusal_of(import_tree, file, name="wide2").what


@looped("text, name, words", [
    (LISTS, "narrow", "assigns narrow not; it assigns mc_sim_7b_63, wide"),
    (LISTS + "wide = [[0]]\n", "wide", "assigns wide twice"),
    ("[[0]]", "wide", "one list without a name"),
    ("[[0],]", "wide", "it assigns none"),
])  # fmt: skip
def test_names_that_are_not_there_once_are_refused(tmp_path: Path, text: str, name: str, words: str) -> None:
    """Python would take the last of two."""
    (tmp_path / "choices.py").write_text(text)
    error = refusal_of(import_tree, tmp_path / "choices.py", name=name)
    assert error.code is Code.FILE_INVALID
    assert words in error.what
