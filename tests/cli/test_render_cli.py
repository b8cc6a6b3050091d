"""render as a user runs it: labels, themes, and one step of the built-in model against its sequential text."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner
from looped import looped
from program import error_number, treeopt, treeopt_json

from treeopt.cli.app import program
from treeopt.drafter import Drafter
from treeopt.drafting.plans import untrained
from treeopt.files.bundled import POCKET
from treeopt.files.drafters import save_drafter
from treeopt.files.trees import save_policy, save_tree
from treeopt.models.base import Base, load_base
from treeopt.policy import TreePolicy
from treeopt.tree import Tree

SVG = "{http://www.w3.org/2000/svg}"
PROMPT = "class Stack:\n    def __init__(self):\n        self.items = []\n    def push(self, "


@pytest.fixture(scope="module")
def pocket() -> Base:
    """The built-in model."""
    return load_base(POCKET, device="cpu")


@pytest.fixture(scope="module")
def truth(pocket: Base) -> list[int]:
    """The tokens of its greedy text, by stock `generate`."""
    assert pocket.tokenizer is not None
    ids = torch.tensor([pocket.tokenizer(PROMPT)["input_ids"]])
    text: list[int] = pocket.generate(ids, torch.ones_like(ids), 40)[0, ids.shape[1] :].tolist()
    return text


def policy_files(vocab: int) -> None:
    """A policy `p.yaml` of a drafter `d.safetensors` for which nothing was learned, stored in it as its plan."""
    drafter = Drafter.untrained(vocab)
    save_drafter(drafter, "d.safetensors")
    policy = TreePolicy(12, drafter.depth, drafter.id, source={"drafter": "d.safetensors"})
    save_policy(policy, "p.yaml")


def test_the_model_is_that_of_the_drafter() -> None:
    """As in `treeopt generate`, where the options name none."""
    save_drafter(dataclasses.replace(Drafter.untrained(9), source={"model": "elsewhere"}), "d.safetensors")
    save_policy(TreePolicy(12, 3, Drafter.untrained(9).id, source={"drafter": "d.safetensors"}), "p.yaml")
    for line in (("render", "p.yaml", "--example", "x"), ("generate", "x", "--tree", "p.yaml")):
        assert "elsewhere" in treeopt(*line, status=4).stderr


def red(file: str) -> list[str | None]:
    """Labels of the accepted nodes and of the token after them."""
    found = []
    for group in ElementTree.parse(file).getroot().findall(f"{SVG}g"):
        if {"accepted", "bonus"} & set(group.attrib["class"].split()):
            found.append(group.findtext(f"{SVG}text"))
    return found


@looped("kind", ["static", "policy", "nothing"])
def test_example_draws_the_sequential_text(kind: str, pocket: Base, truth: list[int]) -> None:
    """The red path of each step is the next part of the model's greedy text, in the picture as in the JSON."""
    policy_files(pocket.vocab_size)
    tree = {"static": ["mc_sim_7b_63"], "policy": ["p.yaml"], "nothing": []}[kind]
    at, drafts = 0, 0
    for step in ("1", "2"):
        data = treeopt_json("render", *tree, "--example", PROMPT, "--step", step, "-o", "s.svg", "--force")
        path = [*data["accepted_tokens"], data["bonus"]["token"]]
        assert path == truth[at : at + len(path)]
        texts = [*data["accepted_texts"], data["bonus"]["text"]]
        assert red("s.svg") == [one.replace(" ", "␣").replace("\n", "↵") for one in texts]
        assert pocket.tokenizer is not None
        assert "".join(texts).strip() in pocket.tokenizer.decode(truth)
        assert (data["step"], data["prompt"], data["label"]) == (int(step), PROMPT, "token")
        assert len(data["drawn"]) == data["nodes"]
        at, drafts = at + len(path) - 1, drafts + len(path) - 2
    assert drafts or kind == "nothing"


