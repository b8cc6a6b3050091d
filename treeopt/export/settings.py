"""Settings of engines that take no fixed tree, by their own names (docs/engines/index.md has versions and sources).

The numbers come from replay of what the engine will draft (`treeopt.optimize.chains`) or from what an engine counted
(`treeopt.optimize.counters`), and from a latency profile. A setting that follows from neither is named with the reason,
and not guessed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treeopt.calibration import Calibration
from treeopt.defaults import KINDS
from treeopt.engines import (
    BLOCK_DRAFT,
    EAGLE_DRAFT,
    HEADS_DRAFT,
    LOOKUP_DRAFT,
    MODEL_DRAFT,
    MTP_DRAFT,
    SETTINGS,
    EngineMethod,
)
from treeopt.errors import Code, TreeoptError, check_choice, check_counts, counted
from treeopt.export.lint import DraftConfig, drafter_name, engine_method
from treeopt.facts import Fact, for_programs, picked
from treeopt.latency import LatencyProfile
from treeopt.optimize.budget import Budget, check_priced
from treeopt.optimize.chains import (
    DynamicTree,
    MeasuredAcceptance,
    acceptance_rates,
    chain_doubts,
    chain_tokens,
    chains_by_batch,
    choose_dynamic_tree,
    replay_chain,
)
from treeopt.optimize.counters import CounterEstimates, estimate_chains
from treeopt.optimize.replay import Replay

EXACT, ESTIMATE, OTHER_DRAFTER, COUNTED = "exact", "estimate", "other drafter", "measured"
_NO_LENGTH = "the fastest length needs seconds per step: --profile, or give the length with --chain-length"
_NO_SIZE = "the fastest size needs seconds per step: --profile, or give the size with --nodes"
_NO_GAIN = "no length is faster than decoding without drafts on this machine"
_TOP_K = "a top-k above 1 needs page size 1, or the attention backend flashinfer, fa3 or triton, and not trtllm_mha"
_SCHEDULE = "draft_len_schedule begins with its greatest length, so none is above that of the smallest batch"
_NAMES = {
    HEADS_DRAFT: "Medusa heads",
    MODEL_DRAFT: "a draft model",
    EAGLE_DRAFT: "an EAGLE head",
    MTP_DRAFT: "an MTP module",
    BLOCK_DRAFT: "a block drafter",
    LOOKUP_DRAFT: "n-grams of its own",
}
_TABLE = "num_speculative_tokens_per_batch_size"  # of vLLM

Lengths = dict[int, int]  # batch -> drafts


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one engine with the steps that replay promises."""

    settings: dict[str, Any]  # values by the engine's names; empty where none could be derived
    replay: Replay | None = None  # the promised steps; None without settings
    # the figures at each measured batch; empty without a profile
    budgets: Mapping[int, Budget] = field(default_factory=dict)
    underived: dict[str, str] = field(default_factory=dict)  # reasons, by setting
    notes: tuple[str, ...] = ()  # what a user must know
    # the smallest measured batch with drafts, which the promise is of; None where the length was given
    batch: int | None = None
    # `exact` where the replay is of the engine's own drafts, `estimate` of likely ones, `other drafter` where the
    # engine does not have that of the calibration; of counters `measured` of this very chain, or `estimate`
    bound: str = EXACT
    chain: bool = True  # whether the engine drafts a chain, not a tree
    lines: bool = False  # whether the settings are options of a command line; otherwise they are JSON
    warning: str = ""  # that the engine does not have the drafter of the calibration; empty where it has
    engine: str = ""  # one of `treeopt.engines.SETTINGS`
    chains: tuple[float, ...] = ()  # tokens per step of chains of 0, 1, 2, ... drafts
    # the chains that an engine's counters give, in place of a replay; None with a calibration
    estimates: CounterEstimates | None = None
    # share of the steps that accept d drafts or more, d = 1, 2, ..., of the chain of the settings; empty where it is
    # not known
    rates: tuple[float, ...] = ()
    drafts: int | None = None  # the length of the chain, 0 for none; None without settings, or of a tree

    @property
    def tokens_per_step(self) -> float | None:
        """Of the settings, by replay or by the engine's counters; None without settings."""
        if self.estimates is not None:
            return None if self.drafts is None else self.estimates.tokens[self.drafts]
        return None if self.replay is None else self.replay.tokens_per_step

    def report(self) -> Iterator[Fact]:
        """Who reads the settings, and the steps that replay promises."""
        yield Fact("read by", SETTINGS[self.engine].versions, key="versions")
        promise = f"tokens per step ({self.bound}{'' if self.batch is None else f', batch {self.batch}'})"
        tokens, source = self.tokens_per_step, "replay" if self.estimates is None else "counters"
        yield Fact(None if tokens is None else source, tokens, ".4f", promise, "tokens_per_step")
        for batch, budget in self.budgets.items():
            figures = f"{budget.tokens_per_step:.4f} tokens per step, speedup {budget.speedup:.3f}"
            yield Fact(f"batch {batch}", f"{budget.nodes - 1} drafts: {figures}")
        for note in self.notes:
            yield Fact("note", note)
        batches = [
            {"batch": batch, "drafts": budget.nodes - 1, **picked(budget, "tokens_per_step", "speedup")}
            for batch, budget in self.budgets.items()
        ]
        own = {"to": self.engine, **picked(self, "settings", "batch", "bound", "notes"), "batches": batches}
        steps = {"chain_tokens_per_step": self.chains, "acceptance_rates": self.rates}
        yield from for_programs({**own, **steps, "not_derived": self.underived})

    @property
    def synthetic(self) -> EngineSettings:
        """The same settings with these acceptance rates in place of real ones, to time the engine before training.

        Raises:
            TreeoptError: E230 where the rates are not known, E105 where the engine has no such setting.
        """
        if self.engine not in SYNTHETIC:
            what = f"{self.engine} has no synthetic acceptance"
            raise TreeoptError(Code.TREE_NOT_EXPORTABLE, what, fix=f"--for {' or '.join(SYNTHETIC)}")
        if not self.rates:
            what = "the acceptance rates of the chain are not known"
            fix = "--chain-length or --profile, and --calibration or counters of a chain of that length"
            why = "the engine accepts drafts at these rates in place of real ones"
            raise TreeoptError(Code.PROFILE_INVALID, what, why=why, fix=fix)
        kept = {key: value for key, value in self.settings.items() if key != _TABLE}
        kept |= {"num_speculative_tokens": len(self.rates)} if self.engine == "vllm" else {}
        kept |= SYNTHETIC[self.engine]([round(rate, 4) for rate in self.rates])
        return dataclasses.replace(self, settings=kept)

    @property
    def content(self) -> str:
        """The settings as the engine takes them: JSON, or options of its command line; empty without settings."""
        if not self.settings or self.lines:
            return " ".join(f"{name} {value}" for name, value in self.settings.items())
        return json.dumps(self.settings)


