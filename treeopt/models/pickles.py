"""Checks of PyTorch's .pt files: the size of what is packed in them, and the kind of the tensors."""

from __future__ import annotations

import os
import zipfile
from typing import IO

from torch import Tensor

from treeopt.files.read import read_head

MAGIC = (b"PK\x03\x04", b"\x80")  # of a zip and of a pickle; torch.load also tries to unpack archives of tar
UNKNOWN = 1 << 62  # bytes; more than any file has


def unpacked_size(file: str | os.PathLike[str] | IO[bytes]) -> int:
    """The bytes of all members of a .pt file; 0 where it is a pickle, as PyTorch wrote before 1.6.

    PyTorch stores the members without compression and one after another, so that they have fewer bytes than the file.
    `torch.load` also unpacks archives that the zipfile module refuses, such as those of other versions of the format;
    nothing is known of their size, so that they count as `UNKNOWN`.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OSError):
        return UNKNOWN if _begins_as_zip(file) else 0


def _begins_as_zip(file: str | os.PathLike[str] | IO[bytes]) -> bool:
    """Whether `torch.load` takes a file for a zip: by its first bytes alone."""
    if isinstance(file, (str, os.PathLike)):
        return read_head(file, len(MAGIC[0])) == MAGIC[0]
    file.seek(0)
    return file.read(len(MAGIC[0])) == MAGIC[0]


def ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is in memory with a place for each value: not sparse, nested, quantised or expanded."""
    if tensor.is_nested or tensor.is_quantized or str(tensor.layout) != "torch.strided" or tensor.device.type != "cpu":
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
