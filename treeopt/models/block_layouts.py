"""Layouts of block drafters: how their tensors are called, and what their configs say.

    z-lab, JetSpec    dflash_config.target_layer_ids name layers, whose outputs are read: HS[id + 1]
    speculators       aux_hidden_state_layer_ids: HS[id]
    without either    HS[round(1 + i (L - 4) / (n - 1)) + 1] for draft layers i of n, HS[L // 2 + 1] of one

with HS as of `draft_layouts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from treeopt.defaults import MAX_DEPTH
from treeopt.errors import Code, TreeoptError
from treeopt.models.block_module import BlockWiring
from treeopt.models.draft_layouts import (
    DROPPED,
    SPECULATORS,
    ModuleLayout,
    Names,
    decoder_config,
    state_size,
    states_of,
    unread,
)

_AUX, _TARGETS = "aux_hidden_state_layer_ids", "target_layer_ids"
_NAMES: Names = (
    (r".*rotary_emb\.inv_freq", DROPPED),
    (r"(d2t|t2d)", DROPPED),
    (r"layers\.", "decoder.layers."),
    (r"embed_tokens\.", "embeddings."),
)
# Keys that change the forward, and the values at which they do not.
_PLAIN = {
    "final_logit_softcapping": (None, 0, 0.0),
    "output_multiplier": (None, 1, 1.0),
    "input_embedding_scale": (None, 1, 1.0),
    "attention_sink_bias": (None, False),
    "use_swa": (None, False),
    "conv_kernel_size": (None,),
    "projector_type": (None, "dflash"),
}


def is_block(keys: Iterable[str], config: Mapping[str, Any]) -> bool:
    """Whether a config names a block drafter, or tensors of these names are those of one."""
    known, named = set(keys), config.get("architectures")
    by_name = [*map(str, named if isinstance(named, list) else []), str(config.get(SPECULATORS, ""))]
    if any(re.fullmatch(r"DFlash.*|dflash", name) for name in by_name):
        return True
    return {"fc.weight", "hidden_norm.weight", "norm.weight"} <= known and "midlayer.hidden_norm.weight" not in known


def block_layout(
    name: str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], layers: int
) -> ModuleLayout:
    """The layout of a block drafter; arguments as `eagle_layout`."""
    by_speculators, part = SPECULATORS in config, config.get("dflash_config")
    settings = {**config, **(part if isinstance(part, Mapping) else {})}
    for key, plain in _PLAIN.items():
        if settings.get(key) not in plain:
            raise unread(name, f"its {key} is {settings[key]!r}, which is not read")
    decoder = decoder_config(name, config, shapes, "qwen3")
    window = config.get("sliding_window")
    if type(window) is int and window > 0 and "sliding_attention" in (getattr(decoder, "layer_types", None) or ()):
        decoder.sliding_window, decoder.use_sliding_window = window, True  # Qwen3's config has no window by default
    head = shapes.get("lm_head.weight", ())
    size, mask = settings.get("block_size"), settings.get("mask_token_id")
    if type(size) is not int or not 2 <= size <= MAX_DEPTH:
        raise unread(name, f"its block_size is {size!r}, not a number from 2 to {MAX_DEPTH}")
    if type(mask) is not int or mask < 0:
        raise unread(name, f"its mask_token_id is {mask!r}, not a token")
    if settings.get("sample_from_anchor") is True:
        raise unread(name, "it drafts from the root's own row, as DSpark, which is not read yet")
    causal = settings.get("causal_head") is True or settings.get("causal") is True
    title = "JetSpec" if settings.get("causal_head") is True else "DFlash"
    wiring = BlockWiring(
        title=f"{title} ({'speculators' if by_speculators else 'z-lab'})",
        reads=_reads(name, config, settings, layers, decoder.num_hidden_layers),
        state_size=state_size(name, config, int(decoder.hidden_size)),
        size=size,
        mask=mask,
        causal=causal,
        mask_embedding="mask_embedding" in shapes,
        vocabulary=head[0] if len(head) == 2 else 0,
        own_embeddings="embed_tokens.weight" in shapes,
    )
    return ModuleLayout(wiring, decoder, _NAMES)


def _reads(name: str, config: Mapping[str, Any], settings: Mapping[str, Any], layers: int, own: int) -> tuple[int, ...]:
    """The states that a block drafter of `own` layers reads; see the module's docstring."""
    given, more = (config.get(_AUX), 0) if SPECULATORS in config else (settings.get(_TARGETS), 1)
    if given is None:
        given, more = [round(1 + i * (layers - 4) / (own - 1)) for i in range(own)] if own > 1 else [layers // 2], 1
    return states_of(name, given, more, layers)


def check_mask(name: str, wiring: BlockWiring, vocab_size: int) -> None:
    """Raise E213 where the mask is no token of the base."""
    if wiring.mask >= vocab_size and not wiring.mask_embedding:
        why = f"its mask is token {wiring.mask}, and the base has {vocab_size}"
        raise TreeoptError(Code.DRAFT_MISMATCH, f"{name} was not made for this base: {why}")
