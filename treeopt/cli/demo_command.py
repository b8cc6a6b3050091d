"""`treeopt demo`: the whole job on the built-in model, offline."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import shlex
import time
from typing import Any

import click

from treeopt.cli.console import Console, command
from treeopt.files.atomic import make_folder

SIZES = (4, 8, 16, 64)
_DRAWN = 16
_PROMPTS, _TOKENS = 128, 96  # calibrated on
_JUDGED = 10  # prompts decoded with each tree
_BUILT = ("calibration.safetensors", *(f"tree{size}.yaml" for size in SIZES), "tree.svg", "tree.safetensors")


@command("demo")
@click.option("-o", "--output", default="demo", show_default=True, help="Folder for what it makes.")
@click.pass_context
def run(ctx: click.Context, console: Console, output: str) -> None:
    """Calibrate, build, render, compile and validate on the built-in model, and say each command that is run.

    Everything is offline and takes about a minute on two cores. Files from an earlier demo are overwritten.
    """
    begin = time.monotonic()
    folder = make_folder(output)
    traces = str(folder / "calibration.safetensors")
    trees = {size: str(folder / f"tree{size}.yaml") for size in SIZES}
    found = _run(ctx, console, "calibrate", "--limit", _PROMPTS, "--max-new-tokens", _TOKENS, "--force", "-o", traces)
    shares = " ".join(f"{accuracy[0]:.1%}" for accuracy in found["accuracy"])
    console.say(f"  first guess right, by head: {shares}   ({found['positions']} positions)")
    for size, tree in trees.items():
        _run(ctx, console, "build", "--calibration", traces, "--nodes", size, "-o", tree)
    _run(ctx, console, "render", trees[_DRAWN], "-o", folder / "tree.svg")
    _run(ctx, console, "compile", trees[_DRAWN], "-o", folder / "tree.safetensors")
    judged = {
        size: _run(ctx, console, "validate", "--tree", tree, "--limit", _JUDGED, "--max-new-tokens", _TOKENS)
        for size, tree in trees.items()
    }
    rows = []
    for size, one in judged.items():
        rates = [f"{one[name]:.3f}" for name in ("predicted_tokens_per_step", "tokens_per_step")]
        rows.append([str(size), *rates, f"{one['speedup']:.2f}", "yes" if one["lossless"] else "NO"])
    console.say()
    console.table(["nodes", "predicted τ", "measured τ", "speedup", "lossless"], rows)
    console.say("τ: tokens per step = all tokens / all steps; speedup: tokens/s over one token a step on the same loop")
    console.say(f"wrote {' '.join(str(folder / name) for name in _BUILT)}")
    console.note(f"{time.monotonic() - begin:.0f} s   next: the same with --heads HEADS_OF_YOUR_OWN")
    console.result({"output": output, "files": [str(folder / name) for name in _BUILT], "trees": judged})


command = run


def _run(ctx: click.Context, console: Console, name: str, *arguments: object) -> dict[str, Any]:
    """Run one of our commands in this process, and give what it prints as JSON; leave where it fails."""
    texts = [str(argument) for argument in arguments]
    console.say(f"$ treeopt {shlex.join([name, *texts])}")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        one: click.Command = importlib.import_module(f"treeopt.cli.{name}_command").command
        status = one.main([*texts, "--json"], prog_name=f"treeopt {name}", standalone_mode=False)
    if status:
        ctx.exit(status)
    found: dict[str, Any] = json.loads(printed.getvalue() or "{}")
    return found
