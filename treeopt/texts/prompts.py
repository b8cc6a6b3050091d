"""Prompts from a file, a hub data set, a named set or Python objects, and the faults of rows that are not prompts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import reprlib
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from treeopt.errors import Code, TreeoptError, check_counts, counted, first_line
from treeopt.files import strict_yaml
from treeopt.files.bundled import prompt_sets
from treeopt.files.read import MOST_TEXT, parse_json, read_bytes
from treeopt.files.strict_yaml import Schema, check
from treeopt.files.tensors import canonical_json
from treeopt.models.hub import hub_reachable, looks_local, unreachable

_SCHEMA = "treeopt.prompts/1"
_REQUESTS = ("instruction", "prompt")  # fields with a request, for the chat template
ANSWERS = ("output", "response", "completion", "answer")
# Fields with the user turns of a dialogue: in the files of MT-bench and Spec-Bench; in the hub's MT-bench.
_TURNS = ("turns", "prompt")
_ROW_DIGITS = 8
# Rows that work, by field, in the order in which faults are named.
_EXAMPLES = {
    "messages": '{"messages": [{"role": "user", "content": "..."}]}',
    "turns": '{"turns": ["...", "..."]}',
    "instruction": '{"instruction": "..."}',
    "prompt": '{"prompt": "..."}',
    "text": '{"text": "..."}',
}
_SHOWN_SKIPPED = 5
_SHOWN_FIELDS = 200  # characters of a row's field names
_TEXT = "a text that is not empty"
FORMATS = (".json", ".jsonl", ".txt", ".parquet")
_MOST_ROWS = 10_000_000
_BATCH_ROWS = 256  # of a parquet file that are unpacked at a time

Message = Mapping[str, str]


class PromptSetFile(Schema):
    """The format `treeopt.prompts/1`: the place of a named prompt set on the hub."""

    schema_name: Literal["treeopt.prompts/1"] = Field(alias="schema")
    repository: str
    file: str
    reference: str
    license: str


@dataclass(frozen=True)
class Prompt:
    """One prompt: chat messages, or plain text to continue."""

    id: str  # of the row and turn
    messages: tuple[Message, ...] | None  # of a chat; None for plain text
    text: str | None  # plain text; None for a chat
    answer: str | None  # the given answer, where the row has one and it is used
    category: str | None = None  # of the row, where it has one
    turn: int = 1  # of a dialogue, from 1
    later: tuple[str, ...] = ()  # the user turns after this one; `after` makes the next prompt
    row: int = 0  # index of the row in its file

    @property
    def dialogue(self) -> str:
        """The id of the dialogue's first turn: without the suffix that `after` adds to later ones."""
        return self.id.rpartition(".")[0] if self.turn > 1 else self.id

    def after(self, answer: str) -> Prompt:
        """The prompt of the next turn, after this answer."""
        assert self.messages is not None, "only requests have turns"
        said = ({"role": "assistant", "content": answer}, {"role": "user", "content": self.later[0]})
        turn = self.turn + 1
        return dataclasses.replace(
            self,
            id=f"{self.dialogue}.{turn:02}",
            messages=(*self.messages, *said),
            answer=None,
            turn=turn,
            later=self.later[1:],
        )


@dataclass(frozen=True)
class PromptSet:
    """Prompts with their origin: `name` as the user gave it, `sha256` of the file (of the rows, for a data set)."""

    name: str
    sha256: str
    prompts: tuple[Prompt, ...]


def request(text: str) -> Prompt:
    """The prompt of one request."""
    return Prompt("request", ({"role": "user", "content": text},), None, None)


def load_prompts(
    name: str | os.PathLike[str], *, skip: int = 0, limit: int | None = None, answers: bool = False
) -> PromptSet:
    """Prompts by file name, hub data set or named set; a data set is `owner/name` or `owner/name:split`.

    Args:
        name: a .json, .jsonl, .txt or .parquet file; a hub data set; or a named set such as `alpaca_eval`. Rows may be
            those of MT-bench and Spec-Bench: `question_id`, `category`, `turns`.
        skip: number of rows to leave out at the start.
        limit: number of rows after those; None takes all.
        answers: require an answer in each row: `output`, `response`, `completion`, `answer`, or a last assistant
            message.

    Raises:
        TreeoptError: E201 where a file is missing, E301 where the hub is needed and does not answer, E302 where a row
            has no usable field, E303 where there is no row.
    """
    name = os.fspath(name)
    check_counts(0, skip=skip, limit=limit or 0)
    digest, rows = read_rows(name, limit=None if limit is None else skip + limit)
    if skip >= len(rows):
        what = f"{name} holds {len(rows)} prompts, and --skip leaves out {skip}"
        raise TreeoptError(Code.PROMPTS_EMPTY, what, fix="a smaller --skip")
    numbered = list(enumerate(rows))[skip:]
    prompts = tuple(as_prompt(row, row_id(digest, i), name, i, answers) for i, row in numbered)
    return PromptSet(name, digest, prompts)


