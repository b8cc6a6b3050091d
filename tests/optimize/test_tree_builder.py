"""From a calibration to a tree, in one call and as the command line asks for it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_calibration, random_calibration
from looped import looped
from refusals import refusal_of

import treeopt
from treeopt.calibration import Calibration
from treeopt.errors import Code, TreeoptError
from treeopt.files.strict_yaml import MAX_BYTES
from treeopt.files.trees import load_tree, save_tree, tree_yaml
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.build_job import BuildJob, run_job
from treeopt.optimize.replay import replay
from treeopt.optimize.select_method import MEDUSA, Fitter, Limits
from treeopt.optimize.tree_builder import build_tree, check_size, describe, tree_limits
from treeopt.tree import Tree


def products(tree: Tree, calibration: Calibration) -> list[float]:
    """Of each path, the product of its accuracies."""
    accuracy = calibration.accuracy
    return [math.prod(accuracy[head, rank] for head, rank in enumerate(path)) for path in tree.paths]


@looped("seed", range(5))
@looped("nodes", [1, 2, 16, 64])
def test_expected_of_a_built_tree(nodes: int, seed: int) -> None:
    """Independent is 1 and the sum of the products of accuracies; replay is the replay on the calibration itself."""
    calibration = random_calibration(seed, sequences=40)
    tree = build_tree(calibration, nodes)
    assert tree.nodes == nodes
    assert tree.expected is not None
    assert tree.expected.independent == pytest.approx(1.0 + math.fsum(products(tree, calibration)), rel=1e-5)
    assert tree.expected.replay == pytest.approx(replay(tree, calibration).tokens_per_step, abs=1e-6)


def test_values_of_a_built_tree() -> None:
    """Each node of the Medusa tree carries the product of its accuracies, to six digits."""
    calibration = random_calibration(0, sequences=40)
    tree = build_tree(calibration, 64, values="independent", weights="uniform")
    assert tree.values == pytest.approx(products(tree, calibration), rel=1e-5)


def test_expected_by_hand() -> None:
    """Head 1 is right in two of three trials and head 2 in one of two: 1 + 2/3 + 1/3, in steps of 3 and 1."""
    calibration = make_calibration([np.array([[0, 0], [0, 3], [5, 0], [0, 0]])], top_k=2)
    tree = build_tree(calibration, 3)
    assert tree.paths == ((0,), (0, 0))
    assert tree.values == (0.666667, 0.333333)
    assert tree.expected is not None
    assert tree.expected.independent == 2.0
    assert tree.expected.replay == 2.0


@looped("max_rank", [0, 1, 3])
def test_max_rank_is_respected(max_rank: int) -> None:
    """No path has a larger rank; the largest allowed is used."""
    tree = build_tree(random_calibration(0, sequences=40), 200, max_rank=max_rank)
    assert tree.max_rank == max_rank
    assert tree.expected is not None
    assert tree.expected.top_k == max_rank + 1


@looped("top_k", [1, 2, 4])
def test_top_k_is_respected(top_k: int) -> None:
    """Only the first K ranks are used, and K stands beside the figures."""
    calibration = random_calibration(0, sequences=40)
    tree = build_tree(calibration, 200, top_k=top_k)
    assert tree.max_rank == top_k - 1
    assert tree.expected is not None
    assert tree.expected.top_k == top_k
    assert tree.source["method"]["top_k"] == top_k
    assert tree == build_tree(calibration, 200, max_rank=top_k - 1)


@looped("top_k, max_rank, ranks", [(3, 9, 3), (9, 2, 3)])
def test_the_narrower_of_top_k_and_max_rank_counts(top_k: int, max_rank: int, ranks: int) -> None:
    """Both limits hold at once."""
    tree = build_tree(random_calibration(0, sequences=40), 200, top_k=top_k, max_rank=max_rank)
    assert tree.max_rank == ranks - 1


@looped("max_depth", [1, 2, 9])
def test_max_depth_is_respected(max_depth: int) -> None:
    """No path is longer."""
    tree = build_tree(random_calibration(0, sequences=40), 60, max_depth=max_depth)
    assert tree.depth == min(max_depth, 4)


def test_source_names_the_calibration() -> None:
    """A tree says by what and from which calibration it was made."""
    calibration = random_calibration(4, sequences=7)
    source = build_tree(calibration, 20).source
    assert source["made_by"] == f"treeopt {treeopt.__version__}"
    assert source["method"]["budget"] == 20
    assert source["calibration"] == {
        "model": "base",
        "model_id": "b1",
        "heads": "heads",
        "heads_id": "h1",
        "prompts": "prompts.json",
        "sequences": 7,
        "positions": calibration.positions,
    }


@looped("levels, ranks", [(5, 32), (8, 100), (9, 253)])
def test_largest_tree_that_is_allowed_fits_into_a_file(levels: int, ranks: int) -> None:
    """One node more is refused; the lines of the longest paths and values, as many as are allowed, are read."""
    error = refusal_of(check_size, Limits(1 << 30, ranks), levels, "--nodes")
    assert error.code is Code.FILE_UNWRITABLE
    most = int(error.fix.split()[1])
    check_size(Limits(most, ranks), levels, "--nodes")
    with pytest.raises(TreeoptError):
        check_size(Limits(most + 1, ranks), levels, "--nodes")
    longest = Tree.from_paths([(ranks - 1,) * depth for depth in range(1, levels + 1)], [1.23456e-10] * levels)
    *_, line = tree_yaml(longest).splitlines()
    assert most > 80_000
    assert (len(line) + 1) * most < MAX_BYTES - 10_000


def test_limits_that_allow_few_nodes_are_never_too_large() -> None:
    """What counts is how many nodes there can be: 1 + 2 + 4 with two ranks and two levels."""
    check_size(Limits(1 << 30, 2), 2, "--nodes")
    check_size(Limits(1 << 30, 1), 12, "--nodes")
    check_size(Limits(1 << 30, 253, 2), 5, "--nodes")
    with pytest.raises(TreeoptError, match="16,258,540"):
        check_size(Limits(1 << 30, 253, 3), 5, "--nodes")


@looped(
    "wrong",
    [
        *({"nodes": nodes} for nodes in (0, 4.5, True, math.nan, "8", None)),
        *({"top_k": top_k} for top_k in (0, 1.5, True)),
        *({name: limit} for name in ("max_depth", "max_rank") for limit in (-1, 2.5, True, False)),
        {"values": "jnt"},
        {"weights": "visit"},
        {"values": None},
    ],
)
def test_each_wrong_argument_is_refused(wrong: dict[str, Any]) -> None:
    """One suffices, and the error names it."""
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} "):
        build_tree(random_calibration(0), **{"nodes": 4, **wrong})


def test_integers_of_numpy_and_top_k() -> None:
    """They give the tree that plain integers give; K is what the figures rest on, not what was asked for."""
    calibration = random_calibration(0)
    tree = build_tree(calibration, np.int64(4), top_k=np.int32(2))  # type: ignore[arg-type]
    assert tree_yaml(tree) == tree_yaml(build_tree(calibration, 4, top_k=2))
    tree = build_tree(random_calibration(0, top_k=4), 30, top_k=32)
    assert tree.expected is not None
    assert tree.expected.top_k == 4


@looped("levels, named", [(0, None), (1, "level 1"), (2, "all levels")])
def test_source_names_the_levels_without_gaps(levels: int, named: str | None) -> None:
    """The method of the tree's file says where siblings have no gaps."""
    calibration = random_calibration(0)
    fitter = Fitter(calibration, tree_limits(calibration, 6, contiguous=levels))
    source = describe(fitter, fitter.choose([MEDUSA])).source
    assert source["method"].get("contiguous") == named


