"""Settings of engines that take no fixed tree, by their own names (docs/engines/index.md has versions and sources).

The numbers come from replay of what the engine will draft and from a latency profile (`treeopt.optimize.chains`). A
setting that follows from neither is named with the reason, and not guessed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from treeopt.calibration import Calibration
from treeopt.defaults import HEADS, MODEL
from treeopt.engines import ANY_DRAFT, EAGLE_DRAFT, SETTINGS
from treeopt.errors import Code, TreeoptError, check_choice, check_counts
from treeopt.export.lint import drafter_name
from treeopt.facts import Fact, picked
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import Budget
from treeopt.optimize.chains import (
    chain_tokens,
    chains_by_batch,
    choose_dynamic_tree,
    replay_chain,
)
from treeopt.optimize.replay import Replay

EXACT, ESTIMATE, OTHER_DRAFTER = "exact", "estimate", "other drafter"
_NO_LENGTH = "the fastest length needs seconds per step: --profile, or give the length with --chain-length"
_NO_SIZE = "the fastest size needs seconds per step: --profile, or give the size with --nodes"
_NO_GAIN = "no length is faster than decoding without drafts on this machine"
_SCHEDULE = "draft_len_schedule begins with its greatest length, so none is above that of the smallest batch"
_NAMES = {HEADS: "Medusa heads", MODEL: "a draft model", EAGLE_DRAFT: "an EAGLE head"}
_METHODS = {HEADS: "medusa", MODEL: "draft_model"}  # of vLLM, by treeopt's drafter

Lengths = dict[int, int]  # batch -> drafts


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one engine with the steps that replay promises.

    Args:
        settings: values by the engine's names; empty where none could be derived.
        replay: the promised steps; None without settings.
        budgets: the figures at each measured batch; empty without a profile.
        underived: reasons, by setting.
        notes: what a user must know.
        batch: the smallest measured batch with drafts, which the promise is of; None where the length was given.
        bound: `exact` where the replay is of the engine's own drafts, `estimate` where it is of likely ones, `other
            drafter` where the engine does not have the drafter of the calibration.
        chain: whether the engine drafts a chain, not a tree.
        lines: whether the settings are options of a command line; otherwise they are JSON.
        warning: that the engine does not have the drafter of the calibration; empty where it has.
        engine: one of `treeopt.engines.SETTINGS`.
        chains: tokens per step of chains of 0, 1, 2, ... drafts.
    """

    settings: dict[str, Any]
    replay: Replay | None = None
    budgets: Mapping[int, Budget] = field(default_factory=dict)
    underived: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    batch: int | None = None
    bound: str = EXACT
    chain: bool = True
    lines: bool = False
    warning: str = ""
    engine: str = ""
    chains: tuple[float, ...] = ()

    def report(self) -> Iterator[Fact]:
        """Who reads the settings, and the steps that replay promises."""
        yield Fact("read by", SETTINGS[self.engine].versions, key="versions")
        promise = f"tokens per step ({self.bound}{'' if self.batch is None else f', batch {self.batch}'})"
        tokens = None if self.replay is None else self.replay.tokens_per_step
        yield Fact("replay" if self.replay else None, tokens, ".4f", promise, "tokens_per_step")
        for batch, budget in self.budgets.items():
            figures = f"{budget.tokens_per_step:.4f} tokens per step, speedup {budget.speedup:.3f}"
            yield Fact(f"batch {batch}", f"{budget.nodes - 1} drafts: {figures}")
        for note in self.notes:
            yield Fact("note", note)
        batches = [
            {"batch": batch, "drafts": budget.nodes - 1, **picked(budget, "tokens_per_step", "speedup")}
            for batch, budget in self.budgets.items()
        ]
        for key, value in {
            "to": self.engine,
            **picked(self, "settings", "batch", "bound", "notes"),
            "batches": batches,
            "chain_tokens_per_step": self.chains,
            "not_derived": self.underived,
        }.items():
            yield Fact(None, value, key=key)

    @property
    def content(self) -> str:
        """The settings as the engine takes them: JSON, or options of its command line; empty without settings."""
        if not self.settings or self.lines:
            return " ".join(f"{name} {value}" for name, value in self.settings.items())
        return json.dumps(self.settings)


