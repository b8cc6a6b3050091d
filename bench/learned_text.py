"""What more learned text is worth: tokens per step of a drafter by the number of tokens that it was learned from.

    python bench/learned_text.py MODEL [--heads HEADS] [--tokens 0 10000 50000 200000 400000] [--keep FOLDER]

The drafter is learned from the model's answers to the first prompts of AlpacaEval and from sampled ones, and judged by
replay on its greedy answers to the others, and to first questions of each category of Spec-Bench. For each number of
tokens: minutes of sampling (in proportion to the tokens) and of the rest (forwards over the learned texts in the first
number only), the n-gram table, top-1 accuracy of level 1, tokens per step of per-step trees of each size and of a
static tree of 16 nodes (cross-validated), and tokens per step of the per-step tree of 16 nodes by category. With heads
the Medusa tree of the heads alone is judged too.

Fewer tokens than a round of sampling has are those of prompts that are evenly spread over it; else they are its first.
--keep stores the texts of a model in a folder, from which the next run takes them; then no sampling is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import pickle
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from timing import add_tiny, machine

import treeopt.drafting.learn
import treeopt.drafting.trace
from treeopt.calibrate.pipeline import as_calibration
from treeopt.calibration import Calibration, Provenance
from treeopt.drafter import Drafter
from treeopt.drafting.count import MAX_BYTES, ROW, NgramCounts
from treeopt.drafting.learn import Learned, Learning, learn
from treeopt.drafting.plans import proposer_for
from treeopt.drafting.trace import trace_texts
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, load_base
from treeopt.models.given import load_pair
from treeopt.models.heads import MedusaHeads
from treeopt.optimize.per_step import build_policy, replay_policy
from treeopt.optimize.replay import replay
from treeopt.optimize.tree_builder import build_tree
from treeopt.progress import Progress, silent
from treeopt.runs.work import BatchRun, Chunk, chunk_name
from treeopt.texts.answers import AnswerOptions, Drawn, answer_all, hidden_states
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import Prompt, PromptSet, load_prompts
from treeopt.texts.samples import draw
from treeopt.traces import NONE

TOP_K, BATCH = 32, 64
STATIC = 16  # nodes of the static tree, and of the categories' trees
OTHERS = "AlpacaEval, the other prompts"


@dataclasses.dataclass
class Texts:
    """Texts of a model: those to learn from, sampled ones, and greedy ones to judge on.

    Args:
        known: greedy answers to the prompts that drafters are learned from.
        drawn: sampled answers to them.
        drawing: minutes that it took to sample; None where the texts were stored.
        judged: greedy answers to other prompts, by category; a shorter answer is the beginning of a longer one.
    """

    known: list[Text]
    drawn: list[Drawn]
    drawing: float | None
    judged: dict[str, list[Text]]

    def first(self, tokens: int) -> Iterator[Drawn]:
        """Sampled answers with this many tokens; the last is cut."""
        rounds = len(self.drawn) // len(self.known)
        whole = self.drawn[: len(self.known)] if rounds else self.drawn
        mean = statistics.mean(len(one.choices) for one in whole) if whole else 1
        needed = round(tokens / mean)
        chosen = self.drawn
        if needed < len(whole):
            chosen = [*(whole[i * len(whole) // needed] for i in range(needed)), *self.drawn[len(whole) :]]
        for one in chosen:
            if tokens > 0:
                yield Drawn(dataclasses.replace(one.text, answer=one.text.answer[:tokens]), one.choices[:tokens])
                tokens -= len(one.choices)

    def judged_to(self, new_tokens: int) -> dict[str, list[Text]]:
        """The first tokens of the judged answers."""
        return {
            name: [dataclasses.replace(text, answer=text.answer[:new_tokens]) for text in rows]
            for name, rows in self.judged.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--heads", help="heads+ngram in place of ngram")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[0, 10_000, 50_000, 200_000, 400_000])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--known", type=int, default=600, help="prompts to learn from")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[128], help="of each judged answer, at most")
    parser.add_argument("--questions", type=int, default=6, help="of each category")
    parser.add_argument("--table-bytes", type=int, default=MAX_BYTES, help="of the n-gram table, at most")
    parser.add_argument("--row", type=int, default=ROW, help="successors of a context in it, at most")
    parser.add_argument("--dtype", default="float32", help="of the model, which writes, and is traced")
    parser.add_argument("--keep", type=Path, help="folder of the texts")
    add_tiny(parser)
    options = parser.parse_args()
    if options.tiny:
        options.tokens, options.nodes, options.known, options.new_tokens = [0, 40], [4], 4, [8]
        options.questions = 1
    torch.set_num_threads(1)
    print(f"{machine(1)}, torch {torch.__version__}")
    heads: MedusaHeads | None = None
    if options.heads is None:
        base = load_base(options.model, dtype=options.dtype, device="cpu")
    else:
        base, loaded = load_pair(options.heads, options.model, dtype=options.dtype, device="cpu")
        heads = loaded.heads
    texts = made_texts(base, options)
    chunks: dict[str, Chunk] = {}
    limits = {"max_bytes": options.table_bytes, "row": options.row}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(NgramCounts.table.__kwdefaults__, limits))
        once = kept_states()
        stack.enter_context(mock.patch.object(treeopt.drafting.trace, "hidden_states", once))
        if heads is not None:
            report_medusa(base, heads, texts, options)
        for tokens in options.tokens:
            report(base, heads, texts, tokens, options, chunks)


def kept_states() -> Callable[[Base, Sequence[Text]], list[torch.Tensor]]:
    """`hidden_states` that computes those of the same texts once, as all drafters are fitted and judged on them."""
    known: dict[tuple[tuple[str, int], ...], list[torch.Tensor]] = {}

    def states(base: Base, texts: Sequence[Text]) -> list[torch.Tensor]:
        key = tuple((text.prompt_id, len(text.answer)) for text in texts)
        if key not in known:
            known[key] = list(hidden_states(base, texts))
        return known[key]

    return states


def stored(options: argparse.Namespace, name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, or what a run before stored under this name."""
    of = f"{Path(options.model).name}-{options.dtype}-{options.known}"
    path = None if options.keep is None else options.keep / f"{of}-{name}.pickle"
    if path is not None and path.exists():
        return pickle.loads(path.read_bytes())  # written by the lines below
    made = make()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(made))
    return made


