"""Checks of a checkpoint, before and after it is loaded."""

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from treeopt.errors import Code, TreeoptError, first_line, out_of_memory
from treeopt.models.tensors import check_shards, listed, read_config, refused_name, refused_pickle

_SETTINGS = ("config.json", "generation_config.json")  # transformers ignores the second where it is damaged
_PICKLES = "pytorch_model*.bin"  # weights that are read where there are no safetensors files
_MOST_LAYERS = 100_000  # of a config; some configs make a list of them before anything else is checked
_WEIGHTS_A_BYTE = 8  # the maximum of any quantisation
_SCALES = ("_scale", "_scale_inv")  # after a weight's name: it is a product of both
_SMALL = 1 << 28  # weights; this many fit into memory, and loading them names the missing ones
# Advice in messages of other libraries to run code of a checkpoint, and references to a report that is not printed.
_ADVICE = re.compile(r"weights_only|trust_remote_code|above report|ignore_mismatched_sizes")


def check_files(name: str, folder: Path) -> Any:
    """Check the files of a base model before it is loaded; the class of transformers that loads it.

    That for images and text where there is none for text alone.
    """
    for settings in _SETTINGS:
        read_config(folder / settings)
    check_shards(folder)
    return check_size(name, folder)


def check_size(name: str, folder: Path) -> Any:
    """Raise E304 where a config describes a model far larger than its files, or weights are stored as integers.

    Loading fills missing weights with random numbers, so a wrong config could use up the memory before it is detected.
    Returned is the class that loads the model.
    """
    kind: Any = AutoModelForCausalLM
    stored, size = _stored(folder)
    content = read_config(folder / _SETTINGS[0])
    most = _most_layers(content)
    if most > _MOST_LAYERS:
        raise _not_of_config(name, f"describes {most} layers, more than {_MOST_LAYERS:,}")
    try:
        # MiMo-7B is Qwen2 with MTP layers, and has no class in transformers.
        of_qwen = content.get("model_type") == "mimo"
        config = (Qwen2Config if of_qwen else AutoConfig).from_pretrained(folder, trust_remote_code=False)
        layers = config.get_text_config().num_hidden_layers
        if size and layers > (len(stored) or size):  # checked first: the time of the rest grows with this number
            raise _not_of_config(name, f"describes {layers} layers, which its files cannot hold")
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder:
            kind = AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else kind
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            model = kind.from_config(config, trust_remote_code=False)
    except TreeoptError:
        raise
    except Exception:  # loading will raise the same error, or follow an adapter to its base
        return kind
    weights = sum(weight.numel() for weight in model.parameters())
    if size and weights > max(_SMALL, _WEIGHTS_A_BYTE * size):
        raise _not_of_config(name, f"describes {weights:,} weights, and the files hold {size:,} bytes")
    if not _quantised(getattr(config, "quantization_config", None)):
        for key, _ in model.named_parameters():
            scaled = any(f"{key}{end}" in stored for end in _SCALES)
            if scaled or not stored.get(key, "F32").startswith(("F", "BF")):
                found = f"{key} is stored as {stored[key]}{' with a scale' * scaled}"
                what = f"the config of {name} names no quantisation of transformers, and {found}"
                why = "the number stored is not the weight"
                raise TreeoptError(Code.MODEL_INVALID, what, why=why, fix="use weights in bfloat16 or float32")
    return Qwen2ForCausalLM if of_qwen else kind


def check_loaded(name: str, model: nn.Module, info: Mapping[str, Any]) -> tuple[str, ...]:
    """Warnings about a checkpoint that was loaded."""
    faults = []
    if info["missing_keys"]:
        faults.append(f"it lacks {listed(info['missing_keys'])}")
    if info["mismatched_keys"]:
        shapes = [f"{key} {list(found)}, not {list(expected)}" for key, found, expected in info["mismatched_keys"]]
        faults.append(f"it has other shapes than its config: {listed(shapes)}")
    if faults:
        what = f"the checkpoint {name} does not have all weights of {type(model).__name__}: {'; '.join(faults)}"
        why = "weights that are missing would be random numbers"
        fix = "use a complete checkpoint of this architecture, with its config.json"
        raise TreeoptError(Code.MODEL_INVALID, what, why=why, fix=fix)
    if not info["unexpected_keys"]:
        return ()
    return (f"warning: {name} has weights that {type(model).__name__} does not use: {listed(info['unexpected_keys'])}",)


