"""Tensors of a checkpoint by name, from safetensors and PyTorch's files and their shards; no code of a file is run."""

import functools
import hashlib
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from treeopt.errors import Code, TreeoptError
from treeopt.files.read import is_regular, leaves_folder, read_head, read_settings, stays_in
from treeopt.models.devices import weight_of

State: TypeAlias = dict[str, Tensor]
Loaders: TypeAlias = Mapping[str, Callable[[], Tensor]]  # read a tensor when they are called
Wanted: TypeAlias = Callable[[Path, Iterable[str]], Iterable[str]]  # an index and its names -> those that are read

UNKNOWN = 1 << 62  # bytes; more than any file has
_INDEX = (".safetensors.index.json", ".bin.index.json")  # of maps from weights to shard files
_ONLY_BESIDE = "a checkpoint's index may name only files of the checkpoint"
_SHOWN = 6  # names in a message
_MAGIC = (b"PK\x03\x04", b"\x80")  # of a zip and of a pickle; torch.load also tries to unpack archives of tar
_FIRST = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the pickle that PyTorch wrote first before 1.6
_PROTOCOLS = tuple(_MAGIC[1] + bytes([one]) for one in range(2, 6))  # that pickles begin with; PyTorch writes the first
_UNREADABLE = (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, EOFError, OSError, RuntimeError)
_SAMPLES = 64  # values of each tensor in a fingerprint
_ROUNDINGS = (torch.float32, torch.bfloat16, torch.float16)  # precisions in which a base is loaded


def read_config(file: Path) -> dict[str, Any]:
    """A JSON object of settings of another library; empty where the file does not exist."""
    if not file.exists():
        return {}
    config = read_settings(file)
    if not isinstance(config, dict):
        raise TreeoptError(Code.FILE_INVALID, f"{file} is not a JSON object but {type(config).__name__}")
    return config


def tensor_loaders(file: Path, wanted: Wanted) -> Loaders:
    """The tensors of a file or of an index of shards, by name; shards without a wanted tensor are not opened.

    Raises:
        TreeoptError: E201 where a file is missing, E203 where one is damaged or an index names files outside its
            folder, E210 where a pickle is not plain tensors, E211 where it holds anything else.
    """
    check_shards(file.parent)
    if not file.name.endswith(_INDEX):
        return _of_one_file(file)
    loaders: dict[str, Callable[[], Tensor]] = dict.fromkeys(read_config(file)["weight_map"], _not_read)
    opened: dict[str, Loaders] = {}
    for key, shard in shards_of(file, wanted).items():
        if shard not in opened:
            opened[shard] = _of_one_file(file.parent / shard)
        if key not in opened[shard]:
            raise TreeoptError(Code.FILE_INVALID, f"{file} names {key} in {shard}, which does not have it")
        loaders[key] = opened[shard][key]
    return loaders


def shards_of(index: Path, wanted: Wanted) -> dict[str, str]:
    """The file of each wanted tensor of an index, after `check_shards`."""
    check_shards(index.parent)
    shards: dict[str, str] = read_config(index)["weight_map"]
    return {key: shards[key] for key in wanted(index, shards)}


