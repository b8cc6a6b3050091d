"""The compiled kernel against the naive drafter; threads, texts that grow, shrink and are left."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import random_tree
from kernel_scorer import Scorer
from looped import looped
from naive_draft import SOURCES, Case, bounds, naive_growth, random_case

from treeopt.defaults import STEP_SIZES
from treeopt.drafting.interface import AcceptedPart, Expansion, SizeLimits
from treeopt.drafting.kernel import compiled
from treeopt.drafting.kernel import session as kernel_session
from treeopt.drafting.kernel.session import KernelSession
from treeopt.errors import Code, TreeoptError
from treeopt.verify.buffers import compile_ranks

SEEDS = int(os.environ.get("TREEOPT_SEEDS", "3"))  # of each source
NEAR = 2e-4


def begun(case: Case) -> KernelSession:
    """A session of the kernel with a step begun."""
    return Scorer(case.drafter).session(torch.from_numpy(case.logits), case.recent, case.drafter.depth)


def cases(seed: int, source: str) -> Case:
    """Every third one maps its probabilities."""
    return random_case(seed, source=source, mapped=seed % 3 == 0)


def paths_of(tree: Expansion, row: int) -> list[tuple[int, ...]]:
    """The path of each node of one row."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def check_growth(case: Case, nodes: int) -> None:
    """Path by path with the naive probability; nodes that are about equally likely may change places."""
    found = begun(case).expand(nodes, case.drafter.depth)
    for row in range(len(case.recent)):
        wanted = naive_growth(case.naive(row), nodes, case.drafter.depth)
        pairs = dict(zip(paths_of(found, row), found.log_probability[row].tolist(), strict=True)), wanted
        last = min(min(one.values()) for one in pairs)
        for path in pairs[0].keys() | pairs[1].keys():
            values = [one.get(path, last) for one in pairs]
            assert values == pytest.approx([values[0]] * 2, abs=NEAR) or min(values) == -np.inf


@looped("source", SOURCES)
def test_likeliest_nodes_are_the_naive_ones(source: str) -> None:
    """Of every source, with few nodes and with more than a level may have parents."""
    for seed in range(SEEDS):
        for nodes in (2, 9, 64):
            check_growth(cases(seed, source), nodes)


def check_filled(case: Case, seed: int) -> None:
    """A node of rank r has the naive candidate r of its parent, up to equal scores; where there is none it is void."""
    nodes = {1: 4, 2: 12}.get(case.drafter.depth, 24)
    tree = random_tree(seed, nodes=nodes, depth=case.drafter.depth, ranks=4)
    session, roots = begun(case), torch.from_numpy(case.recent[:, -1].copy())
    session.look(session._step.seen.reshape(len(roots), -1))
    drafts = session.fill(roots, roots, compile_ranks(tree))
    void = torch.zeros(drafts.tokens.shape, dtype=torch.bool) if drafts.void is None else drafts.void
    for row, (tokens, missing) in enumerate(zip(drafts.tokens.tolist(), void.tolist(), strict=True)):
        naive = case.naive(row)
        assert tokens[0] == roots[row]
        for node, path in enumerate(tree.paths, start=1):
            above = [tokens[tree.paths.index(path[:depth]) + 1] for depth in range(1, len(path))]
            if any(missing[tree.paths.index(path[:depth]) + 1] for depth in range(1, len(path))):
                assert missing[node]
                continue
            ranked = naive.ranked(above)
            assert missing[node] == (path[-1] >= len(ranked))
            if not missing[node]:
                low, high = bounds(ranked, tokens[node])
                assert low <= path[-1] <= high


@looped("source", SOURCES)
def test_filled_trees_are_the_naive_ones(source: str) -> None:
    """Every node of random trees."""
    for seed in range(SEEDS):
        check_filled(cases(seed, source), seed)


def test_trees_with_few_log_probabilities() -> None:
    """Of heads, candidates beyond those whose log-probabilities are read share the rest equally."""
    case = random_case(2, rows=1, source="heads", window=20)
    few = replace(case, drafter=replace(case.drafter, top_logprobs=case.drafter.top))
    rest = case.logits.copy()
    for level in rest[:, 0]:
        order = sorted(range(len(level)), key=lambda token: (-level[token], token))[case.drafter.top :]
        if order:
            level[order] = np.log(np.exp(level[order]).sum() / len(order))
    for nodes in (9, 64):
        found, wanted = (begun(one).expand(nodes, case.drafter.depth) for one in (few, replace(case, logits=rest)))
        chances = [dict(zip(paths_of(one, 0), one.log_probability[0].tolist(), strict=True)) for one in (found, wanted)]
        assert sorted(chances[0].values()) == pytest.approx(sorted(chances[1].values()), abs=NEAR)


