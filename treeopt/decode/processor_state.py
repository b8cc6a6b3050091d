"""Whether logits processors change their state when they are called.

A tree calls a processor with the path of each draft, most of which are rejected. That is harmless where the result
depends on the text alone; a processor that counts its calls, such as a grammar's matcher, would return wrong scores.
State is everything reachable from the object: attributes, containers, other objects, tensors, closures. Objects of a
compiled library cannot be read and may change undetected.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrefixConstrainedLogitsProcessor, PreTrainedTokenizerBase

from treeopt.errors import Code, TreeoptError

_STOCK = "transformers."  # its processors are known; those with a state are refused by name
_COMPARED = 1 << 16  # values of a CPU tensor that are compared; of larger tensors the version counter is
_CONSTANT = (nn.Module, PreTrainedTokenizerBase, type, ModuleType)  # not what a processor changes
_FIX = "tree=treeopt.Tree(()) decodes with one node; stateless_processors=True, or [{name}], says that it has no state"


def watched(processors: Iterable[Any], stateless: bool | Sequence[type]) -> list[Any]:
    """Those processors that run code from outside transformers and are not declared to have no state."""
    if stateless is True:
        return []
    declared = tuple(stateless or ())
    # This stock processor calls a function of the user's, such as a grammar's.
    others = [one for one in processors if isinstance(one, PrefixConstrainedLogitsProcessor) or not _is_stock(one)]
    return [one for one in others if not (declared and isinstance(one, declared))]


def _is_stock(processor: Any) -> bool:
    return (type(processor).__module__ + ".").startswith(_STOCK)


class Watch:
    """The state of some processors as it was last seen.

    Raises:
        TreeoptError: E510 where a state cannot be seen.
    """

    def __init__(self, processors: Sequence[Any]) -> None:
        self._processors = processors
        self._seen = [_State(one) for one in processors]

    def check(self) -> None:
        """Raise E510 where a processor has changed since the begin."""
        for one, seen in zip(self._processors, self._seen, strict=True):
            if _State(one).text != seen.text:
                what = f"the logits processor {type(one).__name__} changes its own state when it is called"
                why = "a tree calls it with the paths of drafts that are rejected later"
                raise _refused(one, what, why)


class _State(pickle.Pickler):
    """What an object consists of, as bytes that are equal where nothing has changed; nothing is ever unpickled.

    Attributes:
        text: the bytes.
    """

    def __init__(self, processor: Any) -> None:
        self._kept: list[Any] = []  # keeps objects alive that are identified by their address
        stream = io.BytesIO()
        super().__init__(stream, protocol=4)
        try:
            self.dump(processor)
        except Exception as error:  # whatever a foreign object raises: it cannot be looked into
            what = f"the state of the logits processor {type(processor).__name__} cannot be seen: {error}"
            raise _refused(processor, what, "a tree would call it with drafts that are rejected later") from error
        self.text = stream.getvalue()

    def persistent_id(self, obj: Any) -> Any:
        """A replacement for tensors and for objects that do not change; None for everything else."""
        if isinstance(obj, _CONSTANT):
            return self._place(obj)
        if isinstance(obj, Tensor):
            if obj.is_inference() or (obj.device.type == "cpu" and obj.numel() <= _COMPARED):
                return str(obj.dtype), tuple(obj.shape), _bytes(obj)
            return (*self._place(obj), obj._version)
        if isinstance(obj, torch.Generator):
            return "generator", _bytes(obj.get_state())
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Functions by what they close over; everything else as it says itself."""
        if isinstance(obj, FunctionType) and obj is not _parts:
            cells = [cell.cell_contents for cell in obj.__closure__ or ()]
            return _parts, (self._place(obj.__code__), cells, obj.__defaults__)
        if isinstance(obj, MethodType):
            return _parts, (obj.__func__, obj.__self__)
        return NotImplemented

    def _place(self, obj: Any) -> tuple[str, int]:
        self._kept.append(obj)
        return type(obj).__name__, id(obj)


def _bytes(tensor: Tensor) -> bytes:
    """The values of a tensor of any type."""
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def _parts(*parts: Any) -> tuple[Any, ...]:
    """Stands for a function in a state."""
    return parts


def _refused(processor: Any, what: str, why: str) -> TreeoptError:
    fix = _FIX.format(name=type(processor).__name__)
    return TreeoptError(Code.GENERATE_UNSUPPORTED, what, why=why, fix=fix)
