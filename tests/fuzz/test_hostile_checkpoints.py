"""Checkpoints that were made to do harm: archives, indices that lead elsewhere, settings, code."""

from __future__ import annotations

import io
import json
import os
import pickle
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import hostile_seeds as seeds
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hostile_readers import READERS, folder_of
from looped import looped
from refusals import refusal_of
from tiny import tiny_base

from treeopt.errors import Code
from treeopt.models.adapters import CONFIG_FILE, read_adapter
from treeopt.models.checkpoint import check_files
from treeopt.models.config_shapes import config_shape
from treeopt.models.given import tokenizer_beside
from treeopt.models.head_files import load_heads
from treeopt.models.tensors import check_shards

pytestmark = pytest.mark.slow


@looped("dtype", [torch.uint64, torch.uint32, torch.uint16, torch.int8])
def test_token_map_of_any_whole_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """A token map is read by its numbers; torch has no minimum of unsigned types, and ids beyond int64 are refused."""
    state = {
        "blocks.0.layers.0.weight": torch.ones(seeds.HIDDEN, seeds.HIDDEN),
        "lm_head.weight": torch.ones(3, seeds.HIDDEN),
    }
    (tmp_path / "config.json").write_bytes(seeds.heads_configs()[1])
    for ids, right in (([0, 2, 5], True), ([0, 2, 7], False), ([0, 2, 2], False), ([2**64 - 1, 2, 5], False)):
        if max(ids) > 7 and dtype is not torch.uint64:
            continue
        found = state | {"token_map": torch.tensor(ids, dtype=dtype)}
        safetensors.torch.save_file(found, tmp_path / "medusa_lm_head.safetensors")
        if right:
            kept = load_heads(tmp_path).heads.token_map
            assert kept is not None
            assert kept.tolist() == ids
        else:
            assert "distinct token ids" in refusal_of(load_heads, tmp_path).what


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def test_zip_bombs(tmp_path: Path) -> None:
    """A .pt file whose members unpack to more than it has is refused before it is unpacked."""
    content = {"x/data.pkl": pickle.dumps({}, 2), "x/version": b"3\n", "x/data/0": bytes(50_000_000)}
    for name in ("medusa_lm_head.pt", "growmap.pt"):
        (tmp_path / name).write_bytes(zipped(content))
        assert (tmp_path / name).stat().st_size < 100_000
    tracemalloc.start()
    try:
        assert "unpacks to 50,0" in refusal_of(load_heads, tmp_path / "medusa_lm_head.pt").what
        (tmp_path / "growmap.pt").write_bytes(zipped(content | {"x/data/1": bytes(50_000_000)}))
        before = tracemalloc.get_traced_memory()[0]
        assert "at most 67,108,864 are read" in refusal_of(READERS["growmap (.pt)"].read, tmp_path / "growmap.pt").what
        assert tracemalloc.get_traced_memory()[1] - before < 150_000_000  # of making the file
    finally:
        tracemalloc.stop()


def test_zip_that_only_torch_reads(tmp_path: Path) -> None:
    """A compressed .pt file of an unknown version is unpacked by torch, and not by zipfile: it is refused unread."""
    stream = io.BytesIO()
    torch.save({"x": torch.zeros(1000)}, stream)
    with zipfile.ZipFile(stream) as archive:
        raw = bytearray(zipped({one.filename: archive.read(one) for one in archive.infolist()}))
    raw[raw.index(b"PK\x01\x02") + 6] = 99  # the version that is needed to unpack the first member
    assert len(torch.load(io.BytesIO(raw), weights_only=True)["x"]) == 1000
    for name in ("medusa_lm_head.pt", "growmap.pt"):
        (tmp_path / name).write_bytes(raw)
    assert "is damaged" in refusal_of(load_heads, tmp_path / "medusa_lm_head.pt").what
    assert "is damaged" in refusal_of(READERS["growmap (.pt)"].read, tmp_path / "growmap.pt").what


@looped(
    "tensor",
    [
        torch.zeros(1).expand(1 << 20, 1 << 20),
        torch.eye(4).to_sparse(),
        torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8),
        torch.empty(4, 4, device="meta"),
    ],
)
def test_tensors_that_are_no_arrays(tensor: torch.Tensor, tmp_path: Path) -> None:
    """Tensors of a few bytes that stand for terabytes, or that have no values in memory, are refused."""
    torch.save(seeds.heads_state() | {"0.0.linear.weight": tensor}, tmp_path / "medusa_lm_head.pt")
    error = refusal_of(load_heads, tmp_path)
    assert error.code in (Code.HEADS_INVALID, Code.FILE_INVALID, Code.PICKLE_REFUSED)
    assert len(str(error)) < 1000


