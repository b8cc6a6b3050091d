"""Block drafters in each layout: the logits of all levels against a naive forward from the tensors, and refusals."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_checkpoints import CONFIGS, OLD_HEADS, random_state
from naive_blocks import NaiveBlock, read_states
from safetensors.torch import load_file, save_file
from tiny import tiny_base
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from treeopt.decode.rejection import DrawnChain
from treeopt.decode.rules import Sample
from treeopt.drafter import Drafter
from treeopt.drafting.block import BlockProposer
from treeopt.drafting.interface import Observed
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.eagle2 import ddtree_drafter
from treeopt.models.base import CACHE, Base
from treeopt.models.draft_files import kind_in_files, load_draft

VOCAB, LAYERS = 96, 6


@pytest.fixture
def base() -> Base:
    """A base model of random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=LAYERS, bos_token_id=None, eos_token_id=None, **sizes)
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        weight.data = torch.randn_like(weight) * (0.2 if weight.dim() > 1 else 0.1) + (weight.dim() == 1)
    return Base(model, None, "base")


def drafter_in(folder: Path, name: str, base: Base, *, old: bool = False, **changed: Any) -> tuple[str, NaiveBlock]:
    """A drafter of random weights in a folder, and its naive forward by the config as it was before the changes.

    An `old` file has the heads that depend on a token in `logit_head`.
    """
    kind, config = CONFIGS[name]
    embeddings, lm_head = base.model.get_input_embeddings().weight.data, base.lm_head.weight.data
    state = random_state(kind, config, 3, embeddings, lm_head)
    if old:
        state = {f"logit_head.{key}" if key.startswith(OLD_HEADS) else key: one for key, one in state.items()}
    folder.mkdir(exist_ok=True)
    save_file({key: one.contiguous() for key, one in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    return str(folder), NaiveBlock(kind, config, state, embeddings, lm_head, LAYERS)


class Recording(BlockProposer):
    """Records the logits that it packs; `seen` float [B, levels, V_draft]."""

    def __init__(self, base: Base, draft: Base) -> None:
        super().__init__(base, draft, Drafter.model_only(draft.model.levels, 8, draft.fingerprint, "block"))
        self._packed: list[Tensor] = []

    def pack(self, logits: Tensor) -> Observed:
        self._packed.append(logits.clone())
        return super().pack(logits)

    @property
    def seen(self) -> Tensor:
        return torch.cat(self._packed, dim=1)


@torch.inference_mode()
@pytest.mark.parametrize("name", CONFIGS)
def test_block_is_its_naive_forward(name: str, base: Base, tmp_path: Path) -> None:
    """The logits of every level at several roots of a text, by the code of tracing; nothing after a root is read."""
    assert_naive(*drafter_in(tmp_path / "draft", name, base), base)


@torch.inference_mode()
@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith(("domino", "dspark"))])
def test_heads_of_older_files(name: str, base: Base, tmp_path: Path) -> None:
    """In `logit_head`: the same logits, and a tensor that is missing has the name that it had there."""
    folder, naive = drafter_in(tmp_path / "draft", name, base, old=True)
    assert_naive(folder, naive, base)
    file = Path(folder) / "model.safetensors"
    state = load_file(file)
    missing = [key for key in state if key.startswith("logit_head.")][-1]
    save_file({key: one for key, one in state.items() if key != missing}, file)
    with pytest.raises(TreeoptError, match=f"lacks {re.escape(missing)}"):
        load_draft(folder, base)


@pytest.mark.parametrize(("name", "head"), [("domino", "prefix_gru"), ("dspark", "markov_head")])
def test_heads_that_a_file_lacks(name: str, head: str, base: Base, tmp_path: Path) -> None:
    """They have the names of today's files."""
    folder, _ = drafter_in(tmp_path / "draft", name, base)
    file = Path(folder) / "model.safetensors"
    save_file({key: one for key, one in load_file(file).items() if not key.startswith(OLD_HEADS)}, file)
    with pytest.raises(TreeoptError, match=rf"lacks .*(?<!logit_head\.)\b{head}"):
        load_draft(folder, base)


