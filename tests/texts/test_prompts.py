"""Prompts: every file form and field is read, and what cannot be used is refused by file and row."""

from __future__ import annotations

import datetime
import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from looped import looped
from pyarrow import parquet
from refusals import refusal_of

from treeopt.errors import EXIT_ENVIRONMENT, EXIT_INPUT, Code, TreeoptError
from treeopt.models import hub
from treeopt.texts import prompts as prompts_module
from treeopt.texts.prompts import Prompt, PromptSet, load_prompts, row_of

ROWS = [{"instruction": "Name a bird."}, {"instruction": "Name a fish.", "output": "A carp."}]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """An empty folder, an empty hub cache and no hub; the list takes every address that is connected to."""
    tried: list[object] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "hub_reachable", lambda: False)
    monkeypatch.setattr(prompts_module, "hub_reachable", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", lambda _self, address: tried.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_more, **_named: tried.append(host))
    monkeypatch.setattr("datasets.get_dataset_split_names", lambda name, **_named: tried.append(name))
    return tried


def write_rows(file: Path, rows: list[Any]) -> Path:
    """A prompt file in the form that its suffix names."""
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif file.suffix == ".txt":
        file.write_text("".join(row + "\n" for row in rows))
    else:
        file.write_text(json.dumps(rows))
    return file


def one(tmp_path: Path, row: Any, **options: Any) -> Prompt:
    """The prompt made of one row."""
    return load_prompts(str(write_rows(tmp_path / "one.json", [row])), **options).prompts[0]


def refusal(name: Path | str, **options: Any) -> TreeoptError:
    """The error that loading ends with."""
    return refusal_of(load_prompts, str(name), **options)


def contents(prompts: PromptSet) -> list[str]:
    """What each prompt says."""
    return [prompt.text if prompt.messages is None else prompt.messages[-1]["content"] for prompt in prompts.prompts]


@looped("suffix", [".json", ".jsonl", ".parquet"])
def test_load_prompts_rows(tmp_path: Path, suffix: str) -> None:
    """The same rows come out of all three forms."""
    prompts = load_prompts(str(write_rows(tmp_path / f"rows{suffix}", ROWS)))
    assert contents(prompts) == ["Name a bird.", "Name a fish."]
    assert prompts.prompts[0].messages == ({"role": "user", "content": "Name a bird."},)


@looped("suffix", [".txt", ".json", ".jsonl"])
def test_load_prompts_plain_strings(tmp_path: Path, suffix: str) -> None:
    """A bare string, or a line of a .txt, is a request."""
    prompts = load_prompts(str(write_rows(tmp_path / f"rows{suffix}", ["Name a bird.", "Näme ä fish."])))
    assert contents(prompts) == ["Name a bird.", "Näme ä fish."]
    assert prompts.prompts[1].messages == ({"role": "user", "content": "Näme ä fish."},)


@looped(("suffix", "line"), [(".txt", "{}"), (".jsonl", '"{}"')])
def test_load_prompts_blank_lines(tmp_path: Path, suffix: str, line: str) -> None:
    """Blank lines are no prompts."""
    (tmp_path / f"rows{suffix}").write_text("\n".join(["", line.format("a"), "  ", line.format("b"), ""]))
    assert contents(load_prompts(str(tmp_path / f"rows{suffix}"))) == ["a", "b"]


@looped("field", ["instruction", "prompt"])
def test_load_prompts_request_fields(tmp_path: Path, field: str) -> None:
    """`instruction` and `prompt` are requests."""
    prompt = one(tmp_path, {field: "Name a bird.", "other": 3})
    assert (prompt.messages, prompt.text) == (({"role": "user", "content": "Name a bird."},), None)


def test_load_prompts_text_instruction_and_chat(tmp_path: Path) -> None:
    """`text` is continued, an `input` follows its instruction, a chat is taken whole but for its last answer."""
    prompt = one(tmp_path, {"text": "Once upon a time"})
    assert (prompt.messages, prompt.text) == (None, "Once upon a time")
    with_input = one(tmp_path, {"instruction": "Translate.", "input": "a bird"})
    without = one(tmp_path, {"instruction": "Translate.", "input": ""})
    assert with_input.messages == ({"role": "user", "content": "Translate.\n\na bird"},)
    assert without.messages == ({"role": "user", "content": "Translate."},)
    asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    chat = [*asked, {"role": "assistant", "content": "Hello"}]
    assert one(tmp_path, {"messages": asked}).messages == tuple(asked)
    answered = one(tmp_path, {"messages": chat}, answers=True)
    assert (answered.messages, answered.answer) == (tuple(asked), "Hello")


QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Shorter."], "reference": ["a", "b"]},
    {"question_id": 1, "category": "translation", "turns": ["Translate: Vogel"]},
]


