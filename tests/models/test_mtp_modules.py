"""MTP layers in the checkpoints of their families, against transformers' own MTP model where it has one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mtp_checkpoints import VOCAB, WIDTH, configs, write
from tiny import tiny_base
from tiny_modules import tiny_module
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from treeopt.models.base import Base, load_base
from treeopt.models.draft_files import load_draft
from treeopt.models.draft_module import DraftModule, layout_of
from treeopt.verify.levels import LevelSession

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
@pytest.mark.parametrize(
    ("family", "count"),
    [*((family, 1) for family in OF_TRANSFORMERS), ("deepseek_v3", 3), ("glm4_moe", 3)],
)
def test_drafts_are_those_of_transformers(family: str, count: int, tmp_path: Path) -> None:
    """The logits of each level's draft are those of transformers' MTP model, which has one layer for each."""
    write(tmp_path, family, count=count)
    base = load_base(str(tmp_path), dtype="float32")
    layers = base.model.config.num_hidden_layers
    numbers = "|".join(str(layers + number) for number in range(count))
    base.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.({numbers})\..*", r"^mtp\..*"]
    module = MtpModel.from_pretrained(base.model)
    ids = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(5))
    draft = load_draft("mtp", base)
    assert isinstance(draft.model, DraftModule)
    assert not draft.notes
    assert ("3 layers" in layout_of(draft.model)) == (count == 3)
    _, states = base.reading(draft.model.wiring.reads).forward(ids, use_cache=False)
    tokens, expected, _ = module(
        input_ids=ids[:, 1:],
        last_hidden_states=states[:, :-1],
        attention_mask=None,
        position_ids=torch.arange(1, 12)[None],
        mtp_cache=MtpCache(config=base.model.config.get_mtp_config()),
        do_sample=False,
        logits_processor=None,
        full_input_ids=ids,
    )
    session = LevelSession(draft, 1)
    read = torch.zeros(1, 11, draft.model.state_width)
    read[..., :WIDTH] = states[:, :-1]
    found = [session.append(ids[:, 1:], hidden=read)[:, -1:]]
    session.keep([11])
    session.hidden = session.hidden[:, -1:]
    found += [session.extend(tokens[:, level : level + 1], np.zeros((1, 1), np.int64)) for level in range(count - 1)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=0, atol=1e-5)
    root = draft.model.logits(session_root(draft, ids, read))
    torch.testing.assert_close(root, found[0][:, 0], rtol=0, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama", "qwen3-mixed"])
def test_rows_of_a_text_one_by_one(name: str) -> None:
    """Without a mask, after a cache, they give the logits of all in one forward: no layer sees rows that it lacks."""
    base = tiny_base(name, 1, vocab_size=29)
    module = tiny_module(base, "mtp3", 2).model
    ids = torch.randint(0, 29, (1, 7), generator=torch.Generator().manual_seed(3))
    read = torch.randn(1, 7, base.hidden_size, generator=torch.Generator().manual_seed(4))
    expected = module(ids, read, position_ids=torch.arange(7)[None], use_cache=False).logits
    kinds = getattr(module.config, "layer_types", None)
    mask = dict.fromkeys(kinds) if kinds else None
    cache, below = DynamicCache(), torch.zeros(1, 1, module.state_width)
    for row in range(7):
        hidden = torch.cat([read[:, row : row + 1], below[..., base.hidden_size :]], dim=-1)
        where = {"position_ids": torch.tensor([[row]]), "past_key_values": cache}
        out = module(ids[:, row : row + 1], hidden, attention_mask=mask, use_cache=True, **where)
        [below] = out.hidden_states
        torch.testing.assert_close(out.logits[:, 0], expected[:, row], rtol=0, atol=1e-5)
    last = module(ids, read, position_ids=torch.arange(7)[None], use_cache=False).hidden_states[0][:, -1:]
    torch.testing.assert_close(below, last, rtol=0, atol=1e-5)


def session_root(draft: Base, ids: Tensor, read: Tensor) -> Tensor:
    """What the children of the last token read."""
    session = LevelSession(draft, 1)
    session.append(ids[:, 1:], hidden=read)
    assert session.hidden is not None
    return session.hidden[:, -1]
