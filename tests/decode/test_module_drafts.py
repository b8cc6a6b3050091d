"""Decoding with EAGLE heads and MTP layers: stock text in the predicted steps, and sampled texts as of the base."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import mtp_checkpoints
import numpy as np
import pytest
import torch
from chances import ALPHA, counted, p_value, small_base, text_probabilities
from conftest import ROOT_FOLDER
from decoding import stock
from drafters import answered, prompts_of
from helpers import random_tree
from mtp_checkpoints import write
from naive_draft import random_drafter
from predicted import predict
from tiny import but_slow, family, tiny_base
from tiny_modules import BLOCKS, module_drafter, tiny_module

import treeopt
from treeopt.decode.decoder import Decoded, TreeDecoder
from treeopt.decode.rejection import DrawnChain, Rejection
from treeopt.decode.rules import Sample
from treeopt.drafter import Drafter
from treeopt.drafting import parallel
from treeopt.drafting.interface import NO_CANDIDATE
from treeopt.drafting.kernel.data import num_candidates
from treeopt.drafting.model import DRAFT_MODEL_SOURCE
from treeopt.drafting.module import ModuleProposer
from treeopt.drafting.plans import untrained
from treeopt.drafting.trace import draft_sources, positions_of, states_for
from treeopt.errors import Code, TreeoptError
from treeopt.evaluate.eagle2 import DEPTHS, TOP_KS, eagle2_drafter
from treeopt.evaluate.learn_drafter import outside_shares
from treeopt.models.base import Base, load_base
from treeopt.models.draft_files import load_draft
from treeopt.models.draft_module import kind_of
from treeopt.policy import Plan, TreePolicy
from treeopt.schedule import Schedule, ScheduledPlan
from treeopt.texts.encode import Text
from treeopt.texts.prompts import Prompt
from treeopt.tree import Tree

NEW = 16
VOCAB = 13  # so that two random models often agree
DEPTH = 4
OWN_HEADS = {"eagle3": 8, "mtp3": VOCAB}  # tokens
KINDS = ("eagle3", "eagle1", "mtp", "mtp3", "peagle", *BLOCKS)


def drafter_of(draft: Base, seed: int = 0, *, ngram: bool = False) -> Drafter:
    """A random record of a module."""
    vocab = draft.model.base_vocab_size
    _, drafter = random_drafter(np.random.default_rng(seed), vocab, "voted", 20)
    sure = (0.3, 0.8, 0.4) if getattr(draft.model.wiring, "confidence", False) else ()
    level = dataclasses.replace(drafter.levels[0], head=1.0, confidence=sure)
    made = dataclasses.replace(drafter, levels=(level,) * DEPTH, num_heads=0, top=min(drafter.top, draft.vocab_size))
    if not ngram:
        made = dataclasses.replace(Drafter.model_only(DEPTH, made.top, "0"), levels=made.levels)
    return module_drafter(dataclasses.replace(made, draft="0"), draft)


def plans_of(drafter: Drafter) -> list[Plan]:
    """A random tree, a chain that ends above the last level, and a policy."""
    ranks = min(4, num_candidates(drafter))
    tree = random_tree(3, nodes=min(14, 1 + ranks * drafter.depth), depth=drafter.depth, ranks=ranks)
    trees = (tree, Tree.chain(max(1, drafter.depth - 1)))
    return [*(dataclasses.replace(one, drafter=drafter.id) for one in trees), TreePolicy(12, DEPTH, drafter.id)]


def steps_of(decoded: list[Decoded]) -> list[int]:
    return [len(one.step_lengths) for one in decoded]


def check_plans(base: Base, draft: Base, seed: int, *, ngram: bool, new: int = NEW) -> None:
    """Every plan: stock text in the predicted steps, in a batch as alone."""
    texts = answered(base, prompts_of(seed, 3, longest=40, vocab=VOCAB), new)
    prompts = [text.prompt for text in texts]
    assert texts[0].answer == stock(base, prompts[0], new)
    drafter = drafter_of(draft, seed, ngram=ngram)
    accepted = 0
    for plan in plans_of(drafter):
        decoder = TreeDecoder(base, None, plan, drafter=drafter, draft=draft)
        decoded = decoder.generate(prompts, new)
        assert [one.tokens for one in decoded] == [text.answer for text in texts]
        assert steps_of(decoded) == predict(base, None, plan, texts, drafter, draft).sums.steps.tolist()
        assert decoder.generate(prompts[0], new) == decoded[0]
        accepted += sum(len(one.tokens) - len(one.steps) for one in decoded)
    assert accepted


def pairs_of(names: tuple[str, ...], *quick: tuple[str, str, bool]) -> list[Any]:
    """Every kind with every model once, with and without the table in turn; `make test` runs the `quick` ones."""
    known = {case[:2]: case for case in quick}
    pairs = enumerate(itertools.product(KINDS, names))
    turns = [(kind, name, (number + number // len(names)) % 2 == 0) for number, (kind, name) in pairs]
    return but_slow([known.get(case[:2], case) for case in turns], *quick)


@pytest.mark.parametrize(
    "case",
    pairs_of(
        ("llama", "qwen3-mixed", "gemma2", "phi3"),
        ("eagle3", "llama", False),
        ("eagle1", "llama", True),
        ("mtp", "qwen3-mixed", True),
        ("mtp3", "llama", True),
        ("block", "gemma2", True),
        ("sliding", "llama", True),
        ("dspark-rnn", "gemma2", True),
        ("dflash2", "llama", True),
        ("peagle", "gemma2", False),
    ),
)
def test_attention(case: tuple[str, str, bool]) -> None:
    """On models that verify trees with a mask."""
    kind, name, ngram = case
    base = tiny_base(name, 1, vocab_size=VOCAB)
    new = 22 if kind == "causal" else NEW  # its random drafts are right too rarely in fewer tokens
    draft = tiny_module(base, kind, 2, vocabulary=OWN_HEADS.get(kind, 0))
    check_plans(base, draft, len(name), ngram=ngram, new=new)


@pytest.mark.parametrize(
    "case",
    pairs_of(("qwen3_next", "qwen3_5_text"), ("mtp", "qwen3_5_text", True)),
)
def test_recurrent(case: tuple[str, str, bool]) -> None:
    """On hybrids with a recurrent state, whose trees are verified as paths."""
    kind, name, ngram = case
    base = family(name, 1)
    check_plans(base, tiny_module(base, kind, 2), 3, ngram=ngram)


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_layers_with_a_state(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inkling's convolutions, relative positions and windows: its MTP layers run on copies of their caches."""
    monkeypatch.setitem(mtp_checkpoints.SIZES, "vocab_size", VOCAB)
    write(tmp_path, "inkling_mm_model", count=count)
    base = load_base(str(tmp_path), dtype="float32")
    check_plans(base, load_draft("mtp", base), 1, ngram=False, new=6)


