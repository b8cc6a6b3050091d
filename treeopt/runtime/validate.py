"""Validate: is tree decoding lossless, does it do what was predicted, and is it faster.

For every prompt, in turn in one process: stock `generate`, our own loop one token a step without heads, our loop with
the tree. The prediction comes from a separate teacher-forced pass over the text of stock `generate`, and replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from treeopt.build.replay import Replay, replay
from treeopt.calibrate.measure import as_calibration, trace_texts
from treeopt.calibrate.texts import Text
from treeopt.calibration import MAX_RANKS, Provenance
from treeopt.models.base import Base
from treeopt.models.heads import MedusaHeads
from treeopt.progress import Progress, silent
from treeopt.runtime.clock import now
from treeopt.runtime.decode import Decoded, TreeDecoder
from treeopt.tree import Tree, check_tree_fits

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Difference:
    """The first place where a text differs from plain greedy decoding; `gap` is between the two tokens' logits there.

    `way` says which text: `tree`, or `one by one`. A token is -1 where its text had already ended.
    """

    prompt_id: str
    way: str
    position: int
    greedy_token: int
    found_token: int
    gap: float


@dataclass(frozen=True)
class Pace:
    """Decoding of all prompts one way: seconds without prefill, prefill apart; the first token belongs to prefill."""

    tokens: int
    steps: int
    seconds: float
    prefill_seconds: float
    texts: int

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first of each text, per second of decoding; None where there were none."""
        return (self.tokens - self.texts) / self.seconds if self.tokens > self.texts and self.seconds else None


@dataclass(frozen=True)
class PromptResult:
    """Tokens and steps of one prompt: measured by the decoder, predicted by replay."""

    prompt_id: str
    tokens: int
    steps: int
    predicted_steps: int


@dataclass(frozen=True)
class Validation:
    """What came out; `expected_tokens_per_step` is the tree file's own, None where it has none."""

    results: tuple[PromptResult, ...]
    differences: tuple[Difference, ...]
    predicted: Replay
    measured_by_depth: tuple[float, ...]
    expected_tokens_per_step: float | None
    tree: Pace
    one_by_one: Pace
    generate: Pace
    made_by: dict[str, str]

    @property
    def lossless(self) -> bool:
        """Whether every text is, token for token, that of stock greedy `generate`."""
        return not self.differences

    @property
    def tokens_per_step(self) -> float:
        """tau: all tokens / all steps."""
        return self.tree.tokens / self.tree.steps

    @property
    def prediction_misses(self) -> tuple[PromptResult, ...]:
        """Prompts whose number of steps was not the predicted one."""
        return tuple(result for result in self.results if result.steps != result.predicted_steps)

    @property
    def overhead(self) -> float | None:
        """Seconds of a tree step / seconds of a one-token step of our own loop without heads; None untimed."""
        if self.tree.tokens_per_second is None or self.one_by_one.tokens_per_second is None:
            return None
        return (self.tree.seconds / self.tree.steps) / (self.one_by_one.seconds / self.one_by_one.steps)

    @property
    def speedup(self) -> float | None:
        """Tokens a second with the tree / one by one = tau / overhead; None untimed."""
        return None if self.overhead is None else self.tokens_per_step / self.overhead