def made_texts(base: Base, options: argparse.Namespace) -> Texts:
    """The texts of a run; drafters are learned from answers of at most 128 tokens."""
    prompts = load_prompts(str(options.shared / "data" / "alpaca_eval.json")).prompts
    questions: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in load_prompts(str(options.shared / "data" / "spec_bench.jsonl")).prompts:
        questions[prompt.category or ""].append(dataclasses.replace(prompt, later=()))
    others = prompts[options.known : options.known + 4] if options.tiny else prompts[options.known :]
    groups = {OTHERS: others, **{name: rows[: options.questions] for name, rows in questions.items()}}
    small = 8 if options.tiny else 128

    def answers(rows: Sequence[Prompt], limit: int) -> list[Text]:
        try:
            encoded = encode_prompts(base, PromptSet("", "", tuple(rows)), limit, chat_template=True)
        except TreeoptError as error:  # no question of the category fits into the context
            if error.code is not Code.PROMPTS_EMPTY:
                raise
            return []
        answered, _ = answer_all(base, encoded.texts, AnswerOptions(max_new_tokens=limit, batch_size=BATCH))
        return answered

    spent: list[float] = []
    known = stored(options, "known", lambda: answers(prompts[: options.known], small))

    def sampled() -> list[Drawn]:
        begin = time.perf_counter()
        sampling = AnswerOptions(small, BATCH, temperature=0.7)
        found = list(draw(base, known, max(options.tokens), sampling))
        spent.append((time.perf_counter() - begin) / 60)
        return found

    drawn = stored(options, f"drawn-{max(options.tokens)}", sampled)
    longest = max(options.new_tokens)
    judged = stored(
        options, f"judged-{longest}", lambda: {name: answers(rows, longest) for name, rows in groups.items()}
    )
    return Texts(known, drawn, spent[0] if spent else None, judged)


