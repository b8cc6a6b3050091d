"""Tiny base models with an MTP layer in their checkpoint, as the families that have one publish it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    InklingConfig,
    InklingTextConfig,
    MellumConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Step3p7Config,
)

VOCAB, WIDTH = 96, 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_RELATIVE = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "d_rel": 4,
    "rel_extent": 16,
}
_BY_NUMBER = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}


def configs() -> dict[str, PreTrainedConfig]:
    """Published configs scaled down, by the family of their MTP layer."""
    one = SIZES | {"num_key_value_heads": 4, "num_hidden_layers": 3}
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "mtp_layer_types": ["full_attention"]}
    return {
        "deepseek_v3": DeepseekV3Config(**one, **_EXPERTS, **_LATENT, **_BY_NUMBER, n_group=1, topk_group=1),
        "glm4_moe": Glm4MoeConfig(**SIZES, **_EXPERTS, **_BY_NUMBER, num_hidden_layers=3, head_dim=8),
        "glm4_moe_lite": Glm4MoeLiteConfig(**one, **_EXPERTS, **_LATENT, **_BY_NUMBER, n_group=1, topk_group=1),
        "mellum": MellumConfig(
            **SIZES, **_EXPERTS, **sliding, num_hidden_layers=2, head_dim=8, num_experts=4, num_nextn_predict_layers=1
        ),
        "qwen3_next": Qwen3NextConfig(
            **SIZES,
            **_EXPERTS,
            **_LINEAR,
            num_hidden_layers=4,
            head_dim=8,
            num_experts=4,
            shared_expert_intermediate_size=16,
        ),
        "qwen3_5_text": Qwen3_5TextConfig(
            **SIZES, **_LINEAR, num_hidden_layers=4, head_dim=16, mtp_num_hidden_layers=1
        ),
        "qwen3_5_moe_text": Qwen3_5MoeTextConfig(
            **SIZES,
            **_EXPERTS,
            **_LINEAR,
            num_hidden_layers=4,
            head_dim=16,
            num_experts=4,
            shared_expert_intermediate_size=16,
            mtp_num_hidden_layers=1,
        ),
        "mimo": Qwen2Config(**SIZES, num_hidden_layers=3, num_nextn_predict_layers=1),
        "step3p7": step(3, 2),
        "inkling_text": inkling(),
        "inkling_mm_model": inkling(of_text=False),
    }


def inkling(layers: int = 3, of_mtp: int = 1, *, of_text: bool = True, window: int = 32) -> PreTrainedConfig:
    """Inkling's: every layer has convolutions and relative positions, and attends to all tokens or to a window."""
    kinds = {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "mlp_layer_types": ["dense", "sparse", "sparse"]}
    if layers > 3:
        kinds["layer_types"] += ["hybrid", "hybrid_sliding", "hybrid"][: layers - 3]
        kinds["mlp_layer_types"] += ["dense"] * (layers - 3)
    sizes = {"num_hidden_layers": layers, "head_dim": 8, "sliding_window_size": window, "n_routed_experts": 4}
    given = {"chain_hidden_post_norm": not of_text, "mtp_local_layer_ids": [1], "unpadded_vocab_size": VOCAB - 4}
    given |= {
        "mtp_hidden_states_first": not of_text,
        "num_mtp_layers": of_mtp,
        "n_shared_experts": 1,
        "logits_mup_width_multiplier": 2.0,
    }
    text = InklingTextConfig(**SIZES, **_EXPERTS, **_RELATIVE, **kinds, **sizes, **given)
    if of_text:
        return text
    vision = {"hidden_size": 16, "n_layers": 2, "patch_size": 4, "text_hidden_size": WIDTH}
    audio = {"n_mel_bins": 4, "mel_vocab_size": 8, "text_hidden_size": WIDTH}
    return InklingConfig(text_config=text.to_dict(), vision_config=vision, audio_config=audio)


def step(layers: int, of_mtp: int, heads: int = 4) -> PreTrainedConfig:
    """Step-3.7's: its sliding layers, as those of MTP are, may have other numbers of heads."""
    kinds = ["sliding_attention", "full_attention", "full_attention", *["sliding_attention"] * (layers + of_mtp - 3)]
    text = SIZES | _EXPERTS | dict.fromkeys(("bos_token_id", "eos_token_id"))
    text |= {"num_hidden_layers": layers, "layer_types": kinds, "moe_layers_enum": "1,2", "sliding_window": 8}
    text |= {"head_dim": 8, "n_routed_experts": 4, "share_expert_dim": 16, "pad_token_id": 1}
    vision = {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14}
    more = {"num_sliding_attention_heads": heads, "num_nextn_predict_layers": of_mtp}
    return Step3p7Config(text_config=text | more, vision_config=vision)