@pytest.mark.parametrize("kind", ["eagle3", "mtp3", "peagle", "block", "dspark-rnn"])
def test_rows_that_end_and_rows_that_are_rewound(kind: str) -> None:
    """Rows end at different places, and steps after a rewind are those of before."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft = tiny_module(base, kind, 2)
    texts = answered(base, prompts_of(4, 4, longest=30, vocab=VOCAB), NEW)
    prompts = [text.prompt for text in texts]
    drafter = drafter_of(draft, ngram=True)
    decoder = TreeDecoder(base, None, TreePolicy(12, DEPTH, drafter.id), drafter=drafter, draft=draft)
    rows = decoder.prefill(prompts, 3 * NEW)
    decoder.step(rows)
    mark = rows.mark()
    first = [decoder.step(rows) for _ in range(4)]
    rows.rewind(mark)
    assert [decoder.step(rows) for _ in range(4)] == first
    base.model.generation_config.eos_token_id = [texts[0].answer[4], texts[1].answer[9]]
    batch = decoder.generate(prompts, NEW)
    assert batch == [decoder.generate(prompt, NEW) for prompt in prompts]
    assert len({len(one.tokens) for one in batch}) > 1


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "block"])
def test_a_schedule_that_begins_without_drafts(kind: str) -> None:
    """The states of steps without drafts are read, too: later steps draft as if there had been no such steps."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft = tiny_module(base, kind, 2)
    drafter = drafter_of(draft)
    [text] = answered(base, prompts_of(1, 1, longest=12, vocab=VOCAB), 2 * NEW)
    tree, begin = plans_of(drafter)[0], len(text.prompt) + 7
    schedule = Schedule((ScheduledPlan(1, begin, Tree(())), ScheduledPlan(1, 4 * NEW, tree)))
    always = TreeDecoder(base, None, tree, drafter=drafter, draft=draft)
    late = TreeDecoder(base, None, schedule, drafter=drafter, draft=draft).generate(text.prompt, 2 * NEW)
    assert late.tokens == text.answer
    plain = 8  # steps whose cache has at most `begin` tokens
    assert late.step_lengths[:plain] == [1] * plain
    rest = always.generate([*text.prompt, *text.answer[:plain]], 2 * NEW - plain)
    assert late.step_lengths[plain:] == rest.step_lengths
    assert max(rest.step_lengths) > 1


