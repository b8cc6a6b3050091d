"""Memory: the most that each stage of a calibration takes, for more and more prompts; and that of large vocabularies.

    python bench/memory.py stages [--drafter heads] [--temperature 0] [--positions 10000 100000 1000000]
    python bench/memory.py vocabulary [--vocab 151936] [--positions 256]

`stages` calibrates and builds with a tiny random model whose answers are random tokens, in a process of its own for
each number of positions. A stage's figure is its peak of resident memory above that before the first stage, which
includes torch and the model. It is read from /proc, so the script runs on Linux only.

`vocabulary` runs each function over logits of many tokens twice, with the bound of `treeopt.models.logits` and without,
in a process of its own each time. A figure is its peak above the memory before it, which includes logits that it is
given. The results are compared by their bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import add_tiny, machine
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from treeopt.calibrate import pipeline
from treeopt.calibration import Calibration
from treeopt.decode import rules
from treeopt.decode.rules import Sample
from treeopt.drafting.count import choices_in
from treeopt.drafting.heads import HeadsProposer
from treeopt.drafting.interface import Drafts
from treeopt.drafting.learn import Learning
from treeopt.drafting.trace import Target, trace_texts
from treeopt.evaluate.validate import log_likelihood
from treeopt.files.calibrations import load_calibration, save_calibration
from treeopt.models import logits
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.models.logits import top_ids
from treeopt.optimize.tree_builder import build_tree
from treeopt.runs.work import Work
from treeopt.texts.encode import Text
from treeopt.texts.prompts import load_prompts
from treeopt.train.loss import head_losses, hits, weighted
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_tree

VOCAB, HIDDEN, HEADS = 512, 16, 5
PROMPT, ANSWER = 24, 64  # tokens
BATCH = 256
MB = 1e6
# Functions of `calibrate.pipeline` that are stages, with their names in the table.
STAGES = {"encode_prompts": "encode", "_answered": "answer", "learn": "learn", "_traced": "trace"}
STAGES |= {"as_calibration": "record"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    stages = commands.add_parser("stages", help="peak memory of each stage, by number of positions")
    stages.add_argument("--positions", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    stages.add_argument("--drafter", choices=("heads", "ngram", "heads+ngram"), default="heads")
    stages.add_argument("--temperature", type=float, default=0.0)
    add_tiny(stages)
    vocabulary = commands.add_parser("vocabulary", help="peak memory of functions over logits, with and without bound")
    vocabulary.add_argument("--vocab", type=int, default=151_936)
    vocabulary.add_argument("--positions", type=int, default=256)
    add_tiny(vocabulary)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "vocabulary":
        vocabulary_table(*((700, 40) if options.tiny else (options.vocab, options.positions)))
        return
    print(f"{machine(1)}, torch {torch.__version__}; {options.drafter}, temperature {options.temperature:g}")
    stages_table([600, 2400] if options.tiny else options.positions, options.drafter, options.temperature)


def alone(run: Callable[..., Any], *given: Any) -> Any:
    """What a function returns in a process of its own, which begins as a copy of this one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(run, *given).result()


def vocabulary_table(vocab: int, positions: int) -> None:
    """Print the peak of each function with the bound and without."""
    print(f"{machine(1)}, torch {torch.__version__}")
    print(f"{positions} positions of {vocab:,} tokens: {positions * vocab * 4 / MB:.0f} MB of logits in float32")
    print(f"MB above the start     bound of {logits.LOGITS_BYTES / MB:.0f}   no bound   same bytes")
    for name in CASES:
        runs = [alone(peak_of, name, vocab, positions, bound) for bound in (logits.LOGITS_BYTES, 1 << 60)]
        (bounded, one), (unbounded, other) = runs
        print(f"  {name:20}{bounded / MB:12.0f}{unbounded / MB:11.0f}   {'yes' if one == other else 'NO'}")


def peak_of(name: str, vocab: int, positions: int, bound: int) -> tuple[int, str]:
    """Bytes of the peak of a function above the memory before it, and the hash of its result."""
    logits.LOGITS_BYTES = bound
    run, meter = CASES[name](vocab, positions), Meter()
    found = meter.metered("run", run)()
    return meter.peaks["run"], hashlib.sha256(found.numpy(force=True).tobytes()).hexdigest()


