"""A hook of mkdocs: files of the repository outside docs/ are part of the site, and links lead to them.

Pages link as on GitHub, by the paths of the repository (`../trees/README.md`). The README is the site's first page,
`index.md`; the other files of PAGES, and other files that pages link to, are below `repository/`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

LINK = re.compile(r"\]\(([^)\s]*)\)")
ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "calibration/README.md",
    "trees/README.md",
    "treeopt/data/pocket/README.md",
    "treeopt/data/pocket-draft/README.md",
    "treeopt/data/pocket-eagle3/README.md",
)


def site_path(path: str) -> str:
    """The path in the site of a file of the repository: `docs/files.md` -> `files.md`."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def repository_path(path: str) -> str:
    """The path in the repository of a file of the site, the inverse of `site_path`."""
    if path == "index.md":
        return "README.md"
    return path.removeprefix("repository/") if path.startswith("repository/") else f"docs/{path}"


def site_link(link: str, page: str) -> str:
    """A link of a page, as the repository has it -> as the site has it; `page` is the page's path in the site."""
    if not link or link.startswith(("#", "http:", "https:", "mailto:")):
        return link
    path, mark, section = link.partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(repository_path(page)), path))
    return posixpath.relpath(site_path(target), posixpath.dirname(page) or ".") + mark + section


def linked_files() -> list[str]:
    """Files outside docs/ that pages link to and that are no pages, such as scripts of examples/."""
    pages = [ROOT / page for page in PAGES] + sorted((ROOT / "docs").rglob("*.md"))
    found = set()
    for page in pages:
        for link in LINK.findall(page.read_text()):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.is_file() and target.is_relative_to(ROOT):
                found.add(target.relative_to(ROOT).as_posix())
    return sorted(path for path in found if not path.startswith("docs/") and path not in PAGES)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the files outside docs/."""
    from mkdocs.structure.files import File  # the tests of the links need no mkdocs

    for path in (*PAGES, *linked_files()):
        files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite the links outside of fenced code."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    of_page = page.file.src_uri
    return "".join(
        part if part.startswith("```") else LINK.sub(lambda m: f"]({site_link(m[1], of_page)})", part) for part in parts
    )
