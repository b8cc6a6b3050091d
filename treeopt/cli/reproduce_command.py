"""`treeopt reproduce`: run the command that made a file again, and compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeopt.cli.console import Console, command
from treeopt.cli.early_checks import check_apart
from treeopt.cli.inputs import hashes_of
from treeopt.cli.options import force_option
from treeopt.cli.rerun import Remade, check_remade, line_of, rerun
from treeopt.errors import Code, TreeoptError, counted
from treeopt.files.configurations import DEFAULTS, INPUTS, MADE_BY, NO_COMMANDS, command_lines

if TYPE_CHECKING:
    from treeopt.evaluate.again import Comparison, Difference, Kind

_SHOWN = 10  # of the differences of one kind
_LONGEST = 100  # characters of a value that are printed
_MOST_THREADS = 1 << 16
_IDS = ("model_id", "heads_id", "draft_id")
_WORDS = {
    "identical": "identical: the same bytes",
    "equal": "equal",
    "within": "within the tolerance",
    "differs": "different",
}
_KINDS: dict[Kind, str] = {
    "result": "results",
    "seconds": "measured in seconds, or chosen by them",
    "environment": "environment",
    "name": "names of files and options",
}


@command("reproduce")
@click.argument("file")
@click.option("--map", "mapped", multiple=True, metavar="OLD=NEW", help="An input that is elsewhere now; repeatable.")
@click.option("--device", help="cpu, cuda, cuda:1, ...")
@click.option("--device-map", type=click.Choice(["auto"]), help="auto: divide the model among all GPUs.")
@force_option
@click.option("-o", "--output", help="Keep what is made again under this name [default: it is deleted].")
def run(console: Console, file: str, mapped: tuple[str, ...], output: str | None, **options: Any) -> None:
    """Run the command that made FILE again, from the inputs that it was made from, and compare.

    FILE is any file that `treeopt config` reads; it is never replaced. Names of inputs are relative to the folder in
    which the command was run, so run this there too. Inputs with another content, and models with other weights, are
    refused (E207).

    Exit status 0: the bytes are the same, or all that differs is measured in seconds, or is a name. Where versions,
    device, precision or threads differ from those of FILE, results may differ within a tolerance, which is printed with
    its figures. Exit status 6: the results differ.
    """
    from treeopt.evaluate.again import compare_files

    check_apart("device", "device_map")
    made = _remade(file, _mapping(mapped), options["device"] or options["device_map"])
    check_remade(made)
    _check_output(made, output, force=options["force"])
    line = line_of(made)
    console.say(f"command   {line}")
    _use_threads(made)
    with rerun(console, made, output=output, **options) as again:
        found = compare_files(made.file, again, made.command)
    _report(console, made, found)
    if output is not None:
        console.note(f"wrote {output}")
    result = {"file": file, "command": line, "verdict": found.verdict, "tolerance": found.rule, "output": output}
    checks = [{**vars(one), "holds": one.holds} for one in found.checks]
    differences = [{**vars(one), "old": _plain(one.old), "new": _plain(one.new, one.old)} for one in found.differences]
    console.result({**result, "checks": checks, "differences": differences})
    if found.verdict == "differs":
        raise _different(made, found)


command = run


def _mapping(mapped: Iterable[str]) -> dict[str, str]:
    """The present names of inputs by the old ones."""
    found = {}
    for text in mapped:
        old, equals, new = text.partition("=")
        if not (old and equals and new):
            raise click.BadParameter(f"{text!r} is not OLD=NEW", param_hint="--map")
        found[old] = new
    return found


def _remade(file: str, mapping: Mapping[str, str], device: str | None) -> Remade:
    """What is to be made again, after checking its inputs.

    Raises:
        TreeoptError: E201 where the file or an input is missing, E203 where it stores no configuration or no hashes,
            E207 where an input has changed.
    """
    from treeopt.files.configurations import stored_configuration
    from treeopt.files.parts import data_of, parts_of

    path, stored = Path(file), stored_configuration(file)
    names = [name for name in stored if name not in NO_COMMANDS]
    if len(names) != 1:
        raise TreeoptError(Code.FILE_INVALID, f"{file} stores {len(names)} commands, and one makes a file")
    if MADE_BY not in stored:
        lines = "; ".join(command_lines(stored))
        what = f"{file} stores no hashes of its inputs, so it cannot be known whether they are the same"
        raise TreeoptError(
            Code.FILE_INVALID, what, why="versions of treeopt before wrote it", fix=f"run again: {lines}"
        )
    _check_types(file, stored)
    _check_mapping(stored, names[0], mapping)
    _check_inputs(file, stored.get(INPUTS, {}), mapping)
    configuration = {
        name: {key: _mapped(value, mapping) for key, value in options.items()}
        for name, options in stored.items()
        if name in (names[0], DEFAULTS)
    }
    parts, result = parts_of(path), data_of(path)
    if names[0] == "generate" and result is not None:  # the prompt may have come from standard input
        configuration[names[0]].setdefault("prompt", result.get("prompt"))
    ids = {
        kind: tuple(dict.fromkeys(str(part) for place, part in parts.items() if place[-1] == kind and part))
        for kind in _IDS
    }
    if path.is_dir():
        ids["model_id"] = _base_ids(parts)
    if device is not None and configuration.get(DEFAULTS, {}).get("dtype") == "auto":  # each device has its own
        precisions = {part for place, part in parts.items() if place[-1] == "dtype" and place[0] != "configuration"}
        configuration[DEFAULTS] |= {"dtype": precisions.pop()} if len(precisions) == 1 else {}
    header = {str(place[0]): part for place, part in parts.items() if len(place) == 1}
    header["provenance"] = {str(place[1]): part for place, part in parts.items() if place[0] == "provenance"}
    known = {kind: found for kind, found in ids.items() if found}
    inputs = tuple(str(_mapped(name, mapping)) for name in stored.get(INPUTS, {}))
    return Remade(path, names[0], configuration, result, header, known, inputs)


def _base_ids(parts: Mapping[tuple[str | int, ...], Any]) -> tuple[str, ...]:
    """The fingerprints of the base in a folder of heads, of an adapter or of a merged model; the last two by precision.

    The note of a merged model has the name of its base where that of an adapter has the fingerprints.
    """
    ours = ("config.json", "treeopt", "base"), ("treeopt.json", "base"), ("treeopt.json", "base_ids")
    name = ours[1]
    return tuple(str(part) for place, part in parts.items() if place != name and {place[:2], place[:3]} & {*ours})


def _mapped(value: Any, mapping: Mapping[str, str]) -> Any:
    """The value of an option with the present names of inputs, or of the folders that they are in."""
    if isinstance(value, list):
        return [_mapped(one, mapping) for one in value]
    for old, new in mapping.items():
        if value == old:
            return new
        if isinstance(value, str) and value.startswith(old.rstrip("/") + "/"):
            return new.rstrip("/") + value[len(old.rstrip("/")) :]
    return value


def _check_types(file: str, stored: Mapping[str, Mapping[Any, Any]]) -> None:
    """Raise E203 where the hashes of inputs are no texts, or the number of threads cannot be."""
    what, threads = "", stored[MADE_BY].get("threads", 1)
    if not all(isinstance(one, str) for pair in stored.get(INPUTS, {}).items() for one in pair):
        what = f"{INPUTS} of {file} are not names with their SHA-256"
    elif type(threads) is not str and not (type(threads) is int and 1 <= threads <= _MOST_THREADS):
        what = f"{MADE_BY} of {file} has {threads!r} threads, and 1 to {_MOST_THREADS} are possible"
    if what:
        raise TreeoptError(Code.FILE_INVALID, what, why="it was edited", fix="restore it")


def _check_mapping(stored: Mapping[str, Mapping[str, Any]], name: str, mapping: Mapping[str, str]) -> None:
    """Raise a usage error for a name that the command did not have."""
    values = [one for value in stored[name].values() for one in (value if isinstance(value, list) else [value])]
    values += [*stored.get(DEFAULTS, {}).values(), *stored.get(INPUTS, {})]
    for old in mapping:
        if all(_mapped(value, {old: ""}) == value for value in values):
            raise click.BadParameter(f"no input of the command was named {old!r}", param_hint="--map")


def _check_inputs(file: str, hashes: Mapping[str, str], mapping: Mapping[str, str]) -> None:
    """Raise E201 for a missing input, E207 for one with another content."""
    names = {name: str(_mapped(name, mapping)) for name in hashes}
    found = hashes_of(names.values())
    missing = [now for now in names.values() if now not in found]
    if missing:
        what = f"missing of {file}: {counted(len(missing), 'input')}"
        fix = "run this in the folder in which the command was run, or give --map OLD=NEW"
        raise TreeoptError(Code.FILE_MISSING, what, at="\n".join(missing[:_SHOWN]), fix=fix)
    changed = [name for name, now in names.items() if found[now] != hashes[name]]
    if changed:
        lines = [f"{names[name]}: sha256 {found[names[name]][:12]}, was {hashes[name][:12]}" for name in changed]
        what = f"changed since {file} was made: {counted(len(changed), 'input')}"
        raise TreeoptError(Code.INPUT_CHANGED, what, at="\n".join(lines[:_SHOWN]), fix="restore them, or give --map")


def _check_output(made: Remade, output: str | None, *, force: bool) -> None:
    """Check -o: the file itself and its inputs are never replaced."""
    from treeopt.files.outputs import check_no_input, check_output

    if output is None:
        return
    if made.file.is_dir():
        check_no_input(output, made.file, *made.inputs)
    else:
        check_output(output, force=force, inputs=[made.file, *made.inputs])


def _use_threads(made: Remade) -> None:
    """Set torch's threads to those of the file, since sums depend on them."""
    from treeopt.files.configurations import stored_configuration

    threads = stored_configuration(made.file)[MADE_BY].get("threads")
    if isinstance(threads, int):
        import torch

        torch.set_num_threads(threads)


