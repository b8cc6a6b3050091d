"""The records of a comparison: its options, its rows, and the prompts that are learned and judged."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from treeopt.defaults import DRAFT_KINDS, HEADS, HEADS_NGRAM, LEARN_SIZES, NGRAM, STEP_SIZES
from treeopt.drafting.learn import Learning
from treeopt.drafting.memory import Memory
from treeopt.errors import Code, TreeoptError, check_counts
from treeopt.evaluate.baselines import Metrics, Spread
from treeopt.evaluate.learn_drafter import setting_of
from treeopt.evaluate.runs import ValidateOptions
from treeopt.facts import picked
from treeopt.optimize.budget import fastest
from treeopt.runs.work import ALONE, BatchRun
from treeopt.sampling import check_seed
from treeopt.texts.encode import Text
from treeopt.texts.prompts import GivenPrompts, Prompt, PromptSet, Skipped

T = TypeVar("T")

MC_SIM, MEDUSA, EAGLE2, DDTREE = "mc_sim_7b_63", "medusa", "eagle2", "ddtree"
FASTEST = ", fastest size"  # the end of the name of a method whose size is chosen by timed steps
# What `--methods` takes. All but the first two are rows only where they are chosen.
METHODS = (
    *("autoregressive", "generate", "lookup", "recycling", "suffix", "sam", "assisted", MC_SIM, MEDUSA),
    *(HEADS, HEADS_NGRAM, NGRAM, EAGLE2, DDTREE, *(name for pair in DRAFT_KINDS.items() for name in pair)),
)
REFERENCES = METHODS[:2]


@dataclass(frozen=True)
class CompareOptions:
    """How methods are compared: what is learned, and how texts are decoded.

    Args:
        methods: some of `METHODS`; autoregressive and generate are always run, as speedup and lossless refer to them.
        nodes: the size of every tree, root counted, 2 to 254; published trees keep theirs.
        sizes: numbers of nodes that are timed, for the fastest tree of each drafter, 2 to 254.
        texts: number of prompts that are judged, spread evenly over those that are not learned; all where fewer.
        max_new_tokens: maximum number of new tokens of each text.
        repeats: runs of each text by each method.
        learn_limit: number of prompts that are learned from, spread evenly over those that are not judged; all where
            fewer.
        learn_tokens: tokens sampled to learn each n-gram table from; None: as for `Learning`.
        seed: of the sampling.
        batch_size: prompts that are answered together while learning; texts are judged one at a time.
        chat_template: apply the tokenizer's chat template to requests, where it has one.
        prompts_learn: prompts to learn from, in any form that prompts have; None for the first half of each category.
        memory: the per-step trees of drafters with an n-gram table are decoded with it too, and it learns the texts, as
            do Token Recycling, SuffixDecoding and SAM-Decoding then.
        division: the processes of a command, which divide the texts that are judged; each of them learns, and
            `divided_compare` returns None to all but the first.

    Raises:
        ValueError: where a number is out of range, or there is no such method.
    """

    methods: Sequence[str] = METHODS
    nodes: int = 16
    sizes: Sequence[int] = LEARN_SIZES
    texts: int = 8
    max_new_tokens: int = 64
    repeats: int = 3
    learn_limit: int = 16  # with learn_tokens, for five minutes for all methods of the built-in model
    learn_tokens: int | None = 10_000
    seed: int = 0
    batch_size: int = 16
    chat_template: bool = True
    prompts_learn: GivenPrompts | None = None
    memory: Memory | None = None
    division: BatchRun[Any] = ALONE

    def __post_init__(self) -> None:
        check_counts(texts=self.texts, max_new_tokens=self.max_new_tokens)
        check_counts(repeats=self.repeats, learn_limit=self.learn_limit, batch_size=self.batch_size)
        check_seed(self.seed)
        Learning(self.learn_tokens)  # raises ValueError
        for name, size in (("nodes", self.nodes), *(("sizes", size) for size in self.sizes)):
            check_counts(**{name: size})
            if not 2 <= size <= STEP_SIZES[-1]:
                raise ValueError(f"{name} {size}: from 2 to {STEP_SIZES[-1]}")
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown or not self.methods:
            raise ValueError(f"methods {', '.join(unknown) or 'is empty'}: some of {', '.join(METHODS)}")

    @property
    def decoding(self) -> ValidateOptions:
        names = ("max_new_tokens", "repeats", "chat_template", "memory", "division")
        return ValidateOptions(judge=0, **picked(self, *names))


@dataclass(frozen=True)
class Figures:
    """Figures of one method over some texts; spreads over the repeats are None where nothing was timed."""

    texts: int
    mean_acceptance_length: float  # tokens per step: all tokens / all steps
    tokens_per_second: Spread | None  # without prefill
    speedup: Spread | None  # tokens per second over those of autoregressive decoding by our loop

    @classmethod
    def of(cls, metrics: Metrics, name: str) -> Figures:
        tau, rate = metrics.tokens_per_step(name), metrics.tokens_per_second(name)
        return cls(len(metrics.trials), tau, rate, metrics.speedup(name))


@dataclass(frozen=True)
class Row:
    """One method.

    Args:
        method: its name, different in each row.
        nodes: the largest number of tokens that it verifies in a step; None where it was left out before its tree.
        figures: of all texts; None where the method cannot run.
        same: number of texts that are, token for token in every repeat, those of stock greedy `generate`.
        by_category: by the categories of the prompt file.
        by_turn: by the turns of dialogues, from 1.
        left_out: why the method cannot run; empty where it ran.
        exact: whether the model is in float32. In half precision texts may differ at near ties.
        gaps: in half precision, for each text that differs, the difference of the logits of the two tokens at its first
            difference, by one forward over the text before it.
    """

    method: str
    nodes: int | None
    figures: Figures | None = None
    same: int = 0
    by_category: Mapping[str, Figures] = field(default_factory=dict)
    by_turn: Mapping[int, Figures] = field(default_factory=dict)
    left_out: str = ""
    exact: bool = True
    gaps: Sequence[float] = ()

    @property
    def lossless(self) -> bool | None:
        """Whether every text is that of stock greedy `generate`; None where the method was left out."""
        return None if self.figures is None else self.same == self.figures.texts


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Args:
        rows: one a method and size, in the order of `METHODS`.
        texts: prompts of all judged turns, with the answers of stock generate.
        learned: number of prompts that were learned from.
        dropped: number of prompts that were not judged because an equal one was learned.
        skipped: prompts and later turns that do not fit into the context.
        repeats: runs of each text by each method.
        made_by: versions, device, threads, dtype, attention, and whether forwards over trees were compiled.
    """

    rows: tuple[Row, ...]
    texts: tuple[Text, ...]
    learned: int
    dropped: int
    skipped: tuple[Skipped, ...]
    repeats: int
    made_by: dict[str, str]

    @property
    def setting(self) -> str:
        return setting_of(self.made_by["dtype"], compiled="compiled" in self.made_by)

    @property
    def recommended(self) -> Row:
        """The row with the most tokens per second, by 2 % more than autoregressive decoding; else the row of that.

        In float32 a method whose texts differ from those of stock generate is not recommended.
        """
        plain, *others = [row for row in self.rows if row.figures is not None]
        others = [row for row in others if row.lossless or not row.exact]
        timed = [(row, row.figures.speedup.median) for row in others if row.figures and row.figures.speedup]
        chosen = fastest([speedup for _, speedup in timed])
        return plain if chosen is None or timed[chosen][0].method == REFERENCES[1] else timed[chosen][0]

    def row(self, method: str) -> Row:
        return next(row for row in self.rows if row.method == method)


