"""Makers of records for tests: traces as in real life, and trees of any shape."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from treeopt.calibration import Calibration, Provenance
from treeopt.traces import MISS, NONE
from treeopt.tree import Tree


def make_calibration(answers: list[np.ndarray], *, top_k: int = 16, ids: list[str] | None = None) -> Calibration:
    """A calibration from full rank tables, one [G, H] a sequence; `NONE` and `MISS` are put where they belong."""
    rows = []
    for table in answers:
        ranks = np.where(table >= top_k, MISS, table).astype(np.uint8)
        left = np.arange(len(ranks), 0, -1)[:, None]
        ranks[np.arange(1, ranks.shape[1] + 1)[None, :] >= left] = NONE
        rows.append(ranks)
    names = ids or [f"set:{s:08}" for s in range(len(rows))]
    return Calibration(
        ranks=np.concatenate(rows),
        offsets=np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64),
        prompt_ids=tuple(names),
        token_hashes=tuple(f"{len(row)}-{int(row.sum())}" for row in rows),
        top_k=top_k,
        provenance=Provenance(
            "base", "b1", "heads", "h1", {"answers": "greedy"}, {"sha": "prompts.json"}, {"torch": "2"}
        ),
    )


def random_calibration(
    seed: int, *, sequences: int = 20, length: int = 50, heads: int = 4, top_k: int = 16
) -> Calibration:
    """Ranks that fall off roughly as real ones do, of texts of different lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, length + 1, sequences)
    return make_calibration([rng.geometric(0.45, (n, heads)) - 1 for n in lengths], top_k=top_k)


def random_tree(seed: int, *, nodes: int, depth: int, ranks: int) -> Tree:
    """A tree of `nodes` nodes (root counted), grown at random places, with gaps among the ranks."""
    rng = np.random.default_rng(seed)
    paths: set[tuple[int, ...]] = {()}
    while len(paths) < nodes:
        parents = sorted(path for path in paths if len(path) < depth)
        paths.add((*parents[rng.integers(len(parents))], int(rng.integers(ranks))))
    return Tree.from_paths(paths - {()})


def without_checksum(path: Path) -> bytes:
    """The content of an array file as treeopt wrote it before files had a checksum."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["treeopt"])
    del header["sha256"]
    written: bytes = save(load(raw), metadata={"treeopt": json.dumps(header)})
    return written


def stretches(seed: int, texts: int = 60) -> Calibration:
    """Texts that stay easy or hard for twenty tokens; all different."""
    rng = np.random.default_rng(seed)
    tables = []
    for _ in range(texts):
        hard = (np.cumsum(rng.random(80) < 0.05) + rng.integers(2)) % 2 == 1
        easy, spread = rng.geometric(0.85, (80, 3)) - 1, rng.geometric(0.18, (80, 3)) - 1
        tables.append(np.where(hard[:, None], spread, easy))
    return dataclasses.replace(make_calibration(tables), token_hashes=tuple(f"{seed}-{text}" for text in range(texts)))


def pooled(row: list[float]) -> list[float]:
    """The nearest row that never rises: pool adjacent violators."""
    pools: list[list[float]] = []
    for value in row:
        pools.append([value])
        while len(pools) > 1 and sum(pools[-2]) / len(pools[-2]) < sum(pools[-1]) / len(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [sum(pool) / len(pool) for pool in pools for _ in pool]
