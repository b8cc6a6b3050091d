"""Which families of transformers verify trees losslessly: a Markdown table, as docs/develop/families.md has it.

    python bench/families.py                   # all; --only NAME runs one

Each family is a tiny random model, in float32, with eager and with sdpa attention. The drafter knows the text of stock
`generate` and hides it among wrong siblings, so paths as deep as the tree are accepted. A family is lossless if every
text, alone and in a batch of prompts of different lengths, is that of stock `generate`.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from known_texts import KnownTexts
from timing import add_tiny, machine
from tiny_families import CONTEXT, FAMILIES, tiny_model

from treeopt.decode.decoder import TreeDecoder
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base

NEW, DEPTH, NODES = 24, 5, 14
LENGTHS = (1, 9, 40, CONTEXT - NEW)  # of the prompts, in tokens: within the windows, beyond, and to the context's end
TINY = ("bert", "gpt_neo-window", "gpt_oss", "mamba")
LOSSLESS, REFUSED, WRONG, NONE = "lossless", "refused", "WRONG", "-"


@dataclass(frozen=True)
class Outcome:
    """How a family with one attention fared: a verdict, tokens per step, and the reason of what was refused."""

    verdict: str
    tokens_per_step: float = 0.0
    reason: str = ""


def try_family(family: str, attention: str) -> Outcome:
    """Decode with the tree of the true text, and compare."""
    try:
        model = tiny_model(family, attention=attention)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        return Outcome(NONE)
    base = Base(model, None, family)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(base.vocab_size, size=length).tolist() for length in LENGTHS]
    try:
        TreeDecoder(base, None, KnownTexts(base, [], 2, 1))
    except TreeoptError as error:
        return Outcome(REFUSED, reason=error.why or error.what)
    texts = [greedy(base, prompt, NEW) for prompt in prompts]
    known = KnownTexts(
        base, [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)], NODES, DEPTH, whole=True
    )
    decoder, reason, right, steps = TreeDecoder(base, None, known), "", [], []
    for rows in (*([row] for row in range(len(prompts))), list(range(len(prompts) - 1)), list(range(len(prompts)))):
        try:
            decoded = decoder.generate([prompts[row] for row in rows], NEW)
        except TreeoptError as error:
            if error.code is not Code.CONTEXT_FULL:
                raise
            reason = f"some texts are refused: {error.what}"
            continue
        right.append([one.tokens for one in decoded] == [texts[row] for row in rows])
        steps += [length for one in decoded for length in one.step_lengths]
    return Outcome(LOSSLESS if right and all(right) else WRONG, float(np.mean(steps or [0.0])), reason)


def greedy(base: Base, prompt: list[int], new: int) -> list[int]:
    """The new tokens of stock greedy `generate`."""
    ids = torch.tensor([prompt])
    with warnings.catch_warnings(action="ignore"):
        out = base.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
        )
    new_tokens: list[int] = out[0, len(prompt) :].tolist()
    return new_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one family")
    add_tiny(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    chosen = TINY if options.tiny else FAMILIES if options.only is None else (options.only,)
    print(f"{machine(1)}, transformers {transformers.__version__}; {len(chosen)} families\n")
    begin = time.perf_counter()
    print("| family | eager | sdpa | tokens per step | refused |\n|---|---|---|---|---|")
    counts: Counter[str] = Counter()
    for family in chosen:
        eager, sdpa = (try_family(family, attention) for attention in ("eager", "sdpa"))
        found = [one for one in (eager, sdpa) if one.verdict != NONE]
        per_step = min(one.tokens_per_step for one in found)
        counts[WRONG if WRONG in (eager.verdict, sdpa.verdict) else found[0].verdict] += 1
        shown = f"{per_step:.2f}" if per_step else ""
        print(f"| {family} | {eager.verdict} | {sdpa.verdict} | {shown} | {found[0].reason} |", flush=True)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    print(f"\n{len(chosen)} families: {counted}; {time.perf_counter() - begin:.0f} s")
    if counts[WRONG]:
        sys.exit(1)


if __name__ == "__main__":
    main()
