"""The shape of any causal language model of transformers, from its config.json; no weights are read.

The model is made on torch's `meta` device, where tensors have shapes and no values. Its linear layers are the matrices,
the key-value cache of a forward has heads, head sizes and windows of every layer. Experts are stacked weights
[E, out, in]; they are left out of the forward, because routing depends on values. The FLOPs of a prompt, of one token
after it and of many, by torch's counter, must be those of the shape: so recurrent layers, compressed key-value caches
and other parts without a formula here are found.
"""

import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from treeopt.errors import Code, TreeoptError, first_line
from treeopt.files.read import read_settings
from treeopt.models.base import cache_name
from treeopt.models.checkpoint import counts_layers
from treeopt.models.head_files import load_heads
from treeopt.shape import MOST, Attention, Drafting, Matrix, ModelShape, shape_error

_SHORT = 5  # tokens of the first forward, which recurrent layers take one after another
_TRIED = (1024, 1, 64)  # tokens of forwards with one cache: attention has a large share of the later ones
_MOST_LAYERS = 1000  # a model of more is not made, even without values
_TOLERANCE = 0.02  # share of FLOPs outside of matrices and attention, such as the products of rotary positions
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")


def config_shape(file: Path, name: str) -> ModelShape:
    """The shape of the model of a config.json; E240 where its arithmetic is not that of a transformer."""
    content = read_settings(file)
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        what = f"{file} is not a config.json of transformers: it has no model_type"
        raise TreeoptError(Code.FILE_INVALID, what, at=f"{file}:1:1", why="model_type names the architecture")
    kind = content.pop("model_type")
    kind = "qwen2" if kind == "mimo" else kind  # as `check_size` reads it
    left_out = ("quantization_config", "auto_map", "torch_dtype", "dtype")
    try:
        _check_sizes(content)
        config = AutoConfig.for_model(kind, **{key: content[key] for key in content if key not in left_out})
        config = config.get_text_config()
        _check_sizes(config.to_dict())
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
        return shape_of_model(model.eval(), name, str(file))
    except TreeoptError:
        raise
    except Exception as error:  # transformers raises many types for a config that it cannot use
        if isinstance(error, MemoryError):
            raise TreeoptError(Code.OUT_OF_MEMORY, f"{name} does not fit into memory") from error
        raise _not_modelled(name, kind, first_line(error)) from error


def _check_sizes(content: Mapping[Any, Any]) -> None:
    """Raise ValueError for numbers of layers and sizes, at any depth of a config, of which no model is made."""
    for name, value in content.items():
        layers = counts_layers(str(name))
        if type(value) is int and value > (_MOST_LAYERS if layers else MOST):
            raise ValueError(f"{name} {reprlib.repr(value)} is more than {_MOST_LAYERS if layers else MOST:,}")
        if name == "num_hidden_layers" and value is not None and int(value) < 1:
            raise ValueError(f"num_hidden_layers {value} is below 1")
        if isinstance(value, dict):
            _check_sizes(value)


def heads_drafting(name: str, base: ModelShape) -> Drafting:
    """What Medusa heads of a folder or hub name compute."""
    heads = load_heads(name).heads
    if heads.hidden_size != base.hidden:
        what = f"{name} has heads for hidden size {heads.hidden_size}, {base.name} has {base.hidden}"
        raise TreeoptError(Code.HEADS_MISMATCH, what)
    rows = None if heads.lm_head is None else int(heads.lm_head.shape[1])
    return Drafting(heads.num_heads, int(heads.weight.shape[0]), rows)