@dataclass(frozen=True)
class _EngineInput:
    """The input of all engines, as `engine_settings` takes it."""

    calibration: Calibration | None  # None where the figures are an engine's own
    profile: LatencyProfile | None
    drafts: int | None
    nodes: int | None
    chains: tuple[float, ...]
    method: str  # one of the engine's; empty where it is not known
    known: EngineMethod
    draft: DraftConfig | None

    @property
    def several(self) -> bool:
        """Whether several batches were measured."""
        return self.profile is not None and len(self.profile.batches) > 1


def engine_settings(
    engine: str,
    calibration: Calibration | None,
    profile: LatencyProfile | None = None,
    *,
    drafts: int | None = None,
    nodes: int | None = None,
    measured: MeasuredAcceptance | None = None,
    method: str | None = None,
    draft: DraftConfig | None = None,
) -> EngineSettings:
    """The settings of an engine for the drafter of a calibration, or for the one that it ran itself.

    Args:
        engine: one of `treeopt.engines.SETTINGS`.
        calibration: traces of the drafter that the engine will run; None where `measured` is given.
        profile: seconds per step of that drafter on the machine that serves; without it `drafts` or `nodes` is needed.
        drafts: the length of the chain; None is the fastest.
        nodes: the size of the dynamic tree, root counted; None is the fastest.
        measured: in place of a calibration, the accepted drafts that an engine counted with a chain of K drafts.
            Shorter chains are estimated (`treeopt.optimize.counters`); longer ones are not.
        draft: the config of the drafter that is served, whose MTP modules limit the lengths of vLLM's `mtp`.
        method: the engine's name of its drafter, one of `SETTINGS[engine].methods`; None is the one of the
            calibration's drafter, where there is one.

    Raises:
        TreeoptError: E220 and E223 as in replay, E230 where the profile lacks what is needed, E303 where the
            calibration holds no text, E103 where a number is out of range, E203 where the engine gave a mean alone.
        ValueError: where no engine has the name, it takes no such number, or the number is not whole.
    """
    check_choice("engine", engine, SETTINGS)
    known = SETTINGS[engine]
    if method is not None:
        check_choice("method", method, known.methods)
    for name, value in (("drafts", drafts), ("nodes", nodes)):
        if value is not None:
            check_counts(**{name: value})
    if nodes is not None and (refused := no_tree(engine, method, calibration is not None, drafts is not None)):
        raise ValueError(refused)
    if calibration is not None:
        if not calibration.positions:
            raise TreeoptError(Code.PROMPTS_EMPTY, "the calibration holds no text")
        chains = tuple(chain_tokens(calibration).tolist())
        name = drafter_name(calibration.provenance.drafter_id, calibration.provenance.drafter)
        if profile is not None and (drafts is not None or no_tree(engine, method, True, False)):
            check_priced(profile, calibration, profile.kind or KINDS[0])
    elif measured is not None:
        estimates, name = estimate_chains(measured), ""
        chains = estimates.tokens
    else:
        raise ValueError("settings need a calibration, or what an engine measured")
    if drafts is not None and drafts >= len(chains):
        raise _too_long(drafts, len(chains) - 1, calibration)
    method = method or engine_method(known, name, calibration)
    how = known.methods.get(method, EngineMethod("", by_batch=True, model=False))
    given = _EngineInput(calibration, profile, drafts, nodes, chains, method, how, draft if method == "mtp" else None)
    found = dataclasses.replace(SETTINGS_OF[engine](given), engine=engine, chains=chains)
    if found.settings and known.methods and not method:
        why = "counters do not name the drafter" if calibration is None else "the engine does not have the drafter"
        found.underived[METHOD_KEYS[engine][0]] = f"{why}: --method with one of {', '.join(known.methods)}"
    elif found.settings and how.model:
        found.underived[METHOD_KEYS[engine][1]] = f"the path of {_NAMES[how.drafts]}"
    return _of_counters(found, estimates) if calibration is None else _of_drafter(found, calibration, name, method)


