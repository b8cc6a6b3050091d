"""Writing heads: files that load as what they were, and nothing of somebody else's that they replace."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from head_states import HIDDEN, make_state
from looped import looped
from tiny import random_heads, tiny_base

from treeopt.errors import Code, TreeoptError
from treeopt.models.head_files import check_heads_writable, load_heads, save_heads
from treeopt.models.head_layouts import from_state, places
from treeopt.models.heads import MedusaHeads


def same(one: MedusaHeads, other: MedusaHeads) -> bool:
    """Whether two heads hold equal tensors of one dtype under the same names."""
    states = one.state_dict(), other.state_dict()
    if states[0].keys() != states[1].keys():
        return False
    return all(torch.equal(t, states[1][key]) and t.dtype == states[1][key].dtype for key, t in states[0].items())


@looped("dtype", [torch.float32, torch.bfloat16, torch.float16])
@looped(("blocks", "shared_head"), [(0, False), (1, False), (2, False), (1, True), (2, True)])
def test_save_heads_round_trip(tmp_path: Path, blocks: int, shared_head: bool, dtype: torch.dtype) -> None:
    """What is saved is loaded again: every tensor in its dtype, numbers of heads and blocks, the base's name."""
    heads = random_heads(tiny_base("llama"), 3, blocks=blocks, shared=shared_head).to(dtype)
    file = save_heads(heads, tmp_path / "heads", base="owner/base")
    assert file == tmp_path / "heads" / "medusa_lm_head.safetensors"
    loaded = load_heads(tmp_path / "heads")
    assert same(loaded.heads, heads)
    assert (loaded.base, loaded.notes) == ("owner/base", ())
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, blocks)
    assert config.get("version") == ("2" if shared_head else None)
    names = {name for name, *_ in places(3, blocks, not shared_head)}
    assert set(safetensors.torch.load_file(file)) == names


def test_save_heads_bytes_are_the_same(tmp_path: Path, shared: Path) -> None:
    """Published heads saved again hold the published tensors, and twice saved, the same bytes."""
    published = load_heads(shared / "models" / "tinystories-260k-medusa")
    files = [save_heads(published.heads, tmp_path / name, base="owner/base") for name in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()
    original, again = (safetensors.torch.load_file(file) for file in (published.file, files[0]))
    assert original.keys() == again.keys()
    assert all(torch.equal(original[key], again[key]) for key in original)


@looped("current", [".", "elsewhere", "~"])
def test_save_heads_base_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, current: str) -> None:
    """A base in a folder is named relative to the heads, so both can move together, whatever folder is current."""
    (tmp_path / "models" / "base").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / current.replace("~", "."))
    base = "~/models/base" if current == "~" else os.path.relpath(tmp_path / "models" / "base")
    save_heads(from_state(make_state(), "made"), tmp_path / "models" / "mine" / "heads", base=base)
    config = json.loads((tmp_path / "models" / "mine" / "heads" / "config.json").read_text())
    assert config["base_model_name_or_path"] == "../../base"
    (tmp_path / "models").rename(tmp_path / "moved")
    assert load_heads(tmp_path / "moved" / "mine" / "heads").base == str(tmp_path / "moved" / "base")


def test_save_heads_made_by(tmp_path: Path) -> None:
    """How heads were made stands under one key of the config; without it that key is absent."""
    heads = from_state(make_state(), "made")
    save_heads(heads, tmp_path / "with", base="owner/base", made_by={"method": "by hand"})
    save_heads(heads, tmp_path / "without", base="owner/base")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("with", "without")]
    assert configs[0].pop("treeopt") == {"method": "by hand"}
    assert configs[0] == configs[1]


def test_heads_of_some_tokens_are_refused(tmp_path: Path) -> None:
    """The original layout has no token map, and without it they would draft other tokens."""
    whole, tokens = random_heads(tiny_base("llama"), 2), torch.tensor([4, 2, 6])
    assert whole.lm_head is not None
    parts = whole.weight.detach(), whole.bias.detach(), whole.lm_head.detach()[:, tokens]
    with pytest.raises(TreeoptError, match="part of the tokens") as caught:
        save_heads(MedusaHeads.from_tensors(*parts, tokens, whole.vocab_size), tmp_path / "heads", base="b")
    assert caught.value.code is Code.HEADS_INVALID
    assert not (tmp_path / "heads").exists()


