"""Distill: the model's own answers, turn by turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from looped import looped
from tiny import chat_base, cycle_base, walk

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.texts.prompts import PromptSet, load_prompts
from treeopt.train.data import load_texts
from treeopt.train.distill import Distilled, SelfTalk, distill

END = walk(0, 8)[7]
ANSWER = "w28 w33 w10 w3 w20 w21"  # of `chat_base()` to whatever is asked


def prompts(folder: Path, rows: list[Any], name: str = "seeds.jsonl") -> PromptSet:
    """Prompts from rows written to a file."""
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_prompts(str(folder / name))


def questions(folder: Path, count: int = 5, name: str = "seeds.jsonl") -> PromptSet:
    """Requests of different lengths."""
    return prompts(
        folder, [{"instruction": " ".join(f"w{i + j}" for j in range(1 + i % 3))} for i in range(count)], name
    )


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(base: Base, seeds: PromptSet | SelfTalk, path: Path, **options: Any) -> Distilled:
    """Distill with a small budget."""
    return distill(base, seeds, path, **{"max_new_tokens": 8, "batch_size": 2, **options})


def refusal(base: Base, seeds: PromptSet | SelfTalk, path: Path, **options: Any) -> TreeoptError:
    """The error that a run ends with."""
    with pytest.raises(TreeoptError) as caught:
        run(base, seeds, path, **options)
    return caught.value


def test_greedy_answers_are_stock_generate(tmp_path: Path) -> None:
    """Answers to single requests are those of stock generate to each alone, with their ids and spans."""
    base = chat_base(disturbed=0.3)
    assert base.tokenizer is not None
    done = run(base, questions(tmp_path), tmp_path / "out.jsonl", max_new_tokens=12)
    rows = rows_of(tmp_path / "out.jsonl")
    assert len(rows) == 5
    for row, prompt in zip(rows, questions(tmp_path).prompts, strict=True):
        ids = base.tokenizer.apply_chat_template(
            list(prompt.messages or ()), add_generation_prompt=True, return_dict=False
        )
        alone = {"attention_mask": torch.ones(1, len(ids), dtype=torch.int64), "do_sample": False}
        out = base.model.generate(torch.tensor([ids]), max_new_tokens=12, **alone)[0].tolist()
        assert row["ids"] == out
        assert row["answers"] == [[len(ids), len(out)]]
        answer = base.tokenizer.decode(out[len(ids) :], skip_special_tokens=True)
        assert row["messages"] == [*(prompt.messages or ()), {"role": "assistant", "content": answer}]
        assert row["model_id"] == base.fingerprint
    assert len({tuple(row["ids"][row["answers"][0][0] :]) for row in rows}) > 1  # what is asked has a say
    tokens = sum(end - start for row in rows for start, end in row["answers"])
    assert (done.rows, done.tokens, done.skipped) == (5, tokens, ())


def test_several_turns_feed_the_models_own_answers(tmp_path: Path) -> None:
    """The user's turns are put one by one, each after the model's own answers, and each answer is a row."""
    base = chat_base()
    assert base.tokenizer is not None
    said = [
        {"role": "system", "content": "w1"},
        {"role": "user", "content": "w2 w4"},
        {"role": "assistant", "content": "w8 w9"},  # another's answer: never seen
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": "w8 w9"},
    ]
    run(base, prompts(tmp_path, [{"messages": said}, {"instruction": "w6"}]), tmp_path / "out.jsonl")
    rows = rows_of(tmp_path / "out.jsonl")
    own = {"role": "assistant", "content": ANSWER}
    assert [row["messages"] for row in rows] == [
        [*said[:2], own],
        [*said[:2], own, said[3], own],
        [{"role": "user", "content": "w6"}, own],
    ]
    assert base.tokenizer.decode(rows[1]["ids"]) == (
        f"<sys> w1 <user> w2 w4 <bot> {ANSWER} <end> <user> w5 <bot> {ANSWER} <end>"
    )
    assert [row["answers"] for row in rows] == [[[6, 13]], [[16, 23]], [[3, 10]]]
    assert len({row["id"] for row in rows}) == 2


def test_conversation_ends_with_a_cut_answer(tmp_path: Path) -> None:
    """An answer that its budget cut is kept, no further turn follows it, and the run counts such conversations."""
    said = [{"role": "user", "content": "w2"}, {"role": "user", "content": "w3"}]
    done = run(chat_base(), prompts(tmp_path, [{"messages": said}]), tmp_path / "out.jsonl", max_new_tokens=3)
    assert done.ended_early == 1
    (row,) = rows_of(tmp_path / "out.jsonl")
    assert row["messages"][-1] == {"role": "assistant", "content": "w28 w33 w10"}


def test_plain_text_is_continued(tmp_path: Path) -> None:
    """Plain text is continued as it stands, without the template."""
    base = chat_base()
    run(base, prompts(tmp_path, [{"text": "w2 <bot> w28"}]), tmp_path / "out.jsonl")
    (row,) = rows_of(tmp_path / "out.jsonl")
    assert (row["text"], row["output"]) == ("w2 <bot> w28", "w33 w10 w3 w20 w21")
    assert row["ids"] == [2, *walk(0, 8)]
    assert row["answers"] == [[3, 9]]


def test_self_talk_with_template(tmp_path: Path) -> None:
    """The model writes the user's turns and answers them; rows grow turn by turn."""
    base = chat_base()
    assert base.tokenizer is not None
    done = run(base, SelfTalk(6, turns=2, opening_tokens=4), tmp_path / "out.jsonl")
    rows = rows_of(tmp_path / "out.jsonl")
    assert done.rows == len(rows) > 6
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles in (["user", "assistant"], ["user", "assistant"] * 2)
        (start, end) = row["answers"][0]
        asked = base.tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
        assert row["ids"][:start] == asked
        assert end == len(row["ids"])
        assert all(message["content"].strip() for message in row["messages"][::2])
    assert len({row["messages"][0]["content"] for row in rows}) > 3  # sampled, whatever the answers' temperature
    assert all(row["messages"][-1]["content"] == ANSWER for row in rows)


