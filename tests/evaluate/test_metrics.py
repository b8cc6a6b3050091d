"""Metrics: sums before ratios, ratios within a repeat, spread over repeats; and baselines that count what they do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import cycle_base, cycle_heads, tiny_base

from treeopt.decode.decoder import TreeDecoder
from treeopt.decode.draft_metrics import DraftMetrics
from treeopt.evaluate.baselines import (
    AUTOREGRESSIVE,
    GENERATE,
    LOOKUP,
    TREE,
    Call,
    Metrics,
    Run,
    Spread,
    Trial,
    with_decoder,
    with_generate,
)
from treeopt.optimize.replay import Replay, visits
from treeopt.texts.encode import Text
from treeopt.texts.prompts import Prompt
from treeopt.tree import Tree


def run(tokens: int, steps: int, seconds: float, prefill: float = 0.5) -> Run:
    """A run of so many equal tokens; the first step takes what the others leave."""
    return Run([7] * tokens, [tokens - steps + 1, *[1] * (steps - 1)], 1, prefill, seconds)


def trial(name: str, tree: list[Run], plain: list[Run], *, category: str | None = None, turn: int = 1) -> Trial:
    """A text that the tree and the one-token loop decoded; stock and prompt lookup as the loop."""
    runs = {GENERATE: plain, LOOKUP: plain, AUTOREGRESSIVE: plain, TREE: tree}
    predicted = len(tree[0].step_lengths), len(tree[0].tokens)
    text = Text(name, [], [], Prompt(name, None, "", None, category, turn))
    return Trial(text, runs, predicted_steps=predicted[0], predicted_tokens=predicted[1])


def test_metrics_hand_written() -> None:
    """120 tokens in 40 steps of 30 ms against steps of 10 ms: tau 3, overhead 3, speed-up 1."""
    metrics = Metrics((trial("a:0", [run(120, 40, 1.2)], [run(120, 120, 1.2)]),))
    assert metrics.tokens_per_step() == 3.0
    assert metrics.overhead == Spread(*[pytest.approx(3.0)] * 3)
    assert metrics.speedup() == Spread(*[pytest.approx(1.0)] * 3)
    assert metrics.tokens_per_second() == Spread(*[pytest.approx(119 / 1.2)] * 3)
    assert metrics.prefill_seconds() == 0.5


def test_metrics_sum_before_they_divide() -> None:
    """tau of 10 tokens in 2 steps and 2 in 2 is 12 / 4, not the mean of 5 and 1."""
    plain = [run(10, 10, 1.0)]
    metrics = Metrics((trial("a:0", [run(10, 2, 1.0)], plain), trial("a:1", [run(2, 2, 1.0)], [run(2, 2, 1.0)])))
    assert metrics.tokens_per_step() == metrics.predicted_tokens_per_step == 3.0
    assert (metrics.tokens, metrics.steps) == (12, 4)


def test_metrics_predicted_tokens_per_step_is_of_predicted_tokens() -> None:
    """(9.5 + 4) / (4 + 2), whatever any baseline decoded; None where nothing is predicted."""
    runs = {name: [run(tokens, 2, 1.0)] for name, tokens in ((GENERATE, 10), (AUTOREGRESSIVE, 8), (TREE, 6))}
    trials = tuple(Trial(Text(f"a:{steps}", [], []), runs, steps, tokens) for steps, tokens in ((4, 9.5), (2, 4)))
    assert Metrics(trials).predicted_tokens_per_step == 2.25
    assert Metrics((Trial(Text("a:0", [], []), runs),)).predicted_tokens_per_step is None


def test_metrics_spread_over_repeats() -> None:
    """A ratio is formed within each repeat: where both decoders slow down alike in one, the speed-up does not move."""
    tree = [run(100, 50, seconds) for seconds in (1.0, 10.0, 1.0, 2.0, 2.0)]
    plain = [run(100, 100, seconds) for seconds in (1.5, 15.0, 1.5, 3.0, 3.0)]
    metrics = Metrics((trial("a:0", tree, plain),))
    assert metrics.speedup() == Spread(*[pytest.approx(1.5)] * 3)
    assert metrics.overhead == Spread(*[pytest.approx(4 / 3)] * 3)
    assert metrics.tokens_per_second() == Spread(*map(pytest.approx, (99 / 2, 99 / 2, 99)))
    assert metrics.speedup(AUTOREGRESSIVE) == Spread(1.0, 1.0, 1.0)


def test_metrics_of_each_repeat() -> None:
    """Overheads 2, 4 and 8 in three repeats: the median is 4, the quartiles lie half-way to the others."""
    tree = [run(100, 50, seconds) for seconds in (1.0, 2.0, 4.0)]
    metrics = Metrics((trial("a:0", tree, [run(100, 100, 1.0)] * 3),))
    assert metrics.overhead == Spread(*map(pytest.approx, (4, 3, 6)))
    assert metrics.speedup() == Spread(*map(pytest.approx, (0.5, 0.375, 0.75)))


def test_metrics_of_parts() -> None:
    """Categories in the order of the file, turns in their own; rows without a category are in none."""
    plain = [run(4, 4, 1.0)]
    trials = (
        trial("a:0", [run(4, 1, 1.0)], plain, category="writing"),
        trial("a:0.02", [run(4, 2, 1.0)], plain, category="writing", turn=2),
        trial("a:1", [run(4, 4, 1.0)], plain, category="math"),
        trial("a:2", [run(4, 2, 1.0)], plain),
    )
    metrics = Metrics(trials)
    assert {name: part.trials for name, part in metrics.by_category.items()} == {
        "writing": trials[:2],
        "math": trials[2:3],
    }
    assert list(metrics.by_category) == ["writing", "math"]
    assert {turn: part.steps for turn, part in metrics.by_turn.items()} == {1: 7, 2: 2}
    assert metrics.by_category["writing"].tokens_per_step() == 8 / 3


def test_draft_metrics_of_the_trees_runs() -> None:
    """Counts are summed over texts before they are divided; stock baselines report none; a part has its own."""
    base = cycle_base(1)
    runs = {
        GENERATE: with_generate(base),
        AUTOREGRESSIVE: with_decoder(TreeDecoder(base, None, Tree(()))),
        TREE: with_decoder(TreeDecoder(base, cycle_heads(base, 3, 1), Tree.chain(3))),
    }
    budgets = (13, 6, 4)  # tokens in steps of four: a last root alone, two drafts beyond the budget, a full step
    trials = tuple(
        Trial(
            Text("a:0", [], [], Prompt("a:0", None, "", None, f"of {n}")),
            {name: baseline([[3, 8]], n, Call(0)) for name, baseline in runs.items()},
        )
        for n in budgets
    )
    found = Metrics(trials).draft_metrics()
    assert found == DraftMetrics(7, 18, (0, 1, 0, 5))
    assert found.mean_acceptance_length == Metrics(trials).tokens_per_step() == 23 / 7
    assert Metrics(trials).draft_metrics(AUTOREGRESSIVE) == DraftMetrics(23, 0, (0,))
    assert Metrics(trials).draft_metrics(GENERATE) is None
    parts = Metrics(trials).by_category.values()
    assert [part.draft_metrics() for part in parts] == [
        DraftMetrics(4, 9, (0, 0, 0, 3)),
        DraftMetrics(2, 6, (0, 1, 0, 1)),
        DraftMetrics(1, 3, (0, 0, 0, 1)),
    ]


def test_predicted_histogram() -> None:
    """Steps of replay by their accepted drafts, without those that begin at the last token of a text."""
    accepted = np.array([2, 0, 0, 1, 0, 0, 0, 0], np.int8)  # of texts of 6, 1 and 1 tokens; the first: 3 + 2 + 1
    offsets = np.array([0, 6, 7, 8])
    assert Replay(accepted, visits(accepted), offsets, 3).histogram == (0, 1, 1, 0)
    full = np.array([1, 0, 0, 0], np.int8)  # 2 + 1 + 1
    assert Replay(full, visits(full), np.array([0, 4]), 1).histogram == (1, 1)
    assert Replay(0 * full, visits(0 * full), np.array([0, 4]), 0).histogram == (0,)


def test_prompt_lookup_counts_its_forwards() -> None:
    """Its text is stock generate's, its steps are the forwards that really ran, and their tokens add up."""
    base = cycle_base(1)
    forwards: list[int] = []
    hook = base.model.register_forward_hook(lambda _model, _inputs, _output: forwards.append(1))
    stock = with_generate(base)([[3, 8]], 150, Call(0))[
        0
    ]  # the cycle has 61 tokens, so the text comes round and can be looked up
    assert len(forwards) == len(stock.step_lengths) == 150
    forwards.clear()
    found = with_generate(base, prompt_lookup_num_tokens=10)([[3, 8]], 150, Call(0))[0]
    hook.remove()
    assert found.tokens == stock.tokens
    assert len(forwards) == len(found.step_lengths) < 100
    assert sum(found.step_lengths) == 150


