"""`treeopt report`: one page of any inputs; inputs that are broken or do not belong together are one error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from looped import looped
from report_pages import COMPARISON, DECODING, PROFILE, TREE, VALIDATION, Page

from treeopt.calibration import Calibration
from treeopt.cli.app import program
from treeopt.files.calibrations import load_calibration, save_calibration
from treeopt.files.profiles import save_profile
from treeopt.files.trees import plan_id, save_policy, save_tree
from treeopt.policy import PolicyExpected, TreePolicy
from treeopt.view.report_data import PARTS

FILES = {
    "calibration": "calibration.safetensors",
    "tree": "tree.yaml",
    "profile": "profile.yaml",
    "validation": "validate.json",
    "comparison": "compare.json",
    "decoding": "generate.json",
}
pytestmark = pytest.mark.usefixtures("calibration", "inputs", "unloaded")


@pytest.fixture
def inputs() -> None:
    """A file of every kind."""
    save_tree(TREE, "tree.yaml")
    save_profile(PROFILE, "profile.yaml")
    for name, content in (("validate", VALIDATION), ("compare", COMPARISON), ("generate", DECODING)):
        Path(f"{name}.json").write_text(json.dumps(content))


def report(*arguments: str, status: int = 0) -> Result:
    """Run the command and check its exit status."""
    done = CliRunner().invoke(program, ["report", *arguments])
    assert done.exit_code == status, done.output + repr(done.exception)
    return done


def options(*names: str) -> list[str]:
    """The options of these inputs."""
    return [word for name in names for word in (f"--{name}", FILES[name])]


def test_report_of_all_inputs_is_one_page() -> None:
    """The page has every part; the same inputs give the same bytes, and an unedited page is replaced."""
    result = json.loads(report(*options(*FILES), "--largest", "6", "--json").stdout)
    page = Path("report.html").read_bytes()
    assert result.pop("configuration")["report"]["largest"] == 6
    assert result == {"output": "report.html", "bytes": result["bytes"], "inputs": list(PARTS)}
    assert result["bytes"] == len(page) < 500_000
    report(*options(*FILES), "--largest", "6")
    assert Path("report.html").read_bytes() == page
    Path("report.html").write_bytes(page.replace(b"<h1>", b"<h1>My "))
    assert "error[E202]" in report(*options("tree"), status=3).stderr


def test_report_has_the_figures_of_curve() -> None:
    """The points of a curve are those that `treeopt curve` prints, with the speedup of the profile."""
    report(*options("calibration", "profile"), "--largest", "6")
    [found] = Page(Path("report.html").read_text()).data["calibrations"]
    line = ["curve", "--profile", "profile.yaml", "--largest", "6", "--json"]
    curve = json.loads(CliRunner().invoke(program, line).stdout)
    assert found["curves"][0]["best"] == curve["best"]
    for point, printed in zip(found["curves"][0]["points"], curve["points"], strict=True):
        for name in ("prediction", "overhead_quartiles"):
            ends = printed.pop(name)
            assert point.pop(name) == (ends and [ends["low"], ends["high"]])
        assert {**point, "sampling": 0} == {**printed, "sampling": 0}


def test_report_has_the_commands_of_its_files() -> None:
    """The command that a tree stores is on the page, with the tree as output; a tree without one has none."""
    without = CliRunner().invoke(program, ["report", "--tree", "tree.yaml", "-o", "one.html"])
    assert without.exit_code == 0
    assert "command" not in Page(Path("one.html").read_text()).data["tree"]
    built = CliRunner().invoke(program, ["build", "--nodes", "9", "-o", "nine.yaml"])
    assert built.exit_code == 0
    report("--tree", "nine.yaml")
    page = Path("report.html").read_text()
    assert Page(page).data["tree"]["command"] == "treeopt build --nodes 9 -o nine.yaml"
    assert "treeopt build --nodes 9 -o nine.yaml" in page.split('id="provenance"')[1].split("report-data")[0]
    assert "configuration" not in Page(page).data["tree"]["source"]


def test_report_has_no_local_path(tmp_path: Path) -> None:
    """Title, commands, provenance and configuration name files and models without their folders; hub names stay."""
    here = str(tmp_path)
    read = load_calibration("calibration.safetensors")
    made = replace(
        read.provenance, model=f"{here}/models/small", prompts={"name": f"{here}/a b/p.jsonl"}, heads="lmsys/heads"
    )
    save_calibration(replace(read, provenance=made), "calibration.safetensors", overwrite=True)
    given = [word if word.startswith("--") else str(tmp_path / word) for word in options("calibration", "profile")]
    built = CliRunner().invoke(program, ["build", *given[:2], "--nodes", "9", "-o", f"{here}/nine.yaml"])
    assert built.exit_code == 0, built.output
    result = {**DECODING, "command": f"treeopt generate 'a b' --model {here}/models/small --tree=../t/x.yaml"}
    result |= {"prompt": f"open {here}/p", "model": f"{here}/models/small"}
    Path("generate.json").write_text(json.dumps(result))
    report(*given, "--tree", f"{here}/nine.yaml", "--decoding", f"{here}/generate.json", "-o", f"{here}/r.html")
    page = Path("r.html").read_text()
    assert page.count(here) == page.count(f"open {here}/p") == 2  # the prompt, on the page and in its data
    found = Page(page).data
    assert found["title"].endswith(": small")
    assert found["decoding"]["command"] == "treeopt generate 'a b' --model small --tree=x.yaml"
    assert found["tree"]["command"] == "treeopt build --calibration calibration.safetensors --nodes 9 -o nine.yaml"
    made_of = found["calibrations"][0]
    assert (made_of["heads"], made_of["provenance"]["prompts"]) == ("lmsys/heads", {"name": "p.jsonl"})


def test_report_of_a_policy() -> None:
    """A policy has no cross-validated figure; its expected one is shown."""
    policy = TreePolicy(8, 2, "0123456789abcdef", expected=PolicyExpected(1.5, 1.4, 8.0))
    save_policy(policy, "policy.yaml")
    report("--tree", "policy.yaml")
    page = Path("report.html").read_text()
    assert Page(page).data["tree"]["expected"]["replay"] == 1.5
    assert "1.500" in page.split('id="provenance"')[0]


@looped(
    ("arguments", "words"),
    [
        ([], "Missing inputs"),
        (["--validation", "validate.json", "--validation", "validate.json"], "is given twice"),
    ],
)
def test_usage(arguments: list[str], words: str) -> None:
    """No input, and one input twice are usage errors."""
    assert words in report(*arguments, status=2).stderr


def changed(data: dict[str, Any], **more: Any) -> str:
    """A result with other values, as a file's content."""
    return json.dumps({**data, **more})


