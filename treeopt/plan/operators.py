"""The operators of a step: FLOPs and bytes of each, from the shape of the model.

With b texts of q new tokens after s cached ones (b = batch, q = nodes), a matrix [m, n] takes 2 b q m n FLOPs, reads
its weights and b q n numbers, and writes b q m. The scores Q K^T of n heads of size d over k keys take 2 b n q k d
FLOPs, read b n q d and b n_kv k d numbers and write b n q k; the product with the values is its mirror. Source:
arXiv:2401.10774, appendix G, table 5, for layers without grouped heads; there k = s. Here k = s + q, as the new tokens
attend to one another, and the LM head and the writes to the key-value cache count too.

Of E experts of which a token passes through k, t tokens compute k each, and read E (1 - (1 - k/E)^t) of them: the
expected number of distinct ones, where every token chooses k at random.

Arrays have one entry for each number of nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeopt.defaults import ATTENTIONS
from treeopt.plan.devices import BYTES
from treeopt.shape import Attention, Drafting, Matrix, ModelShape, shape_error

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepSetting:
    """How numbers are stored and multiplied.

    Args:
        dtype: of the weights, one of `BYTES`. Activations are float32 with float32 weights, else 16 bits.
        kv_dtype: of the key-value cache; that of the activations where None.
        attention: `eager` writes and reads the scores of all keys, as in the paper; `flash` keeps them on the chip.

    Raises:
        TreeoptError: E240 for an unknown dtype or attention.
    """

    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    attention: str = ATTENTIONS[0]

    def __post_init__(self) -> None:
        for name in (self.dtype, *([] if self.kv_dtype is None else [self.kv_dtype])):
            if name not in BYTES:
                raise shape_error(f"no dtype has the name {name}", fix=f"--dtype {', '.join(BYTES)}")
        if self.attention not in ATTENTIONS:
            raise shape_error(f"no attention has the name {self.attention}", fix=f"--attention {', '.join(ATTENTIONS)}")

    @property
    def activation(self) -> str:
        """The dtype of activations, in which attention is computed."""
        if self.dtype == "float32":
            return self.dtype
        return "float16" if self.dtype == "float16" else "bfloat16"

    @property
    def weight_bytes(self) -> float:
        return BYTES[self.dtype]

    @property
    def activation_bytes(self) -> float:
        return BYTES[self.activation]

    @property
    def kv_bytes(self) -> float:
        return BYTES[self.kv_dtype or self.activation]


@dataclass(frozen=True)
class Operator:
    """One kind of product or transfer, summed over the layers that have it; arrays are float64 [n]."""

    name: str  # of the matrix, `scores`, `values` or `kv writes`
    flops: Floats  # multiplications and additions
    bytes: Floats  # read and written
    calls: Floats  # how often it is started in a step
    dtype: str  # in which it is computed

    def times(self, factor: Floats) -> Operator:
        """The operator, so many times in a step."""
        return Operator(self.name, self.flops * factor, self.bytes * factor, self.calls * factor, self.dtype)


def forward_operators(
    shape: ModelShape, nodes: Floats, batch: int, cached: int, setting: StepSetting
) -> list[Operator]:
    """The operators of one forward over `nodes` new tokens (float64 [n]) of each text, after `cached` ones."""
    tokens = batch * nodes
    found = [_product(matrix, tokens, setting) for matrix in shape.matrices]
    for kind in shape.attention:
        found += _attention(kind, nodes, batch, cached, setting)
    written, calls = setting.kv_bytes * (tokens * shape.cached_values), np.full_like(tokens, shape.layers)
    writes = Operator("kv writes", np.zeros_like(tokens), written, calls, setting.activation)
    return [*found, writes, _product(shape.lm_head, tokens, setting)]


def drafting_operators(
    shape: ModelShape, drafting: Drafting, nodes: Floats, batch: int, cached: int, setting: StepSetting
) -> list[Operator]:
    """The operators that draft for trees of so many nodes; none for one node.

    Each Medusa head runs at one position of each text. A draft model runs once for each level: at first the last token,
    then the nodes of one level, which are taken as (N - 1) / L each.
    """
    drafts = (nodes > 1).astype(np.float64)
    once, texts = np.ones_like(nodes), np.full_like(nodes, batch)
    found: list[Operator] = []
    if drafting.heads:
        rows, hidden, heads = drafting.head_rows, shape.hidden, drafting.heads
        if drafting.blocks:
            blocks = Matrix("residual blocks", hidden, hidden, heads * drafting.blocks)
            found.append(dataclasses.replace(_product(blocks, texts, setting), calls=once * drafting.blocks))
        separate = Matrix("LM heads", rows or shape.lm_head.rows, hidden, heads if rows else 1)
        positions = texts if rows else texts * heads  # a shared LM head multiplies the states of all heads at once
        found.append(dataclasses.replace(_product(separate, positions, setting), calls=once))
        found = [one.times(drafts) for one in found]
    if drafting.draft is not None:
        forwards = np.minimum(drafting.levels, nodes - 1)
        level = np.maximum(1.0, np.ceil((nodes - 1) / drafting.levels))
        first = forward_operators(drafting.draft, once, batch, cached, setting)
        later = forward_operators(drafting.draft, level, batch, cached, setting)
        found += [one.times(drafts) for one in first]
        found += [one.times(np.maximum(forwards - 1, 0.0)) for one in later]
    return found


def _product(matrix: Matrix, tokens: Floats, setting: StepSetting) -> Operator:
    """Tokens times a matrix, in all of its layers."""
    size = float(matrix.rows * matrix.columns * matrix.count)
    read = np.full_like(tokens, matrix.experts)
    if matrix.experts > 1:
        read = matrix.experts * (1.0 - (1.0 - matrix.active / matrix.experts) ** tokens)
    numbers = tokens * matrix.active * matrix.count * (matrix.rows + matrix.columns)
    return Operator(
        name=matrix.name,
        flops=2.0 * tokens * matrix.active * size,
        bytes=setting.weight_bytes * size * read + setting.activation_bytes * numbers,
        calls=np.full_like(tokens, matrix.count),
        dtype=setting.dtype,
    )


def _attention(kind: Attention, nodes: Floats, batch: int, cached: int, setting: StepSetting) -> Iterator[Operator]:
    """The products of queries with keys, and of scores with values, in all layers of one kind."""
    keys = kind.seen(cached) + nodes
    texts = float(batch * kind.layers)
    moved = 0.0 if setting.attention == "flash" else setting.activation_bytes * texts * kind.heads * nodes * keys
    for name, size in (("scores", kind.key_size), ("values", kind.value_size)):
        queries = setting.activation_bytes * texts * kind.heads * nodes * size
        cache = setting.kv_bytes * texts * kind.kv_heads * keys * size
        flops = 2.0 * texts * kind.heads * nodes * keys * size
        yield Operator(name, flops, queries + cache + moved, np.full_like(nodes, kind.layers), setting.activation)
