"""MTP layers in the checkpoints of their families, against transformers' own MTP model where it has one."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from mtp_checkpoints import VOCAB, WIDTH, configs, write
from safetensors.torch import load_file, save_file
from tiny import tiny_base
from tiny_modules import tiny_module
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Exaone4Config, ExaoneMoeConfig, PreTrainedConfig
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import CACHE, Base, load_base
from treeopt.models.compatibility import check_draft, check_heads_fit
from treeopt.models.config_shapes import config_shape
from treeopt.models.draft_files import load_draft
from treeopt.models.draft_layouts import mtp_layout
from treeopt.models.draft_module import DraftModule, layout_of
from treeopt.models.variants import variants_of
from treeopt.train.medusa1 import new_heads
from treeopt.verify.probe import levels_of, probed

OF_TRANSFORMERS = ("deepseek_v3", "glm4_moe", "mellum", "step3p7", "inkling_text", "inkling_mm_model")
SEVERAL = ("deepseek_v3", "glm4_moe", "step3p7", "inkling_text", "inkling_mm_model")  # layers
# Their configs in transformers do not say that they have MTP layers; its MTP model takes their decoder layers, too.
TOLD = ("glm4_moe_lite", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.fixture(scope="module", params=configs())
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Base]:
    """A family, and its base model."""
    folder: Path = tmp_path_factory.mktemp("mtp") / request.param
    write(folder, request.param)
    return request.param, load_base(str(folder), dtype="float32")


def test_reads_every_family(loaded: tuple[str, Base]) -> None:
    """All tensors of the layer are read, and it has the base's state after the final norm beside the embedding."""
    family, base = loaded
    draft = load_draft("mtp", base)
    assert isinstance(draft.model, DraftModule)
    assert draft.model.wiring.kind == "mtp"
    assert draft.model.wiring.reads == (base.layers,)
    assert draft.model.wiring.state_first == (family in ("mimo", "inkling_mm_model"))


_BY_NUMBER = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.o_proj", "mlp.experts.1.up_proj")
_OF_QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.self_attn.o_proj")
_OF_INKLING = ("embed_norm", "hidden_norm", "input_proj", "transformer_block.self_attn.k_sconv.conv1d")
_OF_MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "self_attn.o_proj", "mlp.up_proj")
NAMED = {  # tensors of the MTP layer as its family publishes them: four parts, and some of the decoder layer
    "deepseek_v3": [f"model.layers.3.{name}.weight" for name in _BY_NUMBER],
    "glm4_moe": [f"model.layers.3.{name}.weight" for name in _BY_NUMBER],
    "glm4_moe_lite": [f"model.layers.3.{name}.weight" for name in _BY_NUMBER],
    "step3p7": [f"model.layers.3.{name}.weight" for name in (*_BY_NUMBER[:-1], "mlp.up_proj")],
    "mellum": [f"mtp.{name}.weight" for name in (*_OF_QWEN, "layers.0.mlp.experts.1.up_proj")],
    "qwen3_next": [f"mtp.{name}.weight" for name in (*_OF_QWEN, "layers.0.mlp.experts.1.up_proj")],
    "qwen3_5_moe_text": [f"mtp.{name}.weight" for name in (*_OF_QWEN, "layers.0.mlp.experts.1.up_proj")],
    "qwen3_5_text": [f"mtp.{name}.weight" for name in (*_OF_QWEN, "layers.0.mlp.up_proj")],
    "inkling_text": [f"model.mtp.layers.0.{name}.weight" for name in (*_OF_INKLING, "transformer_block.mlp.up_proj")],
    "inkling_mm_model": [
        "model.mtp.chain_norm.weight",
        *(f"model.mtp.layers.0.{name}.weight" for name in _OF_INKLING[:3]),
    ],
    "mimo": [f"model.mtp_layers.0.{name}.weight" for name in _OF_MIMO],
}


def refused(base: Base, state: dict[str, Tensor], folder: Path) -> TreeoptError:
    """The error of the MTP layer among these tensors, as those of a base's checkpoint."""
    save_file(state, folder / "model.safetensors")
    with pytest.raises(TreeoptError) as caught:
        load_draft("mtp", dataclasses.replace(base, name=str(folder)))
    assert caught.value.code is Code.DRAFT_INVALID
    return caught.value


