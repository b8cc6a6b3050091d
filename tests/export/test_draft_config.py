"""Limits of a served drafter, read from its config.json: lengths of MTP modules, and Hydra heads without grounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from engine_settings import READERS
from looped import looped
from priced import COUNTED, priced
from program import error_of, treeopt
from refusals import refusal_of

from treeopt.errors import Code
from treeopt.export.lint import DraftConfig, read_draft_config
from treeopt.export.settings import engine_settings
from treeopt.export.trees import export_tree
from treeopt.files.trees import save_tree
from treeopt.optimize.chains import chains_by_batch
from treeopt.tree import Tree

CONFIGS: dict[str, tuple[dict[str, Any], int | None, bool | None]] = {
    "DeepSeek": ({"num_nextn_predict_layers": 1}, 1, None),
    "Qwen3.5": ({"text_config": {"mtp_num_hidden_layers": 3}}, 3, None),
    "without modules": ({"num_nextn_predict_layers": 0, "text_config": None}, None, None),
    "Hydra": ({"hydra_num_heads": 4, "grounded_heads": True}, None, True),
    "Hydra, not grounded": ({"hydra_num_heads": 4}, None, False),
}


@looped("name", CONFIGS)
def test_configs_are_read(tmp_path: Path, name: str) -> None:
    """From the file, and from its folder."""
    config, modules, grounded = CONFIGS[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    for path in (file, tmp_path):
        assert read_draft_config(path) == DraftConfig(str(path), modules, grounded)


def test_what_is_no_config_is_refused(tmp_path: Path) -> None:
    """One error for a missing file, one that is no object, and a number of modules that is none."""
    assert refusal_of(read_draft_config, tmp_path).code is Code.FILE_MISSING
    for text in ("[]", "{", '{"n_predict": "three"}', '{"n_predict": -1}'):
        (tmp_path / "config.json").write_text(text)
        assert refusal_of(read_draft_config, tmp_path).code is Code.FILE_INVALID


def test_lengths_are_those_that_vllm_takes() -> None:
    """The fastest of at most the modules or a multiple of them, at each batch; another given length is refused."""
    assert [drafts for drafts in range(1, 10) if DraftConfig("m", 3).allows(drafts)] == [1, 2, 3, 6, 9]
    expected, profile = np.arange(1.0, 6.0), priced({1: 0.01, 8: 0.01})
    for modules, longest in ((None, 4), (1, 4), (2, 4), (3, 3), (4, 4)):
        found = chains_by_batch(expected, profile, allows=DraftConfig("m", modules).allows)
        assert {budget.nodes - 1 for budget in found.values()} == {longest}
        settings = engine_settings(
            "vllm", None, profile, measured=COUNTED, method="mtp", draft=DraftConfig("m", modules)
        )
        assert DraftConfig("m", modules).allows(settings.settings["num_speculative_tokens"])
        assert "n_predict" not in " ".join(settings.notes)
    free, bound = (
        engine_settings("vllm", None, priced({1: 0.001}), measured=COUNTED, method=method, draft=DraftConfig("m", 3))
        for method in ("eagle3", "mtp")
    )
    assert (free.drafts, bound.drafts) == (4, 3)  # limits of MTP modules do not hold for EAGLE
    READERS["vllm"](bound.content, "")
    error = refusal_of(
        engine_settings, "vllm", None, drafts=4, measured=COUNTED, method="mtp", draft=DraftConfig("m", 3)
    )
    assert error.code is Code.TREE_NOT_EXPORTABLE


def test_trees_are_for_grounded_hydra_heads() -> None:
    """Other heads are refused, and other drafters."""
    tree = Tree.from_paths([(0,), (0, 0)])
    assert export_tree(tree, "hydra", draft=DraftConfig("h", grounded=True)).content
    for grounded, what in ((False, "without grounding"), (None, "no Hydra heads")):
        error = refusal_of(export_tree, tree, "hydra", draft=DraftConfig("h", grounded=grounded))
        assert (error.code, what in error.what) == (Code.TREE_NOT_EXPORTABLE, True)


def test_command(tmp_path: Path) -> None:
    """--draft is for the engines that it limits, and gives the refusal of the library."""
    (tmp_path / "config.json").write_text('{"hydra_num_heads": 4}')
    tree = tmp_path / "t.yaml"
    save_tree(Tree.from_paths([(0,), (0, 0)]), tree)
    assert "without grounding" in error_of("E105", "export", tree, "--for", "hydra", "--draft", tmp_path)
    assert "--draft is for" in treeopt("export", tree, "--for", "medusa", "--draft", tmp_path, status=2).stderr
