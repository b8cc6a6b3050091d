"""Shapes from configs: FLOPs of real forwards by torch's counter, parameters, and models that have no shape."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT_FOLDER
from looped import looped
from tiny import FAMILIES, TREE_FAMILIES
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import CACHE
from treeopt.models.checkpoint import counts_layers
from treeopt.models.config_shapes import heads_drafting
from treeopt.models.shapes import NAMED, model_shape, named_shape
from treeopt.plan.operators import StepSetting, forward_operators

BATCH, CACHED, NODES = 3, 40, 9  # 40 cached tokens exceed the windows of 16
COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**COMMON, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {**COMMON, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 16}),
    "olmo2": ("olmo2", COMMON),
    "falcon": ("falcon", {**COMMON, "multi_query": True}),
    "starcoder2": ("starcoder2", {**COMMON, "tie_word_embeddings": True}),
    "bloom": ("bloom", {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4, "pad_token_id": None}),
}
TRIED = {**{name: FAMILIES[name] for name in TREE_FAMILIES}, **MORE}
# Families that do not take one mask [B, 1, nodes, keys]: their layers need several masks, or make their own.
DEFAULT_MASK = {"bloom", "opt", "mistral", "qwen2-mixed", "qwen3-mixed", "gemma2", "gemma3", "phi3"}
# Compressed keys and values (MLA): the cache is expanded by a matrix in every step.
LATENT = {
    **COMMON,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
}
WIDE = {**COMMON, "model_type": "llama", "intermediate_size": 512}  # 5 tokens: attention has less than 2 % of the FLOPs
FIXED_PARAMETERS = {  # of the published checkpoints
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
}


def tiny(name: str) -> Any:
    """A random model on the CPU with eager attention and experts."""
    kind, settings = TRIED[name]
    settings = {key: value for key, value in settings.items() if key != "attn_implementation"}
    config = AutoConfig.for_model(kind, **{"vocab_size": 61, "pad_token_id": None, **settings})
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


def flops(shape: Any, nodes: int, cached: int) -> float:
    """FLOPs of a forward by the hardware model."""
    found = forward_operators(shape, np.array([float(nodes)]), BATCH, cached, StepSetting("float32"))
    return float(sum(one.flops[0] for one in found))


def counted(model: Any, nodes: int, cache: DynamicCache, mask: torch.Tensor | None) -> int:
    """FLOPs of a real forward, by torch's counter."""
    ids = torch.randint(0, 61, (BATCH, nodes))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids, **{CACHE: cache}, use_cache=True, **({} if mask is None else {"attention_mask": mask}))
    return int(counter.get_total_flops())


def tree_mask(nodes: int, cached: int) -> torch.Tensor:
    """float32 [B, 1, nodes, cached + nodes]: a tree in which node i hangs from node (i - 1) // 2."""
    seen = torch.zeros(nodes, nodes, dtype=torch.bool)
    for node in range(nodes):
        above = node
        while above:
            seen[node, above] = True
            above = (above - 1) // 2
        seen[node, 0] = True
    mask = torch.cat([torch.ones(nodes, cached, dtype=torch.bool), seen], 1)
    lowest = torch.finfo(torch.float32).min
    return torch.where(mask, 0.0, lowest).expand(BATCH, 1, -1, -1).contiguous()


@looped("name", TRIED)
@pytest.mark.slow
def test_flops_and_parameters_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    """Prefill, one token and a tree after the cache take the counted FLOPs; parameters are exact."""
    model = tiny(name)
    model.config.save_pretrained(tmp_path)
    shape = model_shape(tmp_path)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    for nodes in (1, NODES):
        cache = DynamicCache(config=model.config)
        prefill = counted(model, CACHED, cache, None)
        mask = tree_mask(nodes, CACHED) if nodes > 1 and name not in DEFAULT_MASK else None
        step = counted(model, nodes, cache, mask)
        assert flops(shape, CACHED, 0) == pytest.approx(prefill, rel=0.02)
        assert flops(shape, nodes, CACHED) == pytest.approx(step, rel=0.02)


