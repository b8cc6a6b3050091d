"""The base model's own continuations of prompts, turn by turn, by stock `generate`, and the states behind them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, LogitsProcessorList

from treeopt.errors import check_counts
from treeopt.models.auto_batch import AutoBatch, in_parts
from treeopt.models.base import Base
from treeopt.models.compatibility import check_states_fit
from treeopt.sampling import batch_seed, check_seed, check_temperature
from treeopt.texts.encode import Text, next_turn
from treeopt.texts.prompts import Skipped


@dataclass(frozen=True)
class AnswerOptions:
    """How a base model answers prompts.

    Args:
        max_new_tokens: most tokens of each answer; fewer where the model ends the text.
        batch_size: prompts in one forward. Greedy answers of other batch sizes differ by rounding alone.
        temperature: 0 is greedy; above 0, tokens are sampled.
        seed: of the sampling.
        chat_template: put requests through the tokenizer's chat template, where it has one.
        auto_batch: halves the forwards where memory runs out; its first size replaces `batch_size`. Results then depend
            on the memory that is free, as on the batch size.

    Raises:
        ValueError: where a number is out of range.
    """

    max_new_tokens: int = 128
    batch_size: int = 16
    temperature: float = 0.0
    seed: int = 0
    chat_template: bool = True
    auto_batch: AutoBatch | None = None

    def __post_init__(self) -> None:
        if self.auto_batch is not None:
            object.__setattr__(self, "batch_size", self.auto_batch.first)
        check_counts(max_new_tokens=self.max_new_tokens, batch_size=self.batch_size)
        check_seed(self.seed)
        check_temperature(self.temperature)
        for name in ("max_new_tokens", "batch_size", "seed"):
            object.__setattr__(self, name, int(getattr(self, name)))  # files and torch take no integers of numpy

    @property
    def greedy(self) -> bool:
        """Whether every token of the answers is the model's greedy choice."""
        return self.temperature == 0

    @property
    def batches(self) -> int | str:
        """The batch size as settings of runs store it."""
        return self.batch_size if self.auto_batch is None else str(self.auto_batch)


@dataclass(frozen=True)
class Drawn:
    """A sampled answer; `choices[i]` is the model's greedy choice where answer token i was sampled."""

    text: Text
    choices: list[int]


class ChoiceRecorder(LogitsProcessor):
    """Records the greedy choice at each step of `generate`: of equal logits the smallest id; the logits stay."""

    def __init__(self) -> None:
        self._steps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._steps.append(scores.argmax(-1))
        return scores

    def choices(self) -> list[list[int]]:
        """The choices of each row of the batch, one a step."""
        return torch.stack(self._steps, dim=1).tolist()


def answer_batches(prompts: Sequence[Text], options: AnswerOptions) -> list[list[Text]]:
    """The prompts in batches of similar lengths, the same for any number of processes or shards."""
    ordered, size = sorted(prompts, key=_length), options.batch_size
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def answer_batch(
    base: Base,
    batch: Sequence[Text],
    options: AnswerOptions,
    number: int,
    *,
    known: Mapping[str, Sequence[int]] | None = None,
) -> tuple[list[Text], list[Skipped]]:
    """The texts of a batch and of its dialogues' later turns with answers, and the turns that did not fit.

    `number` is that of the batch, which seeds its sampling. `known` has the answers that an earlier call gave, by
    prompt id; then nothing is generated.
    """
    if options.temperature > 0 and known is None:
        torch.manual_seed(batch_seed(options.seed, number))
    budget = options.max_new_tokens
    answered: list[Text] = []
    skipped: list[Skipped] = []
    pending = list(batch)
    while pending:
        pending.sort(key=_length)
        if known is None:
            answer = functools.partial(continue_texts, base, max_new_tokens=budget, temperature=options.temperature)
            done = list(in_parts(options.auto_batch, pending, answer))
        else:
            done = [dataclasses.replace(text, answer=list(known[text.prompt_id])) for text in pending]
        answered += done
        following = [next_turn(base, text, budget, chat_template=options.chat_template) for text in done]
        skipped += [turn for turn in following if isinstance(turn, Skipped)]
        pending = [turn for turn in following if isinstance(turn, Text)]
    return answered, skipped


