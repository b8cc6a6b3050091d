"""tree_generate: inside stock generate, every option gives what stock generate gives."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chances import ALPHA, LENGTH, PROMPT, SMALL, p_value, small_base, text_probabilities
from drafters import SIZE_COST, quick_drafter
from random_trees import RandomTrees
from tiny import TREE_FAMILIES, VOCAB, but_slow, cycle_base, cycle_heads, random_heads, tiny_base
from torch import Tensor
from transformers import (
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    StopStringCriteria,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from treeopt import tree_generate
from treeopt.decode.generate import TreeGenerateOutput
from treeopt.decode.rules import Sample
from treeopt.errors import Code, TreeoptError
from treeopt.files.drafters import save_drafter
from treeopt.files.trees import save_policy, save_tree
from treeopt.models.base import Base
from treeopt.models.head_files import LoadedHeads
from treeopt.models.heads import MedusaHeads
from treeopt.policy import TreePolicy
from treeopt.tree import Tree
from treeopt.verify import probe

NEW = 24
# Every token is drafted for the place behind the root, and for the one behind three of those: all steps accept one
# draft, many two, so whatever looks at a path has paths to look at.
TREE = Tree.from_paths([(rank,) for rank in range(VOCAB)] + [(i, rank) for i in range(3) for rank in range(VOCAB)])
ALONE = {"input_ids": torch.tensor([[3, 8, 5, 21]])}
BATCH = {
    "input_ids": torch.tensor([[3, 8, 5, 21, 9], [0, 0, 7, 7, 2], [0, 0, 0, 0, 33]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]),
}
INPUTS = {"alone": ALONE, "batch": BATCH}
OWN = {"custom_generate": tree_generate, "stateless_processors": True}


class OddPaths(LogitsProcessor):
    """A processor of the user's own: forbids a token that depends on all tokens before, and on the row."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids):
            scores[row, int(ids.sum() + row) % 7 :: 7] = -torch.inf
        return scores


class SumReached(StoppingCriteria):
    """A criterion of the user's own: ends a row when its tokens sum to a multiple of nine."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids.sum(-1) % 9 == 0) & (input_ids.shape[1] > 8)


@functools.cache
def greedy_text(model: PreTrainedModel) -> list[int]:
    """The plain text of the one prompt."""
    return model.generate(**ALONE, do_sample=False, max_new_tokens=NEW)[0, 4:].tolist()


def ends(*places: int) -> Callable[[PreTrainedModel], dict[str, Any]]:
    """End tokens that stand at these places of the plain text."""
    return lambda model: {"eos_token_id": [greedy_text(model)[place] for place in places]}


class NothingFits(LogitsProcessor):
    """A processor of the user's own: forbids every token after texts of odd sums."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill((input_ids.sum(-1, keepdim=True) % 2).bool(), -torch.inf)


def own_prefixes(batch: int, ids: Tensor) -> list[int]:
    """As `allowed`; the row must be that of the text."""
    known = [rows["input_ids"][batch].tolist() for rows in INPUTS.values() if batch < len(rows["input_ids"])]
    assert any(ids.tolist()[: len(one)] == one for one in known), batch
    return allowed(batch, ids)


class SecondEnd(StoppingCriteria):
    """A criterion with an end token, which ends a row at its second one."""

    def __init__(self, token: int) -> None:
        self.eos_token_id = torch.tensor([token])

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, 5:] == self.eos_token_id).sum(-1) >= 2


class OneNumber(SecondEnd):
    """The same, with a plain number."""

    def __init__(self, token: int) -> None:
        self.eos_token_id = token  # type: ignore[assignment]


def trie(model: PreTrainedModel, **options: Any) -> dict[str, Any]:
    """The greedy text of each row, up to its end; any other prefix raises KeyError."""
    known: dict[tuple[int, ...], list[int]] = {}
    for rows in INPUTS.values():
        ids = rows["input_ids"]
        texts = model.generate(**rows, do_sample=False, max_new_tokens=NEW, **options).tolist()
        for at, text in itertools.product(range(ids.shape[1], len(texts[0])), texts):
            known[tuple(text[:at])] = text[at : at + 1]
    return {"prefix_allowed_tokens_fn": lambda _, ids: known[tuple(ids.tolist())], **options}


