"""`--draft` as a user meets it: learn, calibrate, build, validate and generate, and the refusals."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from looped import looped
from program import error_number, error_of, treeopt, treeopt_json

from treeopt.drafter import Drafter
from treeopt.evaluate.profile import TimedStep
from treeopt.files.bundled import pocket
from treeopt.files.drafters import load_drafter
from treeopt.models.base import load_base
from treeopt.texts.encode import encode
from treeopt.texts.prompts import load_prompts

FEW = ("--prompts", "pocket", "--limit", "5", "--max-new-tokens", "12")
OTHERS = ("--prompts", "pocket", "--skip", "6", "--limit", "2", "--max-new-tokens", "16")
DRAFT = ("--draft", "layers")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a draft model, pocket without its last layers, and what was learned with it."""
    folder = tmp_path_factory.mktemp("made")
    base = load_base("pocket", dtype="float32")
    model = copy.deepcopy(base.model)
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers = 3
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:3]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        model.save_pretrained("layers")
        assert base.tokenizer is not None
        base.tokenizer.save_pretrained("layers")
        treeopt("learn", *DRAFT, *FEW, "--nodes", "6", "-o", "model.safetensors")
        treeopt("calibrate", *DRAFT, *FEW, "--drafter", "model+ngram", "--learn-tokens", "120", "-o", "mn.safetensors")
    return folder


@pytest.fixture(autouse=True)
def _in_folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)


def test_learned_drafter_names_its_draft_model() -> None:
    """The file holds the id and the name of the draft model, and `generate` and `validate` load it from there."""
    drafter = load_drafter("model.safetensors")
    assert (drafter.name, drafter.source["draft"]) == ("model", "layers")
    assert drafter.draft == load_base("layers", dtype="float32").fingerprint
    drafted = treeopt_json("generate", "import os", "--drafter", "model.safetensors", "--max-new-tokens", "16")
    plain = treeopt_json("generate", "import os", "--model", "pocket", "--max-new-tokens", "16")
    assert drafted["tokens"] == plain["tokens"]
    found = treeopt_json("validate", "--drafter", "model.safetensors", *OTHERS)
    assert found["lossless"]
    assert found["tokens_per_step"] == found["predicted_tokens_per_step"]


@pytest.mark.slow
@looped("kind", ["static", "dynamic"])
def test_built_from_traces(kind: str) -> None:
    """A tree or policy built from traces of `model+ngram` is lossless, in the predicted steps."""
    treeopt("build", "--calibration", "mn.safetensors", "--nodes", "8", "--kind", kind, "-o", f"{kind}.yaml")
    found = treeopt_json("validate", "--tree", f"{kind}.yaml", *OTHERS)
    assert found["lossless"]
    assert found["tokens_per_step"] == found["predicted_tokens_per_step"] > 1


@pytest.mark.slow
def test_leviathan_beside_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """`learn` prints acceptance rate, cost ratio and chains; replay of a chain of one draft is near the formula's."""

    def seconds(step: TimedStep) -> float:
        alone = step.decoder.trees.nodes == 1
        return 0.02 if not alone else 0.002 if step.decoder.base.name == "layers" else 0.01

    monkeypatch.setattr(TimedStep, "seconds", seconds)
    found = treeopt_json("learn", *DRAFT, *FEW, "--nodes", "6", "-o", "again.safetensors")["chains"]
    assert 0.1 < found["alpha"] < 1
    assert found["cost_ratio"] == pytest.approx(0.2)
    assert found["alpha_sampled"] == pytest.approx(sampled_alpha(), abs=1e-4)
    assert found["chains"][1]["speedup"] == pytest.approx((1 + found["alpha"] + found["alpha"] ** 2) / 1.4)
    first = found["chains"][0]
    assert first["tokens_per_step"] == pytest.approx(1 + found["alpha"])
    assert first["replayed_tokens_per_step"] == pytest.approx(first["tokens_per_step"], rel=0.15)
    text = treeopt("calibrate", *DRAFT, *FEW, "--kind", "static", "-o", "alpha.safetensors").stdout
    assert f"acceptance rate alpha {found['alpha']:.3f}" in text


@torch.inference_mode()
def sampled_alpha() -> float:
    """The mean overlap of the two models' distributions along the answers, by one forward a token."""
    base, draft = load_base("pocket", dtype="float32"), load_base("layers", dtype="float32")
    shares = []
    for prompt in load_prompts("pocket", limit=5).prompts:
        ids = encode(prompt, base.tokenizer, chat_template=True)[0]
        for _ in range(12):
            p, q = (one.forward(torch.tensor([ids]), use_cache=False)[0][0, -1].softmax(-1) for one in (base, draft))
            shares.append(float(torch.minimum(p, q).sum()))
            ids = [*ids, int(p.argmax())]
    return sum(shares) / len(shares)


