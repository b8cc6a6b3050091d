"""`treeopt render`: a tree as a picture, or one decoding step with its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.checks import check_belongs
from treeopt.cli.console import Console, command
from treeopt.cli.drafters import chosen_plan, draft_option, drafter_file_option, load_for_plan, named_models
from treeopt.cli.options import chat_template_option, check_outputs, force_option, model_options
from treeopt.defaults import LABELS, THEMES
from treeopt.errors import Code, TreeoptError

if TYPE_CHECKING:
    from treeopt.cli.drafters import ChosenPlan
    from treeopt.drafted_step import DraftedStep

_OF_EXAMPLE = (
    *("step", "drafter", "heads", "model", "adapter", "draft"),
    *("device", "device_map", "dtype", "chat_template"),
)
_MARKED = ("svg", "dot", "gv")  # only these hold the mark; files of other formats are replaced with --force alone
_OUTPUT = "an .svg or .dot file; .png, .pdf, ... need graphviz [default: TREE.svg]"
_LABEL = (
    "Label of nodes; probability: the values of the tree, with --example those of the base model "
    "[default: rank; with --example token]."
)


@command("render")
@click.argument("tree", required=False)
@click.option("-o", "--output", help=_OUTPUT)
@force_option
@click.option("--title", default="", show_default=False, help="Heading of the picture.")
@click.option("--label", type=click.Choice(LABELS), help=_LABEL)
@click.option("--theme", type=click.Choice(THEMES), default="auto", help="auto: that of the reader's system.")
@click.option("--example", metavar="PROMPT", help="Decode PROMPT and draw one step: its tokens, accepted ones in red.")
@click.option("--step", type=click.IntRange(min=1), default=1, help="Which step of --example.")
@drafter_file_option("Of --example: drafter file, without TREE with the tree it recommends [default: that of TREE].")
@draft_option()
@chat_template_option
@model_options(dtype="auto")
def run(console: Console, tree: str | None, **options: Any) -> None:
    """Draw TREE (a file, or a name from `treeopt list`): one column per level; width and color of a node show its
    value.

    --example PROMPT continues a prompt greedily and draws one step of it: the token of each node, and in red the
    accepted path and the token after it. TREE may then be a policy, whose tree of that step is drawn. Models and
    drafters, and the tree without TREE, are chosen as in `treeopt generate`.
    """
    from treeopt.files.outputs import PICTURE

    options, example = {**options, "tree": tree}, options["example"]
    name = options["drafter"] if tree is None else tree
    if tree is None and example is None:
        raise click.UsageError("Missing argument 'TREE'.")
    output = options["output"] or f"{'step' if name is None else Path(name).stem}.svg"
    file_format = Path(output).suffix.removeprefix(".").lower() or "svg"
    check_belongs(_OF_EXAMPLE, "--example", example is not None)
    check_belongs(("theme",), "an .svg file", file_format == "svg")
    # An invalid tree is the first error, before an output that may not be replaced.
    drawn = treeopt.load_tree(str(tree)) if example is None else chosen_plan(options)
    check_outputs(options, output, kind=PICTURE if file_format in _MARKED else None)
    options["output"] = output
    if isinstance(drawn, treeopt.Tree):
        _write(console, drawn, None, options, file_format)
        return
    if file_format not in _MARKED:
        from treeopt.view.graph import render

        render(treeopt.Tree(()), file_format)  # a format that cannot be written is refused before a model is loaded
    step = _step(console, options, drawn)
    _write(console, step.tree, step, options, file_format)


def _step(console: Console, options: Mapping[str, Any], chosen: ChosenPlan) -> DraftedStep:
    """The step of the example that the options choose."""
    from treeopt.decode.stream import draft_step
    from treeopt.texts.encode import encode
    from treeopt.texts.prompts import request

    text = options["example"]
    if not text:
        raise TreeoptError(Code.PROMPTS_EMPTY, "the prompt is empty", fix='--example "Once upon a time"')
    used = load_for_plan(console, {**options, **named_models(options, chosen)}, chosen)
    template = options["chat_template"]
    ids, _ = encode(request(text), used.base.tokenizer, chat_template=template, vocab=used.base.vocab_size)
    heads = None if used.heads is None else used.heads.heads
    plan: Any = {"tree": used.plan, "drafter": used.drafter, "draft": used.draft}
    try:
        return draft_step(used.base, heads, ids=ids, **plan, number=options["step"], prompt=text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--step") from error


def _write(
    console: Console, tree: treeopt.Tree, step: DraftedStep | None, options: Mapping[str, Any], file_format: str
) -> None:
    """Write the picture, and print the step and the name of the file."""
    from treeopt.files.atomic import write_bytes
    from treeopt.files.configurations import write_note
    from treeopt.files.outputs import PICTURE, write_marked
    from treeopt.view.graph import render
    from treeopt.view.scene import accepted_words, drawn_data

    label = options["label"] or ("rank" if step is None else "token")
    shown: dict[str, Any] = {"label": label, "step": step}
    picture = render(tree, file_format, title=options["title"], theme=options["theme"], **shown)
    if file_format in _MARKED:
        write_marked(options["output"], picture.decode(), PICTURE, console.configuration)
    else:
        write_bytes(options["output"], picture)
        write_note(options["output"], console.configuration)
    if step is not None:
        console.say(accepted_words(step))
    console.note(f"wrote {options['output']}")
    counts = {"nodes": tree.nodes, "depth": tree.depth, "leaves": len(tree.leaves), "output": options["output"]}
    more = drawn_data(tree, **shown) if console.for_programs else {}
    console.result({**counts, "label": label, **more})
