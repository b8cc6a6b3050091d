"""Reports about engines: rules that a tree breaks, and what limits cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from treeopt.cli.console import Console

if TYPE_CHECKING:
    from treeopt.export.lint import Constrained, Finding
    from treeopt.tree import Tree


def say_findings(console: Console, findings: Iterable[Finding]) -> None:
    """Print each broken rule with its reason and remedy."""
    for finding in findings:
        engine = f" [{finding.engine}]" if finding.engine else ""
        console.say(f"{finding.severity}: {finding.rule}{engine}: {finding.what}")
        console.say(f"  why: {finding.why}")
        if finding.fix:
            console.say(f"  fix: {finding.fix}")


def warn_findings(console: Console, findings: Iterable[Finding]) -> None:
    """Print each broken rule as a warning, on one line."""
    for finding in findings:
        remedy = f" ({finding.fix})" if finding.fix else ""
        console.warn(f"warning: {finding.rule}: {finding.what}; {finding.why}{remedy}")


def findings_as_list(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Broken rules with the keys of `--json`."""
    return [dataclasses.asdict(finding) for finding in findings]


def report_limits(console: Console, constrained: Constrained, engine: str) -> None:
    """Print what the limits of a build cost, and the rules of the engine that the tree still breaks."""
    gain = constrained.gain
    if gain is not None:
        texts = "cross-validated" if constrained.cross_validated else "replay"
        console.say(
            f"limits{f' of {engine}' if engine else ''}: {gain.second:.3f} tokens per step, {gain.first:.3f} without "
            f"them ({texts}): {gain}"
        )
    else:
        console.say("what the limits cost is printed for one --calibration")
    warn_findings(console, constrained.findings)


def report_refusing(console: Console, tree: Tree) -> list[str]:
    """Print the engines that a tree cannot be exported to, with the remedy; their names."""
    from treeopt.export.lint import refusing_engines

    found = refusing_engines(tree)
    if found:
        console.say(f"not exportable to {', '.join(found)}; treeopt build --for ENGINE builds within the limits of one")
    return found


def limits_as_dict(constrained: Constrained, engine: str) -> dict[str, Any]:
    """What the limits of a build cost, with the keys of `--json`."""
    return {
        "engine": engine or None,
        "loss": None if constrained.gain is None else constrained.gain.as_dict(),
        "cross_validated": constrained.cross_validated,
        "findings": findings_as_list(constrained.findings),
    }
