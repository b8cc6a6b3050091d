"""Writing a base with its merged adapter as a checkpoint of transformers."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from treeopt.errors import Code, TreeoptError
from treeopt.files.atomic import check_folder, check_space, make_folder, unwritable, write_text
from treeopt.models.adapters import NOTE_FILE
from treeopt.models.base import Base


def save_merged(base: Base, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write a base and its tokenizer to a folder that `from_pretrained` of transformers loads.

    The weights are in the precision in which the base was loaded. A tied LM head that was adapted is untied in the
    folder.

    Args:
        base: from `load_base(..., adapter=)`.
        folder: made where it is missing; it appears when it is complete.
        overwrite: replace a folder that this function wrote.

    Raises:
        TreeoptError: as `check_merged_writable`; E403 where the disk is too small.
        ValueError: where the base has no adapter, so that it is a copy of an existing checkpoint.

    Example:
        >>> import treeopt
        >>> texts = ["import os\\nprint(os.getcwd())", "def main():\\n    return 0"]
        >>> trained = treeopt.train_jointly("pocket", texts, "h", treeopt.JointSettings(steps=1), heads="pocket")
        >>> merged = treeopt.load_base("pocket", adapter=trained.adapter)
        >>> treeopt.save_merged(merged, "merged").name
        'merged'
    """
    if base.adapter is None:
        raise ValueError(f"{base.name} was loaded without an adapter, so there is nothing to merge")
    place = check_merged_writable(folder, overwrite=overwrite)
    size = sum(tensor.numel() * tensor.element_size() for tensor in base.model.state_dict().values())
    check_space(place, size, "the merged model")
    parent = make_folder(place.absolute().parent)
    try:
        temporary = Path(tempfile.mkdtemp(dir=parent, prefix=f".{place.name[:40]}."))
    except OSError as error:
        raise unwritable(place, error) from error
    try:
        written = temporary / "model"
        base.model.save_pretrained(written)
        if base.tokenizer is not None:
            base.tokenizer.save_pretrained(written)
        note = {"base": base.name, "adapter": base.adapter.name, "base_ids": dict(base.adapter.base_ids)}
        write_text(written / NOTE_FILE, json.dumps(note, indent=1) + "\n")
        if place.exists():
            shutil.rmtree(place)
        os.replace(written, place)
    except OSError as error:
        raise unwritable(place, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return place


def check_merged_writable(folder: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """The folder, after checking that a merged base can be written there; called before long work.

    Raises:
        TreeoptError: E202 where it holds a merged base and `overwrite` is off, E204 where it holds other files or
            cannot be written.
    """
    place = check_folder(folder)
    names = {path.name for path in place.iterdir()} if place.is_dir() else set()
    if names and not {NOTE_FILE, "config.json"} <= names:
        what = f"{folder} holds files that treeopt did not write"
        fix = "choose a folder that does not exist"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, why="merged weights need a folder of their own", fix=fix)
    if names and not overwrite:
        what = f"{folder} holds a merged model"
        raise TreeoptError(Code.FILE_EXISTS, what, fix="choose another folder, or replace it with --force")
    return place
