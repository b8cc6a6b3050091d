"""Loading base models: whole checkpoints of all families, and the damage that must not pass for one."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from machines import accelerator
from mtp_checkpoints import configs
from tiny import FAMILIES, VOCAB, chat_base, tiny_base
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import CACHE, Base, cache_name, check_runs, load_base
from treeopt.verify.probe import check_trees

State = dict[str, torch.Tensor]
WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


def test_generate_leaves_the_shared_model_as_it_is() -> None:
    """Another thread sees the model's end tokens while `generate` runs with a config of its own."""
    base, seen = tiny_base("llama"), list[tuple[int, ...]]()
    base.model.generation_config.eos_token_id = [3, 5]

    def look(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(base.eos_ids)
        return scores

    ids = torch.tensor([[4, 7]])
    base.generate(ids, torch.ones_like(ids), 4, logits_processor=[look])
    assert seen
    assert {*seen, base.eos_ids} == {(3, 5)}


@pytest.fixture(scope="module")
def tiny() -> Base:
    """A random llama."""
    return tiny_base("llama")


@pytest.fixture
def folder(tiny: Base, tmp_path: Path) -> Path:
    """Its checkpoint, to be damaged."""
    tiny.model.save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Callable[[State], State]) -> None:
    """Write the folder's weights anew."""
    state = change(safetensors.torch.load_file(folder / WEIGHTS))
    safetensors.torch.save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def configure(folder: Path, file: str = "config.json", **fields: Any) -> None:
    """Set fields of one of the folder's settings files."""
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def fault(name: str | Path) -> TreeoptError:
    """The error of loading; its text names nothing that is not shown, and gives no advice that would run code."""
    with pytest.raises(TreeoptError) as caught:
        load_base(str(name), device="cpu")
    text = str(caught.value)
    assert not any(word in text for word in ("weights_only=False", "`False`", "above report", "trust_remote_code"))
    return caught.value


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_load_base_saved_family(family: str, tied: bool, tmp_path: Path) -> None:
    """Every family comes back as it was saved, with nothing missing and nothing to warn about."""
    saved = tiny_base(family, tie_word_embeddings=tied)
    saved.model.save_pretrained(tmp_path)
    found = load_base(str(tmp_path), device="cpu")
    assert found.notes == ()
    for key, tensor in saved.model.state_dict().items():
        torch.testing.assert_close(found.model.state_dict()[key], tensor, rtol=0, atol=0)


def test_load_base_without_its_accelerator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of torch for an accelerator that is not there loads a model by default, on the CPU in float32."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    accelerator(monkeypatch, kind="cuda", count=0)
    base = load_base(str(folder))
    assert (base.device, base.dtype_name) == (torch.device("cpu"), "float32")


@pytest.mark.parametrize("missing", [UP, "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_load_base_missing_weight(folder: Path, missing: str) -> None:
    """A weight that the checkpoint lacks is E304 by name, not a random number."""
    rewrite(folder, lambda state: {key: tensor for key, tensor in state.items() if key != missing})
    error = fault(folder)
    assert error.code is Code.MODEL_INVALID
    assert f"it lacks {missing}" in error.what


def test_load_base_missing_many(folder: Path) -> None:
    """Of many missing weights the first are named and the others counted."""
    rewrite(folder, lambda state: {f"other.{key}": tensor for key, tensor in state.items()})
    count = len(tiny_base("llama").model.state_dict())
    assert f"and {count - 6} more" in fault(folder).what


def test_load_base_wrong_shape(folder: Path) -> None:
    """A weight of another shape is E304 with both shapes."""
    rewrite(folder, lambda state: {**state, UP: state[UP][:-1].clone()})
    error = fault(folder)
    assert error.code is Code.MODEL_INVALID
    assert f"{UP} [47, 32], not [48, 32]" in error.what


def test_load_base_unused_weights_are_noted(folder: Path) -> None:
    """Weights that the architecture does not use are named in a note; the model loads."""
    rewrite(folder, lambda state: {**state, "heads.0.weight": torch.zeros(3)})
    (note,) = load_base(str(folder), device="cpu").notes
    assert "does not use: heads.0.weight" in note


def test_load_base_fewer_layers_are_noted(folder: Path) -> None:
    """Layers beyond the config's number are weights that are not used."""
    configure(folder, num_hidden_layers=1)
    assert "model.layers.1." in load_base(str(folder), device="cpu").notes[0]


@pytest.mark.parametrize("place", ["../../etc/passwd", "/etc/passwd", "a/../../b", "..\\b", "C:\\b", "C:b", "."])
def test_load_base_index_outside_its_folder(folder: Path, place: str) -> None:
    """An index that names a file outside its folder is refused before anything is read."""
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {UP: place}}))
    error = fault(folder)
    assert error.code is Code.FILE_INVALID
    assert "not in its folder" in error.what


