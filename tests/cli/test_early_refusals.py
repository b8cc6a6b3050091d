"""What cannot come to anything is refused early: before models are loaded, and before long work is begun."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from drafters import quick_drafter
from looped import looped
from program import error_number, treeopt
from tiny import chat_base, random_heads, tiny_base

from treeopt.files.drafters import save_drafter
from treeopt.files.trees import save_policy, save_tree
from treeopt.models.head_files import save_heads
from treeopt.policy import TreePolicy
from treeopt.tree import Tree

OPENINGS = "prompts.jsonl"


@pytest.fixture(autouse=True)
def _files() -> None:
    """A model that cannot verify trees, its heads, and prompts."""
    base = tiny_base("mamba")
    base.model.save_pretrained("mamba")
    tokenizer = chat_base().tokenizer
    assert tokenizer is not None
    tokenizer.save_pretrained("mamba")
    save_heads(random_heads(base, 2), "heads", base="../mamba")
    save_tree(Tree.chain(2), "t.yaml")
    Path(OPENINGS).write_text('{"text": "w1 w2 w3"}\n')


@pytest.fixture
def no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever loads a model fails."""

    def fail(*_inputs: Any, **_named: Any) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr("treeopt.models.given.load_pair", fail)
    monkeypatch.setattr("treeopt.load_base", fail)
    monkeypatch.setattr("treeopt.models.base.load_base", fail)


MODEL = ("--heads", "heads", "--device", "cpu")


@pytest.fixture
def plans() -> None:
    """A drafter, trees that do not fit it, and a policy of another."""
    base = tiny_base("llama")
    drafter = quick_drafter(base, random_heads(base, 2))
    save_drafter(drafter, "d.safetensors")
    save_tree(Tree(((200,),), drafter=drafter.id), "wide.yaml")
    save_tree(dataclasses.replace(Tree.chain(9), drafter=drafter.id), "deep.yaml")
    save_policy(TreePolicy(8, 2, "0123456789abcdef"), "other.yaml")


PLANS = {
    "no tree file": (("--tree", "no-such.yaml"), "E201"),
    "no such name": (("--tree", "no-such-tree"), "E104"),
    "no drafter file": (("--tree", "t.yaml", "--drafter", "no.safetensors"), "E201"),
    "drafter for a plain tree": (("--tree", "t.yaml", "--drafter", "d.safetensors"), "E223"),
    "another drafter": (("--tree", "other.yaml", "--drafter", "d.safetensors"), "E223"),
    "no drafter": (("--tree", "wide.yaml"), "E223"),
    "rank beyond": (("--tree", "wide.yaml", "--drafter", "d.safetensors"), "E102"),
    "too deep": (("--tree", "deep.yaml", "--drafter", "d.safetensors"), "E101"),
}


@pytest.mark.usefixtures("plans", "no_models")
@looped("name", PLANS)
def test_wrong_plans_cost_no_model(name: str) -> None:
    """A missing or wrong tree or drafter is refused before a model is loaded, by validate and generate."""
    arguments, number = PLANS[name]
    for command in (("validate", "--prompts", OPENINGS), ("generate", "w1 w2")):
        assert error_number(treeopt(*command, *arguments, *MODEL, status=3)) == number


@pytest.mark.usefixtures("no_models")
@looped(
    "line",
    [
        ("generate", "w1", "--tree", "t.yaml", "--top-k", "3"),
        ("generate", "w1", "--tree", "t.yaml", "--seed", "1"),
        ("generate", "w1", "--tree", "t.yaml", "--acceptance", "sample", "--delta", "0.1"),
        ("generate", "w1", "--tree", "t.yaml", "--acceptance", "sample", "--seed", "-1"),
        ("generate", "w1", "--tree", "t.yaml", "--acceptance", "sample", "--seed", str(1 << 64)),
        ("generate", "w1", "--tree", "t.yaml", "--acceptance", "sample", "--temperature", "inf"),
        ("generate", "w1", "--tree", "t.yaml", "--acceptance", "sample", "--temperature", "nan"),
        ("generate", "w1", "--tree", "t.yaml", "--acceptance", "sample", "--top-p", "0"),
        ("generate", "w1", "--tree", "t.yaml", "--acceptance", "typical", "--delta", "nan"),
        ("generate", "w1", "--tree", "t.yaml", "--max-new-tokens", "0"),
        ("validate", "--tree", "t.yaml", "--prompts", OPENINGS, "--judge", "-1"),
        ("validate", "--tree", "t.yaml", "--prompts", OPENINGS, "--repeats", "0"),
        ("validate", "--tree", "t.yaml"),
        ("compare", "--methods", "lookup,model,suffix", "--memory", "new", "--prompts", OPENINGS),
        ("profile", "--sizes", "0"),
        ("profile", "--batch-size", "0"),
        ("profile", "--repeats", "0"),
    ],
)
def test_option_conflicts_cost_no_model(line: tuple[str, ...]) -> None:
    """Options that do not go together, or are out of range, exit 2 before a model is loaded."""
    result = treeopt(*line, *MODEL, status=2)
    assert "Traceback" not in result.output


def test_sizes_that_no_machine_holds_are_refused() -> None:
    """A billion nodes, and a context beyond the model's, are one error each; JSON says the same."""
    base = tiny_base("llama")
    base.model.save_pretrained("llama")
    save_heads(random_heads(base, 2), "lheads", base="../llama")
    line = ("profile", "--heads", "lheads", "--device", "cpu", "--repeats", "1", "-q")
    assert error_number(treeopt(*line, "--sizes", str(10**9), status=3)) == "E230"
    assert error_number(treeopt(*line, "--sizes", "2", "--context", str(10**9), status=3)) == "E503"
    huge = treeopt(*line, "--sizes", "2", "--context", "8", "--batch-size", str(10**14), "--json", status=4)
    assert json.loads(huge.stderr)["error"] == "E403"
    assert not Path("profile.yaml").exists()