@looped("right, end", [(9, "high"), (1, "low")])
def test_intervals_end_where_a_tree_does(right: int, end: str) -> None:
    """With ten texts that are all right or all wrong the ends are 1 and 1 + depth, not beyond."""
    texts = [np.full((20 + i, 1), 0 if i < right else 99) for i in range(10)]
    expected = build_tree(make_calibration(texts), 2).expected
    assert expected is not None
    assert getattr(expected, end) == {"low": 1.0, "high": 2.0}[end]


def test_job_of_one_calibration_is_build_tree() -> None:
    """The library's one call and the command line's job give the same tree."""
    calibration = random_calibration(4, sequences=30)
    assert run_job(calibration, BuildJob(nodes=12)).tree == build_tree(calibration, 12)


def test_contradictions_are_refused() -> None:
    """The fastest size needs a profile."""
    with pytest.raises(ValueError, match="profile"):
        run_job(random_calibration(6), BuildJob(nodes=None))


def test_profile_of_per_step_trees_gives_no_static_size() -> None:
    """Their steps take other times: E230, before any tree is grown."""
    points = [LatencyPoint(nodes, 1, 64, seconds, seconds, seconds) for nodes, seconds in ((1, 1.0), (8, 1.5))]
    profile = LatencyProfile.from_points(points, {"kind": "dynamic"})
    with pytest.raises(TreeoptError, match="dynamic") as caught:
        run_job(random_calibration(6), BuildJob(nodes=None, profile=profile))
    assert caught.value.code is Code.PROFILE_INVALID


