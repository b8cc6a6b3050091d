"""Figures that a change of the code must not change, printed as JSON, and compared with those of another commit.

    python bench/equality.py -o before.json [--tiny] [--only ngram]
    python bench/equality.py --against before.json [--tiny] [--only ngram]

The first line on the commit before (minutes), the second on this one; its exit status is 1 where a figure differs.

For each drafter of the built-in model and of tinystories: hashes of the ranks of a calibration, paths and expected
figures of a static tree and of a per-step policy, the steps that replay predicts and the decoder measures, alone and in
batches, and the tokens of a text. Only the command line is used, so that the script runs on other commits.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from timing import add_tiny, machine

from treeopt.cli import main as treeopt

Figures = dict[str, Any]

DRAFTERS = ("heads", "heads+ngram", "ngram")
WITH_DRAFT = ("model", "model+ngram")  # of the built-in model
EXPECTED = ("independent", "replay", "cross_validated")  # the ends of intervals are estimates of their own
MEASURED = (
    "lossless",
    "tokens",
    "steps",
    "tokens_per_step",
    "predicted_tokens_per_step",
    "acceptance_histogram",
    "predicted_acceptance_histogram",
)


def run(*words: str) -> Figures:
    """The result of one treeopt command with --json, run in this process."""
    printed = io.StringIO()
    sys.argv = ["treeopt", *words, "--json"]
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        treeopt()
    text = printed.getvalue()
    if not text.startswith("{"):
        sys.exit(f"treeopt {' '.join(words)} failed; it printed {text[:200]!r}")
    return dict(json.loads(text))


def tensors_hash(file: Path) -> str:
    """SHA-256 of all tensors of a safetensors file, by name; its metadata has paths and versions."""
    sha = hashlib.sha256()
    with safe_open(file, "np") as opened:
        for name in sorted(opened.keys()):
            array = opened.get_tensor(name)
            sha.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return sha.hexdigest()


def built(file: Path, *options: str) -> Figures:
    """Paths and expected figures of a tree; nodes of a policy."""
    found = run("build", "--calibration", "c.safetensors", "-o", str(file), "--force", *options)
    expected = found.get("expected_tokens_per_step") or {}
    return {
        "paths": found.get("paths"),
        **{name: found.get(name) for name in ("values", "nodes", "depth", "size_cost")},
        "expected": {name: expected.get(name) for name in EXPECTED},
    }


def decoded(tree: str, model: list[str], prompts: list[str], tiny: bool) -> Figures:
    """What validate predicts and measures with a tree, alone and in batches, and the tokens of a text."""
    figures: Figures = {}
    length = ["--max-new-tokens", "24" if tiny else "64"]
    for batch in ("1", "3"):
        limit = ["--limit", "3" if tiny else "6", "--skip", "12", "--batch-size", batch]
        found = run("validate", "--tree", tree, *model, *prompts, *length, *limit)
        figures[f"batch {batch}"] = {name: found.get(name) for name in MEASURED}
    text = run("generate", "The first thing to know is", "--tree", tree, *model, *length)
    figures["text"] = {name: text[name] for name in ("tokens", "step_lengths")}
    return figures


def drafter_figures(drafter: str, model: list[str], prompts: list[str], tiny: bool) -> Figures:
    """All figures of one drafter, in the current folder."""
    texts = ["--limit", "8" if tiny else "12", "--max-new-tokens", "32" if tiny else "64"]
    learned = ["--learn-tokens", "2000"] if "ngram" in drafter else []
    run("calibrate", *model, *prompts, "--drafter", drafter, *texts, *learned, "-o", "c.safetensors", "--force")
    figures: Figures = {"files": {file.name: tensors_hash(file) for file in sorted(Path().glob("*.safetensors"))}}
    for name, options in (("static 8", ["--nodes", "8"]), ("static 32", ["--nodes", "32"])):
        figures[name] = built(Path("tree.yaml"), *options)
        figures[name] |= decoded("tree.yaml", model, prompts, tiny)
    if drafter != "heads":
        figures["per step 16"] = built(Path("policy.yaml"), "--kind", "dynamic", "--nodes", "16")
        figures["per step 16"] |= decoded("policy.yaml", model, prompts, tiny)
    return figures


def cases(shared: Path) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """Name, drafter, options of the model and options of the prompts of every case."""
    for drafter in DRAFTERS:
        yield "pocket", drafter, ["--model", "pocket"] if drafter == "ngram" else ["--heads", "pocket"], []
    for drafter in WITH_DRAFT:
        yield "pocket", drafter, ["--model", "pocket", "--draft", "pocket-draft"], []
    base, heads = (str(shared / "models" / name) for name in ("tinystories-260k", "tinystories-260k-medusa"))
    if not Path(base).is_dir():
        print(f"{base} is missing: tinystories is left out", file=sys.stderr)
        return
    prompts = ["--prompts", str(shared / "data" / "story_openings.json")]
    for drafter in DRAFTERS:
        yield "tinystories", drafter, ["--model", base, *([] if drafter == "ngram" else ["--heads", heads])], prompts


def differences(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """Each place where two nested results differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            yield from differences(before.get(name), now.get(name), f"{place} / {name}" if place else name)
    elif before != now:
        yield f"{place}: {str(before)[:120]} before, {str(now)[:120]} now"


def main() -> None:
    """Print the figures, or what differs from those of another commit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", type=Path, help="write the figures to this file")
    parser.add_argument("--against", type=Path, help="figures of another commit")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--only", help="one drafter")
    add_tiny(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as rounding depends on their number
    print(machine(1))
    shared, against = options.shared.absolute(), options.against and options.against.read_text(encoding="utf-8")
    output = options.o and options.o.absolute()
    figures: Figures = {}
    for name, drafter, model, prompts in cases(shared):
        if options.only not in (None, drafter):
            continue
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            figures[f"{name} {drafter}"] = drafter_figures(drafter, model, prompts, options.tiny)
        sha = hashlib.sha256(json.dumps(figures[f"{name} {drafter}"]).encode()).hexdigest()
        print(f"{name} {drafter}: {sha[:16]}", flush=True)
    if output:
        output.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    if against is not None:
        before = {case: known for case, known in json.loads(against).items() if options.only in (None, case.split()[1])}
        found = list(differences(before, figures))
        print("\n".join(found) or f"equal: {len(figures)} drafters")
        sys.exit(bool(found))


if __name__ == "__main__":
    main()
