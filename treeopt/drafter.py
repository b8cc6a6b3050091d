"""The drafter record: the fitted weights of each level, and the n-gram table.

Level h (1..L) drafts token t+1+h, as head h does. The score of token y at level h, after the text so far and the drafts
of the levels above it, is

    head[h] * log p_h(y)  +  prior[h] * log U(y)  +  ngram[h] * ratio(y | last tokens)
        +  cache[h][n] * log(P_n(y) / P_0(y))
        +  prompt_lookup[h][m] where y followed the latest longest match, m tokens long, of the last tokens in the text

with p_h the distribution of head h (levels below the heads have none), U and ratio from the n-gram table. P_n is the
estimate of the cache of the text so far: for each length n of `CACHE_LENGTHS`, the places where the last n tokens
occurred before vote for the tokens that followed there,

    P_n(y) = (votes(y) + cache_prior * P_m(y)) / (places + cache_prior)

with m the next shorter length and P_0 = U(y) * exp(ratio). The longest length with at least one place is used. The
softmax over a level's candidates, with `other_logit` as the score of all other tokens together, estimates the
probability of each candidate; the level's `calibration_map` maps it to the observed frequency.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treeopt.defaults import DRAFT_KINDS, HEADS, HEADS_NGRAM, LEVELS, MAX_DEPTH, MODEL, NGRAM
from treeopt.errors import Code, TreeoptError
from treeopt.ngram_table import CONTEXT, NgramTable
from treeopt.policy import Plan

MAX_WINDOW = 1 << 16  # so that place and length of a match fit into one float32
PLAN = "plan"  # the key of a drafter's source with the settings in which its plan was timed
MAX_CANDIDATES = 1 << 12  # of one source
MAX_MATCH = 12  # matches of this many tokens or more have the same weight
CACHE_LENGTHS = (1, 2, 3, 4, 6, 8)  # tokens of the contexts that the cache looks up in the text so far
WINDOW = 2048  # default number of most recent tokens that cache and prompt lookup search
TOP_LOGPROBS = 64  # default number of tokens of each head whose log-probabilities are read
LM_HEAD_LEVELS = 3  # of a drafter without heads; five were no better (docs/develop/method.md)
# Of drafters that nothing was learned for: candidates of each source, and weights between those fitted to two models.
UNTRAINED_TOP, UNTRAINED_HEAD, UNTRAINED_OTHER = 16, 0.1, -1.0
NO_CHANCE = -40.0  # log of a negligible probability
_OLD_FIELDS = 6  # of a level that drafters of before the cache have


@dataclass(frozen=True)
class Level:
    """The fitted numbers of one level; see the module docstring.

    Args:
        head, prior, ngram: weights of the three logarithms.
        prompt_lookup: `MAX_MATCH` weights, of matches of 1, 2, .. tokens; the last also that of longer matches.
        other_logit: score of all tokens together that are not candidates.
        calibration_map: pairs of log-odds, estimated and observed, both ascending; linear between pairs, constant
            beyond them. Empty: estimates are not changed.
        cache: weights of the cache of the text so far, by the longest length of `CACHE_LENGTHS` that was found.
        confidence: of a draft with a confidence head a, b, c: its likeliest token's log-odds are a + b times its own
            and c times those of that head. Empty: that head is not read.
    """

    head: float = 1.0
    prior: float = 0.0
    ngram: float = 0.0
    prompt_lookup: tuple[float, ...] = (0.0,) * MAX_MATCH
    other_logit: float = NO_CHANCE
    calibration_map: tuple[tuple[float, float], ...] = ()
    cache: tuple[float, ...] = (0.0,) * len(CACHE_LENGTHS)
    confidence: tuple[float, ...] = ()

    def fault(self) -> str:
        """What is wrong with the numbers, for a message; empty if nothing is."""
        pairs = self.calibration_map
        scalars = (self.head, self.prior, self.ngram, self.other_logit)
        weights = (*scalars, *self.prompt_lookup, *self.cache, *self.confidence)
        if not all(map(math.isfinite, (*weights, *(value for pair in pairs for value in pair)))):
            return "has numbers that are not finite"
        if (len(self.prompt_lookup), len(self.cache)) != (MAX_MATCH, len(CACHE_LENGTHS)):
            return f"has not {MAX_MATCH} weights of prompt_lookup and {len(CACHE_LENGTHS)} of cache"
        if len(self.confidence) not in (0, 3):
            return "has not three numbers of confidence, or none"
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in itertools.pairwise(pairs)):
            return "has a calibration_map that does not ascend"
        return ""


@dataclass(frozen=True, eq=False)
class Drafter:
    """A learned drafter: the fitted numbers of every level, and the n-gram table.

    Args:
        levels: L levels, at least one, and at least as many as there are heads.
        num_heads: H; 0 for a drafter without heads.
        top: candidates of a level from its head, or from the draft model, which are the likeliest tokens; of the
            levels below the heads, the most frequent tokens (none where H = 0, and where the n-gram table is empty).
        window: number of the last tokens that cache and prompt lookup search, at least `CONTEXT`; 0 searches none.
        ngram_table: None for the heads, or the draft model, alone. An empty table (no contexts, no counted tokens) is
            replaced by the frequencies of the tokens in the text so far.
        source: model, heads, the text it was learned from, versions.
        cache_prior: weight of the next shorter length's estimate in the cache, in votes; above 0.
        voted: candidates of a level from the votes of the cache, beside the one of prompt lookup.
        lm_head_levels: where H = 0, number of first levels in which the base's own distribution of the root takes the
            place of a head's.
        top_logprobs: number of the likeliest tokens of each head, of the LM head or of the draft model, whose
            log-probabilities are read; all other tokens share the rest equally. 0 reads those of all tokens.
        draft: id (`fingerprint`) of the draft model, whose logits after each node take the place of a head's; empty
            where there is none. H is then 0.
        plan: the tree or policy that is recommended for it; it names this drafter's id.
        draft_kind: of `draft`: `model`, or one that reads the base's states, `eagle`, `mtp` or `block`.

    Raises:
        TreeoptError: E222 where a rule above is broken.
    """

    levels: tuple[Level, ...]
    num_heads: int
    top: int
    window: int = 0
    ngram_table: NgramTable | None = None
    source: Mapping[str, Any] = field(default_factory=dict)
    cache_prior: float = 1.0
    voted: int = 0
    lm_head_levels: int = 0
    top_logprobs: int = 0
    draft: str = ""
    plan: Plan | None = None
    draft_kind: str = MODEL

    def __post_init__(self) -> None:
        fault = self._fault()
        if not fault and self.plan is not None and self.plan.drafter != self.id:
            fault = f"its plan was made for drafter {self.plan.drafter or HEADS}, this is {self.id}; replace it by None"
        if not fault and self.plan is not None and self.plan.depth > self.depth:
            fault = f"its plan is {self.plan.depth} deep, and there are {self.depth} levels"
        if fault:
            raise TreeoptError(Code.DRAFTER_INVALID, f"not a drafter: {fault}")

    def _fault(self) -> str:
        if not 0 <= self.num_heads <= len(self.levels) or not self.levels:
            return f"{len(self.levels)} levels for {self.num_heads} heads"
        if len(self.levels) > MAX_DEPTH:
            return f"{len(self.levels)} levels, more than {MAX_DEPTH}"
        if self.draft and self.num_heads + self.lm_head_levels:
            beside = f"{self.num_heads} heads" if self.num_heads else f"lm_head_levels of {self.lm_head_levels}"
            return f"a draft model beside {beside}"
        if self.draft_kind not in DRAFT_KINDS:
            return f"a draft of kind {self.draft_kind!r}, not {', '.join(DRAFT_KINDS)}"
        if not min(1, self.levels_with_logits) <= self.top <= MAX_CANDIDATES:
            return f"{self.top} candidates of each head"
        if self.window != 0 and not CONTEXT <= self.window <= MAX_WINDOW:
            return f"a window of {self.window} tokens, not from {CONTEXT} to {MAX_WINDOW}"
        if not 0 <= self.voted <= MAX_CANDIDATES or not (self.cache_prior > 0 and math.isfinite(self.cache_prior)):
            return f"{self.voted} candidates from the cache and a cache_prior of {self.cache_prior}"
        most = 0 if self.num_heads else len(self.levels)  # a level reads a head or the LM head
        if not 0 <= self.lm_head_levels <= most:
            allowed = f"not from 0 to {most}" if most else f"beside {self.num_heads} heads"
            return f"lm_head_levels of {self.lm_head_levels}, {allowed}"
        if not 0 <= self.top_logprobs <= MAX_CANDIDATES:
            return f"{self.top_logprobs} log-probabilities of each head"
        if len(self.levels) > self.num_heads and self.ngram_table is None and not self.draft:
            return "extra depth below the heads needs an n-gram table"
        faults = (
            f"level {number} {level.fault()}" for number, level in enumerate(self.levels, start=1) if level.fault()
        )
        return next(faults, "")

    @classmethod
    def heads_only(cls, num_heads: int, top: int) -> Drafter:
        """The drafter of the heads alone, with the probabilities that they give."""
        return cls((Level(),) * num_heads, num_heads, top)

    @classmethod
    def model_only(cls, levels: int, top: int, draft: str, kind: str = MODEL) -> Drafter:
        """The drafter of a draft model or module alone, with the probabilities that it gives."""
        return cls((Level(),) * levels, 0, top, draft=draft, draft_kind=kind)

    @classmethod
    def untrained(cls, vocab_size: int, levels: int = LEVELS) -> Drafter:
        """A drafter without heads that nothing was learned for: the text so far and the LM head give the candidates.

        A candidate's score is its probability by the cache, and a little of its probability in place of the root.
        """
        level = Level(UNTRAINED_HEAD, 1.0, 1.0, other_logit=UNTRAINED_OTHER, cache=(1.0,) * len(CACHE_LENGTHS))
        top = min(UNTRAINED_TOP, vocab_size)
        table = NgramTable(
            keys=np.zeros(0, np.int64),
            tokens=np.arange(top, dtype=np.int32)[None],
            ratios=np.zeros((1, top), np.float16),
            backoff=np.zeros(1, np.float16),
            unigram=np.full(vocab_size, -math.log(vocab_size), np.float16),
            num_tokens=0,
        )
        lm_head, known = min(LM_HEAD_LEVELS, levels), min(TOP_LOGPROBS, vocab_size)
        return cls((level,) * levels, 0, top, WINDOW, table, {}, 1.0, top, lm_head, known)

    @property
    def depth(self) -> int:
        """L, the number of levels, which is the maximum depth of its trees."""
        return len(self.levels)

    @property
    def name(self) -> str:
        """The drafter by name, as `--drafter` has it."""
        if self.draft:
            return self.draft_kind if self.ngram_table is None else DRAFT_KINDS[self.draft_kind]
        return HEADS if self.ngram_table is None else HEADS_NGRAM if self.num_heads else NGRAM

    @property
    def timed_dtype(self) -> str:
        """The dtype in which the steps of the recommended plan were the fastest; empty where they were not timed."""
        timed = self.source.get(PLAN)
        found = timed.get("dtype") if isinstance(timed, Mapping) else None
        return found if isinstance(found, str) else ""

    @property
    def timed_compiled(self) -> bool:
        """Whether the steps of the recommended plan were the fastest with a compiled forward."""
        timed = self.source.get(PLAN)
        return isinstance(timed, Mapping) and timed.get("compiled") is True

    @property
    def levels_with_logits(self) -> int:
        """The number of first levels whose candidates have a probability by a head, the LM head or the draft model."""
        return self.depth if self.draft else self.num_heads or self.lm_head_levels

    @functools.cached_property
    def id(self) -> str:
        """Hash of all fields that determine the drafts; traces and trees store it.

        Fields that were added later are left out at their defaults, so that drafters of before keep their ids.
        """
        levels = [dataclasses.astuple(level) for level in self.levels]
        settings: list[Any] = [self.num_heads, self.top, self.window, [level[:_OLD_FIELDS] for level in levels]]
        empty = self.ngram_table is not None and self.ngram_table.empty
        added = [self.cache_prior, self.voted, self.lm_head_levels, empty, [level[_OLD_FIELDS:-1] for level in levels]]
        if added != [1.0, 0, 0, False, [(Level().cache,)] * len(levels)]:
            settings.append(added)
        if self.top_logprobs:
            settings.append(self.top_logprobs)
        if self.draft:
            settings.append(["draft", self.draft, *([] if self.draft_kind == MODEL else [self.draft_kind])])
        if any(level.confidence for level in self.levels):
            settings.append(["confidence", [level.confidence for level in self.levels]])
        digest = hashlib.sha256(json.dumps(settings).encode())
        if self.ngram_table is not None:
            for name, array in sorted(self.ngram_table.arrays().items()):
                digest.update(name.encode() + array.tobytes())
        return digest.hexdigest()[:16]
