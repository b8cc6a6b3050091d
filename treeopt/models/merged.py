"""Writing a base with its merged adapter as a checkpoint of transformers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError

from treeopt.errors import Code, TreeoptError, first_line, os_error
from treeopt.files.atomic import check_folder, check_space, make_folder, new_file_mode, unwritable, write_text
from treeopt.files.configurations import with_stored
from treeopt.models.adapters import NOTE_FILE
from treeopt.models.base import Base
from treeopt.models.tensors import read_config

_SHOWN = 3  # files in a message


def save_merged(base: Base, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write a base and its tokenizer to a folder that `from_pretrained` of transformers loads.

    The weights are in the precision in which the base was loaded. A tied LM head that was adapted is untied in the
    folder.

    Args:
        base: from `load_base(..., adapter=)`.
        folder: made where it is missing; it appears when it is complete.
        overwrite: replace the files that this function wrote; a folder that holds any other file is refused.

    Raises:
        TreeoptError: as `check_merged_writable`, for the folders of base and adapter; E403 where the disk is too small.
        ValueError: where the base has no adapter, so that it is a copy of an existing checkpoint.

    Examples:
        >>> import treeopt
        >>> texts = ["import os\\nprint(os.getcwd())", "def main():\\n    return 0"]
        >>> trained = treeopt.train_jointly("pocket", texts, "h", treeopt.JointSettings(steps=1), heads="pocket")
        >>> merged = treeopt.load_base("pocket", adapter=trained.adapter)
        >>> treeopt.save_merged(merged, "merged").name
        'merged'
    """
    if base.adapter is None:
        raise ValueError(f"{base.name} was loaded without an adapter, so there is nothing to merge")
    others = (base.name, base.adapter.name)
    place = check_merged_writable(folder, overwrite=overwrite, others=others)
    check_merged_space(base, place)
    target = Path(os.path.realpath(place))  # of a link, the folder that it points to
    parent = make_folder(target.parent)
    try:
        temporary = Path(tempfile.mkdtemp(dir=parent, prefix=f".{target.name[:40]}."))
    except OSError as error:
        raise unwritable(place, error) from error
    written = temporary / "model"
    try:
        base.model.save_pretrained(written)
        if base.tokenizer is not None:
            base.tokenizer.save_pretrained(written)
        for path in written.rglob("*.safetensors"):  # safetensors makes them readable by their owner alone
            path.chmod(new_file_mode())
        made = {"base": base.name, "adapter": base.adapter.name, "base_ids": dict(base.adapter.base_ids)}
        note = {**made, "files": sorted(_names_in(written))}
        write_text(written / NOTE_FILE, json.dumps(with_stored(note), indent=1) + "\n")
        check_merged_writable(folder, overwrite=overwrite, others=others)  # writing took long
        _replace(written, target, temporary / "before")
    except OSError as error:
        raise unwritable(place, error) from error
    except SafetensorError as error:  # its own errors of the disk
        raise unwritable(place, os_error(error) or OSError(0, first_line(error))) from error
    finally:
        shutil.rmtree(written, ignore_errors=True)
        with contextlib.suppress(OSError):
            temporary.rmdir()
    return place


def check_merged_writable(
    folder: str | os.PathLike[str], *, overwrite: bool, others: Iterable[str | os.PathLike[str]] = ()
) -> Path:
    """The folder, after checking that a merged base can be written there; called before long work."""
    place = check_folder(folder)
    for other in others:
        _check_apart(place, other)
    if not place.is_dir() or not any(place.iterdir()):
        return place
    foreign = sorted(_names_in(place) - _names_written(place))
    if foreign:
        what = f"{folder} holds files that treeopt did not write: {', '.join(foreign[:_SHOWN])}"
        fix = "choose a folder that does not exist, or move these files away"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, why="merged weights need a folder of their own", fix=fix)
    if not overwrite:
        what = f"{folder} holds a merged model"
        raise TreeoptError(Code.FILE_EXISTS, what, fix="choose another folder, or replace it with --force")
    return place


def check_merged_space(base: Base, folder: str | os.PathLike[str]) -> None:
    """Raise E403 where a disk is too small for the base with an adapter in its weights; the base needs none yet."""
    # The names of a tied LM head and its embedding are both counted: the merged model has both.
    size = sum(tensor.numel() * tensor.element_size() for tensor in base.model.state_dict().values())
    check_space(folder, size, "the merged model", option="--merge")


def _check_apart(place: Path, other: str | os.PathLike[str]) -> None:
    """Raise E204 where a folder is another file or folder, contains it, or lies in it."""
    target, source = (Path(os.path.realpath(Path(one).expanduser())) for one in (place, other))
    if target in (source, *source.parents) or source in target.parents:
        what = f"the folder for the merged model, {place}, is, contains or lies in {other}, which the run uses"
        why, fix = "merged weights need a folder of their own", "choose another folder for the merged model"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, why=why, fix=fix)


def _names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def _names_written(folder: Path) -> set[str]:
    """The files and folders that `save_merged` wrote to a folder, by its note; empty where it has no such note."""
    try:
        names = read_config(folder / NOTE_FILE).get("files")
    except TreeoptError:
        return set()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return set()
    return {*names, NOTE_FILE}


def _replace(written: Path, target: Path, before: Path) -> None:
    """Move a folder to its place; one of `save_merged` that is there is moved away before and deleted after."""
    if target.is_dir():
        os.replace(target, before)
    try:
        os.replace(written, target)
    except BaseException:
        if before.is_dir():
            os.replace(before, target)
        raise
    shutil.rmtree(before, ignore_errors=True)
