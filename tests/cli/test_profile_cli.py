"""`treeopt profile` as a user meets it, on a tiny model and heads saved to a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from looped import looped
from safetensors.torch import save_file
from tiny import random_heads, tiny_base

from treeopt.cli.app import program
from treeopt.files.profiles import load_profile
from treeopt.models.head_layouts import state_of


@pytest.fixture(scope="module")
def heads_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three heads in the original layout, whose config names a tiny llama with a context of 64."""
    folder = tmp_path_factory.mktemp("models")
    base = tiny_base("llama", max_position_embeddings=64)
    base.model.save_pretrained(folder / "base")
    heads = random_heads(base, 3)
    (folder / "heads").mkdir()
    save_file(state_of(heads), folder / "heads" / "medusa_lm_head.safetensors")
    (folder / "heads" / "config.json").write_text('{"base_model_name_or_path": "../base"}')
    return folder / "heads"


def profile(heads: Path, *arguments: str, status: int = 0) -> Result:
    """Run the command on the CPU with two repeats and check its exit status."""
    fixed = ["profile", "--heads", str(heads), "--device", "cpu", "--repeats", "2"]
    result = CliRunner().invoke(program, [*fixed, *arguments])
    assert result.exit_code == status, result.output + repr(result.exception)
    return result


def test_json_is_the_file(heads_folder: Path) -> None:
    """Standard output is one object with every point, and the file holds the same."""
    result = profile(
        heads_folder,
        "--sizes",
        "2,6",
        "--context",
        "8,16",
        "--context",
        "12",
        "--batch-size",
        "1,2",
        "--json",
        "-o",
        "p.yaml",
    )
    data = json.loads(result.stdout)
    saved = load_profile("p.yaml")
    assert data["points"] == [vars(point) for point in saved.points]
    assert data["provenance"] == saved.provenance
    assert data["output"] == "p.yaml"
    assert (saved.batches, saved.contexts) == ((1, 2), (8, 12, 16))
    assert {point.nodes for point in saved.points} == {1, 2, 6}
    assert len(saved.points) == 18
    assert Path(saved.provenance["model"]).name == "base"
    assert saved.provenance["repeats"] == 2


def test_table_and_defaults(heads_folder: Path) -> None:
    """The context defaults to what the model has room for, and the table has a line a size with its ratio."""
    result = profile(heads_folder, "--sizes", "1,2,16")
    saved = load_profile("profile.yaml")
    lines = result.stdout.splitlines()
    assert lines[0].split("\t") == ["nodes", "batch", "context", "ms per step", "spread", "overhead"]
    assert [line.split("\t")[:3] for line in lines[1:4]] == [[n, "1", "60"] for n in ("1", "2", "16")]
    one = saved.points[0].seconds
    assert [line.split("\t")[5] for line in lines[1:4]] == [f"{p.seconds / one:.2f}" for p in saved.points]
    assert lines[1].endswith("\t1.00")
    assert lines[4].startswith(
        "static trees, drafter heads: median of the faster half of 2 rounds (float32, cpu, 1 thread,"
    )
    most = "(of 64 positions, as many as leave room for the trees)"
    assert f"context  60 tokens {most}; shorter texts have faster steps: --context\n" in result.stderr
    assert "wrote profile.yaml" in result.stderr
    assert "profile 3/3 100%" in result.stderr


def test_existing_profile_is_kept_without_force(heads_folder: Path) -> None:
    """A profile takes minutes; a folder that is not there is refused before any work."""
    Path("p.yaml").write_text("old")
    assert "E202" in profile(heads_folder, "--sizes", "1", "-o", "p.yaml", status=3).stderr
    profile(heads_folder, "--sizes", "1", "-o", "p.yaml", "-q", "--force")
    assert load_profile("p.yaml").curve()[0].tolist() == [1]
    assert "E204" in profile(Path("no-such-heads/"), "-o", "no/p.yaml", status=3).stderr


def test_too_long_context_is_one_error(heads_folder: Path) -> None:
    """A context beyond the model's is E503 with the range that fits, and no file is written."""
    result = profile(heads_folder, "--sizes", "2", "--context", "64", status=3)
    assert "error[E503]" in result.stderr
    assert "--context from 1 to 62" in result.stderr
    assert not Path("profile.yaml").exists()


@looped("wrong", ["", "1,,2", "0", "-1", "1.5", "a", "1 2"])
@looped("option", ["--sizes", "--context", "--batch-size"])
def test_what_is_no_list_of_numbers_exits_2(heads_folder: Path, option: str, wrong: str) -> None:
    """Lists hold whole numbers from 1, separated by commas."""
    assert "is not a list of whole numbers" in profile(heads_folder, option, wrong, status=2).stderr
