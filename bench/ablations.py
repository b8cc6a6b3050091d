"""The ablations of the Medusa paper (arXiv:2401.10774) on any model, as tables and pictures: docs/develop/ablations.md.

    python bench/ablations.py dense --calibration C.safetensors [--trees 500] [--profile P.yaml] [-o dense.svg]
    python bench/ablations.py levels --calibration C.safetensors [-o levels.svg]
    python bench/ablations.py sizes --calibration A.safetensors --calibration B.safetensors [-o sizes.svg]
    python bench/ablations.py prompts --calibration C.safetensors [--draws 5] [-o prompts.svg]
    python bench/ablations.py epsilon --heads H --tree T.yaml --prompts P [--skip N --limit N] [-o epsilon.svg]

`dense` is figure 4 (random dense trees against optimised sparse ones), `levels` section 2.2.3 (how many heads), `sizes`
section 2.3.3 (node budgets, of several drafters on the same texts), `prompts` how many prompts a calibration needs, and
`epsilon` figure 5 (typical acceptance). All but `epsilon` replay traces; trees are judged on texts that were left out
of their fit. Intervals are 90 %. The best dense tree is chosen on the texts that it is judged on.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from intervals import ratio_interval
from numpy.typing import NDArray
from timing import add_tiny, machine

from treeopt.calibration import Calibration
from treeopt.decode.rules import Typical
from treeopt.defaults import DEFAULT_TOP_K, DEFAULT_VALUES, DEFAULT_WEIGHTS, STEP_SIZES
from treeopt.evaluate.baselines import GENERATE, TREE
from treeopt.evaluate.validate import SAMPLED, make_inputs, validate
from treeopt.files.calibrations import load_calibration
from treeopt.files.profiles import load_profile
from treeopt.optimize.curve import Timing, default_sizes
from treeopt.optimize.intervals import Interval, by_text, difference_interval, sampling_interval
from treeopt.optimize.per_step import replay_plan, sums_by_size
from treeopt.optimize.replay import TextSums, TraceRows
from treeopt.optimize.select_method import FOLDS, MEDUSA, Fitter, Method, candidates
from treeopt.optimize.tree_builder import tree_limits
from treeopt.schedule import Schedule
from treeopt.texts.prompts import load_prompts
from treeopt.tree import Tree
from treeopt.view.charts import Panel, Series, render_chart

BAND = "_90 % interval"  # of charts, not in their legends
Widths = tuple[int, ...]  # s_1, s_2, ... candidates of each level of a dense tree
Masks = NDArray[np.bool_]

LARGEST_DENSE = 256  # nodes of the paper's largest dense trees, root counted
SPARSE = 64  # nodes of the sparse tree that the paper compares with all of them
LEVELS_SIZES = (16, 64, 256)
SIZES = (2, 4, 8, 16, 32, 64, 128)
EPSILONS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.09, 0.12, 0.16, 0.2, 0.25)  # over the range of figure 5
TEMPERATURE = 0.7  # of figure 5
ENOUGH = 0.01  # of tokens per step: less is no loss
FEWEST = 10  # prompts of the smallest calibration
TOKENS = "tokens per step"
HEADINGS = {
    "dense": "Random dense trees, and sparse trees of treeopt",
    "levels": "How many levels a tree needs",
    "sizes": "Trees of each drafter by size",
    "prompts": "How many prompts a calibration needs",
    "epsilon": "Typical acceptance by epsilon",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("dense", "levels", "sizes", "prompts", "epsilon"))
    parser.add_argument("--calibration", action="append", help="traces; several for sizes")
    parser.add_argument("--trees", type=int, default=500, help="random dense trees; 0: all")
    parser.add_argument("--profile", help="seconds per step, for the speedup of dense and sparse trees")
    parser.add_argument("--draws", type=int, default=5, help="random splits of the texts")
    parser.add_argument("--heads", default="pocket")
    parser.add_argument("--tree")
    parser.add_argument("--prompts", default="pocket")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--limit", type=int)
    parser.add_argument("-o", "--output", help="the picture, an SVG")
    add_tiny(parser)
    given = parser.parse_args()
    print(machine(1))
    panels = {"dense": dense, "levels": levels, "sizes": sizes, "prompts": prompts, "epsilon": epsilon}[given.what](
        given
    )
    if given.output:
        Path(given.output).write_text(render_chart(panels, HEADINGS[given.what], note=_note(given)))


def _note(given: argparse.Namespace) -> str:
    """The models and texts of a picture."""
    if not given.calibration:
        return f"{Path(given.heads).name}: prompts of {Path(given.prompts).name}, temperature {TEMPERATURE}"
    found = [(Path(name).stem, load_calibration(name)) for name in given.calibration]
    return "\n".join(
        f"{name}: {Path(one.provenance.model).name}, {one.distinct} texts, {one.positions:,} positions replayed"
        for name, one in found
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows as Markdown."""
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