def assert_naive(folder: str, naive: NaiveBlock, base: Base) -> None:
    """The states that are read, and the logits at several roots, are those of the naive forward."""
    draft = load_draft(folder, base)
    assert kind_in_files(folder) == "block"
    reads = read_states(naive.config, LAYERS)
    assert draft.model.wiring.reads == reads
    assert draft.model.levels == naive.levels
    chance = torch.Generator().manual_seed(1)
    text = torch.randint(0, VOCAB, (14,), generator=chance).tolist()
    roots = [1, 6, 12]
    drafts = torch.randint(0, VOCAB, (len(roots), naive.levels - 1), generator=chance)
    proposer = Recording(base, draft)
    session = proposer.start([text], naive.levels, [[root + 1 for root in roots]])
    _, states = base.reading(reads).forward(torch.tensor([text[:-1]]), use_cache=False)
    session.read([states[0]])
    session.begin(torch.tensor([text[root] for root in roots]), states[0, :1].expand(len(roots), -1))
    session.prepare(drafts.numpy())
    for row, root in enumerate(roots):
        expected = torch.stack(naive.logits(text[: root + 1], states[0, :root], drafts[row].tolist()))
        torch.testing.assert_close(proposer.seen[row], expected, rtol=0, atol=1e-5)
    best = session.candidates(torch.nn.functional.pad(drafts, (0, 1)).numpy(), 3)
    ranked = expected.argsort(dim=-1, descending=True, stable=True)[:, :3]
    assert best[-1].tolist() == [list(naive.target(one.tolist())) for one in ranked]


@torch.inference_mode()
@pytest.mark.parametrize("window", [64, 6, 2])
def test_masks_of_kinds_of_layers(window: int, base: Base, tmp_path: Path) -> None:
    """A block with a sliding and a full layer, in decoding: a row sees the last positions of its window, as the naive
    one, and of the block those before it; if not causal, with a window beyond the text the same as without.
    """
    text, found = list(range(20, 32)), []
    for name in ("dflash-sliding", "dflash-sliding-whole", "dflash"):
        folder, naive = drafter_in(tmp_path / name, name, base, sliding_window=window)
        naive.sizes = {**naive.sizes, "sliding_window": window}
        proposer = Recording(base, load_draft(folder, base))
        _, states = base.reading(proposer.reads).forward(torch.tensor([text[:-1]]), use_cache=False)
        session = proposer.start([text], proposer.depth)
        session.read([states[0]])
        session.begin(torch.tensor(text[-1:]), states[:, -1])
        expected = torch.stack(naive.logits(text, states[0], []))
        torch.testing.assert_close(proposer.seen[0], expected, rtol=0, atol=1e-5)
        found.append(proposer.seen)
    assert not torch.allclose(*found[:2], rtol=0, atol=1e-3)
    assert torch.allclose(*found[1:], rtol=0, atol=1e-5 if window == 64 else 1e-3) is (window == 64)


@torch.inference_mode()
def test_trees_of_ddtree(base: Base, tmp_path: Path) -> None:
    """Of all paths those with the largest products of the levels' own probabilities."""
    base.lm_head.weight.data *= 4  # so that some tokens are much likelier than others
    folder, naive = drafter_in(tmp_path / "draft", "dflash", base)
    proposer, text = ddtree_drafter(base, load_draft(folder, base)), list(range(20, 32))
    _, states = base.reading(proposer.reads).forward(torch.tensor([text[:-1]]), use_cache=False)
    session = proposer.start([text], proposer.depth)
    session.read([states[0]])
    session.begin(torch.tensor(text[-1:]), states[:, -1])
    grown, found = session.expand(40, proposer.depth), [()]
    for token, parent in zip(grown.tokens[0].tolist(), grown.parents[0].tolist(), strict=True):
        found.append((*found[parent], token))
    chances = [one.log_softmax(-1).tolist() for one in naive.logits(text, states[0], [])]
    paths, level = dict[tuple[int, ...], float](), {(): 0.0}
    for of_level in chances:  # of each level far more paths than the tree has nodes
        more = {(*path, t): score + of_level[t] for path, score in level.items() for t in range(VOCAB)}
        level = dict(sorted(more.items(), key=lambda one: -one[1])[:200])
        paths |= level
    assert max(map(len, found)) > 1
    assert set(found[1:]) == set(sorted(paths, key=lambda path: -paths[path])[:39])