def misfit(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """What is missing, unexpected or of another shape, by name; empty where a state is as these shapes say."""
    missing, extra = shapes.keys() - state.keys(), state.keys() - shapes.keys()
    parts = [f"{word} {listed(names)}" for word, names in (("lacks", missing), ("has also", extra)) if names]
    for key, shape in shapes.items():
        if key in state and tuple(state[key].shape) != shape and len(parts) < _SHOWN:
            parts.append(f"{key} has shape {list(state[key].shape)}, not {list(shape)}")
    return " and ".join(parts)


def listed(names: Iterable[str]) -> str:
    """The first names, and the number of the others, for a message."""
    known = sorted(names)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return ", ".join(known[:_SHOWN]) + more


def invalid(name: str, what: str) -> TreeoptError:
    """E211: a checkpoint that breaks a rule of its layout."""
    return TreeoptError(Code.HEADS_INVALID, f"{name} {what}", fix="see the layouts of heads in docs/develop/formats.md")


def check_shards(folder: Path) -> None:
    """Raise E203 where an index file of weights names a file outside its folder, by itself or by a link.

    No file of weights is opened. In the cache of the hub, the files of a folder are links to those of its repository.
    """
    for file in sorted(found for suffix in _INDEX for found in folder.glob(f"*{suffix}")):
        shards = read_config(file).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise TreeoptError(Code.FILE_INVALID, f"{file} has no weight_map from weights to files")
        place, names = Path(os.path.realpath(folder)), sorted(set(shards.values()))
        inside = place, *(above.parent / "blobs" for above in place.parents if above.name == "snapshots")
        odd = next((name for name in names if leaves_folder(name) or not stays_in(folder / name, *inside)), None)
        if odd is not None:
            what = f"{file} names weights in {odd!r}, which is not in its folder, or a link to another folder"
            fix = "put the files of weights into the folder, or name the folder that they are in"
            raise TreeoptError(Code.FILE_INVALID, what, why=_ONLY_BESIDE, fix=fix)


def _not_read() -> Tensor:
    raise AssertionError("a tensor that was not wanted is read")


def _of_one_file(file: Path) -> Loaders:
    if os.path.lexists(file) and not is_regular(file):
        raise TreeoptError(Code.FILE_INVALID, f"{file} is not a file, but a folder, a pipe, a device or a broken link")
    if not is_regular(file):
        raise TreeoptError(Code.FILE_MISSING, f"there is no file {file}")
    if file.suffix == ".safetensors":
        try:
            opened: Any = safe_open(file, framework="pt")
        except (SafetensorError, OSError, ValueError) as error:  # ValueError: names that no file can have
            raise _damaged(file, error) from error
        return {key: functools.partial(_tensor, opened, key, file) for key in opened.keys()}  # noqa: SIM118
    return {key: tensor.detach for key, tensor in _unpickled(file).items()}


def _tensor(opened: Any, key: str, file: Path) -> Tensor:
    try:
        tensor: Tensor = opened.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error
    return tensor


def _damaged(file: Path, error: Exception) -> TreeoptError:
    return TreeoptError(Code.FILE_INVALID, f"{file} is damaged or not a safetensors file: {error}")


def _unpickled(file: Path) -> State:
    """The tensors of a file that torch.save wrote."""
    no_checkpoint = TreeoptError(Code.FILE_INVALID, f"{file} is damaged, or not a checkpoint of PyTorch")
    if not read_head(file, len(_MAGIC[0])).startswith(_MAGIC):
        raise no_checkpoint
    kind = refused_pickle(file)
    if kind is not None:
        raise _refused(file, kind)
    unpacked = unpacked_size(file)
    if unpacked == UNKNOWN:
        raise no_checkpoint
    if unpacked > file.stat().st_size:
        raise invalid(str(file), f"unpacks to {unpacked:,} bytes, more than it has; PyTorch writes no compressed files")
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's of pickles that it refuses next
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the types that torch.load raises vary
        # The message of torch on a refused pickle proposes weights_only=False, which would run code of the file.
        refused = refused_name(error)
        raise (no_checkpoint if refused is None else _refused(file, refused)) from error
    if not isinstance(loaded, dict):
        raise invalid(str(file), "is not a dictionary of tensors")
    odd = [str(key) for key, value in loaded.items() if not isinstance(value, Tensor) or not ordinary(value)]
    if odd:
        raise invalid(str(file), f"is not a dictionary of tensors that are plain arrays in memory: {listed(odd)}")
    return {str(key): value for key, value in loaded.items()}


def _refused(file: Path, kind: str) -> TreeoptError:
    what = f"{file} was refused: it is not plain tensors ({kind})"
    return TreeoptError(Code.PICKLE_REFUSED, what, fix="use a file of safetensors")


def refused_name(error: BaseException) -> str | None:
    """The function or class in a pickle refused by `torch.load(..., weights_only=True)`; None for any other error."""
    found = re.search(r"(?:GLOBAL|class|function) ([\w.]+)", str(error))
    return found[1] if found and "weights_only" in str(error) else None


def refused_pickle(file: str | os.PathLike[str] | IO[bytes]) -> str | None:
    """What a pickle or an archive with pickles is that PyTorch cannot read without running code; None for other files.

    A file of PyTorch that names functions or classes is found only while it is read: `refused_name`.
    """
    head = _head(file, len(_FIRST))
    if head.startswith(_PROTOCOLS):
        return None if _FIRST.startswith(head) else "a pickle that PyTorch did not write"
    if not head.startswith(_MAGIC[0]):
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
    `torch.load` also unpacks archives that the zipfile module refuses; nothing is known of their size: `UNKNOWN`.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OSError):
        # `torch.load` takes a file for a zip by its first bytes alone.
        return UNKNOWN if _head(file, len(_MAGIC[0])) == _MAGIC[0] else 0


def _head(file: str | os.PathLike[str] | IO[bytes], size: int) -> bytes:
    if isinstance(file, (str, os.PathLike)):
        return read_head(file, size)
    file.seek(0)
    return file.read(size)


def ordinary(tensor: Tensor) -> bool:
    """Whether a tensor is in memory with a place for each value: not sparse, nested, quantised or expanded."""
    if tensor.is_nested or tensor.is_quantized or str(tensor.layout) != "torch.strided" or tensor.device.type != "cpu":
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


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
    """The fingerprint of the weights rounded to each precision: one is equal in models of two precisions."""
    return {str(dtype).removeprefix("torch."): fingerprint(module, dtype) for dtype in _ROUNDINGS}
