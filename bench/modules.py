"""An EAGLE-3 head against Medusa heads of the same base, and treeopt's trees against EAGLE-2's from the same drafts.

    python bench/modules.py --model pocket|tinystories|smollm2|hybrid [--draft FOLDER] [--heads FOLDER] [--alone]
        [--no-confidence]

Drafters are learned and trees built on the first half of the prompts, and evaluated on the second by replay, which
equals decoding step by step: tokens per step at 8, 16, 32 and 64 nodes. EAGLE-2's trees have the depth and top-k of a
grid that is best on texts of the first half; a line for each size has what all of them give. Goals: the head alone at
least 1.35 times the Medusa heads alone; `eagle+ngram` at least `heads+ngram`; static and per-step trees at least 3 %
over EAGLE-2's. The folder of smollm2 is that of `python bench/smollm2.py build/smollm2`; it runs in bfloat16. The
hybrid of tests/data drafts by its MTP layer, and has no heads.

A block drafter (--draft FOLDER, as of calibration/recipes/pocket-dflash.yaml) is compared with DDTree, the likeliest
nodes by the product of its own probabilities: goals are 3 % for static trees, 5 % per step, and 10 % for `block+ngram`
over `block`. With --no-confidence the score of DSpark has no feature of its confidence head.
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

from treeopt.calibration import Calibration
from treeopt.defaults import BLOCK
from treeopt.drafting.learn import Learning
from treeopt.evaluate.eagle2 import DEPTHS, TOP_KS, ddtree_drafter, eagle2_drafter, per_step_traces, tokens_per_step
from treeopt.models.base import Base
from treeopt.models.draft_files import load_draft
from treeopt.models.draft_module import kind_of
from treeopt.models.given import load_pair
from treeopt.optimize.replay import replay
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import PromptSet
from treeopt.traces import MISS, NONE
from treeopt.tree import Tree

EAGLE2, DDTREE = "EAGLE-2", "DDTree"
HEADS_GOAL, NGRAM_GOAL, EAGLE2_GOAL, DDTREE_GOAL, TABLE_GOAL = 1.35, 1.0, 1.03, 1.05, 1.1
CHOSEN_BY = 32  # texts of the first half that EAGLE-2's depth and top-k are chosen by
DRAFTS = {
    "pocket": "pocket-eagle3",
    "tinystories": "tests/data/tinystories-eagle3",
    "smollm2": "tests/data/smollm2-eagle3",
    "hybrid": "mtp",
}


def answers(pair: Pair, prompts: PromptSet) -> list[Text]:
    """Prompts with the base's answers."""
    encoded = encode_prompts(pair.base, prompts, pair.new_tokens).texts
    return answer_all(pair.base, encoded, AnswerOptions(max_new_tokens=pair.new_tokens, batch_size=64))[0]


def eagle2(pair: Pair, draft: Base, half: Half, sizes: Sequence[int], *, tiny: bool) -> list[tuple[float, str]]:
    """Tokens per step of EAGLE-2's trees on the texts for evaluation, of each size with its best depth and top-k."""
    known, kept = answers(pair, pair.first_half)[:CHOSEN_BY], set(half.evaluated.prompt_ids)
    texts = [text for text in answers(pair, pair.second_half) if text.prompt_id in kept]
    grid = [(depth, top_k) for depth in DEPTHS for top_k in TOP_KS][: 2 if tiny else None]
    traced = {one: per_step_traces(pair.base, eagle2_drafter(pair.base, draft, *one), known) for one in grid}
    best = []
    for nodes in sizes:
        found = {one: tokens_per_step(traced[one], nodes) for one in grid}
        listed = ", ".join(f"{depth}/{top_k} {found[depth, top_k]:.3f}" for depth, top_k in grid)
        print(f"EAGLE-2's grid on {len(known)} texts, {nodes} nodes, depth/top-k: {listed}", flush=True)
        best.append(max(grid, key=lambda one: found[one]))
    evaluated = {one: per_step_traces(pair.base, eagle2_drafter(pair.base, draft, *one), texts) for one in set(best)}
    pairs = zip(best, sizes, strict=True)
    return [(tokens_per_step(evaluated[one], nodes), f"depth {one[0]}, top-k {one[1]}") for one, nodes in pairs]