def no_tree(engine: str, method: str | None, traced: bool, chain: bool) -> str:
    """Why an engine takes no size of a tree; empty where it does.

    `traced` is whether there is a calibration, and `chain` whether the length of a chain was given.
    """
    known = SETTINGS[engine]
    if not known.trees or (method and known.methods[method].drafts not in (*known.trees, MTP_DRAFT)):
        return f"{f'{engine} {method}' if method and known.trees else engine} takes no nodes"
    return "" if traced and not chain else "the size of a tree needs a calibration, and no length of a chain"


def _of_drafter(found: EngineSettings, calibration: Calibration, name: str, method: str) -> EngineSettings:
    """Settings by replay, with a warning where the engine does not have the drafter."""
    methods = SETTINGS[found.engine].methods
    if found.chain and found.drafts:
        found = dataclasses.replace(found, rates=acceptance_rates(replay_chain(calibration, found.drafts).histogram))
    drafters = {methods[method].drafts} if method else {one.drafts: None for one in methods.values()}
    if not methods or name in drafters:
        return found
    has = " or ".join(_NAMES[drafter] for drafter in drafters)
    of = f"the drafter {name}" if name else "a drafter whose file is not found"
    warning = f"the calibration is of {of}, and the engine drafts with {has}: the figures do not hold there"
    return dataclasses.replace(found, bound=OTHER_DRAFTER, warning=warning)


def _of_counters(found: EngineSettings, estimates: CounterEstimates) -> EngineSettings:
    """Settings by an engine's counts, with a note where longer chains may be faster."""
    notes = list(found.notes)
    if estimates.too_short(found.drafts if found.budgets else None):
        share = f"{estimates.last_rate:.1%} of the steps accepted all {counted(estimates.longest, 'draft')}"
        notes.append(f"a longer chain may be faster: {share}; measure with more drafts")
    bound, rates = (COUNTED, estimates.rates) if found.drafts == estimates.longest else (ESTIMATE, ())
    return dataclasses.replace(found, estimates=estimates, bound=bound, notes=tuple(notes), rates=rates)


def _too_long(drafts: int, longest: int, calibration: Calibration | None) -> TreeoptError:
    what, why = f"a chain of {drafts} drafts cannot be replayed", "chains have 16 drafts at most"
    if calibration is None:
        what, why = f"a chain of {drafts} drafts cannot be estimated", f"the engine ran {counted(longest, 'draft')}"
    elif calibration.num_heads == longest:
        why = f"the calibration has {counted(longest, 'level')}"
    fix = f"--chain-length {longest} or less" if longest else "traces or measured steps with drafts"
    return TreeoptError(Code.TREE_TOO_DEEP, what, at=f"--chain-length {drafts}", why=why, fix=fix)


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