def test_faults_are_named_as_in_the_files(loaded: tuple[str, Base], tmp_path: Path) -> None:
    """A tensor that is missing, or of another shape, has its name in the checkpoint, whatever the layout."""
    family, base = loaded
    state = load_file(Path(base.name) / "model.safetensors")
    for name in NAMED[family]:
        without = {key: one for key, one in state.items() if key != name}
        assert len(without) == len(state) - 1
        assert f"and lacks {name}\n" in str(refused(base, without, tmp_path))
        shape = list(state[name].shape)
        found = str(refused(base, state | {name: torch.zeros(*shape[:-1], 3)}, tmp_path))
        assert f"and {name} has shape {[*shape[:-1], 3]}, not {shape}\n" in found
    quantised = {key: one.to(torch.int8) if key == NAMED[family][-1] else one for key, one in state.items()}
    assert f"has weights of torch.int8, such as {NAMED[family][-1]}" in str(refused(base, quantised, tmp_path))
    extra = f"{NAMED[family][-1].rsplit('.', 2)[0]}.extra.weight"
    assert f"has also {extra}" in str(refused(base, state | {extra: torch.zeros(3)}, tmp_path)) or "experts" in extra


_FAMILY = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}


def test_layers_that_are_not_read_are_named(tmp_path: Path) -> None:
    """The error names their family; of a checkpoint without MTP tensors it says so."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("mimo_v2_flash", **_FAMILY)).save_pretrained(tmp_path)
    base = load_base(str(tmp_path), dtype="float32")
    state = load_file(tmp_path / "model.safetensors")
    assert refused(base, state, tmp_path).why == "it has no tensors of one"
    tensors = ("enorm", "hnorm", "eh_proj", "self_attn.o_proj")
    layer = {f"model.mtp.layers.0.{name}.weight": torch.ones(WIDTH) for name in tensors}
    assert refused(base, state | layer, tmp_path).why == "its layout is MiMo-V2's, which is not read"


@pytest.mark.parametrize("heads", [(4, 2), (2, 4), (2, 2)])
def test_heads_of_step_3_7_are_those_of_its_tensors(heads: tuple[int, int], tmp_path: Path) -> None:
    """Its MTP layers may have another number of heads than its sliding layers, and these than the others."""
    write(tmp_path, "step3p7", count=2, heads=heads)
    draft = load_draft("mtp", load_base(str(tmp_path), dtype="float32"))
    assert [layer.self_attn.num_heads for layer in draft.model.decoder.layers] == [heads[1]]
    assert layout_of(draft.model) == "MTP (step3p5), 2 layers"


def test_names_that_step_3_7_publishes(tmp_path: Path) -> None:
    """vLLM's `step3p5_mtp.py` reads the last norm and a copy of the LM head below `transformer`, transformers not."""
    write(tmp_path, "step3p7", count=2)
    base = load_base(str(tmp_path), dtype="float32")
    expected = load_draft("mtp", base).fingerprint
    state = load_file(tmp_path / "model.safetensors")
    state = {
        key.replace(".shared_head.", ".transformer.shared_head.").replace("_head.head.", "_head.output."): one
        for key, one in state.items()
    }
    save_file(state, tmp_path / "model.safetensors")
    assert load_draft("mtp", base).fingerprint == expected


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "name"), [("step3p7", "model.layers.{}.shared_head.head.weight"), ("qwen3_5_text", "mtp.lm_head.weight")]
)
def test_lm_heads_of_their_own(family: str, name: str, tmp_path: Path) -> None:
    """Step-3.7's layers have one each, trained apart from the base's: each level's logits are by that of its layer."""
    write(tmp_path, family, count=2 if family in SEVERAL else 1)
    base = load_base(str(tmp_path), dtype="float32")
    state = load_file(tmp_path / "model.safetensors")
    count = 2 if family in SEVERAL else 1
    own = [torch.randn_like(base.lm_head.weight) for _ in range(count)]
    shared = load_draft("mtp", base)
    save_file(state | {name.format(base.layers + i): own[i] for i in range(count)}, tmp_path / "model.safetensors")
    draft, ids = load_draft("mtp", base), torch.tensor([[3, 1, 4, 1, 5]])
    short = state | {name.format(base.layers): own[0][1:].clone()}
    assert f"{name.format(base.layers)} that is not the base's" in str(refused(base, short, tmp_path))
    assert draft.fingerprint != shared.fingerprint
    hidden = torch.randn(1, 5, base.hidden_size)
    for layer, (one, other) in enumerate(zip(layers_of(draft), layers_of(shared), strict=True)):
        found, expected = (part(ids, hidden, use_cache=False) for part in (one, other))
        assert torch.equal(found.hidden_states[0], expected.hidden_states[0])
        torch.testing.assert_close(found.logits, expected.hidden_states[0] @ own[layer].T, rtol=0, atol=1e-5)
    given = {"level": 1, "use_cache": False, "position_ids": torch.tensor([[3]])}
    level = draft.model(ids[:, :1], torch.randn(1, 1, draft.model.state_width), **given)
    assert torch.equal(level.logits, layers_of(draft)[-1].head(level.hidden_states[0][..., -base.hidden_size :]))


