"""The command `treeopt learn`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli import drafters
from treeopt.cli import options as shared
from treeopt.cli.checks import check_inputs
from treeopt.cli.configuration import with_configuration
from treeopt.cli.console import Console, command
from treeopt.cli.numbers import SEED, Temperature
from treeopt.cli.work_options import batch_option, batch_settings, ending_work, open_work, work_options
from treeopt.defaults import DRAFTER_FILE, HEADS_NGRAM, LEARN_SIZES, MODEL, NGRAM, STEP_SIZES

if TYPE_CHECKING:
    from treeopt.models.base import Base
    from treeopt.models.head_files import LoadedHeads

_DRAFTER = f"{', '.join(drafters.LEARNED)} [default: {HEADS_NGRAM}; {MODEL} with --draft, {NGRAM} with --model alone]."
_NODES = f"Size to time, repeatable [default: {' '.join(map(str, LEARN_SIZES))}]."


@command("learn")
@shared.model_options(dtype="auto", several=True)
@shared.prompt_options()
@click.option("--drafter", help=_DRAFTER)
@drafters.draft_option(default="none")
@drafters.learning_options
@click.option("--temperature", type=Temperature(min_open=True), default=0.7, help="Of sampling.")
@click.option("--seed", type=SEED, default=0, help="Seed of sampling.")
@batch_option
@click.option("--nodes", type=click.IntRange(2, STEP_SIZES[-1]), multiple=True, help=_NODES)
@shared.compile_option
@work_options
@click.option("-o", "--output", default=DRAFTER_FILE, help="File to write.")
def run(console: Console, **options: Any) -> None:
    """Learn a drafter from the model's own text, for a model with heads, with a draft model, or without either.

    `heads+ngram`: the guesses of the heads, rescored by an n-gram table and the text so far. `ngram`: the guesses of
    the table, of the text so far and of the LM head; it needs no heads. `model+ngram`: the guesses of the draft model
    (--draft), rescored in the same way. `model`: these guesses alone, with probabilities fitted to the base's text.

    The base answers the prompts, and samples --learn-tokens more tokens. The n-gram table counts its greedy choices;
    the answers decide the weights of the sources. Base and heads do not change, and decoding stays lossless.

    Then trees of several sizes are built, measured on held-out texts, and timed on this machine. The file stores the
    tree with the most tokens per second, which `generate` and `validate` use without --tree. It is the root alone
    (plain decoding) where no tree is faster. With --dtype float32,bfloat16 steps are timed in both dtypes, and with
    --compile with compiled forwards as well.

    To build other trees, run `treeopt calibrate --drafter FILE` on other prompts. Finished batches are stored in
    OUTPUT.partial, for --resume.

    Takes about 3 minutes for the built-in model and its prompts on two CPU cores.
    """
    drafter = drafters.chosen_drafter(options, HEADS_NGRAM)
    if drafter not in drafters.LEARNED:
        raise click.BadParameter(f"{drafter!r} is not {' or '.join(drafters.LEARNED)}", param_hint="--drafter")
    shared.check_outputs(options, options["output"], suffixes=(".safetensors",))
    check_inputs()
    _, *further = shared.dtypes_of(options)
    if further and options["device_map"] is not None:
        raise click.UsageError("--device-map takes one --dtype: the model is copied for each further one")
    name, batches, work = shared.chosen_prompts(options), batch_settings(console, options), open_work(options)
    from treeopt.evaluate.learn_drafter import divided_learn
    from treeopt.verify.probe import check_trees

    prompts = treeopt.load_prompts(name, skip=options["skip"], limit=options["limit"])
    batches |= {name: options[name] for name in ("max_new_tokens", "chat_template")}
    with_compiled = options.pop("compile")  # the model itself answers and traces as it is
    base, loaded = shared.load_models(console, options, with_heads=drafter == HEADS_NGRAM)
    draft = drafters.load_draft_model(console, options, base)
    shared.say_prompts(console, prompts)
    check_trees(base)
    fields = {name: options[name] for name in ("temperature", "seed", "levels")}
    learning = treeopt.Learning(drafters.sampled_tokens(options), ngram=drafter in drafters.WITH_TABLE, **fields)
    console.note(learning.announcement(prompts, options["max_new_tokens"]))
    with ending_work(console, work):
        with console.progress("learn") as progress:
            batches |= {"draft": draft, "work": work, "dtypes": further, "compile": with_compiled}
            found = divided_learn(base, loaded, prompts, learning, options["nodes"] or LEARN_SIZES, progress, batches)
        if found is None:
            return
        made = with_configuration(found.drafter, console.configuration)
        treeopt.save_drafter(made, options["output"], overwrite=options["force"])
        work.remove()
    _report(console, found, options["output"], base, loaded)


def _report(
    console: Console, found: treeopt.LearnedDrafter, output: str, base: Base, loaded: LoadedHeads | None
) -> None:
    from treeopt.evaluate.learn_drafter import learned_parts, learned_warnings

    assert found.run.learned is not None
    console.warn(*learned_warnings(found))
    console.report(*learned_parts(found))
    where = f"--heads {loaded.name}" if loaded is not None else f"--model {base.name}"
    where += "" if base.adapter is None else f" --adapter {base.adapter.name}"
    console.note(f"wrote {output}   next: treeopt generate 'PROMPT' {where} --drafter {output}")
    console.result({**found.run.learned.as_dict(), "output": output})
