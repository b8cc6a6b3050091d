"""The site of `make docs`: its pages and links, and that it needs no other machine.

Tests of the built site run where TREEOPT_SITE names its folder, which `make docs` does after building it.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import yaml
from conftest import ROOT_FOLDER
from looped import looped
from test_readme import DEVELOPER_PAGES, USER_PAGES

import treeopt
from treeopt.cli.app import COMMANDS, program
from treeopt.cli.configuration import COMMON
from treeopt.errors import Code

SITE = ROOT_FOLDER / "docs" / "site"
LINKS = runpy.run_path(str(SITE / "links.py"))
GENERATED = runpy.run_path(str(SITE / "generated.py"))


def pages_of(nav: list[dict[str, Any]]) -> list[str]:
    """The pages of a navigation, in order."""
    pages: list[str] = []
    for entry in nav:
        for value in entry.values():
            pages += [value] if isinstance(value, str) else pages_of(value)
    return pages


def test_navigation_has_every_page_once() -> None:
    """Each page of docs/, of elsewhere in the repository, and that is generated, is in the site's navigation."""
    pages = pages_of(yaml.safe_load((SITE / "mkdocs.yml").read_text())["nav"])
    committed = {*USER_PAGES, *DEVELOPER_PAGES, *LINKS["PAGES"]}
    expected = {"commands.md", "errors.md", *map(LINKS["site_path"], committed)}
    assert set(pages) == expected
    assert len(pages) == len(expected)


def test_api_page_has_every_public_name_once() -> None:
    """docs/api.md has each name of treeopt/__init__.pyi once, and no name that does not exist."""
    listed = [name for name, *_ in GENERATED["API_NAME"].findall(GENERATED["API"].read_text())]
    named = [name.removeprefix("treeopt.") for name in listed if name.count(".") == 1]
    assert sorted(named) == sorted(set(treeopt.__all__) - {"__version__"})


def test_api_page_has_the_docstrings() -> None:
    """docs/api.md says of each name what its docstring says first: `python docs/site/generated.py` writes it."""
    page = GENERATED["API"].read_text()
    assert page == GENERATED["with_summaries"](page)


def test_page_of_errors_is_the_registry() -> None:
    """The page has a row for every error, in order: exit status, cause, rule and remedy are the registry's."""
    rows = re.findall(r"</a>(E\d+) \| (.+) \| (.+) \| (.+) \| (.+) \|$", GENERATED["errors_page"](), re.MULTILINE)
    shown = [tuple(re.sub(r"\[(.+?)\]\(.+?\)", r"docs/\1.md", cell.replace("`", "")) for cell in row) for row in rows]
    codes = sorted(Code, key=lambda code: code.number)
    parts = ((one.number, str(one.exit_status), one.cause, one.rule, one.fix) for one in codes)
    assert shown == [tuple(part.replace("`", "") for part in one) for one in parts]
    assert {int(row[1]) for row in shown} <= set(GENERATED["EXIT_STATUSES"])


def test_page_of_commands_has_every_option() -> None:
    """Each command is a section, in the order of the groups, and each of its options is there with its default."""
    page = GENERATED["commands_page"]()
    sections = dict(re.findall(r"^###+ (treeopt .+)\n((?:(?!^##).*\n)*)", page, flags=re.MULTILINE))
    below = [name for name in sections if name.count(" ") == 2]
    assert [name for name in sections if name not in below] == [f"treeopt {name}" for name in COMMANDS]
    assert below == ["treeopt heads convert", "treeopt heads show"]
    for name in COMMANDS:
        command = program.get_command(click.Context(program), name)
        options = [one for one in command.params if isinstance(one, click.Option) and one.name not in COMMON]
        assert [one.opts for one in options if one.opts[-1] not in sections[f"treeopt {name}"]] == []
    assert "| `--nodes N\\|AUTO` | `64` | Budget" in sections["treeopt build"]
    assert "One of `static`, `dynamic`." in sections["treeopt build"]
    assert "| `--draft TEXT` | that of a drafter file |" in sections["treeopt calibrate"]
    assert "treeopt build --nodes 64 -o tree.yaml" in sections["treeopt build"]