@dataclass(frozen=True)
class _EngineInput:
    """The input of all engines, as `engine_settings` takes it."""

    calibration: Calibration
    profile: LatencyProfile | None
    drafts: int | None
    nodes: int | None

    @property
    def several(self) -> bool:
        """Whether several batches were measured."""
        return self.profile is not None and len(self.profile.batches) > 1


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
    if not calibration.positions:
        raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text")
    chains = tuple(chain_tokens(calibration).tolist())
    if drafts is not None and drafts >= len(chains):
        what = f"a chain of {drafts} drafts cannot be replayed"
        why = f"the calibration has {calibration.num_heads} levels, and chains have 16 drafts at most"
        fix = f"--chain-length {len(chains) - 1} or less"
        raise TreeoptError(Code.TREE_TOO_DEEP, what, at=f"--chain-length {drafts}", why=why, fix=fix)
    found = SETTINGS_OF[engine](_EngineInput(calibration, profile, drafts, nodes))
    drafters = known.chains or known.trees or ()
    name = _drafter(calibration)
    if not {name, ANY_DRAFT} & set(drafters):
        has = " or ".join(_NAMES[drafter] for drafter in drafters)
        of = f"the drafter {name}" if name else "a drafter whose file is not found"
        warning = f"the calibration is of {of}, and the engine drafts with {has}: the figures do not hold there"
        found = dataclasses.replace(found, bound=OTHER_DRAFTER, warning=warning)
    return dataclasses.replace(found, engine=engine, chains=chains)


def promised(found: EngineSettings, calibration: Calibration, drafts: int | None) -> Replay:
    """The steps to compare an engine's with: of a chain of as many drafts as it made, or those of other settings.

    `drafts` is the greatest number in the engine's histogram; None where it has none.
    """
    if not found.chain or drafts is None:
        if found.replay is None:
            what = "there is no prediction to compare with: the engine's file and the options give no length"
            raise TreeoptError(Code.PROFILE_INVALID, what, fix="--profile, --chain-length or --nodes")
        return found.replay
    if not 1 <= drafts < len(found.chains):
        what = f"the engine made {drafts} drafts a step, and chains are replayed to {len(found.chains) - 1}"
        raise TreeoptError(Code.TREE_TOO_DEEP, what, why="the calibration has no more levels")
    return replay_chain(calibration, drafts)


def _drafter(calibration: Calibration) -> str:
    return drafter_name(calibration.provenance.drafter_id, calibration.provenance.drafter)


def _chain(
    given: _EngineInput, key: str, make: Callable[[Lengths], dict[str, Any]], *notes: str, by_batch: bool = False
) -> EngineSettings:
    """The settings of an engine that takes a length, which it calls `key`.

    `make` gets the length at each batch, of which at least one is positive; at batch 1 where there is no profile. An
    engine that takes a length for each batch says so by `by_batch`; others get that of the smallest measured batch.
    """
    calibration, profile = given.calibration, given.profile
    if profile is None and given.drafts is None:
        return EngineSettings({}, underived={key: _NO_LENGTH})
    budgets = {} if profile is None else chains_by_batch(calibration, profile, given.drafts)
    if not by_batch:
        budgets = dict(sorted(budgets.items())[:1])
    lengths = {batch: budget.nodes - 1 for batch, budget in budgets.items()} or {1: given.drafts or 0}
    drafting = {batch: length for batch, length in lengths.items() if length}
    if not drafting:
        return EngineSettings({}, budgets=budgets, underived={key: _NO_GAIN})
    batch = min(drafting)
    replay = replay_chain(calibration, drafting[batch])
    return EngineSettings(make(lengths), replay, budgets, notes=notes, batch=batch if budgets else None)


def _vllm(given: _EngineInput) -> EngineSettings:
    table = "num_speculative_tokens_per_batch_size"
    method = _METHODS.get(_drafter(given.calibration))
    by_batch = method != _METHODS[HEADS]  # its proposer asserts one length: with a table vLLM stops
    with_table = by_batch and given.several

    def make(lengths: Lengths) -> dict[str, Any]:
        made: dict[str, Any] = {"method": method} if method else {}
        made |= {"num_speculative_tokens": max(lengths.values())}
        return made | ({table: _ranges(lengths)} if with_table else {})

    notes = ["beyond the largest measured batch vLLM keeps the last length of the table"] if with_table else []
    found = _chain(given, "num_speculative_tokens", make, *notes, by_batch=by_batch)
    if not found.settings:
        return found
    if "method" not in found.settings:
        found.underived["method"] = "the calibration is of a drafter that vLLM does not have"
    found.underived["model"] = "the folder of the heads (`treeopt heads convert --for vllm`), or the draft model"
    if not by_batch:
        found.underived[table] = "vLLM drafts one length for all batches with Medusa heads (0.32)"
    elif not given.several:
        found.underived[table] = "the profile has one batch, or there is none"
    return found


