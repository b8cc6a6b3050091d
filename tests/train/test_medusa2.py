"""Medusa-2: heads and adapter learn together, at two rates, and end bit for bit alike however often the run was cut."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from looped import looped
from runs import JOINT, SMALL, Cut, cut_at, metrics, noise, refused, tied_base
from tiny import HIDDEN, VOCAB, chat_base, cycle_base, random_heads, tiny_base, walk
from torch import Tensor

from treeopt.errors import Code
from treeopt.files.atomic import write_files
from treeopt.models.base import Base, load_base
from treeopt.models.given import load_pair
from treeopt.models.head_files import load_heads, save_heads
from treeopt.models.heads import MedusaHeads
from treeopt.train import medusa2 as joint_module
from treeopt.train import medusa2 as medusa2_module
from treeopt.train.data import Example, collate
from treeopt.train.medusa1 import new_heads, train_heads
from treeopt.train.medusa2 import JointModel, adapted, train_jointly
from treeopt.train.settings import JointSettings, Settings

HEADS, WEIGHTS = "medusa_lm_head.safetensors", "adapter/adapter_model.safetensors"
FILES = ("config.json", HEADS, "adapter/adapter_config.json", WEIGHTS)


def assert_same_joint_run(one: Path, other: Path) -> None:
    """Both folders hold the same heads, adapter and metrics, and nothing else."""
    for folder in (one, other):
        found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert found == {*FILES, "adapter/treeopt.json", "metrics.jsonl"}
    for name in FILES:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert metrics(one) == metrics(other)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `JOINT` that nothing cut off."""
    folder = tmp_path_factory.mktemp("unbroken")
    train_jointly(tied_base(), noise(20), folder, JOINT)
    return folder


@pytest.mark.slow
@looped("step", [3, 5, 12])
def test_resume_is_an_unbroken_run(tmp_path: Path, unbroken: Path, step: int) -> None:
    """Cut off before the first checkpoint, after it or at the end, the resumed run ends bit for bit the same."""
    with pytest.raises(Cut):
        train_jointly(tied_base(), noise(20), tmp_path, JOINT, progress=cut_at(step))
    done: list[int] = []
    train_jointly(tied_base(), noise(20), tmp_path, JOINT, resume=True, progress=lambda at, *_rest: done.append(at))
    assert done[0] == {3: 1, 5: 5, 12: 9}[step]  # checkpoints are of steps 4 and 8; a callback is before a save
    assert_same_joint_run(unbroken, tmp_path)


