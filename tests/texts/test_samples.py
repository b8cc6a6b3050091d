"""Texts that a model writes: greedy choices of sampled answers, as many tokens as asked, one progress."""

from __future__ import annotations

import itertools

import pytest
import torch
from drafters import answered, planted, prompts_of
from looped import looped
from tiny import FAMILIES, chat_base, tiny_base

from treeopt.models.base import Base
from treeopt.progress import Progress, silent
from treeopt.texts import samples as draw_module
from treeopt.texts.answers import (
    AnswerOptions,
    ChoiceRecorder,
    Drawn,
    answer_all,
    continue_texts,
    left_padded,
    sample_texts,
)
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import Prompt, PromptSet
from treeopt.texts.samples import draw

NEW = 8


def drawn(
    base: Base, texts: list[Text], tokens: int, *, batch_size: int = 4, progress: Progress = silent
) -> list[Text]:
    """Text drawn at a temperature at which no two answers are alike."""
    options = AnswerOptions(NEW, batch_size, 3.0, 5)
    return [one.text for one in draw(base, texts, tokens, options, progress=progress)]


def ending(base: Base) -> Base:
    """The base with so many tokens that end a text that answers are short."""
    base.model.generation_config.eos_token_id = list(range(20))
    return base


def size(texts: list[Text]) -> int:
    """Tokens of all answers."""
    return sum(len(text.answer) for text in texts)


@pytest.mark.slow
@looped("short", [False, True])
@looped("prompts", [1, 3, 40])
@looped("tokens", [1, 10, 72, 333])
def test_as_many_tokens_as_asked(prompts: int, tokens: int, short: bool) -> None:
    """So many tokens come out, a twentieth more at most, of few prompts or many, of short answers too."""
    base = ending(planted()[0]) if short else planted()[0]
    texts = answered(base, prompts_of(1, prompts), NEW)
    found = drawn(base, texts, tokens)
    assert tokens <= size(found) <= tokens * 1.05
    if prompts == 40 and tokens < 300:  # no whole round
        assert size(found) == tokens
    assert {text.prompt_id for text in found} <= {text.prompt_id for text in texts}
    assert all(0 < len(text.answer) <= NEW for text in found)


def test_no_more_is_generated_than_a_batch_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tokens of forty prompts cost two answers, not a round."""
    base, _ = planted()
    texts = answered(base, prompts_of(1, 40), NEW)
    asked: list[int] = []

    def counting(base: Base, texts: list[Text], max_new_tokens: int, *, temperature: float) -> list[Drawn]:
        asked.append(len(texts) * max_new_tokens)
        return sample_texts(base, texts, max_new_tokens, temperature=temperature)

    monkeypatch.setattr(draw_module, "sample_texts", counting)
    drawn(base, texts, 10, batch_size=10**9)
    assert sum(asked) == 2 * NEW
    asked.clear()
    drawn(base, texts[:1], 100, batch_size=10**9)
    assert sum(asked) == 13 * NEW  # 13 answers of 8 tokens


def test_whole_rounds_are_stock_sampling() -> None:
    """Rounds that fit whole, or nearly, are stock sampled generate; the seed of a batch has its number."""
    base, _ = planted()
    texts = answered(base, prompts_of(1, 9), NEW)
    expected = []
    order = sorted(texts, key=lambda text: (len(text.prompt), text.prompt_id))
    for part in range(2):
        for start in range(0, 9, 4):
            batch = order[start : start + 4]
            torch.manual_seed(5 * 1_000_003 + 3 * part + start // 4 + 2**31)
            ids, mask = left_padded([text.prompt for text in batch], base.pad_id)
            out = base.generate(ids, mask, NEW, temperature=3.0)[:, ids.shape[1] :].tolist()
            expected += [(text.prompt_id, answer) for text, answer in zip(batch, out, strict=True)]
    for tokens in (2 * 9 * NEW - 6, 2 * 9 * NEW, 2 * 9 * NEW + 20):
        found = [(text.prompt_id, text.answer) for text in drawn(base, texts, tokens)]
        assert found[:18] == expected
        assert len(found) == (18 if tokens <= 2 * 9 * NEW else 21)


def test_part_of_a_round_is_of_all_lengths() -> None:
    """Where a round need not be whole its prompts are spread over all lengths, not the shortest."""
    base, _ = planted()
    texts = answered(base, [Text(f"set:{i:08}", [i + 1] * (i + 1), []) for i in range(40)], NEW)
    lengths = [len(text.prompt) for text in drawn(base, texts, 10 * NEW)]
    assert lengths == list(range(1, 41, 4))


@looped(("tokens", "short"), [(200, False), (200, True), (210, False)])  # 216 are three whole rounds
def test_one_progress_over_all_tokens(tokens: int, short: bool) -> None:
    """Over all rounds progress rises from 0 by the tokens that were drawn, towards nearly one total, and ends there."""
    base = ending(planted()[0]) if short else planted()[0]
    texts = answered(base, prompts_of(1, 9), NEW)
    calls: list[tuple[int, int, str]] = []
    found = drawn(base, texts, tokens, progress=lambda *what: calls.append(what))
    done = [one for one, _, _ in calls]
    assert done == sorted(set(done))
    assert done[0] == 0
    assert all(after - before <= 4 * NEW for before, after in itertools.pairwise(done))
    assert done[-1] == calls[-1][1] == size(found)
    assert all(note.startswith("tokens sampled") for _, _, note in calls)
    assert all(done <= total and tokens <= total <= tokens * 1.05 for done, total, _ in calls)


def test_a_model_without_a_choice_ends_the_drawing() -> None:
    """Where every round repeats the one before nothing more is drawn."""
    base, _ = planted()
    texts = answered(base, prompts_of(1, 3), NEW)
    calls: list[tuple[int, int, str]] = []
    options = AnswerOptions(NEW, 4, 1e-4, 0)
    found = [one.text for one in draw(base, texts, 10**12, options, progress=lambda *what: calls.append(what))]
    assert 0 < size(found) <= 4 * 6 * NEW
    assert calls[-2][2] == "tokens sampled, 0% of the answers new"
    assert calls[-1] == (size(found), size(found), "tokens sampled, no more answers are new")


def test_each_batch_is_handed_on_when_it_is_finished() -> None:
    """No answers are collected: those of a batch come before the next batch is written, and none is asked for 0."""
    base, _ = planted()
    texts = answered(base, prompts_of(1, 9), NEW)
    done: list[int] = []
    answers = draw(base, texts, 200, AnswerOptions(NEW, 4, 3.0, 5), progress=lambda *what: done.append(what[0]))
    so_far = 0
    for one in answers:
        so_far += len(one.text.answer)
        assert done[-1] - 4 * NEW < so_far <= done[-1]
    assert list(draw(base, texts, 0, AnswerOptions(NEW, 4, 3.0, 5), progress=lambda *what: done.clear())) == []
    assert done


NEW_answers = 12


def choices_at(base: Base, text: Text) -> list[int]:
    """The model's greedy choice at the place of each token of the answer, by one forward a prefix, without a batch."""
    prefixes = [[*text.prompt, *text.answer[:i]] for i in range(len(text.answer))]
    with torch.inference_mode():
        return [int(base.model(torch.tensor([prefix])).logits[0, -1].argmax()) for prefix in prefixes]