def test_self_talk_plain(tmp_path: Path) -> None:
    """Without a template the model writes how a text begins, from its first token on, and then goes on."""
    base = chat_base(template=None)
    assert base.tokenizer is not None
    base.tokenizer.bos_token = "<user>"
    begin = base.tokenizer.bos_token_id
    run(base, SelfTalk(6, opening_tokens=3), tmp_path / "out.jsonl", max_new_tokens=5)
    rows = rows_of(tmp_path / "out.jsonl")
    assert 0 < len(rows) <= 6
    for row in rows:
        start, end = row["answers"][0]
        assert (row["ids"][0], start) == (begin, 4)
        assert base.tokenizer.decode(row["ids"][1:start], skip_special_tokens=True) == row["text"]
        assert row["output"] == base.tokenizer.decode(row["ids"][start:end], skip_special_tokens=True)
        assert row["ids"][start:] == walk(row["ids"][start - 1], 1 + end - start)[1:]  # greedy
    assert len({row["text"] for row in rows}) > 1


def test_self_talk_begins_with_the_end_token(tmp_path: Path) -> None:
    """A tokenizer without a first token lends the one that ends texts; with neither, self-talk is refused."""
    base = chat_base(template=None)
    run(base, SelfTalk(2, opening_tokens=3), tmp_path / "out.jsonl")
    assert all(row["ids"][0] == END for row in rows_of(tmp_path / "out.jsonl"))
    assert base.tokenizer is not None
    base.tokenizer.eos_token = None
    assert refusal(base, SelfTalk(2), tmp_path / "none.jsonl").code is Code.MODEL_INVALID


