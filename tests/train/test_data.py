"""Training texts: which tokens are answers, by every kind of row, and every way to be wrong is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from looped import looped
from tiny import CHAT, VOCAB, chat_base, tiny_base

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.train.data import Example, TrainingTexts, collate, load_texts
from treeopt.train.loss import IGNORED, targets

TALK = [
    {"role": "system", "content": "w1 w2"},
    {"role": "user", "content": "w3 w4 w5"},
    {"role": "assistant", "content": "w6 w8 w9"},
    {"role": "user", "content": "w10"},
    {"role": "assistant", "content": "w11 w12"},
]


def load(base: Base, folder: Path, rows: list[Any], *, length: int = 100, chat_template: bool = True) -> TrainingTexts:
    """The texts of rows written to a file."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_texts(base, [str(folder / "rows.jsonl")], length=length, chat_template=chat_template)


def refusal(base: Base, folder: Path, rows: list[Any], **options: Any) -> TreeoptError:
    """The error that loading rows ends with."""
    with pytest.raises(TreeoptError) as caught:
        load(base, folder, rows, **options)
    return caught.value


def spoken(base: Base, example: Example) -> list[str]:
    """Each answer of an example as text, special tokens shown."""
    assert base.tokenizer is not None
    return [str(base.tokenizer.decode(example.ids[start:end].tolist())) for start, end in example.answers]


def given(ids: Any, answers: Any, model_id: str) -> dict[str, Any]:
    """A row as `treeopt distill` writes it, whose text is another than its ids."""
    return {"text": "w1 w2", "output": "w3 w4 w5", "ids": ids, "answers": answers, "model_id": model_id}


def test_conversation_spans(tmp_path: Path) -> None:
    """A conversation is rendered whole; its spans are the assistant's turns, each with its end token."""
    base = chat_base()
    assert base.tokenizer is not None
    (example,) = load(base, tmp_path, [{"messages": TALK}]).examples
    assert example.ids.tolist() == base.tokenizer.apply_chat_template(TALK, return_dict=False)
    assert spoken(base, example) == ["w6 w8 w9 <end>", "w11 w12 <end>"]
    assert example.guessable == 3 + 2


def test_conversation_leaves_out_what_follows_the_end(tmp_path: Path) -> None:
    """What a template puts behind the end token is no part of an answer."""
    base = chat_base(template=CHAT.replace("<end> ", "<end> w20 "))
    (example,) = load(base, tmp_path, [{"messages": TALK}]).examples
    assert spoken(base, example) == ["w6 w8 w9 <end>", "w11 w12 <end>"]


def test_conversation_without_an_answer_is_counted(tmp_path: Path) -> None:
    """A user alone teaches nothing: the row is left out and counted."""
    texts = load(chat_base(), tmp_path, [{"messages": TALK[:2]}, {"messages": TALK}])
    assert (len(texts.examples), texts.empty, texts.cut) == (1, 1, 0)
    rows = [{"instruction": "w3", "output": ["w4"]}, {"instruction": "w3", "output": "w4"}]
    assert (texts := load(chat_base(), tmp_path, rows)).empty == 1, len(texts.examples)


def test_template_that_rewrites_earlier_turns(tmp_path: Path) -> None:
    """Where a template drops earlier answers, as templates of reasoning models do, the row is refused by number."""
    forgetful = CHAT.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else 'w20' }}")
    base = chat_base(template=forgetful)
    error = refusal(base, tmp_path, [{"messages": TALK[:3]}, {"messages": TALK}])
    assert error.code is Code.PROMPTS_INVALID
    assert "row 1" in error.what
    assert len(load(base, tmp_path, [{"messages": TALK[:3]}]).examples) == 1


def test_template_whose_request_is_not_followed(tmp_path: Path) -> None:
    """Where an answer does not stand behind the template's request for one, the row is refused."""
    base = chat_base(template=CHAT.replace("{{- '<bot>' if", "{{- '<bot> w20' if"))
    assert refusal(base, tmp_path, [{"messages": TALK}]).code is Code.PROMPTS_INVALID


