"""Node budgets: tokens per step by nodes for several methods and drafters, beside the Medusa tree.

The Medusa tree (independent values, uniform weights) is the method of arXiv:2401.10774, section 2.3.3 and appendix C.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from treeopt.calibration import Calibration
from treeopt.defaults import DEFAULT_VALUES, DEFAULT_WEIGHTS, SIZES_SIZES
from treeopt.errors import Code, TreeoptError
from treeopt.optimize.intervals import Interval, by_text, ratio_interval, sampling_interval
from treeopt.optimize.methods import MEDUSA, candidates
from treeopt.optimize.per_step import sums_by_size
from treeopt.optimize.select_method import FOLDS, Fitter
from treeopt.optimize.sums import TextSums
from treeopt.optimize.sweep_limits import check_folds, check_reached, check_sizes
from treeopt.optimize.tree_builder import DEFAULT_TOP_K, tree_limits
from treeopt.policy import STEP_SIZES
from treeopt.progress import Progress, silent

INDEPENDENT, STATIC, PER_STEP = "independent tree", "best static tree", "per-step trees"


@dataclass(frozen=True)
class SizePoint:
    """Trees of `nodes` nodes (root counted) of one calibration.

    Args:
        calibration: its name.
        trees: `INDEPENDENT` (the Medusa tree, where the calibration is of heads alone), `STATIC` (what `build_tree`
            builds) or `PER_STEP`.
        method: of static trees; empty for per-step trees.
        nodes: of each tree.
        tokens_per_step: static trees cross-validated; per-step trees are not fitted to the traces.
        sampling: 90 % interval of the expected tokens per step.
        ratio: tokens per step / those of the Medusa tree of as many nodes.
        ratio_interval: 90 % interval of `ratio` (paired over texts).
    """

    calibration: str
    trees: str
    method: str
    nodes: int
    tokens_per_step: float
    sampling: Interval | None
    ratio: float
    ratio_interval: Interval | None


@dataclass(frozen=True)
class SizeSweep:
    """The result of `sweep_sizes`.

    Args:
        points: by calibration in the order given, then by kind of trees, then by nodes.
        texts: different texts, which all calibrations hold.
        left_out: sequences of all calibrations that not all of them hold.
        medusa: name of the calibration whose Medusa tree is the denominator of the ratios: the first one of heads
            alone, else the first one.
    """

    points: tuple[SizePoint, ...]
    texts: int
    left_out: int
    medusa: str


def sweep_sizes(
    calibrations: Mapping[str, Calibration] | Calibration,
    *,
    sizes: Sequence[int] = SIZES_SIZES,
    top_k: int = DEFAULT_TOP_K,
    progress: Progress = silent,
) -> SizeSweep:
    """Tokens per step by nodes: the Medusa tree, the best static trees, and per-step trees where they were traced.

    Source: arXiv:2401.10774, section 2.3.3 (node budgets) and figure 4a (tokens per step by nodes).

    Args:
        calibrations: by name, of different drafters on the same texts; or one calibration.
        sizes: nodes of the trees, root counted. Per-step trees are left out above the largest traced size.
        top_k: K, the ranks of each level that are considered.
        progress: called after each size.

    Raises:
        TreeoptError: E102 where the traces hold no tree of a size; E221 where the calibrations have fewer than five
            different texts in common; E303 where the only calibration has fewer.
        ValueError: where a number is out of range, or there is no calibration.
    """
    check_sizes(sizes)
    named = {"calibration": calibrations} if isinstance(calibrations, Calibration) else dict(calibrations)
    if not named:
        raise ValueError("no calibration: give one or more")
    common = common_texts(named)
    sizes = sorted(set(sizes))
    medusa = next((name for name, one in common.items() if not one.provenance.drafter_id), next(iter(common)))
    points: dict[tuple[str, str], list[SizePoint]] = {}
    for done, nodes in enumerate(sizes, start=1):
        sums = {name: _sums(one, nodes, top_k) for name, one in common.items()}
        medusa_sums = sums[medusa][INDEPENDENT, str(MEDUSA)]
        other = by_text(common[medusa].token_hashes, medusa_sums.tokens, medusa_sums.steps)
        for name, calibration in common.items():
            for (trees, method), one in sums[name].items():
                point = _point(calibration, (name, trees, method, nodes), one, other)
                points.setdefault((name, trees), []).append(point)
        progress(done, len(sizes), f"{nodes} nodes")
    texts = next(iter(common.values()))
    left_out = sum(one.sequences for one in named.values()) - len(named) * texts.sequences
    listed = tuple(point for of_trees in points.values() for point in of_trees)
    return SizeSweep(listed, texts.distinct, left_out, medusa)


def common_texts(calibrations: Mapping[str, Calibration]) -> dict[str, Calibration]:
    """The sequences that all calibrations hold, with equal prompt ids and tokens, in the order of prompt ids.

    Raises:
        TreeoptError: E221 where fewer than five different texts are common; E303 where the only calibration has fewer.
    """
    keys = [dict(zip(_keys(one), range(one.sequences), strict=True)) for one in calibrations.values()]
    common = sorted(set.intersection(*map(set, keys)))
    if len(keys) > 1 and len({tokens for _, tokens in common}) < FOLDS:
        raise TreeoptError(
            Code.CALIBRATION_MISMATCH,
            f"the calibrations have {len(common)} texts in common, and {FOLDS} are needed",
            at="\n".join(calibrations),
            why="drafters are compared on the same texts",
            fix="treeopt calibrate each drafter with the same model, prompts and --max-new-tokens",
        )
    chosen = {
        name: one.select(sorted(rows[key] for key in common))
        for (name, one), rows in zip(calibrations.items(), keys, strict=True)
    }
    for one in chosen.values():
        check_folds(one)
    return chosen


def _keys(calibration: Calibration) -> list[tuple[str, str]]:
    return list(zip(calibration.prompt_ids, calibration.token_hashes, strict=True))


def _point(
    calibration: Calibration, key: tuple[str, str, str, int], sums: TextSums, medusa: Sequence[NDArray[Any]]
) -> SizePoint:
    """The point of a name, kind, method and size, beside tokens and steps of the Medusa tree on each text."""
    tokens, steps = by_text(calibration.token_hashes, sums.tokens, sums.steps)
    medusa_tokens, medusa_steps = medusa
    ratio = float((tokens.sum() / steps.sum()) / (medusa_tokens.sum() / medusa_steps.sum()))
    interval = ratio_interval(tokens, steps, medusa_tokens, medusa_steps)
    return SizePoint(*key, sums.tokens_per_step, sampling_interval(tokens, steps), ratio, interval)


def _sums(calibration: Calibration, nodes: int, top_k: int) -> dict[tuple[str, str], TextSums]:
    """For each kind of trees and its method, tokens and steps of each text."""
    limits = tree_limits(calibration, nodes, top_k=top_k)
    fitter = Fitter(calibration, limits)
    fit = fitter.choose(candidates(DEFAULT_VALUES, DEFAULT_WEIGHTS, refined=False))
    assert fit.sums is not None
    [(growth, _)] = fitter.build([MEDUSA])
    for one in (growth, fit.growth):
        check_reached(one, [nodes], calibration, limits)
    [medusa] = fitter.cross_validated_sums(MEDUSA, [nodes])
    found = {(INDEPENDENT, str(MEDUSA)): medusa, (STATIC, str(fit.method)): fit.sums}
    if calibration.steps is not None and nodes <= STEP_SIZES[-1]:
        found[PER_STEP, ""] = sums_by_size(calibration, nodes)
    return found