def test_load_base_shards(folder: Path, tiny: Base) -> None:
    """An index of files beside it loads, links and all."""
    (folder / WEIGHTS).rename(folder / "blob")
    (folder / "model-1.safetensors").symlink_to(folder / "blob")
    weight_map = dict.fromkeys(tiny.model.state_dict(), "model-1.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert torch.equal(load_base(str(folder), device="cpu").lm_head.weight, tiny.lm_head.weight)


class RunsCode:
    """Pickled, asks to make a file named `ran`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def damaged() -> Iterator[tuple[str, Callable[[Path], object], Code, str]]:
    """Name, damage, the error's code and words of it."""

    def text(file: str, content: str) -> Callable[[Path], object]:
        return lambda folder: (folder / file).write_text(content)

    def config(**fields: Any) -> Callable[[Path], object]:
        return lambda folder: configure(folder, **fields)

    def weights(change: Callable[[State], State]) -> Callable[[Path], object]:
        return lambda folder: rewrite(folder, change)

    def pickled(data: Any) -> Callable[[Path], object]:
        return lambda folder: ((folder / WEIGHTS).unlink(), torch.save(data, folder / "pytorch_model.bin"))

    def of_python(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": RunsCode()}))

    def folder_for(file: str) -> Callable[[Path], object]:
        return lambda folder: ((folder / file).unlink(), (folder / file).mkdir())

    def garbage(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / "pytorch_model.bin").write_bytes(b"garbage" * 9)

    model, file = Code.MODEL_INVALID, Code.FILE_INVALID
    spoil = {"nan": float("nan"), "inf": float("inf")}
    yield "empty config", text("config.json", ""), file, "not JSON"
    yield "empty object", text("config.json", "{}"), model, "model_type"
    yield "a list", text("config.json", "[1]"), file, "is not a JSON object"
    yield "null", text("config.json", "null"), file, "is not a JSON object"
    yield "deep", text("config.json", "[" * 100_000), file, "not JSON"
    yield "config a folder", folder_for("config.json"), file, "cannot be read"
    yield "weights a folder", folder_for(WEIGHTS), model, "no file named"
    yield "no weights", lambda folder: (folder / WEIGHTS).unlink(), model, "no file named"
    yield "truncated", lambda folder: os.truncate(folder / WEIGHTS, 5000), model, "deserializing header"
    yield "empty weights", lambda folder: os.truncate(folder / WEIGHTS, 0), model, "header too small"
    yield "another architecture", config(model_type="gpt2"), model, "does not have all weights of GPT2LMHeadModel"
    yield "no language model", config(model_type="t5"), model, "(t5) is no causal language model"
    yield "unknown architecture", config(model_type="nosuch"), model, "nosuch"
    yield "model type a number", config(model_type=5), model, "`5`"
    yield "size a text", config(hidden_size="many"), model, "expected int, got str (value: 'many')"
    yield "huge", config(hidden_size=32 * 4096, vocab_size=2**40), model, "the files hold"
    yield "hugest", config(hidden_size=2**200, num_attention_heads=4), model, "transformers can load"
    yield "many layers", config(num_hidden_layers=90_000), model, "which its files cannot hold"
    yield "too many layers", config(num_hidden_layers=10**15), model, "layers, more than 100,000"
    yield "no layers", config(num_hidden_layers=0), model, "its forward fails"
    yield "negative context", config(max_position_embeddings=-5), model, "max_position_embeddings is -5"
    yield "unknown activation", config(hidden_act="nosuch"), model, "nosuch"
    yield "end a text", text("generation_config.json", '{"eos_token_id": "x"}'), model, "eos_token_id is 'x'"
    yield "end true", text("generation_config.json", '{"eos_token_id": [1, true]}'), model, "eos_token_id is True"
    yield "filler a text", text("generation_config.json", '{"pad_token_id": "x"}'), model, "transformers can load"
    yield "generation garbage", text("generation_config.json", "{{"), file, "generation_config.json is not JSON"
    yield "generation a list", text("generation_config.json", "[]"), file, "generation_config.json is not a JSON object"
    yield "tokenizer garbage", text("tokenizer.json", "{{"), model, "tokenizer of"
    yield "tokenizer empty", text("tokenizer.json", "{}"), model, "tokenizer of"
    yield "index a list", text(f"{WEIGHTS}.index.json", "[]"), file, "is not a JSON object"
    yield "index of numbers", text(f"{WEIGHTS}.index.json", '{"weight_map": {"a": 1}}'), file, "no weight_map"
    yield "code", _with_code, model, "needs code from its own repository"
    yield "pickle garbage", garbage, model, "its files are damaged"
    yield "pickle with code", pickled({"a": RunsCode()}), Code.PICKLE_REFUSED, "mkdir"
    yield "pickle beside weights", lambda folder: (of_python(folder), text(WEIGHTS, "x")(folder)), model, "can load"
    yield "pickle of Python", of_python, Code.PICKLE_REFUSED, "a pickle that PyTorch did not write"
    yield "pickle of a list", pickled([1, 2]), model, "transformers can load"
    yield "int8", weights(lambda state: {k: t.to(torch.int8) for k, t in state.items()}), model, "stored as I8"
    for name, value in spoil.items():
        spoiled = weights(lambda state, value=value: {**state, UP: state[UP] * value})  # type: ignore[misc]
        yield name, spoiled, Code.NOT_FINITE, "the model"
    yield "one nan row", weights(_with_nan_row), Code.NOT_FINITE, "the model"


def _with_code(folder: Path) -> None:
    """A config whose classes are in a file of the checkpoint."""
    configure(folder, model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    (folder / "own.py").write_text("import os\nos.mkdir('ran')\nfrom transformers import LlamaConfig as C\n")


def _with_nan_row(state: State) -> State:
    """One token's row of the LM head is no number: no prompt shows it, every logit of that token does."""
    state["lm_head.weight"][VOCAB - 1] = float("nan")
    return state


@pytest.mark.parametrize(("damage", "code", "words"), [pytest.param(*rest, id=name) for name, *rest in damaged()])
def test_load_base_damaged(
    folder: Path,
    damage: Callable[[Path], object],
    code: Code,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Whatever is wrong with a folder, it is one of our errors that says what; nothing of it is run."""
    damage(folder)
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # where a library asks whether it may run code
    current = tmp_path_factory.mktemp("current")
    monkeypatch.chdir(current)
    error = fault(folder)
    assert error.code is code
    assert words in f"{error.what} {error.why}"
    assert list(current.iterdir()) == []


def test_load_base_experts_that_do_not_go_together(tmp_path: Path) -> None:
    """Where weights cannot be put together, transformers' report is not shown, so it is not referred to."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "num_local_experts": 2, "vocab_size": VOCAB, "eos_token_id": None}
    made = AutoConfig.for_model("mixtral", **sizes, **experts)
    AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    assert load_base(str(tmp_path), device="cpu").notes == ()
    one = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    rewrite(tmp_path, lambda state: {**state, one: state[one][:-1].clone()})
    error = fault(tmp_path)
    assert (error.code, error.why) == (Code.MODEL_INVALID, "its files are damaged, or of different models")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_load_base_other_floats(folder: Path, tiny: Base, dtype: torch.dtype) -> None:
    """Weights stored as other floating-point numbers are those numbers."""
    rewrite(folder, lambda state: {key: tensor.to(dtype) for key, tensor in state.items()})
    found = load_base(str(folder), device="cpu").lm_head.weight
    assert torch.equal(found, tiny.lm_head.weight.to(dtype).float())


@pytest.mark.parametrize(
    ("kind", "text", "vision", "expected"),
    [
        (
            "qwen2_vl",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
            {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
            "Qwen2VLForConditionalGeneration",
        ),
        (
            "qwen3_5",
            {"head_dim": 16, "layer_types": ["full_attention", "full_attention"]},
            {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
            "Qwen3_5ForCausalLM",
        ),
    ],
)
def test_load_base_of_images_and_text(
    kind: str, text: dict[str, Any], vision: dict[str, int], expected: str, tmp_path: Path
) -> None:
    """The class for text alone where transformers has one, else the one for both, which verifies trees of text."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = AutoConfig.for_model(kind, text_config={**sizes, **heads, **text}, vision_config=vision)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    base = load_base(str(tmp_path), dtype="float32")
    assert (type(base.model).__name__, base.vocab_size, base.context, base.layers) == (expected, VOCAB, 128, 2)
    check_trees(base)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 10**9
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TreeoptError, match="the files hold"):  # before memory is used for it
        load_base(str(tmp_path), dtype="float32")


@pytest.mark.parametrize(("dtype", "attention"), [("float32", "sdpa"), ("bfloat16", "eager"), ("float16", "sdpa")])
def test_attention_by_dtype(folder: Path, tiny: Base, dtype: str, attention: str) -> None:
    """Attention on a CPU is the one that is fast in the dtype, loaded in it or copied to it."""
    loaded = load_base(str(folder), device="cpu", dtype=dtype)
    for base in (loaded, tiny.in_dtype(dtype), tiny.in_dtype("bfloat16").in_dtype(dtype)):
        assert (base.dtype_name, base.model.config._attn_implementation) == (dtype, attention)


def test_numbers_that_stay_in_float32() -> None:
    """A copy in another dtype keeps what transformers keeps, here the bias by which experts are chosen."""
    model = AutoModelForCausalLM.from_config(configs()["glm4_moe"], dtype=torch.float32)
    copied = Base(model, None, "experts").in_dtype("bfloat16").model
    kinds = {key.split(".")[-1]: one.dtype for key, one in copied.state_dict().items()}
    assert (kinds["e_score_correction_bias"], kinds["weight"]) == (torch.float32, torch.bfloat16)


def test_unknown_dtypes() -> None:
    """They are not taken as `auto`."""
    for dtype in ("fp16", torch.bfloat16):
        with pytest.raises(ValueError, match="one of auto, float32"):
            load_base("pocket", dtype=dtype)  # type: ignore[arg-type]


def test_load_base_half_that_overflows(folder: Path) -> None:
    """A model whose states overflow in its dtype is E504, and the way out is named."""
    rewrite(folder, lambda state: {**state, UP: state[UP] * 1e6})
    assert load_base(str(folder), device="cpu").dtype_name == "float32"
    with pytest.raises(TreeoptError, match="not finite") as caught:
        load_base(str(folder), device="cpu", dtype="float16")
    assert caught.value.code is Code.NOT_FINITE
    assert "--dtype float32" in caught.value.fix


def test_load_base_names_of_any_kind(tmp_path: Path) -> None:
    """A name that is too long for a path, a loop of links, and an unknown home folder are errors of ours."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("x" * 5000, str(tmp_path / "loop"), "~nobodyatall/model", "a\0b"):
        assert fault(name).code in (Code.HUB_UNREACHABLE, Code.FILE_MISSING, Code.MODEL_INVALID, Code.FILE_INVALID)


def test_load_base_hub_index_outside(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The index of a hub repository is looked at before its weights are fetched."""
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": {UP: "../../x"}}))
    fetched: list[Any] = []
    snapshot = lambda *name, **options: fetched.append(options["allow_patterns"]) or str(folder)  # noqa: E731
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert fault("owner/model").code is Code.FILE_INVALID
    assert fetched == [["*.json"]]
    (folder / f"{WEIGHTS}.index.json").unlink()
    assert fault("owner/model").code is Code.HUB_UNREACHABLE  # its weights are not in the cache


def test_load_base_tokenizer_comes_along(tmp_path: Path) -> None:
    """The tokenizer is loaded with the weights; a folder without one has none."""
    chat = chat_base()
    chat.model.save_pretrained(tmp_path)
    assert load_base(str(tmp_path), device="cpu").tokenizer is None
    assert chat.tokenizer is not None
    chat.tokenizer.save_pretrained(tmp_path)
    found = load_base(str(tmp_path), device="cpu").tokenizer
    assert found is not None
    assert found("w1 w2")["input_ids"] == chat.tokenizer("w1 w2")["input_ids"]


def test_probe_says_that_the_base_gives_no_numbers() -> None:
    """A model of a caller's own whose logits are NaN is E504, not a model that cannot do trees."""
    base = tiny_base("llama")
    with torch.no_grad():
        base.lm_head.weight[3] = float("nan")
    with pytest.raises(TreeoptError, match="not finite") as caught:
        check_trees(base)
    assert caught.value.code is Code.NOT_FINITE


@pytest.mark.parametrize(
    ("pad", "eos", "expected"),
    [(7, 9, 7), (None, 9, 9), (None, [9, 11], 9), (None, None, 0), (VOCAB, 9, 9), (-1, None, 0)],
)
def test_padding_is_a_token_of_the_vocabulary(pad: int | None, eos: Any, expected: int) -> None:
    """The model's own padding token, else its end of text, else token 0; none outside the vocabulary."""
    base = tiny_base("llama")
    base.model.generation_config.pad_token_id, base.model.generation_config.eos_token_id = pad, eos
    assert base.pad_id == expected


def test_looped_model_without_a_last_state_is_refused() -> None:
    """transformers gives None for the last state where layers run several times; logits alone do not verify trees."""
    base = tiny_base("llama")
    base.model.register_forward_hook(lambda _model, _inputs, out: setattr(out, "hidden_states", (None,)))
    check_runs(base)
    with pytest.raises(TreeoptError, match="gives no hidden state that its LM head reads") as caught:
        check_trees(base)
    assert caught.value.code is Code.NO_TREES


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, where it imports its compiler
def test_cache_name_is_that_of_the_forward() -> None:
    """Also of a compiled model, whose own forward names no arguments, and of code written for another name."""

    class Other(torch.nn.Module):
        def forward(self, ids: torch.Tensor, cache_params: Any = None) -> torch.Tensor:
            return ids

    for model, name in ((tiny_base("llama").model, CACHE), (Other(), "cache_params")):
        assert cache_name(model) == cache_name(torch.compile(model)) == name