def test_drafters_of_other_masks_and_sizes_are_others(base: Base, tmp_path: Path) -> None:
    """Their fingerprints differ, though their weights are equal."""
    settings = [{}, {"block_size": 6}, {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2, 3]}}]
    folders = [drafter_in(tmp_path / str(i), "dflash", base, **one)[0] for i, one in enumerate(settings)]
    folders.append(drafter_in(tmp_path / "sliding", "dflash-sliding", base)[0])
    assert len({load_draft(folder, base).fingerprint for folder in folders}) == 4


def test_configs_that_say_the_same(base: Base, tmp_path: Path) -> None:
    """Settings in `dspark_config`, a drafter's type, TensorRT-LLM's key, no size, and a rope for each kind of layer."""

    def written(folder: str, name: str, *, without: str = "", **changed: Any) -> Any:
        path, _ = drafter_in(tmp_path / folder, name, base, **changed)
        config = json.loads((Path(path) / "config.json").read_text())
        config.pop(without, None)
        (Path(path) / "config.json").write_text(json.dumps(config))
        return load_draft(path, base).model

    config = CONFIGS["dspark-specforge"][1]
    heads = {key: one for key, one in config["dflash_config"].items() if key.startswith(("markov", "enable", "conf"))}
    bare = {key: one for key, one in config["dflash_config"].items() if key not in heads}
    plain = written("plain", "dspark-specforge").wiring
    assert written("part", "dspark-specforge", dflash_config=bare, dspark_config=heads).wiring == plain
    assert written("type", "dspark-specforge", model_type="dspark").wiring == plain
    spelled = {"use_confidence_head" if key == "enable_confidence_head" else key: one for key, one in heads.items()}
    assert written("key", "dspark-specforge", dflash_config={**bare, **spelled}).wiring == plain
    assert written("size", "dflash", without="block_size").wiring.size == 16
    inner = CONFIGS["dflash-speculators"][1]["transformer_layer_config"]
    ropes = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
    ropes["sliding_attention"]["rope_type"] = "default"
    nested = {**inner, "rope_parameters": ropes}
    found = written("ropes", "dflash-speculators", transformer_layer_config=nested)
    assert found.config.rope_parameters["rope_theta"] == 5e5
    top = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    assert written("above", "dflash-speculators", **top).config.layer_types == top["layer_types"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    outside = {**inner, "rope_parameters": yarn, "partial_rotary_factor": 0.5}
    rotary = written("outside", "dflash-speculators", transformer_layer_config=outside).decoder.rotary_emb
    assert 2 * len(rotary.inv_freq) == inner["head_dim"]
    both = written("both", "dflash-speculators", transformer_layer_config=nested, **top)
    assert both.config.rope_parameters["rope_theta"] == 1e4
    within = {"transformer_layer_config": {**inner, **top}, **dict.fromkeys(top)}
    assert written("null", "dflash-speculators", **within).config.layer_types == top["layer_types"]


def test_drafts_of_a_block_say_whether_its_root_predicts(base: Base, tmp_path: Path) -> None:
    """DSpark of speculators without its key: a block of five rows with four drafts does not predict at the root."""
    for drafts in (3, 4, 5):
        folder, _ = drafter_in(tmp_path / str(drafts), "dspark-speculators", base)
        config = json.loads((Path(folder) / "config.json").read_text())
        config.pop("sample_from_anchor", None)
        config["speculators_config"] = {"proposal_methods": [{"speculative_tokens": drafts}]}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        wiring = load_draft(folder, base).model.wiring
        assert (wiring.size, wiring.from_root) == (5, drafts != 4)
        assert wiring.title == "DSpark (speculators)"


def test_a_block_reads_embeddings_without_the_scale_of_gemma(tmp_path: Path) -> None:
    """The rows of a block are those of the table, as in z-lab's and speculators' classes."""
    kinds = ["full_attention"] * LAYERS
    base = tiny_base("gemma3", 1, vocab_size=VOCAB, hidden_size=32, num_hidden_layers=LAYERS, layer_types=kinds)
    model = load_draft(drafter_in(tmp_path / "draft", "dflash", base)[0], base).model
    table = base.model.get_input_embeddings().weight
    assert torch.equal(model.embedded_rows(torch.tensor([[5, 5]]))[0], table[[5, 95]])
    domino, seen = load_draft(drafter_in(tmp_path / "domino", "domino", base)[0], base).model, list[Tensor]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(domino.domino), "read", lambda _, tokens, embeddings: seen.append(embeddings(tokens)))
        patch.setattr(type(domino.domino), "forward", lambda *_: None)
        domino.after(0, torch.zeros(1, 4, 1), torch.zeros(1, 4, 1), torch.tensor([[5]]), torch.zeros(1))
    assert torch.equal(seen[0][0, 0], table[5])


