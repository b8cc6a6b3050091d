"""Decode: whatever the tree and the heads, the text is that of stock greedy generate, in the predicted steps."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import HEADS, TREES, prompt_of, stock
from helpers import random_tree
from looped import looped
from predicted import predict
from tiny import TREE_FAMILIES, VOCAB, but_slow, cycle_base, cycle_heads, random_heads, tiny_base
from torch import Tensor

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafting.heads import HeadsSession
from treeopt.drafting.interface import Drafts
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base, load_base
from treeopt.models.head_files import load_heads
from treeopt.models.heads import MedusaHeads
from treeopt.texts.encode import Text, encode
from treeopt.texts.prompts import load_prompts
from treeopt.tree import Tree
from treeopt.verify.buffers import Buffers

STORY_TREES = {
    "one node": Tree(()),
    "chain": Tree.chain(5),
    "wide": Tree(tuple((rank,) for rank in range(40))),
    "random 24": random_tree(24, nodes=24, depth=5, ranks=4),
    "full 3x3x3": Tree.from_paths(
        [path for depth in (1, 2, 3) for path in np.ndindex(*[3] * depth)]  # 1 + 3 + 9 + 27 nodes
    ),
}


@pytest.fixture(scope="module")
def story(shared: Path) -> tuple[Base, MedusaHeads]:
    """The small pretrained model and its heads."""
    heads = load_heads(shared / "models" / "tinystories-260k-medusa").heads
    return load_base(str(shared / "models" / "tinystories-260k"), device="cpu"), heads


@pytest.fixture(scope="module")
def story_texts(story: tuple[Base, MedusaHeads], shared: Path) -> list[Text]:
    """Four story openings with their greedy continuations of 64 tokens."""
    base, _ = story
    prompts = load_prompts(str(shared / "data" / "story_openings.json"), limit=4).prompts
    ids = [encode(prompt, base.tokenizer, chat_template=True)[0] for prompt in prompts]
    return [Text(prompt.id, row, stock(base, row, 64)) for prompt, row in zip(prompts, ids, strict=True)]


@pytest.mark.parametrize("family", TREE_FAMILIES)
@pytest.mark.parametrize("name", but_slow(TREES, "wide", "64 nodes"))
def test_generate_lossless(family: str, name: str) -> None:
    """Two prompts a model and tree: token for token the text of stock generate, and its steps add up to it."""
    seed = list(TREES).index(name)
    base = tiny_base(family, seed)
    decoder = TreeDecoder(base, random_heads(base, HEADS, seed), TREES[name])
    accepted = 0
    for number in range(2):
        prompt = prompt_of(10 * seed + number)
        decoded = decoder.generate(prompt, 28)
        assert decoded.tokens == stock(base, prompt, 28)
        assert sum(decoded.step_lengths) == len(decoded.tokens) == 28
        assert all(1 <= length <= TREES[name].depth + 1 for length in decoded.step_lengths)
        accepted += len(decoded.tokens) - len(decoded.step_lengths)
    if name == "wide":
        assert accepted == 2 * 14  # all tokens are drafted, so every step emits two
    if name == "256 nodes":
        assert accepted > 0


class Oracle:
    """In place of the heads: right drafts along one random path of the tree, wrong ones elsewhere."""

    def __init__(self, tree: Tree, text: list[int], seed: int) -> None:
        self.tree, self.text, self.at = tree, text, 0
        self.rng = np.random.default_rng(seed)
        self.planted: list[int] = []  # accepted drafts that each step should show

    def fill(self, root: Tensor, _states: Tensor, compiled: Buffers) -> Drafts:
        """A token for every node; `at` is the root's place in the text."""
        assert root.tolist() == [self.text[self.at]]
        upcoming = [*self.text[self.at + 1 :], *[VOCAB] * self.tree.depth]  # beyond the text nothing is right
        node = int(self.rng.integers(self.tree.nodes))
        tokens = [int(root)]
        for i in range(1, self.tree.nodes):
            true = upcoming[self.tree.depths[i] - 1]
            on_path = bool(self.tree.ancestors[node, i])
            tokens.append(true % VOCAB if on_path else (true + 1 + int(self.rng.integers(VOCAB - 2))) % VOCAB)
        self.planted.append(min(self.tree.depths[node], len(self.text) - self.at - 1))
        return Drafts(torch.tensor([tokens]), compiled)


