"""`treeopt generate`: continue a prompt with a tree, and stream the text."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

import treeopt
from treeopt.cli import options as shared
from treeopt.cli.checks import check_belongs, check_inputs, option_of, origin_of
from treeopt.cli.console import Console, command
from treeopt.cli.drafters import ChosenPlan, chosen_plan, load_draft_model, load_for_plan, named_models, plan_options
from treeopt.cli.terminal import colored, printable
from treeopt.defaults import MAX_DEPTH
from treeopt.errors import Code, TreeoptError
from treeopt.facts import picked
from treeopt.files.atomic import check_writable

if TYPE_CHECKING:
    from treeopt.decode.draft_metrics import Step
    from treeopt.decode.rules import Rule
    from treeopt.decode.stream import Piece

# Of alternating steps. Foreground and background are both set, so that they are readable on any terminal.
_SHADES = ("black on bright_cyan", "black on bright_yellow")
_STDIN = "-"
_RULES = (shared.GREEDY, shared.SAMPLE, shared.TYPICAL, shared.REJECTION)
_NODES = "For rejection: the root and the chain [default: 5]."


@command("generate")
@click.argument("prompt", required=False)
@shared.model_options(dtype="auto")
@shared.text_options()
@plan_options
@click.option("--memory", "memory_file", help="File of earlier texts; this one is added. A missing file is made.")
@shared.compile_option
@shared.acceptance_options(rules=_RULES, what="rejection: speculative sampling, of a chain that is drawn from --draft.")
@click.option("--nodes", type=click.IntRange(2, MAX_DEPTH + 1), help=_NODES)
def run(console: Console, prompt: str | None, **options: Any) -> None:
    """Continue PROMPT with a tree; `-`, or no PROMPT and a pipe, reads it from standard input.

    With --drafter alone, the tree is the one that the drafter recommends. Without --tree, --drafter and --heads, each
    step has a tree of 16 nodes drafted by --draft, or from the text so far.

    greedy, sample and rejection give the text, or the distribution of texts, of the base model alone. typical accepts
    every draft token that is likely enough, and is lossy. rejection needs --draft, and takes neither tree nor drafter.

    On a terminal the tokens of one step have the same color. In a pipe, standard output is the answer, byte for byte.
    With --compile the text is decoded twice, and only the second run is shown and timed.
    """
    text = _prompt(prompt)
    drawn = options["acceptance"] == shared.REJECTION
    _check_drawn(options, drawn)
    check_inputs()
    memory = _memory(console, options["memory_file"])
    chosen = None if drawn else chosen_plan(options)
    rule = shared.acceptance_rule(options, rules=_RULES)
    from treeopt.decode.stream import decoded_steps, stream_text, whole_text
    from treeopt.models.base import now
    from treeopt.texts.encode import encode
    from treeopt.texts.prompts import request

    decoder, origin = _decoder(console, options, rule, chosen, memory)
    base, limit = decoder.base, options["max_new_tokens"]
    ids, _ = encode(request(text), base.tokenizer, chat_template=options["chat_template"], vocab=base.vocab_size)
    assert base.tokenizer is not None
    if base.compile:
        console.note("compiling, which takes up to a minute for each size of the cache")
    decoder.generate(*(ids, limit) if base.compile else (ids[-1:], 2))  # untimed: it loads what a first step needs
    begin, decoding, ready = now(base), decoder.start(ids, limit), now(base)
    steps = [piece.tokens for piece in _streamed(stream_text(decoding, base.tokenizer), console) if piece.tokens]
    measured = _measured(console, decoder, steps, ready - begin, now(base) - ready)
    again = decoded_steps(decoder, ids, steps) if console.for_programs else []
    if memory is not None:
        memory.add([*ids, *measured["tokens"]])
        memory.save(options["memory_file"], overwrite=True)
    console.result(
        {
            "text": whole_text(measured["tokens"], base.tokenizer),
            "prompt": text,
            **measured,
            "steps": [vars(step) for step in again],
            "prompt_tokens": len(ids),
            "nodes": decoder.trees.nodes,
            "acceptance": options["acceptance"],
            "lossy": rule.lossy,
            "model": base.name,
            "made_by": {**base.versions(), "dtype": base.dtype_name},
            **origin,
        }
    )


def _check_drawn(options: Mapping[str, Any], drawn: bool) -> None:
    """Check the options that belong to drafts that are drawn, or do not."""
    check_belongs(("nodes",), f"--acceptance {shared.REJECTION}", drawn)
    if drawn and options["draft"] is None:
        raise click.UsageError(
            f"--acceptance {shared.REJECTION} needs --draft, a smaller model with the same tokenizer"
        )
    others = [option_of(name) for name in ("tree", "drafter", "heads", "memory_file") if options[name] is not None]
    if drawn and others:
        raise click.UsageError(f"--acceptance {shared.REJECTION} draws its drafts from --draft: leave out {others[0]}")


def _decoder(
    console: Console, options: Mapping[str, Any], rule: Rule, chosen: ChosenPlan | None, memory: treeopt.Memory | None
) -> tuple[treeopt.TreeDecoder, dict[str, Any]]:
    """The decoder of a tree or policy, or of drawn chains, and the result's origin."""
    if chosen is None:
        return _drawn_decoder(console, options, rule)

    used = load_for_plan(console, {**options, **named_models(options, chosen)}, chosen)
    heads = None if used.heads is None else used.heads.heads
    given: Any = {"drafter": used.drafter, "draft": used.draft, "acceptance": rule, "memory": memory}
    decoder = treeopt.TreeDecoder(used.base, heads, used.plan, **given)
    decoder.memory = None  # the text is added once, after its steps were decoded again for the result
    return decoder, origin_of(used.base, used.heads, used.draft, used.plan)


