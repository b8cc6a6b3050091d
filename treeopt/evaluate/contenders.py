"""The methods of a comparison, ready to decode: each learns what it needs, and says why where it cannot run."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from treeopt.calibrate.pipeline import CalibrationRun, run_calibration
from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Rule
from treeopt.drafter import HEADS, HEADS_NGRAM, KINDS, MODEL, MODEL_NGRAM, NGRAM, Drafter
from treeopt.drafting.learn import Learning
from treeopt.drafting.token_recycling import NAME as RECYCLING
from treeopt.drafting.token_recycling import TokenRecycling
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.baselines import (
    ASSISTED,
    AUTOREGRESSIVE,
    GENERATE,
    LOOKUP,
    LOOKUP_TOKENS,
    Baseline,
    with_decoder,
    with_generate,
    with_memory,
)
from treeopt.evaluate.comparison import FASTEST, MC_SIM, MEDUSA, CompareOptions
from treeopt.evaluate.plan_figures import figures_of, plans_of, timed
from treeopt.evaluate.recycling import recycle_texts
from treeopt.evaluate.timed_step import AcceptDeepest
from treeopt.files.policies import plan_id
from treeopt.files.trees import load_tree
from treeopt.latency import ONE_NODE
from treeopt.models.base import Base
from treeopt.models.fit import heads_like
from treeopt.models.heads import MedusaHeads
from treeopt.models.layouts import LoadedHeads
from treeopt.optimize.per_step import build_policy
from treeopt.optimize.tree_builder import build_tree
from treeopt.policy import Plan, TreePolicy
from treeopt.progress import Progress
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import PromptSet
from treeopt.tree import Tree

PUBLISHED_RECYCLING = "token_recycling"  # among the bundled trees
_KIND_NAMES = dict(zip(KINDS, ("static", "per step"), strict=True))
_UNFIT = (Code.TREE_TOO_DEEP, Code.RANK_TOO_LARGE, Code.NO_TREES)  # of a tree or draft model that cannot run here

NO_HEADS = "no heads were given (--heads)"
NO_DRAFT = "no draft model was given (--draft)"


@dataclass(frozen=True)
class Contender:
    """A method that can run.

    Args:
        name: of the method.
        nodes: tokens that it verifies in a step at most.
        baseline: how it decodes.
        content: id of what it has learned; empty where it learns nothing.
    """

    name: str
    nodes: int
    baseline: Baseline
    content: str = ""


@dataclass(frozen=True)
class LeftOut:
    """A method that cannot run, and why."""

    name: str
    why: str


Entry = Contender | LeftOut


@dataclass(frozen=True)
class Job:
    """What methods are made from.

    Args:
        base: the base model.
        loaded: its heads; None where there are none.
        draft: its draft model; None where there is none.
        prompts: to learn from.
        options: of the comparison.
        progress: called while methods learn.
        longest: tokens that a judged text may have; 0 if unknown.
    """

    base: Base
    loaded: LoadedHeads | None
    draft: Base | None
    prompts: PromptSet
    options: CompareOptions
    progress: Progress
    longest: int = 0

    @functools.cached_property
    def heads(self) -> MedusaHeads | None:
        """The heads in the base's dtype."""
        return None if self.loaded is None else heads_like(self.base, self.loaded.heads)

    @functools.cached_property
    def answered(self) -> list[Text]:
        """The prompts to learn from with the base's answers."""
        options = self.options
        prompts = encode_prompts(
            self.base, self.prompts, options.max_new_tokens, chat_template=options.chat_template
        ).texts
        settings = AnswerOptions(
            options.max_new_tokens, options.batch_size, seed=options.seed, chat_template=options.chat_template
        )
        progress = self.noted(RECYCLING)
        return answer_all(self.base, prompts, settings, progress=lambda done, total: progress(done, total, "answers"))[
            0
        ]

    @functools.cached_property
    def by_heads(self) -> CalibrationRun:
        """The traces of the heads."""
        return self.calibrated(HEADS)

    def calibrated(self, drafter: str) -> CalibrationRun:
        """A drafter learned from the prompts, and the traces of it."""
        options = self.options
        return run_calibration(
            self.base,
            self.loaded if drafter in (HEADS, HEADS_NGRAM) else None,
            self.prompts,
            learning=None if drafter == HEADS else self._learning(drafter),
            progress=self.noted(drafter),
            steps=drafter != HEADS,
            max_new_tokens=options.max_new_tokens,
            batch_size=options.batch_size,
            seed=options.seed,
            chat_template=options.chat_template,
            draft=self.draft if drafter in (MODEL, MODEL_NGRAM) else None,
        )

    def _learning(self, drafter: str) -> Learning:
        return Learning(self.options.learn_tokens, seed=self.options.seed, ngram=drafter != MODEL)

    def noted(self, name: str) -> Progress:
        """The progress callback with the name of a method in its notes."""
        return lambda done, total, note: self.progress(done, total, f"{name}: {note}")

    def decoder(self, plan: Plan, drafter: Drafter | None = None, rule: Rule | None = None) -> TreeDecoder:
        """A decoder of ours with the heads or the draft model that its drafter needs."""
        needs_heads = drafter is None or drafter.num_heads > 0
        needs_draft = drafter is not None and drafter.draft
        return TreeDecoder(
            self.base,
            self.heads if needs_heads else None,
            plan,
            drafter=drafter,
            draft=self.draft if needs_draft else None,
            acceptance=rule,
            probe=False,
        )


