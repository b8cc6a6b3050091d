"""What `--draft` names, by its files: kinds, and the error of each checkpoint that is not one or is damaged."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_seeds import EAGLE
from mtp_checkpoints import write
from naive_modules import layer_config, peagle_specforge, random_state
from safetensors.torch import load_file, save_file
from tiny import tiny_base
from tiny_modules import tiny_module
from torch import Tensor

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, load_base
from treeopt.models.draft_files import beside, kind_in_files, load_draft
from treeopt.models.given import as_draft

VOCAB, WIDTH, LAYERS = 40, 16, 2
CONFIG: dict[str, Any] = {**EAGLE, "vocab_size": VOCAB, "draft_vocab_size": 24}
State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base() -> Base:
    return tiny_base("llama", 1, vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS)


def head(folder: Path, change: Callable[[State], Any] = len, suffix: str = "safetensors", **config: Any) -> str:
    """A head in a folder, with changed tensors and config."""
    content = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
    folder.mkdir(exist_ok=True)
    state = random_state("eagle3", CONFIG, LAYERS, seed=1)
    change(state)
    (folder / "config.json").write_text(json.dumps(content))
    if suffix == "safetensors":
        save_file(state, folder / "model.safetensors")
    else:
        torch.save(state, folder / "pytorch_model.bin")
    return str(folder)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_head_from_both_formats(suffix: str, base: Base, tmp_path: Path) -> None:
    """From a folder, by the loader of commands and by functions; in the base's dtype."""
    name = head(tmp_path, suffix=suffix)
    weights = "model.safetensors" if suffix == "safetensors" else "pytorch_model.bin"
    (tmp_path / f"{weights}.index.json").write_text('{"weight_map": {}}')  # of an earlier save; transformers ignores it
    draft = load_draft(name, base)
    assert kind_in_files(name) == "eagle"
    assert draft.model.wiring.title == "EAGLE-3 (SpecForge)"
    assert draft.model.wiring.reads == (1, 1, 2)
    assert draft.dtype == base.dtype
    again = as_draft(name, base)
    assert again is not None
    assert again.fingerprint == draft.fingerprint


def test_a_head_without_auxiliary_states(base: Base, tmp_path: Path) -> None:
    """It reads the last states as they are, by any name of its layer; an fc in its file is not read."""
    said = {"eagle_config": {"use_aux_hidden_state": False}}
    drop = {"fc": lambda state: None, "no fc": lambda state: state.pop("fc.weight")}

    def numbered(state: dict[str, Tensor]) -> None:
        state.pop("fc.weight")
        for key in [key for key in state if key.startswith("midlayer.")]:
            state[key.replace("midlayer.", "layers.0.")] = state.pop(key)

    text = torch.arange(6)[None]
    logits = []
    for name, change in {**drop, "layers": numbered}.items():
        model = load_draft(head(tmp_path / name, change=change, **said), base).model
        assert model.wiring.reads == (LAYERS,)
        states = torch.randn(1, 6, base.hidden_size, generator=torch.Generator().manual_seed(0))
        assert torch.equal(model.states(states), states)
        logits.append(model(text, hidden=states).logits)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_sizes_and_angles_that_configs_name_otherwise(base: Base, tmp_path: Path) -> None:
    """The width of Llama 4's dense layers; a rotation of all dimensions whatever share a config has of its base."""
    wide = {"model_type": "llama4_text", "intermediate_size": 8, "intermediate_size_mlp": CONFIG["intermediate_size"]}
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    plain, part = ({"rope_parameters": {**rope, **more}} for more in ({}, {"partial_rotary_factor": 0.5}))
    models = [load_draft(head(tmp_path / f"{i}", **one), base).model for i, one in enumerate(({}, wide, plain, part))]
    logits = [model(torch.arange(6)[None]).logits for model in models]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[2], logits[3])
    assert not torch.equal(logits[0], logits[2])