def test_conversation_without_a_template(tmp_path: Path) -> None:
    """Without the template one turn is plain text and its answer; several turns cannot be told apart."""
    base = chat_base()
    (example,) = load(base, tmp_path, [{"messages": TALK[1:3]}], chat_template=False).examples
    assert base.tokenizer is not None
    assert base.tokenizer.decode(example.ids.tolist()) == "w3 w4 w5 w6 w8 w9 <end>"
    assert spoken(base, example) == ["w6 w8 w9 <end>"]
    (same,) = load(chat_base(template=None), tmp_path, [{"messages": TALK[1:3]}]).examples
    assert np.array_equal(same.ids, example.ids)
    assert refusal(base, tmp_path, [{"messages": TALK}], chat_template=False).code is Code.PROMPTS_INVALID


@looped("field", ["instruction", "prompt"])
def test_request_and_answer(tmp_path: Path, field: str) -> None:
    """A request goes through the template, and its answer ends with the end token."""
    base = chat_base()
    assert base.tokenizer is not None
    (example,) = load(base, tmp_path, [{field: "w3 w4", "output": "w5 w6"}]).examples
    assert base.tokenizer.decode(example.ids.tolist()) == "<user> w3 w4 <bot> w5 w6 <end>"
    assert spoken(base, example) == ["w5 w6 <end>"]


def test_text_and_answer(tmp_path: Path) -> None:
    """Plain text with an answer: the text is the prompt."""
    base = chat_base()
    (example,) = load(base, tmp_path, [{"text": "w3 w4", "output": "w5 w6"}]).examples
    assert spoken(base, example) == ["w5 w6 <end>"]
    assert len(example.ids) == 5


def test_end_of_a_request_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    """Chat models list several end tokens: a turn ends with the tokenizer's, which need not be the first."""
    base = chat_base()
    assert base.tokenizer is not None
    ends = base.eos_ids
    base.model.generation_config.eos_token_id = [5, *ends]
    (example,) = load(base, tmp_path, [{"instruction": "w3 w4", "output": "w5 w6"}]).examples
    assert example.ids[-1] == base.tokenizer.eos_token_id == ends[0]


def test_unusable_fields_beside_others(tmp_path: Path) -> None:
    """Messages in another form are passed over where the row has a text; an empty answer is none."""
    base = chat_base()
    other = {"messages": [{"from": "human", "value": "x"}], "instruction": "w3 w4", "output": "w5 w6"}
    (example,) = load(base, tmp_path, [other]).examples
    assert spoken(base, example) == ["w5 w6 <end>"]
    (example,) = load(base, tmp_path, [{"messages": [], "text": "w3 w4 w5 w6"}]).examples
    assert spoken(base, example) == ["w3 w4 w5 w6"]
    found = load(base, tmp_path, [other, {"text": "w3 w4 w5 w6", "output": ""}])
    assert (len(found.examples), found.empty) == (1, 1)


def test_answer_without_an_end_token(tmp_path: Path) -> None:
    """A model whose generation never ends on a token has answers without one."""
    base = chat_base()
    base.model.generation_config.eos_token_id = None
    (example,) = load(base, tmp_path, [{"instruction": "w3 w4", "output": "w5 w6"}]).examples
    assert spoken(base, example) == ["w5 w6"]


def test_plain_text_in_windows(tmp_path: Path) -> None:
    """Long plain text becomes several examples, none cut; what is left, too short to guess in, is dropped."""
    base = chat_base()
    assert base.tokenizer is not None
    text = " ".join(f"w{i % 50}" for i in range(22))
    texts = load(base, tmp_path, [{"text": text}], length=10)
    assert [len(example.ids) for example in texts.examples] == [10, 10]
    ids = np.concatenate([example.ids for example in texts.examples])
    assert ids.tolist() == base.tokenizer(text).input_ids[:20]
    assert all(example.answers == ((0, 10),) for example in texts.examples)
    assert (texts.cut, texts.empty) == (0, 0)


