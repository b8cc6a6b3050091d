"""`treeopt distill` and `treeopt train` as a user meets them, at tiny size on the shared model."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from looped import looped
from program import error_number, error_of, treeopt, treeopt_json
from tiny import chat_base, tiny_base

from treeopt.cli import train_command
from treeopt.cli.console import Console
from treeopt.files.calibrations import load_calibration
from treeopt.models.base import load_base
from treeopt.models.head_files import load_heads
from treeopt.train import trainer as trainer_module
from treeopt.train.settings import JointSettings, Settings

TINY = ("--num-heads", "2", "--batch-size", "4", "--length", "64", "--shared-lm-head", "--device", "cpu")


@pytest.fixture
def chat() -> str:
    """A tiny model with a chat template, in the folder `base`, and training texts in `data.jsonl`."""
    base = chat_base()
    base.model.save_pretrained("base")
    assert base.tokenizer is not None
    base.tokenizer.save_pretrained("base")
    asked = {"role": "assistant", "content": "w2 w3 w4 w5"}
    rows = ({"messages": [{"role": "user", "content": f"w{i + 1}"}, asked]} for i in range(8))
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "base"


def test_distill_train_calibrate(shared: Path) -> None:
    """Self-talk, heads trained on it, and their calibration on texts of their base: one command each."""
    model = shared / "models" / "tinystories-260k"
    made = treeopt_json(
        "distill", "--model", model, "--self-talk", "6", "--max-new-tokens", "24", "--device", "cpu", "-o", "t.jsonl"
    )
    rows = [json.loads(line) for line in Path("t.jsonl").read_text().splitlines()]
    assert set(made) == {"rows", "tokens", "ended_early", "skipped_prompts", "output", "configuration"}
    assert (made["rows"], made["output"]) == (len(rows), "t.jsonl")
    assert made["tokens"] == sum(end - start for row in rows for start, end in row["answers"])
    trained = treeopt_json(
        "train", "--model", model, "--data", "t.jsonl", *TINY, "--epochs", "2", "--holdout", "2", "-o", "heads"
    )
    assert set(trained) == {"steps", "heads", "held_out", "output", "configuration"}
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
    given = ("--data", "data.jsonl", *TINY, "--num-heads", "5", "--holdout", "2")
    result = treeopt("train", "--model", chat, *given, "-o", "heads")
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert lines[0] == ["", "loss", "top-1", "top-2", "top-3", "top-4", "top-5", "trials"]
    assert [line[0] for line in lines[1:3]] == ["head 1", "head 2"]
    assert [line[-1] for line in lines[1:3]] == ["8", "6"]  # five tokens an answer, its end counted, of two texts
    assert lines[5] == ["head 5", *"------", "0"]
    assert "8 texts, 64 tokens, of data.jsonl" in result.stderr
    assert "treeopt calibrate --heads heads" in result.stderr


def test_train_warns_of_cut_and_empty_rows(chat: str) -> None:
    """Texts beyond --length, and rows without an answer, are counted in warnings."""
    with Path("data.jsonl").open("a") as stream:
        stream.write(json.dumps({"messages": [{"role": "user", "content": "w1"}]}) + "\n")
    result = treeopt("train", "--model", chat, "--data", "data.jsonl", *TINY, "--length", "6", "-q", "-o", "heads")
    assert "cut at 6 tokens (--length): 8 longer texts" in result.stderr
    assert "hold no answer of two tokens or more: 1 row" in result.stderr


def test_distill_prompts_and_train_on_them(chat: str) -> None:
    """Prompts are answered up to --limit; those too long are named."""
    rows = [{"instruction": "w1"}, {"instruction": "w2 " * 300}, {"instruction": "w3"}]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--model", chat, "--prompts", "p.jsonl", "--max-new-tokens", "16", "--device", "cpu")
    result = treeopt("distill", *options, "-o", "t.jsonl")
    assert "2 answers, 14 tokens" in result.stdout
    assert "skipped 1 prompt: row 1 (too long for the context" in result.stdout
    assert "treeopt train --data t.jsonl" in result.stderr
    assert treeopt_json("distill", *options, "--limit", "1", "-o", "one.jsonl")["rows"] == 1
    treeopt("train", "--model", chat, "--data", "t.jsonl", *TINY, "--steps", "1", "-o", "heads")


@looped(
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
    assert "--load-in-4bit" in error_of(
        "E402", "train", "--model", chat, "--data", "data.jsonl", *TINY, "--load-in-4bit", "-o", "heads", status=4
    )


@looped("command", ["train", "distill", "generate"])
def test_model_without_tokenizer(chat: str, command: str) -> None:
    """Text needs a tokenizer: E304, before anything is written."""
    tiny_base("llama").model.save_pretrained("bare")
    if command == "generate":
        assert error_number(treeopt(command, "text", "--model", "bare", "--device", "cpu", status=3)) == "E304"
        return
    given = ("--data", "data.jsonl") if command == "train" else ("--prompts", "data.jsonl")
    out = "out" if command == "train" else "out.jsonl"
    assert error_number(treeopt(command, "--model", "bare", *given, "--device", "cpu", "-o", out, status=3)) == "E304"
    assert not Path(out).is_file()
    assert not Path("out/medusa_lm_head.safetensors").exists()
    assert chat == "base"


@looped(
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
        patch.setattr(trainer_module.Watch, "on_step_end", interrupted)
        result = treeopt(*arguments, "-o", "heads", status=1)
    assert "with --resume" in result.stderr
    assert error_number(treeopt(*arguments, "-o", "heads", status=3)) == "E202"
    treeopt(*arguments, "--resume", "-o", "heads")
    treeopt(*arguments, "-o", "unbroken")
    name = "medusa_lm_head.safetensors"
    assert (Path("heads") / name).read_bytes() == (Path("unbroken") / name).read_bytes()


def test_only_the_first_process_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several processes, of any launcher, one speaks; a RANK without WORLD_SIZE silences nobody."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for rank, size, said in (("0", "2", True), ("1", "2", False), ("1", "1", True), ("1", "", True)):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        monkeypatch.setenv("RANK", rank)
        if size:
            monkeypatch.setenv("WORLD_SIZE", size)
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
    assert "warning: answers of another model, tokenised again: 1 row;" in treeopt(*line, "-o", "h").stderr
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


STAGE_TWO = ("train", "--stage", "2", "--data", "data.jsonl", "--batch-size", "4", "--rank", "4", "--device", "cpu")


def test_stages_and_adapter(chat: str) -> None:
    """Two stages, and every command that runs the base with the adapter, as a checkpoint that has it in its weights."""
    treeopt("train", "--model", chat, "--data", "data.jsonl", *TINY, "--steps", "2", "-o", "one")
    options = ("--model", chat, "--heads", "one", "--holdout", "2", "--steps", "3", "--learning-rate", "0.01")
    trained = treeopt_json(*STAGE_TWO, *options, "--self-distill", "-o", "two")
    assert set(trained) == {"steps", "heads", "held_out", "base", "output", "configuration"}
    assert set(trained["base"]) == {"loss", "original_loss", "divergence", "trials"}
    assert trained["base"]["trials"] == 10  # five tokens an answer, its end counted
    assert trained["base"]["divergence"] > 0
    settings = json.loads(Path("two/config.json").read_text())["treeopt"]["settings"]
    assert (settings["self_distill"], settings["rank"], settings["learning_rate"]) == (True, 4, 0.01)
    Path("p.jsonl").write_text("".join(json.dumps({"instruction": f"w{i}"}) + "\n" for i in range(4)))
    few = ("--prompts", "p.jsonl", "--max-new-tokens", "4", "--device", "cpu")
    pair = ("--heads", "two", "--adapter", "two/adapter")
    said = treeopt("calibrate", *pair, *few, "-o", "c.safetensors").stderr
    assert "base with adapter two/adapter" in said
    made = load_calibration("c.safetensors").provenance
    merged = load_base(chat, device="cpu", adapter="two/adapter")
    merged.model.save_pretrained("merged")
    merged.tokenizer.save_pretrained("merged")
    assert made.model_id == merged.fingerprint != load_base(chat, device="cpu").fingerprint
    assert made.made_by["adapter"] == "two/adapter"
    treeopt("build", "--calibration", "c.safetensors", "--nodes", "4", "-o", "t.yaml")
    assert treeopt_json("validate", *pair, *few, "--tree", "t.yaml", "--dtype", "float32")["lossless"]
    texts = [
        treeopt_json("generate", "w3", *one, "--tree", "t.yaml", "--max-new-tokens", "4", "--device", "cpu")["text"]
        for one in (pair, ("--heads", "two", "--model", "merged"))
    ]
    assert texts[0] == texts[1]
    treeopt("compare", *pair, *few, "--nodes", "4", "--learn-tokens", "0", "--repeats", "1")
    treeopt("distill", "--model", chat, "--adapter", "two/adapter", *few, "-o", "d.jsonl")
    row = json.loads(Path("d.jsonl").read_text().splitlines()[0])
    assert (row["model_id"], row["source"]["adapter"]) == (merged.fingerprint, "two/adapter")


def test_stage_two_prints_the_base(chat: str) -> None:
    """The base's loss before and after, its divergence, and the next command with the adapter."""
    result = treeopt(*STAGE_TWO, "--model", chat, *TINY[:2], "--steps", "1", "--holdout", "2", "-o", "heads")
    assert re.search(
        r"loss on them: \d\.\d+ nats before, \d\.\d+ with the adapter; divergence .* \d\.\d+", result.stdout
    )
    assert "treeopt calibrate --heads heads --adapter heads/adapter" in result.stderr
    assert "experts" not in result.stderr
    warned = treeopt(
        "calibrate", "--heads", "heads", "--prompts", "data.jsonl", "--device", "cpu", "-o", "c.safetensors"
    )
    assert "heads was trained with an adapter of its base, which is not used (--adapter)" in warned.stderr


