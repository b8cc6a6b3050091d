"""Compare: which method of speculative decoding pays for a model and prompts, all of them in one process."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from treeopt.calibrate.pipeline import as_calibration, run_calibration
from treeopt.calibrate.results import CalibrationRun
from treeopt.calibration import Calibration, Provenance
from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.rules import Rule
from treeopt.defaults import BLOCK, DRAFT_KINDS, EAGLE, HEADS, HEADS_NGRAM, MODEL, MTP, NGRAM, ONE_NODE
from treeopt.drafter import Drafter
from treeopt.drafting.learn import Learning
from treeopt.drafting.memory import Memory
from treeopt.drafting.suffix import GRID, PUBLISHED, SAM, SUFFIX, SuffixProposer, SuffixTrie, best_of_grid
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
    Metrics,
    autoregressive,
    learning_texts,
    with_decoder,
    with_generate,
    with_memory,
)
from treeopt.evaluate.comparison import (
    DDTREE,
    EAGLE2,
    FASTEST,
    MC_SIM,
    MEDUSA,
    METHODS,
    CompareOptions,
    Comparison,
    Figures,
    Row,
    halves,
    spread_evenly,
    unlike,
)
from treeopt.evaluate.divergence import gaps_of
from treeopt.evaluate.eagle2 import best_eagle2, ddtree_drafter
from treeopt.evaluate.learn_drafter import figures_of, plans_of, timed
from treeopt.evaluate.profile import timed_rule
from treeopt.evaluate.runs import Runs, decode_all, made_by
from treeopt.facts import picked
from treeopt.files.trees import load_tree, plan_id
from treeopt.models.base import Base
from treeopt.models.compatibility import check_heads_fit, heads_like
from treeopt.models.draft_module import kind_of
from treeopt.models.given import GivenHeads, GivenModel, as_base, as_draft, as_heads
from treeopt.models.head_files import LoadedHeads
from treeopt.models.heads import MedusaHeads
from treeopt.models.logits import top_ids
from treeopt.optimize.per_step import build_policy
from treeopt.optimize.tree_builder import build_tree
from treeopt.policy import Plan, TreePolicy
from treeopt.progress import Progress, silent
from treeopt.texts.answers import AnswerOptions, answer_all, hidden_states
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import GivenPrompts, PromptSet, as_prompt_set
from treeopt.traces import MISS, NONE, Ranks
from treeopt.verify.probe import check_trees

Ints = NDArray[np.int64]


@torch.inference_mode()
def recycle_texts(drafter: TokenRecycling, texts: Sequence[Text], batch_size: int = 16) -> Calibration:
    """Recycle the logits along finished texts, one text after the other, and rank each text's tokens before.

    The drafter's matrix is changed. This is a simulation by one teacher-forced forward a batch: a decoder recycles the
    rejected nodes of its trees as well, so its matrix and its tokens per step differ.
    """
    base, width = drafter.base, drafter.num_candidates
    matrix: Ints = drafter.matrix.numpy(force=True).copy()
    traces: list[TextTraces] = []
    for start in range(0, len(texts), batch_size):
        part = texts[start : start + batch_size]
        for text, states in zip(part, hidden_states(base, part), strict=True):
            found = top_ids(base.lm_logits(states), width).numpy(force=True)
            traces.append(TextTraces(_recycled(matrix, np.asarray(text.answer, np.int64), found, drafter.depth)))
    drafter.matrix.copy_(torch.from_numpy(matrix))
    return as_calibration(texts, traces, width, Provenance("", "", "", "", {}))


def _recycled(matrix: Ints, answer: Ints, found: Ints, depth: int) -> Ranks:
    """uint8 [G, depth]: the ranks of an answer int64 [G], whose logits' best tokens int64 [G, K] overwrite `matrix`."""
    ranks = np.full((len(answer), depth), NONE, np.uint8)
    for i in range(len(answer)):
        if i:  # the prompt's last token is not recycled, as in decoding
            matrix[answer[i - 1]] = found[i]
        true = answer[i + 1 : i + 1 + depth]
        hit = matrix[answer[i : i + len(true)]] == true[:, None]
        ranks[i, : len(true)] = np.where(hit.any(1), hit.argmax(1), MISS)
    return ranks


PUBLISHED_RECYCLING = "token_recycling"  # among the bundled trees
_ASSISTANT_TOKENS = 20  # the default of transformers, where the draft model's config does not say it
_UNFIT = (Code.TREE_TOO_DEEP, Code.RANK_TOO_LARGE, Code.NO_TREES)  # of a tree or draft model that cannot run here

