"""The command `treeopt demo`."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import time
from collections.abc import Callable, Iterable
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
_MEDUSA = ("--values", "independent", "--weights", "uniform")
_TREES = ("medusa", "static", "dynamic", "no-heads")
_TRACES = ("heads.safetensors", "heads-ngram.safetensors", "ngram.safetensors")
_DRAFTERS = ("heads-ngram.drafter.safetensors", "ngram.drafter.safetensors")
_RESULTS = {name: f"validate-{name}{NODES}.json" for name in _TREES}  # what validate --json prints
_DECODING, _REPORT = "generate.json", "report.html"
_BUILT: tuple[str, ...] = (*_TRACES, *_DRAFTERS)
_BUILT += (*(f"{name}{NODES}.yaml" for name in _TREES), "tree.svg", "tree.safetensors")
_BUILT += (*_RESULTS.values(), _DECODING, REPORT_INPUTS_FILE, _REPORT)
_PROMPT = "def read_lines(path):"  # of the text in the report; the built-in model writes Python
_IN_REPORT = {  # relative to the folder; the first validation is the headline
    "calibrations": ["heads.safetensors", "heads-ngram.safetensors"],
    "tree": f"static{NODES}.yaml",
    "validation": [_RESULTS[name] for name in ("static", "dynamic", "no-heads", "medusa")],
    "decoding": _DECODING,
}
_CURVE_NODES = 32  # largest size of the report's curves
_SHORT = ("--max-new-tokens", _TOKENS)
_LABELS = {
    "medusa": "Medusa tree, heads",
    "static": "static tree, heads+ngram",
    "dynamic": "per-step trees, heads+ngram",
    "no-heads": "no heads: per-step trees, ngram",
}


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
    manifest.check(_BUILT, force=force)
    import torch

    torch.set_num_threads(1)  # a second thread gains nothing on a model this small, and on busy cores is far slower

    def make(name: str, *arguments: object, output: str, beside: str = "") -> dict[str, Any]:
        """Run a command that writes `output`, and perhaps a file beside it; the manifest was checked for both."""
        made = _run(console, name, *arguments, "--force", "-o", str(folder / output))
        manifest.add(filter(None, (output, beside)))
        return made

    _make_all(console, make, folder)
    trees = {name: str(folder / f"{name}{NODES}.yaml") for name in _TREES}
    others = ("--skip", _PROMPTS, "--limit", _EVALUATED, "--max-new-tokens", _TOKENS)
    results = {name: _run(console, "validate", "--tree", tree, *others) for name, tree in trees.items()}
    _write_report(make, folder, results, _run(console, "generate", _PROMPT, "--tree", trees["static"], *_SHORT))
    manifest.add((*_RESULTS.values(), _DECODING, REPORT_INPUTS_FILE))
    _report(console, results)
    written = [str(folder / name) for name in _BUILT]
    console.say(f"wrote {' '.join(written)}")
    console.say(f"open {folder / _REPORT} in a browser: the figures, the tree and a decoded text on one page")
    yours = "--model YOUR_MODEL, or --heads YOUR_HEADS, and --prompts YOUR_PROMPTS"
    console.note(f"{time.monotonic() - begin:.0f} s   next: the same commands with {yours}")
    console.result({"output": output, "files": written, "trees": results})


command = run


def _make_all(console: Console, make: Callable[..., dict[str, Any]], folder: Path) -> None:
    """Write the calibrations, the drafter, the trees, the picture and the compiled tree."""
    heads, both, ngram = (folder / name for name in _TRACES)
    medusa, static, dynamic, no_heads = (f"{name}{NODES}.yaml" for name in _TREES)
    limits = ("--limit", _PROMPTS, "--max-new-tokens", _TOKENS)
    _say_accuracy(console, make("calibrate", *limits, output=heads.name))
    for drafter, traces, beside in zip((HEADS_NGRAM, NGRAM), (both, ngram), _DRAFTERS, strict=True):
        learning = ("--drafter", drafter, "--learn-tokens", _SAMPLED)
        _say_accuracy(console, make("calibrate", *learning, *limits, output=traces.name, beside=beside))
    size = ("--nodes", NODES)
    make("build", "--calibration", heads, *size, *_MEDUSA, output=medusa)
    make("build", "--calibration", both, *size, output=static)
    make("build", "--calibration", both, *size, "--kind", "dynamic", output=dynamic)
    make("build", "--calibration", ngram, *size, "--kind", "dynamic", output=no_heads)
    make("render", folder / medusa, output="tree.svg")
    make("compile", folder / medusa, output="tree.safetensors")


def _write_report(
    make: Callable[..., dict[str, Any]], folder: Path, results: dict[str, dict[str, Any]], decoding: dict[str, Any]
) -> None:
    """Keep the results of validate and generate, and write the page about them."""
    kept = {
        _DECODING: decoding,
        REPORT_INPUTS_FILE: _IN_REPORT,
        **{_RESULTS[name]: one for name, one in results.items()},
    }
    for name, content in kept.items():
        write_text(folder / name, json.dumps(content, indent=1) + "\n")
    make("report", folder, "--largest", _CURVE_NODES, output=_REPORT)


def _say_accuracy(console: Console, found: dict[str, Any]) -> None:
    """Print the top-1 accuracy of each level."""
    accuracy = " ".join(f"{ranks[0]:.1%}" for ranks in found["accuracy"])
    console.say(f"  top-1 accuracy by level: {accuracy}   ({found['positions']} positions)")


def _report(console: Console, results: dict[str, dict[str, Any]]) -> None:
    """Print the figures of autoregressive decoding and of the trees, side by side."""
    rows = [["autoregressive", "1.000", "1.000", "1.00", "yes"]]
    for name, one in results.items():
        rates = [f"{one[key]:.3f}" for key in ("predicted_tokens_per_step", "tokens_per_step")]
        rows.append([_LABELS[name], *rates, f"{one['speedup']:.2f}", "yes" if one["lossless"] else "NO"])
    console.say()
    console.table([f"{NODES} nodes", "predicted τ", "measured τ", "speedup", "lossless"], rows)
    console.say(
        "τ: tokens per step = all tokens / all steps; speedup: tokens/s over autoregressive in the same loop, 1 thread"
    )


def _run(console: Console, name: str, *arguments: object) -> dict[str, Any]:
    """Run a command in this process and return its JSON; its errors are those of the demo."""
    texts = [str(argument) for argument in arguments]
    console.say(f"$ treeopt {shlex.join([name, *texts])}")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_inside([name, *texts, "--json"], notes=True)
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
