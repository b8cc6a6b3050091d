"""Every figure of a page is in the stored output that the page names, or in published.yaml with its source.

bench/figures.py runs the commands and stores what they print in docs/figures/; nothing runs here. A section with
measured figures has the comment `<!-- figures: NAME ... -->`, which holds from there to the next heading. Figures are
numbers with decimals and numbers of percent, in text, tables and blocks of output (`text`); other code, headings,
comments and addresses are left out, and so are names such as Qwen3-0.6B.
"""

from __future__ import annotations

import datetime
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT_FOLDER
from looped import looped
from test_readme import DEVELOPER_PAGES, USER_PAGES

STORED = ROOT_FOLDER / "docs" / "figures"
PUBLISHED: dict[str, list[dict[str, str]]] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())
CHECKED = (*USER_PAGES, *DEVELOPER_PAGES)
SAME_DATE = datetime.timedelta(days=7)

COMMENT = re.compile(r"<!-- figures: ([^>]*?) *-->")
PERCENT = r"(?=(?:(?: to |\u2013|-)\d[\d,.]*)? ?%)"  # behind a number, also behind the first of a range
NUMBER = re.compile(rf"(?<![\w.,])\d(?:[\d,]*\d)?(?:(?:\.\d+)+|{PERCENT})")
PRINTED = re.compile(r"(?<![\w.])\d(?:[\d,]*\d)?(?:\.\d+)*(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Figure:
    """A number of a page as it is written, without commas, and the stored outputs that it may come from."""

    line: int
    number: str
    percent: bool
    names: tuple[str, ...]


def _output(block: re.Match[str]) -> str:
    """What is left of a block of code: the lines of output."""
    lines = block[0].splitlines()[1:-1]
    return "\n".join(["", *(f" {line.replace('`', ' ')}" if block[1] == "text" else "" for line in lines), ""])


def without_code(page: str) -> list[str]:
    """The lines of a page; those of fenced code are empty, and inline code, addresses and comments are cut out.

    Output (`text`) is kept, after a space: a line of it is no heading.
    """
    page = re.sub(r"^```(\w*)$.*?^```$", _output, page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"`[^`]*`", lambda m: "`" + "\n" * m[0].count("\n"), page)
    page = re.sub(r"\]\([^)]*\)|https?://\S+", "]", page)
    page = re.sub(r"<!--(?! figures:).*?-->", lambda m: "\n" * m[0].count("\n"), page, flags=re.DOTALL)
    return page.splitlines()


def figures_of(page: str) -> Iterator[Figure]:
    """The figures of a page, in order."""
    names: tuple[str, ...] = ()
    for line, text in enumerate(without_code(page), 1):
        if text.startswith("#"):
            names = ()
            continue
        for comment in COMMENT.finditer(text):
            names += tuple(comment[1].split())
        text = COMMENT.sub("", text)
        for match in NUMBER.finditer(text):
            before = re.split(r"[\s(|*=~≈]", text[: match.start()])[-1]
            if not re.search("[A-Za-z]", before):  # not in a name
                percent = re.match(PERCENT, text[match.end() :]) is not None
                yield Figure(line, match[0].replace(",", ""), percent, names)


def printed(output: str) -> set[str]:
    """The numbers of a stored output."""
    return {match.replace(",", "") for match in PRINTED.findall(output)}


def rounds_to(figure: Figure, number: str) -> bool:
    """Whether a printed number has the value of a figure after rounding; a fraction may be shown in percent."""
    if figure.number.count(".") > 1 or number.count(".") > 1:  # versions
        return figure.number == number
    shown, exact = Decimal(figure.number), Decimal(number)
    unit = Decimal(1).scaleb(-len(figure.number.partition(".")[2]))
    values = (exact, exact * 100) if figure.percent else (exact,)
    return any(
        value < 10**12 and value.quantize(unit, mode) == shown
        for value in values
        for mode in (ROUND_HALF_EVEN, ROUND_HALF_UP)
    )


def faults(page: str, outputs: dict[str, str], published: set[str]) -> list[str]:
    """The figures of a page that no output named for them has and that are not published."""
    numbers = {name: printed(output) for name, output in outputs.items()}
    found = []
    for figure in figures_of(page):
        if figure.number in published:
            continue
        known = (number for name in figure.names for number in numbers.get(name, ()))
        if not any(rounds_to(figure, number) for number in known):
            sources = f"not in {', '.join(figure.names)}" if figure.names else "without a source"
            found.append(f"line {figure.line}: {figure.number}{' %' * figure.percent} {sources}")
    return found


def stored_outputs() -> dict[str, str]:
    """The stored outputs by name."""
    return {path.stem: path.read_text() for path in sorted(STORED.glob("*.txt"))}


def published_in(page: str) -> set[str]:
    """The numbers that published.yaml lists for a page."""
    return {number.replace(",", "") for entry in PUBLISHED.get(page, []) for number in entry["number"].split()}


def names_in(page: str) -> set[str]:
    """The stored outputs that a page names."""
    return {name for names in COMMENT.findall((ROOT_FOLDER / page).read_text()) for name in names.split()}


@pytest.mark.parametrize("page", CHECKED)
def test_figures_are_those_of_the_stored_outputs(page: str) -> None:
    """Each figure of a page has its source, and the source has the figure."""
    found = faults((ROOT_FOLDER / page).read_text(), stored_outputs(), published_in(page))
    assert not found, "\n".join(found)


@looped("page", CHECKED)
def test_outputs_named_by_pages_exist(page: str) -> None:
    """Each name of a comment is that of a file in docs/figures/."""
    assert names_in(page) <= set(stored_outputs())


def test_every_stored_output_is_named() -> None:
    """A stored output that no page names is of no use."""
    assert set(stored_outputs()) == set().union(*map(names_in, CHECKED))


def headers_of(outputs: dict[str, str]) -> dict[str, dict[str, str]]:
    """The date and the machine of each output."""
    heads = {name: output.partition("\n\n")[0] for name, output in outputs.items()}
    return {name: dict(re.findall(r"^(date|machine): (.*)$", head, re.MULTILINE)) for name, head in heads.items()}


def sections_of(page: str) -> list[str]:
    return re.split(r"^(?=#)", page, flags=re.MULTILINE)


def of_another_machine(page: str, machines: dict[str, str]) -> list[str]:
    """The sections with outputs of another machine than most, which do not say so."""
    most = max(machines.values(), key=list(machines.values()).count)
    found = []
    for section in sections_of(page):
        names = {name for names in COMMENT.findall(section) for name in names.split()}
        if any(machines[name] != most for name in names) and "processor" not in section:
            found.append(section.splitlines()[0])
    return found


@looped("page", CHECKED)
def test_sections_with_outputs_of_another_machine_say_so(page: str) -> None:
    """Times of two machines are not compared without a word."""
    headers = headers_of(stored_outputs())
    text = (ROOT_FOLDER / page).read_text()
    assert of_another_machine(text, {name: header["machine"] for name, header in headers.items()}) == []


def test_another_machine_is_found() -> None:
    machines = {"a": "x", "b": "x", "c": "y"}
    page = "# A\n<!-- figures: a c -->\n\n## B\n<!-- figures: c -->\non another processor\n## C\n<!-- figures: b -->\n"
    assert of_another_machine(page, machines) == ["# A"]


def test_stored_outputs_are_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """All have dates within a week, and the commands that bench/figures.py has today."""
    monkeypatch.syspath_prepend(str(ROOT_FOLDER / "bench"))
    script: Any = importlib.import_module("figures")
    outputs = stored_outputs()
    assert outputs
    dates = [datetime.date.fromisoformat(header["date"]) for header in headers_of(outputs).values()]
    assert max(dates) - min(dates) <= SAME_DATE
    for name, output in outputs.items():
        lines = output.splitlines()
        assert [command for command in script.FIGURES[name] if f"$ {command}" not in lines] == [], name


def test_pages_are_listed_once() -> None:
    """A second list of a page would replace the first."""
    lines = Path(__file__).with_name("published.yaml").read_text().splitlines()
    assert len([line for line in lines if not line.startswith(("#", " "))]) == len(PUBLISHED)


@looped("page", PUBLISHED)
def test_published_figures_are_used(page: str) -> None:
    """Each number of published.yaml is on its page, and each entry is a number in quotes and a source."""
    for entry in PUBLISHED[page]:
        assert set(entry) == {"number", "source"}
        assert all(isinstance(value, str) and value for value in entry.values()), entry
    used = {figure.number for figure in figures_of((ROOT_FOLDER / page).read_text())}
    assert published_in(page) <= used


PLANTED = """\
# A page of 1.5 figures
<!-- figures: a -->
The tree gives 2.64 tokens per step, `9.9` in code, [a link](https://example.org/7.7), 48.6 % of them.

```
treeopt build --weight 9.9
```

| Qwen3-0.6B | 1,234.5 | ± 0.4 % |

## Another
A temperature of 0.7, and 30 to 40 %.
<!-- figures: a b -->
torch 2.13.0, a limit of 64.

```text
# tokens: 2.636
```
"""
OUTPUTS = {"a": "2.6361 tokens\t1234.52\n48.6% ± 0.4%", "b": "torch 2.13.0"}


@looped(
    ("change", "expected"),
    [
        ((" ", " "), []),
        (("2.64", "2.65"), ["line 3: 2.65 not in a"]),
        (("48.6 %", "48.7 %"), ["line 3: 48.7 % not in a"]),
        (("1,234.5", "1,234.6"), ["line 9: 1234.6 not in a"]),
        (("0.4 %", "0.5 %"), ["line 9: 0.5 % not in a"]),
        (("A temperature of 0.7", "A temperature of 0.8"), ["line 12: 0.8 without a source"]),
        (("30 to 40", "31 to 40"), ["line 12: 31 % without a source"]),
        (("2.13.0", "2.13.1"), ["line 14: 2.13.1 not in a, b"]),
        (("figures: a b", "figures: a"), ["line 14: 2.13.0 not in a"]),
        (("2.636", "2.637"), ["line 17: 2.637 not in a, b"]),
        (("figures: a -->", "figures: b -->"), [f"line {n} not in b" for n in ("3: 2.64", "3: 48.6 %")]),
    ],
)
def test_planted_faults_are_found(change: tuple[str, str], expected: list[str]) -> None:
    """A wrong figure, one without a source, and a comment that names another output are found, with their line."""
    found = faults(PLANTED.replace(*change, 1), OUTPUTS, {"0.7", "30", "40"})
    assert found[: len(expected)] == expected
    assert bool(found) == bool(expected)


@looped(
    ("figure", "number", "expected"),
    [
        (Figure(1, "2.13", False, ()), "2.125", True),
        (Figure(1, "2.12", False, ()), "2.125", True),
        (Figure(1, "2.13", False, ()), "2.1", False),
        (Figure(1, "2.50", False, ()), "2.5", True),
        (Figure(1, "48.6", True, ()), "0.4861", True),
        (Figure(1, "48.6", False, ()), "0.4861", False),
        (Figure(1, "12", True, ()), "11.6", True),
        (Figure(1, "0.002", False, ()), "1.6e-3", True),
    ],
)
def test_rounding(figure: Figure, number: str, expected: bool) -> None:
    """A half may be rounded either way; a fraction is a number of percent where the page writes percent."""
    assert rounds_to(figure, number) is expected