def _memory(console: Console, name: str | None) -> treeopt.Memory | None:
    """The memory of a file, or an empty one for a new file, which this process alone writes until it ends."""
    from treeopt.runs.lock import Lock

    if name is None:
        return None
    click.get_current_context().with_resource(Lock(check_writable(name, overwrite=True)))
    memory = treeopt.load_memory(name) if os.path.exists(name) else treeopt.Memory()
    console.made_with["memory_id"] = memory.id
    return memory


def _drawn_decoder(
    console: Console, options: Mapping[str, Any], rule: Rule
) -> tuple[treeopt.TreeDecoder, dict[str, Any]]:
    """The decoder of chains that are drawn from the draft model, and the result's origin."""
    from treeopt.decode.rejection import NUM_DRAFTS

    assert isinstance(rule, treeopt.Rejection)
    base, _ = shared.load_models(console, options, with_heads=False)
    draft = load_draft_model(console, options, base)
    assert draft is not None
    try:
        chain = treeopt.DrawnChain(base, draft, rule, NUM_DRAFTS if options["nodes"] is None else options["nodes"] - 1)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return treeopt.TreeDecoder(base, None, chain, acceptance=rule), origin_of(base, None, draft)


def _measured(
    console: Console, decoder: treeopt.TreeDecoder, steps: list[Step], prefill: float, seconds: float
) -> dict[str, Any]:
    """The figures of the text, printed to standard error; the first token is known after the prefill."""
    from treeopt.decode.draft_metrics import Decoded

    text = Decoded(steps, decoder.trees.depth)
    tokens = len(text.tokens)
    speed = (tokens - 1) / seconds if tokens > 1 else None
    rate = "" if speed is None else f"  {speed:.0f} tokens/s"
    console.note(  # the text need not end its line
        f"\n{text.tokens_per_step:.2f} tokens per step  {tokens} tokens in {len(steps)} steps{rate}  "
        f"(first token after {prefill * 1e3:.0f} ms, not included)"
        + ("  LOSSY: typical acceptance" if decoder.acceptance.lossy else "")
    )
    figures = picked(text, "tokens", "step_lengths", "tokens_per_step")
    return {**figures, "tokens_per_second": speed, "prefill_seconds": prefill, **text.draft_metrics.as_dict()}


def _prompt(given: str | None) -> str:
    """The prompt argument, or standard input without its final newline."""
    text = given
    if given is None or given == _STDIN:
        if sys.stdin is None or (given is None and sys.stdin.isatty()):
            what = "Missing argument 'PROMPT': give a text, or pipe one in; standard input is closed or a terminal."
            raise click.UsageError(what)
        text = sys.stdin.buffer.read().decode(errors="surrogateescape").removesuffix("\n")
    if not text:
        raise TreeoptError(Code.PROMPTS_EMPTY, "the prompt is empty", fix='treeopt generate "Once upon a time" ...')
    if any("\ud800" <= one <= "\udfff" for one in text):
        raise TreeoptError(Code.PROMPTS_INVALID, "the prompt is not text in UTF-8", fix="give it in UTF-8")
    return text


def _streamed(pieces: Iterator[Piece], console: Console) -> Iterator[Piece]:
    """The pieces, each written to standard output at once; with --json they are not written."""
    if not console.for_people:
        yield from pieces
    elif colored():
        yield from _shaded(pieces)
    else:
        for piece in pieces:
            click.echo(piece.text, nl=False)  # flushes
            yield piece


def _shaded(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The pieces in alternating colors; without colors by NO_COLOR, or where the terminal has none."""
    from rich.console import Console as RichConsole
    from rich.text import Text

    terminal = RichConsole(highlight=False, soft_wrap=True)
    try:
        for i, piece in enumerate(pieces):
            for part in re.split(r"([\n\t])", printable(piece.text)):
                if part in ("\n", "\t"):  # a colored one would fill the rest of the line
                    click.echo(part, nl=False)
                else:
                    terminal.print(Text(part, _SHADES[i % 2]), end="")
            sys.stdout.flush()
            yield piece
    finally:
        click.echo()
