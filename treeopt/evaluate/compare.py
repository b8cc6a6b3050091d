"""Compare: which method of speculative decoding pays for a model and prompts, all of them in one process."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from treeopt.calibrate.pipeline import as_calibration, run_calibration
from treeopt.calibrate.results import CalibrationRun
from treeopt.calibration import MISS, NONE, Calibration, Provenance, Ranks
from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Rule
from treeopt.drafter import HEADS, HEADS_NGRAM, KINDS, MODEL, MODEL_NGRAM, NGRAM, Drafter
from treeopt.drafting.learn import Learning
from treeopt.drafting.token_recycling import NAME as RECYCLING
from treeopt.drafting.token_recycling import TokenRecycling
from treeopt.drafting.trace import TextTraces
from treeopt.errors import Code, TreeoptError, memory_as_error
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
from treeopt.evaluate.comparison import (
    FASTEST,
    MC_SIM,
    MEDUSA,
    CompareOptions,
    Comparison,
    Figures,
    Row,
    halves,
    spread_evenly,
)
from treeopt.evaluate.divergence import ENDED, first_difference
from treeopt.evaluate.learn_drafter import figures_of, plans_of, timed
from treeopt.evaluate.metrics import Metrics, Trial
from treeopt.evaluate.runs import Runs, decode_all, made_by
from treeopt.evaluate.timed_step import AcceptDeepest
from treeopt.files.policies import plan_id
from treeopt.files.trees import load_tree
from treeopt.latency import ONE_NODE
from treeopt.models.base import Base
from treeopt.models.compatibility import check_heads_fit, heads_like
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_draft, as_heads
from treeopt.models.head_files import LoadedHeads
from treeopt.models.heads import MedusaHeads
from treeopt.models.logits import top_ids
from treeopt.optimize.per_step import build_policy
from treeopt.optimize.tree_builder import build_tree
from treeopt.policy import Plan, TreePolicy
from treeopt.progress import Progress, silent
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import Encoded, Text, encode_prompts
from treeopt.texts.hidden_states import hidden_states
from treeopt.texts.prompts import GivenPrompts, Prompt, PromptSet, as_prompt_set
from treeopt.tree import Tree
from treeopt.verify.probe import check_trees

Ints = NDArray[np.int64]


@torch.inference_mode()
def recycle_texts(drafter: TokenRecycling, texts: Sequence[Text], batch_size: int = 16) -> Calibration:
    """Recycle the logits along finished texts, one text after the other, and rank each text's tokens before.

    This is a simulation by one teacher-forced forward a batch: the matrix sees the tokens of the texts alone. A decoder
    recycles the rejected nodes of its trees as well, so its matrix and its tokens per step differ.

    Args:
        drafter: its matrix is changed.
        texts: prompts with the base's answers.
        batch_size: texts of one forward.

    Returns:
        The ranks of the answers' tokens among the successors known before each position.

    Raises:
        TreeoptError: as `hidden_states`.
    """
    base, width = drafter.base, drafter.num_candidates
    matrix: Ints = drafter.matrix.numpy(force=True).copy()
    rows: list[Ranks] = []
    for start in range(0, len(texts), batch_size):
        part = texts[start : start + batch_size]
        for text, states in zip(part, hidden_states(base, part), strict=True):
            found = top_ids(base.lm_logits(states), width).numpy(force=True)
            rows.append(_recycled(matrix, np.asarray(text.answer, np.int64), found, drafter.depth))
    drafter.matrix.copy_(torch.from_numpy(matrix))
    return as_calibration(texts, list(map(TextTraces, rows)), width, Provenance("", "", "", "", {}))


def _recycled(matrix: Ints, answer: Ints, found: Ints, depth: int) -> Ranks:
    """uint8 [G, depth] ranks of an answer int64 [G]; rows of `matrix` are overwritten on the way.

    Row i of `found` int64 [G, K] holds the likeliest tokens after the token before answer token i.
    """
    ranks = np.full((len(answer), depth), NONE, np.uint8)
    for i in range(len(answer)):
        if i:  # the prompt's last token is not recycled, as in decoding
            matrix[answer[i - 1]] = found[i]
        true = answer[i + 1 : i + 1 + depth]
        hit = matrix[answer[i : i + len(true)]] == true[:, None]
        ranks[i, : len(true)] = np.where(hit.any(1), hit.argmax(1), MISS)
    return ranks


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


def compare(
    model: GivenModel,
    heads: GivenHeads | None,
    prompts: GivenPrompts,
    *,
    draft: GivenModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
    **options: Any,
) -> Comparison:
    """Decode prompts by every method of speculative decoding in turn, and compare tokens per step and speed.

    The methods are autoregressive decoding by our loop, stock `generate`, its prompt lookup and assisted generation,
    Token Recycling, the published tree mc_sim_7b_63 and the Medusa tree, and trees of each drafter, static and per
    step. All trees have the same number of nodes, but for published ones, and for one of each drafter that has the most
    tokens per second: cross-validated tokens per step over the seconds of a step, as in `learn_drafter`. What a method
    must learn it learns from other prompts than those that are judged; of prompts that equal learned ones none is
    judged.

    Args:
        model: a causal language model of transformers, a `Base`, or a folder or hub name, then loaded in float32.
        heads: its draft heads: `MedusaHeads`, what `load_heads` gives, or a folder or hub name; None for none.
        prompts: as for `run_calibration`. The second half of each category is judged, and where `prompts_learn` is
            given, all. A later turn follows the answer of stock generate to the turn before.
        draft: a draft model with the same tokenizer, in the forms of `model`; None for none.
        tokenizer: the model's, where it is not in the folder of its weights.
        progress: called while methods learn, and after each text.
        options: fields of `CompareOptions`: `methods`, `nodes`, `sizes`, `texts`, `max_new_tokens`, `repeats`,
            `learn_limit`, `learn_tokens`, `seed`, `batch_size`, `chat_template`, `prompts_learn`.

    Returns:
        The rows; methods that cannot run have the reason in theirs.

    Raises:
        TreeoptError: as `run_calibration` and the loaders; E213 where the draft model has another tokenizer, E303 where
            no prompt is left to learn from or to judge, E502 where the model cannot verify trees.
        TypeError: where an argument has another type, or there is no such option.
        ValueError: where a number is out of range.

    Examples:
        >>> import treeopt
        >>> options = {"methods": ["lookup", "recycling"], "repeats": 1, "max_new_tokens": 16}
        >>> found = treeopt.compare("pocket", None, ["import os", "def f():", "class A:", "x = 1"], **options)
        >>> [row.method for row in found.rows if row.nodes == 16], found.learned
        (['token recycling'], 2)
    """
    chosen = CompareOptions(**options)
    base = as_base(model, tokenizer, dtype="float32")
    loaded = None if heads is None else as_heads(heads)
    if loaded is not None:
        check_heads_fit(base, loaded.heads, loaded.name)
    check_trees(base)
    given = as_prompt_set(prompts)
    learned = None if chosen.prompts_learn is None else as_prompt_set(chosen.prompts_learn)
    if learned is None:
        learned, given = halves(given)
    fitting = _fitting(base, learned, chosen)
    learned = dataclasses.replace(learned, prompts=tuple(spread_evenly(fitting, chosen.learn_limit)))
    encoded = encode_prompts(base, given, chosen.max_new_tokens, chat_template=chosen.chat_template)
    job = Job(base, loaded, as_draft(draft, base), learned, chosen, progress)
    texts = spread_evenly(_others(job, encoded), chosen.texts)
    job = dataclasses.replace(job, longest=_longest(texts, job))
    with memory_as_error("fewer new tokens, fewer nodes or a smaller batch"):
        entries = contenders(job)
        baselines = {one.name: one.baseline for one in entries if isinstance(one, Contender)}
        content = {one.name: one.content if isinstance(one, Contender) else one.why for one in entries}
        runs = decode_all(baselines, base, texts, chosen.decoding, progress, content=content)
        chosen.division.leader_only()
    return Comparison(
        rows=_rows(entries, runs, base),
        texts=runs.texts,
        learned=len(learned.prompts),
        dropped=len(encoded.texts) - len(_others(job, encoded)),
        skipped=(*encoded.skipped, *runs.skipped),
        repeats=chosen.repeats,
        made_by=made_by(base),
    )


def _fitting(base: Base, prompts: PromptSet, options: CompareOptions) -> list[Prompt]:
    """The prompts that fit into the context with the new tokens; E303 where there are none."""
    encoded = encode_prompts(base, prompts, options.max_new_tokens, chat_template=options.chat_template)
    known = {text.prompt_id for text in encoded.texts}
    return [prompt for prompt in prompts.prompts if prompt.id in known]


def _longest(texts: Sequence[Text], job: Job) -> int:
    """The tokens that a text may have; a dialogue may fill the context."""
    if any(text.later for text in texts):
        return job.base.context
    return max(len(text.prompt) for text in texts) + job.options.max_new_tokens


def _others(job: Job, encoded: Encoded) -> list[Text]:
    """The texts whose prompts are not among those to learn from; E303 where there are none."""
    options = job.options
    known = {
        tuple(text.prompt)
        for text in encode_prompts(
            job.base, job.prompts, options.max_new_tokens, chat_template=options.chat_template
        ).texts
    }
    others = [text for text in encoded.texts if tuple(text.prompt) not in known]
    if not others:
        what = f"all {len(encoded.texts)} prompts equal prompts that are learned, so none is judged"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, fix="--prompts-learn with other prompts")
    return others


def _rows(entries: Sequence[Entry], runs: Runs, base: Base) -> tuple[Row, ...]:
    trials = tuple(
        Trial(text.prompt_id, text.category, text.turn, by_name)
        for text, by_name in zip(runs.texts, runs.by_text, strict=True)
    )
    return tuple(_row(entry, Metrics(trials), runs, base) for entry in entries)


def _row(entry: Entry, metrics: Metrics, runs: Runs, base: Base) -> Row:
    """The figures of one method, or why there are none."""
    name, exact = entry.name, base.dtype == torch.float32
    if isinstance(entry, LeftOut):
        return Row(name, None, left_out=entry.why)
    if name in runs.left_out:
        return Row(name, entry.nodes, left_out=runs.left_out[name])
    other = [
        (text, [run.tokens for run in by_name[name] if run.tokens != text.answer])
        for text, by_name in zip(runs.texts, runs.by_text, strict=True)
    ]
    differing = [(text, found[0]) for text, found in other if found]
    return Row(
        name,
        entry.nodes,
        Figures.of(metrics, name),
        len(runs.texts) - len(differing),
        {part: Figures.of(of_part, name) for part, of_part in metrics.by_category.items()},
        {turn: Figures.of(of_turn, name) for turn, of_turn in metrics.by_turn.items()},
        exact=exact,
        gaps=() if exact else tuple(_gaps(base, name, differing)),
    )


@torch.inference_mode()
def _gaps(base: Base, name: str, differing: Sequence[tuple[Text, Sequence[int]]]) -> Iterator[float]:
    """The difference of the logits of the two tokens where each text first differs, where neither has ended."""
    for text, tokens in differing:
        found = first_difference(text, name, tokens)
        if ENDED not in (found.greedy_token, found.found_token):
            prefix = torch.tensor([[*text.prompt, *text.answer[: found.position]]], device=base.device)
            logits = base.forward(prefix, use_cache=False, logits_to_keep=1)[0][0, -1].float()
            yield abs(float(logits[found.greedy_token] - logits[found.found_token]))
