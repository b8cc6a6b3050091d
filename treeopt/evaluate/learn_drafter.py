"""Learn a drafter, measure its trees, and recommend one, in one call."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from treeopt.calibrate.pipeline import CalibrationOptions, calibrate, job_of
from treeopt.calibrate.results import CalibrationRun
from treeopt.calibration import Calibration
from treeopt.decode.decoder import TreeDecoder
from treeopt.defaults import BLOCK, KINDS, LEARN_SIZES, NONE, ONE_NODE, STEP_SIZES
from treeopt.drafter import PLAN, Drafter
from treeopt.drafting.learn import Learning
from treeopt.errors import check_choice, check_counts, counted, memory_as_error
from treeopt.evaluate.profile import TimedStep, prefilled, timed_rule, timed_tokens
from treeopt.facts import Column, Fact, Part, Table, milliseconds, picked
from treeopt.models.base import DTYPES, Base
from treeopt.models.compatibility import heads_like
from treeopt.models.draft_files import in_dtype_of
from treeopt.models.draft_module import DraftModule, StateModule, draft_reads, kind_of, over_tokens
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_draft, as_heads
from treeopt.models.head_files import LoadedHeads
from treeopt.optimize.budget import fastest
from treeopt.optimize.build_report import TREES, reliability_text
from treeopt.optimize.chains import ChainPrediction, chain_parts, predict_chains, sampled_acceptance
from treeopt.optimize.per_step import build_policy
from treeopt.optimize.select_method import FOLDS
from treeopt.optimize.tree_builder import budget_of, build_tree
from treeopt.policy import Plan, TreePolicy
from treeopt.progress import Progress, silent
from treeopt.texts.encode import Text
from treeopt.texts.prompts import GivenPrompts, skipped_text
from treeopt.tree import Tree

ALL_TEXTS = "all"  # beside categories
_DEPTHS = (1, 2, 3, 4)  # of chains and static trees of a draft, beside trees of any depth: each level costs a forward
_FEWEST_ROUNDS, _MOST_ROUNDS = 5, 40  # of timed steps, beside the first, which is not counted
_SAMPLED = 16  # answers by which the acceptance rate under sampling is estimated
_SECONDS = 1.5  # of all timed steps together, where that takes a number of rounds in between


@dataclass(frozen=True)
class PlanFigures:
    """A tree or policy of a drafter and its figures."""

    plan: Plan
    tokens_per_step: float  # each text by a table without it; weights are fitted to all
    seconds: float  # of one step, the shortest of those that were timed
    speedup: float  # over autoregressive decoding in the same loop, dtype and forward, in tokens/s without prefill
    dtype: str  # of the model
    compiled: bool = False  # whether the forward was

    @property
    def nodes(self) -> int:
        """Its size, root counted."""
        return self.plan.nodes

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds

    @property
    def setting(self) -> str:
        return setting_of(self.dtype, compiled=self.compiled)

    @property
    def kind(self) -> str:
        """`static`, `dynamic`, or `none` for plain decoding."""
        return NONE if self.nodes == ONE_NODE else KINDS[isinstance(self.plan, TreePolicy)]


def setting_of(dtype: str, *, compiled: bool) -> str:
    return f"{dtype}, compiled" if compiled else dtype


def fastest_of(figures: Sequence[PlanFigures]) -> PlanFigures:
    """The plan and setting with the most tokens per second by `fastest`; figures of none are first in each setting."""
    best: list[PlanFigures] = []
    for setting in dict.fromkeys(one.setting for one in figures):
        none, *others = [one for one in figures if one.setting == setting]
        chosen = fastest([one.speedup for one in others])
        best.append(none if chosen is None else others[chosen])
    first, *others = best
    chosen = fastest([one.tokens_per_second / first.tokens_per_second for one in others])
    return first if chosen is None else others[chosen]


def plans_of(calibration: Calibration, sizes: Sequence[int], *, with_draft: bool) -> list[Plan]:
    """None, then of each size the best tree and a policy; no tree twice.

    With a draft, chains come before them, and trees of limited depths among them. Sizes are path tokens where per-step
    trees were traced by these.
    """
    by_paths = calibration.steps is not None and calibration.steps.path_accepted is not None
    lengths = [drafts for drafts in _DEPTHS if with_draft and drafts < max(sizes)]
    chains = [budget_of(1 + drafts, path_tokens=by_paths) for drafts in lengths]
    first = [build_tree(calibration, ONE_NODE), *(build_tree(calibration, **chain, top_k=1) for chain in chains)]
    plans: list[Plan] = [tree for number, tree in enumerate(first) if tree not in first[:number]]
    limits = [*(depth for depth in _DEPTHS if with_draft and depth < calibration.num_heads), None]
    for size in sorted({*sizes} - {ONE_NODE}):
        budget = budget_of(size, path_tokens=by_paths)
        for tree in (build_tree(calibration, **budget, max_depth=limit) for limit in limits):
            if tree not in plans:
                plans.append(tree)
        if calibration.steps is not None:
            step = max(one for one in STEP_SIZES if one <= size) if by_paths else size
            plans.append(build_policy(calibration, step, path_tokens=by_paths))
    return plans


def figures_of(plans: Sequence[Plan], seconds: Sequence[float], base: Base) -> tuple[PlanFigures, ...]:
    """The figures of plans, the first of them none, with the seconds of their steps on a base."""
    found = []
    for plan, one in zip(plans, seconds, strict=True):
        assert plan.expected is not None
        tau = getattr(plan.expected, "cross_validated", None) or plan.expected.replay  # not of texts too few to divide
        found.append(PlanFigures(plan, tau, one, tau * seconds[0] / one, base.dtype_name, base.compile))
    return tuple(found)


def timed(groups: Sequence[Sequence[TreeDecoder]], texts: Sequence[Text], progress: Progress) -> list[list[float]]:
    """Seconds of a step of each decoder, which all take turns at the end of the text of median length.

    The decoders of a group have one base and its `timed_rule`. A step takes the shortest of several rounds: what else
    runs on the machine can only lengthen it.
    """
    text = sorted(([*text.prompt, *text.answer] for text in texts), key=len)[len(texts) // 2]
    steps = [step for decoders in groups for step in _steps_after(text, decoders)]
    warm_up = sum(step.after_lead_in() for step in steps)
    rounds = min(max(_FEWEST_ROUNDS, int(_SECONDS / warm_up)), _MOST_ROUNDS)
    spent = np.empty((rounds, len(steps)))
    for row in range(rounds):
        spent[row] = [step.after_lead_in() for step in steps]
        progress(row + 1, rounds, "timed steps")
    shortest = iter(spent.min(0).tolist())
    return [[next(shortest) for _ in decoders] for decoders in groups]


def _steps_after(text: Sequence[int], decoders: Sequence[TreeDecoder]) -> list[TimedStep]:
    """The steps of the decoders of one base after a text, or after its last tokens that leave room for a step."""
    base = decoders[0].base
    more = timed_tokens(base, max(decoder.trees.depth for decoder in decoders))
    prompts = torch.tensor([text[-max(1, base.context - more) :]], device=base.device)
    pairs = zip(decoders, prefilled(decoders, prompts, more), strict=True)
    return [TimedStep(decoder, cached, prompts) for decoder, cached in pairs]


@dataclass(frozen=True)
class LearnedDrafter:
    """The result of `learn_drafter`.

    Args:
        drafter: with the recommended plan.
        figures: in each dtype: of none, then of each size and kind.
        run: the calibration, each text traced by a drafter that was learned without it, and the folds' drafters.
        chains: with a draft model, what Leviathan's formulas say of chains, and replay; its cost ratio is measured.
        sampled_alpha: with a draft model, its acceptance rate under sampling at temperature 1, along some answers.
        outside: with a module whose vocabulary is a part of the base's, the share of the answers' tokens that it does
            not have, of all texts (`ALL_TEXTS`) and by category: no level drafts them without an n-gram table.
    """

    drafter: Drafter
    figures: tuple[PlanFigures, ...]
    run: CalibrationRun
    chains: ChainPrediction | None = None
    sampled_alpha: float | None = None
    outside: Mapping[str, float] = field(default_factory=dict)

    @property
    def recommended(self) -> PlanFigures:
        """The figures of the plan and dtype with the most tokens per second; of none where no drafting pays."""
        return fastest_of(self.figures)


_PLANS = (
    Column("trees", lambda one: TREES.get(one.kind, one.kind)),
    Column(None, "dtype"),
    Column(None, "compiled"),
    Column(None, "kind"),
    Column("nodes", "nodes"),
    Column("depth", "plan.depth", key=""),
    Column("tokens/step", "tokens_per_step", ".3f"),
    Column("step", "seconds", milliseconds),
    Column("tokens/s", "tokens_per_second", ".1f"),
    Column("speedup", "speedup", ".2f"),
)


def learned_parts(found: LearnedDrafter) -> Iterator[Part]:
    """What was learned from, the figures of all plans, the recommended one, and the chains of a draft model."""
    assert found.run.learned is not None
    yield from found.run.learned.lines()
    yield reliability_text(found.run.calibration)
    yield from _plan_parts(found)
    if found.chains is not None:
        yield from chain_parts(found.chains, found.drafter.name, found.sampled_alpha)
        yield "timed chains are among the trees above: those of g drafts have g + 1 nodes and depth g"
        chains = picked(found.chains, "alpha", "best_drafts", "best_replayed_drafts", "chains")
        more = {"cost_ratio": found.chains.cost, "alpha_sampled": found.sampled_alpha}
        yield Fact(None, {**chains, **more}, key="chains")
    if found.outside:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in found.outside.items())
        yield f"tokens of the answers outside the draft vocabulary, which only an n-gram table drafts: {shares}"
        yield Fact(None, dict(found.outside), key="outside_draft_vocabulary")
    yield skipped_text(found.run.skipped)
    yield Fact(None, found.run.skipped, key="skipped_prompts")


def _plan_parts(found: LearnedDrafter) -> Iterator[Part]:
    several = len({one.setting for one in found.figures}) > 1
    best = found.recommended
    yield Table((Column("setting", "setting", key=""), *_PLANS) if several else _PLANS, found.figures, key="sizes")
    yield (
        "tokens/step: all tokens / all steps, each text by a table without it; step: the shortest here, batch 1; "
        f"speedup: over autoregressive decoding in the same loop{' and setting' if several else ''}, without prefill"
    )
    if any(isinstance(one.plan, TreePolicy) and one.plan.path_tokens for one in found.figures):
        yield "per step: the nodes are path tokens, leaves x (depth + 1), as the model verifies paths as a batch"
    if several:
        plain = max((one for one in found.figures if one.kind == NONE), key=lambda one: one.tokens_per_second)
        yield f"fastest without a drafter: {plain.setting}, {plain.tokens_per_second:.1f} tokens/s"
    if len({one.dtype for one in found.figures}) > 1:
        yield "texts in half precision can differ from those in float32; measure it: treeopt validate --dtype D"
    shown = "none: no tree is faster than plain decoding on this machine"
    if best.kind != NONE:
        shown = f"{TREES[best.kind]}, {counted(best.nodes, 'node')}, depth {best.plan.depth}"
    yield f"recommended: {shown}" + (f", in {best.setting}" if several else "")
    yield Fact(None, Table(_PLANS, [best]).value[0], key="recommended")


def learned_warnings(found: LearnedDrafter) -> list[str]:
    """Warnings of too few positions, and of too few texts."""
    calibration, learned = found.run.calibration, found.run.learned
    assert learned is not None
    few = f"warning: tokens/step of {counted(calibration.distinct, 'different text')} are unreliable"
    return [*learned.warnings(calibration.positions), *([few] if calibration.distinct < FOLDS else [])]


def learn_drafter(
    model: GivenModel,
    prompts: GivenPrompts,
    heads: GivenHeads | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    learning: Learning | None = None,
    sizes: Sequence[int] = LEARN_SIZES,
    progress: Progress = silent,
    **options: Any,
) -> LearnedDrafter:
    """Learn a drafter from the model's own text; recommend a tree or policy for it.

    The recommended plan is the one with the most tokens per second: cross-validated tokens per step over the seconds of
    a step; it is `Tree(())`, plain decoding, where no other is faster. With a draft model, which runs once for each
    level, chains and static trees of limited depth are candidates too. The steps are timed on this machine at batch 1,
    at the end of the text of median length, all in turn.

    Args:
        model: the base model: a causal language model of transformers, a folder or hub name, or a `Base`.
        prompts: as for `run_calibration`.
        heads: its heads, as for `run_calibration`; None for a drafter without heads.
        tokenizer: of the model; None takes the one beside the model's weights.
        learning: how the drafter is learned; None for the defaults.
        sizes: numbers of nodes, root counted, at most 254. Beside plain decoding, a static tree and per-step trees of
            each size are measured. A tree is smaller where more nodes accept nothing more.
        progress: called after each batch, and after each round of timed steps.
        options: fields of `CalibrationOptions`; `dtypes`, further dtypes in which the same steps are timed, by copies
            of the model and of a draft; and `compile`, to time them with compiled forwards as well, each of which takes
            up to a minute to compile. The drafter's `timed_dtype` and `timed_compiled` are those of the recommended
            plan; a draft is not compiled.

    Raises:
        TreeoptError: as `run_calibration`, `build_tree` and `TreeDecoder`.
        ValueError: as `run_calibration`; where there is no size, or one is out of range.

    Examples:
        >>> import treeopt
        >>> prompts = ["import os", "def main():"]
        >>> found = treeopt.learn_drafter("pocket", prompts, learning=treeopt.Learning(200), max_new_tokens=12)
        >>> found.drafter.num_heads, found.drafter.plan.drafter == found.drafter.id
        (0, True)
    """
    _check_sizes(sizes)
    base, loaded = as_base(model, tokenizer), None if heads is None else as_heads(heads)
    found = divided_learn(base, loaded, prompts, learning or Learning(), sizes, progress, options)
    assert found is not None, "only commands divide a run among processes"
    return found


def divided_learn(
    base: Base,
    loaded: LoadedHeads | None,
    prompts: GivenPrompts,
    learning: Learning,
    sizes: Sequence[int],
    progress: Progress,
    options: dict[str, Any],
) -> LearnedDrafter | None:
    """What `learn_drafter` does; None in a process that follows another."""
    dtypes: Sequence[str] = options.pop("dtypes", ())
    with_compiled = options.pop("compile", False)
    for dtype in dtypes:
        check_choice("dtypes", dtype, DTYPES)
    draft = options["draft"] = as_draft(options.get("draft"), base)
    chosen = CalibrationOptions(**options, steps=True)
    run = calibrate(job_of(base, loaded, prompts, chosen, learning=learning, progress=progress))
    if run is None:
        return None
    assert run.learned is not None
    plans = plans_of(run.calibration, sizes, with_draft=draft is not None)
    with memory_as_error("smaller sizes, or fewer dtypes"):
        bases = [base, *(copy for copy in (base.in_dtype(dtype) for dtype in dtypes) if copy is not base)]
        drafts = [draft if draft is None or one is base else in_dtype_of(one, draft) for one in bases]
        if with_compiled:
            bases, drafts = [*bases, *(dataclasses.replace(one, compile=True) for one in bases)], drafts * 2
        pairs = zip(bases, drafts, strict=True)
        groups = [_decoders(one, loaded, plans, run.learned.drafter, beside) for one, beside in pairs]
        by_level = draft if draft is not None and kind_of(draft.model) != BLOCK else None
        alone = [[TreeDecoder(by_level, None, Tree(()), acceptance=timed_rule(by_level))]] if by_level else []
        seconds = timed([*groups, *alone], run.texts, progress)
    figures = [
        one for group, spent in zip(groups, seconds, strict=False) for one in figures_of(plans, spent, group[0].base)
    ]
    chains = None if by_level is None else predict_chains(run.calibration, seconds[-1][0] / seconds[0][0])
    alpha = None if by_level is None else _sampled_alpha(base, by_level, run.texts[:_SAMPLED])
    best = fastest_of(figures)
    timing = {"dtype": best.dtype, "threads": torch.get_num_threads(), **({"compiled": True} if best.compiled else {})}
    source = {**run.learned.drafter.source, PLAN: timing}
    drafter = dataclasses.replace(run.learned.drafter, plan=best.plan, source=source)
    return LearnedDrafter(drafter, tuple(figures), run, chains, alpha, outside_shares(draft, run.texts))


def _decoders(
    base: Base, loaded: LoadedHeads | None, plans: Sequence[Plan], drafter: Drafter, draft: Base | None
) -> list[TreeDecoder]:
    used = None if loaded is None else heads_like(base, loaded.heads)
    options: dict[str, Any] = {"drafter": drafter, "draft": draft, "acceptance": timed_rule(base), "probe": False}
    return [TreeDecoder(base, used, plan, **options) for plan in plans]


def _check_sizes(sizes: Sequence[int]) -> None:
    if not sizes:
        raise ValueError("sizes is empty")
    check_counts(**{f"sizes[{i}]": size for i, size in enumerate(sizes)})
    if max(sizes) > STEP_SIZES[-1]:
        raise ValueError(f"sizes {list(sizes)}: at most {STEP_SIZES[-1]} nodes")


def outside_shares(draft: Base | None, texts: Sequence[Text]) -> dict[str, float]:
    """The share of the answers' tokens that a module's vocabulary lacks, of all texts and by category; else empty."""
    tokens = draft.model.token_map if draft is not None and isinstance(draft.model, StateModule) else None
    if draft is None or tokens is None or len(tokens) == draft.model.base_vocab_size:
        return {}
    known = set(tokens.tolist())
    lacking: dict[str, list[bool]] = {ALL_TEXTS: []}
    for text in texts:
        for name in {ALL_TEXTS, text.category or ALL_TEXTS}:
            lacking.setdefault(name, []).extend(token not in known for token in text.answer)
    return {name: sum(part) / max(1, len(part)) for name, part in lacking.items()}


@torch.inference_mode()
def _sampled_alpha(base: Base, draft: Base, texts: Sequence[Text]) -> float:
    """The mean of sum_x min(p, q) over the tokens of the answers, p of the base and q of the draft model."""
    shares, tokens, module = 0.0, 0, draft.model if isinstance(draft.model, DraftModule) else None
    for text in texts:
        ids = torch.tensor([[*text.prompt, *text.answer[:-1]]], device=base.device)
        inside = ids if module else ids.clamp(max=draft.vocab_size - 1)[:, -draft.context :].to(draft.device)
        keep = min(len(text.answer), inside.shape[1] - (module is not None))
        if not keep:
            continue
        p, states = base.reading(draft_reads(draft.model)).forward(ids, use_cache=False, logits_to_keep=keep)
        rows = inside[:, 1:] if module else inside
        hidden = {"hidden": module.states(states[:, :-1])} if module else {}
        q = draft.forward(rows, use_cache=False, logits_to_keep=keep, **hidden)[0][0].float()
        q = over_tokens(q, draft.model, base.vocab_size).softmax(-1)
        shares += keep * sampled_acceptance(p[0].float().softmax(-1).numpy(force=True), q.numpy(force=True))
        tokens += keep
    return shares / max(1, tokens)
