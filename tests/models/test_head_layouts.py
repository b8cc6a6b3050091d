"""Every published layout of heads is recognised by its names and read exactly; damaged ones are refused by name."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from looped import looped
from tiny import HIDDEN as BASE_HIDDEN
from tiny import VOCAB as BASE_VOCAB
from tiny import tiny_base
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.models import head_files
from treeopt.models.given import load_pair
from treeopt.models.head_files import load_heads

HEADS, HIDDEN, VOCAB = 3, 4, 7
State = dict[str, Tensor]
# Names of a block's tensors and of an LM head, from the description of the formats.
NAMES: dict[str, Callable[[int, int, str], str]] = {
    "medusa": lambda h, b, part: f"{h}.{b}.linear.{part}",
    "full": lambda h, b, part: f"medusa_head.{h}.{b}.linear.{part}",
    "modelopt": lambda h, b, part: f"medusa_heads.{h}.{b}.linear.{part}",
    "vllm": lambda h, b, part: f"blocks.{h}.layers.{b}.{part}",
    "vllm with a prefix": lambda h, b, part: f"medusa_heads.blocks.{h}.layers.{b}.{part}",
    "nxdi": lambda h, b, part: f"medusa_head_{h}.{b}.linear.{part}",
}
LM_HEADS: dict[str, Callable[[int, int], str]] = {
    "medusa": lambda h, blocks: f"{h}.{blocks}.weight",
    "full": lambda h, blocks: f"medusa_head.{h}.{blocks}.weight",
    "modelopt": lambda h, blocks: f"medusa_heads.{h}.{blocks}.weight",
    "vllm": lambda h, _blocks: f"lm_heads.{h}.weight",
    "vllm with a prefix": lambda h, _blocks: f"medusa_heads.lm_heads.{h}.weight",
    "nxdi": lambda h, blocks: f"medusa_head_{h}.{blocks}.weight",
}
FILES = {
    "medusa": "medusa_lm_head.safetensors",
    "full": "model.safetensors",
    "modelopt": "model.safetensors",
    "vllm": "model.safetensors",
    "vllm with a prefix": "model.safetensors",
    "nxdi": "medusa_heads.pt",
}


def made(layout: str, *, blocks: int = 1, own: bool = True, bias: bool = True, heads: int = HEADS) -> State:
    """The tensors of random heads in a layout."""
    rng = torch.Generator().manual_seed(5)
    state: State = {}
    for h in range(heads):
        for b in range(blocks):
            state[NAMES[layout](h, b, "weight")] = torch.randn(HIDDEN, HIDDEN, generator=rng)
            if bias:
                state[NAMES[layout](h, b, "bias")] = torch.randn(HIDDEN, generator=rng)
        if own:
            state[LM_HEADS[layout](h, blocks)] = torch.randn(VOCAB, HIDDEN, generator=rng)
    return state


def write(folder: Path, state: State, config: dict[str, Any] | None = None, file: str = "model.safetensors") -> Path:
    """A folder with these tensors in one file, and a config where one is given."""
    folder.mkdir(exist_ok=True)
    if file.endswith(".safetensors"):
        safetensors.torch.save_file(state, folder / file)
    else:
        torch.save(state, folder / file)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def refusal(path: Path) -> TreeoptError:
    """The error that loading ends with."""
    with pytest.raises(TreeoptError) as caught:
        load_heads(path)
    return caught.value


@looped("layout, blocks", itertools.product(NAMES, [1, 2]))
def test_layout_is_read_exactly(tmp_path: Path, layout: str, blocks: int) -> None:
    """Each tensor gets to its head and block, as a folder and as the file itself."""
    state = made(layout, blocks=blocks)
    folder = write(tmp_path, state, {"medusa_fc_bias": True}, FILES[layout])
    for path in (folder, folder / FILES[layout]):
        heads = load_heads(path).heads
        assert (heads.num_heads, heads.weight.shape[0], heads.vocab_size) == (HEADS, blocks, VOCAB)
        assert heads.lm_head is not None
        for h in range(HEADS):
            for b in range(blocks):
                assert torch.equal(heads.weight[b, h], state[NAMES[layout](h, b, "weight")])
                assert torch.equal(heads.bias[b, h], state[NAMES[layout](h, b, "bias")])
            assert torch.equal(heads.lm_head[h], state[LM_HEADS[layout](h, blocks)])


@looped(
    "layout, own, title",
    [
        ("medusa", True, "Medusa v1, with LM heads"),
        ("medusa", False, "Medusa v2, with the base's LM head"),
        ("full", True, "Medusa v1.0, with its base model"),
        ("modelopt", True, "ModelOpt, with its base model"),
        ("vllm", True, "vLLM"),
        ("nxdi", True, "AWS NxD Inference"),
    ],
)
def test_layout_is_named(tmp_path: Path, layout: str, own: bool, title: str) -> None:
    """The layout is told by the names alone."""
    assert load_heads(write(tmp_path, made(layout, own=own), None, FILES[layout])).layout == title


@looped("layout", ["full", "modelopt", "vllm", "nxdi"])
def test_missing_bias_of_one_block_is_named(tmp_path: Path, layout: str) -> None:
    """A tensor that one head lacks is refused with its name in the layout of the file."""
    state = made(layout)
    lost = NAMES[layout](1, 0, "bias")
    del state[lost]
    error = refusal(write(tmp_path, state, None, FILES[layout]))
    assert error.code is Code.HEADS_INVALID
    assert f"lacks {lost}" in error.what


BACKBONE = {"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), "lm_head.weight": torch.zeros(VOCAB, HIDDEN)}


@looped("layout, suffix", [("full", "safetensors"), ("modelopt", "bin")])
def test_shards_of_heads_are_found_beside_the_base(tmp_path: Path, layout: str, suffix: str) -> None:
    """The index is followed to the shards with heads; shards without are not opened; the base is the folder."""
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    state = made(layout)
    names = [f"{stem}-0000{i}-of-00003.{suffix}" for i in (1, 2, 3)]
    first = [key for key in state if ".1." in key]
    parts = [{}, {key: state[key] for key in first}, {key: t for key, t in state.items() if key not in first}]
    for name, part in zip(names[1:], parts[1:], strict=True):
        write(tmp_path, part, None, name)
    (tmp_path / names[0]).write_bytes(b"damaged")
    index = {key: names[i] for i, part in enumerate(parts) for key in part} | dict.fromkeys(BACKBONE, names[0])
    (tmp_path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": index}))
    for path in (tmp_path, tmp_path / f"{stem}.{suffix}.index.json"):
        loaded = load_heads(path)
        assert torch.equal(loaded.heads.weight[0, 1], state[NAMES[layout](1, 0, "weight")])
        assert loaded.base == str(tmp_path)
        assert loaded.file.name.endswith(".index.json")


def test_index_faults_are_refused(tmp_path: Path) -> None:
    """A shard that is missing, lacks a tensor, or is outside the folder is one error each."""
    state = made("full")
    index = tmp_path / "model.safetensors.index.json"
    write(tmp_path, state, None, "a.safetensors")

    def map_to(shard: str, more: tuple[str, ...] = ()) -> TreeoptError:
        index.write_text(json.dumps({"weight_map": dict.fromkeys([*state, *more], shard)}))
        return refusal(tmp_path)

    assert map_to("b.safetensors").code is Code.FILE_MISSING
    lacking = map_to("a.safetensors", ("medusa_head.3.1.weight",))
    assert lacking.code is Code.FILE_INVALID
    assert "medusa_head.3.1.weight" in lacking.what
    for elsewhere in ("../a.safetensors", "/etc/passwd"):
        assert "not in its folder" in map_to(elsewhere).what


def test_full_checkpoint_decodes_with_its_own_base(tmp_path: Path) -> None:
    """Heads beside a backbone are loaded together with it, whatever base their config names."""
    base = tiny_base("llama")
    base.model.save_pretrained(tmp_path)
    state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for h in range(2):
        state[f"medusa_head.{h}.0.linear.weight"] = torch.randn(BASE_HIDDEN, BASE_HIDDEN)
        state[f"medusa_head.{h}.0.linear.bias"] = torch.randn(BASE_HIDDEN)
        state[f"medusa_head.{h}.1.weight"] = torch.randn(BASE_VOCAB, BASE_HIDDEN)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": "owner/other"}))
    found, loaded = load_pair(str(tmp_path), None, device="cpu")
    assert found.name == str(tmp_path)
    assert loaded.heads.num_heads == 2
    assert torch.equal(found.lm_head.weight, base.lm_head.weight)


def test_vllm_without_biases(tmp_path: Path) -> None:
    """Blocks without biases have biases of 0."""
    heads = load_heads(write(tmp_path, made("vllm", bias=False), {"num_heads": HEADS})).heads
    assert heads.bias.shape == (1, HEADS, HIDDEN)
    assert not heads.bias.any()


@looped("config, said", [({}, True), ({"medusa_fc_bias": True}, False)])
def test_vllm_biases_that_it_drops_are_noted(tmp_path: Path, config: dict[str, Any], said: bool) -> None:
    """vLLM skips biases unless its config asks for them, and a user is warned of that."""
    notes = load_heads(write(tmp_path, made("vllm"), config)).notes
    assert any("drops the biases" in note for note in notes) == said


@looped("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_vllm_with_one_lm_head(tmp_path: Path, name: str) -> None:
    """One LM head in the checkpoint, under either name, is that of every head."""
    one = torch.randn(VOCAB, HIDDEN)
    state = {**made("vllm", own=False), name: one}
    heads = load_heads(write(tmp_path, state, {"original_lm_head": True})).heads
    assert heads.lm_head is not None
    assert all(torch.equal(heads.lm_head[h], one) for h in range(HEADS))


@looped("config, said", [({}, False), ({"original_lm_head": True}, True)])
def test_vllm_lm_heads_that_it_drops_are_noted(tmp_path: Path, config: dict[str, Any], said: bool) -> None:
    """With `original_lm_head` vLLM has one LM head for all heads, whatever the checkpoint holds."""
    loaded = load_heads(write(tmp_path, made("vllm"), config))
    assert any(f"one of these {HEADS} LM heads" in note for note in loaded.notes) == said
    assert loaded.heads.lm_head is not None
    assert not torch.equal(loaded.heads.lm_head[0], loaded.heads.lm_head[1])


def test_vllm_with_the_first_lm_head_alone_is_incomplete(tmp_path: Path) -> None:
    """Without `original_lm_head` the other heads lack theirs."""
    state = {**made("vllm", own=False), "lm_heads.0.weight": torch.randn(VOCAB, HIDDEN)}
    assert "lm_heads.1.weight" in refusal(write(tmp_path, state, {})).what


MAP = torch.tensor([6, 0, 3])


@looped("prefix, rows", itertools.product(["", "medusa_heads."], [len(MAP), VOCAB]))
def test_vllm_token_map(tmp_path: Path, rows: int, prefix: str) -> None:
    """Row i of an LM head is of token map[i]; a checkpoint with the rows of all tokens gives those of the map."""
    layout = "vllm with a prefix" if prefix else "vllm"
    state = made(layout, own=False) | {f"{prefix}token_map": MAP.int()}
    full = torch.randn(HEADS, VOCAB, HIDDEN)
    for h in range(HEADS):
        state[LM_HEADS[layout](h, 1)] = (full[h] if rows == VOCAB else full[h, MAP]).clone()
    heads = load_heads(write(tmp_path, state, {"vocab_size": VOCAB, "truncated_vocab_size": 3})).heads
    assert heads.vocab_size == VOCAB
    assert heads.lm_head is not None
    assert torch.equal(heads.lm_head, full[:, MAP])
    hidden = torch.randn(2, HIDDEN)
    with torch.no_grad():
        found, x = heads(hidden), heads.features(hidden)
    for h in range(HEADS):
        for column, token in enumerate(MAP.tolist()):
            assert torch.allclose(found[h, :, token], x[h] @ full[h, token], atol=1e-5), (h, column)
    others = [token for token in range(VOCAB) if token not in MAP.tolist()]
    assert (found[:, :, others] == -10_000).all()


@looped("config", [{"vocab_size": VOCAB}, {"vocab_size": VOCAB, "truncated_vocab_size": VOCAB}])
def test_vllm_token_map_that_is_not_used(tmp_path: Path, config: dict[str, Any]) -> None:
    """Where the vocabulary is not truncated vLLM does not use the map, and neither do we."""
    loaded = load_heads(write(tmp_path, {**made("vllm"), "token_map": MAP}, config))
    assert loaded.heads.token_map is None
    assert any("token_map is not used" in note for note in loaded.notes)


@looped(
    "token_map",
    [
        torch.tensor([6, 0, 7]),  # beyond the vocabulary
        torch.tensor([6, 0, -1]),
        torch.tensor([6, 0, 6]),
        torch.tensor([6.0, 0.0, 3.0]),
        torch.tensor([True, False, True]),
        torch.tensor([[6, 0, 3]]),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([6, 0, 3, 1]),  # one more than there are rows
    ],
)
def test_invalid_token_maps_are_refused(tmp_path: Path, token_map: Tensor) -> None:
    """Only distinct ids below the vocabulary size, one for each row, are a token map."""
    state = made("vllm", own=False) | {"token_map": token_map}
    for h in range(HEADS):
        state[f"lm_heads.{h}.weight"] = torch.randn(3, HIDDEN)
    error = refusal(write(tmp_path, state, {"vocab_size": VOCAB, "truncated_vocab_size": 3}))
    assert error.code is Code.HEADS_INVALID
    assert "token_map" in error.what


@looped("vocab_size", [None, "7", True, 7.5])
def test_token_map_without_a_vocabulary_size(tmp_path: Path, vocab_size: object) -> None:
    """The map needs the size of the whole vocabulary."""
    config = {"vocab_size": vocab_size, "truncated_vocab_size": 3}
    assert "vocab_size" in refusal(write(tmp_path, {**made("vllm"), "token_map": MAP}, config)).what


def eight_bits(scale: Tensor) -> tuple[State, State]:
    """ModelOpt's heads with FP8 block weights, and the same in bfloat16."""
    exact, stored = made("modelopt"), {}
    for key, tensor in exact.items():
        if key.endswith("linear.weight"):
            stored[key] = tensor.to(torch.float8_e4m3fn)
            stored[f"{key}_scale"] = scale.clone()
            stored[key.replace("weight", "input_scale")] = torch.tensor(2.0)
            exact[key] = (stored[key].float() * (scale[:, None] if scale.ndim == 1 else scale)).bfloat16()
        else:
            stored[key] = exact[key] = tensor.bfloat16()
    return stored, exact


