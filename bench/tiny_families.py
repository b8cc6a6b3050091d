"""Makers of tiny random models of the causal language models of transformers, by model type."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 31  # so few that random drafts are accepted now and then
WINDOW = 16  # of sliding layers, in tokens: shorter than most texts here
CONTEXT = 128
_SPREAD = 0.35  # standard deviation of all matrices: with the usual 0.02 a random model repeats one token for ever

_NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# Each config takes the settings that it has; several have the same meaning under the names of different families.
_SETTINGS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 48,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "rotary_dim": 4,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    # recurrent layers
    "state_size": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 1,
    "ssm_state_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    # shorter than most texts here
    "chunk_size": 32,
    "mamba_chunk_size": 32,
    "block_size": 32,
    "attention_chunk_size": WINDOW,
    "index_topk": WINDOW,
}
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len")
_LATENT = {"num_key_value_heads": 4}
_PAD = {"pad_token_id": 1}
_DECODER = {"is_decoder": True, "pad_token_id": 0}
_FOUR = {"num_hidden_layers": 4}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
_TWO_KINDS = {"layer_types": ["linear_attention", "full_attention"]}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": CONTEXT // 4}
_LONGROPE = {
    "original_max_position_embeddings": CONTEXT // 2,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": CONTEXT // 2,
    },
}
# Families that need nothing besides.
_PLAIN = [
    "afmoe",
    "apertus",
    "arcee",
    "aria_text",
    "beam",
    "bitnet",
    "codegen",
    "cohere",
    "cohere2_moe",
    "diffllama",
    "doge",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "falcon",
    "flex_olmo",
    "flint",
    "gemma",
    "gemma2",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_neox_japanese",
    "gpt_oss",
    "gptj",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "iquestcoder",
    "jais2",
    "jetmoe",
    "llama",
    "mellum",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmoe",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
]
# What the others need; names with a dash after the model type are variants of it.
_TREES: dict[str, dict[str, Any]] = {
    **{name: {} for name in _PLAIN},
    "biogpt": _PAD,
    "cohere2": _FOUR,
    "ctrl": {},
    "cwm": {"bos_token_id": 1, "eos_token_id": 2},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "gemma3_text": {"num_hidden_layers": 6},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "num_hidden_layers": 6, "global_head_dim": 8},
    "gpt_neo-global": {"attention_types": [[["global"], 2]]},
    "gpt_neo-window": {"attention_types": [[["global", "local"], 1]], "window_size": CONTEXT},
    "kolibri1": {"head_dim": 8},
    "laguna": {},
    "llama-dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    "llama-yarn": {"rope_parameters": _YARN},
    "longcat_flash": {"num_attention_heads": 4, "num_key_value_heads": 4, "zero_expert_num": 2, "moe_topk": 2},
    "mimo_v2_flash": {},
    "minicpm3": _LATENT,
    "modernbert-decoder": {**_PAD, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 4, "sep_token_id": 5},
    "olmo3": _FOUR,
    "opt": _PAD,
    "phi3-longrope": _LONGROPE,
    "qwen2-mixed": {"use_sliding_window": True, "max_window_layers": 1},
    "xglm": _PAD,
    "youtu": _LATENT,
    "bert": _DECODER,
    "doge-window": {"keep_window_size": 32},
    "electra": _DECODER,
    "roberta": _DECODER,
}
_PATHS: dict[str, dict[str, Any]] = {
    # attention whose masks or positions are not those that a tree needs
    "bloom": {},
    "deepseek_v32": {**_LATENT, "index_n_heads": 16, "index_head_dim": 16},
    "falcon-alibi": {"alibi": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "llama4_text": {},
    "mpt": {},
    # recurrent and hybrid layers
    "bailing_hybrid": {**_LATENT, **_TWO_KINDS},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "deepseek_v4": {
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "compress_rates": {"heavily_compressed_attention": 16, "compressed_sparse_attention": 4},
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {**_MAMBA, **_TWO_KINDS},
    "kimi_linear": {**_LATENT, **_TWO_KINDS},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "minimax": {},
    "nemotron_h": {},
    "olmo_hybrid": {},
    "qwen3_5_text": _TWO_KINDS,
    "qwen3_next": _TWO_KINDS,
    "rwkv": {},
    # attention to an encoder
    "bart": {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, **_PAD},
}
_REFUSED: dict[str, dict[str, Any]] = {
    # no cache is returned
    "openai-gpt": {},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": WINDOW},
    # several hidden states for each token
    "gemma3n_text": {
        **{"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
        **{"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
        **{"intermediate_size": 48, "activation_sparsity_pattern": None, "laurel_rank": 4, "altup_num_inputs": 2},
    },
    # the state is ignored in chunks of several tokens
    "falcon_mamba": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "mamba": {},
}
MORE = _TREES | _PATHS | _REFUSED
FAMILIES = tuple(sorted(MORE))
TREE_FAMILIES = tuple(sorted(_TREES))  # on the route of tree masks
PATH_FAMILIES = tuple(sorted(_PATHS))  # on the route of paths; the others are refused


def tiny_config(family: str, *, context: int = CONTEXT, vocab: int = VOCAB) -> Any:
    """The config of a tiny model of one of `FAMILIES`."""
    kind = family if family in transformers.CONFIG_MAPPING else family.rpartition("-")[0]
    made = transformers.CONFIG_MAPPING[kind]
    known = {*made().to_dict(), *made.attribute_map}
    wanted = {"vocab_size": vocab, **_SETTINGS, **dict.fromkeys(_CONTEXT, context)}
    chosen = {name: value for name, value in wanted.items() if name in known}
    # Of two names of one setting the common one counts.
    for name, other in made.attribute_map.items():
        if name in chosen and other in chosen:
            del chosen[other]
    return AutoConfig.for_model(kind, **{**chosen, **_NONE, **MORE[family]})


def tiny_model(
    family: str,
    *,
    seed: int = 0,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    context: int = CONTEXT,
    vocab: int = VOCAB,
) -> PreTrainedModel:
    """A random model whose greedy texts vary; the weights of all dtypes and attentions are those of the seed."""
    config = tiny_config(family, context=context, vocab=vocab)
    with warnings.catch_warnings(action="ignore"), torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        _spread_(model)
    model.generation_config = transformers.GenerationConfig()
    return model.to(dtype).eval()


@torch.no_grad()
def _spread_(model: nn.Module) -> None:
    """Draw all matrices anew, and disturb biases and norms."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        parameter.copy_(noise * _SPREAD if parameter.ndim > 1 else parameter + 0.1 * noise)