def test_blocks_of_commands_are_in_the_language_of_the_shell() -> None:
    """So that they wrap and can be copied, which output does not and cannot."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri="quickstart.md"))
    text = "a\n```\ntreeopt demo\n```\n```text\nx\n```\n"
    assert GENERATED["on_page_markdown"](text, page) == text.replace("```\ntreeopt", "```sh\ntreeopt")


@looped(
    ("page", "link", "expected"),
    [
        ("quickstart.md", "sizes.md#when-a-tree-is-slower", "sizes.md#when-a-tree-is-slower"),
        ("quickstart.md", "../treeopt/data/pocket/README.md", "repository/treeopt/data/pocket/README.md"),
        ("quickstart.md", "../README.md#read-on", "index.md#read-on"),
        ("quickstart.md", "curve.svg", "curve.svg"),
        ("index.md", "docs/tree.svg", "tree.svg"),
        ("index.md", "CHANGELOG.md", "repository/CHANGELOG.md"),
        ("repository/CHANGELOG.md", "docs/develop/hardware.md", "../develop/hardware.md"),
        ("repository/CHANGELOG.md", "README.md#read-on", "../index.md#read-on"),
        ("repository/treeopt/data/pocket/README.md", "../../../trees/README.md", "../../../trees/README.md"),
        ("repository/treeopt/data/pocket/README.md", "../../../docs/training.md", "../../../../training.md"),
        ("sizes.md", "https://arxiv.org/abs/2401.10774", "https://arxiv.org/abs/2401.10774"),
        ("sizes.md", "#plan", "#plan"),
        ("engines/vllm.md", "../sizes.md", "../sizes.md"),
        ("engines/vllm.md", "../../README.md", "../index.md"),
        ("develop/method.md", "../../bench/figures.py", "../repository/bench/figures.py"),
    ],
)
def test_link_of_the_repository_becomes_one_of_the_site(page: str, link: str, expected: str) -> None:
    """A link that leads to a file of the repository leads to the same file of the site."""
    assert LINKS["site_link"](link, page) == expected


def test_links_in_code_are_kept() -> None:
    """A list of lists in a block of Python looks like a link and is none."""

    class Page:
        class file:
            src_uri = "index.md"

    text = "[a](docs/files.md)\n```python\nx = [[0]](docs/files.md)\n```\n[b](LICENSE)\n"
    expected = "[a](files.md)\n```python\nx = [[0]](docs/files.md)\n```\n[b](repository/LICENSE)\n"
    assert LINKS["on_page_markdown"](text, Page) == expected


def test_files_that_pages_link_to_are_part_of_the_site() -> None:
    """Scripts and recipes are; pages are so anyway."""
    files = LINKS["linked_files"]()
    assert "calibration/recipes/pocket.yaml" in files
    assert [path for path in files if path.endswith(".md") or path.startswith("docs/")] == []


# The built site


@pytest.fixture(scope="module")
def built() -> Path:
    """The folder of the built site."""
    if "TREEOPT_SITE" not in os.environ:
        pytest.skip("needs the built site, which `make docs` makes and checks")
    return ROOT_FOLDER / os.environ["TREEOPT_SITE"]


class Loaded(HTMLParser):
    """What a page loads without a click: scripts, styles, pictures, fonts, frames."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        names = {
            "link": ("href",),
            "script": ("src",),
            "img": ("src", "srcset"),
            "iframe": ("src",),
            "source": ("src",),
        }
        if tag == "link" and given.get("rel") in ("canonical", "next", "prev"):
            return
        self.addresses += [given[name] or "" for name in names.get(tag, ()) if name in given]