def test_long_conversations_are_cut_and_counted(tmp_path: Path) -> None:
    """A conversation beyond the length loses its end, and its later answers; one that fits is no cut."""
    base = chat_base()
    texts = load(base, tmp_path, [{"messages": TALK}, {"messages": TALK[1:3]}], length=14)
    assert [len(example.ids) for example in texts.examples] == [14, 9]
    assert texts.cut == 1
    assert spoken(base, texts.examples[0]) == ["w6 w8 w9 <end>"]
    (short,) = load(base, tmp_path, [{"messages": TALK}], length=11).examples
    assert spoken(base, short) == ["w6 w8 w9"]
    assert short.answers[-1][1] == 11


def test_empty_rows_are_counted(tmp_path: Path) -> None:
    """Answers of one token leave nothing to guess: counted, not an error."""
    rows = [{"text": "w1"}, {"text": "w1 w2"}, {"text": "w1 w2 w3"}]
    texts = load(chat_base(), tmp_path, rows)
    assert (len(texts.examples), texts.empty) == (1, 2)  # the first token is no guess, the second a root
    assert texts.examples[0].guessable == 1


def test_nothing_left(tmp_path: Path) -> None:
    """Where no row has an answer of two tokens there is nothing to train on."""
    error = refusal(chat_base(), tmp_path, [{"text": "w1 w2"}, {"messages": TALK[:2]}])
    assert error.code is Code.PROMPTS_EMPTY
    assert "rows.jsonl" in error.what


def test_given_ids_of_the_same_base(tmp_path: Path) -> None:
    """Token ids written with the same base are used as they are, text or not."""
    base = chat_base()
    row = given([5, 6, 7, 8, 9, 10], [[2, 4], [5, 6]], base.fingerprint)
    (example,) = load(base, tmp_path, [row]).examples
    assert example.ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert example.ids.dtype == np.int32
    assert example.answers == ((2, 4), (5, 6))


def test_given_ids_of_another_base(tmp_path: Path) -> None:
    """Token ids of another base are another language: the row's text is encoded."""
    base = chat_base()
    end = base.eos_ids[0]
    (example,) = load(base, tmp_path, [given([5, 6, 7, end], [[2, 4]], "0123456789abcdef")]).examples
    assert spoken(base, example) == ["w3 w4 w5 <end>"]
    (example,) = load(base, tmp_path, [given([5, 6, 7, 8], [[2, 4]], "0123456789abcdef")]).examples
    assert spoken(base, example) == ["w3 w4 w5"], "an answer that distill cut has no end"


def test_turns_of_another_base_are_learned_once(tmp_path: Path) -> None:
    """`distill` writes a row for each turn: the answer is the last one, with its end where it was not cut."""
    base = chat_base()
    for last, said in ((base.eos_ids[0], "w11 w12 <end>"), (8, "w11 w12")):
        row = {**given([5, 6, last], [[1, 3]], "0123456789abcdef"), "messages": TALK}
        (example,) = load(base, tmp_path, [row]).examples
        assert spoken(base, example) == [said]


def test_given_ids_need_no_tokenizer(tmp_path: Path) -> None:
    """Token ids are enough where the base has no tokenizer; text is not."""
    base = tiny_base("llama")
    assert len(load(base, tmp_path, [given([5, 6, 7, 8], [[1, 4]], base.fingerprint)]).examples) == 1
    assert refusal(base, tmp_path, [{"text": "w1 w2 w3"}]).code is Code.MODEL_INVALID