def test_names_of_other_families(tmp_path: Path) -> None:
    """Hunyuan's and Ling's last norm is `final_layernorm`; MiMo-7B's config is of a class that transformers lacks."""
    write(tmp_path / "glm", "glm4_moe")
    base = load_base(str(tmp_path / "glm"), dtype="float32")
    expected = load_draft("mtp", base).fingerprint
    state = load_file(tmp_path / "glm" / "model.safetensors")
    renamed = {key.replace("shared_head.norm", "final_layernorm"): one for key, one in state.items()}
    save_file(renamed, tmp_path / "glm" / "model.safetensors")
    assert load_draft("mtp", base).fingerprint == expected
    write(tmp_path / "mimo", "mimo")
    file = tmp_path / "mimo" / "config.json"
    base = load_base(str(file.parent), dtype="float32")
    expected = load_draft("mtp", base).fingerprint
    auto, shape = {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}, config_shape(file, "mimo")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "mimo", "auto_map": auto}))
    again = load_base(str(file.parent), dtype="float32")
    assert again.fingerprint == base.fingerprint
    assert load_draft("mtp", again).fingerprint == expected
    assert dataclasses.replace(config_shape(file, "mimo"), source=shape.source) == shape


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (Exaone4Config(layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2), "sliding_attention"),
        (ExaoneMoeConfig(num_hidden_layers=2, mlp_layer_types=["dense", "sparse"]), "dense"),
    ],
)
def test_kinds_of_the_first_layer(config: PreTrainedConfig, kinds: str) -> None:
    """EXAONE's MTP layers attend as its first layer, K-EXAONE's are dense, as in vLLM's classes."""
    layout = mtp_layout({"fc.weight": "mtp.fc.weight", "norm.weight": "mtp.norm.weight"}, config, 32)
    assert kinds in (layout.config.layer_types[0], *getattr(layout.config, "mlp_layer_types", [])[:1])