def test_prompt_lookup_is_in_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers deprecates settings beside a config."""
    base, given = cycle_base(1), {}
    stock = base.model.generate
    monkeypatch.setattr(base.model, "generate", lambda *ids, **options: given.update(options) or stock(*ids, **options))
    with_generate(base, prompt_lookup_num_tokens=10)([[3, 8]], 5, Call(0))
    assert given["generation_config"].prompt_lookup_num_tokens == 10
    assert given.keys() == {"attention_mask", "generation_config", "stopping_criteria"}


def test_prompt_lookup_in_the_prefill() -> None:
    """What the prompt's own forward accepts is no work of the time after it."""
    base = cycle_base(1)
    again = [3, *with_generate(base)([[3]], 62, Call(0))[0].tokens]  # once round the cycle and two tokens more
    found = with_generate(base, prompt_lookup_num_tokens=10)([again], 30, Call(0))[0]
    assert found.prefilled == found.step_lengths[0] == 11


def test_baselines_give_the_same_text() -> None:
    """Stock, our loop and a tree, each timed, with one token known when the prompt is read."""
    base = cycle_base(1)
    tree = TreeDecoder(base, cycle_heads(base, 3, 1), Tree.chain(3))
    plain = TreeDecoder(base, None, Tree(()))
    runs = [
        baseline([[3, 8]], 20, Call(0))[0]
        for baseline in (with_generate(base), with_decoder(plain), with_decoder(tree))
    ]
    assert runs[0].tokens == runs[1].tokens == runs[2].tokens
    assert [len(one.step_lengths) for one in runs] == [20, 20, 5]
    assert all(one.prefilled == 1 and one.seconds > 0 and one.prefill_seconds > 0 for one in runs)