@looped(
    ("ids", "answers"),
    [
        ([5, VOCAB, 7, 8], [[1, 4]]),
        ([5, -1, 7, 8], [[1, 4]]),
        ([5, 6.0, 7, 8], [[1, 4]]),
        ("5678", [[1, 4]]),
        ([5, 6, 7, 8], None),
        ([5, 6, 7, 8], [[1, 5]]),
        ([5, 6, 7, 8], [[-1, 3]]),
        ([5, 6, 7, 8], [[3, 2]]),
        ([5, 6, 7, 8], [[1, 2, 3]]),
        ([5, 6, 7, 8], [[1]]),
        ([5, 6, 7, 8], [1, 4]),
    ],
)
def test_given_ids_that_do_not_fit(tmp_path: Path, ids: Any, answers: Any) -> None:
    """Ids outside the vocabulary and spans outside the ids are refused, with the row's number."""
    base = chat_base()
    rows = [given([5, 6, 7, 8], [[1, 4]], base.fingerprint), given(ids, answers, base.fingerprint)]
    error = refusal(base, tmp_path, rows)
    assert error.code is Code.PROMPTS_INVALID
    assert "row 1" in error.what


@looped("row", [{}, 7, {"messages": []}, {"messages": "hello"}, {"output": "w1 w2"}, [1, 2]])
def test_rows_that_are_no_texts(tmp_path: Path, row: Any) -> None:
    """A row without a usable field is refused."""
    assert refusal(chat_base(), tmp_path, [row]).code is Code.PROMPTS_INVALID


def test_several_files(tmp_path: Path) -> None:
    """Files are read one after another, and each one's hash is kept."""
    base = chat_base()
    names = [str(tmp_path / name) for name in ("one.jsonl", "two.jsonl")]
    for name, text in zip(names, ("w1 w2 w3", "w4 w5 w6 w8"), strict=True):
        Path(name).write_text(json.dumps({"text": text}) + "\n")
    texts = load_texts(base, names, length=10)
    assert [len(example.ids) for example in texts.examples] == [3, 4]
    assert texts.names == tuple(names)
    assert len(set(texts.sha256)) == 2
    assert load_texts(base, names[:1], length=10).sha256 == texts.sha256[:1]


def test_collate_by_hand() -> None:
    """Ids are padded on the right, and answers are numbered from 1 in each text."""
    one = Example(np.array([5, 6, 7, 8, 9], np.int32), ((1, 3), (4, 5)))
    two = Example(np.array([3, 4], np.int32), ((0, 2),))
    batch = collate([one, two])
    assert batch["ids"].tolist() == [[5, 6, 7, 8, 9], [3, 4, 0, 0, 0]]
    assert batch["answers"].tolist() == [[0, 1, 1, 0, 2], [1, 1, 0, 0, 0]]


def test_guessable_counts_first_targets() -> None:
    """What an example calls guessable is what the first head is asked, for random spans."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        cuts = sorted(rng.choice(21, 4, replace=False).tolist())
        example = Example(rng.integers(0, VOCAB, 20).astype(np.int32), ((cuts[0], cuts[1]), (cuts[2], cuts[3])))
        batch = collate([example, dataclasses.replace(example, answers=())])
        first = targets(batch["ids"], batch["answers"], 1)
        assert int((first[0] != IGNORED).sum()) == example.guessable
        assert int((first[1] != IGNORED).sum()) == 0


def test_conversation_that_the_assistant_begins(tmp_path: Path) -> None:
    """A template that cannot stand before the first turn refuses the row by its number."""
    said = [{"role": "assistant", "content": "w1 w2"}, {"role": "user", "content": "w3"}]
    error = refusal(chat_base(), tmp_path, [{"messages": TALK}, {"messages": said}])
    assert error.code is Code.PROMPTS_INVALID
    assert f"row 1 of {tmp_path / 'rows.jsonl'}" in error.what


def test_half_a_surrogate_pair_in_an_answer(tmp_path: Path) -> None:
    """Half of a surrogate pair in a conversation is a question mark, not a crash."""
    base = chat_base()
    rows = [[{"role": "user", "content": "w1"}, {"role": "assistant", "content": f"w2 {x} w3"}] for x in "\ud800?"]
    one, other = load(base, tmp_path, [{"messages": row} for row in rows]).examples
    assert one.ids.tolist() == other.ids.tolist()
