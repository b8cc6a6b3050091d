"""The command `treeopt calibrate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli import drafters
from treeopt.cli.checks import check_apart, check_belongs, check_inputs
from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console, command
from treeopt.cli.numbers import SEED, Temperature
from treeopt.cli.options import check_outputs, chosen_prompts, load_models, model_options, prompt_options, say_prompts
from treeopt.cli.work_options import (
    batch_option,
    batch_settings,
    ending_work,
    name_shard,
    open_work,
    shard_option,
    work_options,
)
from treeopt.defaults import CALIBRATION_FILE, HEADS, KINDS, MODEL, NGRAM, WITH_DRAFT
from treeopt.errors import Code, TreeoptError

if TYPE_CHECKING:
    from treeopt.calibrate.pipeline import CalibrationOptions
    from treeopt.calibrate.results import CalibrationRun
    from treeopt.models.base import Base
    from treeopt.models.head_files import LoadedHeads
    from treeopt.texts.prompts import PromptSet

_KIND = f"dynamic: trace per-step trees too [default: dynamic, but static with --drafter {HEADS}]."


@command("calibrate")
@model_options(dtype="auto")
@prompt_options()
@click.option("--responses", help="Score the answers in this file (a prompt and `output` a row); generate none.")
@click.option(
    "--drafter",
    help=f"{HEADS}: the heads alone; {', '.join(drafters.LEARNED)}: learn a drafter from these prompts; or a drafter "
    f"file [default: {HEADS}; {MODEL} with --draft, {NGRAM} with --model alone].",
)
@drafters.draft_option()
@drafters.learning_options
@click.option("--kind", type=click.Choice(KINDS), help=_KIND)
@click.option("--temperature", type=Temperature(), default=0.0, help="0 is greedy.")
@click.option("--seed", type=SEED, default=0, help="Seed of sampling.")
@batch_option
@shard_option
@work_options
@click.option("-o", "--output", default=CALIBRATION_FILE, help="File to write.")
def run(console: Console, **options: Any) -> None:
    """Measure how often a drafter's guesses are correct, on the base model's answers to prompts.

    The output holds the rank of each token of the answers among the guesses of each head or level, and with
    --temperature the model's probability of each guess. Any tree can be built from it, and replayed exactly.

    With --drafter heads+ngram, ngram, model or model+ngram a drafter is learned from the prompts, and written beside
    the output (see `treeopt learn`). Each answer is measured with a drafter that was learned from the other prompts.

    Prompts with `turns` are answered turn by turn. Finished batches are stored in OUTPUT.partial, for --resume. With
    --shard i/n the output holds one part of n; `treeopt merge` joins the parts.

    Takes about a minute for the built-in model and its prompts on two CPU cores.
    """
    name_shard(options)
    batches = batch_settings(console, options)
    chosen = drafters.chosen_drafter(options)
    name = _prompts_of(options)
    learning, drafter_file = _drafting(chosen, options)
    work = open_work(options)
    check_inputs()
    from treeopt.calibrate.pipeline import calibrate, job_of
    from treeopt.verify.probe import check_trees

    drafter = treeopt.load_drafter(drafter_file) if drafter_file is not None and learning is None else None
    steps = drafter_file is not None and options["kind"] != "static"
    given = _load(console, options, name, chosen, drafter, {**batches, "work": work, "steps": steps})
    base, _, prompts, settings = given
    if drafter_file is None:
        drafters.warn_no_trees(console, base, "its traces are of use in other engines only")
    else:
        check_trees(base)
    if learning is not None:
        console.note(learning.announcement(prompts, options["max_new_tokens"], given=settings.responses))
    with ending_work(console, work):
        with console.progress("calibrate") as progress:
            job = job_of(*given, drafter=drafter, learning=learning, progress=progress)
            run = calibrate(job)
        if run is None:
            return
        _save(run, drafter_file, options, console.configuration)
        work.remove()
    made = None if run.learned is None else drafter_file
    report_calibration(console, run, options["output"], made, drafts=job.draft is not None)


def _load(
    console: Console,
    options: dict[str, Any],
    name: str,
    chosen: str,
    drafter: treeopt.Drafter | None,
    more: dict[str, Any],
) -> tuple[Base, LoadedHeads | None, PromptSet, CalibrationOptions]:
    """Load prompts and models, and print their names and what does not belong together."""
    from treeopt.calibrate.pipeline import CalibrationOptions
    from treeopt.drafting.learn import learned_from_these
    from treeopt.models.origins import drafter_for_others, models_ids

    scored = options["responses"] is not None
    prompts = treeopt.load_prompts(name, skip=options["skip"], limit=options["limit"], answers=scored)
    with_heads = chosen not in (NGRAM, *WITH_DRAFT) and drafters.uses_heads(options, chosen, drafter)
    base, loaded = load_models(console, options, with_heads=with_heads)
    draft = drafters.load_draft_model(console, options, base, drafter)
    console.warn(*drafter_for_others(drafter, models_ids(base, loaded, draft)), *learned_from_these(drafter, prompts))
    say_prompts(console, prompts)
    names = ("max_new_tokens", "temperature", "seed", "chat_template", "shard")
    made = {name: options[name] for name in names}
    return base, loaded, prompts, CalibrationOptions(draft=draft, responses=scored, **made, **more)


def _prompts_of(options: dict[str, Any]) -> str:
    """The name of the prompts or responses, after checks of the options that need no model."""
    scored = options["responses"] is not None
    check_apart("prompts", "responses")
    check_belongs(("temperature",), "generated answers, not to --responses", not scored)
    check_outputs(options, options["output"], suffixes=(".safetensors",))
    return options["responses"] if scored else chosen_prompts(options)


def _drafting(name: str, options: dict[str, Any]) -> tuple[treeopt.Learning | None, str | None]:
    """How a drafter is learned, if one is; and the drafter's file, to read or to write; None for the heads alone."""
    from treeopt.files.drafters import SCHEMA
    from treeopt.files.tensors import unedited_schema

    if name not in (HEADS, *drafters.LEARNED):
        return None, name
    if name == HEADS and options["kind"] != "dynamic":
        return None, None
    if options["shard"] is not None:
        fix = "learn it first, with treeopt learn, then calibrate --drafter FILE --shard i/n"
        raise click.UsageError(f"a shard has too few texts to learn a drafter from: {fix}")
    output = Path(options["output"])
    file = str(output.with_name(f"{output.stem}.drafter.safetensors"))
    exists = options["resume"] and Path(file).is_file()
    resumed = exists and unedited_schema(Path(file)) == SCHEMA  # `_save` refuses the drafter of another run
    check_outputs({**options, "force": options["force"] or resumed}, file)
    check_inputs()
    made = {"tokens": drafters.sampled_tokens(options), "seed": options["seed"], "levels": options["levels"]}
    return treeopt.Learning(**made, ngram=name in drafters.WITH_TABLE), file