def with_index(folder: Path, name: str) -> Path:
    """A folder whose index names one file."""
    folder.mkdir(parents=True, exist_ok=True)
    index = {"weight_map": dict.fromkeys(seeds.heads_state(), name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.quick
@looped("name", ["../../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "C:\\x", "..\\x"])
def test_index_outside_its_folder(name: str, tmp_path: Path) -> None:
    """An index of heads, of a model or of a draft model names files of its folder alone."""
    assert "not in its folder" in refusal_of(load_heads, with_index(tmp_path, name)).what
    assert "not in its folder" in refusal_of(check_files, "m", tmp_path).what


@pytest.mark.quick
@looped("name", ["a\0b.safetensors", "\ud800.safetensors", "x" * 500 + ".safetensors"])
def test_index_of_odd_names(name: str, tmp_path: Path) -> None:
    """Names that no file can have are one error."""
    assert refusal_of(load_heads, with_index(tmp_path, name)).code in (Code.FILE_INVALID, Code.FILE_MISSING)


def test_links_of_an_index_stay_in_its_folder(tmp_path: Path) -> None:
    """A link out of the folder is refused; links in it and in the cache of the hub are followed."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "w.safetensors").write_bytes(seeds.heads()[0])
    folder = with_index(tmp_path / "in", "part.safetensors")
    (folder / "part.safetensors").symlink_to(elsewhere / "w.safetensors")
    for load in (load_heads, check_shards):
        assert "a link to another folder" in refusal_of(load, folder).what
    with_index(folder, "sub/w.safetensors")
    (folder / "sub").symlink_to(elsewhere)
    assert "a link to another folder" in refusal_of(load_heads, folder).what
    (folder / "sub").unlink()
    (folder / "part.safetensors").unlink()
    (folder / "blob").write_bytes(seeds.heads()[0])
    with_index(folder, "part.safetensors")
    (folder / "part.safetensors").symlink_to("blob")
    assert load_heads(folder).heads.num_heads == 2
    snapshot = with_index(tmp_path / "models--a--b" / "snapshots" / "0123", "part.safetensors")
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (tmp_path / "models--a--b" / "blobs" / "9f").write_bytes(seeds.heads()[0])
    (snapshot / "part.safetensors").symlink_to("../../blobs/9f")
    assert load_heads(snapshot).heads.num_heads == 2
    (tmp_path / "linked").symlink_to(folder)
    assert load_heads(tmp_path / "linked").heads.num_heads == 2


def test_index_of_a_pipe(tmp_path: Path) -> None:
    """A pipe in place of a shard is refused, and nobody waits for it."""
    os.mkfifo(with_index(tmp_path, "part.safetensors") / "part.safetensors")
    assert "is not a file" in refusal_of(load_heads, tmp_path).what


@looped("name", ["../x", "/etc/passwd", "a/b", ""])
def test_marks_name_files_of_their_checkpoint(name: str, tmp_path: Path) -> None:
    """The mark of a checkpoint names files beside it."""
    reader = READERS["mark of a checkpoint"]
    path = folder_of("mark of a checkpoint", tmp_path) / reader.file
    [valid] = map(json.loads, seeds.marks())
    path.write_text(json.dumps(valid | {"files": {name: "0" * 64}}))
    assert "is not what treeopt wrote" in refusal_of(reader.read, path).what


@pytest.mark.quick
@looped(
    "changes",
    [
        {"megatron_config": {"a": 1}, "megatron_core": "megatron.core"},
        {"target_modules": "(a+)+$"},
        {"r": 10**9},
        {"r": 3},
        {"modules_to_save": ["lm_head"]},
        {"layer_replication": [[0, 10**6]]},
        {"corda_config": {"cache_file": "/etc/passwd"}},
        {"rank_pattern": {"(a+)+$": 10**9}},
        {"init_lora_weights": "pissa"},
        {"later": {"x": 1}},
    ],
)
def test_settings_of_adapters(changes: dict[str, Any], tmp_path: Path) -> None:
    """Settings of peft that import modules, read files or take memory are refused; so is another rank."""
    reader = READERS["adapter's config"]
    path = folder_of("adapter's config", tmp_path) / CONFIG_FILE
    for config in (changes, {}):
        path.write_text(json.dumps(json.loads(seeds.adapter_configs()[0]) | config))
        reader.before(path)
        if config:
            assert refusal_of(read_adapter, path.parent).code is Code.FILE_INVALID
    assert read_adapter(path.parent).heads_id == "h1"


def test_code_beside_a_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that needs code of its folder is not loaded, nobody is asked, and the code is not run."""
    tiny_base("llama").model.save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass Tok: pass\n")
    auto = {"AutoTokenizer": ["evil.Tok", None], "AutoConfig": "evil.Tok", "AutoModelForCausalLM": "evil.Tok"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Tok", "auto_map": auto}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "evil", "auto_map": auto}))

    def asked(*_given: Any) -> str:
        raise AssertionError("the user is asked whether to run code")

    monkeypatch.setattr("builtins.input", asked)
    assert tokenizer_beside(str(tmp_path)) is None
    assert refusal_of(READERS["tokenizer"].read, tmp_path / "x").code is Code.MODEL_INVALID
    assert refusal_of(config_shape, tmp_path / "config.json", "m").code is Code.PLAN_INVALID
    assert not (tmp_path / "ran").exists()


@looped("kind", ["qwen2", "gemma2", "llama"])
def test_layers_are_counted_before_a_config_is_made(kind: str, tmp_path: Path) -> None:
    """Some configs make a list of as many entries as layers: the number is checked before."""
    config = {"model_type": kind, "num_hidden_layers": 10**15, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "num_hidden_layers" in refusal_of(config_shape, tmp_path / "config.json", "m").why
    assert "layers, more than 100,000" in refusal_of(check_files, "m", tmp_path).what
