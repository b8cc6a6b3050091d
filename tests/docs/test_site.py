"""The site of `make docs`: its pages and links, and that it needs no other machine.

Tests of the built site run where TREEOPT_SITE names its folder, which `make docs` does after building it.
"""

from __future__ import annotations

import os
import re
import runpy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT_FOLDER
from looped import looped

import treeopt

SITE = ROOT_FOLDER / "docs" / "site"
LINKS = runpy.run_path(str(SITE / "links.py"))


def pages_of(nav: list[dict[str, Any]]) -> list[str]:
    """The pages of a navigation, in order."""
    pages: list[str] = []
    for entry in nav:
        for value in entry.values():
            pages += [value] if isinstance(value, str) else pages_of(value)
    return pages


def test_navigation_has_every_page_once() -> None:
    """Each Markdown page of docs/, and each page from elsewhere in the repository, is in the site's navigation."""
    pages = pages_of(yaml.safe_load((SITE / "mkdocs.yml").read_text())["nav"])
    expected = {path.name for path in (ROOT_FOLDER / "docs").glob("*.md")} | set(
        map(LINKS["site_path"], LINKS["PAGES"])
    )
    assert set(pages) == expected
    assert len(pages) == len(expected)


def test_api_page_has_every_public_name_once() -> None:
    """docs/api.md has each name of treeopt/__init__.pyi once, and no name that does not exist."""
    named = re.findall(r"^::: treeopt\.(\w+)$", (ROOT_FOLDER / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    assert sorted(named) == sorted(set(treeopt.__all__) - {"__version__"})


@looped(
    ("page", "link", "expected"),
    [
        ("quickstart.md", "sizes.md#when-a-tree-is-slower", "sizes.md#when-a-tree-is-slower"),
        ("quickstart.md", "../treeopt/data/pocket/README.md", "repository/treeopt/data/pocket/README.md"),
        ("quickstart.md", "../README.md#read-on", "index.md#read-on"),
        ("quickstart.md", "curve.svg", "curve.svg"),
        ("index.md", "docs/tree16.svg", "tree16.svg"),
        ("index.md", "CHANGELOG.md", "repository/CHANGELOG.md"),
        ("repository/CHANGELOG.md", "docs/develop/hardware.md", "../hardware.md"),
        ("repository/CHANGELOG.md", "README.md#read-on", "../index.md#read-on"),
        ("repository/treeopt/data/pocket/README.md", "../../../trees/README.md", "../../../trees/README.md"),
        ("repository/treeopt/data/pocket/README.md", "../../../docs/training.md", "../../../../training.md"),
        ("errors.md", "https://arxiv.org/abs/2401.10774", "https://arxiv.org/abs/2401.10774"),
        ("errors.md", "#errors", "#errors"),
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
    text = '<a href="https://arxiv.org">a</a><img src="tree16.svg"><style>a{mask:url("data:image/svg+xml,//a")}</style>'
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
