"""EAGLE-2's choice of a tree, as SGLang makes it, on a made-up drafter; nothing of treeopt's replay is used.

The drafter gives the candidates of a node fixed random probabilities, for each position another set. The true tokens
are drawn from them, so a likely path is often right.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from helpers import make_calibration

from treeopt.calibration import Calibration
from treeopt.defaults import STEP_SIZES
from treeopt.traces import MISS, NONE, StepTraces

Path = tuple[int, ...]


class MadeUpDrafter:
    """Probabilities of `width` candidates after every path of `levels` levels, at each position of one text."""

    def __init__(self, seed: int, length: int, levels: int, width: int) -> None:
        rng = np.random.default_rng(seed)
        self.length, self.levels, self.width = length, levels, width
        self.chances: list[list[np.ndarray]] = []  # [position][level]: [width ** level, width], descending
        self.truth: list[Path] = []
        for _ in range(length):
            sharpness = rng.choice([0.15, 0.4, 1.0])
            tables = [np.sort(rng.dirichlet([sharpness] * (width + 1), width**level)) for level in range(levels)]
            tables = [table[:, :0:-1] for table in tables]  # the smallest is the chance of a token that is no candidate
            self.chances.append(tables)
            path: Path = ()
            for level in range(levels):
                row = tables[level][self.number(path)]
                path = (*path, int(rng.choice(width + 1, p=[*row, max(1 - row.sum(), 0)])))
                if path[-1] == width:
                    break
            self.truth.append(path if path[-1] < width else path[:-1])

    def number(self, path: Path) -> int:
        """The row of a path in its level's table."""
        found = 0
        for rank in path:
            found = found * self.width + rank
        return found

    def children(self, position: int, path: Path, top_k: int) -> list[tuple[float, Path]]:
        """The likeliest candidates after a path with their probabilities after it."""
        row = self.chances[position][len(path)][self.number(path)]
        return [(float(row[rank]), (*path, rank)) for rank in range(min(top_k, self.width))]

    def right_levels(self, position: int) -> Path:
        """The true path, cut at the end of the text."""
        return self.truth[position][: self.length - 1 - position]


def chosen_tree(drafter: MadeUpDrafter, position: int, steps: int, top_k: int, num_draft_tokens: int) -> set[Path]:
    """The drafts that SGLang verifies: expand the best `top_k` of each level, then keep the best of all candidates."""
    scores: dict[Path, float] = {}
    beam: list[tuple[float, Path]] = [(1.0, ())]
    for _ in range(steps):
        level = []
        for score, path in beam:
            for chance, child in drafter.children(position, path, top_k):
                scores[child] = score * chance
                level.append((score * chance, child))
        level.sort(key=lambda one: (-one[0], one[1]))
        beam = level[:top_k]
    best = sorted(scores, key=lambda path: (-scores[path], len(path), path))
    return set(best[: num_draft_tokens - 1])


def accepted(drafter: MadeUpDrafter, position: int, tree: set[Path]) -> int:
    """The drafts that are accepted: the longest prefix of the true path in the tree."""
    truth = drafter.right_levels(position)
    return max(length for length in range(len(truth) + 1) if length == 0 or truth[:length] in tree)


def engine_steps(drafter: MadeUpDrafter, steps: int, top_k: int, num_draft_tokens: int) -> list[int]:
    """The accepted drafts of each step that the engine takes through the text."""
    position, taken = 0, []
    while position < drafter.length:
        tree = chosen_tree(drafter, position, steps, top_k, num_draft_tokens)
        taken.append(accepted(drafter, position, tree))
        position += 1 + taken[-1]
    return taken


def traces_of(drafters: list[MadeUpDrafter]) -> Calibration:
    """What a calibration records of these texts: ranks, and the places of true paths among all nodes."""
    tables, places, confidence = [], [], []
    for drafter in drafters:
        levels = drafter.levels
        ranks = np.full((drafter.length, levels), drafter.width)
        rows = np.full((drafter.length, levels), MISS)
        sure = np.zeros((drafter.length, levels))
        for position in range(drafter.length):
            ordered = all_nodes(drafter, position)
            for level in range(levels):
                path = drafter.truth[position]
                if level < len(path):
                    ranks[position, level] = path[level]
                    rows[position, level] = min(ordered[path[: level + 1]], MISS)
                if level <= len(path):
                    sure[position, level] = drafter.children(position, path[:level], 1)[0][0]
        tables.append(ranks)
        places.append(rows)
        confidence.append(sure)
    made = make_calibration(tables, top_k=drafters[0].width)
    node_rank = np.where(made.ranks == NONE, NONE, np.concatenate(places)).astype(np.uint8)
    expected = np.ones((made.positions, len(STEP_SIZES)), np.float32)
    return dataclasses.replace(
        made, steps=StepTraces(node_rank, expected, np.concatenate(confidence).astype(np.float16))
    )


def all_nodes(drafter: MadeUpDrafter, position: int) -> dict[Path, int]:
    """The place of every path in the order of probability; the root has place 0."""
    scores: dict[Path, float] = {(): 1.0}
    level: list[Path] = [()]
    for _ in range(drafter.levels):
        following = []
        for path in level:
            for chance, child in drafter.children(position, path, drafter.width):
                scores[child] = scores[path] * chance
                following.append(child)
        level = following
    ordered = sorted(scores, key=lambda path: (-scores[path], len(path), path))
    return {path: place for place, path in enumerate(ordered)}
