"""Configs and random tensors of block drafters in each layout, by their published names."""

from __future__ import annotations

from typing import Any

import torch
from naive_blocks import (
    CONFIDENCE,
    GATE,
    GRU,
    JOINT,
    MARKOV,
    PROJECTOR,
    SELECTOR,
    Config,
    Kind,
    head_width,
    layer_sizes,
    read_states,
    setting,
)
from torch import Tensor

# Heads that older files of DSpark and Domino have in `logit_head` (SpecForge reads both).
OLD_HEADS = ("markov_head.", "confidence_head.", "prefix_gru.", "embed_proj.")


def layer_shapes(sizes: Config, prefix: str) -> dict[str, tuple[int, ...]]:
    """The names and shapes of one layer."""
    h, inner, width = sizes["hidden_size"], sizes["intermediate_size"], head_width(sizes)
    queries, keys = sizes["num_attention_heads"] * width, sizes["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    shapes |= {"self_attn.q_proj.weight": (queries, h), "self_attn.k_proj.weight": (keys, h)}
    shapes |= {"self_attn.v_proj.weight": (keys, h), "self_attn.o_proj.weight": (h, queries)}
    shapes |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
    shapes |= {"mlp.gate_proj.weight": (inner, h), "mlp.up_proj.weight": (inner, h), "mlp.down_proj.weight": (h, inner)}
    return {prefix + name: shape for name, shape in shapes.items()}


def added_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The names and shapes that DFlash2 has and DFlash has not."""
    sizes = layer_sizes(config)
    h, vocab, rank = sizes["hidden_size"], sizes["vocab_size"], setting(config, "selector_rank")
    taps, group = setting(config, "conv_kernel_size"), setting(config, "conv_group_size")
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(sizes["num_hidden_layers"]):
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{number}.{name}.base_kernel"] = (2, taps, h)
            shapes[f"layers.{number}.{name}.kernel_projection.weight"] = (2 * taps * h // group, h)
    shapes |= {SELECTOR + "predecessor_codebook": (vocab, rank), SELECTOR + "successor_codebook": (vocab, rank)}
    return shapes | {SELECTOR + "hidden_projection.weight": (rank, h)}


def random_state(
    kind: Kind, config: Config, seed: int, embeddings: Tensor | None = None, lm_head: Tensor | None = None
) -> dict[str, Tensor]:
    """Random tensors with the published names and shapes.

    Layouts with their own embeddings and head get copies of `embeddings` and `lm_head` (of its rows that are in the
    draft vocabulary), or random ones where these are not given.
    """
    sizes, generator = layer_sizes(config), torch.Generator().manual_seed(seed)
    h, vocab = sizes["hidden_size"], sizes["vocab_size"]
    draft_vocab = config.get("draft_vocab_size") or vocab
    parts = len(read_states(config, 4))  # how many there are does not depend on the base
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, parts * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    for number in range(sizes["num_hidden_layers"]):
        shapes |= layer_shapes(sizes, f"layers.{number}.")
    if kind.startswith("dspark"):
        rank = setting(config, "markov_rank")
        shapes |= {MARKOV + "w1.weight": (vocab, rank), MARKOV + "w2.weight": (draft_vocab, rank)}
        if setting(config, "markov_head_type") == "gated":
            shapes |= {GATE + ".weight": (rank, h + rank), GATE + ".bias": (rank,)}
        if setting(config, "markov_head_type") == "rnn":
            shapes |= {JOINT + ".weight": (3 * rank, 2 * rank + h), JOINT + ".bias": (3 * rank,)}
        if setting(config, "enable_confidence_head", False):
            beside = rank if setting(config, "confidence_head_with_markov", False) else 0
            shapes |= {CONFIDENCE + ".weight": (1, h + beside), CONFIDENCE + ".bias": (1,)}
    if kind == "dflash2":
        shapes |= added_shapes(config)
    if kind == "domino":
        gru, inner = setting(config, "gru_hidden_dim"), setting(config, "emb_dim")
        shapes |= {GRU + "ih_l0": (3 * gru, h), GRU + "hh_l0": (3 * gru, gru)}
        shapes |= {PROJECTOR + "0.weight": (inner, h + gru), PROJECTOR + "2.weight": (draft_vocab, inner)}
    if config.get("mask_embedding"):
        shapes |= {"mask_embedding": (h,)}
    own = kind == "dspark" or kind.endswith("-speculators")
    if own:
        shapes |= {"embed_tokens.weight": (vocab, h), "lm_head.weight": (draft_vocab, h)}
    state = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        state[name] = 1 + 0.1 * noise if len(shape) == 1 and name.endswith("weight") else 0.2 * noise
    ids = torch.arange(vocab)
    if draft_vocab < vocab:
        ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        state["d2t"] = ids - torch.arange(draft_vocab)
        state["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    if own and embeddings is not None:
        state["embed_tokens.weight"] = embeddings.detach().clone()
    if own and lm_head is not None:
        state["lm_head.weight"] = lm_head.detach()[ids].clone()
    return state


def layer_config(layers: int) -> dict[str, Any]:
    """The sizes of a small drafter with so many layers."""
    return {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": layers,
        "vocab_size": 96,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }


def zlab_config(layers: int, **others: Any) -> dict[str, Any]:
    """The config.json of a drafter in the layout of z-lab: DFlash, DFlash2, Domino and JetSpec."""
    config = layer_config(layers) | {"architectures": ["DFlashDraftModel"], "num_target_layers": 6} | others
    if "rope_parameters" in config:
        del config["rope_theta"]
    return config


def deepspec_config(**others: Any) -> dict[str, Any]:
    """The config.json of a DSpark drafter in the layout of DeepSpec."""
    return (
        layer_config(2)
        | {"architectures": ["Qwen3DSparkModel"], "num_target_layers": 6, "num_anchors": 4}
        | {"block_size": 5, "mask_token_id": 95, "target_layer_ids": [0, 2, 3]}
        | {"markov_rank": 6, "markov_head_type": "vanilla"}
        | {"enable_confidence_head": False, "confidence_head_with_markov": False}
        | others
    )


def speculators_config(algorithm: str, layers: int, **others: Any) -> dict[str, Any]:
    """The config.json of a drafter in the layout of speculators, with ids that are indices of hidden states."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5 if algorithm == "dspark" else 4}
    return {
        "architectures": ["DSparkSpeculator" if algorithm == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": algorithm,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "base", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layer_config(layers),
        "aux_hidden_state_layer_ids": [1, 3, 4],
        "mask_token_id": 95,
        "block_size": 5,
        "sample_from_anchor": algorithm == "dspark",
        "draft_vocab_size": 96,
    } | others


IDS = {"mask_token_id": 95, "target_layer_ids": [0, 2, 3]}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
CONVOLUTION = {"conv_kernel_size": 2, "conv_group_size": 4}
SELECTION = {"selector_rank": 6, "selector_top_k": 5}
DOMINO = {"projector_type": "domino", "emb_dim": 10, "gru_hidden_dim": 6}
UNSHIFTED = {"pure_draft_prefix_len": 1, "shift_label": False}
SHIFTED = {"pure_draft_prefix_len": 2, "shift_label": True}
HEADS = {"markov_rank": 6, "markov_head_type": "vanilla"}
SURE = {"enable_confidence_head": True, "confidence_head_with_markov": False}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
WINDOWED = {"transformer_layer_config": layer_config(2) | SLIDING | {"use_sliding_window": True}}
SURE_WITH_MARKOV = {"enable_confidence_head": True, "confidence_head_with_markov": True}

CONFIGS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "dflash": ("dflash", zlab_config(2, block_size=5, dflash_config=IDS)),
    "dflash-inner-block": ("dflash", zlab_config(3, dflash_config=IDS | {"block_size": 5}, **ROPE)),
    "dflash-default-ids": ("dflash", zlab_config(3, block_size=5, dflash_config={"mask_token_id": 95})),
    "dflash-one-layer": ("dflash", zlab_config(1, block_size=5, dflash_config={"mask_token_id": 95})),
    "dflash-causal": ("dflash", zlab_config(2, block_size=5, dflash_config=IDS | {"causal": True})),
    "dflash-sliding": ("dflash", zlab_config(2, block_size=5, dflash_config=IDS, **SLIDING)),
    "dflash-sliding-whole": ("dflash", zlab_config(2, block_size=5, is_causal=False, dflash_config=IDS, **SLIDING)),
    "dflash-speculators": ("dflash-speculators", speculators_config("dflash", 2)),
    "dflash-speculators-sliding": ("dflash-speculators", speculators_config("dflash", 2, **WINDOWED)),
    "dflash-speculators-sliding-whole": (
        "dflash-speculators",
        speculators_config("dflash", 2, **WINDOWED, sliding_window_non_causal=True),
    ),
    "dflash-speculators-part": ("dflash-speculators", speculators_config("dflash", 3, draft_vocab_size=40)),
    "dflash-speculators-mask": ("dflash-speculators", speculators_config("dflash", 2, mask_embedding=True)),
    "dflash-speculators-llama": (  # sizes of Domino in every config, and the type that training was given
        "dflash-speculators",
        speculators_config("dflash", 2, projector_type="dflash", gru_hidden_dim=7, emb_dim=3)
        | {"transformer_layer_config": layer_config(2) | {"model_type": "llama"}},
    ),
    "dflash2": (
        "dflash2",
        zlab_config(2, architectures=["DFlash2DraftModel"], block_size=5, dflash_config=IDS | CONVOLUTION | SELECTION),
    ),
    "domino": ("domino", zlab_config(2, block_size=5, dflash_config=IDS | DOMINO | UNSHIFTED)),
    "domino-v5": (
        "domino",
        zlab_config(2, block_size=5, dflash_config=IDS | DOMINO | UNSHIFTED | {"projector_type": "causal_v5"}),
    ),
    "domino-shifted": ("domino", zlab_config(2, block_size=5, dflash_config=IDS | DOMINO | SHIFTED)),
    "dspark": ("dspark", deepspec_config()),
    "dspark-confidence": ("dspark", deepspec_config(**SURE)),
    "dspark-confidence-markov": ("dspark", deepspec_config(**SURE_WITH_MARKOV)),
    "dspark-gated": ("dspark", deepspec_config(markov_head_type="gated")),
    "dspark-rnn": ("dspark", deepspec_config(markov_head_type="rnn")),
    "dspark-specforge": (
        "dspark-specforge",
        layer_config(2)
        | {"architectures": ["DSparkDraftModel"], "num_target_layers": 6}
        | {"dflash_config": IDS | HEADS | SURE_WITH_MARKOV | {"block_size": 5, "projector_type": "dspark"}},
    ),
    "dspark-speculators": ("dspark-speculators", speculators_config("dspark", 2, **HEADS, **SURE)),
    "dspark-speculators-part": (
        "dspark-speculators",
        speculators_config("dspark", 2, draft_vocab_size=40, **HEADS, **SURE_WITH_MARKOV),
    ),
    "jetspec": ("jetspec", zlab_config(3, block_size=5, dflash_config=IDS | {"causal_head": True})),
}
