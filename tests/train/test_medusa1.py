"""Medusa-1: heads begin as the base, learn, and end bit for bit alike however often the run was cut off."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from looped import looped
from refusals import refusal_of
from runs import SMALL, Cut, assert_same_run, cut_at, metrics, noise, walks
from tiny import HIDDEN, VOCAB, but_slow, chat_base, cycle_base, tiny_base
from torch import nn
from transformers import TrainingArguments

from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.given import load_pair
from treeopt.models.head_files import load_heads
from treeopt.train.data import Example, collate
from treeopt.train.loss import IGNORED, targets
from treeopt.train.medusa1 import new_heads, train_heads
from treeopt.train.run import _even, _split, _trainer_arguments
from treeopt.train.settings import Settings, steps_of


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `SMALL` that nothing cut off."""
    folder = tmp_path_factory.mktemp("unbroken")
    train_heads(tiny_base("llama"), noise(20), folder, SMALL)
    return folder


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """The same run, cut off after step 9; its checkpoints are of steps 4 and 8."""
    with pytest.raises(Cut):
        train_heads(tiny_base("llama"), noise(20), tmp_path, SMALL, progress=cut_at(9))
    return tmp_path


@looped("shared_head", [False, True])
@looped("blocks", [0, 1, 2])
@looped("family", ["llama", "gpt2"])
def test_new_heads_repeat_the_base(family: str, blocks: int, shared_head: bool) -> None:
    """Before any step each head gives the base's own features, logits and guesses."""
    base = tiny_base(family)
    heads = new_heads(base, 3, blocks=blocks, shared_lm_head=shared_head)
    ids = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, hidden = base.forward(ids)
        features = heads.features(hidden.flatten(0, 1))
        guesses = heads(hidden.flatten(0, 1), base.lm_head)
    for h in range(3):
        assert torch.equal(features[h], hidden.flatten(0, 1))
        assert torch.equal(guesses[h].argmax(-1), logits.flatten(0, 1).argmax(-1))
        torch.testing.assert_close(guesses[h], logits.flatten(0, 1))
    assert (heads.lm_head is None) == shared_head
    assert heads.weight.shape == (blocks, 3, HIDDEN, HIDDEN)


def test_new_heads_own_no_part_of_the_base() -> None:
    """A copied LM head is a copy: writing into it leaves the base as it was."""
    base = tiny_base("llama")
    before = base.lm_head.weight.clone()
    heads = new_heads(base, 2)
    assert heads.lm_head is not None
    with torch.no_grad():
        heads.lm_head.zero_()
    assert torch.equal(base.lm_head.weight, before)


def with_bias() -> Base:
    """A base whose LM head has a bias that decides."""
    base = tiny_base("llama")
    lm_head = nn.Linear(HIDDEN, VOCAB)
    with torch.no_grad():
        lm_head.weight.copy_(base.lm_head.weight)
        lm_head.bias.normal_(std=10.0, generator=torch.Generator().manual_seed(0))
    base.model.set_output_embeddings(lm_head)
    return base


def test_new_heads_lm_head_with_bias() -> None:
    """The layout holds no bias, so own LM heads are refused; shared ones repeat the base with it."""
    base = with_bias()
    with pytest.raises(TreeoptError) as caught:
        new_heads(base, 2)
    assert caught.value.code is Code.HEADS_MISMATCH
    assert "--shared-lm-head" in caught.value.fix
    with torch.no_grad():
        logits, hidden = base.forward(torch.arange(20)[None])
        guesses = new_heads(base, 2, shared_lm_head=True)(hidden[0], base.lm_head)
    torch.testing.assert_close(guesses[1], logits[0])
    assert torch.equal(guesses[1].argmax(-1), logits[0].argmax(-1))


