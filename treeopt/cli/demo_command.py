"""`treeopt demo`: the whole job on the built-in model, offline."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import shlex
import time
from pathlib import Path
from typing import Any

import click

from treeopt.cli.console import Console, command
from treeopt.cli.options import force_option
from treeopt.files.atomic import make_folder
from treeopt.files.manifest import Manifest

NODES = 16
_PROMPTS, _TOKENS = 64, 96  # learned and calibrated on
_DRAWN = 2 * _PROMPTS * _TOKENS  # tokens to learn from besides: every prompt answered twice more
_JUDGED = 8  # other prompts, decoded with each tree
_PAPER = ("--values", "independent", "--weights", "uniform")
_TREES = ("paper", "corrected", "dynamic")
_BUILT: tuple[str, ...] = ("plain.safetensors", "corrected.safetensors", "corrected.drafter.safetensors")
_BUILT += (*(f"{name}{NODES}.yaml" for name in _TREES), "tree.svg", "tree.safetensors")


@command("demo")
@click.option("-o", "--output", default="demo", show_default=True, help="Folder for what it makes.")
@force_option
@click.pass_context
def run(ctx: click.Context, console: Console, output: str, force: bool) -> None:
    """Calibrate, build, render, compile and validate on the built-in model, and say each command that is run.

    Three trees of one size are compared on prompts that none was made from: the paper's; one for drafts that are
    corrected by the tokens before them; and trees that are chosen anew at every step.

    Everything is offline, on one thread, and takes about a minute. Files of an earlier demo are replaced, but for those
    that were changed since.
    """
    begin = time.monotonic()
    folder = make_folder(output)
    manifest = Manifest(folder / "demo-manifest.json")
    manifest.check(_BUILT, force=force)
    import torch

    # A model this small gains nothing from a second thread, and on busy cores a second can cost ten times the time.
    torch.set_num_threads(1)
    traces = {name: str(folder / f"{name}.safetensors") for name in ("plain", "corrected")}
    trees = {name: str(folder / f"{name}{NODES}.yaml") for name in _TREES}
    known = ("--limit", _PROMPTS, "--max-new-tokens", _TOKENS)

    def make(name: str, *arguments: object, output: str, beside: str = "") -> dict[str, Any]:
        """Run a command that writes `output`, and perhaps a file beside it; the manifest was checked for both."""
        made = _run(ctx, console, name, *arguments, "--force", "-o", output)
        manifest.add(filter(None, (Path(output).name, beside)))
        return made

    found = make("calibrate", *known, output=traces["plain"])
    _say_shares(console, found)
    correct = ("--drafter", "heads+ngram", "--learn-tokens", _DRAWN)
    _say_shares(console, make("calibrate", *correct, *known, output=traces["corrected"], beside=_BUILT[2]))
    size = ("--nodes", NODES)
    make("build", "--calibration", traces["plain"], *size, *_PAPER, output=trees["paper"])
    make("build", "--calibration", traces["corrected"], *size, output=trees["corrected"])
    make("build", "--calibration", traces["corrected"], *size, "--kind", "dynamic", output=trees["dynamic"])
    make("render", trees["paper"], output=str(folder / "tree.svg"))
    make("compile", trees["paper"], output=str(folder / "tree.safetensors"))
    others = ("--skip", _PROMPTS, "--limit", _JUDGED, "--max-new-tokens", _TOKENS)
    judged = {name: _run(ctx, console, "validate", "--tree", tree, *others) for name, tree in trees.items()}
    _report(console, judged)
    written = [str(folder / name) for name in _BUILT]
    console.say(f"wrote {' '.join(written)}")
    console.note(f"{time.monotonic() - begin:.0f} s   next: the same with --heads HEADS_OF_YOUR_OWN")
    console.result({"output": output, "files": written, "trees": judged})


command = run


def _say_shares(console: Console, found: dict[str, Any]) -> None:
    shares = " ".join(f"{accuracy[0]:.1%}" for accuracy in found["accuracy"])
    console.say(f"  first guess right, by level: {shares}   ({found['positions']} positions)")


def _report(console: Console, judged: dict[str, dict[str, Any]]) -> None:
    """One by one and the three trees, side by side."""
    rows = [["autoregressive", "1.000", "1.000", "1.00", "yes"]]
    for name, one in judged.items():
        rates = [f"{one[key]:.3f}" for key in ("predicted_tokens_per_step", "tokens_per_step")]
        label = {"paper": "the Medusa tree"}.get(name, name)
        rows.append([label, *rates, f"{one['speedup']:.2f}", "yes" if one["lossless"] else "NO"])
    console.say()
    console.table([f"{NODES} nodes", "predicted τ", "measured τ", "speedup", "lossless"], rows)
    console.say(
        "τ: tokens per step = all tokens / all steps; speedup: tokens/s over one token a step, same loop, one thread"
    )


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
