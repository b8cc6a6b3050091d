"""Building, compiling and replaying: seconds, against a best-first heap in the same run; and the whole command.

python bench/build.py [CALIBRATION]     random traces of 512 texts where no calibration is named
"""

from __future__ import annotations

import argparse
import functools
import heapq
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from timing import add_tiny, goal_line, interleaved, machine

from treeopt.calibration import Calibration, Provenance
from treeopt.files.calibrations import save_calibration
from treeopt.optimize.grow import grow
from treeopt.optimize.replay import Replay, children_of, visits
from treeopt.optimize.values import IndependentValues
from treeopt.traces import MISS, NONE
from treeopt.tree import Tree
from treeopt.verify.buffers import compile_tree

HEADS, RANKS = 5, 16
BUILD_GOALS = {64: 0.001, 1024: 0.010, 1_000_000: 5.0}
POSITIONS, SEQUENCES = 1_000_000, 2_000
COMMAND_GOALS = {64: 1.0, 1024: 2.0, 16_384: 15.0, 131_072: 120.0}
TEXTS, TOKENS, TOP_K = 512, 160, 32


def accuracy_table() -> NDArray[np.float64]:
    """A 5 x 16 table of accuracies that decrease roughly as those of real heads."""
    return np.array([[0.5 * 0.7**h * (rank + 1) ** -1.5 for rank in range(RANKS)] for h in range(HEADS)])


def build(table: NDArray[np.float64], nodes: int) -> Tree:
    """The growth of `treeopt build` from a table of accuracies."""
    return grow(IndependentValues(table), nodes).tree()


def heap_build(table: NDArray[np.float64], nodes: int) -> Tree:
    """Best-first growth with a heap over paths."""
    rows = table.tolist()
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-value, 1, (rank,)) for rank, value in enumerate(rows[0])]
    heapq.heapify(heap)
    paths: list[tuple[int, ...]] = []
    values: list[float] = []
    while heap and len(paths) < nodes - 1:
        value, depth, path = heapq.heappop(heap)
        paths.append(path)
        values.append(-value)
        if depth < len(rows):
            for rank, share in enumerate(rows[depth]):
                heapq.heappush(heap, (value * share, depth + 1, (*path, rank)))
    return Tree.from_paths(paths, values)


def random_calibration() -> Calibration:
    """Texts of one length, with ranks distributed roughly as those of real heads."""
    ranks = np.minimum(np.random.default_rng(0).geometric(0.3, (TEXTS, TOKENS, HEADS)) - 1, MISS)
    ranks[ranks >= TOP_K] = MISS
    ranks[:, np.arange(TOKENS)[:, None] + np.arange(1, HEADS + 1) >= TOKENS] = NONE
    return Calibration(
        ranks=ranks.reshape(-1, HEADS).astype(np.uint8),
        offsets=np.arange(TEXTS + 1, dtype=np.int64) * TOKENS,
        prompt_ids=tuple(f"random:{text:08}" for text in range(TEXTS)),
        token_hashes=tuple(map(str, range(TEXTS))),
        top_k=TOP_K,
        provenance=Provenance("random", "", "random", "", {}),
    )


def time_command(calibration: str | None, sizes: Sequence[int]) -> None:
    """`treeopt build` from process start to end, by its defaults, on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        file = calibration or str(Path(folder, "random.safetensors"))
        if calibration is None:
            save_calibration(random_calibration(), file)
        for nodes, goal in ((size, COMMAND_GOALS[size]) for size in sizes):
            command = [sys.executable, "-m", "treeopt", "build", "--calibration", file, "--nodes", str(nodes), "-q"]
            begin, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            subprocess.run(
                [*command, "-o", str(Path(folder, "tree.yaml"))],
                check=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
            )
            seconds = time.perf_counter() - begin
            used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used
            print(f"{goal_line(f'treeopt build --nodes {nodes}', seconds, goal, 's')}   CPU: {used:.2g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibration", nargs="?", help="timed by the whole command; random traces where left out")
    add_tiny(parser)
    options = parser.parse_args()
    tiny = options.tiny
    table = accuracy_table()
    print(f"{machine(1)}\nbuild from a {HEADS} x {RANKS} table, record included; median of interleaved runs")
    for nodes, goal in BUILD_GOALS.items():
        if tiny and nodes > 10_000:
            continue
        repeats = 2 if tiny or nodes > 10_000 else 50
        timed = {"levels": functools.partial(build, table, nodes), "heap": functools.partial(heap_build, table, nodes)}
        seconds = interleaved(timed, repeats=repeats)
        assert build(table, nodes).paths == heap_build(table, nodes).paths
        print(goal_line(f"build {nodes:,} nodes", seconds["levels"], goal, "s"), end="")
        print(f"   heap: {seconds['heap']:.4g} s, {seconds['heap'] / seconds['levels']:.1f} times as long")
    large = build(table, 1024)
    # A new record each time, because a record caches derived values.
    compiled = interleaved({"compile": lambda: compile_tree(Tree(large.paths))}, repeats=50)["compile"]
    print(goal_line("compile 1,024 nodes", compiled, 0.005, "s"))
    tree = build(table, 64)
    positions = 10_000 if tiny else POSITIONS
    ranks = (np.random.default_rng(0).geometric(0.45, (positions, HEADS)) - 1).astype(np.uint8)
    offsets = np.linspace(0, positions, SEQUENCES + 1).astype(np.int64)

    def replay_all() -> float:
        accepted = children_of(tree).accepted(ranks)
        return Replay(accepted, visits(accepted), offsets, tree.depth).tokens_per_step

    print(
        goal_line(
            f"replay 64 nodes over {positions:,} positions",
            interleaved({"replay": replay_all}, repeats=5)["replay"],
            0.5,
            "s",
        )
    )
    time_command(options.calibration, [64] if tiny else list(COMMAND_GOALS))


if __name__ == "__main__":
    main()
