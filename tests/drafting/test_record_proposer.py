"""Drafters of records: what they read of a record, and records and plans that do not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from looped import looped
from naive_draft import random_drafter
from refusals import refusal_of
from tiny import random_heads, tiny_base

from treeopt.decode.decoder import TreeDecoder
from treeopt.drafter import Drafter, Level
from treeopt.drafting import model
from treeopt.drafting.count import NgramCounts
from treeopt.drafting.fit import FitSample
from treeopt.drafting.heads import HeadsProposer
from treeopt.drafting.interface import AcceptedPart
from treeopt.drafting.kernel import compiled
from treeopt.drafting.kernel import session as kernel_session
from treeopt.drafting.kernel.session import shape_of
from treeopt.drafting.ngram import RecordProposer, check_drafter
from treeopt.drafting.plans import check_plan, proposer_for, trees_for
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.policy import TreePolicy
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_ranks

VOCAB = 7
BASE = tiny_base("llama", vocab_size=VOCAB)
TABLE = NgramCounts(VOCAB).table()  # of no text


def record(heads: int = 0, **fields: Any) -> Drafter:
    """A drafter of three levels with a table, of four candidates from logits."""
    return Drafter((Level(),) * 3, heads, 4, fields.pop("window", 5), TABLE, **fields)


@looped(("drafter", "window", "known", "name"), [
    (Drafter.heads_only(2, 3), 0, 3, "head"),
    (record(2), 5, 7, "head"),
    (record(2, top_logprobs=5), 5, 5, "head"),
    (record(2, top_logprobs=2), 5, 4, "head"),
    (record(window=0), 4, 7, "LM head"),
    (record(lm_head_levels=2, top_logprobs=99), 5, 7, "LM head"),
])  # fmt: skip
def test_what_a_drafter_reads(drafter: Drafter, window: int, known: int, name: str) -> None:
    """Last tokens, at least a context's; log-probabilities, at least the candidates'; whose logits they are."""
    heads = random_heads(BASE, 2) if drafter.num_heads else None
    made = RecordProposer(BASE, heads, drafter)
    assert (made.depth, made.window, made.known, made.logits_name) == (drafter.depth, window, known, name)
    states = torch.randn(5, BASE.hidden_size, generator=torch.Generator().manual_seed(0))
    logits = {"head": 2, "LM head": min(1, drafter.lm_head_levels)}[name]
    assert made.logits(states, 3).shape == (logits, 5, VOCAB)
    assert made.logits(states, 1).shape == (min(1, logits), 5, VOCAB)
    assert made.logits(states, 0).shape[0] == 0 or name == "head"
    assert made.start([[1]] * 5, 3).observe(states).shape == (5, logits * (2 * known + 1))
    if name == "LM head" and logits:
        assert torch.equal(made.logits(states, 3)[0], BASE.lm_head(states))


def test_lm_head_runs_once_a_step() -> None:
    """A step's drafts come from the logits of its forward: the LM head, whose weights are many, is not run again."""
    base = tiny_base("llama")
    drafter = Drafter.untrained(base.vocab_size)
    decoder = TreeDecoder(base, None, TreePolicy(6, drafter.depth, drafter.id), drafter=drafter)
    decoder.generate([3], 3)  # whether the logits are those of the LM head is found out once
    calls: list[torch.Size] = []
    handle = base.lm_head.register_forward_hook(lambda _module, _given, found: calls.append(found.shape))
    found = decoder.generate([3, 5, 9], 12)
    handle.remove()
    steps = found.step_lengths if found.step_lengths[-1] > 1 else found.step_lengths[:-1]  # the last root alone
    assert len(calls) == 1 + len(steps)


@looped(("family", "config"), [("gemma2", {"final_logit_softcapping": 0.5}), ("llama", {})])
def test_logits_that_a_model_caps_are_not_those_of_the_lm_head(family: str, config: dict[str, float]) -> None:
    """Drafts are then those of the LM head's own outputs, as in tracing."""
    base = tiny_base(family, **config)
    assert base.logits_of_lm_head is (family == "llama")
    made = RecordProposer(base, None, Drafter.untrained(base.vocab_size))
    logits, states = base.forward(torch.tensor([[3, 5, 9]]), use_cache=False)
    observe = made.start([[3, 5, 9]] * 3, 1).observe
    found = observe(states[0], logits[0])
    assert torch.equal(found, observe(states[0]))
    other = observe(states[0], logits[0] + torch.arange(len(logits[0, 0])))
    assert torch.equal(found, other) is (family == "gemma2")