@pytest.mark.parametrize("kind", but_slow(["eagle3", "mtp3", "peagle", "block", "dspark-rnn"], "mtp3", "block"))
def test_sampled_texts(kind: str) -> None:
    """Drafts of a tree are accepted by the base's draws, those drawn from the head by rejection: texts are sampled
    as without drafts.
    """
    base = small_base()
    draft = tiny_module(base, kind, 3, vocabulary=base.vocab_size - 1)
    drafter = drafter_of(draft, 7)
    rule = Sample(temperature=1.3)
    tree = TreeDecoder(base, None, plans_of(drafter)[0], drafter=drafter, draft=draft, acceptance=rule, probe=False)
    drawn = TreeDecoder(base, None, DrawnChain(base, draft, Sample(), 3), acceptance=Rejection(1.3), probe=False)
    for decoder in (tree, drawn):
        assert p_value(counted(decoder, rounds=3), text_probabilities(base, rule)) > ALPHA


@pytest.mark.parametrize(("kind", "levels"), [("eagle3", 8), ("mtp3", 8), ("block", 4)])
def test_modules_that_nothing_was_learned_for(kind: str, levels: int) -> None:
    """A module alone drafts by its own probabilities, to 8 levels or as many as it has; of few tokens too."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft = tiny_module(base, kind, 2, vocabulary=OWN_HEADS.get(kind, 0))
    decoder, [text] = TreeDecoder(base, draft=draft), answered(base, prompts_of(1, 1, longest=12, vocab=VOCAB), NEW)
    assert (decoder.trees.nodes, decoder.trees.depth) == (16, levels)
    found = decoder.generate(text.prompt, NEW)
    assert found.tokens == text.answer
    tokens = OWN_HEADS["eagle3"] if kind == "eagle3" else VOCAB
    drafter = Drafter.model_only(levels, tokens, draft.fingerprint, kind_of(draft.model))
    plan = TreePolicy(16, levels, drafter.id)
    assert untrained(base, draft)[1].id == drafter.id
    assert steps_of([found]) == steps_of(
        [TreeDecoder(base, None, plan, drafter=drafter, draft=draft).generate(text.prompt, NEW)]
    )


@torch.inference_mode()
@pytest.mark.parametrize(("depth", "top_k", "nodes"), [(3, 4, 8), (4, 3, 31), (3, 2, 8), (1, 5, 4), (4, 1, 5)])
def test_trees_of_eagle2(depth: int, top_k: int, nodes: int) -> None:
    """Of all nodes that a beam of k reaches, each with k children, the tree has those with the largest products."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft = tiny_module(base, "eagle3", 2)
    proposer = eagle2_drafter(base, draft, depth, top_k)
    [text] = answered(base, prompts_of(1, 1, longest=12, vocab=VOCAB), 4)
    ids = [*text.prompt, *text.answer]
    _, states = base.reading(proposer.reads).forward(torch.tensor([ids[:-1]]), use_cache=False)
    session = proposer.start([ids], depth)
    session.read([states[0]])
    session.begin(torch.tensor(ids[-1:]), states[:, -1])
    grown = session.expand(nodes, depth)
    paths: dict[tuple[int, ...], float] = {}
    level: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(depth):
        children = []
        for path, score in level:
            chances = _logits_after(draft, states[0], ids, path).log_softmax(-1)
            best = sorted(range(VOCAB), key=lambda token: (-float(chances[token]), token))[:top_k]
            children += [((*path, token), score + float(chances[token])) for token in best]
        paths |= dict(children)
        level = sorted(children, key=lambda one: -one[1])[:top_k]
    expected = sorted(paths, key=lambda path: -paths[path])[: nodes - 1]
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(grown.tokens[0].tolist(), grown.parents[0].tolist(), strict=True):
        found.append((*found[parent], token))
    assert set(found[1:]) == set(expected)