def _logits(vocab: int, positions: int) -> torch.Tensor:
    return torch.randn(positions, vocab, generator=torch.Generator().manual_seed(0))


def _ties(vocab: int, positions: int) -> Callable[[], torch.Tensor]:
    values = _logits(vocab, positions).round_()  # many equal logits, whose order takes integer keys
    return lambda: top_ids(values, 64)


def _target(vocab: int, positions: int) -> Callable[[], torch.Tensor]:
    """The target's probabilities of a sampled text's candidates."""
    base = random_base(vocab, HIDDEN)
    text = Text("0:00000000", [1, 2, 3], list(range(positions)))
    proposer = HeadsProposer(base, MedusaHeads(HEADS, 1, HIDDEN, None))

    def run() -> torch.Tensor:
        [found] = trace_texts(base, [proposer], [text], 253, target=Target.at_temperature(0.7, vocab))
        assert found.target is not None
        return torch.from_numpy(found.target.probability)

    return run


def _heads(vocab: int, positions: int) -> Callable[[], torch.Tensor]:
    """Ranks of a text's tokens under heads."""
    base = random_base(vocab, HIDDEN)
    text = Text("0:00000000", [1, 2, 3], list(range(positions)))
    proposer = HeadsProposer(base, MedusaHeads(HEADS, 1, HIDDEN, None))
    return lambda: torch.from_numpy(trace_texts(base, [proposer], [text], 253)[0].ranks)


def _choices(vocab: int, positions: int) -> Callable[[], torch.Tensor]:
    """Greedy choices after the tokens of a text, for the n-gram table."""
    base = random_base(vocab, HIDDEN)
    return lambda: torch.tensor(choices_in(base, [list(range(positions + 1))]))


def _draws(vocab: int, positions: int) -> Callable[[], torch.Tensor]:
    """A token drawn after every node, with top-k and top-p."""
    values, rule = _logits(vocab, positions)[None], Sample(0.7, top_k=50, top_p=0.9)
    return lambda: rule.choose(values, None, torch.Generator().manual_seed(1))


def _typical(vocab: int, positions: int) -> Callable[[], torch.Tensor]:
    """Typical acceptance of a tree's drafts."""
    values = _logits(vocab, positions)[None]
    tree = compile_tree(Tree.from_paths([(rank,) for rank in range(positions - 1)]))
    drafts = Drafts(torch.arange(positions)[None], tree)
    return lambda: rules.typical(drafts, values, temperature=0.7)


def _likelihood(vocab: int, positions: int) -> Callable[[], torch.Tensor]:
    """The likelihood of a text."""
    base = random_base(vocab, HIDDEN)
    text = Text("0:00000000", [1, 2, 3], list(range(positions)))
    return lambda: torch.tensor(log_likelihood(base, [text]))


def _losses(vocab: int, positions: int) -> Callable[[], torch.Tensor]:
    """Losses of heads, and their gradients."""
    heads, lm_head = MedusaHeads(2, 1, HIDDEN, None), torch.nn.Linear(HIDDEN, vocab, bias=False)
    hidden = torch.randn(positions, HIDDEN, generator=torch.Generator().manual_seed(0))
    true = torch.arange(2 * positions).view(positions, 2)

    def run() -> torch.Tensor:
        torch.autograd.backward(weighted(head_losses(heads, hidden, true, lm_head)))
        return hits(heads, hidden, true, lm_head)

    return run


# Functions over logits: each makes what the function needs, and returns the run that is measured.
CASES = {
    "ranks of heads": _heads,
    "target probabilities": _target,
    "choices to count": _choices,
    "order of equal logits": _ties,
    "draws of a tree": _draws,
    "typical acceptance": _typical,
    "likelihood of texts": _likelihood,
    "losses of training": _losses,
}


def stages_table(sizes: list[int], drafter: str, temperature: float) -> None:
    """Print the peak of each stage for each number of positions, and how it grows with the last of them."""
    found = [alone(measured, size, drafter, temperature) for size in sizes]
    print("MB above the start    " + "".join(f"{one['positions']:>12,}" for one in found) + "   bytes a position")
    rows = [(name, [one["peaks"][name] for one in found]) for name in found[0]["peaks"]]
    rows.append(("file", [one["file"] for one in found]))
    apart = found[-1]["positions"] - found[-2]["positions"] if len(found) > 1 else found[0]["positions"]
    for name, values in rows:
        grown = values[-1] - (values[-2] if len(values) > 1 else 0)
        print(f"  {name:20}" + "".join(f"{value / MB:12.1f}" for value in values) + f"{grown / apart:12.0f}")
    print(f"  {'the whole process':20}" + "".join(f"{one['peak'] / MB:12.1f}" for one in found))