def test_arrays_of_a_tree() -> None:
    """Parents, ranks, depths and the children of each node; they are kept as long as the tree."""
    tree = compile_ranks(Tree.from_paths([[0], [2], [0, 1], [0, 3], [2, 0]]))
    found = shape_of(tree)
    assert shape_of(tree) is found
    assert found.parents.tolist() == [0, 0, 0, 1, 1, 2]
    assert found.ranks.tolist()[1:] == [0, 2, 1, 3, 0]
    assert found.depths.tolist() == [0, 1, 1, 2, 2, 2]
    assert [(a, b) for a, b in zip(found.first.tolist(), found.last.tolist(), strict=True) if a != b] == [
        (1, 3),
        (3, 5),
        (5, 6),
    ]
    assert shape_of(compile_ranks(Tree.chain(1))) is not found


def fault(drafter: Drafter, heads: int = 0, draft: Any = None) -> tuple[str, str]:
    """What and fix of the refusal."""
    error = refusal_of(check_drafter, drafter, BASE, random_heads(BASE, heads) if heads else None, draft)
    assert error.code is Code.DRAFTER_MISMATCH
    return error.what.partition(": ")[2], error.fix


def test_records_that_do_not_fit() -> None:
    """The remedy is of the part that differs: heads, a draft model, or the base."""
    source = {"model": "the base", "draft": "the draft"}
    drafted = record(draft="d1", source=source)
    assert fault(record(2)) == (
        "it was made for 2 heads, there are 0",
        "--heads HEADS, or in Python heads=treeopt.load_heads(...)",
    )
    assert fault(record(), 3) == (
        "it was made for 0 heads, there are 3",
        "leave the heads out: --model MODEL without --heads, or in Python heads=None",
    )
    assert fault(record(2), 3)[1].startswith("--model MODEL, for which it was learned")
    assert fault(drafted) == (
        "it was made with a draft model, and there is no draft model",
        "--draft the draft, or in Python draft=...",
    )
    assert fault(dataclasses.replace(drafted, source={}))[1] == "--draft DRAFT, or in Python draft=..."
    assert fault(record(), draft=BASE) == (
        "it was made without one, and there is a draft model",
        "leave out --draft, or in Python draft=None",
    )
    other = NgramCounts(VOCAB + 1).table()
    for made, heads in ((record(2, source=source), 2), (record(source=source), 0)):
        what, fix = fault(dataclasses.replace(made, ngram_table=other), heads)
        assert what == "its vocabulary holds 8 tokens, the base's 7"
        assert fix == "--model the base, for which it was learned, or treeopt learn for this model"
    with pytest.raises(TypeError, match="not an object of type dict"):
        check_drafter({}, BASE, None)  # type: ignore[arg-type]
    with pytest.raises(TreeoptError, match="no heads were given") as caught:
        RecordProposer(BASE, None, record(2))
    assert caught.value.code is Code.TREE_TOO_DEEP


def test_plans_of_other_drafters() -> None:
    """E223 names both drafters; the tree of a drafter may have its levels and candidates, and no more."""
    drafter = record()
    most = 4 + TABLE.tokens.shape[1] + 1
    check_plan(Tree.chain(2), None)
    check_plan(Tree(((0,),), drafter=drafter.id), drafter)
    check_plan(TreePolicy(4, 2, drafter.id), drafter)
    for plan, given, words in (
        (Tree(((0,),), drafter="d1"), None, "the tree was made for drafter d1; none was given"),
        (Tree(((0,),), drafter="d1"), drafter, f"the tree was made for drafter d1; the one given is {drafter.id}"),
        (TreePolicy(4, 2, "d1"), None, "the tree was made for drafter d1; none was given"),
        (Tree.chain(1), drafter, f"the tree was made for the heads alone, not for drafter {drafter.id}"),
    ):
        error = refusal_of(check_plan, plan, given)
        assert (error.code, error.what) == (Code.DRAFTER_MISMATCH, words)
    for tree, code in ((Tree.chain(4), Code.TREE_TOO_DEEP), (Tree.from_paths([[most]]), Code.RANK_TOO_LARGE)):
        assert refusal_of(check_plan, Tree(tree.paths, drafter=drafter.id), drafter).code is code