def answer_all(
    base: Base,
    prompts: Sequence[Text],
    options: AnswerOptions,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Text], list[Skipped]]:
    """The answers to prompts and to later turns, by prompt id, and the turns that did not fit into the context."""
    batches = answer_batches(prompts, options)
    answers = (answer_batch(base, batch, options, number) for number, batch in enumerate(batches))
    return collect(batches, answers, progress)


def collect(
    batches: Sequence[Sequence[Text]],
    answers: Iterable[tuple[list[Text], list[Skipped]]],
    progress: Callable[[int, int], None],
) -> tuple[list[Text], list[Skipped]]:
    """The answers to the batches, by prompt id, and the turns that were left out."""
    answered: list[Text] = []
    skipped: list[Skipped] = []
    left = sum(1 + len(text.later) for batch in batches for text in batch)  # later turns may not fit into the context
    for batch, (texts, turns) in zip(batches, answers, strict=True):
        answered += texts
        skipped += turns
        left -= sum(1 + len(text.later) for text in batch)
        progress(len(answered), len(answered) + left)
    return sorted(answered, key=lambda text: text.prompt_id), skipped


@torch.inference_mode()
def continue_texts(
    base: Base, texts: Sequence[Text], max_new_tokens: int, *, temperature: float = 0.0, **options: Any
) -> list[Text]:
    """The texts with the base model's continuations, each up to and with the end; options of `Base.generate`."""
    ids, mask = left_padded([text.prompt for text in texts], base.pad_id)
    ids, mask = ids.to(base.device), mask.to(base.device)
    out = base.generate(ids, mask, max_new_tokens, temperature=temperature, **options)
    answers = out[:, ids.shape[1] :].tolist()
    return [
        dataclasses.replace(text, answer=cut_at_end(answer, base.eos_ids))
        for text, answer in zip(texts, answers, strict=True)
    ]


def sample_texts(base: Base, texts: Sequence[Text], max_new_tokens: int, *, temperature: float) -> list[Drawn]:
    """The texts as of `continue_texts`, with the greedy choices at the places of their answers' tokens."""
    recorder = ChoiceRecorder()
    processors = LogitsProcessorList([recorder])
    sampled = continue_texts(base, texts, max_new_tokens, temperature=temperature, logits_processor=processors)
    pairs = zip(sampled, recorder.choices(), strict=True)
    return [Drawn(text, choices[: len(text.answer)]) for text, choices in pairs]


def left_padded(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left for `generate`: ids and mask, int64 [B, T]."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_id, padding_side="left")
    return ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")


def cut_at_end(answer: list[int], eos_ids: Sequence[int]) -> list[int]:
    """The tokens up to and with the first end-of-text token."""
    ends = [i for i, token in enumerate(answer) if token in eos_ids]
    return answer[: ends[0] + 1] if ends else answer


def _length(text: Text) -> tuple[int, str]:
    """The order of prompts: by length, and by id among those of equal length."""
    return len(text.prompt), text.prompt_id


def hidden_states(base: Base, texts: Sequence[Text]) -> list[Tensor]:
    """Hidden states of the answers, one [G, d] a text: row i is the state that predicts answer token i."""
    pairs = zip(text_states(base, texts), texts, strict=True)
    return [states[len(text.prompt) - 1 :][: len(text.answer)] for states, text in pairs]


@torch.inference_mode()
def text_states(base: Base, texts: Sequence[Text]) -> list[Tensor]:
    """Hidden states of prompts and answers, one [T, d] a text, without that of the last token."""
    # The last token is left out, as none follows it. A causal model does not attend to padding on the right.
    inputs = [torch.tensor(text.prompt + text.answer[:-1]) for text in texts]
    ids = pad_sequence(inputs, batch_first=True, padding_value=base.pad_id)
    logits, hidden = base.forward(ids.to(base.device), use_cache=False, logits_to_keep=1)
    base.check_finite(logits, hidden)
    if not base.reads:
        check_states_fit(base, hidden)
    return [hidden[row, : len(ids)] for row, ids in enumerate(inputs)]


@torch.inference_mode()
def answer_logits(base: Base, text: Text) -> Tensor:
    """The whole model's logits float [G, V] at an answer's positions; row i predicts answer token i."""
    ids = torch.tensor([text.prompt + text.answer[:-1]], device=base.device)
    logits, hidden = base.forward(ids, use_cache=False, logits_to_keep=len(text.answer))
    base.check_finite(logits, hidden)
    return logits[0]
