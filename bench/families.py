"""Which families of transformers verify trees losslessly: a Markdown table, as docs/develop/families.md has it.

    python bench/families.py                   # all; --only NAME runs one

Each family is a tiny random model, in float32, with eager and with sdpa attention. The drafter knows the text of stock
`generate` and hides it among wrong siblings, so paths as deep as the tree are accepted. A family is lossless if every
text, alone and in a batch of prompts of different lengths, is that of stock `generate`. The route is how the probe
found that it verifies trees; families on the route of paths also decode with trees of other sizes, chains, true paths
of random depth, and 300 tokens on.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import transformers
from known_texts import KnownTexts
from timing import add_tiny, machine
from tiny_families import CONTEXT, FAMILIES, tiny_model

from treeopt.decode.decoder import TreeDecoder
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.verify.probe import probed

NEW, DEPTH, NODES = 24, 5, 14
LENGTHS = (1, 9, 40, CONTEXT - NEW)  # of the prompts, in tokens: within the windows, beyond, and to the context's end
OTHERS = ((1, 0), (2, 1), (6, 5), (64, 5))  # nodes and depth of more trees on the route of paths; 6 of depth 5: a chain
ROUNDING = 1e-4  # of their spread, above which a difference of logits is shown
LONG = 300  # new tokens of a long text there
TINY = ("bert", "gpt_neo-window", "gpt_oss", "mamba", "qwen3_next")
LOSSLESS, REFUSED, WRONG, NONE = "lossless", "refused", "WRONG", "-"


@dataclass(frozen=True)
class Outcome:
    """How a family with one attention fared: a verdict, tokens per step, the route, and why texts were refused."""

    verdict: str
    tokens_per_step: float = 0.0
    reason: str = ""
    route: str = ""


def try_family(family: str, attention: str) -> Outcome:
    """Decode with the tree of the true text, and compare."""
    try:
        model = tiny_model(family, attention=attention)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        return Outcome(NONE)
    base = Base(model, None, family)
    try:
        route = probed(base)
    except TreeoptError as error:
        return Outcome(REFUSED, reason=error.why or error.what)
    each, several, everyone = [[row] for row in range(len(LENGTHS))], [0, 1, 2], [0, 1, 2, 3]
    whole = _tried(base, [(NODES, DEPTH, True)], NEW, LENGTHS, [*each, several, everyone])
    if route.kind == "paths":
        ways = "" if route.ways is None or route.ways.joint else ", a text at a time"
        rounding = f"; single tokens differ from chunks by {route.rounding:.1g}" if route.rounding > ROUNDING else ""
        trees = [(NODES, DEPTH, False), *((nodes, depth, False) for nodes, depth in OTHERS)]
        other = _tried(base, trees, NEW, LENGTHS, [[2], everyone])
        longer = Base(tiny_model(family, attention=attention, context=LONG + 2 * CONTEXT), None, family)
        long = _tried(longer, trees[:1], LONG, (9, 40), [[0, 1]])
        verdict = WRONG if WRONG in (whole.verdict, other.verdict, long.verdict) else LOSSLESS
        return replace(whole, verdict=verdict, route=f"paths{ways}{rounding}")
    return replace(whole, route=route.kind)


def _tried(
    base: Base,
    trees: Sequence[tuple[int, int, bool]],
    new: int,
    lengths: Sequence[int],
    batches: Sequence[Sequence[int]],
) -> Outcome:
    """The texts of prompts of these lengths with trees of (nodes, depth, whole), in batches of prompts."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(base.vocab_size, size=length).tolist() for length in lengths]
    texts = [greedy(base, prompt, new) for prompt in prompts]
    known = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    reason, right, steps = "", [], []
    for nodes, depth, whole in trees:
        decoder = TreeDecoder(base, None, KnownTexts(base, known, nodes, depth, whole=whole))
        for rows in batches:
            try:
                decoded = decoder.generate([prompts[row] for row in rows], new)
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
    print("| family | eager | sdpa | route | tokens per step | refused |\n|---|---|---|---|---|---|")
    counts: Counter[str] = Counter()
    for family in chosen:
        eager, sdpa = (try_family(family, attention) for attention in ("eager", "sdpa"))
        found = [one for one in (eager, sdpa) if one.verdict != NONE]
        per_step = min(one.tokens_per_step for one in found)
        verdict = WRONG if WRONG in (eager.verdict, sdpa.verdict) else found[0].verdict
        counts[
            f"{verdict} ({found[0].route.partition(',')[0].partition(';')[0]})" if verdict == LOSSLESS else verdict
        ] += 1
        shown = f"{per_step:.2f}" if per_step else ""
        routes = " / ".join(dict.fromkeys(one.route for one in found))
        print(f"| {family} | {eager.verdict} | {sdpa.verdict} | {routes} | {shown} | {found[0].reason} |", flush=True)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    print(f"\n{len(chosen)} families: {counted}; {time.perf_counter() - begin:.0f} s")
    if counts[WRONG]:
        sys.exit(1)


if __name__ == "__main__":
    main()
