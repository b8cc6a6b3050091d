"""`treeopt generate`: the answer, the whole answer and nothing else on standard output; shades on a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result
from looped import looped

from treeopt.cli.app import program
from treeopt.cli.generate_command import _prompt, _shaded
from treeopt.decode.stream import Piece
from treeopt.files.trees import load_tree, plan_id
from treeopt.models.base import Base

HEADS = "models/tinystories-260k-medusa"
PROMPT = "Once upon a time"
NEW_TOKENS = 80


def generate(shared: Path, *arguments: str, status: int = 0, **more: Any) -> Result:
    """Run the command in this process and check its exit status."""
    line = ["generate", *arguments, "--heads", str(shared / HEADS)]
    result = CliRunner().invoke(program, line, **more)
    assert result.exit_code == status, result.output + repr(result.exception)
    return result


def stock(base: Base, prompt: str = PROMPT, tokens: int = NEW_TOKENS) -> tuple[list[int], str]:
    """What stock greedy `generate` answers: ids and text."""
    assert base.tokenizer is not None
    ids = torch.tensor([base.tokenizer(prompt)["input_ids"]])
    out = base.generate(ids, torch.ones_like(ids), tokens)[0, ids.shape[1] :].tolist()
    return out, str(base.tokenizer.decode(out, skip_special_tokens=True))


@looped("tree", ["mc_sim_7b_63", "vicuna_7b_stage2"])
def test_generate_is_stock_greedy(shared: Path, base: Base, tree: str) -> None:
    """Standard output is the text of stock greedy generate, byte for byte; the figures stand beside it."""
    result = generate(shared, PROMPT, "--tree", tree, "--max-new-tokens", str(NEW_TOKENS))
    assert result.stdout == stock(base)[1]
    assert re.search(
        rf"\n\n\d\.\d\d tokens per step  {NEW_TOKENS} tokens in \d+ steps  \d+ tokens/s", result.stderr, re.M
    )
    assert generate(shared, PROMPT, "--tree", tree, "-q").stderr == ""


@looped("arguments", [["-"], []])
def test_generate_reads_standard_input(shared: Path, base: Base, arguments: list[str]) -> None:
    """`-`, or no prompt at all, reads what is piped in; the newline at its end is the pipe's, not the prompt's."""
    arguments += ["--tree", "mc_sim_7b_63", "--max-new-tokens", "8"]
    assert generate(shared, *arguments, input=PROMPT + "\n").stdout == stock(base, tokens=8)[1]
    assert (
        "error[E302]: the prompt is not text in UTF-8" in generate(shared, *arguments, input=b"a\xff", status=3).stderr
    )


def test_generate_json(shared: Path, base: Base) -> None:
    """One object: tokens, text, and figures that are those of the steps."""
    result = generate(shared, PROMPT, "--tree", "mc_sim_7b_63", "--max-new-tokens", "40", "--json")
    data = json.loads(result.stdout)
    assert (data["tokens"], data["text"]) == stock(base, tokens=40)
    assert sum(data["step_lengths"]) == 40
    assert data["tokens_per_step"] == 40 / len(data["step_lengths"]) > 1.5
    assert [len(step["tokens"]) for step in data["steps"]] == data["step_lengths"]
    assert [token for step in data["steps"] for token in step["tokens"]] == data["tokens"]
    assert "".join(text for step in data["steps"] for text in step["texts"]) == data["text"]
    for step in data["steps"]:  # the tree has ranks below 10 of the heads
        root, *drafts = step["sources"]
        assert root == {"base": 0}
        assert all(set(sources) == {"head"} and sources["head"] < 10 for sources in drafts)
    assert data["command"].startswith("treeopt generate 'Once upon a time' ")
    made_with = data["made_with"]
    assert made_with["model_id"] == base.fingerprint
    assert (made_with["dtype"], made_with["draft_id"], made_with["drafter_id"]) == ("float32", "", "")
    assert len(made_with["heads_id"]) == 16
    assert made_with["tree_id"] == plan_id(load_tree("mc_sim_7b_63"))
    assert data["tokens_per_second"] > 0
    assert result.stderr == ""
    drawn = ("--acceptance", "sample", "--tree", "mc_sim_7b_63", "--max-new-tokens", "8", "--json")
    steps = json.loads(generate(shared, PROMPT, *drawn).stdout)["steps"]
    assert {step["sources"][0]["base"] for step in steps} == {None}, "a root that was drawn has no known rank"


@looped("tokens", [1, 21, 40])
def test_generate_json_names_metrics_as_engines_do(shared: Path, base: Base, tokens: int) -> None:
    """The six figures are those of the steps; a last root that is a step of its own is no draft."""
    arguments = ("--tree", "mc_sim_7b_63", "--max-new-tokens", str(tokens), "--json")
    data = json.loads(generate(shared, PROMPT, *arguments).stdout)
    assert data["tokens"] == stock(base, tokens=tokens)[0]
    verified = data["step_lengths"][:-1] if data["step_lengths"][-1] == 1 else data["step_lengths"]
    accepted = tokens - len(data["step_lengths"])
    assert data["acceptance_histogram"] == [sum(length == k + 1 for length in verified) for k in range(5)]
    assert (data["num_drafts"], data["num_draft_tokens"]) == (len(verified), 63 * len(verified))
    assert data["num_accepted_tokens"] == accepted
    assert data["draft_acceptance_rate"] == (accepted / data["num_draft_tokens"] if verified else None)
    assert data["mean_acceptance_length"] == data["tokens_per_step"]


@looped(
    ("arguments", "number", "status"),
    [
        (["", "--tree", "mc_sim_7b_63"], "E303", 3),
        (["a " * 600, "--tree", "mc_sim_7b_63"], "E503", 3),
        ([PROMPT, "--tree", "mc_sim_7b_63", "--max-new-tokens", "512"], "E503", 3),
        ([PROMPT, "--tree", "no-such.yaml"], "E201", 3),
        ([PROMPT, "--tree", "no-such-tree"], "E104", 3),
    ],
)
def test_generate_errors(shared: Path, arguments: list[str], number: str, status: int) -> None:
    """Nothing to continue, no room, no such tree: one error, and no text."""
    result = generate(shared, *arguments, status=status)
    assert f"error[{number}]" in result.stderr
    assert result.stdout == ""


def test_generate_without_a_prompt_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a prompt a terminal is not waited for."""
    with CliRunner().isolation():
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        with pytest.raises(click.UsageError, match="PROMPT"):
            _prompt(None)


