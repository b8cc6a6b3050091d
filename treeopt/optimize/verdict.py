"""The verdict: none, a chain, static or per-step trees, and of which size, for each batch and context.

Every candidate has its tokens per step from the traces of one calibration: chains and per-step trees by replay, static
trees cross-validated, all sizes by one growth. Profiles give the seconds of its steps. `fastest` chooses among them.

The interval of a speedup is that by the sampling of texts, with the seconds taken as exact. Candidates are not chosen
by it: texts that do not tell two of them apart still say which is more likely the faster. On other simulated texts the
simplest within the paired interval lost 7.0 % (8 texts), 2.0 % (20) and 0.1 % (60) to the best, the simplest within
0.5 % lost 0.7 %, 0.6 % and 0.1 %.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from treeopt.calibration import Calibration
from treeopt.defaults import CHAIN, KINDS, MAX_NODES, NODES, NONE, ONE_NODE, PATH_TOKENS, STEP_SIZES
from treeopt.errors import Code, TreeoptError, counted
from treeopt.facts import Column, Fact, Part, Table, for_programs, milliseconds
from treeopt.latency import LatencyProfile, unmeasured
from treeopt.optimize.auto_drafter import profile_doubts
from treeopt.optimize.budget import Budget, check_priced, fastest, profile_command, step_seconds
from treeopt.optimize.build_job import BuildJob
from treeopt.optimize.build_report import TREES, few_texts, fitted_texts, texts_of
from treeopt.optimize.chains import MOST_DRAFTS, chain_doubts
from treeopt.optimize.curve import default_sizes
from treeopt.optimize.grow import Growth
from treeopt.optimize.intervals import Interval, by_text, difference_interval, sampling_interval
from treeopt.optimize.per_step import build_policy, fastest_policy, policy_budget, replay_policy, sums_by_size
from treeopt.optimize.replay import TextSums, TraceRows, children_of
from treeopt.optimize.select_method import Fitter
from treeopt.optimize.tree_builder import budget_of, described, method_of, rounded, source_of, tree_limits
from treeopt.policy import Plan, TreePolicy
from treeopt.progress import Progress, silent
from treeopt.schedule import Schedule, ScheduledPlan
from treeopt.tree import Tree

EQUAL = 0.005  # of the greatest speedup: closer candidates are equally fast, and the simplest is chosen

Place = tuple[int, int]  # a batch and a context


@dataclass(frozen=True, eq=False)
class Considered:
    """A plan with its tokens and steps of each text, whatever a step takes.

    `more` says whether there is a larger one of its kind, `plan` makes it, and `unit` is that of its size, `nodes`.
    """

    kind: str
    nodes: int
    sums: TextSums
    more: bool
    plan: Callable[[], Plan]
    unit: str = NODES


@dataclass(frozen=True, eq=False)
class Setting:
    """The figures of a plan at one batch and context."""

    of: Considered  # the plan
    budget: Budget  # its figures, for one text of the batch
    tokens_per_second: float  # of all texts of the batch
    interval: Interval | None  # of the speedup; None below two different texts
    # whether it is the largest of its kind that was measured, or the longest chain that is considered, so that a larger
    # one may be faster
    at_edge: bool

    @property
    def kind(self) -> str:
        """`none`, `chain`, `static` or `dynamic`."""
        return self.of.kind


@dataclass(frozen=True, eq=False)
class Verdict:
    """All settings of a batch and a context, the simplest first, and the best of them."""

    batch: int
    context: int
    settings: tuple[Setting, ...]
    best: Setting

    def best_of(self, kind: str) -> Setting | None:
        """The fastest of a kind, by the same rule."""
        found = [one for one in self.settings if one.kind == kind]
        if not found:
            return None
        speedups = [one.budget.speedup for one in found]
        chosen = fastest(speedups, equal=EQUAL)
        return found[int(np.argmax(speedups)) if chosen is None else chosen]


@dataclass(frozen=True, eq=False)
class Verdicts:
    """The verdict of each batch and context."""

    calibration: Calibration  # of the texts and the drafter
    verdicts: tuple[Verdict, ...]  # sorted by batch and context
    left_out: Mapping[str, str]  # kinds without figures, and the command that measures what they lack
    warnings: tuple[str, ...]  # doubts about the comparison

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The best plan of each batch and context."""
        made, cells = functools.cache(lambda one: one.plan()), []
        for one in self.verdicts:
            best, interval = one.best, one.best.interval
            ends = () if interval is None else (max(0.0, interval.low), interval.high)
            figures = map(rounded, (best.budget.tokens_per_step, best.budget.speedup, *ends))
            cells.append(ScheduledPlan(one.batch, one.context, made(best.of), *figures))
        return Schedule.from_cells(cells, source_of(self.calibration))

    def gap(self, first: Setting, second: Setting) -> Interval | None:
        """The interval of the speedup of one setting - that of another, on the same texts."""
        clusters = self.calibration.clusters
        one, other = (by_text(clusters, *each.of.sums.columns[:2]) for each in (first, second))
        scaled = [sums[0] / each.budget.overhead for sums, each in ((one, first), (other, second))]
        return difference_interval(scaled[0], one[1], other[1], scaled[1])


