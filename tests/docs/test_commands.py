"""Every treeopt command of the README and of docs/ runs, page by page, as written and with small limits.

The commands of a page run in its order, in a folder of the page. Files are made earlier on the page, but for the names
in capitals and metrics.txt, which are put there before. Names on the hub and models that a script of bench/ makes are
small local models (STAND_INS, MADE). Options that limit the work are added at the end of a line (SMALL). The last value
of an option counts, so names of files and all other options are those of the page, and the figures are not. This takes
minutes: `make docs-commands` runs it.

Not run here: `make demo` (tests/cli/test_demo.py), `python bench/...` (parsed here; tests/test_bench.py runs each
script with --tiny), blocks in `sh`, of which parts are missing or which take hours (tests/test_readme.py parses them),
and commands in tables and sentences.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from conftest import ROOT_FOLDER, SHARED
from test_readme import DEVELOPER_PAGES, PAGES, treeopt_lines

from treeopt.cli import demo_command
from treeopt.cli.app import program
from treeopt.files.bundled import pocket, prompt_sets
from treeopt.texts import prompts as prompts_module

POCKET_PROMPTS = 40  # of the built-in prompts, in PROMPTS.jsonl and OTHERS.jsonl

# Folders that a script of bench/ makes and pages of developers name -> the same models in the shared folder.
MADE = {
    "build/tinystories-medusa": "models/tinystories-260k-medusa",
    "build/tinystories": "models/tinystories-260k",
}
# Command and a pattern of its options -> options that limit the work. All that match are added.
SMALL = (
    ("calibrate", "", "--limit 14 --max-new-tokens 24"),
    ("calibrate", r"--drafter (?!\S+\.safetensors)|^(?!.*--(heads|drafter|draft) ).*--model ", "--learn-tokens 300"),
    ("calibrate", r"--drafter \S+\.safetensors", "--skip 0"),  # the texts of the other calibrations
    ("learn", "", "--limit 10 --max-new-tokens 24 --nodes 8"),
    ("learn", r"^(?!.*--draft )|--learn-tokens", "--learn-tokens 300"),
    ("validate", "", "--limit 2 --max-new-tokens 16 --repeats 1"),
    ("validate", "--acceptance sample", "--limit 4 --max-new-tokens 12 --draws 60 --repeats 2"),
    ("generate", "", "--max-new-tokens 16"),
    ("profile", "", "--sizes 1,2,4,8,16,32 --context 32,64 --repeats 1"),
    ("compare", "", "--test-limit 2 --max-new-tokens 12 --repeats 1 --learn-limit 4 --learn-tokens 200"),
    ("compare", "--prompts|--json", "--methods lookup,recycling,medusa,ngram"),  # README.md runs all methods
    ("distill", "", "--max-new-tokens 24"),
    ("distill", "^(?!.*--prompts )", "--self-talk 12"),
    ("train", "", "--epochs 1 --batch-size 2 --holdout 2 --log-every 1"),
)
SMALL_DEMO = {"_PROMPTS": 12, "_TOKENS": 16, "_EVALUATED": 2, "_SAMPLED": 200}  # `treeopt demo` has no such options
# Model or heads on the hub -> what runs in its place, a path of a file system being taken before a name on the hub.
STAND_INS = {
    "Qwen/Qwen3-0.6B": "DRAFT",
    "Qwen/Qwen3-8B": "MODEL",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "MODEL",
    "FasterDecoding/medusa-vicuna-7b-v1.3": "HEADS",
    "RedHatAI/Qwen3-8B-speculator.eagle3": "EAGLE",
    "build/smollm2": "MODEL",  # bench/smollm2.py makes it; tests/smollm2 runs the real one
}
PROMPT_SETS = ("alpaca_eval",)  # sets on the hub in whose place the prompts of pocket are read
VLLM_METRICS = """\
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 30.0
"""


def commands_of(page: str) -> list[str]:
    """The treeopt lines of a page's blocks."""
    return treeopt_lines((ROOT_FOLDER / page).read_text(), "")


def limited(line: str) -> list[str]:
    """The arguments of a line, with the options that limit its work, and without a file for its output."""
    arguments = shlex.split(line.partition(" > ")[0], comments=True)[1:]
    added = [more for name, pattern, more in SMALL if arguments[0] == name and re.search(pattern, line)]
    return arguments + [part for more in added for part in more.split()]


