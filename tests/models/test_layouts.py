"""Layouts: both published file forms are read alike, and every way to be wrong is refused by name."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import shutil
import socket
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny import random_heads, tiny_base
from torch import Tensor

from treeopt.errors import EXIT_ENVIRONMENT, EXIT_INPUT, Code, TreeoptError
from treeopt.export.read_tree import import_tree
from treeopt.models import hub
from treeopt.models.heads import MedusaHeads
from treeopt.models.layouts import check_heads_writable, expected_keys, from_state, load_heads, save_heads

HEADS, HIDDEN, VOCAB = 3, 4, 7


def make_state(*, blocks: int = 1, own: bool = True, heads: int = HEADS) -> dict[str, Tensor]:
    """A state dictionary in the original layout, every value different from all others."""
    state: dict[str, Tensor] = {}
    for h in range(heads):
        for layer in range(blocks):
            state[f"{h}.{layer}.linear.weight"] = torch.randn(HIDDEN, HIDDEN)
            state[f"{h}.{layer}.linear.bias"] = torch.randn(HIDDEN)
        if own:
            state[f"{h}.{blocks}.weight"] = torch.randn(VOCAB, HIDDEN)
    return state


def write(folder: Path, state: dict[str, Tensor], config: object = None) -> Path:
    """A heads folder with safetensors weights, and a config where one is given."""
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(state, folder / "medusa_lm_head.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def refusal(path: Path | str) -> TreeoptError:
    """The error that loading ends with."""
    with pytest.raises(TreeoptError) as caught:
        load_heads(path)
    return caught.value


class RunsCode:
    """Unpickles by running a shell command that leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.marker}'",)


def test_load_heads_both_forms(shared: Path) -> None:
    """The published .safetensors and .pt hold equal tensors, so they have one fingerprint."""
    folder = shared / "models" / "tinystories-260k-medusa"
    one = load_heads(folder / "medusa_lm_head.safetensors")
    other = load_heads(folder / "medusa_lm_head.pt")
    assert one.heads.num_heads == 5
    for name, tensor in one.heads.state_dict().items():
        assert torch.equal(tensor, other.heads.state_dict()[name])
    assert one.fingerprint == other.fingerprint


def test_load_heads_folder(shared: Path) -> None:
    """A folder gives its safetensors file, and the base's folder relative to itself, wherever one stands."""
    loaded = load_heads(shared / "models" / "tinystories-260k-medusa")
    assert loaded.file.name == "medusa_lm_head.safetensors"
    assert loaded.base == str(shared / "models" / "tinystories-260k")
    assert loaded.notes == ()


@pytest.mark.parametrize(("blocks", "own"), [(0, True), (1, True), (2, True), (1, False), (2, False)])
def test_from_state_places(blocks: int, own: bool) -> None:
    """Each tensor lands at its head and block; without LM heads the base's is shared."""
    state = make_state(blocks=blocks, own=own)
    heads = from_state(state, "made")
    assert (heads.num_heads, heads.hidden_size) == (HEADS, HIDDEN)
    assert heads.weight.shape[0] == blocks
    for h in range(HEADS):
        for layer in range(blocks):
            assert torch.equal(heads.weight[layer, h], state[f"{h}.{layer}.linear.weight"])
            assert torch.equal(heads.bias[layer, h], state[f"{h}.{layer}.linear.bias"])
        if heads.lm_head is not None:
            assert torch.equal(heads.lm_head[h], state[f"{h}.{blocks}.weight"])
    assert (heads.lm_head is not None) == own


def test_from_state_empty() -> None:
    """A file without any tensor holds no heads."""
    with pytest.raises(TreeoptError) as caught:
        from_state({}, "made")
    assert caught.value.code is Code.HEADS_INVALID


def test_from_state_twelve_heads() -> None:
    """Heads are counted as numbers: head 10 comes after head 9, not after head 1."""
    state = make_state(heads=12)
    heads = from_state(state, "made")
    assert heads.num_heads == 12
    assert torch.equal(heads.weight[0, 10], state["10.0.linear.weight"])