@looped("shared_head", [False, True])
def test_training_learns(tmp_path: Path, shared_head: bool) -> None:
    """On a text that follows a rule both heads learn the rule, on texts held out too."""
    settings = Settings(num_heads=2, steps=100, learning_rate=1e-2, holdout=8, shared_lm_head=shared_head, blocks=2)
    trained = train_heads(cycle_base(), walks(61), tmp_path, settings)
    assert trained.steps == 100
    for score in trained.held_out:
        assert score.top[0] > 0.9
        assert list(score.top) == sorted(score.top)
        assert score.loss < 0.5
    assert [score.trials for score in trained.held_out] == [8 * 21, 8 * 20]
    first, *_, last = [line["head1_loss"] for line in metrics(tmp_path) if "head1_top1" in line]
    assert last < first / 5


@pytest.mark.slow
def test_held_out_scores_are_of_the_heads_returned(tmp_path: Path) -> None:
    """Losses and shares are those of the returned heads on the texts held out, by full logits."""
    base = tiny_base("llama")
    texts = noise(20)
    trained = train_heads(base, texts, tmp_path, SMALL)
    scores = []
    with torch.no_grad():
        for left_out in itertools.combinations(texts.examples, 2):
            batch = collate(left_out)
            true = targets(batch["ids"], batch["answers"], 2)
            hidden = base.forward(batch["ids"])[1]
            losses = []
            for h in range(2):
                known = true[..., h] != IGNORED
                logits = trained.heads(hidden[known], base.lm_head)[h]
                losses.append(nn.functional.cross_entropy(logits, true[known][:, h]).item())
            scores.append(losses)
    found = [score.loss for score in trained.held_out]
    assert sum(np.allclose(found, losses, rtol=1e-5) for losses in scores) == 1


@pytest.mark.slow
@looped("shared_head", [False, True])
def test_base_is_untouched(tmp_path: Path, shared_head: bool) -> None:
    """The base keeps its weights bit for bit, its requires_grad flags, its mode, and has no gradients."""
    base = tiny_base("llama")
    frozen = base.model.model.layers[0].mlp.up_proj.weight
    frozen.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in base.model.state_dict().items()}
    flags = {name: parameter.requires_grad for name, parameter in base.model.named_parameters()}
    train_heads(base, noise(8), tmp_path, dataclasses.replace(SMALL, steps=3, shared_lm_head=shared_head))
    after = base.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {name: parameter.requires_grad for name, parameter in base.model.named_parameters()} == flags
    assert all(parameter.grad is None for parameter in base.model.parameters())
    assert not any(module.training for module in base.model.modules())


@pytest.mark.slow
def test_same_run_twice(tmp_path: Path, unbroken: Path) -> None:
    """The same settings give the same weights and metrics; another seed gives others."""
    train_heads(tiny_base("llama"), noise(20), tmp_path / "same", SMALL)
    train_heads(tiny_base("llama"), noise(20), tmp_path / "other", dataclasses.replace(SMALL, seed=1))
    assert_same_run(unbroken, tmp_path / "same")
    name = "medusa_lm_head.safetensors"
    assert (tmp_path / "other" / name).read_bytes() != (unbroken / name).read_bytes()


@pytest.mark.parametrize("step", but_slow([1, 4, 5, 12], 5))
def test_resume_is_an_unbroken_run(tmp_path: Path, unbroken: Path, step: int) -> None:
    """Cut off at any step, before the first checkpoint (step 4) too, the resumed run ends bit for bit the same."""
    with pytest.raises(Cut):
        train_heads(tiny_base("llama"), noise(20), tmp_path, SMALL, progress=cut_at(step))
    told: list[int] = []
    train_heads(
        tiny_base("llama"), noise(20), tmp_path, SMALL, resume=True, progress=lambda done, *_rest: told.append(done)
    )
    assert told[0] == 1 if step < 5 else told[0] > 4  # it did go on, and not begin anew
    assert_same_run(unbroken, tmp_path)


