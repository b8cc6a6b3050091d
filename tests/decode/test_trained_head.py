"""The trained heads and MTP layer: lossless, in the predicted steps, and better than with states of other layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import ROOT_FOLDER, SHARED
from drafters import answered
from predicted import predict

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import Drafter
from treeopt.files.bundled import pocket
from treeopt.models.base import Base, load_base
from treeopt.models.draft_files import load_draft
from treeopt.policy import Plan, TreePolicy
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import load_prompts
from treeopt.tree import Tree

NEW, DEPTH = 28, 6
TREE = Tree.from_paths([*((0,) * n for n in range(1, DEPTH + 1)), (1,), (2,), (0, 1), (1, 0), (0, 0, 1), (1, 0, 0)])

EAGLE3 = pocket().with_name("pocket-eagle3")


def tokens_per_step(base: Base, draft: Base, texts: list[Text], plan: Plan, drafter: Drafter) -> float:
    """Of decoded texts, which are those of greedy decoding, in the predicted steps, alone and in a batch."""
    decoder = TreeDecoder(base, None, plan, drafter=drafter, draft=draft)
    made = decoder.generate([text.prompt for text in texts], NEW)
    assert [one.tokens for one in made] == [text.answer for text in texts]
    assert decoder.generate(texts[0].prompt, NEW) == made[0]
    predicted = predict(base, None, plan, texts, drafter, draft)
    assert [len(one.steps) for one in made] == predicted.sums.steps.tolist()
    return predicted.tokens_per_step


def texts_of(base: Base, prompts: str, count: int) -> list[Text]:
    encoded = encode_prompts(base, load_prompts(prompts, skip=3, limit=count), NEW).texts
    return answered(base, encoded, NEW)


@pytest.mark.parametrize("name", ["pocket", "tinystories"])
def test_trained_heads_accept_much(name: str) -> None:
    """By a static tree and per step; a chain of the Medusa heads of these bases accepts about one draft a step."""
    if name == "tinystories" and not SHARED.is_dir():
        pytest.skip("needs the shared folder (TREEOPT_SHARED)")
    folder = EAGLE3 if name == "pocket" else ROOT_FOLDER / "tests" / "data" / "tinystories-eagle3"
    base = load_base("pocket" if name == "pocket" else str(SHARED / "models" / "tinystories-260k"), dtype="float32")
    texts = texts_of(base, "pocket" if name == "pocket" else str(SHARED / "data" / "story_openings.json"), 4)
    draft = load_draft(str(folder), base)
    drafter = Drafter.model_only(DEPTH, 8, draft.fingerprint, "eagle")
    for plan in (Tree(TREE.paths, drafter=drafter.id), TreePolicy(13, DEPTH, drafter.id)):
        assert tokens_per_step(base, draft, texts, plan, drafter) > 3


def test_the_trained_mtp_layer_accepts_much() -> None:
    """That of the hybrid, whose trees are verified as paths: static, and per step."""
    base = load_base(str(ROOT_FOLDER / "tests" / "data" / "hybrid"), dtype="float32")
    draft = load_draft("mtp", base)
    drafter = Drafter.model_only(DEPTH, 8, draft.fingerprint, "mtp")
    texts = texts_of(base, "pocket", 3)
    for plan in (Tree(TREE.paths, drafter=drafter.id), TreePolicy(13, DEPTH, drafter.id)):
        assert tokens_per_step(base, draft, texts, plan, drafter) > 2


def test_states_of_the_next_layers_accept_less(tmp_path: Path) -> None:
    """Ids that are read as numbers of states, not of layers, cost a fifth of the tokens per step and raise nothing."""
    base = load_base("pocket", dtype="float32")
    texts, found = texts_of(base, "pocket", 3), []
    for number, ids in enumerate(([0, 2, 3], [1, 3, 4])):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes((EAGLE3 / "model.safetensors").read_bytes())
        config = json.loads((EAGLE3 / "config.json").read_text())
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
        (folder / "config.json").write_text(json.dumps(config))
        draft = load_draft(str(folder), base)
        drafter = Drafter.model_only(DEPTH, 8, draft.fingerprint, "eagle")
        found.append(predict(base, None, Tree(TREE.paths, drafter=drafter.id), texts, drafter, draft).tokens_per_step)
    assert found[1] < 0.8 * found[0]
