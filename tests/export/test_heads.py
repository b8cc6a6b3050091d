"""Heads for engines: what each engine reads is the heads that were given, bit for bit, and the rest is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from engine_heads import READERS, EngineHeads, logits
from looped import looped
from refusals import refusal_of
from tiny import HIDDEN, VOCAB, cycle_base, cycle_heads, random_heads, tiny_base, walk

from treeopt.decode.decoder import TreeDecoder
from treeopt.engines import HEAD_READERS as TARGETS
from treeopt.errors import Code, TreeoptError
from treeopt.export.heads import convert_heads
from treeopt.models.head_files import load_heads
from treeopt.models.heads import MedusaHeads
from treeopt.tree import Tree

BASE = tiny_base("llama")
HEADS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAPPED = torch.tensor([40, 2, 60, 7, 11])


def mapped_heads(dtype: torch.dtype = torch.float32) -> MedusaHeads:
    """Heads that draft five of the tokens."""
    whole = random_heads(BASE, HEADS)
    assert whole.lm_head is not None
    parts = (whole.weight.detach(), whole.bias.detach(), whole.lm_head.detach()[:, MAPPED])
    return MedusaHeads.from_tensors(*(part.to(dtype) for part in parts), MAPPED, VOCAB)


def convert(heads: MedusaHeads, to: str, folder: Path, **options: bool) -> EngineHeads:
    """The heads as the engine reads them."""
    convert_heads(heads, to, folder, base=dataclasses.replace(BASE, name="owner/base"), **options)
    return READERS[to](folder)


def check_equal(read: EngineHeads, heads: MedusaHeads, lm_head: torch.Tensor | None) -> None:
    """The engine has each tensor of the heads, bit for bit and in its place, and these LM heads [H, rows, d]."""
    assert len(read.blocks) == heads.num_heads
    for h, blocks in enumerate(read.blocks):
        assert len(blocks) == heads.weight.shape[0]
        for block, (weight, bias) in enumerate(blocks):
            assert bias is not None
            assert weight.dtype == bias.dtype == heads.weight.dtype
            assert torch.equal(weight, heads.weight[block, h])
            assert torch.equal(bias, heads.bias[block, h])
    assert (read.lm_heads is None) == (lm_head is None)
    if lm_head is not None:
        assert read.lm_heads is not None
        assert all(torch.equal(one, lm_head[h]) for h, one in enumerate(read.lm_heads))


def test_readers_are_those_of_the_targets() -> None:
    """Each layout that treeopt writes has a reader here."""
    assert set(READERS) == set(TARGETS)


@looped("dtype", DTYPES)
@looped("to", READERS)
@looped("blocks", [1, 2])
def test_engine_reads_heads_with_lm_heads(tmp_path: Path, to: str, blocks: int, dtype: torch.dtype) -> None:
    """Every engine has the tensors that were given, and treeopt reads the same files back to equal heads."""
    heads = random_heads(BASE, HEADS, blocks=blocks).to(dtype)
    if to == "nxdi" and blocks > 1:
        with pytest.raises(TreeoptError, match="nxdi") as caught:
            convert(heads, to, tmp_path)
        assert caught.value.code is Code.HEADS_NOT_EXPORTABLE
        return
    check_equal(convert(heads, to, tmp_path), heads, heads.lm_head)
    again = load_heads(tmp_path).heads
    assert again.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(tensor, heads.state_dict()[key]) for key, tensor in again.state_dict().items())


@looped("to", READERS)
@looped("written", [False, True])
def test_engine_reads_heads_that_share_the_lm_head(tmp_path: Path, to: str, written: bool) -> None:
    """vLLM and NxD Inference get the base's LM head, Medusa and TGI only on request."""
    heads = random_heads(BASE, HEADS, shared=True)
    needed = written or to in ("vllm", "nxdi")
    lm_head = BASE.lm_head.weight.detach().expand(HEADS, VOCAB, HIDDEN) if needed else None
    check_equal(convert(heads, to, tmp_path, with_lm_heads=written), heads, lm_head)
    if to == "vllm":
        assert "lm_head.weight" in safetensors.torch.load_file(tmp_path / "model.safetensors")