@pytest.mark.slow
def test_resume_with_accumulation_and_epochs(tmp_path: Path) -> None:
    """Over two epochs with two forwards a step, resumed in the second, the end is the same too."""
    settings = dataclasses.replace(SMALL, steps=0, epochs=2.0, accumulate=2, log_every=1, saves=6)
    train_heads(tiny_base("llama"), noise(20), tmp_path / "whole", settings)
    with pytest.raises(Cut):
        train_heads(tiny_base("llama"), noise(20), tmp_path / "cut", settings, progress=cut_at(8))
    trained = train_heads(tiny_base("llama"), noise(20), tmp_path / "cut", settings, resume=True)
    assert trained.steps == 10
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@looped("other", ["settings", "data", "base", "tokens", "processes"])
def test_resume_with_something_else(broken: Path, other: str) -> None:
    """A run is not resumed with other settings, texts, base or text length; the error names what differs."""
    base = tiny_base("llama", seed=1 if other == "base" else 0)
    texts = noise(20, seed=1 if other == "data" else 0, length=8 if other == "tokens" else 12)
    settings = dataclasses.replace(SMALL, learning_rate=1e-4) if other == "settings" else SMALL
    note = broken / "checkpoints" / "begun.json"
    if other == "processes":
        note.write_text(note.read_text().replace('"processes": 1', '"processes": 2'))
    kept = sorted(broken.rglob("*"))
    with pytest.raises(TreeoptError) as caught:
        train_heads(base, texts, broken, settings, resume=True)
    assert caught.value.code is Code.RESUME_INVALID
    named = {line.split(":")[0] for line in caught.value.at.splitlines()}
    if other == "data":
        named.discard("tokens")  # other texts have other lengths
    assert named == {{"settings": "settings.learning_rate"}.get(other, other)}
    assert sorted(broken.rglob("*")) == kept


def test_resume_of_nothing(tmp_path: Path, unbroken: Path) -> None:
    """An empty folder and a finished run hold nothing to resume, and stay as they are."""
    before = (unbroken / "medusa_lm_head.safetensors").read_bytes()
    for folder in (tmp_path, unbroken):
        with pytest.raises(TreeoptError) as caught:
            train_heads(tiny_base("llama"), noise(20), folder, SMALL, resume=True)
        assert caught.value.code is Code.RESUME_INVALID
    assert (unbroken / "medusa_lm_head.safetensors").read_bytes() == before


def test_unfinished_run_is_not_dropped_unasked(broken: Path, unbroken: Path) -> None:
    """An unfinished run is refused without resume or overwrite; with overwrite it begins anew."""
    with pytest.raises(TreeoptError) as caught:
        train_heads(tiny_base("llama"), noise(20), broken, SMALL)
    assert caught.value.code is Code.FILE_EXISTS
    assert "--resume" in caught.value.fix
    assert (broken / "checkpoints" / "checkpoint-8").is_dir()
    train_heads(tiny_base("llama"), noise(20), broken, SMALL, overwrite=True)
    assert_same_run(unbroken, broken)


def test_finished_heads_are_not_overwritten_unasked(tmp_path: Path, unbroken: Path) -> None:
    """Heads in the folder are refused before any work, and replaced on demand."""
    shutil.copytree(unbroken, tmp_path / "heads")
    settings = dataclasses.replace(SMALL, steps=2)
    with pytest.raises(TreeoptError) as caught:
        train_heads(tiny_base("llama"), noise(20), tmp_path / "heads", settings)
    assert caught.value.code is Code.FILE_EXISTS
    name = "medusa_lm_head.safetensors"
    assert (tmp_path / "heads" / name).read_bytes() == (unbroken / name).read_bytes()
    train_heads(tiny_base("llama"), noise(20), tmp_path / "heads", settings, overwrite=True)
    assert (tmp_path / "heads" / name).read_bytes() != (unbroken / name).read_bytes()


@pytest.mark.slow
def test_accumulation_is_a_larger_batch(tmp_path: Path) -> None:
    """Two forwards of two texts a step train as one forward of four, where all texts are of one length."""
    texts = walks(40, 12)
    large = Settings(num_heads=2, steps=6, batch_size=4, learning_rate=1e-2)
    one = train_heads(tiny_base("llama"), texts, tmp_path / "large", large).heads
    halves = dataclasses.replace(large, batch_size=2, accumulate=2)
    two = train_heads(tiny_base("llama"), texts, tmp_path / "halves", halves).heads
    begun = new_heads(tiny_base("llama"), 2)
    assert not torch.allclose(one.weight, begun.weight, atol=1e-3)
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, two.state_dict()[name], rtol=1e-3, atol=1e-4)


