"""The settings of each engine that takes no fixed tree, by its own names (docs/engines.md has versions and sources)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeopt.calibration import Calibration
from treeopt.drafter import HEADS, MODEL
from treeopt.engines import ANY_DRAFT, EAGLE_DRAFT, SETTINGS
from treeopt.errors import Code, TreeoptError, check_choice, check_counts
from treeopt.files.drafters import load_drafter
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import Budget, budget_at
from treeopt.optimize.engine_choice import (
    TreeChoice,
    best_chains,
    best_stopped_chain,
    best_tree,
    chain_tokens,
    check_chains,
    price_tree,
    tree_of,
)
from treeopt.optimize.engine_replay import replay_chain
from treeopt.optimize.replay import Replay

EXACT, ESTIMATE, OTHER_DRAFTER = "exact", "estimate", "other drafter"
_NO_LENGTH = "the fastest length needs seconds per step: --profile, or give the length with --drafts"
_NO_SIZE = "the fastest size needs seconds per step: --profile, or give the size with --nodes"
_NO_GAIN = "no length is faster than decoding without drafts on this machine"
_SCHEDULE = "draft_len_schedule begins with its greatest length, so none is above that of the smallest batch"
_NAMES = {HEADS: "Medusa heads", MODEL: "a draft model", EAGLE_DRAFT: "an EAGLE head"}
_METHODS = {HEADS: "medusa", MODEL: "draft_model"}  # of vLLM, by treeopt's drafter


@dataclass(frozen=True)
class Given:
    """The input of all engines: what `treeopt.export.settings.engine_settings` takes."""

    calibration: Calibration
    profile: LatencyProfile | None
    drafts: int | None
    nodes: int | None


@dataclass(frozen=True)
class Found:
    """Settings of an engine before they are described, with the fields of `EngineSettings`.

    Args:
        chain: whether an engine with these settings drafts a chain of one length; False for trees and for chains that
            end before improbable drafts.
        lines: whether they are options of a command line; otherwise JSON.
        warning: that the engine does not have the drafter of the calibration; empty where it has.
    """

    settings: dict[str, Any]
    replay: Replay | None
    budgets: Mapping[int, Budget]
    underived: dict[str, str]
    notes: tuple[str, ...] = ()
    batch: int | None = None
    bound: str = EXACT
    chain: bool = True
    lines: bool = False
    warning: str = ""


def _lengths(given: Given) -> dict[int, Budget]:
    """The chain at each measured batch, fastest or of the given length; empty without a profile."""
    if given.profile is None:
        return {}
    if given.drafts is None:
        return best_chains(given.calibration, given.profile)
    check_chains(given.calibration, given.profile)
    expected = chain_tokens(given.calibration)
    return {batch: budget_at(expected, given.profile, given.drafts + 1, batch) for batch in given.profile.batches}


def _chain(
    given: Given, key: str, make: Callable[[dict[int, int]], dict[str, Any]], *notes: str, by_batch: bool = False
) -> Found:
    """The settings of an engine that takes a length.

    Args:
        given: the input.
        key: the name of the length.
        make: the settings, from the length at each batch; at batch 1 where there is no profile. The first is positive
            unless `by_batch`.
        notes: those of the engine.
        by_batch: whether it takes a length for each batch; otherwise it is that of the smallest measured batch.
    """
    budgets = _lengths(given)
    if not by_batch:
        budgets = dict(sorted(budgets.items())[:1])
    if not budgets and given.drafts is None:
        return Found({}, None, {}, {key: _NO_LENGTH})
    lengths = {batch: budget.nodes - 1 for batch, budget in budgets.items()} or {1: given.drafts or 0}
    drafting = {batch: length for batch, length in lengths.items() if length}
    if not drafting:
        return Found({}, None, budgets, {key: _NO_GAIN})
    batch = min(drafting)
    replay = replay_chain(given.calibration, drafting[batch])
    return Found(make(lengths), replay, budgets, {}, notes, batch if budgets else None)


def _vllm(given: Given) -> Found:
    table = "num_speculative_tokens_per_batch_size"
    method = _METHODS.get(drafter_name(given.calibration) or "")
    by_batch = method != _METHODS[HEADS]  # its proposer asserts one length: with a table vLLM stops

    def make(lengths: dict[int, int]) -> dict[str, Any]:
        made: dict[str, Any] = {"method": method} if method else {}
        made |= {"num_speculative_tokens": max(lengths.values())}
        return made | ({table: _ranges(lengths)} if by_batch and _several(given) else {})

    end = "beyond the largest measured batch vLLM keeps the last length of the table"
    found = _chain(
        given, "num_speculative_tokens", make, *([end] if by_batch and _several(given) else []), by_batch=by_batch
    )
    if not found.settings:
        return found
    if "method" not in found.settings:
        found.underived["method"] = "the calibration is of a drafter that vLLM does not have"
    found.underived["model"] = "the folder of the heads (`treeopt heads convert --to vllm`), or the draft model"
    if not by_batch:
        found.underived[table] = "vLLM drafts one length for all batches with Medusa heads (0.32)"
    elif not _several(given):
        found.underived[table] = "the profile has one batch, or there is none"
    return found


def _several(given: Given) -> bool:
    return given.profile is not None and len(given.profile.batches) > 1


def _ranges(lengths: Mapping[int, int]) -> list[list[int]]:
    """[first batch, last batch, length]: a range has the length that is fastest at its end, where it was measured."""
    ranges: list[list[int]] = []
    for batch, length in sorted(lengths.items()):
        if ranges and ranges[-1][2] == length:
            ranges[-1][1] = batch
        else:
            ranges.append([ranges[-1][1] + 1 if ranges else 1, batch, length])
    return ranges


def _sglang(given: Given) -> Found:
    found = _tree(given, narrow=False)
    if isinstance(found, str):
        return Found({}, None, {}, {"--speculative-num-draft-tokens": found}, chain=False)
    choice, budgets = found
    if choice.shape is None:
        return Found({}, None, budgets, {"--speculative-num-draft-tokens": _NO_GAIN}, chain=False)
    settings = {
        "--speculative-num-steps": choice.shape.steps,
        "--speculative-eagle-topk": choice.shape.top_k,
        "--speculative-num-draft-tokens": choice.shape.nodes,
    }
    algorithm = {"--speculative-algorithm": "STANDALONE for a draft model, EAGLE or EAGLE3 for their drafts; no Medusa"}
    notes, batch, bound = _tree_notes(given, choice), min(budgets, default=None), _bound(given, choice)
    return Found(settings, choice.replay, budgets, algorithm, notes, batch, bound, chain=False, lines=True)


def _trtllm(given: Given) -> Found:
    def make(lengths: dict[int, int]) -> dict[str, Any]:
        # The first length is the greatest by rule; beyond the last batch TensorRT-LLM does not draft.
        longest = lengths[min(lengths)]
        ranges = _ranges({batch: min(length, longest) for batch, length in lengths.items()})
        while ranges and not ranges[-1][2]:
            ranges.pop()
        schedule = {last: length for _, last, length in ranges}
        return {"max_draft_len": longest} | ({"draft_len_schedule": schedule} if _several(given) else {})

    if given.nodes is None:
        end = "beyond the last batch of draft_len_schedule TensorRT-LLM does not draft"
        found = _chain(given, "max_draft_len", make, *((end, _SCHEDULE) if _several(given) else ()), by_batch=True)
        if found.settings and not found.settings["max_draft_len"]:
            found = Found({}, None, found.budgets, {"max_draft_len": f"{_SCHEDULE}, and drafts do not pay there"})
        tree = "of the dynamic tree, which has no lengths by batch: --nodes"
        found.underived.update(dict.fromkeys(("dynamic_tree_max_topK", "max_total_draft_tokens"), tree))
        return found
    tree_found = _tree(given, narrow=True)
    assert not isinstance(tree_found, str)
    choice, budgets = tree_found
    assert choice.shape is not None
    settings = {
        "use_dynamic_tree": True,
        "max_draft_len": choice.shape.steps,
        "dynamic_tree_max_topK": choice.shape.top_k,
        "max_total_draft_tokens": choice.shape.nodes - 1,  # without the root
    }
    notes = ("TensorRT-LLM's choice of nodes is taken to be EAGLE-2's", *_tree_notes(given, choice))
    underived = {"draft_len_schedule": "of chains; a dynamic tree has one size"}
    batch = min(budgets, default=None)
    return Found(settings, choice.replay, budgets, underived, notes, batch, _bound(given, choice), chain=False)


def _tree(given: Given, *, narrow: bool) -> tuple[TreeChoice, dict[int, Budget]] | str:
    """The dynamic tree and its figures at the smallest measured batch; a reason where it cannot be chosen."""
    calibration, profile = given.calibration, given.profile
    if given.nodes is not None:
        choice = tree_of(calibration, given.nodes, narrow=narrow)
        return choice, {} if profile is None else price_tree(choice, calibration, profile)
    if profile is None:
        return _NO_SIZE
    batch = profile.batches[0]
    choice = best_tree(calibration, profile, batch=batch, narrow=narrow)
    return choice, {} if choice.budget is None else {batch: choice.budget}


def _bound(given: Given, choice: TreeChoice) -> str:
    traced = given.calibration.steps is not None
    exact = traced and choice.shape is not None and choice.shape.replays_exactly(given.calibration.num_heads)
    return EXACT if exact else ESTIMATE


def _tree_notes(given: Given, choice: TreeChoice) -> tuple[str, ...]:
    if given.calibration.steps is None:
        mean = "no per-step traces: the tree is that of the mean probabilities, one for all steps"
        return (f"{mean}; treeopt calibrate --kind dynamic",)
    if _bound(given, choice) == EXACT:
        return ()
    return ("the traces do not say which nodes the engine expands; docs/engines.md has the difference in a simulation",)


def _llamacpp(given: Given) -> Found:
    def make(lengths: dict[int, int]) -> dict[str, Any]:
        return {
            "--spec-type": "draft-simple",
            "--spec-draft-n-max": lengths[min(lengths)],
            "--spec-draft-n-min": 0,
            "--spec-draft-p-min": 0.0,
        }

    found = dataclasses.replace(_chain(given, "--spec-draft-n-max", make), lines=True)
    if given.profile is None or given.calibration.steps is None:
        if found.settings:
            why = "the engine's default, 0: another needs per-step traces (--kind dynamic) and a profile"
            found.underived["--spec-draft-p-min"] = why
        return found
    batch = given.profile.batches[0]
    best = best_stopped_chain(given.calibration, given.profile, given.drafts, batch=batch)
    if best.budget.speedup <= 1 and given.drafts is None:
        return Found({}, None, found.budgets, {"--spec-draft-n-max": _NO_GAIN})
    settings = make({batch: best.drafts}) | {"--spec-draft-p-min": best.least}
    note = (
        "p-min is by the traced probabilities; llama.cpp compares those of its draft model among its ten likeliest "
        "tokens"
    )
    return Found(settings, best.replay, {batch: best.budget}, {}, (note,), batch, chain=not best.least, lines=True)


def _transformers(given: Given) -> Found:
    def make(lengths: dict[int, int]) -> dict[str, Any]:
        return {
            "num_assistant_tokens": lengths[min(lengths)],
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }

    note = "set them on assistant_model.generation_config, which assisted generation reads; batch 1 only"
    found = _chain(given, "num_assistant_tokens", make, note)
    if found.settings:
        found.underived["prompt_lookup_num_tokens"] = "prompt lookup drafts by other rules than the traced drafter"
    return found


def _any_chain(given: Given) -> Found:
    return _chain(given, "drafts", lambda lengths: {"drafts": lengths[min(lengths)]})


SETTINGS_OF: dict[str, Callable[[Given], Found]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "llamacpp": _llamacpp,
    "transformers": _transformers,
    "chain": _any_chain,
}


def settings_of(engine: str, given: Given) -> Found:
    """The settings of an engine, with a warning where it does not have the drafter of the calibration."""
    found = SETTINGS_OF[engine](given)
    known = SETTINGS[engine]
    drafters = known.trees if given.nodes is not None or known.chains is None else known.chains
    assert drafters is not None
    name = drafter_name(given.calibration)
    if not found.settings or {name, ANY_DRAFT} & set(drafters):
        return found
    has = " or ".join(_NAMES[drafter] for drafter in drafters)
    of = "a drafter whose file is not found" if name is None else f"the drafter {name}"
    warning = f"the calibration is of {of}, and the engine drafts with {has}: the figures do not hold there"
    return dataclasses.replace(found, bound=OTHER_DRAFTER, warning=warning)


def drafter_name(calibration: Calibration) -> str | None:
    """The drafter of a calibration by name, as `--drafter` has it; None where its file is not there."""
    source = calibration.provenance
    if not source.drafter_id:
        return HEADS
    if not source.drafter or not Path(source.drafter).is_file():
        return None
    drafter = load_drafter(source.drafter)
    return drafter.name if drafter.id == source.drafter_id else None


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one engine with the steps that replay promises.

    Args:
        engine: one of `treeopt.engines.SETTINGS`.
        settings: values by the engine's names; empty where none could be derived.
        content: the settings as the engine takes them: JSON, or options of its command line; empty with them.
        replay: the promised steps; None without settings.
        batch: the smallest measured batch with drafts, which the promise is of; None where the length was given.
        bound: `exact` where the replay is of the engine's own drafts, `estimate` where it is of likely ones, `other
            drafter` where the engine does not have the drafter of the calibration.
        chain: whether the engine drafts a chain of one length: no tree, and no chain that ends earlier.
        budgets: the figures at each measured batch; empty without a profile.
        chains: tokens per step of chains of 0, 1, 2, ... drafts.
        underived: reasons, by setting.
        notes: what a user must know.
        warning: that the engine does not have the drafter of the calibration; empty where it has.
    """

    engine: str
    settings: Mapping[str, Any]
    content: str
    replay: Replay | None
    batch: int | None
    bound: str
    chain: bool
    budgets: Mapping[int, Budget]
    chains: tuple[float, ...]
    underived: Mapping[str, str]
    notes: tuple[str, ...]
    warning: str


