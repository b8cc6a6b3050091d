"""The length of a chain that treeopt chooses for llama.cpp, against every length measured there, in one run.

    python bench/llama_lengths.py [--build FOLDER] [--shared ../shared]

--build compiles llama.cpp's Python bindings from their source package into FOLDER (some minutes with a compiler) and
uses them there; else they must be installed. The SmolLM2 GGUF answers AlpacaEval prompts, greedy, on one thread, with
the bindings' own prompt lookup of 0 to 10 drafts, of which 10 is their default. Every repeat decodes the next prompt
with each length in turn; times are CPU seconds after the first token. First, on other prompts:

- a step of each number of drafts is timed, with drafts that are never right;
- a chain of 10 drafts is counted, as an engine's counters would. `treeopt export --measured` estimates the tokens per
  step of shorter chains from these counts alone.

Prompt lookup finds no match at some steps, which then have fewer drafts. So the seconds of a length are the mean over
the steps of that run, each with its own number of drafts. They are given to treeopt as a CSV file.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from recommended import WIDEST, interval
from smollm2 import shared_file
from timing import add_tiny, judged, machine

from treeopt.files.profiles import load_profile
from treeopt.optimize.chains import MeasuredAcceptance, chains_by_batch, mean_acceptance
from treeopt.optimize.counters import estimate_chains

PACKAGE = "llama-cpp-python==0.3.36"
# With GGML_NATIVE this version crashes in `decode` on a CPU with AMX.
FLAGS = ("AVX", "AVX2", "FMA", "F16C", "BMI2", "AVX512")
WARM = 4  # steps before a time begins
DEFAULT = 10  # drafts of LlamaPromptLookupDecoding
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

    def seconds(self, ids: Sequence[int], drafts: int | None, count: int) -> float:
        """CPU seconds of a step with so many drafts, none of them right, and of looking them up; None is plain."""

        def wrong(found: NDArray[np.intc], /, **_: Any) -> NDArray[np.intc]:
            self.lookup(found, 2, drafts or 1)
            made: NDArray[np.intc] = np.full(drafts or 0, model.token_bos(), np.intc)
            return made

        model = self.plain if drafts is None else self.drafting
        model.draft_model = None if drafts is None else wrong
        stream = model.generate(list(ids), temp=0.0)
        model.reset()
        for _ in range(1 + WARM):
            next(stream)
        begin = time.process_time()
        for _ in range(count):
            next(stream)
        return (time.process_time() - begin) / count


def timed(engine: Engine, ids: Sequence[int], rounds: int, count: int) -> tuple[float, list[float]]:
    """Median seconds of a plain step, and of steps with 0, 1, ... `DEFAULT` drafts, taken in turn."""
    found = [[engine.seconds(ids, drafts, count) for drafts in (None, *range(DEFAULT + 1))] for _ in range(rounds)]
    plain, *seconds = np.median(found, axis=0).tolist()
    return plain, seconds


def csv_lines(plain: float, seconds: Sequence[float], proposed: Sequence[int]) -> Iterator[str]:
    """The mean seconds of a step at each length, of steps that propose at most so many drafts."""
    yield "tokens, seconds"
    yield f"1, {plain:.6f}"
    for drafts in range(1, DEFAULT + 1):
        yield f"{drafts + 1}, {np.mean([seconds[min(one, drafts)] for one in proposed]):.6f}"


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
    known, rounds = 12, 9
    if options.tiny:
        options.new_tokens, options.repeats, known, rounds = 8, 2, 2, 1
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
    choose(engine, texts[:known], texts[known:], rounds, options)


def choose(
    engine: Engine, known: Sequence[list[int]], others: Sequence[list[int]], rounds: int, options: argparse.Namespace
) -> None:
    """Choose a length by counts and step times on the known prompts, and measure all lengths on the others."""
    plain, seconds = timed(engine, known[0], rounds, min(16, options.new_tokens))
    print("step of 0, 1, ... drafts over plain: " + " ".join(f"{one / plain:.2f}" for one in seconds))
    counted = Steps()
    for ids in known:
        engine.run(ids, options.new_tokens, DEFAULT, counted)
    histogram = [Counter(counted.accepted)[drafts] for drafts in range(DEFAULT + 1)]
    estimates = estimate_chains(MeasuredAcceptance(mean_acceptance(histogram), tuple(histogram)))
    proposed = counted.proposed[: len(counted.accepted)]
    print(
        f"counted at {DEFAULT}: {len(proposed)} steps, {np.mean(np.array(proposed) > 0):.1%} with drafts: {histogram}"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write("\n".join(csv_lines(plain, seconds, proposed)) + "\n")
        file.flush()
        profile = load_profile(file.name)
    [budget] = chains_by_batch(np.array(estimates.tokens), profile).values()
    chosen, known_seconds = budget.nodes - 1, profile.curve(1)[1]
    lengths = range(DEFAULT + 1)
    check_estimates(engine, known, counted, estimates.chains, options.new_tokens)
    rates: dict[int, list[float]] = {drafts: [] for drafts in lengths}
    made = {drafts: Steps() for drafts in lengths}
    for number in range(options.repeats + 1):
        for drafts in lengths:
            tokens, spent = engine.run(others[number % len(others)], options.new_tokens, drafts, made[drafts])
            if number:  # the first one warms
                rates[drafts].append(max(tokens, 1) / spent)
    print("drafts  tokens per step  tokens/s  over plain  expected")
    for drafts in lengths:
        _, mean, _ = interval(rates[drafts], rates[0])
        speedup = estimates.tokens[drafts] * plain / known_seconds[drafts]
        rate, tau = float(np.median(rates[drafts])), made[drafts].tokens_per_step
        print(f"{drafts:6}  {tau:15.3f}  {rate:8.1f}  {mean:10.3f}  {speedup:8.3f}")
    best = max(lengths, key=lambda drafts: float(np.mean(np.log(rates[drafts]))))
    low, mean, high = interval(rates[chosen], rates[best])
    within = f"{best} is the best measured; 90 % interval {low:.3f} to {high:.3f}, {len(rates[0])} repeats"
    judged(f"chosen {chosen} drafts over the best", mean if high < 1 else max(mean, 1.0), BEST_GOAL, within)
    low, mean, high = interval(rates[chosen], rates[DEFAULT])
    judged(f"chosen {chosen} drafts over the default of {DEFAULT}", mean, 1.0, f"90 % interval {low:.3f} to {high:.3f}")
    widest = max(high / mean - 1 for _, mean, high in (interval(rates[chosen], rates[one]) for one in (best, 0)))
    judged("half width of the intervals to the best and to plain", widest, WIDEST, most=True)


def check_estimates(
    engine: Engine, known: Sequence[list[int]], counted: Steps, chains: Sequence[Any], new_tokens: int
) -> None:
    """The estimated tokens per step of every length beside those that are counted on the same prompts."""
    print("drafts  tokens per step, counted  estimated, 90 %")
    worst, held = 0.0, 0
    for chain in chains[1:]:
        steps = Steps() if chain.drafts < DEFAULT else counted
        for ids in known if steps is not counted else ():
            engine.run(ids, new_tokens, chain.drafts, steps)
        worst = max(worst, abs(chain.tokens_per_step / steps.tokens_per_step - 1))
        held += chain.low <= steps.tokens_per_step <= chain.high
        ends = f"{chain.low:.3f} to {chain.high:.3f}"
        print(f"{chain.drafts:6}  {steps.tokens_per_step:24.3f}  {chain.tokens_per_step:.3f}, {ends}", flush=True)
    judged("largest error of estimates", worst, ERROR_GOAL, most=True)
    judged("lengths within their interval", held / (len(chains) - 1), 1.0)


if __name__ == "__main__":
    main()