def test_metrics_lines(unbroken: Path) -> None:
    """Every second step has a line with each head's loss and accuracies; the last lines are of the texts held out."""
    lines = metrics(unbroken)
    steps = [line for line in lines if "learning_rate" in line]
    assert [line["step"] for line in steps] == [2, 4, 6, 8, 10, 12]
    names = {f"head{h}_{part}" for h in (1, 2) for part in ("loss", "top1", "top2", "top3", "top4", "top5")}
    assert all(names <= line.keys() for line in steps)
    assert {f"eval_{name}" for name in names} <= lines[-1].keys()
    for line in steps:  # two equally large forwards a line: the loss is the weighted sum of the heads', nearly
        assert line["loss"] == pytest.approx(0.8 * line["head1_loss"] + 0.64 * line["head2_loss"], rel=0.05)


@pytest.mark.slow
@looped("warmup", [0.0, 0.5])
def test_learning_rate_schedule(tmp_path: Path, warmup: float) -> None:
    """The rate rises over the warm-up's share of the steps and falls on a cosine afterwards."""
    settings = dataclasses.replace(SMALL, log_every=1, warmup=warmup, steps=8)
    train_heads(tiny_base("llama"), noise(20), tmp_path, settings)
    rates = [line["learning_rate"] for line in metrics(tmp_path) if "learning_rate" in line]
    assert len(rates) == 8
    peak = rates.index(max(rates))
    assert peak == round(warmup * 8)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert max(rates) == pytest.approx(1e-2)


@pytest.mark.slow
@looped("shared_head", [False, True])
def test_loss_that_is_not_a_number(tmp_path: Path, shared_head: bool) -> None:
    """A base that gives NaN ends the run at the first logged step, with the step, and no heads are written."""
    base = tiny_base("llama")
    with torch.no_grad():
        base.model.model.norm.weight[0] = float("nan")
    with pytest.raises(TreeoptError) as caught:
        train_heads(base, noise(20), tmp_path, dataclasses.replace(SMALL, shared_lm_head=shared_head))
    assert caught.value.code is Code.NOT_FINITE
    assert "step 2" in caught.value.what
    assert not (tmp_path / "medusa_lm_head.safetensors").exists()
    assert list((tmp_path / "checkpoints").glob("checkpoint-*")) == []


@pytest.mark.slow
@looped(("steps", "log_every"), [(1, 1), (2, 10)])
def test_heads_spoiled_by_the_last_step_are_not_written(tmp_path: Path, steps: int, log_every: int) -> None:
    """Logged losses are those before a step: what the last one did is looked at before anything is saved."""
    settings = dataclasses.replace(SMALL, steps=steps, log_every=log_every, learning_rate=1e30, warmup=0.0)
    with pytest.raises(TreeoptError) as caught:
        train_heads(tiny_base("llama"), noise(20), tmp_path, settings)
    assert caught.value.code is Code.NOT_FINITE
    assert not (tmp_path / "medusa_lm_head.safetensors").exists()


def test_short_run_has_metrics(tmp_path: Path) -> None:
    """A run of fewer steps than lie between two lines still gets one."""
    train_heads(tiny_base("llama"), noise(20), tmp_path, dataclasses.replace(SMALL, steps=2, log_every=10))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "head1_loss" in line] == [2]


def test_last_steps_have_a_line(tmp_path: Path) -> None:
    """Steps after the last whole interval are logged at the end, with accuracies."""
    train_heads(tiny_base("llama"), noise(20), tmp_path, dataclasses.replace(SMALL, steps=7, log_every=4))
    assert [line["step"] for line in metrics(tmp_path) if "head1_top1" in line] == [4, 7]


