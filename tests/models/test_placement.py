"""Models on several devices, by offloading to the disk and by pretended devices: no test needs an accelerator."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pretended
import pytest
import torch
from drafters import prompts_of
from helpers import random_tree
from machines import accelerator
from tiny import VOCAB, chat_base, cycle_heads, random_heads, tiny_base
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from treeopt.calibrate.pipeline import run_calibration
from treeopt.decode.decoder import TreeDecoder
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.divergence import _in_float64
from treeopt.evaluate.validate import validate
from treeopt.files.calibrations import save_calibration
from treeopt.models import devices as placement_module
from treeopt.models.adapters import Adapter, merge
from treeopt.models.base import Base, load_base, now
from treeopt.models.devices import check_placed, device_names, is_offloaded, kept_before, placement, weight_of
from treeopt.models.heads import MedusaHeads
from treeopt.train.loss import head_losses
from treeopt.train.medusa1 import new_heads
from treeopt.train.medusa2 import train_jointly
from treeopt.verify.levels import LevelSession

PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
DISK = dict(zip(PARTS, ("disk", "disk", "cpu", "cpu", "cpu", "disk"), strict=True))
REQUESTS = ["w1 w2 w3", "w5 w6", "w3 w8 w9 w10 w11"]
NEW = 10


@pytest.fixture(scope="module")
def whole() -> Base:
    """A tiny model with a tokenizer, whose heads know most of its text."""
    return chat_base(disturbed=0.03)


@pytest.fixture(scope="module")
def folder(whole: Base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its checkpoint."""
    place = tmp_path_factory.mktemp("models") / "tiny-chat"
    whole.model.save_pretrained(place)
    assert whole.tokenizer is not None
    whole.tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def on_disk(folder: Path) -> Base:
    """The same with most weights on the disk."""
    return load_base(folder, device_map=DISK)


def calibration_of(base: Base, heads: MedusaHeads, file: Path) -> bytes:
    """The bytes of a calibration, static and per-step trees."""
    run = run_calibration(base, heads, REQUESTS, max_new_tokens=NEW, batch_size=2, steps=True)
    save_calibration(run.calibration, file)
    return file.read_bytes()


def texts_of(base: Base, heads: MedusaHeads) -> list[list[int]]:
    """Texts decoded alone and in a batch, with the tokens of each step."""
    prompts = [text.prompt for text in prompts_of(0, 2, longest=20)]
    decoder = TreeDecoder(base, heads, random_tree(1, nodes=16, depth=3, ranks=6), probe=False)
    found = [decoder.generate(prompts[0], NEW), *decoder.generate(prompts, NEW)]
    return [[*one.tokens, *one.step_lengths] for one in found]