def test_labels_and_json_of_a_tree(small_tree: Tree) -> None:
    """Labels are as the option says; the JSON lists what is drawn."""
    save_tree(small_tree, "t.yaml")
    data = treeopt_json("render", "t.yaml", "--label", "probability", "-o", "t.svg")
    assert [one["label"] for one in data["drawn"]] == ["", ".50", ".20", ".25", ".10", ".12"]
    assert (data["nodes"], data["depth"], data["leaves"], data["output"]) == (6, 3, 3, "t.svg")
    assert data["drawn"][3] == {"kind": "node", "label": ".25", "node": 3, "parent": 1, "path": [0, 0], "value": 0.25}
    assert "accepted" not in data
    treeopt("render", "t.yaml", "-o", "picture")
    assert ElementTree.parse("picture").getroot().tag.endswith("svg")
    treeopt("render", "t.yaml", "--label", "none", "-o", "t.dot")
    assert ".50" not in Path("t.dot").read_text()


@looped(
    ("arguments", "number"),
    [
        (("mc_sim_7b_63", "--label", "probability"), "E107"),
        (("mc_sim_7b_63", "--label", "token"), "E107"),
        (("p.yaml",), "E203"),
        (("mc_sim_7b_63", "--example", "x", "--drafter", "d.safetensors"), "E223"),
        (("mc_sim_7b_63", "--example", "x " * 600), "E503"),
    ],
)
def test_render_errors(arguments: tuple[str, ...], number: str) -> None:
    """One error, before anything is written."""
    policy_files(2048)
    assert error_number(treeopt("render", *arguments, "-o", "out.svg", status=3)) == number
    assert not Path("out.svg").exists()


@pytest.mark.usefixtures("unloaded")
@looped(("suffix", "numbers"), [("xyz", {"E204"}), ("png", {"E401", ""})])
def test_format_is_checked_before_a_model_is_loaded(small_tree: Tree, suffix: str, numbers: set[str]) -> None:
    """A format that graphviz does not know is E204, any other one without graphviz E401."""
    save_tree(small_tree, "t.yaml")
    line = ["render", "t.yaml", "--example", "def f", "-o", f"t.{suffix}"]
    done = CliRunner().invoke(program, line)
    found = re.findall(r"^error\[(E\d+)\]", done.stderr, flags=re.MULTILINE)
    assert {*found} <= numbers
    assert not found or done.exit_code in (3, 4)
    assert found or isinstance(done.exception, AssertionError), "with graphviz the model is loaded next"


def test_step_beyond_the_context_is_a_usage_error() -> None:
    """The text ends with the context, and the message has the number of its steps."""
    save_tree(Tree.chain(2), "t.yaml")
    long = "x = 1\n" * 110
    said = treeopt("render", "t.yaml", "--example", long, "--step", "100000", status=2).stderr
    assert "there is no step 100000" in said


def test_policy_without_an_example_says_what_draws_it() -> None:
    """A policy has no tree of its own: the error names --example."""
    policy_files(2048)
    assert "treeopt render --example" in treeopt("render", "p.yaml", status=3).stderr


@looped(
    ("arguments", "said"),
    [
        ((), "Missing argument 'TREE'"),
        (("mc_sim_7b_63", "--step", "2"), "--step belongs to --example"),
        (("mc_sim_7b_63", "--model", "pocket"), "--model belongs to --example"),
        (("mc_sim_7b_63", "--theme", "dark", "-o", "t.dot"), "--theme belongs to an .svg file"),
        (("mc_sim_7b_63", "--drafter", "d.safetensors"), "--drafter belongs to --example"),
        (("mc_sim_7b_63", "--example", ""), "it is empty"),
        (("--heads", "pocket", "--example", "x"), "--heads needs --tree"),
    ],
)
@pytest.mark.usefixtures("unloaded")
def test_render_usage(arguments: tuple[str, ...], said: str) -> None:
    """Options that do not belong together are refused before a model is loaded."""
    result = treeopt("render", *arguments, status=2)
    assert said in result.stderr


def test_stored_plan_of_a_drafter_is_drawn(pocket: Base, truth: list[int]) -> None:
    """--example without TREE takes the tree that the drafter recommends, here a policy."""
    policy, drafter = untrained(pocket)
    save_drafter(dataclasses.replace(drafter, plan=policy), "p.safetensors")
    assert "Missing argument 'TREE'" in treeopt("render", "--drafter", "p.safetensors", status=2).stderr
    data = treeopt_json("render", "--drafter", "p.safetensors", "--example", PROMPT)
    assert (data["output"], data["accepted_tokens"]) == ("p.svg", truth[: len(data["accepted"])])