def _ranges(lengths: Lengths) -> list[list[int]]:
    """[first batch, last batch, length]: a range has the length that is fastest at its end, where it was measured."""
    ranges: list[list[int]] = []
    for batch, length in sorted(lengths.items()):
        if ranges and ranges[-1][2] == length:
            ranges[-1][1] = batch
        else:
            ranges.append([ranges[-1][1] + 1 if ranges else 1, batch, length])
    return ranges


def _sglang(given: _EngineInput) -> EngineSettings:
    key = "--speculative-num-draft-tokens"
    if given.nodes is None and given.profile is None:
        return EngineSettings({}, underived={key: _NO_SIZE}, chain=False)
    choice = choose_dynamic_tree(given.calibration, given.profile, given.nodes)
    batch = None if given.profile is None else given.profile.batches[0]
    budgets = {} if batch is None or choice.budget is None else {batch: choice.budget}
    if choice.shape is None:
        return EngineSettings({}, budgets=budgets, underived={key: _NO_GAIN}, chain=False)
    names = ("--speculative-num-steps", "--speculative-eagle-topk", key)
    simulated = "docs/engines/index.md has the difference in a simulation"
    estimated = f"the traces do not say which nodes the engine expands; {simulated}"
    exact = choice.shape.replays_exactly(given.calibration.num_heads)
    algorithm = "STANDALONE for a draft model, EAGLE or EAGLE3 for their drafts; no Medusa"
    return EngineSettings(
        dict(zip(names, dataclasses.astuple(choice.shape), strict=True)),
        choice.replay,
        budgets,
        {"--speculative-algorithm": algorithm},
        notes=() if exact else (estimated,),
        batch=batch,
        bound=EXACT if exact else ESTIMATE,
        chain=False,
        lines=True,
    )


def _trtllm(given: _EngineInput) -> EngineSettings:
    def make(lengths: Lengths) -> dict[str, Any]:
        # The first length is the greatest by rule; beyond the last batch TensorRT-LLM does not draft.
        longest = lengths[min(lengths)]
        ranges = _ranges({batch: min(length, longest) for batch, length in lengths.items()})
        while ranges and not ranges[-1][2]:
            ranges.pop()
        schedule = {last: length for _, last, length in ranges}
        return {"max_draft_len": longest} | ({"draft_len_schedule": schedule} if given.several else {})

    notes = ("beyond the last batch of draft_len_schedule TensorRT-LLM does not draft", _SCHEDULE)
    found = _chain(given, "max_draft_len", make, *(notes if given.several else ()), by_batch=True)
    if found.settings and not found.settings["max_draft_len"]:
        why = f"{_SCHEDULE}, and drafts do not pay there"
        found = EngineSettings({}, budgets=found.budgets, underived={"max_draft_len": why})
    return found


def _llamacpp(given: _EngineInput) -> EngineSettings:
    fixed = {"--spec-draft-n-min": 0, "--spec-draft-p-min": 0.0}
    found = _length(given, "--spec-draft-n-max", {"--spec-type": "draft-simple"}, fixed, lines=True)
    if found.settings:
        why = "the engine's default, 0: it is compared with probabilities that are not traced"
        found.underived["--spec-draft-p-min"] = why
    return found


def _transformers(given: _EngineInput) -> EngineSettings:
    note = "set them on assistant_model.generation_config, which assisted generation reads; batch 1 only"
    fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    found = _length(given, "num_assistant_tokens", {}, fixed, note)
    if found.settings:
        found.underived["prompt_lookup_num_tokens"] = "prompt lookup drafts by other rules than the traced drafter"
    return found


def _length(
    given: _EngineInput, key: str, before: Mapping[str, Any], after: Mapping[str, Any], *notes: str, lines: bool = False
) -> EngineSettings:
    """The settings of an engine that takes one length, that of the smallest batch, between others that are fixed."""
    found = _chain(given, key, lambda lengths: {**before, key: lengths[min(lengths)], **after}, *notes)
    return dataclasses.replace(found, lines=lines)


SETTINGS_OF: dict[str, Callable[[_EngineInput], EngineSettings]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "llamacpp": _llamacpp,
    "transformers": _transformers,
    "chain": lambda given: _length(given, "drafts", {}, {}),
}
