"""`treeopt build`: traces to a tree."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from treeopt.build.fit import VALUES, WEIGHTS, Fit, Fitter, candidates
from treeopt.build.intervals import texts_to_halve
from treeopt.build.judge import Judgement, judge, split
from treeopt.build.mixture import Matrix, Mixed, Tasks
from treeopt.build.sizes import SizeChoice, best_size
from treeopt.build.trees import DEFAULT_TOP_K, describe, tree_limits
from treeopt.calibration import Calibration
from treeopt.cli.console import Console, command
from treeopt.files.calibrations import DEFAULT_FILE, load_calibration
from treeopt.files.outputs import check_output
from treeopt.files.profiles import load_profile
from treeopt.files.trees import save_tree
from treeopt.tree import Tree

_AUTO = "auto"


class _Nodes(click.ParamType[int | str]):
    """A number of nodes, or `auto`."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == _AUTO:
            return _AUTO
        return click.IntRange(min=1).convert(value, param, ctx)


@command("build")
@click.option(
    "--calibration",
    "calibrations",
    multiple=True,
    default=[DEFAULT_FILE],
    show_default=True,
    help="Traces, by `treeopt calibrate`; several, one a task, for a mixture.",
)
@click.option("--nodes", type=_Nodes(), default=64, show_default=True, help="Budget, root counted; auto: the fastest.")
@click.option("--profile", help="Seconds a step, by `treeopt profile`; for --nodes auto.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Of the profile.")
@click.option("--context", type=click.IntRange(min=1), help="Of the profile [default: its longest].")
@click.option("--values", type=click.Choice(VALUES), default="joint", show_default=True)
@click.option("--weights", type=click.Choice(WEIGHTS), default="visits", show_default=True)
@click.option("--refine", type=click.FloatRange(min=0), default=0.0, help="Seconds for exchanging nodes one by one.")
@click.option("--top-k", type=click.IntRange(min=1), default=DEFAULT_TOP_K, show_default=True, help="Ranks a head.")
@click.option("--max-rank", type=click.IntRange(min=0), help="No larger rank, e.g. 9 for engines that draft ten.")
@click.option("--max-depth", type=click.IntRange(min=0), help="No longer path [default: the number of heads].")
@click.option("--holdout", type=click.IntRange(min=1), help="Set the last N texts aside; judge by them at the end.")
@click.option("--mix", help="Shares of the tasks, e.g. 3,1 [default: by their tokens].")
@click.option("--robust", is_flag=True, help="For several tasks: the least loss on the worst of them.")
@click.option("-o", "--output", default="tree.yaml", show_default=True)
def run(console: Console, **options: Any) -> None:
    """Grow the tree with the most tokens per step under a number of nodes.

    Node values are estimated from the traces; several estimates compete on texts they were not fitted to, the paper's
    (--values independent --weights uniform) among them. Then the tree is replayed over the traces, which is exactly
    what a decoder would do on that text.
    """
    files = options["calibrations"]
    shares = _check(options, len(files))
    check_output(options["output"], *files)
    loaded = [load_calibration(file) for file in files]
    limits_asked = {name: options[name] for name in ("top_k", "max_depth", "max_rank")}
    fitted, aside, dropped = loaded[0], None, 0
    if options["holdout"]:
        fitted, aside, dropped = split(loaded[0], options["holdout"])
    nodes, choice = options["nodes"], None
    if nodes == _AUTO:
        profile = load_profile(options["profile"])
        methods = candidates(options["values"], options["weights"], refined=False)
        choice = best_size(fitted, profile, methods, options["batch"], options["context"], **limits_asked)
        nodes = choice.best.nodes
    limits = tree_limits(fitted, nodes, **limits_asked)
    matrix = mixed = None
    if len(loaded) > 1:
        tasks = Tasks(loaded, limits, options["values"], options["weights"])
        matrix = tasks.matrix()
        mixed = tasks.robust() if options["robust"] else tasks.weighted(shares or [c.positions for c in loaded])
        fitter, fit = mixed.fitter, mixed.fit
    else:
        fitter = Fitter(fitted, limits, refine_seconds=options["refine"])
        fit = fitter.choose(candidates(options["values"], options["weights"], refined=options["refine"] > 0))
    tree = describe(fitter, fit)
    save_tree(tree, options["output"])
    # Read once, and only now that the file is written: nothing could have been fitted to these texts.
    judgement = judge(tree, fitted, aside, dropped, limits) if aside is not None else None
    _report(console, tree, fit, fitter.calibration, nodes, options["output"])
    _report_more(console, files, choice, matrix, mixed, judgement)
    console.result(_as_dict(tree, fit, options["output"], choice, matrix, mixed, judgement))


command = run