def verdicts_of(
    calibration: Calibration,
    profiles: Sequence[LatencyProfile],
    *,
    batches: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    kinds: Sequence[str] = KINDS,
    job: BuildJob | None = None,
    progress: Progress = silent,
) -> Verdicts:
    """The best plan of each batch and context.

    Args:
        calibration: the traces; without those of per-step trees these are left out.
        profiles: at most one of each kind of trees and of chains; one without provenance, such as an engine's own
            step times, prices all. Without a profile of chains these are priced as static trees of as many nodes.
        batches: all that the profiles have where None.
        contexts: of each batch all that the profiles have where None.
        kinds: of trees that are considered, chains with the static ones.
        job: values, weights and limits of static trees.
        progress: called after each fold.

    Raises:
        TreeoptError: E230 where a batch, a context or the step of one node was not measured, two profiles are of one
            kind, or no kind has one; E223 where a profile is of another drafter.
    """
    priced = _priced(calibration, profiles, kinds)
    places = _places([*priced.values()], batches, contexts)
    left_out = _left_out(calibration, priced, kinds, places)
    considered = Considering(calibration, priced, places, job or BuildJob(nodes=None), progress)
    found = []
    for batch, context in places:
        settings = tuple(_settings(considered, priced, batch, context))
        best = fastest([one.budget.speedup for one in settings[1:]], equal=EQUAL)
        found.append(Verdict(batch, context, settings, settings[0 if best is None else best + 1]))
    return Verdicts(calibration, tuple(found), left_out, tuple(dict.fromkeys(_doubts(priced, places))))


def _priced(
    calibration: Calibration, profiles: Sequence[LatencyProfile], kinds: Sequence[str]
) -> dict[str, LatencyProfile]:
    """The profile of each kind that can be priced, and that of chains."""
    priced: dict[str, LatencyProfile] = {}
    for profile in profiles:
        for kind in KINDS if profile.kind is None else (profile.kind,):
            check_priced(profile, calibration, kind)
            if kind in priced:
                what = f"two profiles are of {kind}{'s' if kind == CHAIN else ' trees'}"
                raise TreeoptError(Code.PROFILE_INVALID, what, fix="leave one out")
            priced[kind] = profile
    traced = calibration.steps is not None
    static = KINDS[0] in kinds
    found = {kind: priced[kind] for kind in kinds if kind in priced and (traced or kind == KINDS[0])}
    if static and (chains := priced.get(CHAIN, priced.get(KINDS[0]))) is not None:
        found = {CHAIN: chains, **found}
    if not found:
        fix = ", then ".join(profile_command(calibration, kind) for kind in kinds)
        raise TreeoptError(Code.PROFILE_INVALID, f"no profile is of {' or '.join(kinds)} trees", fix=fix)
    return found


def _places(
    profiles: Sequence[LatencyProfile], batches: Sequence[int] | None, contexts: Sequence[int] | None
) -> list[Place]:
    """The batches and contexts, ascending; E230 where one was not measured."""
    measured = set.intersection(*({point.key[:2] for point in one.points} for one in profiles))
    wanted = []
    for batch in sorted(set(batches or (batch for batch, _ in measured))):
        own = sorted(context for other, context in measured if other == batch)
        wanted += [(batch, context) for context in sorted(set(contexts or own or [0]))]
    missing = [place for place in wanted if place not in measured]
    if missing or not wanted:
        names = [f"batch {batch}" + (f" with context {context}" if context else "") for batch, context in missing]
        known = ", ".join(f"batch {batch} with context {context}" for batch, context in sorted(measured))
        several = "" if len(profiles) == 1 else "in all profiles: "
        raise unmeasured(names[0] if names else "a batch and context of the others", several + (known or "none"))
    return wanted