def wrong_settings(model: PreTrainedModel) -> Iterator[str]:
    """Settings of a model's config or generation config that are invalid for text generation."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if weight is None or weight.ndim != 2:
        yield "it has no linear LM head"
        return
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and (not isinstance(limit, int) or limit < 0):
        yield f"max_position_embeddings is {limit!r}"
    for name in ("eos_token_id", "pad_token_id"):
        given = getattr(model.generation_config, name)
        several = name == "eos_token_id" and isinstance(given, (list, tuple))
        for token in given if several else [given]:
            if token is not None and type(token) is not int:
                yield f"{name} is {token!r}, not a token id"


def plain_reason(error: BaseException) -> str:
    """One line of an exception of another library, without its advice to run code of the checkpoint."""
    message = first_line(error)
    if message.endswith(":"):  # the reason is in the next line
        message = " ".join(" ".join(str(error).strip().splitlines()[:2]).split())
    if _ADVICE.search(message):
        return "its files are damaged, or of different models"
    named = isinstance(error, (LookupError, TypeError, AttributeError))
    return f"{type(error).__name__}: {message}" if named else message


def not_loadable(name: str, error: Exception, folder: Path | None = None) -> TreeoptError:
    """The error of loading a model, or of its forward."""
    if out_of_memory(error):
        fix = "--dtype bfloat16, or a smaller model"
        return TreeoptError(Code.OUT_OF_MEMORY, f"{name} does not fit into memory", fix=fix)
    if "custom code" in str(error):
        what = f"{name} needs code from its own repository, which treeopt does not run"
        why = "only architectures of transformers itself are loaded"
        return TreeoptError(Code.MODEL_INVALID, what, why=why, fix="use another model")
    read = folder is not None and not any(folder.glob("*.safetensors"))
    files = sorted(folder.glob(_PICKLES)) if folder is not None and read else []
    refused = refused_name(error) or next(filter(None, map(refused_pickle, files)), None)
    if refused is not None:
        what = f"the weights of {name} were refused: they are not plain tensors ({refused})"
        return TreeoptError(Code.PICKLE_REFUSED, what, fix="use its safetensors files")
    what, why = f"{name} is not a model that transformers can load", plain_reason(error)
    if folder is not None and "for this kind of AutoModel" in why:
        config = read_config(folder / _SETTINGS[0])
        what = f"{name} ({config.get('model_type')}) is no causal language model, nor one of images and text"
        named = ", ".join(config.get("architectures") or ["no class"])
        why = f"transformers has no causal language model of this type; config.json names {named}"
    return TreeoptError(Code.MODEL_INVALID, what, why=why)


def _not_of_config(name: str, what: str) -> TreeoptError:
    fix = "use the config.json of these weights"
    return TreeoptError(
        Code.MODEL_INVALID, f"the config of {name} {what}", why="config and weights are of different models", fix=fix
    )


def counts_layers(name: str) -> bool:
    """Whether a name of a config is a number of layers, such as `num_hidden_layers`, `n_layer` or `decoder_layers`."""
    return name == "n_layer" or name.endswith("layers")


def _quantised(given: Any) -> bool:
    """Whether a config's `quantization_config` is one that transformers applies; others it skips with a log line."""
    if not isinstance(given, Mapping):
        return given is not None
    bits = given.get("load_in_8bit") or given.get("load_in_4bit")
    return bool(bits) or given.get("quant_method") in AUTO_QUANTIZATION_CONFIG_MAPPING


def _most_layers(config: Mapping[str, Any]) -> int:
    """The largest number of layers in a config or in the configs inside of it."""
    inner = [_most_layers(part) for part in config.values() if isinstance(part, dict)]
    numbers = [value for key, value in config.items() if counts_layers(str(key)) and type(value) is int]
    return max([0, *inner, *numbers])


def _stored(folder: Path) -> tuple[dict[str, str], int]:
    """The type of each tensor in a folder's readable safetensors files, and the bytes of all files of weights."""
    kinds: dict[str, str] = {}
    size = 0
    for file in folder.glob("*"):
        if file.suffix not in (".safetensors", ".bin") or not file.is_file():
            continue
        size += file.stat().st_size
        try:
            with safe_open(file, framework="pt") as opened:
                kinds |= {key: opened.get_slice(key).get_dtype() for key in opened.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError):
            continue
    return kinds, size
