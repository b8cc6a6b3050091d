"""Where the data folders `trees/` and `calibration/` are: inside the wheel, or beside the package in a checkout."""

from __future__ import annotations

from pathlib import Path

from treeopt.errors import Code, TreeoptError

_KINDS = ("trees", "calibration")


def data_root(kind: str) -> Path:
    """The folder of one kind of data (`trees` or `calibration`).

    Raises:
        TreeoptError: E201 where the installation lacks it.
    """
    assert kind in _KINDS
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "data" / kind, package.parent / kind):
        if folder.is_dir():
            return folder
    raise TreeoptError(Code.FILE_MISSING, f"the installed treeopt lacks its {kind} folder", fix="install treeopt again")


def zoo() -> dict[str, Path]:
    """Name and file of each tree in the zoo, by name."""
    return {path.stem: path for path in sorted(data_root("trees").glob("*.yaml"))}


def prompt_sets() -> dict[str, Path]:
    """Name and file of each named prompt set, by name."""
    return {path.stem: path for path in sorted((data_root("calibration") / "prompts").glob("*.yaml"))}