def traced(base: Base, heads: MedusaHeads | None, texts: Sequence[Text], drafter: Drafter | None) -> Calibration:
    """The traces of texts."""
    rows = sorted(texts, key=lambda text: text.prompt_id)
    proposer, found = proposer_for(base, heads, drafter), []
    for start in range(0, len(rows), BATCH // 4):
        part = rows[start : start + BATCH // 4]
        depth = 0 if drafter is None else drafter.depth
        found += trace_texts(base, [proposer] * len(part), part, TOP_K, step_depth=depth)
    source = Provenance("", "", "", "", {}, drafter_id="" if drafter is None else drafter.id)
    return as_calibration(rows, found, TOP_K, source)


def learned_from(base: Base, heads: MedusaHeads | None, texts: Texts, tokens: int, chunks: dict[str, Chunk]) -> Learned:
    """The drafter of `learn`, from the sampled answers at hand; forwards over the prompts are kept in `chunks`."""

    class Kept(BatchRun[Chunk]):
        def each(
            self, part: str, numbers: Sequence[int], make: Callable[[int], Chunk], progress: Progress = silent
        ) -> Iterator[Chunk]:
            for number in numbers:
                name = chunk_name(part, number)
                if name not in chunks:
                    chunks[name] = make(number)
                yield chunks[name]

    def drawn(*_given: object, **_options: object) -> Iterator[Drawn]:
        return texts.first(tokens)

    options = AnswerOptions(max_new_tokens=128, batch_size=BATCH)
    with mock.patch.object(treeopt.drafting.learn, "draw", drawn):
        return learn(base, heads, texts.known, Learning(tokens), options=options, run=Kept())


def report(
    base: Base,
    heads: MedusaHeads | None,
    texts: Texts,
    tokens: int,
    options: argparse.Namespace,
    chunks: dict[str, Chunk],
) -> None:
    """The figures of one number of tokens."""
    begin = time.perf_counter()
    learned = learned_from(base, heads, texts, tokens, chunks)
    rest = (time.perf_counter() - begin) / 60
    drafter = learned.drafter
    table = drafter.ngram_table
    size = "" if table is None else f", {table.contexts:,} contexts, {table.bytes / 1e6:.1f} MB"
    sampling = (
        "" if texts.drawing is None else f"{texts.drawing * tokens / max(options.tokens):.1f} minutes of sampling, "
    )
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in learned.seconds.items())
    print(f"\n{drafter.name}, {tokens:,} sampled tokens: {sampling}{rest:.1f} of the rest ({parts}){size}")
    by_category = {}
    for new_tokens in options.new_tokens:
        for name, judged in texts.judged_to(new_tokens).items():
            if not judged:
                continue
            found = traced(base, heads, judged, drafter)
            by_category[name] = tau(found, STATIC)
            if name == OTHERS:
                taus = "  ".join(f"{nodes}: {tau(found, nodes):.3f}" for nodes in options.nodes)
                top = float(np.mean((found.ranks[:, 0] == 0)[found.ranks[:, 0] != NONE]))
                static = build_tree(found, STATIC).expected
                assert static is not None
                print(f"answers of {new_tokens} tokens, {found.positions:,} in all; level 1 top-1 {top:.1%}")
                print(
                    f"per step by nodes  {taus}; static, {STATIC} nodes: {static.cross_validated or static.replay:.3f}"
                )
        print("  ".join(f"{name} {value:.3f}" for name, value in by_category.items()), flush=True)


def tau(calibration: Calibration, nodes: int) -> float:
    """Tokens per step of trees of a size that are chosen per step."""
    return replay_policy(build_policy(calibration, nodes), calibration).tokens_per_step


def report_medusa(base: Base, heads: MedusaHeads, texts: Texts, options: argparse.Namespace) -> None:
    """Accuracy of the heads, and tokens per step of their Medusa tree, built from the texts to learn from."""
    fitted = traced(base, heads, texts.known, None)
    trees = [build_tree(fitted, nodes, values="independent", weights="uniform") for nodes in options.nodes]
    for new_tokens in options.new_tokens:
        judged = traced(base, heads, texts.judged_to(new_tokens)[OTHERS], None)
        top = (f"{np.mean((row == 0)[row != NONE]):.1%}" for row in judged.ranks.T)
        print(f"\nheads alone, answers of {new_tokens} tokens: top-1 {' '.join(top)}")
        taus = (f"{tree.nodes}: {replay(tree, judged).tokens_per_step:.3f}" for tree in trees)
        print(f"Medusa tree by nodes  {'  '.join(taus)}", flush=True)


if __name__ == "__main__":
    main()
