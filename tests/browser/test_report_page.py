"""The page of a report, and pictures, in headless Chromium: hover, keyboard, themes, phone width, no request.

Chromium is Debian's package, found by name. Where there is none, or no playwright, the tests are skipped.
`make test-all` installs Chromium where it may.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from looped import looped
from report_pages import HOSTILE, whole_data

from treeopt.files.trees import load_tree
from treeopt.view import report_data
from treeopt.view.charts import Bar, Panel, Series, render_bars, render_chart
from treeopt.view.report import render_report
from treeopt.view.svg import render_svg

Image = pytest.importorskip("PIL.Image")  # matplotlib needs it
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, which .[dev] installs")
pytestmark = pytest.mark.browser

THEMES, WIDTHS = ("light", "dark"), (360, 1200)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Of every visible text: its contrast over that of WCAG AA (4.5, of large or bold text 3), its element and colors.
CONTRASTS = """() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v / 255 <= .04045 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4);
  const light = (color) => {
    const [r, g, b] = parts(color).slice(0, 3).map(linear);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      const [, , , alpha = 1] = parts(color);
      if (alpha) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const style = getComputedStyle(element);
    const silent = /^(script|style|title|desc)$/i.test(element.tagName);
    if (silent || !walker.currentNode.data.trim() || !element.checkVisibility()) continue;
    const color = element.closest("svg") ? style.fill : style.color;
    const [high, low] = [light(color), light(behind(element))].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const ratio = (high + .05) / (low + .05) / (large ? 3 : 4.5);
    found.push([ratio, `${element.tagName}.${element.className}`, color, behind(element)]);
  }
  return found;
}"""


class Opened:
    """A page in the browser, with what it requested and complained about."""

    def __init__(self, page: Any, file: Path) -> None:
        self.page, self.requests, self.messages = page, [], []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.goto(file.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")

    def check_quiet(self, file: Path) -> None:
        """Nothing was requested but the file, and the console is empty: no error, no violation of the policy."""
        assert self.requests == [file.as_uri()]
        assert self.messages == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium (on Debian: apt-get install chromium; make test-all does this as root)")
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium's sandbox refuses root
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield found
        found.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole report, and one of hostile names and texts."""
    folder = tmp_path_factory.mktemp("pages")
    texts = {"whole": "", "hostile": HOSTILE}
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(render_report(whole_data(text)), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


@pytest.fixture
def opened(browser: Any, files: dict[str, Path]) -> Iterator[Opened]:
    """The whole report in a window of a common size."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    yield Opened(page, files["whole"])
    page.close()


@pytest.mark.quick
def test_hover_shows_a_node(opened: Opened, files: dict[str, Path]) -> None:
    """All nodes are there; hovering one writes its path, value and rank, and its tooltip has them."""
    nodes = opened.page.locator("#tree g.node")
    assert nodes.count() == 6
    opened.page.locator("#tree g.node[data-node='4'] circle").hover()
    text = "node 4: path [0, 1], rank 1 of head 2, right with probability 0.1"
    assert opened.page.locator("#tree-status").inner_text() == text
    assert opened.page.locator("#tree g.node[data-node='4'] title").text_content() == text
    assert opened.page.locator("#tree g.node[data-node='4']").get_attribute("aria-label") == text
    assert "of n = " in opened.page.locator(".heat td").first.get_attribute("title")
    opened.check_quiet(files["whole"])


@looped("width", WIDTHS)
def test_root_of_a_large_tree_is_in_view(browser: Any, width: int, tmp_path: Path) -> None:
    """Of a tree of 64 nodes the root, half way down the picture, is not cut off by the box around it."""
    name = "mc_sim_7b_63"
    data = {**report_data.report_data(report_data.ReportInputs(plan=(name, load_tree(name))))}
    (tmp_path / "page.html").write_text(render_report(data), encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto((tmp_path / "page.html").as_uri())
    box, root = (page.locator(one).bounding_box() for one in (".scroll.tree", "#tree g.node[data-node='0'] circle"))
    assert box["x"] <= root["x"] <= root["x"] + root["width"] <= box["x"] + box["width"]
    assert box["y"] <= root["y"] <= root["y"] + root["height"] <= box["y"] + box["height"]
    page.close()


@pytest.mark.quick
def test_arrow_keys_move_between_nodes(opened: Opened, files: dict[str, Path]) -> None:
    """Tab reaches one node; arrows go to child, sibling and parent, and the status line follows."""
    page = opened.page
    page.locator("#tree g.node[tabindex='0']").focus()
    visited = []
    keys = "Home ArrowRight ArrowRight ArrowDown ArrowUp ArrowLeft ArrowDown ArrowRight Enter"
    for key in keys.split():
        page.keyboard.press(key)
        visited.append(page.evaluate("document.activeElement.dataset.node"))
    assert visited == ["0", "1", "3", "4", "3", "1", "2", "2", "2"]
    status = page.locator("#tree-status")
    assert status.inner_text() == "node 2: path [1], rank 1 of head 1, right with probability 0.2"
    assert status.get_attribute("aria-live") == "polite"
    assert page.locator("#tree g.node[tabindex='0']").count() == 1
    opened.check_quiet(files["whole"])


@looped("selector", ["h1", "td data", "#tree text.label", "figcaption"])
def test_contrasts_find_a_faint_text(opened: Opened, selector: str) -> None:
    """The check of contrasts below fails for one text of a faint color, and names it."""
    element = opened.page.locator(selector).first
    name = element.evaluate("(one) => one.tagName.toLowerCase()")
    assert [one for one in opened.page.evaluate(CONTRASTS) if one[0] < 1] == []
    element.evaluate("(one) => { one.style.color = one.style.fill = 'rgb(200, 200, 200)'; }")
    found = [one for one in opened.page.evaluate(CONTRASTS) if one[0] < 1]
    assert found
    assert any(one[1].lower().startswith(name) and one[2] == "rgb(200, 200, 200)" for one in found)
    element.evaluate("(one) => { one.style.color = one.style.fill = ''; }")  # the next case looks at the same page


@looped("name", ["whole", "hostile"])
@looped("width", WIDTHS)
@looped("theme", THEMES)
def test_page_in_themes_and_widths(
    browser: Any, files: dict[str, Path], tmp_path: Path, theme: str, width: int, name: str
) -> None:
    """No page scrolls sideways, every text has the contrast of WCAG AA, themes differ, and the console is empty."""
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=theme)
    opened = Opened(page, files[name])
    assert page.evaluate("document.documentElement.scrollWidth") == width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[theme]
    found = page.evaluate(CONTRASTS)
    assert len(found) > 200
    assert [one for one in found if one[0] < 1] == []
    page.screenshot(path=str(tmp_path / "page.png"), full_page=True)
    assert (tmp_path / "page.png").stat().st_size > 20_000
    opened.check_quiet(files[name])
    page.close()


@looped("theme", THEMES)
def test_verdict_is_on_a_phone_screen(browser: Any, files: dict[str, Path], theme: str) -> None:
    """At 360 by 640 pixels the verdict and the speedup are seen without scrolling, and commands wrap."""
    page = browser.new_page(viewport={"width": 360, "height": 640}, color_scheme=theme)
    page.goto(files["whole"].as_uri())
    for selector in ("#verdict", ".lead strong data"):
        box = page.locator(selector).first.bounding_box()
        assert box["y"] > 0
        assert box["y"] + box["height"] < 640
    for selector in ("pre.commands", "#provenance .facts"):
        for element in page.locator(selector).all():
            assert element.evaluate("(one) => one.scrollWidth <= one.clientWidth")
    page.close()


def test_print_is_light(browser: Any, files: dict[str, Path], tmp_path: Path) -> None:
    """Printed from a dark screen the page is light, and it becomes a PDF."""
    page = browser.new_page(color_scheme="dark")
    page.goto(files["whole"].as_uri())
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.pdf(path=str(tmp_path / "page.pdf"))
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    page.close()


def test_letters_can_be_shown(opened: Opened) -> None:
    """The sources of drafts have letters, so that nothing is shown by color alone."""
    letter = opened.page.locator(".decoded sup").first
    assert not letter.is_visible()
    opened.page.locator("#letters").check()
    assert letter.inner_text() == "N"
    assert letter.is_visible()


BACKGROUNDS = {"light": (255, 255, 255), "dark": (13, 17, 23)}
PANELS = [Panel(name, "tokens", [Series("a", [1, 8], [1.0, 2.0]), Series("b", [1, 8], [1.0, 1.5])]) for name in "xy"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A chart, bars, the picture of a tree, and those of the pages."""
    folder = tmp_path_factory.mktemp("pictures")
    drawn = {
        "chart": render_chart(PANELS, "A model", note="a machine"),
        "bars": render_bars([Bar("a", 1.5, 1.2, 1.1, 1.3, True), Bar("b", 1.0, 0.9, 0.9, 0.9, False)], "A model"),
        "tree": render_svg(load_tree("mc_sim_7b_63"), "A tree"),
    }
    for name, text in drawn.items():
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")
    docs = Path(__file__).resolve().parents[2] / "docs"
    return [
        *(folder / f"{name}.svg" for name in drawn),
        *sorted(docs.glob("*.svg")),
        *sorted(docs.glob("develop/*.svg")),
    ]


@looped("theme", THEMES)
def test_pictures_follow_the_scheme(browser: Any, pictures: list[Path], tmp_path: Path, theme: str) -> None:
    """An image on a page of 360 pixels fits it, with the scheme's background; each text has the contrast of WCAG AA."""
    page = browser.new_page(viewport={"width": 360, "height": 640}, color_scheme=theme)
    for picture in pictures:
        head = '<meta name="color-scheme" content="light dark"><body style="margin:0">'
        image = f'<img src="{picture.as_uri()}" style="display:block;max-width:100%">'
        (tmp_path / "page.html").write_text(head + image)
        page.goto((tmp_path / "page.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == 360, picture.name
        page.locator("img").screenshot(path=str(tmp_path / "shot.png"))
        with Image.open(tmp_path / "shot.png") as shot:
            assert shot.convert("RGB").getpixel((1, 1)) == BACKGROUNDS[theme], picture.name
        page.goto(picture.as_uri())
        fills = page.evaluate("[...document.querySelectorAll('text')].map((one) => getComputedStyle(one).fill)")
        assert fills, picture.name
        for fill in set(fills):
            ratio = contrast(tuple(map(int, re.findall(r"\d+", fill)[:3])), BACKGROUNDS[theme])
            assert ratio >= 4.5, (picture.name, fill)
    page.close()


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """The contrast of two colors by WCAG."""
    linear = [[v / 3294.6 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in color] for color in (one, other)]
    high, low = sorted((0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in linear), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.quick
def test_contrast_is_that_of_wcag() -> None:
    """Black on white has 21, a color on itself 1."""
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)
    assert contrast((9, 90, 200), (9, 90, 200)) == 1
