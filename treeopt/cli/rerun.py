"""Runs the command of a stored configuration again, into a new file, for `treeopt reproduce`."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from treeopt.cli.configuration import option_name
from treeopt.cli.console import RAISING, Console
from treeopt.cli.options import EXPECTED_IDS
from treeopt.errors import EXIT_BELOW, EXIT_NOT_LOSSLESS, Code, TreeoptError
from treeopt.files.atomic import unwritable, write_text
from treeopt.files.configurations import command_lines
from treeopt.files.read import read_head

_OUTPUTS = {("compare", ".svg"): "svg", ("compare", ".csv"): "csv"}  # else `output`
_MEASURED = {"compare": (".svg",)}  # pictures of seconds
_DRAFTER = "treeopt.drafter/1"
_SHARDS = ("treeopt.shard/1", "treeopt.answers/1")


@dataclass(frozen=True)
class Remade:
    """What is run again.

    Args:
        file: the file that is made again.
        command: its command, without the name of the program.
        configuration: the stored one, with the present names of inputs.
        result: the JSON object of a result of --json; None for an output.
        header: the header of a safetensors file of treeopt, else empty.
        ids: the fingerprints that models must have, by kind.
        inputs: the present names of the inputs.
    """

    file: Path
    command: str
    configuration: Mapping[str, Mapping[str, Any]]
    result: Mapping[str, Any] | None
    header: Mapping[str, Any]
    ids: Mapping[str, tuple[str, ...]]
    inputs: tuple[str, ...]


@contextlib.contextmanager
def rerun(
    console: Console, made: Remade, *, output: str | None, device: str | None, device_map: str | None, force: bool
) -> Iterator[Path]:
    """Run the command again; yields the new file, which is deleted at the end unless `output` names it.

    Without `output` the new file lies beside the old one, or in a folder beside it, under another name.

    Raises:
        TreeoptError: as the command; E203 where its options are not those of this version.
    """
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="treeopt-")))
        options = scratch / "options.yaml"
        options.write_text(json.dumps(made.configuration))
        words = ["--config", str(options)]
        names = {one.name for one in _command(made.command).params}
        words += ["--device", device] if device is not None and "device" in names else []
        words += ["--device-map", device_map] if device_map is not None and "device_map" in names else []
        words += ["--force"] if force and "force" in names else []
        if made.header.get("schema") in _SHARDS:
            words += ["--shard", f"{made.header['shard']}/{made.header['shards']}"]
        if made.result is not None:
            target = Path(output or scratch / "result.json")
            printed = _run(console, made, [*words, *_output_words_of_result(made, scratch), "--json"])
            lines = read_head(made.file, 2) == b"{\n"  # as `treeopt demo` writes results; --json prints one line
            write_text(target, json.dumps(json.loads(printed), indent=1) + "\n" if lines else printed)
            yield target
            return
        if output is None:
            place = made.file.resolve().parent
            beside = stack.enter_context(_beside(place.parent if _is_adapter(made.file) else place))
        target = _target(made, beside) if output is None else Path(output)
        _run(console, made, [*words, *_output_words(made, target, scratch)])
        yield _again(made, target)


def check_remade(made: Remade) -> None:
    """Raise E203 for pictures that are drawn of measured seconds, and commands whose results are of the moment."""
    if made.file.suffix.lower() in _MEASURED.get(made.command, ()):
        what = f"{made.file} is a picture of measured seconds, which are never the same again"
        raise TreeoptError(Code.FILE_INVALID, what, fix="reproduce the .csv file, or the result of --json")
    if made.command in ("doctor", "reproduce"):
        what = f"{made.file} is what treeopt {made.command} found at one moment"
        raise TreeoptError(Code.FILE_INVALID, what, fix=f"treeopt {made.command}")
    _command(made.command)


def line_of(made: Remade) -> str:
    """The command as it can be typed again."""
    arguments = [option_name(one) for one in _command(made.command).params if isinstance(one, click.Argument)]
    [line] = command_lines({made.command: made.configuration[made.command]}, arguments=arguments)
    return line


def _command(name: str) -> click.Command:
    """The command of a name such as `heads convert`.

    Raises:
        TreeoptError: E203 where this version has no such command.
    """
    found: click.Command | None = click.get_current_context().find_root().command
    for part in name.split():
        found = found.get_command(click.Context(found), part) if isinstance(found, click.Group) else None
    if found is None:
        raise TreeoptError(Code.FILE_INVALID, f"this version of treeopt has no command {name!r}")
    return found


@contextlib.contextmanager
def _beside(place: Path) -> Iterator[Path]:
    """A new folder; at the end it and all files beside it whose names begin with its name are deleted."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=".treeopt-again-", dir=place))
    except OSError as error:
        raise unwritable(place, error) from error
    try:
        yield folder
    finally:
        for one in place.glob(f"{folder.name}*"):
            shutil.rmtree(one, ignore_errors=True) if one.is_dir() else one.unlink(missing_ok=True)


