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
from treeopt.drafting.block import BlockProposer
from treeopt.drafting.interface import Observed
from treeopt.drafting.module import ModuleProposer
from treeopt.files.bundled import data_root, pocket
from treeopt.files.strict_yaml import check, load
from treeopt.models.base import load_base
from treeopt.models.draft_files import load_draft
from treeopt.models.draft_module import kind_of, over_tokens

pytestmark = pytest.mark.bench

modules, module_losses = script("make_module"), script("module_losses")
RECIPES = data_root("calibration") / "recipes"
NAMES = (
    *("pocket-eagle3", "pocket-dflash", "pocket-dspark", "tinystories-eagle3", "smollm2-eagle3", "smollm2-dflash"),
    "hybrid-mtp",
)
HYBRID = Path(__file__).resolve().parent / "data" / "hybrid"
LEVELS = 3
BLOCKS = {"pocket-dflash": "DFlash (z-lab)", "pocket-dspark": "DSpark (DeepSpec)"}


def tiny_recipe(name: str, base: str, **training: Any) -> Any:
    """A recipe, every size of it small."""
    raw = {**load(RECIPES / f"{name}.yaml").data, "base": base}
    raw["openings"] = {"characters": 80, "seeds": 12}
    if "eagle" in raw:
        raw["eagle"]["draft_vocabulary"] = 200
    raw["answers"] = {"max_new_tokens": 12, "batch_size": 6}
    raw["training"] |= {"levels": 2, "length": 64, "texts": 4, "held_out": 4, "warmup_steps": 2, "most_epochs": 3}
    if "block" in raw:
        raw["block"]["size"] = 2 if "markov_rank" in raw["block"] else 3
    raw["training"] |= training
    return modules.ModuleRecipe.model_validate(raw)


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_recipes_are_read(name: str) -> None:
    check(load(RECIPES / f"{name}.yaml"), modules.ModuleRecipe, modules.SCHEMA)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("pocket-eagle3", "pocket"),
        ("pocket-dflash", "pocket"),
        ("pocket-dspark", "pocket"),
        ("hybrid-mtp", str(HYBRID)),
    ],
)
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
    for file in ("losses.json", "model-mtp.safetensors" if name == "hybrid-mtp" else "model.safetensors"):
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
    elif name in BLOCKS:
        block = load_draft(str(tmp_path / "whole"), model)
        assert (block.model.wiring.title, block.model.wiring.reads, block.notes) == (BLOCKS[name], (1, 3, 4), ())
    else:
        head = load_draft(str(tmp_path / "whole"), model)
        assert head.model.wiring.reads == (1, 3, 4)
        texts = modules.own_texts(recipe, model, tmp_path / "whole", tmp_path)
        counts = torch.bincount(torch.cat(texts), minlength=model.vocab_size)
        assert len(head.model.token_map) == 200
        assert counts[head.model.token_map].sum() == counts.topk(200).values.sum()
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


@pytest.mark.quick
@torch.inference_mode()
@pytest.mark.parametrize(("kind", "vocabulary"), [("eagle3", 0), ("eagle3", 17), ("mtp", 0)])
def test_losses_are_those_of_drafting(kind: str, vocabulary: int) -> None:
    """At each level the mean divergence of what a session drafts after the true tokens, position by position."""
    base = tiny_base("llama", 1, vocab_size=29)
    draft = tiny_module(base, kind, 2, vocabulary=vocabulary)
    inside = modules.drafted(draft.model)
    text = torch.randint(0, 29, (13,), generator=torch.Generator().manual_seed(3))
    given = modules.with_states([text], base, draft.model)
    found = modules.losses(draft.model, base.lm_head.weight[inside], given, LEVELS)
    base = base.reading(draft.model.wiring.reads)
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
                share = target.softmax(-1)[inside].sum()
                full = over_tokens(logits, draft.model, 29)
                sums[level] += share * module_losses.divergence(target[inside][None], full[inside][None])[0]
                counts[level] += 1
    torch.testing.assert_close(found, sums / counts, rtol=0, atol=1e-5)


