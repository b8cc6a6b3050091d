"""Making of EAGLE-3 heads and MTP layers, at the smallest size that runs, and the losses that they are trained by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import documents, script
from safetensors.torch import load_file
from tiny import tiny_base
from tiny_modules import tiny_module

from treeopt.drafter import Drafter
from treeopt.drafting.interface import Observed
from treeopt.drafting.module import ModuleProposer
from treeopt.files.bundled import data_root, pocket_eagle3
from treeopt.files.strict_yaml import check, load
from treeopt.models.base import load_base
from treeopt.models.draft_files import load_draft
from treeopt.models.draft_module import kind_of, over_tokens

pytestmark = pytest.mark.bench

modules = script("make_module")
RECIPES = data_root("calibration") / "recipes"
NAMES = ("pocket-eagle3", "tinystories-eagle3", "hybrid-mtp")
HYBRID = Path(__file__).resolve().parent / "data" / "hybrid"
LEVELS = 3


def tiny_recipe(name: str, base: str, **training: Any) -> Any:
    """A recipe, every size of it small."""
    raw = {**load(RECIPES / f"{name}.yaml").data, "base": base}
    raw["openings"] = {"characters": 80, "seeds": 12}
    raw["answers"] = {"max_new_tokens": 12, "batch_size": 6}
    raw["training"] |= {"levels": 2, "length": 64, "texts": 4, "held_out": 4, "warmup_steps": 2, "most_epochs": 3}
    raw["training"] |= training
    return modules.ModuleRecipe.model_validate(raw)


@pytest.mark.parametrize("name", NAMES)
def test_recipes_are_read(name: str) -> None:
    check(load(RECIPES / f"{name}.yaml"), modules.ModuleRecipe, modules.SCHEMA)


@pytest.mark.parametrize(("name", "base"), [("pocket-eagle3", "pocket"), ("hybrid-mtp", str(HYBRID))])
def test_a_run_in_parts_makes_the_module_of_one_run(
    name: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files are equal, the head is read as one of its layout, and its losses on held-out texts fall."""
    monkeypatch.setattr(modules, "standard_library", documents)
    recipe = tiny_recipe(name, base)
    assert modules.make(recipe, tmp_path / "whole", tmp_path)
    finished = [modules.make(recipe, tmp_path / "parts", tmp_path, minutes=0.0) for _ in range(3)]
    assert finished == [False, False, True]
    assert "epoch 3 held out" in capsys.readouterr().out
    for file in ("losses.json", "model.safetensors" if name == "pocket-eagle3" else "model-mtp.safetensors"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes()
    losses = json.loads((tmp_path / "whole" / "losses.json").read_text())["losses"]
    assert [len(one) for one in losses] == [2, 2, 2]
    assert sum(losses[-1]) < sum(losses[0])
    model = load_base(base, dtype="float32", device="cpu")
    if name == "hybrid-mtp":
        for file in HYBRID.iterdir():
            if file.name not in ("README.md", "losses.json", "model-mtp.safetensors", "model.safetensors.index.json"):
                (tmp_path / "whole" / file.name).write_bytes(file.read_bytes())
        model = load_base(str(tmp_path / "whole"), dtype="float32", device="cpu")
        assert load_draft("mtp", model).model.wiring.kind == "mtp"
    else:
        head = load_draft(str(tmp_path / "whole"), model)
        assert head.model.wiring.reads == (1, 3, 4)
        assert load_file(tmp_path / "whole" / "model.safetensors")["fc.weight"].dtype == torch.bfloat16


def test_training_stops_after_an_epoch_that_gains_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more epoch follows, whose learning rate falls to 0."""
    monkeypatch.setattr(modules, "standard_library", documents)
    rates: list[float] = []
    rate = modules.State.rate

    def spied(self: Any, steps: int) -> float:
        rates.append(rate(self, steps))
        return rates[-1]

    monkeypatch.setattr(modules.State, "rate", spied)
    recipe = tiny_recipe("pocket-eagle3", "pocket", least_gain=1.0, most_epochs=9, warmup_steps=1)
    assert modules.make(recipe, tmp_path / "made", tmp_path)
    del rates[1::2]  # of the second group of parameters
    steps = len(rates) // 3
    assert len(rates) == 3 * steps
    assert set(rates[: 2 * steps]) == {recipe.training.learning_rate}
    assert rates[-1] == pytest.approx(recipe.training.learning_rate / steps)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_losses_are_those_of_drafting(kind: str) -> None:
    """At each level the mean divergence of what a session drafts after the true tokens, position by position."""
    base = tiny_base("llama", 1, vocab_size=29)
    draft = tiny_module(base, kind, 2)
    base = base.reading(draft.model.wiring.reads)
    text = torch.randint(0, 29, (13,), generator=torch.Generator().manual_seed(3))
    found = modules.losses(draft.model, base, [text], LEVELS)
    seen: list[torch.Tensor] = []

    class Recording(ModuleProposer):
        def pack(self, logits: torch.Tensor) -> Observed:
            seen.append(logits.clone())
            return super().pack(logits)

    wanted, states = base.forward(text[None], use_cache=False)
    drafter = Drafter.model_only(LEVELS, 5, draft.fingerprint, kind_of(draft.model))
    sums, counts = torch.zeros(LEVELS), torch.zeros(LEVELS)
    for root in range(1, len(text) - 1):
        seen.clear()
        session = Recording(base.reading(()), draft, drafter).start([text.tolist()], LEVELS, [[root + 1]])
        session.read([states[0, :-1]])
        session.begin(text[root : root + 1], states[:, root - 1])
        after = [*text[root + 1 :].tolist(), *[0] * LEVELS][: LEVELS - 1]
        session.trace(torch.tensor([[*after, 0]]).numpy())
        levels = [one[0, 0] for one in seen]
        # The training leaves out the rows of the last positions, so that all levels have the same rows.
        for level, logits in enumerate(levels):
            if root - 1 < len(text) - LEVELS and root + level < len(text) - 1:
                target = wanted[0, root + level]
                full = over_tokens(logits, draft.model, 29)
                sums[level] += modules.divergence(target[None], full[None])[0]
                counts[level] += 1
    torch.testing.assert_close(found, sums / counts, rtol=0, atol=1e-5)


def test_built_in_head_is_that_of_its_recipe() -> None:
    """At most 2.2 MB; its states, sizes and losses are those of recipe, config and card."""
    folder = pocket_eagle3()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2_200_000
    recipe = check(load(RECIPES / "pocket-eagle3.yaml"), modules.ModuleRecipe, modules.SCHEMA)
    head = load_draft("pocket-eagle3", load_base("pocket", dtype="float32", device="cpu"))
    assert list(head.model.wiring.reads) == recipe.eagle.reads
    figures = json.loads((folder / "losses.json").read_text())
    card = (folder / "README.md").read_text()
    assert f"{figures['parameters']:,} parameters" in card
    assert f"{head.model.num_parameters():,} parameters" in card
    for loss in figures["losses"][-1]:
        assert f"{loss:.3f}" in card
