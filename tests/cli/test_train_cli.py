"""`treeopt distill` and `treeopt train` as a user meets them, at tiny size on the shared model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from program import error_number, treeopt, treeopt_json
from tiny import chat_base, tiny_base

from treeopt.cli.console import Console
from treeopt.files.calibrations import load_calibration
from treeopt.models.layouts import load_heads
from treeopt.train import talks as talks_module
from treeopt.train import trainer as trainer_module

TINY = ("--num-heads", "2", "--batch-size", "4", "--length", "64", "--shared-lm-head", "--device", "cpu")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def chat() -> str:
    """A tiny model with a chat template, in the folder `base`, and training texts in `data.jsonl`."""
    base = chat_base()
    base.model.save_pretrained("base")
    assert base.tokenizer is not None
    base.tokenizer.save_pretrained("base")
    said = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3 w4 w5"}]
    Path("data.jsonl").write_text("".join(json.dumps({"messages": said}) + "\n" for _ in range(8)))
    return "base"


def test_distill_train_calibrate(shared: Path) -> None:
    """Self-talk, heads trained on it, and their calibration on texts of their base: one command each."""
    model = shared / "models" / "tinystories-260k"
    made = treeopt_json(
        "distill", "--model", model, "--self-talk", "6", "--max-new-tokens", "24", "--device", "cpu", "-o", "t.jsonl"
    )
    rows = [json.loads(line) for line in Path("t.jsonl").read_text().splitlines()]
    assert set(made) == {"rows", "tokens", "new_rows", "ended_early", "skipped_prompts", "output"}
    assert (made["rows"], made["new_rows"], made["output"]) == (len(rows), len(rows), "t.jsonl")
    assert made["tokens"] == sum(end - start for row in rows for start, end in row["answers"])
    trained = treeopt_json(
        "train", "--model", model, "--data", "t.jsonl", *TINY, "--epochs", "2", "--holdout", "2", "-o", "heads"
    )
    assert set(trained) == {"steps", "heads", "held_out", "output"}
    assert (trained["steps"], trained["heads"], trained["output"]) == (2, 2, "heads")
    assert [set(score) for score in trained["held_out"]] == [{"loss", "top", "trials"}] * 2
    assert all(len(score["top"]) == 5 and score["trials"] > 0 for score in trained["held_out"])
    loaded = load_heads("heads")
    assert loaded.heads.lm_head is None
    assert loaded.base is not None
    assert Path(loaded.base).resolve() == model
    assert sorted(path.name for path in Path("heads").iterdir()) == [
        "config.json",
        "medusa_lm_head.safetensors",
        "metrics.jsonl",
    ]
    prompts = shared / "data" / "story_openings.json"
    options = ("--prompts", prompts, "--limit", "2", "--max-new-tokens", "8", "--device", "cpu")
    treeopt("calibrate", "--heads", "heads", *options, "-o", "c.safetensors")
    assert load_calibration("c.safetensors").num_heads == 2


def test_train_prints_scores_and_next_step(chat: str) -> None:
    """Without --json there is a line a head, and standard error says what was found and what comes next."""
    result = treeopt("train", "--model", chat, "--data", "data.jsonl", *TINY, "--holdout", "2", "-o", "heads")
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert lines[0] == ["", "loss", "top-1", "top-2", "top-3", "top-4", "top-5", "trials"]
    assert [line[0] for line in lines[1:3]] == ["head 1", "head 2"]
    assert [line[-1] for line in lines[1:3]] == ["8", "6"]  # five tokens an answer, its end counted, of two texts
    assert "8 texts, 64 tokens, of data.jsonl" in result.stderr
    assert "treeopt calibrate --heads heads" in result.stderr


def test_train_warns_of_cut_and_empty_rows(chat: str) -> None:
    """Texts beyond --length, and rows without an answer, are counted in warnings."""
    with Path("data.jsonl").open("a") as stream:
        stream.write(json.dumps({"messages": [{"role": "user", "content": "w1"}]}) + "\n")
    result = treeopt("train", "--model", chat, "--data", "data.jsonl", *TINY, "--length", "6", "-q", "-o", "heads")
    assert "8 texts were longer than 6 tokens" in result.stderr
    assert "1 rows hold no answer" in result.stderr


def test_distill_prompts_and_train_on_them(chat: str) -> None:
    """Prompts are answered up to --limit; those too long are named."""
    rows = [{"instruction": "w1"}, {"instruction": "w2 " * 300}, {"instruction": "w3"}]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--model", chat, "--prompts", "p.jsonl", "--max-new-tokens", "16", "--device", "cpu")
    result = treeopt("distill", *options, "-o", "t.jsonl")
    assert "2 answers, 14 tokens (2 answers in this run)" in result.stdout
    assert "skipped 1 prompts: row 1 (too long for the context" in result.stdout
    assert "treeopt train --data t.jsonl" in result.stderr
    assert treeopt_json("distill", *options, "--limit", "1", "-o", "one.jsonl")["rows"] == 1
    treeopt("train", "--model", chat, "--data", "t.jsonl", *TINY, "--steps", "1", "-o", "heads")


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (("train", "--model", "./no-model", "--data", "data.jsonl", "-o", "heads"), "E201"),
        (("train", "--model", "base", "--data", "no-data.jsonl", "-o", "heads"), "E201"),
        (("train", "--model", "base", "--data", "data.jsonl", "-o", "data.jsonl"), "E204"),
        (("train", "--model", "base", "--data", "data.jsonl", "--resume", "-o", "heads"), "E205"),
        (("train", "--model", "base", "--data", "data.jsonl", "--holdout", "8", "-o", "heads"), "E303"),
        (("distill", "--model", "./no-model", "--self-talk", "2", "-o", "t.jsonl"), "E201"),
        (("distill", "--model", "base", "--prompts", "no.jsonl", "-o", "t.jsonl"), "E201"),
        (("distill", "--model", "base", "--self-talk", "2", "-o", "no/t.jsonl"), "E204"),
        (("distill", "--model", "base", "--self-talk", "2", "--resume", "-o", "t.jsonl"), "E205"),
        (("distill", "--model", "base", "--self-talk", "2", "-o", "data.jsonl"), "E202"),
    ],
)
@pytest.mark.usefixtures("chat")
def test_wrong_input_exits_3(arguments: tuple[str, ...], number: str) -> None:
    """What is missing, in the way or too little is one error, by its number."""
    assert error_number(treeopt(*arguments, "--device", "cpu", status=3)) == number


def test_four_bits_need_cuda(chat: str) -> None:
    """A base in 4 bits on a CPU is E402: the environment's fault."""
    result = treeopt("train", "--model", chat, "--data", "data.jsonl", *TINY, "--load-in-4bit", "-o", "heads", status=4)
    assert error_number(result) == "E402"
    assert "--load-in-4bit" in result.stderr


