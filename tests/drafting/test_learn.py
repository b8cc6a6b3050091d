"""Learn: the counts, their folds, and that no text is traced by a table that contains it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import answered, learned, planted, prompts_of
from looped import looped
from tiny import chat_base, cycle_base, cycle_heads, random_heads, tiny_base

from treeopt.calibrate.pipeline import run_calibration
from treeopt.calibration import Calibration
from treeopt.defaults import MAX_DEPTH
from treeopt.drafter import MAX_WINDOW
from treeopt.drafting import learn as learning_module
from treeopt.drafting.count import NgramCounts
from treeopt.drafting.learn import FOLDS, LM_HEAD_LEVELS, VOTED, Learning, _folds, learn
from treeopt.models.base import Base
from treeopt.models.given import load_pair
from treeopt.models.head_files import LoadedHeads
from treeopt.ngram_table import CONTEXT, NgramTable
from treeopt.texts.answers import AnswerOptions, Drawn
from treeopt.texts.encode import Text
from treeopt.texts.prompts import Prompt, PromptSet, load_prompts
from treeopt.texts.samples import Drawing, draw


def same(one: NgramTable | None, other: NgramTable | None) -> bool:
    """Whether two tables hold the same."""
    assert one is not None
    assert other is not None
    pairs = zip(one.arrays().values(), other.arrays().values(), strict=True)
    return one.num_tokens == other.num_tokens and all(np.array_equal(a, b) for a, b in pairs)


def choices_of(base: Base, tokens: Sequence[int]) -> list[int]:
    """What the base would write after every token but the last, one forward a prefix."""
    with torch.inference_mode():
        ends = range(1, len(tokens))
        return [int(base.model(torch.tensor([tokens[:end]])).logits[0, -1].argmax()) for end in ends]


def drawn_of(base: Base, texts: Sequence[Text], tokens: int, new: int) -> list[Text]:
    """What `learned` draws."""
    return [one.text for one in draw(base, texts, Drawing(tokens, Learning().temperature, 0, new, 8))]


def test_every_fold_leaves_its_own_texts_out() -> None:
    """The table of a fold is that of all other folds' texts, and the drafter's that of all; nothing else is counted."""
    base, heads = planted()
    texts = answered(base, prompts_of(1, 11), 8)
    found = learned(base, heads, texts, tokens=1, new=8)
    [drawn] = drawn_of(base, texts, 1, 8)
    tokens = [*drawn.prompt, *drawn.answer]
    assert set(found.fold_of.values()) == set(range(FOLDS))
    for fold, drafter in enumerate((*found.folds, found.drafter)):
        others = [text for text in texts if found.fold_of[text.prompt_id] != fold]
        assert len(others) < len(texts) or fold == FOLDS
        counts = NgramCounts(base.vocab_size)
        for text in others:
            whole = [*text.prompt, *text.answer]
            counts.add(whole[:-1], choices_of(base, whole))
        if found.fold_of[drawn.prompt_id] != fold:
            counts.add(tokens[:-1], choices_of(base, tokens), first=len(drawn.prompt) - 1)
        assert same(drafter.ngram_table, counts.table())
        assert drafter.levels == found.drafter.levels
    for text, model in zip(texts, found.proposers(base, heads, texts), strict=True):
        assert model.drafter is found.folds[found.fold_of[text.prompt_id]]
    assert found.tokens == 1 + sum(len(text.prompt) + len(text.answer) - 1 for text in texts)


def test_without_tokens_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 0 tokens all tables are empty, nothing is drawn or counted, and the text so far gives candidates."""
    base, heads = planted()
    texts = answered(base, prompts_of(1, 9), 20)
    for name in ("draw", "count_texts", "count_drawn"):
        monkeypatch.delattr(learning_module, name)
    for given in (heads, None):
        found = learned(base, given, texts, tokens=0)
        for drafter in (*found.folds, found.drafter):
            assert same(drafter.ngram_table, NgramCounts(base.vocab_size).table())
            assert drafter.ngram_table is not None
            assert drafter.ngram_table.empty
            assert drafter.voted == VOTED
        assert found.tokens == 0
        assert any(any(level.cache) for level in found.drafter.levels)


