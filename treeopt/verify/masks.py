"""Tree attention masks for stock models, as views of buffers.

A node attends to the prefix, its ancestors and itself, within the layer's sliding window. Windows are measured between
positions, not between cache indices, which differ inside a tree. The mask does not depend on the length of the prefix
otherwise, so one right-aligned buffer [longest prefix | tree] is used for all lengths: masks of shorter prefixes are
views of it, and the rows of a batch, with prefixes of different lengths, are gathered from it. The mask of a static
tree is built once; those of per-step trees are built at each step, the part of the prefix from a table by depth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.verify.buffers import Buffers

_KNOWN_LAYERS = ("full_attention", "sliding_attention")

Mask = Tensor | dict[str, Tensor]
Windows = Mapping[str, int | None]


def layer_windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """The sliding window of each kind of attention layer; None for full attention.

    Raises:
        TreeoptError: E502 where a layer's attention is of a kind that cannot verify trees.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False:
        window = None
    kinds = sorted(set(getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"]))
    strange = [kind for kind in kinds if kind not in _KNOWN_LAYERS]
    # gpt_neo's local layers measure their window between cache indices and take no mask by layer.
    if "local" in (getattr(text, "attention_layers", None) or ()):
        strange.append("local")
    if strange:
        raise TreeoptError(
            Code.NO_TREES,
            f"{text.model_type} has {', '.join(strange)} layers",
            why="a tree needs attention layers that take a mask: recurrent and index-windowed layers do not",
        )
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


class TreeMasks:
    """Masks of trees after prefixes of any length up to `capacity`, taken from one buffer for each kind of layer.

    The masks are additive floats (0 to attend, the dtype's minimum to hide), which eager and sdpa attention accept.
    Models with several kinds of layers take a mapping by kind.

    Args:
        buffers: by kind of layer, float [B, 1, N, capacity + N + 1]: the longest prefix, the tree, and one column that
            is hidden from all nodes; one for all rows where the first size is 1.
        capacity: the maximum length of a prefix.
    """

    def __init__(self, buffers: dict[str, Tensor], capacity: int) -> None:
        self.capacity = capacity
        self._buffers = buffers
        self._end = next(iter(buffers.values())).shape[-1] - 1

    def at(self, length: int) -> Mask:
        """The masks after prefixes of `length` tokens: [B, 1, N, length + N], or one such for each kind of layer."""
        return self._of(lambda buffer: buffer[..., self.capacity - length : self._end])

    def at_each(self, lengths: Tensor, width: int) -> Mask:
        """The masks after prefixes of different `lengths` int64 [B], `width` entries wide: [B, 1, N, width]."""
        columns = torch.arange(width, device=lengths.device) + (self.capacity - lengths)[:, None]
        columns = columns.clamp_(max=self._end)[:, None, None]  # after a row's tree: the last column, which is hidden

        def take(buffer: Tensor) -> Tensor:
            rows, nodes = len(lengths), buffer.shape[2]
            return buffer.expand(rows, -1, -1, -1).gather(3, columns.expand(-1, -1, nodes, -1))

        return self._of(take)

    def _of(self, take: Callable[[Tensor], Tensor]) -> Mask:
        masks = {kind: take(buffer) for kind, buffer in self._buffers.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))


class PrefixMasks:
    """The part of a mask over the prefix, which depends only on the depth of a node.

    Args:
        depth: the maximum depth of a node.
        windows: of each kind of attention layer.
        capacity: the maximum length of a prefix.
        base: the model, for dtype and device of the masks.
    """

    def __init__(self, depth: int, windows: Windows, capacity: int, base: Base) -> None:
        self.capacity = capacity
        self._windows = windows
        dtype, device = base.dtype, base.device
        self._see = torch.zeros((), dtype=dtype, device=device)
        self._hide = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)
        place = torch.arange(-capacity, 0, device=device)  # positions relative to the root
        depths = torch.arange(depth + 1, device=device)[:, None]
        self._prefix = {  # [D+1, capacity]; without a window one row for all depths
            kind: self._see.expand(1, capacity) if window is None else self._masked(place > depths - window)
            for kind, window in windows.items()
        }

    def before(self, tree: Buffers, length: int) -> TreeMasks:
        """The masks of a compiled tree, or of one for each row, after prefixes of up to `length` tokens."""
        return TreeMasks({kind: self._buffer(tree, length, kind) for kind in self._windows}, length)

    def _buffer(self, tree: Buffers, length: int, kind: str) -> Tensor:
        """[B, 1, N, length + N + 1]; B is 1 for one tree."""
        window, prefix = self._windows[kind], self._prefix[kind][:, self.capacity - length :]
        depths = tree.position_ids.view(-1, tree.nodes)
        visible = tree.attention_mask.view(-1, tree.nodes, tree.nodes)
        rows, nodes = depths.shape
        if window is None:
            before = prefix.expand(rows, nodes, -1)
        else:
            before = prefix[depths]
            visible = visible & (depths[:, None, :] > depths[:, :, None] - window)
        hidden = self._hide.expand(rows, nodes, 1)
        return torch.cat([before, self._masked(visible), hidden], dim=-1)[:, None]

    def _masked(self, visible: Tensor) -> Tensor:
        return torch.where(visible, self._see, self._hide)