def test_load_heads_config_lies(tmp_path: Path) -> None:
    """Where config.json claims another number of heads the weights win, and a note says so."""
    loaded = load_heads(write(tmp_path, make_state(), {"medusa_num_heads": 2}))
    assert loaded.heads.num_heads == 3
    assert len(loaded.notes) == 1
    assert "2 heads" in loaded.notes[0]
    assert "have 3" in loaded.notes[0]


def test_load_heads_config_right_or_absent(tmp_path: Path) -> None:
    """A config that agrees, or none at all, leaves no note."""
    assert load_heads(write(tmp_path / "with", make_state(), {"medusa_num_heads": 3})).notes == ()
    bare = load_heads(write(tmp_path / "without", make_state()))
    assert (bare.notes, bare.base) == ((), None)


def test_load_heads_base_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base path is taken from the heads' folder, not from the current one; what is no folder stays a hub name."""
    (tmp_path / "base").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    near = load_heads(write(tmp_path / "near", make_state(), {"base_model_name_or_path": "../base"}))
    far = load_heads(write(tmp_path / "far", make_state(), {"base_model_name_or_path": "owner/base"}))
    assert near.base == str(tmp_path / "base")
    assert far.base == "owner/base"


def test_load_heads_shared_lm_head_file(tmp_path: Path) -> None:
    """The second version of the layout, blocks only, is read as heads that share the base's LM head."""
    assert load_heads(write(tmp_path, make_state(own=False), {"version": "2"})).heads.vocab_size is None


def test_load_heads_plain_pt(tmp_path: Path) -> None:
    """A .pt with an ordered dictionary of tensors is read."""
    state = make_state()
    torch.save(state, tmp_path / "medusa_lm_head.pt")
    assert torch.equal(load_heads(tmp_path).heads.weight[0, 2], state["2.0.linear.weight"])


@pytest.mark.parametrize("form", ["zip", "old", "pickle"])
def test_load_heads_running_code(tmp_path: Path, form: str) -> None:
    """A .pt that would run a command is refused, the command does not run, and no unsafe way out is proposed."""
    marker, file = tmp_path / "ran", tmp_path / "medusa_lm_head.pt"
    state = {**make_state(), "0.0.linear.weight": RunsCode(marker)}
    if form == "pickle":
        file.write_bytes(pickle.dumps(RunsCode(marker), protocol=2))
    else:
        torch.save(state, file, _use_new_zipfile_serialization=form == "zip")
    error = refusal(tmp_path)
    assert not marker.exists()
    assert error.code is Code.PICKLE_REFUSED
    assert error.exit_status == EXIT_INPUT
    assert "weights_only=False" not in str(error)
    assert str(file) in str(error)


def pickles(marker: Path) -> dict[str, bytes]:
    """Pickles that are not files of plain tensors as PyTorch writes them by default."""

    def zipped(member: str, compression: int = zipfile.ZIP_STORED) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", compression) as archive:
            archive.writestr(member, pickle.dumps([RunsCode(marker)] + ["x"] * 5000, protocol=2))
        return stream.getvalue()

    def saved(value: object, **options: Any) -> bytes:
        stream = io.BytesIO()
        torch.save(value, stream, **options)
        return stream.getvalue()

    program = io.BytesIO()
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), program)
    return {
        "code": pickle.dumps(RunsCode(marker)),
        "numbers": pickle.dumps({"a": 1}, protocol=2),
        "tensors": pickle.dumps(make_state()),
        "zip": zipped("weights.pkl"),
        "zip in folder": zipped("archive/data.pkl"),
        "zip, compressed": zipped("weights.pkl", zipfile.ZIP_DEFLATED),
        "protocol 4": saved(make_state(), pickle_protocol=4),
        "protocol 4, old form": saved(make_state(), pickle_protocol=4, _use_new_zipfile_serialization=False),
        "TorchScript": program.getvalue(),
    }