@pytest.mark.quick
@torch.inference_mode()
def test_texts_are_read_as_alone() -> None:
    """Padding beside a longer text changes nothing, and each text gets its own states, in the order given."""
    base = tiny_base("llama", 1, vocab_size=29)
    draft = tiny_module(base, "eagle3", 2)
    texts = [torch.randint(0, 29, (length,), generator=torch.Generator().manual_seed(length)) for length in (13, 5, 9)]
    together = modules.with_states(texts, base, draft.model)
    for text, found in zip(texts, together, strict=True):
        [alone] = modules.with_states([text], base, draft.model)
        assert torch.equal(found.ids, text)
        for name in ("read", "last", "inside"):
            torch.testing.assert_close(getattr(found, name), getattr(alone, name), rtol=0, atol=1e-5)


@pytest.mark.quick
@torch.inference_mode()
@pytest.mark.parametrize("kind", ["block", "dspark"])
def test_losses_of_blocks_are_those_of_drafting(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each level the mean divergence of what a session drafts at the same roots, after the text's own tokens, and
    the cross-entropy of a confidence head.
    """
    base = tiny_base("llama", 1, vocab_size=29)
    draft = tiny_module(base, kind, 2)
    chance = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 29, (length,), generator=chance) for length in (13, 9)]
    given = modules.with_states(texts, base, draft.model)
    drawn = torch.rand(2, 3, generator=chance)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: drawn)
    found = modules.block_losses(draft.model, base.lm_head.weight, given, 3, 0)
    levels = draft.model.levels
    sums, counts = torch.zeros(levels), torch.zeros(levels)
    for text, part, chances in zip(texts, given, drawn, strict=True):
        for root in (1 + (chances * (len(text) - 2)).long()).tolist():
            seen: list[torch.Tensor] = []

            class Recording(BlockProposer):
                def pack(self, logits: torch.Tensor, seen: list[torch.Tensor] = seen) -> Observed:
                    seen.append(logits)
                    return super().pack(logits)

            proposer = Recording(base, draft, Drafter.model_only(levels, 5, draft.fingerprint, "block"))
            session = proposer.start([text[: root + 1].tolist()], levels)
            session.read([part.read[:root]])
            session.begin(text[root : root + 1], part.last[:1])
            following = text[root + 1 : root + levels]
            session.prepare(torch.nn.functional.pad(following, (0, levels - 1 - len(following)))[None].numpy())
            drafted, [logits] = torch.cat(seen, dim=1)[0], base.forward(text[None], use_cache=False)[0]
            for level in range(min(levels, len(text) - 1 - root)):
                sums[level] += module_losses.divergence(logits[root + level][None], drafted[level][None])[0]
                if draft.model.wiring.confidence:
                    sure = draft.model.confidence(session._rows[:, level : level + 1], text[None, root + level, None])
                    right = drafted[level].argmax() == logits[root + level].argmax()
                    sums[level] -= (sure if right else -sure).sigmoid().log().item()
                counts[level] += 1
    torch.testing.assert_close(found, sums / counts, rtol=0, atol=1e-5)


@pytest.mark.quick
def test_built_in_head_is_that_of_its_recipe() -> None:
    """At most 2.2 MB; its states, sizes and losses are those of recipe, config and card."""
    folder = pocket().with_name("pocket-eagle3")
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


@pytest.mark.quick
def test_head_of_smollm2_is_that_of_its_recipe() -> None:
    """At most 20 MB; its states, vocabulary and losses are those of recipe, config and card."""
    folder = HYBRID.parent / "smollm2-eagle3"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 20_000_000
    recipe = check(load(RECIPES / "smollm2-eagle3.yaml"), modules.ModuleRecipe, modules.SCHEMA)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    reads = [one + 1 for one in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    assert reads == recipe.eagle.reads
    assert config["draft_vocab_size"] == recipe.eagle.draft_vocabulary == len(tensors["d2t"]) <= 4096
    assert int(tensors["t2d"].sum()) == len(tensors["d2t"])
    figures, card = json.loads((folder / "losses.json").read_text()), (folder / "README.md").read_text()
    assert f"{figures['parameters']:,} parameters" in " ".join(card.split())
    for loss in figures["losses"][-1]:
        assert f"{loss:.3f}" in card