def engine_settings(
    engine: str,
    calibration: Calibration,
    profile: LatencyProfile | None = None,
    *,
    drafts: int | None = None,
    nodes: int | None = None,
) -> EngineSettings:
    """The settings of an engine for the drafter of a calibration.

    Args:
        engine: one of `treeopt.engines.SETTINGS`.
        calibration: traces of the drafter that the engine will run.
        profile: seconds per step of that drafter on the machine that serves; without it `drafts` or `nodes` is needed.
        drafts: the length of the chain; None is the fastest.
        nodes: the size of the dynamic tree, root counted; None is the fastest.

    Raises:
        TreeoptError: E220 and E223 as in replay, E230 where the profile lacks what is needed, E303 where the
            calibration holds no text, E103 where a number is out of range.
        ValueError: where no engine has the name, it takes no such number, or the number is not whole.
    """
    check_choice("engine", engine, SETTINGS)
    known = SETTINGS[engine]
    for name, value, taken in (("drafts", drafts, known.chains), ("nodes", nodes, known.trees)):
        if value is not None and taken is None:
            raise ValueError(f"{engine} takes no {name}")
        if value is not None:
            check_counts(**{name: value})
    if drafts is not None and nodes is not None:
        raise ValueError("drafts are of a chain and nodes of a tree: one of them")
    if not calibration.positions:
        raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text")
    if drafts is not None and not 1 <= drafts < len(chain_tokens(calibration)):
        what = f"a chain of {drafts} drafts cannot be replayed"
        why = f"the calibration has {calibration.num_heads} levels, and chains have 16 drafts at most"
        raise TreeoptError(Code.TREE_TOO_DEEP, what, at=f"--drafts {drafts}", why=why)
    found = settings_of(engine, Given(calibration, profile, drafts, nodes))
    return EngineSettings(
        engine,
        found.settings,
        _content(found),
        found.replay,
        found.batch,
        found.bound,
        found.chain,
        found.budgets,
        tuple(chain_tokens(calibration).tolist()),
        found.underived,
        found.notes,
        found.warning,
    )


def promised(found: EngineSettings, calibration: Calibration, drafts: int | None) -> Replay:
    """The steps to compare an engine's with: of a chain of as many drafts as it made, or those of other settings.

    Args:
        found: the settings.
        calibration: the traces that they were made from.
        drafts: the greatest number of drafts in the engine's histogram; None where it has none.

    Raises:
        TreeoptError: E101 where the engine drafts more levels than were traced, E230 where neither is known.
    """
    if not found.chain or drafts is None:
        if found.replay is None:
            what = "there is no promise to compare with: the engine's file and the options give no length"
            raise TreeoptError(Code.PROFILE_INVALID, what, fix="--profile, --drafts or --nodes")
        return found.replay
    if not 1 <= drafts < len(found.chains):
        what = f"the engine made {drafts} drafts a step, and chains are replayed to {len(found.chains) - 1}"
        raise TreeoptError(Code.TREE_TOO_DEEP, what, why="the calibration has no more levels")
    return replay_chain(calibration, drafts)


def _content(found: Found) -> str:
    if not found.settings:
        return ""
    if not found.lines:
        return json.dumps(found.settings)
    return " ".join(f"{name} {value}" for name, value in found.settings.items())