@looped("suffix", [".jsonl", ".parquet"])
def test_load_prompts_turns(tmp_path: Path, suffix: str) -> None:
    """MT-bench's and Spec-Bench's rows begin with their first turn, keep the others, and their category."""
    first, second = load_prompts(str(write_rows(tmp_path / f"question{suffix}", QUESTIONS))).prompts
    assert (first.messages, first.text) == (({"role": "user", "content": "Write a post."},), None)
    assert (first.category, first.turn, first.later) == ("writing", 1, ("Shorter.",))
    assert (second.category, second.later) == ("translation", ())


def test_load_prompts_turns_under_prompt(tmp_path: Path) -> None:
    """The hub's MT-bench lists its turns under `prompt`; one text there is one request, as ever."""
    prompt = one(tmp_path, {"category": "math", "prompt": ["a", "b"], "prompt_id": 3})
    assert (prompt.messages, prompt.later) == (({"role": "user", "content": "a"},), ("b",))
    assert one(tmp_path, {"prompt": "a", "turns": []}).later == ()
    asked = {"messages": [{"role": "user", "content": "a"}], "turns": ["a", "b"]}
    assert one(tmp_path, asked).later == ()  # messages have the turns already


@looped(
    "name, said", [("set:00000003.02", "row 3 turn 2"), ("mine:7", "row 7"), ("request", "request"), ("a:b", "a:b")]
)
def test_row_of_any_id(name: str, said: str) -> None:
    """Ids of callers are of any form."""
    assert row_of(name) == said


def test_prompt_after_an_answer(tmp_path: Path) -> None:
    """The next turn holds all that was said; its id sorts between its row's and the next row's."""
    rows = [{"turns": [f"t{i}" for i in range(12)]}, "other"]
    first, other = load_prompts(str(write_rows(tmp_path / "rows.jsonl", rows))).prompts
    prompts = [first]
    while prompts[-1].later:
        prompts.append(prompts[-1].after(f"a{len(prompts) - 1}"))
    assert len(prompts) == 12
    assert [message["content"] for message in prompts[2].messages or ()] == ["t0", "a0", "t1", "a1", "t2"]
    assert [message["role"] for message in prompts[1].messages or ()] == ["user", "assistant", "user"]
    ids = [prompt.id for prompt in (*prompts, other)]
    assert ids == sorted(set(ids))
    assert ids[1] == f"{first.id}.02"


@looped("field", ["output", "response", "completion", "answer"])
def test_load_prompts_answers(tmp_path: Path, field: str) -> None:
    """An answer is read where it is wanted, and only there."""
    row = {"instruction": "Name a bird.", field: "A wren."}
    assert one(tmp_path, row, answers=True).answer == "A wren."
    assert one(tmp_path, row).answer is None


def test_load_prompts_answers_missing(tmp_path: Path) -> None:
    """A row without an answer is refused where answers are wanted, by file and row."""
    file = write_rows(tmp_path / "rows.json", [{"prompt": "a", "answer": "b"}, {"prompt": "c"}])
    error = refusal(file, answers=True)
    assert error.code is Code.PROMPTS_INVALID
    assert f"row 1 of {file}" in error.what