def _report(console: Console, made: Remade, found: Comparison) -> None:
    """Print the verdict and what differs."""
    but = [title for kind, title in _KINDS.items() if kind != "result" and found.of(kind)]
    verdict = _WORDS[found.verdict]
    if found.verdict == "equal":
        verdict += f" but for what is {' and '.join(but)}" if but else ": the same values, written in other bytes"
    console.say(f"result    {made.file} is {verdict}")
    if found.rule:
        console.say(f"tolerance {found.rule}")
    for one in found.checks:
        console.say(
            f"  {one.name}: {one.old:.4f} -> {one.new:.4f}, limit {one.limit:.4f}{'' if one.holds else '  OUTSIDE'}"
        )
    for kind, title in _KINDS.items():
        some = found.of(kind)
        if some:
            console.say(f"differing: {counted(len(some), 'part')}: {title}")
            for each in some[:_SHOWN]:
                console.say(f"  {_line(each)}")
            if len(some) > _SHOWN:
                console.say(f"  and {len(some) - _SHOWN} more")


def _different(made: Remade, found: Comparison) -> TreeoptError:
    """E506, with the first results that differ."""
    results = found.of("result")
    what = f"{made.file} is not what its command makes now: {counted(len(results), 'difference')}"
    why = "results are outside the tolerance" if found.rule else ""
    fix = "treeopt reproduce FILE -o AGAIN keeps what was made"
    if made.configuration[made.command].get("refine"):
        fix = "leave out --refine: how far it gets depends on the speed of the machine"
    return TreeoptError(Code.NOT_REPRODUCED, what, at="\n".join(map(_line, results[:_SHOWN])), why=why, fix=fix)


def _line(one: Difference) -> str:
    return f"{one.place}: {_shown(one.old)} -> {_shown(one.new, one.old)}"


def _shown(value: Any, other: Any = None) -> str:
    """A value in words of bounded length; `--json` has the whole value."""
    text = str(_plain(value, other))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}… ({len(text):,} characters)"


def _plain(value: Any, other: Any = None) -> Any:
    """A value in types of JSON; of an array its form, and how many values differ."""
    import numpy as np

    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if not isinstance(value, np.ndarray):
        return value
    form = f"{value.dtype} {list(value.shape)}"
    if not isinstance(other, np.ndarray) or other.shape != value.shape:
        return form
    return f"{form}, {counted(int((value != other).sum()), 'different value')}"
