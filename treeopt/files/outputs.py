"""Checks of output files before any work: which existing files a command may replace.

Without --force a command replaces an existing file only if it is a tree, a compiled tree or a picture, of the kind that
the command writes, has treeopt's mark and was not edited. All other files need --force: calibrations, drafters,
profiles, heads and texts take long to make, and formats such as PNG hold no mark. An input of the same run is never
replaced.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import check_writable, write_text
from treeopt.files.configurations import Configuration, comment_of, is_note, note_of
from treeopt.files.read import is_regular

_Name = str | os.PathLike[str]


def check_output(path: _Name, *, kind: str | None = None, force: bool, inputs: Iterable[_Name | None] = ()) -> Path:
    """The path, after checking that a command may write an output of this kind there: E202, E204.

    `kind` is None for an output that takes long to make, so that only `force` replaces a file.
    """
    target = check_writable(path, overwrite=True)
    if os.path.lexists(note_of(path)):
        note = check_writable(note_of(path), overwrite=True)
        check_no_input(note, *inputs)
        if not force and not is_note(note):
            what = f"{note_of(path)} exists, and is no note of treeopt, which would replace it"
            raise TreeoptError(Code.FILE_EXISTS, what)
    check_no_input(path, *inputs)
    if not target.exists() or force:
        return target
    found = None if kind is None else _KINDS.get(written_kind(target) or "")
    if kind is not None and found == kind:
        return target
    why = f"only an unedited {kind} that treeopt wrote is replaced without --force" if kind and found is None else ""
    why = f"it is a {found}, and the output is a {kind}" if found else why
    raise TreeoptError(Code.FILE_EXISTS, f"{path} exists", why=why)


def check_no_input(path: _Name, *inputs: _Name | None) -> None:
    """Raise E204 where an output is an input of the same run, or part of a model in a folder that is an input."""
    target = Path(path)
    for source in (Path(os.path.expanduser(name)) for name in inputs if name):
        if not (target.exists() and source.exists()):
            continue
        inside = source.is_dir() and target.resolve().parent == source.resolve()
        if target.samefile(source) or (inside and written_kind(target) is None):
            what = f"{path} is an input of this command" + (f", a file of {source}" if inside else "")
            why = "an input is never replaced, not even with --force"
            raise TreeoptError(Code.FILE_UNWRITABLE, what, why=why, fix="choose another name with -o")


def written_kind(path: Path) -> str | None:
    """The kind or schema of an unedited file of treeopt, in a format that is not part of a model's checkpoint."""
    from treeopt.files.tensors import unedited_schema

    kind, unedited = _mark_of(path)
    return kind if kind and unedited else unedited_schema(path) if path.is_file() else None


TREE, PICTURE, BUFFERS, REPORT = "tree", "picture", "compiled tree", "report"  # kinds that are fast to make again
BUFFERS_SCHEMA = "treeopt.buffers/1"  # of compiled trees
_KINDS = {**{kind: kind for kind in (TREE, PICTURE, REPORT)}, BUFFERS_SCHEMA: BUFFERS}  # by mark or schema
_XML, _DOT, _YAML = ("<!-- ", " -->"), ("// ", ""), ("# ", "")  # before and after a comment
_COMMENTS = {".dot": _DOT, ".gv": _DOT}  # of pictures; an SVG image or a page otherwise, also without a suffix
_MARK = re.compile(r"(?:<!-- |// |# )treeopt ([a-z ]+), unedited: sha256 ([0-9a-f]{64})(?: -->)?\n")
LONGEST = 200  # bytes of a mark's line
_PIECE = 1 << 20  # bytes that are hashed at a time


def write_marked(
    path: str | os.PathLike[str], content: str, kind: str, configuration: Configuration | None = None
) -> None:
    """Write a text, which must end with a line break, the configuration of its command as a comment, and its mark.

    E204 for a tree or a schedule whose file would be too large to be read.
    """
    from treeopt.files.strict_yaml import MAX_BYTES  # imports pydantic

    assert content.endswith("\n")
    content = content.encode(errors="replace").decode()  # names of files that are not UTF-8
    if kind == TREE and len(content) + LONGEST > MAX_BYTES:
        what, why = f"{path} would have {len(content):,} bytes", f"at most {MAX_BYTES:,} are read"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, why=why, fix="a smaller --nodes, or fewer plans of a schedule")
    before, after = _COMMENTS.get(Path(path).suffix.lower(), _XML) if kind in (PICTURE, REPORT) else _YAML
    if configuration:
        content += f"{before}{comment_of(configuration)}{after}\n"
    digest = hashlib.sha256(content.encode()).hexdigest()
    write_text(path, f"{content}{before}treeopt {kind}, unedited: sha256 {digest}{after}\n")


def is_edited(path: Path) -> bool:
    """Whether a file has a mark, and the text before it is not the one that was written."""
    kind, unedited = _mark_of(path)
    return kind is not None and not unedited


def _mark_of(path: Path) -> tuple[str | None, bool]:
    """The kind in the mark of a regular file, if it has one, and whether the text before it is as it was written."""
    if not is_regular(path):
        return None, False
    size = path.stat().st_size
    with path.open("rb") as stream:
        stream.seek(max(0, size - LONGEST))
        last = stream.read(LONGEST).splitlines(keepends=True)[-1:]
        found = _MARK.fullmatch(b"".join(last).decode(errors="replace"))
        if found is None:
            return None, False
        stream.seek(0)
        digest, left = hashlib.sha256(), size - len(last[0])
        while left > 0 and (piece := stream.read(min(left, _PIECE))):
            digest.update(piece)
            left -= len(piece)
    return found[1], digest.hexdigest() == found[2]
