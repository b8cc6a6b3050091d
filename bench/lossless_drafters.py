"""The drafters of `lossless.py`: the trees of a case, with their tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from known_texts import KnownTexts
from lossless_cases import DRAWN, RULES, Case
from lossless_stock import base_of
from tiny_families import VOCAB

from treeopt.decode.rejection import DrawnChain
from treeopt.decode.rules import Sample
from treeopt.defaults import EAGLE
from treeopt.drafter import Drafter
from treeopt.drafting.kernel.data import num_candidates
from treeopt.drafting.plans import TreeSource, trees_for
from treeopt.drafting.token_recycling import TokenRecycling
from treeopt.models.base import Base
from treeopt.models.draft_module import kind_of
from treeopt.policy import Plan, TreePolicy
from treeopt.tree import Tree

from helpers import random_tree  # isort: skip - known_texts makes tests/ importable
from naive_draft import random_drafter  # isort: skip
from tiny import random_heads  # isort: skip
from tiny_modules import tiny_module  # isort: skip

COSTS = ((1, 0.1), (2, 0.2), (4, 0.3), (6, 0.5), (8, 0.9), (16, 1.4))


def source_of(case: Case, base: Base, texts: Sequence[Sequence[int]]) -> TreeSource:
    """The trees of the case's drafter."""
    rng = np.random.default_rng([16, case.seed])
    if case.drafter == "known":
        nodes = min(case.nodes, 1 + VOCAB // 2) if case.depth == 1 else case.nodes  # siblings have different tokens
        return KnownTexts(base, texts, nodes, min(case.depth, nodes - 1), case.seed)
    if case.drafter == "none":
        return trees_for(base, None, Tree(()))
    if case.drafter == "drawn chain" or (case.drafter == EAGLE and case.rule in DRAWN):
        drawn = RULES[case.rule] if case.rule in DRAWN else Sample(1.0, seed=1)
        assert isinstance(drawn, Sample)
        return DrawnChain(base, _draft(case, base), drawn, case.depth)
    if case.drafter == "recycling":
        return trees_for(base, None, _tree(case, "", 8), TokenRecycling(base))
    if case.drafter == "heads":
        heads = random_heads(base, case.depth, case.seed)
        return trees_for(base, heads.to(base.device, base.dtype), _tree(case, "", VOCAB))
    drafter, draft = _record(case, base, rng)
    heads = None
    if drafter.num_heads:
        heads = random_heads(base, drafter.num_heads, case.seed).to(base.device, base.dtype)
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
        top = int(rng.integers(2, 9))
        return Drafter.model_only(case.depth, top, draft.fingerprint, kind_of(draft.model)), draft
    made = random_drafter(rng, VOCAB, "voted", 20)[1]
    return dataclasses.replace(made, levels=made.levels[:1] * case.depth, num_heads=0, draft=draft.fingerprint), draft


def _draft(case: Case, base: Base) -> Base:
    """The draft model: the base itself, or another random model or EAGLE head."""
    if case.drafter == EAGLE:
        kind = ("eagle3", "eagle1")[case.seed % 2]
        made: Base = tiny_module(base, kind, case.seed, vocabulary=VOCAB // 2 if case.seed % 4 == 0 else 0)
        return made
    if case.drafter == "itself" or (case.drafter == "drawn chain" and case.seed % 2):
        return base
    return base_of(case.draft, "sdpa", "float32", case.context, -1 - case.block % 2)


def _tree(case: Case, drafter: str, ranks: int) -> Tree:
    depth, nodes = case.depth, case.nodes
    most = 1 + sum(ranks**level for level in range(1, depth + 1))
    tree: Tree = random_tree(case.seed, nodes=min(nodes, max(1, most // 2)), depth=depth, ranks=ranks)
    return dataclasses.replace(tree, drafter=drafter)


def _plan(case: Case, drafter: Drafter) -> Plan:
    depth = min(case.depth, drafter.depth)
    if case.plan == "static":
        return _tree(dataclasses.replace(case, depth=depth), drafter.id, min(8, num_candidates(drafter, VOCAB)))
    if case.plan == "per step":
        return TreePolicy(max(2, case.nodes), depth, drafter.id)
    return TreePolicy(COSTS[-1][0], depth, drafter.id, COSTS)