def test_the_page_names_the_grid() -> None:
    """A baseline is as good as its grid: what it has is on the page, and the bench prints all of it."""
    page = (ROOT_FOLDER / "docs" / "eagle-mtp.md").read_text()
    assert f"a grid (top-k {', '.join(map(str, TOP_KS))}" in " ".join(page.split())
    printed = (ROOT_FOLDER / "docs" / "figures" / "modules-pocket.txt").read_text()
    assert all(f" {depth}/{top_k} " in printed for depth in DEPTHS for top_k in TOP_KS)


def _logits_after(draft: Base, states: torch.Tensor, ids: list[int], path: tuple[int, ...]) -> torch.Tensor:
    """The head's logits after a path of drafts, by forwards without a cache; row i reads token i + 1."""
    hidden = draft.model.states(states)[None]
    for level in range(len(path) + 1):
        tokens = torch.tensor([[*ids[1:], *path[:level]]])
        logits, after = draft.forward(tokens, hidden=hidden, use_cache=False)
        hidden = torch.cat([hidden, after[:, -1:]], dim=1)
    return logits[0, -1]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_sources_of_drafts(name: str) -> None:
    """In a teacher-forced pass over a finished text each accepted draft is found in the lists of its step."""
    base = tiny_base(name, 1, vocab_size=VOCAB)
    draft = tiny_module(base, "eagle3", 2)
    drafter = drafter_of(draft)
    decoder = TreeDecoder(base, None, TreePolicy(12, DEPTH, drafter.id), drafter=drafter, draft=draft)
    made = decoder.generate(list(range(1, 9)), 2 * NEW)
    proposer = ModuleProposer(base, draft, drafter)
    found = draft_sources(base, proposer, list(range(1, 9)), made.steps)
    assert [len(one) for one in found] == [length - 1 for length in made.step_lengths]
    assert any(made.step_lengths[i] > 1 for i in range(len(made.steps)))
    assert all(DRAFT_MODEL_SOURCE in lists for step in found for lists in step)


