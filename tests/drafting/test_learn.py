"""Learn: counts that need no second pass over a text, their folds, and no text traced by a table that contains it."""

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

from treeopt.calibrate.pipeline import CalibrationOptions, run_calibration
from treeopt.calibration import Calibration
from treeopt.defaults import MAX_DEPTH
from treeopt.drafter import MAX_WINDOW
from treeopt.drafting import count as count_module
from treeopt.drafting import learn as learning_module
from treeopt.drafting.count import NgramCounts, choices_in, count_drawn, count_texts
from treeopt.drafting.learn import FOLDS, LM_HEAD_LEVELS, VOTED, Learning, _folds, learn
from treeopt.drafting.plans import proposer_for
from treeopt.models.base import Base
from treeopt.models.given import load_pair
from treeopt.models.head_files import LoadedHeads
from treeopt.ngram_table import CONTEXT, NgramTable
from treeopt.runs.work import Chunk, pack_rows
from treeopt.texts.answers import AnswerOptions, Drawn, answer_all, continue_texts, hidden_states
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import Prompt, PromptSet, load_prompts
from treeopt.texts.samples import draw


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
    return [one.text for one in draw(base, texts, tokens, AnswerOptions(new, 8, Learning().temperature, 0))]


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
    folds = [proposer_for(base, heads, fold) for fold in found.folds]
    for text in texts:
        model = folds[found.fold_of[text.prompt_id]]
        assert model.drafter is found.folds[found.fold_of[text.prompt_id]]
    assert found.tokens == 1 + sum(len(text.prompt) + len(text.answer) - 1 for text in texts)


@pytest.mark.slow
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


@pytest.mark.slow
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


NEW = 9


def second_pass(base: Base, texts: Sequence[Text]) -> list[list[int]]:
    """The oracle: all tokens of all texts in one teacher-forced forward; the choice after each but the last."""
    with torch.inference_mode():
        rows = [Text("", text.prompt[:1], [*text.prompt[1:], *text.answer]) for text in texts]
        return [base.lm_head(hidden).argmax(-1).tolist() for hidden in hidden_states(base, rows)]


def counts_of(base: Base, texts: Sequence[Text], drawn: Sequence[Text] = ()) -> NgramCounts:
    """The counts by the oracle: whole `texts`, and the answers of `drawn`."""
    counts = NgramCounts(base.vocab_size)
    everything = [*texts, *drawn]
    for i, (text, choices) in enumerate(zip(everything, second_pass(base, everything), strict=True)):
        first = 0 if i < len(texts) else len(text.prompt) - 1
        counts.add([*text.prompt, *text.answer][:-1], choices, first=first)
    return counts


def same_count(one: NgramCounts, other: NgramCounts) -> bool:
    """Whether all counts of two are equal."""
    pairs = zip(one.joined(), other.joined(), strict=True)
    names = ("keys", "shorter", "successors", "counts")
    equal = (np.array_equal(getattr(a, name), getattr(b, name)) for a, b in pairs for name in names)
    return np.array_equal(one.unigram, other.unigram) and all(equal)


def same_table(one: NgramTable | None, other: NgramTable) -> bool:
    """Whether two tables hold the same_count."""
    assert one is not None
    pairs = zip(one.arrays().values(), other.arrays().values(), strict=True)
    return one.num_tokens == other.num_tokens and all(np.array_equal(a, b) for a, b in pairs)


def ending() -> Base:
    """A random model that ends its texts early now and then."""
    base = tiny_base("llama", 3)
    base.model.generation_config.eos_token_id = list(range(6))
    return base


def counted_as(greedy: bool, batch_size: int) -> CalibrationOptions:
    """Options of greedy or of given answers."""
    return CalibrationOptions(batch_size=batch_size, responses=not greedy)


def everything(base: Base, texts: Sequence[Text], *, greedy: bool, batch_size: int = 4) -> NgramCounts:
    """All texts counted into one."""
    counts = NgramCounts(base.vocab_size)
    count_texts(base, texts, {text.prompt_id: counts for text in texts}, counted_as(greedy, batch_size))
    return counts


def test_choices_after_every_token() -> None:
    """Of rows of any lengths, one token among them: what the model would write after each prefix."""
    base = tiny_base("llama", 3)
    rows = [[4, 7, 7, 1, 2, 3, 4], [9], [5, 6, *[60] * 9]]
    with torch.inference_mode():
        expected = [
            [int(base.model(torch.tensor([row[:end]])).logits[0, -1].argmax()) for end in range(1, len(row))]
            for row in rows
        ]
    assert choices_in(base, rows) == expected
    assert choices_in(base, rows[1:2]) == [[]]


@looped("greedy", [False, True])
@looped("temperature", [0.0, 2.0])
def test_counts_are_those_of_a_second_pass(greedy: bool, temperature: float) -> None:
    """Greedy answers are counted exactly without a forward; others only with one."""
    base = ending()
    torch.manual_seed(1)
    texts = continue_texts(base, prompts_of(1, 11), NEW, temperature=temperature)
    assert same_count(everything(base, texts, greedy=greedy), counts_of(base, texts)) == (
        temperature == 0 or not greedy
    )