def ends(interval: Interval | None, *, percent: bool = False) -> str:
    if interval is None:
        return "-"
    return " to ".join(f"{end:.2%}" if percent else f"{end:.3f}" for end in (interval.low, interval.high))


def named(method: Method) -> str:
    return "Medusa tree" if method == MEDUSA else str(method)


def best_method(fitter: Fitter) -> Method:
    """The method that `build` would choose, without improving trees one by one."""
    return fitter.choose(candidates(DEFAULT_VALUES, DEFAULT_WEIGHTS)).method


def texts_of(calibration: Calibration, sums: TextSums) -> tuple[NDArray[Any], NDArray[Any]]:
    """Tokens and steps of each different text."""
    tokens, steps = by_text(calibration.token_hashes, sums.tokens, sums.steps)
    return tokens, steps


# Figure 4: dense trees, the Cartesian product of the s_k likeliest candidates of each level (section 2.1.2).


def dense_widths(depth: int, ranks: int, largest: int) -> list[Widths]:
    """The widths of all dense trees with 2 to `largest` nodes (root counted), by nodes, then by widths."""
    found: list[tuple[int, Widths]] = []
    level: list[tuple[Widths, int, int]] = [((), 1, 1)]  # widths, leaves, nodes
    for _ in range(depth):
        level = [
            ((*widths, width), leaves * width, nodes + leaves * width)
            for widths, leaves, nodes in level
            for width in range(1, min(ranks, (largest - nodes) // leaves) + 1)
        ]
        found += [(nodes, widths) for widths, _, nodes in level]
    return [widths for _, widths in sorted(found)]


def dense_tree(widths: Widths, drafter: str = "") -> Tree:
    paths = [itertools.product(*map(range, widths[:depth])) for depth in range(1, len(widths) + 1)]
    return Tree(tuple(itertools.chain.from_iterable(paths)), drafter=drafter)


def dense_nodes(widths: Widths) -> int:
    return 1 + sum(itertools.accumulate(widths, int.__mul__))


def dense(given: argparse.Namespace) -> list[Panel]:
    calibration, largest = load_calibration(given.calibration[0]), 40 if given.tiny else LARGEST_DENSE
    timing = Timing(load_profile(given.profile), 1, None) if given.profile else None
    compared = min(SPARSE, largest)
    limits = tree_limits(calibration, largest, top_k=DEFAULT_TOP_K)
    fitter, rows = Fitter(calibration, limits), TraceRows.of(calibration)
    possible = dense_widths(calibration.num_heads, limits.top_k, largest)
    widths, trees = possible, min(given.trees, 5) if given.tiny else given.trees
    if 0 < trees < len(possible):
        chosen = np.random.default_rng(0).choice(len(possible), trees, replace=False)
        widths = [possible[i] for i in np.sort(chosen).tolist()]
    replays = {one: rows.replay(dense_tree(one)).sums for one in widths}
    of_dense = {one: sums.tokens_per_step for one, sums in replays.items()}
    shown = sorted({*default_sizes(largest), compared})
    needed = sorted({*shown, *map(dense_nodes, widths)})
    sparse = {
        one: dict(zip(needed, fitter.cross_validated_sums(one, needed), strict=True))
        for one in dict.fromkeys([MEDUSA, best_method(fitter)])
    }
    print(f"{len(widths)} of the {len(possible):,} dense trees of at most {largest} nodes")
    _dense_table(shown, of_dense, sparse, timing)
    best = max(of_dense, key=lambda one: of_dense[one])
    other = texts_of(calibration, replays[best])
    for method, sums in sparse.items():
        tau, own = sums[compared].tokens_per_step, texts_of(calibration, sums[compared])
        beaten = sum(one < tau for one in of_dense.values())
        difference = ends(difference_interval(own[0], own[1], other[1], other[0]))
        print(
            f"sparse tree of {compared} nodes ({named(method)}, {tau:.3f}): beats {beaten} of {len(widths)}; the best "
            f"has {of_dense[best]:.3f} ({'x'.join(map(str, best))}, {dense_nodes(best)} nodes); difference {difference}"
        )
    return _dense_panels(shown, of_dense, sparse, timing)


def _speed(nodes: int, tau: float, timing: Timing) -> float:
    return tau * timing.seconds(1) / timing.seconds(nodes)


def _dense_table(
    shown: Sequence[int],
    of_dense: dict[Widths, float],
    sparse: dict[Method, dict[int, TextSums]],
    timing: Timing | None,
) -> None:
    rows = []
    for nodes in shown:
        smaller = {one: tau for one, tau in of_dense.items() if dense_nodes(one) <= nodes}
        best = max(smaller, key=lambda one: smaller[one], default=())
        line = [str(nodes), f"{smaller[best]:.3f} ({'x'.join(map(str, best))})" if best else "-"]
        for sums in sparse.values():
            tau = sums[nodes].tokens_per_step
            line.append(f"{tau:.3f}" + ("" if timing is None else f" (speedup {_speed(nodes, tau, timing):.2f})"))
        rows.append(line)
    table(["nodes", "best dense tree of at most as many (widths)", *map(named, sparse)], rows)


def _dense_panels(
    shown: Sequence[int],
    of_dense: dict[Widths, float],
    sparse: dict[Method, dict[int, TextSums]],
    timing: Timing | None,
) -> list[Panel]:
    """Figure 4a and, with a profile, 4b."""

    def panel(label: str, figure: Callable[[int, float], float]) -> Panel:
        dots = [figure(dense_nodes(one), tau) for one, tau in of_dense.items()]
        series = [Series("dense trees", [dense_nodes(one) for one in of_dense], dots, dots=True)]
        for method, sums in sparse.items():
            lines = [figure(nodes, sums[nodes].tokens_per_step) for nodes in shown]
            series.append(Series(f"sparse: {named(method)}", list(shown), lines))
        return Panel("nodes", label, series, log2=True)

    panels = [panel(TOKENS, lambda _nodes, tau: tau)]
    if timing is not None:
        panels.append(panel("speedup over autoregressive", lambda nodes, tau: _speed(nodes, tau, timing)))
    return panels


def levels(given: argparse.Namespace) -> list[Panel]:
    """Trees on the first 1, 2, ... levels, by the method that is chosen with all levels."""
    calibration, rows, lines = load_calibration(given.calibration[0]), [], []
    for nodes in LEVELS_SIZES[:1] if given.tiny else LEVELS_SIZES:
        limits = tree_limits(calibration, nodes, top_k=DEFAULT_TOP_K)
        fit = Fitter(calibration, limits).choose(candidates(DEFAULT_VALUES, DEFAULT_WEIGHTS))
        assert fit.sums is not None
        whole, enough, points = texts_of(calibration, fit.sums), [], []
        for count in range(1, calibration.num_heads + 1):
            limited = Fitter(calibration, dataclasses.replace(limits, max_depth=count))
            tree = limited.build(fit.method).tree()
            [sums] = limited.cross_validated_sums(fit.method, [nodes])
            own, tau = texts_of(calibration, sums), sums.tokens_per_step
            share, interval = tau / fit.sums.tokens_per_step, ratio_interval(*own, *whole)
            if (share if interval is None else interval.low) > 1 - ENOUGH:
                enough.append(count)
            points.append((tau, sampling_interval(*own)))
            shown = (f"{tau:.3f}", ends(points[-1][1]), f"{share:.1%}", ends(interval, percent=True))
            rows.append((nodes, count, tree.nodes, *shown))
        print(
            f"{nodes} nodes: {enough[0]} of {calibration.num_heads} levels lose less than {ENOUGH:.0%} ({fit.method})"
        )
        taus, intervals = zip(*points, strict=True)
        lines.append(Series(f"{nodes} nodes", range(1, calibration.num_heads + 1), taus, {BAND: intervals}))
    table(["nodes", "levels", "used nodes", TOKENS, "90 %", "of all levels", "90 %"], rows)
    return [Panel("levels", TOKENS, lines)]


def common_texts(calibrations: Sequence[Calibration]) -> list[Calibration]:
    """The sequences that all calibrations hold, by prompt ids and tokens."""
    keys = [
        {key: i for i, key in enumerate(zip(one.prompt_ids, one.token_hashes, strict=True))} for one in calibrations
    ]
    common = sorted(set.intersection(*map(set, keys)))
    return [one.select(sorted(rows[key] for key in common)) for one, rows in zip(calibrations, keys, strict=True)]


def sizes(given: argparse.Namespace) -> list[Panel]:
    """The independent, the best static and the per-step trees of each calibration, by nodes, over the Medusa tree."""
    names = [Path(name).stem for name in given.calibration]
    calibrations = common_texts([load_calibration(name) for name in given.calibration])
    medusa = next((i for i, one in enumerate(calibrations) if not one.provenance.drafter_id), 0)
    print(f"{calibrations[0].distinct} different texts; the Medusa tree is that of {names[medusa]}")
    rows: list[tuple[object, ...]] = []
    lines: dict[str, list[tuple[int, float, Interval | None, float, Interval | None]]] = {}
    for nodes in SIZES[:2] if given.tiny else SIZES:
        found = [_trees_of_size(one, nodes) for one in calibrations]
        other = texts_of(calibrations[medusa], next(iter(found[medusa].values())))
        for name, calibration, trees in zip(names, calibrations, found, strict=True):
            for kind, sums in trees.items():
                own, tau = texts_of(calibration, sums), sums.tokens_per_step
                ratio = float((own[0].sum() / own[1].sum()) / (other[0].sum() / other[1].sum()))
                known, paired = sampling_interval(*own), ratio_interval(*own, *other)
                lines.setdefault(f"{kind}, {name}", []).append((nodes, tau, known, ratio, paired))
                rows.append((nodes, f"{kind}, {name}", f"{tau:.3f}", ends(known), f"{ratio:.3f}", ends(paired)))
    table(["nodes", "trees", TOKENS, "90 %", "of the Medusa tree", "90 %"], rows)
    panels = []
    for label, ratios in ((TOKENS, False), ("tokens per step / Medusa tree", True)):
        series = [
            Series(
                name,
                [one[0] for one in of],
                [one[3] if ratios else one[1] for one in of],
                {BAND: [one[4] if ratios else one[2] for one in of]},
            )
            for name, of in lines.items()
        ]
        panels.append(Panel("nodes", label, series, log2=True))
    return panels


def _trees_of_size(calibration: Calibration, nodes: int) -> dict[str, TextSums]:
    """For each kind of trees, cross-validated tokens and steps of each text."""
    fitter = Fitter(calibration, tree_limits(calibration, nodes, top_k=DEFAULT_TOP_K))
    fit = fitter.choose(candidates(DEFAULT_VALUES, DEFAULT_WEIGHTS))
    assert fit.sums is not None
    [medusa] = fitter.cross_validated_sums(MEDUSA, [nodes])
    found = {"independent tree": medusa, "best static tree": fit.sums}
    if calibration.steps is not None and nodes <= STEP_SIZES[-1]:
        found["per-step trees"] = sums_by_size(calibration, nodes)
    return found


# How many prompts: in each draw every fifth of the texts is judged by trees from the first n of the others.


def prompts(given: argparse.Namespace) -> list[Panel]:
    calibration, draws = load_calibration(given.calibration[0]), 1 if given.tiny else given.draws
    first = {calibration.token_hashes[s]: s for s in np.flatnonzero(np.diff(calibration.offsets))[::-1].tolist()}
    different = calibration.select(sorted(first.values()))
    fitter = Fitter(different, tree_limits(different, 8 if given.tiny else SPARSE, top_k=DEFAULT_TOP_K))
    fitted = different.sequences - -(-different.sequences // FOLDS)  # those left where the largest fifth is judged
    series = (FEWEST * factor * 10**power for power in range(6) for factor in (1, 2, 5))
    counts = [*(count for count in series if count <= 0.8 * fitted), fitted]
    rng = np.random.default_rng(0)
    shuffles = [rng.permutation(different.sequences) for _ in range(draws)]
    methods = list(dict.fromkeys([MEDUSA, best_method(fitter)]))
    rows, lines = [], []
    for method in methods:
        sums = {count: [_judged(fitter, method, order, count) for order in shuffles] for count in counts}
        points = [_lost(sums[count], sums[fitted]) for count in counts]
        lost = [100 * one[1] for one in points]
        known = [None if one[2] is None else Interval(100 * one[2].low, 100 * one[2].high) for one in points]
        lines.append(Series(named(method), counts, lost, {BAND: known}))
        for count, (tau, share, interval, worst) in zip(counts, points, strict=True):
            rows.append(
                (count, named(method), f"{tau:.3f}", f"{share:.2%}", ends(interval, percent=True), f"{worst:.2%}")
            )
        fine = [one[2] is not None and one[2].high < ENOUGH for one in points]
        enough = next((n for i, n in enumerate(counts) if all(fine[i:])), fitted)
        print(f"{named(method)}: {enough} of {fitted} prompts lose less than {ENOUGH:.0%}")
    table(["prompts", "trees", TOKENS, "lost", "90 %", "worst draw"], rows)
    return [Panel("prompts of the calibration", "tokens per step lost, %", lines, log2=True)]


def _judged(fitter: Fitter, method: Method, order: NDArray[np.int64], count: int) -> TextSums:
    """Tokens and steps of every text in one draw, of trees from `count` of the texts that are not in its fifth."""
    parts, sums = np.empty(len(order), np.int64), []
    parts[order] = np.arange(len(order)) % FOLDS
    for part in range(FOLDS):
        fitted: Masks = np.zeros(len(order), np.bool_)
        fitted[order[parts[order] != part][:count]] = True
        growth = fitter.build(method, fitted)
        sums.append(TraceRows.of(fitter.calibration, parts == part).replay(growth).sums)
    return TextSums.of_folds(parts, sums)


def _lost(sums: Sequence[TextSums], whole: Sequence[TextSums]) -> tuple[float, float, Interval | None, float]:
    """Tokens per step, the share lost against trees from all other texts, its interval, and that of the worst draw."""
    stacked = [np.stack([getattr(one, name) for one in each]) for each in (sums, whole) for name in ("tokens", "steps")]
    tokens, steps, all_tokens, all_steps = (float(each.sum()) for each in stacked)
    ratio = ratio_interval(*stacked)
    interval = None if ratio is None else Interval(1 - ratio.high, 1 - ratio.low, ratio.level)
    worst = max(1 - one.tokens_per_step / all_.tokens_per_step for one, all_ in zip(sums, whole, strict=True))
    return tokens / steps, 1 - (tokens / steps) / (all_tokens / all_steps), interval, worst


def epsilon(given: argparse.Namespace) -> list[Panel]:
    """Figure 5: typical acceptance with delta = sqrt(epsilon), beside greedy and sampled texts."""
    tree = given.tree or [[0], [1], [0, 0]]
    chosen: dict[str, Any] = {"max_new_tokens": 8 if given.tiny else 128}
    texts = load_prompts(given.prompts, skip=given.skip, limit=2 if given.tiny else given.limit)
    epsilons = EPSILONS[-2:] if given.tiny else EPSILONS
    lines: dict[str, tuple[float, Interval | None, Any]] = {}
    for one in epsilons:
        rule = Typical(TEMPERATURE, one, math.sqrt(one))
        found = validate(given.heads, given.heads, tree, texts, acceptance=rule, **chosen)
        sums = np.array([[trial.tokens, trial.steps] for trial in found.metrics.trials], np.int64).T
        interval = sampling_interval(*by_text([trial.text.prompt_id for trial in found.metrics.trials], *sums))
        lines[f"typical, epsilon {one:g}"] = (found.tokens_per_step, interval, found.quality[TREE])
    inputs, _ = make_inputs(given.heads, given.heads, tree, texts, None, None, chosen)
    for name, label in ((GENERATE, "greedy"), (SAMPLED, "sampled")):  # exact acceptance decodes these texts
        pairs = zip(found.texts, found.metrics.trials, strict=True)
        answered = [dataclasses.replace(text, answer=trial.runs[name][0].tokens) for text, trial in pairs]
        traces = inputs.traces(answered)
        assert not isinstance(inputs.tree, Schedule)
        replays = replay_plan(inputs.tree, traces).sums
        interval = sampling_interval(*by_text(traces.prompt_ids, replays.tokens, replays.steps))
        lines[label] = (replays.tokens_per_step, interval, found.quality[name])
    header = ["texts", f"{TOKENS} (90 %)", "log-likelihood a token", "distinct-1", "distinct-2", "distinct-3"]
    rows = [
        (
            *(name, f"{tau:.3f} ({ends(known)})", f"{one.log_likelihood:.4f}"),
            *(*(f"{share:.4f}" for share in one.distinct), f"{one.agreement:.1%}"),
        )
        for name, (tau, known, one) in lines.items()
    ]
    table([*header, "agreement with greedy"], rows)
    taus = Series("typical", epsilons, [lines[f"typical, epsilon {one:g}"][0] for one in epsilons])
    dashed = [
        Series(name, [epsilons[0], epsilons[-1]], [lines[name][0]] * 2, dashed=True) for name in ("greedy", "sampled")
    ]
    return [Panel("epsilon", TOKENS, [taus, *dashed])]


if __name__ == "__main__":
    main()