NO_HEADS = "no heads were given (--heads)"
NO_DRAFT = "no draft model was given (--draft)"
NO_LEVELS = "a block drafter has all levels at once, and no levels that grow one by one (ddtree)"
_NO_MODULE = {
    MODEL: NO_DRAFT,
    EAGLE: "no EAGLE head was given (--draft)",
    MTP: "no MTP layer was given (--draft mtp)",
    BLOCK: "no block drafter was given (--draft)",
}


@dataclass(frozen=True)
class Contender:
    """A method: its most tokens of a step, how it decodes, and an id of what it learned, or why it cannot run."""

    name: str
    nodes: int | None
    baseline: Baseline | None
    content: str = ""


@dataclass(frozen=True)
class Material:
    """What methods are made from, and learn from: prompts, as token ids too (`asked`), and models; drafts by kind."""

    base: Base
    loaded: LoadedHeads | None
    drafts: Mapping[str, Base]
    prompts: PromptSet
    asked: Sequence[Text]
    options: CompareOptions
    progress: Progress
    longest: int

    @functools.cached_property
    def heads(self) -> MedusaHeads | None:
        return None if self.loaded is None else heads_like(self.base, self.loaded.heads)

    @functools.cached_property
    def by_heads(self) -> CalibrationRun:
        return self.calibrated(HEADS)

    def calibrated(self, drafter: str) -> CalibrationRun:
        """A drafter learned from the prompts, and the traces of it."""
        learning = Learning(self.options.learn_tokens, seed=self.options.seed, ngram=drafter not in DRAFT_KINDS)
        return run_calibration(
            self.base,
            self.loaded if drafter in (HEADS, HEADS_NGRAM) else None,
            self.prompts,
            learning=None if drafter == HEADS else learning,
            progress=self.noted(drafter),
            steps=drafter != HEADS,
            draft=self.drafts.get(_KIND_OF.get(drafter, "")),
            **self.answers,
        )

    @property
    def answers(self) -> dict[str, Any]:
        return picked(self.options, "max_new_tokens", "batch_size", "seed", "chat_template")

    @functools.cached_property
    def answered(self) -> list[Text]:
        """The model's answers to the prompts to learn from."""
        settings = AnswerOptions(**self.answers)
        return answer_all(self.base, self.asked, settings, progress=lambda i, n: self.progress(i, n, "answers"))[0]

    def noted(self, name: str) -> Progress:
        """The progress callback with the name of a method in its notes."""
        return lambda done, total, note: self.progress(done, total, f"{name}: {note}")

    def decoder(
        self, plan: Plan, drafter: Drafter | None = None, rule: Rule | None = None, memory: Memory | None = None
    ) -> TreeDecoder:
        """A decoder of ours with the heads or the draft model that its drafter needs; it adds nothing to the memory."""
        heads = self.heads if drafter is None or drafter.num_heads else None
        draft = self.drafts[drafter.draft_kind] if drafter is not None and drafter.draft else None
        given: Any = {"drafter": drafter, "draft": draft, "acceptance": rule, "memory": memory}
        made = TreeDecoder(self.base, heads, plan, probe=False, **given)
        made.memory = None
        return made


def contenders(job: Material) -> list[Contender]:
    """The chosen methods in their order, learned and built; autoregressive and generate first.

    Where none is chosen, those of EAGLE heads, MTP layers and block drafters that are not given have no row.
    """
    entries: list[Contender] = [
        Contender(AUTOREGRESSIVE, ONE_NODE, autoregressive(job.base)),
        Contender(GENERATE, ONE_NODE, with_generate(job.base)),
    ]
    chosen = tuple(job.options.methods) != METHODS
    for name in (name for name in _MAKERS if name in job.options.methods):
        try:
            why = _missing(job, name)
            if why and name in _OF_MODULES and not chosen:
                continue
            found = [] if why else _MAKERS[name](job)
        except TreeoptError as error:
            if error.code not in _UNFIT:
                raise
            found, why = [], error.what
        entries += found or [Contender(_SHOWN.get(name, name), None, None, why)]
    return entries


def _missing(job: Material, name: str) -> str:
    """What a method needs and does not have; empty where it may run."""
    if name in _WITH_HEADS and job.loaded is None:
        return NO_HEADS
    if name in _KIND_OF and _KIND_OF[name] not in job.drafts:
        return _NO_MODULE[_KIND_OF[name]]
    if name == EAGLE2 and not job.drafts.keys() - {BLOCK}:
        return NO_LEVELS if job.drafts else NO_DRAFT
    if name == DDTREE and BLOCK not in job.drafts:
        return _NO_MODULE[BLOCK]
    if name == "assisted" and job.longest > job.drafts[MODEL].context:
        return f"texts of up to {job.longest} tokens exceed the draft model's context of {job.drafts[MODEL].context}"
    return ""


