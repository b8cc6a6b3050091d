"""Answers: sampled ones come with the model's greedy choices, and progress counts the texts that will be written."""

from __future__ import annotations

import torch
from drafters import prompts_of
from looped import looped
from tiny import FAMILIES, chat_base, tiny_base

from treeopt.models.base import Base
from treeopt.texts.answers import AnswerOptions, ChoiceRecorder, answer_all, continue_texts, sample_texts
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import Prompt, PromptSet

NEW = 12


def choices_at(base: Base, text: Text) -> list[int]:
    """The model's greedy choice at the place of each token of the answer, by one forward a prefix, without a batch."""
    prefixes = [[*text.prompt, *text.answer[:i]] for i in range(len(text.answer))]
    with torch.inference_mode():
        return [int(base.model(torch.tensor([prefix])).logits[0, -1].argmax()) for prefix in prefixes]


@looped("family", FAMILIES)
@looped("temperature", [0.7, 1.0, 3.0])
def test_choices_of_sampled_answers(family: str, temperature: float) -> None:
    """In a batch of prompts of any lengths, with ends of text: the greedy choice at each token of the cut answer."""
    base = tiny_base(family, 3)
    base.model.generation_config.eos_token_id = list(range(6))
    base.model.generation_config.repetition_penalty = 5.0  # of no effect on the choices, as on the answers
    # gpt_neo's local layers and mamba see the padding before a prompt, in stock `generate` too
    longest = 1 if family in ("mamba", "gpt_neo") else 12
    torch.manual_seed(7)
    drawn = sample_texts(base, prompts_of(1, 6, longest=longest), NEW, temperature=temperature)
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
    expected = continue_texts(base, prompts, NEW, temperature=temperature)
    torch.manual_seed(7)
    drawn = sample_texts(base, prompts, NEW, temperature=temperature)
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
