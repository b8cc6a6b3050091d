"""MTP layers in the checkpoints of their families, against transformers' own MTP model where it has one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mtp_checkpoints import VOCAB, configs, write
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from treeopt.models.base import Base, load_base
from treeopt.models.draft_files import load_draft
from treeopt.models.draft_module import DraftModule

OF_TRANSFORMERS = ("deepseek_v3", "glm4_moe", "mellum")  # it has no MTP model of the others


@pytest.fixture(scope="module", params=configs())
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Base]:
    """A family, and its base model."""
    folder: Path = tmp_path_factory.mktemp("mtp") / request.param
    write(folder, request.param)
    return request.param, load_base(str(folder), dtype="float32")


def test_reads_every_family(loaded: tuple[str, Base]) -> None:
    """All tensors of the layer are read, and it has the base's state after the final norm beside the embedding."""
    family, base = loaded
    draft = load_draft("mtp", base)
    assert isinstance(draft.model, DraftModule)
    assert draft.model.wiring.kind == "mtp"
    assert draft.model.wiring.reads == (base.model.config.num_hidden_layers,)
    assert draft.model.wiring.state_first == (family == "mimo")


@torch.inference_mode()
@pytest.mark.parametrize("loaded", OF_TRANSFORMERS, indirect=True)
def test_first_draft_is_that_of_transformers(loaded: tuple[str, Base]) -> None:
    """The logits of the first draft are those of transformers' MTP model."""
    _, base = loaded
    layers = base.model.config.num_hidden_layers
    base.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers}\..*", r"^mtp\..*"]
    module = MtpModel.from_pretrained(base.model)
    ids = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(5))
    draft = load_draft("mtp", base)
    assert isinstance(draft.model, DraftModule)
    _, states = base.reading(draft.model.wiring.reads).forward(ids, use_cache=False)
    places = torch.arange(1, 12)[None]
    _, expected, _ = module(
        input_ids=ids[:, 1:],
        last_hidden_states=states[:, :-1],
        attention_mask=None,
        position_ids=places,
        mtp_cache=MtpCache(config=base.model.config.get_mtp_config()),
        do_sample=False,
        logits_processor=None,
        full_input_ids=ids,
    )
    found, _ = draft.forward(ids[:, 1:], hidden=states[:, :-1], position_ids=places, use_cache=False)
    torch.testing.assert_close(found[:, -1], expected[:, -1], rtol=0, atol=1e-5)