def validate(
    base: Base,
    heads: MedusaHeads,
    tree: Tree,
    prompts: Sequence[Text],
    *,
    max_new_tokens: int = 128,
    progress: Progress = silent,
) -> Validation:
    """Decode every prompt three ways and compare.

    Args:
        base: the base model; float32 makes exact comparison meaningful.
        heads: its draft heads.
        tree: the tree to prove.
        prompts: their token ids; any continuation they carry is ignored.
        max_new_tokens: budget of each continuation.
        progress: told after each prompt.

    Raises:
        TreeoptError: as `TreeDecoder`, and E503 where a prompt does not fit into the context.
    """
    assert prompts
    kept = min(MAX_RANKS, base.vocab_size)
    check_tree_fits(tree, heads=heads.num_heads, ranks=kept, holder="the prediction")
    decoder, plain = TreeDecoder(base, heads, tree), TreeDecoder(base, None, Tree(()), probe=False)
    for one in (decoder, plain):
        one.generate(prompts[0].prompt, min(_WARM_UP_TOKENS, max_new_tokens))
    _stock(base, prompts[0].prompt, min(_WARM_UP_TOKENS, max_new_tokens))
    texts: list[Text] = []
    decoded: list[Decoded] = []
    differences: list[Difference] = []
    spent = np.zeros((3, 2))  # ways x (prefill, decoding) seconds
    for prompt in prompts:
        stock, stock_spent = _stock(base, prompt.prompt, max_new_tokens)
        single, single_spent = _timed(plain, prompt.prompt, max_new_tokens)
        treed, tree_spent = _timed(decoder, prompt.prompt, max_new_tokens)
        spent += [stock_spent, single_spent, tree_spent]
        texts.append(Text(prompt.prompt_id, prompt.prompt, stock))
        decoded.append(treed)
        ways = {"tree": treed.tokens, "one by one": single.tokens}
        wrong = next((way for way, found in ways.items() if found != stock), None)
        if wrong is not None:
            differences.append(_difference(base, prompt, wrong, stock, ways[wrong]))
        progress(len(texts), len(prompts), "lossless" if not differences else "NOT lossless")
    predicted = predict(base, decoder.heads or heads, tree, texts)
    steps = predicted.steps_by_sequence().tolist()
    results = tuple(
        PromptResult(text.prompt_id, len(one.tokens), len(one.step_lengths), step)
        for text, one, step in zip(texts, decoded, steps, strict=True)
    )
    tokens = sum(len(text.answer) for text in texts)
    return Validation(
        results=results,
        differences=tuple(differences),
        predicted=predicted,
        measured_by_depth=_by_depth(decoded, tree.depth),
        expected_tokens_per_step=tree.expected.replay if tree.expected else None,
        tree=Pace(sum(r.tokens for r in results), sum(r.steps for r in results), spent[2, 1], spent[2, 0], len(texts)),
        one_by_one=Pace(tokens, tokens, spent[1, 1], spent[1, 0], len(texts)),
        generate=Pace(tokens, tokens, spent[0, 1], spent[0, 0], len(texts)),
        made_by={**base.versions(), "threads": str(torch.get_num_threads()), "dtype": base.dtype_name},
    )


def predict(base: Base, heads: MedusaHeads, tree: Tree, texts: Sequence[Text]) -> Replay:
    """What the tree will do on these very texts, without decoding: teacher-forced ranks, then replay."""
    kept = min(MAX_RANKS, base.vocab_size)
    rows = [trace_texts(base, heads, [text], kept)[0] for text in texts]
    return replay(tree, as_calibration(texts, rows, kept, Provenance("", "", "", "", {})))


def _timed(decoder: TreeDecoder, prompt: Sequence[int], max_new_tokens: int) -> tuple[Decoded, tuple[float, float]]:
    """A text and its (prefill, decoding) seconds."""
    begin = now(decoder.base)
    decoding = decoder.start(prompt, max_new_tokens)
    ready = now(decoder.base)
    steps = list(decoding)
    end = now(decoder.base)
    tokens = [token for step in steps for token in step]
    return Decoded(tokens, [len(step) for step in steps]), (ready - begin, end - ready)


class _FirstTokenClock(StoppingCriteria):
    """Never stops; notes when the first token was there, which ends stock generate's prefill."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._go_on = torch.zeros(1, dtype=torch.bool, device=base.device)
        self.first: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        if self.first is None:
            self.first = now(self._base)
        return self._go_on


@torch.inference_mode()
def _stock(base: Base, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], tuple[float, float]]:
    """The model's own greedy `generate` of one prompt, and its (prefill, decoding) seconds."""
    ids = torch.tensor([list(prompt)], device=base.device)
    clock = _FirstTokenClock(base)
    begin = now(base)
    criteria = StoppingCriteriaList([clock])
    out = base.generate(ids, torch.ones_like(ids), max_new_tokens, stopping_criteria=criteria)
    end = now(base)
    first = clock.first if clock.first is not None else end
    return out[0, len(prompt) :].tolist(), (first - begin, end - first)


@torch.inference_mode()
def _difference(base: Base, prompt: Text, way: str, greedy: Sequence[int], found: Sequence[int]) -> Difference:
    shared = min(len(greedy), len(found))
    at = next((i for i in range(shared) if greedy[i] != found[i]), shared)
    ids = torch.tensor([[*prompt.prompt, *greedy[:at]]], device=base.device)
    logits = base.forward(ids, use_cache=False)[0][0, -1].float()
    one, other = (tokens[at] if at < len(tokens) else -1 for tokens in (greedy, found))
    gap = abs(float(logits[one] - logits[other])) if min(one, other) >= 0 else float("nan")
    return Difference(prompt.prompt_id, way, at, one, other, gap)


def _by_depth(decoded: Sequence[Decoded], depth: int) -> tuple[float, ...]:
    """Share of steps that emitted d drafts or more, d = 1 .. D."""
    lengths = np.array([length for one in decoded for length in one.step_lengths])
    return tuple(float(np.mean(lengths > d)) for d in range(1, depth + 1))