def _chain(
    given: _EngineInput,
    key: str,
    make: Callable[[Lengths], dict[str, Any]],
    *notes: str,
    by_batch: bool = False,
    allows: Callable[[int], bool] = lambda drafts: True,
) -> EngineSettings:
    """The settings of an engine that takes a length, which it calls `key`.

    `make` gets the length at each batch, of which at least one is positive; at batch 1 where there is no profile. An
    engine that takes a length for each batch says so by `by_batch`; others get that of the smallest measured batch.
    """
    profile = given.profile
    if profile is None and given.drafts is None:
        return EngineSettings({}, underived={key: _NO_LENGTH})
    notes += tuple(() if profile is None else chain_doubts(profile))
    budgets = {} if profile is None else chains_by_batch(np.array(given.chains), profile, given.drafts, allows=allows)
    if not by_batch:
        budgets = dict(sorted(budgets.items())[:1])
    lengths = {batch: budget.nodes - 1 for batch, budget in budgets.items()} or {1: given.drafts or 0}
    drafting = {batch: length for batch, length in lengths.items() if length}
    if not drafting:
        return EngineSettings({}, budgets=budgets, underived={key: _NO_GAIN}, drafts=0)
    batch = min(drafting)
    replay = None if given.calibration is None else replay_chain(given.calibration, drafting[batch])
    settings, smallest = make(lengths), batch if budgets else None
    return EngineSettings(settings, replay, budgets, notes=notes, batch=smallest, drafts=drafting[batch])


def _vllm(given: _EngineInput) -> EngineSettings:
    with_table = given.known.by_batch and given.several

    def make(lengths: Lengths) -> dict[str, Any]:
        made: dict[str, Any] = {"method": given.method} if given.method else {}
        made |= {"num_speculative_tokens": max(lengths.values())}
        return made | ({_TABLE: _ranges(lengths)} if with_table else {})

    notes = ["beyond the largest measured batch vLLM keeps the last length of the table"] if with_table else []
    if given.method == "medusa":
        notes.append("vLLM 0.33 has no Medusa heads: 0.32 is the last version with them")
    config = given.draft or DraftConfig("")
    if given.method == "mtp" and not given.draft:
        notes.append("above n_predict of the checkpoint, num_speculative_tokens must be a multiple of it: --draft")
    config.check(given.drafts)
    if given.method == "suffix":
        notes.append("needs arctic-inference 0.1.1; the number is a maximum")
    found = _chain(given, "num_speculative_tokens", make, *notes, by_batch=given.known.by_batch, allows=config.allows)
    if found.settings and not given.known.by_batch:
        found.underived[_TABLE] = f"vLLM drafts one length for all batches with method {given.method}"
    elif found.settings and not given.several:
        found.underived[_TABLE] = "the profile has one batch, or there is none"
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
    names = ("--speculative-num-steps", "--speculative-eagle-topk", key)
    algorithm = {"--speculative-algorithm": given.method} if given.method else {}
    if given.calibration is None or given.drafts is not None or no_tree("sglang", given.method, True, False):
        return _sglang_chain(given, algorithm, names)
    if given.nodes is None and given.profile is None:
        return EngineSettings({}, underived={key: _NO_SIZE}, chain=False)
    choice = choose_dynamic_tree(given.calibration, given.profile, given.nodes)
    batch = given.profile.batches[0] if given.profile is not None else None
    budgets = {} if batch is None or choice.budget is None else {batch: choice.budget}
    if choice.shape is None:
        return EngineSettings({}, budgets=budgets, underived={key: _NO_GAIN}, chain=False)
    exact = choice.shape.replays_exactly(given.calibration.num_heads)
    notes = () if exact else ("the traces do not say which nodes the engine expands (docs/develop/formats.md)",)
    return EngineSettings(
        {**algorithm, **dict(zip(names, dataclasses.astuple(choice.shape), strict=True))},
        choice.replay,
        budgets,
        notes=notes if choice.shape.top_k == 1 else (*notes, _TOP_K),
        batch=batch,
        bound=EXACT if exact else ESTIMATE,
        chain=False,
        lines=True,
    )