def write(folder: Path, family: str, seed: int = 0, count: int = 1, heads: tuple[int, int] = (4, 4)) -> None:
    """Save a base model of random weights with its MTP layers, under the names that the family publishes.

    Step-3.7's sliding layers have so many `heads`, and those of MTP.
    """
    config = configs()[family]
    layers = config.get_text_config().num_hidden_layers
    if family == "step3p7":
        config, more = step(layers, count, heads[0]), step(layers + count, 0, heads[1])
    elif family.startswith("inkling"):
        of_text = family == "inkling_text"
        config, more = inkling(layers, count, of_text=of_text), inkling(layers + count, of_text=of_text)
    else:
        setattr(config, "mtp_num_hidden_layers" if family.startswith("qwen3") else "num_nextn_predict_layers", count)
        more = copy.deepcopy(config)
        more.num_hidden_layers = layers + count
        for key in ("layer_types", "mlp_layer_types"):
            if kinds := getattr(config, key, None):
                setattr(more, key, [*kinds, *["full_attention" if key == "layer_types" else kinds[-1]] * count])
    state = _weights(config, folder, seed)
    last, chance = _weights(more, folder / "more", seed + 1), torch.Generator().manual_seed(seed)
    for number in range(count):
        place = f"layers.{layers + number}."
        layer = {key.split(place)[1]: one for key, one in last.items() if place in key}
        state |= _published(family, layers, number, layer, state, chance)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _weights(config: PreTrainedConfig, folder: Path, seed: int) -> dict[str, Tensor]:
    """The tensors of a model of random weights, saved in a folder; experts one by one, where these are published."""
    torch.manual_seed(seed)
    of_images = isinstance(config, (Step3p7Config, InklingConfig))
    kind = AutoModelForImageTextToText if of_images else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    for weight in model.parameters():
        weight.data = (
            torch.randn_like(weight) * 0.15 if weight.dim() > 1 else weight.data + torch.randn_like(weight) * 0.1
        )
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    if isinstance(config, (InklingConfig, InklingTextConfig)):
        return state
    return dict(part for item in state.items() for part in _unfused(*item))


def _unfused(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The tensors of the experts of a layer, where they are in one."""
    if name.endswith(".experts.gate_up_proj"):
        place = name.removesuffix("gate_up_proj")
        halves = [one.chunk(2) for one in tensor]
        return [
            (f"{place}{i}.{part}_proj.weight", half.contiguous())
            for i, pair in enumerate(halves)
            for part, half in zip(("gate", "up"), pair, strict=True)
        ]
    if name.endswith(".experts.down_proj"):
        place = name.removesuffix("down_proj")
        return [(f"{place}{i}.down_proj.weight", one.contiguous()) for i, one in enumerate(tensor)]
    return [(name, tensor)]


def _published(
    family: str,
    layers: int,
    number: int,
    layer: dict[str, Tensor],
    state: dict[str, Tensor],
    chance: torch.Generator,
) -> dict[str, Tensor]:
    """The tensors of an MTP layer by their published names."""

    def norm(center: float = 1.0) -> Tensor:
        return center + 0.1 * torch.randn(WIDTH, generator=chance)

    project = 0.2 * torch.randn(WIDTH, 2 * WIDTH, generator=chance)
    if family in ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "step3p7"):
        place = f"model.layers.{layers + number}."
        return {
            **{place + key: one for key, one in layer.items()},
            f"{place}enorm.weight": norm(),
            f"{place}hnorm.weight": norm(),
            f"{place}eh_proj.weight": project,
            f"{place}shared_head.norm.weight": norm(),
            f"{place}shared_head.head.weight": state["lm_head.weight"].clone(),
            f"{place}embed_tokens.weight": state["model.embed_tokens.weight"].clone(),
        }
    if family == "mimo":
        place = f"model.mtp_layers.{number}."
        return {
            **{place + key: one for key, one in layer.items()},
            f"{place}token_layernorm.weight": norm(),
            f"{place}hidden_layernorm.weight": norm(),
            f"{place}input_proj.weight": project,
            f"{place}final_layernorm.weight": norm(),
        }
    if family.startswith("inkling"):
        place = f"model.mtp.layers.{number}."
        return {
            **{f"{place}transformer_block.{key}": one for key, one in layer.items()},
            f"{place}embed_norm.weight": norm(),
            f"{place}hidden_norm.weight": norm(),
            f"{place}input_proj.weight": project,
            **({} if number or family == "inkling_text" else {"model.mtp.chain_norm.weight": norm()}),
        }
    center = 0.0 if family.startswith("qwen3") else 1.0  # their norms multiply by 1 + w
    return {
        **{f"mtp.layers.{number}.{key}": one for key, one in layer.items()},
        "mtp.pre_fc_norm_embedding.weight": norm(center),
        "mtp.pre_fc_norm_hidden.weight": norm(center),
        "mtp.fc.weight": project,
        "mtp.norm.weight": norm(center),
    }
