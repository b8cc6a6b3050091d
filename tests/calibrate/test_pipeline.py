"""Measure: traces of a real model with heads, against one forward and one sort a position."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from head_ranks import head_ranks
from numpy.typing import NDArray
from tiny import VOCAB, random_heads, tiny_base
from torch.nn import functional as F

from treeopt.calibrate.pipeline import run_calibration
from treeopt.calibrate.results import CalibrationRun
from treeopt.calibration import Calibration
from treeopt.drafter import Drafter
from treeopt.errors import Code, TreeoptError
from treeopt.models.base import Base
from treeopt.models.head_files import LoadedHeads
from treeopt.models.heads import MedusaHeads
from treeopt.optimize.replay import replay
from treeopt.texts.answers import continue_texts, cut_at_end
from treeopt.texts.encode import Text, encode
from treeopt.texts.prompts import Prompt, PromptSet, load_prompts
from treeopt.traces import MISS, NONE
from treeopt.tree import Tree

SURE = 32  # ranks below it never move by rounding in these tests; deeper ones lie among nearly equal logits


@pytest.fixture(scope="module")
def stories(shared: Path) -> PromptSet:
    """The first 64 story openings."""
    return load_prompts(str(shared / "data" / "story_openings.json"), limit=64)


@pytest.fixture(scope="module")
def uneven(stories: PromptSet) -> PromptSet:
    """Twelve openings cut at different places: prompts of different lengths, longest first."""
    texts = [prompt.messages[0]["content"] for prompt in stories.prompts[:12] if prompt.messages]
    cut = tuple(Prompt(f"cut:{i:02}", None, text[: 60 - 4 * i], None) for i, text in enumerate(texts))
    return PromptSet("cut", "sha", cut)


def first(prompts: PromptSet, count: int) -> PromptSet:
    """The first so many prompts of a set."""
    return dataclasses.replace(prompts, prompts=prompts.prompts[:count])


def made_texts(base: Base, prompts: PromptSet, max_new_tokens: int) -> list[Text]:
    """Every prompt continued alone, by stock generate."""
    texts = [Text(p.id, encode(p, base.tokenizer, chat_template=True)[0], []) for p in prompts.prompts]
    return [continue_texts(base, [text], max_new_tokens)[0] for text in texts]


@torch.inference_mode()
def naive_ranks(base: Base, heads: MedusaHeads, text: Text) -> NDArray[np.int64]:
    """int64 [G, H]: full ranks, by a forward over each prefix, each head alone, and a full sort; -1 beyond the end."""
    assert heads.lm_head is not None
    table = np.full((len(text.answer), heads.num_heads), -1)
    for i in range(len(text.answer)):
        prefix = torch.tensor([text.prompt + text.answer[:i]])
        state = base.model(prefix, output_hidden_states=True).hidden_states[-1][0, -1]
        for h in range(min(heads.num_heads, len(text.answer) - 1 - i)):
            x = state + F.silu(heads.weight[0, h] @ state + heads.bias[0, h])
            logits = (heads.lm_head[h] @ x).tolist()
            order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
            table[i, h] = order.index(text.answer[i + 1 + h])
    return table


def assert_same_ranks(found: NDArray[np.uint8], full: NDArray[np.int64], kept: int) -> None:
    """Sentinels stand where they belong, sure ranks are equal, and others are off by rounding at most."""
    assert np.array_equal(found == NONE, full < 0)
    low = (full >= 0) & (full < SURE)
    assert np.array_equal(found[low], full[low])
    assert np.all(found[full >= SURE] >= SURE)
    assert np.all(found[full >= kept + 3] == MISS)
    middle = (full >= SURE) & (full < kept - 3)
    assert np.all(np.abs(found[middle].astype(int) - full[middle]) <= 3)


def same_calibration(one: Calibration, other: Calibration) -> bool:
    """Whether two records hold the same."""
    arrays = np.array_equal(one.ranks, other.ranks) and np.array_equal(one.offsets, other.offsets)
    names = (one.prompt_ids, one.token_hashes, one.top_k) == (other.prompt_ids, other.token_hashes, other.top_k)
    return arrays and names and one.provenance == other.provenance


def test_run_calibration_brute_force(base: Base, loaded: LoadedHeads, uneven: PromptSet) -> None:
    """Traces of story openings, run in a batch, are those of one forward and one sort a position."""
    run = run_calibration(base, loaded, first(uneven, 3), max_new_tokens=24)
    assert (run.skipped, run.answers_cut) == ((), 0)
    record = run.calibration
    assert (record.sequences, record.num_heads, record.top_k) == (3, 5, 253)
    for s, text in enumerate(made_texts(base, first(uneven, 3), 24)):
        assert_same_ranks(record.sequence(s), naive_ranks(base, loaded.heads, text), record.top_k)


def test_other_drafter_is_refused_before_any_answer(base: Base, loaded: LoadedHeads, uneven: PromptSet) -> None:
    """Answers take long; a drafter for another number of heads is known at once."""
    calls: list[str] = []
    with pytest.raises(TreeoptError) as caught:
        run_calibration(
            base,
            loaded,
            uneven,
            drafter=Drafter.heads_only(loaded.heads.num_heads + 1, 4),
            progress=lambda done, total, note: calls.append(note),
        )
    assert caught.value.code is Code.DRAFTER_MISMATCH
    assert not calls


def test_trace_texts_few_kept(base: Base, loaded: LoadedHeads, stories: PromptSet) -> None:
    """Ranks from the number kept on are misses, wherever they lie; nothing else changes."""
    texts = made_texts(base, first(stories, 2), 30)
    for few, many in zip(
        head_ranks(base, loaded.heads, texts, 4), head_ranks(base, loaded.heads, texts, 253), strict=True
    ):
        cut = np.where((many >= 4) & (many != NONE), MISS, many)
        assert np.array_equal(few, cut)
        assert np.count_nonzero(few == MISS) > 0


def test_run_calibration_small_vocabulary() -> None:
    """With a vocabulary below 253 all ranks are kept and nothing is missed."""
    base = tiny_base("llama")
    heads = random_heads(base, 3)
    texts = [Text("a:0", [3, 5], []), Text("a:1", [7], [])]
    kept = min(253, VOCAB)
    rows = head_ranks(base, heads, continue_texts(base, texts, 12), kept)
    assert [row.shape for row in rows] == [(12, 3), (12, 3)]
    for row in rows:
        assert np.count_nonzero(row == MISS) == 0
        assert (row == NONE).sum(axis=0).tolist() == [1, 2, 3]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_trace_texts_short_answers(length: int) -> None:
    """An answer shorter than the heads reach has rows all the same, of `NONE` beyond its end."""
    base = tiny_base("llama")
    rows = head_ranks(base, random_heads(base, 4), [Text("a:0", [3, 5], list(range(length)))], 61)[0]
    left = np.arange(length - 1, -1, -1)
    assert np.array_equal((rows != NONE).sum(axis=1), np.minimum(left, 4))


def test_run_calibration_batch_sizes(base: Base, loaded: LoadedHeads, uneven: PromptSet) -> None:
    """Alone and in batches of any size, padded or not, the texts are equal, and so is every sure rank."""
    assert len({len(encode(p, base.tokenizer, chat_template=True)[0]) for p in uneven.prompts}) > 8
    runs = [
        run_calibration(base, loaded, uneven, max_new_tokens=40, batch_size=size).calibration for size in (1, 5, 16)
    ]
    for other in runs[1:]:
        assert other.token_hashes == runs[0].token_hashes
        assert np.array_equal(other.offsets, runs[0].offsets)
        low = (other.ranks < SURE) | (runs[0].ranks < SURE)
        assert np.array_equal(other.ranks[low], runs[0].ranks[low])
        assert np.mean(other.ranks == runs[0].ranks) > 0.995


def test_run_calibration_same_input(base: Base, loaded: LoadedHeads, stories: PromptSet) -> None:
    """The same input gives the same record."""
    runs = [run_calibration(base, loaded, first(stories, 6), max_new_tokens=16).calibration for _ in range(2)]
    assert same_calibration(*runs)


def test_run_calibration_end_of_text(
    base: Base, loaded: LoadedHeads, stories: PromptSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts end with the token that ends them, which is counted; beyond it there is nothing to guess."""
    free = made_texts(base, first(stories, 3), 160)
    monkeypatch.setattr(base.model.generation_config, "eos_token_id", 1)  # the model does emit its <s>
    record = run_calibration(base, loaded, first(stories, 3), max_new_tokens=160).calibration
    lengths = np.diff(record.offsets).tolist()
    assert lengths == [len(cut_at_end(text.answer, [1])) for text in free]
    assert 0 < sum(length < 160 for length in lengths) < 3  # both kinds occur
    texts = [Text(text.prompt_id, text.prompt, cut_at_end(text.answer, [1])) for text in free]
    ended = next(s for s, text in enumerate(texts) if text.answer[-1] == 1)
    assert_same_ranks(record.sequence(ended), naive_ranks(base, loaded.heads, texts[ended]), record.top_k)


