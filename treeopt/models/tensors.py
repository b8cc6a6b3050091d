"""Checks of PyTorch's .pt files: who wrote them, the size of what is packed in them, and the kind of the tensors."""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from typing import IO

import torch
from torch import Tensor, nn

from treeopt.files.read import read_head
from treeopt.models.devices import weight_of

MAGIC = (b"PK\x03\x04", b"\x80")  # of a zip and of a pickle; torch.load also tries to unpack archives of tar
SAM_DECODING = "a SAM-Decoding table"
UNKNOWN = 1 << 62  # bytes; more than any file has
_FIRST = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the pickle that PyTorch wrote first before 1.6
_PROTOCOLS = tuple(MAGIC[1] + bytes([one]) for one in range(2, 6))  # that pickles begin with; PyTorch writes the first
_BEGINNING = 128  # bytes; the class of a pickled object is among them
_UNREADABLE = (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, EOFError, OSError, RuntimeError)


def refused_pickle(file: str | os.PathLike[str] | IO[bytes]) -> str | None:
    """What a pickle or an archive with pickles is that PyTorch cannot read without running code; None for other files.

    A file of PyTorch that names functions or classes is found only while it is read: `checkpoint.refused_name`.
    """
    head = _head(file, _BEGINNING)
    if head.startswith(_PROTOCOLS):
        if b"samd" in head or b"sam_only" in head:  # its packages; the file is its pickled automaton
            return SAM_DECODING
        return None if _FIRST.startswith(head[: len(_FIRST)]) else "a pickle that PyTorch did not write"
    if not head.startswith(MAGIC[0]):
        return None
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            pickles = [name for name in names if name.endswith(".pkl")]
            if any(name.endswith("/constants.pkl") for name in pickles):
                return "a program of TorchScript"
            if pickles and not any(name.endswith("/version") for name in names):
                return "a zip with a pickle that PyTorch did not write"
            for name in pickles:
                with archive.open(name) as member:
                    start = member.read(2)
                if start in _PROTOCOLS[1:]:
                    return f"a pickle of protocol {start[1]}, not 2"
    except _UNREADABLE:
        pass
    return None


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
        # `torch.load` takes a file for a zip by its first bytes alone.
        return UNKNOWN if _head(file, len(MAGIC[0])) == MAGIC[0] else 0


def _head(file: str | os.PathLike[str] | IO[bytes], size: int) -> bytes:
    """The first bytes of a file."""
    if isinstance(file, (str, os.PathLike)):
        return read_head(file, size)
    file.seek(0)
    return file.read(size)


def ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is in memory with a place for each value: not sparse, nested, quantised or expanded."""
    if tensor.is_nested or tensor.is_quantized or str(tensor.layout) != "torch.strided" or tensor.device.type != "cpu":
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


_SAMPLES = 64  # values read of each tensor
_ROUNDINGS = (torch.float32, torch.bfloat16, torch.float16)  # precisions in which a base is loaded


@torch.no_grad()
def fingerprint(module: nn.Module, rounding: torch.dtype = torch.float32) -> str:
    """16 hex digits from the name, shape and 64 evenly spaced values of every parameter, rounded to a dtype."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        flat = (weight_of(module, name) if tensor.is_meta else tensor).reshape(-1)
        at = torch.linspace(0, max(flat.numel() - 1, 0), min(_SAMPLES, flat.numel()), dtype=torch.float64).long()
        sample = flat[at.to(flat.device)].to(rounding).float().cpu().numpy()
        digest.update(f"{name}{list(tensor.shape)}".encode() + sample.tobytes())
    return digest.hexdigest()[:16]


def fingerprints(module: nn.Module) -> dict[str, str]:
    """The fingerprint of the weights rounded to each precision, by its name.

    A model loaded in two precisions has two fingerprints, but one of these is equal.
    """
    return {str(dtype).removeprefix("torch."): fingerprint(module, dtype) for dtype in _ROUNDINGS}