def test_load_prompts_limit(tmp_path: Path) -> None:
    """A limit takes the first rows, leaves their ids as they are, and the rows beyond it are not looked at."""
    file = str(write_rows(tmp_path / "rows.txt", list("abcde")))
    whole, part = load_prompts(file), load_prompts(file, limit=2)
    assert contents(part) == ["a", "b"]
    assert part.prompts == whole.prompts[:2]
    assert part.sha256 == whole.sha256
    assert contents(load_prompts(str(write_rows(tmp_path / "rows.json", ["a", 7])), limit=1)) == ["a"]
    with pytest.raises(ValueError, match="limit -1: it is not a whole number from 0"):
        load_prompts(file, limit=-1)
    with pytest.raises(ValueError, match="skip -1"):
        load_prompts(file, skip=-1)


def test_load_prompts_ids(tmp_path: Path) -> None:
    """A prompt's id is 16 digits of the file's SHA-256 and its row, so ids ascend with the rows."""
    file = write_rows(tmp_path / "rows.txt", ["a"] * 12)
    prompts = load_prompts(str(file))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert prompts.sha256 == digest
    assert [prompt.id for prompt in prompts.prompts[::11]] == [f"{digest[:16]}:00000000", f"{digest[:16]}:00000011"]


@looped(
    ("name", "text", "place"),
    [
        ("rows.json", '[\n "a",\n "b"\n "c"]', ":4:2"),
        ("rows.jsonl", '"a"\n\n{"text": }\n', ":3:10"),
        ("rows.json", "", ":1:1"),
    ],
)
def test_load_prompts_broken_json(tmp_path: Path, name: str, text: str, place: str) -> None:
    """Broken JSON is reported with file, line and column."""
    (tmp_path / name).write_text(text)
    error = refusal(tmp_path / name)
    assert error.code is Code.FILE_INVALID
    assert error.at == f"{tmp_path / name}{place}"


def test_load_prompts_deep_json(tmp_path: Path) -> None:
    """JSON nested too deep to be read is a damaged file, not a crash."""
    (tmp_path / "rows.json").write_text("[" * 100_000)
    assert refusal(tmp_path / "rows.json").code is Code.FILE_INVALID


@looped(("name", "content"), [("rows.parquet", b"PAR1 but not really PAR1"), ("rows.txt", b"\xff\xfe")])
def test_load_prompts_damaged(tmp_path: Path, name: str, content: bytes) -> None:
    """A parquet file that is none, and bytes that are no UTF-8, are damaged files."""
    (tmp_path / name).write_bytes(content)
    error = refusal(tmp_path / name)
    assert error.code is Code.FILE_INVALID
    assert name in error.what


@looped(("name", "text"), [("rows.json", "[]"), ("rows.jsonl", "\n"), ("rows.txt", " \n")])
def test_load_prompts_empty(tmp_path: Path, name: str, text: str) -> None:
    """A file without rows, or a limit of none, leaves no prompt."""
    (tmp_path / name).write_text(text)
    assert refusal(tmp_path / name).code is Code.PROMPTS_EMPTY
    assert refusal(write_rows(tmp_path / "full.txt", ["a"]), limit=0).code is Code.PROMPTS_EMPTY


@looped("name", ["absent.json", "./absent", "absent.txt", "/no/such/place"])
def test_load_prompts_missing(offline: list[object], name: str) -> None:
    """A name that can only be a path is a missing file, and the hub is not asked."""
    error = refusal(name)
    assert (error.code, error.exit_status) == (Code.FILE_MISSING, EXIT_INPUT)
    assert name.removeprefix("./") in error.what
    assert offline == []


def test_load_prompts_other_form(tmp_path: Path) -> None:
    """A file of another form, and JSON that is not a list, are refused with what would work."""
    (tmp_path / "rows.csv").write_text("a,b")
    (tmp_path / "rows.json").write_text('{"instruction": "a"}')
    assert ".jsonl" in refusal(tmp_path / "rows.csv").what
    assert "not a list" in refusal(tmp_path / "rows.json").what