def shape_of_model(model: Any, name: str, source: str = "") -> ModelShape:
    """The shape of a causal language model on the `meta` device, from forwards there."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    if head is None:
        raise _not_modelled(name, config.model_type, "it has no LM head")
    tied = head.weight is model.get_input_embeddings().weight
    active = next((int(value) for key in _ACTIVE if (value := getattr(config, key, None))), 0)  # 0 without experts
    matrices, experts = _matrices(model, head, active)
    for module in experts:
        module.forward = lambda hidden, *_, **__: hidden  # left out
    short, cache = _forward(model, _SHORT, None)
    total = sum(parameter.numel() for parameter in model.parameters())
    counted = sum(matrix.parameters for matrix in matrices) + (0 if tied else head.weight.numel())
    shape = ModelShape(
        name=name,
        hidden=int(head.weight.shape[1]),
        matrices=tuple(matrices),
        attention=tuple(_attention(name, config, cache)),
        lm_head=Matrix("lm_head", *head.weight.shape),
        tied=tied,
        other=total - counted,
        context=getattr(config, "max_position_embeddings", None),
        source=source,
    )
    _check_flops(shape, config.model_type, _SHORT, 0, short)
    cached, cache = 0, None
    for tokens in _tried(shape.context):
        flops, cache = _forward(model, tokens, cache)
        _check_flops(shape, config.model_type, tokens, cached, flops)
        cached += tokens
    return shape


def _forward(model: Any, tokens: int, cache: Any) -> tuple[int, Any]:
    """The counted FLOPs of a forward of new tokens, and the cache after it."""
    inputs = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        name = cache_name(model)
        cache = getattr(model(inputs, **{name: cache}, use_cache=True), name)
    return counter.get_total_flops(), cache


def _tried(context: int | None) -> tuple[int, int, int]:
    """`_TRIED`, or fewer tokens that a short context takes."""
    long, one, many = _TRIED
    if context is None or context >= sum(_TRIED):
        return long, one, many
    many = max(1, min(many, context // 3))
    return max(1, context - one - many), one, many


def _matrices(model: nn.Module, head: nn.Module, active: int) -> tuple[list[Matrix], list[nn.Module]]:
    """The matrices of the layers, equal ones together, and the modules that hold stacked experts."""
    counts: Counter[tuple[str, int, int, int]] = Counter()
    stacked = []
    for path, module in model.named_modules():
        if module is head or isinstance(module, nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            rows, columns = parameter.shape[-2:] if parameter.dim() > 1 else (1, 1)
            label = path.rsplit(".", 1)[-1] + ("" if name == "weight" else f".{name}")
            if parameter.dim() == 2 and name == "weight":
                rows, columns = (columns, rows) if isinstance(module, Conv1D) else (rows, columns)
                counts[label, rows, columns, 1] += 1
            elif parameter.dim() == 3 and active and parameter.shape[0] >= active and "bias" not in name:
                counts[label, rows, columns, parameter.shape[0]] += 1
                stacked.append(module)
    found = [
        Matrix(label, rows, columns, count, experts, active if experts > 1 else 1)
        for (label, rows, columns, experts), count in counts.items()
    ]
    return found, stacked


def _attention(name: str, config: Any, cache: Any) -> Iterator[Attention]:
    """The attention layers by kind, from the cache of a forward."""
    kinds: Counter[tuple[int, int, int, int | None]] = Counter()
    for layer in getattr(cache, "layers", ()):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4:
            raise _not_modelled(name, config.model_type, "a layer has no keys and values of all tokens")
        window = getattr(layer, "sliding_window", None)
        kinds[keys.shape[1], keys.shape[-1], values.shape[-1], window] += 1
    for (kv_heads, key_size, value_size, window), layers in kinds.items():
        yield Attention(layers, int(config.num_attention_heads), kv_heads, key_size, value_size, window)


def _check_flops(shape: ModelShape, kind: str, tokens: int, cached: int, counted: int) -> None:
    """Raise E240 where the FLOPs of a forward, without experts, are not those of the shape."""
    weights = [matrix.parameters for matrix in shape.matrices if matrix.experts == 1]
    expected = 2 * tokens * (sum(weights) + shape.lm_head.parameters)
    for one in shape.attention:
        seen = cached if one.window is None else min(cached, one.window - 1)
        expected += 2 * tokens * (seen + tokens) * one.layers * one.heads * (one.key_size + one.value_size)
    share = counted / expected - 1
    if abs(share) > _TOLERANCE:
        step = f"of {tokens:,} new and {cached:,} cached tokens"
        why = f"its FLOPs are {share:+.1%} off those of its matrices and attention in a step {step}"
        raise _not_modelled(shape.name, kind, why)


def _not_modelled(name: str, kind: str, why: str) -> TreeoptError:
    what = f"the hardware model has no formula for {name} ({kind})"
    return shape_error(what, at=f"--model {name}", why=why, fix="a transformer of transformers, or a name of --presets")