def read_rows(name: str, *, limit: int | None = None) -> tuple[str, list[Any]]:
    """The sha256 of all rows of a file, hub data set or named set, and the first rows, at least one."""
    path = Path(os.path.expanduser(name))
    if not os.path.isfile(path) and name in prompt_sets():
        path = prompt_sets()[name]
        if path.suffix == ".yaml":
            path = _fetch_set(name, path)
    if os.path.exists(path) or looks_local(name):  # os.path.exists is False for a name that is too long
        digest, rows = _read_file(path)
    else:
        digest, rows = _read_dataset(name)
    if not rows[:limit]:
        raise TreeoptError(Code.PROMPTS_EMPTY, f"{name} holds no prompts")
    return digest, rows[:limit]


def row_id(digest: str, index: int) -> str:
    """The id of a row: its file's sha256 and its index."""
    return f"{digest[:16]}:{index:0{_ROW_DIGITS}}"


def row_of(prompt_id: str) -> str:
    """The row of a prompt in its file, and its turn from the second on; the id itself where a caller chose it."""
    row, _, turn = prompt_id.partition(":")[2].partition(".")
    if not row.isdecimal() or not (turn or "0").isdecimal():
        return prompt_id
    return f"row {int(row)}" + (f" turn {int(turn)}" if turn else "")


def skipped_text(skipped: Sequence[Skipped]) -> str | None:
    """The prompts that were skipped; None where there are none."""
    if not skipped:
        return None
    named = [f"{row_of(s.prompt_id)} ({s.reason}, {s.tokens} tokens)" for s in skipped[:_SHOWN_SKIPPED]]
    more = f" and {len(skipped) - _SHOWN_SKIPPED} more" if len(skipped) > _SHOWN_SKIPPED else ""
    return f"skipped {counted(len(skipped), 'prompt')}: {', '.join(named)}{more}"


def as_prompt(row: Any, prompt_id: str, name: str, index: int, answers: bool) -> Prompt:
    """The prompt in row `index` of `name`, with its answer where `answers` requires one; E302 where one is missing."""
    fields = {_REQUESTS[0]: row} if isinstance(row, str) else row if isinstance(row, dict) else {}
    usable = {field: fields[field] for field in _EXAMPLES if field in fields and fault_of(field, fields[field]) is None}
    turns = next((tuple(usable[field]) for field in _TURNS if isinstance(usable.get(field), (list, tuple))), ())
    request = next((usable[field] for field in _REQUESTS if isinstance(usable.get(field), str)), None)
    answer, chat, text = _answer(fields), None, None
    if "messages" in usable:
        chat, turns = tuple(usable["messages"]), ()
        if chat[-1]["role"] == "assistant":
            answer, chat = chat[-1]["content"], chat[:-1]
    elif turns:
        chat = _asked(turns[0])
    elif request is not None:
        extra = fields.get("input")
        chat = _asked(f"{request}\n\n{extra}" if isinstance(extra, str) and extra else request)
    elif "text" in usable:
        text = usable["text"]
    else:
        raise _no_prompt(row, f"row {index} of {name}")
    if answers and answer is None:
        what = f"row {index} of {name} has no answer to score"
        why = f"an answer is a last message, of the assistant, or a text in {' or '.join(ANSWERS)}"
        raise TreeoptError(Code.PROMPTS_INVALID, what, why=why)
    category = fields.get("category") if isinstance(fields.get("category"), str) else None
    return Prompt(prompt_id, chat, text, answer if answers else None, category, later=turns[1:], row=index)