@pytest.mark.parametrize("command", ["train", "distill"])
def test_model_without_tokenizer(chat: str, command: str) -> None:
    """Text needs a tokenizer: E304, before anything is written."""
    tiny_base("llama").model.save_pretrained("bare")
    given = ("--data", "data.jsonl") if command == "train" else ("--prompts", "data.jsonl")
    out = "out" if command == "train" else "out.jsonl"
    assert error_number(treeopt(command, "--model", "bare", *given, "--device", "cpu", "-o", out, status=3)) == "E304"
    assert not Path(out).is_file()
    assert not Path("out/medusa_lm_head.safetensors").exists()
    assert chat == "base"


@pytest.mark.parametrize(
    "arguments",
    [
        ("distill", "-o", "t.jsonl"),
        ("distill", "--prompts", "p", "--self-talk", "2", "-o", "t.jsonl"),
        ("distill", "--self-talk", "0", "-o", "t.jsonl"),
        ("train", "-o", "heads"),
        ("train", "--data", "d", "--warmup", "1", "-o", "heads"),
        ("train", "--data", "d", "--length", "2", "-o", "heads"),
        ("train", "--data", "d"),
    ],
)
def test_wrong_command_lines_exit_2(arguments: tuple[str, ...]) -> None:
    """Options that miss or exclude one another, and numbers out of range, are a wrong command line."""
    treeopt(*arguments, status=2)
    assert list(Path().iterdir()) == []


