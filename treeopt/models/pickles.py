"""Checks of PyTorch's .pt files: the size of what is packed in them, and the kind of the tensors."""

from __future__ import annotations

import os
import zipfile
from typing import IO

from torch import Tensor

MAGIC = (b"PK\x03\x04", b"\x80")  # of a zip and of a pickle; torch.load also tries to unpack archives of tar


def unpacked_size(file: str | os.PathLike[str] | IO[bytes]) -> int:
    """The bytes of all members of a .pt file; 0 where it is no zip, as PyTorch wrote before 1.6.

    PyTorch stores the members without compression and one after another, so that they have fewer bytes than the file.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OSError):
        return 0  # torch.load reads it or says that it is damaged


def ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is in memory with a place for each value: not sparse, nested, quantised or expanded."""
    if tensor.is_nested or tensor.is_quantized or str(tensor.layout) != "torch.strided" or tensor.device.type != "cpu":
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
