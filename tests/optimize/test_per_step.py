"""Policies: replay equals a naive loop, size_cost is at least as fast as any fixed size, other traces are refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import make_calibration, random_tree
from looped import looped
from per_step_traces import naive, profile_of, traced
from refusals import refusal_of

from treeopt.calibration import Calibration
from treeopt.defaults import STEP_SIZES
from treeopt.errors import Code, TreeoptError
from treeopt.latency import LatencyPoint, LatencyProfile
from treeopt.optimize.budget import step_seconds
from treeopt.optimize.curve import Timing, policy_curve
from treeopt.optimize.per_step import build_policy, fastest_policy, policy_budget, replay_policy, sizes_of, sums_by_size
from treeopt.optimize.replay import replay
from treeopt.policy import TreePolicy
from treeopt.traces import MISS, NONE, StepTraces


@looped("seed", range(6))
@looped("size_cost", [(), ((1, 0.2), (8, 0.5), (32, 1.1)), ((2, 0.3), (32, 0.9))])
def test_replay_is_a_naive_loop(seed: int, size_cost: tuple[tuple[int, float], ...]) -> None:
    """Steps of each text, and the size of each step, are those of a loop over positions."""
    calibration = traced(seed)
    policy = TreePolicy(32, 3, "d1", size_cost)
    steps, sizes = naive(policy, calibration)
    found = replay_policy(policy, calibration)
    assert found.sums.steps.tolist() == steps
    assert found.steps == sum(steps)
    assert calibration.steps is not None
    assert sizes_of(policy, calibration.steps)[found.visited].tolist() == sizes


@looped("depth", [3, 4, 9])
@looped("size_cost", [(), ((2, 0.3), (32, 0.9))])
def test_replay_ends_at_the_depth_of_the_policy(depth: int, size_cost: tuple[tuple[int, float], ...]) -> None:
    """No step accepts more drafts than the policy is deep, nor more than there are levels in the traces."""
    calibration = traced(11, exact=True)
    policy = TreePolicy(32, depth, "d1", size_cost)
    found = replay_policy(policy, calibration)
    assert found.sums.steps.tolist() == naive(policy, calibration)[0]
    assert found.depth == min(depth, 3)
    assert found.accepted[found.visited].max() == min(depth, 3)


@looped("depth", [1, 2])
def test_a_policy_above_the_depth_of_the_traces(depth: int) -> None:
    """Nodes below its depth would have other places in its own trees: refused, unless there are none."""
    calibration = traced(11, exact=True)
    policy = TreePolicy(32, depth, "d1")
    assert refusal_of(replay_policy, policy, calibration).code is Code.CALIBRATION_INVALID
    assert calibration.steps is not None
    nodes = calibration.steps.node_rank.copy()
    nodes[:, depth:] = np.where(nodes[:, depth:] == NONE, NONE, MISS)
    own = dataclasses.replace(calibration, target=None, steps=dataclasses.replace(calibration.steps, node_rank=nodes))
    assert replay_policy(policy, own).sums.steps.tolist() == naive(policy, own)[0]


@looped("seed", range(4))
def test_size_of_each_step_is_that_of_the_most_tokens_above_the_cost(seed: int) -> None:
    """Every position takes what a loop over the costs finds, the smallest of equal ones; the costs lie far apart."""
    calibration = traced(seed)
    assert calibration.steps is not None
    for size_cost in (((1, 0.0), (254, 2.0)), ((4, 0.1), (6, 0.1), (192, 0.7), (254, 0.7)), ((3, 0.0), (8, 0.0))):
        wanted = []
        for expected_tokens in calibration.steps.expected_tokens.astype(float):
            gains = [expected_tokens[STEP_SIZES.index(size)] - cost for size, cost in size_cost]
            wanted.append(size_cost[gains.index(max(gains))][0])
        policy = TreePolicy(size_cost[-1][0], 3, "d1", size_cost)
        assert sizes_of(policy, calibration.steps).tolist() == wanted


@looped("nodes", [2, 3, 17, 254])
def test_replay_of_every_size(nodes: int) -> None:
    """Sizes between those whose expected tokens were traced replay exactly too; the curve holds the same steps."""
    calibration = traced(7)
    steps, _ = naive(TreePolicy(nodes, 3, "d1"), calibration)
    assert sums_by_size(calibration, nodes).steps.tolist() == steps
    [alone, point] = policy_curve(calibration, [1, nodes]).points
    assert alone.tokens_per_step == 1.0
    assert point.tokens_per_step == calibration.positions / sum(steps)


def test_place_equal_to_the_size_is_outside() -> None:
    """The root is node 0, so a tree of n nodes holds places 0 to n - 1."""
    made = make_calibration([np.zeros((3, 1), int)])
    steps = StepTraces(
        np.array([[4], [4], [NONE]], np.uint8), np.ones((3, len(STEP_SIZES)), np.float32), np.ones((3, 1), np.float16)
    )
    provenance = dataclasses.replace(made.provenance, drafter_id="d1")
    calibration = dataclasses.replace(made, steps=steps, provenance=provenance)
    assert replay_policy(TreePolicy(4, 1, "d1"), calibration).steps == 3
    assert replay_policy(TreePolicy(5, 1, "d1"), calibration).steps == 2


@looped("seed", range(8))
def test_expected_figures(seed: int) -> None:
    """Tokens per step, estimate and mean size are those of the steps that begin."""
    calibration = traced(seed)
    policy = build_policy(calibration, 24)
    steps, _ = naive(policy, calibration)
    assert policy.expected is not None
    assert calibration.steps is not None
    assert (policy.nodes, policy.depth, policy.drafter, policy.size_cost) == (24, 3, "d1", ())
    assert policy.expected.replay == pytest.approx(calibration.positions / sum(steps), rel=1e-6)
    assert policy.expected.nodes == 24
    visited = replay_policy(policy, calibration).visited
    expected_tokens = calibration.steps.expected_tokens[visited, STEP_SIZES.index(24)].mean()
    assert policy.expected.estimated == pytest.approx(float(expected_tokens), rel=1e-6)
    assert policy.expected.low is not None
    assert policy.expected.high is not None
    assert policy.expected.low < policy.expected.replay < policy.expected.high
    assert policy.source["drafter"] == "d.safetensors"


SECONDS = {1: 1.0, 2: 1.05, 8: 1.2, 32: 1.9, 128: 5.0, 254: 11.0}


def rate(calibration: Calibration, policy: TreePolicy, profile: LatencyProfile) -> float:
    """Tokens a second on the traces, by the naive loop."""
    _, sizes = naive(policy, calibration)
    return calibration.positions / sum(step_seconds(profile, size) for size in sizes)


@looped("exact", [True, False])
@looped("seed", range(4))
def test_fastest_policy_against_every_size(seed: int, exact: bool) -> None:
    """With exact estimates no fixed size is faster; with any, what was expected is what the loop finds."""
    calibration, profile = traced(seed, sequences=40, exact=exact), profile_of(SECONDS)
    policy = fastest_policy(calibration, profile)
    found = rate(calibration, policy, profile)
    if exact:
        fixed = [rate(calibration, TreePolicy(size, 3, "d1"), profile) for size in STEP_SIZES[1:]]
        assert found >= max(*fixed, 1.0) * (1 - 1e-9)
        assert found > 1.1 * max(*fixed, 1.0)
        # Prices are time at the policy's own rate: no other is faster, but for the steps beginning elsewhere.
        for other in np.linspace(0.5, 2.0, 16) * found:
            size_cost = tuple((size, other * step_seconds(profile, size)) for size in STEP_SIZES[1:])
            assert rate(calibration, TreePolicy(254, 3, "d1", size_cost), profile) <= 1.02 * found
    steps, sizes = naive(policy, calibration)
    assert policy.expected is not None
    assert policy.expected.replay == pytest.approx(calibration.positions / sum(steps), rel=1e-6)
    assert policy.expected.nodes == pytest.approx(np.mean(sizes), rel=1e-6)


def test_size_is_fixed_in_a_batch() -> None:
    """Rows of a batch share one size: it is the fixed one of the most tokens a second."""
    calibration = traced(1, sequences=40, exact=True)
    points = [LatencyPoint(n, batch, 512, s, s, s) for n, s in SECONDS.items() for batch in (1, 8)]
    profile = LatencyProfile.from_points(points)
    assert fastest_policy(calibration, profile).size_cost
    found = fastest_policy(calibration, profile, batch=8)
    fixed = {size: rate(calibration, TreePolicy(size, 3, "d1"), profile_of(SECONDS)) for size in STEP_SIZES[1:]}
    assert (found.nodes, found.size_cost) == (max(fixed, key=fixed.__getitem__), ())


def dinkelbach(calibration: Calibration, profile: LatencyProfile, sizes: list[int]) -> tuple[float, int]:
    """The rate that size_cost of the best round are at, and its largest size, by twelve rounds of the naive loop."""
    value, reached, best, largest = 1 / step_seconds(profile, 1), 0.0, 0.0, 2
    for _ in range(12):
        size_cost = tuple((size, value * step_seconds(profile, size)) for size in sizes)
        _, taken = naive(TreePolicy(sizes[-1], calibration.num_heads, "d1", size_cost), calibration)
        found = calibration.positions / sum(step_seconds(profile, size) for size in taken)
        if found <= reached:
            break
        best, reached, largest = value, found, max(taken)
        value = found
    return best, largest


@looped("exact", [True, False])
@looped("seed", range(6))
@looped("seconds", [SECONDS, {1: 1.0, 2: 1.01, 254: 1.5}, {1: 0.2, 2: 1.0, 12: 1.3}, {1: 9.0, 2: 9.0, 3: 9.1}])
def test_size_cost_is_that_of_naive_rounds(seconds: dict[int, float], seed: int, exact: bool) -> None:
    """Rate, size_cost and largest size are those of Dinkelbach's rounds by the naive loop, begun at one node a step."""
    calibration, profile = traced(seed, exact=exact), profile_of(seconds)
    sizes = [size for size in STEP_SIZES if 2 <= size <= max(seconds)]
    value, largest = dinkelbach(calibration, profile, sizes)
    policy = fastest_policy(calibration, profile)
    if not policy.size_cost:  # a fixed size is faster: the estimates misled the choice
        priced = TreePolicy(
            largest, 3, "d1", tuple((n, value * step_seconds(profile, n)) for n in sizes if n <= largest)
        )
        assert rate(calibration, policy, profile) > rate(calibration, priced, profile)
        return
    assert [size for size, _ in policy.size_cost] == [size for size in sizes if size <= largest]
    assert [cost for _, cost in policy.size_cost] == pytest.approx(
        [value * step_seconds(profile, size) for size in sizes if size <= largest], rel=1e-6
    )