def test_shared_lm_head_needs_the_base(tmp_path: Path) -> None:
    """Without the base model nothing is written."""
    with pytest.raises(TreeoptError, match="LM head") as caught:
        convert_heads(random_heads(BASE, HEADS, shared=True), "vllm", tmp_path / "out", base=None)
    assert caught.value.code is Code.HEADS_NOT_EXPORTABLE
    assert not (tmp_path / "out").exists()


def test_tgi_refuses_two_blocks_that_share_the_lm_head(tmp_path: Path) -> None:
    """TGI's second version has one block; with LM heads two blocks are possible."""
    heads = random_heads(BASE, HEADS, blocks=2, shared=True)
    with pytest.raises(TreeoptError, match=r"for tgi") as caught:
        convert(heads, "tgi", tmp_path)
    assert caught.value.fix == "--with-lm-heads"
    lm_head = BASE.lm_head.weight.detach().expand(HEADS, VOCAB, HIDDEN)
    check_equal(convert(heads, "tgi", tmp_path, with_lm_heads=True), heads, lm_head)


@looped("dtype", DTYPES)
def test_token_map_goes_to_vllm_alone(tmp_path: Path, dtype: torch.dtype) -> None:
    """vLLM reads the rows with their tokens; no other layout can say them."""
    heads = mapped_heads(dtype)
    read = convert(heads, "vllm", tmp_path / "vllm")
    check_equal(read, heads, heads.lm_head)
    assert (read.tokens, read.vocab_size) == (MAPPED.tolist(), VOCAB)
    for to in ("medusa", "tgi", "nxdi"):
        with pytest.raises(TreeoptError, match=f"written for {to}"):
            convert(heads, to, tmp_path / to)


@looped("kind", ["with LM heads", "two blocks", "shared", "token map"])
def test_logits_of_the_engine_are_those_of_treeopt(tmp_path: Path, kind: str) -> None:
    """After a way through vLLM's files the heads give the logits of plain arithmetic on these files."""
    made = {
        "with LM heads": random_heads(BASE, HEADS),
        "two blocks": random_heads(BASE, HEADS, blocks=2),
        "shared": random_heads(BASE, HEADS, shared=True),
        "token map": mapped_heads(),
    }[kind]
    hidden = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(3))
    expected = logits(convert(made, "vllm", tmp_path), hidden, BASE.lm_head.weight.detach())
    for heads in (made, load_heads(tmp_path).heads):
        with torch.no_grad():
            found = heads(hidden, BASE.lm_head).double()
        drafted = torch.isfinite(expected)
        assert torch.allclose(found[drafted], expected[drafted], atol=1e-4)
        assert (found[~drafted] < -1000).all()
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
        assert found.shape == (HEADS, 7, VOCAB)


def test_lm_heads_written_again(tmp_path: Path) -> None:
    """The file of heads with LM heads is replaced; it is not written beside one that would be read in its place."""
    heads = random_heads(BASE, HEADS, shared=True)
    for overwrite in (False, True):
        convert(heads, "medusa", tmp_path / "own", with_lm_heads=True, overwrite=overwrite)
    convert(heads, "medusa", tmp_path / "shared")
    error = refusal_of(lambda: convert(heads, "medusa", tmp_path / "shared", with_lm_heads=True, overwrite=True))
    assert error.code is Code.FILE_UNWRITABLE


def test_heads_of_a_truncated_vocabulary_decode_losslessly(tmp_path: Path) -> None:
    """Heads with a token map, read from vLLM's files, draft only their tokens, and the text is that of the base."""
    base = cycle_base()
    heads = cycle_heads(base, 3)
    assert heads.lm_head is not None
    kept = torch.arange(0, VOCAB, 2)
    parts = heads.weight.detach(), heads.bias.detach(), heads.lm_head.detach()[:, kept]
    convert_heads(MedusaHeads.from_tensors(*parts, kept, VOCAB), "vllm", tmp_path, base="owner/base")
    decoder = TreeDecoder(base, load_heads(tmp_path).heads, Tree.chain(3))
    found = decoder.generate([0], 40)
    assert found.tokens == walk(0, 41)[1:]
    lengths = set(found.step_lengths)
    assert lengths - {1}, "no draft was accepted"
    whole = TreeDecoder(base, heads, Tree.chain(3)).generate([0], 40)
    assert len(whole.step_lengths) < len(found.step_lengths)


