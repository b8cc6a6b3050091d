"""`treeopt validate`: what it prints, what it warns of, and with which status it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from looped import looped
from program import treeopt

from treeopt.cli.app import program
from treeopt.cli.console import Console
from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.draft_metrics import DraftMetrics, Step
from treeopt.evaluate.baselines import Baseline, Call, Run, with_generate
from treeopt.evaluate.validation_report import lossless_rows
from treeopt.files.trees import plan_id, save_tree
from treeopt.models.base import Base, load_base
from treeopt.models.head_files import load_heads
from treeopt.tree import Tree

HEADS = "models/tinystories-260k-medusa"
FIGURES = (
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "acceptance_histogram",
)
OPENINGS = "data/story_openings.json"
TREE = Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


@pytest.fixture(autouse=True)
def _files() -> None:
    """A tree in `t.yaml`."""
    save_tree(TREE, "t.yaml")


@pytest.fixture
def validate(shared: Path) -> Callable[..., Result]:
    """The command on the small model: two openings, 12 tokens, unless told otherwise."""

    def run(*arguments: str, prompts: str = "", status: int = 0) -> Result:
        line = [
            "validate",
            "--heads",
            str(shared / HEADS),
            "--tree",
            "t.yaml",
            "--max-new-tokens",
            "12",
            "--limit",
            "2",
        ]
        result = CliRunner().invoke(program, [*line, "--prompts", prompts or str(shared / OPENINGS), *arguments])
        assert result.exit_code == status, result.output + repr(result.exception)
        return result

    return run


@pytest.fixture
def wrong_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tree decoder ends its text with a token that nobody chose."""
    start = TreeDecoder.start_all

    def spoiled(self: TreeDecoder, ids: Sequence[Sequence[int]], max_new_tokens: int) -> Iterator[dict[int, list[int]]]:
        steps = list(start(self, ids, max_new_tokens))
        if self.tree.nodes > 1:
            last = steps[-1][0]
            steps[-1] = {0: Step([*last[:-1], 300], last.num_draft_tokens)}
        return iter(steps)

    monkeypatch.setattr(TreeDecoder, "start_all", spoiled)


def table(text: str, first: str) -> list[list[str]]:
    """The rows of a printed table whose header begins so; its own first line included."""
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(first))
    rows = []
    for line in lines[begin:]:
        if "\t" not in line:
            break
        rows.append(line.split("\t"))
    return rows


def test_report_of_all_baselines(validate: Callable[..., Result]) -> None:
    """Every baseline has its line, speeds their quartiles over the repeats, and depths both their shares."""
    text = validate("--repeats", "2").stdout
    assert "lossless        yes: 2/2 texts, 24 tokens, against stock greedy generate in float32" in text
    measured = re.search(r"tokens per step ([0-9.]+) measured: (\d+) tokens / (\d+) steps", text)
    assert measured is not None
    assert float(measured[1]) == pytest.approx(int(measured[2]) / int(measured[3]), abs=1e-4)
    speeds = table(text, "\ttokens/step")
    assert [row[0] for row in speeds] == ["", "stock generate", "prompt lookup", "autoregressive", "tree 8"]
    assert speeds[3][1] == "1.00"
    assert re.fullmatch(r"\d+ \(\d+-\d+\)", speeds[4][2])
    assert "median (quartiles) of 2 repeats" in text
    depths = table(text, "drafts accepted")
    assert [row[0] for row in depths[1:]] == ["1", "2", "3"]
    assert all(measured == predicted for _, measured, predicted in depths[1:])