@looped("tokens", [1, 50, 400])
def test_drawn_answers_are_counted_while_they_are_written(tokens: int) -> None:
    """The recorded choices of every answer, the cut one among them, are counted as by a second pass."""
    base = ending()
    texts = answered(base, prompts_of(1, 7), NEW)
    drawn = list(draw(base, texts, tokens, AnswerOptions(NEW, 4, 2.0, 5)))
    counts = NgramCounts(base.vocab_size)
    for one in drawn:
        count_drawn(counts, one)
    assert same_count(counts, counts_of(base, [], [one.text for one in drawn]))
    assert counts.unigram.sum() == sum(len(one.text.answer) for one in drawn)


@looped("tokens", [1, 300])
@looped("sampled", [False, True])
def test_a_drafter_is_that_of_two_passes(tokens: int, sampled: bool) -> None:
    """Learned from greedy answers or from others: the tables of the drafter and of its folds, exactly."""
    base, heads = planted()
    options = AnswerOptions(max_new_tokens=NEW, batch_size=4, temperature=1.5 if sampled else 0.0)
    torch.manual_seed(1)
    texts = continue_texts(base, prompts_of(1, 9), NEW, temperature=options.temperature)
    learning = Learning(tokens, temperature=2.0, top=6, window=16)
    found = learn(base, heads, texts, learning, options=options)
    drawn = [one.text for one in draw(base, texts, tokens, AnswerOptions(NEW, 4, 2.0, 0))]
    for fold, drafter in enumerate((*found.folds, found.drafter)):
        kept, more = ([one for one in part if found.fold_of[one.prompt_id] != fold] for part in (texts, drawn))
        assert same_table(drafter.ngram_table, counts_of(base, kept, more).table())


@looped(("given", "greedy"), [({}, True), ({"temperature": 0.5}, False), ({"responses": True}, False)])
def test_answers_that_are_greedy(given: dict[str, float], greedy: bool) -> None:
    """Answers that were sampled, or are given, are not the model's choices."""
    assert CalibrationOptions(**given).greedy is greedy  # type: ignore[arg-type]  # fields by name


@looped("given", [{"responses": True}, {"temperature": 3.0}, {}])
def test_a_calibration_learns_the_models_choices(given: dict[str, float]) -> None:
    """Answers that are given, sampled or greedy: the model's choices after them are counted, not always the answers."""
    base = chat_base(disturbed=0.1)
    prompts = tuple(
        Prompt(f"set:{i:08}", ({"role": "user", "content": f"w{i}"},), None, "w9 w3 w11 w2 w5") for i in range(5)
    )
    loaded = LoadedHeads(cycle_heads(base, 2), "heads", Path("heads"), None, "h1", ())
    chosen = CalibrationOptions(max_new_tokens=6, batch_size=2, **given)  # type: ignore[arg-type]  # fields by name
    everything = PromptSet("chats", "sha", prompts)
    learning = Learning(10)
    run = run_calibration(base, loaded, everything, learning=learning, max_new_tokens=6, batch_size=2, **given)
    texts = encode_prompts(base, everything, 6, scored=True).texts
    if not chosen.responses:
        torch.manual_seed(chosen.seed)
        texts, _ = answer_all(base, texts, chosen)
    drawn = [one.text for one in draw(base, texts, 10, AnswerOptions(6, 2, learning.temperature, learning.seed))]
    assert run.learned is not None
    assert same_table(run.learned.drafter.ngram_table, counts_of(base, texts, drawn).table())


def test_waiting_batches_hold_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a batch are bytes until its forward, as integers of Python take tenfold."""
    seen: list[type] = []

    def choices(_base: Base, rows: Sequence[bytes], _auto_batch: Any) -> Chunk:
        seen.extend(map(type, rows))
        return pack_rows([[0] * (len(row) // 4 - 1) for row in rows])

    monkeypatch.setattr(count_module, "_choices", choices)
    base = tiny_base("llama")
    texts = [Text(f"{i}", [1, 2, i], [3]) for i in range(3)]
    counts = {text.prompt_id: NgramCounts(base.vocab_size) for text in texts}
    count_texts(base, texts, counts, counted_as(False, 2))
    assert seen == [bytes] * 3


def test_only_distinct_prompts_go_through_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer does, and of equal prompts one; each of their texts is counted in its fold."""
    base, heads = planted()
    prompts = [*prompts_of(1, 9), *(Text(f"twin:{i}", [7, 8, 9], []) for i in range(3))]
    texts = answered(base, prompts, NEW)
    seen: list[list[int]] = []

    def noting(base: Base, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        seen.extend(map(list, rows))
        return choices_in(base, rows)

    monkeypatch.setattr(count_module, "choices_in", noting)
    learned(base, heads, texts, new=NEW)
    assert sorted(seen) == sorted([*(text.prompt for text in prompts[:9]), [7, 8, 9]])
    assert same_count(everything(base, texts, greedy=True), counts_of(base, texts))


@looped(("greedy", "note", "total"), [(True, "prompts counted", 7), (False, "texts counted", 9)])
def test_progress_counts_what_goes_through_the_model(greedy: bool, note: str, total: int) -> None:
    """From 0, batch by batch, to the number of distinct prompts or of texts."""
    base = ending()
    texts = answered(base, [*prompts_of(1, 6), *(Text(f"twin:{i}", [7, 8, 9], []) for i in range(3))], NEW)
    texts = [Text(text.prompt_id, text.prompt, [i]) for i, text in enumerate(texts)]
    calls: list[tuple[int, int, str]] = []
    counts = {text.prompt_id: NgramCounts(base.vocab_size) for text in texts}
    count_texts(base, texts, counts, counted_as(greedy, 4), progress=lambda *call: calls.append(call))
    assert calls == [(done, total, note) for done in (*range(0, total, 4), total)]
