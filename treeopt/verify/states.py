"""Stock caches of any kind as values: copied, replicated, joined and taken apart along the batch dimension.

`transformers` offers this for some kinds of layers only: linear-attention layers lack `batch_repeat_interleave`,
MiniMax's cache fails in `reorder_cache`, RWKV's state is a list. Here a cache is whatever a forward returned: objects,
lists and dictionaries of tensors, whose first dimension is the batch, and of numbers. The probe checks that this is so.
"""

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedModel

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base

_SHARE = 0.8  # of free memory that the rows of a step may take
_TOKENS = 64  # by which a text grows before its memory is looked at again

_log = logging.getLogger(__name__)
_logged: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()  # bytes that were logged


class Unlike(ValueError):
    """Caches have different parts, so that they cannot be joined."""


Change = Callable[[list[Any]], Any]  # tensors, or whole numbers, at one place of several caches -> one


def joined(caches: Sequence[Any], counts: Sequence[int]) -> Any:
    """One cache with `counts` copies of each text's, in this order; the texts' caches, of batch 1, are not changed.

    Where tensors differ in a dimension, the shorter ones begin with zeros there, as texts padded on the left do.
    `Unlike` where some text has no tensor yet where others have one.
    """

    def join(values: list[Any]) -> Any:
        if any(type(value) is not type(values[0]) for value in values):
            raise Unlike
        if not isinstance(values[0], Tensor):
            return max(values)  # the length of the longest
        if not _has_rows(values[0], 1):
            return values[0].clone()
        sizes = [max(each) for each in zip(*(value.shape for value in values), strict=True)]
        parts = [_padded(value, sizes).expand(count, *sizes[1:]) for value, count in zip(values, counts, strict=True)]
        return torch.cat(parts)

    return _changed(list(caches), join)


def taken(cache: Any, row: int, rows: int, befores: Sequence[Any], index: int, tokens: int) -> Any:
    """The cache of one text, of batch 1, from that of `rows` rows after a forward of so many tokens.

    `befores` are the caches that were joined for it, that of the text at `index`: they tell what was padded.
    """

    def take(values: list[Any]) -> Any:
        after, *own = values
        if not isinstance(after, Tensor):
            return after - max(own) + own[index]
        if not _has_rows(after, rows):
            return after
        one = after[row : row + 1]
        if own[index] is not None and own[index].ndim == after.ndim:
            for place, size in enumerate(own[index].shape[1:], 1):
                if size != one.shape[place]:
                    # As many tokens more than before, and at most as many as a window keeps of the longest text.
                    kept = min(size + tokens, one.shape[place])
                    one = one.narrow(place, one.shape[place] - kept, kept)
        return one.clone(memory_format=torch.contiguous_format)

    return _changed([cache, *befores], take)


def selected(cache: Any, rows: Tensor) -> Any:
    """Copies of rows int64 [n] of a cache."""

    def select(values: list[Any]) -> Any:
        first = values[0]
        return first.index_select(0, rows.to(first.device)) if isinstance(first, Tensor) and first.ndim else first

    return _changed([cache], select)


def size_of(cache: Any) -> int:
    """Bytes of all tensors of a cache, each counted once."""
    return sum({id(tensor): tensor.nbytes for tensor in _tensors(cache)}.values())


def check_memory(
    base: Base, rows: int, lengths: Sequence[int], caches: Sequence[Any], fitting: set[tuple[int, int]]
) -> None:
    """Raise E403 unless copies of the largest of the caches, one for each of all rows of a step, fit into memory.

    `lengths` are the tokens of the texts; `fitting` has the numbers of rows, and lengths, that are known to fit. The
    bytes of a model are logged before they are allocated, and again where they are twice as many.
    """
    seen = rows, max(lengths) // _TOKENS
    if seen in fitting:
        return
    each = max(map(size_of, caches))
    if base.device.type == "cuda":
        unused = torch.cuda.memory_reserved(base.device) - torch.cuda.memory_allocated(base.device)
        free = torch.cuda.mem_get_info(base.device)[0] + unused
    else:
        free = psutil.virtual_memory().available
    what = f"{base.name}: {rows} paths of {each:,} bytes of state, {rows * each:,} in all"
    if rows * each > _SHARE * free:
        why = f"each path of a tree has a copy of the model's state; {free:,} bytes are free"
        fix = "a tree with fewer leaves, a smaller batch or a shorter context"
        raise TreeoptError(Code.OUT_OF_MEMORY, what, why=why, fix=fix)
    if rows * each >= 2 * _logged.get(base.model, 0):
        _log.info("%s", what)
        _logged[base.model] = rows * each
    fitting.add(seen)


def _tensors(cache: Any) -> Iterator[Tensor]:
    found: list[Tensor] = []

    def see(values: list[Any]) -> Any:
        if isinstance(values[0], Tensor):
            found.append(values[0])
        return values[0]

    _changed([cache], see)
    return iter(found)


def _has_rows(value: Tensor, rows: int) -> bool:
    return value.ndim > 0 and value.shape[0] == rows


def _padded(value: Tensor, sizes: Sequence[int]) -> Tensor:
    missing = [size - have for size, have in zip(sizes, value.shape, strict=True)]
    if not any(missing[1:]):
        return value
    return pad(value, [amount for each in reversed(missing[1:]) for amount in (each, 0)])


def _changed(values: list[Any], change: Change, known: dict[int, Any] | None = None) -> Any:
    """Caches of one structure merged into a new one, place by place; what is shared stays shared."""
    known = {} if known is None else known
    first = next((value for value in values if value is not None), None)
    if isinstance(first, bool) or first is None or isinstance(first, (str, float, type, nn.Module, PreTrainedConfig)):
        return first
    if isinstance(first, int):
        return change(values)
    if id(first) not in known:
        known[id(first)] = change(values) if isinstance(first, Tensor) else _new(values, change, known)
    return known[id(first)]


def _new(values: list[Any], change: Change, known: dict[int, Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return type(first)((key, _changed([value[key] for value in values], change, known)) for key in first)
    if isinstance(first, (list, tuple)):
        return type(first)([_changed(list(each), change, known) for each in zip(*values, strict=True)])
    if not hasattr(first, "__dict__") or callable(first):
        return first
    made = copy.copy(first)
    for name in vars(first):
        vars(made)[name] = _changed([vars(value)[name] for value in values], change, known)
    return made
