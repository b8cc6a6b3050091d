"""The random cases of `lossless.py`: what a seed stands for, and how a case is run and judged."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from known_texts import KnownTexts
from tiny_families import TREE_FAMILIES, VOCAB, tiny_model
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from treeopt.decode.decoder import TreeDecoder, advance
from treeopt.decode.draft_metrics import Decoded
from treeopt.decode.generate import tree_generate
from treeopt.decode.rejection import DrawnChain, Rejection
from treeopt.decode.rules import Greedy, Rule, Sample, Typical
from treeopt.drafter import Drafter
from treeopt.drafting.kernel_data import num_candidates
from treeopt.drafting.plans import TreeSource, trees_for
from treeopt.drafting.token_recycling import TokenRecycling
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.divergence import Cause, Judge, first_difference, tolerated
from treeopt.evaluate.text_distribution import p_of_counts, text_cells
from treeopt.models.base import Base
from treeopt.policy import Plan, TreePolicy
from treeopt.texts.encode import Text
from treeopt.tree import Tree
from treeopt.verify.probe import check_trees

from helpers import random_tree  # isort: skip - known_texts makes tests/ importable
from naive_draft import random_drafter  # isort: skip
from tiny import random_heads  # isort: skip

BLOCK = 40  # consecutive seeds share a model, prompts and the texts of stock generate
NEW = 24
POOL = 6  # prompts of a model
DRAWS = 256  # texts of a case of sampling
LEVELS = 4
CONTEXTS = {"short": 56, "long": 320}  # tokens; a cache of 256 entries grows in the second
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
DRAFTERS = (
    *("known",) * 4,
    "none",
    "lookup",
    "heads",
    "heads (per step)",
    "ngram",
    "heads+ngram",
    "model",
    "model+ngram",
    "itself",
    "recycling",
    "drawn chain",
)
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
PROCESSORS = ("none", "repetition penalty", "no repeated pairs", "least length", "noise")
COSTS = ((1, 0.1), (2, 0.2), (4, 0.3), (6, 0.5), (8, 0.9), (16, 1.4))
LEAST_P = 1e-6  # of a case of sampling
LIMITED = ("gpt_neo-global", "gpt_neo-window", "phi3-longrope")  # that refuse some texts with E503
SAME, ROUNDING, REFUSED, FAILED = "same", "rounding", "refused", "FAILED"


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

    @property
    def block(self) -> int:
        return self.seed // BLOCK


@dataclasses.dataclass(frozen=True)
class Result:
    """How a case ended, with tokens and steps, and what differed."""

    outcome: str
    tokens: int = 0
    steps: int = 0
    detail: str = ""
    p: float | None = None
    ended: bool = False  # whether an end token ended a text


def draw(seed: int, families: Sequence[str] = TREE_FAMILIES) -> Case:
    """The case of a seed."""
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
        rows=",".join(map(str, rng.integers(POOL, size=rng.integers(1, 5)))),
        new=int(rng.integers(1, NEW + 1)),
        drafter=drafter,
        plan=str(rng.choice(("static", "per step", "by cost"))),
        nodes=int(rng.integers(1 + depth, 40)),
        depth=depth,
        rule=rule,
        via=via,
        processors=processors,
    )
    longest = max(len(prompt) for prompt in prompts_of(case))
    room = CONTEXTS[context] - longest
    # Half of the texts that can end within two tokens of the context's end do.
    return dataclasses.replace(case, new=room - int(rng.integers(2)) if 2 <= room <= NEW and rng.integers(2) else min(case.new, room))


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


@functools.lru_cache(6)
def base_of(family: str, attention: str, dtype: str, context: str, block: int) -> Base:
    """A random model; with eager attention where the family has no other."""
    make = functools.partial(tiny_model, family, seed=block, dtype=DTYPES[dtype], context=CONTEXTS[context])
    try:
        model = make(attention=attention)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        model = make(attention="eager")
    return Base(model, None, family)


def model_of(case: Case) -> Base:
    """The case's model, with its end tokens."""
    base = base_of(case.family, case.attention, case.dtype, case.context, case.block)
    ends = np.random.default_rng([15, case.block]).permutation(VOCAB)[: case.ends].tolist()
    base.model.generation_config.eos_token_id = ends or None
    base.model.generation_config.pad_token_id = 0
    return base


