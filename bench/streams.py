"""A memory across texts, on streams that repeat and on one that does not, beside SuffixDecoding and SAM-Decoding.

    python bench/streams.py --model pocket|tinystories|smollm2 [--drafters ngram heads+ngram] [--decode]

Drafters of 16 levels are learned on the first half of the prompts (bench/drafting_halves.py): where texts repeat, deep
trees pay, and SuffixDecoding drafts as deep. Streams are made from the second:

edits    a file six times, each time with one token in 64 changed, cut at another place and continued
agent    the same instructions five times, then another observation, then the same last 16 tokens
turns    the first 40 two-turn questions of MT-bench (SmolLM2)
once     every prompt once

Texts are decoded one after another, the prompts of `edits` and `agent` in rounds, so that 12 others lie between two
that are alike. Tokens per step are by replay over the greedy texts, with trees of 16 nodes per step, and with a memory
that begins empty; `--decode` decodes them too, and compares. Intervals of ratios are by the bootstrap over prompts.
SuffixDecoding and SAM-Decoding run with their published defaults, and with the settings of a grid that are best on the
stream itself; nodes are the same. Goals: 15 % over the same drafter without a memory and 5 % over SuffixDecoding where
texts repeat, and a loss below 0.5 % where they do not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drafting_halves import TOP_K, Pair, load, traces
from timing import add_tiny, judged, machine

from treeopt.decode.decoder import TreeDecoder
from treeopt.defaults import LEVELS
from treeopt.drafter import Drafter
from treeopt.drafting.interface import Ints
from treeopt.drafting.learn import Learning
from treeopt.drafting.memory import Memory
from treeopt.drafting.suffix import GRID, PUBLISHED, SUFFIX, steps_of
from treeopt.evaluate.runs import Stream, trace
from treeopt.models.base import Base
from treeopt.models.draft_files import load_draft
from treeopt.models.heads import MedusaHeads
from treeopt.optimize.per_step import build_policy, replay_plan
from treeopt.policy import TreePolicy
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import Text, encode_prompts

NODES = 16
EDITS, AGENT, TURNS, ONCE = "edits", "agent", "turns", "once"
FILES, TAILS = 6, 5  # versions of a file; tails of the same instructions
ALIKE = 12  # files, and instructions
CUE = 16  # tokens at the end of every prompt of an agent, after what it observed
QUESTIONS = 40
DRAWS = 2000  # of the bootstrap
DRAFTS = {
    "pocket": {"model": "pocket-draft", "eagle": "pocket-eagle3", "block": "tests/data/pocket-dflash"},
    "tinystories": {"eagle": "tests/data/tinystories-eagle3"},
    "smollm2": {"eagle": "tests/data/smollm2-eagle3", "block": "tests/data/smollm2-dflash"},
    "hybrid": {"mtp": "mtp"},
}
GAIN = {EDITS: 1.15, AGENT: 1.15, TURNS: 1.15, ONCE: 0.995}


def edited(text: Sequence[int], other: Sequence[int], rng: np.random.Generator) -> list[int]:
    """A text with one token in 64 replaced by those of another text."""
    found = list(text)
    for place in rng.choice(len(found), max(1, len(found) // 64), replace=False):
        found[int(place)] = int(rng.choice(other))
    return found


def streams(pair: Pair, texts: Sequence[Text], shared: Path) -> dict[str, list[list[int]]]:
    """The prompts of each stream, in their order; `texts` are prompts with greedy answers."""
    rng, few = np.random.default_rng(0), list(texts[:ALIKE])
    room = pair.base.context - pair.new_tokens
    whole = [[*text.prompt, *text.answer] for text in few]
    observed = [text.prompt[:24] for text in texts]
    found: dict[str, list[list[int]]] = {EDITS: [], AGENT: [], ONCE: [text.prompt for text in texts]}
    for _ in range(FILES):
        for one, other in zip(whole, [*whole[1:], whole[0]], strict=True):
            cut = int(len(one) * rng.uniform(0.4, 0.8))
            found[EDITS].append(edited(one[: min(cut, room)], other, rng))
    for turn in range(TAILS):
        for i, text in enumerate(few):
            tail = observed[(i * TAILS + turn) % len(observed)]
            instructions = text.prompt[:-CUE][-(room - CUE - len(tail)) :]
            found[AGENT].append([*instructions, *tail, *text.prompt[-CUE:]])
    if pair.base.tokenizer is not None and pair.base.tokenizer.chat_template:
        found[TURNS] = questions(pair, shared)
    return found


def questions(pair: Pair, shared: Path) -> list[list[int]]:
    """Both turns of MT-bench's questions, the second after the greedy answer to the first."""
    lines = [json.loads(line) for line in (shared / "data" / "spec_bench.jsonl").read_text().splitlines()]
    rows = [line["turns"] for line in lines if len(line["turns"]) > 1][:QUESTIONS]
    tokenizer: Any = pair.base.tokenizer
    found: list[list[int]] = []
    first = [Text(f"{i}:0", ids(tokenizer, [one]), []) for i, (one, _) in enumerate(rows)]
    options = AnswerOptions(max_new_tokens=pair.new_tokens, batch_size=16)
    for text, row in zip(answer_all(pair.base, first, options)[0], rows, strict=True):
        answer = tokenizer.decode(text.answer, skip_special_tokens=True)
        found += [text.prompt, ids(tokenizer, [row[0], answer, row[1]])]
    return found