def test_a_peagle_of_many_layers(tmp_path: Path) -> None:
    """It is no draft model by its number of layers."""
    base = tiny_base("llama", 1, vocab_size=96, hidden_size=32, num_hidden_layers=6)
    config = peagle_specforge(layer_config(5), eagle_config={"use_aux_hidden_state": False})  # it has no such form
    state = random_state("peagle-specforge", config, 6, 0)
    save_file({key: one.contiguous() for key, one in state.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    draft = load_draft(str(tmp_path), base)
    assert (draft.model.wiring.title, len(draft.model.decoder.layers)) == ("P-EAGLE (SpecForge)", 5)


def test_what_engines_do_not_read(base: Base, tmp_path: Path) -> None:
    """A t2d as classes begin with it, a prefix of a class around the head, a copy of the base's: one draft."""

    def begun(value: int) -> Callable[[State], Any]:
        return lambda state: state.update(t2d=torch.full((VOCAB,), value, dtype=torch.bool))

    def within(state: State) -> None:
        for key in [*state]:
            state["model." * (key != "lm_head.weight") + key] = state.pop(key)

    one = load_draft(head(tmp_path / "plain"), base)
    for number, change in enumerate((begun(0), begun(1), within, _with("verifier_lm_head.weight", VOCAB, WIDTH))):
        name = head(tmp_path / str(number), change)
        assert kind_in_files(name) == "eagle"
        assert load_draft(name, base).fingerprint == one.fingerprint


@torch.inference_mode()
def test_embeddings_without_the_scale_of_gemma(tmp_path: Path) -> None:
    """Drafters were trained on copies of the base's table, which Gemma's class multiplies by a constant."""
    base = tiny_base("gemma3", 1, vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS)
    table, ids = base.model.get_input_embeddings(), torch.arange(VOCAB)
    assert not torch.allclose(table(ids), table.weight)
    assert torch.equal(load_draft(head(tmp_path), base).model.embedded(ids), table.weight)


@torch.inference_mode()
def test_a_first_head_with_an_lm_head(base: Base, tmp_path: Path) -> None:
    """EAGLE-1 may have one of its own, as EAGLE of Llama 4, which vLLM reads."""
    config = {key: value for key, value in CONFIG.items() if key != "draft_vocab_size"}
    state = random_state("eagle1", config, LAYERS, seed=1) | {"lm_head.weight": torch.randn(VOCAB, WIDTH)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(state, tmp_path / "model.safetensors")
    draft = load_draft(str(tmp_path), base)
    states = torch.randn(3, WIDTH)
    assert torch.equal(draft.model.head(states), states @ state["lm_head.weight"].T)


@torch.inference_mode()
def test_layers_in_another_precision() -> None:
    """Each of several MTP layers has the LM head of the base that it is put beside."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft, half = tiny_module(base, "mtp3"), base.in_dtype("bfloat16")
    model: Any = beside(half, copy.deepcopy(draft.model), "half").model
    for level in range(3):
        hidden = torch.randn(1, 1, model.state_width, dtype=torch.bfloat16)
        given = {"level": level, "use_cache": False, "position_ids": torch.tensor([[5]])}
        assert model(torch.tensor([[3]]), hidden, **given).logits.dtype == torch.bfloat16


def test_a_head_of_other_weights_is_warned_of(base: Base, tmp_path: Path) -> None:
    """Its config may name the base and the fingerprint of its weights, in any of our precisions."""
    made_for = {"name": base.name, "fingerprint": base.in_dtype("bfloat16").fingerprint}
    assert load_draft(head(tmp_path / "same", base=made_for), base).notes == ()
    [note] = load_draft(head(tmp_path / "other", base={**made_for, "fingerprint": "0" * 16}), base).notes
    assert f"was made for other weights than those of {base.name}" in note
    [note] = load_draft(head(tmp_path / "named", base={**made_for, "name": "models/other"}), base).notes
    assert "was made for models/other, by its config.json" in note
    with pytest.warns(UserWarning, match="was made for models/other, by its config.json"):
        as_draft(tmp_path / "named", base)


@torch.inference_mode()
def test_an_mtp_layer_of_speculators(tmp_path: Path) -> None:
    """Its projection reads the embedding first: with the halves exchanged, MiMo's layer drafts the same."""
    write(tmp_path / "base", "mimo")
    base = load_base(str(tmp_path / "base"), dtype="float32")
    own = load_draft("mtp", base)
    state = load_file(tmp_path / "base" / "model.safetensors")
    layer = {key.removeprefix("model."): one for key, one in state.items() if "mtp_layers" in key}
    fc = layer["mtp_layers.0.input_proj.weight"]
    layer["mtp_layers.0.input_proj.weight"] = fc.roll(fc.shape[1] // 2, dims=1)
    (tmp_path / "draft").mkdir()
    save_file(layer, tmp_path / "draft" / "model.safetensors")
    verifier = {"verifier": {"name_or_path": "org/other"}}
    config = {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1, "speculators_config": verifier}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    assert kind_in_files(str(tmp_path / "draft")) == "mtp"
    draft = load_draft(str(tmp_path / "draft"), base)
    assert draft.model.wiring.title == "MTP (speculators)"
    assert "was made for org/other" in draft.notes[0]
    ids, hidden = torch.tensor([[3, 1, 4]]), torch.randn(1, 3, base.hidden_size)
    found = [one.forward(ids, hidden=hidden, use_cache=False)[0] for one in (own, draft)]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


def _without(name: str) -> Callable[[State], Any]:
    return lambda state: state.pop(name)


def _with(name: str, *shape: int) -> Callable[[State], Any]:
    return lambda state: state.update({name: torch.zeros(shape)})


def _offsets(tokens: list[int]) -> Callable[[State], Any]:
    return lambda state: state.update(d2t=torch.tensor(tokens) - torch.arange(len(tokens)))


WRONG: dict[str, tuple[Callable[[State], Any], dict[str, Any], Code, str]] = {
    "missing": (_without("midlayer.hidden_norm.weight"), {}, Code.DRAFT_INVALID, "lacks midlayer.hidden_norm.weight"),
    "unexpected": (_with("extra.weight", 3), {}, Code.DRAFT_INVALID, "has also extra.weight"),
    "two of a name": (_with("model.fc.weight", WIDTH, 3 * WIDTH), {}, Code.DRAFT_INVALID, "has also model.fc.weight"),
    "misshapen": (_with("norm.weight", 3), {}, Code.DRAFT_INVALID, r"norm.weight has shape \[3\], not \[16\]"),
    "no d2t": (_without("d2t"), {}, Code.DRAFT_INVALID, "24 tokens and no d2t"),
    "d2t of too few": (_offsets([1, 2]), {}, Code.DRAFT_INVALID, "d2t that is not 24 distances"),
    "d2t twice": (_offsets([7] * 24), {}, Code.DRAFT_INVALID, "d2t that is not 24 distances"),
    "d2t outside": (_offsets([*range(23), VOCAB]), {}, Code.DRAFT_INVALID, "d2t that is not 24 distances"),
    "d2t of other tokens": (_offsets([*range(24)]), {}, Code.DRAFT_INVALID, "d2t that is not 24 distances"),
    "vocabulary": (len, {"vocab_size": 41}, Code.DRAFT_MISMATCH, "vocabulary has 41 tokens, the base's 40"),
    "width": (len, {"target_hidden_size": 8}, Code.DRAFT_MISMATCH, "reads states of width 8, the base's are 16"),
    "layers": (
        len,
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
        Code.DRAFT_MISMATCH,
        "reads the states .1, 2, 3., and the base has 2 layers",
    ),
    "ids": (len, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "012"}}, Code.DRAFT_INVALID, "not a list"),
    "huge": (len, {"intermediate_size": 1 << 40}, Code.DRAFT_INVALID, r"mlp.gate_proj.weight has shape .24, 16., not"),
    "no heads": (len, {"num_attention_heads": 0}, Code.DRAFT_INVALID, "modulo by zero"),
    "negative": (len, {"intermediate_size": -5}, Code.DRAFT_INVALID, "no module can be made from its config"),
    "rotary": (len, {"rope_parameters": {"rope_type": "odd"}}, Code.DRAFT_INVALID, "no module can be made"),
    "no norm": (_without("norm.weight"), {}, Code.DRAFT_INVALID, "lacks norm.weight"),
    "no head": (_without("lm_head.weight"), {}, Code.DRAFT_INVALID, "lacks lm_head.weight"),
    "no fc_norm": (len, {"fc_norm": True}, Code.DRAFT_INVALID, "lacks fc_norm.0.weight"),
    "a layer too many": (_with("layers.7.mlp.up_proj.weight", 24, 16), {}, Code.DRAFT_INVALID, "has also layers.7"),
    "quantised": (
        lambda state: state.update({"fc.weight": state["fc.weight"].to(torch.float8_e4m3fn)}),
        {},
        Code.DRAFT_INVALID,
        "weights of torch.float8",
    ),
    "odd names": (len, {"architectures": [1], "hidden_act": "odd"}, Code.DRAFT_INVALID, "no module can be made"),
    "names twice": (
        lambda state: state.update({"layers.0.hidden_norm.weight": state["midlayer.hidden_norm.weight"].clone()}),
        {},
        Code.DRAFT_INVALID,
        "has also ",
    ),
    "not finite": (_with("fc.weight", 16, 48), {}, Code.NOT_FINITE, "not finite"),
    "P-EAGLE": (_with("mask_hidden", 1, 1, 48), {}, Code.DRAFT_INVALID, "mask_token_id is None and its num_depths 8"),
    "P-EAGLE, mask": (
        _with("mask_hidden", 1, 1, 48),
        {"pard_token": VOCAB},
        Code.DRAFT_MISMATCH,
        "its mask is token 40",
    ),
    "P-EAGLE, levels": (
        _with("mask_hidden", 1, 1, 48),
        {"pard_token": 1, "num_depths": 0},
        Code.DRAFT_INVALID,
        "its num_depths 0",
    ),
    "Markov head": (_with("markov_head.markov_w1.weight", 4, 4), {}, Code.DRAFT_INVALID, "has also markov_head"),
    "DeepSeek-V4": (
        _with("mtp.2.markov_head.embed.weight", 4, 4),
        {},
        Code.DRAFT_INVALID,
        "DSpark in the layout of",
    ),
    "DFlash": (
        len,
        {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 5, "block_size": 4, "mask_token_id": 1}
        | {"target_layer_ids": [1]},
        Code.DRAFT_INVALID,
        r"is read as DFlash \(z-lab\), and",
    ),
    "DFlash2": (
        len,
        {"architectures": ["DFlash2DraftModel"], "num_hidden_layers": 5},
        Code.DRAFT_INVALID,
        "its mask_token_id is None",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_fault_is_one_error(name: str, base: Base, tmp_path: Path) -> None:
    """The error names the tensor or the number; a head of another kind is called what it is."""
    change, config, code, what = WRONG[name]

    def changed(state: State) -> None:
        change(state)
        if name == "not finite":
            state["fc.weight"][0, 0] = torch.nan

    with pytest.raises(TreeoptError, match=what) as caught:
        load_draft(head(tmp_path, changed, **config), base)
    assert caught.value.code is code


def test_ids_of_layers(base: Base, tmp_path: Path) -> None:
    """Heads of equal weights that read other states are other drafts; ids at the top are those of vLLM."""
    ids = "eagle_aux_hidden_state_layer_ids"
    configs = ({}, {"eagle_config": {ids: [0, 1, 0]}}, {"eagle_config": None, ids: [1, 1, 2]})
    drafts = [load_draft(head(tmp_path / str(i), **config), base) for i, config in enumerate(configs)]
    assert [draft.model.wiring.reads for draft in drafts] == [(1, 1, 2), (1, 2, 1), (1, 1, 2)]
    assert drafts[0].fingerprint == drafts[2].fingerprint != drafts[1].fingerprint


def test_mtp_with_embeddings_of_its_own(tmp_path: Path) -> None:
    """Copies of the base's are left out, others are refused."""
    write(tmp_path, "glm4_moe")
    base = load_base(str(tmp_path), dtype="float32")
    load_draft("mtp", base)
    base.model.get_input_embeddings().weight.data += 1
    with pytest.raises(TreeoptError, match=r"embed_tokens\.weight that is not the base's"):
        load_draft("mtp", base)


def test_mtp_of_a_base_without_one(tmp_path: Path) -> None:
    """No tensors of one, and tensors of a layout that is not read, are told apart; a config of more layers is told."""
    write(tmp_path, "mimo")
    whole = (tmp_path / "model.safetensors").read_bytes()
    base = load_base(str(tmp_path), dtype="float32")
    assert not load_draft("mtp", base).notes
    base.model.config.num_nextn_predict_layers = 3
    assert "3 MTP layers by its config.json, and its checkpoint has 1" in load_draft("mtp", base).notes[0]
    base.model.save_pretrained(tmp_path)
    with pytest.raises(TreeoptError, match="has no MTP layer that treeopt reads") as caught:
        load_draft("mtp", base)
    assert caught.value.code is Code.DRAFT_INVALID
    assert "no tensors of one" in caught.value.why
    for part in (b"input_proj.weight", b"token_layernorm", b"hidden_layernorm"):
        whole = whole.replace(part, b"other_" + part[6:])
    (tmp_path / "model.safetensors").write_bytes(whole)
    with pytest.raises(TreeoptError) as caught:
        load_draft("mtp", base)
    assert "its layout is another one, with tensors such as model.mtp_layers.0." in caught.value.why


def test_a_draft_model_stays_one(base: Base, tmp_path: Path) -> None:
    """A causal language model of one layer has no tensors of a head."""
    tiny_base("llama", 2, vocab_size=VOCAB, num_hidden_layers=1).model.save_pretrained(tmp_path)
    assert kind_in_files(str(tmp_path)) == "model"
    draft = load_draft(str(tmp_path), base)
    assert draft.model.config.num_hidden_layers == 1
    assert as_draft(draft, base) is draft
