"""Sampling text and counting the model's choices: in one pass, and with a second pass over the sampled text.

    python bench/learn.py [--model pocket] [--new-tokens 24 128] [--batch-size 16]

One pass is that of `learn`: choices are recorded while the text is sampled, and only prompts go through the model
again. With two passes, whole texts go through it again: greedy answers and sampled ones, each with its prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
import transformers
from timing import add_tiny, interleaved, machine

from treeopt.drafting.count import NgramCounts, choices_in, count_drawn, count_texts
from treeopt.models.base import Base, load_base
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import load_prompts
from treeopt.texts.samples import draw

ANSWERS = 4  # sampled answers a prompt
TEMPERATURE = 0.7


def one_pass(base: Base, texts: Sequence[Text], tokens: int, sampling: AnswerOptions) -> NgramCounts:
    """The counts as `learn` makes them."""
    counts = NgramCounts(base.vocab_size)
    for drawn in draw(base, texts, tokens, sampling):
        count_drawn(counts, drawn)
    by_prompt = {text.prompt_id: counts for text in texts}
    count_texts(base, texts, by_prompt, AnswerOptions(batch_size=sampling.batch_size))
    return counts


def two_passes(base: Base, texts: Sequence[Text], tokens: int, sampling: AnswerOptions) -> NgramCounts:
    """The counts by a teacher-forced forward over each text; sampled texts in the order of the prompts' lengths."""
    counts = NgramCounts(base.vocab_size)
    whole = [*texts, *(drawn.text for drawn in draw(base, texts, tokens, sampling))]
    for start in range(0, len(whole), sampling.batch_size):
        batch = whole[start : start + sampling.batch_size]
        rows = [[*text.prompt, *text.answer] for text in batch]
        for i, (row, choices) in enumerate(zip(rows, choices_in(base, rows), strict=True), start=start):
            counts.add(row[:-1], choices, first=0 if i < len(texts) else len(whole[i].prompt) - 1)
    return counts


def agreement(one: NgramCounts, other: NgramCounts) -> float:
    """The share of the counts that two have in common; not 1 where rounding decides between two tokens."""
    return float(np.minimum(one.unigram, other.unigram).sum() / max(one.unigram.sum(), other.unigram.sum()))


def measure(base: Base, options: argparse.Namespace, new_tokens: int) -> None:
    """Print the seconds for answers of at most `new_tokens` tokens; those of the greedy answers are left out."""
    encoded = encode_prompts(base, load_prompts(options.prompts, limit=options.limit), new_tokens).texts
    texts, _ = answer_all(base, encoded, AnswerOptions(max_new_tokens=new_tokens, batch_size=options.batch_size))
    prompt, answer = (sum(map(len, part)) for part in zip(*((text.prompt, text.answer) for text in texts), strict=True))
    tokens, sampling = ANSWERS * answer, AnswerOptions(new_tokens, options.batch_size, TEMPERATURE)
    found: dict[str, NgramCounts] = {}

    def one() -> None:
        found["one"] = one_pass(base, texts, tokens, sampling)

    def two() -> None:
        found["two"] = two_passes(base, texts, tokens, sampling)

    seconds = interleaved({"one": one, "two": two}, repeats=options.repeats)
    print(
        f"{base.name}, {len(texts)} prompts of {prompt / len(texts):.0f} tokens, answers of {answer / len(texts):.0f}, "
        f"{tokens:,} tokens sampled, batches of {options.batch_size}: one pass {seconds['one']:.2f} s, "
        f"two {seconds['two']:.2f} s, {seconds['two'] / seconds['one']:.2f} times as long; "
        f"{agreement(found['one'], found['two']):.2%} of the counts are equal"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--prompts", default="pocket")
    parser.add_argument("--limit", type=int, default=64, help="prompts")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[24, 128], help="of each answer, at most")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    add_tiny(parser)
    options = parser.parse_args()
    if options.tiny:
        options.limit, options.new_tokens, options.repeats = 3, [4], 1
    torch.set_num_threads(options.threads)
    print(f"{machine(options.threads)}, torch {torch.__version__}, transformers {transformers.__version__}")
    base = load_base(options.model, device=options.device)
    for new_tokens in options.new_tokens:
        measure(base, options, new_tokens)


if __name__ == "__main__":
    main()
