"""Triton's paths in braces: `{0}, {1}, {0, 0}`, the value of `medusa_choices` in a config.pbtxt."""

from __future__ import annotations

import re

from treeopt.export.faults import Fault, shown
from treeopt.tree import Path, Tree

_S = r"[ \t\r\n]*"  # not \s, which has characters that `int` refuses
_RANKS = rf"\{{{_S}[0-9]{{1,10}}(?:{_S},{_S}[0-9]{{1,10}})*{_S}\}}"
_LIST = re.compile(rf"{_RANKS}(?:{_S},{_S}{_RANKS})*{_S},?")
_NAME = re.compile(r"(?:medusa_choices|eagle_choices)\s*[:=]\s*")


def braces_text(tree: Tree) -> str:
    """The tree's paths in runtime order, on one line."""
    return ", ".join("{" + ", ".join(map(str, path)) + "}" for path in tree.paths)


def is_braces(text: str) -> bool:
    """Whether a text begins as paths in braces do, with or without the option's name and quotes."""
    return re.match(r"\{\s*[0-9][0-9\s,]*\}", _bare(text)) is not None


def paths_of_braces(text: str, fault: Fault) -> list[Path]:
    """The paths of a text such as `{0}, {1}, {0, 0}`, which need not be those of a tree.

    Raises:
        TreeoptError: E206 where it is not such a text.
    """
    listed = _bare(text)
    if not _LIST.fullmatch(listed):
        raise fault(f"holds {shown(listed)}, not paths such as {{0}}, {{1}}, {{0, 0}}")
    return [tuple(int(rank) for rank in ranks.split(",")) for ranks in re.findall(r"\{([^}]*)\}", listed)]


def _bare(text: str) -> str:
    """The paths without the option's name and quotes."""
    bare = text.strip()
    name = _NAME.match(bare)
    bare = bare[name.end() :] if name else bare
    quoted = len(bare) > 1 and bare[0] in "\"'" and bare[-1] == bare[0]
    return bare[1:-1].strip() if quoted else bare