@pytest.mark.parametrize("name", pickles(Path()))
def test_pickle_is_refused_without_warnings(tmp_path: Path, name: str, recwarn: pytest.WarningsRecorder) -> None:
    """A pickle or a zip with one that PyTorch does not read as plain tensors is E210, in `import` too."""
    file = tmp_path / "heads.pt"
    file.write_bytes(pickles(tmp_path / "ran")[name])
    recwarn.clear()
    for read in (load_heads, import_tree):
        with pytest.raises(TreeoptError) as caught:
            read(file)
        assert caught.value.code is Code.PICKLE_REFUSED
        assert str(file) in str(caught.value)
    assert not recwarn.list
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("module", [b"samd.sam.sam", b"samd_sam_only.sam.dyn_sam", b"model.sam_only.sam.sam"])
def test_table_of_sam_decoding(tmp_path: Path, module: bytes) -> None:
    """The pickled automaton of SAM-Decoding is called by its name, and is not unpickled."""
    named = b"\x8c" + bytes([len(module)]) + module + b"\x8c\x09StaticSAM\x93)\x81."
    forms = b"\x80\x02c" + module + b"\nStaticSAM\n)\x81.", b"\x80\x04\x95" + struct.pack("<Q", len(named)) + named
    for content in forms:
        assert list(pickletools.genops(content))[-1][0].name == "STOP"  # a whole pickle
        file = tmp_path / "sam_alpaca.pkl"
        file.write_bytes(content)
        error = refusal(file)
        assert error.code is Code.PICKLE_REFUSED
        assert "(a SAM-Decoding table)" in error.what
        assert error.fix.startswith("treeopt cannot read these yet")


@pytest.mark.parametrize("size", [1, 2, 3, 14, 15, 40, 200])
def test_part_of_a_checkpoint_is_damaged(tmp_path: Path, size: int, recwarn: pytest.WarningsRecorder) -> None:
    """The beginning of a file of PyTorch in its old form is E203, not a refused pickle."""
    file = tmp_path / "heads.pt"
    torch.save(make_state(), file, _use_new_zipfile_serialization=False)
    file.write_bytes(file.read_bytes()[:size])
    assert refusal(file).code is Code.FILE_INVALID
    assert not recwarn.list


def test_damaged_pickle_gives_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """A file in which torch sees another protocol of pickles is a damaged one of heads and of a tree, and no more."""
    file = tmp_path / "heads.pt"
    torch.save({}, file, _use_new_zipfile_serialization=False)
    file.write_bytes(file.read_bytes()[:15] + b"\x80\x00" + bytes(50))
    assert refusal(file).code is Code.FILE_INVALID
    with pytest.raises(TreeoptError, match="is damaged"):
        import_tree(file)
    assert not recwarn.list


def test_running_code_would_run(tmp_path: Path) -> None:
    """The file of the test above is a real danger: unpickled without care, it runs its command."""
    marker = tmp_path / "ran"
    pickle.loads(pickle.dumps(RunsCode(marker)))
    assert marker.exists()


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
@pytest.mark.parametrize("share", [0.5, 0.99])
def test_load_heads_truncated(tmp_path: Path, shared: Path, name: str, share: float) -> None:
    """Half a file, or all but its end, is reported as damaged."""
    raw = (shared / "models" / "tinystories-260k-medusa" / name).read_bytes()
    (tmp_path / name).write_bytes(raw[: int(len(raw) * share)])
    error = refusal(tmp_path)
    assert error.code is Code.FILE_INVALID
    assert name in error.what


def test_load_heads_missing_key(tmp_path: Path) -> None:
    """A key that other heads have and one lacks is named."""
    state = make_state()
    del state["1.0.linear.bias"]
    error = refusal(write(tmp_path, state))
    assert error.code is Code.HEADS_INVALID
    assert "1.0.linear.bias" in error.what


def test_load_heads_missing_head(tmp_path: Path) -> None:
    """A head left out in the middle is named."""
    state = {key: tensor for key, tensor in make_state().items() if not key.startswith("1.")}
    error = refusal(write(tmp_path, state))
    assert error.code is Code.HEADS_INVALID
    assert "1.1.weight" in error.what


