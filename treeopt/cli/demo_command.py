"""The command `treeopt demo`."""

import contextlib
import io
import json
import shlex
import time
from collections.abc import Iterator
from typing import Any

import click

from treeopt.cli.console import Console, command, run_inside
from treeopt.cli.options import force_option
from treeopt.defaults import HEADS_NGRAM, NGRAM
from treeopt.files.atomic import make_folder, write_text
from treeopt.files.outputs import BUFFERS, PICTURE, REPORT, TREE, check_output

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
_FILES: dict[str, str | None] = {  # name: its kind, of which an unedited file is replaced
    "heads.safetensors": None,
    **{f"{name}.safetensors": None for name in _DRAFTERS},
    **{f"{name}.drafter.safetensors": None for name in _DRAFTERS},
    **{f"{name}{NODES}.yaml": TREE for name in _TREES},
    "tree.svg": PICTURE,
    "tree.safetensors": BUFFERS,
    **dict.fromkeys([*_RESULTS.values(), _DECODING]),
    _REPORT: REPORT,
}
_CURVE_NODES = 32  # largest size of the report's curves
_PROMPT = "def read_lines(path):"  # of the text in the report; the built-in model writes Python
_IN_REPORT = {  # the first validation is the headline
    "--calibration": ["heads.safetensors", "heads-ngram.safetensors"],
    "--tree": [f"static{NODES}.yaml"],
    "--validation": [_RESULTS[name] for name in ("static", "dynamic", "no-heads", "medusa")],
    "--decoding": [_DECODING],
}


def _steps() -> Iterator[tuple[str, str]]:
    """The commands that write traces, trees and pictures, with the file of each; `{}` is the folder."""
    limits = f"--limit {_PROMPTS} --max-new-tokens {_TOKENS}"
    yield f"calibrate {limits}", "heads.safetensors"
    for name, drafter in _DRAFTERS.items():
        yield f"calibrate --drafter {drafter} --learn-tokens {_SAMPLED} {limits}", f"{name}.safetensors"
    for name, (_, traces, how) in _TREES.items():
        yield f"build --calibration {{}}/{traces}.safetensors --nodes {NODES} {how}", f"{name}{NODES}.yaml"
    yield f"render {{}}/medusa{NODES}.yaml", "tree.svg"
    yield f"compile {{}}/medusa{NODES}.yaml", "tree.safetensors"


@command("demo")
@click.option("-o", "--output", default="demo", help="Folder for the files.")
@force_option
def run(console: Console, output: str, force: bool) -> None:
    """Calibrate, build, render, compile, validate and report on the built-in model, and print each command.

    Four plans of one size are compared on held-out prompts: the Medusa tree of the heads, a static tree and per-step
    trees of a drafter heads+ngram, and per-step trees of a drafter without heads.

    The demo is offline, uses one thread, and takes one to two minutes. --force replaces the files of an earlier demo.
    """
    begin = time.monotonic()
    folder = make_folder(output)
    for name, kind in _FILES.items():
        check_output(folder / name, kind=kind, force=force)
    import torch

    torch.set_num_threads(1)  # a second thread gains nothing on a model this small, and on busy cores is far slower

    for line, file in _steps():
        made = _run(console, *(word.format(folder) for word in line.split()), "--force", "-o", folder / file)
        if line.startswith("calibrate"):
            accuracy = " ".join(f"{ranks[0]:.1%}" for ranks in made["accuracy"])
            console.say(f"  top-1 accuracy by level: {accuracy}   ({made['positions']} positions)")
    trees = {name: folder / f"{name}{NODES}.yaml" for name in _TREES}
    others = ("--skip", _PROMPTS, "--limit", _EVALUATED, "--max-new-tokens", _TOKENS)
    results = {name: _run(console, "validate", "--tree", tree, *others) for name, tree in trees.items()}
    kept: dict[str, Any] = {_RESULTS[name]: one for name, one in results.items()}
    kept[_DECODING] = _run(console, "generate", _PROMPT, "--tree", trees["static"], "--max-new-tokens", _TOKENS)
    for name, content in kept.items():
        write_text(folder / name, json.dumps(content, indent=1) + "\n")
    inputs = [word for option, names in _IN_REPORT.items() for name in names for word in (option, folder / name)]
    _run(console, "report", *inputs, "--largest", _CURVE_NODES, "--force", "-o", folder / _REPORT)
    _report(console, results)
    written = [str(folder / name) for name in _FILES]
    console.say(f"wrote {' '.join(written)}")
    console.say(f"open {folder / _REPORT} in a browser: the figures, the tree and a decoded text on one page")
    yours = "--model YOUR_MODEL, or --heads YOUR_HEADS, and --prompts YOUR_PROMPTS"
    console.note(f"{time.monotonic() - begin:.0f} s   next: the same commands with {yours}")
    console.result({"output": output, "files": written, "trees": results})


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