def test_baselines_of_a_batch_give_each_row_its_own_text_and_steps() -> None:
    """Rows of other lengths, decoded together, are those decoded alone; each has its share of the seconds."""
    base = cycle_base(1)
    base.model.generation_config.eos_token_id = with_generate(base)([[3, 8]], 9, Call(0))[0].tokens[
        -1
    ]  # rows end apart
    tree = TreeDecoder(base, cycle_heads(base, 3, 1), Tree.chain(3))
    prompts = [[3, 8], [5], [7, 7, 9, 2]]
    for baseline in (with_generate(base), with_decoder(TreeDecoder(base, None, Tree(()))), with_decoder(tree)):
        together = baseline(prompts, 20, Call(0))
        alone = [baseline([prompt], 20, Call(0))[0] for prompt in prompts]
        assert [run.tokens for run in together] == [run.tokens for run in alone]
        assert [run.step_lengths for run in together] == [run.step_lengths for run in alone]
        assert len({run.seconds for run in together}) == 1


def test_stock_generate_of_a_text_that_ends_at_once() -> None:
    """A first token that ends the text is a run of one token, all of it prefill."""
    base = tiny_base("llama")
    first = base.generate(torch.tensor([[3, 5]]), torch.ones(1, 2).long(), 1)[0, 2].item()
    base.model.generation_config.eos_token_id = first
    found = with_generate(base)([[3, 5]], 20, Call(0))[0]
    assert (found.tokens, found.step_lengths, found.prefilled) == ([first], [1], 1)
