"""`treeopt validate --acceptance sample` and `typical`: what is printed, the JSON, warnings, statuses, and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from looped import looped
from program import treeopt, treeopt_json

from treeopt.evaluate import validate_sample as module
from treeopt.evaluate.validate_sample import DistributionTest
from treeopt.files.trees import save_tree
from treeopt.tree import Tree

SMALL = ("--tree", "t.yaml", "--limit", "2", "--max-new-tokens", "8")
SAMPLE = ("validate", *SMALL, "--acceptance", "sample", "--temperature", "0.5", "--seed", "3", "--draws", "24")
TYPICAL = ("validate", *SMALL, "--acceptance", "typical")


@pytest.fixture(autouse=True)
def _files() -> None:
    """A tree in `t.yaml`."""
    save_tree(Tree.from_paths([(0,), (1,), (0, 0)]), "t.yaml")


def untimed(data: Any) -> Any:
    """A report, and its parts, without what a clock measured."""
    if not isinstance(data, dict):
        return data
    clock = ("seconds", "second", "speedup", "overhead", "quartiles", "autoregressive")
    return {key: untimed(value) for key, value in data.items() if not key.endswith(clock)}


@pytest.mark.slow
def test_sample_prints_both_figures_with_their_errors() -> None:
    """Measured and predicted tokens per step, standard errors, z-score, and the tests of the distribution."""
    text = treeopt(*SAMPLE[:-1], "100", "--repeats", "2").stdout
    first, second = text.splitlines()[:2]
    assert first.startswith("tokens per step 1.")
    assert " ± " in first
    assert "measured on 4 texts" in first
    assert "predicted on the texts of stock generate; z-score " in second
    assert "\nlossless        yes, by the distribution of texts in float32: p " in text
    assert "of 4 tests (Bonferroni), limit 0.0001" in text
    assert text.count("\nrow ") == 2


@pytest.mark.slow
def test_sample_json_is_the_same_for_equal_seeds() -> None:
    """The settings, both figures, both standard errors, and the tests; all the same again."""
    data = treeopt_json(*SAMPLE[:-1], "100", "--top-k", "30", "--top-p", "0.9")
    assert [data[key] for key in ("acceptance", "temperature", "top_k", "top_p", "seed")] == ["sample", 0.5, 30, 0.9, 3]
    assert (data["lossy"], data["lossless"], data["texts"], data["prompts"]) == (False, True, 2, 2)
    z = (data["tokens_per_step"] - data["predicted_tokens_per_step"]) / data["z_score"]
    assert 0 < z <= data["measured_standard_error"] + data["predicted_standard_error"] + 0.01
    assert data["tokens"] / data["steps"] == data["tokens_per_step"]
    depths = data["acceptance_by_depth"]
    assert len(depths["measured"]) == len(depths["predicted"]) == 2
    assert [one["draws"] for one in data["tests"]] == [100, 100]
    assert untimed(treeopt_json(*SAMPLE[:-1], "100", "--top-k", "30", "--top-p", "0.9")) == untimed(data)
    assert treeopt_json(*SAMPLE[:-1], "1")["lossless"] is None, "one draw tests nothing"


def test_sample_with_another_distribution_exits_5(monkeypatch: pytest.MonkeyPatch) -> None:
    """E501 with the prompt and both p-values, after the report."""
    compare = module.compare_texts

    def wrong(*given: Any) -> DistributionTest:
        found = compare(*given)
        return dataclasses.replace(found, cells=2, p_stock=1e-6 if found.prompt_id.endswith("1") else found.p_stock)

    monkeypatch.setattr(module, "compare_texts", wrong)
    result = treeopt(*SAMPLE, status=5)
    assert "error[E501]: the texts of 1 of 2 prompts do not have the distribution" in result.stderr
    assert "1e-06 against stock generate" in result.stderr
    assert "row 1: p " in result.stderr
    assert "\nlossless        NO, by the distribution" in result.stdout


@looped(("score", "warned"), [(2e4, True), (-2e4, True), (-4.2, False)])
def test_sample_warns_of_a_wrong_prediction(score: float, warned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A z-score that two prompts (Student's t, one degree of freedom) do not explain is a warning, and no failure."""
    monkeypatch.setattr(module, "z_score", lambda *_: score)
    monkeypatch.setattr(module, "LEAST_DRAFTS", 1)  # these few tokens count
    result = treeopt(*SAMPLE[:-1], "0")
    assert (f"differ by {score:+.1f} standard errors" in result.stderr) is warned