def other_machines(text: str, suffix: str) -> list[str]:
    """Addresses with a host that a page or a style sheet loads."""
    if suffix == ".html":
        styles = re.findall(r"<style[^>]*>(.*?)</style>", text, flags=re.DOTALL)
        loaded = [*Loaded(text).addresses, *(address for style in styles for address in other_machines(style, ".css"))]
    else:
        loaded = re.findall(r"""(?:@import\s*(?:url\()?|url\()\s*['"]?([^'")\s;]+)""", text)
    return [address for address in loaded if re.match(r"(?:https?:)?//", address)]


@looped(
    ("text", "suffix"),
    [
        ('<script src="https://unpkg.com/x.js"></script>', ".html"),
        ('<link rel="stylesheet" href="//fonts.googleapis.com/css">', ".html"),
        ('<link href="https://fonts.gstatic.com" rel="preconnect" crossorigin>', ".html"),
        ("<style>@import url('https://fonts.googleapis.com/css');</style>", ".html"),
        ("@font-face{src:url(https://fonts.gstatic.com/a.woff2)}", ".css"),
    ],
)
def test_other_machines_are_found(text: str, suffix: str) -> None:
    """The check of the site finds scripts, styles and fonts of other machines."""
    assert len(other_machines(text, suffix)) == 1


def test_links_are_no_loads() -> None:
    """A link that is followed by a click, a data address and a file of the site are not found."""
    text = '<a href="https://arxiv.org">a</a><img src="tree.svg"><style>a{mask:url("data:image/svg+xml,//a")}</style>'
    assert other_machines(text, ".html") == []


def test_site_loads_nothing_from_other_machines(built: Path) -> None:
    """No page or style sheet of the site names a script, style, font or picture of another machine."""
    files = [path for path in built.rglob("*") if path.suffix in (".html", ".css")]
    assert len(files) > 25
    assert {path.name: found for path in files if (found := other_machines(path.read_text(), path.suffix))} == {}


def test_site_has_the_docstrings(built: Path) -> None:
    """The page of the API has an anchor and text of every public name."""
    page = (built / "api.html").read_text()
    names = set(treeopt.__all__) - {"__version__"}
    assert {name for name in names if f'id="treeopt.{name}"' not in page} == set()
    assert "the prompts are prefilled once" in page  # of measure_profile


def test_site_has_the_pictures(built: Path) -> None:
    """Every picture of a page is a file of the site."""
    for path in built.rglob("*.html"):
        for address in re.findall(r'<img[^>]* src="([^":]+)"', path.read_text()):
            assert (path.parent / address).is_file(), f"{path.name}: {address}"


# The built site in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Chromium, which `make test-browser` installs where apt-get may do it")
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]) as started,
    ):
        yield started


def test_search_works_from_a_file(built: Path, browser: Any) -> None:
    """A page that is opened as a file finds words of other pages, and loads nothing from other machines."""
    page = browser.new_page()
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url))
    page.goto((built / "index.html").as_uri())
    page.locator(".md-search__input").first.focus()
    page.keyboard.type("calibrate")
    page.locator(".md-search-result__link").first.wait_for()
    assert page.locator(".md-search-result__link").count() > 3
    assert [address for address in loaded if not address.startswith(("file:", "data:", "blob:"))] == []


@looped("width", [360, 1280])
def test_no_command_is_under_a_button(built: Path, browser: Any, width: int) -> None:
    """The lines of commands end before the copy button, and no block of commands is wider than its page."""
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto((built / "quickstart.html").as_uri())
    page.locator(".md-code__button").first.wait_for(state="attached")
    found = page.evaluate(
        """() => [...document.querySelectorAll(".language-sh code")].map((code) => {
            const range = document.createRange();
            range.selectNodeContents(code);
            const lines = [...range.getClientRects()].map((box) => box.right);
            const button = code.parentElement.parentElement.querySelector(".md-code__button");
            return [Math.max(...lines), button.getBoundingClientRect().left, code.scrollWidth - code.clientWidth];
        })"""
    )
    assert len(found) > 1
    assert [one for one in found if one[0] > one[1] or one[2] > 0] == []
    assert page.locator(".language-text .md-code__button:visible").count() == 0
