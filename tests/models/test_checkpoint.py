"""Checks of models' folders before loading, by hand-made files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from treeopt.errors import Code, TreeoptError
from treeopt.models import checkpoint
from treeopt.models.checkpoint import check_size
from treeopt.models.head_layouts import _scaled

# Two embeddings of 6 x 4; in each of two layers 4 matrices of 4 x 4, 3 of 4 x 8 and 2 norms of 4; the last norm.
WEIGHTS = 2 * 24 + 2 * (64 + 96 + 8) + 4


def folder_of(place: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    """A folder with the config of a small Llama, and these tensors."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 6, "hidden_size": 4,
        "num_attention_heads": 1, "intermediate_size": 8, "num_hidden_layers": 2, "tie_word_embeddings": False,
        **changes,
    }  # fmt: skip
    (place / "config.json").write_text(json.dumps(config))
    save_file(tensors, place / "model.safetensors")
    return place


def refused(place: Path) -> str:
    """Why the folder is not loaded."""
    with pytest.raises(TreeoptError) as caught:
        check_size("m", place)
    assert caught.value.code is Code.MODEL_INVALID
    return caught.value.what


def some(count: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """So many stored tensors of two numbers."""
    return {f"t{i}": torch.zeros(2, dtype=dtype) for i in range(count)}


def test_layers_are_at_most_the_stored_tensors(tmp_path: Path) -> None:
    """Two layers in two tensors may be; three are refused, and so are more than 100,000."""
    check_size("m", folder_of(tmp_path, some(2)))
    assert "describes 3 layers, which its files cannot hold" in refused(
        folder_of(tmp_path, some(2), num_hidden_layers=3)
    )
    check_size("m", folder_of(tmp_path, some(3), num_hidden_layers=3))
    assert "describes 100001 layers, more than 100,000" in refused(
        folder_of(tmp_path, some(2), num_hidden_layers=100_001)
    )


def test_weights_are_at_most_those_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight a byte, or few; a folder without files is not checked."""
    place = folder_of(tmp_path, some(2))
    size = (place / "model.safetensors").stat().st_size
    for small, a_byte in ((WEIGHTS, 0), (0, WEIGHTS / size)):
        monkeypatch.setattr(checkpoint, "_SMALL", small)
        monkeypatch.setattr(checkpoint, "_WEIGHTS_A_BYTE", a_byte)
        check_size("m", place)
    monkeypatch.setattr(checkpoint, "_WEIGHTS_A_BYTE", (WEIGHTS - 1) / size)
    monkeypatch.setattr(checkpoint, "_SMALL", WEIGHTS - 1)
    assert f"describes {WEIGHTS} weights, and the files hold {size:,} bytes" in refused(place)
    (place / "model.safetensors").unlink()
    check_size("m", place)


def test_weights_stored_as_integers_need_a_quantisation(tmp_path: Path) -> None:
    """A tensor of the model in another type than floating point."""
    stored = {"model.norm.weight": torch.zeros(4, dtype=torch.int8), **some(2)}
    said = "names no quantisation of transformers, and model.norm.weight is stored as"
    assert f"{said} I8" in refused(folder_of(tmp_path, stored))
    scaled = {"model.norm.weight": torch.zeros(4, dtype=torch.float8_e4m3fn), "model.norm.weight_scale": torch.ones(1)}
    for named in ({}, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}):
        assert f"{said} F8_E4M3 with a scale" in refused(folder_of(tmp_path, scaled, **named))
    check_size("m", folder_of(tmp_path, scaled, quantization_config={"quant_method": "fp8"}))
    check_size("m", folder_of(tmp_path, {"model.norm.weight": torch.zeros(4, dtype=torch.bfloat16), **some(2)}))
    check_size("m", folder_of(tmp_path, {"unknown": torch.zeros(4, dtype=torch.int8), **some(2)}))


def test_eight_bits_by_hand() -> None:
    """Rows times their scales, in the type of the other tensors; weights and scales belong together."""
    eight = torch.tensor([[1.0, 2.0], [4.0, 0.5]]).to(torch.float8_e4m3fn)
    plain = {"a.bias": torch.zeros(2, dtype=torch.float16)}
    assert _scaled(plain, {}, "m") == (plain, [])
    for scale, wanted in ((torch.tensor([2.0, 0.5]), [[2, 4], [2, 0.25]]), (torch.tensor(3.0), [[3, 6], [12, 1.5]])):
        state, notes = _scaled({**plain, "a.weight": eight, "a.weight_scale": scale}, {}, "m")
        assert list(state) == ["a.bias", "a.weight"]
        assert (state["a.weight"].dtype, state["a.weight"].tolist()) == (torch.float16, wanted)
        assert notes == ["FP8 weights are multiplied by their scales, in float16"]
    alone = {"a.weight": eight, "a.weight_scale": torch.tensor(1.0)}
    for config, dtype in (
        ({}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"torch_dtype": "float16"}, torch.float16),
    ):
        assert _scaled(alone, config, "m")[0]["a.weight"].dtype is dtype
    for state in (
        {"a.weight": eight},
        {"a.weight": eight.float(), "a.weight_scale": torch.tensor(1.0)},
        {"a.weight": eight, "a.weight_scale": torch.ones(3)},
    ):
        with pytest.raises(TreeoptError):
            _scaled(state, {}, "m")
    assert "a.input_scale" not in _scaled({**alone, "a.input_scale": torch.tensor(1.0)}, {}, "m")[0]