@pytest.mark.slow
def test_resume_of_a_kill_between_adapter_and_heads(
    tmp_path: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All steps done and the adapter written, but not the heads: resumed, without a step, it ends the same."""

    def killed(*_given: Any, also: dict[Path, bytes], **_options: Any) -> None:
        write_files(also)
        raise Cut

    with monkeypatch.context() as patched:
        patched.setattr(medusa2_module, "save_trained", killed)
        with pytest.raises(Cut):
            train_jointly(tied_base(), noise(20), tmp_path, JOINT)
    assert (tmp_path / WEIGHTS).exists()
    assert not (tmp_path / HEADS).exists()
    done: list[int] = []
    train_jointly(tied_base(), noise(20), tmp_path, JOINT, resume=True, progress=lambda at, *_rest: done.append(at))
    assert done == []
    assert_same_joint_run(unbroken, tmp_path)


@pytest.mark.slow
def test_resume_with_distillation_and_given_heads(tmp_path: Path) -> None:
    """The same with self-distillation, from given heads that share the LM head; other heads are refused."""
    settings = dataclasses.replace(JOINT, self_distill=True)
    given = random_heads(tied_base(), 2, shared=True)
    train_jointly(tied_base(), noise(20), tmp_path / "whole", settings, heads=given)
    with pytest.raises(Cut):
        train_jointly(tied_base(), noise(20), tmp_path / "cut", settings, heads=given, progress=cut_at(6))
    other = random_heads(tied_base(), 2, seed=1)
    error = refused(Code.RESUME_INVALID, tied_base(), noise(20), tmp_path / "cut", settings, heads=other, resume=True)
    assert {line.split(":")[0] for line in error.at.splitlines()} == {"heads", "settings.shared_lm_head"}
    train_jointly(tied_base(), noise(20), tmp_path / "cut", settings, heads=given, resume=True)
    assert_same_joint_run(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.slow
@looped("self_distill", [False, True])
@looped("family", ["llama", "gpt2"])
def test_given_model_and_heads_do_not_change(tmp_path: Path, family: str, self_distill: bool) -> None:
    """The model keeps its modules, weights, tying, requires_grad flags and mode; the given heads keep theirs."""
    base = tiny_base(family, tie_word_embeddings=True)
    next(base.model.parameters()).requires_grad_(False)
    heads = random_heads(base, 2)
    modules = [(name, type(module)) for name, module in base.model.named_modules()]
    before = {name: tensor.clone() for name, tensor in (base.model.state_dict() | heads.state_dict()).items()}
    flags = {name: parameter.requires_grad for name, parameter in base.model.named_parameters()}
    settings = dataclasses.replace(JOINT, steps=2, self_distill=self_distill, learning_rate=1e-2)
    train_jointly(base, noise(8), tmp_path, settings, heads=heads)
    after = base.model.state_dict() | heads.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [(name, type(module)) for name, module in base.model.named_modules()] == modules
    assert base.lm_head.weight is base.model.get_input_embeddings().weight
    assert base.model.config.tie_word_embeddings
    assert {name: parameter.requires_grad for name, parameter in base.model.named_parameters()} == flags
    assert all(parameter.grad is None for parameter in base.model.parameters())
    assert not any(module.training for module in base.model.modules())


@looped("shared", [False, True])
@looped("self_distill", [False, True])
def test_loss_and_gradients_by_full_logits(self_distill: bool, shared: bool) -> None:
    """The model's loss is L_LM + lambda_0 * sum of 0.8^h * L_h, and trains adapter and heads by this sum alone."""
    base = tied_base()
    settings = JointSettings(rank=4, alpha=8.0, dropout=0.0, self_distill=self_distill)
    joined = adapted(base, settings)
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in joined.weights:
            weight.normal_(std=0.2, generator=rng)
    heads = random_heads(base, 2, shared=shared)
    model = JointModel(joined, heads, settings)
    model.heads_weight = 0.3
    ids = [5, 9, 2, 7, 7, 1, 30, 4]
    example = Example(torch.tensor(ids).int().numpy(), ((2, 8),))
    found = model.train()(**collate([example]))["loss"]
    # By hand: positions 1 .. 6 precede a token of the answer 2 .. 7.
    states = joined.base.model(torch.tensor([ids]), output_hidden_states=True)
    logits = states.logits[0]
    if self_distill:
        with torch.no_grad():
            known = base.model(torch.tensor([ids])).logits[0].softmax(-1)
        rows = [(known[t] * (known[t].log() - logits[t].softmax(-1).log())).sum() for t in range(1, 7)]
    else:
        rows = [-logits[t].softmax(-1)[ids[t + 1]].log() for t in range(1, 7)]
    expected = torch.stack(rows).mean()
    guesses = heads(states.hidden_states[-1][0], joined.base.lm_head)
    for h in (1, 2):
        terms = [-guesses[h - 1, t].softmax(-1)[ids[t + 1 + h]].log() for t in range(1, 7 - h)]
        expected = expected + 0.3 * 0.8**h * torch.stack(terms).mean()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    inputs = [*joined.weights, *heads.parameters()]
    for one, other in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        assert one.abs().max() > 0


def movements(folder: Path, settings: JointSettings) -> tuple[float, float]:
    """How far one step moves the weights of the heads and the adapter's second factors, which begin at 0."""
    base = tied_base()
    heads = random_heads(base, 2)
    trained = train_jointly(base, noise(6), folder, settings, heads=heads)
    moved = (trained.heads.weight - heads.weight).abs().max().item()
    weights = safetensors.torch.load_file(trained.adapter / "adapter_model.safetensors")
    return moved, max(tensor.abs().max().item() for name, tensor in weights.items() if "lora_B" in name)


@looped("ratio", [4.0, 10.0])
@pytest.mark.slow
def test_learning_rates_of_heads_and_adapter(tmp_path: Path, ratio: float) -> None:
    """Adam's first step is as long as the rate: the heads move 4 times (or 10 times) as far as the adapter."""
    settings = dataclasses.replace(JOINT, steps=1, warmup=0.0, learning_rate=1e-3, heads_rate=ratio, holdout=0)
    heads, adapter = movements(tmp_path, settings)
    assert adapter == pytest.approx(1e-3, rel=1e-2)
    assert heads == pytest.approx(ratio * 1e-3, rel=1e-2)


def test_schedules_of_rates_and_weight(unbroken: Path) -> None:
    """Both rates follow the same warm-up and cosine, 4 to 1; lambda_0 of new heads rises by a sine from 0."""
    lines = [line for line in metrics(unbroken) if "learning_rate" in line]
    for line in lines:
        assert line["heads_learning_rate"] == pytest.approx(4 * line["learning_rate"])
    rates = [line["learning_rate"] for line in lines]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(5e-4)  # the second of 12 steps, after one of warm-up
    expected = [0.01 * math.sin(math.pi / 2 * (line["step"] - 1) / 12) for line in lines]
    assert [line["heads_weight"] for line in lines] == pytest.approx(expected)


@looped(
    ("given", "changes", "schedule", "weight"),
    [
        (True, {}, "constant", 0.2),
        (False, {}, "sine", 0.01),
        (False, {"heads_schedule": "constant"}, "constant", 0.2),
        (True, {"heads_schedule": "sine", "heads_weight": 0.5}, "sine", 0.5),
    ],
)
def test_defaults_of_the_weight(given: bool, changes: dict[str, Any], schedule: str, weight: float) -> None:
    """The paper's two ways, and direct joint tuning: new heads with a constant weight."""
    base = tied_base()
    heads = random_heads(base, 3, shared=True, blocks=2) if given else None
    found = dataclasses.replace(JOINT, **changes).chosen(heads)
    assert (found.heads_schedule, found.heads_weight) == (schedule, weight)
    shape = (found.num_heads, found.blocks, found.shared_lm_head)
    assert shape == ((3, 2, True) if given else (2, 1, False))


def logits_of(base: Base, ids: Tensor) -> Tensor:
    """Logits of a base."""
    with torch.no_grad():
        logits: Tensor = base.model(ids).logits
    return logits


@pytest.mark.slow
@looped("shared", [False, True])
def test_saved_run_is_the_trained_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """Heads and merged base from the folder give the logits of the trained modules, and the scores of the held out."""
    kept: list[JointModel] = []
    begun = JointModel.__init__

    def keep(self: JointModel, *given: Any, **options: Any) -> None:
        begun(self, *given, **options)
        kept.append(self)

    monkeypatch.setattr(joint_module.JointModel, "__init__", keep)
    base = tied_base()
    base.model.save_pretrained(tmp_path / "base")
    settings = dataclasses.replace(JOINT, learning_rate=1e-2, shared_lm_head=shared)
    trained = train_jointly(load_base(tmp_path / "base"), noise(20), tmp_path / "run", settings)
    ids = torch.arange(20)[None]
    merged, loaded = load_pair(str(tmp_path / "run"), None, device="cpu", adapter=str(tmp_path / "run" / "adapter"))
    (joined,) = kept[0].eval()._adapted
    with torch.no_grad():
        expected = joined.base.model(ids).logits
    torch.testing.assert_close(logits_of(merged, ids), expected, rtol=1e-4, atol=1e-4)
    assert (logits_of(merged, ids) - logits_of(base, ids)).abs().max() > 0.1
    assert all(torch.equal(a, b) for a, b in zip(loaded.heads.parameters(), trained.heads.parameters(), strict=True))
    # The scores by naive code on the merged model; the two texts held out are of those that are not trained on.
    assert trained.base_score is not None
    texts = noise(20).examples
    scores = [naive_scores(merged, base, loaded.heads, [texts[i], texts[j]]) for i in range(20) for j in range(i)]
    found = trained.base_score
    wanted = [found.loss, found.original_loss, found.divergence]
    wanted += [figure for score in trained.held_out for figure in (score.loss, score.top[0])]
    assert sum(score == pytest.approx(wanted, rel=1e-3, abs=1e-4) for score in scores) == 1


def naive_scores(merged: Base, base: Base, heads: Any, texts: list[Example]) -> list[float]:
    """Loss, original loss, divergence, and of two heads loss and top-1 share, of texts answered from their token 1."""
    sums, counts = [0.0] * 7, [0] * 7
    for text in texts:
        ids = torch.from_numpy(text.ids).long()
        with torch.no_grad():
            out = merged.model(ids[None], output_hidden_states=True)
            guesses = heads(out.hidden_states[-1][0], merged.lm_head).log_softmax(-1)
        p, q = out.logits[0].log_softmax(-1), logits_of(base, ids[None])[0].log_softmax(-1)
        for t in range(len(ids) - 1):
            terms = [-p[t, ids[t + 1]], -q[t, ids[t + 1]], (q[t].exp() * (q[t] - p[t])).sum()]
            for h in (1, 2):
                if t + 1 + h < len(ids):
                    true = ids[t + 1 + h]
                    terms += [-guesses[h - 1, t, true], (guesses[h - 1, t].argmax() == true).float()]
            for i, term in enumerate(terms):
                sums[i] += float(term)
                counts[i] += 1
    return [total / count for total, count in zip(sums, counts, strict=True)]


@pytest.mark.slow
def test_joint_training_learns(tmp_path: Path) -> None:
    """On texts of another rule than the base's, base and heads learn the rule; with distillation the base stays."""
    base = cycle_base()
    texts = dataclasses.replace(noise(40), examples=tuple(reversed_walk(i) for i in range(40)))
    settings = JointSettings(num_heads=1, steps=60, holdout=8, learning_rate=2e-2, rank=8, shared_lm_head=True)
    free = train_jointly(base, texts, tmp_path / "free", settings).base_score
    held = train_jointly(base, texts, tmp_path / "held", dataclasses.replace(settings, self_distill=True)).base_score
    assert free is not None
    assert held is not None
    assert free.loss < 0.3 * free.original_loss
    assert held.divergence < 0.1 * free.divergence
    assert held.loss == pytest.approx(held.original_loss, rel=0.05)


def reversed_walk(first: int) -> Example:
    """A text of `cycle_base` from its end to its beginning."""
    ids = walk(first % VOCAB, 24)[::-1]
    return Example(torch.tensor(ids).int().numpy(), ((1, 24),))


@pytest.mark.slow
def test_two_stages(tmp_path: Path) -> None:
    """Stage 2 goes on from the folder of stage 1, whose files stay, with its number and form of heads."""
    base = tied_base()
    first = dataclasses.replace(SMALL, num_heads=3, blocks=2, shared_lm_head=True)
    train_heads(base, noise(20), tmp_path / "one", first)
    before = {path: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    trained = train_jointly(base, noise(20), tmp_path / "two", JOINT, heads=tmp_path / "one")
    assert {path: path.read_bytes() for path in (tmp_path / "one").iterdir()} == before
    assert (trained.heads.num_heads, trained.heads.bias.shape[0], trained.heads.lm_head) == (3, 2, None)
    made_by = json.loads((tmp_path / "two" / "config.json").read_text())["treeopt"]
    assert made_by["method"] == "Medusa-2"
    assert made_by["heads"] == load_heads(tmp_path / "one").fingerprint
    assert made_by["settings"]["heads_weight"] == 0.2
    untrained = train_jointly(base, noise(20), tmp_path / "new", dataclasses.replace(JOINT, num_heads=3)).held_out
    assert len(trained.held_out) == len(untrained) == 3


@pytest.mark.slow
def test_stage_two_begins_at_the_given_heads(tmp_path: Path) -> None:
    """Without a step that moves anything, the saved heads are those given."""
    base = tied_base()
    heads = random_heads(base, 2)
    settings = dataclasses.replace(JOINT, steps=1, learning_rate=1e-30)
    trained = train_jointly(base, noise(6), tmp_path, settings, heads=heads)
    for name, tensor in trained.heads.state_dict().items():
        assert torch.equal(tensor, heads.state_dict()[name])


def test_refused_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of another size, the folder of the given heads, a foreign adapter folder and a missing peft."""
    base = tied_base()
    save_heads(random_heads(base, 2), tmp_path / "heads", base="x")
    refused(Code.FILE_UNWRITABLE, base, noise(6), tmp_path / "heads", JOINT, heads=tmp_path / "heads", overwrite=True)
    other = random_heads(tiny_base("llama", hidden_size=64, vocab_size=VOCAB + 2), 2)
    refused(Code.HEADS_MISMATCH, base, noise(6), tmp_path / "out", JOINT, heads=other)
    (tmp_path / "mine" / "adapter").mkdir(parents=True)
    (tmp_path / "mine" / "adapter" / "adapter_model.safetensors").write_text("mine")
    refused(Code.FILE_UNWRITABLE, base, noise(6), tmp_path / "mine", JOINT, overwrite=True)
    assert (tmp_path / "mine" / "adapter" / "adapter_model.safetensors").read_text() == "mine"
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    error = refused(Code.PROGRAM_MISSING, base, noise(6), tmp_path / "out", JOINT)
    assert error.exit_status == 4
    assert error.fix == "pip install peft"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_tokenizer_of_a_model_object(tmp_path: Path) -> None:
    """A model of transformers without a folder is trained on plain texts with `tokenizer=`, as with a `Base`."""
    chat = chat_base()
    texts = [" ".join(f"w{token}" for token in walk(i, 12)) for i in range(6)]
    settings = dataclasses.replace(JOINT, steps=2)
    refused(Code.MODEL_INVALID, chat.model, texts, tmp_path / "bare", settings)
    train_jointly(chat, texts, tmp_path / "base", settings)
    train_jointly(chat.model, texts, tmp_path / "model", settings, tokenizer=chat.tokenizer)
    for name in (HEADS, WEIGHTS):
        assert (tmp_path / "base" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    with pytest.raises(TypeError, match="a tokenizer is one of transformers"):
        train_jointly(chat.model, texts, tmp_path / "wrong", settings, tokenizer="base")  # type: ignore[arg-type]


@looped("tokens", [20, VOCAB])
def test_heads_with_a_token_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Heads whose LM heads have the rows of a token map are refused before a model is loaded."""
    made = random_heads(tied_base(), 2)
    token_map = torch.arange(VOCAB).flip(0)[:tokens]
    assert made.lm_head is not None
    lm_head = made.lm_head.detach()[:, token_map]
    heads = MedusaHeads.from_tensors(made.weight.detach(), made.bias.detach(), lm_head, token_map, VOCAB)
    monkeypatch.setattr(medusa2_module, "as_base", None)
    error = refused(Code.HEADS_MISMATCH, "base", noise(6), tmp_path / "out", JOINT, heads=heads)
    assert f"{tokens} of {VOCAB} tokens in their token_map" in error.what
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_finished_run_is_not_replaced_unasked(tmp_path: Path) -> None:
    """Heads and adapter of a finished run stay without `overwrite`, and are replaced with it."""
    settings = dataclasses.replace(JOINT, steps=1)
    train_jointly(tied_base(), noise(6), tmp_path, settings)
    before = (tmp_path / WEIGHTS).read_bytes()
    refused(Code.FILE_EXISTS, tied_base(), noise(6), tmp_path, dataclasses.replace(settings, seed=1))
    assert (tmp_path / WEIGHTS).read_bytes() == before
    train_jointly(tied_base(), noise(6), tmp_path, dataclasses.replace(settings, seed=1), overwrite=True)
    assert (tmp_path / WEIGHTS).read_bytes() != before


def test_logits_that_are_not_the_lm_heads(tmp_path: Path) -> None:
    """A model that caps the logits of its LM head is refused: its losses would be of other logits."""
    base = tiny_base("gemma2", final_logit_softcapping=5.0)
    assert "soft cap" in refused(Code.MODEL_INVALID, base, noise(6), tmp_path / "out", JOINT).what
    assert not (tmp_path / "out").exists()


@looped(
    "wrong",
    [
        {"rank": 0},
        {"alpha": 0.0},
        {"dropout": 1.0},
        {"heads_rate": math.inf},
        {"heads_weight": -1.0},
        {"heads_schedule": "cosine"},
    ],
)
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    """A value that no run can use is a ValueError that names it."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        dataclasses.replace(JOINT, **wrong)


def test_settings_of_stage_one_are_refused(tmp_path: Path) -> None:
    """Settings without an adapter are of another type."""
    with pytest.raises(TypeError, match="JointSettings"):
        train_jointly(tied_base(), noise(6), tmp_path, Settings())  # type: ignore[arg-type]


def test_loss_that_is_not_finite(tmp_path: Path) -> None:
    """A rate that destroys the base ends the run with an error, and nothing is written."""
    settings = dataclasses.replace(JOINT, learning_rate=1e30, warmup=0.0)
    refused(Code.NOT_FINITE, tied_base(), noise(20), tmp_path, settings)
    assert not (tmp_path / "adapter").exists()
    assert not (tmp_path / "medusa_lm_head.safetensors").exists()


def test_bf16_base(tmp_path: Path) -> None:
    """A base in bfloat16 trains a float32 adapter and float32 heads; the heads are saved in its precision."""
    base = tied_base()
    base.model.to(torch.bfloat16)
    trained = train_jointly(base, noise(8), tmp_path, dataclasses.replace(JOINT, steps=2, shared_lm_head=True))
    weights = safetensors.torch.load_file(tmp_path / WEIGHTS)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert trained.heads.weight.dtype is torch.float32
    assert load_heads(tmp_path).heads.weight.dtype is torch.bfloat16
    assert new_heads(base, 1).weight.shape == (1, 1, HIDDEN, HIDDEN)
