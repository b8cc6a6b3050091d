"""EAGLE heads and MTP layers by `--draft`: learn, validate, generate, export and compare, and the refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from looped import looped
from program import error_of, treeopt, treeopt_json
from tiny_modules import write_block

from treeopt.files.bundled import pocket
from treeopt.files.drafters import load_drafter
from treeopt.models.base import load_base

FEW = ("--prompts", "pocket", "--limit", "5", "--max-new-tokens", "16")
OTHERS = ("--prompts", "pocket", "--skip", "6", "--limit", "2", "--max-new-tokens", "16")
TWO = ("--prompts", "pocket", "--limit", "2", "--max-new-tokens", "8")
HEAD = ("--draft", "pocket-eagle3")
DEVICE = ("--model", "llama-3-8b", "--device-preset", "a100-80gb-pcie")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what was learned with the built-in head."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_block(folder / "dflash", load_base("pocket", dtype="float32"))
        treeopt("learn", *HEAD, *FEW, "--nodes", "6", "-o", "eagle.safetensors")
        block = ("--drafter", "block+ngram", "--learn-tokens", "300", "--nodes", "6")
        treeopt("learn", "--draft", "dflash", *FEW, *block, "-o", "block.safetensors")
        treeopt("calibrate", *HEAD, *FEW, "--drafter", "eagle+ngram", "--learn-tokens", "120", "--kind", "dynamic")
    return folder


@pytest.fixture(autouse=True)
def _in_folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


def test_kind_is_read_from_the_files() -> None:
    """`--draft` of an EAGLE head makes the drafter `eagle`, whose file names the head and its layout."""
    drafter = load_drafter("eagle.safetensors")
    assert drafter.name == drafter.draft_kind == "eagle"
    assert drafter.source["draft"] == "pocket-eagle3"
    assert drafter.source["draft_layout"] == "EAGLE-3 (SpecForge)"
    assert load_drafter("calibration.drafter.safetensors").name == "eagle+ngram"
    block = load_drafter("block.safetensors")
    assert (block.name, block.draft_kind, block.depth) == ("block+ngram", "block", 4)
    assert block.source["draft_layout"] == "DFlash (z-lab)"


def test_predicted_is_measured() -> None:
    """Static and per-step trees, with and without the n-gram table: lossless, in the predicted steps."""
    treeopt("build", "--nodes", "12", "-o", "static.yaml")
    treeopt("build", "--nodes", "12", "--kind", "dynamic", "-o", "dynamic.yaml")
    drafters = (("--drafter", "block.safetensors"), ("--drafter", "eagle.safetensors"))
    for plan in (*drafters, ("--tree", "static.yaml"), ("--tree", "dynamic.yaml")):
        found = treeopt_json("validate", *plan, *OTHERS)
        assert found["lossless"]
        assert found["tokens_per_step"] == found["predicted_tokens_per_step"]
    assert found["tokens_per_step"] > 1.5
    drafted = treeopt_json("generate", "import os", "--tree", "static.yaml", "--max-new-tokens", "16")
    plain = treeopt_json("generate", "import os", "--model", "pocket", "--max-new-tokens", "16")
    assert drafted["tokens"] == plain["tokens"]


def test_trees_of_ddtree_are_a_method() -> None:
    """`compare` has a row of DDTree's trees beside those of the block drafter, without those of EAGLE-2."""
    few = ("--test-limit", "1", "--learn-limit", "3", "--max-new-tokens", "8", "--methods", "block,ddtree,eagle2")
    few += ("--repeats", "1", "--learn-tokens", "60")
    found = treeopt_json("compare", "--draft", "dflash", "--prompts", "pocket", *few)
    rows = {row["method"]: row for row in found["rows"]}
    assert rows["block, DDTree"]["lossless"]
    assert rows["block, per step"]["lossless"]
    assert "ddtree" in rows["eagle2"]["left_out"]
    assert found["made_with"]["draft_id"]


DSPARK = str(Path(__file__).resolve().parent.parent / "data" / "pocket-dspark")


METHODS = {
    "dflash": {"vllm": '"dflash"', "sglang": "DFLASH", "llamacpp": "draft-dflash"},
    DSPARK: {"vllm": '"dspark"', "sglang": "DSPARK", "llamacpp": "draft-dspark"},
}


@looped("draft", METHODS)
def test_engines_get_the_method_of_blocks(draft: str) -> None:
    """The method is that of the block drafter."""
    treeopt("calibrate", "--draft", draft, *TWO, "-o", "block-alone.safetensors", "--force")
    for engine, method in METHODS[draft].items():
        arguments = ("export", "--for", engine, "--calibration", "block-alone.safetensors", "--chain-length", "1")
        assert method in treeopt(*arguments).output


def test_what_is_found_is_printed() -> None:
    """The line of the draft has its layout and the states that it reads."""
    result = treeopt("generate", "import os", "--drafter", "eagle.safetensors", "--max-new-tokens", "4")
    assert "pocket-eagle3  EAGLE-3 (SpecForge), reads the states 1 3 4 of the base" in result.stderr


def test_engines_get_the_method_of_eagle3() -> None:
    """The method is that of the head's layout."""
    treeopt("calibrate", *HEAD, *TWO, "-o", "alone.safetensors", "--force")
    methods = {"vllm": "eagle3", "sglang": "EAGLE3", "trtllm": "Eagle3", "llamacpp": "draft-eagle3"}
    for engine, method in methods.items():
        printed = treeopt("export", "--for", engine, "--calibration", "alone.safetensors", "--chain-length", "3").output
        assert method in printed
        assert "the figures do not hold" not in printed


@looped(
    ("arguments", "said"),
    [
        (("learn", *HEAD, "--drafter", "model"), "is for --drafter eagle or eagle+ngram"),
        (("learn", "--draft", "pocket-draft", "--drafter", "eagle"), "is for --drafter model or model+ngram"),
        (("learn", "--drafter", "eagle"), "needs --draft, an EAGLE head of the base"),
        (("learn", "--drafter", "mtp+ngram"), "needs --draft, which is mtp for the layer"),
        (("compare", *HEAD, *HEAD), "twice for one kind"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], said: str) -> None:
    """Options that do not belong together are one usage error."""
    result = treeopt(*arguments, *FEW, status=2)
    assert said in " ".join(result.stderr.split())


@looped(
    ("arguments", "number"),
    [
        (("learn", "--draft", "mtp", *FEW), "E216"),
        (("learn", "--draft", "missing/", *FEW), "E201"),
        (("plan", *DEVICE, "--draft", "pocket-eagle3", "--levels", "3"), "E240"),
        (("heads", "show", "HEAD"), "E211"),
    ],
)
def test_refusals(arguments: tuple[str, ...], number: str) -> None:
    """An MTP layer that is not there, a folder that is not, and an EAGLE head where heads or a model are wanted."""
    error_of(number, *(str(pocket().with_name("pocket-eagle3")) if word == "HEAD" else word for word in arguments))
