"""`treeopt validate`: check that a tree is lossless and as predicted, and measure its speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli import options as shared
from treeopt.cli.checks import check_belongs, check_inputs, origin_of
from treeopt.cli.console import Console, command
from treeopt.cli.drafters import chosen_memory, chosen_plan, load_with_prompts, memory_option, plan_options
from treeopt.cli.numbers import COUNT, NOT_NEGATIVE, FiniteRange
from treeopt.cli.processes import division_of, nproc_option
from treeopt.errors import counted

if TYPE_CHECKING:
    from treeopt.schedule import Planned

_RULES = (shared.GREEDY, shared.SAMPLE, shared.TYPICAL)


@command("validate")
@shared.model_options(dtype="float32")
@shared.prompt_options()
@plan_options
@click.option("--repeats", type=COUNT, default=1, help="Runs of each text and baseline, which take turns.")
@click.option("--batch-size", type=COUNT, default=1, help="Prompts decoded together.")
@memory_option
@nproc_option
@shared.compile_option
@shared.acceptance_options(rules=_RULES, what="sample and typical: what is validated differs, see the command's help.")
@click.option("--draws", type=NOT_NEGATIVE, help="For sample: texts of a test, 0 for none [default: 1000].")
@click.option("--judge", type=NOT_NEGATIVE, help="Differing texts examined in float64; 0: none [default: 5].")
@click.option("--min-tokens-per-step", type=FiniteRange(min=0), help="Minimum; exit status 6 below it.")
@click.option("--min-speedup", type=FiniteRange(min=0), help="Minimum for the median repeat; exit status 6 below it.")
def run(console: Console, **options: Any) -> None:
    """Decode every prompt with the tree, autoregressively, with stock `generate` and with prompt lookup, and compare.

    Lossless means that the text is, token for token, that of stock greedy `generate`. The first --judge texts that
    differ are examined by a float64 forward on the CPU. The cause is a tie (equal logits), rounding (a gap below the
    resolution of the dtype) or a bug. The exit status is 5 for a bug; in float32 also for rounding and for a difference
    that was not examined. In bfloat16 and float16 these two are no failures, so use float32 to show that a tree is
    lossless.

    With --drafter alone, the tree is the one that the drafter recommends. Without --tree, --drafter and --heads, each
    step has a tree of 16 nodes drafted by --draft, or from the text so far. The prediction does not use the decoder: it
    is a separate teacher-forced pass, and replay.

    Prompts with `turns` (MT-bench, Spec-Bench) are decoded turn by turn, each after the model's answer. Metrics are
    printed for each turn and each `category`.

    --acceptance sample decodes every prompt --repeats times. Lossless then means that the first tokens after the four
    shortest prompts, drawn --draws times each, have the distribution of the base model and of stock `generate`
    (chi-square tests; exit status 5 where a p-value times the number of tests is below 1e-4). --acceptance typical is
    lossy: its texts are compared with greedy and sampled texts.

    With --memory each text is drafted with those before it, which the prediction replays in the same order.

    --nproc divides the batches among processes. Processes on one CPU slow each other down, so compare speeds only
    within a run.

    Takes about 10 minutes for the built-in model and its 256 prompts on two CPU cores; with --limit 20, a minute.
    """
    source = shared.chosen_prompts(options)
    check_inputs()
    chosen = chosen_plan(options)
    settings = {**_settings(options), "memory": chosen_memory(console, options)}
    from treeopt.evaluate.runs import JUDGED
    from treeopt.evaluate.validate import Validation, advice, divided_validate, make_inputs
    from treeopt.evaluate.validation_report import measured_data, measured_report, rule_report, tolerated_text

    used, encoded = load_with_prompts(console, options, chosen, source)
    base, plan = used.base, used.plan
    _note_calibrated(console, plan, source, options["skip"])
    with console.progress("validate") as progress:
        settings |= {"draft": used.draft}
        inputs = make_inputs(base, used.heads, plan, encoded.texts, None, used.drafter, settings)
        found = divided_validate(*inputs, progress)
    if found is None:
        return
    console.report(*measured_report(found, encoded.skipped))  # before differing texts are judged, which may take long
    console.warn(*(f"warning: {warning}" for warning in advice(found, plan)))
    if isinstance(found, Validation):
        found = found.judged(base, JUDGED if options["judge"] is None else options["judge"])
        if tolerated := tolerated_text(found, base.tokenizer):
            console.note(tolerated)
    parts, data = rule_report(found)
    console.report(*parts)
    console.result({**measured_data(found, encoded.skipped), **origin_of(base, used.heads, used.draft, plan), **data})
    found.check(base.tokenizer)
    found.check_minima(options["min_tokens_per_step"], options["min_speedup"])


def _note_calibrated(console: Console, plan: Planned, source: str, skip: int) -> None:
    """Say that the tree was built from these prompts: by their name and number, which are what its file has."""
    made = plan.source.get("calibration") or {}
    count = made.get("sequences")
    named = source in str(made.get("prompts", "")).split(", ")
    if named and isinstance(count, int) and skip < count:  # an edited file may have a text here
        console.note(
            f"the tree was built from {counted(count, 'text')} of {source} too; --skip {count} takes prompts that it "
            "was not fitted to"
        )


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `validate`; nothing is judged yet."""
    name = options["acceptance"]
    check_belongs(("judge",), f"--acceptance {shared.GREEDY}", name == shared.GREEDY)
    check_belongs(("memory",), f"--acceptance {shared.GREEDY}", name == shared.GREEDY)
    check_belongs(("draws",), f"--acceptance {shared.SAMPLE}", name == shared.SAMPLE)
    if options["temperature"] == 0:
        raise click.UsageError("--temperature 0 is greedy decoding, which is the default: leave out --acceptance")
    settings = {name: options[name] for name in ("max_new_tokens", "repeats", "batch_size", "chat_template")}
    settings |= {} if options["draws"] is None else {"draws": options["draws"]}
    rule = shared.acceptance_rule(options, rules=_RULES)
    return {**settings, "judge": 0, "acceptance": rule, "division": division_of(options)}