def halves(prompts: PromptSet) -> tuple[PromptSet, PromptSet]:
    """The first half of each category, rounded down, and the rest; E303 where the first half is empty."""
    by_category: dict[str | None, list[Prompt]] = defaultdict(list)
    for prompt in prompts.prompts:
        by_category[prompt.category].append(prompt)
    learned = {prompt.id for rows in by_category.values() for prompt in rows[: len(rows) // 2]}
    if not learned:
        what = f"{len(prompts.prompts)} prompts cannot be divided into some to learn from and others to compare on"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, fix="--prompts-learn FILE, or more prompts")
    first = tuple(one for one in prompts.prompts if one.id in learned)
    second = tuple(one for one in prompts.prompts if one.id not in learned)
    return dataclasses.replace(prompts, prompts=first), dataclasses.replace(prompts, prompts=second)


def spread_evenly(given: Sequence[T], count: int) -> list[T]:
    """At most `count` of them at equal distances, the first included."""
    if len(given) <= count:
        return list(given)
    return [given[i * len(given) // count] for i in range(count)]


def unlike(texts: Sequence[Text], asked: Sequence[Text]) -> list[Text]:
    """The texts whose prompts are not among those to learn from; E303 where there are none."""
    known = {tuple(text.prompt) for text in asked}
    others = [text for text in texts if tuple(text.prompt) not in known]
    if not others:
        what = f"all {len(texts)} prompts equal prompts to learn from, so none is left to compare on"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, fix="--prompts-learn with other prompts")
    return others
