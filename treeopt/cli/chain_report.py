"""The output of commands about chains of a draft model: Leviathan's formulas beside replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treeopt.cli.console import Console

if TYPE_CHECKING:
    from treeopt.calibration import Calibration
    from treeopt.models.base import Base
    from treeopt.optimize.chains import ChainFigures, ChainPrediction

_SHOWN = 8  # chains of more drafts are shown only where one is the fastest


def report_acceptance(console: Console, calibration: Calibration, draft: Base | None) -> None:
    """With a draft model, print the acceptance rate, and tokens per step of chains by the formula and by replay."""
    from treeopt.optimize.chains import predict_chains

    if draft is None:
        return
    found = predict_chains(calibration, 0.0)
    console.say(f"acceptance rate alpha {found.alpha:.3f}: positions where the drafter's best token is the base's")
    chains = found.chains[:_SHOWN]
    rows = [[str(one.drafts), f"{one.tokens_per_step:.3f}", _number(one.replayed_tokens_per_step)] for one in chains]
    console.table(["chain of drafts", "tokens/step, formula", "replay"], rows)
    console.say("formula: (1 - alpha^(g+1)) / (1 - alpha) of arXiv:2211.17192, for drafts accepted independently")


def report_chains(console: Console, found: ChainPrediction, drafter: str, sampled: float | None) -> None:
    """Print acceptance rates, cost ratio, and the speedup of chains by the formula and by replay.

    `sampled` is the draft model's acceptance rate under sampling.
    """
    console.say(
        f"acceptance rate alpha {found.alpha:.3f} of drafter {drafter}, cost ratio c {found.cost:.2f}: seconds of a "
        "step of the draft model alone / of the base, here"
    )
    if sampled is not None:
        console.say(f"under sampling at temperature 1, alpha of the draft model {sampled:.3f}: mean of sum_x min(p, q)")
    rows = [
        [
            str(one.drafts),
            f"{one.tokens_per_step:.3f}",
            _number(one.replayed_tokens_per_step),
            f"{one.speedup:.2f}",
            _number(one.replayed_speedup, 2),
        ]
        for one in _shown(found)
    ]
    console.table(["chain of drafts", "tokens/step, formula", "replay", "speedup, formula", "replay"], rows)
    formula, replay = _best(found.best_drafts), _best(found.best_replayed_drafts)
    console.say(
        f"best chain: {formula} by the formula of arXiv:2211.17192, {replay} by replay; both take a step of g drafts "
        "for g c + 1 steps of the base"
    )


def chains_as_dict(found: ChainPrediction) -> dict[str, Any]:
    """The figures of `report_chains` for JSON."""
    return {
        "alpha": found.alpha,
        "cost_ratio": found.cost,
        "best_drafts": found.best_drafts,
        "best_replayed_drafts": found.best_replayed_drafts,
        "chains": [vars(one) for one in found.chains],
    }


def _shown(found: ChainPrediction) -> list[ChainFigures]:
    best = (found.best_drafts, found.best_replayed_drafts)
    return [one for one in found.chains if one.drafts <= _SHOWN or one.drafts in best]


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _best(drafts: int) -> str:
    return f"{drafts} draft{'s' if drafts > 1 else ''}" if drafts else "none"
