"""Adapters: merged weights against the definition, untied LM heads, and every mismatch or damage as one error."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from runs import noise
from tiny import VOCAB, random_heads, tiny_base
from torch import Tensor
from transformers import AutoModelForCausalLM

from treeopt.errors import Code, TreeoptError
from treeopt.models.adapters import read_adapter
from treeopt.models.base import Base, load_base
from treeopt.models.given import load_pair
from treeopt.models.head_files import save_heads
from treeopt.models.tensors import fingerprint, fingerprints
from treeopt.train.medusa2 import train_jointly
from treeopt.train.settings import JointSettings

FAST = JointSettings(num_heads=2, steps=3, batch_size=2, rank=4, alpha=12.0, learning_rate=3e-2, warmup=0.0)
IDS = torch.arange(20)[None]
FAMILIES = {"llama": True, "gpt2": True, "qwen2-mixed": False}  # name -> whether the LM head is the embedding


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """An architecture."""
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, and heads and adapter trained on it in `run`."""
    place = tmp_path_factory.mktemp(family)
    tiny_base(family, tie_word_embeddings=FAMILIES[family]).model.save_pretrained(place / "base")
    train_jointly(load_base(place / "base"), noise(20), place / "run", FAST)
    return place


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a tied llama."""
    place = tmp_path_factory.mktemp("trained")
    tiny_base("llama", tie_word_embeddings=True).model.save_pretrained(place / "base")
    train_jointly(load_base(place / "base"), noise(20), place / "run", FAST)
    return place


@pytest.fixture
def llama(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(trained, tmp_path, dirs_exist_ok=True)


def logits(model: Any) -> Tensor:
    """Logits of a model of transformers."""
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def test_merged_weights_are_base_plus_scaled_product(folder: Path, family: str) -> None:
    """Every linear weight is W + alpha / rank * B A, by hand from the file; all other tensors are the base's."""
    base, merged = load_base(folder / "base"), load_base(folder / "base", adapter=folder / "run" / "adapter")
    factors = safetensors.torch.load_file(folder / "run" / "adapter" / "adapter_model.safetensors")
    expected = {name: tensor.clone() for name, tensor in base.model.state_dict().items()}
    layers = {key.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for key in factors}
    for layer in layers:
        a, b = (factors[f"base_model.model.{layer}.lora_{half}.weight"] for half in "AB")
        update = 12.0 / 4 * (b @ a)
        expected[f"{layer}.weight"] += update.T if family == "gpt2" and layer != "lm_head" else update
    found = merged.model.state_dict()
    assert found.keys() == expected.keys()
    assert len(layers) == (9 if family == "gpt2" else 1 + 7 * merged.layers)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(tensor, base.model.state_dict()[name]) == (name.removesuffix(".weight") not in layers)
    assert not hasattr(merged.model, "peft_config")
    assert not any("lora" in name for name, _ in merged.model.named_modules())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing|fan_in_fan_out")
def test_merged_model_is_base_and_adapter_of_peft(folder: Path) -> None:
    """Logits equal those of peft's own model, loaded by stock peft from the adapter's folder."""
    from peft import PeftModel

    stock = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    head, embedding = stock.get_output_embeddings(), stock.get_input_embeddings()
    head.weight = torch.nn.Parameter(
        embedding.weight.detach().clone() if head.weight is embedding.weight else head.weight
    )
    stock.config.tie_word_embeddings = False
    joined = PeftModel.from_pretrained(stock, folder / "run" / "adapter").eval()
    merged = load_base(folder / "base", adapter=folder / "run" / "adapter")
    torch.testing.assert_close(logits(merged.model), logits(joined), rtol=1e-4, atol=1e-4)
    assert (logits(merged.model) - logits(load_base(folder / "base").model)).abs().max() > 0.05


