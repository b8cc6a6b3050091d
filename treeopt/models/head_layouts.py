"""The layouts of heads checkpoints: the names of the tensors in the files of each program that writes or reads heads.

    layout    block l of head h                        LM head of head h
    medusa    {h}.{l}.linear.{weight,bias}             {h}.{L}.weight
    full      medusa_head.{h}.{l}.linear...            medusa_head.{h}.{L}.weight        beside the backbone
    modelopt  medusa_heads.{h}.{l}.linear...           medusa_heads.{h}.{L}.weight       beside the backbone
    vllm      blocks.{h}.layers.{l}.{weight,bias}      lm_heads.{h}.weight, or lm_head.weight for all heads
    nxdi      medusa_head_{h}.{l}.linear...            medusa_head_{h}.{L}.weight

Heads and blocks count from 0, and L is the number of blocks. Block weights are [d, d], biases [d], LM heads [V, d]. TGI
reads `medusa`. A layout is recognised by its names, because published configs are wrong about heads.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import DTYPES
from treeopt.models.heads import MedusaHeads
from treeopt.models.tensors import State, invalid, listed, misfit

Place: TypeAlias = tuple[str, str, tuple[int, ...]]  # name of a tensor; attribute of the heads, and index in it

_DIGITS = "([0-9]{1,9})"
_SCALE = "_scale"  # of a weight: weight_scale
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class HeadsLayout:
    """The names of the tensors of heads."""

    title: str  # for users
    block: str  # template of the name of a block's tensor, with {h}, {l} and {part}
    lm_head: str  # of an LM head, with {h} and, where it is counted like a block, {blocks}
    prefix: str = ""  # of every name; other tensors of the checkpoint are those of its base model
    other: tuple[str, ...] = ()  # further names of the layout

    @functools.cached_property
    def block_pattern(self) -> re.Pattern[str]:
        """Groups: head, block, weight or bias."""
        return _pattern(self.block)

    @functools.cached_property
    def lm_head_pattern(self) -> re.Pattern[str]:
        """Groups: head and, where the template has one, the number of blocks."""
        return _pattern(self.lm_head)

    def fits(self, key: str) -> bool:
        """Whether a tensor of this name belongs to the heads."""
        return bool(self.block_pattern.fullmatch(key) or self.lm_head_pattern.fullmatch(key)) or key in self.other


def _pattern(template: str) -> re.Pattern[str]:
    parts = {"h": _DIGITS, "l": _DIGITS, "blocks": _DIGITS, "part": "(weight|bias)"}
    pieces = re.split(r"\{(\w+)\}", template)
    return re.compile("".join(parts[piece] if i % 2 else re.escape(piece) for i, piece in enumerate(pieces)))


def _prefixed(layout: HeadsLayout, prefix: str, title: str) -> HeadsLayout:
    other = tuple(prefix + key for key in layout.other)
    return HeadsLayout(title, prefix + layout.block, prefix + layout.lm_head, prefix, other)


MEDUSA = HeadsLayout("Medusa", "{h}.{l}.linear.{part}", "{h}.{blocks}.weight")
FULL = _prefixed(MEDUSA, "medusa_head.", "Medusa v1.0, with its base model")
MODELOPT = _prefixed(MEDUSA, "medusa_heads.", "ModelOpt, with its base model")
NXDI = _prefixed(MEDUSA, "medusa_head_", "AWS NxD Inference")
VLLM = HeadsLayout("vLLM", "blocks.{h}.layers.{l}.{part}", "lm_heads.{h}.weight", other=("lm_head.weight", "token_map"))
VLLM_PREFIXED = _prefixed(VLLM, "medusa_heads.", "vLLM")
LAYOUTS = (MEDUSA, NXDI, FULL, VLLM_PREFIXED, MODELOPT, VLLM)

# Names in checkpoints of other kinds, the first that fits: what they are, and what to do.
_DRAFTERS = (
    r"hydra_(mlp|lm_head)\.|(.*\.)?(mtp(_layers)?|eh_proj|enorm|hnorm|shared_head|pre_projection)\.|(fusion_)?fc\.|"
    r"(logit_head\.)?(markov_head|confidence_head)\.|prefix_gru\.|mask_hidden$|"
    r"(hidden_norm|encoder\.output_norm_enc|midlayer|layers\.0\.hidden_norm)\."
)
_NOT_YET = "--draft reads EAGLE heads, --draft mtp an MTP layer; others cannot be read yet (--drafter ngram needs none)"
_FOREIGN = (
    (r"medusa_heads\.\d+\.(medusa_layers|lm_head)\.", "a checkpoint of TensorRT-LLM", "use the original heads"),
    (_DRAFTERS, "a drafter of another kind, such as EAGLE, MTP, Hydra or DFlash", _NOT_YET),
    (r"(model|transformer|gpt_neox)\.", "a base model without Medusa heads", "name the folder of the heads"),
    (r"layers\.0\.", "perhaps an EAGLE draft model", _NOT_YET),
)


def detect(keys: Iterable[str], name: str) -> HeadsLayout:
    """The layout of a checkpoint, by the names of its tensors."""
    known = sorted(keys)
    for layout in LAYOUTS:
        if any(layout.block_pattern.fullmatch(key) or layout.lm_head_pattern.fullmatch(key) for key in known):
            return layout
    for pattern, kind, fix in _FOREIGN:
        if any(re.match(pattern, key) for key in known):
            raise TreeoptError(Code.HEADS_INVALID, f"{name} is {kind}", fix=fix)
    raise invalid(name, f"has keys of another layout: {listed(known) or 'no tensors'}")


def places(num_heads: int, blocks: int, has_lm_head: bool, layout: HeadsLayout = MEDUSA) -> Iterator[Place]:
    """The tensors of heads by their names in a layout."""
    for block in range(blocks):
        for h in range(num_heads):
            for part in ("weight", "bias"):
                yield layout.block.format(h=h, l=block, part=part), part, (block, h)
    for h in range(num_heads if has_lm_head else 0):
        yield layout.lm_head.format(h=h, blocks=blocks), "lm_head", (h,)


def heads_of(state: State, layout: HeadsLayout, config: Mapping[str, Any], name: str) -> tuple[MedusaHeads, list[str]]:
    """Heads from the tensors and the config of a checkpoint, and warnings for the user.

    Checkpoints may leave out biases, have one LM head for all heads, a token map, or 8-bit weights.

    Raises:
        TreeoptError: E211 where names, shapes, a token map or a scale do not fit, E504 where values are not finite.
    """
    state, notes = _scaled(state, config, name)
    if layout.title != VLLM.title:
        return from_state(state, name, layout), notes
    token_map = state.pop(f"{layout.prefix}token_map", None)
    state = _with_biases(_with_lm_heads(state, layout, config, notes), layout, config, notes)
    vocab_size = config.get("vocab_size")
    if token_map is not None and config.get("truncated_vocab_size", vocab_size) == vocab_size:
        notes.append("token_map is not used: truncated_vocab_size is vocab_size in config.json, or absent")
        token_map = None
    if token_map is None:
        return from_state(state, name, layout), notes
    if type(vocab_size) is not int:
        raise invalid(name, "has a token_map, and its config.json has no vocab_size")
    _check_token_map(token_map, vocab_size, name)
    for key, tensor in state.items():
        if layout.lm_head_pattern.fullmatch(key) and tensor.ndim == 2:
            # vLLM takes the rows of the map where the checkpoint has those of all tokens.
            state[key] = tensor[token_map.long()] if len(tensor) == vocab_size else tensor
            if len(state[key]) != len(token_map):
                raise invalid(name, f"has {len(tensor)} rows in {key} and {len(token_map)} tokens in its token_map")
    return from_state(state, name, layout, token_map=token_map.long(), vocab_size=vocab_size), notes


def from_state(
    state: State,
    name: str,
    layout: HeadsLayout = MEDUSA,
    *,
    token_map: Tensor | None = None,
    vocab_size: int | None = None,
) -> MedusaHeads:
    """Heads from tensors in a layout, all blocks with biases; E211 names the keys or shapes that do not fit."""
    blocks_of = [match for match in map(layout.block_pattern.fullmatch, state) if match]
    heads_of = [match for match in map(layout.lm_head_pattern.fullmatch, state) if match]
    unknown = [key for key in state if not layout.fits(key)]
    if unknown or not state:
        raise invalid(name, f"has keys of another layout: {listed(unknown) or 'no tensors'}")
    num_heads = 1 + max((int(match[1]) for match in (*blocks_of, *heads_of)), default=0)
    blocks = max((1 + int(match[2]) for match in blocks_of), default=0)
    if max(num_heads, blocks) > len(state):  # checked first: the time of the rest grows with these numbers
        raise invalid(name, f"has a key of head {num_heads - 1} but {len(state)} tensors")
    parts = list(places(num_heads, blocks, bool(heads_of), layout))
    ordered = [key for kind in ("lm_head", "weight") for key, part, _ in parts if part == kind and key in state]
    sizes = tuple(state[ordered[0]].shape) if ordered else ()
    sizes = sizes or (0,)
    hidden = sizes[-1]
    shapes = {"weight": (hidden, hidden), "bias": (hidden,), "lm_head": (sizes[0], hidden)}
    fault = misfit(state, {key: shapes[part] for key, part, _ in parts})
    if fault:
        raise invalid(name, f"has {num_heads} heads of {blocks} blocks but {fault}")
    _check_values(state, name)
    counts = {"weight": (blocks, num_heads), "bias": (blocks, num_heads), "lm_head": (num_heads,)}
    whole = {part: next(iter(state.values())).new_empty(counts[part] + shapes[part]) for part in shapes}
    for key, part, at in parts:
        whole[part][at] = state[key]
    lm_head = whole["lm_head"] if heads_of else None
    return MedusaHeads.from_tensors(whole["weight"], whole["bias"], lm_head, token_map, vocab_size)


def _check_values(state: State, name: str) -> None:
    kinds = {str(tensor.dtype) for tensor in state.values()}
    if len(kinds) > 1 or not next(iter(state.values())).is_floating_point():
        raise invalid(name, f"has tensors of {', '.join(sorted(kinds))}, not of one floating-point type")
    broken = next((key for key, tensor in state.items() if not torch.isfinite(tensor).all()), None)
    if broken is not None:
        what = f"the heads {name} have values in {broken} that are not finite"
        raise TreeoptError(Code.NOT_FINITE, what, why="their weights are damaged", fix="another copy of the heads")


def state_of(heads: MedusaHeads, layout: HeadsLayout = MEDUSA) -> State:
    """The tensors of heads by their names in a layout, without a token map: copies in the memory of the CPU."""
    blocks, num_heads = heads.bias.shape[:2]
    found = places(num_heads, blocks, heads.lm_head is not None, layout)
    state = {key: getattr(heads, part)[at] for key, part, at in found}
    # Views would be written with all of the memory that they share.
    return {key: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for key, tensor in state.items()}


def _check_token_map(token_map: Tensor, vocab_size: int, name: str) -> None:
    whole = not token_map.is_floating_point() and token_map.dtype != torch.bool and not token_map.is_complex()
    if not whole or token_map.ndim != 1 or not len(token_map):
        raise invalid(name, f"has a token_map of {token_map.dtype} {list(token_map.shape)}, not of token ids")
    ids = token_map.long()  # torch has no minimum of some unsigned types; those beyond int64 become negative
    if ids.min() < 0 or ids.max() >= vocab_size or len(set(ids.tolist())) < len(ids):
        raise invalid(name, f"has a token_map that is not of distinct token ids below {vocab_size}")


def _with_lm_heads(state: State, layout: HeadsLayout, config: Mapping[str, Any], notes: list[str]) -> State:
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


def _with_biases(state: State, layout: HeadsLayout, config: Mapping[str, Any], notes: list[str]) -> State:
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
    named = str(config.get("dtype") or config.get("torch_dtype"))
    dtype = plain[0] if plain else DTYPES.get(named, torch.bfloat16)
    result = {key: tensor for key, tensor in state.items() if key not in scales}
    for key in quantised:
        scale = state[key + _SCALE].float()
        if scale.numel() not in (1, len(state[key])):
            raise invalid(name, f"has a {key + _SCALE} of {list(scale.shape)}, neither one value nor one for each row")
        result[key] = (state[key].float() * scale.reshape(-1, 1)).to(dtype)
    return result, [f"FP8 weights are multiplied by their scales, in {str(dtype).removeprefix('torch.')}"]
