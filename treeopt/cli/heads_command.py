"""`treeopt heads`: a checkpoint of Medusa heads, described or written for an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli.console import Console, command
from treeopt.cli.options import force_option
from treeopt.engines import HEAD_READERS
from treeopt.errors import Code, TreeoptError
from treeopt.files.configurations import storing, write_note

if TYPE_CHECKING:
    from treeopt.models.head_files import LoadedHeads


@click.group("heads")
def run() -> None:
    """Describe Medusa heads, or convert them for an engine.

    HEADS is a folder, a weights file, an index of shards or a hub name. The layout is recognised by the names of the
    tensors: Medusa (v1, v2, v1.0 with its base model), TGI, vLLM, ModelOpt and AWS NxD Inference.
    """


@command("show")
@click.argument("heads")
def show(console: Console, heads: str) -> None:
    """Print the layout, sizes and base model of HEADS, and the layouts that can hold them."""
    loaded = treeopt.load_heads(heads)
    described = _described(loaded)
    for note in loaded.notes:
        console.warn(f"warning: {note}")
    for name, value in described.items():
        if name != "converts":
            console.say(f"{name:14} {'not known' if value is None else value}")
    for name, why in described["converts"].items():
        console.say(f"--for {name:9} {'no: ' + why if why else 'yes'}")
    console.result(described)


_TO = "The layout; docs/develop/formats.md lists its readers."


@command("convert")
@click.argument("heads")
@click.option("--for", "to", type=click.Choice(list(HEAD_READERS)), required=True, help=_TO)
@click.option("--model", help="Base model: folder or hub name [default: the one in the heads' config].")
@click.option("--with-lm-heads", is_flag=True, help="Write the base's LM head for each head, where they share it.")
@force_option
@click.option("-o", "--output", required=True, help="Folder.")
def convert(console: Console, heads: str, output: str, force: bool, **options: Any) -> None:
    """Write HEADS in the layout of an engine, with a config that it reads; no value is changed.

    vLLM and NxD Inference store an LM head. Heads that share that of their base model are written with it, so the base
    model is then loaded.
    """
    from treeopt.files.outputs import check_no_input

    loaded, to = treeopt.load_heads(heads), options["to"]
    check_no_input(output, loaded.file.parent)
    if loaded.joint_base and options["model"] is None:
        what, why = f"{heads} were trained with an adapter of {loaded.base}", "engines need a base with it merged"
        fix = "--model FOLDER of the merged checkpoint, which docs/training.md makes"
        raise TreeoptError(Code.HEADS_NOT_EXPORTABLE, what, why=why, fix=fix)
    for note in loaded.notes:
        console.warn(f"warning: {note}")
    with storing(console.configuration):
        base, more = options["model"] or loaded.base, {"with_lm_heads": options["with_lm_heads"], "overwrite": force}
        found = treeopt.convert_heads(loaded.heads, to, output, base=base, **more)
    if len(found.files) == 1:  # a layout without a config
        write_note(found.files[0], console.configuration)
    for file in found.files:
        console.say(f"wrote {file}")
    v2 = to == "medusa" and loaded.heads.lm_head is None and not options["with_lm_heads"]
    of_v2 = ["without LM heads (Medusa v2): Spec-Bench and TensorRT-LLM need --with-lm-heads"] if v2 else []
    for note in (f"read by {HEAD_READERS[to]}", *of_v2, *found.notes):
        console.say(note)
    files = [str(file) for file in found.files]
    result = {"from": loaded.layout, "to": to, "output": output, "files": files}
    console.result({**result, "readers": HEAD_READERS[to], "notes": found.notes})


def _described(loaded: LoadedHeads) -> dict[str, Any]:
    """What is known of heads, by names for people and programs."""
    from treeopt.export.heads import refusal

    heads = loaded.heads
    return {
        "file": str(loaded.file),
        "layout": loaded.layout,
        "heads": heads.num_heads,
        "blocks": heads.bias.shape[0],
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "lm_heads": "none: that of the base model" if heads.lm_head is None else "one for each head",
        "drafted_tokens": heads.vocab_size if heads.token_map is None else len(heads.token_map),
        "dtype": str(heads.bias.dtype).removeprefix("torch."),
        "base": loaded.base,
        "fingerprint": loaded.fingerprint,
        "converts": {name: refusal(heads, name) for name in HEAD_READERS},
    }


run.add_command(show)
run.add_command(convert)
