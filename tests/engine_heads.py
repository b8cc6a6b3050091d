"""Readers of heads, each as its engine reads them, written from the description of the formats; none of treeopt.

Each returns the block weights and biases [head][block], the LM head of each head, and the tokens of its rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

Blocks = list[list[tuple[Tensor, Tensor | None]]]


@dataclass
class EngineHeads:
    """What an engine has after loading; `lm_heads` None: it uses that of the base model."""

    blocks: Blocks
    lm_heads: list[Tensor] | None
    tokens: list[int] | None = None
    vocab_size: int | None = None


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def read_medusa(folder: Path) -> EngineHeads:
    """The original code: v1 from the pickle, v2 from safetensors; numbers of heads and blocks from the config."""
    config = config_of(folder)
    if str(config.get("version", "1")) == "2":
        state = safetensors.torch.load_file(folder / "medusa_lm_head.safetensors")
    else:
        state = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    heads, blocks = config["medusa_num_heads"], config["medusa_num_layers"]
    return sequential(state, heads, blocks, own=str(config.get("version", "1")) != "2")


def read_tgi(folder: Path) -> EngineHeads:
    """TGI: safetensors alone; v1 is tried first, v2 needs one block; a config with architectures is not speculative."""
    config = config_of(folder)
    assert "architectures" not in config
    assert config["base_model_name_or_path"]
    state = safetensors.torch.load_file(folder / "medusa_lm_head.safetensors")
    heads, blocks = config["medusa_num_heads"], config["medusa_num_layers"]
    try:
        return sequential(state, heads, blocks, own=True)
    except KeyError:
        assert blocks == 1
        return sequential(state, heads, 1, own=False)


def sequential(state: dict[str, Tensor], heads: int, blocks: int, *, own: bool, prefix: str = "{h}.") -> EngineHeads:
    made: Blocks = []
    lm_heads = []
    for h in range(heads):
        name = prefix.format(h=h)
        made.append([(state[f"{name}{b}.linear.weight"], state[f"{name}{b}.linear.bias"]) for b in range(blocks)])
        if own:
            lm_heads.append(state[f"{name}{blocks}.weight"])
    return EngineHeads(made, lm_heads if own else None)


def read_vllm(folder: Path) -> EngineHeads:
    """vLLM: any "num..heads" of the config is the number of heads; names that are not known are skipped."""
    config: dict[str, Any] = {"hidden_size": 4096, "vocab_size": 32001, "num_heads": 5, "num_hidden_layers": 1}
    for key, value in config_of(folder).items():
        name = key
        if "num" in key and "heads" in key:
            name = "num_heads"
        elif "num" in key and "layers" in key:
            name = "num_hidden_layers"
        config[name] = value
    assert config["model_type"] == "medusa"
    state = {
        key.replace("medusa_heads.", ""): tensor
        for key, tensor in safetensors.torch.load_file(folder / "model.safetensors").items()
    }
    heads, bias = range(config["num_heads"]), config.get("medusa_fc_bias", False)
    truncated = config.get("truncated_vocab_size") or config["vocab_size"]
    tokens = state["token_map"] if truncated < config["vocab_size"] else None
    made: Blocks = []
    for h in heads:
        names = [f"blocks.{h}.layers.{b}" for b in range(config["num_hidden_layers"])]
        made.append([(state[f"{n}.weight"], state[f"{n}.bias"] if bias else None) for n in names])
    if config.get("original_lm_head", False):
        one = state["lm_head.weight"] if "lm_head.weight" in state else state["lm_heads.0.weight"]
        lm_heads = [one for _ in heads]
    else:
        lm_heads = [state[f"lm_heads.{h}.weight"] for h in heads]
    if tokens is not None:
        lm_heads = [one[tokens] if len(one) > len(tokens) else one for one in lm_heads]
    assert all(one.shape == (truncated, config["hidden_size"]) for one in lm_heads)
    return EngineHeads(made, lm_heads, None if tokens is None else tokens.tolist(), config["vocab_size"])


def read_nxdi(folder: Path) -> EngineHeads:
    """NxD Inference: a pickle in the folder of the base, one block; the number of heads is an option of the server."""
    state = torch.load(folder / "medusa_heads.pt", weights_only=True)
    heads = 0
    while f"medusa_head_{heads}.1.weight" in state:
        heads += 1
    assert len(state) == 3 * heads
    return sequential(state, heads, 1, own=True, prefix="medusa_head_{h}.")


READERS: dict[str, Callable[[Path], EngineHeads]] = {
    "medusa": read_medusa,
    "tgi": read_tgi,
    "vllm": read_vllm,
    "nxdi": read_nxdi,
}


def logits(read: EngineHeads, hidden: Tensor, base_lm_head: Tensor) -> Tensor:
    """float64 [H, n, V] of the heads, one vector after another."""
    found = []
    for h, blocks in enumerate(read.blocks):
        x = hidden.double()
        for weight, bias in blocks:
            y = x @ weight.double().T + (0 if bias is None else bias.double())
            x = x + y * torch.sigmoid(y)
        rows = x @ (base_lm_head if read.lm_heads is None else read.lm_heads[h]).double().T
        if read.tokens is not None:
            assert read.vocab_size is not None
            full = torch.full((len(x), read.vocab_size), -torch.inf, dtype=torch.float64)
            for column, token in enumerate(read.tokens):
                full[:, token] = rows[:, column]
            rows = full
        found.append(rows)
    return torch.stack(found)
