"""Tree attention masks for stock models, and the limits of texts in models that cannot have them everywhere.

A node attends to the prefix, its ancestors and itself, within the layer's sliding window, which is measured between
positions. Kernels copy or refuse a mask that is not aligned: its rows are a multiple of 8 elements apart. For one text
it is a view of a right-aligned buffer [longest prefix | tree | hidden], one for each remainder of the length by 8, into
which a static tree is written once. The masks of a batch are made at each step.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.verify.buffers import Buffers
from treeopt.verify.cache import ALIGN, aligned, with_standard_strides

_KNOWN_LAYERS = ("full_attention", "sliding_attention")

Mask = Tensor | Mapping[str, Tensor | None] | None  # by kind of layer where a model has several; None hides nothing
Windows = Mapping[str, int | None]


def layer_windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """The sliding window of each kind of attention layer; None for full attention. E502 where a kind takes no tree."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False:
        window = None
    kinds = sorted(set(getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"]))
    strange = [kind for kind in kinds if kind not in _KNOWN_LAYERS]
    if strange:
        raise TreeoptError(
            Code.NO_TREES,
            f"{text.model_type} has {', '.join(strange)} layers",
            why="a tree needs attention layers that take a mask: recurrent and index-windowed layers do not",
        )
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


@dataclass
class _Buffer:
    """The mask after prefixes whose lengths have one remainder."""

    values: dict[str, Tensor]  # by kind of layer, float [1, 1, N, prefix | tree | hidden]
    root: int  # column of the root
    tree: Buffers | None = None  # the static tree that was written into it


class TreeMasks:
    """The masks of a model's trees: additive floats, 0 to attend, the dtype's minimum to hide.

    Eager and sdpa attention accept them. Models with several kinds of layers take a mapping by kind. `nodes` and
    `depth` are the maxima of any tree. Where forwards read the `whole` capacity of the cache, masks are contiguous, so
    that their strides do not depend on the largest cache so far. In `causal` kinds of layers a node of a block does not
    attend to deeper ones either.
    """

    def __init__(
        self, base: Base, nodes: int, depth: int, windows: Windows, *, whole: bool = False, causal: Collection[str] = ()
    ) -> None:
        self._nodes, self._depth, self._windows, self._whole = nodes, depth, windows, whole
        self._device, self._causal = base.device, causal
        # With eager attention, models make a mask of zeros where they get none, or fail where it is one of a mapping.
        self.made_by_model = base.model.config._attn_implementation != "sdpa"
        self._see = torch.zeros((), dtype=base.dtype, device=base.device)
        self._hide = torch.full((), torch.finfo(base.dtype).min, dtype=base.dtype, device=base.device)
        self._capacity, self._inference = -1, False

    def reserve(self, capacity: int) -> None:
        """Make `one_row` ready for caches of so many entries; buffers for more are kept."""
        inference = torch.is_inference_mode_enabled()  # tensors made in this mode cannot be written outside
        if capacity <= self._capacity and inference == self._inference:
            return
        self._capacity, self._inference = max(capacity, self._capacity), inference
        self._buffers: dict[int, _Buffer] = {}  # by remainder, made on first use
        place = torch.arange(-self._capacity - ALIGN, 0, device=self._device)  # positions relative to the root
        depths = torch.arange(self._depth + 1, device=self._device)[:, None]
        self._prefix = {  # [D+1, capacity + ALIGN]
            kind: self._masked(place > depths - window) for kind, window in self._windows.items() if window is not None
        }

    def one_row(self, tree: Buffers, length: int, width: int, unmasked: Collection[str] = ()) -> Mask:
        """The mask of one text of `length` tokens: [1, 1, N, width], a view; `unmasked` kinds of layers get none.

        `width` entries are read: `length` and the nodes, rounded up to a multiple of 8; where `whole`, all reserved.
        """
        if len(unmasked) == len(self._windows):
            return self._of({})
        remainder = length % ALIGN
        buffer = self._buffers.get(remainder) or self._new_buffer(remainder)
        start = buffer.root - length
        if tree.per_row or buffer.tree is not tree:
            # Of a static tree the whole buffer is written, for prefixes of any length.
            self._write(buffer, tree, start if tree.per_row else 0)
            buffer.tree = None if tree.per_row else tree
        masks = {
            kind: each[:, :, : tree.nodes].narrow(3, start, width)
            for kind, each in buffer.values.items()
            if kind not in unmasked
        }
        return self._of({kind: with_standard_strides(mask) for kind, mask in masks.items()} if self._whole else masks)

    def rows(self, tree: Buffers, lengths: Tensor, width: int, unmasked: Collection[str] = ()) -> Mask:
        """The masks of texts of `lengths` int64 [B]: [B, 1, N, width]; of the `unmasked` kinds none or all."""
        if unmasked:
            return self._of({})
        nodes = tree.nodes
        visible = tree.attention_mask.view(-1, nodes, nodes)
        return self.last_nodes(visible, tree.position_ids.view(-1, nodes), lengths, width)

    def last_nodes(self, visible: Tensor, depths: Tensor, lengths: Tensor, width: int) -> Mask:
        """The masks of the last n of M nodes in each row, after texts of `lengths` int64 [B]: [B, 1, n, width].

        `visible` bool [1 or B, n, M] is whether each of them attends to each node, `depths` are int64 [1 or B, M].
        """
        rows, (count, nodes) = len(lengths), visible.shape[1:]
        place = torch.arange(width, device=lengths.device) - lengths[:, None]  # [B, width], relative to the root
        place = place[:, None, None]
        prefix = place < 0  # [B, 1, 1, width]
        columns = lengths[:, None] + torch.arange(nodes, device=lengths.device)
        columns = columns[:, None, None].expand(-1, -1, count, -1)  # [B, 1, n, M], of the tree
        masks = {}
        for kind, window in self._windows.items():
            seen = prefix
            if window is not None:
                seen = prefix & (place > depths[:, None, nodes - count :, None] - window)
            mask = self._masked(seen).expand(rows, 1, count, -1).contiguous()
            masks[kind] = mask.scatter_(3, columns, self._inside(visible, depths, kind).expand(rows, -1, -1, -1))
        return self._of(masks)

    def autoregressive(self, length: int, rows: int) -> dict[str, None]:
        """The kinds of layers in which the token after `length` others attends to all; in a batch all or none."""
        kinds = {kind: None for kind, window in self._windows.items() if window is None or length < window}
        return kinds if rows == 1 or len(kinds) == len(self._windows) else {}

    def _new_buffer(self, remainder: int) -> _Buffer:
        root = self._capacity + remainder
        after = self._capacity if self._whole else aligned(self._nodes) + ALIGN
        columns = aligned(root) + after
        hidden = self._hide.expand(1, 1, self._nodes, columns)
        values = {}
        for kind in self._windows:
            values[kind] = hidden.clone(memory_format=torch.contiguous_format)
            values[kind][..., :root] = 0.0
        self._buffers[remainder] = _Buffer(values, root)
        return self._buffers[remainder]

    def _write(self, buffer: _Buffer, tree: Buffers, start: int) -> None:
        """Write a tree into a buffer whose prefix begins at column `start`."""
        nodes, root = tree.nodes, buffer.root
        for kind, window in self._windows.items():
            values = buffer.values[kind][0, 0, :nodes]
            visible = tree.attention_mask.view(-1, nodes, nodes)
            values[:, root : root + nodes] = self._inside(visible, tree.position_ids.view(-1, nodes), kind)[0, 0]
            if nodes < self._nodes:  # columns of a larger tree before
                values[:, root + nodes : root + self._nodes] = self._hide
            if window is not None:
                values[:, start:root] = self._prefix[kind][tree.position_ids.view(-1), start - root :]

    def _inside(self, visible: Tensor, depths: Tensor, kind: str) -> Tensor:
        """The columns of the tree: [1 or B, 1, n, M]; arguments as `last_nodes`."""
        below, own = depths[:, None], depths[:, -visible.shape[1] :, None]
        if (window := self._windows[kind]) is not None:
            visible = visible & (below > own - window)
        if kind in self._causal:
            visible = visible & (below <= own)
        return self._masked(visible[:, None])

    def _masked(self, visible: Tensor) -> Tensor:
        return torch.where(visible, self._see, self._hide)

    def _of(self, masks: dict[str, Tensor]) -> Mask:
        """As the model takes it; kinds of layers without a mask get None."""
        by_kind = {kind: masks.get(kind) for kind in self._windows}
        return by_kind if len(by_kind) > 1 else next(iter(by_kind.values()))


def index_window(config: PreTrainedConfig) -> int | None:
    """The least window, in cache entries, of a model whose masks depend on cache indices (GPT-Neo); None for others.

    They hide nothing that a tree needs as long as all entries that are read, drafts included, are within it.
    """
    text = config.get_text_config()
    layers = getattr(text, "attention_layers", None)  # GPT-Neo's name
    if layers is None:
        return None
    windows = [text.max_position_embeddings, *([text.window_size] if "local" in layers else [])]
    return min(map(int, windows))


def tree_context(context: int, config: PreTrainedConfig, nodes: int) -> int:
    """Maximum number of tokens of a text whose steps verify `nodes` nodes; 0 or less where there is none."""
    window = index_window(config)
    return context if window is None else min(context, window - nodes - ALIGN + 1)


def frequency_switch(config: PreTrainedConfig) -> int | None:
    """The number of tokens after which a model takes other rotary frequencies; None for models that never do."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [each for each in (parameters, *parameters.values()) if isinstance(each, dict)]  # of the model, or a layer
    switches = [each.get("original_max_position_embeddings") for each in kinds if each.get("rope_type") == "longrope"]
    return min((int(switch) for switch in switches if switch), default=None)


def check_frequencies(switch: int, lengths: Sequence[int], max_new_tokens: int) -> None:
    """Raise E503 unless all texts of a batch end before the switch of rotary frequencies, or begin after it.

    `longrope` has one set of frequencies for all tokens of a forward: the second as soon as any position is beyond the
    original context. The last token of a text is not run, so a text may be one token longer than `switch`.
    """
    if all(length > switch for length in lengths) or max(lengths) + max_new_tokens <= switch + 1:
        return
    prompts = " to ".join(map(str, sorted({min(lengths), max(lengths)})))
    raise TreeoptError(
        Code.CONTEXT_FULL,
        f"{prompts} prompt tokens and {max_new_tokens} new ones; the rotary frequencies change after {switch} tokens",
        why="with longrope, a tree that crosses this place would read its text with other frequencies",
        fix="prompts that are all longer, or all texts shorter, than that",
    )