def test_speculative_sampling() -> None:
    """Equal seeds give equal texts, in fewer steps than tokens; `--nodes` is the root and the chain."""
    options = ("--acceptance", "rejection", *DRAFT, "--max-new-tokens", "24", "--seed", "3", "--temperature", "0.5")
    first, again = (treeopt_json("generate", "import os", *options, "--nodes", "4") for _ in range(2))
    assert first["tokens"] == again["tokens"]
    assert len(first["step_lengths"]) < len(first["tokens"])
    assert max(first["step_lengths"]) <= first["nodes"] == 4
    assert not first["lossy"]


def test_profile_of_a_draft_model() -> None:
    """The profile names the drafter, and its steps are of the draft model too."""
    options = ("--sizes", "4", "--context", "32", "--repeats", "1", "-o", "p.yaml", "--force")
    found = treeopt_json("profile", "--drafter", "model.safetensors", *options)["provenance"]
    assert (found["drafter"], found["drafter_name"]) == (load_drafter("model.safetensors").id, "model")


def test_draft_that_nothing_was_learned_for() -> None:
    """`generate`, `validate` and `profile` take a draft alone: each step has 16 nodes, by its own probabilities."""
    found = treeopt_json("validate", *DRAFT, *OTHERS)
    assert (found["lossless"], found["nodes"]) == (True, 16)
    assert found["tokens_per_step"] == found["predicted_tokens_per_step"]
    drafted, plain = (
        treeopt_json("generate", "import os", *more, "--max-new-tokens", "16")
        for more in (DRAFT, ("--model", "pocket"))
    )
    assert drafted["tokens"] == plain["tokens"]
    assert "drafts from layers" in treeopt("generate", "import os", *DRAFT, "--max-new-tokens", "2").stderr
    assert len(drafted["step_lengths"]) < len(plain["step_lengths"]) < 16
    options = ("--sizes", "4", "--context", "32", "--repeats", "1", "--kind", "dynamic", "-o", "p.yaml", "--force")
    timed = treeopt_json("profile", *DRAFT, *options)["provenance"]
    untrained = Drafter.model_only(8, 16, load_base("layers", dtype="float32").fingerprint)
    assert (timed["drafter"], timed["drafter_name"]) == (untrained.id, "model")


@looped(
    ("arguments", "message"),
    [
        (("calibrate", "--drafter", "model"), "needs --draft"),
        (("learn", "--drafter", "ngram", *DRAFT, "--model", "pocket"), "has no draft such as"),
        (("learn", "--drafter", "model", *DRAFT, "--heads", "pocket"), "uses no heads"),
        (("calibrate", *DRAFT, "--learn-tokens", "9"), "--learn-tokens belongs to"),
        (("profile", *DRAFT, "--heads", "pocket"), "give either --heads or --draft"),
        (("generate", "x", *DRAFT, "--heads", "pocket"), "--heads needs --tree"),
        (("generate", "x", *DRAFT, "--memory", "m.safetensors"), "--memory needs --drafter"),
        (("validate", *DRAFT, "--memory", "empty"), "--memory needs --drafter"),
        (("generate", "x", "--acceptance", "rejection"), "needs --draft"),
        (("generate", "x", "--acceptance", "rejection", *DRAFT, "--tree", "static.yaml"), "leave out --tree"),
        (("generate", "x", "--nodes", "4"), "--nodes belongs to --acceptance rejection"),
    ],
)
def test_contradictions(arguments: tuple[str, ...], message: str) -> None:
    """Options that contradict each other are a usage error that says how."""
    assert message in treeopt(*arguments, status=2).stderr.replace("\n", " ")


@pytest.mark.slow
def test_refused_models() -> None:
    """A draft model that does not exist, or does not fit the drafter, is refused by the name of the option."""
    missing = error_of("E201", "calibrate", "--draft", "./nowhere", *FEW)
    assert "there is no ./nowhere" in missing
    assert "--draft" in missing
    assert "there is no ./nowhere" in missing
    assert "base model" not in missing
    alone = ("--model", str(pocket()), "--drafter", "ngram", "--learn-tokens", "0")
    treeopt("calibrate", *alone, *FEW, "-o", "n.safetensors")
    error_of("E223", "calibrate", *DRAFT, *FEW, "--drafter", "n.drafter.safetensors")
    assert error_number(treeopt("generate", "x", *DRAFT, "--tree", "mc_sim_7b_63", status=3)) == "E223"