def test_finished_heads_and_force(chat: str) -> None:
    """Heads are not overwritten unasked; with --force they are."""
    arguments = ("train", "--model", chat, "--data", "data.jsonl", *TINY, "--steps", "2", "-o", "heads")
    treeopt(*arguments)
    before = Path("heads/medusa_lm_head.safetensors").read_bytes()
    assert error_number(treeopt(*arguments, "--seed", "3", status=3)) == "E202"
    assert Path("heads/medusa_lm_head.safetensors").read_bytes() == before
    treeopt(*arguments, "--learning-rate", "0.1", "--force")
    assert Path("heads/medusa_lm_head.safetensors").read_bytes() != before


def test_train_interrupted_and_resumed(chat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C says how to go on; the same command without is refused, and with --resume it ends the run."""
    arguments = ("train", "--model", chat, "--data", "data.jsonl", *TINY, "--steps", "4", "--log-every", "1")

    def interrupted(*_args: Any, **_kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module._Watch, "on_step_end", interrupted)
        result = treeopt(*arguments, "-o", "heads", status=1)
    assert "with --resume" in result.stderr
    assert error_number(treeopt(*arguments, "-o", "heads", status=3)) == "E202"
    treeopt(*arguments, "--resume", "-o", "heads")
    treeopt(*arguments, "-o", "unbroken")
    name = "medusa_lm_head.safetensors"
    assert (Path("heads") / name).read_bytes() == (Path("unbroken") / name).read_bytes()


def test_distill_interrupted_and_resumed(chat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second batch names the unfinished file; --resume ends with the bytes of an unbroken run."""
    rows = [{"instruction": f"w{i}"} for i in range(1, 6)]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("distill", "--model", chat, "--prompts", "p.jsonl", "--batch-size", "2", "--device", "cpu")
    whole, calls = talks_module.continue_texts, []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(talks_module, "continue_texts", interrupted)
        result = treeopt(*arguments, "-o", "t.jsonl", status=1)
    assert "--resume" in result.stderr
    assert "t.jsonl.partial" in result.stderr
    assert len(Path("t.jsonl.partial").read_text().splitlines()) == 2
    assert error_number(treeopt(*arguments, "-o", "t.jsonl", status=3)) == "E202"
    treeopt(*arguments, "--resume", "-o", "t.jsonl")
    treeopt(*arguments, "-o", "unbroken.jsonl")
    assert Path("t.jsonl").read_bytes() == Path("unbroken.jsonl").read_bytes()


def test_only_the_first_process_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun every process does the same, and one of them says so; a RANK of something else silences nobody."""
    for rank, launcher, said in (
        ("0", "TORCHELASTIC_RUN_ID", True),
        ("1", "TORCHELASTIC_RUN_ID", False),
        ("1", "", True),
    ):
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        monkeypatch.setenv("RANK", rank)
        if launcher:
            monkeypatch.setenv(launcher, "none")
        for as_json in (False, True):
            console = Console(as_json, quiet=False)
            console.say("result")
            console.warn("warning")
            console.table(["a"], [["b"]])
            console.result({"a": 1})
            assert bool(capsys.readouterr().out) == said


def test_train_says_what_it_cannot_use_well(shared: Path) -> None:
    """Another model's rows are named, nothing to train is a wrong command line, and a file is no folder."""
    model = shared / "models" / "tinystories-260k"
    Path("other.jsonl").write_text('{"text": "Once", "output": " upon a time", "model_id": "elsewhere"}\n')
    line = ["train", "--model", model, "--data", "other.jsonl", "--steps", "1", "--device", "cpu"]
    assert "warning: 1 rows are answers of another model" in treeopt(*line, "-o", "h").stderr
    assert "nothing to train" in treeopt(*line, "-o", "g", "--blocks", "0", "--shared-lm-head", status=2).stderr
    assert "is a file, not a folder" in treeopt(*line, "-o", "other.jsonl", status=3).stderr


def test_distill_refuses_at_once_what_cannot_fit(shared: Path) -> None:
    """Turns without a chat template, and openings longer than the context, before anything is written."""
    model = shared / "models" / "tinystories-260k"
    Path("turns.jsonl").write_text('{"turns": ["Once", "Then"]}\n')
    line = ["distill", "--model", model, "--device", "cpu", "-o", "out.jsonl"]
    assert error_number(treeopt(*line, "--prompts", "turns.jsonl", status=3)) == "E302"
    assert error_number(treeopt(*line, "--self-talk", "2", "--opening-tokens", "600", status=3)) == "E503"
    assert not list(Path().glob("out*"))