def test_self_talk_turns_need_a_template(tmp_path: Path) -> None:
    """Several turns are refused where no template tells them apart."""
    for base, used in ((chat_base(template=None), True), (chat_base(), False)):
        error = refusal(base, SelfTalk(2, turns=2), tmp_path / "out.jsonl", chat_template=used)
        assert error.code is Code.PROMPTS_INVALID
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_cannot_be_rendered_ends_the_run_before_any_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation without a template among others."""
    monkeypatch.setattr(Base, "generate", None)
    rows = [{"instruction": "w1"}] * 3 + [
        {"messages": [{"role": role, "content": "w1"} for role in ("system", "user")]}
    ]
    error = refusal(chat_base(template=None), prompts(tmp_path, rows), tmp_path / "out.jsonl")
    assert error.code is Code.PROMPTS_INVALID
    assert "is a conversation, but no chat template is in use" in error.what


def test_self_talk_that_ends_in_its_opening_is_named(tmp_path: Path) -> None:
    """Openings that end the text give no row; where none is left that is an error."""
    base = chat_base(template=None)
    base.model.generation_config.eos_token_id = list(range(61))  # any token ends a text
    error = refusal(base, SelfTalk(2), tmp_path / "out.jsonl")
    assert error.code is Code.PROMPTS_EMPTY
    assert "ended in its opening" in error.what
    assert list(tmp_path.iterdir()) == []


def test_sampling_by_seed(tmp_path: Path) -> None:
    """Sampled answers are the same for one seed and other ones for another, whatever was drawn before."""
    base, seeds = chat_base(), questions(tmp_path)
    written = []
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        torch.rand(7)
        run(base, seeds, tmp_path / name, temperature=1.5, seed=seed)
        written.append([row["ids"] for row in rows_of(tmp_path / name)])
    assert written[0] == written[1]
    assert written[0] != written[2]
    assert (tmp_path / "one").read_bytes() == (tmp_path / "same").read_bytes()
    assert rows_of(tmp_path / "one")[0]["source"]["answers"] == "sampled at 1.5"
    run(base, seeds, tmp_path / "greedy")
    assert [row["ids"] for row in rows_of(tmp_path / "greedy")] != written[0]


def test_too_long_prompts_are_skipped_and_named(tmp_path: Path) -> None:
    """Prompts that do not fit with the budget are left out, counted and named, wherever they stand."""
    base = chat_base()
    seeds = prompts(tmp_path, [{"instruction": "w1"}, {"instruction": "w2 " * 254}, {"instruction": "w3"}])
    done = run(base, seeds, tmp_path / "out.jsonl")
    assert [(skip.prompt_id, skip.tokens, skip.reason) for skip in done.skipped] == [
        (seeds.prompts[1].id, 256, "too long for the context")
    ]
    assert [row["messages"][0]["content"] for row in rows_of(tmp_path / "out.jsonl")] == ["w1", "w3"]


def test_prompts_kept_for_judging(tmp_path: Path) -> None:
    """Seeds that begin as an excluded prompt are left out and named, in either form; others are answered."""
    talk = {"messages": [{"role": "user", "content": "w4 "}, {"role": "user", "content": "w5"}]}
    seeds = prompts(tmp_path, [{"instruction": "w1"}, {"text": "w2 w3"}, talk, {"text": "w5"}, {"text": "w6"}])
    exclude = prompts(tmp_path, [{"text": "w1"}, {"instruction": "w2 w3"}, {"instruction": "w4"}], "judge.jsonl")
    done = run(chat_base(), seeds, tmp_path / "out.jsonl", exclude=exclude)
    assert [row["text"] for row in rows_of(tmp_path / "out.jsonl")] == ["w5", "w6"]
    assert [skip.prompt_id for skip in done.skipped] == [prompt.id for prompt in seeds.prompts[:3]]
    assert {skip.reason for skip in done.skipped} == {"an evaluation prompt"}


def test_prompts_that_all_are_too_long(tmp_path: Path) -> None:
    """Where no seed gives an answer nothing is written."""
    seeds = prompts(tmp_path, [{"instruction": "w2 " * 300}])
    error = refusal(chat_base(), seeds, tmp_path / "out.jsonl")
    assert error.code is Code.PROMPTS_EMPTY
    assert "too long" in error.what
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seeds.jsonl"]


def test_base_without_tokenizer(tmp_path: Path) -> None:
    """Text needs a tokenizer."""
    error = refusal(cycle_base(), questions(tmp_path), tmp_path / "out.jsonl")
    assert error.code is Code.MODEL_INVALID


@looped("used", [True, False])
def test_output_is_training_data_and_prompts(tmp_path: Path, used: bool) -> None:
    """The file is read as texts, with the very tokens, and as prompts with answers."""
    base = chat_base()
    run(base, questions(tmp_path), tmp_path / "out.jsonl", chat_template=used)
    rows = rows_of(tmp_path / "out.jsonl")
    texts = load_texts(base, [str(tmp_path / "out.jsonl")], length=100, chat_template=used)
    assert [example.ids.tolist() for example in texts.examples] == [row["ids"] for row in rows]
    assert [[list(span) for span in example.answers] for example in texts.examples] == [row["answers"] for row in rows]
    answered = load_prompts(str(tmp_path / "out.jsonl"), answers=True)
    assert [prompt.answer for prompt in answered.prompts] == [row["messages"][-1]["content"] for row in rows]
    assert [prompt.messages for prompt in answered.prompts] == [tuple(row["messages"][:-1]) for row in rows]
