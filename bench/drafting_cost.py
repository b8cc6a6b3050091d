"""Time of drafting without the heads' matrix products, relative to a step; on a 134M model with 32,000 tokens."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from decode import SMALL_SHAPE, TINY_SHAPE
from timing import goal_line, interleaved
from transformers import LlamaConfig, LlamaForCausalLM

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import MAX_MATCH, TOP_LOGPROBS, Drafter, Level
from treeopt.drafting.count import NgramCounts
from treeopt.drafting.plans import trees_for
from treeopt.evaluate.profile import generic_growth
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.policy import TreePolicy
from treeopt.tree import Tree

VOCAB, HEADS, LEVELS, TEXT, COUNTED = 32_000, 5, 8, 200, 400_000
SIZES = (16, 64)
ROUNDS = 40
GOAL = 0.05
CACHE_NODES, CACHE_GOAL = 16, 40e-6  # seconds of the cache's term at each level of a static tree
CALLS = 20  # in a timed run
CACHE = (0.5, 0.6, 0.7, 0.7, 0.8, 0.8)  # its weights
_CALIBRATION_MAP = ((-9.0, -9.0), (9.0, 9.0))


def cost(*, tiny: bool = False) -> None:
    """Print drafting's share of a step for static and dynamic trees."""
    torch.manual_seed(0)
    config = LlamaConfig(**(TINY_SHAPE if tiny else SMALL_SHAPE), vocab_size=VOCAB, max_position_embeddings=1024)
    base = Base(LlamaForCausalLM(config).to(torch.bfloat16).eval(), None, "random")
    heads = MedusaHeads(HEADS, 1, base.hidden_size, None).to(torch.bfloat16)
    drafter = random_drafter(4_000 if tiny else COUNTED)
    parameters = sum(one.numel() for one in base.model.parameters()) / 1e6
    print(f"{parameters:.0f}M parameters in bfloat16, {HEADS} heads on the base's LM head, {LEVELS} levels")
    for nodes in SIZES:
        growth = generic_growth(nodes, LEVELS, 10)
        tree = Tree(growth.tree(nodes).paths, drafter=drafter.id)
        for name, plan in (("static", tree), ("dynamic", TreePolicy(nodes, LEVELS, drafter.id))):
            share(base, heads, drafter, name, plan, nodes, rounds=2 if tiny else ROUNDS)
    cache_term(base, heads, drafter, rounds=2 if tiny else ROUNDS)


def cache_term(base: Base, heads: MedusaHeads, drafter: Drafter, *, rounds: int) -> None:
    """Print the time of the cache's term: the same tree is drafted with and without it, in turn."""
    bare = dataclasses.replace(
        drafter, levels=tuple(dataclasses.replace(level, cache=Level().cache) for level in drafter.levels)
    )
    paths = generic_growth(CACHE_NODES, LEVELS, 10).tree(CACHE_NODES).paths
    text = np.random.default_rng(1).zipf(1.3, TEXT) % VOCAB  # repeats its frequent tokens
    states, root = torch.zeros(1, base.hidden_size, dtype=torch.bfloat16), torch.tensor([int(text[-1])])
    runs = {}
    for name, record in (("with", drafter), ("without", bare)):
        trees = trees_for(base, heads, Tree(paths, drafter=record.id), record)
        runs[name] = functools.partial(repeatedly, trees.draft, trees.start([text.tolist()]), root, states, TEXT)
    with torch.inference_mode():
        spent = interleaved(runs, repeats=rounds)
    levels = max(map(len, paths))
    each = (spent["with"] - spent["without"]) / (levels * CALLS)
    print(goal_line(f"cache at {CACHE_NODES} nodes, a level", each * 1e6, CACHE_GOAL * 1e6, "us"))


def repeatedly(function: Callable[..., object], *arguments: object) -> None:
    """Call a function `CALLS` times."""
    for _ in range(CALLS):
        function(*arguments)


def random_drafter(counted: int) -> Drafter:
    """A drafter whose n-gram table is of random text, with rows and searches of realistic size."""
    rng = np.random.default_rng(0)
    counts = NgramCounts(VOCAB)
    text = (rng.zipf(1.3, counted) % VOCAB).tolist()
    counts.add(text[:-1], text[1:])
    level = Level(0.5, 0.3, 0.6, (2.0,) * MAX_MATCH, -5.0, _CALIBRATION_MAP, CACHE)
    return Drafter((level,) * LEVELS, HEADS, 16, 512, counts.table(), top_logprobs=TOP_LOGPROBS)


def share(
    base: Base, heads: MedusaHeads, drafter: Drafter, name: str, plan: Tree | TreePolicy, nodes: int, *, rounds: int
) -> None:
    """Print the medians of the parts, timed in turn."""
    trees = trees_for(base, heads, plan, drafter)
    decoder = TreeDecoder(base, heads, plan, drafter=drafter, probe=False)
    rng = np.random.default_rng(1)
    prompt = rng.integers(VOCAB, size=TEXT).tolist()
    rows = decoder.prefill([prompt], 700)
    hidden, root, session = rows.hidden, rows.root, rows.drafting

    @torch.inference_mode()
    def products() -> None:
        heads(hidden, base.lm_head, min(HEADS, trees.depth))

    @torch.inference_mode()
    def drafts() -> None:
        trees.draft(session, root, hidden, TEXT)

    spent: dict[str, list[float]] = {"step": [], "products": [], "drafts": []}
    parts: dict[str, Callable[[], object]] = {
        "step": lambda: decoder.step(rows),
        "products": products,
        "drafts": drafts,
    }
    for _ in range(rounds):
        for part, run in parts.items():
            begin = time.perf_counter()
            run()
            spent[part].append(time.perf_counter() - begin)
    step, product, draft = (statistics.median(spent[part]) * 1e3 for part in ("step", "products", "drafts"))
    beyond = draft - product
    print(
        f"{nodes:3} nodes {name:8} step {step:.2f} ms, heads {product:.2f}, drafting beyond them {beyond:.2f} ms "
        f"= {beyond / step:.1%} of the step: {'met' if beyond / step <= GOAL else 'MISSED'}, goal {GOAL:.0%}"
    )