def _check(options: dict[str, Any], tasks: int) -> list[float] | None:
    """The shares of a mixture, after refusing options that contradict each other."""
    if (options["nodes"] == _AUTO) != (options["profile"] is not None):
        raise click.UsageError("--nodes auto and --profile go together")
    if tasks == 1 and (options["mix"] or options["robust"]):
        raise click.UsageError("--mix and --robust need several --calibration")
    if tasks > 1 and (options["holdout"] or options["refine"] or options["nodes"] == _AUTO):
        raise click.UsageError("--holdout, --refine and --nodes auto take one --calibration")
    if options["mix"] and options["robust"]:
        raise click.UsageError("--mix and --robust exclude each other")
    if not options["mix"]:
        return None
    try:
        shares = [float(share) for share in options["mix"].split(",")]
    except ValueError as error:
        raise click.BadParameter("numbers, with commas between", param_hint="--mix") from error
    if len(shares) != tasks or min(shares) <= 0:
        raise click.BadParameter(f"{tasks} positive numbers, one a calibration", param_hint="--mix")
    return shares


def _report(console: Console, tree: Tree, fit: Fit, calibration: Calibration, asked: int, output: str) -> None:
    assert tree.expected is not None
    expected = tree.expected
    if tree.nodes < asked:
        console.warn(
            f"warning: {tree.nodes} nodes, not {asked}: no further path has any value in this calibration "
            f"(K = {expected.top_k})"
        )
    console.say(
        f"{tree.nodes} nodes = 1 root + {len(tree.paths)} drafts, depth {tree.depth}, {len(tree.leaves)} leaves, "
        f"K = {expected.top_k} ranks a head"
    )
    console.say(f"method                    {fit.method}")
    console.say(f"expected tokens per step  {expected.independent:.3f}  independent: 1 + sum of products of accuracies")
    console.say(
        f"                          {expected.replay:.3f}  replay: what a decoder yields on the "
        f"{calibration.sequences} traced texts"
    )
    if expected.unseen is not None:
        console.say(
            f"                          {expected.unseen:.3f}  unseen: the same on texts left out of the fit; "
            f"{expected.low:.3f} to {expected.high:.3f} on"
        )
        console.say(
            f"                                 as many new prompts (90 %); {texts_to_halve(calibration.sequences)} "
            "more prompts would halve that"
        )
    console.note(f"wrote {output}")


def _report_more(
    console: Console,
    files: tuple[str, ...],
    choice: SizeChoice | None,
    matrix: Matrix | None,
    mixed: Mixed | None,
    judgement: Judgement | None,
) -> None:
    if choice is not None:
        for label, budget in (("fastest", choice.best), ("64 nodes", choice.at_64)):
            if budget is not None:
                console.say(
                    f"{label:9} {budget.nodes} nodes: {budget.tokens_per_step:.3f} tokens per step, overhead "
                    f"{budget.overhead:.2f}, speedup {budget.speedup:.2f} by the profile"
                )
    if matrix is not None and mixed is not None:
        rows = [[name, *(f"{tau:.3f}" for tau in row)] for name, row in zip(files, matrix.tokens_per_step, strict=True)]
        rows.append(["this tree", *(f"{tau:.3f}" for tau in mixed.tokens_per_step)])
        rows.append(["share", *(f"{share:.2f}" for share in mixed.shares)])
        console.table(["tokens per step, tree of / on", *files], rows)
    if judgement is not None:
        low, high = judgement.gain.low, judgement.gain.high
        console.say(
            f"judged on {judgement.texts} texts set aside ({judgement.dropped} that stand in both dropped): "
            f"{judgement.tokens_per_step:.4f} ({judgement.interval.low:.3f} to {judgement.interval.high:.3f})"
        )
        console.say(
            f"the paper's tree there: {judgement.paper_tokens_per_step:.4f}; gain "
            f"{judgement.tokens_per_step / judgement.paper_tokens_per_step - 1:+.2%} ({low:+.3f} to {high:+.3f} tokens)"
        )


def _as_dict(
    tree: Tree,
    fit: Fit,
    output: str,
    choice: SizeChoice | None,
    matrix: Matrix | None,
    mixed: Mixed | None,
    judgement: Judgement | None,
) -> dict[str, Any]:
    assert tree.expected is not None
    expected = vars(tree.expected)
    data: dict[str, Any] = {
        "nodes": tree.nodes,
        "depth": tree.depth,
        "leaves": len(tree.leaves),
        "top_k": tree.expected.top_k,
        "method": str(fit.method),
        "expected_tokens_per_step": {
            name: expected[name] for name in ("independent", "replay", "unseen", "low", "high")
        },
        "steps_on_unseen_texts": fit.trials,
        "paths": tree.paths,
        "values": tree.values,
        "output": output,
    }
    if choice is not None:
        data["auto"] = {"best": vars(choice.best), "at_64": choice.at_64 and vars(choice.at_64)}
    if matrix is not None and mixed is not None:
        data["tasks"] = {
            "tokens_per_step": matrix.tokens_per_step.tolist(),
            "this_tree": mixed.tokens_per_step.tolist(),
            "shares": mixed.shares.tolist(),
        }
    if judgement is not None:
        data["judged"] = dataclasses.asdict(judgement)
    return data
