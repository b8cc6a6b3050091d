"""Count: the counts are those of a second pass over every text, which the texts' writing makes needless."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import answered, learned, planted, prompts_of
from looped import looped
from tiny import chat_base, cycle_heads, tiny_base

from treeopt.calibrate.job import CalibrationOptions
from treeopt.calibrate.pipeline import run_calibration
from treeopt.drafting import count as count_module
from treeopt.drafting.count import NgramCounts, choices_in, count_drawn, count_texts
from treeopt.drafting.learn import Learning, learn
from treeopt.models.base import Base
from treeopt.models.head_files import LoadedHeads
from treeopt.ngram_table import NgramTable
from treeopt.runs.work import Chunk, pack_rows
from treeopt.texts.answers import AnswerOptions, answer_all, continue_texts
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.hidden_states import hidden_states
from treeopt.texts.prompts import Prompt, PromptSet
from treeopt.texts.samples import Drawing, draw

NEW = 9


def second_pass(base: Base, texts: Sequence[Text]) -> list[list[int]]:
    """The oracle: all tokens of all texts in one teacher-forced forward; the choice after each but the last."""
    with torch.inference_mode():
        rows = [Text("", text.prompt[:1], [*text.prompt[1:], *text.answer]) for text in texts]
        return [base.lm_head(hidden).argmax(-1).tolist() for hidden in hidden_states(base, rows)]


def counts_of(base: Base, texts: Sequence[Text], drawn: Sequence[Text] = ()) -> NgramCounts:
    """The counts by the oracle: whole `texts`, and the answers of `drawn`."""
    counts = NgramCounts(base.vocab_size)
    everything = [*texts, *drawn]
    for i, (text, choices) in enumerate(zip(everything, second_pass(base, everything), strict=True)):
        first = 0 if i < len(texts) else len(text.prompt) - 1
        counts.add([*text.prompt, *text.answer][:-1], choices, first=first)
    return counts


def same(one: NgramCounts, other: NgramCounts) -> bool:
    """Whether all counts of two are equal."""
    pairs = zip(one.joined(), other.joined(), strict=True)
    names = ("keys", "shorter", "successors", "counts")
    equal = (np.array_equal(getattr(a, name), getattr(b, name)) for a, b in pairs for name in names)
    return np.array_equal(one.unigram, other.unigram) and all(equal)


def same_table(one: NgramTable | None, other: NgramTable) -> bool:
    """Whether two tables hold the same."""
    assert one is not None
    pairs = zip(one.arrays().values(), other.arrays().values(), strict=True)
    return one.num_tokens == other.num_tokens and all(np.array_equal(a, b) for a, b in pairs)


def ending() -> Base:
    """A random model that ends its texts early now and then."""
    base = tiny_base("llama", 3)
    base.model.generation_config.eos_token_id = list(range(6))
    return base


def everything(base: Base, texts: Sequence[Text], *, greedy: bool, batch_size: int = 4) -> NgramCounts:
    """All texts counted into one."""
    counts = NgramCounts(base.vocab_size)
    count_texts(base, texts, {text.prompt_id: counts for text in texts}, greedy=greedy, batch_size=batch_size)
    return counts


def test_choices_after_every_token() -> None:
    """Of rows of any lengths, one token among them: what the model would write after each prefix."""
    base = tiny_base("llama", 3)
    rows = [[4, 7, 7, 1, 2, 3, 4], [9], [5, 6, *[60] * 9]]
    with torch.inference_mode():
        expected = [
            [int(base.model(torch.tensor([row[:end]])).logits[0, -1].argmax()) for end in range(1, len(row))]
            for row in rows
        ]
    assert choices_in(base, rows) == expected
    assert choices_in(base, rows[1:2]) == [[]]


@looped("greedy", [False, True])
@looped("temperature", [0.0, 2.0])
def test_counts_are_those_of_a_second_pass(greedy: bool, temperature: float) -> None:
    """Greedy answers are counted exactly without a forward; others only with one."""
    base = ending()
    torch.manual_seed(1)
    texts = continue_texts(base, prompts_of(1, 11), NEW, temperature=temperature)
    assert same(everything(base, texts, greedy=greedy), counts_of(base, texts)) == (temperature == 0 or not greedy)


@looped("tokens", [1, 50, 400])
def test_drawn_answers_are_counted_while_they_are_written(tokens: int) -> None:
    """The recorded choices of every answer, the cut one among them, are counted as by a second pass."""
    base = ending()
    texts = answered(base, prompts_of(1, 7), NEW)
    drawn = list(draw(base, texts, Drawing(tokens, 2.0, 5, NEW, 4)))
    counts = NgramCounts(base.vocab_size)
    for one in drawn:
        count_drawn(counts, one)
    assert same(counts, counts_of(base, [], [one.text for one in drawn]))
    assert counts.unigram.sum() == sum(len(one.text.answer) for one in drawn)


@looped("tokens", [1, 300])
@looped("sampled", [False, True])
def test_a_drafter_is_that_of_two_passes(tokens: int, sampled: bool) -> None:
    """Learned from greedy answers or from others: the tables of the drafter and of its folds, exactly."""
    base, heads = planted()
    options = AnswerOptions(max_new_tokens=NEW, batch_size=4, temperature=1.5 if sampled else 0.0)
    torch.manual_seed(1)
    texts = continue_texts(base, prompts_of(1, 9), NEW, temperature=options.temperature)
    learning = Learning(tokens, temperature=2.0, top=6, window=16)
    found = learn(base, heads, texts, learning, options=options)
    drawn = [one.text for one in draw(base, texts, Drawing(tokens, 2.0, 0, NEW, 4))]
    for fold, drafter in enumerate((*found.folds, found.drafter)):
        kept, more = ([one for one in part if found.fold_of[one.prompt_id] != fold] for part in (texts, drawn))
        assert same_table(drafter.ngram_table, counts_of(base, kept, more).table())


@looped(("given", "greedy"), [({}, True), ({"temperature": 0.5}, False), ({"responses": True}, False)])
def test_answers_that_are_greedy(given: dict[str, float], greedy: bool) -> None:
    """Answers that were sampled, or are given, are not the model's choices."""
    assert CalibrationOptions(**given).greedy is greedy  # type: ignore[arg-type]  # fields by name


