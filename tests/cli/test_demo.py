"""`treeopt demo`: the whole job, at a tiny size."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from looped import looped
from report_pages import Page

from treeopt.cli import demo_command
from treeopt.cli.app import program


@pytest.fixture(scope="module", autouse=True)
def tiny() -> Iterator[None]:
    """Few and short texts."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_PROMPTS": 8, "_TOKENS": 12, "_EVALUATED": 2, "_SAMPLED": 100}.items():
            patch.setattr(demo_command, name, value)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The folder in which `treeopt demo -o out` ran, and what it printed."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(program, ["demo", "-o", "out"])
    assert done.exit_code == 0, done.output
    return folder, done


@pytest.fixture
def done(made: tuple[Path, Result], tmp_path: Path) -> Result:
    """What the demo printed; its files are copied to the test's own folder."""
    shutil.copytree(made[0] / "out", tmp_path / "out")
    return made[1]


def test_demo_prints_commands_table_and_files(done: Result, tmp_path: Path) -> None:
    """Every command is shown as it can be typed; the table says lossless; the files named are there."""
    for name in ("calibrate", "build", "render", "compile", "validate", "generate", "report"):
        assert f"$ treeopt {name} " in done.output
    rows = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line][1:]
    labels = ["autoregressive", "Medusa tree, heads", "static tree, heads+ngram", "per-step trees, heads+ngram"]
    labels += ["no heads: per-step trees, ngram"]
    assert [row[0] for row in rows] == labels
    assert all(row[1] == row[2] and row[4] == "yes" for row in rows)
    written = next(line for line in done.stdout.splitlines() if line.startswith("wrote ")).split()[1:]
    assert len(written) == 17
    assert all((tmp_path / name).is_file() for name in written)
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert [one["file"] for one in page.data["validations"]][:1] == ["validate-static16.json"]
    assert [str(one.get("id")) for one in page.named("section")].count("comparison") == 0
    assert page.data["decoding"]["num_accepted"] == sum(page.data["decoding"]["first_source"].values()) > 0
    assert "open out/report.html" in done.stdout


def test_a_shown_command_can_be_typed_again(done: Result) -> None:
    """The lines after `$` are real: the build that was shown gives the same tree."""
    shown = next(line for line in done.stdout.splitlines() if line.endswith("out/static16.yaml") and "build" in line)
    before = Path("out/static16.yaml").read_bytes()
    again = CliRunner().invoke(program, shown.removeprefix("$ treeopt ").split())
    assert again.exit_code == 0
    assert Path("out/static16.yaml").read_bytes() == before


def test_a_file_that_cannot_be_written_ends_the_demo() -> None:
    """It is found before any work."""
    Path("out").mkdir()
    Path("out/tree.svg").mkdir()
    done = CliRunner().invoke(program, ["demo", "-o", "out"])
    assert done.exit_code == 3
    assert done.stderr.count("error[E204]: out/tree.svg is a folder") == 1
    assert done.stdout == ""


@pytest.mark.usefixtures("done")
def test_a_second_demo_needs_force() -> None:
    """Traces and results take long to make, so an earlier demo ends the next one, before any work."""
    again = CliRunner().invoke(program, ["demo", "-o", "out"])
    assert again.exit_code == 3
    assert "error[E202]: out/heads.safetensors exists" in again.stderr
    assert "choose another name with -o, or overwrite it with --force" in again.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("done")
def test_a_forced_demo_makes_equal_files() -> None:
    """An edited file is replaced by an equal one; with --json programs read one object, with every tree's figures."""
    tree = Path("out/static16.yaml")
    before = tree.read_text()
    tree.write_text(before + "# my favourite\n")
    forced = CliRunner().invoke(program, ["demo", "-o", "out", "--force", "--json"])
    assert forced.exit_code == 0
    assert tree.read_text() == before
    found = json.loads(forced.stdout)
    assert set(found["trees"]) == {"medusa", "static", "dynamic", "no-heads"}
    assert all(tree["lossless"] for tree in found["trees"].values())


@looped(
    ("name", "content"),
    [
        ("heads.safetensors", "precious"),
        ("ngram.drafter.safetensors", "precious"),
        ("tree.svg", "precious"),
        ("generate.json", "{}"),
    ],
)
def test_a_demo_keeps_files_that_it_did_not_make(name: str, content: str) -> None:
    """A file of one of its names in a folder of the user's own ends the demo before any work."""
    Path("out").mkdir()
    Path("out", name).write_text(content)
    assert CliRunner().invoke(program, ["demo", "-o", "out"]).exit_code == 3
    assert [path.name for path in Path("out").iterdir()] == [name]
    assert Path("out", name).read_text() == content