def test_heads_draft_by_themselves() -> None:
    """Without a record all tokens are candidates; with one as many as it has, further ranks are no candidates."""
    heads, states = random_heads(BASE, 2), torch.randn(3, BASE.hidden_size, generator=torch.Generator().manual_seed(1))
    logits = heads(states, BASE.lm_head, 2)
    order = logits.argsort(-1, descending=True).transpose(0, 1)
    for made, most in ((HeadsProposer(BASE, heads), VOCAB), (HeadsProposer(BASE, heads, Drafter.heads_only(2, 3)), 3)):
        assert (made.depth, made.window, made.num_candidates) == (2, 0, most)
        session = made.start([[1], [2], [3]], 2)
        session.begin(torch.tensor([1, 2, 3]), states)
        best = session.candidates(np.zeros((3, 2), np.int64), 5)
        assert best[:, :, : min(5, most)].tolist() == order[:, :, : min(5, most)].tolist()
        assert (best[:, :, most:] == -1).all()
        ranks, _ = session.trace(order[:, :, 3].numpy().copy())
        assert set(ranks.ravel().tolist()) == ({3} if most > 3 else {1 << 30})
        names = session.sources(order[:, :, 2].numpy().copy())
        assert names == [[{"head": 2}] * 2] * 3
    none = HeadsProposer(BASE, None)
    assert (none.depth, none.num_candidates) == (0, VOCAB)
    assert none.start([[1]], 0).fill(torch.tensor([5]), states[:1], compile_ranks(Tree(()))).tokens.tolist() == [[5]]
    session.begin(torch.tensor([1, 2, 3]), torch.full_like(states, torch.nan))
    with pytest.raises(TreeoptError, match=r"head 1 on .* gives logits that are not finite") as caught:
        session.check_finite()
    assert caught.value.code is Code.NOT_FINITE


def test_heads_give_the_chance_of_their_best_guess() -> None:
    """The largest log-probability of each level, where it is asked for."""
    heads, states = random_heads(BASE, 2), torch.randn(3, BASE.hidden_size, generator=torch.Generator().manual_seed(2))
    session = HeadsProposer(BASE, heads).start([[1], [2], [3]], 2)
    session.begin(torch.tensor([1, 2, 3]), states)
    true = np.zeros((3, 2), np.int64)
    best = heads(states, BASE.lm_head, 2).log_softmax(-1).amax(-1).T
    assert session.trace(true, confidence=True)[1].tolist() == [pytest.approx(row, abs=1e-5) for row in best.tolist()]
    assert session.trace(true)[1].shape == (0, 0)


def test_long_texts_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tokens in pieces of four, and at once: the likeliest tokens after each, by a forward over the whole text."""
    draft, texts = (
        tiny_base("llama", 1, vocab_size=VOCAB),
        [[1, 2, 3, 4, 5, 6, 0, 1, 2, 3], [4, 4, 4, 4, 4, 4, 4, 4, 4, 4]],
    )
    drafter = Drafter((Level(),) * 2, 0, 3, draft=draft.fingerprint)
    with torch.inference_mode():
        wanted = draft.model(torch.tensor(texts)).logits.topk(3).indices
    for piece in (4, 5, 100):
        monkeypatch.setattr(model, "PIECE", piece)
        found = model.ModelProposer(BASE, draft, drafter).along(texts)
        assert found.shape == (2, 10, 7)
        assert found[..., :3].tolist() == wanted.tolist()


def test_compilation_is_announced_when_drafting_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """By drafters of records and by those with a draft model."""
    calls: list[int] = []
    monkeypatch.setattr(kernel_session, "note_compilation", lambda: calls.append(1))
    draft = tiny_base("llama", 1, vocab_size=VOCAB)
    RecordProposer(BASE, None, record()).start([[1]], 1)
    model.ModelProposer(BASE, draft, record(draft=draft.fingerprint)).start([[1]], 1)
    assert calls == [1, 1]


@looped("kept", [True, False])
def test_machine_code_is_kept_where_a_folder_can_be_written(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions are compiled without Python's lock and without counting references."""
    options: list[dict[str, bool]] = []
    monkeypatch.setattr(compiled.config, "CACHE_DIR", "")
    monkeypatch.setattr(compiled, "_folders", lambda: iter([tmp_path] if kept else []))
    monkeypatch.setattr(compiled.numba, "njit", lambda **given: options.append(given) or (lambda function: function))
    assert compiled.compiled(len) is len
    assert options == [{"nogil": True, "cache": kept, "_nrt": False}]


