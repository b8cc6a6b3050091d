"""EAGLE heads and MTP layers in each layout: their logits, level by level, against a naive forward from the tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_checkpoints import write
from naive_modules import PARALLEL_CONFIGS, Kind, NaiveModule, random_state, read_states
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from treeopt.drafter import Drafter
from treeopt.drafting.interface import Observed
from treeopt.drafting.module import ModuleProposer
from treeopt.drafting.parallel import ParallelProposer
from treeopt.models.base import Base, load_base
from treeopt.models.draft_files import kind_in_files, load_draft
from treeopt.models.draft_module import kind_of
from treeopt.verify.probe import route_of

LAYERS, VOCAB, DEPTH = 7, 96, 4
SIZES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
SPECFORGE = {**SIZES, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCAB}
SPECULATORS = {"speculators_model_type": "eagle3", "transformer_layer_config": SIZES, "draft_vocab_size": VOCAB}
IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE1 = {"speculators_model_type": "eagle", "transformer_layer_config": SIZES}
MTP = {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1, "transformer_layer_config": SIZES}


def _inner(**changed: Any) -> dict[str, Any]:
    return {"transformer_layer_config": {**SIZES, **changed}}


CASES: dict[str, tuple[Kind, dict[str, Any]]] = {
    "eagle1": ("eagle1", {**SIZES, "architectures": ["LlamaForCausalLM"]}),
    "eagle1 of two layers": ("eagle1", {**SIZES, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}),
    "eagle1 without a bias": ("eagle1", {**SIZES, "architectures": ["LlamaForCausalLM"], "bias": False}),
    "eagle3, default states": ("eagle3", SPECFORGE),
    "eagle3, states of SGLang": ("eagle3", {**SPECFORGE, "eagle_config": {IDS: [0, 2, 5]}}),
    "eagle3, a part of the vocabulary": ("eagle3", {**SPECFORGE, "draft_vocab_size": 40}),
    "eagle3, norm_output of the trainer": ("eagle3", {**SPECFORGE, "norm_output": True}),
    "eagle3, states of AngelSlim": ("eagle3", {**SPECFORGE, "aux_hidden_states_layer_ids": [0, 3, 4]}),
    "eagle1, biases of Qwen": ("eagle1", {**SIZES, "architectures": ["LlamaForCausalLM"], "qkv_bias": True}),
    "eagle3, norms of Qwen": ("eagle3", {**SPECFORGE, "model_type": "qwen3"}),
    "eagle3, biases of Qwen": ("eagle3", {**SPECFORGE, "qkv_bias": True}),
    "eagle3, the base's config": ("eagle3", SPECFORGE),
    "eagle3, rope of images": ("eagle3", SPECFORGE),
    "eagle3, settings of SGLang": ("eagle3", {**SPECFORGE, "norm_before_residual": True}),
    "eagle3.1, one norm": ("eagle3", {**SPECFORGE, "norm_before_fc": True, "norm_output": True}),
    "eagle3.1": ("eagle3", {**SPECFORGE, "fc_norm": True, "norm_output": True}),
    "eagle1 of speculators": ("eagle1-speculators", {**EAGLE1, "fusion_bias": False, "layernorms": False}),
    "eagle1 of speculators, normed": ("eagle1-speculators", {**EAGLE1, "fusion_bias": True, "layernorms": True}),
    "mtp of speculators": ("mtp-speculators", MTP),
    "speculators, eagle3.1": ("eagle3", {**SPECULATORS, "fc_norm": True, "norm_output": True, IDS: [2, 4, 5]}),
    "speculators": ("eagle3", {**SPECULATORS, IDS: [1, 3, 6]}),
    "speculators, normed": ("eagle3", {**SPECULATORS, "norm_before_residual": True, "norm_before_fc": True}),
    "speculators, norm_output": ("eagle3", {**SPECULATORS, "norm_output": True, "draft_vocab_size": 50}),
    "speculators, qwen3": ("eagle3", {**SPECULATORS, **_inner(model_type="qwen3"), "embed_requires_grad": True}),
    "speculators, two layers": ("eagle3", {**SPECULATORS, **_inner(num_hidden_layers=2, attention_bias=True)}),
}


# Keys of a config.json that say the same, such as those of the base's, whose class the module does not have.
WRITTEN: dict[str, dict[str, Any]] = {
    "eagle3, the base's config": {
        "model_type": "phi3",
        "sliding_window": 3,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2], "rope_theta": 5000.0},
        "rope_parameters": None,
        "eagle_config": {IDS: []},
    },
    "eagle3, settings of SGLang": {"norm_before_residual": None, "eagle_config": {"norm_before_residual": True}},
    "eagle3, rope of images": {"rope_parameters": {"rope_type": "mrope", "rope_theta": 5000.0}},
}


@pytest.fixture(scope="module")
def base() -> Base:
    """A base model of random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": LAYERS}, bos_token_id=None, eos_token_id=None)
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        weight.data = torch.randn_like(weight) * (0.2 if weight.dim() > 1 else 0.1) + (weight.dim() == 1)
    return Base(model, None, "base")