def test_load_heads_extra_key(tmp_path: Path) -> None:
    """A second LM head of one head is named."""
    error = refusal(write(tmp_path, {**make_state(), "2.4.weight": torch.zeros(VOCAB, HIDDEN)}))
    assert error.code is Code.HEADS_INVALID
    assert "2.4.weight" in error.what


def test_load_heads_unknown_keys(tmp_path: Path) -> None:
    """Keys of another layout are named, at most six of them."""
    state = {**make_state(), **{f"medusa_head.{i}.weight": torch.zeros(1) for i in range(9)}}
    error = refusal(write(tmp_path, state))
    assert error.code is Code.HEADS_INVALID
    assert error.what.count("medusa_head.") == 6


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("0.1.weight", (VOCAB + 1, HIDDEN)),  # heads of different vocabularies
        ("0.1.weight", (VOCAB, HIDDEN + 1)),
        ("1.0.linear.weight", (HIDDEN, HIDDEN + 1)),
        ("1.0.linear.bias", (HIDDEN + 1,)),
        ("1.0.linear.bias", (1, HIDDEN)),
    ],
)
def test_load_heads_one_wrong_shape(tmp_path: Path, key: str, shape: tuple[int, ...]) -> None:
    """One tensor of another shape than its kind is refused."""
    error = refusal(write(tmp_path, {**make_state(), key: torch.zeros(shape)}))
    assert error.code is Code.HEADS_INVALID


@pytest.mark.parametrize(
    ("suffix", "shape"),
    [
        ("0.linear.weight", (HIDDEN, HIDDEN + 1)),
        ("0.linear.weight", (HIDDEN + 1, HIDDEN)),
        ("0.linear.bias", (HIDDEN + 1,)),
        ("1.weight", (VOCAB, HIDDEN + 1)),
        ("1.weight", (HIDDEN,)),
    ],
)
def test_load_heads_all_wrong_shape(tmp_path: Path, suffix: str, shape: tuple[int, ...]) -> None:
    """Tensors that agree with each other but not with the hidden size are refused, and one is named."""
    wrong = {f"{h}.{suffix}": torch.zeros(shape) for h in range(HEADS)}
    error = refusal(write(tmp_path, {**make_state(), **wrong}))
    assert error.code is Code.HEADS_INVALID
    assert "has shape" in error.what


def test_load_heads_pt_of_something_else(tmp_path: Path) -> None:
    """A .pt that holds a bare tensor, or numbers, is not a checkpoint."""
    for content in (torch.zeros(3), {"0.0.weight": 3.0}):
        torch.save(content, tmp_path / "medusa_lm_head.pt")
        assert refusal(tmp_path).code is Code.HEADS_INVALID


def test_load_heads_missing_folder(tmp_path: Path) -> None:
    """A path that is not there, and a folder without weights, are missing files."""
    absent = refusal(tmp_path / "absent")
    assert (absent.code, absent.exit_status) == (Code.FILE_MISSING, EXIT_INPUT)
    assert "absent" in absent.what
    assert "medusa_lm_head.safetensors" in refusal(tmp_path).what


def test_load_heads_broken_config(tmp_path: Path) -> None:
    """A config that is not JSON is a damaged file, and it is named."""
    write(tmp_path, make_state())
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3,')
    error = refusal(tmp_path)
    assert error.code is Code.FILE_INVALID
    assert "config.json" in error.what


def test_load_heads_hub_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub name ends offline in one environment error, and no connection is tried."""
    tried: list[object] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "hub_reachable", lambda: False)
    monkeypatch.setattr(socket.socket, "connect", lambda _self, address: tried.append(address))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    error = refusal("owner/some-medusa-heads")
    assert (error.code, error.exit_status) == (Code.HUB_UNREACHABLE, EXIT_ENVIRONMENT)
    assert "owner/some-medusa-heads" in error.what
    assert tried == []


def test_load_heads_name_without_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare name can be no heads repository: it is a missing folder."""
    monkeypatch.chdir(tmp_path)
    assert refusal("some-heads").code is Code.FILE_MISSING