def halves_of(pair: Pair, draft: Base, tokens: int, *, others: bool) -> dict[str, Half]:
    """The results of each drafter by name: of the draft module, and the `others`."""
    alone, learning, kind = Learning(ngram=False, top=TOP_K), Learning(tokens=tokens), kind_of(draft.model)
    halves: dict[str, Half] = {}
    if pair.loaded is not None and others:
        halves |= {"heads": measured(pair, alone), "heads+ngram": measured(pair, learning)}
    if others:
        halves["ngram"] = measured(pair, learning, heads=False)
    halves[kind] = measured(pair, alone, draft=draft)
    halves[f"{kind}+ngram"] = measured(pair, learning, draft=draft)
    return halves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DRAFTS, default="pocket")
    parser.add_argument("--draft", help="EAGLE head or block drafter of the model")
    parser.add_argument("--heads", help="Medusa heads of the model")
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--tokens", type=int, default=100_000, help="sampled tokens to learn from")
    parser.add_argument("--alone", action="store_true", help="leave out drafters without the draft module")
    parser.add_argument("--no-confidence", action="store_true", help="do not read DSpark's confidence head")
    add_tiny(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes, tokens = (SIZES[:1], 400) if options.tiny else (SIZES, options.tokens)
    pair = load(options.model, options.shared, tiny=options.tiny)
    if options.heads:
        pair = dataclasses.replace(pair, loaded=load_pair(options.heads, pair.base.name, dtype=pair.base.dtype_name)[1])
    draft = load_draft(options.draft or DRAFTS[options.model], pair.base)
    print(f"{machine(1)}; {options.model}, {draft.name}: {draft.model.num_parameters():,} parameters")
    if options.no_confidence:
        draft.model.wiring = dataclasses.replace(draft.model.wiring, confidence=False)
    kind = kind_of(draft.model)
    halves = halves_of(pair, draft, tokens, others=not options.alone)
    print(f"evaluated on {halves[kind].evaluated.sequences} texts, {halves[kind].evaluated.positions:,} tokens")
    assert len({half.evaluated.sequences for half in halves.values()}) == 1
    print(f"{'nodes':24}", *(f"{nodes:>8}" for nodes in sizes))
    taus = ours(halves, sizes)
    theirs = DDTREE if kind == BLOCK else EAGLE2
    if kind == BLOCK:
        found = ddtree(pair, draft, halves[kind], sizes)
    else:
        found = eagle2(pair, draft, halves[kind], sizes, tiny=options.tiny)
    taus[theirs] = [tau for tau, _ in found]
    row = f"{kind}, {theirs}"
    print(f"{row:24}", *(f"{tau:8.3f}" for tau in taus[theirs]), " ", "; ".join(one for _, one in found))
    accuracy = halves[kind].evaluated.accuracy[:, 0]
    print("top-1 accuracy by level:", " ".join(f"{share:.1%}" for share in accuracy))
    for name in (kind, f"{kind}+ngram"):
        spine, beside = continued(halves[name].evaluated)
        print(f"{name}: the best candidate is right {spine:.1%} below a best one, {beside:.1%} below others")
    report(kind, theirs, taus, sizes)


def ours(halves: dict[str, Half], sizes: Sequence[int]) -> dict[str, list[float]]:
    """Tokens per step of treeopt's trees of each size, by their name; they are printed."""
    taus: dict[str, list[float]] = {}
    for name, half in halves.items():
        for trees in ("static", "dynamic"):
            row = f"{name}, {'per step' if trees == 'dynamic' else trees}"
            taus[row] = [half.tau(trees, nodes) for nodes in sizes]
            print(f"{row:24}", *(f"{tau:8.3f}" for tau in taus[row]), flush=True)
        deepest = half.evaluated.num_heads
        made = [Tree.chain(min(nodes - 1, deepest)) for nodes in sizes]
        chains = [dataclasses.replace(one, drafter=half.evaluated.provenance.drafter_id) for one in made]
        row = f"{name}, chain"
        print(f"{row:24}", *(f"{replay(one, half.evaluated).tokens_per_step:8.3f}" for one in chains), flush=True)
    return taus


def continued(traces: Calibration) -> tuple[float, float]:
    """The share of true drafts whose next level's best candidate is right: of best candidates, and of others."""
    above, below = traces.ranks[:, :-1], traces.ranks[:, 1:]
    true = below < NONE
    parts = [below[true & part] == 0 for part in (above == 0, (above > 0) & (above < MISS))]
    shares = [part.mean() if len(part) else 0.0 for part in parts]
    return float(shares[0]), float(shares[1])


def ddtree(pair: Pair, draft: Base, half: Half, sizes: Sequence[int]) -> list[tuple[float, str]]:
    """Tokens per step of DDTree's trees on the texts for evaluation, of each size."""
    kept = set(half.evaluated.prompt_ids)
    texts = [text for text in answers(pair, pair.second_half) if text.prompt_id in kept]
    traces = per_step_traces(pair.base, ddtree_drafter(pair.base, draft), texts)
    return [(tokens_per_step(traces, nodes), "") for nodes in sizes]


def report(kind: str, theirs: str, taus: dict[str, list[float]], sizes: Sequence[int]) -> None:
    """Print the ratios beside their goals."""
    of_heads = [
        ("head over Medusa heads, static", f"{kind}, static", "heads, static", HEADS_GOAL),
        (f"{kind}+ngram over heads+ngram, per step", f"{kind}+ngram, per step", "heads+ngram, per step", NGRAM_GOAL),
    ]
    of_trees = [
        (f"static trees over {theirs}'s", f"{kind}, static", theirs, EAGLE2_GOAL),
        (f"per-step trees over {theirs}'s", f"{kind}, per step", theirs, DDTREE_GOAL if kind == BLOCK else EAGLE2_GOAL),
        (f"{kind}+ngram over {kind}, per step", f"{kind}+ngram, per step", f"{kind}, per step", TABLE_GOAL),
    ]
    ratios = of_heads if kind != BLOCK and "heads, static" in taus else []
    for name, above, below, goal in [*ratios, *of_trees[: 3 if kind == BLOCK else 2]]:
        for nodes, one, other in zip(sizes, taus[above], taus[below], strict=True):
            judged(f"{name}, {nodes} nodes", one / other, goal)


if __name__ == "__main__":
    main()