def contenders(job: Job) -> list[Entry]:
    """The chosen methods in their order, learned and built; autoregressive and generate first."""
    plain = TreeDecoder(job.base, None, Tree(()), probe=False)
    entries: list[Entry] = [
        Contender(AUTOREGRESSIVE, ONE_NODE, with_decoder(plain)),
        Contender(GENERATE, ONE_NODE, with_generate(job.base)),
    ]
    for name, make in _MAKERS.items():
        if name in job.options.methods:
            try:
                entries += make(job)
            except TreeoptError as error:
                if error.code not in _UNFIT:
                    raise
                entries.append(LeftOut(_SHOWN.get(name, name), error.what))
    return entries


def _lookup(job: Job) -> list[Entry]:
    return [Contender(LOOKUP, LOOKUP_TOKENS + 1, with_generate(job.base, prompt_lookup_num_tokens=LOOKUP_TOKENS))]


def _assisted(job: Job) -> list[Entry]:
    if job.draft is None:
        return [LeftOut(ASSISTED, NO_DRAFT)]
    if job.longest > job.draft.context:
        why = f"texts of up to {job.longest} tokens exceed the draft model's context of {job.draft.context}"
        return [LeftOut(ASSISTED, why)]
    drafts = int(job.draft.model.generation_config.num_assistant_tokens or _ASSISTANT_TOKENS)
    return [Contender(ASSISTED, drafts + 1, with_generate(job.base, assistant_model=job.draft.model))]


_ASSISTANT_TOKENS = 20  # the default of transformers, where the draft model's config does not say it


def _recycling(job: Job) -> list[Entry]:
    """A tree of the chosen size, built from the ranks of recycled texts, and the published tree."""
    learned = TokenRecycling(job.base)
    traces = recycle_texts(learned, job.answered, job.options.batch_size)
    published = load_tree(PUBLISHED_RECYCLING)
    trees = {f"{RECYCLING}, published tree": published}
    if job.options.nodes != published.nodes:
        trees = {RECYCLING: build_tree(traces, job.options.nodes), **trees}
    entries: list[Entry] = []
    for name, tree in trees.items():
        drafter = TokenRecycling(job.base)
        drafter.matrix.copy_(learned.matrix)
        try:
            decoder = TreeDecoder(job.base, None, tree, drafter=drafter, probe=False)
        except TreeoptError as error:  # fewer than eight tokens in the vocabulary
            entries.append(LeftOut(name, error.what))
        else:
            learned_id = hashlib.sha256(drafter.matrix.numpy(force=True).tobytes()).hexdigest()
            content = f"{plan_id(tree)} {learned_id}"
            entries.append(Contender(name, tree.nodes, with_memory(decoder, drafter.matrix), content))
    return entries