def _save(
    run: CalibrationRun, drafter_file: str | None, options: dict[str, Any], configuration: Mapping[str, Any]
) -> None:
    """Write the learned drafter, if any, and the calibration, which names its drafter's file."""
    from treeopt.calibrate.results import save_shard

    if run.learned is not None:
        assert drafter_file is not None
        drafter, written = run.learned.drafter, options["resume"] and Path(drafter_file).exists()
        if written and treeopt.load_drafter(drafter_file).id != drafter.id:  # else written before the run was stopped
            fix = "move it away; the same command with --resume continues"
            raise TreeoptError(Code.FILE_EXISTS, f"{drafter_file} is the drafter of another run", fix=fix)
        made = with_configuration(drafter, configuration)
        treeopt.save_drafter(made, drafter_file, overwrite=options["force"] or written)
    provenance = dataclasses.replace(run.calibration.provenance, drafter=drafter_file or "")
    calibration = dataclasses.replace(run.calibration, provenance=provenance)
    calibration = with_configuration(calibration, configuration)
    if run.part is not None:
        shard = dataclasses.replace(run.part, calibration=calibration)
        save_shard(shard, options["output"], overwrite=options["force"])
        return
    treeopt.save_calibration(calibration, options["output"], overwrite=options["force"])


def report_calibration(
    console: Console, run: CalibrationRun, output: str, drafter_output: str | None = None, *, drafts: bool = False
) -> None:
    """Print what was traced; `drafts` by a draft model, whose chains are predicted."""
    from treeopt.calibrate.results import run_as_dict, run_parts

    if run.learned is not None:
        console.warn(*run.learned.warnings(run.calibration.positions))
    console.report(*run_parts(run, drafts=drafts))
    written = output if drafter_output is None else f"{output} and {drafter_output}"
    step = f"build --nodes 64 --calibration {output} -o tree.yaml" if run.part is None else "merge, of all shards"
    console.note(f"wrote {written}   next: treeopt {step}")
    console.result({**run_as_dict(run), "output": output, "drafter_output": drafter_output})