@pytest.mark.parametrize("device_map", [{"": "cpu"}, DISK], ids=["cpu", "disk"])
def test_map_of_the_cpu_and_the_disk_gives_the_same_bytes(
    device_map: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fingerprint, versions, calibration and texts are those of a model that is loaded whole."""
    monkeypatch.chdir(tmp_path)
    one, other = load_base(folder, device="cpu"), load_base(folder, device_map=device_map)
    assert is_offloaded(other.model) == ("disk" in str(device_map))
    assert other.fingerprint == one.fingerprint
    assert (other.versions(), other.dtype, other.device) == (one.versions(), one.dtype, one.device)
    assert (other.devices, other.layers) == ((torch.device("cpu"),), one.layers)
    heads, shared = cycle_heads(one, 3), random_heads(one, 3, shared=True)
    assert calibration_of(other, heads, tmp_path / "b.safetensors") == calibration_of(
        one, heads, tmp_path / "a.safetensors"
    )
    assert texts_of(other, shared) == texts_of(one, shared)


def test_heads_are_trained_on_weights_of_the_disk(whole: Base, on_disk: Base) -> None:
    """New heads copy the LM head, and the loss of heads without LM heads reads it."""
    assert on_disk.lm_head.weight.is_meta
    made = new_heads(on_disk, 2)
    assert made.lm_head is not None
    assert torch.equal(made.lm_head, new_heads(whole, 2).lm_head)
    heads, states = random_heads(whole, 2, shared=True), torch.randn(5, whole.hidden_size)
    true = torch.arange(10).view(5, 2)
    expected = head_losses(heads, states, true, whole.lm_head)
    assert torch.equal(head_losses(heads, states, true, on_disk.lm_head), expected)


def test_exact_copy_has_the_weights_of_the_disk(whole: Base, on_disk: Base) -> None:
    """Differences of texts are judged by a float64 copy, which does not change the model."""
    ids = torch.arange(6)[None]
    exact, expected = _in_float64(on_disk.model), _in_float64(whole.model)
    assert torch.equal(exact(ids).logits, expected(ids).logits)
    assert exact(ids).logits.dtype == torch.float64
    assert is_offloaded(on_disk.model)


def test_exact_copy_of_modules_with_weights_and_biases(tmp_path: Path) -> None:
    """Loading one offloaded weight of a module replaces the others too."""
    config = Qwen2Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    divided = Qwen2ForCausalLM.from_pretrained(tmp_path, device_map=DISK)
    ids = torch.arange(6)[None]
    assert torch.equal(_in_float64(divided)(ids).logits, _in_float64(model)(ids).logits)


def test_work_that_needs_whole_weights_is_refused(on_disk: Base, tmp_path: Path) -> None:
    """Adapters, stage 2 of training and compiled forwards: E402, and nothing is written."""
    heads = random_heads(on_disk_like := tiny_base("llama"), 1)
    assert on_disk_like.hidden_size == on_disk.hidden_size
    refused: tuple[Callable[[], Any], ...] = (
        lambda: merge(on_disk.model, Adapter("adapter", {}, "", "")),
        lambda: train_jointly(on_disk, ["w1 w2 w3 w4"], tmp_path / "heads"),
        lambda: TreeDecoder(on_disk, heads, [[0]], compile=True),
    )
    for call in refused:
        with pytest.raises(TreeoptError) as error:
            call()
        assert error.value.code is Code.DEVICE_UNUSABLE
    assert not list(tmp_path.iterdir())


def test_device_and_map_exclude_each_other(folder: Path) -> None:
    with pytest.raises(ValueError, match="give either"):
        load_base(folder, device="cpu", device_map="auto")


def test_auto_is_the_cpu_without_an_accelerator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `device="cpu"`: in float32, without a map."""
    accelerator(monkeypatch, kind="cuda", count=0)
    assert placement("auto", "auto") == (torch.device("cpu"), {})
    base = load_base(folder, device_map="auto")
    assert (base.device, base.dtype) == (torch.device("cpu"), torch.float32)
    assert not hasattr(base.model, "hf_device_map")


def test_map_is_passed_on_with_its_main_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers makes the map of a policy; the precision follows the first accelerator that a map names."""
    accelerator(monkeypatch, kind="cuda", count=2)
    monkeypatch.setattr(
        placement_module, "pick_device", lambda name: torch.device("cuda:0" if name == "auto" else name)
    )
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    assert placement("auto", "auto") == (first, {"device_map": "auto"})
    assert placement("auto", "balanced") == (first, {"device_map": "balanced"})
    assert placement("auto", "cuda:1") == (second, {})
    split: dict[str, int | str | torch.device] = {"model": "cpu", "lm_head": 1, "rest": "disk"}
    assert placement("auto", split) == (second, {"device_map": split})
    assert placement("auto", {"": "disk"}) == (torch.device("cpu"), {"device_map": {"": "disk"}})
    assert placement("cuda:1", None) == (second, {})


@pytest.mark.parametrize("device_map", [{"": 0}, {"": "nonsense"}, "nonsense"], ids=str)
def test_device_of_a_map_that_is_not_there_is_refused(
    device_map: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator(monkeypatch, kind="cuda", count=0)
    with pytest.raises(TreeoptError) as error:
        load_base(folder, device_map=device_map)
    assert error.value.code is Code.DEVICE_UNUSABLE


@pytest.mark.parametrize("host", ["cpu", "disk"])
def test_model_that_does_not_fit_on_the_accelerators_is_refused(host: str) -> None:
    """`auto` offloads nothing: E403 says how many parts do not fit; a map that names the host does as it says."""
    model = tiny_base("llama").model
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 1, "model.layers.1": host, "lm_head": host}
    with pytest.raises(TreeoptError, match="2 of 4 parts of M do not fit") as error:
        check_placed(model, "M", "auto")
    assert error.value.code is Code.OUT_OF_MEMORY
    check_placed(model, "M", model.hf_device_map)


def test_model_without_parts_that_stay_together_is_not_divided() -> None:
    """E304 where transformers does not say which modules stay on one device, unless one device holds them all."""
    model = tiny_base("llama").model
    model._no_split_modules = set()
    model.hf_device_map = {"": 0}
    check_placed(model, "M", "auto")
    model.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(TreeoptError, match="cannot be divided") as error:
        check_placed(model, "M", "auto")
    assert error.value.code is Code.MODEL_INVALID
    model._no_split_modules = {"LlamaDecoderLayer"}
    check_placed(model, "M", "auto")


def test_weights_without_values_are_refused(on_disk: Base) -> None:
    """On the device meta, and no hook loads them; those of the disk pass."""
    check_placed(on_disk.model, "M", DISK)
    model = copy.deepcopy(tiny_base("llama").model)
    model.lm_head.to("meta")
    with pytest.raises(TreeoptError, match=r"1 weights of M have no values: lm_head.weight") as error:
        check_placed(model, "M", {"": "cpu"})
    assert error.value.code is Code.OUT_OF_MEMORY


def test_kinds_of_devices_are_named_with_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind has its name alone, however many devices; several are a setting that results depend on."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    places = [torch.device("cuda", i) for i in (0, 0, 1, 0)]
    monkeypatch.setattr(placement_module, "devices_of", lambda _: iter(places))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ("A", "B")[device.index])
    assert device_names(model) == "A (2 modules), B (1 modules), A (1 modules)"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A")
    assert device_names(model) == "A"


def test_pretended_devices_refuse_tensors_of_several() -> None:
    """What the tests below rest on: values, indices and masks of another device are errors, copies are not."""
    with pretended.devices() as (one, other):
        here, there = torch.arange(4, device=one), torch.arange(4, device=other)
        mixed: tuple[Callable[[], Any], ...] = (
            lambda: here + there,
            lambda: here[there],
            lambda: here.index_select(0, there),
            lambda: torch.where(here > 1, there, there),
            lambda: torch.cat([here, torch.arange(4)]),
            lambda: here.index_copy_(0, here, there),
        )
        for mix in mixed:
            with pytest.raises(AssertionError, match="of tensors on"):
                mix()
        assert (here + there.to(one)).tolist() == [0, 2, 4, 6]
        assert here[torch.tensor([2, 0])].tolist() == [2, 0]  # indices may be on the CPU
        here[1:3] = there[:2]
        assert here.tolist() == [0, 0, 1, 3]


@contextlib.contextmanager
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretended devices have nothing to wait for; yields those that were waited for."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    yield waited


@pytest.mark.parametrize(("family", "shared"), [("llama", True), ("qwen2-mixed", False)])
def test_divided_model_gives_the_same_texts(family: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and LM head on two devices, heads without LM heads and with them: the same texts and fingerprint."""
    one = tiny_base(family, 1)
    heads = random_heads(one, 3, shared=shared)
    expected = texts_of(one, heads)
    with _no_wait(monkeypatch) as waited, pretended.devices() as places:
        two = pretended.divided(one, *places)
        assert (two.device, two.devices, two.layers) == (places[0], places, 0)
        assert texts_of(two, copy.deepcopy(heads).to(two.device)) == expected
        assert two.fingerprint == one.fingerprint
        now(two)
        assert waited == list(places)


@pytest.mark.slow
def test_divided_model_gives_the_same_traces(whole: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration and validation by stock generate, predicted and measured."""
    tree, heads = [[0], [1], [0, 0]], cycle_heads(whole, 3)

    def found(base: Base, heads: MedusaHeads) -> tuple[Any, ...]:
        run = run_calibration(base, heads, REQUESTS[:2], max_new_tokens=5, batch_size=2)
        validation = validate(base, heads, tree, REQUESTS[:1], max_new_tokens=4)
        return run.calibration.ranks.tolist(), validation.lossless, validation.tokens_per_step

    expected = found(whole, heads)
    with _no_wait(monkeypatch), pretended.devices() as places:
        two = pretended.divided(whole, *places)
        assert found(two, copy.deepcopy(heads).to(two.device)) == expected


def test_divided_draft_model_gives_the_same_drafts(whole: Base) -> None:
    """Levels of trees in a batch, whose rows are selected and copied, on a draft model of two devices."""

    def logits(base: Base) -> list[Any]:
        tokens = (torch.arange(6, device=base.device).view(2, 3) * 5) % VOCAB
        session = LevelSession(base, 2)
        found = [session.append(tokens)]
        session.keep([2, 3])
        found.append(session.extend(tokens[:, :1], np.zeros((1, 1), np.int64)))
        session.branch([1, 0, 1], [3, 2, 1])
        found.append(session.append(tokens[:1].expand(3, -1), logits_to_keep=1))
        session.keep([4, 3, 2])
        session.select([0, 2])
        found.append(session.append(tokens))
        return [one.numpy(force=True) for one in found]

    expected = logits(whole)
    with pretended.devices() as places:
        found = logits(pretended.divided(whole, *reversed(places)))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)  # of attention by other kernels


def test_hook_of_the_lm_head_is_removed_after_an_error(whole: Base) -> None:
    """A forward that fails leaves no hook on the model."""
    with pretended.devices() as places:
        two = pretended.divided(whole, *places)
        last = torch.zeros(1, 1, dtype=torch.int64, device=two.device)
        with pytest.raises(TypeError):
            two.forward(torch.zeros(1, 2, dtype=torch.int64, device=two.device), logits_to_keep=last, position_ids="x")
        assert not two.lm_head._forward_pre_hooks


def test_hook_of_the_lm_head_leaves_other_threads_alone(whole: Base) -> None:
    """What one thread's forward keeps before the LM head, the forward of another does not."""
    states = torch.randn(1, 4, whole.hidden_size)
    with kept_before(whole.lm_head, torch.tensor([[2]])), ThreadPoolExecutor(1) as pool:
        other, own = pool.submit(whole.lm_head, states).result(), whole.lm_head(states)
    assert (other.shape[1], own.shape[1]) == (4, 1)


def test_weight_of_an_offloaded_module_is_read(whole: Base, on_disk: Base) -> None:
    for name, weight in whole.model.named_parameters():
        assert torch.equal(weight_of(on_disk.model, name), weight)
    assert dataclasses.replace(on_disk).fingerprint == whole.fingerprint