def drafted(seconds: dict[int, float], drafting: dict[int, float]) -> LatencyProfile:
    """A profile with the seconds of drafting."""
    points = [LatencyPoint(n, 1, 512, s, s, s, drafting.get(n)) for n, s in seconds.items()]
    return LatencyProfile.from_points(points)


@looped("seed", range(4))
@looped("share", [0.1, 0.5, 0.9])
@pytest.mark.slow
def test_drafting_is_that_of_the_largest_size(seed: int, share: float) -> None:
    """A step takes the drafting of the policy's largest size: no policy that ends at another size is faster."""
    calibration = traced(seed, sequences=40, exact=True)
    alone = {n: share * s for n, s in SECONDS.items() if n > 1}
    profile = drafted(SECONDS, alone)
    sizes = np.array(STEP_SIZES[1:])
    drafting = np.interp(sizes, list(alone), list(alone.values()))
    rest = np.array([step_seconds(profile, int(size)) for size in sizes]) - drafting

    def speed(policy: TreePolicy) -> float:
        _, taken = naive(policy, calibration)
        dear = drafting[sizes == policy.nodes][0]
        return calibration.positions / (rest[np.searchsorted(sizes, taken)] + dear).sum()

    policy = fastest_policy(calibration, profile)
    found = speed(policy)
    for end in range(1, len(sizes) + 1):
        for value in np.linspace(0.7, 1.3, 7) * found:
            costs = tuple((int(n), value * one) for n, one in zip(sizes[:end], rest[:end], strict=True))
            assert speed(TreePolicy(int(sizes[end - 1]), 3, "d1", costs)) <= found * 1.01
    if share == 0.9:
        assert found > 1.05 * speed(fastest_policy(calibration, profile_of(SECONDS)))


