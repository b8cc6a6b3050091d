"""Building, compiling and replaying: seconds, against a best-first heap in the same run.

python bench/build.py
"""

from __future__ import annotations

import functools
import heapq

import numpy as np
from timing import interleaved, machine, verdict

from treeopt.build.grow import grow
from treeopt.build.replay import Replay, accepted_drafts, visits
from treeopt.build.values import IndependentValues
from treeopt.runtime.buffers import compile_tree
from treeopt.tree import Tree

HEADS, RANKS = 5, 16
BUILD_GOALS = {64: 0.001, 1024: 0.010, 1_000_000: 5.0}
POSITIONS, SEQUENCES = 1_000_000, 2_000


def accuracy_table() -> np.ndarray:
    """A 5 x 16 table that falls off roughly as real heads do."""
    return np.array([[0.5 * 0.7**h * (rank + 1) ** -1.5 for rank in range(RANKS)] for h in range(HEADS)])


def build(table: np.ndarray, nodes: int) -> Tree:
    """What `treeopt build` does after reading the calibration."""
    return grow(IndependentValues(table), nodes).tree()


def heap_build(table: np.ndarray, nodes: int) -> Tree:
    """The textbook way: best first with a heap over paths."""
    rows = table.tolist()
    heap = [(-value, 1, (rank,)) for rank, value in enumerate(rows[0])]
    heapq.heapify(heap)
    paths, values = [], []
    while heap and len(paths) < nodes - 1:
        value, depth, path = heapq.heappop(heap)
        paths.append(path)
        values.append(-value)
        if depth < len(rows):
            for rank, share in enumerate(rows[depth]):
                heapq.heappush(heap, (value * share, depth + 1, (*path, rank)))
    return Tree.from_paths(paths, values)


def main() -> None:
    table = accuracy_table()
    print(f"{machine(1)}\nbuild from a {HEADS} x {RANKS} table, record included; median of interleaved runs")
    for nodes, goal in BUILD_GOALS.items():
        repeats = 2 if nodes > 10_000 else 50
        ways = {"levels": functools.partial(build, table, nodes), "heap": functools.partial(heap_build, table, nodes)}
        seconds = interleaved(ways, repeats=repeats)
        assert build(table, nodes).paths == heap_build(table, nodes).paths
        print(verdict(f"build {nodes:,} nodes", seconds["levels"], goal, "s"), end="")
        print(f"   heap: {seconds['heap']:.4g} s, {seconds['heap'] / seconds['levels']:.1f} times as long")
    large = build(table, 1024)
    # A new record each time: the record keeps what it derives.
    compiled = interleaved({"compile": lambda: compile_tree(Tree(large.paths))}, repeats=50)["compile"]
    print(verdict("compile 1,024 nodes", compiled, 0.005, "s"))
    tree = build(table, 64)
    ranks = (np.random.default_rng(0).geometric(0.45, (POSITIONS, HEADS)) - 1).astype(np.uint8)
    offsets = np.linspace(0, POSITIONS, SEQUENCES + 1).astype(np.int64)

    def replay_all() -> float:
        accepted = accepted_drafts(tree, ranks)
        return Replay(accepted, visits(accepted), offsets, tree.depth).tokens_per_step

    print(
        verdict(
            "replay 64 nodes over 1 M positions", interleaved({"replay": replay_all}, repeats=5)["replay"], 0.5, "s"
        )
    )


if __name__ == "__main__":
    main()