@looped(("name", "parameters"), FIXED_PARAMETERS.items())
def test_named_shapes_have_the_parameters_of_their_checkpoints(name: str, parameters: int) -> None:
    """Embeddings, norms and biases included."""
    assert named_shape(name).parameters == parameters


@looped(
    ("name", "config"),
    [
        ("llama-7b", {"model_type": "llama"}),  # the defaults of transformers are Llama-7B
        ("mistral-7b", {"model_type": "mistral", "num_key_value_heads": 8, "sliding_window": 4096}),
        ("mixtral-8x7b", {"model_type": "mixtral", "sliding_window": None}),
        (
            "qwen3-30b-a3b",
            {
                "model_type": "qwen3_moe",
                "hidden_size": 2048,
                "moe_intermediate_size": 768,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "num_experts": 128,
                "num_experts_per_tok": 8,
            },
        ),
    ],
)
@pytest.mark.slow
def test_named_shape_is_that_of_its_config(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    """FLOPs, bytes of the weights and the cache of a name are those of the model that transformers makes."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    known, read = named_shape(name), model_shape(tmp_path / "config.json")
    assert known.attention == read.attention
    assert (known.parameters, known.tied, known.hidden) == (read.parameters, read.tied, read.hidden)
    for nodes in (1.0, 64.0):
        pair = [forward_operators(one, np.array([nodes]), 2, 512, StepSetting()) for one in (known, read)]
        for figure in ("flops", "bytes"):
            one, other = (sum(float(getattr(row, figure)[0]) for row in rows) for rows in pair)
            # matrices that are one in the model (gate and up) read their input once
            assert one == pytest.approx(other, rel=1e-12 if figure == "flops" else 0.02)


def test_named_shape_needs_no_torch() -> None:
    """`model_shape` of a known name imports neither torch nor transformers."""
    code = (
        "import sys, treeopt; print(treeopt.model_shape('Llama-7B').layers, "
        "[name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT_FOLDER)
    assert done.stdout.strip() == "32 []"


def test_every_named_shape_can_be_made() -> None:
    """All names give a shape under their name, with a source."""
    for name in NAMED:
        shape = named_shape(name)
        assert shape.name == name
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", shape.source)


@looped(
    ("config", "why"),
    [
        ({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2}, "no keys and values"),
        ({"model_type": "openai-gpt", "n_embd": 32, "n_layer": 2, "n_head": 4}, "has no attribute"),
        ({**COMMON, "model_type": "jamba"}, ""),
        (LATENT | {"first_k_dense_replace": 2}, "FLOPs are"),
        (LATENT | EXPERTS, "FLOPs are"),
        ({**WIDE, "model_type": "diffllama"}, "FLOPs are"),
        ({**COMMON, "model_type": "t5"}, "AutoModelForCausalLM"),
        ({"model_type": "no-such-type"}, "no-such-type"),
        ({**COMMON, "model_type": "llama", "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({**COMMON, "model_type": "llama", "num_hidden_layers": 0}, "num_hidden_layers"),
        ({**COMMON, "model_type": "llama", "vocab_size": 10**15}, "vocab_size"),
        ({"model_type": "bart", "encoder_layers": 2, "decoder_layers": 30_000, "d_model": 64}, "decoder_layers"),
        ({**COMMON, "model_type": "llama", "hidden_size": -32}, ""),
        ({**COMMON, "model_type": "llama", "vocab_size": "many"}, ""),
    ],
)
def test_config_without_a_shape_is_refused_with_a_reason(config: dict[str, Any], why: str, tmp_path: Path) -> None:
    """Recurrent layers, compressed caches, other attention, encoders, unknown types and wrong numbers are E240."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TreeoptError) as caught:
        model_shape(tmp_path)
    assert caught.value.code is Code.PLAN_INVALID
    assert why in caught.value.why
    assert caught.value.why
    assert "\n" not in caught.value.why


def test_sizes_of_a_layer_are_not_numbers_of_layers(tmp_path: Path) -> None:
    """Gemma 3n and 4 have a vocabulary of each layer's inputs, of 262,144 tokens."""
    config = {**COMMON, "model_type": "llama", "vocab_size_per_layer_input": 262_144, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_shape(tmp_path).layers == COMMON["num_hidden_layers"]
    names = ("n_layer", "num_hidden_layers", "decoder_layers", "n_layers")
    assert all(map(counts_layers, names))
    assert not any(map(counts_layers, ("vocab_size_per_layer_input", "hidden_size_per_layer_input", "layer_norm_eps")))


def test_hidden_arithmetic_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A forward that does more than its matrices and attention has no shape."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaMLP.forward

    def twice(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return plain(self, hidden) + plain(self, hidden)

    (tmp_path / "config.json").write_text(json.dumps({**COMMON, "model_type": "llama"}))
    model_shape(tmp_path)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", twice)
    with pytest.raises(TreeoptError, match="has no formula for") as caught:
        model_shape(tmp_path)
    assert "FLOPs are +" in caught.value.why


@looped("product", ["scores", "expansion"])
def test_hidden_arithmetic_of_attention_is_found(product: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Attention that computes its scores twice, or multiplies all cached keys by a matrix, has no shape."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward

    def more(module: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if product == "scores":
            torch.matmul(query, key.repeat_interleave(2, 1).transpose(2, 3))
        else:
            key = torch.matmul(key, torch.eye(8, dtype=key.dtype, device=key.device))
        return plain(module, query, key, *rest, **options)

    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    model_shape(tmp_path)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", more)
    with pytest.raises(TreeoptError, match="has no formula for") as caught:
        model_shape(tmp_path)
    assert "FLOPs are +" in caught.value.why


@looped("text", ["", "[]", "{", '{"a": 1}', '{"model_type": 3}', "\xff"])
def test_file_that_is_no_config_is_refused(text: str, tmp_path: Path) -> None:
    """E203 with the file, and E201 where there is none."""
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(TreeoptError) as caught:
        model_shape(tmp_path)
    assert caught.value.code is Code.FILE_INVALID
    (tmp_path / "config.json").unlink()
    with pytest.raises(TreeoptError) as caught:
        model_shape(tmp_path)
    assert caught.value.code is Code.FILE_MISSING


@looped(("name", "near"), [("lama-7b", "llama-7b"), ("mixtral", "mixtral-8x7b"), ("qwen3", "qwen3-")])
def test_unknown_name_lists_similar_ones(name: str, near: str) -> None:
    """E240 with the names that it may mean."""
    with pytest.raises(TreeoptError) as caught:
        model_shape(name)
    assert caught.value.code is Code.PLAN_INVALID
    assert near in caught.value.fix


def test_rows_are_outputs_in_every_layout(tmp_path: Path) -> None:
    """GPT-2 stores its matrices transposed; rows are outputs there too."""
    tiny("gpt2").config.save_pretrained(tmp_path)
    sizes = {matrix.name: (matrix.rows, matrix.columns) for matrix in model_shape(tmp_path).matrices}
    assert (sizes["c_attn"], sizes["c_fc"]) == ((96, 32), (128, 32))


def test_shape_and_heads_of_the_built_in_model() -> None:
    """pocket has the parameters of its model card, and five heads of two blocks with LM heads of their own."""
    shape = model_shape("pocket")
    assert (shape.parameters, shape.layers, shape.hidden, shape.lm_head.rows) == (2_545_728, 5, 192, 2048)
    drafting = heads_drafting("pocket", shape)
    assert (drafting.heads, drafting.blocks) == (5, 2)
    with pytest.raises(TreeoptError) as caught:
        heads_drafting("pocket", named_shape("llama-7b"))
    assert caught.value.code is Code.HEADS_MISMATCH
