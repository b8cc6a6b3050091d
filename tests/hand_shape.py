"""A shape whose FLOPs and bytes are computed by hand."""

from __future__ import annotations

from treeopt.shape import Attention, Matrix, ModelShape

SHAPE = ModelShape(
    name="by hand",
    hidden=5,
    matrices=(Matrix("m", 3, 5, count=2),),
    attention=(Attention(layers=2, heads=4, kv_heads=2, key_size=3, value_size=2),),
    lm_head=Matrix("lm_head", 7, 5),
    tied=False,
    other=35,
)
