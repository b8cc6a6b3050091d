"""What checkpoints of heads leave out or add: biases, one LM head for all heads, a token map, 8-bit weights.

The result is in one form: each block with a bias, an LM head for each head or for none, floating-point tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treeopt.models.head_files import HeadTensors, State
from treeopt.models.head_layouts import Layout, invalid, listed

_SCALE = "_scale"  # of a weight: weight_scale
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class PlainHeads:
    """Tensors of heads in one form, by the names of their layout.

    Args:
        state: as in the description of this file.
        token_map: int64 [T], the token of each row of the LM heads; None where row v is of token v.
        vocab_size: V with a token map, else None.
        notes: warnings for the user.
    """

    state: State
    token_map: Tensor | None
    vocab_size: int | None
    notes: tuple[str, ...]


def plain_heads(found: HeadTensors, config: Mapping[str, Any]) -> PlainHeads:
    """The tensors of heads, with what their layout leaves out.

    Raises:
        TreeoptError: E211 where a token map or a scale does not fit.
    """
    layout, name = found.layout, str(found.file)
    state, notes = _scaled(found.state, config, name)
    if layout.name != "vllm":
        return PlainHeads(state, None, None, tuple(notes))
    token_map = state.pop(f"{layout.prefix}token_map", None)
    state = _with_biases(_with_lm_heads(state, layout, config, notes), layout, config, notes)
    vocab_size = config.get("vocab_size")
    if token_map is None:
        return PlainHeads(state, None, None, tuple(notes))
    if config.get("truncated_vocab_size", vocab_size) == vocab_size:
        notes.append("token_map is not used: truncated_vocab_size is vocab_size in config.json, or absent")
        return PlainHeads(state, None, None, tuple(notes))
    if type(vocab_size) is not int:
        raise invalid(name, "has a token_map, and its config.json has no vocab_size")
    _check_token_map(token_map, vocab_size, name)
    for key, tensor in state.items():
        if layout.lm_head_pattern.fullmatch(key) and tensor.ndim == 2:
            # vLLM takes the rows of the map where the checkpoint has those of all tokens.
            state[key] = tensor[token_map.long()] if len(tensor) == vocab_size else tensor
            if len(state[key]) != len(token_map):
                raise invalid(name, f"has {len(tensor)} rows in {key} and {len(token_map)} tokens in its token_map")
    return PlainHeads(state, token_map.long(), vocab_size, tuple(notes))


def _check_token_map(token_map: Tensor, vocab_size: int, name: str) -> None:
    whole = not token_map.is_floating_point() and token_map.dtype != torch.bool and not token_map.is_complex()
    if not whole or token_map.ndim != 1 or not len(token_map):
        raise invalid(name, f"has a token_map of {token_map.dtype} {list(token_map.shape)}, not of token ids")
    ids = token_map.long()  # torch has no minimum of some unsigned types; those beyond int64 become negative
    if ids.min() < 0 or ids.max() >= vocab_size or len(set(ids.tolist())) < len(ids):
        raise invalid(name, f"has a token_map that is not of distinct token ids below {vocab_size}")


def _with_lm_heads(state: State, layout: Layout, config: Mapping[str, Any], notes: list[str]) -> State:
    """The state with an LM head for each head, where it has one for all; a note where vLLM keeps one of several."""
    shared, first = f"{layout.prefix}lm_head.weight", layout.lm_head.format(h=0)
    present = [key for key in state if layout.lm_head_pattern.fullmatch(key)]
    if len(present) > 1 and config.get("original_lm_head") is True:
        notes.append(f"vLLM keeps one of these {len(present)} LM heads: original_lm_head is true in config.json")
    if shared in state and not present:
        source = shared
    elif present == [first] and config.get("original_lm_head") is True:
        source = first
    else:
        return state
    numbers = [int(match[1]) for match in map(layout.block_pattern.fullmatch, state) if match]
    if max(numbers, default=0) > len(state):  # refused later; the time of this grows with it
        return state
    rest = {key: tensor for key, tensor in state.items() if key != source}
    return rest | {layout.lm_head.format(h=h): state[source] for h in range(1 + max(numbers, default=0))}


def _with_biases(state: State, layout: Layout, config: Mapping[str, Any], notes: list[str]) -> State:
    """The state with biases of 0, where it has none; a note where vLLM drops those that it has."""
    found = [match for match in map(layout.block_pattern.fullmatch, state) if match]
    if any(match[3] == "bias" for match in found):
        if config.get("medusa_fc_bias") is not True:
            notes.append("vLLM drops the biases of these heads: medusa_fc_bias is not true in config.json")
        return state
    biases = {
        layout.block.format(h=match[1], l=match[2], part="bias"): state[match[0]].new_zeros(state[match[0]].shape[:1])
        for match in found
    }
    return state | biases


def _scaled(state: State, config: Mapping[str, Any], name: str) -> tuple[State, list[str]]:
    """The state with 8-bit weights multiplied by their scales, in the type of the other tensors."""
    quantised = {key for key, tensor in state.items() if tensor.dtype in _EIGHT_BITS}
    scales = {key for key in state if key.endswith(_SCALE)}
    if not quantised and not scales:
        return dict(state), []
    unused = sorted(key for key in scales if key.removesuffix(_SCALE) not in quantised and "input" not in key)
    lacking = sorted(key for key in quantised if key + _SCALE not in state)
    if unused or lacking:
        raise invalid(name, f"has weights that are not FP8 with a weight_scale: {listed(unused + lacking)}")
    plain = [tensor.dtype for key, tensor in state.items() if key not in quantised | scales]
    dtype = plain[0] if plain else _named_dtype(config)
    result = {key: tensor for key, tensor in state.items() if key not in scales}
    for key in quantised:
        scale = state[key + _SCALE].float()
        if scale.numel() not in (1, len(state[key])):
            raise invalid(name, f"has a {key + _SCALE} of {list(scale.shape)}, neither one value nor one for each row")
        result[key] = (state[key].float() * scale.reshape(-1, 1)).to(dtype)
    return result, [f"FP8 weights are multiplied by their scales, in {str(dtype).removeprefix('torch.')}"]


def _named_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The floating-point type in a config; bfloat16 where there is none."""
    names = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return names.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)