@pytest.mark.parametrize(("seed", "family"), list(enumerate(TREE_FAMILIES)))
def test_generate_lossless_planted_drafts(seed: int, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With paths anywhere in the tree accepted at every step, the text stays that of stock generate."""
    base, tree = tiny_base(family, seed), random_tree(seed, nodes=30, depth=5, ranks=6)
    prompt = prompt_of(seed)
    text = stock(base, prompt, 40)
    oracle = Oracle(tree, text, seed)
    monkeypatch.setattr(HeadsSession, "fill", lambda _session, *given: oracle.fill(*given))
    lengths = []
    for step in TreeDecoder(base, random_heads(base, HEADS), tree).start(prompt, 40):
        assert step == text[oracle.at : oracle.at + len(step)]
        oracle.at += len(step)
        lengths.append(len(step))
    assert oracle.at == 40
    assert lengths[: len(oracle.planted)] == [1 + planted for planted in oracle.planted]
    assert np.mean(lengths) > 2


@pytest.mark.parametrize(("family", "eos"), list(zip(TREE_FAMILIES, itertools.cycle([[7], [3, 7], [0]]), strict=False)))
def test_generate_end_of_text(family: str, eos: list[int]) -> None:
    """A text ends with the first of its end tokens, wherever in a step that falls."""
    base = tiny_base(family, 6)
    prompt = prompt_of(6)
    text = stock(base, prompt, 12)
    ends = [text[place] for place in eos]  # tokens of the greedy text itself
    base.model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    decoded = TreeDecoder(base, random_heads(base, HEADS, 6), TREES["256 nodes"]).generate(prompt, 12)
    assert decoded.tokens == stock(base, prompt, 12)
    assert decoded.tokens[-1] in ends
    assert len(decoded.tokens) <= eos[0] + 1
    assert sum(decoded.step_lengths) == len(decoded.tokens)


@looped("place", range(10))
def test_generate_end_inside_step(place: int) -> None:
    """Accepted drafts behind an end token are clipped: steps of five end at any place within a step."""
    base = cycle_base(1)
    text = stock(base, [3, 8], 20)
    base.model.generation_config.eos_token_id = text[place]
    decoded = TreeDecoder(base, cycle_heads(base, 4, 1), Tree.chain(4)).generate([3, 8], 20)
    assert decoded.tokens == text[: place + 1] == stock(base, [3, 8], 20)
    assert decoded.step_lengths == [5] * ((place + 1) // 5) + [(place + 1) % 5] * ((place + 1) % 5 > 0)


@looped("budget", range(1, 8))
def test_generate_budget(budget: int) -> None:
    """Exactly the budget comes out, also where the last step had accepted more; one token is one step."""
    base = cycle_base(1)
    decoded = TreeDecoder(base, cycle_heads(base, 4, 1), Tree.chain(4)).generate([3, 8], budget)
    assert decoded.tokens == stock(base, [3, 8], budget)
    assert decoded.step_lengths == ([budget] if budget <= 5 else [5, budget - 5])


@pytest.mark.parametrize("blocks", [0, 2])
@pytest.mark.parametrize("shared_lm_head", [True, False])
def test_generate_other_heads(blocks: int, shared_lm_head: bool) -> None:
    """Heads without blocks, with two, and with the base's LM head decode losslessly."""
    base = tiny_base("llama", 9)
    heads = random_heads(base, 3, 9, blocks=blocks, shared=shared_lm_head)
    decoded = TreeDecoder(base, heads, random_tree(9, nodes=50, depth=3, ranks=25)).generate(prompt_of(9), 30)
    assert decoded.tokens == stock(base, prompt_of(9), 30)


def test_generate_input_forms() -> None:
    """A list, a vector and a row of ids are the same prompt, and a bare model is a base."""
    base = tiny_base("llama", 1)
    decoder = TreeDecoder(base.model, random_heads(base, HEADS, 1), TREES["64 nodes"])
    forms = ([3, 5, 7], torch.tensor([3, 5, 7]), torch.tensor([[3, 5, 7]]))
    assert [decoder.generate(form, 9).tokens for form in forms] == [stock(base, [3, 5, 7], 9)] * 3
    pair = [[3, 5, 7], [4, 9, 2]]
    texts = [stock(base, prompt, 9) for prompt in pair]
    for batch in (pair, np.array(pair), torch.tensor(pair)):
        assert [one.tokens for one in decoder.generate(batch, 9)] == texts
    for nothing in ([], (), np.zeros((0, 3), np.int64), torch.zeros(0, 3, dtype=torch.int64)):
        assert decoder.generate(nothing, 9) == []


def test_decoder_tree_too_deep() -> None:
    """A tree deeper than there are heads is refused; without heads any draft is too deep."""
    base = tiny_base("llama")
    for heads, depth in ((random_heads(base, 2), 3), (None, 1)):
        with pytest.raises(TreeoptError) as caught:
            TreeDecoder(base, heads, Tree.chain(depth))
        assert caught.value.code is Code.TREE_TOO_DEEP
    TreeDecoder(base, random_heads(base, 2), Tree.chain(2))


def test_decoder_rank_too_large() -> None:
    """A rank that the vocabulary does not have is refused; its last one is decoded with."""
    base = tiny_base("llama")
    with pytest.raises(TreeoptError) as caught:
        TreeDecoder(base, random_heads(base, 2), Tree(((VOCAB,),)))
    assert caught.value.code is Code.RANK_TOO_LARGE
    decoded = TreeDecoder(base, random_heads(base, 2), Tree(((VOCAB - 1,),))).generate([3, 4], 12)
    assert decoded.tokens == stock(base, [3, 4], 12)


@pytest.mark.parametrize("sizes", [(48, VOCAB), (32, VOCAB + 1)])
def test_decoder_other_heads(sizes: tuple[int, int]) -> None:
    """Heads of another hidden size or vocabulary are refused."""
    with pytest.raises(TreeoptError) as caught:
        TreeDecoder(tiny_base("llama"), MedusaHeads(2, 1, *sizes), Tree.chain(1))
    assert caught.value.code is Code.HEADS_MISMATCH


def test_start_interleaved() -> None:
    """One decoder serves several texts in turn."""
    base = tiny_base("llama", 4)
    decoder = TreeDecoder(base, random_heads(base, HEADS, 4), TREES["64 nodes"])
    texts: list[list[int]] = [[], []]
    turns = [decoder.start([3, 4], 20), decoder.start([5, 6], 30)]
    for _ in range(30):
        for text, decoding in zip(texts, turns, strict=True):
            text.extend(next(decoding, []))
    assert texts == [stock(base, [3, 4], 20), stock(base, [5, 6], 30)]


@pytest.mark.parametrize("name", but_slow(STORY_TREES, "one node", "random 24"))
def test_generate_predicted_steps(story: tuple[Base, MedusaHeads], story_texts: list[Text], name: str) -> None:
    """On four stories each, the steps are those of replay over separate teacher-forced traces, text by text."""
    base, heads = story
    decoder = TreeDecoder(base, heads, STORY_TREES[name])
    decoded = [decoder.generate(text.prompt, 64) for text in story_texts]
    assert [one.tokens for one in decoded] == [text.answer for text in story_texts]
    predicted = predict(base, heads, STORY_TREES[name], story_texts)
    assert [len(one.step_lengths) for one in decoded] == predicted.sums.steps.tolist()
    assert sum(len(one.step_lengths) for one in decoded) == predicted.steps
    starts = np.flatnonzero(predicted.visited)
    assert [length for one in decoded for length in one.step_lengths] == (
        np.diff([*starts, predicted.tokens]).tolist()  # not only as many: the same steps
    )


@pytest.mark.parametrize("name", ["chain", "random 24"])
def test_generate_predicted_steps_end_of_text(
    story: tuple[Base, MedusaHeads], story_texts: list[Text], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prediction holds too where texts end early, within a step or not."""
    base, heads = story
    monkeypatch.setattr(base.model.generation_config, "eos_token_id", story_texts[0].answer[40])
    texts = [dataclasses.replace(text, answer=stock(base, text.prompt, 64)) for text in story_texts[:2]]
    assert any(len(text.answer) < 64 for text in texts)
    decoder = TreeDecoder(base, heads, STORY_TREES[name])
    decoded = [decoder.generate(text.prompt, 64) for text in texts]
    assert [one.tokens for one in decoded] == [text.answer for text in texts]
    predicted = predict(base, heads, STORY_TREES[name], texts)
    assert [len(one.step_lengths) for one in decoded] == predicted.sums.steps.tolist()


def test_own_generation_rules_are_set_aside() -> None:
    """Penalties and forbidden tokens in the model's own generation config change neither text, and stay in place."""
    base = tiny_base("llama", 5)
    prompt = [3, 8, 21, 40]
    plain = stock(base, prompt, 24)
    config = base.model.generation_config
    config.suppress_tokens, config.repetition_penalty, config.min_new_tokens = [plain[0]], 1.7, 5
    config.return_dict_in_generate = True
    decoder = TreeDecoder(base, random_heads(base, 3), Tree.chain(3))
    assert decoder.generate(prompt, 24).tokens == stock(base, prompt, 24) == plain
    assert base.model.generation_config is config


def test_decoder_leaves_the_callers_heads_alone() -> None:
    """Heads of another dtype are copied, not converted in place."""
    base = tiny_base("llama", 5)
    heads = random_heads(base, 2).to(torch.float64)
    TreeDecoder(base, heads, Tree.chain(2))
    assert heads.bias.dtype is torch.float64


def test_model_in_training_mode_is_refused() -> None:
    """Dropout would look like a model that cannot do trees; the error says what to call."""
    base = tiny_base("llama", 5)
    decoder = TreeDecoder(base.model, None, Tree(()))
    base.model.train()
    for run in (lambda: TreeDecoder(base, None, Tree(())), lambda: decoder.generate([3, 8], 2)):
        with pytest.raises(TreeoptError, match="in training mode") as caught:
            run()
        assert caught.value.code is Code.NO_TREES
    assert caught.value.what.startswith("LlamaForCausalLM is")  # a model without a name


def test_logits_that_are_not_numbers_are_an_error() -> None:
    """A model that gives NaN is E504, not a text."""
    base = tiny_base("llama", 5)
    decoder = TreeDecoder(base, None, Tree(()))
    with torch.no_grad():
        base.model.get_output_embeddings().weight.fill_(float("nan"))
    for decode in (lambda: decoder.generate([3, 8], 4), lambda: decoder.prefill([torch.tensor([3, 8])], 4)):
        with pytest.raises(TreeoptError, match="the model tiny-llama gives logits that are not finite") as caught:
            decode()
        assert caught.value.code is Code.NOT_FINITE
        assert caught.value.at == "prompt 0, after 2 tokens of prompt and text"


@pytest.mark.parametrize("batch", [False, True])
def test_nan_while_decoding_says_where(batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that turn into NaN behind the prompt end in E504 with the place, not in a text."""
    base = tiny_base("llama", 5)
    decoder = TreeDecoder(base, random_heads(base, 2), Tree.chain(2))
    forward, calls = base.model.forward, []

    def spoiled(*given: object, **more: object) -> object:
        out = forward(*given, **more)
        calls.append(1)
        if len(calls) == 3:
            out.logits[-1] = float("nan")
        return out

    monkeypatch.setattr(base.model, "forward", spoiled)
    with pytest.raises(TreeoptError, match="not finite") as caught:
        decoder.generate([[3, 8], [4, 9, 2]] if batch else [3, 8], 20)
    assert caught.value.code is Code.NOT_FINITE
    assert caught.value.at.startswith(f"prompt {int(batch)}, after ")


def test_buffers_unset_memory_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies behind a row's end, a huge number included, its text is the same."""
    base = tiny_base("llama", 6)
    decoder, other = (TreeDecoder(base, random_heads(base, HEADS, 6), TREES["64 nodes"]) for _ in range(2))
    prompts = [prompt_of(1), prompt_of(2), prompt_of(3)]
    text = decoder.generate(prompts, 20)
    fresh = torch.Tensor.new_zeros
    monkeypatch.setattr(torch.Tensor, "new_zeros", lambda *given, **more: fresh(*given, **more).fill_(1e4))
    assert other.generate(prompts, 20) == text


def test_misuse_is_told_apart() -> None:
    """A row without room left, a prompt without tokens, and a tree without heads: each its own error."""
    base = tiny_base("llama", 5)
    decoder = TreeDecoder(base, random_heads(base, 2), Tree.chain(2))
    rows = decoder.prefill([[3, 8]], 1)
    with pytest.raises(TreeoptError, match="used up its reserved space") as caught:
        all(decoder.step(rows) for _ in range(4))
    assert caught.value.code is Code.CONTEXT_FULL
    for empty in (np.array([]), [[3], []]):
        with pytest.raises(TreeoptError, match="holds no tokens"):
            decoder.generate(empty, 4)
    with pytest.raises(TreeoptError, match="no prompt is given"):
        decoder.prefill([], 4)
    with pytest.raises(TreeoptError, match="no heads were given"):
        TreeDecoder(base, None, Tree.chain(2))


@looped("name", ["base", "heads", "drafter", "acceptance"])
@looped("given", [5, TreeDecoder])
def test_wrong_type_is_named(name: str, given: object) -> None:
    """An argument of another type is refused at once, by its name."""
    base = tiny_base("llama", 1)
    arguments: dict[str, Any] = {"base": base, "heads": random_heads(base, 2), "tree": Tree.chain(1)}
    with pytest.raises(TypeError, match=f"^{name} is .*, not an object of type (int|type)"):
        TreeDecoder(**arguments | {name: given})