@looped("levels", [1, 2, 5])
def test_without_heads(levels: int) -> None:
    """A drafter without heads reads the LM head in its first levels, and has no more levels than asked for."""
    base, _ = planted()
    found = learned(base, None, answered(base, prompts_of(1, 9), 20), levels=levels).drafter
    assert found.num_heads == found.voted == 0
    assert 1 <= found.depth <= levels
    assert found.lm_head_levels == min(found.depth, LM_HEAD_LEVELS)
    assert found.levels[0].head != 0.0
    assert all(level.head == 0.0 for level in found.levels[LM_HEAD_LEVELS:])


def test_nothing_to_draft_by_is_refused() -> None:
    """Neither heads nor n-grams."""
    base, _ = planted()
    with pytest.raises(ValueError, match="nothing drafts"):
        learned(base, None, answered(base, prompts_of(1, 4), 5), ngram=False)


@looped("wrong", [
    {"tokens": -1}, {"levels": 0}, {"levels": MAX_DEPTH + 1}, {"top": 0}, {"window": CONTEXT - 1}, {"window": -1},
    {"window": MAX_WINDOW + 1}, {"seed": -1}, {"temperature": -0.1}, {"temperature": math.nan},
])  # fmt: skip
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    """Before anything is drawn; the ends of the ranges are taken."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Learning(**wrong)
    for window in (0, CONTEXT, MAX_WINDOW):
        assert Learning(tokens=0, seed=0, levels=MAX_DEPTH, top=1, window=window).window == window


def test_drawn_texts_share_their_prompts_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn texts are counted behind their prompts, in the fold of the prompt; the prompt itself is counted once."""
    base, heads = planted()
    texts = answered(base, prompts_of(1, 9), 8)
    drawn: list[Text] = []

    def drawing(*arguments: object, **options: object) -> Iterator[Drawn]:
        for one in draw(*arguments, **options):  # type: ignore[arg-type]  # handed on
            drawn.append(one.text)
            yield one

    monkeypatch.setattr(learning_module, "draw", drawing)
    found = learned(base, heads, texts, tokens=100, new=8)
    assert 100 <= sum(len(text.answer) for text in drawn) <= 105
    for fold, drafter in enumerate((*found.folds, found.drafter)):
        counts = NgramCounts(base.vocab_size)
        for text in (*texts, *drawn):
            if found.fold_of[text.prompt_id] != fold:
                tokens = [*text.prompt, *text.answer]
                first = 0 if text in texts else len(text.prompt) - 1
                counts.add(tokens[:-1], choices_of(base, tokens), first=first)
        assert same(drafter.ngram_table, counts.table())


def text_of(prompt_id: str, prompt: list[int], turn: int = 1) -> Text:
    """A text of one turn of a dialogue."""
    return Text(prompt_id, prompt, [1], Prompt(prompt_id, None, "x", None, turn=turn))


