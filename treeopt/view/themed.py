"""Colors of charts: matplotlib's SVG with the light and the dark colors that the reader's system prefers.

`themed` makes a file of its own, `inline_svg` an element of an HTML page that defines the same variables. Equal
pictures give equal bytes.
"""

import re
from xml.etree import ElementTree

# Colors that charts are drawn in, those of a light page -> CSS variables, and their values on a dark page.
COLORS = {
    "#0b4f8a": ("line-1", "#79c0ff"),
    "#d9480f": ("line-2", "#ffa657"),
    "#2b8a3e": ("line-3", "#6fdd8b"),
    "#862e9c": ("line-4", "#d2a8ff"),
    "#0b7285": ("line-5", "#56d4dd"),
    "#c2255c": ("line-6", "#ff9bce"),
    "#5c940d": ("line-7", "#b8d96b"),
    "#33414d": ("line-8", "#c9d1d9"),
    "#9aa7b2": ("muted-line", "#6e7a86"),
    "#57606a": ("muted", "#9da7b1"),
    "#e3e8ed": ("grid", "#21262d"),
    "#b0b0b0": ("grid", "#21262d"),
    "#000000": ("text", "#e6edf3"),
    "#ffffff": ("page", "#0d1117"),
}
_STYLED = re.compile(r'(<[^<>]*?) style="([^"]*)"')
_PLACES = re.compile(r' (?:d|x|y|width|height|points|transform)="[^"]*"')
_NUMBERED = re.compile(r'(<g) id="[^"]*_\d+"')  # groups that nothing refers to
_LONG = re.compile(r"(\.\d\d)\d+")
_DEFAULT = re.compile(r'<style type="text/css">.*?</style>', re.DOTALL)
_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
_CHART = ".treeopt-chart"


def themed(picture: str) -> str:
    """A picture of matplotlib with CSS classes for its `style` attributes, in the colors of the reader's scheme."""
    classes: dict[str, str] = {}

    def named(match: re.Match[str]) -> str:
        return f'{match[1]} class="{classes.setdefault(match[2], f"c{len(classes)}")}"'

    text = _STYLED.sub(named, picture.replace("<svg ", '<svg class="treeopt-chart" ', 1))
    text = _NUMBERED.sub(r"\1", text)
    text = _PLACES.sub(lambda match: _LONG.sub(r"\1", match[0]), re.sub(r"\n +", "\n", text))
    light, dark = (
        f"{_CHART}{{" + "".join(f"--{name}:{color};" for name, color in dict(pairs).items()) + "}"
        for pairs in ([(name, color) for color, (name, _) in reversed(COLORS.items())], COLORS.values())
    )
    rules = [f"{light}@media (prefers-color-scheme:dark){{{dark}}}"]
    rules += [f"{_CHART} *{{stroke-linejoin:round}}{_CHART} text{{font-family:{_FONT};fill:#000000;fill:var(--text)}}"]
    rules += [f"{_CHART} .{name}{{{_rule(style)}}}" for style, name in classes.items()]
    sheet = "\n".join(rules)
    return _DEFAULT.sub(lambda _: f"<style>{sheet}</style>", text, count=1)


def _rule(style: str) -> str:
    """Declarations with the variables of their colors; the color itself is for programs that know no variables."""
    found = []
    for name, value in _declarations(style).items():
        if name != "font-family":
            found.append(f"{name}:{value}")
        if value.lower() in COLORS:
            found.append(f"{name}:var(--{COLORS[value.lower()][0]})")
    return ";".join(found)


_REFERENCE = re.compile(r"""(?:url\(#|href="#)([^)"]+)""")
_DROPPED = {"metadata", "style", "title", "desc"}
_OF_PAGE = {"font", "font-family"}  # which the style sheet of the page chooses


def inline_svg(picture: str, label: str) -> str:
    """A picture as an element of an HTML page without `style` attributes, with `label` as its text alternative."""
    root = ElementTree.fromstring(picture)
    used = set(_REFERENCE.findall(picture))
    for element in root.iter():
        element.tag = _local(element.tag)
        for child in [child for child in element if _local(child.tag) in _DROPPED]:
            element.remove(child)
        given = {_local(name): value for name, value in element.attrib.items()}
        if given.get("id") not in used:  # names of series, which others repeat
            given.pop("id", None)
        given |= _declarations(given.pop("style", ""))
        element.attrib = {name: _variable(value) for name, value in given.items() if name not in _OF_PAGE}
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"class": "chart", "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _declarations(style: str) -> dict[str, str]:
    pairs = (one.partition(":") for one in style.split(";") if one.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _variable(value: str) -> str:
    """A color as the page's variable; other values as they are."""
    found = COLORS.get(value.lower())
    return value if found is None else f"var(--{found[0]}, {value})"