class Recording(ModuleProposer):
    """Records the logits that it packs."""

    def pack(self, logits: Tensor) -> Observed:
        self.seen.append(logits.clone())
        return super().pack(logits)


def logits_of(base: Base, draft: Base, text: list[int], root: int, drafts: list[int]) -> list[Tensor]:
    """The logits after the root, the token of a number of a text, and after each draft; by the code of tracing."""
    proposer = Recording(base, draft, Drafter.model_only(len(drafts) + 1, 8, draft.fingerprint, kind_of(draft.model)))
    proposer.seen = []
    session = proposer.start([text], proposer.depth, [[root + 1]])
    _, states = base.reading(proposer.reads).forward(torch.tensor([text[:-1]]), use_cache=False)
    session.read([states[0]])
    session.begin(torch.tensor([text[root]]), states[:, root - 1])
    session.trace(torch.tensor([[*drafts, 0]]).numpy())
    return [one[0, 0] for one in proposer.seen]


def candidates_of(base: Base, draft: Base, text: list[int], root: int, drafts: list[int]) -> list[list[int]]:
    """The base's tokens of the three best candidates of each level."""
    proposer = ModuleProposer(
        base, draft, Drafter.model_only(len(drafts) + 1, 8, draft.fingerprint, kind_of(draft.model))
    )
    session = proposer.start([text], proposer.depth, [[root + 1]])
    _, states = base.reading(proposer.reads).forward(torch.tensor([text[:-1]]), use_cache=False)
    session.read([states[0]])
    session.begin(torch.tensor([text[root]]), states[:, root - 1])
    found: list[list[int]] = session.candidates(torch.tensor([[*drafts, 0]]).numpy(), 3)[0].tolist()
    return found


def naive_logits(base: Base, module: NaiveModule, text: list[int], root: int, drafts: list[int]) -> list[Tensor]:
    """The same by the naive forward."""
    reads = read_states(module.config, module.layers)
    out = base.model(torch.tensor([text[: root + 1]]), output_hidden_states=True).hidden_states
    states = torch.cat([out[index][0, :root] for index in reads], dim=-1)
    return module.chain(text[: root + 1], states, drafts)


@torch.inference_mode()
@pytest.mark.parametrize("name", CASES)
def test_eagle_is_its_naive_forward(name: str, base: Base, tmp_path: Path) -> None:
    """Each level's logits, for a root in the middle of a text and at its end."""
    kind, config = CASES[name]
    state = random_state(kind, config, LAYERS, seed=3)
    save_file(state, tmp_path / "model.safetensors")
    written = {key: value for key, value in (config | WRITTEN.get(name, {})).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(written))
    draft = load_draft(str(tmp_path), base)
    naive = NaiveModule(config, state, base.model.get_input_embeddings().weight, base.lm_head.weight, LAYERS, kind)
    assert draft.model.wiring.reads == read_states(config, LAYERS)
    text = torch.randint(0, VOCAB, (14,), generator=torch.Generator().manual_seed(1)).tolist()
    for root, drafts in ((5, text[6 : 6 + DEPTH]), (13, [3, 90, 41, 7])):
        found, expected = logits_of(base, draft, text, root, drafts), naive_logits(base, naive, text, root, drafts)
        for one, other in zip(found, expected, strict=True):
            # Rounding grows where the first layer, without a norm, reads the outputs of the second.
            torch.testing.assert_close(one, other, rtol=0, atol=5e-5 if name == "eagle1 of two layers" else 1e-5)
        best = candidates_of(base, draft, text, root, drafts)
        assert best == [naive.target(one.argsort(descending=True, stable=True)[:3].tolist()) for one in expected]
    if draft.model.token_map is not None:
        assert draft.model.token_map.tolist() == naive.target(range(len(draft.model.token_map)))