def test_holdout_larger_than_data(tmp_path: Path) -> None:
    """Where nothing is left to train on the error says how many texts there are, and no run is begun."""
    with pytest.raises(TreeoptError) as caught:
        train_heads(tiny_base("llama"), noise(20), tmp_path, dataclasses.replace(SMALL, holdout=20))
    assert caught.value.code is Code.PROMPTS_EMPTY
    assert "20 of 20" in caught.value.what
    assert not (tmp_path / "checkpoints").exists()


def test_copies_of_a_text_held_out_are_not_trained_on() -> None:
    """Their score would be that of texts which were seen."""
    walk, settings = walks(3).examples, dataclasses.replace(SMALL, holdout=1)
    for copies in range(1, 8):
        trained, held_out = _split([*walk, *(dataclasses.replace(walk[0]) for _ in range(copies))], settings)
        assert held_out[0].ids.tolist() not in [example.ids.tolist() for example in trained]
    assert refusal_of(_split, walk[:1] * 3, settings).code is Code.PROMPTS_EMPTY


@pytest.mark.slow
def test_holdout_is_not_trained_on(tmp_path: Path) -> None:
    """What a text held out says leaves the trained weights as they are."""
    texts = walks(4)
    settings = dataclasses.replace(SMALL, holdout=2, steps=2)
    kinds = []
    for i in range(4):
        changed = Example(np.full(24, 7, np.int32), ((2, 24),))
        examples = (*texts.examples[:i], changed, *texts.examples[i + 1 :])
        folder = tmp_path / str(i)
        train_heads(tiny_base("llama"), dataclasses.replace(texts, examples=examples), folder, settings)
        kinds.append((folder / "medusa_lm_head.safetensors").read_bytes())
    train_heads(tiny_base("llama"), texts, tmp_path / "as-it-was", settings)
    as_it_was = (tmp_path / "as-it-was" / "medusa_lm_head.safetensors").read_bytes()
    assert kinds.count(as_it_was) == 2


@pytest.mark.slow
@looped("shared_head", [False, True])
@looped("dtype", [torch.float32, torch.bfloat16])
def test_saved_heads_are_the_trained_ones(tmp_path: Path, dtype: torch.dtype, shared_head: bool) -> None:
    """The folder holds the returned heads in the base's dtype, beside a config that names the base and the run."""
    base = tiny_base("llama")
    base.model.to(dtype)
    settings = dataclasses.replace(SMALL, steps=2, blocks=2, shared_lm_head=shared_head)
    trained = train_heads(base, noise(20), tmp_path, settings)
    loaded = load_heads(tmp_path)
    assert loaded.notes == ()
    assert loaded.base == base.name
    assert trained.heads.weight.dtype is torch.float32
    wanted = trained.heads.state_dict()
    assert loaded.heads.state_dict().keys() == wanted.keys()
    for name, tensor in loaded.heads.state_dict().items():
        assert tensor.dtype is dtype
        assert torch.equal(tensor, wanted[name].to(dtype))
    made_by = json.loads((tmp_path / "config.json").read_text())["treeopt"]
    assert made_by["method"] == "Medusa-1"
    assert {**made_by["settings"], "length": settings.length} == dataclasses.asdict(settings)
    assert "length" not in made_by["settings"]  # the texts have their length already
    assert made_by["base"] == base.fingerprint
    assert made_by["data"] == ["sha0"]


@pytest.mark.slow
def test_mixed_precision(tmp_path: Path) -> None:
    """With bf16 the heads' weights stay float32 and move much as without; the base's states are those of decoding."""
    settings = dataclasses.replace(SMALL, steps=4, learning_rate=1e-3)
    exact = train_heads(tiny_base("llama"), noise(20), tmp_path / "exact", settings).heads
    base, seen = tiny_base("llama"), set()
    base.model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda _, __, out: seen.add(out.dtype))
    mixed = train_heads(base, noise(20), tmp_path / "mixed", dataclasses.replace(settings, bf16=True)).heads
    assert seen == {torch.float32}
    assert mixed.weight.dtype is torch.float32
    assert not torch.equal(mixed.weight, exact.weight)
    assert nn.functional.cosine_similarity(mixed.weight.flatten(), exact.weight.flatten(), dim=0) > 0.7


