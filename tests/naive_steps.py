"""Steps of a tree, trees of independent values and folds, by loops that import nothing of what they check."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence

import numpy as np
from helpers import make_calibration

from treeopt.calibration import Calibration
from treeopt.traces import NONE

Path = tuple[int, ...]
FOLDS = 5


def uneven(seed: int, sequences: int, *, heads: int = 3, length: int = 30) -> Calibration:
    """Different texts, each with likeliest ranks of its own, so that trees of different texts differ."""
    rng = np.random.default_rng(seed)
    tables = []
    for _ in range(sequences):
        ranks = rng.geometric(rng.uniform(0.3, 0.9, heads), (int(rng.integers(length // 2, length)), heads)) - 1
        tables.append((ranks + rng.choice([0, 0, 1], heads)) % 6)
    made = make_calibration(tables, top_k=8)
    return dataclasses.replace(made, token_hashes=tuple(f"t{s}" for s in range(sequences)))


def naive_sums(paths: Collection[Path], calibration: Calibration, texts: Sequence[int]) -> list[tuple[int, int]]:
    """Tokens and steps of some texts: emit the root, then drafts while the path is in the tree."""
    known, found = set(paths), []
    for s in texts:
        rows = calibration.sequence(s).tolist()
        at = steps = 0
        while at < len(rows):
            drafts = 0
            while drafts < len(rows[at]) and tuple(rows[at][: drafts + 1]) in known:
                drafts += 1
            at, steps = at + 1 + drafts, steps + 1
        assert at == len(rows)
        found.append((len(rows), steps))
    return found


def tau(sums: Sequence[tuple[int, int]]) -> float:
    """All tokens / all steps."""
    return sum(tokens for tokens, _ in sums) / sum(steps for _, steps in sums)


def naive_medusa(
    calibration: Calibration, texts: Sequence[int], nodes: int, *, top_k: int, levels: int | None = None
) -> set[Path]:
    """The `nodes` - 1 paths with the greatest products of accuracies on these texts, of all that there are."""
    rows = [row for s in texts for row in calibration.sequence(s).tolist()]
    levels = calibration.num_heads if levels is None else levels
    accuracy = []
    for level in range(levels):
        column = [row[level] for row in rows if row[level] != NONE]
        accuracy.append([column.count(rank) / max(len(column), 1) for rank in range(top_k)])
    valued = []
    for depth in range(1, levels + 1):
        for path in itertools.product(range(top_k), repeat=depth):
            value = float(np.prod([accuracy[level][rank] for level, rank in enumerate(path)]))
            if value > 0:
                valued.append((-value, depth, path))
    return {path for _, _, path in sorted(valued)[: nodes - 1]}


def naive_folds(calibration: Calibration) -> list[int]:
    """The fold of each text: different texts in the order of their hashes, dealt to five folds, and shuffled."""
    different = sorted(set(calibration.token_hashes))
    dealt = np.random.default_rng(0).permutation([i % FOLDS for i in range(len(different))]).tolist()
    return [dealt[different.index(one)] for one in calibration.token_hashes]


def left_out_sums(
    calibration: Calibration, nodes: int, *, top_k: int, levels: int | None = None
) -> list[tuple[int, int]]:
    """Tokens and steps of every text by the tree of independent values that was fitted to the other folds."""
    folds, found = naive_folds(calibration), {}
    for fold in range(FOLDS):
        fitted = [s for s, other in enumerate(folds) if other != fold]
        judged = [s for s, other in enumerate(folds) if other == fold]
        paths = naive_medusa(calibration, fitted, nodes, top_k=top_k, levels=levels)
        found |= dict(zip(judged, naive_sums(paths, calibration, judged), strict=True))
    return [found[s] for s in range(calibration.sequences)]