def _left_out(
    calibration: Calibration, priced: Mapping[str, LatencyProfile], kinds: Sequence[str], places: Sequence[Place]
) -> dict[str, str]:
    """What measures the kinds that cannot be compared."""
    lists = (",".join(map(str, dict.fromkeys(column))) for column in zip(*places, strict=True))
    cells = " --batch-size {} --context {}".format(*lists)
    found = {kind: profile_command(calibration, kind) + cells for kind in kinds if kind not in priced}
    if KINDS[1] in found and calibration.steps is None:
        found[KINDS[1]] = "treeopt calibrate --kind dynamic, with the same --drafter"
    return found


class Considering:
    """The plans that are considered; their tokens per step do not depend on batch and context."""

    def __init__(
        self,
        calibration: Calibration,
        priced: Mapping[str, LatencyProfile],
        places: Sequence[Place],
        job: BuildJob,
        progress: Progress,
    ) -> None:
        self.calibration, self.job = calibration, job
        texts = functools.partial(by_text, calibration.clusters)  # the interval of a plan's tokens per step:
        self.sampling = functools.cache(lambda one: sampling_interval(*texts(*one.sums.columns)[:2]))
        self._sizes = {
            kind: {int(size) for place in places for size in profile.curve(*place)[0]}
            for kind, profile in priced.items()
        }
        largest = min(max(map(max, self._sizes.values())), MAX_NODES)
        self.by_paths = any(profile.path_tokens for profile in priced.values())
        self.unit = PATH_TOKENS if self.by_paths else NODES
        limits = tree_limits(calibration, **{**job.cuts, **budget_of(largest, path_tokens=self.by_paths)})
        self.fitter = Fitter(calibration, limits, progress=progress)

    @functools.cached_property
    def none(self) -> Considered:
        tokens = np.diff(self.calibration.offsets)
        plan = functools.partial(described, self.fitter, Tree(()), None)
        return Considered(NONE, ONE_NODE, TextSums(tokens, tokens), False, plan)

    @functools.cached_property
    def plans(self) -> dict[str, list[Considered]]:
        """Chains, static and per-step trees of each kind that is priced, up to the largest size that was measured."""
        made = {CHAIN: self._chains, KINDS[0]: self._grown, KINDS[1]: self._per_step}
        return {kind: [*make(self._sizes[kind])] for kind, make in made.items() if kind in self._sizes}

    def _per_step(self, measured: Iterable[int]) -> Iterator[Considered]:
        """Of one size at every step."""
        most = STEP_SIZES[-1]
        unit = {"path_tokens": self.by_paths}
        for size in (size for size in _sizes(measured, most) if size in STEP_SIZES or not self.by_paths):
            plan = functools.partial(build_policy, self.calibration, size, **unit)
            sums = sums_by_size(self.calibration, size, **unit)
            yield Considered(KINDS[1], size, sums, size < most, plan, self.unit)

    def _chains(self, measured: Iterable[int]) -> Iterator[Considered]:
        levels = self.calibration.num_heads
        levels = levels if self.job.max_depth is None else min(levels, self.job.max_depth)
        longest = min(levels, MOST_DRAFTS, max(measured) - 1)
        walked = TraceRows.of(self.calibration).replays(children_of(Tree.chain(longest)), range(2, longest + 2))
        for drafts, found in enumerate(walked, start=1):
            tree = functools.partial(described, self.fitter, Tree.chain(drafts), found.sums)
            yield Considered(CHAIN, drafts + 1, found.sums, drafts < levels, tree)

    def _grown(self, measured: Iterable[int]) -> Iterator[Considered]:
        chosen = self.fitter.choose(self.job.methods).method
        method, reached = method_of(chosen, self.fitter.limits), self.fitter.reached(chosen)
        sizes = _sizes(measured, reached)
        found = self.fitter.cross_validated_sums(chosen, sizes) if sizes else ()
        for size, growth, sums in zip(sizes, self.fitter.growths(chosen, sizes), found, strict=True):
            plan = functools.partial(_grown_tree, self.fitter, growth, size, sums, method)
            more = size < reached or reached >= self.fitter.limits.nodes
            yield Considered(KINDS[0], size, sums, more, plan, self.unit)