def _assisted(job: Material) -> list[Contender]:
    model = job.drafts[MODEL].model
    drafts = int(model.generation_config.num_assistant_tokens or _ASSISTANT_TOKENS)
    return [Contender(ASSISTED, drafts + 1, with_generate(job.base, assistant_model=model))]


def _eagle2(job: Material) -> list[Contender]:
    """EAGLE-2's trees of each draft, of the chosen size."""
    entries = []
    for kind, draft in job.drafts.items():
        if kind == BLOCK:
            continue
        name = f"{kind}, EAGLE-2"
        drafter, policy, chosen = best_eagle2(job.base, draft, job.answered, job.options.nodes, job.noted(name))
        run = with_decoder(TreeDecoder(job.base, None, policy, drafter=drafter, probe=False))
        entries.append(Contender(f"{name}, {chosen}", policy.nodes, run, f"{draft.fingerprint} {chosen}"))
    return entries


def _ddtree(job: Material) -> list[Contender]:
    """DDTree's trees of the block drafter, of the chosen size."""
    drafter = ddtree_drafter(job.base, job.drafts[BLOCK])
    policy = TreePolicy(job.options.nodes, drafter.depth, drafter.drafter.id)
    decoder = TreeDecoder(job.base, None, policy, drafter=drafter, probe=False)
    return [Contender("block, DDTree", policy.nodes, with_decoder(decoder), drafter.draft.fingerprint)]


def _recycling(job: Material) -> list[Contender]:
    """A tree of the chosen size, built from the ranks of recycled texts, and the published tree."""
    learned = TokenRecycling(job.base)
    traces = recycle_texts(learned, job.answered, job.options.batch_size)
    learned_id = hashlib.sha256(learned.matrix.numpy(force=True).tobytes()).hexdigest()
    published = load_tree(PUBLISHED_RECYCLING)
    trees = {f"{RECYCLING}, published tree": published}
    if job.options.nodes != published.nodes:
        trees = {RECYCLING: build_tree(traces, job.options.nodes), **trees}
    entries = []
    for name, tree in trees.items():
        drafter = TokenRecycling(job.base)
        drafter.matrix.copy_(learned.matrix)
        decoder = TreeDecoder(job.base, None, tree, drafter=drafter, probe=False)
        run = with_memory(decoder, drafter.matrix, across=job.options.memory is not None)
        entries.append(Contender(name, tree.nodes, run, f"{plan_id(tree)} {learned_id}"))
    return entries


def _suffix(job: Material, name: str) -> list[Contender]:
    """Drafts of SuffixDecoding or SAM-Decoding, published and best of a grid; a memory's texts are learned, too."""
    texts, entries, nodes, memory = job.answered, [], job.options.nodes, job.options.memory
    known = [] if memory is None else [Text("", (), text) for text in memory.texts()]
    best = best_of_grid(name, texts, nodes, job.noted(name))
    for label, method in (("published", PUBLISHED[name]), (f"best of {len(GRID[name])}", best)):
        earlier, policy = SuffixTrie().learn([*texts, *known], method), TreePolicy(nodes, nodes - 1, name)
        run = with_decoder(TreeDecoder(job.base, None, policy, drafter=SuffixProposer(method, earlier), probe=False))
        if memory is not None:
            run = learning_texts(run, functools.partial(earlier.learn, method=method))
        learned_id = hashlib.sha256(repr(earlier.tokens).encode()).hexdigest()
        entries.append(Contender(f"{name}, {method.shown(f'from {len(texts)}')}, {label}", nodes, run, learned_id))
    return entries


def _sizes(job: Material, name: str) -> list[Contender]:
    """A drafter's static tree and, where it is learned, its policy, of the chosen size, and its fastest plan."""
    run = job.by_heads if name == HEADS else job.calibrated(name)
    drafter = None if run.learned is None else run.learned.drafter
    plans: list[Plan] = [build_tree(run.calibration, job.options.nodes)]
    if drafter is not None:
        plans.append(build_policy(run.calibration, job.options.nodes))
    found = [_ours(job, _kind(name, plan), plan, drafter) for plan in plans]
    memory = job.options.memory
    if memory is not None and drafter is not None and drafter.ngram_table is not None:
        plan, run_it = plans[-1], with_decoder(job.decoder(plans[-1], drafter, memory=memory))
        found.append(Contender(f"{name}, with the memory", plan.nodes, run_it, f"{plan_id(plan)} {memory.id}"))
    fastest = _fastest_plan(job, name, run, drafter)
    if fastest is not None:
        found.append(_ours(job, _kind(name, fastest) + FASTEST, fastest, drafter))
    return found