@looped("name", ["owner/prompts", "owner/prompts:train", "alpaca_eval"])
def test_load_prompts_hub_offline(offline: list[object], name: str) -> None:
    """A hub data set and a named set end offline in one environment error, and no connection is tried."""
    error = refusal(name)
    assert (error.code, error.exit_status) == (Code.HUB_UNREACHABLE, EXIT_ENVIRONMENT)
    assert name in error.what
    assert "local path" in error.fix
    assert offline == []


def test_data_set_with_columns_that_are_no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that are not used may hold dates, bytes or NaN."""
    rows = [{"prompt": "a", "when": datetime.date(2026, 1, 2), "raw": b"x", "score": float("nan")}]
    monkeypatch.setattr(prompts_module, "hub_reachable", lambda: True)
    monkeypatch.setattr("datasets.get_dataset_split_names", lambda _name: ["test"])
    monkeypatch.setattr("datasets.load_dataset", lambda _name, split: datasets.Dataset.from_list(rows))
    assert contents(load_prompts("owner/name")) == ["a"]


def test_hub_reachable_offline_mode(offline: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user asked to stay offline the hub is not even tried."""
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    monkeypatch.setattr(socket.socket, "connect", lambda _self, address: offline.append(address))
    assert hub.hub_reachable.__wrapped__() is False
    assert offline == []


def test_load_prompts_alpaca_eval(shared: Path) -> None:
    """The local copy of AlpacaEval gives its 805 instructions as requests."""
    prompts = load_prompts(str(shared / "data" / "alpaca_eval.json"))
    assert len(prompts.prompts) == 805
    assert contents(prompts)[1] == "How did US states get their names?"
    assert all(prompt.messages is not None and len(prompt.messages) == 1 for prompt in prompts.prompts)


def test_line_separators_inside_a_row_do_not_split_it(tmp_path: Path) -> None:
    """A raw U+2028 in a JSON string belongs to it; a byte order mark and CRLF are no part of the text."""
    file = tmp_path / "p.jsonl"
    file.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\r\n'.encode())
    assert [one.messages[0]["content"] for one in load_prompts(str(file)).prompts if one.messages] == ["a\u2028b", "c"]


def test_suffix_in_capitals_is_read(tmp_path: Path) -> None:
    """ROWS.JSON is a .json file."""
    file = tmp_path / "ROWS.JSON"
    file.write_text('["a"]')
    assert len(load_prompts(str(file)).prompts) == 1


def test_alpaca_answers_include_an_empty_one(shared: Path) -> None:
    """AlpacaEval's two rows with an empty answer are read; they are left out where answers are scored."""
    prompts = load_prompts(str(shared / "data/alpaca_eval.json"), answers=True).prompts
    assert [i for i, prompt in enumerate(prompts) if not prompt.answer] == [247, 504]