@looped("scale", [torch.tensor(0.5), torch.tensor([0.5, 2.0, 0.25, 3.0])])
def test_modelopt_in_8_bits(tmp_path: Path, scale: Tensor) -> None:
    """FP8 weights are multiplied by their scale, for all rows or for each; scales of inputs have no use here."""
    stored, exact = eight_bits(scale)
    loaded = load_heads(write(tmp_path, stored, {}))
    for h in range(HEADS):
        assert torch.equal(loaded.heads.weight[0, h], exact[f"medusa_heads.{h}.0.linear.weight"])
    assert any("FP8" in note for note in loaded.notes)


@looped("fault", ["no scale", "scale of another weight", "two scales", "scale of a wrong shape"])
def test_other_quantisation_is_refused(tmp_path: Path, fault: str) -> None:
    """Weights that cannot be multiplied out are refused, never read as if they were plain."""
    stored, _ = eight_bits(torch.tensor(0.5))
    key = "medusa_heads.1.0.linear.weight_scale"
    if fault == "no scale":
        del stored[key]
    elif fault == "scale of another weight":
        stored["medusa_heads.1.1.weight_scale"] = torch.tensor(1.0)
    elif fault == "two scales":
        stored[f"{key}_2"] = torch.tensor(1.0)
    else:
        stored[key] = torch.ones(3)
    assert refusal(write(tmp_path, stored, {})).code is Code.HEADS_INVALID