def test_json_holds_what_is_printed(validate: Callable[..., Result]) -> None:
    """Medians and quartiles of each baseline, shares by depth, and no difference."""
    data = json.loads(validate("--repeats", "3", "--json").stdout)
    assert (data["lossless"], data["failures"], data["differences"], data["repeats"]) == (True, 0, [], 3)
    assert data["acceptance_by_depth"]["measured"] == data["acceptance_by_depth"]["predicted"]
    for name, rate in data["tokens_per_second"].items():
        low, high = data["quartiles"]["tokens_per_second"][name]
        assert low <= rate <= high
    assert data["speedup_vs_autoregressive"]["autoregressive"] == 1.0
    assert data["speedup_vs_autoregressive"]["tree"] == data["speedup"]
    assert data["by_turn"]["1"]["tokens"] == data["tokens"] == 24
    assert data["by_category"] == {}


@looped("batch_size", ["1", "3"])
def test_json_names_metrics_as_engines_do(
    validate: Callable[..., Result], shared: Path, batch_size: str, tmp_path: Path
) -> None:
    """The six figures are those of the texts' tokens and steps, as the decoder and replay count them; so in parts."""
    rows = [{"prompt": text, "category": name} for text, name in (("One day", "a"), ("Tom and", "b"), ("The cat", "a"))]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--limit", "3", "--batch-size", batch_size)
    data = json.loads(validate(*options, "--json", prompts=str(tmp_path / "p.jsonl")).stdout)
    base, heads = load_base(str(shared / "models/tinystories-260k")), load_heads(str(shared / HEADS)).heads
    prompts = [base.tokenizer(row["prompt"])["input_ids"] for row in rows]
    texts = TreeDecoder(base, heads, TREE).generate(prompts, 12)
    last_roots = sum(one.step_lengths[-1] == 1 for one in texts)  # of a text that ends by its budget
    assert data["num_drafts"] == sum(data["acceptance_histogram"]) == data["steps"] - last_roots
    assert data["num_draft_tokens"] == 7 * data["num_drafts"]
    assert data["num_accepted_tokens"] == data["tokens"] - data["steps"] > 0
    assert data["draft_acceptance_rate"] == data["num_accepted_tokens"] / data["num_draft_tokens"]
    assert data["mean_acceptance_length"] == data["tokens_per_step"] == data["predicted_tokens_per_step"]
    assert data["acceptance_histogram"] == data["predicted_acceptance_histogram"]
    assert len(data["acceptance_histogram"]) == TREE.depth + 1
    parts = data["by_category"]
    for name, of_part in (("a", texts[::2]), ("b", texts[1:2])):
        assert DraftMetrics.total(one.draft_metrics for one in of_part).as_dict().items() <= parts[name].items()
    assert {key: data["by_turn"]["1"][key] for key in FIGURES} == {key: data[key] for key in FIGURES}
    said = (
        f"drafts          {data['num_draft_tokens']} verified in the {data['num_drafts']} steps that had any, "
        f"{data['num_accepted_tokens']} accepted ({data['draft_acceptance_rate']:.1%})"
    )
    assert said in validate(*options, prompts=str(tmp_path / "p.jsonl")).stdout.splitlines()


def test_json_without_drafts(validate: Callable[..., Result]) -> None:
    """The one-node tree has no rate, in JSON null."""
    save_tree(Tree(()), "one.yaml")
    data = json.loads(validate("--tree", "one.yaml", "--json").stdout)
    assert [data[key] for key in FIGURES] == [0, 0, 0, None, 1.0, [0]]
    assert data["predicted_acceptance_histogram"] == [0]
    assert len(data["made_with"]["model_id"]) == 16
    assert (data["made_with"]["tree_id"], data["made_with"]["drafter_id"]) == (plan_id(Tree(())), "")
    assert (
        "drafts          0 verified in the 0 steps that had any, 0 accepted\n" in validate("--tree", "one.yaml").stdout
    )


@pytest.mark.usefixtures("wrong_decoder")
def test_bug_exits_5(validate: Callable[..., Result]) -> None:
    """A planted bug is named with its row, place, both tokens and the gap, in float32 as in bfloat16."""
    for dtype in ("float32", "bfloat16"):
        result = validate("-q", "--dtype", dtype, status=5)
        assert "error[E501]: 2 of 2 texts differ from greedy decoding (2 bug)" in result.stderr
        assert re.search(
            r"row 0, token 11: greedy \d+ '.+', tree 300 '.+', gap \d.*: bug$", result.stderr, re.MULTILINE
        )
        assert "lossless        NO: 0/2 texts" in result.stdout
    assert json.loads(validate("--json", status=5).stdout)["differences"][0]["cause"] == "bug"


