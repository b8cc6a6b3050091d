"""Random draft modules for tiny base models."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen3Config

from treeopt.defaults import BLOCK, EAGLE, MTP
from treeopt.drafter import Drafter
from treeopt.models.base import Base
from treeopt.models.block_module import BlockModule, BlockWiring
from treeopt.models.draft_files import beside
from treeopt.models.draft_layouts import mtp_layout
from treeopt.models.draft_module import OWN, DraftModule, StateModule, Wiring

_FAR = 512  # positions
BLOCKS: dict[str, dict[str, Any]] = {  # what their wirings have beside those of DFlash
    BLOCK: {},
    "causal": {"causal": True},
    "sliding": {"causal_kinds": ("sliding_attention",)},
    "dspark": {"from_root": True, "markov_rank": 4, "markov": "gated", "confidence": True, "confidence_of_token": True},
    "dspark-rnn": {"from_root": True, "markov_rank": 4, "markov": "rnn"},
    "domino": {"domino": (6, 5, 1)},
    "dflash2": {"selector_rank": 4, "selector_top_k": 5, "taps": 2, "group": 4},
}


def tiny_module(
    base: Base, kind: str, seed: int = 0, *, vocabulary: int = 0, spread: float = 0.3, positions: int = _FAR
) -> Base:
    """A random module for a base: an EAGLE-3 head with so many tokens (0: all), an EAGLE-1 head, or an MTP layer.

    `kind` is `eagle3`, `eagle1`, `peagle`, `mtp` or `mtp3`, one or three of the base's decoder layers, or one of
    `BLOCKS`, a block drafter of two layers and five rows.
    """
    text = base.model.config.get_text_config()
    width, layers = text.hidden_size, text.num_hidden_layers
    made: Any = DraftModule
    wiring: Any
    if kind in BLOCKS:
        sizes: dict[str, Any] = {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": positions,
        }
        if kind == "sliding":
            kinds = ["sliding_attention", "full_attention"]
            sizes |= {"use_sliding_window": True, "sliding_window": 6, "layer_types": kinds}
        config = Qwen3Config(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, **sizes)
        reads, mask = (1, layers), base.vocab_size - 1
        wiring = BlockWiring("DFlash", reads, width, 5, mask, vocabulary=vocabulary, **BLOCKS[kind])
        made = BlockModule
    elif kind.startswith(MTP):
        layout = mtp_layout({"fc.weight": "mtp.fc.weight"}, base.model.config, width)
        config, wiring = layout.config, dataclasses.replace(layout.wiring, vocabulary=vocabulary)
    else:
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=positions,
        )
        wiring = Wiring(EAGLE, "EAGLE", (layers,), width, first_norm=False, final_norm=False)
        if kind in ("eagle3", "peagle"):
            tokens = vocabulary or base.vocab_size
            reads = (1, layers // 2, layers)
            wiring = Wiring(EAGLE, "EAGLE-3", reads, width, wide=True, project=True, vocabulary=tokens)
        if kind == "peagle":
            wiring = dataclasses.replace(wiring, kind=BLOCK, levels=4, mask=base.vocab_size - 1)
    config._attn_implementation = base.model.config._attn_implementation
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        shared = base.model.get_input_embeddings(), base.lm_head, base.vocab_size
        module = made(copy.deepcopy(config), wiring, *shared)
        for _ in range(2 if kind == "mtp3" else 0):
            module.append(DraftModule(copy.deepcopy(config), wiring, *shared))
        for weight in module.parameters():
            weight.data = torch.randn_like(weight) * spread + (weight.dim() == 1)
        if wiring.vocabulary:
            module.tokens.copy_(torch.randperm(base.vocab_size)[: wiring.vocabulary].sort().values)
    return beside(base, module.to(base.device), f"tiny-{kind}")


def write_block(folder: Path, base: Base, seed: int = 3) -> None:
    """A random block drafter for a base in z-lab's layout."""
    module = tiny_module(base, BLOCK, seed, spread=0.05).model
    assert isinstance(module, BlockModule)
    folder.mkdir()
    state = {key.removeprefix("decoder."): one for key, one in module.state_dict().items() if key not in OWN}
    save_file({key: one.contiguous() for key, one in state.items()}, folder / "model.safetensors")
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    settings = {"mask_token_id": module.wiring.mask, "target_layer_ids": [one - 1 for one in module.wiring.reads]}
    config = {
        "architectures": ["DFlashDraftModel"],
        "vocab_size": base.vocab_size,
        "block_size": module.wiring.size,
        "dflash_config": settings,
        **{name: getattr(module.config, name) for name in (*sizes, "num_hidden_layers", "rms_norm_eps")},
    }
    (folder / "config.json").write_text(json.dumps(config))


def module_drafter(drafter: Drafter, draft: Base) -> Drafter:
    """A record of a draft model as one of a module."""
    assert isinstance(draft.model, StateModule)
    return dataclasses.replace(drafter, draft=draft.fingerprint, draft_kind=draft.model.wiring.kind)