def test_embedding_of_a_tied_base_stays(folder: Path, family: str) -> None:
    """The adapter of a tied LM head does not change the embedding, and the merged model is untied."""
    base, merged = load_base(folder / "base"), load_base(folder / "base", adapter=folder / "run" / "adapter")
    assert (base.lm_head.weight is base.model.get_input_embeddings().weight) == FAMILIES[family]
    assert torch.equal(merged.model.get_input_embeddings().weight, base.model.get_input_embeddings().weight)
    assert not torch.equal(merged.lm_head.weight, base.lm_head.weight)
    assert not merged.model.config.tie_word_embeddings
    assert merged.fingerprint != base.fingerprint
    assert merged.versions()["adapter"] == str(folder / "run" / "adapter")
    assert "adapter" not in base.versions()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing|fan_in_fan_out")
def test_lines_of_the_docs_make_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    """The lines of docs/training.md, pasted: `load_base` of the new folder is the base with its adapter."""
    said = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (code,) = re.findall(r"```python\n(  from peft import.*?)```", said, re.DOTALL)
    lines = [line for line in textwrap.dedent(code).splitlines() if "AutoTokenizer.from" not in line]  # it has none
    names = {"MODEL": folder / "base", "DIR": tmp_path / "merged"}
    exec("\n".join(lines).replace("JOINT", str(folder / "run")), names)
    merged = load_base(folder / "base", adapter=folder / "run" / "adapter")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(stock.eval()), logits(merged.model))
    texts = [model.generate(IDS, max_new_tokens=20, do_sample=False) for model in (stock, merged.model)]
    assert torch.equal(*texts)
    assert not stock.config.tie_word_embeddings
    assert load_base(tmp_path / "merged").fingerprint == merged.fingerprint


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_adapter_in_another_precision(llama: Path, dtype: str) -> None:
    """An adapter trained in float32 is merged into the same base loaded in half precision, up to its rounding."""
    half = load_base(llama / "base", dtype=dtype, device="cpu", adapter=llama / "run" / "adapter")
    whole = load_base(llama / "base", adapter=llama / "run" / "adapter")
    assert half.dtype_name == dtype
    exact = whole.lm_head.weight
    assert ((half.lm_head.weight.float() - exact).abs() <= 2**-7 * exact.abs() + 1e-2).all()


def test_fingerprints_by_precision() -> None:
    """A model rounded to a precision has the fingerprint of that precision; the plain one is that of float32."""
    base = tiny_base("llama")
    known = fingerprints(base.model)
    assert known["float32"] == fingerprint(base.model)
    assert len(set(known.values())) == 3
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        assert fingerprint(tiny_base("llama").model.to(dtype)) == known[name]


def refused(run: Callable[[], Any], code: Code) -> TreeoptError:
    """The error that a call raises."""
    with pytest.raises(TreeoptError) as caught:
        run()
    assert caught.value.code is code
    return caught.value


def test_adapter_of_another_base(llama: Path) -> None:
    """A base of the same architecture with other weights is refused, with both fingerprints."""
    tiny_base("llama", seed=1, tie_word_embeddings=True).model.save_pretrained(llama / "other")
    error = refused(lambda: load_base(llama / "other", adapter=llama / "run" / "adapter"), Code.ADAPTER_MISMATCH)
    assert load_base(llama / "base").fingerprint in error.at
    assert load_base(llama / "other").fingerprint in error.at


def test_adapter_with_its_heads(llama: Path) -> None:
    """`load_pair` takes the adapter with its own heads, refuses it with other ones, and warns where it is left out."""
    adapter = str(llama / "run" / "adapter")
    base, loaded = load_pair(str(llama / "run"), None, adapter=adapter)
    assert base.adapter is not None
    assert base.adapter.heads_id == loaded.fingerprint
    assert base.notes == ()
    alone, _ = load_pair(str(llama / "run"), None)
    assert ["--adapter" in note for note in alone.notes] == [True]
    base.model.save_pretrained(llama / "merged")
    assert load_pair(str(llama / "run"), str(llama / "merged"))[0].notes == ()
    save_heads(random_heads(alone, 2), llama / "heads", base=str(llama / "base"))
    assert load_pair(str(llama / "heads"), None)[0].notes == ()
    refused(lambda: load_pair(str(llama / "heads"), None, adapter=adapter), Code.ADAPTER_MISMATCH)


