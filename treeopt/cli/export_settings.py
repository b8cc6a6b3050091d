"""`treeopt export --calibration`: settings of an engine that takes no fixed tree, and what it measured beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treeopt.cli.console import Console
from treeopt.cli.options import check_outputs
from treeopt.engines import SETTINGS
from treeopt.files.atomic import write_text
from treeopt.files.configurations import write_note

if TYPE_CHECKING:
    from treeopt.export.settings import EngineSettings
    from treeopt.optimize.chains import AcceptanceComparison


def export_settings(console: Console, to: str, output: str | None, options: Mapping[str, Any]) -> None:
    """Print or write the settings of an engine, with what replay promises and, with --measured, what it measured."""
    from treeopt.files.calibrations import load_calibration
    from treeopt.files.profiles import load_profile

    calibration = load_calibration(options["calibration"])
    profile = None if options["profile"] is None else load_profile(options["profile"])
    if output is not None:
        check_outputs(options, output)
    from treeopt.export.settings import engine_settings, promised

    found = engine_settings(to, calibration, profile, drafts=options["drafts"], nodes=options["nodes"])
    comparison = None
    if options["compare"] is not None:
        from treeopt.export.acceptance import read_acceptance
        from treeopt.optimize.chains import compare_acceptance

        measured = read_acceptance(options["compare"])
        if len(measured.draft_lengths) > 1:
            lengths = ", ".join(map(str, measured.draft_lengths))
            console.warn(f"warning: the engine's steps had {lengths} drafts; the promise is of the longest chain")
        drafts = None if measured.histogram is None else len(measured.histogram) - 1
        comparison = compare_acceptance(promised(found, calibration, drafts), calibration, measured)
    _report(console, found, output, table=comparison is None)
    if comparison is not None:
        _report_comparison(console, comparison)
    console.result(_as_dict(found, comparison, output))


def _report(console: Console, found: EngineSettings, output: str | None, *, table: bool) -> None:
    if output is not None and found.content:
        write_text(output, found.content + "\n")
        write_note(output, console.configuration)
    elif found.content:
        console.say(found.content)
    elif table:
        rows = [[str(drafts), f"{tokens:.4f}"] for drafts, tokens in enumerate(found.chains)]
        console.table(["drafts", "tokens per step"], rows)
    if found.warning:
        console.warn(f"warning: {found.warning}")
    for name, why in found.underived.items():
        console.warn(f"not derived: {name}: {why}")
    if output is not None:
        written = f"wrote {output}" if found.content else f"{output} is not written: there is no setting"
        (console.note if found.content else console.warn)(written)
    console.note(f"read by   {SETTINGS[found.engine].versions}")
    if found.replay is not None:
        where = "" if found.batch is None else f", batch {found.batch}"
        console.note(f"replay    {found.replay.tokens_per_step:.4f} tokens per step ({found.bound}{where})")
    for batch, budget in found.budgets.items():
        figures = f"{budget.tokens_per_step:.4f} tokens per step, speedup {budget.speedup:.3f}"
        console.note(f"batch {batch:<4}{budget.nodes - 1} drafts: {figures}")
    for note in found.notes:
        console.note(f"note      {note}")


def _report_comparison(console: Console, comparison: AcceptanceComparison) -> None:
    interval = comparison.interval
    spread = "" if interval is None else f" ({interval.low:.3f} to {interval.high:.3f} on as many new texts)"
    console.say(f"promised  {comparison.promised:.4f} tokens per step{spread}")
    difference = comparison.measured / comparison.promised - 1
    verdict = {True: "as promised", False: "not as promised", None: "no interval of the promise"}
    console.say(f"measured  {comparison.measured:.4f} ({difference:+.1%}): {verdict[comparison.as_promised]}")
    if comparison.measured_rates is None:
        return
    pairs = list(zip(comparison.promised_rates, comparison.measured_rates, strict=False))
    rows = [[str(d), f"{one:.4f}", f"{other:.4f}"] for d, (one, other) in enumerate(pairs, 1)]
    console.table(["drafts accepted, at least", "promised", "measured"], rows)


def _as_dict(found: EngineSettings, comparison: AcceptanceComparison | None, output: str | None) -> dict[str, Any]:
    budgets = [
        {
            "batch": batch,
            "drafts": budget.nodes - 1,
            "tokens_per_step": budget.tokens_per_step,
            "speedup": budget.speedup,
        }
        for batch, budget in found.budgets.items()
    ]
    result: dict[str, Any] = {
        "to": found.engine,
        "versions": SETTINGS[found.engine].versions,
        "settings": dict(found.settings),
        "content": found.content if output is None else None,
        "output": output if found.content else None,
        "tokens_per_step": None if found.replay is None else found.replay.tokens_per_step,
        "batch": found.batch,
        "bound": found.bound,
        "batches": budgets,
        "chain_tokens_per_step": found.chains,
        "not_derived": dict(found.underived),
        "notes": found.notes,
    }
    if comparison is None:
        return result
    interval = comparison.interval
    return result | {
        "comparison": {
            "promised": comparison.promised,
            "interval": None if interval is None else [interval.low, interval.high],
            "measured": comparison.measured,
            "as_promised": comparison.as_promised,
            "promised_rates": comparison.promised_rates,
            "measured_rates": comparison.measured_rates,
        }
    }