def test_fingerprint_follows_weights(tmp_path: Path, shared: Path) -> None:
    """The fingerprint is that of the weights, not of the folder, and changes with one value."""
    file = shared / "models" / "tinystories-260k-medusa" / "medusa_lm_head.safetensors"
    shutil.copyfile(file, tmp_path / file.name)
    assert load_heads(tmp_path).fingerprint == load_heads(file).fingerprint
    state = safetensors.torch.load_file(file)
    state["0.0.linear.bias"] = state["0.0.linear.bias"] + 1.0
    assert load_heads(write(tmp_path / "other", state)).fingerprint != load_heads(file).fingerprint


@pytest.mark.parametrize(
    "content", [b"", b"hello world this is not a pt", b"<html>", b"version https://git-lfs\n", b"PK\x03"]
)
def test_bytes_that_are_no_checkpoint_are_damage(tmp_path: Path, content: bytes) -> None:
    """An empty file, a web page or a git-lfs pointer is E203: damaged, not an attack."""
    file = tmp_path / "medusa_lm_head.pt"
    file.write_bytes(content)
    with pytest.raises(TreeoptError) as caught:
        load_heads(tmp_path)
    assert caught.value.code is Code.FILE_INVALID


@pytest.mark.parametrize(
    "state",
    [
        {"0.0.weight": torch.zeros(())},
        {"0.0.linear.weight": torch.zeros(()), "0.0.linear.bias": torch.zeros(())},
        {"0.0.weight": torch.zeros(4, 3, dtype=torch.int64)},
    ],
)
def test_tensors_of_the_wrong_kind_are_refused(state: dict[str, torch.Tensor]) -> None:
    """Numbers without dimensions and integers are E211."""
    with pytest.raises(TreeoptError) as caught:
        from_state(state, "crafted")
    assert caught.value.code is Code.HEADS_INVALID


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    """A NaN would win every comparison and score 100 %: E504 with the name of the heads, and no word of layouts."""
    state = make_state()
    state["1.0.linear.bias"][2] = value
    error = refusal(write(tmp_path / "broken", state))
    assert error.code is Code.NOT_FINITE
    assert error.what.startswith(f"the heads {tmp_path / 'broken'}")
    assert "1.0.linear.bias" in error.what
    assert "layout" not in str(error)


def test_huge_head_number_is_refused_at_once() -> None:
    """A key that names head 30,000,000 does not make a list of as many."""
    with pytest.raises(TreeoptError) as caught:
        from_state({"30000000.0.weight": torch.zeros(4, 3)}, "crafted")
    assert caught.value.code is Code.HEADS_INVALID


def same(one: MedusaHeads, other: MedusaHeads) -> bool:
    """Whether two heads hold equal tensors of one dtype under the same names."""
    states = one.state_dict(), other.state_dict()
    if states[0].keys() != states[1].keys():
        return False
    return all(torch.equal(t, states[1][key]) and t.dtype == states[1][key].dtype for key, t in states[0].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("blocks", "shared_head"), [(0, False), (1, False), (2, False), (1, True), (2, True)])
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
    weights, biases, lm_heads = expected_keys(3, blocks, not shared_head)
    names = {name for row in (*weights, *biases) for name in row} | set(lm_heads)
    assert set(safetensors.torch.load_file(file)) == names


def test_save_heads_bytes_are_the_same(tmp_path: Path, shared: Path) -> None:
    """Published heads saved again hold the published tensors, and twice saved, the same bytes."""
    published = load_heads(shared / "models" / "tinystories-260k-medusa")
    files = [save_heads(published.heads, tmp_path / name, base="owner/base") for name in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()
    original, again = (safetensors.torch.load_file(file) for file in (published.file, files[0]))
    assert original.keys() == again.keys()
    assert all(torch.equal(original[key], again[key]) for key in original)


@pytest.mark.parametrize("current", [".", "elsewhere"])
def test_save_heads_base_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, current: str) -> None:
    """A base in a folder is named relative to the heads, so both can move together, whatever folder is current."""
    (tmp_path / "models" / "base").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / current)
    base = os.path.relpath(tmp_path / "models" / "base")
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