def test_missing_files(llama: Path) -> None:
    """Nothing there, the folder of the heads (the fix names the right one), and a file that is missing."""
    refused(lambda: load_base(llama / "base", adapter=llama / "none"), Code.FILE_MISSING)
    error = refused(lambda: load_base(llama / "base", adapter=llama / "run"), Code.FILE_MISSING)
    assert error.fix == f"--adapter {llama / 'run' / 'adapter'}"
    for name in ("adapter_model.safetensors", "treeopt.json", "adapter_config.json"):
        shutil.copytree(llama / "run" / "adapter", llama / name)
        (llama / name / name).unlink()
        error = refused(lambda name=name: load_base(llama / "base", adapter=llama / name), Code.FILE_MISSING)
        assert name in error.what + error.at


def test_damaged_files(llama: Path) -> None:
    """A damaged file, one of another method, or a config with another scale is E203."""
    scaled = json.loads((llama / "run" / "adapter" / "adapter_config.json").read_text()) | {"lora_alpha": 5000}
    cases = (
        ("treeopt.json", "{"),
        ("treeopt.json", "{}"),
        ("treeopt.json", '{"base": {"float32": 1}, "heads": "a", "model": "b", "sha256": "c"}'),
        ("adapter_config.json", "[]"),
        ("adapter_config.json", '{"peft_type": "IA3"}'),
        ("adapter_config.json", '{"peft_type": "LORA", "r": "four", "target_modules": 3}'),
        ("adapter_config.json", json.dumps(scaled, indent=1, sort_keys=True) + "\n"),
        ("adapter_model.safetensors", "damaged"),
    )
    for name, content in cases:
        file = llama / "run" / "adapter" / name
        whole = file.read_bytes()
        file.write_text(content)
        refused(lambda: load_base(llama / "base", adapter=llama / "run" / "adapter"), Code.FILE_INVALID)
        file.write_bytes(whole)
    assert load_base(llama / "base", adapter=llama / "run" / "adapter").adapter is not None


def test_weights_of_another_run(llama: Path) -> None:
    """Weights that are whole but not those that the note was written with are refused."""
    path = llama / "run" / "adapter" / "adapter_model.safetensors"
    weights = safetensors.torch.load_file(path)
    safetensors.torch.save_file({name: tensor + 1 for name, tensor in weights.items()}, path)
    refused(lambda: read_adapter(llama / "run" / "adapter"), Code.FILE_INVALID)


def test_missing_peft(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without peft an adapter is E401 with the command that installs it."""
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    error = refused(lambda: load_base(llama / "base", adapter=llama / "run" / "adapter"), Code.PROGRAM_MISSING)
    assert (error.fix, error.exit_status) == ("pip install peft", 4)


def test_not_into_four_bits(llama: Path) -> None:
    """A quantised base cannot hold merged weights."""
    with pytest.raises(ValueError, match="4 bits"):
        load_base(llama / "base", load_in_4bit=True, adapter=llama / "run" / "adapter")


def test_note_has_the_ids(trained: Path) -> None:
    """The note has the base's fingerprints and that of the heads in the file; peft's config names rank and layers."""
    note = json.loads((trained / "run" / "adapter" / "treeopt.json").read_text())
    base: Base = load_base(trained / "base")
    assert note["base"] == fingerprints(base.model)
    assert note["heads"] == load_pair(str(trained / "run"), None)[1].fingerprint
    config = json.loads((trained / "run" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"], config["bias"]) == (4, 12.0, 0.05, "none")
    assert config["base_model_name_or_path"] == str(trained / "base")
    assert len(config["target_modules"]) == 15
    assert base.vocab_size == VOCAB