def test_profiles_of_other_steps_are_refused() -> None:
    """E223 for another drafter, E230 for static trees; a profile of the drafter's per-step trees is taken."""
    calibration = traced(3)
    points = profile_of(SECONDS).points
    for source, code in (
        ({"model_id": "m", "kind": "dynamic"}, Code.DRAFTER_MISMATCH),
        ({"model_id": "m", "kind": "dynamic", "drafter": "d2"}, Code.DRAFTER_MISMATCH),
        ({"model_id": "m", "kind": "static", "drafter": "d1"}, Code.PROFILE_INVALID),
    ):
        profile = LatencyProfile(points, source)
        for use in (lambda p: fastest_policy(calibration, p), lambda p: policy_curve(calibration, [1, 8], Timing(p))):
            error = refusal_of(use, profile)
            assert error.code is code
            assert "--drafter d.safetensors --kind dynamic" in error.fix
    for source in ({"model_id": "m", "drafter": "d1"}, {"kind": "dynamic", "drafter": "d1"}):
        assert fastest_policy(calibration, LatencyProfile(points, source)) == fastest_policy(
            calibration, profile_of(SECONDS)
        )


def test_the_root_alone_is_never_cheap() -> None:
    """A step that chooses its tree has paid for heads and drafter, which the profile's one node does without."""
    for seconds in ({1: 0.01, 2: 1.0, 8: 1.1}, {1: 1.0, 2: 3.0, 8: 4.0}):
        policy = fastest_policy(traced(3, exact=True), profile_of(seconds))
        assert policy.sizes[0] == 2


