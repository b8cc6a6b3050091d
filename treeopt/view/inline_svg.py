"""Pictures of matplotlib as parts of a page: themed by the page's colors, without style attributes.

A strict Content-Security-Policy refuses style attributes, and colors of a file do not follow the reader's theme. So
declarations become attributes of the same names, and colors become variables of the page's style sheet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

# Colors of our charts -> the variables of the page; the color itself serves where a page has no such variable.
COLORS = {
    "#0b4f8a": "line-1",
    "#d9480f": "line-2",
    "#2b8a3e": "line-3",
    "#862e9c": "line-4",
    "#0b7285": "line-5",
    "#c2255c": "line-6",
    "#5c940d": "line-7",
    "#33414d": "line-8",
    "#9aa7b2": "muted-line",
    "#e3e8ed": "grid",
    "#b0b0b0": "grid",
    "#000000": "text",
    "#ffffff": "page",
}
_FONT = re.compile(r"(?:(?P<weight>\d+|bold)\s+)?(?P<size>[\d.]+px)\s")
_REFERENCE = re.compile(r"""(?:url\(#|href="#)([^)"]+)""")
_URL = re.compile(r"url\(#")
_DROPPED = {"metadata", "style", "title", "desc"}


def inline_svg(picture: str, prefix: str, label: str) -> str:
    """A picture as an element of an HTML page.

    Args:
        picture: an SVG file's text.
        prefix: of all ids in it, so that they differ from those of other pictures on the page.
        label: the text alternative.
    """
    root = ElementTree.fromstring(picture)
    used = set(_REFERENCE.findall(picture))
    for element in root.iter():
        element.tag = _local(element.tag)
        for child in [child for child in element if _local(child.tag) in _DROPPED]:
            element.remove(child)
        element.attrib = dict(_attributes(element, prefix, used))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"class": "chart", "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    """A name without its namespace."""
    return name.rpartition("}")[2]


def _attributes(element: Element, prefix: str, used: set[str]) -> Iterator[tuple[str, str]]:
    """The attributes of an element, those of its style attribute included."""
    for given, value in element.attrib.items():
        name = _local(given)
        if name == "style":
            yield from _declarations(value, prefix)
        elif name == "id":  # others repeat names of series
            if value in used:
                yield name, prefix + value
        elif name == "href":
            yield name, value.replace("#", f"#{prefix}", 1)
        else:
            yield name, _value(value, prefix)
    if element.tag == "text" and "fill" not in element.get("style", ""):
        yield "fill", "var(--text, #000)"


def _declarations(style: str, prefix: str) -> Iterator[tuple[str, str]]:
    for declaration in filter(str.strip, style.split(";")):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name == "font-family":  # the page chooses it
            continue
        if name != "font":
            yield name, _value(value, prefix)
        elif found := _FONT.match(value):  # the shorthand is no attribute
            yield "font-size", found["size"]
            if found["weight"]:
                yield "font-weight", found["weight"]


def _value(value: str, prefix: str) -> str:
    """A value with its ids prefixed, and a color as the page's variable."""
    color = COLORS.get(value.lower())
    return _URL.sub(f"url(#{prefix}", value) if color is None else f"var(--{color}, {value})"