def _grown_tree(fitter: Fitter, growth: Growth, size: int, sums: TextSums, method: Mapping[str, str | int]) -> Tree:
    known = sums if fitter.can_leave_out else None
    unit = "budget" if fitter.limits.path_tokens is None else "path_tokens"
    return described(fitter, growth.tree(size), known, method={**method, unit: size})


def _sizes(measured: Iterable[int], most: int) -> list[int]:
    """The sizes of trees that are considered: those of a curve, and those that were measured."""
    known = [size for size in measured if size <= most]
    largest = max(measured, default=ONE_NODE)
    return sorted({*default_sizes(min(largest, most)), *known} - {ONE_NODE})


def _settings(
    considered: Considering, priced: Mapping[str, LatencyProfile], batch: int, context: int
) -> Iterator[Setting]:
    """All settings at a batch and context, none first, then the simplest first."""
    alone = step_seconds(next(iter(priced.values())), ONE_NODE, batch, context)
    yield _setting(considered, considered.none, Budget.of(ONE_NODE, 1.0, alone, alone), batch, ONE_NODE)
    for kind, plans in considered.plans.items():
        profile = priced[kind]
        alone, largest = step_seconds(profile, ONE_NODE, batch, context), profile.largest(batch, context)
        for one in (one for one in plans if one.nodes <= largest):
            seconds = step_seconds(profile, one.nodes, batch, context)
            budget = Budget.of(one.nodes, one.sums.tokens_per_step, seconds, alone)
            yield _setting(considered, one, budget, batch, largest)
    # In a batch all rows have the size that is best for one of them, which replay does not know.
    if KINDS[1] in priced and batch == 1:
        yield from _costed(considered, priced[KINDS[1]], context)


def _costed(considered: Considering, profile: LatencyProfile, context: int) -> Iterator[Setting]:
    """The per-step trees whose size is chosen by its cost, where they are the fastest."""
    calibration = considered.calibration
    policy = fastest_policy(calibration, profile, context=context)
    if policy.size_cost:
        budget = policy_budget(policy, calibration, profile, context=context)
        sums = replay_policy(policy, calibration).sums
        one = Considered(KINDS[1], policy.nodes, sums, policy.nodes < STEP_SIZES[-1], lambda: policy, policy.unit)
        yield _setting(considered, one, budget, 1, profile.largest(1, context))


def _setting(considered: Considering, one: Considered, budget: Budget, batch: int, largest: int) -> Setting:
    found = considered.sampling(one)
    if found is not None:
        ends = {"low": found.low / budget.overhead, "high": found.high / budget.overhead}
        found = dataclasses.replace(found, **ends)
    beyond = one.nodes >= (min(largest, MOST_DRAFTS + 1) if one.kind == CHAIN else largest)
    return Setting(one, budget, batch * budget.tokens_per_second, found, one.more and beyond)


def _doubts(priced: Mapping[str, LatencyProfile], places: Sequence[Place]) -> Iterator[str]:
    for place in places:
        yield from profile_doubts([*priced.values()], *place)
    if CHAIN in priced:
        yield from chain_doubts(priced[CHAIN])


_BEST, _AS_FAST = "best", "not told apart"


def verdict_report(found: Verdicts) -> Iterator[Part]:
    """For each batch and context the fastest of each kind; for programs all that was considered."""
    yield Table(_COLUMNS, [row for one in found.verdicts for row in _rows(found, one)])
    yield (
        "tokens/step: all tokens / all steps, cross-validated for static trees; tokens/s: of the whole batch, while no "
        "text of it has ended; speedup: over the profile's autoregressive step, with its 90 % interval by the sampling "
        "of texts"
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
            edge = f"largest that was measured: {larger} may be faster (treeopt profile --sizes)"
            if place.best.kind == CHAIN and place.best.budget.nodes > MOST_DRAFTS:
                edge = f"longest that is considered: {larger} may be faster"
            where = f"at batch {place.batch}, context {place.context}"
            yield f"warning: {where} the best, {named(place.best)}, is the {edge}"


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