def _kind(name: str, plan: Plan) -> str:
    return f"{name}, {'per step' if isinstance(plan, TreePolicy) else 'static'}"


def _fastest_plan(job: Material, name: str, run: CalibrationRun, drafter: Drafter | None) -> Plan | None:
    """The drafter's plan with the most tokens per second by timed steps; None where no tree drafts."""
    with_draft = drafter is not None and bool(drafter.draft)
    plans = plans_of(run.calibration, job.options.sizes, with_draft=with_draft)
    decoders = [job.decoder(plan, drafter, timed_rule(job.base)) for plan in plans]
    # One of several processes times the steps for all: each of them must decode the same trees.
    each = job.options.division.each
    [seconds] = each("timing", range(1), lambda _: timed([decoders], run.texts, job.noted(name))[0])
    best = max(figures_of(plans, seconds, job.base)[1:], key=lambda one: one.speedup, default=None)
    return None if best is None else best.plan


def _ours(job: Material, name: str, plan: Plan, drafter: Drafter | None = None) -> Contender:
    return Contender(name, plan.nodes, with_decoder(job.decoder(plan, drafter)), plan_id(plan))


def _medusa(job: Material) -> list[Contender]:
    tree = build_tree(job.by_heads.calibration, job.options.nodes, values="independent", weights="uniform")
    return [_ours(job, _SHOWN[MEDUSA], tree)]


_OF_TEXTS = {"suffix": SUFFIX, "sam": SAM}
_SHOWN = {"lookup": LOOKUP, "recycling": RECYCLING, "assisted": ASSISTED, MEDUSA: "Medusa tree", HEADS: "heads, static"}
_WITH_HEADS = (MC_SIM, MEDUSA, HEADS, HEADS_NGRAM)
_OF_MODULES = {EAGLE2, DDTREE, *(name for kind in (EAGLE, MTP, BLOCK) for name in (kind, DRAFT_KINDS[kind]))}
_KIND_OF = {"assisted": MODEL, **{name: kind for kind, more in DRAFT_KINDS.items() for name in (kind, more)}}
_MAKERS: dict[str, Callable[[Material], list[Contender]]] = {
    "lookup": lambda job: [
        Contender(LOOKUP, LOOKUP_TOKENS + 1, with_generate(job.base, prompt_lookup_num_tokens=LOOKUP_TOKENS))
    ],
    "recycling": _recycling,
    **{name: functools.partial(_suffix, name=shown) for name, shown in _OF_TEXTS.items()},
    "assisted": _assisted,
    MC_SIM: lambda job: [_ours(job, MC_SIM, load_tree(MC_SIM))],
    MEDUSA: _medusa,
    **{name: functools.partial(_sizes, name=name) for name in (HEADS, HEADS_NGRAM, NGRAM)},
    EAGLE2: _eagle2,
    DDTREE: _ddtree,
    **{name: functools.partial(_sizes, name=name) for name in _KIND_OF if name != "assisted"},
}