def test_adapter_mismatch(chat: str) -> None:
    """The adapter of another base, and with other heads, is E214."""
    treeopt(*STAGE_TWO, "--model", chat, *TINY[:2], "--steps", "1", "-o", "heads")
    treeopt("train", "--model", chat, "--data", "data.jsonl", *TINY, "--steps", "1", "-o", "one")
    few = ("--prompts", "data.jsonl", "--device", "cpu", "-o", "c.safetensors")
    for pair in (("--model", "pocket"), ("--heads", "one")):
        drafter = ("--drafter", "ngram") if pair[0] == "--model" else ()
        error_of("E214", "calibrate", *pair, *drafter, "--adapter", "heads/adapter", *few)
    assert not Path("c.safetensors").exists()


@looped(
    "line",
    [
        ("--self-distill",),
        ("--heads", "one"),
        ("--rank", "4"),
        ("--stage", "2", "--heads", "one", "--num-heads", "2"),
        ("--stage", "2", "--load-in-4bit"),
        ("--stage", "2", "--heads-schedule", "cosine"),
        ("--stage", "3"),
    ],
)
@pytest.mark.usefixtures("chat")
def test_stage_options_that_contradict(line: tuple[str, ...]) -> None:
    """Options of stage 2 at stage 1, of new heads with given ones, and values outside are a wrong command line."""
    treeopt("train", "--model", "base", "--data", "data.jsonl", *line, "-o", "out", status=2)
    assert not Path("out").exists()


def test_stage_two_without_peft(chat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing peft is known before a model is loaded: exit status 4, with the command that installs it."""
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "peft" else found(name, *more))
    assert "pip install peft" in error_of("E401", *STAGE_TWO, "--model", chat, "-o", "out", status=4)


def test_defaults_are_those_of_the_settings() -> None:
    """Each option of `train` that names a setting has its default."""
    shown = {option.name: option for option in train_command.run.params}
    names = ("num_heads", "blocks", "epochs", "batch_size", "accumulate", "warmup", "weight_decay", "holdout")
    names = (*names, "log_every", "seed", "length", "rank", "alpha", "dropout", "heads_rate")
    assert {name: shown[name].default for name in names} == {name: getattr(JointSettings(), name) for name in names}
    assert Settings().learning_rate == 0.001
    assert JointSettings().learning_rate == 0.0005
    assert {"0.001", "0.0005"} <= set(re.findall(r"[\d.]+\d", shown["learning_rate"].help))
