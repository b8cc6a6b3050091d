"""The command `treeopt demo`."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from treeopt.cli.console import Console, command, run_inside
from treeopt.cli.options import force_option
from treeopt.defaults import HEADS_NGRAM, NGRAM, REPORT_INPUTS_FILE
from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import make_folder, write_text
from treeopt.files.read import MOST_SETTINGS, parse_json, read_bytes, sha256_of

NODES = 16
_PROMPTS, _TOKENS = 40, 96  # prompts and new tokens of the calibrations
_SAMPLED = 2 * _PROMPTS * _TOKENS  # tokens to learn from besides the greedy answers: two more answers a prompt
_EVALUATED = 8  # other prompts, decoded with each tree
_TREES = {  # name: what it is, its traces, and how it is built
    "medusa": ("Medusa tree, heads", "heads", "--values independent --weights uniform"),
    "static": ("static tree, heads+ngram", "heads-ngram", ""),
    "dynamic": ("per-step trees, heads+ngram", "heads-ngram", "--kind dynamic"),
    "no-heads": ("no heads: per-step trees, ngram", "ngram", "--kind dynamic"),
}
_DRAFTERS = {"heads-ngram": HEADS_NGRAM, "ngram": NGRAM}  # by the name of their traces
_RESULTS = {name: f"validate-{name}{NODES}.json" for name in _TREES}  # what validate --json prints
_DECODING, _REPORT = "generate.json", "report.html"
_FILES = (
    "heads.safetensors",
    *(f"{name}.safetensors" for name in _DRAFTERS),
    *(f"{name}.drafter.safetensors" for name in _DRAFTERS),
    *(f"{name}{NODES}.yaml" for name in _TREES),
    *("tree.svg", "tree.safetensors"),
    *(*_RESULTS.values(), _DECODING, REPORT_INPUTS_FILE, _REPORT),
)
_CURVE_NODES = 32  # largest size of the report's curves
_PROMPT = "def read_lines(path):"  # of the text in the report; the built-in model writes Python
_IN_REPORT = {  # relative to the folder; the first validation is the headline
    "calibrations": ["heads.safetensors", "heads-ngram.safetensors"],
    "tree": f"static{NODES}.yaml",
    "validation": [_RESULTS[name] for name in ("static", "dynamic", "no-heads", "medusa")],
    "decoding": _DECODING,
}


def _steps() -> Iterator[tuple[str, ...]]:
    """The commands that write traces, trees and pictures, with the files of each; `{}` is the folder."""
    limits = f"--limit {_PROMPTS} --max-new-tokens {_TOKENS}"
    yield f"calibrate {limits}", "heads.safetensors"
    for name, drafter in _DRAFTERS.items():
        learning = f"calibrate --drafter {drafter} --learn-tokens {_SAMPLED} {limits}"
        yield learning, f"{name}.safetensors", f"{name}.drafter.safetensors"
    for name, (_, traces, how) in _TREES.items():
        yield f"build --calibration {{}}/{traces}.safetensors --nodes {NODES} {how}", f"{name}{NODES}.yaml"
    yield f"render {{}}/medusa{NODES}.yaml", "tree.svg"
    yield f"compile {{}}/medusa{NODES}.yaml", "tree.safetensors"


@command("demo")
@click.option("-o", "--output", default="demo", help="Folder for the files.")
@force_option
def run(console: Console, output: str, force: bool) -> None:
    """Calibrate, build, render, compile, validate and report on the built-in model, and print each command.

    Four plans of one size are compared on other prompts than they were made from: the Medusa tree of the heads, a
    static tree and per-step trees of a drafter heads+ngram, and per-step trees of a drafter without heads.

    The demo is offline, uses one thread, and takes about a minute. Files of an earlier demo are replaced, except those
    that were edited.
    """
    begin = time.monotonic()
    folder = make_folder(output)
    manifest = Manifest(folder / "demo-manifest.json")
    manifest.check(_FILES, force=force)
    import torch

    torch.set_num_threads(1)  # a second thread gains nothing on a model this small, and on busy cores is far slower

    def make(words: Iterable[object], *files: str) -> dict[str, Any]:
        """Run a command that writes files, which the manifest was checked for."""
        made = _run(console, *words, "--force", "-o", folder / files[0])
        manifest.add(files)
        return made

    for line, *files in _steps():
        made = make([word.format(folder) for word in line.split()], *files)
        if line.startswith("calibrate"):
            _say_accuracy(console, made)
    trees = {name: folder / f"{name}{NODES}.yaml" for name in _TREES}
    others = ("--skip", _PROMPTS, "--limit", _EVALUATED, "--max-new-tokens", _TOKENS)
    results = {name: _run(console, "validate", "--tree", tree, *others) for name, tree in trees.items()}
    kept: dict[str, Any] = {_RESULTS[name]: one for name, one in results.items()}
    kept[_DECODING] = _run(console, "generate", _PROMPT, "--tree", trees["static"], "--max-new-tokens", _TOKENS)
    kept[REPORT_INPUTS_FILE] = _IN_REPORT
    for name, content in kept.items():
        write_text(folder / name, json.dumps(content, indent=1) + "\n")
    manifest.add(kept)
    make(("report", folder, "--largest", _CURVE_NODES), _REPORT)
    _report(console, results)
    written = [str(folder / name) for name in _FILES]
    console.say(f"wrote {' '.join(written)}")
    console.say(f"open {folder / _REPORT} in a browser: the figures, the tree and a decoded text on one page")
    yours = "--model YOUR_MODEL, or --heads YOUR_HEADS, and --prompts YOUR_PROMPTS"
    console.note(f"{time.monotonic() - begin:.0f} s   next: the same commands with {yours}")
    console.result({"output": output, "files": written, "trees": results})


command = run


def _say_accuracy(console: Console, found: dict[str, Any]) -> None:
    """Print the top-1 accuracy of each level."""
    accuracy = " ".join(f"{ranks[0]:.1%}" for ranks in found["accuracy"])
    console.say(f"  top-1 accuracy by level: {accuracy}   ({found['positions']} positions)")


def _report(console: Console, results: dict[str, dict[str, Any]]) -> None:
    """Print the figures of autoregressive decoding and of the trees, side by side."""
    rows = [["autoregressive", "1.000", "1.000", "1.00", "yes"]]
    for name, one in results.items():
        rates = [f"{one[key]:.3f}" for key in ("predicted_tokens_per_step", "tokens_per_step")]
        rows.append([_TREES[name][0], *rates, f"{one['speedup']:.2f}", "yes" if one["lossless"] else "NO"])
    console.say()
    console.table([f"{NODES} nodes", "predicted τ", "measured τ", "speedup", "lossless"], rows)
    console.say(
        "τ: tokens per step = all tokens / all steps; speedup: tokens/s over autoregressive in the same loop, 1 thread"
    )


def _run(console: Console, *arguments: object) -> dict[str, Any]:
    """Run a command in this process and return its JSON; its errors are those of the demo."""
    words = [str(argument) for argument in arguments]
    console.say(f"$ treeopt {shlex.join(words)}")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_inside([*words, "--json"], notes=True)
    found: dict[str, Any] = json.loads(printed.getvalue() or "{}")
    return found


_HASH = re.compile("[0-9a-f]{64}")


class Manifest:
    """A JSON file `{name: sha256}` in the folder of the files that it lists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self, names: Iterable[str], *, force: bool) -> None:
        """Raise E202 where a file of these names exists that no earlier run wrote, or that was changed since."""
        known = self._read()
        for name in () if force else (self.path.name, *names):
            file = self.path.with_name(name)
            if not file.exists() or (file == self.path and known):
                continue
            if known.get(name) != sha256_of(file):
                why = f"{self.path.name} lists the files of an earlier run; this one is not in it, or was changed"
                fix = "choose another folder with -o, or overwrite it with --force"
                raise TreeoptError(Code.FILE_EXISTS, f"{file} exists", why=why, fix=fix)

    def add(self, names: Iterable[str]) -> None:
        """List these files, where they exist, as they are now."""
        files = {name: self.path.with_name(name) for name in names}
        found = {name: sha256_of(file) for name, file in files.items() if file.is_file()}
        write_text(self.path, json.dumps(self._read() | found, indent=1) + "\n")

    def _read(self) -> dict[str, object]:
        try:
            data = parse_json(read_bytes(self.path, MOST_SETTINGS))
        except (TreeoptError, ValueError):
            return {}  # no manifest, or an unreadable one: no file is known
        valid = isinstance(data, dict) and all(isinstance(one, str) and _HASH.fullmatch(one) for one in data.values())
        return data if valid else {}