def test_rows_in_threads_are_the_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows in up to four threads give what one thread gives, bit for bit."""
    case = random_case(1, rows=8, window=20, source="voted")
    alone = begun(case).expand(40, case.drafter.depth)
    monkeypatch.setattr(kernel_session, "_LEAST_ROWS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    session = begun(case)
    assert len(session._parts()) == 4
    shared = session.expand(40, case.drafter.depth)
    for name in ("tokens", "parents", "depths", "log_probability"):
        assert getattr(shared, name).tolist() == getattr(alone, name).tolist()


def test_rows_of_one_text_share_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a text change its index one after the other."""
    session = begun(random_case(1, rows=3, window=20))
    session._text, session._end = np.repeat([0, 1, 2], [5, 1, 6]), np.ones(12, np.int64)
    monkeypatch.setattr(kernel_session, "_LEAST_ROWS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    parts = session._parts()
    assert parts[0][0] == 0
    assert parts[-1][1] == 12
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(parts))
    assert all(session._text[end - 1] != session._text[end] for _, end in parts[:-1])


def test_a_text_that_grows_and_is_rewound() -> None:
    """After any calls of keep and rewind the drafts are those of a session that begins with the text."""
    for seed in range(6):
        check_rewound(seed)


def check_rewound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(seed, rows=3, window=20, source="voted")
    session, vocab = begun(case), len(case.table.unigram)
    seen = session._step.seen.reshape(3, -1)
    texts = [row[row >= 0].tolist() for row in case.recent]
    marks: list[tuple[Any, list[list[int]]]] = []
    for _ in range(25):
        if marks and rng.random() < 0.3:
            mark, texts = marks.pop()
            session.rewind(mark)
        if rng.random() < 0.4:
            marks.append((session.mark(), [list(text) for text in texts]))
        if rng.random() < 0.8:  # often right after a rewind, when the index still holds what was undone
            new = [rng.integers(vocab, size=rng.integers(1, 9)).tolist() for _ in texts]
            session.keep(AcceptedPart(new, None, None, None, None))  # type: ignore[arg-type]
            texts = [text + more for text, more in zip(texts, new, strict=True)]
        session.look(seen)
        session.begin(None, None)  # type: ignore[arg-type]
        found = session.expand(20, case.drafter.depth)
        fresh = KernelSession(session.source, texts, case.drafter.depth)
        fresh.look(seen)
        fresh.begin(None, None)  # type: ignore[arg-type]
        wanted = fresh.expand(20, case.drafter.depth)
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert found.log_probability.tolist() == wanted.log_probability.tolist()


def test_selected_rows_keep_their_texts() -> None:
    """Rows 0 and 2 of three go on as if row 1 had never been there."""
    case = random_case(3, rows=3, window=20, source="voted")
    session = begun(case)
    seen = session._step.seen.reshape(3, -1)
    session.select([0, 2])
    session.keep(AcceptedPart([[1], [0]], None, None, None, None))  # type: ignore[arg-type]
    session.look(seen[[0, 2]])
    session.begin(None, None)  # type: ignore[arg-type]
    texts = [[*row[row >= 0].tolist(), more] for row, more in zip(case.recent[[0, 2]], (1, 0), strict=True)]
    fresh = KernelSession(session.source, texts, case.drafter.depth)
    fresh.look(seen[[0, 2]])
    fresh.begin(None, None)  # type: ignore[arg-type]
    assert session.expand(20, 2).tokens.tolist() == fresh.expand(20, 2).tokens.tolist()


@looped("source", SOURCES)
def test_growth_ends_where_no_size_can_pay(source: str) -> None:
    """The chosen size is the one that all sizes' estimates give, though the largest trees are not grown."""
    for seed in range(SEEDS):
        check_sizes(seed, source)