def compare(
    model: GivenModel,
    heads: GivenHeads | None,
    prompts: GivenPrompts,
    *,
    draft: GivenModel | Sequence[GivenModel] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
    **options: Any,
) -> Comparison:
    """Compare methods of speculative decoding by tokens per step and speed.

    The methods are autoregressive decoding by our loop, stock `generate`, its prompt lookup and assisted generation,
    Token Recycling, SuffixDecoding, SAM-Decoding, the published tree mc_sim_7b_63 and the Medusa tree, and trees of
    each drafter, static and per step. All trees have the same number of nodes, but for published ones, and for one of
    each drafter that has the most tokens per second: cross-validated tokens per step over the seconds of a step, as in
    `learn_drafter`. What a method must learn it learns from other prompts than those that are judged; of prompts that
    equal learned ones none is judged.

    Args:
        model: a causal language model of transformers, a `Base`, or a folder or hub name, then loaded in float32.
        heads: its draft heads: `MedusaHeads`, what `load_heads` gives, or a folder or hub name; None for none.
        prompts: as for `run_calibration`. The second half of each category is judged, and where `prompts_learn` is
            given, all. A later turn follows the answer of stock generate to the turn before.
        draft: a draft model with the same tokenizer, an EAGLE head, a block drafter, or `mtp` for the layer in the
            model's checkpoint, in the forms of `model`; or a list of these, one of a kind; None for none.
        tokenizer: the model's, where it is not in the folder of its weights.
        progress: called while methods learn, and after each text.
        options: fields of `CompareOptions`: `methods`, `nodes`, `sizes`, `texts`, `max_new_tokens`, `repeats`,
            `learn_limit`, `learn_tokens`, `seed`, `batch_size`, `chat_template`, `prompts_learn`, `memory`.

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
    drafts = draft if isinstance(draft, (list, tuple)) else [] if draft is None else [draft]
    found = divided_compare(as_base(model, tokenizer, dtype="float32"), heads, prompts, drafts, chosen, progress)
    assert found is not None, "only commands divide a run among processes"
    return found


def divided_compare(
    base: Base,
    heads: GivenHeads | None,
    prompts: GivenPrompts,
    drafts: Sequence[GivenModel],
    chosen: CompareOptions,
    progress: Progress,
) -> Comparison | None:
    """What `compare` does; None in a process that follows another."""
    loaded = None if heads is None else as_heads(heads)
    if loaded is not None:
        check_heads_fit(base, loaded.heads, loaded.name)
    check_trees(base)
    given = as_prompt_set(prompts)
    learned = None if chosen.prompts_learn is None else as_prompt_set(chosen.prompts_learn)
    if learned is None:
        learned, given = halves(given)
    encoded = functools.partial(encode_prompts, base, max_new_tokens=chosen.max_new_tokens)
    fitting, judged = (encoded(one, chat_template=chosen.chat_template) for one in (learned, given))
    asked = spread_evenly(fitting.texts, chosen.learn_limit)
    known = {text.prompt_id for text in asked}
    learned = dataclasses.replace(learned, prompts=tuple(one for one in learned.prompts if one.id in known))
    others = unlike(judged.texts, asked)
    texts = spread_evenly(others, chosen.texts)
    by_kind = _by_kind([draft for draft in (as_draft(one, base) for one in drafts) if draft is not None])
    job = Material(base, loaded, by_kind, learned, asked, chosen, progress, _longest(base, texts, chosen))
    with memory_as_error("fewer new tokens, fewer nodes or a smaller batch"):
        entries = contenders(job)
        baselines = {one.name: one.baseline for one in entries if one.baseline is not None}
        content = {one.name: one.content for one in entries}
        runs = decode_all(baselines, base, texts, chosen.decoding, progress, content=content)
    if chosen.division.follows:
        return None
    return Comparison(
        rows=tuple(_row(entry, Metrics(runs.trials), runs, base) for entry in entries),
        texts=tuple(runs.texts),
        learned=len(learned.prompts),
        dropped=len(judged.texts) - len(others),
        skipped=(*judged.skipped, *runs.skipped),
        repeats=chosen.repeats,
        made_by=made_by(base),
    )


def _by_kind(drafts: Sequence[Base]) -> dict[str, Base]:
    """The drafts by their kinds; ValueError where two are of one."""
    found = {kind_of(draft.model): draft for draft in drafts}
    if len(found) < len(drafts):
        names = ", ".join(draft.name for draft in drafts)
        raise ValueError(f"two drafts are of one kind, and a comparison has one of each: {names}")
    return found


def _longest(base: Base, texts: Sequence[Text], options: CompareOptions) -> int:
    """The tokens that a text may have; a dialogue may fill the context."""
    if any(text.later for text in texts):
        return base.context
    return max(len(text.prompt) for text in texts) + options.max_new_tokens


def _row(entry: Contender, metrics: Metrics, runs: Runs, base: Base) -> Row:
    """The figures of one method, or why there are none."""
    name = entry.name
    if entry.baseline is None:
        return Row(name, None, left_out=entry.content)
    if name in runs.left_out:
        return Row(name, entry.nodes, left_out=runs.left_out[name])
    exact = base.dtype == torch.float32
    texts = [(one.text, run.tokens) for one in runs.trials for run in one.runs[name] if run.tokens != one.text.answer]
    differing = {text.prompt_id: (text, tokens) for text, tokens in reversed(texts)}  # the first run that differs
    return Row(
        name,
        entry.nodes,
        Figures.of(metrics, name),
        len(runs.trials) - len(differing),
        {part: Figures.of(of_part, name) for part, of_part in metrics.by_category.items()},
        {turn: Figures.of(of_turn, name) for turn, of_turn in metrics.by_turn.items()},
        exact=exact,
        gaps=() if exact else tuple(gaps_of(base, name, reversed(differing.values()))),
    )