def test_windows_by_layer(base: Base, tmp_path: Path) -> None:
    """Speculators' Llama layers with windows on some are verified with a mask, and see only their windows."""
    found = []
    for window in (64, 3):
        kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
        config = {**SPECULATORS, **_inner(model_type="llama", num_hidden_layers=2, **kinds), IDS: [1, 3, 6]}
        save_file(random_state("eagle3", config, LAYERS, seed=3), tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        draft = load_draft(str(tmp_path), base)
        assert route_of(draft) == "tree"
        found.append(logits_of(base, draft, [*range(3, 15)], 9, [1, 2, 3])[0])
    naive = NaiveModule(
        config,
        load_file(tmp_path / "model.safetensors"),
        base.model.get_input_embeddings().weight,
        base.lm_head.weight,
        LAYERS,
        "eagle3",
    )
    with torch.inference_mode():
        torch.testing.assert_close(
            found[0], naive_logits(base, naive, [*range(3, 15)], 9, [1, 2, 3])[0], rtol=0, atol=1e-5
        )
    assert not torch.allclose(found[0], found[1])


@torch.inference_mode()
@pytest.mark.parametrize("name", PARALLEL_CONFIGS)
def test_peagle_is_its_naive_forward(name: str, base: Base, tmp_path: Path) -> None:
    """All levels at once, at roots of a text.

    The settings may be where SpecForge's script or a new version of speculators writes them.
    """
    kind, config = PARALLEL_CONFIGS[name]
    state = random_state(kind, config, LAYERS, seed=3)
    save_file(state, tmp_path / "model.safetensors")
    written = dict(config)
    if name == "peagle-specforge":
        moved = {key: written.pop(key) for key in ("num_depths", "mask_token_id", "norm_before_residual")}
        (tmp_path / "peagle_config.json").write_text(json.dumps(moved))
    if name == "peagle-speculators":
        written["speculators_config"] = {"proposal_methods": [{"speculative_tokens": written.pop("num_depths")}]}
    (tmp_path / "config.json").write_text(json.dumps(written))
    draft = load_draft(str(tmp_path), base)
    assert kind_in_files(str(tmp_path)) == kind_of(draft.model) == "block"
    naive = NaiveModule(config, state, base.model.get_input_embeddings().weight, base.lm_head.weight, LAYERS, kind)
    text = torch.randint(0, VOCAB, (14,), generator=torch.Generator().manual_seed(1)).tolist()
    reads, roots, levels = read_states(config, LAYERS), [1, 5, 13], draft.model.levels
    proposer = ParallelProposer(base, draft, Drafter.model_only(levels, 8, draft.fingerprint, "block"))
    _, states = base.reading(reads).forward(torch.tensor([text[:-1]]), use_cache=False)
    session = proposer.start([text], levels, [[root + 1 for root in roots]])
    session.read([states[0]])
    found = session.all_levels(torch.tensor([text[root] for root in roots]))
    for row, root in enumerate(roots):
        expected = torch.stack(naive.parallel(text[: root + 1], states[0, :root]))
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize(("family", "kind"), [("qwen3_5_text", "mtp-qwen"), ("mimo", "mtp-mimo")])
def test_mtp_is_its_naive_forward(family: str, kind: Kind, tmp_path: Path) -> None:
    """As above, of an MTP layer in its base's checkpoint."""
    write(tmp_path, family)
    base = load_base(str(tmp_path), dtype="float32")
    draft, config = load_draft("mtp", base), base.model.config.to_dict()
    state = load_file(tmp_path / "model.safetensors")
    layers = base.model.config.num_hidden_layers
    naive = NaiveModule(config, state, base.model.get_input_embeddings().weight, base.lm_head.weight, layers, kind)
    text = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    found = logits_of(base, draft, text, 6, text[7:11])
    for one, expected in zip(found, naive_logits(base, naive, text, 6, text[7:11]), strict=True):
        torch.testing.assert_close(one, expected, rtol=0, atol=1e-5)
