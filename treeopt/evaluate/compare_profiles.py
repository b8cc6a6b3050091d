"""Latency profiles in a comparison: which method each is of, and the fastest size by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from treeopt.calibration import Calibration
from treeopt.defaults import DEFAULT_VALUES, DEFAULT_WEIGHTS
from treeopt.drafter import HEADS, HEADS_NGRAM, KINDS, MODEL, MODEL_NGRAM, NGRAM
from treeopt.errors import Code, TreeoptError
from treeopt.latency import LatencyProfile
from treeopt.models.base import Base
from treeopt.optimize.auto_nodes import best_size
from treeopt.optimize.methods import candidates
from treeopt.optimize.per_step import fastest_policy
from treeopt.optimize.select_method import Fitter
from treeopt.optimize.tree_builder import build_tree, tree_limits
from treeopt.policy import STEP_SIZES, Plan

DRAFTERS = (HEADS, HEADS_NGRAM, NGRAM, MODEL, MODEL_NGRAM)

ProfileKey = tuple[str, str]  # drafter and kind


def by_drafter(profiles: Sequence[LatencyProfile], methods: Sequence[str]) -> dict[ProfileKey, LatencyProfile]:
    """The profiles by drafter and kind.

    Raises:
        TreeoptError: E230 where a profile does not name its drafter, two are of one drafter and kind, or the drafter is
            not among the methods.
    """
    found: dict[ProfileKey, LatencyProfile] = {}
    for profile in profiles:
        name, kind = str(profile.provenance.get("drafter_name", "")), str(profile.kind)
        fault = ""
        if not name:
            fault = "a profile does not name its drafter"
        elif name not in methods or name not in DRAFTERS:
            fault = f"a profile is of drafter {name}, which is not among the methods"
        elif (name, kind) in found:
            fault = f"two profiles are of {kind} trees of drafter {name}"
        elif name == HEADS and kind != KINDS[0]:
            fault = f"a profile is of {kind} trees of the heads, which are not among the methods"
        elif 1 not in profile.batches:
            fault = f"the profile of {kind} trees of drafter {name} has no batch of 1, in which texts are compared"
        if fault:
            raise TreeoptError(Code.PROFILE_INVALID, fault, fix="treeopt profile --drafter FILE --kind KIND")
        found[name, kind] = profile
    return found


def check_models(profiles: Mapping[ProfileKey, LatencyProfile], base: Base) -> None:
    """Raise E230 where a profile is of another base model; ids of models in other dtypes are not compared."""
    for (name, kind), profile in profiles.items():
        source = profile.provenance
        same_dtype = source.get("dtype") == base.dtype_name
        if same_dtype and source.get("model_id", base.fingerprint) != base.fingerprint:
            what = f"the profile of {kind} trees of drafter {name} is of the model {source.get('model')}"
            fix = f"treeopt profile --model {base.name} --drafter FILE --kind {kind}"
            raise TreeoptError(Code.PROFILE_INVALID, what, why="steps of another model take other times", fix=fix)


def fastest(traces: Calibration, profile: LatencyProfile, kind: str) -> Plan:
    """The tree or policy with the most tokens per second by a profile of the same drafter and kind.

    The drafter of the profile was learned elsewhere, so the ids of the two are not compared.
    """
    priced = dataclasses.replace(profile, provenance={})
    if kind == KINDS[1]:
        return fastest_policy(traces, priced)
    limits = tree_limits(traces, min(profile.largest(1, None), STEP_SIZES[-1]))
    choice = best_size(Fitter(traces, limits), candidates(DEFAULT_VALUES, DEFAULT_WEIGHTS, refined=False), priced)
    return build_tree(traces, choice.best.nodes)