def test_trained_heads_load_with_their_base(tmp_path: Path) -> None:
    """Heads trained on a base in a folder find it again from their own folder."""
    chat = chat_base()
    chat.model.save_pretrained(tmp_path / "base")
    base = Base(chat.model, chat.tokenizer, str(tmp_path / "base"))
    heads = train_heads(base, walks(10), tmp_path / "deep" / "heads", dataclasses.replace(SMALL, steps=2)).heads
    config = json.loads((tmp_path / "deep" / "heads" / "config.json").read_text())
    assert config["base_model_name_or_path"] == "../../base"
    again, loaded = load_pair(str(tmp_path / "deep" / "heads"), None, device="cpu")
    assert again.fingerprint == base.fingerprint
    assert all(torch.equal(a, b) for a, b in zip(heads.parameters(), loaded.heads.parameters(), strict=True))


@looped(("steps", "log_every", "saves"), [(20, 3, 7), (100, 10, 3), (5, 10, 10), (33, 4, 33)])
def test_checkpoints_fall_on_logged_steps(tmp_path: Path, steps: int, log_every: int, saves: int) -> None:
    """A run that goes on from a checkpoint logs what an unbroken one does: no line spans the break."""
    settings = Settings(steps=steps, log_every=log_every, saves=saves)
    arguments = _trainer_arguments(tmp_path, settings, 40, torch.device("cpu"))
    assert arguments.save_steps % arguments.logging_steps == 0
    assert arguments.save_steps >= steps / saves


def test_steps_are_those_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a part of the batches, so a run has fewer steps, and as many checkpoints."""
    monkeypatch.setattr(TrainingArguments, "world_size", 8)
    settings = Settings(batch_size=8, epochs=1.0, saves=10)
    assert steps_of(settings, 10_000, 8) == 157
    assert steps_of(dataclasses.replace(settings, accumulate=3), 10_000, 8) == 53
    arguments = _trainer_arguments(tmp_path, settings, 10_000, torch.device("cpu"))
    assert (arguments.logging_steps, arguments.save_steps) == (10, 20)


def test_largest_seed(tmp_path: Path) -> None:
    """Seeds beyond the 32 bits of numpy's generator are taken too, and noted as given."""
    train_heads(tiny_base("llama"), noise(6), tmp_path, dataclasses.replace(SMALL, steps=1, seed=2**63 - 1))
    assert json.loads((tmp_path / "config.json").read_text())["treeopt"]["settings"]["seed"] == 2**63 - 1


@looped(
    "wrong",
    [
        *({name: value} for name in ("num_heads", "batch_size", "accumulate", "log_every") for value in (0, -1, 1.5)),
        *({name: value} for name in ("epochs", "learning_rate") for value in (0, math.nan, math.inf)),
        *({"warmup": 1.0}, {"weight_decay": math.nan}, {"blocks": -1}, {"steps": -1}, {"holdout": -1}),
        *({"seed": -1}, {"seed": 2**63}, {"shared_lm_head": True, "blocks": 0}),
    ],
)
def test_settings_out_of_range(wrong: dict[str, float]) -> None:
    """A number that no training can use is a ValueError that names it."""
    with pytest.raises(ValueError, match="nothing to train" if "shared_lm_head" in wrong else next(iter(wrong))):
        dataclasses.replace(SMALL, **wrong)


def test_held_out_texts_are_not_repeated() -> None:
    """Two processes fill their batches with texts of no answer; one process needs none."""
    texts = noise(5).examples
    both = _even(texts, SimpleNamespace(world_size=2, per_device_eval_batch_size=4))  # type: ignore[arg-type]
    assert [*both[:5]] == [*texts]
    assert [one.answers for one in both[5:]] == [(), (), ()]
    alone = _even(texts, SimpleNamespace(world_size=1, per_device_eval_batch_size=4))  # type: ignore[arg-type]
    assert [*alone] == [*texts]
    assert _even([], SimpleNamespace(world_size=2, per_device_eval_batch_size=4)) == []  # type: ignore[arg-type]
