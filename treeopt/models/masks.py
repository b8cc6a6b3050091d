"""Tree attention masks for stock models, as views of buffers that are built once.

A node sees the whole prefix and its own ancestors, each within the layer's sliding window. Windows are measured
between positions, not cache indices: inside a tree the two differ. The rule does not depend on the prefix's length, so
one right-aligned buffer [prefix of full capacity | ancestors] serves every step: shorter prefixes are views of it.
"""

from __future__ import annotations

from collections.abc import Mapping

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
        self._buffers = {kind: _buffer(tree, window, capacity, dtype, device) for kind, window in windows.items()}

    def at(self, length: int) -> Mask:
        """The mask after a prefix of `length` tokens: [1, 1, N, length + N], or one such for each kind of layer."""
        views = {kind: buffer[..., self.capacity - length :] for kind, buffer in self._buffers.items()}
        return views if len(views) > 1 else next(iter(views.values()))


def _buffer(tree: Tree, window: int | None, capacity: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    depth = torch.tensor(tree.depths)
    prefix = torch.arange(-capacity, 0)  # positions relative to the root
    visible = torch.cat([torch.ones(tree.nodes, capacity, dtype=torch.bool), torch.tensor(tree.ancestors)], dim=1)
    if window is not None:
        visible &= torch.cat([prefix, depth])[None, :] > depth[:, None] - window
    mask = torch.zeros(1, 1, *visible.shape, dtype=dtype)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min).to(device)