class Noise(LogitsProcessor):
    """Adds noise that is a function of the text: the likeliest token is then a draw, the same in any order of calls."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        drawn = []
        for ids in input_ids.tolist():
            digest = hashlib.blake2b(repr(ids).encode(), digest_size=8).digest()
            drawn.append(np.random.default_rng(int.from_bytes(digest)).gumbel(size=scores.shape[-1]))
        return scores + torch.tensor(np.array(drawn), dtype=scores.dtype)


def options_of(case: Case) -> dict[str, Any]:
    """Options of stock `generate` for the logits processors."""
    made: dict[str, dict[str, Any]] = {
        "none": {},
        "repetition penalty": {"repetition_penalty": 1.4},
        "no repeated pairs": {"no_repeat_ngram_size": 2},
        "least length": {"min_new_tokens": max(1, case.new // 2), "suppress_tokens": [3, 4]},
        "noise": {"logits_processor": LogitsProcessorList([Noise()])},
    }
    return made[case.processors]


_texts: dict[tuple[Any, ...], list[list[int]]] = {}


def stock(case: Case, prompts: Sequence[Sequence[int]], *, padded: bool = False) -> list[list[int]]:
    """The new tokens of stock greedy `generate` for each prompt, alone or, if `padded`, in one batch; kept by prompt."""
    base = model_of(case)
    new = case.new if padded or case.processors != "none" else min(NEW, base.context - max(map(len, prompts)))
    groups = [tuple(map(tuple, prompts))] if padded else [(tuple(prompt),) for prompt in prompts]
    where = (case.block, case.family, case.attention, case.dtype, case.context, case.ends, case.processors)
    found = []
    for group in groups:
        room = min(NEW, base.context - max(map(len, group))) if case.processors == "none" and not padded else new
        key = (*where, room, group)
        if key not in _texts:
            if next(iter(_texts), key)[0] != case.block:
                _texts.clear()
            _texts[key] = _generate(base, group, room, options_of(case))
        found += _texts[key]
    return [text[: case.new] for text in found]


def _generate(base: Base, prompts: Sequence[Sequence[int]], new: int, options: dict[str, Any]) -> list[list[int]]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with warnings.catch_warnings(action="ignore"):
        out = base.model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)
    return [_ended(row[longest:].tolist(), base) for row in out]


def _ended(text: list[int], base: Base) -> list[int]:
    """The tokens up to the first end token."""
    return text[: next((i + 1 for i, token in enumerate(text) if token in base.eos_ids), len(text))]


def source_of(case: Case, base: Base, texts: Sequence[Sequence[int]]) -> TreeSource:
    """The trees of the case's drafter."""
    rng = np.random.default_rng([16, case.seed])
    if case.drafter == "known":
        nodes = min(case.nodes, 1 + VOCAB // 2) if case.depth == 1 else case.nodes  # siblings have different tokens
        return KnownTexts(base, texts, nodes, min(case.depth, nodes - 1), case.seed)
    if case.drafter == "none":
        return trees_for(base, None, Tree(()))
    if case.drafter == "drawn chain":
        return DrawnChain(base, _draft(case, base), RULES[case.rule] if case.rule in DRAWN else Sample(1.0, seed=1), case.depth)
    if case.drafter == "recycling":
        return trees_for(base, None, _tree(case, "", 8), TokenRecycling(base))
    if case.drafter == "heads":
        heads = random_heads(base, case.depth, case.seed)
        return trees_for(base, heads.to(base.dtype), _tree(case, "", VOCAB))
    drafter, draft = _record(case, base, rng)
    heads = random_heads(base, drafter.num_heads, case.seed).to(base.dtype) if drafter.num_heads else None
    return trees_for(base, heads, _plan(case, drafter), drafter, draft)


def _record(case: Case, base: Base, rng: np.random.Generator) -> tuple[Drafter, Base | None]:
    """The record of a drafter that has one, with its draft model."""
    if case.drafter == "lookup":
        return Drafter.untrained(VOCAB, case.depth), None
    if case.drafter == "heads (per step)":
        return Drafter.heads_only(case.depth, int(rng.integers(2, VOCAB))), None
    if case.drafter in ("ngram", "heads+ngram"):
        return random_drafter(rng, VOCAB, "voted" if case.drafter == "heads+ngram" else "lm head", 20)[1], None
    draft = _draft(case, base)
    if case.drafter != "model+ngram":
        return Drafter.model_only(case.depth, int(rng.integers(2, 9)), draft.fingerprint), draft
    made = random_drafter(rng, VOCAB, "voted", 20)[1]
    return dataclasses.replace(made, levels=made.levels[:1] * case.depth, num_heads=0, draft=draft.fingerprint), draft


def _draft(case: Case, base: Base) -> Base:
    """The draft model: the base itself, or another random model."""
    if case.drafter == "itself" or (case.drafter == "drawn chain" and case.seed % 2):
        return base
    return base_of("llama", "sdpa", "float32", case.context, -1 - case.block % 2)


def _tree(case: Case, drafter: str, ranks: int) -> Tree:
    depth, nodes = case.depth, case.nodes
    most = 1 + sum(ranks**level for level in range(1, depth + 1))
    tree = random_tree(case.seed, nodes=min(nodes, max(1, most // 2)), depth=depth, ranks=ranks)
    return dataclasses.replace(tree, drafter=drafter)


def _plan(case: Case, drafter: Drafter) -> Plan:
    depth = min(case.depth, drafter.depth)
    if case.plan == "static":
        return _tree(dataclasses.replace(case, depth=depth), drafter.id, min(8, num_candidates(drafter, VOCAB)))
    if case.plan == "per step":
        return TreePolicy(max(2, case.nodes), depth, drafter.id)
    return TreePolicy(COSTS[-1][0], depth, drafter.id, COSTS)


def run(case: Case) -> Result:
    """Decode a case and compare with stock generate, or with the rule where that is lossy or draws."""
    try:
        base = model_of(case)
        check_trees(base)
        prompts = prompts_of(case)
        padded = case.processors != "none" and len({len(prompt) for prompt in prompts}) > 1
        texts = stock(case, prompts, padded=padded)
        known = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
        source = source_of(case, base, known)
        if case.rule in DRAWN:
            return _drawn(case, base, source, prompts[0])
        made = _decoded(case, base, source, prompts)
        if case.rule in LOSSY:
            return _typical(base, prompts, made)
        return _compared(case, base, source, prompts, texts, made)
    except TreeoptError as error:
        limited = case.family in LIMITED and error.code is Code.CONTEXT_FULL
        limited |= error.code is Code.NO_TREES and not _runs(base)
        return Result(REFUSED if limited else FAILED, detail=str(error).splitlines()[0])
    except Exception as error:  # a crash is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Result(FAILED, detail=f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})")


def _runs(base: Base) -> bool:
    """Whether the stock model runs at all; not every family does in every dtype."""
    try:
        base.model(torch.tensor([[1, 2]]))
    except RuntimeError:
        return False
    return True


def _decoded(case: Case, base: Base, source: TreeSource, prompts: list[list[int]]) -> list[Decoded]:
    """The texts of our loop, in the way of the case."""
    if case.via == "generate":
        return _generated(case, base, source, prompts)
    decoder = TreeDecoder(base, None, source, acceptance=RULES[case.rule], probe=False)
    if case.via == "alone":
        return [decoder.generate(prompt, case.new) for prompt in prompts]
    if case.via == "interleaved":
        return _interleaved(decoder, prompts, case.new)
    if case.via == "steps" and case.new >= 2 * (source.depth + 1):
        return _rewound(decoder, prompts, case.new)
    return decoder.generate(prompts, case.new)


def _generated(case: Case, base: Base, source: TreeSource, prompts: list[list[int]]) -> list[Decoded]:
    """Through stock `generate`, with its processors and padding."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with warnings.catch_warnings(action="ignore"):
        out = base.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=case.new,
            do_sample=False,
            return_dict_in_generate=True,
            custom_generate=tree_generate,
            tree=source,
            **options_of(case),
        )
    texts = [_ended(row[longest:].tolist(), base) for row in out.sequences]
    return [Decoded(text, list(steps), tree_depth=source.depth) for text, steps in zip(texts, out.step_lengths, strict=True)]


def _interleaved(decoder: TreeDecoder, prompts: list[list[int]], new: int) -> list[Decoded]:
    """Several texts in progress on one decoder, a step of each in turn."""
    made = [Decoded([], [], tree_depth=decoder.trees.depth) for _ in prompts]
    going = dict(enumerate(decoder.start(prompt, new) for prompt in prompts))
    while going:
        for row, steps in list(going.items()):
            step = next(steps, None)
            if step is None:
                del going[row]
            else:
                made[row].tokens.extend(step)
                made[row].step_lengths.append(len(step))
    return made


def _rewound(decoder: TreeDecoder, prompts: list[list[int]], new: int) -> list[Decoded]:
    """A batch whose first two steps are undone and made again."""
    made = [Decoded([], [], tree_depth=decoder.trees.depth) for _ in prompts]
    rows = decoder.prefill(prompts, new)
    mark = rows.mark()
    for _ in range(2):
        decoder.step(rows)
    rows.rewind(mark)
    for steps in advance(decoder, rows, dict.fromkeys(rows.indices, new), frozenset(decoder.base.eos_ids)):
        for row, step in steps.items():
            made[row].tokens.extend(step)
            made[row].step_lengths.append(len(step))
    return made


def _compared(
    case: Case,
    base: Base,
    source: TreeSource,
    prompts: list[list[int]],
    texts: list[list[int]],
    made: list[Decoded],
) -> Result:
    """The result of an exact rule: every text is that of stock generate, or the difference has a cause."""
    outcome, details = SAME, []
    for prompt, text, one in zip(prompts, texts, made, strict=True):
        if sum(one.step_lengths) != len(one.tokens):
            outcome, details = FAILED, [*details, f"{len(one.tokens)} tokens in steps of {one.step_lengths}"]
        if one.tokens == text:
            continue
        found = first_difference(Text("row", prompt, text), "tree", one.tokens)
        if case.processors == "none":
            found = Judge(base, source.nodes).decide(found, Text("row", prompt, text))
        details.append(f"token {found.position} is {found.found_token}, not {found.greedy_token}: {found.cause.value}")
        excused = tolerated(found, case.dtype) or (found.cause is Cause.ROUNDING and case.dtype == "float32")
        outcome = FAILED if not excused or outcome == FAILED else ROUNDING
    tokens, steps = sum(len(one.tokens) for one in made), sum(len(one.step_lengths) for one in made)
    ended = any(text[-1] in base.eos_ids for text in texts)
    return Result(outcome, tokens, steps, "; ".join(details), ended=ended)


@torch.inference_mode()
def _typical(base: Base, prompts: list[list[int]], made: list[Decoded]) -> Result:
    """The result of the typical rule: by one plain forward, each step's first token is the likeliest, and each draft is
    as likely as the rule demands."""
    rule = LOSSY["typical"]
    assert isinstance(rule, Typical)
    slack = 0.05 if base.dtype is torch.bfloat16 else 1e-3
    for prompt, one in zip(prompts, made, strict=True):
        ids = torch.tensor([[*prompt, *one.tokens]])
        places = torch.arange(ids.shape[1])[None]
        logits = base.model(ids, position_ids=places, use_cache=False).logits[0, len(prompt) - 1 : -1].double()
        p = (logits / rule.temperature).softmax(-1)
        least = torch.special.entr(p).sum(-1).neg().exp().mul(rule.delta).clamp_max(rule.epsilon)
        chosen = p[torch.arange(len(p)), torch.tensor(one.tokens)]
        roots = torch.zeros(len(p), dtype=torch.bool)
        roots[np.cumsum([0, *one.step_lengths[:-1]])] = True
        right = torch.where(roots, chosen >= p.amax(-1) * (1 - slack), chosen > least * (1 - slack))
        if not right.all():
            return Result(FAILED, detail=f"token {int((~right).nonzero()[0])} is not one that the rule accepts")
    return Result(SAME, sum(len(one.tokens) for one in made), sum(len(one.step_lengths) for one in made))


def _drawn(case: Case, base: Base, source: TreeSource, prompt: list[int]) -> Result:
    """The result of a rule that draws: a chi-square test of the texts of one prompt."""
    rule = RULES[case.rule]
    assert isinstance(rule, Sample)
    cells = text_cells(base, prompt, rule.scores, 10 / DRAWS)
    if not cells.length:
        return Result(SAME, p=1.0)
    decoder = TreeDecoder(base, None, source, acceptance=rule, probe=False)
    made = decoder.generate([prompt] * DRAWS, cells.length)
    p = p_of_counts(cells.counts([one.tokens for one in made]), cells.probabilities)
    tokens, steps = sum(len(one.tokens) for one in made), sum(len(one.step_lengths) for one in made)
    return Result(SAME if p >= LEAST_P else FAILED, tokens, steps, "" if p >= LEAST_P else f"p = {p:.2g}", p)


def shrunk(case: Case, fails: Callable[[Case], bool], *, most: int = 150) -> Case:
    """A simpler case that still fails: each change that keeps it failing is kept, until none is."""
    tried = 0
    going = True
    while going:
        going = False
        for simpler in _simpler(case):
            tried += 1
            if tried > most:
                return case
            if fails(simpler):
                case, going = simpler, True
                break
    return case


def _simpler(case: Case) -> list[Case]:
    rows = case.rows.split(",")
    fewer = [",".join(rows[:i] + rows[i + 1 :]) for i in range(len(rows)) if len(rows) > 1]
    depths = {case.depth // 2, case.depth - 1} - {0}
    wanted: list[dict[str, Any]] = [
        *({"rows": one} for one in fewer),
        *({"new": new} for new in (case.new // 2, case.new - 1)),
        *({"nodes": nodes} for nodes in (case.nodes // 2, case.nodes - 1) if nodes > case.depth),
        *({"depth": depth} for depth in sorted(depths)),
        *({"drafter": drafter} for drafter in ("none", "known") if case.drafter != "none"),
        {"plan": "static"},
        {"rule": "greedy"},
        {"via": "alone"} if case.via != "batch" else {"via": "batch"},
        {"processors": "none"},
        {"ends": 0},
        {"dtype": "float64"},
        {"attention": "eager"},
        {"context": "short"},
    ]
    if case.rule in DRAWN:
        wanted = [one for one in wanted if not one.keys() & {"rule", "drafter", "via"}]
    made = [dataclasses.replace(case, **one) for one in wanted if all(getattr(case, k) != v for k, v in one.items())]
    return [one for one in made if one.new > 0 and _fits(one)]


def _fits(case: Case) -> bool:
    return max(map(len, prompts_of(case))) + case.new <= CONTEXTS[case.context]
