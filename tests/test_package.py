"""What people install: names, lightness, and the wheel."""

from __future__ import annotations

import configparser
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from conftest import ROOT_FOLDER
from looped import looped

import treeopt
from treeopt.errors import Code, TreeoptError
from treeopt.tree import Tree

MOST_BYTES = 11_000_000  # of the wheel
LIGHT = "import sys; {}; print(sorted({{'torch', 'transformers', 'datasets', 'networkx'}} & set(sys.modules)))"


def run_python(code: str, *, executable: str = sys.executable, cwd: Path = ROOT_FOLDER) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_import_loads_no_heavy_library() -> None:
    """`import treeopt`, and its records, load neither torch nor transformers."""
    assert run_python(LIGHT.format("import treeopt; treeopt.Tree, treeopt.load_tree, treeopt.build_tree")) == "[]"


@looped("arguments", [["--help"], ["build", "--help"], ["calibrate", "--help"], ["list"]])
def test_help_loads_no_heavy_library(arguments: list[str]) -> None:
    """Help and listing answer without torch."""
    code = f"import sys\nsys.argv = ['treeopt', *{arguments!r}]\nfrom treeopt.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit:\n    pass\n"
    printed = run_python(code + "print([m for m in ('torch', 'transformers') if m in sys.modules])")
    assert printed.endswith("[]")


def test_all_names_are_exported() -> None:
    """Every public name resolves, and nothing unknown does."""
    for name in treeopt.__all__:
        assert getattr(treeopt, name) is not None
    with pytest.raises(AttributeError):
        treeopt.no_such_name  # noqa: B018 - the access is the test


def test_setup_cfg_names_every_package() -> None:
    """The list of packages in setup.cfg is the tree of folders, data folders included."""
    config = configparser.ConfigParser()
    config.read(ROOT_FOLDER / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    code = {
        ".".join(path.parent.relative_to(ROOT_FOLDER).parts) for path in (ROOT_FOLDER / "treeopt").rglob("__init__.py")
    }
    data = {
        ".".join(["treeopt", "data", *path.relative_to(ROOT_FOLDER).parts])
        for kind in ("trees", "calibration")
        for path in [ROOT_FOLDER / kind, *(p for p in (ROOT_FOLDER / kind).rglob("*") if p.is_dir())]
    }
    built_in = {
        "treeopt.data.pocket",
        "treeopt.data.pocket.heads",
        "treeopt.data.pocket-draft",
        "treeopt.data.pocket-eagle3",
    }
    assert listed == code | data | built_in


@pytest.mark.slow
def test_wheel_works_from_an_empty_folder(tmp_path: Path) -> None:
    """The wheel, installed elsewhere, finds its data and adds one top-level name."""
    source = tmp_path / "source"  # built from a copy: building leaves files behind
    left_out = shutil.ignore_patterns(
        ".*",
        "__pycache__",
        "*.egg-info",
        "build",
        "dist",
        "demo",
        "pocket-made",
        "pocket-draft-made",
        "pocket-eagle3-made",
    )
    shutil.copytree(ROOT_FOLDER, source, ignore=left_out)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheel_command = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(wheel_command, check=True, capture_output=True)
    wheel = next(tmp_path.glob("treeopt-*.whl"))
    assert wheel.name == f"treeopt-{treeopt.__version__}-py3-none-any.whl"
    assert wheel.stat().st_size <= MOST_BYTES
    target, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env" / "bin" / "python")
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--target", str(target), str(wheel)], check=True, capture_output=True
    )
    names = {path.name for path in target.iterdir() if path.suffix != ".dist-info" and path.name != "bin"}
    assert names == {"treeopt"}
    # The clean environment borrows the dependencies, but not the editable install, of this one.
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), *borrowed])}
    code = "import json, treeopt; from treeopt.files.bundled import pocket, zoo, prompt_sets; "
    code += "nodes = treeopt.load_tree('mc_sim_7b_63').nodes; "
    code += "model = sorted(str(p.relative_to(pocket())) for p in pocket().rglob('*.safetensors')); "
    code += "draft = sorted(p.name for p in pocket().with_name('pocket-draft').iterdir()); "
    code += "print(json.dumps([treeopt.__file__, len(zoo()), list(prompt_sets()), nodes, model, draft]))"
    done = subprocess.run([python, "-c", code], cwd=empty, env=environment, capture_output=True, text=True, check=True)
    file, trees, sets, nodes, model, draft = json.loads(done.stdout)
    assert Path(file).is_relative_to(target)
    assert (trees, sets, nodes) == (10, ["alpaca_eval", "pocket"], 64)
    assert model == ["heads/medusa_lm_head.safetensors", "model.safetensors"]
    assert draft == ["README.md", "config.json", "generation_config.json", "losses.json", "model.safetensors"]
    failed = subprocess.run(
        [python, "-c", "import trees"], cwd=empty, env=environment, capture_output=True, check=False
    )
    assert failed.returncode != 0


def test_version_is_said_once() -> None:
    """The command line, the package and the newest section of the changelog with a date name the same version."""
    dated = re.findall(r"^## (\d\S*) - ", (ROOT_FOLDER / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert dated[0] == treeopt.__version__
    printed = run_python("import sys; sys.argv = ['treeopt', '--version']; from treeopt.cli import main; main()")
    assert printed == f"treeopt, version {treeopt.__version__}"


def test_errors_and_trees_can_be_pickled() -> None:
    """Records and errors pass between processes."""
    error = TreeoptError(Code.TREE_INVALID, "no tree", at="here", why="a rule", fix="an edit")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.as_dict()) == (TreeoptError, error.as_dict())
    tree = Tree.from_paths([(0,), (1,)], values=[0.5, 0.25], source={"made_by": "hand"})
    assert pickle.loads(pickle.dumps(tree)) == tree