def _asked(content: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": content},)


def _answer(fields: Mapping[str, Any]) -> str | None:
    """The first answer with text; else an empty one; else None."""
    texts = [fields[name] for name in ANSWERS if isinstance(fields.get(name), str)]
    return next(filter(None, texts), texts[0] if texts else None)


def fault_of(field: str, value: Any) -> tuple[str, Any, str] | None:
    """What makes a field unusable: its first wrong part, the value of this part, and what it must be; else None."""
    if field == "messages":
        return _messages_fault(value)
    if field != "turns" and not (field == "prompt" and isinstance(value, (list, tuple))):
        return None if isinstance(value, str) and value else (field, value, _TEXT)
    if not isinstance(value, (list, tuple)) or not value:
        return field, value, "a list of texts that are not empty"
    parts = enumerate(value)
    return next(((f"{field}[{i}]", one, _TEXT) for i, one in parts if not isinstance(one, str) or not one), None)


def _messages_fault(messages: Any) -> tuple[str, Any, str] | None:
    if not isinstance(messages, list) or not messages:
        return "messages", messages, "a list of messages"
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            return f"messages[{i}]", message, "an object with `role` and `content`"
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                return f"messages[{i}].{key}", message.get(key), "a string"
    roles = [message["role"] for message in messages]
    return None if "user" in roles else ("messages[].role", list(dict.fromkeys(roles)), '"user" in one of them')


def _no_prompt(row: Any, place: str) -> TreeoptError:
    """E302 for a row without a usable field: the fault of the first field that is not null, and a row that works."""
    if not isinstance(row, dict):
        what = f"{place} is {reprlib.repr(row)}: it must be an object, or {_TEXT}"
        return TreeoptError(Code.PROMPTS_INVALID, what, fix=_EXAMPLES["instruction"])
    given = sorted((field for field in _EXAMPLES if field in row), key=lambda field: row[field] is None)
    at = f"it has: {textwrap.shorten(', '.join(map(str, row)), _SHOWN_FIELDS)}"
    fault = fault_of(given[0], row[given[0]]) if given else None
    if fault is None:
        fix = f"{_EXAMPLES['instruction']} or {_EXAMPLES['text']}"
        return TreeoptError(Code.PROMPTS_INVALID, f"{place} has no usable field", at=at, fix=fix)
    part, value, wanted = fault
    what = f"{place} has {reprlib.repr(value)} in `{part}`, which must be {wanted}"
    return TreeoptError(Code.PROMPTS_INVALID, what, at=at, fix=_EXAMPLES[given[0]])


def _fetch_set(name: str, description: Path) -> Path:
    """Path of the file of a named set, from the hub or its cache."""
    described = check(strict_yaml.load(description), PromptSetFile, _SCHEMA)
    from huggingface_hub import hf_hub_download

    offline = not hub_reachable()
    try:
        got = hf_hub_download(described.repository, described.file, repo_type="dataset", local_files_only=offline)
    except Exception as error:  # the client raises many types; all mean that the file is not available
        raise unreachable(name, error) from error
    return Path(got)


def _read_file(path: Path) -> tuple[str, list[Any]]:
    """The sha256 and the rows of a file."""
    raw = read_bytes(path, MOST_TEXT)
    digest = hashlib.sha256(raw).hexdigest()
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return digest, _read_parquet(path, raw)
    if suffix not in FORMATS:
        fix = 'convert it to a .jsonl file, with {"prompt": "..."} in each line'
        raise TreeoptError(Code.PROMPTS_INVALID, f"{path} is none of {', '.join(FORMATS)}", fix=fix)
    try:
        text = raw.decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise TreeoptError(Code.FILE_INVALID, f"{path} is not UTF-8 text (byte {error.start})") from error
    # Not splitlines, which also splits at characters that a JSON string may hold.
    lines = [(i, line.removesuffix("\r")) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if suffix == ".txt":
        return digest, [line for _, line in lines]
    if suffix == ".jsonl":
        return digest, [_parse(path, line, i) for i, line in lines]
    rows = _parse(path, text, 1)
    if not isinstance(rows, list):
        raise TreeoptError(Code.PROMPTS_INVALID, f"{path} holds a {type(rows).__name__}, not a list of prompts")
    return digest, rows


def _parse(path: Path, text: str, line: int) -> Any:
    """The JSON value that begins at a line of a file."""
    try:
        return parse_json(text, finite=False)  # columns that are not used may hold NaN
    except ValueError as error:
        row = line + getattr(error, "lineno", 1) - 1
        message = getattr(error, "msg", str(error))
        what = f"{path} is not JSON: {message}"
        raise TreeoptError(Code.FILE_INVALID, what, at=f"{path}:{row}:{getattr(error, 'colno', 1)}") from error


def _read_parquet(path: Path, raw: bytes) -> list[Any]:
    """The rows of a parquet file; equal values can be stored once, so a small file may have many rows."""
    import pyarrow
    from pyarrow import parquet

    rows: list[Any] = []
    size = 0
    try:
        for batch in parquet.ParquetFile(pyarrow.BufferReader(raw)).iter_batches(batch_size=_BATCH_ROWS):
            size += batch.nbytes
            if size > MOST_TEXT or len(rows) + batch.num_rows > _MOST_ROWS:
                what = f"{path} has more than {_MOST_ROWS:,} rows or {MOST_TEXT:,} bytes when it is unpacked"
                raise TreeoptError(Code.FILE_INVALID, what, fix="split it into several files")
            rows += batch.to_pylist()
    except TreeoptError:
        raise
    except Exception as error:  # damaged pages, texts that are not UTF-8 and unknown time zones raise many types
        raise TreeoptError(Code.FILE_INVALID, f"{path} is not a parquet file: {first_line(error)}") from error
    return rows


def _read_dataset(name: str) -> tuple[str, list[Any]]:
    """Rows of a hub data set: of the split after a colon, else of the first of `test`, `validation` and `train`."""
    if not hub_reachable():
        raise unreachable(name, ConnectionError("not reachable"))
    import datasets

    repository, _, split = name.partition(":")
    try:
        names = datasets.get_dataset_split_names(repository)
        chosen = split or next(s for s in ("test", "validation", "train", *names) if s in names)
        rows = datasets.load_dataset(repository, split=chosen).to_list() if chosen in names else None
    except Exception as error:  # the client raises many types; all mean that the data set is not available
        raise unreachable(name, error) from error
    if rows is None:
        what = f"the data set {repository} has no split {split!r}"
        raise TreeoptError(Code.PROMPTS_INVALID, what, why=f"it has {', '.join(names)}", fix=f"{repository}:{names[0]}")
    named = json.dumps(rows, sort_keys=True, separators=(",", ":"), default=repr)  # columns may hold dates or NaN
    return hashlib.sha256(named.encode()).hexdigest(), rows


@dataclass(frozen=True)
class Skipped:
    """A prompt that was left out: its length in tokens, and the reason."""

    prompt_id: str
    tokens: int
    reason: str


# One row: a request, a row of a prompt file, or a conversation.
GivenRow = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
GivenPrompts = PromptSet | str | os.PathLike[str] | Iterable[GivenRow]

GIVEN = "given"  # name of prompts that are objects, not a file
_KINDS = (
    "{} are a file name, a list of strings, of rows such as {{'instruction': ...}} or of conversations, one list of "
    "chat messages, or {}; not an object of type {}"
)


def as_prompt_set(prompts: GivenPrompts, *, answers: bool = False) -> PromptSet:
    """The prompts that a user gave in any of the forms above; with `answers`, each row must have one."""
    if isinstance(prompts, PromptSet):
        return prompts
    if isinstance(prompts, (str, os.PathLike)):
        return load_prompts(os.fspath(prompts), answers=answers)
    digest, rows = given_rows(prompts, "prompts", "what treeopt.load_prompts gives")
    made = tuple(as_prompt(row, row_id(digest, i), GIVEN, i, answers) for i, row in enumerate(rows))
    return PromptSet(GIVEN, digest, made)


def given_rows(given: Any, noun: str, record: str) -> tuple[str, list[Any]]:
    """The sha256 of the rows of a list of `noun`, and the rows, with conversations as `{"messages": [...]}`."""
    if isinstance(given, (bytes, Mapping, set, frozenset)) or not isinstance(given, Iterable):
        raise TypeError(_KINDS.format(noun, record, type(given).__name__))
    listed = list(given)
    if not listed:
        raise TreeoptError(Code.PROMPTS_EMPTY, f"the list of {noun} is empty")
    conversation = all(isinstance(row, Mapping) and {"role", "content"} <= row.keys() for row in listed)
    rows = [_row(row) for row in ([listed] if conversation else listed)]
    wrong = [type(row).__name__ for row in rows if not isinstance(row, (str, dict))]
    if wrong:
        raise TypeError(_KINDS.format(noun, record, f"{type(given).__name__} with a {wrong[0]} in it"))
    try:
        return hashlib.sha256(canonical_json(rows).encode()).hexdigest(), rows
    except (TypeError, ValueError) as error:
        what = f"{noun} hold a value that JSON cannot represent: {error}"
        raise TreeoptError(Code.PROMPTS_INVALID, what) from error


def _row(row: Any) -> Any:
    """A row as in a prompt file."""
    if isinstance(row, (list, tuple)) and row and all(isinstance(message, Mapping) for message in row):
        return {"messages": [dict(message) for message in row]}
    return dict(row) if isinstance(row, Mapping) else row
