"""What is said of a verdict, and of a schedule."""

from collections.abc import Iterator
from typing import Any

from treeopt.defaults import CHAIN, KINDS, NODES, NONE, ONE_NODE
from treeopt.errors import counted
from treeopt.facts import Column, Fact, Part, Table, for_programs, milliseconds
from treeopt.optimize.build_report import TREES, few_texts, fitted_texts, texts_of
from treeopt.optimize.verdict import EQUAL, Setting, Verdict, Verdicts
from treeopt.policy import Plan, TreePolicy
from treeopt.schedule import Schedule

_BEST, _AS_FAST = "best", "not told apart"


def verdict_report(found: Verdicts) -> Iterator[Part]:
    """For each batch and context the fastest of each kind; for programs all that was considered."""
    yield Table(_COLUMNS, [row for one in found.verdicts for row in _rows(found, one)])
    yield (
        "tokens/step: all tokens / all steps, cross-validated for static trees; tokens/s: of the whole batch; speedup: "
        "over the profile's autoregressive step, with its 90 % interval by the sampling of texts"
    )
    yield (
        f"best: the greatest speedup, of those within {EQUAL:.1%} the simplest; {_AS_FAST}: the interval of the "
        f"difference over {texts_of(found.calibration)} contains 0"
    )
    for kind, fix in found.left_out.items():
        also = "chains and " if kind == KINDS[0] and found.verdicts[0].best_of(CHAIN) is None else ""
        yield f"left out: {also}{TREES[kind]}: {fix}"
    rows = [_data(place, one) for place in found.verdicts for one in place.settings]
    best = [_data(place, place.best) for place in found.verdicts]
    yield from for_programs({"rows": rows, "left_out": found.left_out, "best": best})


def verdict_warnings(found: Verdicts) -> Iterator[str]:
    """Doubts, too few texts, and each best one that is the largest that was measured."""
    yield from (f"warning: {one}" for one in found.warnings)
    yield from (*few_texts(found.calibration), *fitted_texts(found.calibration))
    for place in found.verdicts:
        if place.best.at_edge:
            larger = "a longer one" if place.best.kind == CHAIN else "more nodes"
            yield (
                f"warning: at batch {place.batch}, context {place.context} the best, {named(place.best)}, is the "
                f"largest that was measured: {larger} may be faster (treeopt profile --sizes)"
            )


def named(one: Setting) -> str:
    """`chain of 4`, `static, 12 nodes`."""
    return _named(one.kind, one.budget.nodes, one.of.unit)


def schedule_parts(schedule: Schedule) -> Iterator[Part]:
    """The cells of a schedule."""
    yield f"a schedule of {counted(len(schedule.plans), 'plan')} by batch and context"
    if schedule.drafter:
        file = schedule.source.get("drafter")
        yield Fact("drafter", schedule.drafter + (f" in {file}" if file else ""))
    columns = (
        Column("batch", "batch"),
        Column("context", "context"),
        Column("plan", lambda cell: plan_name(cell.plan)),
        Column("tokens/step", "tokens_per_step", ".3f"),
        Column("speedup", "speedup", ".2f"),
        Column("low", "low", ".2f"),
        Column("high", "high", ".2f"),
    )
    yield Table(columns, schedule.cells)
    yield "a step takes the smallest batch and context that are as large as its own, else the largest"
    cells = [{**vars(one), "plan": plan_name(one.plan), "nodes": one.plan.nodes} for one in schedule.cells]
    yield Fact(None, cells, key="cells")


def plan_name(plan: Plan) -> str:
    """The name of a plan in a schedule, as `named`."""
    if isinstance(plan, TreePolicy):
        return _named(KINDS[1], plan.nodes, plan.unit)
    chain = plan.nodes == plan.depth + 1 and not plan.max_rank
    return _named(NONE if plan.nodes == ONE_NODE else CHAIN if chain else KINDS[0], plan.nodes)


def _named(kind: str, nodes: int, unit: str = NODES) -> str:
    if kind in (NONE, CHAIN):
        return NONE if kind == NONE else f"chain of {nodes - 1}"
    return f"{TREES[kind]}, {counted(nodes, unit.removesuffix('s'))}"


_Row = tuple[Verdict, Setting, str]


def _rows(found: Verdicts, place: Verdict) -> Iterator[_Row]:
    """The fastest of each kind, with what it is beside the best of all."""
    for kind in (NONE, CHAIN, *KINDS):
        one = place.best_of(kind)
        if one is None:
            continue
        if kind == place.best.kind:
            yield place, place.best, _BEST
            continue
        gap = found.gap(one, place.best)
        yield place, one, _AS_FAST if gap is not None and gap.low <= 0 <= gap.high else ""


_COLUMNS = (
    Column("batch", lambda row: row[0].batch),
    Column("context", lambda row: row[0].context),
    Column("plan", lambda row: named(row[1])),
    Column("tokens/step", lambda row: row[1].budget.tokens_per_step, ".3f"),
    Column("step", lambda row: row[1].budget.seconds, milliseconds),
    Column("tokens/s", lambda row: row[1].tokens_per_second, ".0f"),
    Column("speedup", lambda row: row[1].budget.speedup, ".2f"),
    Column("90 %", lambda row: row[1].interval, ".2f"),
    Column("", lambda row: row[2]),
)


def _data(place: Verdict, one: Setting) -> dict[str, Any]:
    """A setting for programs."""
    return {
        "batch": place.batch,
        "context": place.context,
        "kind": one.kind,
        **vars(one.budget),
        "tokens_per_second": one.tokens_per_second,
        "low": None if one.interval is None else one.interval.low,
        "high": None if one.interval is None else one.interval.high,
        "at_edge": one.at_edge,
        "chosen": one is place.best,
    }