def test_profile_of_one_node_is_refused() -> None:
    """Without the time of a step that drafts nothing can be weighed."""
    with pytest.raises(TreeoptError, match="2 nodes") as caught:
        fastest_policy(traced(3, exact=True), profile_of({1: 1.0}))
    assert caught.value.code is Code.PROFILE_INVALID


def test_sizes_end_with_the_profile() -> None:
    """No step is larger than what was measured, however much it would bring."""
    policy = fastest_policy(traced(3, exact=True), profile_of({1: 1.0, 13: 1.0}))
    assert policy.nodes <= 12


def test_one_text_has_no_interval() -> None:
    """From one text nothing is known of others."""
    policy = build_policy(traced(0, sequences=1), 8)
    assert policy.expected is not None
    assert (policy.expected.low, policy.expected.high) == (None, None)


def test_interval_ends_where_no_step_can_be() -> None:
    """Two texts, of which one takes four tokens a step and the other one: the ends are one token and all drafts."""
    made = dataclasses.replace(make_calibration([np.zeros((40, 3), int)] * 2), token_hashes=("fast", "slow"))
    places = np.where(np.arange(80)[:, None] < 40, [[1, 2, 3]], MISS)
    node_rank = np.where(made.ranks == NONE, NONE, places).astype(np.uint8)
    steps = StepTraces(node_rank, np.ones((80, len(STEP_SIZES)), np.float32), np.ones((80, 3), np.float16))
    provenance = dataclasses.replace(made.provenance, drafter_id="d1")
    expected = build_policy(dataclasses.replace(made, steps=steps, provenance=provenance), 8).expected
    assert expected is not None
    assert expected.replay == 1.6
    assert (expected.low, expected.high) == (1.0, 4.0)


@looped("fault", ["steps", "drafter", "text"])
def test_traces_that_do_not_fit_are_refused(fault: str) -> None:
    """No traced trees, another drafter, no text: one error each."""
    calibration = traced(1)
    codes = {"steps": Code.CALIBRATION_INVALID, "drafter": Code.DRAFTER_MISMATCH, "text": Code.PROMPTS_EMPTY}
    changed = {
        "steps": dataclasses.replace(calibration, steps=None),
        "drafter": calibration,
        "text": dataclasses.replace(
            traced(1, sequences=1),
            ranks=calibration.ranks[:0],
            offsets=np.zeros(2, np.int64),
            steps=calibration.steps and calibration.steps.rows(slice(0)),
        ),
    }[fault]
    assert (
        refusal_of(replay_policy, TreePolicy(8, 3, "other" if fault == "drafter" else "d1"), changed).code
        is codes[fault]
    )


def test_static_tree_of_another_drafter_is_refused() -> None:
    """Traces with a drafter do not replay trees of the heads alone, nor the other way round."""
    calibration = traced(1)
    tree = random_tree(0, nodes=4, depth=2, ranks=2)
    replay(dataclasses.replace(tree, drafter="d1"), calibration)
    plain = dataclasses.replace(calibration, provenance=dataclasses.replace(calibration.provenance, drafter_id=""))
    for one, other in ((tree, calibration), (dataclasses.replace(tree, drafter="d1"), plain)):
        assert refusal_of(replay, one, other).code is Code.DRAFTER_MISMATCH


@looped("seed", range(4))
@looped("size_cost", [(), ((2, 0.3), (8, 0.5), (32, 1.1))])
def test_policy_budget_is_the_time_of_a_naive_loop(seed: int, size_cost: tuple[tuple[int, float], ...]) -> None:
    """Every step takes the seconds of its size, with the drafting of the policy's largest size in place of its own."""
    calibration, policy = traced(seed), TreePolicy(32, 3, "d1", size_cost)
    points = {1: (1.0, None), 2: (1.3, 0.1), 8: (1.7, 0.3), 64: (4.0, 1.1)}
    profile = LatencyProfile.from_points(
        LatencyPoint(n, 1, 512, s, s, s, drafting) for n, (s, drafting) in points.items()
    )
    steps, sizes = naive(policy, calibration)
    part = {size: float(np.interp(size, [2, 8, 64], [0.1, 0.3, 1.1])) for size in {*sizes, 32}}
    whole = sum(step_seconds(profile, size) - part[size] + part[32] for size in sizes)
    found = policy_budget(policy, calibration, profile)
    assert found.nodes == 32
    assert found.tokens_per_step == calibration.positions / sum(steps)
    assert found.tokens_per_second == pytest.approx(calibration.positions / whole)
    assert found.seconds == pytest.approx(whole / len(sizes))
    assert (found.overhead, found.speedup) == (
        pytest.approx(found.seconds),
        pytest.approx(found.tokens_per_step / found.seconds),
    )
