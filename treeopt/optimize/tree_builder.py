"""`build_tree`: the best tree of a calibration, with its source and expected tokens per step."""

import dataclasses
from typing import Any

import numpy as np

from treeopt.calibration import Calibration
from treeopt.defaults import DEFAULT_TOP_K, DEFAULT_VALUES, DEFAULT_WEIGHTS, MAX_NODES
from treeopt.errors import Code, TreeoptError, check_counts
from treeopt.files.strict_yaml import MAX_BYTES
from treeopt.optimize.intervals import by_text, prediction_interval
from treeopt.optimize.replay import TextSums
from treeopt.optimize.select_method import Fitter, Limits, Method, MethodFit, candidates
from treeopt.tree import Expected, Tree
from treeopt.version import VERSION

_HEADER_BYTES = 1 << 16  # of a tree file, at most


def build_tree(
    calibration: Calibration,
    nodes: int | None = None,
    *,
    path_tokens: int | None = None,
    top_k: int = DEFAULT_TOP_K,
    max_depth: int | None = None,
    max_rank: int | None = None,
    values: str = DEFAULT_VALUES,
    weights: str = DEFAULT_WEIGHTS,
) -> Tree:
    """The tree with the most tokens per step under a budget of nodes, or of path tokens.

    With `values="independent", weights="uniform"` it is the Medusa tree. Otherwise these methods and the Medusa tree
    are compared by cross-validation, and the best is built; from fewer than five different texts, the Medusa tree.

    Args:
        calibration: the rank traces.
        nodes: the budget, root counted; the tree is smaller where no further node has a value above 0.
        path_tokens: the budget, in place of nodes, for models that verify the paths of a tree as a batch:
            leaves * (depth + 1), at least 2.
        top_k: K, the ranks of each head that are considered.
        max_depth: the length of the longest path; the number of heads where None.
        max_rank: the largest rank of a path (9 for engines that draft ten tokens a head).
        values: `independent` (products of accuracies) or `joint` (how often this path was right).
        weights: `uniform` (every position alike) or `visits` (where steps begin).

    Returns:
        The tree with its values, expected tokens per step and source.

    Raises:
        ValueError: where a number is not whole or out of range, or a name unknown.
    """
    if (nodes is None) == (path_tokens is None):
        raise ValueError("nodes or path_tokens must be given, and not both")
    given: dict[str, Any] = {"top_k": top_k, "max_depth": max_depth, "max_rank": max_rank, "path_tokens": path_tokens}
    fitter = Fitter(calibration, tree_limits(calibration, nodes, **given))
    return describe(fitter, fitter.choose(candidates(values, weights)))


def budget_of(size: int, *, path_tokens: bool) -> dict[str, Any]:
    """A size as the budget of `tree_limits` or a job."""
    return {"nodes": None, "path_tokens": size} if path_tokens else {"nodes": size}


def tree_limits(
    calibration: Calibration,
    nodes: int | None,
    *,
    top_k: int = DEFAULT_TOP_K,
    max_depth: int | None = None,
    max_rank: int | None = None,
    contiguous: int = 0,
    path_tokens: int | None = None,
) -> Limits:
    """The limits of a tree; ValueError where a number is out of range. `nodes` is None with `path_tokens`."""
    if path_tokens is not None:
        check_counts(2, path_tokens=path_tokens)
        nodes = path_tokens
    assert nodes is not None
    check_counts(nodes=nodes, top_k=top_k)
    limits = {"max_rank": max_rank, "max_depth": max_depth}
    check_counts(0, **{name: limit for name, limit in limits.items() if limit is not None})
    ranks = min(top_k, calibration.top_k, top_k if max_rank is None else max_rank + 1)
    return Limits(int(nodes), int(ranks), max_depth, contiguous, path_tokens and int(path_tokens))  # not of numpy


