"""What is exported is enough: the functions that take models give the same for objects, names and records."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from looped import looped
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import treeopt
from treeopt.files.bundled import pocket

PROMPTS = ["import os", "def main():", "class A:"]
SMALL = {"max_new_tokens": 10}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The built-in model as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(pocket(), dtype=torch.float32)


def test_calibration_of_objects_is_that_of_names(model: PreTrainedModel, tmp_path: Path) -> None:
    """Objects and a list give the traces that names and a file of the same rows give, and the same ids of both."""
    (tmp_path / "p.json").write_text(json.dumps(PROMPTS))
    heads = treeopt.load_heads("pocket")
    tokenizer = AutoTokenizer.from_pretrained(pocket())
    named = treeopt.run_calibration("pocket", "pocket", tmp_path / "p.json", **SMALL).calibration
    for given in (
        treeopt.run_calibration(model, heads.heads, PROMPTS, **SMALL),
        treeopt.run_calibration(model, heads, treeopt.load_prompts(tmp_path / "p.json"), tokenizer=tokenizer, **SMALL),
        treeopt.run_calibration(treeopt.load_base("pocket"), pocket() / "heads", iter(PROMPTS), **SMALL),
    ):
        made = given.calibration
        assert made.ranks.tolist() == named.ranks.tolist()
        assert made.token_hashes == named.token_hashes
        assert (made.provenance.model_id, made.provenance.heads_id) == (
            named.provenance.model_id,
            named.provenance.heads_id,
        )


def test_given_answers_are_scored(model: PreTrainedModel) -> None:
    """Rows that bring answers are scored as those of a file."""
    rows = [{"prompt": "import os", "output": " and more of it"}]
    run = treeopt.run_calibration(model, "pocket", rows, responses=True)
    assert run.calibration.sequences == 1


def test_validation_of_objects_is_that_of_names(model: PreTrainedModel, tmp_path: Path) -> None:
    """A tree as a list, a record or a file of either, and prompts in any form, are proved alike."""
    (tmp_path / "mc.py").write_text("mc = [[0], [1], [0, 0]]")
    heads = treeopt.load_heads("pocket").heads
    wanted = treeopt.validate("pocket", "pocket", treeopt.Tree([[0], [1], [0, 0]]), PROMPTS, **SMALL)
    assert wanted.lossless
    for tree in ([[1], [0], [0, 0]], tmp_path / "mc.py"):
        found = treeopt.validate(model, heads, tree, PROMPTS, **SMALL)
        assert found.lossless
        assert found.tokens_per_step == wanted.tokens_per_step == found.predicted.tokens_per_step


def test_prompts_that_do_not_fit_are_named(model: PreTrainedModel) -> None:
    """A prompt too long for the context is left out of the proof, and named in it."""
    found = treeopt.validate(model, "pocket", [[0]], ["import os", "import os\n" * 2000], **SMALL)
    assert [one.reason for one in found.skipped] == ["too long for the context"]
    assert len(found.metrics.trials) == 1


def test_policy_with_its_drafter_is_proved_from_its_file(tmp_path: Path) -> None:
    """A policy's file brings its drafter along, here as in the decoder."""
    drafter = treeopt.Drafter.heads_only(5, top=8)
    treeopt.save_drafter(drafter, tmp_path / "d.safetensors")
    policy = treeopt.TreePolicy(6, 3, drafter.id)
    named = dataclasses.replace(policy, source={"drafter": str(tmp_path / "d.safetensors")})
    treeopt.save_policy(named, tmp_path / "p.yaml")
    wanted = treeopt.validate("pocket", "pocket", policy, PROMPTS[:1], drafter=drafter, **SMALL)
    for tree, given in ((tmp_path / "p.yaml", None), (policy, tmp_path / "d.safetensors")):
        found = treeopt.validate("pocket", "pocket", tree, PROMPTS[:1], drafter=given, **SMALL)
        assert found.lossless
        assert found.tokens_per_step == wanted.tokens_per_step


@pytest.mark.slow
def test_distill_and_train_from_objects(model: PreTrainedModel, tmp_path: Path) -> None:
    """Answers to a list of prompts, less those that are kept for judging, train heads that load."""
    done = treeopt.distill(model, PROMPTS, tmp_path / "a.jsonl", exclude=["import os"], **SMALL)
    assert done.rows == 2
    talk = treeopt.distill(model, treeopt.SelfTalk(1, opening_tokens=4), tmp_path / "s.jsonl", **SMALL)
    assert talk.rows == 1
    settings = treeopt.Settings(num_heads=1, steps=1, shared_lm_head=True, length=32)
    for i, texts in enumerate((tmp_path / "a.jsonl", str(tmp_path / "s.jsonl"), PROMPTS)):
        trained = treeopt.train_heads(model, texts, tmp_path / f"heads{i}", settings)
        assert trained.steps == 1
        assert treeopt.load_heads(tmp_path / f"heads{i}").base == str(pocket())