def test_fits_of_no_text_are_the_defaults() -> None:
    """No position, so no token that was found."""
    found = FitSample(BASE, None, [], {}, 0).fits([record()], 10, 2)
    assert [(fit.level, fit.loss, known.tolist()) for fit, known in found] == [(Level(), 0.0, [])] * 2


def bases() -> tuple[Base, Base]:
    """A model and its draft model."""
    return tiny_base("llama", vocab_size=VOCAB), tiny_base("llama", 1, vocab_size=VOCAB)


def drafter_of(draft: Base | None) -> Drafter:
    """A drafter without heads, for a draft model or for none."""
    _, drafter = random_drafter(np.random.default_rng(0), VOCAB, "voted", 200)
    return dataclasses.replace(drafter, num_heads=0, draft=draft.fingerprint if draft else "")


def test_draft_model_needs_its_record_and_no_heads() -> None:
    """Heads beside it, or no record, are a ValueError; a record that is made without one is E223."""
    base, draft = bases()
    record = drafter_of(draft)
    assert proposer_for(base, None, record, draft).depth == record.depth
    for heads, drafter in ((random_heads(base, 2), record), (None, None), (random_heads(base, 2), None)):
        with pytest.raises(ValueError, match="takes no heads"):
            proposer_for(base, heads, drafter, draft)
    assert refusal_of(proposer_for, base, None, drafter_of(None), draft).code is Code.DRAFTER_MISMATCH


def test_tree_without_anything_to_draft_by_is_refused() -> None:
    """Only the root alone needs neither heads nor a record (E101); with heads the same tree is taken."""
    base, _ = bases()
    assert trees_for(base, None, Tree(())).nodes == 1
    assert trees_for(base, random_heads(base, 2), Tree.chain(2)).nodes == 3
    with pytest.raises(TreeoptError, match="no heads were given") as caught:
        trees_for(base, None, Tree.chain(2))
    assert caught.value.code is Code.TREE_TOO_DEEP


def test_trees_beyond_the_drafter_are_refused() -> None:
    """Two heads over seven tokens draft two levels (E101) of seven ranks (E102)."""
    base, _ = bases()
    heads = random_heads(base, 2)
    assert trees_for(base, heads, Tree.from_paths([[6], [6, 0]])).nodes == 3
    for tree, code in ((Tree.chain(3), Code.TREE_TOO_DEEP), (Tree.from_paths([[7]]), Code.RANK_TOO_LARGE)):
        assert refusal_of(trees_for, base, heads, tree).code is code


def test_static_trees_of_heads_store_no_text() -> None:
    """Nothing is read, stored, marked or rewound on the host; where trees are chosen per step all of it is."""
    base, _ = bases()
    heads = random_heads(base, 2)
    kept = AcceptedPart([[3, 4]], None, None, None, None)  # type: ignore[arg-type]
    states = torch.zeros(1, base.hidden_size)
    static = trees_for(base, heads, Tree.chain(2)).start([[1, 2]])
    static.keep(kept)
    static.select([0])
    static.rewind(static.mark())
    assert static.mark() is None
    assert static.observe(states) is None
    assert "_scored" not in vars(static)
    drafter = Drafter.heads_only(2, 5)
    stepwise = trees_for(base, heads, TreePolicy(4, 2, drafter.id), drafter).start([[1, 2]])
    before = stepwise.mark()
    stepwise.keep(kept)
    assert [before[0].tolist(), stepwise.mark()[0].tolist()] == [[2], [4]]
    stepwise.rewind(before)
    assert stepwise.mark()[0].tolist() == [2]
    assert stepwise.observe(states) is not None
