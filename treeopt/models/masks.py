"""Tree attention masks for stock models, as views of buffers that are built once.

A node sees the whole prefix and its own ancestors, each within the layer's sliding window. Windows are measured
between positions, not cache indices: inside a tree the two differ. The rule does not depend on the prefix's length, so
one right-aligned buffer [prefix of full capacity | ancestors] serves every step: shorter prefixes are views of it, and
the rows of a batch, each with its own prefix, are gathered from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from treeopt.errors import Code, TreeoptError
from treeopt.tree import Tree

_KNOWN_LAYERS = ("full_attention", "sliding_attention")

Mask = Tensor | dict[str, Tensor]


def layer_windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """Window of each kind of attention layer; None sees everything.

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
    """The masks of one tree for one model, for prefixes up to `capacity`.

    The additive float form (0 = see, the dtype's minimum = hide) is the one that eager and sdpa attention both read
    rightly; models with several kinds of layers take a mapping by kind.
    """

    def __init__(
        self, tree: Tree, windows: Mapping[str, int | None], capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = capacity
        self._end = capacity + tree.nodes
        self._buffers = {kind: _buffer(tree, window, capacity, dtype, device) for kind, window in windows.items()}

    def at(self, length: int) -> Mask:
        """The mask after a prefix of `length` tokens: [1, 1, N, length + N], or one such for each kind of layer."""
        return self._of(lambda buffer: buffer[..., self.capacity - length : self._end])

    def at_each(self, lengths: Tensor, width: int) -> Mask:
        """The masks after prefixes of different `lengths` int64 [B], `width` entries wide: [B, 1, N, width]."""
        columns = torch.arange(width, device=lengths.device) + (self.capacity - lengths)[:, None]
        columns = columns.clamp_(max=self._end)  # beyond a row's tree: the buffer's last column, which is hidden
        return self._of(lambda buffer: buffer[0, 0][:, columns].transpose(0, 1)[:, None].contiguous())

    def _of(self, take: Callable[[Tensor], Tensor]) -> Mask:
        masks = {kind: take(buffer) for kind, buffer in self._buffers.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _buffer(tree: Tree, window: int | None, capacity: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[1, 1, N, capacity + N + 1]: the longest prefix, the tree, and one column that nobody sees."""
    depth = torch.tensor(tree.depths)
    prefix = torch.arange(-capacity, 0)  # positions relative to the root
    visible = torch.cat([torch.ones(tree.nodes, capacity, dtype=torch.bool), torch.tensor(tree.ancestors)], dim=1)
    if window is not None:
        visible &= torch.cat([prefix, depth])[None, :] > depth[:, None] - window
    visible = torch.nn.functional.pad(visible, (0, 1))
    mask = torch.zeros(1, 1, *visible.shape, dtype=dtype)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min).to(device)