def allowed(batch: int, ids: Tensor) -> list[int]:
    """Tokens of the parity of row and length."""
    return list(range((batch + len(ids)) % 2, VOCAB, 2))


# Name -> options of generate, some of them made from the model's plain text.
OPTIONS: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "plain": lambda _: {},
    "max_length": lambda _: {"max_new_tokens": None, "max_length": 17},
    "one token": lambda _: {"max_new_tokens": 1},
    "two tokens": lambda _: {"max_new_tokens": 2},
    "end first": ends(0),
    "end inside a step": ends(5),
    "end at another place": ends(6),
    "list of ends": ends(9, 13, 12),
    "min_new_tokens": lambda model: {**ends(3)(model), "min_new_tokens": 7},
    "min_length": lambda model: {**ends(3)(model), "min_length": 10},
    "forced end": lambda model: {**ends(22)(model), "forced_eos_token_id": greedy_text(model)[22]},
    "repetition_penalty": lambda _: {"repetition_penalty": 1.6},
    "no_repeat_ngram_size": lambda _: {"no_repeat_ngram_size": 1},
    "bad_words_ids": lambda model: {"bad_words_ids": [greedy_text(model)[2:4], [greedy_text(model)[6]]]},
    "suppress_tokens": lambda model: {"suppress_tokens": greedy_text(model)[:2]},
    "begin_suppress_tokens": lambda model: {"begin_suppress_tokens": greedy_text(model)[:1]},
    "sequence_bias": lambda model: {"sequence_bias": [[[greedy_text(model)[3], 7], 60.0]]},
    "decay": lambda model: {**ends(20)(model), "exponential_decay_length_penalty": (3, 2.5)},
    "prefix_allowed_tokens_fn": lambda _: {"prefix_allowed_tokens_fn": allowed},
    "trie": trie,
    "nothing fits": lambda _: {"logits_processor": [NothingFits()]},
    "own and prefixes": lambda _: {"logits_processor": [OddPaths()], "prefix_allowed_tokens_fn": own_prefixes},
    "second end": lambda model: {"stopping_criteria": [SecondEnd(greedy_text(model)[2])]},
    "second end, a number": lambda model: {"stopping_criteria": [OneNumber(greedy_text(model)[2])]},
    "own processor": lambda _: {"logits_processor": [OddPaths()]},
    "own and stock": lambda _: {"logits_processor": [OddPaths()], "repetition_penalty": 1.3},
    "own criterion": lambda _: {"stopping_criteria": [SumReached()]},
    "own criterion and end": lambda model: {"stopping_criteria": [SumReached()], **ends(15)(model)},
}
CHANGED = {  # options that must change the text, lest the comparison say nothing
    *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    *("sequence_bias", "prefix_allowed_tokens_fn", "own processor", "own and stock"),
}


@functools.cache
def stock_text(model: PreTrainedModel, name: str, rows: str) -> list[list[int]]:
    """What stock generate gives."""
    options = {"max_new_tokens": NEW, "do_sample": False, **OPTIONS[name](model), **INPUTS[rows]}
    return model.generate(**options).tolist()