@looped("to, names", [("medusa", 2), ("tgi", 1)])
def test_number_of_heads_has_the_name_of_each_reader(tmp_path: Path, to: str, names: int) -> None:
    """Medusa and TGI read `medusa_num_heads`, TensorRT-LLM's LLM API reads `num_medusa_heads`."""
    convert(random_heads(BASE, HEADS), to, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    found = {name: value for name, value in config.items() if "heads" in name}
    assert found == dict.fromkeys(("medusa_num_heads", "num_medusa_heads")[:names], HEADS)


def test_config_names_the_base_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines take a folder from their current one, so a local base is named by its absolute path."""
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    convert_heads(random_heads(BASE, HEADS), "tgi", "out", base="base")
    assert json.loads(Path("out/config.json").read_text())["base_model_name_or_path"] == str(tmp_path / "base")
    assert load_heads("out").base == str(tmp_path / "base")


@looped("to", READERS)
def test_heads_are_replaced_only_on_request(tmp_path: Path, to: str) -> None:
    """Existing heads are refused, and replaced with `overwrite`."""
    convert(random_heads(BASE, 2), to, tmp_path)
    assert refusal_of(convert, random_heads(BASE, HEADS), to, tmp_path).code is Code.FILE_EXISTS
    assert len(READERS[to](tmp_path).blocks) == 2
    assert len(convert(random_heads(BASE, HEADS), to, tmp_path, overwrite=True).blocks) == HEADS


@looped("to", ["medusa", "tgi", "vllm"])
def test_base_model_is_never_replaced(tmp_path: Path, to: str) -> None:
    """A folder with a base model is refused, with `overwrite` too; its files stay."""
    BASE.model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert refusal_of(convert, random_heads(BASE, HEADS), to, tmp_path, overwrite=True).code is Code.FILE_UNWRITABLE
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_nxdi_goes_beside_the_base_model(tmp_path: Path) -> None:
    """NxD Inference reads heads in the folder of the base, which is then also found as their base model."""
    BASE.model.save_pretrained(tmp_path)
    heads = random_heads(BASE, HEADS)
    check_equal(convert(heads, "nxdi", tmp_path), heads, heads.lm_head)
    assert load_heads(tmp_path).base == str(tmp_path)


def test_two_files_of_heads_are_refused(tmp_path: Path) -> None:
    """A folder never gets a second file that programs could read in place of the first."""
    convert(random_heads(BASE, 2), "tgi", tmp_path)
    with pytest.raises(TreeoptError, match=r"medusa_lm_head\.safetensors") as caught:
        convert(random_heads(BASE, HEADS), "medusa", tmp_path, overwrite=True)
    assert caught.value.code in (Code.FILE_UNWRITABLE, Code.FILE_EXISTS)


def test_same_heads_give_the_same_bytes(tmp_path: Path) -> None:
    """Files are reproducible, and a view of large memory is not written whole."""
    whole = torch.randn(1, 50, HIDDEN, HIDDEN)
    bias, lm_head = torch.randn(1, 50, HIDDEN), torch.randn(50, VOCAB, HIDDEN)
    heads = MedusaHeads.from_tensors(whole[:, :2], bias[:, :2], lm_head[:2])
    for to, file in (("medusa", "medusa_lm_head.pt"), ("vllm", "model.safetensors")):
        sizes = []
        for name in ("one", "two"):
            convert(heads, to, tmp_path / to / name)
            sizes.append((tmp_path / to / name / file).read_bytes())
        assert sizes[0] == sizes[1]
        assert len(sizes[0]) < 2 * 4 * (HIDDEN * HIDDEN + HIDDEN + VOCAB * HIDDEN) + 10_000


def test_notes_say_what_is_written(tmp_path: Path) -> None:
    """That the base's LM head is written, and in which type."""
    shared = random_heads(BASE, HEADS, shared=True)

    def notes(heads: MedusaHeads, to: str, **options: Any) -> tuple[str, ...]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return convert_heads(heads, to, folder, base=BASE, **options).notes

    written = f"the LM head of {BASE.name} is written with the heads, in "
    assert notes(random_heads(BASE, HEADS), "medusa") == notes(shared, "medusa") == ()
    assert notes(shared, "medusa", with_lm_heads=True) == notes(shared, "vllm") == (f"{written}float32",)
    assert notes(shared.to(torch.bfloat16), "tgi", with_lm_heads=True) == (f"{written}bfloat16",)