def test_continue_texts_end_of_text(base: Base, stories: PromptSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch each text stops at its own end; another's filler is not counted."""
    monkeypatch.setattr(base.model.generation_config, "eos_token_id", [1, 511])
    prompts = [encode(p, base.tokenizer, chat_template=True)[0] for p in stories.prompts[:12]]
    texts = continue_texts(base, [Text(str(i), ids, []) for i, ids in enumerate(prompts)], 160)
    for text in texts:
        assert all(token not in (1, 511) for token in text.answer[:-1])
        assert text.answer[-1] in (1, 511) or len(text.answer) == 160


@pytest.mark.parametrize(
    ("answer", "eos", "cut"),
    [
        ([5, 1, 7, 1], (1,), [5, 1]),
        ([5, 1, 7], (7, 1), [5, 1]),
        ([1], (1,), [1]),
        ([5, 6], (1,), [5, 6]),
        ([5, 1], (), [5, 1]),
        ([], (1,), []),
    ],
)
def test_cut_at_end(answer: list[int], eos: Sequence[int], cut: list[int]) -> None:
    """The first token that ends a text is its last."""
    assert cut_at_end(answer, eos) == cut


def test_run_calibration_too_long(base: Base, loaded: LoadedHeads) -> None:
    """Prompts that do not fit together with the new tokens are skipped, counted and named, never cut."""
    requests = ["One day a bird sang. " * times for times in (1, 80, 3, 60, 90, 120)]
    prompts = PromptSet(
        "made", "sha", tuple(Prompt(f"made:{i:08}", None, text, None) for i, text in enumerate(requests))
    )
    lengths = {p.id: len(encode(p, base.tokenizer, chat_template=True)[0]) for p in prompts.prompts}
    run = run_calibration(base, loaded, prompts, max_new_tokens=40, responses=False, batch_size=6)
    assert [(skip.prompt_id, skip.tokens) for skip in run.skipped] == [
        (prompt_id, tokens) for prompt_id, tokens in lengths.items() if tokens > 512 - 40
    ]
    assert 0 < len(run.skipped) < len(requests)
    assert run.calibration.sequences == len(requests) - len(run.skipped)
    assert set(run.calibration.prompt_ids).isdisjoint(skip.prompt_id for skip in run.skipped)


def test_run_calibration_all_too_long(base: Base, loaded: LoadedHeads, stories: PromptSet) -> None:
    """Where no prompt fits there is nothing to measure."""
    with pytest.raises(TreeoptError) as caught:
        run_calibration(base, loaded, first(stories, 2), max_new_tokens=512)
    assert caught.value.code is Code.PROMPTS_EMPTY


def test_run_calibration_responses(base: Base, loaded: LoadedHeads) -> None:
    """Given answers are scored as they are, and those beyond the budget are cut and counted."""
    rows = [("One day a bird", "sang a song."), ("Tom had a dog", "and the dog ran far away to the big green park.")]
    prompts = tuple(Prompt(f"given:{i}", None, text, answer) for i, (text, answer) in enumerate(rows))
    run = run_calibration(base, loaded, PromptSet("given", "sha", prompts), max_new_tokens=10, responses=True)
    assert run_calibration(base, loaded, PromptSet("given", "sha", prompts), max_new_tokens=10).answers_cut == 0
    texts = [Text(p.id, *encode(p, base.tokenizer, chat_template=True)) for p in prompts]
    assert [len(text.answer) > 10 for text in texts] == [False, True]
    assert run.answers_cut == 1
    assert run.calibration.provenance.settings["answers"] == "given"
    for s, text in enumerate(texts):
        cut = Text(text.prompt_id, text.prompt, text.answer[:10])
        full = naive_ranks(base, loaded.heads, cut)
        assert_same_ranks(run.calibration.sequence(s), full, run.calibration.top_k)


def test_run_calibration_sampled(base: Base, loaded: LoadedHeads, stories: PromptSet) -> None:
    """Sampling is reproducible by its seed, differs by seed, and says so in the settings."""

    def run(seed: int) -> CalibrationRun:
        return run_calibration(base, loaded, first(stories, 4), max_new_tokens=20, temperature=1.0, seed=seed)

    one, same, other = run(1).calibration, run(1).calibration, run(2).calibration
    assert same_calibration(one, same)
    assert one.token_hashes != other.token_hashes
    assert one.provenance.settings["answers"] == "sampled at 1.0, seed 1"
    assert one.provenance.mergeable() != other.provenance.mergeable()


@pytest.mark.parametrize("field", ["hidden", "vocabulary"])
def test_run_calibration_other_heads(base: Base, stories: PromptSet, field: str) -> None:
    """Heads of another hidden size or vocabulary are refused, with both sizes."""
    heads = MedusaHeads(2, 1, 64, 500) if field == "vocabulary" else MedusaHeads(2, 1, 48, 512)
    with pytest.raises(TreeoptError) as caught:
        run_calibration(base, LoadedHeads(heads, "others", Path("others"), None, "0", ()), first(stories, 1))
    assert caught.value.code is Code.HEADS_MISMATCH
    assert ("500" if field == "vocabulary" else "48") in caught.value.what


def test_run_calibration_known_accuracy(base: Base, loaded: LoadedHeads, stories: PromptSet) -> None:
    """Head 1 of the shared heads is right at first guess about half the time, on 64 openings of 160 tokens."""
    record = run_calibration(base, loaded, first(stories, 32), max_new_tokens=120, batch_size=32).calibration
    assert record.positions == 32 * 120
    assert 0.45 < record.accuracy[0, 0] < 0.52
    assert np.all(np.diff(record.accuracy[:, 0]) < 0)  # each head further ahead is right less often
    assert replay(Tree.chain(5), record).tokens_per_step > 1.5


def test_run_calibration_provenance(base: Base, loaded: LoadedHeads, stories: PromptSet) -> None:
    """The record says what was measured with which weights, settings and versions."""
    provenance = run_calibration(base, loaded, first(stories, 1), max_new_tokens=4).calibration.provenance
    assert (provenance.model_id, provenance.heads_id) == (base.fingerprint, loaded.fingerprint)
    assert (provenance.model, provenance.heads) == (base.name, loaded.name)
    assert provenance.prompts == {stories.sha256: stories.name}
    assert provenance.settings == {
        "answers": "greedy",
        "max_new_tokens": 4,
        "chat_template": "none",
        "eos": [2],
        "dtype": "float32",
    }
    assert provenance.made_by["torch"] == torch.__version__
    assert provenance.made_by["device"] == "cpu"


def test_run_calibration_progress(base: Base, loaded: LoadedHeads, stories: PromptSet) -> None:
    """Progress is reported after each batch of answers, then of ranks, with the number of prompts done."""
    calls: list[tuple[int, int]] = []
    run_calibration(
        base,
        loaded,
        first(stories, 5),
        max_new_tokens=4,
        batch_size=2,
        progress=lambda done, total, _note: calls.append((done, total)),
    )
    assert calls == [(2, 5), (4, 5), (5, 5)] * 2


def test_run_calibration_turns(base: Base, loaded: LoadedHeads, tmp_path: Path) -> None:
    """Every turn is a text of its own, after the model's answer to the one before; batches change nothing."""
    rows = [{"turns": ["One day", "Then", "x " * 300]}, {"turns": ["The sun"]}, {"turns": ["A cat", "A dog"]}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load_prompts(str(tmp_path / "q.jsonl"))
    calls: list[tuple[int, int]] = []
    run, single = (
        run_calibration(
            base, loaded, prompts, max_new_tokens=16, batch_size=size, progress=lambda i, n, _note: calls.append((i, n))
        )
        for size in (4, 1)
    )
    row = [prompt.id for prompt in prompts.prompts]
    assert run.calibration.prompt_ids == (row[0], f"{row[0]}.02", row[1], row[2], f"{row[2]}.02")
    assert [skipped.prompt_id for skipped in run.skipped] == [f"{row[0]}.03"]
    np.testing.assert_array_equal(run.calibration.ranks, single.calibration.ranks)
    assert calls[:2] == [(5, 5), (5, 5)]
    assert base.tokenizer is not None
    ids = base.tokenizer("A cat")["input_ids"]
    first = continue_texts(base, [Text("a:0", ids, [])], 16)[0]
    second = base.tokenizer(f"A cat\n{base.tokenizer.decode(first.answer)}\nA dog")["input_ids"]
    expected = head_ranks(base, loaded.heads, continue_texts(base, [Text("a:1", second, [])], 16), 253)[0]
    np.testing.assert_array_equal(run.calibration.ranks[-16:], expected)


def test_run_calibration_responses_first_turn(base: Base, loaded: LoadedHeads, tmp_path: Path) -> None:
    """Ready-made answers are scored for the first turn alone: later turns bring none."""
    (tmp_path / "q.jsonl").write_text(json.dumps({"turns": ["One day", "Then"], "output": " she went home"}) + "\n")
    prompts = load_prompts(str(tmp_path / "q.jsonl"), answers=True)
    run = run_calibration(base, loaded, prompts, max_new_tokens=16, responses=True)
    assert run.calibration.prompt_ids == (prompts.prompts[0].id,)
