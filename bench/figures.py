"""Run the commands behind the figures of README.md and docs/, and store what they print in docs/figures/.

    python bench/figures.py                      # all, in their order: 16 hours on one core
    python bench/figures.py --resume             # those whose stored output is not of today
    python bench/figures.py compare-pocket exact # these
    python bench/figures.py --list

A stored output begins with its date, machine, versions and load; then follow the commands, each after `$`, with their
standard output. Commands run from the top of the repository on one thread of torch; what they write lies in
build/figures/. tests/docs/test_figures.py compares the pages with the stored outputs and runs nothing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

from timing import add_tiny, machine

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "docs" / "figures"
WORK = "build/figures"
STORIES = "--heads ../shared/models/tinystories-260k-medusa --prompts ../shared/data/story_openings.json"
ALPACA = "--model build/smollm2 --prompts ../shared/data/alpaca_eval.json"
TRACES = f"{WORK}/stories.safetensors"
POCKET = f"{WORK}/pocket.safetensors"
POCKETS = ("model", "eagle", "block")  # drafters of pocket that have modules of their own
# Name -> command lines. A later figure may read what an earlier one wrote. bench/smollm2.py makes build/smollm2.
FIGURES: dict[str, tuple[str, ...]] = {
    "compare-pocket": ("treeopt compare --test-limit 10",),
    "heads-pocket": (
        f"treeopt calibrate --force -o {POCKET}",
        f"treeopt build --calibration {POCKET} --nodes 16 --force -o {WORK}/pocket16.yaml",
        f"treeopt validate --tree {WORK}/pocket16.yaml --limit 20",
    ),
    "chain-pocket": (
        f"treeopt calibrate --draft pocket-draft --limit 64 --force -o {WORK}/chain.safetensors",
        f"treeopt export --for chain --calibration {WORK}/chain.safetensors",
    ),
    "compare-smollm2": (
        f"treeopt compare {ALPACA} --dtype bfloat16,float32 --methods lookup,ngram --test-limit 8 "
        "--learn-limit 200 --learn-tokens 30000 --max-new-tokens 128 --batch-size 32",
    ),
    "compare-smollm2-eagle": (
        f"treeopt compare {ALPACA} --skip 600 --dtype bfloat16 --draft tests/data/smollm2-eagle3 "
        "--methods lookup,ngram,eagle,eagle+ngram --test-limit 5 --learn-limit 100 --learn-tokens 10000 "
        "--max-new-tokens 128 --batch-size 32",
    ),
    "step-smollm2": ("python bench/step.py build/smollm2 --repeats 31",),
    "learned-text-smollm2": (
        "python bench/learned_text.py build/smollm2 --tokens 0 10000 30000 --known 200 --questions 3 --dtype bfloat16",
    ),
    "recommended-pocket": ("python bench/recommended.py --model pocket --dtype float32",),
    "verdict-pocket": ("python bench/verdict.py --model pocket",),
    "verdict-tinystories": ("python bench/verdict.py --model tinystories",),
    "verdict-smollm2": ("python bench/verdict.py --model smollm2 --dtype float32",),
    "verdict-smollm2-bfloat16": ("python bench/verdict.py --model smollm2 --dtype bfloat16",),
    "verdict-full": ("python bench/verdict.py --full --model tinystories --dtype float32",),
    "llama-lengths": (f"python bench/llama_lengths.py --build {WORK}/llama",),
    "forward": ("python bench/forward.py", "python bench/drafting_kernel.py", "python bench/calls.py"),
    "tools": ("python bench/build.py", "python bench/calibrate.py"),
    "hardware": ("python bench/hardware.py paper", "python bench/hardware.py fit"),
    "stories": (
        f"treeopt calibrate {STORIES} --max-new-tokens 160 --batch-size 64 --force -o {TRACES}",
        f"treeopt build --calibration {TRACES} --nodes 64 --force -o {WORK}/t64.yaml",
    ),
    "exact": (f"python bench/exact.py {STORIES} --calibration {TRACES} --limit 128",),
    "optimiser": (
        f"python bench/optimiser.py table --calibration {TRACES}",
        f"python bench/optimiser.py coverage --calibration {TRACES}",
        f"python bench/optimiser.py speed --calibration {TRACES}",
    ),
    "drafting-pocket": ("python bench/drafting.py table --model pocket --tokens 100000",),
    "drafting-tinystories": ("python bench/drafting.py table --model tinystories --tokens 100000",),
    "sampling-agree": ("python bench/sampling.py agree --plans 200",),
    "sampling-loss": ("python bench/sampling.py loss --model pocket",),
    "typical": (
        "python bench/typical.py --model tinystories --texts 32",
        "python bench/typical.py --model pocket --texts 16",
    ),
    "engine-limits": tuple(
        f"treeopt build --calibration {TRACES} --nodes 64 --for {engine} --force -o {WORK}/{engine}.yaml"
        for engine in ("medusa", "trtllm", "sequoia")
    ),
    "ablations": (
        f"python bench/ablations.py dense --calibration {TRACES} -o {WORK}/sweep-dense.svg",
        f"python bench/ablations.py levels --calibration {TRACES} -o {WORK}/sweep-levels.svg",
        f"python bench/ablations.py prompts --calibration {TRACES} -o {WORK}/sweep-prompts.svg",
    ),
    "lossless": ("python bench/lossless.py --cases 800", "python bench/lossless.py --cases 2000 --families paths"),
    "families": ("python bench/families.py",),
    "counters": ("python bench/counters.py --limit 480",),
    "modules-pocket": ("python bench/modules.py --model pocket",),
    "modules-tinystories": ("python bench/modules.py --model tinystories",),
    "modules-hybrid": ("python bench/modules.py --model hybrid",),
    "modules-dflash": ("python bench/modules.py --model pocket --draft tests/data/pocket-dflash",),
    "verdict-dflash": (
        "python bench/verdict.py --model pocket --dtype float32 --draft tests/data/pocket-dflash --batch 1 4",
        "python bench/verdict.py --model smollm2 --dtype bfloat16 --draft tests/data/smollm2-dflash --batch 1",
    ),
    "streams-pocket": ("python bench/streams.py --model pocket --tokens 50000 --decode",),
    "streams-drafters": (
        *(f"python bench/streams.py --model pocket --tokens 50000 --drafters {one}+ngram" for one in POCKETS),
        "python bench/streams.py --model hybrid --tokens 50000 --drafters mtp+ngram",
    ),
    "streams-smollm2": (
        "python bench/streams.py --model smollm2 --tokens 10000 --streams edits agent once",
        "python bench/streams.py --model smollm2 --tokens 10000 --streams turns",
        "python bench/streams.py --model smollm2 --tokens 10000 --drafters eagle+ngram --levels 8 "
        "--streams edits agent",
        "python bench/streams.py --model smollm2 --tokens 10000 --drafters block+ngram --levels 8 "
        "--streams edits agent",
    ),
    "fusion-pocket": ("python bench/fusion.py --model pocket --drafters heads --texts 8",),
    "fusion-drafters": (
        *(f"python bench/fusion.py --model pocket --drafters {one} --texts 4" for one in POCKETS),
        "python bench/fusion.py --model hybrid --drafters mtp --texts 4",
        "python bench/fusion.py --model smollm2 --tokens 10000 --texts 4",
    ),
    "modules-dspark": ("python bench/modules.py --model pocket --draft tests/data/pocket-dspark",),
    "ddtree": ("python bench/ddtree.py",),
    "modules-dspark-no-confidence": (
        "python bench/modules.py --model pocket --draft tests/data/pocket-dspark --alone --no-confidence",
    ),
    "doctor": (
        *(
            f"python bench/make_module.py calibration/recipes/pocket-{kind}.yaml {WORK}/checkpoints/pocket-{kind} "
            "--all-states --minutes 9"
            for kind in ("eagle3", "dflash", "dspark")
        ),
        f"python bench/doctor.py --checkpoints {WORK}/checkpoints",
    ),
    "doctor-shared": ("python bench/doctor.py --shared ../shared",),
    "doctor-eagle3": ("treeopt doctor --draft pocket-eagle3 --no-texts",),
    "doctor-dspark": ("treeopt doctor --draft tests/data/pocket-dspark --no-texts",),
    "modules-smollm2": ("python bench/modules.py --model smollm2 --tokens 10000",),
    "modules-smollm2-dflash": (
        "python bench/modules.py --model smollm2 --draft tests/data/smollm2-dflash --tokens 10000 --alone",
    ),
    "path-trees": (
        f"treeopt calibrate --limit 160 --force -o {WORK}/paths-pocket.safetensors",
        f"treeopt calibrate {STORIES} --max-new-tokens 160 --batch-size 64 --force -o {WORK}/paths-stories.safetensors",
        f"python bench/path_trees.py {WORK}/paths-pocket.safetensors {WORK}/paths-stories.safetensors",
    ),
    "hybrid": ("python bench/hybrid.py",),
}


def processor() -> str:
    """The processor by its own name, with the instructions that decide the speed of bfloat16."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown processor"
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    fast = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in named.get("flags", "").split()]
    return f"{named.get('model name', 'unknown processor')} ({', '.join(fast) or 'no bfloat16 instructions'})"