def measured(positions: int, drafter: str, temperature: float) -> dict[str, Any]:
    """Bytes of the peak of each stage above the start, and of the file, for about so many positions."""
    base = FakeBase(**vars(random_base(VOCAB, HIDDEN)))
    heads = None if drafter == "ngram" else MedusaHeads(HEADS, 1, HIDDEN, None)
    learning = None if drafter == "heads" else Learning(tokens=positions // 4)
    with tempfile.TemporaryDirectory() as folder:
        prompts, output = Path(folder) / "prompts.jsonl", Path(folder) / "calibration.safetensors"
        write_prompts(prompts, -(-positions // ANSWER))
        meter = Meter()
        for function, stage in STAGES.items():
            setattr(pipeline, function, meter.metered(stage, getattr(pipeline, function)))
        found = meter.metered("load prompts", load_prompts)(prompts)
        calibration = calibrated(base, heads, found, learning, Work(output), temperature)
        meter.metered("write", save_calibration)(calibration, output)
        made = calibration.positions
        del found, calibration
        loaded = meter.metered("read", load_calibration)(output)
        meter.metered("build", build_tree)(loaded, nodes=64)
        return {"positions": made, "peaks": meter.peaks, "file": output.stat().st_size, "peak": meter.highest}


def calibrated(
    base: Base, heads: MedusaHeads | None, prompts: Any, learning: Learning | None, work: Work, temperature: float
) -> Calibration:
    """The calibration alone, as the command keeps it; the texts are freed."""
    options: dict[str, Any] = {"max_new_tokens": ANSWER, "batch_size": BATCH, "temperature": temperature, "work": work}
    options["steps"] = learning is not None
    run = pipeline.run_calibration(base, heads, prompts, learning=learning, **options)
    return run.calibration


class Meter:
    """Peaks of resident memory of stages, in bytes above that at the start."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.highest = 0
        self._start = memory("VmRSS")

    def metered(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose peak is noted under the name of its stage."""

        @wraps(function)
        def run(*given: Any, **named: Any) -> Any:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again at VmRSS
            result = function(*given, **named)
            peak = memory("VmHWM")
            self.peaks[stage] = peak - self._start
            self.highest = max(self.highest, peak)
            return result

        return run


def memory(name: str) -> int:
    """A figure of /proc/self/status, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"{name} is not in /proc/self/status"
    return int(found[1]) * 1024


class FakeBase(Base):
    """A base that answers with random tokens, each at once: tracing them takes the time of a real run."""

    def generate(self, ids: torch.Tensor, mask: torch.Tensor, max_new_tokens: int, **options: Any) -> torch.Tensor:
        answers = torch.randint(1, self.vocab_size, (len(ids), max_new_tokens))
        for processor in options.get("logits_processor", ()):
            for step in range(max_new_tokens):
                processor(ids, torch.nn.functional.one_hot(answers[:, step], self.vocab_size).float())
        return torch.cat([ids, answers], dim=1)


def random_base(vocab: int, hidden: int) -> Base:
    """A random model of one layer with a tokenizer of whole words."""
    torch.manual_seed(0)
    shape = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**shape, vocab_size=vocab, max_position_embeddings=1024, eos_token_id=None, bos_token_id=None)
    core = Tokenizer(models.WordLevel({f"w{token}": token for token in range(vocab)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="w0")
    return Base(LlamaForCausalLM(config).eval(), tokenizer, "random")


def write_prompts(path: Path, count: int) -> None:
    """A file of prompts of random words."""
    rng = np.random.default_rng(0)
    with path.open("w") as stream:
        for _ in range(count):
            words = " ".join(f"w{token}" for token in rng.integers(1, VOCAB, PROMPT))
            stream.write(json.dumps({"text": words}) + "\n")


if __name__ == "__main__":
    main()
