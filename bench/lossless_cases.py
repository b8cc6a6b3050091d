"""The random cases of `lossless.py`: what a seed stands for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch
from tiny_families import PATH_FAMILIES, TREE_FAMILIES, VOCAB

from treeopt.decode.rejection import Rejection
from treeopt.decode.rules import Greedy, Rule, Sample, Typical

BLOCK = 40  # consecutive seeds share a model, prompts and the texts of stock generate
NEW = 24
POOL = 6  # prompts of a model
LEVELS = 4
CONTEXTS = {"short": 56, "long": 320}  # tokens; a cache of 256 entries grows in the second
KINDS = {"all": TREE_FAMILIES + PATH_FAMILIES, "tree": TREE_FAMILIES, "paths": PATH_FAMILIES}  # families, by route
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
DRAFTERS = (
    *("known",) * 8,
    "none",
    "lookup",
    *("heads",) * 2,
    "heads (per step)",
    "ngram",
    "heads+ngram",
    "model",
    "model+ngram",
    "itself",
    "recycling",
    "drawn chain",
)
DRAFTED = ("model", "model+ngram", "drawn chain")  # by a draft model of its own
DRAFTS = ("llama", "llama", "lfm2", "qwen3_5_text")  # families of draft models, the last two on the route of paths
EXACT: dict[str, Rule] = {
    "greedy": Greedy(),
    "sample at temperature 0": Sample(0.0, seed=3),
    "typical at temperature 0": Typical(0.0),
    "rejection at temperature 0": Rejection(0.0, seed=3),
    "sample of the likeliest": Sample(0.8, top_k=1, seed=3),
}
LOSSY: dict[str, Rule] = {"typical": Typical(0.9, epsilon=0.2, delta=0.5)}
DRAWN: dict[str, Rule] = {
    "sample": Sample(1.3, top_k=7, top_p=0.95, seed=5),
    "rejection": Rejection(1.3, top_k=7, seed=5),
}
RULES = EXACT | LOSSY | DRAWN
VIAS = ("batch", "alone", "steps", "interleaved", "generate")
ONE_TEXT = ("alone", "interleaved")  # that decode one text at a time
PROCESSORS = ("none", "repetition penalty", "no repeated pairs", "least length", "noise")


@dataclasses.dataclass(frozen=True)
class Case:
    """One case; all fields are numbers or words, so that each can be set on the command line."""

    seed: int
    family: str
    attention: str
    dtype: str
    context: str
    ends: int  # tokens that end a text
    rows: str  # the prompts, by their numbers in the pool
    new: int
    drafter: str
    plan: str
    nodes: int
    depth: int
    rule: str
    via: str
    processors: str
    draft: str  # family of the draft model

    @property
    def block(self) -> int:
        return self.seed // BLOCK


def draw(seed: int, families: Sequence[str] = KINDS["all"]) -> Case:
    """The case of a seed; it depends on `families` by its family alone."""
    block, place = divmod(seed, BLOCK)
    turn = np.random.default_rng([11, block // len(families)])
    family = families[turn.permutation(len(families))[block % len(families)]]
    shared, rng = np.random.default_rng([12, block]), np.random.default_rng([13, seed])
    drafter = str(rng.choice(DRAFTERS))
    rule, via, processors = str(rng.choice(list(EXACT))), str(rng.choice(VIAS)), "none"
    if not place:
        rule, via = ("sample", "rejection", "typical")[block % 3], "batch"
        drafter = "drawn chain" if rule == "rejection" else drafter
    elif via == "generate":
        rule, processors = "greedy", str(rng.choice(PROCESSORS))
    context = str(shared.choice(list(CONTEXTS), p=(0.6, 0.4)))
    depth = int(rng.integers(1, LEVELS + 1))
    case = Case(
        seed=seed,
        family=family,
        attention=("eager", "sdpa")[int(shared.integers(2))],
        dtype=str(shared.choice(list(DTYPES), p=(0.6, 0.25, 0.15))),
        context=context,
        ends=int(shared.integers(3)),
        # Few and short texts where every text or level takes forwards of its own.
        rows=",".join(map(str, rng.integers(POOL, size=rng.integers(1, 3 if via in ONE_TEXT else 5)))),
        new=int(rng.integers(1, 1 + (NEW if drafter == "known" else NEW // 2))),
        drafter=drafter,
        plan=str(rng.choice(("static", "per step", "by cost"))),
        nodes=int(rng.integers(1 + depth, 40)),
        depth=depth,
        rule=rule,
        via=via,
        processors=processors,
        draft=str(shared.choice(DRAFTS)),
    )
    longest = max(len(prompt) for prompt in prompts_of(case))
    room = CONTEXTS[context] - longest
    new = min(case.new, room)
    if 2 <= room <= NEW and rng.integers(2):  # half of the texts that can reach the context's end do
        new = room - int(rng.integers(2))
    return dataclasses.replace(case, new=new)


def prompts_of(case: Case) -> list[list[int]]:
    """The prompts of the rows."""
    pool = _pool(case.block, CONTEXTS[case.context])
    return [list(pool[int(row)]) for row in case.rows.split(",")]


@functools.lru_cache(4)
def _pool(block: int, context: int) -> list[list[int]]:
    rng = np.random.default_rng([14, block])
    near = context - NEW if context == CONTEXTS["short"] else 256 - NEW  # to the context's end, or a cache's
    lengths = [1, 2, *rng.integers(3, 30, 2).tolist(), *(near + rng.integers(-4, NEW - 2, 2)).tolist()]
    return [rng.integers(VOCAB, size=length).tolist() for length in lengths]