def test_typical_prints_the_quality_of_three_kinds_of_texts() -> None:
    """Predicted beside measured, and greedy, sampled and typical texts; lossy is said so."""
    text = treeopt(*TYPICAL, "--epsilon", "0.05").stdout
    lines = text.splitlines()
    measured, predicted = (line.split()[place] for line, place in ((lines[0], 3), (lines[1], 0)))
    assert measured == predicted
    assert "steps agree on 2/2 texts" in lines[1]
    table = [line.split("\t") for line in lines if "\t" in line]
    begin = next(i for i, row in enumerate(table) if row[0] == "texts")
    assert [row[0] for row in table[begin:]] == ["texts", "greedy", "sampled generate", "typical"]
    assert table[begin + 1][-1] == "100.0%"
    assert "LOSSY" in text
    assert "(temperature 0.7, epsilon 0.05, delta 0.3)" in text


def test_typical_json() -> None:
    """The rule, the figures and the quality by kind of text."""
    data = treeopt_json(*TYPICAL, "--temperature", "1.5", "--delta", "0.9")
    assert [data[key] for key in ("acceptance", "temperature", "epsilon", "delta")] == ["typical", 1.5, 0.09, 0.9]
    assert (data["lossy"], data["prediction_misses"]) == (True, [])
    assert data["predicted_tokens_per_step"] == data["tokens_per_step"]
    assert data["acceptance_by_depth"]["measured"] == data["acceptance_by_depth"]["predicted"]
    assert data["acceptance_histogram"] == data["predicted_acceptance_histogram"]
    assert list(data["quality"]) == ["greedy", "sampled_generate", "typical"]
    names = ["log_likelihood", "distinct_1", "distinct_2", "distinct_3", "agreement_with_greedy"]
    assert all(list(one) == names for one in data["quality"].values())
    assert data["quality"]["greedy"]["agreement_with_greedy"] == 1


def test_json_of_all_rules_has_the_same_names(tmp_path: Path) -> None:
    """Only settings and what one rule alone measures differ; categories have their part under every rule."""
    rows = [{"prompt": "One day", "category": "a"}, {"prompt": "The cat", "category": "b"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--prompts", "p.jsonl", "--repeats", "2")
    greedy = treeopt_json("validate", *SMALL, *options)
    sample = treeopt_json(*SAMPLE[:-1], "0", *options)
    typical = treeopt_json(*TYPICAL, *options)
    assert [data["acceptance"] for data in (greedy, sample, typical)] == ["greedy", "sample", "typical"]
    assert [data["lossy"] for data in (greedy, sample, typical)] == [False, False, True]
    assert [data["lossless"] for data in (greedy, sample, typical)] == [True, None, False]
    assert [data["prompts"] for data in (greedy, sample, typical)] == [2, 2, 2]
    assert [data["texts"] for data in (greedy, sample, typical)] == [2, 4, 2]
    assert [data["repeats"] for data in (greedy, sample, typical)] == [2, 2, 2]
    for data in (greedy, sample, typical):
        data.pop("warnings", None)  # a slow tree has one
        assert list(data["by_category"]) == ["a", "b"]
        parts = data["by_category"].values()
        assert all(part["predicted_tokens_per_step"] >= 1 for part in parts)
        assert sum(part["tokens"] for part in parts) == data["tokens"]
    errors = {"measured_standard_error", "predicted_standard_error", "z_score"}
    assert sample.keys() - greedy.keys() == {"temperature", "top_k", "top_p", "seed", "p_value", "tests", *errors}
    assert typical.keys() - greedy.keys() == {"temperature", "epsilon", "delta", "quality"}
    judged = {"failures", "differing", "judged", "differences"}
    assert greedy.keys() - sample.keys() == {*judged, "prediction_misses"}
    assert greedy.keys() - typical.keys() == judged


@pytest.mark.usefixtures("unloaded")
@looped(
    ("options", "message"),
    [
        (("--temperature", "0.7"), "--temperature belongs to --acceptance sample and typical"),
        (("--seed", "1"), "--seed belongs to --acceptance sample"),
        (("--draws", "9"), "--draws belongs to --acceptance sample"),
        (("--acceptance", "typical", "--draws", "9"), "--draws belongs to --acceptance sample"),
        (("--acceptance", "sample", "--epsilon", "0.1"), "--epsilon belongs to --acceptance typical"),
        (("--acceptance", "sample", "--judge", "1"), "--judge belongs to --acceptance greedy"),
        (("--acceptance", "sample", "--temperature", "0"), "--temperature 0 is greedy decoding"),
        (("--acceptance", "typical", "--temperature", "0"), "--temperature 0 is greedy decoding"),
        (("--acceptance", "rejection"), "'rejection' is not one of 'greedy', 'sample', 'typical'"),
    ],
)
def test_options_of_another_rule_are_refused(options: tuple[str, ...], message: str) -> None:
    """A usage error before a model is loaded."""
    assert message in " ".join(treeopt("validate", *SMALL, *options, status=2).stderr.replace("│", " ").split())