def test_save_heads_is_not_tied_to_the_module(tmp_path: Path) -> None:
    """Heads that train, and are views of others' memory, are saved as plain tensors."""
    whole = torch.randn(2, 3, HIDDEN, HIDDEN)
    heads = MedusaHeads.from_tensors(whole.transpose(2, 3), torch.randn(2, 3, HIDDEN), None)
    save_heads(heads, tmp_path, base="owner/base")
    assert same(load_heads(tmp_path).heads, heads)


def test_save_heads_refuses_to_overwrite(tmp_path: Path) -> None:
    """Heads that are there are replaced on demand alone; before, nothing changes."""
    one, other = (from_state(make_state(heads=heads), "made") for heads in (2, 3))
    save_heads(one, tmp_path, base="owner/one")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for refuse in (
        lambda: save_heads(other, tmp_path, base="owner/other"),
        lambda: check_heads_writable(tmp_path, overwrite=False),
    ):
        with pytest.raises(TreeoptError) as caught:
            refuse()
        assert caught.value.code is Code.FILE_EXISTS
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    save_heads(other, tmp_path, base="owner/other", overwrite=True)
    loaded = load_heads(tmp_path)
    assert (loaded.heads.num_heads, loaded.base, loaded.notes) == (3, "owner/other", ())


def test_save_heads_where_a_file_is(tmp_path: Path) -> None:
    """A file in the folder's place is E204, before any long work."""
    (tmp_path / "heads").write_text("")
    for place in (tmp_path / "heads", tmp_path / "heads" / "deeper"):
        with pytest.raises(TreeoptError) as caught:
            check_heads_writable(place, overwrite=True)
        assert caught.value.code is Code.FILE_UNWRITABLE


def test_base_is_found_across_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads in a folder behind a link name their base from where they are."""
    (tmp_path / "store" / "deep").mkdir(parents=True)
    (tmp_path / "scratch").symlink_to("store/deep")
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    save_heads(from_state(make_state(), "made"), "scratch/heads", base="model")
    for folder in ("scratch/heads", "store/deep/heads"):
        base = load_heads(folder).base
        assert base is not None
        assert os.path.samefile(os.path.normpath(base), "model"), base


BASE_FILES = {
    "config.json": '{"model_type": "llama"}',
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "model.safetensors": "",
    "model-00001-of-00002.safetensors": "",
    "model.safetensors.index.json": "{}",
    "pytorch_model.bin": "",
    "vocab.json": "{}",
}


@looped("content", ["", "[]", "not JSON", '{"model_type": "llama"}', '{"base_model_name_or_path": "x"}'])
def test_another_config_is_never_replaced(tmp_path: Path, content: str) -> None:
    """A config.json that is not of heads stays, with and without overwriting."""
    (tmp_path / "config.json").write_text(content)
    for overwrite in (False, True):
        with pytest.raises(TreeoptError, match=r"config\.json") as caught:
            save_heads(from_state(make_state(), "made"), tmp_path, base="owner/base", overwrite=overwrite)
        assert caught.value.code is Code.FILE_UNWRITABLE
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"config.json": content}


@looped("name", BASE_FILES)
def test_heads_never_go_into_the_folder_of_a_base(tmp_path: Path, name: str) -> None:
    """Weights, a tokenizer or a config of a base model keep heads out, even where heads are beside them."""
    save_heads(from_state(make_state(), "made"), tmp_path, base="owner/base")
    (tmp_path / name).write_text(BASE_FILES[name])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TreeoptError) as caught:
        check_heads_writable(tmp_path, overwrite=True)
    assert caught.value.code is Code.FILE_UNWRITABLE
    assert caught.value.at == str(tmp_path / name)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_heads_beside_other_files(tmp_path: Path) -> None:
    """Training data, prompts, metrics and notes in the folder are no reason to refuse."""
    for name in ("data.jsonl", "prompts.json", "metrics.jsonl", "README.md", "model card.txt"):
        (tmp_path / name).write_text("")
    save_heads(from_state(make_state(), "made"), tmp_path, base="owner/base")


def test_folder_in_place_of_the_config(tmp_path: Path) -> None:
    """What cannot be written at the end is refused at the beginning."""
    (tmp_path / "config.json").mkdir()
    with pytest.raises(TreeoptError) as caught:
        check_heads_writable(tmp_path, overwrite=True)
    assert caught.value.code is Code.FILE_UNWRITABLE