REFUSED = {
    "convolution": ({"dflash_config": {"mask_token_id": 95, "conv_kernel_size": 2}}, "lacks layers.0.attention_conv"),
    "group": ({"conv_kernel_size": 2, "conv_group_size": 5}, "5, which does not divide its hidden size 32"),
    "selector_top_k": ({"selector_rank": 4, "selector_top_k": 97}, "selector_top_k is 97, not a number from 1 to 96"),
    "markov_head_type": ({"markov_head_type": "tree"}, "markov_head_type is 'tree'"),
    "domino": ({"projector_type": "domino"}, "gru_hidden_dim is None"),
    "rotary": ({"is_neox_style": False}, "its is_neox_style is False, which is not read"),
    "logit_scale": ({"logit_scale": 0.5}, "its logit_scale is 0.5, which is not read"),
    "use_swa": ({"use_swa": True}, "its use_swa is True, which is not read"),
    "output_multiplier": ({"output_multiplier": 0.5}, "its output_multiplier is 0.5, which is not read"),
    "backbone": ({"dspark_backbone_conv_enabled": True}, "its dspark_backbone_conv_enabled is True, which is not read"),
    "block_size": ({"block_size": 1}, "block_size is 1"),
    "mask_token_id": ({"dflash_config": {}}, "mask_token_id is None"),
    "states": ({"dflash_config": {"mask_token_id": 95, "target_layer_ids": [9]}}, r"reads the states \[10\]"),
    "mask": ({"dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2, 3]}}, "its mask is token 96"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_one_error(name: str, base: Base, tmp_path: Path) -> None:
    """Keys that change the forward, and numbers that do not fit, are named."""
    changed, said = REFUSED[name]
    folder, _ = drafter_in(tmp_path / "draft", "dflash", base, **changed)
    with pytest.raises(TreeoptError, match=said) as caught:
        load_draft(folder, base)
    assert caught.value.code in (Code.DRAFT_INVALID, Code.DRAFT_MISMATCH)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["dspark-rnn", "domino", "dspark-gated", "dflash2"])
def test_nodes_of_a_tree_have_the_logits_of_their_paths(name: str, base: Base, tmp_path: Path) -> None:
    """Whatever the order of their parents, and again after the tree was grown."""
    folder, naive = drafter_in(tmp_path / "draft", name, base)
    proposer, text = Recording(base, load_draft(folder, base)), list(range(20, 32))
    _, states = base.reading(proposer.reads).forward(torch.tensor([text[:-1]]), use_cache=False)
    session = proposer.start([text], proposer.depth)
    session.read([states[0]])
    session.begin(torch.tensor(text[-1:]), states[:, -1])
    grown = session.expand(12, proposer.depth)
    np.testing.assert_array_equal(session.expand(12, proposer.depth).tokens, grown.tokens)
    paths, parents = [(7,), (90,), (3,)], [[0, 0, 0]]
    for _ in range(3):
        found = session.extend(np.array([[path[-1] for path in paths]]), np.array(parents))[0]
        for path, logits in zip(paths, found, strict=True):
            torch.testing.assert_close(logits, naive.logits(text, states[0], path)[len(path)], rtol=0, atol=1e-5)
        parents = [[2, 0, 1]]
        paths = [(*paths[parent], token) for parent, token in zip(parents[0], (11, 5, 60), strict=True)]


@torch.inference_mode()
@pytest.mark.parametrize("name", ["dflash", "dspark-rnn"])
def test_drawn_tokens_have_the_distributions_of_their_paths(name: str, base: Base, tmp_path: Path) -> None:
    """Each is drawn after those before it."""
    folder, naive = drafter_in(tmp_path / "draft", name, base)
    text = list(range(20, 32))
    chain = DrawnChain(base, load_draft(folder, base), Sample(temperature=1.0, seed=3), 3)
    session = chain.start([text])
    _, states = base.reading(chain.reads).forward(torch.tensor([text[:-1]]), use_cache=False)
    session.read([states[0]])
    drafts = chain.draft(session, torch.tensor(text[-1:]), states[:, -1], len(text))
    assert drafts.drawn_from is not None
    expected = torch.stack(naive.logits(text, states[0], drafts.tokens[0, 1:].tolist())[:3]).softmax(-1)
    torch.testing.assert_close(drafts.drawn_from[0], expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_confidence_is_that_of_the_naive_forward(base: Base, tmp_path: Path) -> None:
    """Its logits at each level, with and without the token before, in files of today and older ones."""
    names = ("dspark-confidence", "dspark-confidence-markov")
    for name, old in itertools.product(names, (False, True)):
        folder, naive = drafter_in(tmp_path / f"{name}-{old}", name, base, old=old)
        proposer, text, drafts = Recording(base, load_draft(folder, base)), list(range(20, 32)), [7, 3, 90, 41]
        _, states = base.reading(proposer.reads).forward(torch.tensor([text[:-1]]), use_cache=False)
        session = proposer.start([text], proposer.depth)
        session.read([states[0]])
        _, rows = session.block(torch.tensor(text[-1:]))
        above = torch.tensor([[text[-1], *drafts]])
        found = [proposer.module.confidence(rows[:, i : i + 1], above[:, i : i + 1]).item() for i in range(5)]
        expected = naive.confidence(text, states[0], drafts)
        torch.testing.assert_close(torch.tensor(found).sigmoid(), torch.tensor(expected), rtol=0, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("sliding", [False, True])
def test_transformers_own_class(sliding: bool, base: Base, tmp_path: Path) -> None:
    """A drafter of transformers' class: our logits are those of its states and the base's LM head.

    It gets the states that transformers' generator of drafts hands to it: those of index i + 1 for layer i.
    """
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] if sliding else ["full_attention"] * 2}
    settings = {"block_size": 5, "mask_token_id": 95, "target_layer_ids": [0, 2, 3], "sliding_window": 6, **kinds}
    config = MuseGlimmerAssistantConfig(**sizes, head_dim=8, num_hidden_layers=2, vocab_size=VOCAB, **settings)
    theirs = MuseGlimmerAssistantModel(config).eval()
    for weight in theirs.parameters():
        weight.data = torch.randn_like(weight) * 0.2 + (weight.dim() == 1)
    theirs.save_pretrained(tmp_path)
    proposer, text = Recording(base, load_draft(str(tmp_path), base)), list(range(20, 32))
    assert proposer.reads == tuple(i + 1 for i in config.target_layer_ids)
    _, states = base.reading(proposer.reads).forward(torch.tensor([text[:-1]]), use_cache=False)
    session = proposer.start([text], proposer.depth)
    session.read([states[0]])
    session.begin(torch.tensor(text[-1:]), states[:, -1])
    every = base.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    given = torch.cat([every[i + 1] for i in config.target_layer_ids], dim=-1)
    noise = base.model.get_input_embeddings()(torch.tensor([[text[-1], *[95] * 4]]))
    cache = DFlashCache(config=config)
    cache.set_previous_accepted_tokens(len(text) - 1)
    inputs = {"attention_mask": torch.ones(1, len(text) + 4), CACHE: cache}
    out = theirs(noise_embeds=noise, context_hidden_states=given, **inputs)
    torch.testing.assert_close(proposer.seen, base.lm_head(out.last_hidden_state[:, 1:]), rtol=0, atol=1e-5)
    assert proposer.module.wiring.title == "DFlash (transformers)"


def test_a_drafter_of_more_levels_than_the_block(base: Base, tmp_path: Path) -> None:
    folder, naive = drafter_in(tmp_path / "draft", "dflash", base)
    draft = load_draft(folder, base)
    with pytest.raises(TreeoptError, match=f"drafts {naive.levels}") as caught:
        BlockProposer(base, draft, Drafter.model_only(naive.levels + 1, 8, draft.fingerprint, "block"))
    assert caught.value.code is Code.TREE_TOO_DEEP