@looped(
    "keys, said",
    [
        (["medusa_heads.0.medusa_layers.0.linear.weight", "medusa_heads.0.lm_head.weight"], "TensorRT-LLM"),
        (["hydra_mlp.0.0.linear.weight", "hydra_lm_head.0.weight"], "a drafter of another kind"),
        (["embed_tokens.weight", "fc.weight", "layers.0.mlp.up_proj.weight"], "a drafter of another kind"),
        (["layers.0.self_attn.q_proj.weight", "layers.0.post_attention_layernorm.weight"], "perhaps an EAGLE"),
        (["fusion_fc.weight", "transformer.mlp.up_proj.weight"], "a drafter of another kind"),
        (
            ["fc.weight", "midlayer.hidden_norm.weight", "norm.weight", "d2t", "lm_head.weight"],
            "a drafter of another kind",
        ),
        (
            ["fc.weight", "layers.0.hidden_norm.weight", "norm.weight", "t2d", "embed_tokens.weight"],
            "a drafter of another kind",
        ),
        (["fc.weight", "mask_hidden", "midlayer.hidden_norm.weight", "d2t"], "a drafter of another kind"),
        (
            ["fc.weight", "hidden_norm.weight", "norm.weight", "layers.0.mlp.up_proj.weight"],
            "a drafter of another kind",
        ),
        (["fc.weight", "hidden_norm.weight", "layers.1.mlp.up_proj.weight", "d2t"], "a drafter of another kind"),
        (["encoder.fc.weight", "encoder.output_norm_enc.weight"], "a drafter of another kind"),
        (["fc.weight", "hidden_norm.weight", "prefix_gru.weight_ih_l0"], "a drafter of another kind"),
        (["embed_tokens.weight", "hidden_norm.weight", "markov_head.markov_w1.weight"], "a drafter of another kind"),
        (["logit_head.confidence_head.proj.weight", "hidden_norm.weight"], "a drafter of another kind"),
        (["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"], "a drafter of another kind"),
        (["model.layers.61.eh_proj.weight", "model.layers.61.mlp.up_proj.weight"], "a drafter of another kind"),
        (
            ["model.mtp_layers.0.input_proj.weight", "model.embed_tokens.weight"],
            "a drafter of another kind",
        ),
        (["mtp_layers.0.token_layernorm.weight", "mtp_layers.0.mlp.up_proj.weight"], "a drafter of another kind"),
        (["model.mtp.layers.0.embed_norm.weight", "model.layers.0.mlp.up_proj.weight"], "a drafter of another kind"),
        (["model.layers.0.mlp.up_proj.weight", "pre_projection.weight"], "a drafter of another kind"),
        (["model.embed_tokens.weight", "lm_head.weight"], "a base model without Medusa heads"),
        (["blocks.0.layers.0.weights"], "another layout"),
        (["medusa_head_0.0.linear.weight", "medusa_head_0.note"], "medusa_head_0.note"),
        (["blocks.0.layers.0.weight", "lm_heads.0.weight", "extra"], "extra"),
        (["blocks.0.layers.0.weight", "lm_heads.0.weight", "lm_head.weight"], "has also lm_head.weight"),
        (["blocks.99999999.layers.0.weight", "lm_head.weight"], "head 99999999"),
        (["blocks.0.layers.99999999.weight", "lm_heads.0.weight"], "2 tensors|3 tensors"),
        ([f"{'9' * 5000}.0.weight"], "another layout"),
        (["\u0661.0.weight"], "another layout"),
        (["00.0.weight"], "lacks 0.0.weight"),
    ],
)
def test_names_of_something_else_are_refused(tmp_path: Path, keys: list[str], said: str) -> None:
    """Other kinds of drafters are named, and crafted names end in one error, at once."""
    state = {key: torch.zeros(HIDDEN, HIDDEN) for key in keys}
    error = refusal(write(tmp_path, state, {}))
    assert error.code is Code.HEADS_INVALID
    assert any(word in error.what for word in said.split("|")), error.what
    assert ("--draft reads EAGLE heads" in error.fix) == bool(re.search("EAGLE|drafter", said))


def test_hub_repository_gives_the_shards_with_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a full checkpoint on the hub only the shards with heads are fetched."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cache"
    folder.mkdir()
    index = {"medusa_head.0.0.weight": "model-2.safetensors", "lm_head.weight": "model-1.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    fetched: list[tuple[str, ...]] = []

    def find(_name: str, files: tuple[str, ...]) -> Path:
        fetched.append(files)
        return folder

    monkeypatch.setattr(head_files, "find_heads", find)
    assert head_files._find("owner/heads") == folder
    assert [("model-2.safetensors" in files, "model-1.safetensors" in files) for files in fetched] == [
        (False, False),
        (True, False),
    ]
