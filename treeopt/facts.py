"""Reports as data: facts and tables with labels, values and keys, printed as text or as one JSON object."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Form = str | Callable[[Any], str]  # a format specification, or a function

NOTHING = "-"  # in place of a value that is None
LABELS = 15  # least width of the labels


def shown(value: Any, form: Form = "") -> str:
    """A value as text; records such as `Spread` and `Interval` know how they are formatted."""
    return NOTHING if value is None else form(value) if callable(form) else format(value, form)


def percent(value: float) -> str:
    return f"{value:.1%}"


def milliseconds(value: float) -> str:
    """Seconds as milliseconds."""
    return f"{value * 1e3:.2f} ms"


def threads(number: int | str) -> str:
    """The number of threads of a measurement: `1 thread`, `2 threads`."""
    return f"{number} thread" if int(number) == 1 else f"{number} threads"


def machine(made: Mapping[str, Any]) -> str:
    """The machine of a measurement by what it was made with: `cpu, 1 thread, float32`."""
    number = made.get("threads")
    parts = [made.get("device"), None if number is None else threads(number), made.get("dtype")]
    return ", ".join(str(part) for part in parts if part) or "a machine that is not known"


def attribute(record: Any, names: str) -> Any:
    """An attribute of an attribute (`plan.depth`); None where one on the way is None."""
    for name in names.split("."):
        record = None if record is None else getattr(record, name)
    return record


def picked(record: Any, *names: str) -> dict[str, Any]:
    """These attributes, properties included; of None all are None."""
    return {name: attribute(record, name) for name in names}


@dataclass(frozen=True)
class Fact:
    """One fact: a line `label value note`, and a key of the JSON object."""

    label: str | None  # empty where it continues the one above it; None for programs alone
    value: Any  # None is printed as `-`
    form: Form = ""  # of the value
    note: str = ""  # what the value is of, or compared with
    key: str = ""  # in JSON; empty for people alone

    @property
    def text(self) -> str:
        """The line without its label."""
        return f"{shown(self.value, self.form)} {self.note}".strip()


def for_programs(data: Mapping[str, Any]) -> Iterator[Fact]:
    """Facts of the JSON object alone, by their keys."""
    return (Fact(None, value, key=key) for key, value in data.items())


@dataclass(frozen=True)
class Column:
    """A column of a table, and a key of each JSON row."""

    header: str | None  # of the printed column; None for programs alone
    value: str | Callable[[Any], Any]  # an attribute, as that of `attribute`, or a function of the record
    form: Form = ""  # of the values
    key: str | None = None  # in JSON; the last name of the attribute where None, empty for people alone

    def of(self, record: Any) -> Any:
        """The value of a record."""
        return attribute(record, self.value) if isinstance(self.value, str) else self.value(record)

    @property
    def name(self) -> str:
        """The key in JSON."""
        if self.key is None:
            return self.value.rpartition(".")[2] if isinstance(self.value, str) else ""
        return self.key


@dataclass(frozen=True)
class Table:
    """Records as rows: a table for people, a list of objects for programs. Without a record nothing is printed."""

    columns: Sequence[Column]
    records: Sequence[Any]
    key: str = ""

    @property
    def header(self) -> list[str]:
        return [column.header for column in self.columns if column.header is not None]

    @property
    def cells(self) -> list[list[str]]:
        """The text of each row."""
        printed = [column for column in self.columns if column.header is not None]
        return [[shown(column.of(record), column.form) for column in printed] for record in self.records]

    @property
    def value(self) -> list[dict[str, Any]]:
        """The rows for JSON."""
        named = [column for column in self.columns if column.name]
        return [{column.name: column.of(record) for column in named} for record in self.records]


Part = Fact | Table | str | None  # of a report; a text is a line of its own, None is left out


def lines(parts: Sequence[Part]) -> list[str | Table]:
    """What is printed: lines with aligned labels, and tables that have rows."""
    labels = [part.label for part in parts if isinstance(part, Fact) and part.label is not None]
    width = max([LABELS, *map(len, labels)])
    found: list[str | Table] = []
    for part in parts:
        if isinstance(part, Fact):
            found += [] if part.label is None else [f"{part.label:<{width}} {part.text}"]
        elif isinstance(part, str) or (part is not None and part.records):
            found.append(part)
    return found


def keyed(parts: Sequence[Part]) -> dict[str, Any]:
    """The facts and tables that have a key, by it."""
    return {part.key: part.value for part in parts if isinstance(part, (Fact, Table)) and part.key}