def test_folds_keep_dialogues_and_equal_prompts_together() -> None:
    """All turns of a dialogue, and all dialogues that begin alike, share a fold; the others are spread evenly."""
    texts = [text_of(f"set:{i:08}", [i]) for i in range(8)]
    texts += [text_of("set:00000003.02", [3, 9], 2), text_of("set:00000003.03", [3, 9, 9], 3)]
    texts += [text_of("set:00000020", [5]), text_of("set:00000020.02", [5, 5], 2)]
    folds = _folds(texts)
    assert folds["set:00000003"] == folds["set:00000003.02"] == folds["set:00000003.03"]
    assert folds["set:00000005"] == folds["set:00000020"] == folds["set:00000020.02"]
    assert [folds[f"set:{i:08}"] for i in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert list(folds) == [text.prompt_id for text in texts]


@looped(("prompts", "new", "tokens"), [(1, 20, 0), (1, 1, 400), (3, 1, 0), (2, 5, 100_000), (1, 2, 50)])
@looped("num_heads", [1, 3])
def test_little_text(prompts: int, new: int, tokens: int, num_heads: int) -> None:
    """One prompt, answers of one token, no drawn text, and drawing without end all give a drafter."""
    base = cycle_base()
    heads = cycle_heads(base, num_heads)
    texts = answered(base, prompts_of(0, prompts), new)
    found = learned(base, heads, texts, tokens=tokens, new=new)
    assert num_heads <= found.drafter.depth <= max(5, num_heads)
    assert len(found.folds) == min(prompts, FOLDS)
    table = found.folds[0].ngram_table
    assert table is not None
    assert (table.contexts == 0) == (not tokens)
    assert (table is found.drafter.ngram_table) == (prompts == 1)


def test_one_token_ever_seen() -> None:
    """A model that repeats one token for ever is drafted to the last level."""
    base = tiny_base("llama", 0)
    base.lm_head.weight.detach().zero_()
    heads = random_heads(base, 2)
    texts = answered(base, [Text("set:0", [5] * 4, []), Text("set:1", [5] * 3, [])], 10)
    assert [text.answer for text in texts] == [[0] * 10] * 2
    for given in (heads, None):
        assert learned(base, given, texts, new=10).drafter.depth == 5


def test_heads_alone() -> None:
    """Without n-grams only estimates are fitted: no table, no window, no extra depth, no sampled text."""
    base, heads = planted()
    texts = answered(base, prompts_of(1, 11), 20)
    found = learned(base, heads, texts, ngram=False)
    assert (found.drafter.ngram_table, found.drafter.window, found.drafter.depth) == (None, 0, heads.num_heads)
    assert found.tokens == 0
    assert any(level.calibration_map for level in found.drafter.levels)


def test_equal_seeds_give_equal_drafters() -> None:
    """The same seed draws the same text; another does not."""
    base, heads = planted()
    texts = answered(base, prompts_of(1, 8), 8)

    def made(seed: int) -> str:
        learning = Learning(200, seed=seed, top=6, window=16, temperature=1.5)
        return learn(base, heads, texts, learning, options=AnswerOptions(max_new_tokens=8)).drafter.id

    assert made(1) == made(1)
    assert made(1) != made(2)


@looped("ngram", [False, True])
def test_run_calibration_learns_across_turns(ngram: bool) -> None:
    """Dialogues of several turns are learned from and traced; every trace names the drafter."""
    base = chat_base(disturbed=0.1)
    prompts = PromptSet(
        "chats",
        "sha",
        tuple(
            Prompt(f"set:{i:08}", ({"role": "user", "content": f"w{i}"},), None, None, later=("w9",)) for i in range(5)
        ),
    )
    heads = LoadedHeads(cycle_heads(base, 2), "heads", Path("heads"), None, "h1", ())
    run = run_calibration(base, heads, prompts, max_new_tokens=6, learning=Learning(60, ngram=ngram), steps=True)
    calibration: Calibration = run.calibration
    assert run.learned is not None
    assert calibration.sequences == 10
    assert calibration.provenance.drafter_id == run.learned.drafter.id
    assert calibration.steps is not None
    assert calibration.num_heads == run.learned.drafter.depth
    assert 2 <= run.learned.drafter.depth <= 8 if ngram else run.learned.drafter.depth == 2
    assert run.heads == 2


@pytest.mark.slow
def test_pocket_learns() -> None:
    """On the built-in model, heads+ngram has better top-1 guesses than the heads, on texts left out."""
    base, loaded = load_pair("pocket", None, dtype="float32", device="cpu")
    prompts = load_prompts("pocket", limit=12)
    heads_only = run_calibration(base, loaded, prompts, max_new_tokens=32).calibration
    run = run_calibration(base, loaded, prompts, max_new_tokens=32, learning=Learning(3000), steps=True)
    rescored = run.calibration
    assert rescored.accuracy[1 : loaded.heads.num_heads, 0].sum() > heads_only.accuracy[1:, 0].sum()


def test_defaults_are_those_of_the_page() -> None:
    """16 candidates of a level, n-grams, cache and prompt lookup, and sampling at 0.7."""
    default = Learning()
    assert (default.ngram, default.top, default.temperature, default.seed) == (True, 16, 0.7, 0)
    assert (VOTED, FOLDS) == (16, 4)