def _sglang_chain(given: _EngineInput, algorithm: dict[str, str], names: tuple[str, ...]) -> EngineSettings:
    """A chain is a tree with a top-k of 1; its algorithms name it in their own ways."""
    by_batch = given.known.by_batch and given.method != "" and given.several
    adaptive: list[str] = []

    def make(lengths: Lengths) -> dict[str, Any]:
        drafts = next(length for _, length in sorted(lengths.items()) if length)
        if by_batch:
            slots = {str(first): {"candidate_steps": [length]} for first, _, length in _ranges(lengths)}
            adaptive.append(f"by batch: --speculative-adaptive --speculative-adaptive-config FILE: {json.dumps(slots)}")
        if given.method == "NGRAM":
            return {**algorithm, names[2]: drafts + 1, "--speculative-ngram-max-bfs-breadth": 1}
        if given.method == "DSPARK":
            return {**algorithm, "--speculative-dspark-block-size": drafts}
        if given.method == "DFLASH":
            return {**algorithm, names[2]: drafts + 1}
        shape = DynamicTree(drafts, 1, drafts + 1)
        return {**algorithm, **dict(zip(names, dataclasses.astuple(shape), strict=True))}

    if given.calibration is None:
        adaptive.append("the counts must be of chains, with a top-k of 1")
    found = _chain(given, names[2], make, by_batch=by_batch)
    return dataclasses.replace(found, lines=True, notes=(*found.notes, *adaptive))


def _trtllm(given: _EngineInput) -> EngineSettings:
    def make(lengths: Lengths) -> dict[str, Any]:
        longest = lengths[min(lengths)]  # the greatest by rule
        ranges = _ranges(lengths)
        while ranges and not ranges[-1][2]:
            ranges.pop()
        schedule = {last: length for _, last, length in ranges}
        made: dict[str, Any] = {"decoding_type": given.method} if given.method else {}
        return made | {"max_draft_len": longest} | ({"draft_len_schedule": schedule} if with_schedule else {})

    with_schedule = given.known.by_batch and given.several
    notes = ["beyond the last batch of the schedule TensorRT-LLM does not draft", _SCHEDULE] if with_schedule else []
    chain = functools.partial(_chain, given, "max_draft_len", make, *notes, by_batch=given.known.by_batch)
    found = chain()
    if found.settings and not found.settings["max_draft_len"]:
        lost = {"max_draft_len": f"{_SCHEDULE}, and drafts do not pay there"}
        found = EngineSettings({}, budgets=found.budgets, underived=lost)
    elif found.settings:  # no length may exceed that of the smallest batch
        found = chain(allows=lambda drafts: drafts <= found.settings["max_draft_len"])
    return found


def _llamacpp(given: _EngineInput) -> EngineSettings:
    spec = {"--spec-type": given.method} if given.method else {}
    if given.known.drafts == LOOKUP_DRAFT:
        mod = given.method == "ngram-mod"
        key = "--spec-ngram-mod-n-max" if mod else f"--spec-{given.method}-size-m"
        return _length(given, key, spec, {"--spec-ngram-mod-n-min": 0} if mod else {}, lines=True)
    fixed = {"--spec-draft-n-min": 0, "--spec-draft-p-min": 0.0}
    found = _length(given, "--spec-draft-n-max", spec, fixed, lines=True)
    if found.settings:
        why = "the engine's default, 0: it is compared with probabilities that are not traced"
        found.underived["--spec-draft-p-min"] = why
    return found


def _transformers(given: _EngineInput) -> EngineSettings:
    if given.known.drafts == LOOKUP_DRAFT:
        return _length(given, "prompt_lookup_num_tokens", {}, {}, "an argument of generate; batch 1 only")
    note = "set them on assistant_model.generation_config, which assisted generation reads; batch 1 only"
    fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    return _length(given, "num_assistant_tokens", {}, fixed, note)


def _length(
    given: _EngineInput, key: str, before: Mapping[str, Any], after: Mapping[str, Any], *notes: str, lines: bool = False
) -> EngineSettings:
    """The settings of an engine that takes one length, that of the smallest batch, between others that are fixed."""
    found = _chain(given, key, lambda lengths: {**before, key: lengths[min(lengths)], **after}, *notes)
    return dataclasses.replace(found, lines=lines)


# Acceptance rates [D], each the share of the steps that accept d drafts or more -> the settings that take them: vLLM
# 0.33 (vllm/config/speculative.py), llama.cpp since its pull request 27711.
SYNTHETIC: dict[str, Callable[[list[float]], dict[str, Any]]] = {
    "vllm": lambda rates: {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates},
    "llamacpp": lambda rates: {"--spec-synth-rates": ",".join(map(str, rates))},
}
METHOD_KEYS = {  # the settings of the method, and of the drafter's path
    "vllm": ("method", "model"),
    "sglang": ("--speculative-algorithm", "--speculative-draft-model-path"),
    "trtllm": ("decoding_type", "speculative_model"),
    "llamacpp": ("--spec-type", "--spec-draft-model"),
    "transformers": ("assistant_model", "assistant_model"),
}
SETTINGS_OF: dict[str, Callable[[_EngineInput], EngineSettings]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "llamacpp": _llamacpp,
    "transformers": _transformers,
    "chain": lambda given: _length(given, "drafts", {}, {}),
}
