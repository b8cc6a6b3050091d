"""Random draft modules for tiny base models."""

from __future__ import annotations

import dataclasses

import torch
from transformers import LlamaConfig

from treeopt.defaults import EAGLE, MTP
from treeopt.drafter import Drafter
from treeopt.models.base import Base
from treeopt.models.draft_files import beside
from treeopt.models.draft_layouts import mtp_layout
from treeopt.models.draft_module import DraftModule, Wiring

_FAR = 512  # positions


def tiny_module(
    base: Base, kind: str, seed: int = 0, *, vocabulary: int = 0, spread: float = 0.3, positions: int = _FAR
) -> Base:
    """A random module for a base: an EAGLE-3 head with so many tokens (0: all), an EAGLE-1 head, or an MTP layer.

    `kind` is `eagle3`, `eagle1` or `mtp`, which has the base's own decoder layer.
    """
    text = base.model.config.get_text_config()
    width, layers = text.hidden_size, text.num_hidden_layers
    if kind == MTP:
        layout = mtp_layout({"fc.weight"}, base.model.config, width)
        config, wiring = layout.config, layout.wiring
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
        if kind == "eagle3":
            tokens = vocabulary or base.vocab_size
            reads = (1, layers // 2, layers)
            wiring = Wiring(EAGLE, "EAGLE-3", reads, width, wide=True, project=True, vocabulary=tokens)
    config._attn_implementation = base.model.config._attn_implementation
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = DraftModule(config, wiring, base.model.get_input_embeddings(), base.lm_head, base.vocab_size)
        for weight in module.parameters():
            weight.data = torch.randn_like(weight) * spread + (weight.dim() == 1)
        if wiring.vocabulary:
            module.tokens.copy_(torch.randperm(base.vocab_size)[: wiring.vocabulary].sort().values)
    return beside(base, module, f"tiny-{kind}")


def module_drafter(drafter: Drafter, draft: Base) -> Drafter:
    """A record of a draft model as one of a module."""
    assert isinstance(draft.model, DraftModule)
    return dataclasses.replace(drafter, draft=draft.fingerprint, draft_kind=draft.model.wiring.kind)
