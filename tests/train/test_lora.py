"""Adapters of Medusa-2: on every linear layer of any family, and the base itself before the first step."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import ROOT_FOLDER
from looped import looped
from runs import JOINT, metrics, noise, refused, tied_base
from tiny import HIDDEN, VOCAB, tiny_base

from treeopt.errors import Code, TreeoptError
from treeopt.models import adapters
from treeopt.models.base import Base, load_base
from treeopt.train.medusa2 import adapted, expert_share, train_jointly
from treeopt.train.settings import JointSettings


def test_adapter_is_on_every_linear_layer() -> None:
    """All seven layers of each block and the LM head, with two factors each, and no other weight is trained."""
    joined = adapted(tied_base(), JointSettings(rank=4, alpha=8.0, dropout=0.05))
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj")
    layers = [f"model.layers.{i}.self_attn.{kind}" for i in range(2) for kind in kinds]
    layers += [f"model.layers.{i}.mlp.{kind}" for i in range(2) for kind in ("gate_proj", "up_proj", "down_proj")]
    trained = {name for name, parameter in joined.base.model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{layer}.lora_{half}.default.weight" for layer in (*layers, "lm_head") for half in "AB"}
    assert len(joined.dropouts) == 15
    assert {module.p for module in joined.dropouts} == {0.05}
    layers = [module for module in joined.base.model.modules() if hasattr(module, "lora_A")]
    assert {module.scaling["default"] for module in layers} == {8.0 / 4}


def test_plain_lm_head_has_the_update() -> None:
    """The LM head with which accuracies are counted gives the logits of the LM head with its adapter."""
    joined = adapted(tied_base(), JointSettings(rank=4, alpha=8.0, dropout=0.05))
    with torch.no_grad():
        for weight in joined.weights:
            weight.normal_(generator=torch.Generator().manual_seed(len(weight)))
        hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
        found, expected = joined.plain_lm_head()(hidden), joined.base.lm_head(hidden)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
        assert (found - joined.original.lm_head(hidden)).abs().max() > 1


@pytest.mark.slow
def test_new_adapter_is_the_base(tmp_path: Path) -> None:
    """At step 0 the divergence is exactly 0, in training with dropout, and the loss of the base is the original's."""
    settings = dataclasses.replace(JOINT, self_distill=True, log_every=1, steps=3, warmup=0.5, dropout=0.5)
    train_jointly(tiny_base("gpt2"), noise(20), tmp_path, settings)
    steps = [line for line in metrics(tmp_path) if "kl" in line]
    assert steps[0]["kl"] == 0
    assert steps[-1]["kl"] > 0
    assert metrics(tmp_path)[-1]["eval_kl"] > 0


def family_base(monkeypatch: pytest.MonkeyPatch, family: str) -> Base:
    """A tiny random model of a family of bench/tiny_families.py."""
    monkeypatch.syspath_prepend(str(ROOT_FOLDER / "bench"))
    made: Any = importlib.import_module("tiny_families")
    return Base(made.tiny_model(family, vocab=VOCAB), None, family)


@looped("dropout", [0.0, 0.05])
@looped("family", ["deepseek_v3", "dots1", "glm4_moe"])
def test_layers_that_peft_takes_for_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dropout: float
) -> None:
    """A base is refused before work where peft would leave linear layers out, as the MLP of the first block."""
    base = family_base(monkeypatch, family)
    settings = dataclasses.replace(JOINT, dropout=dropout)
    error = refused(Code.MODEL_INVALID, base, noise(6), tmp_path / "out", settings)
    assert error.what == f"peft cannot put an adapter on every linear layer of {family}"
    assert error.why is not None
    assert error.why.startswith("it would leave out model.layers.0.mlp.down_proj, model.layers.0.mlp.gate_proj, ")
    assert error.fix.startswith("--stage 1")
    assert not (tmp_path / "out").exists()


@looped(("left_out", "odd"), [({"lm_head"}, []), (set(), ["rank_pattern"])])
def test_adapter_that_is_not_the_one_asked_for(
    monkeypatch: pytest.MonkeyPatch, left_out: set[str], odd: list[str]
) -> None:
    """A layer without an adapter, and settings of peft that `read_adapter` refuses, are refused."""

    def make(model: Any, settings: Any) -> Any:
        return peft.PeftModel(model, peft.LoraConfig(r=4, target_modules=set(settings.target_modules) - left_out))

    monkeypatch.setattr(peft, "get_peft_model", make)
    monkeypatch.setattr(adapters, "odd_settings", lambda _config: odd)
    with pytest.raises(TreeoptError, match="peft cannot put an adapter") as caught:
        adapted(tied_base(), JointSettings(rank=4, alpha=8.0, dropout=0.0))
    assert caught.value.code is Code.MODEL_INVALID
    assert caught.value.why == ("it would leave out lm_head" if left_out else "it would also adapt or set rank_pattern")


def test_convolutions_are_no_experts() -> None:
    """Their weights have three dimensions, too."""
    assert expert_share(tiny_base("mamba")) == 0


@pytest.mark.slow
def test_experts_have_no_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral's attention and LM head are adapted, its experts are not, and the adapter is read back."""
    base = family_base(monkeypatch, "mixtral")
    base.model.save_pretrained(tmp_path / "base")
    # Two blocks: attention, four experts of three matrices, a router and two norms.
    linear, experts = VOCAB * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16), 2 * 4 * 3 * 32 * 48
    total = linear + experts + VOCAB * 32 + 2 * (4 * 32 + 2 * 32) + 32
    assert expert_share(base) == experts / total
    given = load_base(str(tmp_path / "base"), device="cpu")
    trained = train_jointly(given, noise(6), tmp_path / "out", dataclasses.replace(JOINT, steps=2))
    merged = load_base(str(tmp_path / "base"), device="cpu", adapter=trained.adapter).model.state_dict()
    before = given.model.state_dict()
    changed = {name for name in merged if not torch.equal(merged[name], before[name])}
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert changed == {"lm_head.weight"} | {
        f"model.layers.{i}.self_attn.{one}.weight" for i in range(2) for one in kinds
    }