TEXT = "a text that is not empty"
TEXTS = "a list of texts that are not empty"
FAULTS: list[tuple[Any, str]] = [
    ({"text": 5}, f"has 5 in `text`, which must be {TEXT}"),
    ({"text": ""}, f"has '' in `text`, which must be {TEXT}"),
    ({"text": None}, f"has None in `text`, which must be {TEXT}"),
    ({"text": None, "instruction": ["a"]}, f"has ['a'] in `instruction`, which must be {TEXT}"),
    ({"messages": None, "text": 5}, f"has 5 in `text`, which must be {TEXT}"),
    ({"text": "", "prompt": 1}, f"has 1 in `prompt`, which must be {TEXT}"),
    ({"instruction": True}, f"has True in `instruction`, which must be {TEXT}"),
    ({"instruction": ""}, f"has '' in `instruction`, which must be {TEXT}"),
    ({"prompt": {"a": 1}}, f"has {{'a': 1}} in `prompt`, which must be {TEXT}"),
    ({"prompt": ["a", ""]}, f"has '' in `prompt[1]`, which must be {TEXT}"),
    ({"turns": "Hi"}, f"has 'Hi' in `turns`, which must be {TEXTS}"),
    ({"turns": []}, f"has [] in `turns`, which must be {TEXTS}"),
    ({"turns": None}, f"has None in `turns`, which must be {TEXTS}"),
    ({"turns": ["a", 2.5]}, f"has 2.5 in `turns[1]`, which must be {TEXT}"),
    ({"messages": "Hi"}, "has 'Hi' in `messages`, which must be a list of messages"),
    ({"messages": {}}, "has {} in `messages`, which must be a list of messages"),
    ({"messages": []}, "has [] in `messages`, which must be a list of messages"),
    ({"messages": ["Hi"]}, "has 'Hi' in `messages[0]`, which must be an object with `role` and `content`"),
    ({"messages": [{"content": "Hi"}]}, "has None in `messages[0].role`, which must be a string"),
    ({"messages": [{"role": 1, "content": "Hi"}]}, "has 1 in `messages[0].role`, which must be a string"),
    (
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "user"}]},
        "has None in `messages[1].content`, which must be a string",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "has [{'type': 'text'}] in `messages[0].content`, which must be a string",
    ),
    (
        {"messages": [{"role": role, "content": "a"} for role in ("human", "gpt", "human")]},
        "has ['human', 'gpt'] in `messages[].role`, which must be \"user\" in one of them",
    ),
    ("", f"is '': it must be an object, or {TEXT}"),
    (7, f"is 7: it must be an object, or {TEXT}"),
    (["Hi"], f"is ['Hi']: it must be an object, or {TEXT}"),
    (None, f"is None: it must be an object, or {TEXT}"),
    ({}, "has no usable field"),
    ({"question": "Hi"}, "has no usable field"),
    ({"text": int("9" * 90)}, f"has {'9' * 18}...{'9' * 19} in `text`, which must be {TEXT}"),
]


@looped(("row", "said"), FAULTS)
def test_faults_of_rows_are_named(tmp_path: Path, row: Any, said: str) -> None:
    """A row that is no prompt is told by its field, what that holds, what it must be, and what would work."""
    file = write_rows(tmp_path / "rows.json", ["fine", row])
    error = refusal(file)
    assert error.what == f"row 1 of {file} {said}"
    assert contents(load_prompts(str(write_rows(tmp_path / "fix.json", [json.loads(error.fix.split(" or ")[0])]))))


def test_faults_of_parquet_types_are_named(tmp_path: Path) -> None:
    """Values of types that JSON does not have are shown too."""
    file = write_rows(tmp_path / "rows.parquet", [{"text": b"abc"}])
    assert "has b'abc' in `text`" in refusal(file).what


@looped("answer", [{}, {"output": 3}])
def test_faults_of_answers_are_named(tmp_path: Path, answer: dict[str, Any]) -> None:
    """Where answers are scored, a row must have one, which is a text."""
    file = write_rows(tmp_path / "rows.json", [{"prompt": "a", **answer}])
    error = refusal(file, answers=True)
    assert error.what == f"row 0 of {file} has no answer to score"
    assert "output or response" in error.why


def test_faults_of_many_fields_stay_short(tmp_path: Path) -> None:
    """A row of ten thousand fields is told in a line."""
    file = write_rows(tmp_path / "rows.json", [{f"field{i}": i for i in range(10_000)}])
    assert len(refusal(file).at) < 300


def test_damaged_pages_of_parquet(tmp_path: Path) -> None:
    """A parquet file whose end is whole but whose pages are not is a damaged file."""
    file = write_rows(tmp_path / "rows.parquet", ROWS)
    raw = bytearray(file.read_bytes())
    raw[4:60] = bytes([255]) * 56
    file.write_bytes(bytes(raw))
    assert refusal(file).code is Code.FILE_INVALID


def test_name_that_is_too_long(tmp_path: Path) -> None:
    """A name that no file system takes is no crash."""
    assert refusal(tmp_path / f"{'a' * 300}.jsonl").code is Code.FILE_INVALID