def check_sizes(seed: int, source: str) -> None:
    rng = np.random.default_rng(seed)
    case = random_case(seed, rows=1, source=source)
    sizes = STEP_SIZES[:6]
    cost = np.cumsum(rng.random(len(sizes)) * rng.choice([0.05, 0.3])).tolist()
    session = begun(case)
    whole = session.expand(sizes[-1], case.drafter.depth).log_probability[0]
    total = 1 + np.concatenate([[0.0], np.cumsum(np.exp(whole.astype(np.float64)))])
    gain = [np.float32(total[min(size, len(total)) - 1]) - price for size, price in zip(sizes, cost, strict=True)]
    roots = torch.from_numpy(case.recent[:, -1].copy())
    session.look(session._step.seen.reshape(1, -1))
    drafts = session.grow(roots, roots, SizeLimits(sizes, tuple(cost), case.drafter.depth))
    assert drafts.tokens.shape[1] == min(sizes[int(np.argmax(gain))], len(total))


@looped("source", ["heads", "voted", "lm head"])
def test_log_probabilities_that_are_not_numbers_are_refused(source: str) -> None:
    """One NaN among the logits of the last row of three is E504, whatever gave the logits; -inf is no fault."""
    case = random_case(3, rows=3, source=source)
    level, token = case.logits.shape[0] - 1, case.logits.shape[2] - 1
    for value in (-np.inf, np.nan):
        logits = case.logits.copy()
        logits[level, -1, token] = value
        if np.isnan(value):
            with pytest.raises(TreeoptError, match="gives logits that are not finite") as caught:
                begun(replace(case, logits=logits))
            assert caught.value.code is Code.NOT_FINITE
        else:
            begun(replace(case, logits=logits))


@looped("token", [-1, 99])
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    """The kernel reads memory by tokens, and does not check them."""
    session = begun(random_case(1))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        KernelSession(session.source, [[1, token, 1]], 2)


READ_ONLY = """
import os, sys, pathlib
from treeopt.drafting.kernel import compiled
compiled._writable = lambda folder, test=compiled._writable: sys.argv[1] in str(folder) and test(folder)
@compiled.compiled
def double(number):
    return 2 * number
print(double(21), [str(one) for one in compiled._folders() if compiled._writable(one)])
"""


@pytest.mark.slow
@looped("place", ["cache", "nowhere"])
def test_cache_folder_where_site_packages_is_read_only(tmp_path: Path, place: str) -> None:
    """The user's cache takes the machine code; where nothing can be written it is compiled for the process."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "NUMBA_CACHE_DIR": ""}
    script = tmp_path / "script.py"
    script.write_text(READ_ONLY)
    out = subprocess.run(
        [sys.executable, script, str(tmp_path / "cache") if place == "cache" else "nowhere"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert out.stdout.startswith("42 ")
    assert bool(list(tmp_path.rglob("*.nbi"))) == (place == "cache")


@pytest.mark.slow
def test_numba_is_imported_only_to_draft() -> None:
    """Neither the package, the command line nor a static tree of the heads needs it."""
    modules = "sys, treeopt, treeopt.cli.app, treeopt.decode.decoder, treeopt.drafting.plans"
    code = f"import {modules}; print('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@looped(("place", "machine_code", "words"), [
    ("here", False, "compiling the drafting kernel, once;"),
    (None, False, "compiling the drafting kernel, at every start, as no folder can be written;"),
    ("here", True, ""),
])  # fmt: skip
def test_compilation_is_announced(
    place: str | None, machine_code: bool, words: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Unless machine code is found, in a folder of the user's choice too."""
    folder = tmp_path / "kernel" if place else None
    if machine_code:
        (tmp_path / "kernel" / "one").mkdir(parents=True)
        (tmp_path / "kernel" / "one" / "grow.nbi").write_bytes(b"")
    monkeypatch.setattr(compiled.config, "CACHE_DIR", "")
    monkeypatch.setattr(compiled, "_folders", lambda: iter([folder] if folder else []))
    caplog.clear()
    with caplog.at_level("INFO", logger="treeopt"):
        compiled.note_compilation.__wrapped__()
    assert words in caplog.text if words else not caplog.text
    assert compiled.machine_code_folder() == folder
    monkeypatch.setattr(compiled.config, "CACHE_DIR", str(tmp_path))
    assert compiled.machine_code_folder() == tmp_path