def test_profile_from_objects(model: PreTrainedModel) -> None:
    """A profile needs no tokenizer and no names."""
    heads = treeopt.load_heads("pocket").heads
    profile = treeopt.measure_profile(model, heads, nodes=(2,), contexts=(8,), repeats=1)
    assert [point.nodes for point in profile.points] == [1, 2]


def calls(folder: Path) -> dict[str, Callable[..., Any]]:
    """Each function with right arguments where none are given."""
    return {
        "run_calibration": lambda model="pocket", heads="pocket", prompts=("a",): treeopt.run_calibration(
            model, heads, prompts, **SMALL
        ),
        "validate": lambda model="pocket", heads="pocket", prompts=("a",): treeopt.validate(
            model, heads, [[0]], prompts, **SMALL
        ),
        "measure_profile": lambda model="pocket", heads="pocket": treeopt.measure_profile(model, heads),
        "distill": lambda model="pocket", prompts=("a",): treeopt.distill(model, prompts, folder / "o.jsonl", **SMALL),
        "train_heads": lambda model="pocket", prompts=("a b c",): treeopt.train_heads(model, prompts, folder / "h"),
    }


WRONG = [(name, "model") for name in ("run_calibration", "validate", "measure_profile", "distill", "train_heads")]
WRONG += [(name, "heads") for name in ("run_calibration", "validate", "measure_profile")]
WRONG += [(name, "prompts") for name in ("run_calibration", "validate", "distill", "train_heads")]


@looped(("name", "argument"), WRONG)
def test_wrong_types_are_one_error(name: str, argument: str, tmp_path: Path) -> None:
    """Each argument of each function refuses what it does not take, says what it takes, and writes nothing."""
    with pytest.raises(TypeError, match="not an object of type int"):
        calls(tmp_path)[name](**{argument: 5})
    assert not list(tmp_path.iterdir())


@looped("name", ["run_calibration", "validate", "measure_profile"])
@looped("given", [5, ["x"]])
def test_wrong_drafters_are_one_error(name: str, given: object) -> None:
    """A drafter of another type is refused by its name; so is `learning`."""
    arguments = {"model": "pocket", "heads": "pocket", "prompts": PROMPTS, "tree": treeopt.Tree.chain(1)}
    names = {"validate": ("model", "heads", "tree", "prompts"), "measure_profile": ("model", "heads")}
    chosen = {one: arguments[one] for one in names.get(name, ("model", "heads", "prompts"))}
    for argument in ("drafter", "learning") if name == "run_calibration" else ("drafter",):
        with pytest.raises(TypeError, match=f"^{argument} is .*, not an object of type {type(given).__name__}"):
            getattr(treeopt, name)(**chosen, **{argument: given})


def test_settings_are_settings(tmp_path: Path) -> None:
    """A dict is no settings."""
    with pytest.raises(TypeError, match=r"treeopt\.Settings, not an object of type dict"):
        treeopt.train_heads("pocket", ["a b c"], tmp_path / "h", {"steps": 1})  # type: ignore[arg-type]


def test_whole_temperatures_are_taken() -> None:
    """A temperature of 1 is one of 1.0."""
    whole, other = (
        treeopt.run_calibration("pocket", "pocket", PROMPTS, temperature=t, max_new_tokens=4) for t in (1, 1.0)
    )
    assert whole.calibration.ranks.tolist() == other.calibration.ranks.tolist()


def test_integers_of_numpy_are_taken(tmp_path: Path) -> None:
    """Integers of numpy give what plain ones give, in memory and in files."""
    number = np.int64(4)
    plain, other = (
        treeopt.run_calibration("pocket", "pocket", PROMPTS, max_new_tokens=n, batch_size=n, seed=n)
        for n in (4, number)
    )
    assert plain.calibration.ranks.tolist() == other.calibration.ranks.tolist()
    made = treeopt.distill("pocket", PROMPTS, tmp_path / "t.jsonl", max_new_tokens=number, seed=number, temperature=1)
    assert made.rows > 0
    profile = treeopt.measure_profile("pocket", "pocket", nodes=[np.int64(2)], contexts=[np.int64(8)], repeats=1)
    assert [point.nodes for point in profile.points] == [1, 2]


@looped("name", ["nodes", "contexts", "batches", "repeats"])
@looped("value", [[1.5], ["2"], [], 0.5, "8", [True]])
def test_profile_refuses_what_is_no_number(name: str, value: object) -> None:
    """A list without whole numbers is a ValueError that names it, before anything is loaded."""
    with pytest.raises(ValueError, match=name):
        treeopt.measure_profile("no such model", "no such heads", **{name: value})  # type: ignore[arg-type]
