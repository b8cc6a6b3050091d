"""Detection of logits processors that change their state when they are called.

Tree decoding calls a processor with the path of each draft, and most drafts are rejected. That is correct where the
result depends on the text alone. A processor that counts its calls, such as a grammar's matcher, would return wrong
scores. The state is everything reachable from the object: attributes, containers, other objects, tensors, closures.
Objects of a compiled library cannot be read and may change undetected.
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

_STOCK = "transformers."  # prefix of its modules; its processors with a state are refused by name in `generate`
_COMPARED = 1 << 16  # largest number of values of a CPU tensor that is compared; else its version counter
_CONSTANT = (nn.Module, PreTrainedTokenizerBase, type, ModuleType)  # not changed by processors
_FIX = "tree=treeopt.Tree(()) decodes with one node; stateless_processors=True, or [{name}], says that it has no state"


def watched(processors: Iterable[Any], stateless: bool | Sequence[type]) -> list[Any]:
    """The processors that run code from outside transformers and are not declared stateless."""
    if stateless is True:
        return []
    declared = tuple(stateless or ())
    # This stock processor calls a function that the user passes, such as a grammar's.
    others = [one for one in processors if isinstance(one, PrefixConstrainedLogitsProcessor) or not _is_stock(one)]
    return [one for one in others if not (declared and isinstance(one, declared))]


def _is_stock(processor: Any) -> bool:
    return (type(processor).__module__ + ".").startswith(_STOCK)


class Watch:
    """The state of some processors when this object was made.

    Raises:
        TreeoptError: E510 where a state cannot be read.
    """

    def __init__(self, processors: Sequence[Any]) -> None:
        self._processors = processors
        self._before = [_State(one) for one in processors]

    def check(self) -> None:
        """Raise E510 where a processor has changed since then."""
        for one, before in zip(self._processors, self._before, strict=True):
            if _State(one).text != before.text:
                what = f"the logits processor {type(one).__name__} changes its own state when it is called"
                why = "a tree calls it with the paths of drafts that are rejected later"
                raise _refused(one, what, why)


class _State(pickle.Pickler):
    """The state of an object as bytes, which are equal where nothing has changed; they are never unpickled.

    Attributes:
        text: the bytes.
    """

    def __init__(self, processor: Any) -> None:
        self._alive: list[Any] = []  # objects identified by their address, which must not be freed
        stream = io.BytesIO()
        super().__init__(stream, protocol=4)
        try:
            self.dump(processor)
        except Exception as error:  # foreign objects raise any type
            what = f"the state of the logits processor {type(processor).__name__} cannot be read: {error}"
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
        """Functions by their closures and defaults; other objects as they pickle themselves."""
        if isinstance(obj, FunctionType) and obj is not _parts:
            cells = [cell.cell_contents for cell in obj.__closure__ or ()]
            return _parts, (self._place(obj.__code__), cells, obj.__defaults__)
        if isinstance(obj, MethodType):
            return _parts, (obj.__func__, obj.__self__)
        return NotImplemented

    def _place(self, obj: Any) -> tuple[str, int]:
        self._alive.append(obj)
        return type(obj).__name__, id(obj)


def _bytes(tensor: Tensor) -> bytes:
    """The values of a tensor of any type."""
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())


def _parts(*parts: Any) -> tuple[Any, ...]:
    """The parts of a function in a state."""
    return parts


def _refused(processor: Any, what: str, why: str) -> TreeoptError:
    fix = _FIX.format(name=type(processor).__name__)
    return TreeoptError(Code.GENERATE_UNSUPPORTED, what, why=why, fix=fix)