@looped("family", FAMILIES)
@looped("temperature", [0.7, 3.0])
def test_choices_of_sampled_answers(family: str, temperature: float) -> None:
    """In a batch of prompts of any lengths, with ends of text: the greedy choice at each token of the cut answer."""
    base = tiny_base(family, 3)
    base.model.generation_config.eos_token_id = list(range(6))
    base.model.generation_config.repetition_penalty = 5.0  # of no effect on the choices, as on the answers
    # gpt_neo's local layers and mamba see the padding before a prompt, in stock `generate` too
    longest = 1 if family in ("mamba", "gpt_neo") else 12
    torch.manual_seed(7)
    drawn = sample_texts(base, prompts_of(1, 6, longest=longest), NEW_answers, temperature=temperature)
    assert len({len(one.text.answer) for one in drawn}) > 1
    for one in drawn:
        assert one.choices == choices_at(base, one.text)
    assert any(one.choices != one.text.answer for one in drawn)


@looped("temperature", [0.0, 1.5])
def test_recording_changes_no_answer(temperature: float) -> None:
    """The answers are those of `continue_texts` by the same seed; greedy answers are their choices."""
    base = tiny_base("llama", 3)
    base.model.generation_config.eos_token_id = list(range(6))
    prompts = prompts_of(1, 6)
    torch.manual_seed(7)
    expected = continue_texts(base, prompts, NEW_answers, temperature=temperature)
    torch.manual_seed(7)
    drawn = sample_texts(base, prompts, NEW_answers, temperature=temperature)
    assert [one.text for one in drawn] == expected
    assert all((one.choices == one.text.answer) >= (temperature == 0) for one in drawn)


def test_the_smaller_of_tied_tokens_is_chosen() -> None:
    """Of equal logits the smallest id, and the logits are handed on as they are."""
    recorder = ChoiceRecorder()
    scores = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    ids = torch.zeros(2, 4, dtype=torch.int64)
    assert recorder(ids, scores) is scores
    assert recorder(ids, scores.flip(-1)).tolist() == scores.flip(-1).tolist()
    assert recorder.choices() == [[1, 0], [0, 0]]


def test_progress_leaves_out_turns_that_do_not_fit() -> None:
    """Texts done of all texts; once a turn does not fit into the context, the turns after it are not expected."""
    base = chat_base()
    long = " ".join(["w3"] * 300)
    rows = (((),), (("w4", "w5"),), ((long, "w5"),))
    prompts = tuple(
        Prompt(f"set:{i:08}", ({"role": "user", "content": "w2"},), None, None, later=later)
        for i, (later,) in enumerate(rows)
    )
    calls: list[tuple[int, int]] = []
    texts = encode_prompts(base, PromptSet("chats", "sha", prompts), 8).texts
    options = AnswerOptions(max_new_tokens=8, batch_size=2)
    answered, skipped = answer_all(base, texts, options, progress=lambda *call: calls.append(call))
    assert (len(answered), len(skipped)) == (5, 1)
    assert calls == [(4, 7), (5, 5)]