def shown(pieces: list[Piece], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal is sent for these pieces."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert list(_shaded(iter(pieces))) == pieces
    return capsys.readouterr().out


def test_terminal_shades_each_step(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring steps differ in shade, a newline has none, and without the shades the text is left."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    pieces = [Piece([1, 2], "Once upon"), Piece([3], " a\n\ntime"), Piece([4], ", [b]one[/b]")]
    sent = shown(pieces, capsys, monkeypatch)
    first, second = re.findall(r"\x1b\[([\d;]+)m(?:Once upon| a)", sent)
    assert first != second
    assert re.findall(r"\x1b\[([\d;]+)m(?:, |time)", sent) == [second, first]
    assert "\x1b[0m\n\n" in sent
    assert re.sub(r"\x1b\[[\d;]*m", "", sent) == "Once upon a\n\ntime, [b]one[/b]\n"


def test_terminal_without_colour(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR leaves the text alone."""
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown([Piece([1], "Once"), Piece([2], " upon")], capsys, monkeypatch) == "Once upon\n"


def test_terminal_takes_no_orders(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Control characters that a model writes do not reach the terminal."""
    monkeypatch.setenv("NO_COLOR", "1")
    sent = shown([Piece([1], "a\x1b[2Jb\r\x07\tc\x9b2J")], capsys, monkeypatch)
    assert sent == "a\\x1b[2Jb\\r\\x07\tc\\x9b2J\n"


@pytest.mark.slow
def test_interrupt_leaves_the_text_so_far(shared: Path, base: Base, tmp_path: Path) -> None:
    """Ctrl-C in the middle: exit 130, and what was written is the beginning of the answer."""
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import sys, time\nfrom treeopt.decode.decoder import TreeDecoder\nstep = TreeDecoder.step\n"
        "def wait(self, rows):\n    time.sleep(0.05)\n    return step(self, rows)\n"
        "TreeDecoder.step = wait\nfrom treeopt.cli import main\nmain()\n"
    )
    line = [sys.executable, str(slow), "generate", PROMPT, "--heads", str(shared / HEADS), "--tree", "mc_sim_7b_63"]
    process = subprocess.Popen(
        [*line, "--max-new-tokens", "400"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background shells hand it down ignored
    )
    assert process.stdout is not None
    begun = process.stdout.read(20)
    os.kill(process.pid, signal.SIGINT)
    rest, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in said
    assert stock(base, tokens=400)[1].encode().startswith(begun + rest)
    assert len(begun + rest) < 1000


def test_rules_of_acceptance(shared: Path) -> None:
    """Sampling is repeated by its seed, typical is marked as lossy, and temperature 0 of both is greedy."""

    def run(*more: str, status: int = 0) -> Result:
        return generate(shared, PROMPT, "--tree", "mc_sim_7b_63", "--max-new-tokens", "40", *more, status=status)

    greedy = run().stdout
    first, again, other = (run("--acceptance", "sample", "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert first == again != other
    assert greedy not in (first, other)
    for rule in ("sample", "typical"):
        assert run("--acceptance", rule, "--temperature", "0").stdout == greedy
    assert "LOSSY" in run("--acceptance", "typical", "--epsilon", "0.01").stderr
    assert "LOSSY" not in run("--acceptance", "sample").stderr
    assert "--temperature belongs to --acceptance sample and typical" in run("--temperature", "1", status=2).stderr
    assert "--top-k belongs to" in run("--acceptance", "typical", "--top-k", "3", status=2).stderr