@looped(
    ("file", "content", "option", "words"),
    [
        ("validate.json", changed(COMPARISON), "validation", "is not a result of treeopt validate"),
        ("validate.json", changed(VALIDATION, texts="many"), "validation", "texts: Input should be a valid integer"),
        ("validate.json", changed(VALIDATION, speedup=float("inf")), "validation", "Infinity is not a finite number"),
        ("compare.json", changed(COMPARISON, rows=[]), "comparison", "rows: "),
        ("generate.json", changed(DECODING, steps=[]), "decoding", "steps: "),
        ("generate.json", "[" * 100_000, "decoding", "is not JSON"),
        (
            "generate.json",
            changed(DECODING, steps=[{"tokens": [1, 2], "texts": ["a"], "sources": [{}, {}]}]),
            "decoding",
            "as many texts and sources as tokens",
        ),
    ],
)
def test_a_broken_result_is_one_error(file: str, content: str, option: str, words: str) -> None:
    """Results of other commands and broken ones are E203, with the place; nothing is written."""
    Path(file).write_text(content)
    stderr = report(*options(option), status=3).stderr
    assert "error[E203]" in stderr
    assert words in stderr
    assert not Path("report.html").exists()


def test_inputs_that_do_not_belong_together_are_one_error(calibration: Calibration) -> None:
    """Another model, another drafter, and another size are refused, and nothing is written."""
    other = replace(calibration, provenance=replace(calibration.provenance, model_id="other"))
    save_calibration(other, "other.safetensors")
    both = [*options("calibration"), "--calibration", "other.safetensors"]
    assert "error[E221]" in report(*both, status=3).stderr
    save_tree(replace(TREE, drafter="abcd"), "drafted.yaml")
    assert "error[E223]" in report(*options("calibration"), "--tree", "drafted.yaml", status=3).stderr
    Path("validate.json").write_text(changed(VALIDATION, nodes=16))
    stderr = report(*options("tree", "validation"), status=3).stderr
    assert "validate.json is of another tree than tree.yaml, of 16 nodes, and tree.yaml has 6" in stderr
    save_profile(replace(PROFILE, provenance={"kind": "static", "drafter": "abcd"}), "other.yaml")
    assert "error[E223]" in report(*options("calibration"), "--profile", "other.yaml", status=3).stderr
    assert not Path("report.html").exists()