def _target(made: Remade, folder: Path) -> Path:
    """The output of the run.

    Files name their drafter relative to their folder, so that the new file must lie in the old one's, but for
    calibrations whose drafter is learned and written beside them, named after them.
    """
    name = made.file.name
    if _is_adapter(made.file):
        return folder / "heads"
    if made.command == "calibrate" and made.header.get("schema") == _DRAFTER:
        return folder / "calibration.safetensors"
    provenance = made.header.get("provenance")
    learned = isinstance(provenance, dict) and provenance.get("drafter") == f"{made.file.stem}.drafter.safetensors"
    return folder / name if learned else folder.with_name(f"{folder.name}.{name}")


def _again(made: Remade, target: Path) -> Path:
    """The part of the run's output that the file is."""
    if _is_adapter(made.file):
        return target / made.file.name
    if made.command == "heads convert" and made.file.is_file():
        return target / made.file.name
    if made.command == "calibrate" and made.header.get("schema") == _DRAFTER:
        return target.with_name(f"{target.stem}.drafter.safetensors")
    return target


def _output_words(made: Remade, target: Path, scratch: Path) -> list[str]:
    """The options of the output, as they are typed; the heads of a merged model are written to `scratch`."""
    if _is_merged(made.file):
        return ["--output", str(scratch / "heads"), "--merge", str(target)]
    options = {str(one.name): one for one in _command(made.command).params if isinstance(one, click.Option)}
    name = _OUTPUTS.get((made.command, made.file.suffix.lower()), "output")
    return [f"--{option_name(options[name])}", str(target)]


def _output_words_of_result(made: Remade, folder: Path) -> list[str]:
    """The same for a result of --json, whose command may also have written a file."""
    assert made.result is not None
    option = next((one for one in _command(made.command).params if one.name == "output"), None)
    name = made.result.get("output") or (option.default if option is not None else None)
    given = option is not None and isinstance(name, str) and name  # click has a mark for no default, which is no text
    return ["--output", str(folder / Path(str(name)).name)] if given else []


def _run(console: Console, made: Remade, words: list[str]) -> str:
    """Run the command in this process; returns its standard output."""
    words = [*words, *(["--quiet"] if console.quiet else []), *(["--no-progress"] if console.shown.no_progress else [])]
    root = click.get_current_context().find_root().command
    context = click.Context(root, info_name="treeopt")  # without the prefix of variables: they would come first
    context.meta.update({RAISING: True, EXPECTED_IDS: made.ids})
    *groups, name = made.command.split()
    for group in groups:
        assert isinstance(context.command, click.Group)
        inner = context.command.get_command(context, group)
        assert inner is not None
        context = click.Context(inner, info_name=group, parent=context)
    command = _command(made.command)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            with command.make_context(name, words, parent=context) as running:
                command.invoke(running)
        except click.exceptions.Exit:  # of lint, after its result
            if made.result is None or not printed.getvalue():
                raise
        except click.ClickException as error:
            what = f"treeopt {made.command} does not take the options of {made.file}: {error.format_message()}"
            raise TreeoptError(Code.FILE_INVALID, what, why="another version of treeopt wrote it") from error
        except TreeoptError as error:
            kept = made.result is not None and printed.getvalue()
            if not (kept and error.exit_status in (EXIT_NOT_LOSSLESS, EXIT_BELOW)):
                raise
    return printed.getvalue()


def _is_adapter(path: Path) -> bool:
    return path.is_dir() and (path / "adapter_config.json").is_file()


def _is_merged(path: Path) -> bool:
    """Whether a folder has a merged model: weights, and the note of them."""
    return (path / "treeopt.json").is_file() and (path / "config.json").is_file()
