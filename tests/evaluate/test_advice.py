"""Advice: given where the metrics call for it, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from treeopt.evaluate.baselines import AUTOREGRESSIVE, GENERATE, LOOKUP, TREE, Metrics, Run, Trial
from treeopt.evaluate.validate import Validation, advice
from treeopt.optimize.replay import Replay
from treeopt.texts.encode import Text


def found(tree: float, plain: float, stock: float, lookup: float) -> Validation:
    """A text of 100 tokens in 40 steps of the tree, decoded in so many seconds by each baseline."""
    seconds = {GENERATE: stock, LOOKUP: lookup, AUTOREGRESSIVE: plain, TREE: tree}
    lengths = {name: [1] * 100 for name in seconds} | {TREE: [61, *[1] * 39]}
    runs = {name: [Run([7] * 100, lengths[name], 1, 0.1, seconds[name])] for name in seconds}
    nothing = Replay(np.zeros(0, np.int8), np.zeros(0, np.bool_), np.zeros(1, np.int64), 1)
    metrics = Metrics((Trial(Text("a:0", [], []), runs, 40),))
    return Validation(metrics, nothing, None, 64, (), {}, 1, 1, {}, ())


def test_fastest_tree_needs_no_advice() -> None:
    """The tree wins: nothing is said."""
    assert advice(found(tree=1.0, plain=2.0, stock=1.9, lookup=1.5)) == ()


def test_losing_tree() -> None:
    """Overhead 3 against 2.5 tokens: both numbers."""
    (text,) = advice(found(tree=2.4, plain=2.0, stock=2.5, lookup=2.5))
    assert "64 nodes takes the time of 3.00 autoregressive steps and yields 2.50 tokens" in text


@pytest.mark.parametrize(
    ("stock", "lookup", "named"),
    [(0.9, 1.5, "stock generate decoded"), (1.5, 0.9, "drafter, decoded"), (0.9, 0.9, "generate and prompt lookup")],
)
def test_faster_baselines(stock: float, lookup: float, named: str) -> None:
    """What comes with transformers and is faster is named."""
    (text,) = advice(found(tree=1.0, plain=2.0, stock=stock, lookup=lookup))
    assert named in text


def test_untimed_gives_no_advice() -> None:
    """Without seconds there is nothing to compare."""
    assert advice(found(tree=0.0, plain=0.0, stock=0.0, lookup=0.0)) == ()