def header() -> list[str]:
    """When, where and with what the commands run."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "numpy"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return [
        f"date: {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}",
        f"machine: {machine(1)}, {processor()}",
        f"versions: {versions}, treeopt at {commit.stdout.strip() or 'an unknown commit'}",
    ]


def run(name: str, lines: tuple[str, ...], *, tiny: bool = False) -> str:
    """The text of a figure: header, commands and what they print; a command that fails raises."""
    text = header()
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "160"}
    before, begin = os.getloadavg()[0], time.monotonic()
    printed = []
    for line in lines:
        more = ["--tiny"] if tiny and line.startswith("python") and "make_module" not in line else []
        words = shlex.split(line.replace("python ", f"{shlex.quote(sys.executable)} ", 1)) + more
        done = subprocess.run(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: `{line}` ended with status {done.returncode}\n{done.stdout}")
        printed += [f"$ {line}", done.stdout.rstrip()]
    minutes = (time.monotonic() - begin) / 60
    text.append(f"load: {before:.1f} before, {os.getloadavg()[0]:.1f} after; {minutes:.1f} minutes")
    return "\n".join([*text, "", *printed]) + "\n"


def main() -> None:
    """Run the named figures, or all, and store each as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*FIGURES, []], metavar="NAME", help="of --list [default: all]")
    parser.add_argument("--list", action="store_true", help="print names and commands, and run nothing")
    parser.add_argument("--resume", action="store_true", help="leave out those whose stored output is of today")
    parser.add_argument("-o", "--output", type=Path, default=STORED, help="folder of the stored outputs")
    add_tiny(parser)
    options = parser.parse_args()
    print(machine(1))
    for name in options.names or FIGURES:
        if options.list:
            print(name, *FIGURES[name], sep="\n    ")
            continue
        stored = options.output / f"{name}.txt"
        if options.resume and stored.exists() and stored.read_text().startswith(f"{header()[0]}\n"):
            continue
        (ROOT / WORK).mkdir(parents=True, exist_ok=True)
        options.output.mkdir(parents=True, exist_ok=True)
        text = run(name, FIGURES[name], tiny=options.tiny)
        stored.write_text(text)
        print(f"{name}: {stored}", flush=True)


if __name__ == "__main__":
    main()