@pytest.mark.parametrize("rows", INPUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_equal_to_stock(model: PreTrainedModel, heads: MedusaHeads, name: str, rows: str) -> None:
    """Token for token and pad for pad what stock generate gives, alone and in a left-padded batch."""
    options = {"max_new_tokens": NEW, "do_sample": False, **OPTIONS[name](model), **INPUTS[rows]}
    stock = stock_text(model, name, rows)
    ours = model.generate(**options, **OWN, heads=heads, tree=TREE)
    assert ours.tolist() == stock
    assert not ours.is_inference()
    if name in CHANGED and rows == "alone":
        assert stock[0][4:] != greedy_text(model)


def test_no_text_after_its_end_is_asked_for(model: PreTrainedModel, heads: MedusaHeads) -> None:
    """A trie that knows no text with an end token, wherever it stands among the drafts."""
    for place in range(1, 12):
        options = {**trie(model, **ends(place)(model)), **ALONE, "do_sample": False, "max_new_tokens": NEW}
        ours = model.generate(**options, **OWN, heads=heads, tree=TREE)
        assert ours.tolist() == model.generate(**options).tolist()


@pytest.mark.parametrize("rows", INPUTS)
@pytest.mark.parametrize(
    "name", but_slow(["plain", *sorted(CHANGED)], "plain", "no_repeat_ngram_size", "own and stock")
)
def test_equal_to_stock_own_trees(model: PreTrainedModel, name: str, rows: str) -> None:
    """Processors see each node's own path too where every row has a tree of its own at every step."""
    options = {"max_new_tokens": NEW, "do_sample": False, **OPTIONS[name](model), **INPUTS[rows]}
    trees = RandomTrees(Base(model, None, "tiny"), nodes=40, depth=3)
    ours = model.generate(**options, **OWN, tree=trees, return_dict_in_generate=True)
    assert ours.sequences.tolist() == stock_text(model, name, rows)
    assert ours.tokens_per_step > 1


def test_kept_decoders_follow_the_config(heads: MedusaHeads) -> None:
    """A context or window that changed between two calls: what stock generate gives. A batch runs under autocast."""
    model = tiny_base("mistral", 3).model
    given = {**ALONE, "do_sample": False}
    for context, window in ((32, None), (96, None), (96, 8), (96, 4)):
        model.config.max_position_embeddings, model.config.sliding_window = context, window
        given["max_new_tokens"] = context - 12
        ours = model.generate(**given, **OWN, heads=heads, tree=TREE)
        assert ours.tolist() == model.generate(**given).tolist()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert len(model.generate(**BATCH, max_new_tokens=8, **OWN, heads=heads, tree=TREE)) == 3


@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_families_in_a_batch(family: str) -> None:
    """Every family, in a left-padded batch, with processors along the paths."""
    base = tiny_base(family, 7)
    base.model.generation_config.pad_token_id = 0
    options = {"max_new_tokens": 16, "do_sample": False, "repetition_penalty": 1.5, **BATCH}
    ours = base.model.generate(**options, custom_generate=tree_generate, heads=random_heads(base, 2), tree=TREE)
    assert ours.tolist() == base.model.generate(**options).tolist()


@pytest.mark.parametrize("rows", INPUTS)
def test_record(model: PreTrainedModel, heads: MedusaHeads, rows: str) -> None:
    """The record holds stock's sequences and our steps; a row's steps add up to its tokens."""
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **ends(9)(model)}
    stock = model.generate(**options, **INPUTS[rows])
    ours = model.generate(**options, **INPUTS[rows], custom_generate=tree_generate, heads=heads, tree=TREE)
    assert isinstance(ours, TreeGenerateOutput)
    assert ours["sequences"].tolist() == stock.sequences.tolist()
    end = options["eos_token_id"][0]
    texts = stock.sequences[:, INPUTS[rows]["input_ids"].shape[1] :].tolist()
    lengths = [text.index(end) + 1 if end in text else len(text) for text in texts]
    assert ours.step_lengths is not None
    assert [sum(steps) for steps in ours.step_lengths] == lengths
    assert all(1 <= step <= TREE.depth + 1 for steps in ours.step_lengths for step in steps)
    assert ours.tokens_per_step == sum(lengths) / sum(map(len, ours.step_lengths)) > 1.5