def test_modules_that_do_not_fit() -> None:
    """Of another width, of more tokens, of more layers, and a record of another kind: each is one error."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft = tiny_module(base, "eagle3", 2)
    drafter = drafter_of(draft)
    plan = TreePolicy(8, DEPTH, drafter.id)
    others = {
        "hidden size": tiny_base("llama", 1, vocab_size=VOCAB, hidden_size=64),
        "vocabulary": tiny_base("llama", 1, vocab_size=VOCAB + 1),
        "last state": tiny_base("llama", 1, vocab_size=VOCAB, num_hidden_layers=1),
    }
    for fault, other in others.items():
        with pytest.raises(TreeoptError, match=f"its {fault} is") as caught:
            TreeDecoder(other, None, plan, drafter=drafter, draft=draft)
        assert caught.value.code is Code.DRAFT_MISMATCH
    assert kind_of(draft.model) == "eagle"
    assert isinstance(TreeDecoder(base, None, plan, drafter=drafter, draft=draft).trees.proposer, ModuleProposer)


def test_blocks_of_rows_need_a_tree_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """P-EAGLE runs its rows after the caches of all texts, which layers with a state do not have."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft = tiny_module(base, "peagle", 2)
    monkeypatch.setattr(parallel, "route_of", lambda _: "paths")
    with pytest.raises(TreeoptError, match="cannot attend to a tree"):
        parallel.ParallelProposer(base, draft, drafter_of(draft))


def test_states_that_a_base_does_not_give() -> None:
    """As of LongCat, whose config counts its layers twice: one error names the state."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    with pytest.raises(TreeoptError, match="reads state 9 of") as caught:
        base.reading((1, 9)).forward(torch.tensor([[1, 2]]))
    assert caught.value.code is Code.DRAFT_MISMATCH


def test_inside_stock_generate() -> None:
    """`custom_generate` takes a module, from call to call, and gives the text of `generate`."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft = tiny_module(base, "eagle3", 2)
    drafter = drafter_of(draft)
    options = {"tree": TreePolicy(8, DEPTH, drafter.id), "drafter": drafter, "draft": draft}
    ids = torch.tensor([[1, 2, 3]])
    for _ in range(2):
        found = base.model.generate(ids, custom_generate=treeopt.tree_generate, max_new_tokens=NEW, **options)
        assert found[0, 3:].tolist() == stock(base, [1, 2, 3], NEW)


@torch.inference_mode()
def test_chains_that_are_drawn_run_the_tokens_of_the_base() -> None:
    """The head reads the base's tokens also where its own vocabulary is smaller than their numbers."""
    base = tiny_base("llama", 1, vocab_size=40)
    draft = tiny_module(base, "eagle3", 2, vocabulary=5)
    ids = [3, 17, 30, 39, 21]
    proposer = ModuleProposer(base, draft, drafter_of(draft))
    session = proposer.start([ids], DEPTH)
    _, states = base.reading(proposer.reads).forward(torch.tensor([ids[:-1]]), use_cache=False)
    session.read([states[0]])
    torch.testing.assert_close(session.advance()[0], _logits_after(draft, states[0], ids, ()), rtol=0, atol=1e-5)
    for path in ((38,), (38, 11)):
        found = session.follow(torch.tensor(path[-1:]))[0]
        torch.testing.assert_close(found, _logits_after(draft, states[0], ids, path), rtol=0, atol=1e-5)


def test_texts_beyond_the_positions_of_the_head() -> None:
    """A head whose config has fewer positions than the base drafts as one that has as many."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    near, far = tiny_module(base, "eagle3", 2, positions=16), tiny_module(base, "eagle3", 2)
    prompt = prompts_of(1, 1, longest=60, vocab=VOCAB)[0].prompt * 3
    made = []
    for draft in (near, far):
        drafter = drafter_of(draft)
        decoder = TreeDecoder(base, None, plans_of(drafter)[0], drafter=drafter, draft=draft)
        made.append(decoder.generate(prompt, NEW).step_lengths)
    assert made[0] == made[1]


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "block"])
def test_half_precision(kind: str) -> None:
    """On a base in bfloat16 a module drafts, and its rotary frequencies stay in float32."""
    base = tiny_base("llama", 1, vocab_size=VOCAB).in_dtype("bfloat16")
    draft = tiny_module(base, kind, 2)
    assert {weight.dtype for weight in draft.model.parameters()} == {torch.bfloat16}
    assert draft.model.decoder.rotary_emb.inv_freq.dtype == torch.float32
    drafter = drafter_of(draft)
    decoder = TreeDecoder(base, None, plans_of(drafter)[2], drafter=drafter, draft=draft)
    assert len(decoder.generate([1, 2, 3], NEW).tokens) == NEW


def test_tokens_outside_the_draft_vocabulary() -> None:
    """Their share of the answers is counted, of all texts and by category; none with a whole vocabulary."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft = tiny_module(base, "eagle3", 2, vocabulary=8)
    texts = answered(base, prompts_of(1, 3, longest=20, vocab=VOCAB), NEW)
    known = set(draft.model.token_map.tolist())
    expected = sum(token not in known for text in texts for token in text.answer) / (3 * NEW)
    assert 0 < expected < 1
    assert outside_shares(draft, texts) == {"all": expected}
    assert outside_shares(tiny_module(base, "eagle3", 2), texts) == {}
    assert outside_shares(tiny_module(base, "mtp", 2), texts) == outside_shares(None, texts) == {}