WITH_COMMANDS = [page for page in PAGES if commands_of(page)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("treeopt build --nodes 64", "build --nodes 64"),
        ("treeopt calibrate -o c", "calibrate -o c --limit 14 --max-new-tokens 24"),
        ("treeopt calibrate --model M", "calibrate --model M --limit 14 --max-new-tokens 24 --learn-tokens 300"),
        ("treeopt calibrate --model M --heads H", "calibrate --model M --heads H --limit 14 --max-new-tokens 24"),
        (
            "treeopt calibrate --drafter ngram",
            "calibrate --drafter ngram --limit 14 --max-new-tokens 24 --learn-tokens 300",
        ),
    ],
)
def test_limits_are_added_behind_the_line(line: str, expected: str) -> None:
    """Every word of the page's line is kept, before the limits."""
    assert limited(line) == expected.split()


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_limited_commands_parse(page: str) -> None:
    """The added options are options of the commands, and each later one replaces the page's value."""
    for line in commands_of(page):
        name, *arguments = limited(line)
        command = program.get_command(click.Context(program), name)
        assert command is not None
        command.make_context(name, arguments)


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_models_of_pages_are_local(page: str) -> None:
    """A model or heads on the hub have a stand-in; a page of users names no model that a script must make first."""
    known = {*STAND_INS, *(MADE if page in DEVELOPER_PAGES else ())}
    for line in commands_of(page):
        words = shlex.split(line)
        named = [after for word, after in itertools.pairwise(words) if word in ("--model", "--heads", "--draft")]
        assert {name for name in named if name.count("/") == 1} <= known, line


Run = Callable[[str], Path]


def prepare(folder: Path) -> None:
    """Put into a folder what no command of a page makes."""
    (folder / "MODEL").symlink_to(pocket())
    (folder / "DRAFT").symlink_to(pocket().with_name("pocket-draft"))
    (folder / "EAGLE").symlink_to(pocket().with_name("pocket-eagle3"))
    shutil.copytree(pocket() / "heads", folder / "HEADS")
    config = json.loads((folder / "HEADS" / "config.json").read_text())
    (folder / "HEADS" / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(pocket())}))
    rows = (pocket() / "prompts.jsonl").read_text().splitlines()
    (folder / "PROMPTS.jsonl").write_text("\n".join(rows[:POCKET_PROMPTS]))
    (folder / "OTHERS.jsonl").write_text("\n".join(rows[POCKET_PROMPTS : 2 * POCKET_PROMPTS]))
    answers = [{"prompt": json.loads(row)["text"], "output": "    return None\n"} for row in rows[:8]]
    (folder / "ANSWERS.jsonl").write_text("\n".join(map(json.dumps, answers)))
    (folder / "metrics.txt").write_text(VLLM_METRICS)
    for name, place in STAND_INS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(folder / place)
    for name, place in MADE.items():
        if SHARED.is_dir():
            (folder / name).symlink_to(SHARED / place)


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a page's commands once; returns its folder."""
    top = tmp_path_factory.mktemp("pages")
    sets = {**prompt_sets(), **dict.fromkeys(PROMPT_SETS, pocket() / "prompts.jsonl")}
    printed: set[str] = set()

    @functools.cache
    def run(page: str) -> Path:
        if not SHARED.is_dir() and any(name in line for name in MADE for line in commands_of(page)):
            pytest.skip(f"needs a model of {', '.join(MADE)} (TREEOPT_SHARED names the folder that has them)")
        folder = top / page.removesuffix(".md")
        folder.mkdir(parents=True)
        prepare(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(prompts_module, "prompt_sets", lambda: sets)
            for name, value in SMALL_DEMO.items():
                patch.setattr(demo_command, name, value)
            for line in commands_of(page):
                if " -o " not in line and line in printed:
                    continue  # what writes no file is run once
                result = CliRunner().invoke(program, limited(line))
                assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"
                assert result.output, line
                if " > " in line:
                    Path(line.partition(" > ")[2]).write_text(result.stdout)
                printed.add(line)
        return folder

    return run


@pytest.mark.docs
@pytest.mark.usefixtures("whole_fit")  # as in the processes of --nproc
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_run_in_the_order_of_the_page(page: str, run_page: Run) -> None:
    """Each command ends with status 0 and prints, and each file that a command names as its output exists."""
    folder = run_page(page)
    for line in commands_of(page):
        words = shlex.split(line)
        for option in ("-o", "--chart", "--csv", "--svg"):
            if option in words:
                assert (folder / words[words.index(option) + 1]).exists(), line


def script_calls() -> list[str]:
    """The calls of scripts of bench/ on pages, in blocks and sentences, that have arguments; NAME stands for any."""
    texts = [(ROOT_FOLDER / page).read_text() for page in PAGES]
    lines = [line for text in texts for line in re.findall(r"^(?:.*/)?python (bench/.*)$", text, flags=re.MULTILINE)]
    codes = [" ".join(code.split()) for text in texts for code in re.findall(r"`python\s(bench/[^`]+)`", text)]
    return sorted({call for call in (*lines, *codes) if " " in call and not re.search(r"\b[A-Z]{3,}\b", call)})


class _ParsedError(Exception):
    """The arguments of a script are parsed; nothing more is run."""


@pytest.mark.docs
@pytest.mark.parametrize("call", script_calls())
def test_calls_of_scripts_parse(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script has the options of the page. tests/test_bench.py runs each script."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser) -> None:
        parse(self)
        raise _ParsedError

    script, *arguments = shlex.split(call.partition(" > ")[0], comments=True)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(str(ROOT_FOLDER / "bench"))
    with pytest.raises(_ParsedError):
        runpy.run_path(str(ROOT_FOLDER / script), run_name="__main__")