class Recorder(BaseStreamer):
    """A streamer that notes all it is given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


@pytest.mark.parametrize("rows", INPUTS)
def test_streamer(model: PreTrainedModel, heads: MedusaHeads, rows: str) -> None:
    """It is told what stock tells it, call by call, though transformers does not pass it on."""
    options = {"max_new_tokens": NEW, "do_sample": False, **ends(9)(model), **INPUTS[rows]}
    told, wanted = Recorder(), Recorder()
    model.generate(**options, streamer=wanted)
    model.generate(**options, streamer=told, custom_generate=tree_generate, heads=heads, tree=TREE)
    assert told.seen == wanted.seen
    assert len(wanted.seen) == 12 if rows == "alone" else len(wanted.seen) > 12


def test_real_model_streams_and_stops(base: Base, loaded: LoadedHeads, capsys: pytest.CaptureFixture[str]) -> None:
    """On the small pretrained model: a printed stream and a stop string, as stock."""
    tokenizer = base.tokenizer
    assert tokenizer is not None
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    options = {"max_new_tokens": 80, "do_sample": False, "input_ids": inputs["input_ids"]}
    stock = base.model.generate(**options, streamer=TextStreamer(tokenizer), stop_strings="park", tokenizer=tokenizer)
    printed = capsys.readouterr().out
    streamer = TextStreamer(tokenizer)
    ours = base.model.generate(
        **options,
        streamer=streamer,
        stopping_criteria=[StopStringCriteria(tokenizer, "park")],
        custom_generate=tree_generate,
        text_streamer=streamer,
        heads=loaded.heads,
        tree=Tree.chain(5),
    )
    assert ours.tolist() == stock.tolist()
    assert capsys.readouterr().out == printed
    assert "park" in printed
    assert stock.shape[1] < 80


@pytest.mark.parametrize("name", ["plain", "warped", "with a text processor"])
def test_sampling_distribution(name: str) -> None:
    """With do_sample texts are distributed as plain sampling; a processor that changes nothing changes nothing."""
    rule = Sample() if name == "plain" else Sample(temperature=1.3, top_k=4, top_p=0.9)
    base, counts = small_base(), np.zeros(SMALL**LENGTH)
    tree = Tree.from_paths([path for depth in (1, 2) for path in np.ndindex(*[2] * depth)])
    options = {"temperature": rule.temperature, "top_k": rule.top_k, "top_p": rule.top_p, "do_sample": True}
    own = [HarmlessProcessor()] if name == "with a text processor" else []
    rows, rounds = (16, 24) if own else (256, 6)
    torch.manual_seed(1)
    for _ in range(rounds):
        texts = base.model.generate(
            torch.tensor([PROMPT]),
            num_return_sequences=rows,
            max_new_tokens=LENGTH,
            logits_processor=own,
            **OWN,
            heads=random_heads(base, 2, 3),
            tree=tree,
            **options,
        )
        for text in texts[:, len(PROMPT) :].tolist():
            counts[int(np.polyval(text, SMALL))] += 1
    assert p_value(counts, text_probabilities(base, rule)) > ALPHA


class HarmlessProcessor(LogitsProcessor):
    """Of the user's own, and without any effect."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


def test_one_class_of_stateless_processors(model: PreTrainedModel, heads: MedusaHeads) -> None:
    """A class alone is a list of it; what is no class is named."""
    given = {**ALONE, "max_new_tokens": 4, "custom_generate": tree_generate, "heads": heads, "tree": TREE}
    given["logits_processor"] = [HarmlessProcessor()]
    alone, listed = (
        model.generate(**given, stateless_processors=one) for one in (HarmlessProcessor, [LogitsProcessor])
    )
    assert alone.tolist() == listed.tolist()
    for wrong in ("HarmlessProcessor", [HarmlessProcessor()]):
        with pytest.raises(TypeError, match="stateless_processors="):
            model.generate(**given, stateless_processors=wrong)


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "beam search": {"num_beams": 2},
    "assisted generation": {"prompt_lookup_num_tokens": 3},
    "output_scores": {"return_dict_in_generate": True, "output_scores": True},
    "ClassifierFree": {"guidance_scale": 1.5},
    "mask hides": {"attention_mask": torch.tensor([[1, 0, 1, 1]])},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported(model: PreTrainedModel, heads: MedusaHeads, name: str) -> None:
    """What a tree does not do is one clear error."""
    options = {**ALONE, "max_new_tokens": 5, "do_sample": False, **UNSUPPORTED[name]}
    with pytest.raises(TreeoptError, match=name) as caught:
        model.generate(**options, custom_generate=tree_generate, heads=heads, tree=TREE)
    assert caught.value.code is Code.GENERATE_UNSUPPORTED


