"""An EAGLE-3 head against Medusa heads of the same base, and treeopt's trees against EAGLE-2's from the same drafts.

    python bench/modules.py --model pocket|tinystories [--draft FOLDER] [--heads FOLDER] [--tokens 100000]

Drafters are learned and trees built on the first half of the prompts, and evaluated on the second by replay, which
equals decoding step by step: tokens per step at 8, 16, 32 and 64 nodes. EAGLE-2's trees have the depth and top-k of a
grid that is best on texts of the first half. Goals: the head alone at least 1.35 times the Medusa heads alone;
`eagle+ngram` at least `heads+ngram`; static and per-step trees at least 3 % over EAGLE-2's.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from drafting import SIZES, Half, measured
from drafting_halves import TOP_K, Pair, load
from timing import add_tiny, judged, machine

from treeopt.drafting.learn import Learning
from treeopt.evaluate.eagle2 import DEPTHS, TOP_KS, eagle2_traces, tokens_per_step
from treeopt.models.base import Base
from treeopt.models.draft_files import load_draft
from treeopt.models.given import load_pair
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import PromptSet

HEADS_GOAL, NGRAM_GOAL, EAGLE2_GOAL = 1.35, 1.0, 1.03
CHOSEN_BY = 32  # texts of the first half that EAGLE-2's depth and top-k are chosen by
DRAFTS = {"pocket": "pocket-eagle3", "tinystories": "tests/data/tinystories-eagle3"}


def answers(pair: Pair, prompts: PromptSet) -> list[Text]:
    """Prompts with the base's answers."""
    encoded = encode_prompts(pair.base, prompts, pair.new_tokens).texts
    return answer_all(pair.base, encoded, AnswerOptions(max_new_tokens=pair.new_tokens, batch_size=64))[0]


def eagle2(pair: Pair, draft: Base, half: Half, sizes: Sequence[int], *, tiny: bool) -> list[tuple[float, str]]:
    """Tokens per step of EAGLE-2's trees on the texts for evaluation, of each size with its best depth and top-k."""
    known, kept = answers(pair, pair.first_half)[:CHOSEN_BY], set(half.evaluated.prompt_ids)
    texts = [text for text in answers(pair, pair.second_half) if text.prompt_id in kept]
    grid = [(depth, top_k) for depth in DEPTHS for top_k in TOP_KS][: 2 if tiny else None]
    traced = {one: eagle2_traces(pair.base, draft, known, *one) for one in grid}
    best = [max(grid, key=lambda one: tokens_per_step(traced[one], nodes)) for nodes in sizes]
    evaluated = {one: eagle2_traces(pair.base, draft, texts, *one) for one in set(best)}
    pairs = zip(best, sizes, strict=True)
    return [(tokens_per_step(evaluated[one], nodes), f"depth {one[0]}, top-k {one[1]}") for one, nodes in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DRAFTS, default="pocket")
    parser.add_argument("--draft", help="EAGLE head of the model")
    parser.add_argument("--heads", help="Medusa heads of the model")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--tokens", type=int, default=100_000, help="sampled tokens to learn from")
    add_tiny(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes, tokens = (SIZES[:1], 400) if options.tiny else (SIZES, options.tokens)
    pair = load(options.model, options.shared, tiny=options.tiny)
    if options.heads:
        pair = dataclasses.replace(pair, loaded=load_pair(options.heads, pair.base.name, dtype="float32")[1])
    draft = load_draft(options.draft or DRAFTS[options.model], pair.base)
    print(f"{machine(1)}; {options.model}, {draft.name}: {draft.model.num_parameters():,} parameters")
    alone, learning = Learning(ngram=False, top=TOP_K), Learning(tokens=tokens)
    halves = {
        "heads": measured(pair, alone),
        "heads+ngram": measured(pair, learning),
        "eagle": measured(pair, alone, draft=draft),
        "eagle+ngram": measured(pair, learning, draft=draft),
    }
    print(f"evaluated on {halves['eagle'].evaluated.sequences} texts, {halves['eagle'].evaluated.positions:,} tokens")
    assert len({half.evaluated.sequences for half in halves.values()}) == 1
    print(f"{'nodes':24}", *(f"{nodes:>8}" for nodes in sizes))
    taus: dict[str, list[float]] = {}
    for name, half in halves.items():
        for kind in ("static", "dynamic"):
            row = f"{name}, {'per step' if kind == 'dynamic' else kind}"
            taus[row] = [half.tau(kind, nodes) for nodes in sizes]
            print(f"{row:24}", *(f"{tau:8.3f}" for tau in taus[row]), flush=True)
    report(pair, draft, halves, taus, sizes, tiny=options.tiny)


def report(
    pair: Pair, draft: Base, halves: dict[str, Half], taus: dict[str, list[float]], sizes: Sequence[int], *, tiny: bool
) -> None:
    """Print EAGLE-2's trees from the same drafts, the head's accuracy, and the ratios beside their goals."""
    found = eagle2(pair, draft, halves["eagle"], sizes, tiny=tiny)
    taus["EAGLE-2"] = [tau for tau, _ in found]
    print(
        f"{'eagle, EAGLE-2':24}", *(f"{tau:8.3f}" for tau in taus["EAGLE-2"]), " ", "; ".join(one for _, one in found)
    )
    accuracy = halves["eagle"].evaluated.accuracy[:, 0]
    print("top-1 accuracy of the head by level:", " ".join(f"{share:.1%}" for share in accuracy))
    for name, above, below, goal in (
        ("head over Medusa heads, static", "eagle, static", "heads, static", HEADS_GOAL),
        ("eagle+ngram over heads+ngram, per step", "eagle+ngram, per step", "heads+ngram, per step", NGRAM_GOAL),
        ("static trees over EAGLE-2's", "eagle, static", "EAGLE-2", EAGLE2_GOAL),
        ("per-step trees over EAGLE-2's", "eagle, per step", "EAGLE-2", EAGLE2_GOAL),
    ):
        for nodes, one, other in zip(sizes, taus[above], taus[below], strict=True):
            judged(f"{name}, {nodes} nodes", one / other, goal)


if __name__ == "__main__":
    main()