def layers_of(draft: Base) -> list[DraftModule]:
    """Each MTP layer alone."""
    assert isinstance(draft.model, DraftModule)
    further, draft.model.further = draft.model.further, torch.nn.ModuleList()
    found = [copy.deepcopy(draft.model), *further]
    draft.model.further = further
    return found


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "count"),
    [*((family, 1) for family in (*OF_TRANSFORMERS, *TOLD)), *((family, 3) for family in SEVERAL)],
)
def test_drafts_are_those_of_transformers(family: str, count: int, tmp_path: Path) -> None:
    """The logits of each level's draft are those of transformers' MTP model, which has one layer for each."""
    write(tmp_path, family, count=count)
    base = load_base(str(tmp_path), dtype="float32")
    layers = base.layers
    numbers = "|".join(str(layers + number) for number in range(count))
    base.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.({numbers})\..*", r"^(model\.)?mtp\..*"]
    draft = load_draft("mtp", base)
    assert isinstance(draft.model, DraftModule)
    assert draft.model.wiring.reads == (layers,)
    assert not draft.notes
    if family in TOLD:
        told = {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]}
        known = {f"mtp_{key}": kinds for key, kinds in told.items() if getattr(base.model.config, key, None)}
        base.model.config.update({"num_mtp_layers": 1, **known})
    module = MtpModel.from_pretrained(base.model)
    ids = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(5))
    assert ("3 layers" in layout_of(draft.model)) == (count == 3)
    _, states = base.reading(draft.model.wiring.reads).forward(ids, use_cache=False)
    tokens, expected, _ = module(
        input_ids=ids[:, 1:],
        last_hidden_states=states[:, :-1],
        attention_mask=None,
        position_ids=torch.arange(1, 12)[None],
        mtp_cache=MtpCache(config=base.model.config.get_mtp_config()),
        do_sample=False,
        logits_processor=None,
        full_input_ids=ids,
    )
    session = levels_of(draft, 1)
    read = torch.zeros(1, 11, draft.model.state_width)
    read[..., :WIDTH] = states[:, :-1]
    found = [session.append(ids[:, 1:], hidden=read)[:, -1:]]
    session.keep([11])
    session.after(session.hidden[:, -1])
    found += [session.extend(tokens[:, level : level + 1], np.zeros((1, 1), np.int64)) for level in range(count - 1)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=0, atol=1e-5)
    root = draft.model.logits(session_root(draft, ids, read))
    torch.testing.assert_close(root, found[0][:, 0], rtol=0, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize(("name", "rows"), [("llama", 7), ("qwen3-mixed", 7), ("inkling_mm_model", 40)])
def test_rows_of_a_text_one_by_one(name: str, rows: int, tmp_path: Path) -> None:
    """Without a mask, after caches of their own, they give the logits of all in one forward; a window of 32 moves."""
    if name.startswith("inkling"):
        write(tmp_path, name, count=3)
        base = load_base(str(tmp_path), dtype="float32")
        module = load_draft("mtp", base).model
    else:
        base = tiny_base(name, 1, vocab_size=29)
        module = tiny_module(base, "mtp3", 2).model
    ids = torch.randint(0, 29, (1, rows), generator=torch.Generator().manual_seed(3))
    read = torch.randn(1, rows, base.hidden_size, generator=torch.Generator().manual_seed(4))
    expected = module(ids, read, position_ids=torch.arange(rows)[None], use_cache=False).logits
    caches, below = None, torch.zeros(1, 1, module.state_width)
    for row in range(rows):
        hidden = torch.cat([read[:, row : row + 1], below[..., base.hidden_size :]], dim=-1)
        where = {"position_ids": torch.tensor([[row]]), CACHE: caches}
        out = module(ids[:, row : row + 1], hidden, use_cache=True, **where)
        [below], caches = out.hidden_states, out[CACHE]
        torch.testing.assert_close(out.logits[:, 0], expected[:, row], rtol=0, atol=1e-5)
    last = module(ids, read, position_ids=torch.arange(rows)[None], use_cache=False).hidden_states[0][:, -1:]
    torch.testing.assert_close(below, last, rtol=0, atol=1e-5)


def test_convolutions_stay_in_float32(tmp_path: Path) -> None:
    """As in the base of 16 bits, whose stock layers run them so. Relative positions have no rotary readings."""
    write(tmp_path, "inkling_mm_model")
    base = load_base(str(tmp_path), dtype="bfloat16")
    draft = load_draft("mtp", base)
    assert not any("rotary" in one.name for one in variants_of(base, draft))
    dtypes = {name: one.dtype for name, one in draft.model.named_parameters()}
    single = {name for name, dtype in dtypes.items() if dtype is torch.float32}
    assert single == {name for name in dtypes if "sconv" in name}
    assert probed(draft).kind == "paths"


def test_spare_rows_of_the_lm_head(tmp_path: Path) -> None:
    """Its logits are fewer than its rows; heads that copy the rows, and modules of either number of tokens, fit."""
    write(tmp_path, "inkling_text")
    base = load_base(str(tmp_path), dtype="float32")
    assert (base.vocab_size, base.rows) == (VOCAB - 4, VOCAB)
    assert base.forward(torch.tensor([[1, 2]]))[0].shape[-1] == VOCAB - 4
    heads = new_heads(base, 2)
    check_heads_fit(base, heads, "new")
    assert torch.equal(heads.lm_head[1], base.lm_head.weight)
    head = tiny_module(tiny_base("llama", vocab_size=VOCAB, hidden_size=WIDTH), "eagle3", vocabulary=8)
    check_draft(base, head)


def session_root(draft: Base, ids: Tensor, read: Tensor) -> Tensor:
    """What the children of the last token read."""
    session = levels_of(draft, 1)
    session.append(ids[:, 1:], hidden=read)
    assert session.hidden is not None
    return session.hidden[:, -1]