def empty() -> Calibration:
    """A calibration without texts."""
    return random_calibration(1).select([])


def test_calibration_without_texts_is_one_error() -> None:
    """There is nothing to count: E303."""
    assert refusal_of(run_job, empty(), BuildJob(nodes=8)).code is Code.PROMPTS_EMPTY


def test_equal_texts_share_a_fold() -> None:
    """A text that stands twice is never judged by a tree that was fitted to its twin."""
    tables = [np.random.default_rng(s).integers(0, 6, (20, 3)) for s in range(12)]
    twice = make_calibration(tables + tables)
    fitter = Fitter(twice, Limits(8, 16))
    sums = fitter.choose([MEDUSA]).sums
    assert sums is not None
    assert np.array_equal(sums.steps[:12], sums.steps[12:])


def test_tree_larger_than_the_engine_takes_is_refused() -> None:
    """Sequoia reads 2,048 nodes: E105."""
    with pytest.raises(TreeoptError, match="2,048 nodes at most") as caught:
        run_job(random_calibration(1, sequences=5), BuildJob(nodes=2049, engine="sequoia"))
    assert caught.value.code is Code.TREE_NOT_EXPORTABLE
    seconds = [LatencyPoint(nodes, 1, 512, *[1 + nodes / 1e9] * 3) for nodes in (1, 4096)]
    job = BuildJob(nodes=None, engine="sequoia", profile=LatencyProfile.from_points(seconds))
    rng = np.random.default_rng(0)
    varied = make_calibration([rng.integers(0, 18, (60 + s, 5)) for s in range(5)])
    assert run_job(varied, job).tree.nodes == 2048


def test_figure_of_deeper_trees_is_not_that_of_the_tree(tmp_path: Path) -> None:
    """Trees that are fitted without a text may be deeper than the whole one, whose file must be readable."""
    long = [[0, 0], [1, 0], [99, 99]] * 300
    long[8], long[20], long[50] = [0, 99], [0, 99], [0, 99]
    short = [np.array([[0, 0], [99, 0], [99, 0]] * (4 + s)) for s in range(4)]
    calibration = make_calibration([*short, np.array(long)])
    tree = build_tree(calibration, 3, values="independent", weights="uniform")
    save_tree(tree, tmp_path / "t.yaml")
    assert load_tree(tmp_path / "t.yaml") == tree
    assert tree.depth == 1
    by_paths = build_tree(calibration, path_tokens=np.int64(4))  # type: ignore[call-overload]
    save_tree(by_paths, tmp_path / "p.yaml")