def test_other_inputs_are_refused() -> None:
    """A model that reads more than token ids is not fed less of it in silence."""
    base = tiny_base("gpt2")
    kinds = torch.tensor([[0, 1, 1, 0]])
    with pytest.raises(TreeoptError, match="token_type_ids"):
        base.model.generate(
            **ALONE, token_type_ids=kinds, custom_generate=tree_generate, heads=random_heads(base, 2), tree=TREE
        )


def test_errors_reach_the_caller(model: PreTrainedModel, heads: MedusaHeads) -> None:
    """A text beyond the context and a tree beyond the heads are the decoder's own errors."""
    for options, code in (({"max_new_tokens": 300}, Code.CONTEXT_FULL), ({"tree": Tree.chain(3)}, Code.TREE_TOO_DEEP)):
        with pytest.raises(TreeoptError) as caught:
            model.generate(
                **{**ALONE, "tree": TREE, "do_sample": False, **options}, custom_generate=tree_generate, heads=heads
            )
        assert caught.value.code is code


def test_model_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many calls of generate probe a model once."""
    base = cycle_base(5)
    runs: list[Base] = []
    run = probe._probe
    monkeypatch.setattr(probe, "_probe", lambda one: (runs.append(one), run(one))[1])
    for _ in range(3):
        base.model.generate(
            **ALONE,
            max_new_tokens=4,
            do_sample=False,
            custom_generate=tree_generate,
            heads=cycle_heads(base, 2, 5),
            tree=Tree.chain(2),
        )
    assert len(runs) == 1


def test_model_is_left_alone(model: PreTrainedModel, heads: MedusaHeads) -> None:
    """Nothing is hung on the model, and its generation config stays."""
    before, config = set(vars(model)), model.generation_config.to_dict()
    model.generate(**ALONE, max_new_tokens=5, custom_generate=tree_generate, heads=heads, tree=TREE)
    assert set(vars(model)) == before
    assert model.generation_config.to_dict() == config


@pytest.fixture(scope="module")
def drafting(model: PreTrainedModel, heads: MedusaHeads, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan of each kind in files beside their drafter, which was learned from texts of the model."""
    folder = tmp_path_factory.mktemp("drafting")
    drafter = quick_drafter(Base(model, None, "tiny"), heads)
    source = {"drafter": str(folder / "d.safetensors")}
    tree = Tree.from_paths([(rank,) for rank in range(8)] + [(0, rank) for rank in range(8)])
    save_drafter(drafter, folder / "d.safetensors")
    save_tree(dataclasses.replace(tree, drafter=drafter.id, source=source), folder / "static.yaml")
    save_policy(TreePolicy(40, 3, drafter.id, source=source), folder / "dynamic.yaml")
    save_policy(TreePolicy(16, drafter.depth, drafter.id, SIZE_COST, source=source), folder / "size_cost.yaml")
    return folder


@pytest.mark.parametrize("rows", INPUTS)
@pytest.mark.parametrize("kind", ["static", "dynamic", "size_cost"])
@pytest.mark.parametrize("name", ["plain", "own and stock", "own criterion and end", "no_repeat_ngram_size"])
def test_equal_to_stock_with_drafters(
    model: PreTrainedModel, heads: MedusaHeads, drafting: Path, name: str, kind: str, rows: str
) -> None:
    """A plan by its file gives stock's text, with processors and criteria, alone and left-padded."""
    options = {"max_new_tokens": NEW, "do_sample": False, **OPTIONS[name](model), **INPUTS[rows]}
    ours = model.generate(
        **options,
        **OWN,
        heads=heads,
        tree=str(drafting / f"{kind}.yaml"),
        return_dict_in_generate=True,
    )
    assert ours.sequences.tolist() == stock_text(model, name, rows)


def test_heads_without_a_tree(model: PreTrainedModel, heads: MedusaHeads) -> None:
    """Heads alone do not say which tree to verify; a model alone drafts from the text so far (test_no_tree.py)."""
    with pytest.raises(ValueError, match="tree"):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, custom_generate=tree_generate, heads=heads)
