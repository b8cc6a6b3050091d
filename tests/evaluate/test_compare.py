"""`treeopt.compare`: rows, figures, what is learned and judged, on a tiny chat model that answers in known words."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from looped import looped
from tiny import VOCAB, chat_base, cycle_heads, tiny_base
from tiny_modules import tiny_module

from treeopt import compare
from treeopt.decode.decoder import TreeDecoder
from treeopt.drafting.memory import Memory
from treeopt.drafting.suffix import PUBLISHED, SAM, SUFFIX, SuffixTrie, steps_of
from treeopt.drafting.token_recycling import TokenRecycling
from treeopt.errors import TreeoptError
from treeopt.evaluate import compare as module
from treeopt.evaluate.baselines import WARMING, Baseline, Call, Run, Spread, learning_texts, with_generate, with_memory
from treeopt.evaluate.compare import NO_DRAFT, NO_HEADS, recycle_texts
from treeopt.evaluate.comparison import FASTEST, CompareOptions, Comparison, halves, spread_evenly
from treeopt.evaluate.divergence import gaps_of
from treeopt.evaluate.profile import TimedStep
from treeopt.models.base import Base
from treeopt.models.logits import top_ids
from treeopt.texts.answers import AnswerOptions, answer_all
from treeopt.texts.encode import Text, encode_prompts
from treeopt.texts.prompts import as_prompt_set
from treeopt.traces import MISS, NONE
from treeopt.tree import Tree

NEW = 10
NODES = 6
SMALL: dict[str, Any] = {"nodes": NODES, "max_new_tokens": NEW, "repeats": 1, "learn_tokens": 60, "learn_limit": 4}
TREES = ("token recycling", "Medusa tree", "heads, static", "heads+ngram, static", "ngram, static", "model, static")


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Questions of two categories, each second one with two turns."""
    found: list[dict[str, Any]] = []
    for i in range(first, first + count):
        turns = [f"w{i} w{i + 7} w{i + 1}", f"w{i + 3}"]
        found.append({"turns": turns[: 1 + i % 2], "category": "ab"[i // 2 % 2]})
    return found


def disturbed() -> Base:
    """A model whose text its heads know often, and that ends no text early."""
    base = chat_base(disturbed=0.05)
    base.model.generation_config.eos_token_id = None
    return base


@pytest.fixture(scope="module")
def model() -> Base:
    return disturbed()


@pytest.fixture(scope="module")
def learned() -> list[str]:
    """The drafters that `found` has learned."""
    return []


@pytest.fixture(scope="module")
def found(model: Base, learned: list[str]) -> Comparison:
    """Every method, with heads, the model as its own draft model, and a random EAGLE-3 head."""
    compared = importlib.import_module("treeopt.evaluate.compare")  # the package's `compare` is the function
    run = compared.run_calibration

    def spied(*given: Any, **options: Any) -> Any:
        made = run(*given, **options)
        learned.append("heads" if made.learned is None else made.learned.drafter.name)
        return made

    drafts = [model, tiny_module(model, "eagle3", 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compared, "run_calibration", spied)
        patch.setattr("treeopt.evaluate.eagle2.DEPTHS", (4,))
        patch.setattr("treeopt.evaluate.eagle2.TOP_KS", (2, 4))
        return compare(
            model, cycle_heads(model, 3), rows(12), draft=drafts, texts=3, sizes=(4,), **{**SMALL, "repeats": 1}
        )


def test_every_method_has_a_row_that_is_lossless(found: Comparison) -> None:
    """The rows are in the order of the methods, and all texts of each are those of stock generate."""
    names = [re.split(", (?:depth|factor|bias)", row.method)[0] for row in found.rows if FASTEST not in row.method]
    assert names == [
        *("autoregressive", "generate", "prompt lookup", "token recycling", "token recycling, published tree"),
        *("SuffixDecoding", "SuffixDecoding", "SAM-Decoding", "SAM-Decoding"),
        *("assisted generation", "mc_sim_7b_63", "Medusa tree", "heads, static"),
        *("heads+ngram, static", "heads+ngram, per step", "ngram, static", "ngram, per step"),
        *("model, EAGLE-2", "eagle, EAGLE-2"),
        *("model, static", "model, per step", "model+ngram, static", "model+ngram, per step"),
        *("eagle, static", "eagle, per step", "eagle+ngram, static", "eagle+ngram, per step"),
    ]
    ran = {row.method for row in found.rows if not row.left_out}
    assert {row.method for row in found.rows} - ran == {"mc_sim_7b_63"}, (
        "the tree has four levels, there are three heads"
    )
    assert "4 levels" in found.row("mc_sim_7b_63").left_out
    assert all(row.lossless for row in found.rows if row.method in ran)
    assert found.row("mc_sim_7b_63").lossless is None


@pytest.mark.usefixtures("found")
def test_rows_are_of_the_drafter_that_they_name(learned: list[str]) -> None:
    """Each drafter is learned with or without the n-gram table, and with the draft of its kind."""
    names = ["heads+ngram", "ngram", "model", "model+ngram", "eagle", "eagle+ngram"]
    assert [name for name in learned if name != "heads"] == names


def test_figures_of_a_row(found: Comparison) -> None:
    """Sizes are those asked for; autoregressive decoding has one token a step; a model knows its own text."""
    lengths = {row.method: row.figures.mean_acceptance_length for row in found.rows if row.figures}
    assert lengths["autoregressive"] == lengths["generate"] == 1.0
    assert lengths["model, static"] == max(lengths.values()) > 3
    assert all(lengths[name] > 1.2 for name in TREES[1:])
    assert all((found.row(name).nodes or 0) <= NODES for name in TREES)
    assert found.row("token recycling, published tree").nodes == 81
    plain = found.row("autoregressive").figures
    assert plain is not None
    assert plain.speedup is not None
    assert (plain.speedup.low, plain.speedup.median, plain.speedup.high) == (1.0, 1.0, 1.0)
    for row in found.rows:
        if row.figures is not None:
            assert row.figures.tokens_per_second is not None
            assert row.figures.tokens_per_second.low <= row.figures.tokens_per_second.high


def test_categories_and_turns_are_apart(found: Comparison) -> None:
    """Both categories are judged, and turns are counted."""
    row = found.row("ngram, static")
    assert row.figures is not None
    assert (found.learned, len(found.texts)) == (4, row.figures.texts)
    assert list(row.by_category) == ["a", "b"]
    assert sum(one.texts for one in row.by_category.values()) == row.figures.texts
    assert [one.texts for one in row.by_turn.values()] == [3, row.figures.texts - 3] == [3, 1]
    assert list(row.by_turn) == [1, 2]


def test_without_heads_and_draft_the_rows_say_so(model: Base) -> None:
    """Methods that need heads or a draft model are rows with the reason."""
    found = compare(model, None, rows(4), **{**SMALL, "repeats": 1})
    reasons = {row.method: row.left_out for row in found.rows if row.left_out}
    needs_heads = ("mc_sim_7b_63", "Medusa tree", "heads, static", "heads+ngram")
    needs_draft = ("assisted generation", "model", "model+ngram")
    assert reasons == {**dict.fromkeys(needs_heads, NO_HEADS), **dict.fromkeys(needs_draft, NO_DRAFT)}
    found = compare(model, None, rows(4), **{**SMALL, "repeats": 1}, methods=["eagle", "mtp+ngram", "eagle2"])
    reasons = {row.method: row.left_out for row in found.rows if row.left_out}
    assert list(reasons) == ["eagle2", "eagle", "mtp+ngram"]
    assert "no EAGLE head was given" in reasons["eagle"]
    with pytest.raises(ValueError, match="two drafts are of one kind"):
        compare(model, None, rows(4), draft=[model, model], **SMALL)


def test_suffix_methods_learn_from_the_texts_to_learn_from(model: Base) -> None:
    """Two rows each, by published settings and by the best of the grid, in the steps that replay predicts."""
    notes: list[str] = []
    options = {**SMALL, "repeats": 1, "methods": ["suffix", "sam"], "progress": lambda *given: notes.append(given[2])}
    found = compare(model, None, rows(12), **options)
    published, best, chain, best_chain = found.rows[2:]
    assert published.method == "SuffixDecoding, factor 1, least 0.1, from 6 answers, published"
    assert re.fullmatch(r"SuffixDecoding, factor \d, least [\d.]+, from 6 (texts|answers), best of 12", best.method)
    assert chain.method == "SAM-Decoding, bias 5, from 6 texts, published"
    assert re.fullmatch(r"SAM-Decoding, bias \d(, latest place)?, from 6 texts, best of 4", best_chain.method)
    assert all(row.nodes == NODES and row.lossless for row in found.rows[2:])
    assert sum("tokens per step" in note for note in notes) == 16
    asked = spread_evenly(encode_prompts(model, halves(as_prompt_set(rows(12)))[0], NEW).texts, 4)
    learned = answer_all(model, asked, AnswerOptions(max_new_tokens=NEW))[0]
    tokens = sum(len(text.answer) for text in found.texts)
    for row, method in ((published, PUBLISHED[SUFFIX]), (chain, PUBLISHED[SAM])):
        steps = sum(steps_of(found.texts, method, NODES, SuffixTrie().learn(learned, method)))
        assert row.figures is not None
        assert row.figures.mean_acceptance_length == tokens / steps > 1


def test_methods_that_read_earlier_texts_learn_the_compared_ones_with_a_memory(model: Base) -> None:
    """SuffixDecoding and SAM-Decoding in the steps of replay, after the memory's texts; Token Recycling in fewer."""
    given = [*(f"w{i} w{2 * i}" for i in range(4)), *(f"w{i} w7 w8" for i in range(9, 13))]
    memory, options = Memory(1 << 16), {**SMALL, "methods": ["recycling", "suffix", "sam", "ngram"], "repeats": 2}
    alone = compare(model, None, given, **options)
    memory.add([*alone.texts[0].prompt, *alone.texts[0].answer])
    before = [Text("", (), text) for text in memory.texts()]
    found = compare(model, None, given, memory=memory, **options)
    assert all(row.lossless for row in found.rows)
    asked = spread_evenly(encode_prompts(model, halves(as_prompt_set(given))[0], NEW).texts, 4)
    learned = answer_all(model, asked, AnswerOptions(max_new_tokens=NEW))[0]
    tokens = sum(len(text.answer) for text in found.texts)
    for method in (PUBLISHED[SUFFIX], PUBLISHED[SAM]):
        known, steps = SuffixTrie().learn([*learned, *before], method), 0
        for text in found.texts:
            steps += sum(steps_of([text], method, NODES, known))
            known.learn([text], method)
        [row] = [row for row in found.rows if row.method.startswith(method.name) and "published" in row.method]
        assert row.figures is not None
        assert row.figures.mean_acceptance_length == tokens / steps
    lengths = [one.row("token recycling, published tree").figures for one in (alone, found)]
    assert lengths[0] is not None
    assert lengths[1] is not None
    assert lengths[1].mean_acceptance_length > lengths[0].mean_acceptance_length


def test_a_text_is_learned_once_before_the_next_batch() -> None:
    """Not while warming up, and of several repeats the first."""
    learned: list[list[tuple[list[int], list[int]]]] = []

    def run(prompts: Sequence[Sequence[int]], _most: int, call: Call) -> list[Run]:
        return [Run([*prompt, call.repeat], [1], 1, 0.0, 0.0) for prompt in prompts]

    learning = learning_texts(run, lambda texts: learned.append([(text.prompt, text.answer) for text in texts]))
    for call in (Call(0, part=WARMING), Call(0), Call(0, repeat=1), Call(0, 1), Call(1), Call(2)):
        learning([[call.batch, call.turn]], 4, call)
    assert learned == [[([0, 0], [0, 0, 0]), ([0, 1], [0, 1, 0])], [([1, 0], [1, 0, 0])]]


def test_lookup_that_fails_is_left_out_with_its_message(model: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers says of a model that prompt lookup does not support is in the row."""
    stock = Base.generate

    def refusing(self: Base, *given: Any, **options: Any) -> Any:
        if "prompt_lookup_num_tokens" in options:
            raise ValueError("no cropping\nof this cache")
        return stock(self, *given, **options)

    monkeypatch.setattr(Base, "generate", refusing)
    found = compare(model, None, rows(4), methods=["lookup"], **SMALL)
    assert [(row.method, row.left_out) for row in found.rows[2:]] == [("prompt lookup", "no cropping")]


def test_a_text_that_differs_in_one_repeat_is_counted(model: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wrong token in the last of two repeats of one text: lossless on all texts but one, and not lossless."""
    calls = []

    def wrong_once(base: Base, **options: Any) -> Baseline:
        stock = with_generate(base, **options)

        def run(prompts: Sequence[Sequence[int]], new: int, call: Call) -> list[Run]:
            [found] = stock(prompts, new, call)
            calls.append(prompts)
            if options and len(calls) == 3:  # the warm-up, and two repeats of the first text
                found = dataclasses.replace(found, tokens=[*found.tokens[:-1], found.tokens[-1] ^ 1])
            return [found]

        return run if options else stock

    monkeypatch.setattr(module, "with_generate", wrong_once)
    found = compare(model, None, rows(6), methods=["lookup"], **SMALL)
    texts = len(found.texts)
    assert [(row.same, row.lossless) for row in found.rows] == [(texts, True), (texts, True), (texts - 1, False)]


def test_learned_prompts_are_never_judged(model: Base) -> None:
    """Prompts equal to learned ones are dropped; where none is left, that is E303."""
    judged, learned = rows(4), rows(3, first=2)
    found = compare(model, None, judged, methods=["generate"], prompts_learn=learned, **SMALL)
    assert (found.learned, found.dropped) == (3, 2)
    prompts = {tuple(text.prompt) for text in found.texts}
    taught = {tuple(text.prompt) for text in encode_prompts(model, as_prompt_set(learned), NEW).texts}
    assert prompts
    assert not prompts & taught
    with pytest.raises(TreeoptError, match="none is left to compare on") as caught:
        compare(model, None, learned, methods=["generate"], prompts_learn=learned, **SMALL)
    assert caught.value.code.number == "E303"


def test_halves_are_of_each_category() -> None:
    """The first half of each category, rounded down, is learned; one prompt cannot be divided."""
    given = as_prompt_set([{"text": f"{i}", "category": name} for i, name in enumerate("aabbbac")])
    first, second = halves(given)
    assert [prompt.row for prompt in first.prompts] == [0, 2]
    assert [prompt.row for prompt in second.prompts] == [1, 3, 4, 5, 6]
    with pytest.raises(TreeoptError, match="cannot be divided"):
        halves(as_prompt_set(["alone"]))


def test_judged_texts_are_spread_evenly() -> None:
    """Fewer texts than there are lie at equal distances, the first included."""
    texts = [Text(f"p:{i}", [i], []) for i in range(10)]
    assert [text.prompt[0] for text in spread_evenly(texts, 4)] == [0, 2, 5, 7]
    assert spread_evenly(texts, 12) == texts


def naive_ranks(base: Base, texts: list[Text], depth: int) -> tuple[list[list[list[int]]], dict[int, list[int]]]:
    """Ranks along the texts by a dictionary and one forward for each prefix, and the dictionary."""
    matrix: dict[int, list[int]] = {}
    found = []
    for text in texts:
        table = []
        for i, root in enumerate(text.answer):
            if i:
                with torch.no_grad():
                    ids = torch.tensor([text.prompt + text.answer[:i]])
                    logits = base.forward(ids, use_cache=False)[0][0, -1:]
                matrix[text.answer[i - 1]] = top_ids(logits, 8)[0].tolist()
            row, above = [], root
            for token in text.answer[i + 1 : i + 1 + depth]:
                known = matrix.get(above, list(range(8)))
                row.append(known.index(token) if token in known else MISS)
                above = token
            table.append(row + [NONE] * (depth - len(row)))
        found.append(table)
    return found, matrix


def test_recycled_ranks_equal_the_naive_simulation(model: Base) -> None:
    """Ranks and matrix are those of a simulation that sees the texts' tokens alone, text after text."""
    prompts = encode_prompts(model, as_prompt_set(rows(5)), NEW).texts
    texts = answer_all(model, prompts, AnswerOptions(max_new_tokens=NEW))[0]
    drafter = TokenRecycling(model, depth=3)
    traces = recycle_texts(drafter, texts, batch_size=2)
    expected, matrix = naive_ranks(model, texts, 3)
    assert traces.ranks.tolist() == [row for table in expected for row in table]
    assert np.diff(traces.offsets).tolist() == [len(text.answer) for text in texts]
    assert drafter.matrix.tolist() == [matrix.get(token, list(range(8))) for token in range(VOCAB)]


def test_each_batch_begins_with_the_learned_memory(model: Base) -> None:
    """Repeats of a text, and texts in any order, begin with the memory of now; a later turn with that of the turn."""
    drafter = TokenRecycling(model)
    tree = Tree.from_paths([(0,), (1,), (0, 0)])
    prompts = [text.prompt for text in encode_prompts(model, as_prompt_set(rows(4)), NEW).texts[1:3]]
    TreeDecoder(model, None, tree, drafter=drafter).generate(prompts[1], NEW)
    learned = drafter.matrix.clone()
    run = with_memory(TreeDecoder(model, None, tree, drafter=drafter), drafter.matrix)
    first = [run([prompts[0]], NEW, Call(0, repeat=r))[0].step_lengths for r in range(3)]
    after = drafter.matrix.clone()
    later = [run([prompts[1]], NEW, Call(0, turn=1, repeat=r))[0].step_lengths for r in range(2)]
    alone = run([prompts[1]], NEW, Call(1))[0].step_lengths
    left = drafter.matrix.clone()

    def expected(matrix: torch.Tensor, prompt: Sequence[int]) -> list[int]:
        drafter.matrix.copy_(matrix)
        return TreeDecoder(model, None, tree, drafter=drafter).generate(prompt, NEW).step_lengths

    assert not torch.equal(after, learned)
    assert first == [expected(learned, prompts[0])] * 3
    assert later == [expected(after, prompts[1])] * 2
    assert alone == expected(learned, prompts[1])
    assert torch.equal(left, drafter.matrix)


@pytest.mark.parametrize(("least", "kind"), [(4, "static"), (2, "per step")])
def test_fastest_size_of_a_drafter(model: Base, monkeypatch: pytest.MonkeyPatch, least: int, kind: str) -> None:
    """There is one more row, of the kind and size that have the most tokens per second by timed steps."""

    def seconds(step: TimedStep) -> float:
        dynamic = step.decoder.tree is None
        return 0.01 + (step.decoder.trees.nodes > least) + (dynamic is not (kind == "per step"))

    monkeypatch.setattr(TimedStep, "seconds", seconds)
    found = compare(model, None, rows(6), methods=["ngram"], sizes=(2, 4, 8), **{**SMALL, "repeats": 1})
    fastest = f"ngram, {kind}, fastest size"
    sizes = {row.method: row.nodes for row in found.rows[2:]}
    assert sizes == {"ngram, static": NODES, "ngram, per step": NODES, fastest: least}
    assert all(row.lossless for row in found.rows)


def test_recommended_row_is_the_fastest(found: Comparison) -> None:
    """By measured medians; autoregressive decoding where no method is faster by 2 %, whatever stock generate does."""

    def with_speedups(**speedups: float) -> Comparison:
        changed = []
        for row in found.rows:
            if row.figures is not None:
                one = speedups.get(row.method, 0.5)
                row = dataclasses.replace(row, figures=dataclasses.replace(row.figures, speedup=Spread(one, one, one)))
            changed.append(row)
        return dataclasses.replace(found, rows=tuple(changed))

    assert (
        with_speedups(medusa=1.3, **{"prompt lookup": 1.2, "ngram, static": 1.1}).recommended.method == "prompt lookup"
    )
    speedups = {"ngram, static": 1.1, "prompt lookup": 1.2, "Medusa tree": 1.15}
    assert with_speedups(**speedups).recommended.method == "prompt lookup"
    assert with_speedups(generate=1.5, **{"ngram, static": 1.019}).recommended.method == "autoregressive"
    assert with_speedups(generate=1.5, **{"ngram, static": 1.4}).recommended.method == "autoregressive"
    assert with_speedups(**{"ngram, static": 1.02}).recommended.method == "ngram, static"
    other = dataclasses.replace(
        faster := with_speedups(**{"ngram, static": 1.5}),
        rows=tuple(
            dataclasses.replace(row, same=row.same - 1) if row.method == "ngram, static" else row for row in faster.rows
        ),
    )
    assert other.recommended.method == "autoregressive"


@looped(
    "options",
    [
        {"nodes": 1},
        {"nodes": 255},
        {"sizes": (8, 1)},
        {"sizes": (True,)},
        {"texts": 0},
        {"repeats": 0},
        {"learn_limit": 0},
        {"methods": ["hydra"]},
        {"methods": []},
        {"seed": -1},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    """Numbers out of range and unknown methods are ValueErrors that name them."""
    [name] = options
    with pytest.raises(ValueError, match=name):
        CompareOptions(**options)


def test_gaps_are_of_the_two_tokens_at_the_first_difference() -> None:
    """The difference of their logits after the text before them; a text that ends too early has none."""
    base = tiny_base("llama")
    text = Text("p:0", [1, 2], [3, 4, 5])
    logits = base.forward(torch.tensor([[1, 2, 3]]))[0][0, -1].detach()
    found = [*gaps_of(base, "tree", [(text, [3, 7, 5]), (text, [3, 4]), (text, [3, 4, 5, 6])])]
    assert found == [pytest.approx(abs(float(logits[4] - logits[7])), rel=1e-4)]