def _published(job: Job) -> list[Entry]:
    if job.heads is None:
        return [LeftOut(MC_SIM, NO_HEADS)]
    return [_ours(job, MC_SIM, load_tree(MC_SIM))]


def _medusa(job: Job) -> list[Entry]:
    if job.heads is None:
        return [LeftOut(_SHOWN[MEDUSA], NO_HEADS)]
    tree = build_tree(job.by_heads.calibration, job.options.nodes, values="independent", weights="uniform")
    return [_ours(job, _SHOWN[MEDUSA], tree)]


def _heads(job: Job) -> list[Entry]:
    if job.heads is None:
        return [LeftOut(_SHOWN[HEADS], NO_HEADS)]
    return _sizes(job, HEADS, job.by_heads, None)


def _learned(job: Job, drafter: str) -> list[Entry]:
    """A learned drafter, static and per step."""
    if drafter == HEADS_NGRAM and job.heads is None:
        return [LeftOut(drafter, NO_HEADS)]
    if drafter in (MODEL, MODEL_NGRAM) and job.draft is None:
        return [LeftOut(drafter, NO_DRAFT)]
    run = job.calibrated(drafter)
    assert run.learned is not None
    return _sizes(job, drafter, run, run.learned.drafter)


def _sizes(job: Job, name: str, run: CalibrationRun, drafter: Drafter | None) -> list[Entry]:
    """A drafter's static tree and, where it is learned, its policy, of the chosen size, and its fastest plan."""
    traces = run.calibration
    found = [_ours(job, f"{name}, {_KIND_NAMES[KINDS[0]]}", build_tree(traces, job.options.nodes), drafter)]
    if drafter is not None:
        policy = build_policy(traces, job.options.nodes)
        found.append(_ours(job, f"{name}, {_KIND_NAMES[KINDS[1]]}", policy, drafter))
    plan = _fastest_plan(job, name, run, drafter)
    if plan is not None:
        found.append(_ours(job, f"{name}, {_KIND_NAMES[KINDS[isinstance(plan, TreePolicy)]]}{FASTEST}", plan, drafter))
    return list(found)


def _fastest_plan(job: Job, name: str, run: CalibrationRun, drafter: Drafter | None) -> Plan | None:
    """The drafter's plan with the most tokens per second by timed steps; None where no tree drafts."""
    with_draft = drafter is not None and bool(drafter.draft)
    plans = plans_of(run.calibration, job.options.sizes, with_draft=with_draft)
    decoders = [job.decoder(plan, drafter, AcceptDeepest()) for plan in plans]
    # One of several processes times the steps for all: each of them must decode the same trees.
    [seconds] = job.options.division.each(1, lambda _: timed([decoders], run.texts, job.noted(name))[0][0])
    best = max(figures_of(plans, seconds, job.base)[1:], key=lambda one: one.speedup, default=None)
    return None if best is None else best.plan


def _ours(job: Job, name: str, plan: Plan, drafter: Drafter | None = None) -> Contender:
    return Contender(name, plan.nodes, with_decoder(job.decoder(plan, drafter)), plan_id(plan))


_MAKERS: dict[str, Callable[[Job], list[Entry]]] = {
    "lookup": _lookup,
    "recycling": _recycling,
    "assisted": _assisted,
    MC_SIM: _published,
    MEDUSA: _medusa,
    HEADS: _heads,
    **{name: functools.partial(_learned, drafter=name) for name in (HEADS_NGRAM, NGRAM, MODEL, MODEL_NGRAM)},
}
_SHOWN = {"lookup": LOOKUP, "recycling": RECYCLING, "assisted": ASSISTED, MEDUSA: "Medusa tree"}
_SHOWN[HEADS] = f"{HEADS}, {_KIND_NAMES[KINDS[0]]}"
