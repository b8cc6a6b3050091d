"""The length of a chain that treeopt chooses for llama.cpp, against every length measured there, in one run.

    python bench/llama_lengths.py [--build FOLDER] [--shared ../shared]

--build compiles llama.cpp's Python bindings from their source package into FOLDER (some minutes with a compiler) and
uses them there; else they must be installed. The SmolLM2 GGUF answers AlpacaEval prompts, greedy, on one thread, with
the bindings' own prompt lookup of 0 to 10 drafts, of which 10 is their default. Every repeat decodes the next prompt
with each length in turn; times are CPU seconds after the first token. First other prompts are decoded so, from which:

- the mean seconds of a step of each length are given to treeopt as a CSV file. Prompt lookup finds no match at some
  steps, which then have fewer drafts, so steps with all drafts would be dearer than those that the engine takes;
- a chain of 10 drafts is counted, as an engine's counters would. `treeopt export --measured` estimates the tokens per
  step of shorter chains from these counts alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from recommended import WIDEST, interval, judged_by_best
from smollm2 import shared_file
from timing import add_tiny, judged, machine

from treeopt.files.profiles import load_profile
from treeopt.optimize.chains import MeasuredAcceptance, chains_by_batch, mean_acceptance
from treeopt.optimize.counters import estimate_chains

PACKAGE = "llama-cpp-python==0.3.36"
# With GGML_NATIVE this version crashes in `decode` on a CPU with AMX.
FLAGS = ("AVX", "AVX2", "FMA", "F16C", "BMI2", "AVX512")
DEFAULT = 10  # drafts of LlamaPromptLookupDecoding
LENGTHS = range(DEFAULT + 1)
BEST_GOAL, ERROR_GOAL = 0.97, 0.03
MESSAGE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class Steps:
    """Counts of the steps of a run.

    Args:
        proposed: number of drafts of each step.
        accepted: accepted drafts of each step.
        before: tokens of the text when the last drafts were made.
    """

    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    before: int | None = None

    def begin(self) -> None:
        """The next tokens are those of another text; the last step of this one is not counted."""
        self.proposed, self.before = self.proposed[: len(self.accepted)], None

    def count(self, tokens: int, drafts: int) -> None:
        """Drafts were made after a text of so many tokens, of which the last one was not drafted."""
        if self.before is not None:
            self.accepted.append(tokens - self.before - 1)
        self.before = tokens
        self.proposed.append(drafts)

    @property
    def tokens_per_step(self) -> float:
        """1 + accepted drafts per step."""
        return 1 + sum(self.accepted) / max(len(self.accepted), 1)


def built(folder: Path) -> None:
    """Compile the bindings into a folder, unless they are there, and import from it."""
    if not (folder / "llama_cpp").is_dir():
        begin = time.perf_counter()
        flags = " ".join(["-DGGML_NATIVE=OFF", *(f"-DGGML_{flag}=ON" for flag in FLAGS)])
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
        environment = {**os.environ, "CMAKE_ARGS": flags}
        subprocess.run([*command, "--target", str(folder), PACKAGE, "diskcache"], check=True, env=environment)
        print(f"built {PACKAGE} in {time.perf_counter() - begin:.0f} s")
    sys.path.insert(0, str(folder))


class Engine:
    """llama.cpp with and without logits of every token, which drafts need and plain decoding does not."""

    def __init__(self, gguf: Path, context: int = 512) -> None:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        options: dict[str, Any] = {"n_ctx": context, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
        self.version = llama_cpp.__version__
        self.plain = llama_cpp.Llama(str(gguf), **options)
        self.drafting = llama_cpp.Llama(str(gguf), **options, logits_all=True)
        self.lookup = LlamaPromptLookupDecoding.find_candidate_pred_tokens

    def ids(self, text: str) -> list[int]:
        """Tokens of a message in the chat format."""
        found: list[int] = self.plain.tokenize(MESSAGE.format(text).encode(), special=True)
        return found

    def run(self, ids: Sequence[int], new_tokens: int, drafts: int, steps: Steps | None = None) -> tuple[int, float]:
        """Tokens after the first, and their CPU seconds, with prompt lookup of so many drafts."""

        def look(found: NDArray[np.intc], /, **_: Any) -> NDArray[np.intc]:
            made: NDArray[np.intc] = self.lookup(found, 2, drafts)  # its default n-grams
            if steps is not None:
                steps.count(len(found), len(made))
            return made

        model = self.drafting if drafts else self.plain
        model.draft_model = look if drafts else None
        if steps is not None:
            steps.begin()
        stream = model.generate(list(ids), temp=0.0)
        model.reset()
        next(stream)
        begin, tokens = time.process_time(), 0
        for token in stream:
            tokens += 1
            if tokens >= new_tokens - 1 or token == model.token_eos():
                break
        return tokens, time.process_time() - begin


def run_all(engine: Engine, known: Sequence[list[int]], new_tokens: int) -> tuple[dict[int, Steps], dict[int, float]]:
    """The counts and the mean seconds of a step of each length, all in turn on each prompt."""
    counts, spent, tokens = {drafts: Steps() for drafts in LENGTHS}, np.zeros(len(LENGTHS)), np.zeros(len(LENGTHS))
    for number, ids in enumerate([known[0], *known]):
        for drafts in LENGTHS:
            made, seconds = engine.run(ids, new_tokens, drafts, counts[drafts] if number else None)
            if number:  # the first one warms
                tokens[drafts] += made
                spent[drafts] += seconds
    each = (spent / tokens).tolist()
    return counts, {drafts: each[drafts] * counts[drafts].tokens_per_step for drafts in LENGTHS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, metavar="FOLDER")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=24)
    add_tiny(parser)
    options = parser.parse_args()
    if options.build:
        built(options.build)
    known = 12
    if options.tiny:
        options.new_tokens, options.repeats, known = 8, 2, 2
    print(machine(1))
    try:
        engine = Engine(shared_file(options.shared))
    except ImportError:
        print(f"llama.cpp was not measured: --build FOLDER compiles its bindings, {PACKAGE}")
        return
    print(f"llama-cpp-python {engine.version}")
    rows = json.loads((options.shared / "data" / "alpaca_eval.json").read_text())
    random.Random(0).shuffle(rows)  # neighbours are alike
    texts = [engine.ids(row["instruction"]) for row in rows if len(row["instruction"]) < 800]
    choose(engine, texts[:known], texts[known:], options)


def choose(
    engine: Engine, known: Sequence[list[int]], others: Sequence[list[int]], options: argparse.Namespace
) -> None:
    """Choose a length by counts and step times on the known prompts, and measure all lengths on the others."""
    counts, seconds = run_all(engine, known, options.new_tokens)
    print(
        "mean step of 0, 1, ... drafts over plain: " + " ".join(f"{one / seconds[0]:.2f}" for one in seconds.values())
    )
    counted = counts[DEFAULT]
    histogram = [Counter(counted.accepted)[drafts] for drafts in LENGTHS]
    estimates = estimate_chains(MeasuredAcceptance(mean_acceptance(histogram), tuple(histogram)))
    drafted = np.mean(np.array(counted.proposed[: len(counted.accepted)]) > 0)
    print(f"counted at {DEFAULT}: {len(counted.accepted)} steps, {drafted:.1%} with drafts: {histogram}")
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        rows = (f"{drafts + 1}, {one:.6f}" for drafts, one in seconds.items())
        file.write("\n".join(["tokens, seconds", *rows]) + "\n")
        file.flush()
        profile = load_profile(file.name)
    [budget] = chains_by_batch(np.array(estimates.tokens), profile).values()
    chosen, known_seconds = budget.nodes - 1, profile.curve(1)[1]
    check_estimates(counts, estimates.chains)
    rates: dict[int, list[float]] = {drafts: [] for drafts in LENGTHS}
    made = {drafts: Steps() for drafts in LENGTHS}
    for number in range(options.repeats + 1):
        for drafts in LENGTHS:
            tokens, spent = engine.run(others[number % len(others)], options.new_tokens, drafts, made[drafts])
            if number:  # the first one warms
                rates[drafts].append(max(tokens, 1) / spent)
    print("drafts  tokens per step  tokens/s  over plain  expected")
    for drafts in LENGTHS:
        _, mean, _ = interval(rates[drafts], rates[0])
        speedup = estimates.tokens[drafts] * seconds[0] / known_seconds[drafts]
        rate, tau = float(np.median(rates[drafts])), made[drafts].tokens_per_step
        print(f"{drafts:6}  {tau:15.3f}  {rate:8.1f}  {mean:10.3f}  {speedup:8.3f}")
    best = max(LENGTHS, key=lambda drafts: float(np.mean(np.log(rates[drafts]))))
    name = f"chosen {chosen} drafts over {best}, the best measured"
    judged_by_best(name, interval(rates[chosen], rates[best]), BEST_GOAL, len(rates[0]))
    low, mean, high = interval(rates[chosen], rates[DEFAULT])
    judged(f"chosen {chosen} drafts over the default of {DEFAULT}", mean, 1.0, f"90 % interval {low:.3f} to {high:.3f}")
    widest = max(high / mean - 1 for _, mean, high in (interval(rates[chosen], rates[one]) for one in (best, 0)))
    judged("half width of the intervals to the best and to plain", widest, WIDEST, most=True)


def check_estimates(counts: Mapping[int, Steps], chains: Sequence[Any]) -> None:
    """The estimated tokens per step of every length beside those that are counted on the same prompts."""
    print("drafts  tokens per step, counted  estimated, 90 %")
    worst, held = 0.0, 0
    for chain in chains[1:]:
        steps = counts[chain.drafts]
        worst = max(worst, abs(chain.tokens_per_step / steps.tokens_per_step - 1))
        held += chain.low <= steps.tokens_per_step <= chain.high
        ends = f"{chain.low:.3f} to {chain.high:.3f}"
        print(f"{chain.drafts:6}  {steps.tokens_per_step:24.3f}  {chain.tokens_per_step:.3f}, {ends}", flush=True)
    judged("largest error of estimates", worst, ERROR_GOAL, most=True)
    judged("lengths within their interval", held / (len(chains) - 1), 1.0)


if __name__ == "__main__":
    main()