@looped("given", [{"responses": True}, {"temperature": 3.0}, {}])
def test_a_calibration_learns_the_models_choices(given: dict[str, float]) -> None:
    """Answers that are given, sampled or greedy: the model's choices after them are counted, not always the answers."""
    base = chat_base(disturbed=0.1)
    prompts = tuple(
        Prompt(f"set:{i:08}", ({"role": "user", "content": f"w{i}"},), None, "w9 w3 w11 w2 w5") for i in range(5)
    )
    loaded = LoadedHeads(cycle_heads(base, 2), "heads", Path("heads"), None, "h1", ())
    chosen = CalibrationOptions(max_new_tokens=6, batch_size=2, **given)  # type: ignore[arg-type]  # fields by name
    everything = PromptSet("chats", "sha", prompts)
    learning = Learning(10)
    run = run_calibration(base, loaded, everything, learning=learning, max_new_tokens=6, batch_size=2, **given)
    texts = encode_prompts(base, everything, 6, scored=True).texts
    if not chosen.responses:
        torch.manual_seed(chosen.seed)
        texts, _ = answer_all(base, texts, chosen)
    drawn = [one.text for one in draw(base, texts, Drawing(10, learning.temperature, learning.seed, 6, 2))]
    assert run.learned is not None
    assert same_table(run.learned.drafter.ngram_table, counts_of(base, texts, drawn).table())


def test_waiting_batches_hold_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a batch are bytes until its forward, as integers of Python take tenfold."""
    seen: list[type] = []

    def choices(_base: Base, rows: Sequence[bytes], _auto_batch: Any) -> Chunk:
        seen.extend(map(type, rows))
        return pack_rows([[0] * (len(row) // 4 - 1) for row in rows])

    monkeypatch.setattr(count_module, "_choices", choices)
    base = tiny_base("llama")
    texts = [Text(f"{i}", [1, 2, i], [3]) for i in range(3)]
    counts = {text.prompt_id: NgramCounts(base.vocab_size) for text in texts}
    count_texts(base, texts, counts, greedy=False, batch_size=2)
    assert seen == [bytes] * 3


def test_only_distinct_prompts_go_through_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer does, and of equal prompts one; each of their texts is counted in its fold."""
    base, heads = planted()
    prompts = [*prompts_of(1, 9), *(Text(f"twin:{i}", [7, 8, 9], []) for i in range(3))]
    texts = answered(base, prompts, NEW)
    seen: list[list[int]] = []

    def noting(base: Base, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        seen.extend(map(list, rows))
        return choices_in(base, rows)

    monkeypatch.setattr(count_module, "choices_in", noting)
    learned(base, heads, texts, new=NEW)
    assert sorted(seen) == sorted([*(text.prompt for text in prompts[:9]), [7, 8, 9]])
    assert same(everything(base, texts, greedy=True), counts_of(base, texts))


@looped(("greedy", "note", "total"), [(True, "prompts counted", 7), (False, "texts counted", 9)])
def test_progress_counts_what_goes_through_the_model(greedy: bool, note: str, total: int) -> None:
    """From 0, batch by batch, to the number of distinct prompts or of texts."""
    base = ending()
    texts = answered(base, [*prompts_of(1, 6), *(Text(f"twin:{i}", [7, 8, 9], []) for i in range(3))], NEW)
    texts = [Text(text.prompt_id, text.prompt, [i]) for i, text in enumerate(texts)]
    calls: list[tuple[int, int, str]] = []
    counts = {text.prompt_id: NgramCounts(base.vocab_size) for text in texts}
    count_texts(base, texts, counts, greedy=greedy, batch_size=4, progress=lambda *call: calls.append(call))
    assert calls == [(done, total, note) for done in (*range(0, total, 4), total)]