MADE_WITH = {
    "model": "pocket",
    "model_id": "base",
    "dtype": "float32",
    "heads_id": "heads",
    "drafter_id": "",
    "tree_id": plan_id(TREE),
}
OF_MODEL = replace(
    TREE, source={"calibration": {"model": "pocket", "model_id": "base", "dtype": "float32", "heads_id": "heads"}}
)


@looped("name", ["validation", "comparison", "decoding"])
@looped(
    ("change", "code"),
    [
        ({}, None),
        ({"model_id": "other"}, "E221"),
        ({"model_id": "other", "dtype": "bfloat16"}, None),  # ids of other weights, which may be those of the model
        ({"heads_id": "other"}, "E221"),
        ({"heads_id": ""}, None),
        ({"drafter_id": "abcd"}, "E223"),
        ({"tree_id": "abcd"}, "E203"),
    ],
)
def test_results_of_other_models_drafters_and_trees_are_refused(
    name: str, change: dict[str, Any], code: str | None
) -> None:
    """Each result is compared with the tree's ids; only a validation must be of the tree itself."""
    save_tree(OF_MODEL, "tree.yaml")
    content = {"validation": VALIDATION, "comparison": COMPARISON, "decoding": DECODING}[name]
    Path(FILES[name]).write_text(changed(content, made_with=MADE_WITH | change))
    refused = None if code == "E203" and name != "validation" else code
    done = report(*options("tree", name), status=0 if refused is None else 3)
    assert Path("report.html").exists() is (refused is None)
    assert refused is None or f"error[{refused}]" in done.stderr


def test_the_first_validation_is_the_headline(calibration: Calibration) -> None:
    """A validation of the tree comes first; one of another tree of as many nodes may follow, and may not be first."""
    made = calibration.provenance
    ids = {**MADE_WITH, "model_id": made.model_id, "heads_id": made.heads_id}
    Path("validate.json").write_text(changed(VALIDATION, made_with=ids))
    Path("other.json").write_text(changed(VALIDATION, made_with=ids | {"tree_id": "abcd"}))
    first, second = ("--validation", "validate.json"), ("--validation", "other.json")
    stderr = report(*options("calibration", "tree"), *second, *first, "--largest", "2", status=3).stderr
    assert "other.json is of another tree than tree.yaml" in stderr
    report(*options("calibration", "tree"), *first, *second, "--largest", "2")
    Path("other.json").write_text(changed(VALIDATION, made_with=ids | {"model_id": "another"}))
    stderr = report(*options("calibration", "tree"), *first, *second, status=3).stderr
    assert "calibration.safetensors and other.json are of different models" in stderr