@pytest.mark.usefixtures("wrong_decoder")
def test_rounding_is_no_failure_in_bfloat16(validate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that part by rounding, in bfloat16: exit 0, said in the report, and listed beside it."""
    monkeypatch.setattr("treeopt.evaluate.divergence._MARGIN", 1e9)  # whatever differs is taken for rounding
    result = validate("--dtype", "bfloat16", status=0)
    assert "lossless        no failure, but differences (2 rounding): 0/2 texts" in result.stdout
    assert re.search(r"gaps of the logits where texts differ: [0-9.e-]+ to [0-9.e-]+\n", result.stdout)
    assert "differences that are not failures (2 rounding)" in result.stderr
    assert "error[E501]: 2 of 2 texts" in validate("-q", status=5).stderr  # float32


def test_prompt_lookup_that_differs_is_not_our_failure(
    validate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock prompt lookup that gives another text is said so, and judges nobody."""

    def spoiled(base: Base, **options: Any) -> Baseline:
        baseline = with_generate(base, **options)
        if not options:
            return baseline

        def run(prompts: Sequence[Sequence[int]], new: int, call: Call) -> list[Run]:
            return [replace(found, tokens=[*found.tokens[:-1], 300]) for found in baseline(prompts, new, call)]

        return run

    monkeypatch.setattr("treeopt.evaluate.validate.with_generate", spoiled)
    text = validate().stdout
    assert "lossless        yes: 2/2 texts" in text
    assert "(not counted: prompt lookup differs from stock generate on 2 texts)" in text


def test_batches(validate: Callable[..., Result]) -> None:
    """Decoded together, the texts are the same; the report names the batch and leaves prompt lookup out."""
    text = validate("--batch-size", "2").stdout
    assert "lossless        yes: 2/2 texts" in text
    assert "batch 2, cpu" in text
    assert "prompt lookup was left out: " in text


def test_thresholds_exit_6_after_the_report(validate: Callable[..., Result]) -> None:
    """A metric below its minimum: the report, then one error that names both."""
    result = validate("-q", "--min-tokens-per-step", "7.5", "--min-speedup", "1000", status=6)
    assert "tokens per step" in result.stdout
    assert re.search(r"error\[E505\]: \d\.\d+ tokens per step, the minimum is 7\.5; speedup", result.stderr)
    assert "--min-tokens-per-step, --min-speedup" in result.stderr
    assert "E505" not in validate("--min-tokens-per-step", "1.01", "--min-speedup", "0.001").stderr


def test_prompts_of_the_calibration_are_noted() -> None:
    """Texts that the tree was built from are named as such; those after them are not."""
    Path("p.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("import os", "def f", "class A"))
    )
    short = ["--prompts", "p.jsonl", "--max-new-tokens", "8"]
    treeopt("calibrate", *short, "--limit", "2", "-o", "c.safetensors")
    treeopt("build", "--calibration", "c.safetensors", "--nodes", "4", "-o", "t.yaml")
    for skip, noted in (("0", True), ("2", False)):
        result = treeopt("validate", "--tree", "t.yaml", *short, "--repeats", "1", "--skip", skip)
        assert ("the tree was built from 2 texts of p.jsonl too; --skip 2 takes" in result.stderr) is noted
    Path("t.yaml").write_text(Path("t.yaml").read_text().replace("sequences: 2", 'sequences: "2"'))
    assert "built from" not in treeopt("validate", "--tree", "t.yaml", *short, "--repeats", "1").stderr


def test_benchmark_rows_are_asked_turn_by_turn(validate: Callable[..., Result]) -> None:
    """MT-bench's rows, one without a category and a second turn too long among them: metrics for each part."""
    rows: list[dict[str, Any]] = [
        {"question_id": 81, "category": "writing", "turns": ["One day", "Then the bird"], "reference": []},
        {"question_id": 82, "category": "math", "turns": ["Once upon a time"]},
        {"question_id": 83, "category": "writing", "turns": ["The sun", "word " * 300, "never asked"]},
    ]
    Path("question.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = validate("--limit", "3", prompts="question.jsonl")
    assert "no chat template: each turn follows the answer before it" in result.stderr
    parts = table(result.stdout, "\ttexts")
    assert [row[:3] for row in parts[1:]] == [
        ["writing", "3", "36"],
        ["math", "1", "12"],
        ["turn 1", "3", "36"],
        ["turn 2", "1", "12"],
    ]
    assert "skipped 1 prompt: row 2 turn 2 (too long for the context" in result.stdout
    data = json.loads(validate("--limit", "3", "--json", prompts="question.jsonl").stdout)
    assert (data["prompts"], data["texts"], data["skipped"], data["lossless"]) == (3, 4, 1, True)
    assert (
        data["by_category"]["writing"]["tokens_per_step"] == data["by_category"]["writing"]["predicted_tokens_per_step"]
    )
    assert sum(part["steps"] for part in data["by_turn"].values()) == data["steps"]


def test_losing_tree_is_warned_of(validate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree whose steps cost more than they yield: both numbers, and the commands."""
    monkeypatch.setattr("treeopt.evaluate.baselines.Metrics._overhead", lambda *_inputs: 9.0)
    said = validate().stderr
    assert "the tree is slower than autoregressive decoding: a step of 8 nodes" in said
    assert re.search(r"takes the time of 9\.00 autoregressive steps and yields \d\.\d\d tokens", said)
    assert "treeopt profile" in said


@pytest.mark.usefixtures("wrong_decoder")
def test_judge_limits_what_is_decided(validate: Callable[..., Result]) -> None:
    """Metrics are printed before the judgement; unjudged texts are counted, and fail in float32 alone."""
    result = validate("--judge", "1", status=5)
    assert result.stdout.index("tokens per step") < result.stdout.index("lossless        NO: 0/2 texts")
    assert "1 of 2 differing texts judged" in result.stdout
    assert "2 of 2 texts differ from greedy decoding (1 bug, 1 unjudged)" in result.stderr
    assert "--judge 2 judges all" in result.stderr
    half = validate("--judge", "0", "--dtype", "bfloat16")
    assert "lossless        no failure, but differences (2 unjudged): 0/2 texts" in half.stdout
    assert "0 of 2 differing texts judged" in half.stdout
    data = json.loads(validate("--judge", "0", "--json", status=5).stdout)
    assert (data["judged"], data["differing"], data["failures"]) == (0, 2, 2)
    assert data["differences"][0]["gap"] is None


@pytest.mark.usefixtures("wrong_decoder")
def test_metrics_are_printed_before_judging(validate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption of the judging comes after the metrics."""

    def interrupted(_model: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("treeopt.evaluate.divergence._in_float64", interrupted)
    said = validate(status=1).stdout  # click's runner ends so; the program itself exits 130
    assert "predicted by replay" in said
    assert "overhead" in said
    assert "lossless" not in said


@looped(("dtype", "said"), [("float32", "yes:"), ("bfloat16", "as far as these texts show:")])
def test_lossless_is_said_of_float32_alone(dtype: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In half precision equal texts do not show that others are."""
    metrics = SimpleNamespace(trials=(1, 2), tokens=9)
    found: Any = SimpleNamespace(
        metrics=metrics,
        our_differences=(),
        differences=(),
        differing=0,
        failures=(),
        num_judged=0,
        made_by={"dtype": dtype},
    )
    Console(False).report(*lossless_rows(found))
    assert (
        f"lossless        {said} 2/2 texts, 9 tokens, against stock greedy generate in {dtype}"
        in capsys.readouterr().out
    )