def test_tokens_outside_by_category() -> None:
    """Texts of a category count together; those without one are in the share of all texts alone."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft = tiny_module(base, "eagle3", 2, vocabulary=8)
    inside = draft.model.token_map.tolist()
    outside = [token for token in range(VOCAB) if token not in inside]
    answers = [
        ("code", [inside[0], outside[0], outside[1], inside[1]]),
        ("talk", [outside[2], outside[0]]),
        ("all", [inside[1]]),  # a category of this name is no second count
        ("code", [inside[2], inside[2], inside[3], inside[4]]),
        (None, [outside[3], inside[5]]),
    ]
    prompts = [Prompt(f"set:{i}", None, "1", None, category) for i, (category, _) in enumerate(answers)]
    texts = [Text(prompt.id, [1], answer, prompt) for prompt, (_, answer) in zip(prompts, answers, strict=True)]
    assert outside_shares(draft, texts) == {"all": 5 / 13, "code": 2 / 8, "talk": 1.0}


def test_traced_ranks_are_those_of_candidates() -> None:
    """Of a small draft vocabulary: tokens without probability, which are void in a tree, have no rank."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft = tiny_module(base, "eagle3", 2, vocabulary=8)
    proposer = ModuleProposer(base, draft, drafter_of(draft, 11, ngram=True))
    texts = answered(base, prompts_of(3, 3, longest=40, vocab=VOCAB), NEW)
    missing = 0
    for session, true in positions_of(proposer, texts, states_for(base, proposer.reads, texts)):
        ranks, found = session.trace(true)[0], session.candidates(true, VOCAB)
        for row, level in np.argwhere(true >= 0):
            listed = found[row, level].tolist()
            token = int(true[row, level])
            assert ranks[row, level] == (listed.index(token) if token in listed else NO_CANDIDATE)
            missing += token not in listed
    assert missing


@pytest.mark.parametrize("kind", ["eagle3", "mtp3", "block"])
def test_long_texts_are_run_in_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of several pieces, of different lengths in a batch, in decoding and in tracing."""
    base = tiny_base("llama", 1, vocab_size=VOCAB)
    draft = tiny_module(base, kind, 2)
    drafter = drafter_of(draft)
    plan = plans_of(drafter)[2]
    texts = answered(base, prompts_of(1, 3, longest=40, vocab=VOCAB), NEW)
    prompts = [text.prompt for text in texts]
    assert len({len(prompt) // 7 for prompt in prompts}) > 1
    whole = TreeDecoder(base, None, plan, drafter=drafter, draft=draft).generate(prompts, NEW)
    monkeypatch.setattr("treeopt.drafting.module.PIECE", 7)
    assert TreeDecoder(base, None, plan, drafter=drafter, draft=draft).generate(prompts, NEW) == whole
    assert steps_of(whole) == predict(base, None, plan, texts, drafter, draft).sums.steps.tolist()