def check_size(limits: Limits, levels: int, option: str) -> None:
    """Raise E204 where the limits allow a tree with more nodes or bytes than a file may have."""
    deepest = levels if limits.max_depth is None else min(levels, limits.max_depth)
    nodes = min(limits.nodes, sum(limits.top_k**depth for depth in range(deepest + 1)))
    line = len("- {path: [], value: 1.23456e-100}\n") + deepest * len(f"{limits.top_k}, ")
    most = min(MAX_NODES, (MAX_BYTES - _HEADER_BYTES) // line)
    if nodes > most:
        what = f"a tree of {nodes:,} nodes is too large for a file"
        why = f"tree files have {MAX_BYTES:,} bytes at most: {most:,} nodes, {deepest} levels deep"
        fix = f"{option} {most} or fewer"
        raise TreeoptError(Code.FILE_UNWRITABLE, what, at=f"{option} {limits.nodes}", why=why, fix=fix)


def describe(fitter: Fitter, fit: MethodFit, *, engine: str = "") -> Tree:
    """The fitted tree with its expected tokens per step and its source; an `engine` is added to its method."""
    method = method_of(fit.method, fitter.limits) | ({"engine": engine} if engine else {})
    return described(fitter, fit.tree, fit.sums, method=method)


def described(fitter: Fitter, tree: Tree, sums: TextSums | None, **source: Any) -> Tree:
    """A tree with its expected tokens per step and its source; `sums` are those of texts left out of the fit."""
    calibration, limits = fitter.calibration, fitter.limits
    replayed = fitter.sums(tree).tokens_per_step
    accuracy = fitter.accuracy()
    independent = 1.0 + sum(float(np.prod([accuracy[h, rank] for h, rank in enumerate(path)])) for path in tree.paths)
    expected = Expected(rounded(independent), rounded(replayed), limits.top_k)
    if sums is not None and sums.tokens_per_step <= 1.0 + tree.depth:  # the trees of other texts may be deeper
        ends = predicted_ends(calibration, sums, tree.depth)
        expected = dataclasses.replace(expected, cross_validated=rounded(sums.tokens_per_step), **ends)
    origin = source_of(calibration, **source)
    return dataclasses.replace(tree, drafter=calibration.provenance.drafter_id, expected=expected, source=origin)


def predicted_ends(calibration: Calibration, sums: TextSums, depth: int) -> dict[str, Any]:
    """The ends, `low` and `high`, of the interval of tokens per step on as many new texts; none of too few texts."""
    interval = prediction_interval(*by_text(calibration.clusters, *sums.columns))
    if interval is None:
        return {}
    return {"low": rounded(max(interval.low, 1.0)), "high": rounded(min(interval.high, 1.0 + depth))}  # a step's bounds


def source_of(calibration: Calibration, **more: Any) -> dict[str, Any]:
    """The source of a tree or policy; `more` stands before the calibration."""
    provenance = calibration.provenance
    dtype = provenance.settings.get("dtype")
    traces = {
        "model": provenance.model,
        "model_id": provenance.model_id,
        **({} if dtype is None else {"dtype": str(dtype)}),
        "heads": provenance.heads,
        "heads_id": provenance.heads_id,
        "prompts": ", ".join(provenance.prompts.values()),
        "sequences": calibration.sequences,
        "positions": calibration.positions,
        **({"temperature": f"{calibration.temperature:g}"} if calibration.temperature else {}),
    }
    drafter = {"drafter": provenance.drafter} if provenance.drafter else {}
    return {"made_by": f"treeopt {VERSION}", **more, "calibration": traces, **drafter}


def method_of(method: Method, limits: Limits) -> dict[str, str | int]:
    """The `method` entry of a tree's source."""
    parts: dict[str, str | int] = {"values": method.values, "weights": method.weights}
    if method.strength:
        parts["strength"] = int(method.strength)
    if limits.contiguous:
        parts["contiguous"] = "level 1" if limits.contiguous == 1 else "all levels"
    budget = {"budget": limits.nodes} if limits.path_tokens is None else {"path_tokens": limits.path_tokens}
    return {**parts, **budget, "top_k": limits.top_k}


def rounded(value: float) -> float:
    """The figure to seven significant digits, as in a file."""
    return float(f"{value:.7g}")
