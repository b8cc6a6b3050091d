"""A simpler case of `lossless.py` that fails as well."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from lossless_cases import CONTEXTS, DRAWN, Case, prompts_of


def shrunk(case: Case, fails: Callable[[Case], bool], *, most: int = 150) -> Case:
    """A simpler case that still fails: each change that keeps it failing is kept, until none is."""
    tried = 0
    going = True
    while going:
        going = False
        for simpler in _simpler(case):
            tried += 1
            if tried > most:
                return case
            if fails(simpler):
                case, going = simpler, True
                break
    return case


def _simpler(case: Case) -> list[Case]:
    rows = case.rows.split(",")
    fewer = [",".join(rows[:i] + rows[i + 1 :]) for i in range(len(rows)) if len(rows) > 1]
    depths = {case.depth // 2, case.depth - 1} - {0}
    wanted: list[dict[str, Any]] = [
        *({"rows": one} for one in fewer),
        *({"new": new} for new in (case.new // 2, case.new - 1)),
        *({"nodes": nodes} for nodes in (case.nodes // 2, case.nodes - 1) if nodes > case.depth),
        *({"depth": depth} for depth in sorted(depths)),
        *({"drafter": drafter} for drafter in ("none", "known") if case.drafter != "none"),
        {"plan": "static"},
        {"rule": "greedy"},
        {"via": "alone"} if case.via != "batch" else {"via": "batch"},
        {"processors": "none"},
        {"ends": 0},
        {"draft": "llama"},
        {"dtype": "float64"},
        {"attention": "eager"},
        {"context": "short"},
    ]
    if case.rule in DRAWN:
        wanted = [one for one in wanted if not one.keys() & {"rule", "drafter", "via"}]
    made = [dataclasses.replace(case, **one) for one in wanted if all(getattr(case, k) != v for k, v in one.items())]
    return [one for one in made if one.new > 0 and _fits(one)]


def _fits(case: Case) -> bool:
    if case.processors != "none" and case.via != "generate":  # only stock `generate` has them
        return False
    return max(map(len, prompts_of(case))) + case.new <= CONTEXTS[case.context]