def test_check_heads_writable_names_the_file(tmp_path: Path) -> None:
    """The file that will be written is named; saving makes its folder with all above it."""
    file = tmp_path / "a" / "b" / "medusa_lm_head.safetensors"
    assert check_heads_writable(tmp_path / "a" / "b", overwrite=False) == file
    assert save_heads(from_state(make_state(), "made"), tmp_path / "a" / "b", base="owner/base") == file
    assert file.is_file()


@pytest.mark.parametrize("config", [[1], "text", 5, {"base_model_name_or_path": 5}, {"base_model_name_or_path": ["a"]}])
def test_load_heads_config_of_another_kind(tmp_path: Path, config: object) -> None:
    """A config that is no object, or a base that is no name, is a damaged file, and it is named."""
    error = refusal(write(tmp_path, make_state(), config))
    assert error.code is Code.FILE_INVALID
    assert "config.json" in error.what


@pytest.mark.parametrize("claimed", ["three", [3], {"a": 3}, 3.5, True, 10**40])
def test_load_heads_number_of_another_kind(tmp_path: Path, claimed: object) -> None:
    """Whatever config.json holds as the number of heads, the weights win and a short note says so."""
    loaded = load_heads(write(tmp_path, make_state(), {"medusa_num_heads": claimed, "medusa_num_layers": claimed}))
    assert loaded.heads.num_heads == 3
    assert len(loaded.notes[0]) < 100


@pytest.mark.parametrize("base", ["", "x" * 5000, "a\0b"])
def test_load_heads_base_that_is_no_folder(tmp_path: Path, base: str) -> None:
    """A base that can be no path stays a name, and an empty one is none."""
    assert load_heads(write(tmp_path, make_state(), {"base_model_name_or_path": base})).base == (base or None)


@pytest.mark.parametrize("place", ["../../etc/passwd", "/etc/passwd"])
def test_load_heads_index_outside_its_folder(tmp_path: Path, place: str) -> None:
    """An index beside the heads that names a file outside their folder is refused before anything is read."""
    (write(tmp_path, {}) / "medusa_lm_head.safetensors").write_bytes(b"not read")
    (tmp_path / "medusa_lm_head.safetensors.index.json").write_text(json.dumps({"weight_map": {"0.0.weight": place}}))
    error = refusal(tmp_path)
    assert error.code is Code.FILE_INVALID
    assert "not in its folder" in error.what


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


@pytest.mark.parametrize(
    "content", ["", "[]", "not JSON", '{"model_type": "llama"}', '{"base_model_name_or_path": "x"}']
)
def test_another_config_is_never_replaced(tmp_path: Path, content: str) -> None:
    """A config.json that is not of heads stays, with and without overwriting."""
    (tmp_path / "config.json").write_text(content)
    for overwrite in (False, True):
        with pytest.raises(TreeoptError, match=r"config\.json") as caught:
            save_heads(from_state(make_state(), "made"), tmp_path, base="owner/base", overwrite=overwrite)
        assert caught.value.code is Code.FILE_UNWRITABLE
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"config.json": content}


@pytest.mark.parametrize("name", BASE_FILES)
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


def test_heads_in_the_older_file_are_heads(tmp_path: Path) -> None:
    """A .pt checkpoint is not put out of use by a .safetensors beside it, unless that is asked for."""
    torch.save(make_state(), tmp_path / "medusa_lm_head.pt")
    with pytest.raises(TreeoptError) as caught:
        check_heads_writable(tmp_path, overwrite=False)
    assert caught.value.code is Code.FILE_EXISTS
    check_heads_writable(tmp_path, overwrite=True)


def test_folder_in_place_of_the_config(tmp_path: Path) -> None:
    """What cannot be written at the end is refused at the beginning."""
    (tmp_path / "config.json").mkdir()
    with pytest.raises(TreeoptError) as caught:
        check_heads_writable(tmp_path, overwrite=True)
    assert caught.value.code is Code.FILE_UNWRITABLE