def ids(tokenizer: Any, turns: Sequence[str]) -> list[int]:
    """A dialogue by the chat template: user and assistant take turns."""
    roles = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    text = tokenizer.apply_chat_template(roles, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def answered(pair: Pair, prompts: Sequence[Sequence[int]]) -> list[Text]:
    """The prompts that fit, with greedy answers."""
    room = pair.base.context - pair.new_tokens
    given = [Text(f"{i:06}:0", list(one), []) for i, one in enumerate(prompts) if len(one) <= room]
    return answer_all(pair.base, given, AnswerOptions(max_new_tokens=pair.new_tokens, batch_size=32))[0]


def ratio(above: Ints, below: Ints, group: Ints) -> tuple[float, float, float]:
    """Tokens per step by the steps `above` over those `below`, and the interval of 95 % by drawing groups."""
    rng, numbers = np.random.default_rng(0), np.unique(group)
    sums = np.array([[part[group == number].sum() for number in numbers] for part in (above, below)])
    drawn = rng.integers(len(numbers), size=(DRAWS, len(numbers)))
    found = sums[1][drawn].sum(1) / sums[0][drawn].sum(1)
    low, high = np.quantile(found, (0.025, 0.975))
    return float(below.sum() / above.sum()), float(low), float(high)


@dataclass(frozen=True)
class Learned:
    """A drafter, its per-step trees, and the models that it needs."""

    name: str
    drafter: Drafter
    policy: TreePolicy
    heads: MedusaHeads | None
    draft: Base | None

    @classmethod
    def of(cls, pair: Pair, name: str, tokens: int, drafts: Mapping[str, str], levels: int = LEVELS) -> Learned:
        """The drafter of a name, learned on the first half of the prompts."""
        kind = name.removesuffix("+ngram")
        heads, draft = kind == "heads", None
        if kind not in ("heads", "ngram"):
            draft = load_draft(drafts[kind], pair.base)
        alone = name in drafts or name == "heads"
        learning = Learning(ngram=False, top=TOP_K) if alone else Learning(tokens=tokens, levels=levels)
        run = traces(pair, evaluated=False, learning=learning, heads=heads, draft=draft)
        assert run.learned is not None
        of_heads = pair.loaded.heads if heads else None
        return cls(name, run.learned.drafter, build_policy(run.calibration, NODES), of_heads, draft)

    def steps(self, base: Base, texts: Sequence[Text], memory: Memory | None) -> Ints:
        """The steps of each text by replay."""
        depth = self.policy.depth
        stream = None if memory is None else Stream(memory)
        found = trace(base, self.heads, texts, self.drafter, self.draft, steps=depth, stream=stream)
        return replay_plan(self.policy, found).sums.steps

    def decoded(self, base: Base, texts: Sequence[Text], memory: Memory | None, new_tokens: int) -> Ints:
        """The same by decoding; the texts must be equal."""
        given: Any = {"drafter": self.drafter, "draft": self.draft, "memory": memory}
        decoder, steps = TreeDecoder(base, self.heads, self.policy, **given), []
        for text in texts:
            made = decoder.generate(text.prompt, new_tokens)
            assert made.tokens == text.answer, text.prompt_id
            steps.append(len(made.steps))
        return np.array(steps)


def published(texts: Sequence[Text]) -> dict[str, tuple[Ints, str]]:
    """The steps of SuffixDecoding and SAM-Decoding: with published defaults, and with the best of the grid."""
    found = {}
    for name, default in PUBLISHED.items():
        tried = {one.shown(): np.array(list(steps_of(texts, one, NODES))) for one in (default, *GRID[name])}
        best = min(tried, key=lambda one: int(tried[one].sum()))
        found[name] = (tried[default.shown()], default.shown())
        found[f"{name}, best of {len(tried)}"] = (tried[best], best)
    return found


def measure(pair: Pair, name: str, texts: Sequence[Text], drafters: Sequence[Learned], options: Any) -> None:
    """Print the figures of one stream."""
    tokens = np.array([len(text.answer) for text in texts])
    group = np.arange(len(texts)) % (ALIKE if name in (EDITS, AGENT) else len(texts))
    print(
        f"\n{name}: {len(texts)} texts, {sum(len(text.prompt) for text in texts) / len(texts):.0f} tokens of prompt, "
        f"{tokens.mean():.0f} of answer"
    )
    suffix = published(texts)
    for row, (steps, settings) in suffix.items():
        print(f"{row:34} {tokens.sum() / steps.sum():.3f}  {settings}", flush=True)
    theirs = min(
        (steps for row, (steps, _) in suffix.items() if row.startswith(SUFFIX)), key=lambda one: int(one.sum())
    )
    for one in drafters:
        without, within = (one.steps(pair.base, texts, memory) for memory in (None, Memory(options.bytes)))
        print(f"{one.name:34} {tokens.sum() / without.sum():.3f}, with a memory {tokens.sum() / within.sum():.3f}")
        if options.decode:
            done = one.decoded(pair.base, texts, Memory(options.bytes), pair.new_tokens)
            print(f"{one.name}: texts with other steps than by replay: {int((done != within).sum())} of {len(texts)}")
        gain, low, high = ratio(within, without, group)
        judged(f"{name}, {one.name} with over without a memory", gain, GAIN[name], f"95 %: {low:.3f} to {high:.3f}")
        if name != ONCE:
            gain, low, high = ratio(within, theirs, group)
            judged(
                f"{name}, {one.name} with a memory over SuffixDecoding", gain, 1.05, f"95 %: {low:.3f} to {high:.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DRAFTS, default="pocket")
    parser.add_argument("--drafters", nargs="+", default=["ngram", "heads+ngram"])
    parser.add_argument("--streams", nargs="+", default=[EDITS, AGENT, TURNS, ONCE])
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--tokens", type=int, default=100_000, help="sampled tokens to learn from")
    parser.add_argument("--levels", type=int, default=16, help="of the drafters")
    parser.add_argument("--bytes", type=int, default=1 << 22, help="of the memory")
    parser.add_argument("--decode", action="store_true", help="decode as well, and compare with the replay")
    add_tiny(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pair = load(options.model, options.shared, tiny=options.tiny)
    tokens, drafts = 400 if options.tiny else options.tokens, DRAFTS[options.model]
    drafters = [Learned.of(pair, name, tokens, drafts, options.levels) for name in options.drafters]
    learned = f"{options.levels} levels, {options.tokens:,} sampled tokens"
    print(f"{machine(1)}; {options.model}, {NODES} nodes per step, drafters of {learned}", flush=True)
    encoded = encode_prompts(pair.base, pair.second_half, pair.new_tokens).texts
    texts = answered(pair, [text.prompt for text in encoded])
    for name, prompts in streams(pair, texts, options.shared).items():
        if name in options.streams:
            measure(pair, name, answered(pair, prompts[:6] if options.tiny else prompts), drafters, options)


if __name__ == "__main__":
    main()
